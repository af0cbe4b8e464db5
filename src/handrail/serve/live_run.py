"""`LiveRun`: a thread's run while this process executes it. `Emissions`: the events that its tools emit."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from handrail.clock import Clock
from handrail.concurrency.cancellation import shielded
from handrail.errors import HandrailError, JournalError, PromptEvaluationError, RunBusy, RunParked
from handrail.events import ApprovalDecided, Emitted, PromptRendered, QuestionAnswered, ToolInvoked
from handrail.journal.protocol import Journal
from handrail.journal.records import Entry
from handrail.messages import Message
from handrail.question import Question
from handrail.run.host import Host
from handrail.run.place import is_in_run
from handrail.serve.agui.translator import Translator
from handrail.serve.agui.wire_events import plain_json
from handrail.serve.feed import Event, Feed
from handrail.serve.refusals import journal_refusal
from handrail.text.raised_errors import place_of

if TYPE_CHECKING:
    from handrail.run.record.parking import Parking
    from handrail.run.response import RunStream
    from handrail.serve.thread import Setup
    from handrail.session import Session


log = logging.getLogger("handrail.serve")


_STOPPING = "The server is stopping. The run resumes when the server is back: follow the thread again."


class LiveRun(Host):
    """A run, from its start or resumption in this process until it ends or is parked.

    The run's events go to the thread's feed, in legs. A leg ends when the run ends, or when everything in the run
    waits for an answer. The next leg begins when the run continues. The run never waits for a reader.
    """

    def __init__(
        self,
        run_id: str,
        session: Session,
        feed: Feed,
        translator: Translator,
        *,
        setup: Setup,
        state: Callable[[], Any],
    ) -> None:
        super().__init__(run_id, park_after=setup.park_after, voters=setup.voters)
        self.session = session
        self.questions: dict[str, Question] = {}
        """The open questions, by id."""
        self.emissions = Emissions(setup.journal, run_id, setup.clock)
        self.parked = False
        self.problem = ""
        """Why the run failed in this process; "" if it did not."""
        self.due_at: float | None = None
        """When the parked run goes on without an answer, as in `RunParked`; None if it does not."""
        self.was_answered = False
        """Whether an answer arrived just as the run was being parked."""
        self._feed = feed
        self._translator = translator
        self._state = state
        self._setup = setup
        self._reported: set[str] = set()
        """The ids of the calls whose file changes have been reported."""
        self._has_committed = False
        self._reporting: asyncio.Task[None] | None = None
        self._first_leg = ""
        self._loop = asyncio.get_running_loop()
        self._started: asyncio.Future[None] = self._loop.create_future()
        self._changed = asyncio.Event()
        self._failure: Exception | None = None
        self._is_cancelled = self._is_stopping = self._is_over = self._is_resumed = False

    @property
    def leg(self) -> str:
        """The id of the open leg, or "" if no leg is open."""
        return self._translator.leg or ""

    @property
    def has_started(self) -> bool:
        """Whether the run has been recorded, or ended before that."""
        return self._started.done()

    @property
    def is_parking(self) -> bool:
        """Whether the run is being parked, or has been. If so, answers go to the journal, not to this run."""
        return self.parking is not None and self.parking.parked

    # Called by the `Thread` that owns the run.

    def recall(self, said: Sequence[Message]) -> None:
        """Record which messages of a resumed run were already sent, so that they are not sent again."""
        self._is_resumed = True
        self._translator.recall(self.run_id, said)

    async def start(self, stream: RunStream[Any], leg: str, over: Callable[[LiveRun], None]) -> None:
        """Start the run, and return when it is recorded. Raises the run's error if it fails before that.

        `over` is called when this process no longer executes the run.
        """
        self._first_leg = leg
        self.execute(self._execute(stream, over))
        await asyncio.wait({self._started})
        if self._failure is not None:
            raise self._failure

    def go_on(self, leg: str = "") -> str:
        """Open the next leg, unless one is open. Returns the id of the open leg."""
        if not self.leg:
            self.wake()
            self._feed.append(self._translator.begin_leg(leg or self._setup.new_id(), self._state()))
        return self.leg

    async def ask(self, question: Question, /) -> None:
        """Show the question to the thread's readers. Its answer arrives through the journal."""
        self.wake()
        self.questions[question.id] = question
        self._feed.append(self._translator.ask(question))
        self._changed.set()

    def run_waiting(self, parking: Parking) -> None:
        """End the leg, because everything in the run waits for an answer, and park the run as a `Host` does."""
        if self.leg and self.questions:
            self._feed.append(self._translator.interrupt(list(self.questions.values()), self._state()))
            self._changed.set()
        super().run_waiting(parking)

    def open(self) -> Sequence[Event]:
        """Return the events that bring a newly joined client up to date."""
        return self._translator.open()

    async def wait_for_question(self, question_id: str) -> bool:
        """Wait until the run asks this question. Returns False if the run ends or waits without asking it."""
        while question_id not in self.questions and not self._is_over and (self.leg or not self.has_started):
            self._changed.clear()
            await self._changed.wait()
        return question_id in self.questions

    async def cancel(self) -> None:
        """Cancel the run and wait for its end. Calls in progress are rolled back."""
        self._is_cancelled = True
        if self._task is not None:
            self._task.cancel()
        await self.over()

    async def park(self, grace: float) -> None:
        """Park the run as `Host.park` does. Its readers are told that the server is stopping."""
        self._is_stopping = True
        await super().park(grace)

    # Execution.

    async def _execute(self, stream: RunStream[Any], over: Callable[[LiveRun], None]) -> None:
        stop = self.session.dispatcher.subscribe(object, self._hear)
        try:
            ended = await self._outcome(stream)
            # report changes before the end, even if this task is cancelled now
            if self._reporting is not None:
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.wait({self._reporting})
            await shielded(self.emissions.finish())
        finally:
            stop()
            self.wake()
            over(self)
        if ended is not None:
            self.go_on(self._first_leg)
            self._feed.append(ended())
        self._is_over = True
        self._mark_started()
        self._changed.set()

    async def _outcome(self, stream: RunStream[Any]) -> Callable[[], Sequence[Event]] | None:
        """Wait for the run's end.

        Returns a function that builds the final events, or None if the run was parked after its leg had ended.
        """
        translator = self._translator
        try:
            response = await stream.response
        except RunParked as parked:
            self.parked = True
            waits = {each.id: each for each in parked.questions}
            self.was_answered = not waits or not self.questions.keys() <= waits.keys()
            self.questions, self.due_at = waits, parked.due_at
            if self.leg and self._is_stopping:
                return lambda: translator.fail(_STOPPING, "ServerStopping")
            return None  # the run's leg has already ended
        except asyncio.CancelledError:
            if self._is_stopping and not self._is_cancelled:
                return lambda: translator.fail(_STOPPING, "ServerStopping")
            return translator.cancel
        except PromptEvaluationError as error:
            if self._is_cancelled or error.phase == "cancelled":
                return translator.cancel
            log.warning("run %s failed: %s", self.run_id, error, extra={"run_id": self.run_id})
            return self._fail(str(error), error.phase)
        except JournalError as error:
            self._failure = None if self.has_started else error
            return self._fail(str(journal_refusal(error, self.run_id)), type(error).__name__)
        except HandrailError as error:
            self._failure = None if self.has_started else error
            log.warning("run %s failed: %s", self.run_id, error, extra={"run_id": self.run_id})
            return self._fail(str(error), type(error).__name__)
        except Exception as error:
            self._failure = None if self.has_started else error
            where = "an error in the app's code" if place_of(error) else "an internal server error"
            log.exception("run %s ended with %s", self.run_id, where, extra={"run_id": self.run_id})
            message = f"The run ended with {where}: {type(error).__name__}. The server's log has the details."
            return self._fail(message, "internal")
        return lambda: translator.finish(output=response.output, stop_reason=response.stop_reason)

    def _fail(self, message: str, code: str) -> Callable[[], Sequence[Event]]:
        self.problem = message
        return lambda: self._translator.fail(message, code)

    # Events.

    def _hear(self, event: object) -> None:
        context = getattr(event, "run_context", None)
        run_id = getattr(context, "run_id", None) or getattr(event, "run_id", "")
        if is_in_run(run_id, self.run_id):
            if asyncio._get_running_loop() is self._loop:  # pyright: ignore[reportPrivateUsage]  # asyncio documents it for this
                self._take(event)
            else:
                self._loop.call_soon_threadsafe(self._take, event)

    def _take(self, event: object) -> None:
        if self._is_over:
            return  # the event comes from an operating system thread that outlived its call
        starts = isinstance(event, PromptRendered) and event.run_context.run_id == self.run_id
        if not self.has_started:
            if not starts:
                return  # this is history that a client sent, added before the run is recorded
            self.go_on(self._first_leg)
            self._mark_started()
        if starts and self._is_resumed:
            return  # `recall` has already recorded which messages were sent
        if isinstance(event, QuestionAnswered | ApprovalDecided):
            self.questions.pop(event.question_id, None)
        self._feed.append(self._translator.take(event))
        if isinstance(event, Emitted):
            self.emissions.add(event)
        elif isinstance(event, ToolInvoked):
            self.emissions.end_call(event.call_id)
        if isinstance(event, ToolInvoked) and event.status == "ok" and len(event.path) == 1:
            self._feed.append(self._translator.changed(self._state()))
            self._has_committed = True
            if self._reporting is None:
                self._reporting = self._loop.create_task(self._report_changes())

    async def _report_changes(self) -> None:
        """Report the file changes of finished calls, as the journal recorded them.

        One query covers all calls that finished before it.
        """
        try:
            while self._has_committed:
                self._has_committed = False
                for unit in await self._setup.journal.calls.load(self.run_id):
                    if unit.call_id not in self._reported:
                        self._reported.add(unit.call_id)
                        paths = paths_in(unit.writes)
                        self._feed.append(self._translator.committed(unit.call_id, unit.diff, paths))
        except JournalError as error:
            log.log(
                error.retry_level, "could not read the file changes of run %s", self.run_id, exc_info=True
            )
        finally:
            self._reporting = None

    def _mark_started(self) -> None:
        if not self._started.done():
            self._started.set_result(None)


def paths_in(writes: Iterable[str]) -> list[str]:
    """Return the paths of the files among the places that a call wrote."""
    return [place.removeprefix("file ") for place in writes if place.startswith("file ")]


# --- emitted events -----------------------------------------------------------------------------------


_MOST = 100
"""Maximum number of events that are kept for each call. The page shows the same number."""


class Emissions:
    """The newest events that each call of a live run emitted.

    The events of a call are recorded when it ends, or when this process no longer executes the run. A call that is
    executed again emits its events again, and these replace the recorded ones.
    """

    def __init__(self, journal: Journal, run_id: str, clock: Clock) -> None:
        self._journal = journal
        self._run_id = run_id
        self._clock = clock
        self._calls: dict[str, list[dict[str, Any]]] = {}
        self._unrecorded: set[str] = set()
        self._recording: set[asyncio.Task[None]] = set()

    def add(self, event: Emitted) -> None:
        shown = {"tool": event.tool, "type": type(event.event).__name__, "event": plain_json(event.event)}
        self._calls[event.call_id] = [*self._calls.get(event.call_id, ()), shown][-_MOST:]
        self._unrecorded.add(event.call_id)

    def by_call(self) -> Mapping[str, Sequence[Any]]:
        """Return the events by the id of the call that emitted them."""
        return dict(self._calls)

    def end_call(self, call_id: str) -> None:
        """Start recording the events of a call that has ended."""
        if call_id in self._unrecorded:
            task = asyncio.get_running_loop().create_task(self._record(call_id))
            self._recording.add(task)
            task.add_done_callback(self._recording.discard)

    async def finish(self) -> None:
        """Record all events that are not recorded yet. Called when this process no longer executes the run."""
        if self._recording:
            await asyncio.wait(tuple(self._recording))
        for call_id in sorted(self._unrecorded):
            await self._record(call_id, is_over=True)

    async def _record(self, call_id: str, *, is_over: bool = False) -> None:
        """Record the events of a call. A failure is logged.

        If this process no longer owns the run, nothing is recorded without `is_over`.
        """
        shown = self._calls[call_id]
        entry = Entry("emitted", call_id, self._clock.now().timestamp(), msgspec.msgpack.encode(shown))
        note = self._journal.calls.note
        try:
            try:
                await note(self._run_id, entry)
            except RunBusy:
                if not is_over:
                    return  # this process no longer owns the run, and `finish` tries again
                await note(self._run_id, entry, from_outside=True)
        except HandrailError as error:
            log.log(error.retry_level, "could not record the events that %s emitted", call_id, exc_info=True)
            return
        if self._calls[call_id] is shown:
            self._unrecorded.discard(call_id)
