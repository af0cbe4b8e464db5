"""`Principals`: determines who sent a request, and how a principal's threads are named in a journal."""

from __future__ import annotations

import base64
import hashlib
import hmac
import inspect
import ipaddress
import logging
import re
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.requests import Request

from handrail.clock import SYSTEM_CLOCK, Clock
from handrail.errors import DefinitionError
from handrail.ids import NewId, random_id
from handrail.serve.limits import Limits, Rate
from handrail.serve.refusals import RequestRefused, ThreadNameRefused

Authenticate = Callable[[Request], "str | Awaitable[str | None] | None"]
"""An app's own hook. Returns the principal that sent a request, or None to refuse it."""

log = logging.getLogger("handrail.serve")

LOCAL = "local"
"""The only principal of a server that has one token or no authentication."""
ID = re.compile(r"[A-Za-z0-9._:~-]{1,128}")
"""Valid ids of threads, and of the runs of AG-UI clients."""
ID_RULE = "1 to 128 letters, digits and . _ : ~ -"
MIN_TOKEN = 16
MAX_PRINCIPAL = 256
_COOKIE_SECONDS = 7 * 24 * 3600
_TOKEN = re.compile(r"[\x21-\x7e]+")
_HINT = "Send it as `Authorization: Bearer TOKEN`, or sign in on the page."


class Principals:
    """Authenticates requests by a token or by an app's own hook.

    With neither, only requests from this machine pass. Tokens are compared in constant time, and addresses
    that send wrong ones are slowed down. The cookie that replaces the token holds an expiry time, signed with
    the journal's key and the token: it survives a restart, but not a change of the token.
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
            raise DefinitionError("the app has its own `authenticate`. Leave the token out.")
        if token is not None and (len(token) < MIN_TOKEN or not _TOKEN.fullmatch(token)):
            raise DefinitionError(
                f"the token is too easy to guess, or can't be sent in a header. Use at least {MIN_TOKEN} letters "
                'and digits, such as `python -c "import secrets; print(secrets.token_urlsafe(32))"` prints.'
            )
        self._token = None if token is None else token.encode()
        self._authenticate = authenticate
        self._key = hmac.digest(key, b"handrail serve cookie\0" + (self._token or b""), "sha256")
        self._clock = clock
        self._new_id = new_id
        self._wrong = Rate(1 / 6, limits.wrong_tokens, clock=clock)

    @property
    def is_open(self) -> bool:
        """Whether the server has no authentication."""
        return self._token is None and self._authenticate is None

    async def of(self, request: Request) -> str:
        """Return the principal that sent a request.

        Raises `RequestRefused`: 401, or 429 after many wrong tokens. Without authentication, requests from
        other machines are refused with 403.
        """
        if self._authenticate is not None:
            return await self._call_hook(self._authenticate, request)
        if self._token is None:
            _check_local(request)
            return LOCAL
        if self._has_cookie(request):
            return LOCAL
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer":
            raise RequestRefused(401, "TokenMissing", f"this server needs a token. {_HINT}")
        self.check_token(request, token.strip())
        return LOCAL

    def check_token(self, request: Request, token: str) -> None:
        """Refuse a wrong token, and any token from an address that has sent too many wrong ones."""
        if self._token is None:
            raise RequestRefused(404, "NotFound", "this server has no token to sign in with")
        address = request.client.host if request.client is not None else ""
        wait = self._wrong.wait(address)
        if wait:
            raise RequestRefused(
                429,
                "TooManyWrongTokens",
                "too many wrong tokens from this address. Wait as long as `Retry-After` says.",
                retry_after=wait,
            )
        if not hmac.compare_digest(_digest(token), _digest(self._token)):
            self._wrong.take(address)
            raise RequestRefused(401, "TokenWrong", f"this is not the server's token. {_HINT}")

    # The cookie.

    def new_cookie(self, request: Request) -> tuple[str, str, int]:
        """Return the name, the value and the lifetime in seconds of a cookie that replaces the token."""
        until = int(self._clock.now().timestamp()) + _COOKIE_SECONDS
        content = f"1.{until}.{self._new_id()[:16]}"
        return cookie_name(request), f"{content}.{self._sign(content)}", _COOKIE_SECONDS

    def _has_cookie(self, request: Request) -> bool:
        value = request.cookies.get(cookie_name(request), "")
        content, _, signature = value.rpartition(".")
        if not hmac.compare_digest(_digest(signature), _digest(self._sign(content))):
            return False
        _, until, _ = content.split(".")
        return self._clock.now().timestamp() < int(until)

    def _sign(self, content: str) -> str:
        signature = hmac.digest(self._key, content.encode("utf-8", "surrogatepass"), "sha256")
        return base64.urlsafe_b64encode(signature).decode().rstrip("=")

    # The app's own hook.

    async def _call_hook(self, authenticate: Authenticate, request: Request) -> str:
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
        if not isinstance(found, str) or not _is_principal(found):  # pyright: ignore[reportUnnecessaryIsInstance]  # an app's own
            log.error(
                "the app's authenticate returned %.80r, which is not 1 to %d printable characters",
                found,
                MAX_PRINCIPAL,
            )
            raise RequestRefused(
                500, "ServerError", "the server could not tell who you are. Its log has the details."
            )
        return found


def cookie_name(request: Request) -> str:
    """Return the cookie's name.

    It contains the port: a browser shares cookies between all servers on a host.
    """
    return f"handrail-{request.url.port or (443 if request.url.scheme == 'https' else 80)}"


def _check_local(request: Request) -> None:
    """Refuse a request unless both ends of its connection are known to be loopback addresses."""
    server: Any = request.scope.get("server")
    client = None if request.client is None else request.client.host
    if _is_loopback(client) and (server is None or _is_loopback(server[0])):
        return
    raise RequestRefused(
        403,
        "TokenNeeded",
        "this server has no token, so it serves its own machine only. Give it one with "
        "`asgi(..., token=...)`, or authenticate requests with `authenticate=...`.",
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
    """Return a digest of constant length, so that a comparison does not reveal the text's length."""
    return hashlib.sha256(text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass")).digest()


# --- thread names --------------------------------------------------------------------------------------


def session_id_of(principal: str, thread_id: str) -> str:
    """Return the session id of a principal's thread. Raises `ThreadNameRefused` if either name is invalid.

    Thread ids contain no slash, so the last slash separates the thread id from the principal, whatever the
    principal contains: two different pairs never share a session.
    """
    if not ID.fullmatch(thread_id):
        raise ThreadNameRefused(thread_id[:256], "the id is invalid", f"Use {ID_RULE}")
    if not _is_principal(principal):
        raise ThreadNameRefused(
            thread_id,
            f"{principal[:MAX_PRINCIPAL]!r} is not a valid principal",
            f"`authenticate` must return 1 to {MAX_PRINCIPAL} printable characters.",
        )
    return f"{principal}/{thread_id}"


def parse_session_id(session_id: str) -> tuple[str, str] | None:
    """Return the principal and the thread id of a session, or None if the session is not a thread."""
    principal, _, thread_id = session_id.rpartition("/")
    try:
        return (principal, thread_id) if session_id_of(principal, thread_id) == session_id else None
    except ThreadNameRefused:
        return None


def _is_principal(text: str) -> bool:
    return 0 < len(text) <= MAX_PRINCIPAL and text.isprintable()
