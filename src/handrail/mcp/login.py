"""Login to an MCP server with OAuth, through the SDK.

The person is asked to open an address. The tokens are kept in a private file, which several processes may share. The SDK
stores neither when a token expires nor which server issued it, and reads stored tokens only once. Without `SharedLogin`, the
person would have to log in again when a stored token has expired, or when another process has refreshed it.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import fcntl
import hashlib
import hmac
import json
import os
import tempfile
from collections.abc import AsyncGenerator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, cast
from urllib.parse import parse_qs, urlsplit

import httpx2
from mcp.client.auth import OAuthClientProvider
from mcp.client.auth.utils import extract_resource_metadata_from_www_auth, issuers_match
from mcp.shared.auth import (
    AuthorizationCodeResult,
    OAuthClientInformationFull,
    OAuthClientMetadata,
    OAuthMetadata,
    OAuthToken,
    ProtectedResourceMetadata,
)
from pydantic import ValidationError

from handrail.clock import SYSTEM_CLOCK, Clock
from handrail.errors import DefinitionError, HandrailError
from handrail.journal.location import state_folder

_LOCK_SECONDS = 30.0
"""Maximum seconds to wait for another process that refreshes the tokens."""
_POLL = 0.05
_PORTS = {"http": 80, "https": 443}


class LoginNeeded(HandrailError, ConnectionError):
    """Raised if nobody logs in to a server, or if the login fails.

    Nobody can be asked, the person declines or does not answer, or the server names endpoints that are not the issuer's.
    """


class AskLogin(Protocol):
    """Asks a person to open an address.

    Returns the address at which the browser ended up, or "" if the redirect reached this program. If `endpoints` is given, nothing is opened:
    the person is asked whether a login may use these addresses, by name. Raises `LoginNeeded` if the person declines.
    """

    async def __call__(self, address: str, endpoints: Mapping[str, str] | None = None, /) -> str: ...


class Bounds(NamedTuple):
    """The authorization server that a login may use."""

    issuer: str = ""
    """Its address; "" if the MCP server may name it."""
    endpoints: Sequence[str] = ()
    """Origins, besides the issuer's, on which its endpoints may be."""


class Stored(NamedTuple):
    """The tokens in a file, with what is needed to refresh them."""

    tokens: OAuthToken
    expires_at: float | None
    """When the access token expires, in seconds since 1970; None if that is unknown."""
    server: OAuthMetadata | None
    """The metadata of the server that issued the tokens; None if it is unknown."""
    resource: ProtectedResourceMetadata | None


class TokenFile:
    """The tokens for one server, and the client's registration with it, in a file that only its owner can read."""

    def __init__(
        self, path: Path, known: OAuthClientInformationFull | None = None, clock: Clock = SYSTEM_CLOCK
    ) -> None:
        self.path = path
        self._known = known
        self._clock = clock
        self.login: SharedLogin | None = None
        """The login that uses this file, whose metadata is stored with the tokens."""

    async def get_tokens(self) -> OAuthToken | None:
        return self._read("tokens", OAuthToken)

    async def set_tokens(self, tokens: OAuthToken) -> None:
        lasts, context = tokens.expires_in, None if self.login is None else self.login.context
        self._write(
            tokens=_plain(tokens),
            expires_at=None if lasts is None else self._clock.now().timestamp() + lasts,
            server=None if context is None else _plain(context.oauth_metadata),
            resource=None if context is None else _plain(context.protected_resource_metadata),
        )

    async def get_client_info(self) -> OAuthClientInformationFull | None:
        return self._known or self._read("client", OAuthClientInformationFull)

    async def set_client_info(self, client_info: OAuthClientInformationFull) -> None:
        if self.login is not None:  # the SDK does not always note it
            client_info.issuer = client_info.issuer or self.login.issuer
        self._write(client=_plain(client_info))

    def confirmed(self, issuer: str) -> frozenset[str]:
        """Return the origins that a person has confirmed for this issuer."""
        found: Any = self._load().get("confirmed")
        return (
            frozenset(cast("dict[str, list[str]]", found).get(issuer, ()))
            if isinstance(found, dict)
            else frozenset()
        )

    def confirm(self, issuer: str, origins: frozenset[str]) -> None:
        """Note that a person has confirmed these origins for an issuer, and only them."""
        self._write(confirmed={issuer: sorted(origins)})

    def stored(self) -> Stored | None:
        """Return the tokens in the file, which may have expired, or None if the file has none or they can't be read."""
        tokens = self._read("tokens", OAuthToken)
        if tokens is None:
            return None
        expires: Any = self._load().get("expires_at")
        return Stored(
            tokens,
            float(expires) if isinstance(expires, int | float) else None,
            self._read("server", OAuthMetadata),
            self._read("resource", ProtectedResourceMetadata),
        )

    @contextlib.asynccontextmanager
    async def lock(self) -> AsyncGenerator[None]:
        """Keep other processes from refreshing the tokens during the block.

        If another process holds the lock for 30 seconds, the block runs without it.
        """
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        handle = os.open(self.path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            for _ in range(int(_LOCK_SECONDS / _POLL)):
                with contextlib.suppress(BlockingIOError):
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                await asyncio.sleep(_POLL)
            yield
        finally:
            os.close(handle)

    def _load(self) -> dict[str, Any]:
        try:
            found: Any = json.loads(self.path.read_bytes())
        except (OSError, ValueError):
            return {}
        return cast("dict[str, Any]", found) if isinstance(found, dict) else {}

    def _read(self, key: str, kind: Any) -> Any:
        try:
            return kind.model_validate(self._load()[key])
        except (KeyError, ValidationError):
            return None

    def _write(self, **changes: Any) -> None:
        data = {**self._load(), **changes}
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        # The file is created for its owner alone, so that there is no moment at which others can read it.
        handle, name = tempfile.mkstemp(dir=self.path.parent)
        try:
            with os.fdopen(handle, "w") as file:
                json.dump(data, file)
            os.replace(name, self.path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(name)
            raise


def _plain(value: Any) -> Any:
    return None if value is None else value.model_dump(mode="json", exclude_none=True)


class SharedLogin(OAuthClientProvider):
    """The SDK's login, with tokens that other processes and later runs can use and refresh too.

    A refresh token is sent only to the server that issued it. A code, a verifier, a secret and a refresh token are sent only to
    endpoints that belong to the issuer. The MCP server names the issuer, and the issuer's metadata name the endpoints, so both
    could lie: an authorization endpoint that people trust, beside a token endpoint of the attacker. Errors quote nothing that a host
    other than the MCP server answered.
    """

    def __init__(
        self,
        url: str,
        about: Any,
        file: TokenFile,
        *handlers: Any,
        bounds: Bounds,
        ask: AskLogin,
        **options: Any,
    ) -> None:
        super().__init__(url, about, file, *handlers, **options)
        file.login = self
        self._file = file
        self._bounds = bounds
        self._ask = ask
        self._last: Stored | None = None

    async def async_auth_flow(
        self, request: httpx2.Request
    ) -> AsyncGenerator[httpx2.Request, httpx2.Response]:
        async with contextlib.AsyncExitStack() as held:
            if await self._must_refresh():
                await held.enter_async_context(self._file.lock())
                if not await self._must_refresh():  # another process has refreshed them
                    await held.aclose()
            flow = super().async_auth_flow(request)
            elsewhere: httpx2.Response | None = None
            try:
                sent = await anext(flow)
                while True:
                    if sent is not request and sent.method == "POST":
                        await self._check(sent)
                    response = yield sent
                    if sent is request:
                        self._check_challenge(response)
                    if _origin(str(sent.url)) != _origin(self.context.server_url):
                        elsewhere = response
                    sent = await flow.asend(response)
                    await held.aclose()  # the refreshed tokens are stored
            except StopAsyncIteration:
                return
            except HandrailError:
                raise
            except Exception as error:
                if elsewhere is None:
                    raise
                # The SDK quotes what was answered, perhaps by a host that only this machine can reach.
                raise LoginNeeded(
                    f"the login did not succeed ({type(error).__name__}). The last answer of {_origin(str(elsewhere.url))} "
                    f"had the HTTP status {elsewhere.status_code}"
                ) from None
            finally:
                await flow.aclose()

    @property
    def issuer(self) -> str:
        """The issuer that the login uses."""
        metadata = self.context.oauth_metadata
        return self._expected_issuer() if metadata is None else str(metadata.issuer)

    async def _perform_authorization(self) -> httpx2.Request:
        await self._check()  # before the person is asked to open the address
        return await super()._perform_authorization()

    async def _check(self, request: httpx2.Request | None = None) -> None:
        """Raise `LoginNeeded` unless the endpoints, and the one that a request is sent to, belong to the issuer.

        They do if they are on the issuer's origin, or on one that is named in the settings. A person who can be asked may confirm
        others. A client's secret belongs to one issuer; if none is named, it belongs to the MCP server's own origin, or to the
        issuer that a person confirms.
        """
        issuer, client = self.issuer, self.context.client_info
        secret = None if client is None else client.client_secret
        bound = self._bounds.issuer or (client.issuer if client is not None and secret else "")
        if bound and not issuers_match(bound, issuer):
            raise LoginNeeded(f"the server names the issuer {issuer}, and the login is for {bound}")
        own = _origin(issuer)
        known = {own, *map(_origin, self._bounds.endpoints)}
        metadata = self.context.oauth_metadata
        base = self.context.get_authorization_base_url(self.context.server_url)
        used = {
            "authorization endpoint": f"{base}/authorize"
            if metadata is None
            else str(metadata.authorization_endpoint),
            "token endpoint": self._get_token_endpoint(),
        }
        if request is not None and str(request.url) not in used.values():
            used["endpoint of a request"] = str(request.url)
        others = {_origin(url) for url in used.values()} - known
        if secret and not bound and own != _origin(base):
            others.add(own)
        if others - self._file.confirmed(issuer):
            await self._ask("", {"issuer": issuer, **used})
            self._file.confirm(issuer, frozenset(others))

    def _check_challenge(self, response: httpx2.Response) -> None:
        """Raise `LoginNeeded` if a server says that its metadata is on a different origin."""
        if response.status_code in (401, 403):
            place = extract_resource_metadata_from_www_auth(response)
            if place is not None and _origin(place) != _origin(self.context.server_url):
                raise LoginNeeded(f"it names metadata that is not on its own origin: {place[:200]}")

    async def _must_refresh(self) -> bool:
        """Switch to the tokens in the file if they have changed. Returns whether they have expired and can be refreshed."""
        context = self.context
        context.client_info = context.client_info or await self._file.get_client_info()
        stored = self._file.stored()
        if stored is not None and stored != self._last:
            self._last = stored
            context.current_tokens = stored.tokens
            context.oauth_metadata = stored.server or context.oauth_metadata
            context.protected_resource_metadata = stored.resource or context.protected_resource_metadata
            # Without metadata it is not known where to refresh the tokens, so they are used until the server refuses them.
            context.token_expiry_time = None if stored.server is None else stored.expires_at
        return not context.is_token_valid() and context.can_refresh_token()


def _origin(url: str) -> str:
    """Return the scheme, host and port of an address. An address that has no valid ones is its own origin."""
    where = urlsplit(url)
    try:
        port = where.port or _PORTS.get(where.scheme)
    except ValueError:
        return url
    return f"{where.scheme}://{where.hostname}:{port}"


LOCAL = "local"
"""The principal of programs on this machine."""
LOGIN_SECONDS = 600.0
"""How many seconds a person has to log in."""
_DONE = "You are logged in. Close this page, and confirm in the program that sent you here."
_FAILED = "The login did not succeed. Close this page, and return to the program that sent you here."
_STRANGE = "This is not the login that the program waits for. Open the address that it shows."
_READ_SECONDS = 10.0
"""Maximum seconds to wait for the first line of the browser's request."""
_MAX_REQUEST = 16 * 1024


@dataclasses.dataclass(frozen=True)
class Login:
    """How to log in to a server with OAuth.

    Each principal logs in on their own. Their tokens are kept in a file of their own, which only the owner of this process can
    read, in `folder` or, if that is None, in the folder `mcp` of Handrail's state folder. After the login the browser is sent to `redirect`. If that is a loopback address, this program
    listens there. If it can't listen, or the browser is on a different machine, the person copies the address from the browser.

    A client that was registered by hand has a `client_id`, and perhaps a `client_secret`, which is sent only to its `issuer`, the
    address of the authorization server. Its endpoints must be on its own origin or on one of `endpoints`, unless a person
    confirms others. Without an `issuer`, the MCP server may name it.
    """

    folder: Path | None = None
    redirect: str = "http://127.0.0.1:8602/callback"
    scope: str | None = None
    client_id: str = ""
    client_secret: str = ""
    metadata_url: str | None = None
    """The https address of a document that describes this client, or None.

    Some servers accept the address in place of a registration.
    """
    issuer: str = ""
    endpoints: Sequence[str] = ()

    def provider(self, url: str, ask: AskLogin, principal: str = LOCAL) -> OAuthClientProvider:
        """Return the SDK's authentication for the server at this address, with the login of this principal.

        Raises pydantic's `ValidationError` if `redirect` is not an address, and `DefinitionError` if the SDK refuses `metadata_url`.
        """
        about = OAuthClientMetadata(
            client_name="Handrail",
            redirect_uris=[self.redirect],  # pyright: ignore[reportArgumentType]  # it is parsed
            grant_types=["authorization_code", "refresh_token"],
            response_types=["code"],
            token_endpoint_auth_method="client_secret_post" if self.client_secret else None,
            scope=self.scope,
        )
        opened: list[str] = []

        async def redirect(address: str) -> None:
            opened[:] = [address]

        async def callback() -> AuthorizationCodeResult:
            state = parse_qs(urlsplit(opened[0]).query).get("state", [""])[0]
            async with _listening(self.redirect, state) as came_back:
                answer = (await ask(opened[0])).strip()
                return _code_in(answer or (came_back.result() if came_back.done() else ""))

        try:
            return SharedLogin(
                url,
                about,
                self.storage(url, principal),
                redirect,
                callback,
                bounds=Bounds(self.issuer, self.endpoints),
                ask=ask,
                client_metadata_url=self.metadata_url,
            )
        except ValueError as error:
            raise DefinitionError(f"the login to {url} is not valid: {error}. Correct its `Login`.") from None

    def storage(self, url: str, principal: str = LOCAL) -> TokenFile:
        """Return the file with a principal's tokens for the server at this address."""
        folder = self.folder or state_folder() / "mcp"
        known = None
        if self.client_id:
            known = OAuthClientInformationFull(
                client_id=self.client_id,
                client_secret=self.client_secret or None,
                redirect_uris=[self.redirect],  # pyright: ignore[reportArgumentType]  # it is parsed
                token_endpoint_auth_method="client_secret_basic" if self.client_secret else "none",
                issuer=self.issuer or None,
            )
        # An address can't begin with "[", so no other principal has the file of the local one.
        owner = url if principal == LOCAL else json.dumps([url, principal])
        name = hashlib.sha256(owner.encode()).hexdigest()[:32]
        return TokenFile(folder / f"{name}.json", known)


def _code_in(address: str) -> AuthorizationCodeResult:
    """Return the code in the address to which the browser was sent. Raises `LoginNeeded` if the address has no code."""
    found = parse_qs(urlsplit(address).query)
    if "code" not in found:
        why = found.get("error", ["the address at which the browser ended up has no code"])[0]
        raise LoginNeeded(f"the login did not succeed: {why[:200]}")
    return AuthorizationCodeResult(
        code=found["code"][0], state=found.get("state", [None])[0], iss=found.get("iss", [None])[0]
    )


@contextlib.asynccontextmanager
async def _listening(redirect: str, state: str) -> AsyncGenerator[asyncio.Future[str], None]:
    """Listen for the browser at the address `redirect`. Yields a future for the address that the browser requests.

    Any page in a browser can send a request to `redirect`, so only a request with the `state` of this login counts. If `redirect`
    is not a loopback address, or its port can't be opened, nothing listens, and the person copies the address.
    """
    came_back: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    where = urlsplit(redirect)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, ValueError, TimeoutError):
            line = (
                (await asyncio.wait_for(reader.readline(), _READ_SECONDS))[:_MAX_REQUEST]
                .decode("latin-1")
                .split()
            )
            asked = urlsplit(line[1] if len(line) > 1 else "")
            found = parse_qs(asked.query)
            given = found.get("state", [""])[0]
            is_ours = asked.path == where.path and hmac.compare_digest(given.encode(), state.encode())
            if is_ours and not came_back.done():
                came_back.set_result(asked.geturl())
            words = (_DONE if "code" in found else _FAILED) if is_ours else _STRANGE
            status = "200 OK" if is_ours else "400 Bad Request"
            head = f"HTTP/1.1 {status}\r\nContent-Type: text/plain\r\nContent-Length: {len(words)}\r\n\r\n"
            writer.write((head + words).encode())
            await writer.drain()
        writer.close()

    server = None
    if where.hostname in ("127.0.0.1", "localhost", "::1"):
        with contextlib.suppress(OSError):
            server = await asyncio.start_server(serve, where.hostname, where.port or 80)
    try:
        yield came_back
    finally:
        if server is not None:
            server.close()
        came_back.cancel()
