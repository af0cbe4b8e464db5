"""`AnswerPage`: an MCP server's page on which people answer questions that ask for secrets.

The client sends the person to the page's address. A secret then goes from the browser to the server, and neither the
client nor its model sees it. The page asks for the client's token, so that only the principal who made a call can answer
its questions. Otherwise somebody could send the address of their own question to a different person, and their call would
get that person's secret.
"""

from __future__ import annotations

from typing import Any
from urllib.parse import urlencode

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from handrail.errors import RunBusy
from handrail.journal.local import check_answer
from handrail.mcp.calls import CallRefused, Calls, CallUnknown, LiveCall
from handrail.question import Answer, Question
from handrail.serve.agui.wire_events import plain_json
from handrail.serve.pages import Pages
from handrail.serve.refusals import RequestRefused
from handrail.serve.requests import PRINCIPAL, BodyLimit, BodyRoute, read

QUESTION_PATH = "/question"
"""The path at which the page's script reads and answers a question."""


class PageAnswer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of a request that answers a question, or declines to."""

    call: str
    question: str
    digest: str
    value: Any = None
    decline: bool = False


class AnswerPage:
    """Serves the page, and the requests of its script, for the calls of one server. An answer may be as large as `body` says."""

    def __init__(self, calls: Calls, body: BodyLimit) -> None:
        self._calls = calls
        self._body = body
        self._pages = Pages()

    def routes(self) -> list[Route]:
        """Return the routes of the page. The page itself contains no secrets, and needs no token."""
        return [
            Route("/", self._page),
            Route("/assets/{name:path}", self._asset),
            Route(QUESTION_PATH, self._show, methods=["GET"]),
            BodyRoute(QUESTION_PATH, self._answer, methods=["POST"], body=self._body),
        ]

    @staticmethod
    def address(request: Any, call_id: str, question: Question) -> str:
        """Return the address at which a question is answered, on the host at which the client reached the server."""
        named = urlencode({"call": call_id, "question": question.id})
        return f"{request.request.base_url}#{named}"

    async def _page(self, request: Request) -> Response:
        return self._pages.page(request, "answer.html")

    async def _asset(self, request: Request) -> Response:
        return self._pages.asset(request, request.path_params["name"])

    async def _show(self, request: Request) -> Response:
        tool, question = await self._find(
            request, request.query_params.get("call", ""), request.query_params.get("question", "")
        )
        shown = {
            "tool": tool,
            "principal": request.scope[PRINCIPAL],
            "title": question.title,
            "message": question.message,
            "rows": msgspec.to_builtins(question.rows),
            "schema": plain_json(msgspec.to_builtins(question.schema)),
            "digest": question.digest,
        }
        return JSONResponse(shown, headers={"cache-control": "no-store"})

    async def _answer(self, request: Request) -> Response:
        body = await read(request, PageAnswer)
        await self._find(request, body.call, body.question)
        call, question = await self._asking(request, body.call, body.question)
        answer = Answer(
            question_id=question.id,
            digest=body.digest,
            by=call.principal,
            outcome="declined" if body.decline else "answered",
            value=None if body.decline else body.value,
            reason="declined on the page" if body.decline else "",
        )
        check_answer(question, answer)
        call.give(answer)
        return JSONResponse({"outcome": answer.outcome})

    async def _find(self, request: Request, call_id: str, question_id: str) -> tuple[str, Question]:
        """Return the tool that the principal who sent the request has called, and its open question that asks for a secret.

        This does not wait for the call, whatever it is doing, and does not resume it. Raises `RequestRefused` if there is
        no such question.
        """
        principal, journal = request.scope[PRINCIPAL], self._calls.journal
        try:
            if journal is None:
                call = self._calls.find(call_id, principal)
                name, asked = ("", []) if call is None else (call.name, list(call.questions.values()))
            else:
                _, message = await self._calls.row(call_id, principal)
                name, asked = message.tool, await journal.questions.open(call_id)
        except CallUnknown:
            raise _unknown() from None
        for question in asked:
            if question.id == question_id and question.secret:
                return name, question
        raise _unknown()

    async def _asking(self, request: Request, call_id: str, question_id: str) -> tuple[LiveCall, Question]:
        """Return the live call that asks an open question, and the question. A recorded call that no process executes is resumed.

        Raises `RequestRefused` if the call ends without asking it, if a different process executes the call, or if the
        server is stopping.
        """
        principal = request.scope[PRINCIPAL]
        try:
            call = await self._calls.resume(call_id, principal=principal, asks=True, opens=True)
        except CallUnknown:
            call = self._calls.find(call_id, principal)
        except CallRefused as error:
            raise RequestRefused(503, "Stopping", str(error), retry_after=5.0) from None
        except RunBusy:
            raise RequestRefused(
                409, "RunBusy", "a different server process is executing this call. Try again soon."
            ) from None
        question = await call.asking(question_id) if isinstance(call, LiveCall) else None
        if isinstance(call, LiveCall) and question is not None:
            return call, question
        raise _unknown()


def _unknown() -> RequestRefused:
    return RequestRefused(
        404,
        "QuestionUnknown",
        "you have no such open question. It may be closed, or belong to a different user: use the token that your "
        "client sends.",
    )
