"""What each address of the server does."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from handrail import runs
from handrail.errors import (
    AnswerRefused,
    HandrailError,
    QuestionsOpen,
    RunBusy,
    RunUnknown,
    ThreadBusy,
    ThreadUnknown,
    UndoRefused,
)
from handrail.guard import approvals_of
from handrail.serve import seen
from handrail.serve.feed import Event
from handrail.serve.streams import lines
from handrail.serve.thread import Thread, answer_to
from handrail.serve.threads import Threads

PAGE = Path(__file__).parent / "page"
_ID = re.compile(r"[A-Za-z0-9._:~-]{1,128}")

STATUSES: Mapping[type[HandrailError], int] = {
    ThreadUnknown: 404,
    RunUnknown: 404,
    ThreadBusy: 409,
    QuestionsOpen: 409,
    RunBusy: 409,
    UndoRefused: 409,
    AnswerRefused: 409,
}


class Refused(HTTPException):
    """A request that can't be served, and why."""

    def __init__(self, status: int, kind: str, message: str) -> None:
        super().__init__(status, message)
        self.kind = kind


class Routes:
    """The addresses, each with what it does."""

    def __init__(
        self,
        threads: Threads,
        *,
        authenticate: Callable[[Request], Any] | None,
        token: str | None,
        renderers: Path | None,
    ) -> None:
        self._threads = threads
        self._journal = threads.journal
        self._authenticate = authenticate
        self._token = token
        self._renderers = renderers

    def list(self) -> Sequence[Any]:
        return [
            Route("/", self.page),
            Route("/about", self.about),
            Route("/health", self.health),
            Route("/agent", self.agent, methods=["POST"]),
            Route("/threads", self.threads),
            Route("/threads/{id}", self.thread),
            Route("/threads/{id}", self.forget, methods=["DELETE"]),
            Route("/threads/{id}/events", self.events),
            Route("/threads/{id}/messages", self.say, methods=["POST"]),
            Route("/threads/{id}/answers", self.answer, methods=["POST"]),
            Route("/threads/{id}/cancel", self.cancel, methods=["POST"]),
            Route("/threads/{id}/runs/{run_id}", self.run),
            Route("/threads/{id}/files", self.files),
            Route("/threads/{id}/calls/{call_id}/undo", self.undo, methods=["POST"]),
            Route("/threads/{id}/approvals", self.approvals),
            Route("/threads/{id}/approvals/{approval_id}", self.revoke, methods=["DELETE"]),
            Route("/runs", self.runs),
            Route("/app/renderers.js", self.renderers),
            Mount("/assets", StaticFiles(directory=PAGE, check_dir=False)),
        ]

    def errors(self) -> dict[Any, Any]:
        return {HTTPException: _refused, HandrailError: _ours}

    # The page.

    async def page(self, request: Request) -> Response:
        return FileResponse(PAGE / "index.html")

    async def renderers(self, request: Request) -> Response:
        if self._renderers is None:
            raise Refused(404, "NotFound", "this app has no renderers of its own")
        return FileResponse(self._renderers, media_type="text/javascript")

    async def about(self, request: Request) -> Response:
        principal = await self._who(request)
        source = self._threads.source
        return JSONResponse(
            {
                "name": source.name,
                "description": source.description,
                "model": source.model,
                "files": source.files is not None,
                "principal": principal,
                "version": version("handrail"),
                "renderers": "/app/renderers.js" if self._renderers is not None else None,
                "threads": True,
            }
        )

    async def health(self, request: Request) -> Response:
        stopping = self._threads.stopping
        return JSONResponse({"status": "stopping" if stopping else "ok"}, 503 if stopping else 200)

    # AG-UI.

    async def agent(self, request: Request) -> Response:
        """One leg of a run, as AG-UI asks for it. Placeholder of the skeleton: plain messages and resume."""
        principal = await self._who(request)
        body = await _json(request)
        thread = self._threads.thread(principal, _id(body.get("threadId")))
        leg = _id(body.get("runId"))
        number = thread.feed.last
        resume: list[Any] = body.get("resume") or []
        if resume:
            waits = {f"{each.id}#{each.digest[:16]}": each for each in await thread.questions()}
            given = [
                answer_to(
                    waits[each["interruptId"]],
                    principal,
                    "answered" if each["status"] == "resolved" else "cancelled",
                    each.get("payload"),
                )
                for each in resume
            ]
            await thread.answer(given, leg=leg)
        else:
            await thread.say(body["messages"][-1]["content"], leg=leg)
        return _sse(lines(thread.feed, number, leg=leg, nested="protocolVersion" in body))

    # Threads.

    async def threads(self, request: Request) -> Response:
        principal = await self._who(request)
        limit = min(int(request.query_params.get("limit", "50")), 200)
        rows = await self._journal.sessions(principal, limit=limit)
        found: list[dict[str, Any]] = []
        for row in rows:
            owner, slash, id = row.session_id.partition("/")
            if slash and owner == principal:
                thread = self._threads.thread(principal, id)
                found.append(
                    {
                        "id": id,
                        "title": seen.title([row.first]),
                        "status": seen.status([row.newest], thread),
                        "began_at": seen.iso(row.first.record.began_at),
                        "updated_at": seen.iso(row.changed_at),
                        "questions": row.questions,
                        "runs": row.runs,
                    }
                )
        return JSONResponse({"threads": found})

    async def thread(self, request: Request) -> Response:
        thread = await self._thread(request)
        return JSONResponse(await seen.thread(self._journal, thread))

    async def events(self, request: Request) -> Response:
        thread = await self._thread(request)
        query = request.query_params
        after = request.headers.get("last-event-id") or query.get("after", "")
        number = thread.feed.number_of(after)
        before: list[Event] = []
        leg = thread.live.leg if thread.live is not None else ""
        if number is None:
            await thread.check_known()
            said = seen.messages(await thread.messages())
            waits = await thread.questions()
            number = thread.feed.last  # nothing happens between this and what is told of the run
            before = _caught_up(thread, said, leg, waits)
        if "follow" in query:
            return _sse(lines(thread.feed, number, before=before, nested=query.get("v") != "0"))
        if not leg and number >= thread.feed.last:
            return _sse(_only(before))
        return _sse(lines(thread.feed, number, before=before, leg=leg, nested=query.get("v") != "0"))

    async def say(self, request: Request) -> Response:
        thread = await self._thread(request)
        body = await _json(request)
        text = body.get("text")
        if not isinstance(text, str) or not text.strip():
            raise Refused(422, "MessageEmpty", "say something: {text: '...'}")
        return JSONResponse({"run_id": await thread.say(text)}, 202)

    async def answer(self, request: Request) -> Response:
        thread = await self._thread(request)
        body = await _json(request)
        asked = next((each for each in await thread.questions() if each.id == body.get("question_id")), None)
        if asked is None or asked.digest != body.get("digest"):
            raise AnswerRefused(
                str(body.get("question_id")), "no such question is open here", "Look at the thread again."
            )
        await thread.answer(
            [
                answer_to(
                    asked,
                    thread.principal,
                    body.get("outcome"),
                    body.get("value"),
                    str(body.get("reason") or ""),
                )
            ]
        )
        return JSONResponse({})

    async def cancel(self, request: Request) -> Response:
        thread = await self._thread(request)
        await thread.cancel()
        return JSONResponse({}, 202)

    async def run(self, request: Request) -> Response:
        thread = await self._thread(request)
        found = await runs.show(self._journal, request.path_params["run_id"])
        if found.row.record.session_id != thread.session_id:
            raise RunUnknown(request.path_params["run_id"])
        return JSONResponse(seen.tree(found))

    async def files(self, request: Request) -> Response:
        thread = await self._thread(request)
        changes: list[dict[str, Any]] = []
        for row in await self._journal.runs(session_id=thread.session_id):
            for call in (await runs.show(self._journal, row.record.id)).calls:
                paths = [place[5:] for place in call.writes if place.startswith("file ")]
                if paths and call.status == "ok":
                    changes.append(
                        {
                            "run_id": row.record.id,
                            "call_id": call.id,
                            "tool": call.tool,
                            "at": None if call.at is None else seen.iso(call.at),
                            "paths": paths,
                            "diff": call.diff,
                            "undone": call.undone,
                            "undoable": bool(call.id) and not call.undone,
                        }
                    )
        return JSONResponse({"changes": changes})

    async def undo(self, request: Request) -> Response:
        thread = await self._thread(request)
        call_id = request.path_params["call_id"]
        for row in await self._journal.runs(session_id=thread.session_id):
            if any(unit.call_id == call_id for unit in await self._journal.load(row.record.id)):
                done = await runs.undo(
                    self._journal,
                    row.record.id,
                    call_id,
                    self._threads.source.files,
                    session=await thread.session(),
                )
                told = {"call_id": call_id, "paths": list(done.paths)}
                thread.feed.append([Event({"type": "CUSTOM", "name": "handrail.undone", "value": told})])
                return JSONResponse(
                    {
                        "tool": done.tool,
                        "paths": list(done.paths),
                        "slices": list(done.slices),
                        "stands": list(done.stands),
                    }
                )
        raise UndoRefused(call_id, (), "this thread has no such call")

    async def approvals(self, request: Request) -> Response:
        thread = await self._thread(request)
        kept = approvals_of(await thread.session()).list()
        return JSONResponse(
            {
                "approvals": [
                    {
                        "id": each.id,
                        "tool": each.tool,
                        "covers": each.covers,
                        "scope": each.scope,
                        "approved": each.approved,
                        "reason": each.reason,
                        "by": each.by,
                        "at": each.at.isoformat(),
                    }
                    for each in kept
                ]
            }
        )

    async def revoke(self, request: Request) -> Response:
        thread = await self._thread(request)
        approvals_of(await thread.session()).revoke(request.path_params["approval_id"])
        return JSONResponse({})

    async def forget(self, request: Request) -> Response:
        thread = await self._thread(request)
        await thread.check_known()
        if thread.live is not None:
            raise ThreadBusy(thread.id)
        rows = await self._journal.runs(session_id=thread.session_id)
        await self._journal.forget([row.record.id for row in rows])
        return JSONResponse({})

    async def runs(self, request: Request) -> Response:
        principal = await self._who(request)
        limit = min(int(request.query_params.get("limit", "50")), 200)
        found = await self._journal.runs(principal=principal, limit=limit)
        return JSONResponse(
            {
                "runs": [
                    {
                        **seen.run_line(row, await runs.show(self._journal, row.record.id)),
                        "thread_id": row.record.session_id.partition("/")[2],
                    }
                    for row in found
                ]
            }
        )

    # Who, and which.

    async def _who(self, request: Request) -> str:
        if self._authenticate is not None:
            found = self._authenticate(request)
            found = await found if inspect.isawaitable(found) else found
            if not found:
                raise Refused(401, "NotSignedIn", "sign in first")
            return str(found)
        return "local"

    async def _thread(self, request: Request) -> Thread:
        return self._threads.thread(await self._who(request), _id(request.path_params["id"]))


def _id(given: Any) -> str:
    if not isinstance(given, str) or not _ID.fullmatch(given):
        raise Refused(422, "BadId", "an id has 1 to 128 letters, digits and . _ : ~ -")
    return given


async def _json(request: Request) -> dict[str, Any]:
    try:
        body: Any = json.loads(await request.body())
    except ValueError:
        raise Refused(400, "BadJson", "the body is no JSON") from None
    if not isinstance(body, dict):
        raise Refused(422, "BadJson", "the body is no JSON object")
    return body  # pyright: ignore[reportUnknownVariableType]  # plain JSON


def _caught_up(thread: Thread, said: Any, leg: str, waits: Any) -> list[Event]:
    from handrail.serve.agui.translate import Translator

    shown = Translator(thread.id, thread.live.run_id if thread.live is not None else "")
    before = shown.begin_leg(leg or "snapshot")
    before.append(Event({"type": "MESSAGES_SNAPSHOT", "messages": said}))
    state = thread.state()
    if state is not None:
        before.append(Event({"type": "STATE_SNAPSHOT", "snapshot": state}))
    if leg and thread.live is not None:
        return [*before, *thread.live.open()]
    return [*before, *(shown.interrupt(waits) if waits else shown.finish())]


async def _only(events: Sequence[Event]) -> Any:
    from handrail.serve.streams import encoded

    for event in events:
        yield encoded(json.dumps(event.data).encode())


def _sse(content: Any) -> Response:
    return StreamingResponse(
        content,
        media_type="text/event-stream",
        headers={"cache-control": "no-store", "x-accel-buffering": "no"},
    )


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    kind = error.kind if isinstance(error, Refused) else "NotFound" if error.status_code == 404 else "Refused"
    return JSONResponse({"error": {"kind": kind, "message": error.detail}}, error.status_code)


async def _ours(request: Request, error: Exception) -> Response:
    status = next((code for kind, code in STATUSES.items() if isinstance(error, kind)), 400)
    return JSONResponse({"error": {"kind": type(error).__name__, "message": str(error)}}, status)
