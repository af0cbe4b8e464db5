"""`Runner`: a worker process, which executes legs of runs until it is told to stop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from handrail.clock import SYSTEM_CLOCK, Clock
from handrail.concurrency.cancellation import shielded
from handrail.concurrency.deadline import Deadline
from handrail.errors import (
    JournalError,
    JournalUpgraded,
    PromptEvaluationError,
    RunBusy,
    RunParked,
    SessionBusy,
    SessionOutdated,
    WorkspaceBusy,
)
from handrail.events import RunClaimed
from handrail.fleet.background import policies_of
from handrail.fleet.dispatcher import Dispatcher, Engine, JournalDispatcher
from handrail.fleet.submission import FleetApp, repeat, this_host
from handrail.journal.records import OVER, RunRow, WorkerRow
from handrail.run.host import Host
from handrail.run.limits import Budget
from handrail.run.record.begin import decode_request, never_begun
from handrail.run.record.lease import renew_now
from handrail.run.record.log import load_attachments
from handrail.runs import cancel
from handrail.runs import session as load_session
from handrail.runs.retention import Retention, keep_sweeping
from handrail.serve import REQUIRED
from handrail.serve.people import People
from handrail.session.bus import publish_everywhere
from handrail.text.raised_errors import described
from handrail.text.rendering import counted

if TYPE_CHECKING:
    from handrail.journal.protocol import Journal
    from handrail.run.host import Voters
    from handrail.run.response import RunStream
    from handrail.serve.narration import Narration, Narrator
    from handrail.session import Session

log = logging.getLogger("handrail.fleet")

_LOOK_SECONDS = 0.5
"""Maximum seconds to wait between two checks of the journal for due runs and for runs to cancel."""
_ANNOUNCE_SECONDS = 10.0
"""Seconds for which a worker counts as alive after it was last announced."""
_PARK_AFTER = 0.2
"""Seconds after which a run is parked if everything in it waits for people."""
_AGAIN_SECONDS = 5.0
"""Seconds after which a run that is still due is handed to the engine again, because its leg may have been lost."""
_RETRY_SECONDS = 15.0
"""Seconds until a run is tried again after a leg failed without ending the run."""
_BUSY_SECONDS = 3.0
"""Seconds until a run is tried again after a different run had its workspace or worked on its session."""
_Busy = WorkspaceBusy | SessionBusy | SessionOutdated
_CUT_SECONDS = 5.0
"""Maximum seconds to wait for the end of legs that were interrupted. After that, they are cancelled."""


class _Leg:
    """A leg that this process executes."""

    def __init__(self, row: RunRow, app: FleetApp, voters: Voters) -> None:
        self.row = row
        self.app = app
        self.host = Host(row.record.id, park_after=_PARK_AFTER, voters=voters)
        # a worker parks every run that waits, so no run stays in memory with a secret
        self.host.keeps_secrets = False
        self.narration: Narration | None = None
        """Reports the leg to the people who watch the run's thread; None if nothing is reported."""

    @property
    def run_id(self) -> str:
        return self.row.record.id


class Runner:
    """Executes the runs of these apps from a journal, at most `limit` runs at once.

    Other people may approve calls if the journal is in PostgreSQL: those who are users there. Runs of removed users wait.

    - `dispatcher`: an engine that starts legs, such as `DbosDispatcher`. Without one, the runner claims runs from the journal.
    - `host`: the name by which runs are pinned to this host.
    - `retention`: rules for when finished runs are deleted from the journal.
    - `report`: called with a line of text about a leg, for example when the leg begins or ends.
    """

    def __init__(
        self,
        journal: Journal,
        apps: Sequence[FleetApp],
        *,
        dispatcher: Engine | None = None,
        limit: int = 10,
        host: str = "",
        report: Callable[[str], None] = lambda line: None,
        retention: Sequence[Retention] = (),
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self.journal = journal
        self.host = host or this_host()
        self.limit = limit
        self._apps = {app.queue: app for app in apps}
        for app in apps:
            app.source.check_spend()
        self._engine = dispatcher
        self._dispatcher: Dispatcher = dispatcher or JournalDispatcher()
        self._report = report
        self._retention = retention
        self._clock = clock
        self._narrator: Narrator | None = None
        self._people = None if journal.accounts is None else People(journal.accounts, clock=journal.clock)
        self._legs: dict[str, _Leg] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._unreleased: set[str] = set()
        """The runs of failed legs that could not be released, because the journal failed."""
        self._draining = False
        self._ended = False
        """Whether `_tend` must end. Its task is cancelled too, but a wait that ends just then can swallow the cancellation."""

    @property
    def queues(self) -> tuple[str, ...]:
        """The queues that this worker takes runs from."""
        return tuple(self._apps)

    @property
    def running(self) -> tuple[str, ...]:
        """The ids of the runs that this worker is executing."""
        return tuple(self._legs)

    async def run(self, stop: asyncio.Event, *, grace: float = 30.0) -> None:
        """Execute legs until `stop` is set. Then take no more runs, and give the current legs `grace` seconds to finish.

        Legs that are left after that are interrupted, and their runs are immediately due for other workers. The same happens
        without the grace period if this worker fails or is cancelled. Raises `JournalUpgraded` once the journal no longer lets
        this version write to it.
        """
        self._narrator = _narrator(self.journal, self._clock, self._who_may_vote)
        duties = [self._tend(), self._claim() if self._engine is None else self._work(self._engine)]
        if self._retention:
            duties.append(keep_sweeping(self.journal, self._retention))
        tasks = [asyncio.ensure_future(each) for each in duties]
        waiting = asyncio.ensure_future(stop.wait())
        try:
            await asyncio.wait([*tasks, waiting], return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                if task.done():
                    task.result()
            self._draining = True
            tasks[1].cancel()
            if self._tasks:
                await asyncio.wait(self._tasks, timeout=grace)
        finally:
            self._draining = True
            tasks[1].cancel()
            await self._cut_off()
            self._ended = True
            waiting.cancel()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            if self._narrator is not None:
                self._narrator.close()
            with contextlib.suppress(JournalError):
                await self._announce(0)

    async def execute(self, run_id: str) -> None:
        """Execute the next leg of a run, if the run is due and no other worker has it.

        Does nothing while the worker drains.
        """
        if self._draining:
            return
        row = await self._claimed(run_id)
        if row is not None:
            await self._execute(row)

    # Duties.

    async def _claim(self) -> None:
        """Claim due runs from the journal, and execute up to `limit` of them at once, until the worker drains."""
        while not self._draining:
            try:
                if len(self._tasks) < self.limit:
                    row = await shielded(self._claimed())
                    if row is not None and self._draining:
                        await self._return(row)
                    elif row is not None:
                        self._start(self._execute(row))
                        continue
                await self.journal.queue.wait(_LOOK_SECONDS)
            except JournalUpgraded:
                raise
            except JournalError as error:
                log.log(error.retry_level, "could not look for runs; will retry", exc_info=True)
                await asyncio.sleep(_LOOK_SECONDS)

    async def _claimed(self, run_id: str | None = None) -> RunRow | None:
        """Claim a due run, and return its row. Returns None if there is no run to claim.

        A run that this worker is still executing is not claimed again, even if another worker has had it in between. The
        journal checks only which process owns a run, so after a second claim it would accept records of the lost leg too.
        """
        return await self.journal.queue.claim(
            self.queues, host=self.host, run_id=run_id, besides=tuple(self._legs)
        )

    async def _return(self, row: RunRow) -> None:
        """Release a run that this process holds and does not execute, so that it is immediately due for other workers."""
        now = self.journal.clock.now().timestamp()
        await self.journal.runs.leave(row.record.id, row.status, row.outcome, due_at=now)

    def _start(self, leg: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.ensure_future(leg)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _work(self, engine: Engine) -> None:
        """Let the engine start legs. Each leg is a separate task, so that stopping the engine does not cancel it."""

        async def execute(run_id: str) -> None:
            await asyncio.shield(self._start(self.execute(run_id)))

        await engine.work(execute, self.queues, self.limit)

    async def _tend(self) -> None:
        """Do the worker's periodic work until it ends.

        Announce that it is alive, tend its narrator, release the runs of failed legs, stop runs that are to be cancelled, and
        hand due runs to the engine.
        """
        announced = 0.0
        handed: dict[str, float] = {}
        while not self._ended:
            now = self._clock.monotonic()
            try:
                if now - announced >= _ANNOUNCE_SECONDS / 3 or not announced:
                    announced = now
                    await self._announce(_ANNOUNCE_SECONDS)
                    if self._narrator is not None:
                        await self._narrator.sweep()
                if self._narrator is not None:
                    await self._narrator.tend()
                await self._release()
                for run_id in await self.journal.queue.signalled():
                    await renew_now(self.journal, run_id)
                if self._engine is not None and not self._draining:
                    handed = await self._hand_over(handed, now)
                await self.journal.queue.wait(_LOOK_SECONDS)
            except JournalUpgraded:
                raise
            except JournalError as error:
                log.log(
                    error.retry_level, "the periodic checks of this worker failed; will retry", exc_info=True
                )
                await asyncio.sleep(_LOOK_SECONDS)

    async def _hand_over(self, handed: dict[str, float], now: float) -> dict[str, float]:
        """Hand due runs to the engine, at most 1000 at a time. A run that is still due after a while is handed over again.

        Returns the time at which each leg that is still due was handed over.
        """
        kept: dict[str, float] = {}
        for row in await self.journal.queue.due(self.queues, host=self.host, limit=1000):
            leg = f"{row.record.id}/{row.legs}"
            if leg in handed and now - handed[leg] < _AGAIN_SECONDS:
                kept[leg] = handed[leg]
                continue
            try:
                await self._dispatcher.wake(row)
            except Exception:  # whatever the engine raises if its database is gone for a while
                log.warning("could not hand run %s to the engine; will retry", row.record.id, exc_info=True)
            kept[leg] = now
        return kept

    async def _announce(self, seconds: float) -> None:
        row = WorkerRow(
            owner="", host=self.host, queues=list(self._apps), runs=len(self._legs), limit=self.limit
        )
        await self.journal.queue.announce(row, seconds=seconds)

    # Legs.

    async def _execute(self, row: RunRow) -> None:
        """Execute a leg of a claimed run. If the leg fails, `_failed` releases the run."""
        leg = self._legs[row.record.id] = _Leg(row, self._apps[row.queue], self._who_may_vote)
        self._tell(leg.run_id, f"leg {row.legs} {'begins' if row.status == 'queued' else 'continues'}")
        try:
            # A lost worker had claimed the run, was asked to cancel it, and never began it.
            if row.status == "queued" and row.stopping:
                await cancel(self.journal, leg.run_id)
                return self._tell(leg.run_id, "cancelled before it began")
            if not row.stopping and not self._may_run(row.record.principal):
                return await self._put_off(row)
            stream = await self._open(leg)
            if leg.narration is not None:
                leg.narration.begin(stream, "")
            await stream.response
            self._tell(leg.run_id, "done")
        except RunParked as parked:
            self._tell(leg.run_id, f"parked, {counted(len(parked.questions), 'open question')}")
        except RunBusy as busy:
            self._tell(leg.run_id, f"taken over by {busy.owner}")
        except asyncio.CancelledError:
            raise
        except Exception as error:
            await self._failed(leg, error)
        finally:
            if leg.narration is not None:
                await leg.narration.finish()
            del self._legs[leg.run_id]
            if (parent := row.record.parent) is not None:
                with contextlib.suppress(JournalError):
                    await renew_now(self.journal, parent.run_id)  # it is told the end at once if it is here

    def _tell(self, run_id: str, what: str) -> None:
        self._report(f"{run_id}: {what}")
        log.info("%s: %s", run_id, what, extra={"run_id": run_id})

    def _may_run(self, principal: str) -> bool:
        return self._people is None or self._people.may_run(principal)

    def _who_may_vote(self, role: str | None, principal: str) -> Mapping[str, float]:
        """Return the users who may vote on this principal's runs and have this role, as `People.who_may_vote` does."""
        if self._people is None:
            return {}
        voters = self._people.who_may_vote(role, principal)
        return voters if self._may_run(principal) else {}

    async def _put_off(self, row: RunRow) -> None:
        """Release the run of a principal who may not run anything. It is due again later, in case that changes."""
        run_id, later = row.record.id, self.journal.clock.now().timestamp() + _RETRY_SECONDS
        await self.journal.runs.leave(run_id, row.status, row.outcome, due_at=later)
        self._tell(run_id, "waits, because its user was removed or may not run anything")

    async def _open(self, leg: _Leg) -> RunStream[Any]:
        """Begin a queued run, or resume a run that has begun. A repeated run submits the next one of its series when it begins."""
        record, journal = leg.row.record, self.journal
        if record.request:
            request = decode_request(record)
            source = leg.app.in_folder(request.folder, request.startup_files)
        else:
            source = leg.app.source
        session: Session | None = None
        if self._narrator is not None:
            leg.narration = await self._narrator.narrate(source, leg.row)
            if leg.narration is not None:
                session, leg.host = leg.narration.live.session, leg.narration.live
        if leg.row.status != "queued":
            return source.resume(record.id, journal=journal, environment=leg.host, session=session)
        request = decode_request(record)
        waited = journal.clock.now().timestamp() - max(record.began_at, request.due_at or 0.0)
        publish_everywhere(RunClaimed(record.id, max(0.0, waited)))
        await repeat(journal, leg.row, request, self._dispatcher)
        if session is None:
            session = await load_session(journal, record.session_id, principal=record.principal)
        await load_attachments(journal, record.id, request.attachments)
        limits: Any = request.budget
        return source.begin(
            request.message,
            attachments=request.attachments,
            run_id=record.id,
            session=session,
            journal=journal,
            environment=leg.host,
            deadline=None
            if request.deadline is None
            else Deadline.after(request.deadline, clock=self._clock),
            budget=None if limits is None else Budget(**limits),
            outer_policies=() if record.parent is None else policies_of(record.parent),
            spend=() if record.parent is None else record.parent.spend,
            traceparent=request.traceparent or None,
        )

    async def _failed(self, leg: _Leg, error: Exception) -> None:
        """Release the run of a failed leg.

        A run that is over, or that another worker has, is left alone. A run that this worker has and that could not begin is
        recorded as failed, unless the journal failed or another run has its workspace or session. Any other run is due again later. If the
        journal fails, `_release` releases the run later.
        """
        self._tell(leg.run_id, f"{type(error).__name__}: {error}")
        journal, run_id = self.journal, leg.run_id
        try:
            row = await journal.runs.get(run_id)
            if row.status in OVER:
                return
            if row.owner not in ("", journal.owner):
                return self._tell(run_id, f"taken over by {row.owner}")
            if not isinstance(error, JournalError | PromptEvaluationError | _Busy):
                log.error("a leg of run %s failed", run_id, exc_info=error, extra={"run_id": run_id})
            is_mine = row.owner == journal.owner
            pause = _BUSY_SECONDS if isinstance(error, _Busy) else _RETRY_SECONDS
            later = journal.clock.now().timestamp() + pause
            if row.status == "queued" and is_mine and not isinstance(error, JournalError | _Busy):
                await journal.runs.leave(run_id, "failed", never_begun("failed", described(error)))
            elif is_mine:
                await journal.runs.leave(run_id, row.status, row.outcome, due_at=later)
            elif not row.owner:
                await journal.queue.wake(run_id, later)
        except JournalError as error:
            log.log(error.retry_level, "run %s could not be released; will retry", run_id, exc_info=True)
            self._unreleased.add(run_id)
        except RunBusy as busy:
            self._tell(run_id, f"taken over by {busy.owner}")

    async def _release(self) -> None:
        """Release the runs that could not be released when their legs failed.

        Otherwise this process could hold them as long as it lives, because in PostgreSQL one lease covers all runs of a process.
        """
        for run_id in tuple(self._unreleased - self._legs.keys()):
            row = await self.journal.runs.get(run_id)
            if row.status not in OVER and row.owner == self.journal.owner:
                with contextlib.suppress(RunBusy):
                    await self._return(row)
            self._unreleased.discard(run_id)

    async def _cut_off(self) -> None:
        """Interrupt the legs that are still executing, and make their runs due for other workers.

        The runs are made due before they are parked, because a run that is parked and not due does not keep its workspace. Other
        workers continue the runs even if this process is killed in the meantime.
        """
        with contextlib.suppress(JournalError):
            for run_id in tuple(self._legs):
                await self.journal.queue.wake(run_id)
        for leg in tuple(self._legs.values()):
            leg.host.cut()
        cut = tuple(self._legs)
        if self._tasks:
            _, stuck = await asyncio.wait(self._tasks, timeout=_CUT_SECONDS)
            for task in stuck:
                task.cancel()
            await asyncio.gather(*stuck, return_exceptions=True)
        for run_id in cut:
            with contextlib.suppress(JournalError, RunBusy):
                row = await self.journal.runs.get(run_id)
                if row.status not in OVER and not row.owner:
                    await self.journal.queue.wake(run_id)
                    self._tell(run_id, "left for another worker")


def _narrator(journal: Journal, clock: Clock, voters: Voters) -> Narrator | None:
    """Return a narrator, which reports the legs to servers.

    Returns None if the journal has no broadcasts, or if the `serve` extra is not installed.
    """
    if journal.broadcasts is None:
        return None
    try:
        from handrail.serve.narration import Narrator
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in REQUIRED:
            raise
        log.warning("servers can't show what this worker does. Install: pip install 'handrail[serve]'")
        return None
    return Narrator(journal, journal.broadcasts, park_after=_PARK_AFTER, clock=clock, voters=voters)
