"""`HttpServer`: an MCP server over streamable HTTP, as an ASGI app.

It uses the guard of `handrail serve`, which checks hosts and origins, authenticates requests and enforces limits. Each request
belongs to the principal who sent it, and so does each call.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from contextlib import AbstractAsyncContextManager
from functools import lru_cache
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import msgspec
from mcp.server.auth.middleware.bearer_auth import AuthenticatedUser
from mcp.server.auth.provider import AccessToken
from mcp.server.streamable_http_manager import StreamableHTTPSessionManager
from mcp.server.transport_security import TransportSecuritySettings
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from handrail.errors import DefinitionError, RunBusy
from handrail.journal.answers import check_answer
from handrail.mcp.calls import CallRefused, Calls, CallUnknown, LiveCall
from handrail.mcp.issuer import IS_CURRENT, Issuer
from handrail.mcp.server import ToolServer
from handrail.question import Answer, Question
from handrail.schema.size import MOST_VALUES
from handrail.serve.agui.wire_events import plain_json
from handrail.serve.lifespan import Lifespan
from handrail.serve.limits import Limits, Quota
from handrail.serve.metrics import MemoryMetrics
from handrail.serve.middleware import AccessLog, GuardMiddleware
from handrail.serve.pages import Pages
from handrail.serve.people import People
from handrail.serve.principals import Authenticate, Principals, check_role
from handrail.serve.refusals import RequestRefused, exception_handlers
from handrail.serve.requests import PERSON, PRINCIPAL, BodyLimit, BodyRoute, read

PATH = "/mcp"
"""The path of the endpoint."""
LIMITS = Limits(body_bytes=4 * 2**20, requests_per_second=500.0, burst=2_000)
"""The default limits. They allow more requests than the limits of `handrail serve`, because programs send the requests."""
CHECK_SECONDS = 1.0
"""Seconds between one check that the sender of a request may still use the server and the next, while the request lasts."""


class HttpServer:
    """Serves a `ToolServer` at `/mcp`, and at `/` the page for answers with secrets.

    Requests are authenticated by access tokens of `issuer`, by `authenticate`, by the users in `people`, or by `token`.
    Without any of these, every request but those for the page itself is refused. With an `issuer` there is no page, because a
    browser has no access token. A request ends, and with it its stream, when its access token expires or its user is removed; the
    calls of a removed user are cancelled. `hosts` are additional host names that the server answers to, and `origins` are additional origins whose
    pages may use it. `prefix` is the path below which clients reach the server, if a proxy adds it. Raises `DefinitionError` if both `issuer` and `authenticate` are given, if `token` is invalid or is
    given together with either of them or with users, or if the access log can't be opened.
    """

    def __init__(
        self,
        served: ToolServer,
        *,
        token: str | None = None,
        authenticate: Authenticate | None = None,
        issuer: Issuer | None = None,
        people: People | None = None,
        hosts: Iterable[str] = (),
        origins: Iterable[str] = (),
        prefix: str = "",
        limits: Limits = LIMITS,
        access_log: Path | None = None,
    ) -> None:
        if issuer is not None and authenticate is not None:
            raise DefinitionError(
                "an issuer and `authenticate` contradict each other. Pass only one of them."
            )
        self.served = served
        served.calls.most = limits.runs_per_principal
        self.limits = limits
        self.metrics = MemoryMetrics()
        journal = served.calls.journal
        self.principals = Principals(
            people or People(),
            key=b"" if journal is None else journal.key,
            token=token,
            authenticate=authenticate if issuer is None else issuer.authenticate,
            limits=limits,
        )
        self._manager = StreamableHTTPSessionManager(
            served.server,
            security_settings=TransportSecuritySettings(enable_dns_rebinding_protection=False),
            max_request_body_size=limits.body_bytes,
        )  # the guard checks hosts and origins
        # Twice as many values as one call's arguments may have, so that a call with too many is told its own limit.
        body = BodyLimit(limits.body_bytes, 2 * MOST_VALUES)
        routes: list[BaseRoute] = [BodyRoute(PATH, endpoint=_Endpoint(self._manager), body=body)]
        if issuer is None:
            page = AnswerPage(served.calls, BodyLimit(limits.body_bytes))
            served.page = page.address
            routes += page.routes()
        else:  # a browser has no access token, so a page could not know who answers
            routes += issuer.routes()
        self._lifespan = Lifespan(self._start, self._stop)
        app = Starlette(
            routes=routes,
            lifespan=self.lifespan,
            exception_handlers=exception_handlers(lambda kind: None, served=f"MCP is at `{PATH}`."),
        )
        app.router.redirect_slashes = False
        self._is_stopping = asyncio.Event()
        self._sessions: asyncio.Task[None] | None = None
        self._guard = GuardMiddleware(
            self._lifespan.wrap(_Admission(app, served, self.principals, limits.streams)),
            principals=self.principals,
            routes=routes,
            metrics=self.metrics,
            limits=limits,
            hosts=hosts,
            origins=origins,
            prefix=prefix,
            stopping=lambda: served.calls.is_stopping,
            access=None if access_log is None else AccessLog(access_log),
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._guard(scope, receive, send)

    def running(self) -> int:
        """Return the number of calls that this process is executing."""
        return self.served.calls.running()

    def lifespan(self, app: object = None) -> AbstractAsyncContextManager[None]:
        """Start the server, and stop it at the end of the block. Pass it to an app that this one is mounted in.

        A server that is not started refuses every request.
        """
        return self._lifespan.run()

    async def start(self) -> None:
        """Start the SDK's session manager. Before this, every request is refused."""
        await self._lifespan.start()

    async def stop(self) -> None:
        """Accept no new work, and park or cancel every call, as `LiveCall.leave` does. Calling this again has no further effect."""
        await self._lifespan.stop()

    async def _start(self) -> None:
        started = asyncio.Event()

        async def run() -> None:
            async with self._manager.run():
                started.set()
                await self._is_stopping.wait()

        self._sessions = asyncio.get_running_loop().create_task(run())
        await started.wait()

    async def _stop(self) -> None:
        await self.served.calls.stop()
        self._is_stopping.set()
        if self._sessions is not None:
            await asyncio.wait([self._sessions])


class _Admission:
    """Refuses requests from people whose role may not run tools, and limits how many requests a principal has in progress.

    A request lasts as long as its call or its stream, so one principal could otherwise take up all connections, and a removed
    user could go on reading.
    """

    def __init__(self, app: ASGIApp, served: ToolServer, principals: Principals, most: int) -> None:
        self._app = app
        self._served = served
        self._principals = principals
        self._requests = Quota(
            most,
            "TooManyRequests",
            f"you have {most} requests in progress, which is the limit. End one of them.",
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if PERSON not in scope:  # a public page, or not a request
            await self._app(scope, receive, send)
            return
        check_role(scope[PERSON], "run")
        self._requests.take(scope[PRINCIPAL])
        try:
            await self._serve(scope, receive, send)
        finally:
            self._requests.give_back(scope[PRINCIPAL])

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request for as long as its sender may use the server."""
        person = scope[PERSON]
        if IS_CURRENT in scope:
            await _serve_while(scope[IS_CURRENT], self._app, scope, receive, send)
        elif self._principals.has_people or person.session:
            is_current = self._principals.watch(person)
            try:
                await _serve_while(is_current, self._app, scope, receive, send)
            finally:
                # a session of the protocol would go on with the call without its request
                if not person.session and not is_current():
                    self._served.calls.cancel_of(person.name)
        else:
            await self._app(scope, receive, send)


async def _serve_while(
    is_current: Callable[[], bool], app: ASGIApp, scope: Scope, receive: Receive, send: Send
) -> None:
    """Serve a request until `is_current` returns False, which is checked every `CHECK_SECONDS`, and before anything is sent.

    The request then ends without sending anything more. Raises `RequestRefused` if its response has not begun.
    """
    loop, limit = asyncio.get_running_loop(), asyncio.timeout(None)
    has_begun = False

    def end() -> None:
        if not limit.expired():
            limit.reschedule(loop.time())

    async def checked(message: Message) -> None:
        nonlocal has_begun
        if not is_current():
            end()
            await loop.create_future()  # until the request is cancelled
        has_begun = True
        await send(message)

    def look() -> None:
        nonlocal timer
        allowed = False
        try:
            allowed = is_current()
        finally:
            if allowed:
                timer = loop.call_later(CHECK_SECONDS, look)
            else:
                end()

    timer = loop.call_later(CHECK_SECONDS, look)
    try:
        async with limit:
            try:
                await app(scope, receive, checked)
            finally:
                timer.cancel()
    except TimeoutError:
        if not limit.expired():
            raise
        if not has_begun:
            problem = "your token has expired, or you may no longer use this server. Authenticate again."
            raise RequestRefused(401, "SignedOut", problem) from None
        await send({"type": "http.response.body", "body": b"", "more_body": False})


class _Endpoint:
    """Tells the SDK's endpoint who sent a request, so that a session belongs to the principal who opened it."""

    def __init__(self, manager: StreamableHTTPSessionManager) -> None:
        self._manager = manager

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["user"] = _user_of(scope[PRINCIPAL])
        await self._manager.handle_request(scope, receive, send)


@lru_cache(maxsize=1_000)
def _user_of(principal: str) -> AuthenticatedUser:
    """Return a principal as the SDK's user. The token is empty, because the guard has checked the real one."""
    return AuthenticatedUser(AccessToken(token="", client_id=principal, scopes=[]))


# --- the page for answers with secrets ---

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
    """Serves the page on which people answer questions that ask for secrets, and the requests of its script.

    The client sends the person to the page's address. A secret then goes from the browser to the server, and neither the
    client nor its model sees it. The page asks for the client's token, so that only the principal who made a call can answer
    its questions. Otherwise somebody could send the address of their own question to a different person, and their call would
    get that person's secret. An answer may be as large as `body` says.
    """

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
