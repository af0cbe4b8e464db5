"""`run`: serves an app with uvicorn until SIGINT or SIGTERM."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import json
import os
import signal
import socket
import ssl
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any, NamedTuple, Protocol, cast

import h11
import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from handrail.errors import DefinitionError
from handrail.serve.limits import Limits, network_of
from handrail.serve.metrics import Metrics
from handrail.serve.middleware import HEADERS
from handrail.serve.refusals import error_body
from handrail.serve.requests import parse_prefix

_BACKLOG = 2048
_SPARE_FILES = 256
_LATE_SECONDS = 1.0
"""If a header timeout fires more than this many seconds late, the server itself was busy, and the timeout starts again.

Without this, the server would refuse requests that have arrived but that it has not read yet.
"""
_ABORT_SECONDS = 1.0
"""Seconds that clients have to read the rest of their responses after the server begins to shut down."""
_SHUTDOWN_SECONDS = 2


class Tls(NamedTuple):
    """A certificate and its private key, as PEM files."""

    certificate: Path
    key: Path

    def check(self) -> None:
        """Raise `DefinitionError` if the files can't be read, or are not a certificate and its private key."""
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(self.certificate, self.key)
        except (OSError, ssl.SSLError) as error:
            reason = getattr(error, "reason", None) or error.strerror or str(error)
            raise DefinitionError(
                f"{self.certificate} and {self.key} can't be used as a certificate and its key: {reason}. Give two PEM files."
            ) from None


def listen(host: str, port: int) -> socket.socket:
    """Open a listening socket, on IPv4 if the host has both an IPv4 and an IPv6 address. Raises `OSError` if that fails."""
    found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, kind, protocol, _, address = min(found, key=lambda each: each[0] != socket.AF_INET)
    made = socket.socket(family, kind, protocol)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(address)
        made.listen(_BACKLOG)
    except OSError:
        made.close()
        raise
    return made


def address_of(listening: socket.socket, scheme: str = "http", prefix: str = "") -> str:
    """Return the URL to open in a browser, such as `http://127.0.0.1:8600/`, or with the prefix `/agents/` at its end."""
    host, port = listening.getsockname()[:2]
    address = ipaddress.ip_address(host.partition("%")[0])
    if address.is_unspecified:
        host = "::1" if address.version == 6 else "127.0.0.1"
    return f"{scheme}://{f'[{host}]' if address.version == 6 else host}:{port}{parse_prefix(prefix)}/"


def is_reachable(listening: socket.socket) -> bool:
    """Return whether the socket listens on an address that other machines may reach."""
    return not ipaddress.ip_address(listening.getsockname()[0].partition("%")[0]).is_loopback


class UvicornServer(uvicorn.Server):
    """A uvicorn server that calls `ready` when it accepts requests. It installs no signal handlers: see `on_signals`."""

    def __init__(self, app: ASGIApp, ready: Callable[[], None], **options: Any) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                timeout_graceful_shutdown=_SHUTDOWN_SECONDS,
                **options,
            )
        )
        self._ready = ready

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._ready()


class Limited(Protocol):
    """An ASGI app with limits for its connections, and metrics that count those that exceed them."""

    @property
    def limits(self) -> Limits: ...
    @property
    def metrics(self) -> Metrics: ...
    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None: ...


class Servable(Limited, Protocol):
    """An ASGI app that can be started and stopped."""

    def running(self) -> int:
        """Return the number of runs that this process has in memory, including those that wait for an answer."""
        ...

    async def start(self) -> None: ...
    async def stop(self) -> None:
        """Accept no new work, and park every run."""
        ...


async def run(
    app: Servable,
    listening: socket.socket,
    *,
    tls: Tls | None = None,
    ready: Callable[[], None] = lambda: None,
    stopping: Callable[[int], None] = lambda runs: None,
) -> None:
    """Serve until SIGINT or SIGTERM, then park every run. A second signal ends the process at once.

    `ready` is called when the server accepts requests. `stopping` is called with the number of runs to park.
    """
    server = server_for(app, ready, tls)
    started: list[asyncio.Task[None]] = []

    async def stop() -> None:
        stopping(app.running())
        try:
            await app.stop()
        finally:
            server.should_exit = True

    def handle(number: int) -> None:
        if started:
            os._exit(128 + number)
        started.append(asyncio.get_running_loop().create_task(stop()))

    await app.start()
    with on_signals(handle):
        await server.serve([listening])


def server_for(
    app: Limited, ready: Callable[[], None] = lambda: None, tls: Tls | None = None
) -> uvicorn.Server:
    """Create a uvicorn server with the app's limits. It installs no signal handlers, because `run` does.

    This may raise the process's limit on open files.
    """
    limits = app.limits
    connections = Connections(limits, app.metrics)
    _raise_file_limit(limits.connections)

    class TimedServer(UvicornServer):
        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            abort = asyncio.get_running_loop().call_later(_ABORT_SECONDS, connections.abort)
            await super().shutdown(sockets)
            abort.cancel()

    async def timed(scope: Scope, receive: Receive, send: Send) -> None:
        with connections.request(scope):
            await app(scope, receive, send)

    return TimedServer(
        timed,
        ready,
        http=cast("Any", connections.open),
        backlog=_BACKLOG,
        limit_concurrency=10 * limits.connections + 100,
        timeout_keep_alive=int(limits.idle_seconds),
        h11_max_incomplete_event_size=limits.header_bytes,
        ssl_certfile=None if tls is None else tls.certificate,
        ssl_keyfile=None if tls is None else tls.key,
    )


# --- connections --------------------------------------------------------------------------------------


class Connections:
    """A server's open connections, with two timeouts that uvicorn lacks and a limit on idle connections.

    A client that does not finish a request's headers in time gets a 408 and is disconnected. A client that stops
    reading while data is waiting for it is also disconnected. uvicorn has no option for either, so its protocol is
    wrapped.
    """

    def __init__(self, limits: Limits, metrics: Metrics) -> None:
        self.limits = limits
        self.metrics = metrics
        self._open: dict[tuple[str, int], Connection] = {}
        self._idle: dict[str, dict[Connection, None]] = {}
        """The connections without a request in progress, by the result of `network_of`. The longest idle one comes first."""

    def open(self, **options: Any) -> Connection:
        """Create the protocol for a new connection. uvicorn gets this method as its `http` option."""
        return Connection(self, H11Protocol(**options))

    def add(self, connection: Connection) -> None:
        self._open[connection.client] = connection
        self.rest(connection)

    def discard(self, connection: Connection) -> None:
        self.use(connection)
        if self._open.get(connection.client) is connection:
            del self._open[connection.client]

    def rest(self, connection: Connection) -> None:
        """Mark a connection as idle. If its address has too many idle connections, the longest idle one is closed."""
        idle = self._idle.setdefault(network_of(connection.client[0]), {})
        idle[connection] = None
        if len(idle) > self.limits.idle_per_address:
            oldest = next(iter(idle))
            del idle[oldest]
            self.metrics.refuse("TooManyIdle")
            oldest.transport.close()

    def use(self, connection: Connection) -> None:
        """Mark a connection as no longer idle, because it has a request in progress or is closed."""
        address = network_of(connection.client[0])
        idle = self._idle.get(address, {})
        idle.pop(connection, None)
        if not idle:
            self._idle.pop(address, None)

    @contextlib.contextmanager
    def request(self, scope: Scope) -> Generator[None]:
        """Tell a request's connection when the request begins and when it ends."""
        connection = self._open.get(scope["client"])
        if connection is not None:
            connection.start_request()
        try:
            yield
        finally:
            if connection is not None:
                connection.end_request()

    def abort(self) -> None:
        """Close every connection immediately, and drop the data that is waiting to be sent."""
        for connection in list(self._open.values()):
            connection.transport.abort()


class Connection(asyncio.Protocol):
    """uvicorn's protocol for one connection, wrapped with timeouts."""

    transport: asyncio.Transport
    client: tuple[str, int]

    def __init__(self, connections: Connections, inner: H11Protocol) -> None:
        self._connections = connections
        self._inner = inner
        self._loop = asyncio.get_running_loop()
        self._requests = 0
        self._headers: asyncio.TimerHandle | None = None
        self._unread: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        peer = transport.get_extra_info("peername")
        self.client = (str(peer[0]), int(peer[1]))
        self._connections.add(self)
        self._inner.connection_made(self.transport)
        self._await_headers()

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        self._await_headers()
        try:
            self._inner.data_received(data)
        except h11.LocalProtocolError:  # uvicorn tried to send a 400 in the middle of a response
            self.transport.close()

    def eof_received(self) -> None:
        self._inner.eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        self._headers = _cancel(self._headers)
        self._unread = _cancel(self._unread)
        self._connections.discard(self)
        self._inner.connection_lost(exc)

    def start_request(self) -> None:
        self._requests += 1
        self._connections.use(self)
        self._headers = _cancel(self._headers)

    def end_request(self) -> None:
        self._requests -= 1
        if not self._requests and not self.transport.is_closing():
            self._connections.rest(self)

    def pause_writing(self) -> None:
        self._inner.pause_writing()
        if self._unread is None:
            seconds = self._connections.limits.write_seconds
            self._unread = self._loop.call_later(seconds, self._disconnect_reader)

    def resume_writing(self) -> None:
        self._unread = _cancel(self._unread)
        self._inner.resume_writing()

    def _await_headers(self) -> None:
        """Start the timeout for a request's headers, unless a request is in progress.

        A running timeout is not restarted, so a client gains no time by sending one byte at a time.
        """
        if self._headers is None and not self._requests:
            seconds = self._connections.limits.header_seconds
            self._headers = self._loop.call_later(seconds, self._refuse_slow)

    def _refuse_slow(self) -> None:
        timer, self._headers = self._headers, None
        if timer is not None and self._loop.time() - timer.when() > _LATE_SECONDS:
            self._await_headers()
        elif not self.transport.is_closing():
            self._connections.metrics.refuse("HeadersTooSlow")
            self.transport.write(_TOO_SLOW)
            self.transport.close()

    def _disconnect_reader(self) -> None:
        self._connections.metrics.refuse("ReaderStalled")
        self.transport.abort()


def _cancel(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()


def _encode_response(status: str, kind: str, message: str) -> bytes:
    """Encode a complete response, for a connection whose request has not fully arrived."""
    body = json.dumps(error_body(kind, message)).encode()
    lines = [
        f"HTTP/1.1 {status}",
        "content-type: application/json",
        f"content-length: {len(body)}",
        "cache-control: no-store",
        "connection: close",
        *(f"{name.decode()}: {value.decode()}" for name, value in HEADERS),
    ]
    return "\r\n".join([*lines, "", ""]).encode() + body


_TOO_SLOW = _encode_response(
    "408 Request Timeout", "HeadersTooSlow", "the request's headers did not arrive in time. Send them faster."
)


# --- the process --------------------------------------------------------------------------------------


@contextlib.contextmanager
def on_signals(handle: Callable[[int], object]) -> Generator[None]:
    """Call `handle` in the event loop on each SIGINT and SIGTERM."""
    loop = asyncio.get_running_loop()
    numbers = (signal.SIGINT, signal.SIGTERM)
    for number in numbers:
        loop.add_signal_handler(number, handle, number)
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)


def _raise_file_limit(connections: int) -> None:
    """If the limit on open files is lower than the connections need, raise it, at most to the hard limit."""
    import resource

    wanted = 2 * connections + _SPARE_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
