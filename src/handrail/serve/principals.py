"""`Principals`: identifies who sent a request. `session_id_of` names a principal's threads in a journal."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import inspect
import logging
import math
import re
import secrets
from collections.abc import Awaitable, Callable, Mapping
from typing import NamedTuple
from urllib.parse import quote
from weakref import WeakValueDictionary

from starlette.requests import Request

from handrail.clock import SYSTEM_CLOCK, Clock
from handrail.errors import DefinitionError
from handrail.serve.limits import Limits, Rate, network_of
from handrail.serve.people import ROLES, SESSION_SECONDS, Action, People, Person, may
from handrail.serve.refusals import RequestRefused, ThreadNameRefused
from handrail.serve.requests import ID, ID_RULE, LoginBody, prefix_of, route_path

Authenticate = Callable[[Request], "str | Awaitable[str | None] | None"]
"""An app's own hook, sync or async. It returns the principal who sent a request, or None to refuse the request."""

log = logging.getLogger("handrail.serve")

LOCAL = "local"
"""The only principal of a server without users and without a hook."""
MIN_TOKEN = 16
MAX_PRINCIPAL = 256
KEY_HEADER = "handrail-key"
_NO_KEY = "/app/renderers.js"
"""The only path that a cookie opens without its key. The page imports it, and imports can't send headers."""
_HANDOVER_SECONDS = 60.0
_TOKEN = re.compile(r"[\x21-\x7e]+")
_HINT = "Send it as `Authorization: Bearer TOKEN`, or open the link that `handrail serve` printed."
_NAMED_HINT = "Send `Authorization: Bearer NAME:TOKEN`, or sign in on the page."


class _Link(NamedTuple):
    """A link that signs a person in once."""

    name: str
    until: float
    secret: bytes
    """A digest of the secret of the page that began the sign-in; b"" if the link works on any page."""


class Cookie(NamedTuple):
    """A new session's cookie, and the key that the page keeps and sends along with it."""

    name: str
    value: str
    seconds: int
    key: str
    person: str


class Principals:
    """Authenticates requests: by the app's own hook, by the server's users, or by its one token.

    Without any of these, the page is opened with a link that works once. A page that has signed in has a session: a
    cookie that scripts can't read, and a key that only pages of the same origin can read. Browsers send a cookie to
    every port of a host, so the cookie is not accepted without the key, except for the app's renderers. Secrets are
    compared in constant time. Wrong secrets are rate-limited, both by the address that sends them and by the user name
    that they are sent for. Raises `DefinitionError` if the token is too short, can't be sent in a header, or is given
    although the hook or the users authenticate requests.
    """

    def __init__(
        self,
        people: People,
        *,
        key: bytes = b"",
        token: str | None = None,
        authenticate: Authenticate | None = None,
        limits: Limits,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self.has_people = authenticate is None and people.has_users()
        if token is not None and (authenticate is not None or self.has_people):
            whose = "the app's own `authenticate`" if authenticate else "each user's own secret"
            raise DefinitionError(
                f"a token can't be used, because requests are authenticated by {whose}. Leave the token out."
            )
        if token is not None and (len(token) < MIN_TOKEN or not _TOKEN.fullmatch(token)):
            raise DefinitionError(
                f"the token is too easy to guess, or can't be sent in a header. Use at least {MIN_TOKEN} letters "
                'and digits, such as `python -c "import secrets; print(secrets.token_urlsafe(32))"` prints.'
            )
        self.people = people
        self._authenticate = authenticate
        self._has_token = token is not None
        self._token_digest = _digest(token or secrets.token_urlsafe(32))
        self._issuer = "people"
        # the issuer contains a digest of the token, so changing the token ends the sessions that were created with it
        if not self.has_people:
            mark = b"" if token is None else hmac.digest(key, b"handrail issuer" + token.encode(), "sha256")
            self._issuer = f"token {mark.hex()}" if mark else "link"
        self._links: dict[bytes, _Link] = {}
        """The unused links, by the digest of their code."""
        self._checks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        """A lock for each address from which, and each user name for which, a secret is being checked."""
        self._clock = clock
        self.link_used: Callable[[], None] = lambda: None
        """Called after a link has been used, so that the operator can be shown a new one."""
        self._wrong = Rate(1 / 6, limits.wrong_tokens, clock=clock)
        self._wrong_names = Rate(1 / 6, 10 * limits.wrong_tokens, clock=clock)

    @property
    def has_links(self) -> bool:
        """Whether the page can be opened with a link. It can if the app has no hook and the server has no users."""
        return self._authenticate is None and not self.has_people

    @property
    def secret(self) -> str | None:
        """What people sign in with on the page: `password`, `token` or `link`. None if the app signs them in itself."""
        if self._authenticate is not None:
            return None
        return "password" if self.has_people else "token" if self._has_token else "link"

    def new_link(self, name: str = LOCAL, seconds: float = math.inf, secret: str = "") -> str:
        """Return the code of a link that signs a person in.

        The link works once, for at most `seconds`, and only while this process runs. If `secret` is given, the link
        only works for a page that sends this secret with it.
        """
        code = secrets.token_urlsafe(32)
        bound = _digest(secret) if secret else b""
        self._links[_digest(code)] = _Link(name, self._clock.monotonic() + seconds, bound)
        return code

    def link_for(self, name: str, request: Request, secret: str) -> str:
        """Return the code of a link for a person whom an OpenID Connect provider has identified.

        The link only works for the page that began the sign-in, which has `secret`. Raises `RequestRefused` if the person is not one of the server's users.
        """
        if self.people.find(name) is None:
            log.warning("a sign-in from %s was refused (UserUnknown)", address_of(request))
            self.people.note("", "sign-in refused", address_of(request), kind="UserUnknown")
            raise RequestRefused(
                403,
                "UserUnknown",
                f"{name} is not a user of this server. Ask its operator to run `handrail users add {name}`.",
            )
        return self.new_link(name, _HANDOVER_SECONDS, secret)

    async def of(self, request: Request) -> Person:
        """Return the person who sent a request.

        Raises `RequestRefused`: 401 if the request is not authenticated, 429 after many wrong secrets, and 500 if the
        app's own hook returns an invalid name. The hook may also raise `RequestRefused` itself, with any status.
        """
        if self._authenticate is not None:
            return self.find(await self._call_hook(self._authenticate, request))
        found = self._by_cookie(request)
        if found is not None:
            return found
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer":
            hint = _NAMED_HINT if self.has_people else _HINT
            raise RequestRefused(401, "TokenMissing", f"this server needs a token. {hint}")
        if not self.has_people:
            self._check_token(request, given.strip())
            return self.find(LOCAL)
        name, _, secret = given.strip().partition(":")
        return await self._check_secret(request, name, secret)

    # Signing in and out.

    async def sign_in(self, request: Request, body: LoginBody) -> Cookie:
        """Exchange a link, a token, or a name and password for a session.

        Raises `RequestRefused` if they are wrong, after too many wrong ones, if the request is from another site's page,
        if the request's own session is somebody else's, or if the app authenticates requests itself.
        """
        if self._authenticate is not None:
            raise RequestRefused(
                404,
                "NotFound",
                "this server has no sign-in, because the app authenticates requests. Sign in to the app.",
            )
        self.check_own_page(request)
        if body.link:
            name = self._take_link(request, body.link, body.secret)
            if self.has_people and self.people.find(name) is None:
                raise self._wrong_secret(
                    request,
                    "SignInWrong",
                    "you are no longer a user of this server. Ask its operator to add you.",
                )
            person = self.find(name)
        elif self.has_people:
            secret = body.password or body.token
            person = await self._check_secret(
                request, body.name, secret, hint="Type them again, or ask the server's operator."
            )
        else:
            self._check_token(request, body.token)
            person = self.find(LOCAL)
        live = self._by_cookie(request)
        if live is not None and live.name != person.name:
            raise RequestRefused(
                409, "SignedIn", f"this browser is already signed in, as {live.name}. Sign out first."
            )
        made = await asyncio.to_thread(
            self.people.sign_in,
            person.name,
            host=_host(request),
            issuer=self._issuer,
            address=address_of(request),
        )
        self.people.note(person.name, "signed in", address_of(request), session=made.id)
        if body.link and self.has_links:
            self.link_used()
        return Cookie(cookie_name(request), made.secret, SESSION_SECONDS, made.key, person.name)

    def check_own_page(self, request: Request) -> None:
        """Raise `RequestRefused` if another site's page sent the request. Only the server's own page may sign people in."""
        if not self._is_own_origin(request):
            raise RequestRefused(
                403,
                "OriginRefused",
                "another site's page can't sign in here. Sign in on the server's own page.",
            )

    async def sign_out(self, request: Request, person: Person) -> None:
        """End the session that a request belongs to, if any."""
        if person.session:
            await asyncio.to_thread(self.people.revoke, id=person.session)
            self.people.note(person.name, "signed out", address_of(request), session=person.session)

    def watch(self, person: Person) -> Callable[[], bool]:
        """Return a function that returns whether a person may still do what they have begun, such as reading a stream.

        They may until their session ends, they are removed, or they lose one of the roles that they had then.
        Calling the function is cheap: users and sessions are read again only after a change.
        """
        people = self.people
        ends_at = people.ends_at(person.session) if person.session else math.inf
        checked = people.generation()
        # users or sessions may have changed since the request was authenticated
        current = self._is_current(person)

        def is_current() -> bool:
            nonlocal checked, current
            now = people.generation()
            if current and now != checked:
                checked, current = now, self._is_current(person)
            return current and people.now() < ends_at

        return is_current

    def _is_current(self, person: Person) -> bool:
        if person.session and self.people.now() >= self.people.ends_at(person.session):
            return False
        now = self.find(person.name)
        return now.since == person.since and person.roles <= now.roles

    def may_run(self, name: str) -> bool:
        """Return whether a principal's runs may go on: not those of a user who was removed or lost the role for it."""
        return name == LOCAL or self.find(name).may("run")

    def who_may_vote(self, role: str | None, principal: str) -> Mapping[str, float]:
        """Return the users who may vote on this principal's runs and have this role, as `People.who_may_vote` does."""
        voters = self.people.who_may_vote(role, principal)  # reads the users again, so it comes first
        return voters if self.may_run(principal) else {}

    def find(self, name: str, session: str = "") -> Person:
        """Return a principal with their current roles.

        On a server without users and without a hook, everyone has the role *admin*. A principal that only the hook knows
        has the role *user*. On a server with users, nobody else has a role.
        """
        if self.has_links:
            return Person(name, frozenset({"admin"}), session)
        found = self.people.find(name)
        if found is not None:
            return Person(name, found.roles, session, found.since)
        return Person(name, frozenset() if self.has_people else frozenset({"user"}), session)

    def _by_cookie(self, request: Request) -> Person | None:
        if "cookie" not in request.headers:
            return None
        value = request.cookies.get(cookie_name(request), "")
        if not value or not self._is_own_origin(request):
            return None
        key = request.headers.get(KEY_HEADER)
        if key is None and not (request.method == "GET" and route_path(request) == _NO_KEY):
            return None
        found = self.people.session_of(value, key, host=_host(request), issuer=self._issuer)
        if found is None or (self.has_people and self.people.find(found.name) is None):
            return None
        return self.find(found.name, found.id)

    def _is_own_origin(self, request: Request) -> bool:
        """Return whether a request's `Origin` header names this server, or is missing, as in a GET from its own page."""
        origin = request.headers.get("origin")
        return origin is None or origin.lower() == f"{request.url.scheme}://{_host(request)}"

    # Secrets.

    def _check_token(self, request: Request, token: str) -> None:
        self._check_patience(request)
        if not hmac.compare_digest(_digest(token), self._token_digest):
            raise self._wrong_secret(request, "TokenWrong", f"this is not the server's token. {_HINT}")

    def _take_link(self, request: Request, code: str, secret: str) -> str:
        """Return the name of the person whom a link signs in, and invalidate the link.

        Raises `RequestRefused` if the link is unknown, used, expired or bound to a different page, and after too many
        wrong secrets.
        """
        self._check_patience(request)
        link = self._links.pop(_digest(code), None)
        if (
            link is None
            or self._clock.monotonic() > link.until
            or (link.secret and not hmac.compare_digest(_digest(secret), link.secret))
        ):
            raise self._wrong_secret(
                request,
                "LinkUsed",
                "this link has already been used or has expired, or it belongs to another server or page. Open the newest "
                "link that the server printed, or sign in again.",
            )
        return link.name

    async def _check_secret(
        self, request: Request, name: str, secret: str, *, hint: str = _NAMED_HINT
    ) -> Person:
        """Return the user with this name and secret. Raises `RequestRefused` if one is wrong, or after too many wrong secrets.

        Secrets from one address, and secrets for one name, are checked one after the other, so that concurrent guesses
        are counted like any others.
        """
        async with self._alone(f"from {network_of(address_of(request))}"), self._alone(f"for {name}"):
            self._check_patience(request, name)
            found = await asyncio.to_thread(self.people.verify, name, secret)
            if found is None:
                raise self._wrong_secret(
                    request, "SignInWrong", f"the name or the password is wrong. {hint}", name
                )
            return found

    def _alone(self, key: str) -> asyncio.Lock:
        lock = self._checks.get(key)
        if lock is None:
            lock = self._checks[key] = asyncio.Lock()
        return lock

    def _check_patience(self, request: Request, name: str = "") -> None:
        """Raise `RequestRefused` after too many wrong secrets from this address, or for this user name."""
        wait = max(
            self._wrong.wait(network_of(address_of(request))), self._wrong_names.wait(name) if name else 0.0
        )
        if wait:
            raise RequestRefused(
                429,
                "TooManyWrongTokens",
                "too many wrong tokens, passwords or links. Try again after the time in the `Retry-After` header.",
                retry_after=wait,
            )

    def _wrong_secret(self, request: Request, kind: str, message: str, name: str = "") -> RequestRefused:
        """Count and log a failed sign-in, and return the refusal.

        The audit log gets the name only if a user has it, because other names may be passwords typed into the wrong field.
        """
        address = address_of(request)
        self._wrong.take(network_of(address))
        if name:
            self._wrong_names.take(name)
        who = name if name and self.people.find(name) is not None else ""
        log.warning("a sign-in from %s was refused (%s)", address, kind)
        self.people.note(who, "sign-in refused", address, kind=kind)
        return RequestRefused(401, kind, message)

    # The app's own hook.

    async def _call_hook(self, authenticate: Authenticate, request: Request) -> str:
        try:
            found = authenticate(request)
            if inspect.isawaitable(found):
                found = await found
        except RequestRefused:
            raise
        except Exception:
            log.exception("the app's `authenticate` raised an error, so the request is refused")
            raise RequestRefused(401, "NotSignedIn", "you are not signed in. Sign in first.") from None
        if found is None or found == "":
            raise RequestRefused(401, "NotSignedIn", "you are not signed in. Sign in first.")
        if not isinstance(found, str) or not is_principal(found) or found == LOCAL:  # pyright: ignore[reportUnnecessaryIsInstance]  # an app's own
            log.error(
                "the app's `authenticate` returned %.80r. It must return 1 to %d printable characters, not %r, or None",
                *(found, MAX_PRINCIPAL, LOCAL),
            )
            raise RequestRefused(
                500, "ServerError", "the server could not identify you. Its log has the details."
            )
        return found


def cookie_name(request: Request) -> str:
    """Return the name of the session cookie. It contains the port, because a browser shares cookies among all ports of a host.

    It also contains the app's prefix, because a host may have several apps. Over TLS, `__Host-` keeps other hosts of the same domain
    from setting the cookie.
    """
    secure = request.url.scheme == "https"
    start = "__Host-" if secure else ""
    place = quote(prefix_of(request), safe="%")
    return f"{start}handrail-{request.url.port or (443 if secure else 80)}{place}"


def cookie_path(request: Request) -> str:
    """Return the path of the session cookie: the app's prefix, or over TLS the whole host, as `__Host-` demands."""
    return "/" if request.url.scheme == "https" else f"{prefix_of(request)}/"


def address_of(request: Request) -> str:
    """Return the address that a request came from, or "" if it is unknown."""
    return request.client.host if request.client is not None else ""


def _host(request: Request) -> str:
    return request.headers.get("host", "").lower()


def _digest(text: str) -> bytes:
    """Return a digest of constant length, so that comparing digests does not reveal the length of the text."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()


# --- thread names --------------------------------------------------------------------------------------


def session_id_of(principal: str, thread_id: str) -> str:
    """Return the session id of a principal's thread. Raises `ThreadNameRefused` if either name is invalid.

    Thread ids contain no slash, so the last slash separates the principal from the thread id, even if the principal
    contains slashes. Two different pairs therefore never share a session.
    """
    if not ID.fullmatch(thread_id):
        raise ThreadNameRefused(thread_id[:256], "the id is invalid", f"Use {ID_RULE}")
    if not is_principal(principal):
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


def is_principal(text: str) -> bool:
    """Return whether a principal may have this name."""
    return 0 < len(text) <= MAX_PRINCIPAL and text.isprintable()


def check_role(person: Person, action: Action) -> None:
    """Raise `RequestRefused` if a person's roles do not allow an action."""
    if not person.may(action):
        roles = [role for role in ROLES if may([role], action)]
        raise RequestRefused(
            403,
            "RoleMissing",
            f"{person.name} may not do this: it needs the role {' or '.join(roles)}. Ask the server's operator for it.",
        )
