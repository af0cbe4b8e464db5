"""`Host`: a run while this process executes it. It may be parked when it waits, or cut off."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from typing import TYPE_CHECKING, Any

from handrail.protocols import Environment, RunMode
from handrail.question import Answer, Question, Quorum

if TYPE_CHECKING:
    from handrail.run.record.parking import Parking

Voters = Callable[[str | None, str], Mapping[str, float]]
"""A function that takes a role, or None for any, and a person to exclude, and returns the names of those who may vote."""
_MIN_CUT_SECONDS = 1.0
"""Minimum seconds that a run gets to end after it is cut off, even if the grace period is shorter."""


class Host(Environment):
    """A run while this process executes it, and its environment: people answer through the journal, now or later.

    A run in which everything waits stays in memory for `park_after` seconds, because someone may answer soon. Then it is
    parked, and an answer resumes it. If `park_after` is None, the run is parked only by `leave` and `park`.
    """

    run_mode: RunMode = "user"
    parks = True
    keeps_secrets = True

    def __init__(
        self, run_id: str, *, park_after: float | None, voters: Voters = lambda role, besides: {}
    ) -> None:
        self.run_id = run_id
        self.park_after = park_after
        self.parking: Parking | None = None
        """The object that parks the run, or None until the run has started."""
        self.rests = False
        """Whether everything in the run waits for answers."""
        self.stays = False
        """Whether the run stays in memory the next time it waits, because a question is about to be closed."""
        self.was_cut = False
        """Whether the run was parked by force. Such a run can continue even before an answer arrives."""
        self._voters = voters
        self._is_leaving = False
        self._task: asyncio.Task[Any] | None = None
        self._timer: asyncio.TimerHandle | None = None

    def execute(self, work: Coroutine[Any, Any, Any]) -> None:
        """Execute the run in a task of its own."""
        self._task = asyncio.get_running_loop().create_task(work, name=f"run {self.run_id}")

    async def over(self) -> None:
        """Wait until this process no longer executes the run."""
        if self._task is not None:
            await asyncio.wait({self._task})

    # The environment of the run.

    async def ask(self, question: Question, /) -> Answer | None:
        """Return None, because the answer arrives through the journal."""
        self.wake()
        return None

    def voters(self, quorum: Quorum, principal: str, /) -> Mapping[str, float]:
        """Return the users who may vote in a quorum, except the principal, and when each was added."""
        return {
            name: since for role in quorum.roles() for name, since in self._voters(role, principal).items()
        }

    def run_started(self, parking: Parking) -> None:
        self.parking = parking

    def run_waiting(self, parking: Parking) -> None:
        """Park the run now if it was told to leave, and otherwise after `park_after` seconds, unless it `stays`."""
        self.wake()
        self.rests = True
        if self._is_leaving:
            self.leave()
        elif self.stays:
            self.stays = False
        elif self.park_after is not None:
            self._timer = asyncio.get_running_loop().call_later(self.park_after, parking.park)

    # Parking.

    def wake(self) -> None:
        """Note that the run continues or has ended, so that it is not parked."""
        self.rests = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def leave(self) -> None:
        """Park the run as soon as everything in it waits for an answer. A run that already waits is parked now.

        If one of its calls can't be re-entered, it is cut off instead: waiting longer would not help.
        """
        self._is_leaving = True
        if self.rests and self.parking is not None and not self.parking.park():
            self.cut()

    def cut(self) -> bool:
        """Park the run by force, as if the process had died. Returns False if the run has not started."""
        if self.parking is None:
            return False
        self.was_cut = self.was_cut or not self.parking.parked
        return self.parking.park(by_force=True)

    async def park(self, grace: float) -> None:
        """Park the run as soon as everything in it waits for an answer. After `grace` seconds, cut it off instead.

        A run that is cut off is recorded as if the process had died.
        """
        self.leave()
        if self._task is None or (await asyncio.wait({self._task}, timeout=grace))[0]:
            return
        if not self.cut():
            self._task.cancel()  # the run has not started in this process
        await asyncio.wait({self._task}, timeout=max(grace, _MIN_CUT_SECONDS))
