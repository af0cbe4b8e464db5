"""Streamable HTTP as a transport to an MCP server, with limits on what the server may send."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import ipaddress
import re
import socket
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from enum import IntEnum
from typing import Any, Self
from urllib.parse import parse_qsl

import httpcore2
import httpx2
from mcp.client.streamable_http import streamable_http_client
from mcp_types import INTERNAL_ERROR

from handrail.errors import DefinitionError
from handrail.mcp import transport
from handrail.mcp.login import AskLogin, Login, LoginNeeded
from handrail.mcp.transport import Flood, Listings, Lost, Mode
from handrail.text.raised_errors import in_short
from handrail.text.secrets import Secrets, is_secret_name

_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")


class Reach(IntEnum):
    """From where an address can be reached: the higher, the fewer."""

    PUBLIC = 0
    PRIVATE = 1
    LINK_LOCAL = 2
    LOOPBACK = 3

    def __str__(self) -> str:
        return self.name.lower().replace("_", "-")


def reach_of(address: str) -> Reach:
    """Return from where an IP address can be reached. An IPv6 address that stands for an IPv4 address is judged as the latter."""
    found: Any = ipaddress.ip_address(address)
    if found.version == 6:
        inner = found.ipv4_mapped or found.sixtofour
        if found in _NAT64:
            inner = ipaddress.IPv4Address(int(found) & 0xFFFFFFFF)
        found = inner or found
    if found.is_loopback or found.is_unspecified:  # a connection to 0.0.0.0 or :: reaches this machine
        return Reach.LOOPBACK
    if found.is_link_local:
        return Reach.LINK_LOCAL
    is_public = found.is_global and not getattr(found, "is_site_local", False)
    return Reach.PUBLIC if is_public else Reach.PRIVATE


@dataclasses.dataclass
class Standing:
    """Where a server was found so far. All its connections share it, because a server can make this program connect again."""

    reach: Reach | None = None
    """The most public address at which the server was connected to; None if it was not yet."""


async def resolve(host: str, port: int) -> list[str]:
    """Return the IP addresses of a host. Raises `OSError` if it has none."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(address[0]) for *_, address in found))


class Border(httpcore2.AsyncNetworkBackend):
    """Opens the connections to a server and, for its login, to the hosts that it names.

    A host that the server names is connected to only at addresses that are at least as public as the server's own. So a server on the
    internet reaches nothing in this machine or network through this program. The address that is connected to is the one that was
    checked, so a name that changes its address changes nothing. The server itself can't move to a less public address either,
    for as long as its `Standing` is used.
    """

    def __init__(
        self, inner: httpcore2.AsyncNetworkBackend, host: str, port: int, standing: Standing
    ) -> None:
        self._inner = inner
        self._own = (host, port)
        self._standing = standing
        self._reach: Reach | None = None
        """Where these connections lead; None before the first."""

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore2.AsyncNetworkStream:
        options: Any = {"local_address": local_address, "socket_options": socket_options}
        if (host, port) == self._own:
            stream = await self._inner.connect_tcp(host, port, timeout, **options)
            try:
                self._enter(str(stream.get_extra_info("server_addr")[0]))
            except BaseException:
                await stream.aclose()
                raise
            return stream
        try:
            async with asyncio.timeout(timeout):
                addresses = await self._allowed(host, port)
        except TimeoutError as error:
            raise httpcore2.ConnectTimeout(str(error)) from error
        except socket.gaierror as error:
            raise httpcore2.ConnectError(str(error)) from error
        share = None if timeout is None else timeout / len(addresses)
        for address in addresses[:-1]:
            try:
                return await self._inner.connect_tcp(address, port, share, **options)
            except (httpcore2.ConnectError, httpcore2.ConnectTimeout):
                continue
        return await self._inner.connect_tcp(addresses[-1], port, share, **options)

    def _enter(self, address: str) -> None:
        """Note the address at which the server was connected to. Raises `ConnectError` if an earlier one was more public."""
        reach, before = reach_of(address), self._standing.reach
        if before is not None and reach > before:
            raise httpcore2.ConnectError(
                f"its address has changed from a {before} one to a {reach} one, so nothing is sent there. If this is "
                "right, start this program again"
            )
        self._standing.reach = self._reach = reach

    async def _allowed(self, host: str, port: int) -> list[str]:
        """Return the addresses of a host that the server may name. Raises `LoginNeeded` if there are none, and `OSError`."""
        limit = self._reach
        if limit is None:  # expired tokens are refreshed before the server is connected to
            limit = min(map(reach_of, await resolve(*self._own)))
        addresses = await resolve(host, port)
        allowed = [each for each in addresses if reach_of(each) <= limit]
        if not allowed:
            raise LoginNeeded(
                f"its login leads to {host}, which has a {reach_of(addresses[0])} address, and its own address is {limit}"
            )
        return allowed

    async def connect_unix_socket(self, *_: Any, **__: Any) -> httpcore2.AsyncNetworkStream:
        raise NotImplementedError

    async def sleep(self, seconds: float) -> None:
        await self._inner.sleep(seconds)


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
