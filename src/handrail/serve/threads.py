"""`Threads`: an app's threads in a journal. `ThreadList`: one principal's threads, page by page."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

from handrail.clock import SYSTEM_CLOCK, Clock
from handrail.errors import JournalAltered, JournalError, RunError
from handrail.ids import NewId, random_id
from handrail.journal.protocol import Journal
from handrail.journal.records import OVER, Mark, RunRecord, RunRow, SessionRow
from handrail.messages import AssistantMessage, Usage, UserMessage
from handrail.run.host import Voters
from handrail.run.record.begin import decode_begin, decode_outcome
from handrail.run.record.lease import renew_now
from handrail.run.record.parking import is_due
from handrail.runs import list_runs, said, show
from handrail.serve import snapshots
from handrail.serve.agui.wire_events import format_time
from handrail.serve.feed import Alarm, Feed
from handrail.serve.live_run import LiveRun
from handrail.serve.principals import parse_session_id, session_id_of
from handrail.serve.refusals import ThreadElsewhere
from handrail.serve.sources import Source, app_name, serves
from handrail.serve.thread import Setup, Submit, Thread

log = logging.getLogger("handrail.serve")

_MOST_KEPT = 256
"""Number of threads in memory above which idle ones are dropped."""
_MOST_RESUMED = 100_000
"""Maximum number of a journal's interrupted and parked runs that are considered at startup. The newest are taken."""
_MOST_SEARCHED = 500
"""Once this many threads and runs have been read for a page, it ends even if it is not full. Of a thread, only this many runs are searched.

This bounds the work, since a thread must be read to see if it matches. Clients continue by requesting the next page.
"""
_LOOK_PAUSE = 0.1
"""Minimum seconds between two looks for what other processes answered or cancelled."""
_SEARCH_BATCH = 200
"""Minimum number of threads that a search reads at a time. It is large because each query sorts all of a principal's threads."""
_MOST_COSTS_CACHED = 20_000
_MOST_COUNTED = 1000
"""Maximum number of a principal's newest runs that are read to count the submitted ones that are not over."""


class _Waiting(NamedTuple):
    """What a parked run waits for: answers to these questions, and a time, if it has one."""

    questions: frozenset[str]
    due_at: float | None


class Threads:
    """Finds threads, resumes the runs that an earlier process left unfinished, and parks all runs when the server stops."""

    def __init__(
        self,
        source: Source,
        journal: Journal,
        *,
        park_after: float | None = 300.0,
        poll_seconds: float | None = 2.0,
        most_kept: int = _MOST_KEPT,
        clock: Clock = SYSTEM_CLOCK,
        new_id: NewId = random_id,
        ended: Callable[[Mapping[str, Any]], None] | None = None,
        voters: Voters = lambda role, besides: {},
        may_run: Callable[[str], bool] = lambda principal: True,
        submit: Submit | None = None,
    ) -> None:
        self.source = source
        self.journal = journal
        self._setup = Setup(
            source,
            journal,
            park_after,
            new_id,
            clock,
            parked=self._was_parked,
            voters=voters,
            submit=submit,
            broadcasts=journal.broadcasts,
        )
        self._may_run = may_run
        self._ended = ended  # called with every event that ends a leg
        self._most_kept = most_kept
        self._poll_seconds = poll_seconds
        self._boot = new_id()[:8]
        self._feeds = itertools.count(1)
        self._alarm = Alarm()
        self._kept: OrderedDict[tuple[str, str], Thread] = OrderedDict()
        self._known: WeakValueDictionary[tuple[str, str], Thread] = WeakValueDictionary()
        """All threads in memory, including those that stay in memory only because a reader follows their feed."""
        self._waiting: dict[tuple[str, str], _Waiting] = {}
        """What parked runs wait for, by principal and thread id."""
        self._polling: asyncio.Task[None] | None = None
        self._resuming: set[asyncio.Task[None]] = set()

    @property
    def clock(self) -> Clock:
        return self._setup.clock

    @property
    def stopping(self) -> bool:
        return self._setup.stopping

    @property
    def parked(self) -> int:
        """Number of this app's parked runs whose open questions this process watches."""
        return len(self._waiting)

    def thread(self, principal: str, id: str) -> Thread:
        """Return this principal's thread with this id, creating the object if the thread is not in memory.

        Another principal's thread is never returned. Raises `ThreadNameRefused` if the id or the principal is invalid.
        """
        key = (principal, id)
        thread = self._known.get(key)
        if thread is None:
            session_id_of(principal, id)
            feed = Feed(f"{self._boot}{next(self._feeds)}", ended=self._ended, alarm=self._alarm)
            thread = self._known[key] = Thread(id, principal, self._setup, feed)
        self._kept[key] = thread
        self._kept.move_to_end(key)
        self._drop_idle()
        return thread

    async def open(self, principal: str, id: str) -> Thread:
        """Return this principal's thread for a request, as `thread` does.

        Raises `ThreadElsewhere` if it belongs to a different app, and `ThreadNameRefused` if a name is invalid.
        """
        thread = self.thread(principal, id)
        if thread.live is None:
            self.check_served(thread, await thread.rows())
        return thread

    def check_served(self, thread: Thread, rows: Sequence[RunRow]) -> None:
        """Raise `ThreadElsewhere` if a thread with these runs belongs to a different app."""
        if rows and thread.live is None and not serves(self.source, rows[-1].record):
            raise ThreadElsewhere(thread.id, app_name(rows[-1].record), rows[-1].record.prompt)

    def find(self, principal: str, id: str) -> Thread | None:
        """Return this principal's thread with this id if it is in memory, or None."""
        return self._known.get((principal, id))

    def running(self) -> Sequence[Thread]:
        """Return the threads that have a run in this process."""
        return list(self._setup.working.values())

    def unfinished(self, principal: str) -> int:
        """Return the number of a principal's runs that are in progress in this process, or parked and watched by it."""
        return sum(key[0] == principal for key in self._setup.working.keys() | self._waiting.keys())

    async def count_unfinished(self, principal: str) -> int:
        """Return the number of a principal's unfinished runs, including submitted ones if this app submits its runs."""
        if self._setup.submit is None:
            return self.unfinished(principal)
        newest = await self.journal.runs.list(principal=principal, limit=_MOST_COUNTED)
        submitted = sum(1 for row in newest if row.queue and row.status not in OVER)
        return self.unfinished(principal) + submitted

    def kept(self) -> int:
        """Return the number of threads that are kept in memory even without readers."""
        return len(self._kept)

    # Startup and shutdown.

    async def start(self) -> None:
        """Finish the file changes, and then resume the runs, that an earlier process left unfinished.

        Runs that wait for an answer stay parked. Runs of other apps in the same journal, and runs that were submitted to
        workers, are not touched. If a run can't be resumed, the error is logged.
        """
        recover = getattr(self.source.files, "recover", None)
        if recover is not None:
            await recover(self.journal)
        standing = await list_runs(self.journal, standing=("interrupted", "parked"), limit=_MOST_RESUMED)
        for line in reversed(standing):  # oldest first
            key = self.key_of(line.row)
            if key is None or line.row.queue:
                continue
            try:
                waits = line.standing == "parked" and await self._waits(line.row)
            except JournalAltered:
                log.exception("the journal of thread %s was altered, so its run is not resumed", key[1])
                continue
            if waits:
                questions = await self.journal.questions.open(line.id)
                self._waiting[key] = _Waiting(frozenset(each.id for each in questions), line.row.due_at)
            else:
                await self._go_on(key)
        if self._poll_seconds is not None:
            self._polling = asyncio.get_running_loop().create_task(self._keep_polling(self._poll_seconds))

    async def stop(self, grace: float = 5.0) -> None:
        """Park every run. Runs that are still working after `grace` seconds are cut off."""
        self._setup.stopping = True
        if self._polling is not None:
            self._polling.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._polling
        await asyncio.gather(*(thread.stop_watching() for thread in list(self._known.values())))
        await asyncio.gather(*(thread.park(grace) for thread in self.running()))

    async def poll(self) -> None:
        """Resume each parked run if a question or its deadline has expired, or another process answered or withdrew a question.

        Runs whose principal may not run anything any more are not resumed, and those in memory are parked when they wait.
        """
        for thread in self.running():
            if thread.live is not None and not self._may_run(thread.principal):
                thread.live.leave()
        await self._resume_due()

    async def _resume_due(self) -> None:
        """Resume the parked runs that need not wait any more."""
        if not self._waiting or self.stopping:
            return
        open_now = {each.id for each in await self.journal.questions.open()}
        for key, waits in list(self._waiting.items()):
            is_over = not waits.questions <= open_now or is_due(waits.due_at, self.journal.clock)
            if is_over and self._may_run(key[0]):
                self._waiting.pop(key, None)
                await self._go_on(key)

    async def _keep_polling(self, seconds: float) -> None:
        """Look for what other processes answered or cancelled, whenever the journal may have changed, and poll every `seconds`.

        Looking takes at most a twentieth of the time, however many questions are open. Nothing is looked for while no run here
        depends on other processes.
        """
        loop = asyncio.get_running_loop()
        polled_at = loop.time()
        while True:
            if not (self._waiting or self._setup.working):
                self._setup.has_begun.clear()
                await self._setup.has_begun.wait()
            # begun before the look, so that no change between the two is missed
            changed = loop.create_task(self.journal.queue.wait(seconds))
            try:
                await asyncio.sleep(0)
                began = loop.time()
                if began - polled_at >= seconds:
                    polled_at = began
                    await self.poll()
                else:
                    await self._resume_due()
                for run_id in await self.journal.queue.signalled():
                    await renew_now(self.journal, run_id)
                await asyncio.sleep(min(max(_LOOK_PAUSE, 20 * (loop.time() - began)), seconds))
                await changed
            except Exception as error:
                level = error.retry_level if isinstance(error, JournalError) else logging.ERROR
                log.log(
                    level, "could not check for answers from other processes; trying again", exc_info=True
                )
                await asyncio.sleep(seconds)
            finally:
                changed.cancel()
                await asyncio.gather(changed, return_exceptions=True)

    async def _go_on(self, key: tuple[str, str]) -> None:
        """Resume the run of a thread, unless its principal may not run anything any more. An error is logged."""
        if not self._may_run(key[0]):
            log.warning(
                "the run of thread %s is not resumed, because its user was removed or may not run anything",
                key[1],
            )
            return
        try:
            await self.thread(*key).go_on()
        except Exception as error:
            is_lost = isinstance(error, JournalError) and error.is_lost
            level = logging.DEBUG if is_lost else logging.ERROR
            log.log(level, "could not resume the run of thread %s", key[1], exc_info=True)
            if is_lost:
                self._waiting.setdefault(
                    key, _Waiting(frozenset(), 0.0)
                )  # it is tried again with the next look

    def key_of(self, row: RunRow) -> tuple[str, str] | None:
        """Return a run's principal and thread id, or None if the run does not belong to one of this app's threads."""
        key = parse_session_id(row.record.session_id)
        if key is None or key[0] != row.record.principal or not self.source.owns(row.record):
            return None
        return key

    async def _waits(self, row: RunRow) -> bool:
        """Return whether a parked run has nothing to do until an answer arrives or a time is over."""
        if not row.questions or is_due(row.due_at, self.journal.clock):
            return False
        calls = (await show(self.journal, row.record.id)).calls
        answered = (
            call.status == "open"
            and call.questions
            and all(each.answer is not None for each in call.questions)
            for call in calls
        )
        return not any(answered)

    def _was_parked(self, thread: Thread, live: LiveRun) -> None:
        if self.stopping:
            return
        key = (thread.principal, thread.id)
        self._waiting[key] = _Waiting(frozenset(live.questions), live.due_at)
        if live.was_answered:
            task = asyncio.get_running_loop().create_task(self._go_on(key))
            self._resuming.add(task)
            task.add_done_callback(self._resuming.discard)

    def _drop_idle(self) -> None:
        over = len(self._kept) - self._most_kept
        if over > 0:
            idle = [key for key, thread in self._kept.items() if thread.is_idle]
            for key in idle[:over]:
                del self._kept[key]


# --- lists --------------------------------------------------------------------------------------------


class ThreadList:
    """Lists the threads that a principal has with this app, in pages, most recently changed first.

    A journal may also contain the threads of other apps, which are not listed.
    """

    def __init__(self, threads: Threads, most_cached: int = _MOST_COSTS_CACHED) -> None:
        self._threads = threads
        self._journal = threads.journal
        self._most_cached = most_cached
        self._costs: OrderedDict[tuple[str, float], tuple[Usage, Decimal | None]] = OrderedDict()
        """Usage and cost of finished runs, by run id and time of the last change."""

    async def page(
        self, principal: str, *, limit: int, before: Mark | None = None, words: str = ""
    ) -> tuple[list[dict[str, Any]], Mark | None]:
        """Return a page of threads, and the mark to pass as `before` to get the next page.

        A page has up to `limit` threads in which people and the model have said all `words`. The mark is None on the last page.
        If few threads match or belong to this app, a page can be short or even empty although it is not the last.
        """
        found: list[dict[str, Any]] = []
        searched = others = 0
        wanted = words.casefold().split()
        batch = max(limit, min(_SEARCH_BATCH, _MOST_SEARCHED)) if wanted else limit
        while True:
            rows = await self._journal.runs.sessions(principal, limit=batch + 1, before=before)
            for row in rows[:batch]:
                key = parse_session_id(row.session_id)
                searched += 1
                if key is not None and key[0] == principal:
                    is_own = serves(self._threads.source, row.newest.record)
                    others += not is_own
                    is_found = is_own and _contains(_first(row.first), wanted)
                    if is_own and not is_found:
                        told = [await self._said(run) for run in await self._runs(row.session_id, principal)]
                        searched += max(0, len(told) - 1)
                        is_found = _contains("\n".join(told), wanted)
                    if is_found:
                        found.append(await self._line(row, key))
                before = (row.changed_at, row.session_id)
                if len(found) == limit or (wanted and searched >= _MOST_SEARCHED):
                    break
            last = not rows or before == (rows[-1].changed_at, rows[-1].session_id)
            enough = len(found) == limit or searched >= _MOST_SEARCHED or not (wanted or others)
            if last or enough:
                return found, None if last else before
            batch = max(limit, min(_SEARCH_BATCH, _MOST_SEARCHED))

    async def _runs(self, session_id: str, principal: str) -> Sequence[RunRow]:
        """Return the runs of a thread that are searched: the newest ones, and only this principal's."""
        rows = await self._journal.runs.list(session_id=session_id)
        return [row for row in rows if row.record.principal == principal][-_MOST_SEARCHED:]

    async def _said(self, row: RunRow) -> str:
        """Return what people and the model have said in a run. Nested runs, thinking and the results of calls are left out."""
        try:
            messages = await said(self._journal, row.record.id) if row.status not in OVER else ()
        except (RunError, JournalAltered):  # its thread can still be listed
            messages = ()
        told = [
            each.text
            for each in messages or decode_outcome(row).messages
            if isinstance(each, AssistantMessage) or (isinstance(each, UserMessage) and not each.by_run)
        ]
        return "\n".join([_first(row.record), *told])

    async def _line(self, row: SessionRow, key: tuple[str, str]) -> dict[str, Any]:
        usage, cost = await self.cost_of(row.session_id)
        return {
            "id": key[1],
            "title": snapshots.title_of([RunRow(record=row.first, status="done")]),
            "status": snapshots.status_of([row.newest], self._threads.find(*key)),
            "began_at": format_time(row.first.began_at),
            "updated_at": format_time(row.changed_at),
            "questions": row.questions,
            "runs": row.runs,
            "usage": snapshots.usage_json(usage),
            "cost": snapshots.format_cost(cost),
        }

    async def cost_of(self, session_id: str) -> tuple[Usage, Decimal | None]:
        """Return the usage and cost of a session so far. The cost is None if that of one of its runs is unknown.

        The usage of runs whose records were altered is left out.
        """
        usage, costs = Usage(), list[Decimal | None]()
        for row in await self._journal.runs.list(session_id=session_id):
            key = (row.record.id, row.changed_at)
            found = self._costs.get(key)
            if found is None:
                try:
                    tree = await show(self._journal, row.record.id)
                except JournalAltered:  # its thread can still be listed
                    costs.append(None)
                    continue
                found = (tree.usage, tree.cost)
                if row.status in OVER:
                    self._costs[key] = found
                    if len(self._costs) > self._most_cached:
                        self._costs.popitem(last=False)
            usage += found[0]
            costs.append(found[1])
        return usage, snapshots.total_cost(costs)


def _first(first: RunRecord) -> str:
    """Return the message that a run began with."""
    return (decode_begin(first).message or "") if first.begin else ""


def _contains(text: str, words: list[str]) -> bool:
    """Return whether a text contains all of these words, in any case."""
    folded = text.casefold() if words else ""
    return all(word in folded for word in words)
