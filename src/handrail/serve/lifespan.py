"""`Lifespan`: starts and stops an app, each once. `on_stop_signal`: stops it in time under other servers."""

from __future__ import annotations

import asyncio
import logging
import signal
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

from handrail.serve.refusals import RequestRefused

log = logging.getLogger("handrail.serve")

_Step = Callable[[], Coroutine[Any, Any, None]]


class Lifespan:
    """Starts an app by `start` and stops it by `stop`, each once.

    `Lifespan.run` is for ASGI servers. It calls `ready` when the app is started.
    """

    def __init__(self, start: _Step, stop: _Step, ready: Callable[[], None] = lambda: None) -> None:
        self._start = start
        self._stop = stop
        self._ready = ready
        self._is_started = self._was_told = False
        self._stopping: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start the app."""
        await self._start()
        self._is_started = True

    async def stop(self) -> None:
        """Stop the app. Calling it again has no further effect."""
        await asyncio.shield(self._begin_stop())

    @asynccontextmanager
    async def run(self) -> AsyncGenerator[None]:
        """Start the app, and stop it when the block ends or the process is told to stop."""
        await self.start()
        self._ready()
        with on_stop_signal(self._begin_stop):
            yield
        await self.stop()

    def wrap(self, app: ASGIApp) -> ASGIApp:
        """Return `app`, with every request refused until it is started.

        Frameworks run no lifespan of an app that is mounted in another. Without it, nobody would resume the app's runs, and the end
        of the process would cancel those that it has.
        """

        async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
            if not self._is_started and scope["type"] == "http":
                self._refuse()
            await app(scope, receive, send)

        return guarded

    def _refuse(self) -> None:
        problem = (
            "this app is not started, because frameworks run no lifespan of an app that is mounted in another. Pass its lifespan to "
            "the outer app, as in `Starlette(routes=[Mount('/desk', desk)], lifespan=desk.lifespan)`."
        )
        if not self._was_told:
            self._was_told = True
            log.error(problem)
        raise RequestRefused(503, "NotStarted", problem)

    def _begin_stop(self) -> asyncio.Task[None]:
        if self._stopping is None:
            self._stopping = asyncio.get_running_loop().create_task(self._stop())
        return self._stopping


@contextmanager
def on_stop_signal(stop: Callable[[], object]) -> Generator[None]:
    """Schedule `stop` in the event loop on SIGINT or SIGTERM, and then call the handler that was installed before.

    Without this, server and app would wait for each other: the server shuts the app down only when all connections are
    closed, and a stream's connection closes only when the app ends the stream. A signal without a handler, or with
    Python's own, keeps its effect. Outside the main thread this does nothing, because only the main thread can install
    signal handlers.
    """
    loop = asyncio.get_running_loop()
    handlers: dict[int, Callable[[int, Any], Any]] = {}

    def handle(number: int, frame: Any) -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(stop)
        handlers[number](number, frame)

    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            before = signal.getsignal(number)
            if callable(before) and before is not signal.default_int_handler:
                handlers[number] = before
                signal.signal(number, handle)
    try:
        yield
    finally:
        for number, before in handlers.items():
            if signal.getsignal(number) is handle:
                signal.signal(number, before)
