"""A served app as a process: the address it listens at, and how it is stopped."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import os
import signal
import socket
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any

from handrail.errors import DefinitionError
from handrail.serve.app import ServedApp
from handrail.serve.extra import missing_extra

if TYPE_CHECKING:
    import uvicorn

_BACKLOG = 2048
_SPARE_FILES = 256
_CLOSE_SECONDS = 2


def listen(host: str, port: int, app: ServedApp) -> socket.socket:
    """A socket at this address. `DefinitionError` for one that others reach, where everybody may come in."""
    found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, kind, protocol, _, address = min(found, key=lambda each: each[0] != socket.AF_INET)
    if app.is_open and not ipaddress.ip_address(str(address[0]).partition("%")[0]).is_loopback:
        raise DefinitionError(
            f"{host or 'every address'} can be reached from other machines, so a token is needed. Set "
            "$HANDRAIL_TOKEN, or listen at 127.0.0.1. A good token: "
            '`python -c "import secrets; print(secrets.token_urlsafe(32))"`.'
        )
    made = socket.socket(family, kind, protocol)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(address)
        made.listen(_BACKLOG)
    except OSError:
        made.close()
        raise
    return made


def address_of(listening: socket.socket) -> str:
    """Where a browser finds it: `http://127.0.0.1:8600/`."""
    host, port = listening.getsockname()[:2]
    address = ipaddress.ip_address(host.partition("%")[0])
    if address.is_unspecified:
        return f"http://{'[::1]' if address.version == 6 else '127.0.0.1'}:{port}/"
    return f"http://{f'[{host}]' if address.version == 6 else host}:{port}/"


async def run(
    app: ServedApp,
    listening: socket.socket,
    *,
    ready: Callable[[], None] = lambda: None,
    stopping: Callable[[int], None] = lambda runs: None,
) -> None:
    """Serve until SIGINT or SIGTERM, which parks every run; a second one ends the process at once.

    `ready` is told when requests are taken, and `stopping` how many runs are being parked.
    """
    server = server_for(app, ready)
    await app.threads.start()
    with _signals(lambda: _stop(app, server, stopping)):
        await server.serve([listening])


def server_for(app: ServedApp, ready: Callable[[], None] = lambda: None) -> uvicorn.Server:
    """uvicorn with the app's limits. It starts no threads and hears no signals: that is `run`'s."""
    try:
        import uvicorn
    except ImportError:
        raise missing_extra("uvicorn") from None
    from handrail.serve.wire import wire

    limits = app.limits
    _allow_files(limits.connections)

    class Server(uvicorn.Server):
        @contextlib.contextmanager
        def capture_signals(self) -> Generator[None]:
            yield  # they are ours

        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            ready()

    config = uvicorn.Config(
        app,
        http=wire(limits, app.metrics),
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        backlog=_BACKLOG,
        timeout_keep_alive=int(limits.idle_seconds),
        timeout_graceful_shutdown=_CLOSE_SECONDS,
        h11_max_incomplete_event_size=limits.header_bytes,
    )
    return Server(config)


async def _stop(app: ServedApp, server: Any, stopping: Callable[[int], None]) -> None:
    stopping(len(app.threads.running()))
    try:
        await app.stop()
    finally:
        server.should_exit = True


@contextlib.contextmanager
def _signals(stop: Callable[[], Any]) -> Generator[None]:
    """The first begins to stop, the second ends the process."""
    loop = asyncio.get_running_loop()
    begun: list[asyncio.Task[None]] = []

    def press(number: int) -> None:
        if begun:
            os._exit(128 + number)
        begun.append(loop.create_task(stop()))

    numbers = (signal.SIGINT, signal.SIGTERM)
    for number in numbers:
        loop.add_signal_handler(number, press, number)
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)


def _allow_files(connections: int) -> None:
    """A connection is a file: let this process have as many as it serves, where it may."""
    import resource

    wanted = 2 * connections + _SPARE_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
