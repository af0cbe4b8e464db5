"""`Thread`: one conversation of one principal, in memory or not."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import pydantic_core

from handrail.adapter.conversation import root_conversation
from handrail.errors import AnswerRefused, QuestionsOpen, RunUnknown, ThreadBusy, ThreadUnknown
from handrail.ids import NewId
from handrail.messages import Message
from handrail.question import Answer, Question
from handrail.records import OVER, Journal, RunRow
from handrail.runs import cancel
from handrail.schema import to_json
from handrail.serve.agui.translate import Translator
from handrail.serve.feed import Feed
from handrail.serve.live import LiveRun
from handrail.serve.source import Source
from handrail.session import Session

if TYPE_CHECKING:
    from handrail.adapter.stream import RunStream
    from handrail.tools import Tool


class Thread:
    """A conversation: its session, its feed, and the run it is in.

    The journal has all of it; what is here can be dropped whenever no run goes, and made again.
    """

    def __init__(
        self,
        id: str,
        principal: str,
        source: Source,
        journal: Journal,
        feed: Feed,
        *,
        park_after: float,
        new_id: NewId,
    ) -> None:
        self.id = id
        self.principal = principal
        self.feed = feed
        self.live: LiveRun | None = None
        self._source = source
        self._journal = journal
        self._session: Session | None = None
        self._park_after = park_after
        self._new_id = new_id
        self._lock = asyncio.Lock()

    @property
    def session_id(self) -> str:
        return f"{self.principal}/{self.id}"

    # What somebody does.

    async def say(
        self,
        text: str,
        *,
        leg: str = "",
        history: Iterable[Message] = (),
        tools: Sequence[Tool[Any, Any]] = (),
    ) -> str:
        """Begin a run with what was said; its id. `ThreadBusy`, or `QuestionsOpen`, where one is under way."""
        async with self._lock:
            await self._check_free()
            session = await self.session()
            run_id = self._new_id()
            self._start(
                run_id,
                session,
                lambda environment: self._source.begin(
                    text,
                    run_id=run_id,
                    session=session,
                    environment=environment,
                    journal=self._journal,
                    history=history,
                    tools=tools,
                ),
                leg,
            )
            return run_id

    async def answer(
        self, answers: Sequence[Answer], *, leg: str = "", tools: Sequence[Tool[Any, Any]] = ()
    ) -> None:
        """Take answers to open questions, and go on with the run. `AnswerRefused` says what does not fit."""
        async with self._lock:
            live = self.live
            open_now = {each.id: each for each in await self.questions()}
            fresh = [each for each in answers if each.question_id in open_now]
            if live is not None and fresh:
                live.go_on(leg)
            for each in answers:
                self._journal.answer(each)
            if live is None and fresh:
                await self._go_on(open_now[fresh[0].question_id].run_id, leg, tools)

    async def cancel(self) -> None:
        """End the run that goes or waits; harmless where there is none."""
        async with self._lock:
            if self.live is not None:
                await self.live.cancel()
                return
            row = await self._newest()
            if row is not None and row.status not in OVER:
                await cancel(self._journal, row.record.id)
                self._session = None  # the record has more to say than it

    async def go_on(self) -> None:
        """Go on with a run whose process ended, or that was parked in the middle of its work."""
        async with self._lock:
            row = await self._newest()
            if self.live is None and row is not None and row.status not in OVER:
                await self._go_on(row.record.id, "", ())

    # What there is to see.

    async def session(self) -> Session:
        """The session, as its runs that are over left it."""
        if self._session is None:
            from handrail import runs

            try:
                self._session = await runs.session(self._journal, self.session_id, principal=self.principal)
            except RunUnknown:
                self._session = Session(id=self.session_id, principal=self.principal)
        return self._session

    async def questions(self) -> Sequence[Question]:
        """What waits for an answer."""
        row = await self._newest()
        return () if row is None or row.status in OVER else await self._journal.questions(row.record.id)

    def state(self) -> Any:
        """The slices that clients see; None where there are none to see."""
        session = self.live.session if self.live is not None else self._session
        if not self._source.shown or session is None:
            return None
        return {
            kind.__name__: pydantic_core.from_json(to_json(list(session[kind].all())))
            for kind in self._source.shown
        }

    async def messages(self) -> Sequence[Message]:
        """What was said, oldest first."""
        session = self.live.session if self.live is not None else await self.session()
        return list(root_conversation(session).messages)

    async def check_known(self) -> None:
        """`ThreadUnknown` where nothing was ever said here."""
        if self.live is None and await self._newest() is None:
            raise ThreadUnknown(self.id)

    # Carrying it out.

    async def _newest(self) -> RunRow | None:
        rows = await self._journal.runs(session_id=self.session_id)
        return rows[-1] if rows else None

    async def _check_free(self) -> None:
        if self.live is not None:
            if self.live.leg or not self.live.questions:
                raise ThreadBusy(self.id)
            raise QuestionsOpen(self.id, len(self.live.questions))
        row = await self._newest()
        if row is not None and row.status not in OVER:
            if row.questions:
                raise QuestionsOpen(self.id, row.questions)
            raise ThreadBusy(self.id)

    async def _go_on(self, run_id: str, leg: str, tools: Sequence[Tool[Any, Any]]) -> None:
        """Resume a run that this process does not have."""
        session = self._session = Session(id=self.session_id, principal=self.principal)
        self._start(
            run_id,
            session,
            lambda environment: self._source.resume(
                run_id, session=session, environment=environment, journal=self._journal, tools=tools
            ),
            leg,
        )

    def _start(
        self,
        run_id: str,
        session: Session,
        begin: Callable[[Any], RunStream[Any]],
        leg: str,
    ) -> None:
        live = LiveRun(
            run_id,
            session,
            self.feed,
            Translator(self.id, run_id),
            state=self.state,
            new_leg=self._new_id,
            park_after=self._park_after,
        )
        stream = begin(live.environment)
        self.live = live
        live.start(stream, leg, self._over)

    def _over(self, live: LiveRun) -> None:
        if self.live is live:
            self.live = None
            if live.questions:
                self._session = None  # it was parked: the record has what is said next


def answer_to(question: Question, principal: str, outcome: Any, value: Any, reason: str = "") -> Answer:
    """Somebody's answer, bound to what they saw."""
    if outcome not in ("answered", "declined", "cancelled"):
        raise AnswerRefused(question.id, f"{outcome!r} is no outcome", "Say answered, declined or cancelled.")
    return Answer(
        question_id=question.id,
        digest=question.digest,
        by=principal,
        outcome=outcome,
        value=value,
        reason=reason,
    )
