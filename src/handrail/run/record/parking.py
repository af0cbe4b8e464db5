"""Parked runs: a run that waits only for answers can be removed from memory, and continues later from its journal."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from contextlib import suppress
from datetime import datetime
from typing import TYPE_CHECKING, NoReturn
from weakref import WeakSet

from handrail.clock import Clock
from handrail.concurrency.deadline import Deadline
from handrail.question import Question
from handrail.run.call_log import told_about
from handrail.run.record.format import was_given_secret

if TYPE_CHECKING:
    from handrail.protocols import Environment
    from handrail.run.call import Attempt
    from handrail.run.run import Run


log = logging.getLogger("handrail.run")

_GRACE = 0.1
"""Seconds that a handler is given to continue after an answer or an inner call, before it counts as waiting."""


class Parking:
    """Watches one run and the runs nested in it, and parks them.

    The run is *quiet* once nothing in it is active: every call waits for an answer, or for an inner call
    that does. It *may be parked* if, in addition, all its calls can be re-entered. A parked run ends as if its
    process had ended: its unfinished calls are not compensated, and their ends are neither recorded nor published. A later
    resume continues from the record.

    The environment decides what happens to a quiet run: see `Environment.run_started` and `Environment.run_waiting`.
    """

    __slots__ = (
        "_environment",
        "_root",
        "_runs",
        "_told",
        "ending",
        "is_paused",
        "parked",
        "resting",
        "told",
    )

    def __init__(self, root: Run, environment: Environment) -> None:
        self._root = root
        self._environment = environment
        self._runs: WeakSet[Run] = WeakSet((root,))
        self._told = False
        """Whether the environment has been notified since the run last became quiet."""
        self.ending: set[Attempt] = set()
        """The attempts that are over but whose end has not been published."""
        self.parked = False
        self.is_paused = False
        """Whether the run waits between two steps of its model."""
        self.resting: WeakSet[Run] = WeakSet()
        """The runs that wait for a person before they ask their model."""
        self.told: list[str] = []
        """The keys of the facts that were published about the calls that were unfinished when the run was parked."""

    @property
    def run_id(self) -> str:
        return self._root.run_context.run_id

    @property
    def quiet(self) -> bool:
        """Whether everything in the run is waiting for answers."""
        if self.is_paused:
            return True
        live, around = self._at_work()
        if not live or self._asks_a_model() or self.ending:
            return False
        return all(_rests(attempt, attempt in around) for attempt in live)

    @property
    def may_park(self) -> bool:
        """Whether the run is quiet and all its calls can be re-entered."""
        return self.quiet and all(_enters_again(attempt) for attempt in self._at_work()[0])

    def park(self, *, by_force: bool = False) -> bool:
        """Park the run now if it may be parked, and return whether it is parked. Call this on the run's loop.

        With `by_force`, the run is parked even if calls are active, as if its process ended now. When it is
        resumed, each interrupted call is treated according to its effect.
        """
        if self.parked:
            return True
        if not by_force and not self.may_park:
            return False
        run_log = self._root.log
        assert run_log.is_kept, "only a run with a record is parked"
        self.told = told_about(self._at_work()[0])
        run_log.close()
        self.parked = True
        self._root.cancellation.cancel("parked")
        return True

    # Called by the run.

    def begin(self) -> None:
        """Notify the environment that the run is about to begin or continue."""
        self._environment.run_started(self)

    def add(self, run: Run) -> None:
        """Watch a run nested in this one."""
        self._runs.add(run)

    def asks(self) -> None:
        """Note that a question is about to be asked.

        Raises `CancelledError` in a parked run, where nobody may be asked.
        """
        if self.parked:
            raise asyncio.CancelledError
        self._told = False

    async def wait(self) -> NoReturn:
        """Wait between two steps of the model, until this is cancelled. Meanwhile, the run may be parked."""
        self.is_paused = True
        try:
            self.consider()
            await asyncio.get_running_loop().create_future()
        finally:
            self.is_paused = False
        raise AssertionError("nobody settles the future")

    def consider(self) -> None:
        """Notify the environment if the run has become quiet. Called after something began to wait or ended."""
        if self.parked or not self.quiet:
            return
        if not self._told:
            self._told = True
            try:
                self._environment.run_waiting(self)
            except Exception:
                log.exception("the environment raised in `run_waiting`; the run is parked if it may be")
                self.park()

    def ended(self, attempt: Attempt) -> None:
        """Note that a call has ended. Its outer call, if there is one, gets time to continue."""
        self.ending.discard(attempt)
        if attempt.parent is None:
            self.consider()
        else:
            self.start_grace(attempt.parent)

    def start_grace(self, attempt: Attempt) -> None:
        """Give a handler time to continue after something that its call waited for has ended."""

        inquiries = attempt.inquire()

        def over() -> None:
            inquiries.grace = None
            self.consider()

        self._told = False
        end_grace(attempt)
        with suppress(RuntimeError):  # the call was closed from outside, without a running loop
            inquiries.grace = asyncio.get_running_loop().call_later(_GRACE, over)

    def _at_work(self) -> tuple[list[Attempt], set[Attempt]]:
        """Return the unfinished calls, and which of them contain others."""
        live = [attempt for run in self._runs for attempt in run.live]
        return live, {attempt.parent for attempt in live if attempt.parent is not None}

    def _asks_a_model(self) -> bool:
        """Return whether one of the runs has no active call, and so waits for its model."""
        return any(run.task is not None and not run.live and run not in self.resting for run in self._runs)


def next_end(questions: Iterable[Question], deadline: Deadline | None, now: datetime) -> float | None:
    """Return when a parked run goes on without an answer: at its first expiry, or at its deadline, if that does not pause.

    The time is in seconds since 1970, by the clock that shows `now`. Returns None if the run only waits for answers.
    """
    ends = [each.expires_at.timestamp() for each in questions if each.expires_at is not None]
    if deadline is not None and not deadline.pauses_for_people:
        ends.append(now.timestamp() + max(deadline.remaining(), 0.0))
    return min(ends, default=None)


def is_due(due_at: float | None, clock: Clock) -> bool:
    """Return whether a parked run goes on now without an answer, given its `next_end` and the journal's clock."""
    return due_at is not None and due_at <= clock.now().timestamp()


def end_grace(attempt: Attempt) -> None:
    """End the handler's grace period, for example because a new question shows that it has seen all earlier answers."""
    inquiries = attempt.inquiries
    if inquiries is not None and inquiries.grace is not None:
        inquiries.grace.cancel()
        inquiries.grace = None


def _rests(attempt: Attempt, is_around: bool) -> bool:
    """Return whether this call only waits: for later answers or, with `is_around`, for the calls inside it."""
    inquiries = attempt.inquiries
    if inquiries is None:
        return is_around
    if not inquiries.left and not is_around:
        return False
    # In the grace period, or if a question does not wait for a later answer, the handler may be about to continue.
    return inquiries.open <= inquiries.left and inquiries.grace is None


def _enters_again(attempt: Attempt) -> bool:
    """Return whether this call can be re-entered. A call that still waits for its approval can: its handler has not begun.

    A call whose work goes on elsewhere can be re-entered too, and continues with that work. A call that was given a secret
    can't, since the record has a mask in place of the secret.
    """
    if was_given_secret(attempt):
        return False
    is_ready = attempt.token is None or attempt.tool.enters_again
    return is_ready or attempt.run.log.find_remote(attempt.place) is not None
