"""`ServedApp`, also called `asgi`: the server as an ASGI app. `Routes`: its URLs and their handlers."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import BaseRoute, Route
from starlette.types import Receive, Scope, Send

from handrail import runs
from handrail.content import Attachment
from handrail.errors import DefinitionError, JournalAltered, RunUnknown
from handrail.journal.protocol import Journal
from handrail.journal.readiness import Readiness
from handrail.notify.sender import Sender
from handrail.notify.settings import Notify
from handrail.question import Answer
from handrail.runs.catalog import approval_json
from handrail.runs.retention import Retention, keep_sweeping
from handrail.schema.size import MOST_VALUES
from handrail.serve import requests, snapshots
from handrail.serve.agui.inputs import parse_input, submit
from handrail.serve.agui.interrupts import question_json
from handrail.serve.agui.queued_messages import queued_json
from handrail.serve.agui.wire_events import format_time
from handrail.serve.attachments import check_number, check_total, received, response_with
from handrail.serve.feed import Event, EventStream, Streams, follow, send_all
from handrail.serve.inbox import Inbox
from handrail.serve.lifespan import Lifespan
from handrail.serve.limits import Limits, Quota
from handrail.serve.metrics import CONTENT_TYPE, RUNS_STARTED, new_metrics
from handrail.serve.middleware import AccessLog, GuardMiddleware
from handrail.serve.notifier import Notifier
from handrail.serve.oidc import OidcProvider
from handrail.serve.pages import Pages
from handrail.serve.people import ACTIONS, Action, People, Person
from handrail.serve.principals import (
    Authenticate,
    Principals,
    address_of,
    check_role,
    cookie_name,
    cookie_path,
)
from handrail.serve.refusals import RequestRefused, exception_handlers
from handrail.serve.requests import PERSON, PRINCIPAL, BodyLimit, BodyRoute, parse_body
from handrail.serve.snapshots import file_changes
from handrail.serve.sources import Source
from handrail.serve.thread import Submit, Thread
from handrail.serve.threads import ThreadList, Threads

log = logging.getLogger("handrail.serve")

_POST = ["POST"]
_QUEUE = "/threads/{id}/runs/{run_id}/messages"
_ORDERS = "/threads/{id}/runs/{run_id}/orders"
_MOST_AUDITED = 10_000
Endpoint = Callable[..., Awaitable[Any]]
"""A function that takes a request and, if its path names one, the principal's thread."""


NOTED = "handrail.noted"
"""The key in a request's scope for details that an endpoint adds to the request's audit log entry."""


class ServedApp:
    """An ASGI app that serves `source`, with AG-UI at `/agent` and the page at `/`. Exported as `asgi`.

    Runs are recorded in `journal`. On startup, the app resumes the runs that an earlier process left unfinished, except
    those that wait for an answer. A run that waits for an answer is parked after `park_after` seconds. On shutdown, the
    app parks its runs. A run that is still working after `grace` seconds is cut off. `renderers` is the path of a script
    with renderers for the page. `hosts` are additional host names that the app answers to, and `origins` are additional
    origins whose pages may use it. `prefix` is the path below which browsers reach the app, such as `/agents`, if a proxy adds it; an
    app that is mounted in another one knows it. `access_log` is a file that gets a line of JSON for every HTTP request. With `submit`,
    workers execute the new runs, and this process shows them; this needs a journal in PostgreSQL. The rules in `retention` say when
    finished runs are deleted from the journal. `public_url` is the URL at which people
    open the page. With it, users are told about questions that wait for them, at the addresses that they were added with, and `notify`
    says when, and who else is told. `sender` replaces how messages are sent.

    Requests are authenticated by `authenticate`, by the users in `people`, or by `token`. Without any of these, the
    page is opened with a link that works once. The app logs a link when an ASGI server starts it, and a new one whenever
    one has been used. Only the page's files, sign-in, `/health` and `/readyz` need no authentication.

    Raises `DefinitionError` if `oidc` is given without users or together with `authenticate`, if `submit` is given and
    the journal is not in PostgreSQL, if `token` is too short, can't be sent in a header, or is given together with
    users or `authenticate`, if `prefix` is not a path, if `notify` has addresses and there is no `public_url`, if that is not the URL
    of a page, or if the access log can't be opened.
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
        prefix: str = "",
        limits: Limits | None = None,
        access_log: Path | None = None,
        submit: Submit | None = None,
        retention: Sequence[Retention] = (),
        notify: Notify | None = None,
        public_url: str = "",
        sender: Sender | None = None,
        park_after: float = 300.0,
        grace: float = 5.0,
    ) -> None:
        if submit is not None and journal.broadcasts is None:
            raise DefinitionError(
                "a server can show what workers do only if the journal is in PostgreSQL, and this one is not. "
                "Use a journal in PostgreSQL (--journal postgresql://…), or leave out `submit`."
            )
        source.check_spend()
        self.limits = limits or Limits()
        self.metrics = new_metrics()
        self.people = people or People()
        self.principals = principals = Principals(
            self.people, key=journal.key, token=token, authenticate=authenticate, limits=self.limits
        )
        self.threads = Threads(
            source,
            journal,
            park_after=park_after,
            ended=self.metrics.end_leg,
            voters=principals.who_may_vote,
            may_run=principals.may_run,
            submit=submit,
        )
        self.inbox = Inbox(self.threads, principals)
        self.notifier = Notifier(source.name, self.inbox, principals, journal, public_url, notify, sender)
        self.streams = Streams(self.limits, self.metrics)
        self._grace = grace
        self._retention = retention
        self._sweeping: asyncio.Task[None] | None = None
        self._logs_link = token is None
        self._stop_observing: Callable[[], None] = lambda: None
        self._lifespan = Lifespan(self._start, self._stop, self._offer_link)
        if oidc is not None and not principals.has_people:
            raise DefinitionError(
                "OpenID Connect needs users, and can't be used together with `authenticate`. Add a user with "
                "`handrail users add NAME`, or leave `authenticate` out."
            )
        self.routes = Routes(self, renderers=renderers, has_oidc=oidc is not None)
        app = Starlette(
            routes=[*self.routes.list(), *(() if oidc is None else oidc.routes(principals))],
            lifespan=self.lifespan,
            exception_handlers=exception_handlers(self.metrics.refuse),
        )
        app.router.redirect_slashes = False
        self._guard = GuardMiddleware(
            self._lifespan.wrap(app),
            principals=principals,
            routes=app.routes,
            metrics=self.metrics,
            limits=self.limits,
            hosts=hosts,
            origins=origins,
            prefix=prefix,
            stopping=lambda: self.threads.stopping,
            access=None if access_log is None else AccessLog(access_log),
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._guard(scope, receive, send)

    def lifespan(self, app: object = None) -> AbstractAsyncContextManager[None]:
        """Start the app, and stop it at the end of the block, as an ASGI server does.

        Pass it to an app that this one is mounted in: `Starlette(routes=[Mount("/desk", desk)], lifespan=desk.lifespan)`.
        An app that is not started refuses every request.
        """
        return self._lifespan.run()

    async def start(self) -> None:
        """Resume the runs that an earlier process left unfinished, and count the votes that it did not count.

        Runs that wait for an answer stay parked, unless the votes decide their question.
        """
        await self._lifespan.start()

    def running(self) -> int:
        """Return the number of runs that this process has in memory, including those that wait for an answer."""
        return len(self.threads.running())

    async def stop(self) -> None:
        """Accept no new work, park every run, and end every stream. Calling it again has no further effect."""
        await self._lifespan.stop()

    async def _start(self) -> None:
        self._stop_observing = self.metrics.observe_runs()
        await self.threads.start()
        await self.inbox.count_all()
        self.notifier.start()
        self._sweeping = asyncio.create_task(keep_sweeping(self.threads.journal, self._retention))

    async def _stop(self) -> None:
        await self.notifier.stop()
        if self._sweeping is not None:
            self._sweeping.cancel()
            await asyncio.gather(self._sweeping, return_exceptions=True)
        await self.threads.stop(self._grace)
        await asyncio.sleep(0.05)  # feeds wake their readers in batches, so wait for the last batch
        self.streams.close()
        self._stop_observing()

    def _offer_link(self) -> None:
        if self._logs_link and self.principals.has_links:
            self.principals.link_used = self._log_link
            self._log_link()

    def _log_link(self) -> None:
        log.warning(
            "to open the page of %r, append this to its address, which ends in a slash (it works once): #link=%s",
            self.threads.source.name,
            self.principals.new_link(),
        )


asgi = ServedApp


# --- the endpoints --------------------------------------------------------------------------------------


class Routes:
    """The endpoints of a server."""

    def __init__(self, app: ServedApp, *, renderers: Path | None, has_oidc: bool) -> None:
        self._app = app
        self._journal = app.threads.journal
        self._pages = Pages()
        self._renderers = renderers
        self._thread_list = ThreadList(app.threads)
        self._has_oidc = has_oidc
        self._readiness = Readiness(self._journal, lambda: app.threads.stopping)
        self._seen: set[tuple[str, str]] = set()
        """Pairs of a person's name and the digest of a question that they were shown, so that each pair is logged once."""
        self._starting = Quota(
            app.limits.runs_per_principal,
            "TooManyRuns",
            "the server allows no more active and waiting runs. Answer or cancel one of yours, or try again soon.",
            app.limits.runs,
        )
        self._observe()

    def list(self) -> Sequence[BaseRoute]:
        return [
            Route("/", self.page),
            Route("/assets/{name:path}", self.asset),
            Route("/login", self.sign_in, methods=_POST),
            Route("/health", self.health),
            Route("/readyz", self.readyz),
            *(
                self._route(method, path, self._guard(action, endpoint, noted, "{id}" in path))
                for method, path, action, endpoint, noted in self.guarded()
            ),
        ]

    def _route(self, method: str, path: str, endpoint: Endpoint) -> Route:
        size = self._app.limits.body_bytes
        with_files = size + self._app.limits.attachment_bytes * 4 // 3  # in base64
        larger = {
            "/agent": BodyLimit(with_files, 5 * MOST_VALUES),  # four lists and a state
            "/threads/{id}/messages": BodyLimit(with_files),
            _QUEUE: BodyLimit(size),
            f"{_QUEUE}/{{message_id}}": BodyLimit(size),
            _ORDERS: BodyLimit(size),
            "/threads/{id}/answers": BodyLimit(size),
            "/inbox/answers": BodyLimit(size),
        }
        if path in larger and method == "POST":
            return BodyRoute(path, endpoint, methods=[method], body=larger[path])
        return Route(path, endpoint, methods=[method])

    def guarded(self) -> Sequence[tuple[str, str, Action, Endpoint, str]]:
        """Return the endpoints that need a role. Each has a method, a path, an action, a handler and a phrase for the audit log.

        If the phrase is empty, `_guard` does not log requests.
        """
        return [
            ("GET", "/app/renderers.js", "see", self.renderers, ""),
            ("GET", "/about", "see", self.about, ""),
            ("POST", "/logout", "see", self.sign_out, ""),
            ("GET", "/metrics", "see", self.metrics, ""),
            ("POST", "/agent", "run", self.agent, "ran"),
            ("GET", "/threads", "see", self.threads, ""),
            ("GET", "/threads/{id}", "see", self.thread, "saw"),
            ("DELETE", "/threads/{id}", "run", self.delete_thread, "deleted"),
            ("GET", "/threads/{id}/events", "see", self.events, "saw"),
            ("POST", "/threads/{id}/messages", "run", self.send_message, "sent a message"),
            ("POST", "/threads/{id}/answers", "run", self.answer, "answered"),
            ("POST", "/threads/{id}/cancel", "run", self.cancel, "cancelled"),
            ("GET", "/threads/{id}/runs/{run_id}", "see", self.run, "saw"),
            ("GET", _QUEUE, "see", self.queued, ""),
            ("POST", _QUEUE, "run", self.send_to_run, "sent a message"),
            ("POST", f"{_QUEUE}/{{message_id}}", "run", self.edit_message, "edited a message"),
            ("DELETE", f"{_QUEUE}/{{message_id}}", "run", self.withdraw_message, "withdrew a message"),
            ("POST", _ORDERS, "run", self.order, "gave an order"),
            ("GET", "/threads/{id}/attachments/{digest}", "see", self.attachment, ""),
            ("GET", "/threads/{id}/files", "see", self.files, "saw"),
            ("POST", "/threads/{id}/calls/{call_id:path}/undo", "run", self.undo, "undid"),
            ("GET", "/threads/{id}/approvals", "see", self.approvals, ""),
            (
                "DELETE",
                "/threads/{id}/approvals/{approval_id:path}",
                "run",
                self.revoke,
                "revoked a decision",
            ),
            ("GET", "/runs", "see", self.runs, ""),
            ("GET", "/usage", "see", self.usage, ""),
            ("GET", "/inbox", "vote", self.inbox, ""),
            ("GET", "/questions/{question_id:path}", "see", self.question, ""),
            ("POST", "/inbox/answers", "vote", self.vote, "voted"),
            ("GET", "/audit", "audit", self.audit, "read the audit log"),
        ]

    def _guard(self, action: Action, endpoint: Endpoint, noted: str, has_thread: bool) -> Endpoint:
        """Wrap an endpoint so that it refuses people whose roles do not allow the action.

        With `has_thread`, it also gets the thread that the request names. If `noted` is not empty, each successful request is
        added to the audit log.
        """

        async def guarded(request: Request) -> Any:
            check_role(request.scope[PERSON], action)
            threads = [await self._thread(request)] if has_thread else []
            response = await endpoint(request, *threads)
            if noted:
                self._note(request, noted)
            return response

        return guarded

    def _note(self, request: Request, action: str, **details: Any) -> None:
        """Add an entry to the audit log, with the ids in the request's path and the details from the endpoint."""
        names = {
            "id": "thread",
            "run_id": "run",
            "call_id": "call",
            "approval_id": "decision",
            "message_id": "message",
        }
        found = {names.get(name, name): value for name, value in request.path_params.items()}
        found |= request.scope.get(NOTED, {}) | details
        self._app.principals.people.note(request.scope[PRINCIPAL], action, address_of(request), **found)

    # The page.

    async def page(self, request: Request) -> Response:
        return self._pages.page(request)

    async def asset(self, request: Request) -> Response:
        return self._pages.asset(request, request.path_params["name"])

    async def renderers(self, request: Request) -> Response:
        if self._renderers is None:
            raise RequestRefused(404, "NotFound", "this app has no renderers")
        return self._pages.file(request, self._renderers)

    # The server.

    async def about(self, request: Request) -> Response:
        source = self._app.threads.source
        return JSONResponse(
            {
                "name": source.name,
                "description": source.description,
                "model": source.model,
                "files": source.files is not None,
                "starters": list(source.starters),
                "principal": request.scope[PRINCIPAL],
                "roles": sorted(request.scope[PERSON].roles),
                "actions": [action for action in ACTIONS if request.scope[PERSON].may(action)],
                "people": self._app.principals.has_people,
                "session": bool(request.scope[PERSON].session),
                "version": version("handrail"),
                "renderers": "app/renderers.js" if self._renderers is not None else None,
                "threads": True,
            }
        )

    async def sign_in(self, request: Request) -> Response:
        """Begin a session, with a cookie that scripts can't read and a key that only this origin's pages can read."""
        body = await requests.read(request, requests.LoginBody)
        cookie = await self._app.principals.sign_in(request, body)
        response = JSONResponse({"key": cookie.key, "principal": cookie.person})
        response.set_cookie(
            cookie.name,
            cookie.value,
            max_age=cookie.seconds,
            path=cookie_path(request),
            httponly=True,
            samesite="strict",
            secure=request.url.scheme == "https",
        )
        return response

    async def sign_out(self, request: Request) -> Response:
        await requests.read(request, requests.EmptyBody)
        await self._app.principals.sign_out(request, request.scope[PERSON])
        response = JSONResponse({})
        response.delete_cookie(
            cookie_name(request), path=cookie_path(request), httponly=True, samesite="strict"
        )
        return response

    async def health(self, request: Request) -> Response:
        """Report whether the server is up, with status 503 while it stops, and how people sign in on the page.

        They use `secret`, as `Principals.secret` returns it, or a provider, which has the relative address `sign_in`.

        Authenticated clients also get the version, and how many runs and threads are in memory.
        """
        stopping = self._app.threads.stopping
        health: dict[str, Any] = {
            "status": "stopping" if stopping else "ok",
            "secret": self._app.principals.secret,
        }
        if self._has_oidc:
            health["sign_in"] = "oidc/login"
        try:
            await self._app.principals.of(request)
        except RequestRefused:
            pass
        else:
            health |= {**self._run_counts(), "version": version("handrail")}
        return JSONResponse(health, 503 if stopping else 200)

    async def readyz(self, request: Request) -> Response:
        """Report whether the server could take a message, with status 503 while it stops or its journal does not answer."""
        state = await self._readiness.state()
        return JSONResponse({"status": state}, 200 if state == "ready" else 503)

    async def metrics(self, request: Request) -> Response:
        return PlainTextResponse(self._app.metrics.text(), media_type=CONTENT_TYPE)

    def _observe(self) -> None:
        metrics, streams = self._app.metrics, self._app.streams
        for name, description, count in (
            ("handrail.runs", "Active runs.", "runs"),
            ("handrail.runs_waiting", "Runs in memory that wait for an answer.", "waiting"),
            ("handrail.threads", "Threads with a run in memory.", "threads"),
        ):
            metrics.observe(name, description, lambda count=count: self._run_counts()[count])
        metrics.observe("handrail.viewers", "Open streams.", lambda: streams.count)

    def _run_counts(self) -> dict[str, int]:
        running = [thread.live for thread in self._app.threads.running() if thread.live is not None]
        active = sum(1 for live in running if live.leg)
        return {"runs": active, "waiting": len(running) - active, "threads": len(running)}

    # AG-UI.

    async def agent(self, request: Request) -> Any:
        """Respond to an AG-UI request with one leg, an error, or, if the input opens no leg, the thread's current state."""
        input = await parse_body(request, lambda data: parse_input(requests.parse_json(data)))
        thread = self._app.threads.thread(request.scope[PRINCIPAL], input.thread_id)
        number = thread.feed.last  # noted before the runs are read, so that no event of a new leg is skipped
        rows = await thread.rows()
        self._app.threads.check_served(thread, rows)
        nested = input.sees_nested

        async def chunks() -> AsyncGenerator[bytes]:
            recorded = await self._journal.questions.history(rows[-1].record.id) if rows else ()
            submitted = await submit(
                thread, input, rows, recorded, partial(self._start_run, thread), self._check_message
            )
            if submitted.refused:
                return send_all(submitted.refused, nested=nested)
            if submitted.leg == input.run_id:
                # Skip the events of runs that other windows started and that have ended in the meantime.
                before_leg = thread.feed.before_leg(submitted.leg, number)
                return follow(thread.feed, before_leg, leg=submitted.leg, nested=nested)
            # The input opened no leg of its own, so send the current state, and follow the run if it is active.
            before, last, leg = await snapshots.joining_events(self._journal, thread)
            if leg:
                return follow(thread.feed, last, before=before, leg=leg, nested=nested)
            return send_all(before, nested=nested)

        return await self._stream(request, chunks)

    async def events(self, request: Request, thread: Thread) -> Any:
        """Stream a thread's events after a position. Without a position that the feed still keeps, a snapshot is sent first.

        The stream ends with the open leg or, if no leg is open, with the newest event. With `?follow=1`, it continues.
        """
        query = request.query_params
        nested = query.get("v") != "0"

        async def chunks() -> AsyncGenerator[bytes]:
            number = thread.feed.number_of(request.headers.get("last-event-id") or query.get("after", ""))
            before: list[Event] = []
            leg = thread.live.leg if thread.live is not None else ""
            await thread.watched()
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
        person: Person = request.scope[PERSON]
        slot = self._app.streams.take(person.name)
        try:
            return EventStream(self._app.streams, slot, await chunks())
        except BaseException:
            slot.close()
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

    async def thread(self, request: Request, thread: Thread) -> Response:
        return JSONResponse(await snapshots.thread_snapshot(self._journal, thread))

    async def delete_thread(self, request: Request, thread: Thread) -> Response:
        await thread.forget()
        return JSONResponse({})

    async def send_message(self, request: Request, thread: Thread) -> Response:
        text, files = await parse_body(request, self._message)
        return JSONResponse({"run_id": await self._start_run(thread, text, attachments=files)}, 202)

    def _message(self, data: bytes) -> tuple[str, Sequence[Attachment]]:
        body = requests.parse(data, requests.MessageBody)
        check_number(len(body.attachments), self._app.limits.attachments)
        return body.text, [received("/attachments", each.data, each.name) for each in body.attachments]

    async def attachment(self, request: Request, thread: Thread) -> Response:
        """Return the bytes of an attachment in the thread. Raises `RequestRefused` if the thread has no such attachment."""
        digest = str(request.path_params["digest"])
        content = await thread.attachment(digest)
        if content is None:
            raise RequestRefused(404, "NotFound", "this thread has no such attachment")
        return response_with(content, digest)

    async def answer(self, request: Request, thread: Thread) -> Response:
        body = await requests.read(request, requests.AnswerBody)
        answer = Answer(
            question_id=body.question_id,
            digest=body.digest,
            by=thread.principal,
            outcome=body.outcome,
            value=body.value,
            reason=body.reason[: self._app.limits.message_chars],
        )
        request.scope[NOTED] = {"question": body.question_id, "digest": body.digest, "outcome": body.outcome}
        await thread.answer([answer])
        return JSONResponse({})

    async def queued(self, request: Request, thread: Thread) -> Response:
        run_id = str(request.path_params["run_id"])
        found = await thread.queued(run_id)
        return JSONResponse({"messages": [queued_json(run_id, each) for each in found]})

    async def send_to_run(self, request: Request, thread: Thread) -> Response:
        """Accept a message to a run while it works, and return it with the run's status."""
        run_id, body = str(request.path_params["run_id"]), await requests.read(request, requests.SendBody)
        self._check_message(body.text, ())
        id = None if body.id is None else requests.check_id(body.id)
        # Shielded, so that the readers are told about an accepted message even if the client disconnects.
        receipt = await asyncio.shield(thread.send(run_id, body.text, when=body.when, id=id))
        request.scope[NOTED] = {"message": receipt.message.id}
        message = queued_json(run_id, receipt.message)
        return JSONResponse({"message": message, "status": receipt.status}, 202)

    async def edit_message(self, request: Request, thread: Thread) -> Response:
        run_id, body = str(request.path_params["run_id"]), await requests.read(request, requests.EditBody)
        if body.text is not None:
            self._check_message(body.text, ())
        edited = thread.edit(run_id, request.path_params["message_id"], text=body.text, when=body.when)
        return JSONResponse({"message": queued_json(run_id, await asyncio.shield(edited))})

    async def withdraw_message(self, request: Request, thread: Thread) -> Response:
        run_id = str(request.path_params["run_id"])
        withdrawn = thread.withdraw(run_id, request.path_params["message_id"])
        return JSONResponse({"message": queued_json(run_id, await asyncio.shield(withdrawn))})

    async def order(self, request: Request, thread: Thread) -> Response:
        """Give a run an order, and return it as a message, with the run's status. To continue a run is no message."""
        run_id, body = str(request.path_params["run_id"]), await requests.read(request, requests.OrderBody)
        if body.text:
            self._check_message(body.text, ())
        request.scope[NOTED] = {"order": body.order}
        receipt = await asyncio.shield(thread.order(run_id, body.order, body.text))
        if receipt is None:
            return JSONResponse({}, 202)
        message = queued_json(run_id, receipt.message)
        return JSONResponse({"message": message, "status": receipt.status}, 202)

    async def cancel(self, request: Request, thread: Thread) -> Response:
        await requests.read(request, requests.EmptyBody)
        await thread.check_known()
        await thread.cancel()
        return JSONResponse({}, 202)

    async def _thread(self, request: Request) -> Thread:
        """Return the thread that has the id in the URL and belongs to the principal who sent the request.

        Raises `RequestRefused` if the id is invalid, and `ThreadElsewhere` if the thread belongs to a different app.
        """
        return await self._app.threads.open(
            request.scope[PRINCIPAL], requests.check_id(request.path_params["id"])
        )

    def _check_message(self, text: str, attachments: Sequence[Attachment]) -> None:
        """Raise `RequestRefused` if a message, with its attachments, is empty or too large."""
        most = self._app.limits.message_chars
        if len(text) > most:
            raise RequestRefused(
                413, "MessageTooLong", f"a message can have at most {most} characters. Send a shorter one."
            )
        check_number(len(attachments), self._app.limits.attachments)
        check_total(attachments, self._app.limits.attachment_bytes)
        if not text.strip() and not attachments:
            raise RequestRefused(
                422,
                "MessageEmpty",
                "the message is empty. Write something.",
                fields=[("/text", "the text must not be empty")],
            )

    async def _start_run(self, thread: Thread, text: str, **options: Any) -> str:
        self._check_message(text, options.get("attachments", ()))
        if self._app.threads.unfinished(thread.principal) >= self._app.limits.runs_per_principal:
            await self._app.threads.poll()  # some of the runs may have been answered or cancelled just now
        unfinished = await self._app.threads.count_unfinished(thread.principal)
        self._starting.take(thread.principal, beside=unfinished, beside_total=self._run_counts()["runs"])
        try:
            # Shielded, so that the run is fully recorded even if the client disconnects.
            run_id = await asyncio.shield(thread.say(text, **options))
        finally:
            self._starting.give_back(thread.principal)
        self._app.metrics.add(RUNS_STARTED)
        return run_id

    # The inbox.

    async def inbox(self, request: Request) -> Response:
        """Return other people's questions that this person may vote on, and nothing else from their threads."""
        person: Person = request.scope[PERSON]
        found: list[dict[str, Any]] = []
        for question, votes in await self._app.inbox.list(person):
            if (person.name, question.digest) not in self._seen:
                self._seen.add((person.name, question.digest))
                self._note(request, "saw", question=question.id, of=question.principal)
            found.append(
                {
                    **question_json(question),
                    "principal": question.principal,
                    "votes": [vote.by for vote in votes],
                    "voted": person.name in {vote.by for vote in votes},
                }
            )
        return JSONResponse({"questions": found})

    async def question(self, request: Request) -> Response:
        """Return where this person can answer a question. Whoever may not answer it learns nothing about it."""
        place = await self._app.inbox.find(request.scope[PERSON], request.path_params["question_id"])
        if place is None:
            raise RequestRefused(404, "QuestionUnknown", "this question is closed, or you may not answer it.")
        return JSONResponse({"thread": place or None})

    async def vote(self, request: Request) -> Response:
        person: Person = request.scope[PERSON]
        body = await requests.read(request, requests.VoteBody)
        reason = body.reason[: self._app.limits.message_chars]
        given = Answer(question_id=body.question_id, digest=body.digest, by=person.name, reason=reason)
        decided = await self._app.inbox.vote(person, given, body.approved)
        request.scope[NOTED] = {
            "question": body.question_id,
            "digest": body.digest,
            "approved": body.approved,
            "decided": decided,
        }
        return JSONResponse({"decided": decided})

    async def audit(self, request: Request) -> Response:
        """Return up to 10,000 audit log entries as JSON lines, oldest first: those after the entry numbered `?after=`.

        Raises `RequestRefused` if `after` is not a number of at most 15 digits.
        """
        after = request.query_params.get("after", "0")
        if not after.isdecimal() or len(after) > 15:
            raise RequestRefused(422, "BadNumber", "`after` must be the number of an entry")
        people = self._app.principals.people
        found = await asyncio.to_thread(people.audit, after=int(after), limit=_MOST_AUDITED)
        lines = (json.dumps({**entry, "at": format_time(entry["at"])}) for entry in found)
        return PlainTextResponse("".join(f"{line}\n" for line in lines), media_type="application/jsonl")

    # History.

    async def run(self, request: Request, thread: Thread) -> Response:
        found = await runs.show(self._journal, request.path_params["run_id"])
        if found.row.record.session_id != thread.session_id:
            raise RunUnknown(request.path_params["run_id"])
        return JSONResponse(snapshots.run_tree(found, await thread.run_messages(await thread.rows())))

    async def runs(self, request: Request) -> Response:
        found = await self._journal.runs.list(
            principal=request.scope[PRINCIPAL], limit=requests.limit_of(request)
        )
        lines: list[dict[str, Any]] = []
        for row in found:
            try:
                tree = await runs.show(self._journal, row.record.id)
            except JournalAltered as altered:
                tree = altered
            lines.append(
                {**snapshots.run_line(row, tree), "thread_id": row.record.session_id.rpartition("/")[2]}
            )
        return JSONResponse({"runs": lines})

    async def usage(self, request: Request) -> Response:
        """Return what this person's runs have used in the last `?days=`, divided by the keys in `?by=`, as JSON or as `?format=csv`.

        With `?everybody=1`, return what everybody's have used. That needs the right to read the audit log.
        """
        query, days = request.query_params, requests.days_of(request)
        everybody = query.get("everybody", "") not in ("", "0")
        if everybody:
            check_role(request.scope[PERSON], "audit")
            self._note(request, "read everybody's usage")
        by: Any = query.getlist("by") or ["day"]
        try:
            found = await runs.usage(
                self._journal,
                by=by,
                since=self._journal.clock.now().timestamp() - days * 86400,
                principal=None if everybody else request.scope[PRINCIPAL],
                zone=query.get("zone", "UTC"),
            )
        except DefinitionError as error:
            raise RequestRefused(422, "BadUsage", str(error)) from None
        if query.get("format") == "csv":
            return PlainTextResponse(found.csv(by), media_type="text/csv")
        return JSONResponse({"lines": found.data(by), "altered": len(found.altered)})

    async def files(self, request: Request, thread: Thread) -> Response:
        return JSONResponse({"changes": await file_changes(self._journal, thread)})

    async def undo(self, request: Request, thread: Thread) -> Response:
        await requests.read(request, requests.EmptyBody)
        undone = await thread.undo(request.path_params["call_id"])
        return JSONResponse(
            {
                "tool": undone.tool,
                "paths": list(undone.paths),
                "slices": list(undone.slices),
                "stands": list(undone.stands),
            }
        )

    async def approvals(self, request: Request, thread: Thread) -> Response:
        kept = await thread.approvals()
        return JSONResponse({"approvals": [approval_json(each) for each in kept]})

    async def revoke(self, request: Request, thread: Thread) -> Response:
        await thread.revoke(request.path_params["approval_id"])
        return JSONResponse({})
