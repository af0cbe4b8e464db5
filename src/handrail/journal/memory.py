"""`MemoryJournal`: the record of a run for as long as the process lives."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Awaitable, Callable, Sequence
from contextvars import ContextVar
from datetime import datetime
from typing import Any, TypeVar, cast

import msgspec
import pydantic_core

from handrail.clock import SYSTEM_CLOCK, Clock
from handrail.errors import DefinitionError, RunBusy, RunError, RunUnknown, SessionError
from handrail.ids import random_id
from handrail.journal.decisions import MemoryDecisions
from handrail.journal.desk import QuestionDesk
from handrail.journal.digest import new_key
from handrail.journal.lease import LEASE_SECONDS, is_free, new_owner
from handrail.journal.tickets import MemoryTickets
from handrail.protocols import Asker
from handrail.question import Answer, Question
from handrail.records import (
    OVER,
    Asked,
    Check,
    CommitUnit,
    DecisionBox,
    Entry,
    Mark,
    Mask,
    RunCopy,
    RunRecord,
    RunRow,
    RunStatus,
    SessionRow,
    TicketBox,
)

T = TypeVar("T")

_inside: ContextVar[tuple[tuple[int, str], ...]] = ContextVar("steps under way around this", default=())


class MemoryJournal:
    """Keeps steps, questions and commits in memory: for tests and for runs nobody will resume."""

    def __init__(self, clock: Clock = SYSTEM_CLOCK) -> None:
        self._clock = clock
        self._steps: dict[str, asyncio.Future[Any]] = {}
        self._steps_of: dict[str, dict[str, None]] = {}
        """The keys of a run's steps. Ids may begin alike, so they do not tell."""
        self._spawned: dict[str, _Child] = {}
        self._units: dict[str, list[CommitUnit]] = {}
        self._order: list[CommitUnit] = []
        self._unapplied: list[CommitUnit] = []
        self._runs: dict[str, RunRow] = {}
        self._entries: dict[str, dict[tuple[str, str], Entry]] = {}
        self.id = random_id()
        self.key = new_key()
        self.owner = new_owner()
        self.synced = False
        self.desk = QuestionDesk(clock, self.key)
        self.desk.stays = lambda question: question.run_id in self._runs  # a parked run asks it again
        self.tickets: TicketBox = MemoryTickets(self.owner, clock, self._runs, self._entries)
        self._decisions = MemoryDecisions(self.owner, self._runs)

    @property
    def decisions(self) -> DecisionBox:
        return self._decisions

    def _now(self) -> float:
        return self._clock.now().timestamp()

    # --- runs -------------------------------------------------------------------------------------

    async def begin(self, run: RunRecord, /) -> None:
        """Record a new run and take it."""
        if run.id in self._runs:
            raise run_exists(run.id)
        now = self._now()
        rows = (row.record for row in self._runs.values())
        began = (each.began_at for each in rows if each.session_id == run.session_id)
        self._runs[run.id] = RunRow(
            record=after_last(run, max(began, default=None)),
            status="running",
            owner=self.owner,
            leased_until=now + LEASE_SECONDS,
            changed_at=now,
        )

    async def take(self, run_id: str, /) -> RunRow:
        """Take a run over to go on with it. What is returned is how it stood before."""
        row, now = await self.run(run_id), self._now()
        if not is_free(row.owner, row.leased_until, now, self.owner):
            raise RunBusy(run_id, row.owner)
        status = row.status if row.status in OVER else "running"
        self._turn_run(row, status, self.owner, now + LEASE_SECONDS, row.outcome)
        return row

    async def keep(self, run_id: str, /) -> bool:
        """Renew the lease; True: somebody has asked for the run to be cancelled."""
        row = self._mine(run_id)
        self._runs[run_id] = msgspec.structs.replace(row, leased_until=self._now() + LEASE_SECONDS)
        return row.stopping

    async def stop(self, run_id: str, /) -> None:
        """Ask the process that has a run to cancel it."""
        row = await self.run(run_id)
        self._runs[run_id] = msgspec.structs.replace(row, stopping=True)

    async def leave(self, run_id: str, status: RunStatus, outcome: bytes = b"", /) -> None:
        """Let go of a run, and say where it stands."""
        self._turn_run(self._mine(run_id), status, "", 0.0, outcome)
        if status in OVER:
            for question in await self.questions(run_id):
                self.desk.cancel(question.id)

    async def run(self, run_id: str, /) -> RunRow:
        """A run as it stands."""
        row = self._runs.get(run_id)
        if row is None:
            raise RunUnknown(run_id)
        waiting = sum(each.run_id == run_id for each in self.desk.open_questions())
        return msgspec.structs.replace(row, questions=waiting)

    async def runs(
        self,
        *,
        session_id: str | None = None,
        principal: str | None = None,
        limit: int = 100,
        before: Mark | None = None,
    ) -> Sequence[RunRow]:
        """Runs, of everybody or of one, the newest first; of a session all of them, the oldest first."""
        records = (row.record for row in self._runs.values())
        found = sorted(
            (each for each in records if principal is None or each.principal == principal),
            key=lambda record: record.mark,
        )
        if session_id is not None:
            found = [each for each in found if each.session_id == session_id]
        else:
            found = [each for each in found if before is None or each.mark < before][::-1][:limit]
        return tuple([await self.run(each.id) for each in found])

    async def sessions(
        self, principal: str, /, *, limit: int = 100, before: Mark | None = None
    ) -> Sequence[SessionRow]:
        """The sessions somebody has runs in, those first that were changed last."""
        of: dict[str, list[RunRow]] = {}
        for run in (await self.runs(principal=principal, limit=len(self._runs)))[::-1]:
            of.setdefault(run.record.session_id, []).append(run)
        found = [
            SessionRow(
                session_id=session_id,
                runs=len(runs),
                changed_at=max(run.changed_at for run in runs),
                first=runs[0].record,
                newest=runs[-1],
                questions=sum(run.questions for run in runs),
            )
            for session_id, runs in of.items()
        ]
        found.sort(key=lambda session: session.mark, reverse=True)
        return tuple([each for each in found if before is None or each.mark < before][:limit])

    async def note(self, run_id: str, entry: Entry, /, *, from_outside: bool = False) -> None:
        """Record something that happened in a run this process has; from outside, in one that nobody has."""
        if from_outside:
            check_nobodys(await self.run(run_id), self._now())
        else:
            self._mine(run_id)
        self._entries.setdefault(run_id, {})[entry.kind, entry.key] = entry

    async def entries(self, run_id: str, /) -> Sequence[Entry]:
        """What happened in a run, in order."""
        return tuple(self._entries.get(run_id, {}).values())

    async def marks(self, session_id: str, /) -> Sequence[tuple[str, Entry]]:
        """Which calls of a session were undone, and of which the model was told."""
        return tuple(
            (run_id, entry)
            for run_id, row in self._runs.items()
            if row.record.session_id == session_id
            for entry in self._entries.get(run_id, {}).values()
            if entry.kind in ("undone", "told")
        )

    async def bring(self, copy: RunCopy, /) -> None:
        """Take a run in that was recorded elsewhere, or under another id."""
        run_id = copy.row.record.id
        if run_id in self._runs:
            raise run_exists(run_id)
        self._runs[run_id] = msgspec.structs.replace(copy.row, owner="", leased_until=0.0, stopping=False)
        self._entries[run_id] = {(entry.kind, entry.key): entry for entry in copy.entries}
        for unit in copy.units:
            self._add(unit)
        for key, value in copy.steps:
            if value is not None:
                self._steps_of.setdefault(run_id, {})[key] = None
                settled = self._steps[key] = asyncio.get_running_loop().create_future()
                settled.set_result(msgspec.msgpack.decode(value))

    async def forget(self, run_ids: Sequence[str], /) -> None:
        """Keep nothing of these runs any more."""
        going = {row.record.session_id for id in run_ids if (row := self._runs.get(id)) is not None}
        for run_id in run_ids:
            self._forget_steps(run_id)
            self._runs.pop(run_id, None)
            self._entries.pop(run_id, None)
            self._units.pop(run_id, None)
            self._order = [unit for unit in self._order if unit.run_id != run_id]
            self._unapplied = [unit for unit in self._unapplied if unit.run_id != run_id]
            self.desk.forget_run(run_id)
        self._decisions.forget(going - {row.record.session_id for row in self._runs.values()})

    def _forget_steps(self, run_id: str) -> None:
        for key in self._steps_of.pop(run_id, ()):
            self._steps.pop(key, None)

    def _mine(self, run_id: str) -> RunRow:
        row = self._runs.get(run_id)
        if row is None:
            raise RunUnknown(run_id)
        if row.owner != self.owner:
            raise RunBusy(run_id, row.owner)
        return row

    def _turn_run(
        self, row: RunRow, status: RunStatus, owner: str, until: float, outcome: bytes = b""
    ) -> RunRow:
        turned = msgspec.structs.replace(
            row,
            status=status,
            owner=owner,
            leased_until=until,
            changed_at=self._now(),
            outcome=outcome,
            stopping=False,
        )
        self._runs[row.record.id] = turned
        return turned

    # --- steps and questions ----------------------------------------------------------------------

    async def step(
        self,
        key: str,
        function: Callable[[], Awaitable[T]],
        /,
        *,
        run_id: str = "",
        unsettled: Callable[[], Awaitable[T]] | None = None,
    ) -> T:
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
        if run_id:
            self._steps_of.setdefault(run_id, {})[key] = None
        entered = _inside.set((*around, me))
        try:
            value = await function()
        except BaseException:
            if self._steps.get(key) is mine:
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
        self,
        question: Question,
        asker: Asker | None = None,
        check: Check | None = None,
        mask: Mask | None = None,
        /,
    ) -> Answer:
        return await self.desk.ask(question, asker, check, mask)

    def answer(self, answer: Answer, /) -> None:
        self.desk.answer(answer)

    async def questions(
        self, run_id: str | None = None, /, *, principal: str | None = None
    ) -> Sequence[Question]:
        """What waits for an answer, of one run or of all, from everybody or from one, oldest first."""
        return tuple(
            each
            for each in self.desk.open_questions()
            if run_id in (None, each.run_id) and principal in (None, each.principal)
        )

    async def asked(self, run_id: str, /) -> Sequence[Asked]:
        """The questions of a run that wait or were answered, oldest first."""
        return tuple(each for each in self.desk.asked() if each.question.run_id == run_id)

    async def steps(self, run_id: str, /) -> Sequence[tuple[str, bytes | None]]:
        """What a run did once: the keys and their settled values."""
        return tuple(
            (key, msgspec.msgpack.encode(value.result(), enc_hook=pydantic_core.to_jsonable_python))
            for key in self._steps_of.get(run_id, ())
            if (value := self._steps.get(key)) is not None and value.done() and value.exception() is None
        )

    async def withdraw(self, prefix: str, /, *, alone: bool = False) -> None:
        """Forget the questions without an answer whose ids begin like this; `alone`, the one of this id."""
        for question in self.desk.open_questions():
            if question.id == prefix if alone else question.id.startswith(prefix):
                self.desk.cancel(question.id)

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
        self._add(unit)
        if unit.files:
            self._unapplied.append(unit)

    def _add(self, unit: CommitUnit) -> None:
        self._units.setdefault(unit.run_id, []).append(unit)
        self._order.append(unit)

    async def applied(self, unit: CommitUnit, /) -> None:
        """Note that the files of a unit are as it says."""
        self._settle(unit)

    async def void(self, unit: CommitUnit, /) -> None:
        """Take a unit back whose files could not be changed."""
        self._settle(unit)
        self._units[unit.run_id] = [other for other in self._units.get(unit.run_id, ()) if other is not unit]
        self._order = [other for other in self._order if other is not unit]

    def _settle(self, unit: CommitUnit) -> None:
        self._unapplied = [other for other in self._unapplied if other is not unit]

    async def unapplied(self) -> Sequence[CommitUnit]:
        """The units whose files nobody has noted as applied, in order."""
        return tuple(self._unapplied)

    async def load(self, run_id: str, /) -> Sequence[CommitUnit]:
        """What was committed in a run, in order."""
        return tuple(self._units.get(run_id, ()))

    async def load_session(self, session_id: str, /) -> Sequence[CommitUnit]:
        """What was committed in all runs of a session, in order."""
        return tuple(unit for unit in self._order if unit.session_id == session_id)

    async def later(self, unit: CommitUnit, /) -> Sequence[CommitUnit]:
        """What was committed after this, in all runs, and was not undone, in order."""
        here = next(
            (
                number
                for number, other in enumerate(self._order)
                if (other.run_id, other.call_id) == (unit.run_id, unit.call_id)
            ),
            len(self._order),
        )
        return tuple(
            other
            for other in self._order[here + 1 :]
            if ("undone", other.call_id) not in self._entries.get(other.run_id, {})
        )


def check_nobodys(row: RunRow, now: float) -> None:
    """Refuse to add to a run from outside that some process has, this one too."""
    if row.owner and not is_free(row.owner, row.leased_until, now, ""):
        raise RunBusy(row.record.id, row.owner)


def after_last(run: RunRecord, last: float | None) -> RunRecord:
    """A run of a session began after those before it, also where the clock was set back or stands."""
    if last is None or run.began_at > last:
        return run
    return msgspec.structs.replace(run, began_at=math.nextafter(last, math.inf))


def run_exists(run_id: str) -> RunError:
    return RunError(
        run_id,
        "the journal has a run of this id already",
        "Resume that one, or give the new one an id of its own.",
    )


class _Child:
    """A spawned run, and how many wait for it."""

    __slots__ = ("running", "waiting")

    def __init__(self, running: asyncio.Future[Any]) -> None:
        self.running = running
        self.waiting = 0


class _Retry(Exception):
    """The step this one waited for failed: try it oneself."""
