"""`Routes`: the server's URLs and their handlers. `Pages`: the files of the page."""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from starlette.routing import BaseRoute, Route

from handrail import runs
from handrail.errors import RunUnknown
from handrail.question import Answer
from handrail.runs.catalog import approval_json
from handrail.serve import requests, snapshots
from handrail.serve.agui.inputs import parse_input, submit
from handrail.serve.feed import Event, EventStream, Streams, follow, send_all
from handrail.serve.limits import Limits, Quota
from handrail.serve.metrics import RUNS_STARTED, PrometheusMetrics
from handrail.serve.middleware import PRINCIPAL
from handrail.serve.principals import Principals
from handrail.serve.refusals import RequestRefused
from handrail.serve.thread import Thread
from handrail.serve.threads import ThreadList, Threads

_POST, _DELETE = ["POST"], ["DELETE"]


class Routes:
    """The endpoints of a server."""

    def __init__(
        self,
        threads: Threads,
        *,
        principals: Principals,
        streams: Streams,
        metrics: PrometheusMetrics,
        limits: Limits,
        renderers: Path | None,
    ) -> None:
        self._threads = threads
        self._journal = threads.journal
        self._principals = principals
        self._streams = streams
        self._metrics = metrics
        self._limits = limits
        self._pages = Pages()
        self._renderers = renderers
        self._thread_list = ThreadList(threads)
        self._starting = Quota(
            limits.runs_per_principal,
            "TooManyRuns",
            "as many runs are active as allowed. Wait for one to end, or cancel it.",
            limits.runs,
        )

    def list(self) -> Sequence[BaseRoute]:
        return [
            Route("/", self.page),
            Route("/assets/{name:path}", self.asset),
            Route("/app/renderers.js", self.renderers),
            Route("/about", self.about),
            Route("/login", self.sign_in, methods=_POST),
            Route("/health", self.health),
            Route("/metrics", self.metrics),
            Route("/agent", self.agent, methods=_POST),
            Route("/threads", self.threads),
            Route("/threads/{id}", self.thread),
            Route("/threads/{id}", self.delete_thread, methods=_DELETE),
            Route("/threads/{id}/events", self.events),
            Route("/threads/{id}/messages", self.send_message, methods=_POST),
            Route("/threads/{id}/answers", self.answer, methods=_POST),
            Route("/threads/{id}/cancel", self.cancel, methods=_POST),
            Route("/threads/{id}/runs/{run_id}", self.run),
            Route("/threads/{id}/files", self.files),
            Route("/threads/{id}/calls/{call_id:path}/undo", self.undo, methods=_POST),
            Route("/threads/{id}/approvals", self.approvals),
            Route("/threads/{id}/approvals/{approval_id:path}", self.revoke, methods=_DELETE),
            Route("/runs", self.runs),
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
        """Exchange the token for a cookie that scripts can't read and other sites' pages can't send."""
        body = requests.parse(await request.body(), requests.LoginBody)
        self._principals.check_token(request, body.token)
        name, value, seconds = self._principals.new_cookie(request)
        response = JSONResponse({})
        response.set_cookie(
            name,
            value,
            max_age=seconds,
            httponly=True,
            samesite="strict",
            secure=request.url.scheme == "https",
        )
        return response

    async def health(self, request: Request) -> Response:
        """Report whether the server is up. Only authenticated clients get the numbers."""
        stopping = self._threads.stopping
        health: dict[str, Any] = {"status": "stopping" if stopping else "ok"}
        try:
            await self._principals.of(request)
        except RequestRefused:
            pass
        else:
            health |= {**self._run_counts(), "version": version("handrail")}
        return JSONResponse(health, 503 if stopping else 200)

    async def metrics(self, request: Request) -> Response:
        counts = self._run_counts()
        gauges = {
            "handrail_runs": ("Active runs.", counts["runs"]),
            "handrail_runs_waiting": ("Runs in memory that wait for an answer.", counts["waiting"]),
            "handrail_threads": ("Threads with a run in memory.", counts["threads"]),
            "handrail_viewers": ("Open streams.", self._streams.count),
        }
        return PlainTextResponse(
            self._metrics.text(gauges), media_type="text/plain; version=0.0.4; charset=utf-8"
        )

    def _run_counts(self) -> dict[str, int]:
        running = [thread.live for thread in self._threads.running() if thread.live is not None]
        active = sum(1 for live in running if live.leg)
        return {"runs": active, "waiting": len(running) - active, "threads": len(running)}

    # AG-UI.

    async def agent(self, request: Request) -> Any:
        """Respond to an AG-UI request with one leg of a run."""
        input = parse_input(requests.parse_json(await request.body()))
        thread = self._threads.thread(request.scope[PRINCIPAL], input.thread_id)
        nested = input.sees_nested

        async def chunks() -> AsyncGenerator[bytes]:
            number = thread.feed.last
            row = await thread.newest()
            recorded = () if row is None else await self._journal.questions.history(row.record.id)
            submitted = await submit(thread, input, recorded, partial(self._start_run, thread))
            if submitted.refused:
                return send_all(submitted.refused, nested=nested)
            if submitted.leg == input.run_id:
                # A run started in another window may have ended since.
                number = thread.feed.before_leg(submitted.leg, number)
                return follow(thread.feed, number, leg=submitted.leg, nested=nested)
            # The input was answered before: send the current state, and what follows if the run is active.
            before, number, leg = await snapshots.joining_events(self._journal, thread)
            if leg:
                return follow(thread.feed, number, before=before, leg=leg, nested=nested)
            return send_all(before, nested=nested)

        return await self._stream(request, chunks)

    async def events(self, request: Request) -> Any:
        """Stream a thread's events after a position, or after a snapshot if it is no longer kept."""
        thread = self._thread(request)
        query = request.query_params
        nested = query.get("v") != "0"

        async def chunks() -> AsyncGenerator[bytes]:
            number = thread.feed.number_of(request.headers.get("last-event-id") or query.get("after", ""))
            before: list[Event] = []
            leg = thread.live.leg if thread.live is not None else ""
            if number is None:
                await thread.check_known()
                before, number, leg = await snapshots.joining_events(self._journal, thread)
            if query.get("follow", "") not in ("", "0"):
                return follow(thread.feed, number, before=before, nested=nested)
            if leg:
                return follow(thread.feed, number, before=before, leg=leg, nested=nested)
            return follow(thread.feed, number, before=before, until=thread.feed.last, nested=nested)

        return await self._stream(request, chunks)

    async def _stream(
        self, request: Request, chunks: Callable[[], Awaitable[AsyncGenerator[bytes]]]
    ) -> EventStream:
        slot = self._streams.take(request.scope[PRINCIPAL])
        try:
            return EventStream(self._streams, slot, await chunks())
        except BaseException:
            slot.give_back()
            raise

    # Threads.

    async def threads(self, request: Request) -> Response:
        found, next = await self._thread_list.page(
            request.scope[PRINCIPAL],
            limit=requests.limit_of(request),
            before=requests.before_of(request),
            words=requests.search_of(request),
        )
        mark = None if next is None else requests.format_mark(request, next)
        return JSONResponse({"threads": found, "next": mark})

    async def thread(self, request: Request) -> Response:
        return JSONResponse(await snapshots.thread_snapshot(self._journal, self._thread(request)))

    async def delete_thread(self, request: Request) -> Response:
        await self._thread(request).forget()
        return JSONResponse({})

    async def send_message(self, request: Request) -> Response:
        thread = self._thread(request)
        body = requests.parse(await request.body(), requests.MessageBody)
        return JSONResponse({"run_id": await self._start_run(thread, body.text)}, 202)

    async def answer(self, request: Request) -> Response:
        thread = self._thread(request)
        body = requests.parse(await request.body(), requests.AnswerBody)
        answer = Answer(
            question_id=body.question_id,
            digest=body.digest,
            by=thread.principal,
            outcome=body.outcome,
            value=body.value,
            reason=body.reason[: self._limits.message_chars],
        )
        await thread.answer([answer])
        return JSONResponse({})

    async def cancel(self, request: Request) -> Response:
        thread = self._thread(request)
        requests.parse(await request.body(), requests.EmptyBody)
        await thread.check_known()
        await thread.cancel()
        return JSONResponse({}, 202)

    def _thread(self, request: Request) -> Thread:
        """Return the thread in the URL.

        It always belongs to the request's principal, who can't name another's thread.
        """
        return self._threads.thread(request.scope[PRINCIPAL], requests.check_id(request.path_params["id"]))

    async def _start_run(self, thread: Thread, text: str, **options: Any) -> str:
        most = self._limits.message_chars
        if len(text) > most:
            raise RequestRefused(
                413, "MessageTooLong", f"a message has at most {most} characters. Send a shorter one."
            )
        if not text.strip():
            raise RequestRefused(
                422, "MessageEmpty", "the message is empty. Write something.", fields=[("/text", "some text")]
            )
        with self._run_slot(thread.principal):
            # Shielded, so that the run is recorded completely even if the client disconnects.
            run_id = await asyncio.shield(thread.say(text, **options))
        self._metrics.add(RUNS_STARTED)
        return run_id

    @contextmanager
    def _run_slot(self, principal: str) -> Generator[None]:
        active = [each for each in self._threads.running() if each.live is not None and each.live.leg]
        mine = sum(1 for each in active if each.principal == principal)
        self._starting.take(principal, beside=mine, beside_total=len(active))
        try:
            yield
        finally:
            self._starting.give_back(principal)

    # History.

    async def run(self, request: Request) -> Response:
        thread = self._thread(request)
        found = await runs.show(self._journal, request.path_params["run_id"])
        if found.row.record.session_id != thread.session_id:
            raise RunUnknown(request.path_params["run_id"])
        return JSONResponse(snapshots.run_tree(found))

    async def runs(self, request: Request) -> Response:
        found = await self._journal.runs.list(
            principal=request.scope[PRINCIPAL], limit=requests.limit_of(request)
        )
        lines: list[dict[str, Any]] = []
        for row in found:
            line = snapshots.run_line(row, await runs.show(self._journal, row.record.id))
            lines.append({**line, "thread_id": row.record.session_id.rpartition("/")[2]})
        return JSONResponse({"runs": lines})

    async def files(self, request: Request) -> Response:
        thread = self._thread(request)
        return JSONResponse({"changes": await snapshots.file_changes(self._journal, thread)})

    async def undo(self, request: Request) -> Response:
        thread = self._thread(request)
        requests.parse(await request.body(), requests.EmptyBody)
        undone = await thread.undo(request.path_params["call_id"])
        return JSONResponse(
            {
                "tool": undone.tool,
                "paths": list(undone.paths),
                "slices": list(undone.slices),
                "stands": list(undone.stands),
            }
        )

    async def approvals(self, request: Request) -> Response:
        kept = await self._thread(request).approvals()
        return JSONResponse({"approvals": [approval_json(each) for each in kept]})

    async def revoke(self, request: Request) -> Response:
        await self._thread(request).revoke(request.path_params["approval_id"])
        return JSONResponse({})


PAGE = Path(__file__).parent / "page"
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".mjs": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".json": "application/json",
    ".map": "application/json",
    ".svg": "image/svg+xml",
    ".png": "image/png",
    ".ico": "image/x-icon",
    ".woff2": "font/woff2",
    ".txt": "text/plain; charset=utf-8",
}
_PART = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*")
_NOT_BUILT = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>Handrail</title>
<h1>The page is not built</h1>
<p>This installation comes from a source checkout that lacks the page's libraries. Run <code>scripts/page</code> in the
checkout (it needs npm), reinstall if you had installed it, then reload this page.</p>
<p>The server itself works: AG-UI clients can use <code>/agent</code>.</p>
</html>
"""


class Pages:
    """Serves the files of one folder, and nothing outside it."""

    def __init__(self, folder: Path = PAGE) -> None:
        self._folder = folder.resolve()
        self._cache: dict[Path, tuple[tuple[int, int], str, bytes]] = {}

    def page(self, request: Request) -> Response:
        """Return the page, or a 503 with instructions if its libraries are missing."""
        vendor = self._folder / "vendor"
        if not vendor.is_dir() or not any(vendor.iterdir()):
            return HTMLResponse(_NOT_BUILT, 503)
        return self.file(request, self._folder / "index.html")

    def asset(self, request: Request, name: str) -> Response:
        """Return a file of the page."""
        parts = name.split("/")
        if not all(_PART.fullmatch(part) for part in parts):
            raise _missing()
        path = self._folder.joinpath(*parts)
        if not path.resolve().is_relative_to(self._folder):
            raise _missing()
        return self.file(request, path)

    def file(self, request: Request, path: Path) -> Response:
        """Return a file with its type and an ETag, or 304 if the client has it already."""
        kind = _TYPES.get(path.suffix)
        try:
            stat = path.stat()
            if kind is None or not path.is_file():
                raise _missing()
            stamp = (stat.st_mtime_ns, stat.st_size)
            cached = self._cache.get(path)
            if cached is None or cached[0] != stamp:
                data = path.read_bytes()
                cached = self._cache[path] = (stamp, f'"{hashlib.sha256(data).hexdigest()[:32]}"', data)
        except OSError:
            raise _missing() from None
        _, tag, data = cached
        headers = {"etag": tag, "cache-control": "no-cache"}
        if tag in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=headers)
        return Response(data, headers=headers, media_type=kind)


def _missing() -> RequestRefused:
    return RequestRefused(404, "NotFound", "there is no such file")
