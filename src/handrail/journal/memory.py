"""`MemoryJournal`: the record of a run for as long as the process lives."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from contextvars import ContextVar
from datetime import datetime
from typing import Any, TypeVar, cast

from handrail.clock import SYSTEM_CLOCK, Clock
from handrail.errors import DefinitionError, SessionError
from handrail.ids import random_id
from handrail.journal.desk import QuestionDesk
from handrail.protocols import Check, CommitUnit, Environment
from handrail.question import Answer, Question

T = TypeVar("T")

_inside: ContextVar[tuple[tuple[int, str], ...]] = ContextVar("steps under way around this", default=())


class MemoryJournal:
    """Keeps steps, questions and commits in memory: for tests and for runs nobody will resume."""

    def __init__(self, clock: Clock = SYSTEM_CLOCK) -> None:
        self._clock = clock
        self._steps: dict[str, asyncio.Future[Any]] = {}
        self._spawned: dict[str, _Child] = {}
        self._units: dict[str, list[CommitUnit]] = {}
        self._unapplied: list[CommitUnit] = []
        self.id = random_id()
        self.synced = False
        self.desk = QuestionDesk(clock)

    async def step(self, key: str, function: Callable[[], Awaitable[T]], /) -> T:
        """Run `function` for this key until it succeeds once; afterwards give its recorded value.

        Two at once for one key are one: the second waits for the first. If the first fails or is
        cancelled, the second tries.
        """
        around, me = _inside.get(), (id(self), key)
        if me in around:
            raise DefinitionError(
                f"step {key!r} needs its own outcome and would wait for itself. Give the inner one another key."
            )
        while (earlier := self._steps.get(key)) is not None:
            try:
                return cast(T, await asyncio.shield(earlier))
            except _Retry:
                continue
        mine: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._steps[key] = mine
        entered = _inside.set((*around, me))
        try:
            value = await function()
        except BaseException:
            del self._steps[key]
            mine.set_exception(_Retry())
            mine.exception()  # looked at: nobody else may be waiting
            raise
        finally:
            with contextlib.suppress(ValueError):  # closed from elsewhere: there is nothing to go back to
                _inside.reset(entered)
        mine.set_result(value)
        return value

    async def ask(
        self, question: Question, environment: Environment | None = None, check: Check | None = None, /
    ) -> Answer:
        return await self.desk.ask(question, environment, check)

    def answer(self, answer: Answer, /) -> None:
        self.desk.answer(answer)

    async def sleep(self, until: datetime, /) -> None:
        """Wait until that time of day."""
        if until.tzinfo is None:
            raise DefinitionError(
                f"sleeping until {until.isoformat()} has no time zone. Give one, for example `datetime.now(UTC)`."
            )
        while (left := (until - self._clock.now()).total_seconds()) > 0:
            await asyncio.sleep(left)

    async def spawn(self, run_id: str, function: Callable[[], Awaitable[T]], /) -> T:
        """Run a child run under its own id; the same id is run once, for all who wait for it.

        When the last of them is cancelled so is the child, and it has ended before they go on.
        """
        child = self._spawned.get(run_id)
        if child is None:
            child = self._spawned[run_id] = _Child(asyncio.ensure_future(function()))
        child.waiting += 1
        try:
            return cast(T, await asyncio.shield(child.running))
        except asyncio.CancelledError:
            if child.waiting == 1 and not child.running.done():
                child.running.cancel()
                await asyncio.wait({child.running})
            raise
        finally:
            child.waiting -= 1

    def cancel(self, run_id: str, /) -> None:
        """Stop a spawned run; harmless if it is over. On the loop's thread."""
        child = self._spawned.get(run_id)
        if child is None:
            raise SessionError(run_id, "no run of this name was spawned here", "Cancel one that was.")
        child.running.cancel()

    async def commit(self, unit: CommitUnit, /) -> None:
        """Record everything one call changed."""
        self._units.setdefault(unit.run_id, []).append(unit)
        if unit.files:
            self._unapplied.append(unit)

    async def applied(self, unit: CommitUnit, /) -> None:
        """Note that the files of a unit are as it says."""
        self._settle(unit)

    async def void(self, unit: CommitUnit, /) -> None:
        """Take a unit back whose files could not be changed."""
        self._settle(unit)
        self._units[unit.run_id] = [other for other in self._units.get(unit.run_id, ()) if other is not unit]

    def _settle(self, unit: CommitUnit) -> None:
        self._unapplied = [other for other in self._unapplied if other is not unit]

    async def unapplied(self) -> Sequence[CommitUnit]:
        """The units whose files nobody has noted as applied, in order."""
        return tuple(self._unapplied)

    async def load(self, run_id: str, /) -> Sequence[CommitUnit]:
        """What was committed in a run, in order."""
        return tuple(self._units.get(run_id, ()))


class _Child:
    """A spawned run, and how many wait for it."""

    __slots__ = ("running", "waiting")

    def __init__(self, running: asyncio.Future[Any]) -> None:
        self.running = running
        self.waiting = 0


class _Retry(Exception):
    """The step this one waited for failed: try it oneself."""
