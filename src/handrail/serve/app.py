"""`asgi`: the server as an ASGI app. Its URLs are defined in `routes`."""

from __future__ import annotations

import asyncio
import logging
import signal
import threading
from collections.abc import AsyncGenerator, Callable, Generator, Iterable
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.types import Receive, Scope, Send

from handrail.errors import DefinitionError
from handrail.journals import Journal
from handrail.serve.access_log import AccessLog
from handrail.serve.feed import Streams
from handrail.serve.inbox import Inbox
from handrail.serve.limits import Limits
from handrail.serve.metrics import PrometheusMetrics, end_leg, refuse
from handrail.serve.middleware import GuardMiddleware
from handrail.serve.oidc import OidcProvider
from handrail.serve.people import People
from handrail.serve.principals import Authenticate, Principals
from handrail.serve.refusals import exception_handlers
from handrail.serve.routes import Routes
from handrail.serve.sources import Source
from handrail.serve.threads import Threads

log = logging.getLogger("handrail.serve")


class ServedApp:
    """An ASGI app that serves `source`: AG-UI at `/agent`, the page at `/`. Exported as `asgi`.

    Runs are recorded in `journal`. On startup, runs that an earlier process left are resumed; on shutdown,
    every run is parked. `hosts` are additional host names the app answers to, `origins` additional origins
    whose pages may use it. Every request is written to `access_log`, if there is one, as a line of JSON.

    Every request is authenticated: by `authenticate`, by the users in `people`, or by `token`. Without any of
    them the page is entered by a link that works once, which the app logs when it starts under an ASGI server.
    """

    def __init__(
        self,
        source: Source,
        *,
        journal: Journal,
        authenticate: Authenticate | None = None,
        people: People | None = None,
        oidc: OidcProvider | None = None,
        token: str | None = None,
        renderers: Path | None = None,
        hosts: Iterable[str] = (),
        origins: Iterable[str] = (),
        limits: Limits | None = None,
        access_log: Path | None = None,
        park_after: float = 300.0,
        grace: float = 5.0,
    ) -> None:
        self.limits = limits or Limits()
        self.metrics = PrometheusMetrics()
        self.people = people or People()
        self.threads = Threads(
            source,
            journal,
            park_after=park_after,
            ended=partial(end_leg, self.metrics),
            voters=self.people.who_may_vote,
        )
        self.inbox = Inbox(self.threads)
        self.streams = Streams(self.limits, self.metrics)
        self._grace = grace
        self._stop_task: asyncio.Task[None] | None = None
        self.principals = principals = Principals(
            self.people, key=journal.key, token=token, authenticate=authenticate, limits=self.limits
        )
        self._logs_link = token is None
        if oidc is not None and not principals.has_people:
            raise DefinitionError(
                "people sign in with OpenID Connect, but the server has no users. Add one: handrail users add NAME."
            )
        self.routes = routes = Routes(
            self.threads,
            principals=principals,
            streams=self.streams,
            metrics=self.metrics,
            limits=self.limits,
            renderers=renderers,
            inbox=self.inbox,
            has_oidc=oidc is not None,
        )
        app = Starlette(
            routes=[*routes.list(), *(() if oidc is None else oidc.routes(principals))],
            lifespan=self._lifespan,
            exception_handlers=exception_handlers(partial(refuse, self.metrics)),
        )
        app.router.redirect_slashes = False
        self._guard = GuardMiddleware(
            app,
            principals=principals,
            metrics=self.metrics,
            limits=self.limits,
            hosts=hosts,
            origins=origins,
            stopping=lambda: self.threads.stopping,
            access=None if access_log is None else AccessLog(access_log),
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._guard(scope, receive, send)

    async def start(self) -> None:
        """Recover what an earlier process left: its runs, and votes that it did not count."""
        await self.threads.start()
        await self.inbox.count_all()

    async def stop(self) -> None:
        """Accept no new work, park every run, and end every stream. Calling it again is harmless."""
        await asyncio.shield(self._start_stopping())

    def _log_link(self) -> None:
        log.warning(
            "to open the page once, add this to the server's address: /#link=%s", self.principals.new_link()
        )

    def _start_stopping(self) -> asyncio.Task[None]:
        if self._stop_task is None:
            self._stop_task = asyncio.get_running_loop().create_task(self._stop())
        return self._stop_task

    async def _stop(self) -> None:
        await self.threads.stop(self._grace)
        await asyncio.sleep(0.05)  # feeds wake their readers in batches: let the last batch through
        self.streams.close()

    @asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncGenerator[None]:
        await self.start()
        if self._logs_link and self.principals.has_links:
            self.principals.link_used = self._log_link
            self._log_link()
        with on_stop_signal(self._start_stopping):
            yield
        await self.stop()


asgi = ServedApp


@contextmanager
def on_stop_signal(stop: Callable[[], object]) -> Generator[None]:
    """Call `stop` in the event loop on SIGINT or SIGTERM, before the handler that was installed.

    A server tells its app to shut down only when all connections are closed, and a stream closes only when
    the app ends it: each would wait for the other. A signal without a handler still ends the process. Outside
    the main thread, where signals never arrive, this does nothing.
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
