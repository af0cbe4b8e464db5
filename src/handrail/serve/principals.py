"""`Principals`: who a request is by. A token's one principal, or whoever an app's own hook says."""

from __future__ import annotations

import base64
import hashlib
import hmac
import inspect
import ipaddress
import logging
import re
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from handrail.clock import SYSTEM_CLOCK, Clock
from handrail.errors import DefinitionError, RequestRefused
from handrail.ids import NewId, random_id
from handrail.serve.limits import Limits, Rate
from handrail.serve.naming import LONGEST_PRINCIPAL

if TYPE_CHECKING:
    from starlette.requests import Request

Authenticate = Callable[["Request"], "str | Awaitable[str | None] | None"]
"""Who a request is by: a principal, or None where it may not come in."""

log = logging.getLogger("handrail.serve")

LOCAL = "local"
"""Who everybody is where there is one token, or none."""
SHORTEST_TOKEN = 16
_COOKIE_SECONDS = 7 * 24 * 3600
_TOKEN = re.compile(r"[\x21-\x7e]+")
_MEND = "Send it as `Authorization: Bearer TOKEN`, or sign in on the page."


class Principals:
    """Tells who a request is by, or refuses it.

    A token is compared in constant time, and whoever sends wrong ones is slowed down, by address. The
    cookie that stands for it holds a time and a signature under the journal's key and the token: it
    outlives a restart, and not a change of the token.
    """

    def __init__(
        self,
        key: bytes,
        *,
        token: str | None = None,
        authenticate: Authenticate | None = None,
        limits: Limits,
        clock: Clock = SYSTEM_CLOCK,
        new_id: NewId = random_id,
    ) -> None:
        if token is not None and authenticate is not None:
            raise DefinitionError("the app says who a request is by itself. Leave the token out.")
        if token is not None and (len(token) < SHORTEST_TOKEN or not _TOKEN.fullmatch(token)):
            raise DefinitionError(
                f"the token is too easy to guess, or can't be sent. Use {SHORTEST_TOKEN} or more letters and "
                'digits, such as `python -c "import secrets; print(secrets.token_urlsafe(32))"` prints.'
            )
        self._token = None if token is None else token.encode()
        self._authenticate = authenticate
        self._key = hmac.digest(key, b"handrail serve cookie\0" + (self._token or b""), "sha256")
        self._clock = clock
        self._new_id = new_id
        self._wrong = Rate(1 / 6, limits.wrong_tokens, clock=clock)

    @property
    def open(self) -> bool:
        """May everybody come in?"""
        return self._token is None and self._authenticate is None

    async def of(self, request: Request) -> str:
        """Who it is by, or `RequestRefused`: 401, or 429 after many wrong tokens.

        Where everybody may come in, that is everybody on this machine: 403 for who is not.
        """
        if self._authenticate is not None:
            return await self._asked(self._authenticate, request)
        if self._token is None:
            _check_near(request)
            return LOCAL
        if self._has_cookie(request):
            return LOCAL
        given = request.headers.get("authorization", "")
        scheme, _, token = given.partition(" ")
        if scheme.lower() != "bearer":
            raise RequestRefused(401, "TokenMissing", f"this server wants a token. {_MEND}")
        self.check(request, token.strip())
        return LOCAL

    def check(self, request: Request, token: str) -> None:
        """Refuse a wrong token, and everybody from an address that has sent too many."""
        if self._token is None:
            raise RequestRefused(404, "NotFound", "this server has no token to sign in with")
        address = request.client.host if request.client is not None else ""
        wait = self._wrong.wait(address)
        if wait:
            raise RequestRefused(
                429,
                "TooManyWrongTokens",
                "too many wrong tokens came from this address. Wait as long as `Retry-After` says.",
                retry_after=wait,
            )
        if not hmac.compare_digest(_digest(token), _digest(self._token)):
            self._wrong.take(address)
            raise RequestRefused(401, "TokenWrong", f"this is not the server's token. {_MEND}")

    # The cookie.

    def cookie(self, request: Request) -> tuple[str, str, int]:
        """The name, the value and the seconds of a cookie that stands for the token."""
        until = int(self._clock.now().timestamp()) + _COOKIE_SECONDS
        said = f"1.{until}.{self._new_id()[:16]}"
        return cookie_name(request), f"{said}.{self._signed(said)}", _COOKIE_SECONDS

    def _has_cookie(self, request: Request) -> bool:
        value = request.cookies.get(cookie_name(request), "")
        said, _, signature = value.rpartition(".")
        if not hmac.compare_digest(_digest(signature), _digest(self._signed(said))):
            return False
        _, until, _ = said.split(".")
        return self._clock.now().timestamp() < int(until)

    def _signed(self, said: str) -> str:
        signature = hmac.digest(self._key, said.encode("utf-8", "surrogatepass"), "sha256")
        return base64.urlsafe_b64encode(signature).decode().rstrip("=")

    # The app's own.

    async def _asked(self, authenticate: Authenticate, request: Request) -> str:
        try:
            found = authenticate(request)
            if inspect.isawaitable(found):
                found = await found
        except RequestRefused:
            raise
        except Exception:
            log.exception("the app's authenticate raised, so the request is refused")
            raise RequestRefused(401, "NotSignedIn", "sign in first") from None
        if found is None or found == "":
            raise RequestRefused(401, "NotSignedIn", "sign in first")
        if not isinstance(found, str) or len(found) > LONGEST_PRINCIPAL or not found.isprintable():  # pyright: ignore[reportUnnecessaryIsInstance]  # an app's own
            log.error(
                "the app's authenticate gave %.80r, which is no principal: 1 to %d printable characters",
                found,
                LONGEST_PRINCIPAL,
            )
            raise RequestRefused(
                500, "ServerError", "the server could not tell who you are; its log says why"
            )
        return found


def cookie_name(request: Request) -> str:
    """One a port: servers on one machine share a browser's cookies."""
    return f"handrail-{request.url.port or (443 if request.url.scheme == 'https' else 80)}"


def _check_near(request: Request) -> None:
    """Refuse whoever is not on this machine, or is not known to be: at both ends the connection must be loopback."""
    server: Any = request.scope.get("server")
    far_end = None if request.client is None else request.client.host
    if _is_loopback(far_end) and (server is None or _is_loopback(server[0])):
        return
    raise RequestRefused(
        403,
        "TokenNeeded",
        "this server has no token, so it serves its own machine only. Whoever runs it can give one to "
        "`asgi(..., token=...)`, or say who comes in with `authenticate=...`.",
    )


def _is_loopback(host: Any) -> bool:
    if host == "localhost":
        return True
    try:
        address = ipaddress.ip_address(str(host).partition("%")[0])
    except ValueError:
        return False
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback


def _digest(text: str | bytes) -> bytes:
    """Of one length whatever it is, so that a comparison tells nothing of the length."""
    return hashlib.sha256(text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass")).digest()
