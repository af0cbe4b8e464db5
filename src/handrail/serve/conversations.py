"""What the addresses do by which people talk: threads, messages, answers, and the streams of both."""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from contextlib import contextmanager
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from handrail.errors import RequestRefused
from handrail.question import Answer
from handrail.serve import requests, snapshots
from handrail.serve.agui.inputs import read
from handrail.serve.agui.legs import begin
from handrail.serve.asked import before_of, limit_of, mark_of, thread_of, words_of
from handrail.serve.event_streams import EventStream, Streams, lines, only
from handrail.serve.feed import Event
from handrail.serve.limits import Limits, Places
from handrail.serve.listed import Listed
from handrail.serve.metrics import Metrics
from handrail.serve.middleware import PRINCIPAL
from handrail.serve.thread import Thread
from handrail.serve.threads import Threads


class Conversations:
    """Threads, as people and their clients use them."""

    def __init__(self, threads: Threads, streams: Streams, metrics: Metrics, limits: Limits) -> None:
        self._threads = threads
        self._journal = threads.journal
        self._streams = streams
        self._metrics = metrics
        self._limits = limits
        self._listed = Listed(threads)
        self._beginning = Places(
            limits.runs_per_principal,
            "TooManyRuns",
            "as many runs are at work as there may be. Wait for one, or cancel it.",
            limits.runs,
        )

    # AG-UI.

    async def agent(self, request: Request) -> Any:
        """One leg of a run, as AG-UI asks for it."""
        principal = request.scope[PRINCIPAL]
        asked = read(requests.read_json(await request.body()))
        thread = self._threads.thread(principal, asked.thread_id)
        nested = asked.sees_nested
        place = self._streams.take(principal)
        try:
            number = thread.feed.last
            row = await thread.newest()
            recorded = () if row is None else await self._journal.asked(row.record.id)
            begun = await begin(thread, asked, recorded, partial(self._begin, thread))
            if begun.refused:
                chunks = only(begun.refused, nested=nested)
            elif begun.leg == asked.run_id:
                number = thread.feed.before_leg(
                    begun.leg, number
                )  # a run of another window may have ended since
                chunks = lines(thread.feed, number, leg=begun.leg, nested=nested)
            else:  # it was answered before: how things stand, and what comes of it
                before, number, leg = await snapshots.joining(self._journal, thread)
                chunks = (
                    lines(thread.feed, number, before=before, leg=leg, nested=nested)
                    if leg
                    else only(before, nested=nested)
                )
            return EventStream(self._streams, place, chunks)
        except BaseException:
            place.give_back()
            raise

    # Threads.

    async def threads(self, request: Request) -> Response:
        principal = request.scope[PRINCIPAL]
        found, next = await self._listed.page(
            principal, limit=limit_of(request), before=before_of(request), words=words_of(request)
        )
        return JSONResponse({"threads": found, "next": None if next is None else mark_of(request, next)})

    async def thread(self, request: Request) -> Response:
        return JSONResponse(await snapshots.thread(self._journal, thread_of(self._threads, request)))

    async def forget(self, request: Request) -> Response:
        await thread_of(self._threads, request).forget()
        return JSONResponse({})

    async def events(self, request: Request) -> Any:
        """A thread's events after a place; without one that is kept, a snapshot first."""
        thread = thread_of(self._threads, request)
        query = request.query_params
        nested = query.get("v") != "0"
        place = self._streams.take(request.scope[PRINCIPAL])
        try:
            number = thread.feed.number_of(request.headers.get("last-event-id") or query.get("after", ""))
            before: list[Event] = []
            leg = thread.live.leg if thread.live is not None else ""
            if number is None:
                await thread.check_known()
                before, number, leg = await snapshots.joining(self._journal, thread)
            follow = query.get("follow", "") not in ("", "0")
            if follow:
                chunks = lines(thread.feed, number, before=before, nested=nested)
            elif leg:
                chunks = lines(thread.feed, number, before=before, leg=leg, nested=nested)
            else:  # nothing goes: what there is, and the end
                chunks = lines(thread.feed, number, before=before, until=thread.feed.last, nested=nested)
            return EventStream(self._streams, place, chunks)
        except BaseException:
            place.give_back()
            raise

    async def say(self, request: Request) -> Response:
        thread = thread_of(self._threads, request)
        said = requests.read(await request.body(), requests.Said)
        return JSONResponse({"run_id": await self._begin(thread, said.text)}, 202)

    async def answer(self, request: Request) -> Response:
        thread = thread_of(self._threads, request)
        given = requests.read(await request.body(), requests.Given)
        answer = Answer(
            question_id=given.question_id,
            digest=given.digest,
            by=thread.principal,
            outcome=given.outcome,
            value=given.value,
            reason=given.reason[: self._limits.message_chars],
        )
        await thread.answer([answer])
        return JSONResponse({})

    async def cancel(self, request: Request) -> Response:
        thread = thread_of(self._threads, request)
        requests.read(await request.body(), requests.Nothing)
        await thread.check_known()
        await thread.cancel()
        return JSONResponse({}, 202)

    # Beginning runs.

    async def _begin(self, thread: Thread, text: str, **more: Any) -> str:
        most = self._limits.message_chars
        if len(text) > most:
            raise RequestRefused(
                413, "MessageTooLong", f"a message has at most {most} characters. Say less at once."
            )
        if not text.strip():
            raise RequestRefused(
                422, "MessageEmpty", "the message is empty. Say something.", fields=[("/text", "some text")]
            )
        with self._place_for_run(thread.principal):
            run_id = await asyncio.shield(thread.say(text, **more))  # begun whole, also if the client goes
        self._metrics.runs_begun += 1
        return run_id

    @contextmanager
    def _place_for_run(self, principal: str) -> Generator[None]:
        at_work = [each for each in self._threads.running() if each.live is not None and each.live.leg]
        mine = sum(1 for each in at_work if each.principal == principal)
        self._beginning.take(principal, beside=mine, beside_total=len(at_work))
        try:
            yield
        finally:
            self._beginning.give_back(principal)
