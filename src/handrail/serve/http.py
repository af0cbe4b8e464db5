"""`asgi`: the server as an ASGI app. What each address does is in `routes`."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from handrail.records import Journal
from handrail.serve.source import Source
from handrail.serve.threads import Threads

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request

Authenticate = Callable[["Request"], "str | None | Awaitable[str | None]"]
"""Who a request is by: a principal, or None where it may not come in."""


def asgi(
    source: Source,
    *,
    journal: Journal,
    authenticate: Authenticate | None = None,
    token: str | None = None,
    renderers: Path | None = None,
    park_after: float = 300.0,
    grace: float = 5.0,
) -> Starlette:
    """An ASGI app that serves `source`: AG-UI at `/agent`, the page at `/`.

    Runs are recorded in `journal`; those that a process before this one left are gone on with at the
    start, and at the end every run is parked.
    """
    from starlette.applications import Starlette

    from handrail.serve.routes import Routes

    threads = Threads(source, journal, park_after=park_after)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncGenerator[None]:
        await threads.start()
        yield
        await threads.stop(grace)

    made = Routes(threads, authenticate=authenticate, token=token, renderers=renderers)
    app = Starlette(routes=made.list(), lifespan=lifespan, exception_handlers=made.errors())
    app.state.threads = threads
    return app


def serve(app: Any, host: str, port: int) -> None:
    """Run an app until it is told to stop."""
    import uvicorn

    uvicorn.run(app, host=host, port=port, log_level="warning", timeout_graceful_shutdown=5)
