"""`LiveRun`: a run of a thread that this process carries out, leg by leg."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from handrail.errors import HandrailError, PromptEvaluationError, RunParked
from handrail.events import ApprovalDecided, QuestionAnswered
from handrail.question import Question
from handrail.serve.agui.translate import Translator
from handrail.serve.asking import BrowserEnvironment
from handrail.serve.feed import Event, Feed

if TYPE_CHECKING:
    from handrail.adapter.stream import RunStream
    from handrail.session import Session

log = logging.getLogger("handrail.serve")


class LiveRun:
    """One run, from its beginning or its resumption here to its end, or until it is parked.

    What it does goes to the thread's feed, in legs: a leg ends when the run is over or when everything
    in it waits for somebody, and another begins when it goes on.
    """

    def __init__(
        self,
        run_id: str,
        session: Session,
        feed: Feed,
        translator: Translator,
        *,
        state: Callable[[], Any],
        new_leg: Callable[[], str],
        park_after: float,
    ) -> None:
        self.run_id = run_id
        self.session = session
        self.environment = BrowserEnvironment(asked=self._asked, rested=self.rest, park_after=park_after)
        self.questions: dict[str, Question] = {}
        """What waits for an answer."""
        self.leg = ""
        """The leg that is open; "" while everything waits."""
        self.task: asyncio.Task[None] | None = None
        self.cancelled = False
        self._feed = feed
        self._translator = translator
        self._state = state
        self._new_leg = new_leg
        self._loop = asyncio.get_running_loop()

    def start(self, stream: RunStream[Any], leg: str, over: Callable[[LiveRun], None]) -> None:
        """Carry it out; `over` is told when this process has it no more."""
        self.go_on(leg)
        self.task = self._loop.create_task(self._carry(stream, over), name=f"run {self.run_id}")

    def go_on(self, leg: str = "") -> None:
        """Open the next leg."""
        if not self.leg:
            self.leg = leg or self._new_leg()
            self.environment.go_on()
            self._feed.append(self._translator.begin_leg(self.leg, self._state()))

    def rest(self) -> None:
        """Everything waits: the leg ends, and says for what."""
        if self.leg and self.questions:
            self._feed.append(self._translator.interrupt(list(self.questions.values()), self._state()))
            self.leg = ""

    def open(self) -> list[Event]:
        """What somebody who joins now must be told to follow."""
        return self._translator.open()

    async def cancel(self) -> None:
        """End the run, and what is under way is undone."""
        self.cancelled = True
        if self.task is not None:
            self.task.cancel()
            await asyncio.wait({self.task})

    async def park(self, grace: float) -> None:
        """Leave the run to the journal: at rest where it comes to that in time, else as if we had died."""
        parking = self.environment.parking
        if self.task is None or parking is None:
            return
        if not self.leg and not parking.park():
            parking.park(by_force=True)
        if self.leg:
            await asyncio.wait({self.task}, timeout=grace)
            parking.park(by_force=True)
        await asyncio.wait({self.task}, timeout=grace)

    async def _carry(self, stream: RunStream[Any], over: Callable[[LiveRun], None]) -> None:
        stop = self.session.dispatcher.subscribe(object, self._hear)
        try:
            ended = await self._ended(stream)
        finally:
            stop()
            self.environment.go_on()
            over(self)
        if ended is not None:
            self.go_on()
            self._feed.append(ended())
            self.leg = ""

    async def _ended(self, stream: RunStream[Any]) -> Callable[[], list[Event]] | None:
        """How the run ended, to be said; None where it was parked."""
        translator = self._translator
        try:
            response = await stream.response
        except RunParked as parked:
            self.questions = {each.id: each for each in parked.questions}
            self.rest()
            return None
        except asyncio.CancelledError:
            return translator.cancel
        except PromptEvaluationError as error:
            if self.cancelled or error.phase == "cancelled":
                return translator.cancel
            message, code = str(error), error.phase
            return lambda: translator.fail(message, code)
        except HandrailError as error:
            message, code = str(error), type(error).__name__
            return lambda: translator.fail(message, code)
        except Exception as error:
            log.exception("run %s ended in an error of ours", self.run_id)
            message = (
                f"The run ended in an error of the server: {type(error).__name__}. Its log has the rest."
            )
            return lambda: translator.fail(message, "internal")
        return lambda: translator.finish(output=response.output, usage=response.usage)

    def _asked(self, question: Question) -> None:
        self.questions[question.id] = question
        self._emit(self._translator.ask(question))

    def _hear(self, event: object) -> None:
        context = getattr(event, "run_context", None)
        run_id = getattr(context, "run_id", None) or getattr(event, "run_id", "")
        if run_id == self.run_id or run_id.startswith(f"{self.run_id}."):
            if asyncio._get_running_loop() is self._loop:  # pyright: ignore[reportPrivateUsage]  # asyncio documents it for this
                self._take(event)
            else:
                self._loop.call_soon_threadsafe(self._take, event)

    def _take(self, event: object) -> None:
        if isinstance(event, QuestionAnswered | ApprovalDecided):
            self.questions.pop(event.question_id, None)
        self._emit(self._translator.take(event))

    def _emit(self, events: list[Event]) -> None:
        if events:
            self.go_on()
            self._feed.append(events)
