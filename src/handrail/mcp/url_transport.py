"""Streamable HTTP as a transport to an MCP server, with limits on what the server may send."""

from __future__ import annotations

import dataclasses
import functools
import re
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, Self
from urllib.parse import parse_qsl

import httpx2
from mcp.client.streamable_http import streamable_http_client
from mcp_types import INTERNAL_ERROR

from handrail.errors import DefinitionError
from handrail.mcp import transport
from handrail.mcp.addresses import Border, Standing
from handrail.mcp.listings import Listings
from handrail.mcp.login import AskLogin, Login
from handrail.mcp.transport import Flood, Lost, Mode
from handrail.raised_errors import in_short
from handrail.secrets import Secrets, is_secret_name

_SILENCE = 300
"""Seconds for which a server may send nothing. A server may keep a stream open for later events, so the limit is high."""
_CONNECT = 30
"""Maximum seconds to connect to a server, and to send it the next part of a request."""
_STREAM, _JSON = "text/event-stream", "application/json"
_PASSED = frozenset([400, 404, 405])
"""Error statuses that are passed on, because the SDK handles them itself."""


@dataclasses.dataclass(frozen=True)
class UrlServer:
    """A server at an address, which speaks streamable HTTP.

    `headers` are sent with each request. With a `login`, the person is asked to log in when the server requires it.
    `secrets` are further values to hide, besides the headers that `Secrets.of` hides. Raises `DefinitionError` if `url` is not
    an http or https address, or contains a user name or password.
    """

    url: str
    headers: Mapping[str, str] = dataclasses.field(default_factory=dict[str, str])
    login: Login | None = None
    mode: Mode = "auto"
    secrets: Sequence[str] = ()
    standing: Standing = dataclasses.field(default_factory=Standing, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not re.match(r"https?://[^/\s]", self.url):
            raise DefinitionError(f"{self.url!r} is not an address of an MCP server. Write https://host/mcp.")
        if "@" in self.url.split("//", 1)[1].partition("/")[0]:
            raise DefinitionError(
                "the address of an MCP server contains a user name or password, which would be shown with the address. "
                "Pass headers={'Authorization': '…'} instead."
            )

    @property
    def hidden(self) -> Secrets:
        query = parse_qsl(self.url.partition("?")[2])
        keys = [value for name, value in query if is_secret_name(name)]
        return Secrets.of({}, self.headers, [*self.secrets, *keys])

    def __str__(self) -> str:
        """Return the address with its secrets hidden, and without its query, which may contain a key."""
        return self.hidden.hide(self.url.partition("?")[0])

    def open(self, lost: Lost, ask: AskLogin, principal: str) -> AbstractAsyncContextManager[Any]:
        """Return the transport to the server."""
        return _http(self, lost, ask, principal)


@asynccontextmanager
async def _http(server: UrlServer, lost: Lost, ask: AskLogin, principal: str) -> AsyncGenerator[Any, None]:
    login = server.login
    wire = _Wire(lost, server)
    async with (
        httpx2.AsyncClient(
            headers=dict(server.headers),
            timeout=httpx2.Timeout(_CONNECT, read=_SILENCE),
            transport=wire,
            auth=None if login is None else login.provider(server.url, ask, principal),
        ) as client,
        streamable_http_client(server.url, http_client=client, max_sse_event_size=transport.MAX_MESSAGE) as (
            read,
            write,
        ),
    ):
        yield _Checked(read, lost, Listings(str(server), server.hidden)), write


class _Wire(httpx2.AsyncBaseTransport):
    """Sends requests, notes why the connection was lost, and limits the size of bodies that are not event streams."""

    def __init__(self, lost: Lost, server: UrlServer) -> None:
        self._inner = httpx2.AsyncHTTPTransport(verify=_trusted())
        at = httpx2.URL(server.url)
        port = at.port or (443 if at.scheme == "https" else 80)
        pool: Any = self._inner._pool  # pyright: ignore[reportPrivateUsage]  # the transport has no option for it
        pool._network_backend = Border(pool._network_backend, at.raw_host.decode(), port, server.standing)
        self._lost = lost
        self._explains = server.login is None
        """Whether a response with an error status is replaced by an explanation, unless it is JSON or `_PASSED` has its status.

        A login needs the original.
        """

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        request.headers["Accept-Encoding"] = "identity"  # a small compressed body can be large when decoded
        try:
            response = await self._inner.handle_async_request(request)
        except httpx2.TransportError as error:
            self._lost(words_of(error))
            raise
        if response.headers.get("Content-Encoding", "identity") != "identity":
            await response.aclose()
            self._lost("it sent a compressed response, which it was asked not to do")
            raise httpx2.DecodingError("the response is compressed", request=request)
        kind = response.headers.get("Content-Type", "").lower()
        passed = not self._explains or response.status_code in _PASSED or response.status_code < 400
        if passed or kind.startswith(_JSON):
            if not kind.startswith(_STREAM):
                response.stream = _Bounded(response.stream)
            return response
        await response.aclose()
        return _refused(response.status_code)

    async def aclose(self) -> None:
        await self._inner.aclose()


@functools.cache
def _trusted() -> ssl.SSLContext:
    """Return the TLS context of all connections. Its certificates are read once, because reading them blocks the event loop."""
    return httpx2.create_ssl_context()


def _refused(status: int) -> httpx2.Response:
    """Return a JSON-RPC error that names the HTTP status, which the SDK would leave out."""
    why = f"HTTP status {status}"
    if status in (401, 403):
        why += ". Give the server a header with a valid token"
    error = {"jsonrpc": "2.0", "id": None, "error": {"code": INTERNAL_ERROR, "message": why}}
    return httpx2.Response(status, json=error)


class _Bounded(httpx2.AsyncByteStream):
    """A body that fails after `MAX_MESSAGE` bytes."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    async def __aiter__(self) -> AsyncIterator[bytes]:
        left = transport.MAX_MESSAGE
        async for chunk in self._inner:
            left -= len(chunk)
            if left < 0:
                raise httpx2.StreamError(
                    f"the response has more than {transport.MAX_MESSAGE // 1024 // 1024} MB"
                )
            yield chunk

    async def aclose(self) -> None:
        await self._inner.aclose()


class _Checked:
    """The stream of a server's messages, without tools that are not valid. The stream ends if `Flood` refuses a message."""

    def __init__(self, inner: Any, lost: Lost, listings: Listings) -> None:
        self._inner = inner
        self._lost = lost
        self._listings = listings
        self._flood = Flood()

    @property
    def last_context(self) -> Any:
        """The context of the sender of the last message, which the session restores."""
        return self._inner.last_context

    async def receive(self) -> Any:
        try:
            return await self.__anext__()
        except StopAsyncIteration:
            raise EOFError from None

    async def __anext__(self) -> Any:
        item = await self._inner.__anext__()
        message = getattr(item, "message", None)
        if why := self._flood.add(message):
            self._lost(why)
            raise StopAsyncIteration
        self._listings.screen(message)
        return item

    def __aiter__(self) -> Self:
        return self

    async def aclose(self) -> None:
        await self._inner.aclose()

    async def __aenter__(self) -> Self:
        await self._inner.__aenter__()
        return self

    async def __aexit__(self, *error: Any) -> None:
        await self._inner.__aexit__(*error)


def words_of(error: BaseException) -> str:
    """Describe a connection error in a few words."""
    match error:
        case httpx2.ConnectError():
            return f"can't connect: {in_short(error)}"
        case httpx2.ConnectTimeout():
            return f"it did not accept the connection within {_CONNECT} s"
        case httpx2.ReadTimeout():
            return f"it sent nothing for {_SILENCE} s"
        case httpx2.RemoteProtocolError():
            return "it closed the connection, or sent something that is not HTTP"
        case _:
            return in_short(error)
