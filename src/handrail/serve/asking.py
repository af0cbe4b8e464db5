"""`BrowserEnvironment`: people who look at a thread now, later, or in a week."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from handrail.dispatch.parking import wait_for_later
from handrail.errors import QuestionCancelled
from handrail.question import Answer, Question
from handrail.tools import RunMode


class BrowserEnvironment:
    """Whoever has the thread open. A question is shown at once, and answered through the journal.

    While somebody may answer soon the run stays in memory. After `park_after` seconds in which
    everything in it waits, it is parked: the journal has it, and an answer goes on with it.
    """

    run_mode: RunMode = "user"
    parks = True
    """Tells the run that it may be parked."""

    def __init__(
        self,
        *,
        asked: Callable[[Question], None],
        rested: Callable[[], None],
        park_after: float,
    ) -> None:
        self._asked = asked
        self._rested = rested
        self._park_after = park_after
        self._timer: asyncio.TimerHandle | None = None
        self.parking: Any = None
        """The run's way to be parked, once it has begun."""

    async def ask(self, question: Question, /) -> Answer:
        """Show the question. Its answer comes through the journal."""
        self.go_on()
        self._asked(question)
        await wait_for_later()
        raise QuestionCancelled(question.name)

    def begins(self, parking: Any) -> None:
        """The run has begun, and can be parked by this."""
        self.parking = parking

    def rests(self, parking: Any) -> None:
        """Everything in the run waits for an answer."""
        self.parking = parking
        self._rested()
        self.go_on()
        self._timer = asyncio.get_running_loop().call_later(self._park_after, parking.park)

    def go_on(self) -> None:
        """Somebody answered, or the run is over: it is not parked for waiting."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
