"""`BrowserEnvironment`: people who look at a thread now, later, or in a week."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from handrail.dispatch.parking import Parking
from handrail.protocols import Environment
from handrail.question import Answer, Question
from handrail.tools import RunMode


class BrowserEnvironment(Environment):
    """Whoever has the thread open. A question is shown at once, and answered through the journal.

    While somebody may answer soon the run stays in memory. After `park_after` seconds in which
    everything in it waits, it is parked: the journal has it, and an answer goes on with it. With None it
    is parked only when the server stops.
    """

    run_mode: RunMode = "user"
    parks = True
    keeps_secrets = True

    def __init__(
        self,
        *,
        asked: Callable[[Question], None],
        rested: Callable[[], None],
        park_after: float | None,
    ) -> None:
        self._asked = asked
        self._rested = rested
        self._park_after = park_after
        self._timer: asyncio.TimerHandle | None = None
        self._leaving = False
        self._at_rest = False
        self.stays = False
        """Is it kept in memory at its next rest, because the end of a question is about to come?"""
        self.was_cut = False
        """Was it parked by force? Then there is something to do in it before anybody answers."""
        self.parking: Parking | None = None
        """The run's way to be parked, once it has begun."""

    async def ask(self, question: Question, /) -> Answer | None:
        """Show the question. Its answer comes through the journal."""
        self.go_on()
        self._asked(question)
        return None

    def begins(self, parking: Parking) -> None:
        """The run has begun, and can be parked by this."""
        self.parking = parking

    def rests(self, parking: Parking) -> None:
        """Everything in the run waits for an answer."""
        self.go_on()
        self._at_rest = True
        self._rested()
        if self._leaving:
            self._leave(parking)
        elif self.stays:
            self.stays = False
        elif self._park_after is not None:
            self._timer = asyncio.get_running_loop().call_later(self._park_after, parking.park)

    def go_on(self) -> None:
        """Somebody answered, or the run is over: it is not parked for waiting."""
        self._at_rest = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def leave(self) -> None:
        """Nobody can answer here any more: the run is parked as soon as it rests, also if it does already."""
        self._leaving = True
        if self._at_rest and self.parking is not None:
            self._leave(self.parking)

    def cut(self) -> bool:
        """Park the run whatever it does, as if the process had ended; False where it has not begun."""
        if self.parking is None:
            return False
        self.was_cut = self.was_cut or not self.parking.parked
        return self.parking.park(by_force=True)

    def _leave(self, parking: Parking) -> None:
        """Park a run at rest. One that can't be entered again is cut: waiting longer would not change that."""
        if not parking.park():
            self.cut()
