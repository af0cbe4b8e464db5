"""`Thread`: one of a principal's conversations, and the actions on it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from handrail import runs
from handrail.clock import SYSTEM_CLOCK, Clock
from handrail.content import Attachment
from handrail.errors import AnswerRefused, MessageRefused, RunBusy, RunUnknown, SessionUnknown, UndoRefused
from handrail.events import ApprovalRemembered
from handrail.guard import approvals_of
from handrail.ids import NewId, random_id
from handrail.journal.answers import already_answered, check_answer
from handrail.journal.protocol import Broadcasts, Journal
from handrail.journal.records import OVER, Order, QuestionRecord, QueuedMessage, RunRow, When
from handrail.messages import Message, UserMessage
from handrail.question import Answer, Question
from handrail.run.host import Voters
from handrail.run.place import is_in_run
from handrail.run.record.begin import is_outdated
from handrail.run.record.notices import unread_remarks
from handrail.run.record.recorded_session import compactions_in
from handrail.runs import Undoing
from handrail.serve.agui.interrupts import frontend_tools_of
from handrail.serve.agui.message_writer import Known
from handrail.serve.agui.queued_messages import queued_event
from handrail.serve.agui.translator import Translator
from handrail.serve.agui.wire_events import custom, plain_json
from handrail.serve.feed import Event, Feed
from handrail.serve.live_run import LiveRun
from handrail.serve.principals import session_id_of
from handrail.serve.refusals import NotForWorkers, QuestionsOpen, ServerStopping, ThreadBusy, ThreadUnknown
from handrail.serve.sources import Source
from handrail.serve.thread_messages import (
    RunMessage,
    messages_in,
    nested_messages_in,
    read_nested,
    render,
    render_thread,
    with_compactions,
    without_compactions,
)
from handrail.serve.watch import Joined, Watch
from handrail.session import Session

if TYPE_CHECKING:
    from handrail.run.response import RunStream
    from handrail.tools import Tool


Submit = Callable[[str, Sequence[Attachment], str, "Thread"], Awaitable[object]]
"""A function that takes a message, its attachments, a run id and a thread, and submits a run of the thread to workers."""
_ELSEWHERE = "another program"
_HERE = "this server"


@dataclass(slots=True)
class Setup:
    """The parts that all of a server's threads share."""

    source: Source
    journal: Journal
    park_after: float | None = 300.0
    new_id: NewId = random_id
    clock: Clock = SYSTEM_CLOCK
    stopping: bool = False
    voters: Voters = lambda role, besides: {}
    submit: Submit | None = None
    """Submits a message to the workers, which then execute the run; None to execute runs in this process."""
    broadcasts: Broadcasts | None = None
    parked: Callable[[Thread, LiveRun], None] = lambda thread, live: None
    """Called after a run was parked, with its thread."""
    working: dict[tuple[str, str], Thread] = field(default_factory=dict[Any, Any])
    has_begun: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when a thread begins to work."""
    """The threads that have a run in this process, by principal and thread id."""


class Thread:
    """One of a principal's conversations, with its session, its feed and its active run.

    Its content is in the journal, so a thread without an active run can be dropped from memory and loaded
    again. Actions that change its runs are executed one at a time. Reading is possible during an action.
    """

    def __init__(self, id: str, principal: str, setup: Setup, feed: Feed) -> None:
        self.id = id
        self.principal = principal
        self.session_id = session_id_of(principal, id)
        self.feed = feed
        feed.owner = self
        self.live: LiveRun | None = None
        self.named: dict[str, str] = {}
        """The ids that a client gave to its user messages, by the ids that they have here."""
        self.problem = ""
        """Why the newest run in this process failed; "" if it did not."""
        self._setup = setup
        self._source = setup.source
        self._journal = setup.journal
        self._session: Session | None = None
        self._watch: Watch | None = None
        self._had_runs = False
        """Whether the journal had runs of the thread when it was last read."""
        self._lock = asyncio.Lock()

    @property
    def is_idle(self) -> bool:
        """Whether nothing is in progress, so that the thread can be dropped from memory."""
        return self.live is None and not self._lock.locked()

    # Reading.

    async def session(self, rows: Sequence[RunRow] | None = None) -> Session:
        """Return the session with everything that its runs have committed. It is empty if the thread has no runs."""
        if self._session is None and rows is not None and not rows:
            self._session = Session(id=self.session_id, principal=self.principal)
        elif self._session is None or await is_outdated(self._session, self._journal):
            try:
                self._session = await runs.session(self._journal, self.session_id, principal=self.principal)
            except SessionUnknown:
                self._session = Session(id=self.session_id, principal=self.principal)
        return self._session

    async def attachment(self, digest: str) -> bytes | None:
        """Return the bytes of one of this thread's attachments; None if none of its runs has it."""
        for row in await self._journal.runs.list(session_id=self.session_id):
            if digest in await self._journal.blobs.list(row.record.id):
                return await self._journal.blobs.get(digest)
        return None

    async def questions(self, rows: Sequence[RunRow] | None = None) -> Sequence[Question]:
        """Return the open questions. Here and elsewhere, `rows` are the thread's runs, if the caller has just read them."""
        row = await self.newest(rows)
        return () if row is None or row.status in OVER else await self._journal.questions.open(row.record.id)

    def state(self) -> Any:
        """Return the state that clients see. Returns None if no session is in memory, or if the source shows no slices."""
        live = self.live
        session = live.session if live is not None and live.has_started else self._session
        return None if session is None else self._shown(session)

    async def read_state(self) -> Any:
        """Return the state that clients see, from the journal if needed; None if the source shows no slices."""
        if not self._source.shown or (self.live is not None and self.live.has_started):
            return self.state()
        return self._shown(await self.session())

    async def messages(self) -> Sequence[Message]:
        """Return the messages, oldest first, including those of an unfinished run, but not those of nested runs."""
        return without_compactions(await self.run_messages())

    async def run_messages(self, rows: Sequence[RunRow] | None = None) -> Sequence[RunMessage]:
        """Return the messages that `messages` returns, each with the id of its run."""
        live = self.live
        if live is not None and live.has_started:
            unread = await unread_remarks(self._journal, live.run_id)
            return _with_unread(messages_in(live.session), live.run_id, unread)
        if rows is not None and not rows:
            return ()
        said = messages_in(await self.session())
        row = await self.newest(rows)
        if row is None or row.status in OVER:
            return said
        run_id = row.record.id
        unread = await unread_remarks(self._journal, run_id)
        compactions = compactions_in(await self._journal.calls.entries(run_id))
        own = with_compactions(run_id, await runs.said(self._journal, run_id), compactions)
        return [*said, *_with_unread(own, run_id, unread)]

    async def rows(self) -> Sequence[RunRow]:
        """Return the thread's runs, oldest first. If another process has deleted them, nothing of them stays in memory."""
        found = await self._journal.runs.list(session_id=self.session_id)
        rows = [row for row in found if row.record.principal == self.principal]
        if self._had_runs and not rows and self.live is None:
            self._drop()
        self._had_runs = bool(rows)
        return rows

    def _drop(self) -> None:
        self._session = None
        self.named.clear()
        self.feed.forget()

    async def newest(self, rows: Sequence[RunRow] | None = None) -> RunRow | None:
        """Return the thread's newest run, or None if it has no runs."""
        rows = await self.rows() if rows is None else rows
        return rows[-1] if rows else None

    async def check_known(self) -> None:
        """Raise `ThreadUnknown` if the thread has no runs."""
        if self.live is None and await self.newest() is None:
            raise ThreadUnknown(self.id)

    async def _session_as_decided(self) -> Session:
        """Return the session with all its remembered decisions, including those from other processes."""
        live = self.live
        session = live.session if live is not None and live.has_started else await self.session()
        if session.decisions is not None:
            await session.decisions.read()
        return session

    def _shown(self, session: Session) -> Any:
        if not self._source.shown:
            return None
        return {kind.__name__: plain_json(list(session[kind].all())) for kind in self._source.shown}

    # Actions.

    async def say(
        self,
        text: str,
        *,
        leg: str = "",
        history: Iterable[Message] = (),
        tools: Sequence[Tool[Any, Any]] = (),
        attachments: Sequence[Attachment] = (),
    ) -> str:
        """Start a run with a message, and return its id once it is recorded.

        Raises `ThreadBusy` while a run is active, `QuestionsOpen` if one waits for answers, `ServerStopping` at shutdown,
        and `NotForWorkers` if workers execute the runs and the message comes with tools or earlier messages. If the run fails
        before it is recorded, raises its error.
        """
        async with self._lock:
            self._check_accepting()
            rows = await self._check_free()
            run_id = self._setup.new_id()
            if self._setup.submit is not None:
                if tools or history:
                    raise NotForWorkers(self.id)
                watch = await self.watched()
                if watch is not None:
                    watch.expect(leg)
                await self._setup.submit(text, attachments, run_id, self)
                return run_id
            live = await self.begun(run_id, rows)
            stream = self._source.begin(
                text,
                run_id=run_id,
                session=live.session,
                environment=live,
                journal=self._journal,
                history=history,
                tools=tools,
                attachments=attachments,
            )
            await self.execute(live, stream, leg)
            return run_id

    async def answer(
        self,
        answers: Sequence[Answer],
        *,
        leg: str = "",
        remark: str = "",
        attachments: Sequence[Attachment] = (),
    ) -> str:
        """Accept answers to this thread's questions, continue the run, and return the id of its leg.

        The run's model is told the remark and its attachments after the results of its calls. They are recorded with an answer, so
        one of the answers must be new.

        Raises `AnswerRefused`, and accepts no answer, if one is invalid. If only the asking tool finds an answer invalid, the
        answers before it stay accepted. Repeating an answer is harmless, even after the run has ended.

        The returned id is "" if no leg opens here: for repeated answers, while the server stops, or if the run is executed
        elsewhere. If a worker continues the run and its broadcasts are watched here, `leg` is returned. Raises
        `ServerStopping` at shutdown if only a resumed run can take the answer, for example one with a secret.
        """
        async with self._lock:
            asked = await self._asked([each.question_id for each in answers])
            answers = _with_remark(answers, asked, remark, tuple(attachments))
            # read after the questions, because the run may have been parked in the meantime
            live = await self._settled()
            for each in answers:
                question, before = asked[each.question_id].question, asked[each.question_id].answer
                if before is None:
                    check_answer(question, each)
                    await self._check_can_resume(question)
                elif before.outcome == "timed out":
                    raise already_answered(question, before)
            if live is None:
                live = await self._resume_to_ask(answers, asked, leg)
            watch = await self.watched()
            if watch is not None:
                watch.expect(leg)
            taken = ""
            try:
                for each in answers:
                    self._journal.questions.answer(each)
                    if asked[each.question_id].answer is None:
                        taken = asked[each.question_id].question.run_id
            finally:
                if live is not None and taken:
                    leg = live.go_on(leg)
            if live is not None or not taken:
                return leg if taken else ""
            row = await self._journal.runs.get(taken)
            if row.queue and watch is not None:
                return leg  # a worker continues the run, and its leg gets this id here
            if self._setup.stopping or self._is_elsewhere(row):
                return ""  # the answer is recorded, and the next process that takes the run reads it
            return await self._go_on(taken, leg)

    async def queued(self, run_id: str) -> Sequence[QueuedMessage]:
        """Return the messages that were sent to one of this thread's runs. Raises `RunUnknown` if it has no such run."""
        await self._check_own(run_id)
        return await runs.messages(self._journal, run_id)

    async def send(self, run_id: str, text: str, *, when: When, id: str | None = None) -> runs.Receipt:
        """Say something to one of this thread's runs while it works, as `handrail.runs.send` does.

        If it is refused because the run is over, the next message may start a run. Raises `RunUnknown` if the thread has no
        such run.
        """
        await self._check_own(run_id)
        try:
            receipt = await runs.send(self._journal, run_id, text, when=when, by=self.principal, id=id)
        except MessageRefused:
            row = await self._journal.runs.get(run_id)
            if row.status in OVER and self.live is not None and self.live.run_id == run_id:
                await self.live.over()
            raise
        await self._show_queued(run_id)
        return receipt

    async def edit(
        self, run_id: str, message_id: str, *, text: str | None = None, when: When | None = None
    ) -> QueuedMessage:
        """Edit a message as `handrail.runs.edit` does, and return it. Raises `RunUnknown` if the thread has no such run."""
        await self._check_own(run_id)
        await runs.edit(self._journal, run_id, message_id, text, when=when, by=self.principal)
        return (await self._show_queued(run_id))[message_id]

    async def withdraw(self, run_id: str, message_id: str) -> QueuedMessage:
        """Withdraw a message as `handrail.runs.withdraw` does, and return it. Raises `RunUnknown` if the thread has no such run."""
        await self._check_own(run_id)
        await runs.withdraw(self._journal, run_id, message_id, by=self.principal)
        return (await self._show_queued(run_id))[message_id]

    async def order(
        self, run_id: str, order: Order | Literal["continue"], text: str = ""
    ) -> runs.Receipt | None:
        """Give one of this thread's runs an order, or continue it, as the functions of `handrail.runs` do. Its pause may end with that.

        Returns the receipt of an order. Raises `RunUnknown` if the thread has no such run.
        """
        await self._check_own(run_id)
        is_paused = any(each.kind == "pause" for each in await self.questions())
        give = {"pause": runs.pause, "wrap up": runs.wrap_up, "stop": runs.stop, "continue": runs.go_on}
        receipt = await give[order](self._journal, run_id, text, by=self.principal)
        await self._show_queued(run_id)
        if is_paused and order != "pause" and not self._setup.stopping:
            await self.go_on()
        return receipt

    async def _check_own(self, run_id: str) -> None:
        if (await self._journal.runs.get(run_id)).record.session_id != self.session_id:
            raise RunUnknown(run_id)

    async def _show_queued(self, run_id: str) -> Mapping[str, QueuedMessage]:
        """Return the messages to a run, by id. If it is not executed here, and so tells its readers nothing, they are told about them."""
        found = await runs.messages(self._journal, run_id)
        if self.live is None or self.live.is_parking:
            self.feed.append([queued_event(run_id, each) for each in found if each.state != "told"])
        return {each.id: each for each in found}

    async def cancel(self) -> None:
        """Cancel the active or waiting run, if there is one. If another process executes it, that process stops it soon."""
        async with self._lock:
            live = await self._settled()
            if live is not None:
                await live.cancel()
            row = await self.newest()  # read in any case, because the run may have been parked just now
            if row is None or row.status in OVER:
                return
            ended = await runs.cancel(self._journal, row.record.id)
            # the session in memory is outdated, because only the journal has the cancellation
            self._session = None
            if ended.status in OVER and (live is None or live.parked):
                told = Translator(self.id, row.record.id)
                self.feed.append([*told.begin_leg(self._setup.new_id()), *told.cancel()])

    @property
    def files(self) -> Any:
        """The filesystem that the thread's runs change; None if they have no files."""
        return self._source.files_of(self.principal)

    async def undo(self, call_id: str) -> Undoing:
        """Undo what one of this thread's calls committed.

        Raises `UndoRefused` if that is not possible, `RunBusy` while a process has one of the thread's runs in memory,
        and `WorkspaceBusy` while a run is using the workspace.
        """
        async with self._lock:
            live = await self._settled()
            if live is not None:
                raise RunBusy(live.run_id, _HERE)
            units = await self._journal.calls.load_session(self.session_id)
            unit = next((unit for unit in units if unit.call_id == call_id), None)
            if unit is None:
                raise UndoRefused(call_id, (), "this thread has no finished call with this id")
            try:
                done = await runs.undo(
                    self._journal,
                    unit.run_id,
                    call_id,
                    self.files,
                    session=self._session,
                    clock=self._setup.clock,
                )
            except RunBusy as busy:
                raise RunBusy(busy.run_id, _ELSEWHERE) from None
            told = {"call_id": call_id, "paths": list(done.paths)}
            events = [custom("handrail.undone", told)]
            if self._source.shown:
                events.append(Event({"type": "STATE_SNAPSHOT", "snapshot": await self.read_state()}))
            self.feed.append(events)
            return done

    async def approvals(self) -> Sequence[ApprovalRemembered]:
        """Return the remembered decisions that have not been revoked, in the order in which they were added."""
        return approvals_of(await self._session_as_decided()).list()

    async def revoke(self, approval_id: str) -> None:
        """Revoke a remembered decision, for the active run too. Raises `SessionError` if there is no such decision."""
        approvals_of(await self._session_as_decided()).revoke(approval_id, self.principal)

    async def forget(self) -> None:
        """Delete the thread and its runs.

        Raises `ThreadBusy` while a process has one of the runs in memory, and `ThreadUnknown` if there are no runs.
        """
        async with self._lock:
            rows = await self.rows()
            if await self._settled() is not None or any(self._is_leased(row) for row in rows):
                raise ThreadBusy(self.id)
            if not rows:
                raise ThreadUnknown(self.id)
            await self._journal.runs.forget([row.record.id for row in rows])
            self._had_runs = False
            self._drop()

    # Called by the server.

    async def go_on(self) -> None:
        """Resume the newest run if it was parked or its process ended, unless it is executed elsewhere."""
        async with self._lock:
            row = await self.newest()
            if self.live is not None or row is None or row.status in OVER or self._is_elsewhere(row):
                return
            await self._go_on(row.record.id)

    async def watched(self) -> Watch | None:
        """Start to follow what other processes broadcast about this thread's runs, and return the watch.

        The watch ends a while after the last reader has left the feed. Returns None

        - if the journal has no broadcasts, or the server is stopping,
        - if this process executes a run of the thread, or
        - if runs are not submitted to workers, and the thread has no unfinished run that is executed elsewhere.
        """
        broadcasts = self._setup.broadcasts
        if self.live is not None or broadcasts is None or self._setup.stopping:
            return None
        if self._setup.submit is None:
            row = await self.newest()
            if row is None or row.status in OVER or not self._is_elsewhere(row):
                return None
        if self._watch is None or self._watch.is_over:
            self._watch = Watch(broadcasts, self._journal, self.session_id, self.feed, self._setup.new_id())
        await self._watch.start()
        self._session = None  # the session in memory lacks what other processes have added
        return self._watch

    async def opening(self) -> Joined | None:
        """Return the state of a run that another process executes.

        Returns None if there is no such run, if it can't be watched, if it has no open leg, or if that process does not
        reply in time.
        """
        watch = await self.watched()
        row = None if watch is None else await self.newest()
        if watch is None or row is None or row.status in OVER or not self._is_leased(row):
            return None
        return await watch.join()

    async def stop_watching(self) -> None:
        """End the watch, if there is one."""
        if self._watch is not None:
            await self._watch.stop()

    async def park(self, grace: float) -> None:
        """Park the active run, if there is one. If it is still working after `grace` seconds, cut it off."""
        live = self.live
        if live is None:
            return
        await live.park(grace)
        if live.was_cut and live.parked:
            # The run was cut off, so the next process must resume it even if a question is open.
            await self._journal.runs.take(live.run_id, turn="none")
            await self._journal.runs.leave(live.run_id, "running")

    # Running.

    def _check_accepting(self) -> None:
        if self._setup.stopping:
            raise ServerStopping(self.id)

    async def _check_free(self) -> Sequence[RunRow]:
        """Return the thread's runs. Raises `ThreadBusy` or `QuestionsOpen` if one of them is not over."""
        live = await self._settled()
        if live is not None:
            if live.leg or not live.questions:
                raise ThreadBusy(self.id)
            raise QuestionsOpen(self.id, len(live.questions))
        rows = await self.rows()
        if rows and rows[-1].status not in OVER:
            if rows[-1].questions:
                raise QuestionsOpen(self.id, rows[-1].questions)
            raise ThreadBusy(self.id)
        return rows

    async def _settled(self) -> LiveRun | None:
        """Return the run that this process executes, or None if it executes none. A run that is being parked is awaited first."""
        if self.live is not None and self.live.is_parking:
            await self.live.over()
        return self.live

    async def _asked(self, ids: Iterable[str]) -> Mapping[str, QuestionRecord]:
        """Return all questions, by id, of the runs that asked the questions with these ids.

        Raises `AnswerRefused` if an id is unknown.
        """
        wanted, found = set(ids), dict[str, QuestionRecord]()
        for row in reversed(await self.rows()):
            if not wanted:
                break
            if any(is_in_run(id, row.record.id) for id in wanted):
                found |= {
                    each.question.id: each for each in await self._journal.questions.history(row.record.id)
                }
                wanted -= found.keys()
        if wanted:
            raise AnswerRefused(min(wanted), "this thread has no such question", "Load the thread again.")
        return found

    async def _check_can_resume(self, question: Question) -> None:
        """Raise `AnswerRefused` if no process holds the question's run and this server's prompt can't resume it."""
        row = await self._journal.runs.get(question.run_id)
        if not row.held and not self._source.owns(row.record):
            problem = f"its run used the prompt {row.record.prompt!r}, and the prompt served here has another name or app"
            raise AnswerRefused(question.id, problem, "Serve that prompt, or cancel the run.")

    def _is_elsewhere(self, row: RunRow) -> bool:
        """Return whether another live process holds this run, it was submitted to workers, or it belongs to a different app."""
        return bool(row.queue) or not self._source.owns(row.record) or self._is_leased(row)

    async def _is_here(self, run_id: str) -> bool:
        return not self._is_elsewhere(await self._journal.runs.get(run_id))

    def _is_leased(self, row: RunRow) -> bool:
        return row.held and row.owner != self._journal.owner

    async def begun(self, run_id: str, rows: Sequence[RunRow] | None = None) -> LiveRun:
        """Create a run of this thread. `execute` starts it."""
        session = await self.session(rows)
        told = Translator(
            self.id,
            run_id,
            history=lambda: render_thread(messages_in(session), nested_messages_in(session), self.named),
            clock=self._setup.clock,
        )
        return LiveRun(run_id, session, self.feed, told, setup=self._setup, state=self.state)

    async def resumed(self, tree: runs.RunTree) -> LiveRun:
        """Load a recorded run of this thread. `execute` continues it."""
        run_id = tree.row.record.id
        said = await self.run_messages()
        session = Session(id=self.session_id, principal=self.principal)
        told = Translator(
            self.id,
            run_id,
            known=Known.of(render(said)),
            history=lambda: render_thread(messages_in(session), nested_messages_in(session), self.named),
            said=lambda nested: without_compactions(
                each for each in nested_messages_in(session) if each.run_id == nested
            ),
            usage=tree.usage,
            cost=tree.cost,
            clock=self._setup.clock,
        )
        live = LiveRun(run_id, session, self.feed, told, setup=self._setup, state=self.state)
        live.recall(without_compactions(each for each in said if each.run_id == run_id))
        inside = await read_nested(self._journal, [tree.row])
        for nested in dict.fromkeys(each.run_id for each in inside):
            told.recall(nested, without_compactions(each for each in inside if each.run_id == nested))
        return live

    async def _go_on(self, run_id: str, leg: str = "", *, stays: bool = False) -> str:
        """Resume a run that this process is not executing, and return the id of the leg in which it continues.

        With `stays`, it is not parked the first time it waits, because a question is about to be closed. A client's tools are rebuilt from the journal, so no client needs to be connected.
        """
        self._check_accepting()
        tree = await runs.show(self._journal, run_id)
        live = await self.resumed(tree)
        live.stays = stays
        stream = self._source.resume(
            run_id,
            session=live.session,
            environment=live,
            journal=self._journal,
            tools=frontend_tools_of(tree.begin.offered, tree.begin.added),
        )
        await self.execute(live, stream, leg)
        return live.leg or leg

    async def _resume_to_ask(
        self, answers: Sequence[Answer], asked: Mapping[str, QuestionRecord], leg: str
    ) -> LiveRun | None:
        """Resume a parked run if an answer can't reach it through the journal. Returns the active run, or None.

        This is necessary if a question is cancelled, or answered with a secret, which the journal does not keep. Raises
        `AnswerRefused` if the run of such a question was submitted to workers.
        """
        left: list[Question] = []
        for each in answers:
            question = asked[each.question_id].question
            if asked[question.id].answer is not None:
                continue
            given = question.secret and each.outcome == "answered"
            if (given or each.outcome == "cancelled") and (
                await self._journal.runs.get(question.run_id)
            ).queue:
                problem = "a worker executes its run, so it can't be cancelled or answered with a secret"
                raise AnswerRefused(question.id, problem, "Decline the question, or cancel the run.")
            if each.outcome == "cancelled" or (given and await self._is_here(question.run_id)):
                left.append(question)
        if left:
            await self._go_on(left[0].run_id, leg, stays=True)
            for question in left:
                if self.live is not None:
                    await self.live.wait_for_question(question.id)
        return self.live

    async def execute(self, live: LiveRun, stream: RunStream[Any], leg: str) -> None:
        """Start to execute a run in this process. Returns when it is recorded; raises its error if it fails before that."""
        self.live = live
        self._setup.working[self.principal, self.id] = self
        self._setup.has_begun.set()
        await live.start(stream, leg, self._over)

    def _over(self, live: LiveRun) -> None:
        if self.live is live:
            self.live, self.problem = None, live.problem
            self._setup.working.pop((self.principal, self.id), None)
            self._session = live.session if live.has_started and not live.parked else None
            if live.parked:
                self._setup.parked(self, live)


def _with_unread(
    messages: Sequence[RunMessage], run_id: str, unread: UserMessage | None
) -> Sequence[RunMessage]:
    """Return a run's messages with the one that its model had not been told when `unread` was read, which is before `messages`."""
    if unread is None:
        return messages
    told = [each for run, each in messages if run == run_id and isinstance(each, UserMessage) and each.midway]
    return messages if told[-1:] == [unread] else [*messages, RunMessage(run_id, unread)]


def _with_remark(
    answers: Sequence[Answer],
    asked: Mapping[str, QuestionRecord],
    remark: str,
    attachments: tuple[Attachment, ...],
) -> Sequence[Answer]:
    """Return the answers with the remark on one that is new: on the last, or else on one that cancels its question.

    A cancellation is not recorded. A repeated answer gets the remark with which it was recorded, so that it is the same.
    """
    found: list[Answer] = []
    for each in answers:
        before = asked[each.question_id].answer
        said = (each.remark, each.attachments) if before is None else (before.remark, before.attachments)
        found.append(msgspec.structs.replace(each, remark=said[0], attachments=said[1]))
    new = [at for at, each in enumerate(found) if asked[each.question_id].answer is None]
    if (remark or attachments) and new:
        at = max(new, key=lambda at: (found[at].outcome != "cancelled", at))
        found[at] = msgspec.structs.replace(found[at], remark=remark, attachments=attachments)
    return found
