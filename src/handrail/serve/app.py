"""`asgi`: the server as an ASGI app. What each address does is in `routes`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from handrail.records import Journal
from handrail.serve.extra import missing_extra
from handrail.serve.limits import Limits
from handrail.serve.metrics import Metrics
from handrail.serve.principals import Authenticate, Principals
from handrail.serve.source import Source
from handrail.serve.stopping import told_first
from handrail.serve.threads import Threads

if TYPE_CHECKING:
    from starlette.applications import Starlette


class ServedApp:
    """An ASGI app that serves `source`: AG-UI at `/agent`, the page at `/`. Called `asgi` outside.

    Runs are recorded in `journal`; those that a process before this one left are gone on with at the
    start, and at the end every run is parked. `hosts` and `origins` are names it answers to, and pages it
    takes requests from, beside its own.
    """

    def __init__(
        self,
        source: Source,
        *,
        journal: Journal,
        authenticate: Authenticate | None = None,
        token: str | None = None,
        renderers: Path | None = None,
        hosts: Iterable[str] = (),
        origins: Iterable[str] = (),
        limits: Limits | None = None,
        park_after: float = 300.0,
        grace: float = 5.0,
    ) -> None:
        try:
            from starlette.applications import Starlette
        except ImportError:
            raise missing_extra("starlette") from None
        from handrail.serve import refusals
        from handrail.serve.event_streams import Streams
        from handrail.serve.middleware import Guard
        from handrail.serve.pages import Pages
        from handrail.serve.routes import Routes

        self.limits = limits or Limits()
        self.metrics = Metrics()
        self.threads = Threads(source, journal, park_after=park_after, ended=self.metrics.leg_ended)
        self.streams = Streams(self.limits, self.metrics)
        self._grace = grace
        self._stopping: asyncio.Task[None] | None = None
        principals = Principals(journal.key, token=token, authenticate=authenticate, limits=self.limits)
        self.is_open = principals.open
        """May everybody come in who reaches it?"""
        routes = Routes(
            self.threads,
            principals=principals,
            streams=self.streams,
            metrics=self.metrics,
            limits=self.limits,
            pages=Pages(),
            renderers=renderers,
        )
        app = Starlette(
            routes=routes.list(),
            lifespan=self._lifespan,
            exception_handlers=refusals.handlers(self.metrics),
        )
        app.router.redirect_slashes = False
        self._guard = Guard(
            app,
            principals=principals,
            metrics=self.metrics,
            limits=self.limits,
            hosts=hosts,
            origins=origins,
            stopping=lambda: self.threads.stopping,
        )

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await self._guard(scope, receive, send)

    async def stop(self) -> None:
        """Begin nothing any more, leave every run to the journal, and end every stream. Once is enough."""
        await asyncio.shield(self._begin_to_stop())

    def _begin_to_stop(self) -> asyncio.Task[None]:
        if self._stopping is None:
            self._stopping = asyncio.get_running_loop().create_task(self._stop())
        return self._stopping

    async def _stop(self) -> None:
        await self.threads.stop(self._grace)
        await asyncio.sleep(0.05)  # readers are told in portions: the last one is on its way
        self.streams.close()

    @asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncGenerator[None]:
        await self.threads.start()
        with told_first(self._begin_to_stop):
            yield
        await self.stop()


asgi = ServedApp
