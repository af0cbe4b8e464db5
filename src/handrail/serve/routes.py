"""The addresses of the server. What those of threads do is in `conversations` and `history`."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import BaseRoute, Route

from handrail.errors import RequestRefused
from handrail.serve import requests
from handrail.serve.conversations import Conversations
from handrail.serve.event_streams import Streams
from handrail.serve.history import History
from handrail.serve.limits import Limits
from handrail.serve.metrics import Metrics
from handrail.serve.middleware import PRINCIPAL
from handrail.serve.pages import Pages
from handrail.serve.principals import Principals
from handrail.serve.threads import Threads

_POST, _DELETE = ["POST"], ["DELETE"]


class Routes:
    """The addresses, and what the ones do that are about the server itself."""

    def __init__(
        self,
        threads: Threads,
        *,
        principals: Principals,
        streams: Streams,
        metrics: Metrics,
        limits: Limits,
        pages: Pages,
        renderers: Path | None,
    ) -> None:
        self._threads = threads
        self._principals = principals
        self._streams = streams
        self._metrics = metrics
        self._pages = pages
        self._renderers = renderers
        self._conversations = Conversations(threads, streams, metrics, limits)
        self._history = History(threads)

    def list(self) -> Sequence[BaseRoute]:
        talk, past = self._conversations, self._history
        return [
            Route("/", self.page),
            Route("/assets/{name:path}", self.asset),
            Route("/app/renderers.js", self.renderers),
            Route("/about", self.about),
            Route("/login", self.sign_in, methods=_POST),
            Route("/health", self.health),
            Route("/metrics", self.metrics),
            Route("/agent", talk.agent, methods=_POST),
            Route("/threads", talk.threads),
            Route("/threads/{id}", talk.thread),
            Route("/threads/{id}", talk.forget, methods=_DELETE),
            Route("/threads/{id}/events", talk.events),
            Route("/threads/{id}/messages", talk.say, methods=_POST),
            Route("/threads/{id}/answers", talk.answer, methods=_POST),
            Route("/threads/{id}/cancel", talk.cancel, methods=_POST),
            Route("/threads/{id}/runs/{run_id}", past.run),
            Route("/threads/{id}/files", past.files),
            Route("/threads/{id}/calls/{call_id:path}/undo", past.undo, methods=_POST),
            Route("/threads/{id}/approvals", past.approvals),
            Route("/threads/{id}/approvals/{approval_id:path}", past.revoke, methods=_DELETE),
            Route("/runs", past.runs),
        ]

    # The page.

    async def page(self, request: Request) -> Response:
        return self._pages.page(request)

    async def asset(self, request: Request) -> Response:
        return self._pages.asset(request, request.path_params["name"])

    async def renderers(self, request: Request) -> Response:
        if self._renderers is None:
            raise RequestRefused(404, "NotFound", "this app has no renderers of its own")
        return self._pages.file(request, self._renderers)

    # The server.

    async def about(self, request: Request) -> Response:
        source = self._threads.source
        return JSONResponse(
            {
                "name": source.name,
                "description": source.description,
                "model": source.model,
                "files": source.files is not None,
                "principal": request.scope[PRINCIPAL],
                "version": version("handrail"),
                "renderers": "/app/renderers.js" if self._renderers is not None else None,
                "threads": True,
            }
        )

    async def sign_in(self, request: Request) -> Response:
        """A cookie for the token: scripts of the page can't read it, and other sites' pages can't send it."""
        given = requests.read(await request.body(), requests.SignIn)
        self._principals.check(request, given.token)
        name, value, seconds = self._principals.cookie(request)
        told = JSONResponse({})
        told.set_cookie(
            name,
            value,
            max_age=seconds,
            httponly=True,
            samesite="strict",
            secure=request.url.scheme == "https",
        )
        return told

    async def health(self, request: Request) -> Response:
        """Whether it serves; how much, only to who may come in."""
        stopping = self._threads.stopping
        told: dict[str, Any] = {"status": "stopping" if stopping else "ok"}
        try:
            await self._principals.of(request)
        except RequestRefused:
            pass
        else:
            told |= {**self._standing(), "version": version("handrail")}
        return JSONResponse(told, 503 if stopping else 200)

    async def metrics(self, request: Request) -> Response:
        standing = self._standing()
        gauges = {
            "handrail_runs": ("Runs at work here.", standing["runs"]),
            "handrail_runs_waiting": ("Runs here that wait for an answer.", standing["waiting"]),
            "handrail_threads": ("Threads with a run in memory.", standing["threads"]),
            "handrail_viewers": ("Streams that are open.", self._streams.count),
        }
        return PlainTextResponse(
            self._metrics.text(gauges), media_type="text/plain; version=0.0.4; charset=utf-8"
        )

    def _standing(self) -> dict[str, int]:
        running = [thread.live for thread in self._threads.running() if thread.live is not None]
        at_work = sum(1 for live in running if live.leg)
        return {"runs": at_work, "waiting": len(running) - at_work, "threads": len(running)}
