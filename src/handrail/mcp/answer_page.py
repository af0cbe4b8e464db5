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

from handrail.clock import SYSTEM_CLOCK
from handrail.errors import RunBusy
from handrail.journal.answers import check_answer
from handrail.mcp.calls import CallRefused, Calls, CallUnknown, LiveCall
from handrail.question import Answer, Question
from handrail.serve.agui.wire_events import plain_json
from handrail.serve.middleware import PRINCIPAL
from handrail.serve.pages import Pages
from handrail.serve.refusals import RequestRefused
from handrail.serve.requests import parse

PATH = "/question"
"""The path at which the page's script reads and answers a question."""


class PageAnswer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of a request that answers a question, or declines to."""

    call: str
    question: str
    digest: str
    value: Any = None
    decline: bool = False


class AnswerPage:
    """Serves the page, and the requests of its script, for the calls of one server."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        self._pages = Pages()

    def routes(self) -> list[Route]:
        """Return the routes of the page. The page itself contains no secrets, and needs no token."""
        return [
            Route("/", self._page),
            Route("/assets/{name:path}", self._asset),
            Route(PATH, self._show, methods=["GET"]),
            Route(PATH, self._answer, methods=["POST"]),
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
        call, question = await self._find(
            request, request.query_params.get("call", ""), request.query_params.get("question", "")
        )
        shown = {
            "tool": call.name,
            "principal": call.principal,
            "title": question.title,
            "message": question.message,
            "rows": msgspec.to_builtins(question.rows),
            "schema": plain_json(msgspec.to_builtins(question.schema)),
            "digest": question.digest,
        }
        return JSONResponse(shown, headers={"cache-control": "no-store"})

    async def _answer(self, request: Request) -> Response:
        body = parse(await request.body(), PageAnswer)
        call, question = await self._find(request, body.call, body.question)
        answer = Answer(
            question_id=question.id,
            digest=body.digest,
            by=call.principal,
            outcome="declined" if body.decline else "answered",
            value=None if body.decline else body.value,
            reason="declined on the page" if body.decline else "",
        )
        check_answer(question, answer, SYSTEM_CLOCK.now())
        call.give(answer)
        return JSONResponse({"outcome": answer.outcome})

    async def _find(self, request: Request, call_id: str, question_id: str) -> tuple[LiveCall, Question]:
        """Return the call of the principal who sent the request, and its open question that asks for a secret.

        A recorded call that no process executes is resumed.

        Raises `RequestRefused` if there is no such question, if a different process executes the call, or if the server is stopping.
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
        if isinstance(call, LiveCall) and not await call.wait():
            question = call.questions.get(question_id)
            if question is not None and question.secret:
                return call, question
        raise RequestRefused(
            404,
            "QuestionUnknown",
            "you have no such open question. It may be closed, or belong to a different user: use the token that your "
            "client sends.",
        )
