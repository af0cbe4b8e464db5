"""`LiveRun`: a run of a thread that this process carries out, leg by leg."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any

from handrail.errors import HandrailError, JournalError, PromptEvaluationError, RunParked
from handrail.events import ApprovalDecided, PromptRendered, QuestionAnswered, ToolInvoked
from handrail.messages import Message
from handrail.place import is_in_run
from handrail.question import Question
from handrail.records import CommitUnit
from handrail.serve.agui.translator import Translator
from handrail.serve.asking import BrowserEnvironment
from handrail.serve.feed import Event, Feed

if TYPE_CHECKING:
    from handrail.adapter.stream import RunStream
    from handrail.session import Session

log = logging.getLogger("handrail.serve")

_STOPPING = "The server is stopping. The run goes on when it is back: follow the thread again."
_LEAST_TO_END = 1.0
"""How many seconds a run that is cut has to end, however short the grace was."""


class LiveRun:
    """One run, from its beginning or its resumption here to its end, or until it is parked.

    What it does goes to the thread's feed, in legs: a leg ends when the run is over or when everything
    in it waits for somebody, and another begins when it goes on. Nothing here waits for a reader.
    """

    def __init__(
        self,
        run_id: str,
        session: Session,
        feed: Feed,
        translator: Translator,
        *,
        state: Callable[[], Any],
        commits: Callable[[], Awaitable[Sequence[CommitUnit]]],
        new_leg: Callable[[], str],
        park_after: float | None,
    ) -> None:
        self.run_id = run_id
        self.session = session
        self.environment = BrowserEnvironment(asked=self._asked, rested=self.rest, park_after=park_after)
        self.questions: dict[str, Question] = {}
        """What waits for an answer."""
        self.parked = False
        self.was_answered = False
        """Was it parked in the moment in which an answer came?"""
        self._feed = feed
        self._translator = translator
        self._state = state
        self._commits = commits
        self._told_of: set[str] = set()
        """The calls of which is known what they did to files."""
        self._has_committed = False
        self._looking: asyncio.Task[None] | None = None
        self._new_leg = new_leg
        self._first_leg = ""
        self._loop = asyncio.get_running_loop()
        self._task: asyncio.Task[None] | None = None
        self._begun: asyncio.Future[None] = self._loop.create_future()
        self._changed: asyncio.Future[None] | None = None
        self._failure: Exception | None = None
        self._is_cancelled = self._is_stopping = self._is_over = self._is_resumed = False

    @property
    def leg(self) -> str:
        """The leg that is open; "" while everything waits."""
        return self._translator.leg or ""

    @property
    def has_begun(self) -> bool:
        """Is it recorded, and its session as it was when it began?"""
        return self._begun.done()

    @property
    def leaves(self) -> bool:
        """Is it being parked? Then it takes no answer any more; the journal does."""
        parking = self.environment.parking
        return parking is not None and parking.parked

    # What its thread does with it.

    def recall(self, said: Sequence[Message]) -> None:
        """Let it be known what a run that is resumed here has said: nobody says it again."""
        self._is_resumed = True
        self._translator.recall(self.run_id, said)

    async def start(self, stream: RunStream[Any], leg: str, over: Callable[[LiveRun], None]) -> None:
        """Carry it out. It is recorded when this returns; what kept it from that is raised.

        `over` is told when this process has it no more.
        """
        self._first_leg = leg
        self._task = self._loop.create_task(self._carry(stream, over), name=f"run {self.run_id}")
        await asyncio.wait({self._begun})
        if self._failure is not None:
            raise self._failure

    def go_on(self, leg: str = "") -> str:
        """Open the next leg, unless one is open; the one that is now."""
        if not self.leg:
            self.environment.go_on()
            self._feed.append(self._translator.begin_leg(leg or self._new_leg(), self._state()))
        return self.leg

    def rest(self) -> None:
        """Everything waits: the leg ends, and says for what."""
        if self.leg and self.questions:
            self._feed.append(self._translator.interrupt(list(self.questions.values()), self._state()))
            self._tell_change()

    def open(self) -> Sequence[Event]:
        """What somebody who joins now must be told to follow."""
        return self._translator.open()

    async def asks(self, question_id: str) -> bool:
        """Wait until it asks this; False where it rests, or is over, without."""
        while question_id not in self.questions and not self._is_over and (self.leg or not self.has_begun):
            if self._changed is None:
                self._changed = self._loop.create_future()
            await asyncio.wait({self._changed})
        return question_id in self.questions

    async def cancel(self) -> None:
        """End the run, and what is under way is undone."""
        self._is_cancelled = True
        if self._task is not None:
            self._task.cancel()
        await self.over()

    async def park(self, grace: float) -> None:
        """Leave the run to the journal: at rest where it comes to that in time, else as if we had died."""
        self._is_stopping = True
        self.environment.leave()
        if self._task is None or (await asyncio.wait({self._task}, timeout=grace))[0]:
            return
        if not self.environment.cut():
            self._task.cancel()  # nothing of it has begun here
        await asyncio.wait({self._task}, timeout=max(grace, _LEAST_TO_END))

    async def over(self) -> None:
        """Wait until this process has it no more."""
        if self._task is not None:
            await asyncio.wait({self._task})

    # What becomes of it.

    async def _carry(self, stream: RunStream[Any], over: Callable[[LiveRun], None]) -> None:
        stop = self.session.dispatcher.subscribe(object, self._hear)
        try:
            ended = await self._ended(stream)
            if self._looking is not None:  # before the end is told, also if it is cancelled in this moment
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.wait({self._looking})
        finally:
            stop()
            self.environment.go_on()
            over(self)
        if ended is not None:
            self.go_on(self._first_leg)
            self._feed.append(ended())
        self._is_over = True
        self._has_begun()
        self._tell_change()

    async def _ended(self, stream: RunStream[Any]) -> Callable[[], Sequence[Event]] | None:
        """How the run ended, to be said; None where it was parked."""
        translator = self._translator
        try:
            response = await stream.response
        except RunParked as parked:
            self.parked = True
            waits = {each.id: each for each in parked.questions}
            self.was_answered = not waits or not self.questions.keys() <= waits.keys()
            self.questions = waits
            if self.leg and self._is_stopping:
                return lambda: translator.fail(_STOPPING, "ServerStopping")
            return None  # it rested before, and said so
        except asyncio.CancelledError:
            if self._is_stopping and not self._is_cancelled:
                return lambda: translator.fail(_STOPPING, "ServerStopping")
            return translator.cancel
        except PromptEvaluationError as error:
            if self._is_cancelled or error.phase == "cancelled":
                return translator.cancel
            message, code = str(error), error.phase
            return lambda: translator.fail(message, code)
        except HandrailError as error:
            self._failure = None if self.has_begun else error
            message, code = str(error), type(error).__name__
            return lambda: translator.fail(message, code)
        except Exception as error:
            self._failure = None if self.has_begun else error
            log.exception("run %s ended in an error of ours", self.run_id)
            message = (
                f"The run ended in an error of the server: {type(error).__name__}. Its log has the rest."
            )
            return lambda: translator.fail(message, "internal")
        return lambda: translator.finish(output=response.output)

    # What happens in it.

    def _asked(self, question: Question) -> None:
        self.questions[question.id] = question
        self._feed.append(self._translator.asked(question))
        self._tell_change()

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
            return  # said by a thread that outlived its call
        begins = isinstance(event, PromptRendered) and event.run_context.run_id == self.run_id
        if not self.has_begun:
            if not begins:
                return  # what was said elsewhere is taken over, before the run is recorded
            self.go_on(self._first_leg)
            self._has_begun()
        if begins and self._is_resumed:
            return  # the translator knows how far it was
        if isinstance(event, QuestionAnswered | ApprovalDecided):
            self.questions.pop(event.question_id, None)
        self._feed.append(self._translator.take(event))
        if isinstance(event, ToolInvoked) and event.status == "ok" and len(event.path) == 1:
            self._feed.append(self._translator.changed(self._state()))
            self._has_committed = True
            if self._looking is None:
                self._looking = self._loop.create_task(self._look_at_commits())

    async def _look_at_commits(self) -> None:
        """Say what calls that are over did to files: the record knows. One look is for all that are over by then."""
        try:
            while self._has_committed:
                self._has_committed = False
                for unit in await self._commits():
                    if unit.call_id not in self._told_of:
                        self._told_of.add(unit.call_id)
                        paths = [place[5:] for place in unit.writes if place.startswith("file ")]
                        self._feed.append(self._translator.committed(unit.call_id, unit.diff, paths))
        except JournalError:
            log.warning(
                "what calls of run %s did to files could not be looked up", self.run_id, exc_info=True
            )
        finally:
            self._looking = None

    def _has_begun(self) -> None:
        if not self._begun.done():
            self._begun.set_result(None)

    def _tell_change(self) -> None:
        changed, self._changed = self._changed, None
        if changed is not None:
            changed.set_result(None)
