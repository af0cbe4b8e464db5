"""`StatusServer`: a worker's metrics and health over HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncGenerator, Callable

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from handrail.fleet.runner import Runner
from handrail.journal.readiness import Readiness
from handrail.serve.limits import Limits
from handrail.serve.metrics import CONTENT_TYPE, Metrics
from handrail.serve.server import server_for


class StatusServer:
    """Serves the `/metrics`, `/health` and `/readyz` of a worker, without credentials: it tells numbers only.

    It runs on the worker's event loop, so a loop that is blocked does not answer. `/health` has the status 503 while the worker drains,
    and `/readyz` also while its journal does not answer.
    """

    def __init__(self, runner: Runner, metrics: Metrics, is_draining: Callable[[], bool]) -> None:
        self.limits = Limits()
        self.metrics = metrics
        self._runner = runner
        self._is_draining = is_draining
        self._readiness = Readiness(runner.journal, is_draining)
        routes = {"/metrics": self._metrics, "/health": self._health, "/readyz": self._readyz}
        self._app = Starlette(routes=[Route(path, answer) for path, answer in routes.items()])
        metrics.observe("handrail.runs", "Active runs.", lambda: len(runner.running))
        metrics.observe("handrail.runs_limit", "Maximum number of active runs.", lambda: runner.limit)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send)

    @contextlib.asynccontextmanager
    async def listen(self, listening: socket.socket) -> AsyncGenerator[None]:
        """Answer requests, and observe the runs of this process, until the end of the block."""
        server = server_for(self)
        serving = asyncio.ensure_future(server.serve([listening]))
        stop = self.metrics.observe_runs()
        try:
            yield
        finally:
            stop()
            server.should_exit = True
            await serving

    async def _metrics(self, request: Request) -> Response:
        return PlainTextResponse(self.metrics.text(), media_type=CONTENT_TYPE)

    async def _health(self, request: Request) -> Response:
        draining, runner = self._is_draining(), self._runner
        health = {
            "status": "draining" if draining else "ok",
            "runs": len(runner.running),
            "limit": runner.limit,
        }
        return JSONResponse(health, 503 if draining else 200)

    async def _readyz(self, request: Request) -> Response:
        state = await self._readiness.state()
        return JSONResponse({"status": state}, 200 if state == "ready" else 503)
