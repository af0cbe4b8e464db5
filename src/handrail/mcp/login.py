"""Login to an MCP server with OAuth, through the SDK.

The person is asked to open an address. The tokens are kept in a private file.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hashlib
import hmac
import json
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

from mcp.client.auth import OAuthClientProvider
from mcp.shared.auth import AuthorizationCodeResult, OAuthClientInformationFull, OAuthClientMetadata

from handrail.errors import DefinitionError
from handrail.journal.location import state_folder
from handrail.mcp.tokens import AskLogin, Bounds, LoginNeeded, SharedLogin, TokenFile

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
