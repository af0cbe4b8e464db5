"""Commits: `commit` checks that what a call read still holds, and makes its changes at once, with or without a record.

With a journal, the record and the files are written in an order that survives a crash.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from handrail.concurrency.cancellation import Pending, shielded, unless_stopped
from handrail.concurrency.claims import GaveUp, Pace, Stop, never
from handrail.concurrency.threads import run_in_thread
from handrail.errors import Conflict, PromptEvaluationError, UnfinishedCommit
from handrail.events import CallStatus
from handrail.journal.protocol import Journal
from handrail.journal.records import CommitUnit, WorkspaceDelta
from handrail.run.failures import Refused
from handrail.run.record.format import InnerCall, commit_unit, inner_call
from handrail.run.record.log import store_attachments
from handrail.run.transaction import key_of, note_past
from handrail.tools import EFFECTS, ToolResult

if TYPE_CHECKING:
    from handrail.run.call import Attempt, Passage
    from handrail.run.transaction import RecordedFork


log = logging.getLogger("handrail.gate")

_STORED = 8 * 1024 * 1024
"""Maximum bytes that are stored at a time, unless a single file is larger."""
_RECOVERY_SECONDS = 10.0
"""Seconds to go on finishing what dead processes of this journal have left in the way of a call."""
_FIRST_PAUSE, _LONGEST_PAUSE = 0.001, 0.1
_FOREIGN = 2
"""How many times a call may be run again because somebody other than a call has changed what it read or previewed."""
_CONFLICTS, _CONFLICT_SECONDS = 1000, 600.0
"""When a call that keeps conflicting with other calls gives up: after this many runs, or this much time."""


def commit(attempt: Attempt) -> bool | Coroutine[Any, Any, bool]:
    """Commit a call that has succeeded: an inner call into its outer call, any other into the session and the resources.

    Returns whether it was committed, or a coroutine that returns this, if the commit may have to wait. A call that was not committed
    must run again. If the call can't be committed, raises an error such as `Conflict`.
    """
    journal = attempt.run.journal
    if journal is not None:
        return _record_untouched(journal, attempt) if _is_alone(attempt) else _commit_journaled(attempt)
    committed = _commit_at_once(attempt)
    return _commit_claimed(attempt) if committed is None else committed


def _is_alone(attempt: Attempt) -> bool:
    """Return whether a call of the run itself has touched nothing, and no other call is at work in its run or has claimed its session.

    Such a call has nothing to check, to claim or to apply, and its record overtakes no other.
    """
    run, transaction = attempt.run, attempt.transaction
    if attempt.parent is not None or attempt.is_undone or (transaction is not None and transaction.touched):
        return False
    return len(run.live) == 1 and not run.session.claims.is_busy and not attempt.finished.attachments


def _record_untouched(journal: Journal, attempt: Attempt) -> bool | Coroutine[Any, Any, bool]:
    """Record a call that is alone, as `commit` does. A journal records what it was given first before the rest, so nothing is claimed."""
    attempt.passage.stale = ()
    unit = commit_unit(attempt, attempt.finished)
    if not journal.synced and journal.calls.commit_now(unit):
        attempt.passage.recorded = True
        return True
    begun = journal.calls.commit_soon(unit)
    return _commit_journaled(attempt) if begun is None else _finish_untouched(begun, attempt)


async def _finish_untouched(begun: Pending[bool], attempt: Attempt) -> bool:
    """Wait for the record of a call that is alone. If it was not added, commit the call like any other."""
    attempt.passage.recorded = await begun.wait()
    return attempt.passage.recorded or await _commit_journaled(attempt)


async def _commit_journaled(attempt: Attempt) -> bool:
    """Commit a call in a run with a journal. An inner call becomes part of the outer call's record.

    Its result is kept in case the outer handler is re-entered.
    """
    log, transaction, result = attempt.run.log, attempt.open_transaction, attempt.finished
    if transaction.parent is None:
        return await _commit_claimed(attempt)
    inner = await transaction.go_through(lambda: inner_call(attempt, result)) if log.is_kept else None
    done = _commit_at_once(attempt, inner)
    if done is None:
        done = await _commit_inside(attempt, inner)
    if done and log.is_kept:
        if result.attachments:
            await shielded(store_attachments(log.journal, log.run_id, result.attachments))
        attempt.passage.recorded = await shielded(log.note("inner call", attempt.call.place, inner))
    return done


def _commit_at_once(attempt: Attempt, record: InnerCall | None = None) -> bool | None:
    """Commit the call's forks at once. Returns False if the call must run again, and None if the commit would have to wait.

    `record` is the record of an inner call, which the calls around it may need; None if there is none.
    """
    transaction, outer = attempt.open_transaction, attempt.parent
    changed = None if outer is None else _check_outer(attempt, outer)
    if transaction.touched:
        locks = transaction.lock()  # no other commit may happen between the version check and the last change
        if locks is None:
            return None
        try:
            if _must_run_again(attempt, transaction.stale()):
                return False
            transaction.prepare()
            transaction.apply()
        finally:
            for lock in locks:
                lock.release()
        transaction.publish()
    _pass_on(attempt, changed, record)
    return True


async def _commit_inside(attempt: Attempt, record: InnerCall | None) -> bool:
    """Commit an inner call with many files, or after another one with many files, as `_commit_at_once` does."""
    transaction, outer = attempt.open_transaction, attempt.parent
    claims = await transaction.claim_outer()
    try:
        if _must_run_again(attempt, await transaction.go_through(transaction.stale)):
            return False
        await transaction.go_through(transaction.prepare)
        changed = None if outer is None else _check_outer(attempt, outer)
        await shielded(transaction.apply_inside())
    finally:
        await claims.leave()
    transaction.publish()
    _pass_on(attempt, changed, record)
    return True


async def _commit_claimed(attempt: Attempt) -> bool:
    """Commit a call while nobody else can commit to what it read or changed. Returns False if it must run again."""
    journal, transaction, outer = attempt.run.journal, attempt.open_transaction, attempt.parent
    if transaction.parent is not None:
        return await _commit_inside(attempt, None)
    claims = await transaction.claim(recorded=journal is not None)
    try:
        changed = None if outer is None else _check_outer(attempt, outer)
        if _must_run_again(attempt, await transaction.go_through(transaction.stale)):
            return False
        await transaction.go_through(transaction.prepare)
        if journal is not None:
            if transaction.only_read:
                await claims.leave(but=attempt.run.session.claims)  # nobody waits while it is recorded
            if (waiting := _commit_recorded(journal, attempt, attempt.finished)) is not None:
                await waiting
        elif transaction.durable is not None:
            await _commit_unrecorded(attempt)
        else:
            transaction.apply()
        if changed is not None:
            note_past(attempt, changed)
    finally:
        await claims.leave()
    attempt.passage.recorded = journal is not None
    transaction.publish()
    return True


# --- the calls around a call -------------------------------------------------------------------------


def _check_outer(attempt: Attempt, outer: Attempt) -> bool | None:
    """Raise `Refused` if the outer call is over, because only an auxiliary call can be committed then.

    Returns None if the call commits into its outer call. If it commits past the outer call, returns whether it has
    changed anything; False for an auxiliary call.
    """
    call, transaction = attempt.call, attempt.open_transaction
    if call.kind.is_auxiliary:
        return None if outer.transaction is transaction.parent else False
    if outer.ended:
        raise Refused("cancelled", f"{call.name} was not applied: its outer call is over.")
    if outer.transaction is transaction.parent:
        return None
    effect = attempt.own_effect(attempt.finished)
    return bool(transaction.settled or effect or transaction.writes() or transaction.spawned)


def _pass_on(attempt: Attempt, changed: bool | None, record: InnerCall | None) -> None:
    """Tell the calls around a committed call what it did. `changed` is what `_check_outer` returned."""
    transaction = attempt.open_transaction
    if transaction.parent is not None and not attempt.kind.is_auxiliary:
        # If the outer call fails, it must undo or report the external effects of its inner calls.
        transaction.parent.inherit(transaction)
        attempt.settle_effect(transaction.parent)
    if changed is not None:
        note_past(attempt, changed, *(() if record is None else (record.changes,)))


# --- conflicts ---------------------------------------------------------------------------------------


def _must_run_again(attempt: Attempt, stale: tuple[str, ...]) -> bool:
    """Return whether the call must run again: something that it read has changed (`stale`), and it can be undone completely.

    Raises `Conflict` if the call would have to run again, but has conflicted too often, or if its tool's `reenters` is true.
    """
    if stale and EFFECTS[attempt.tool.effect].transactional:
        count_conflict(attempt, Conflict(stale), has_read=True)
        return True
    attempt.passage.stale = stale
    return False


def count_conflict(attempt: Attempt, error: Conflict, *, has_read: bool = False) -> None:
    """Count a conflict after which the call is run again. Raises `error` if it is not.

    Conflicts with other calls end, because those that conflicted run one after another. Somebody other than a call
    may go on for ever, and must not be overwritten by a call that has neither read nor previewed what they changed.
    """
    passage, tool, transaction = attempt.passage, attempt.tool, attempt.open_transaction
    is_previewed = attempt.preview is not None
    can_repeat = EFFECTS[tool.effect].transactional and not tool.reenters and not transaction.kept
    if can_repeat and transaction.others_committed():
        now = attempt.run.monotonic()
        passage.conflicted_at = passage.conflicted_at or now
        passage.conflicts += 1
        passage.turns = passage.turns or transaction.turns()
        if passage.conflicts < _CONFLICTS and now - passage.conflicted_at < _CONFLICT_SECONDS:
            return
    elif is_previewed or (can_repeat and has_read):
        passage.foreign += 1
        if passage.foreign <= _FOREIGN:
            return
    raise error


def end_turn(passage: Passage) -> None:
    """End the turn of a call that conflicted with others, if it has one."""
    turns, passage.turns = passage.turns, None
    if turns is not None:
        turns.leave(passage)


# --- records and files -------------------------------------------------------------------------------


async def _upload(journal: Journal, fork: RecordedFork, run_id: str) -> WorkspaceDelta:
    """Store the bytes of a staged fork's files that the journal does not have yet. Returns the fork's delta."""
    delta = fork.delta()
    assert delta is not None, "only forks with changes are uploaded"
    sizes = {
        change.new.digest: change.new.size for change in delta.changes if change.new and change.new.digest
    }
    stored = set(await journal.workspaces.has(sizes, run_id=run_id)) if sizes else set[str]()
    for some in _batches({digest: size for digest, size in sizes.items() if digest not in stored}):
        blobs = await run_in_thread(lambda some=some: [fork.content(digest) for digest in some])
        await journal.workspaces.put(blobs, run_id=run_id)
    return delta


def _batches(sizes: dict[str, int]) -> Iterator[Sequence[str]]:
    """Yield the digests in batches, each of at most `_STORED` bytes or a single larger file."""
    batch: list[str] = []
    total = 0
    for digest, size in sizes.items():
        if batch and total + size > _STORED:
            yield batch
            batch, total = [], 0
        batch.append(digest)
        total += size
    if batch:
        yield batch


@runtime_checkable
class RecoverableFork(Protocol):
    """A fork of a folder in which a dead process may have left a recorded commit unfinished."""

    async def recover(self, journal: Journal, /) -> None:
        """Finish the commits that this journal recorded."""
        ...


async def record_end(
    attempt: Attempt, result: ToolResult[Any], status: CallStatus, ending: BaseException | None
) -> bool:
    """Record the end of a call that has not been recorded as a commit, and return whether it was recorded.

    Nothing is recorded if there is no journal, if the log is closed, if the call or its run was cancelled, or if the
    error `ending` ends the run because of its budget and would do so again.
    """
    log = attempt.run.log
    if not log.is_kept or log.closed:
        return False
    if status == "cancelled" or attempt.run.cancellation.cancelled:
        return False
    if _meets_its_budget_again(attempt, ending):
        return False
    if result.attachments:
        await shielded(store_attachments(log.journal, log.run_id, result.attachments))
    if attempt.parent is None:
        await shielded(log.journal.calls.commit(commit_unit(attempt, result, status)))
        return True
    inner = inner_call(attempt, result, status)
    return await shielded(log.note("inner call", attempt.call.place, inner))


def _meets_its_budget_again(attempt: Attempt, ending: BaseException | None) -> bool:
    """Return whether a call has exceeded the run's budget, and would do so again if the run were resumed.

    If the process dies before the run's end is recorded, the resumed run must end in the same way. If the call were
    recorded, the resumed run would continue, because the record does not say that the call ended the run.
    """
    is_budget = isinstance(ending, PromptEvaluationError) and ending.phase == "budget"
    return is_budget and (not attempt.passage.charged or attempt.tool.enters_again)


def _commit_recorded(
    journal: Journal, attempt: Attempt, result: ToolResult[Any]
) -> Coroutine[Any, Any, None] | None:
    """Record the changes of a prepared call, then apply them. The caller must prevent other commits meanwhile.

    If the call has used no durable resource, its result has no attachments, and the journal can record it without waiting,
    everything is done immediately, and this returns None. Otherwise it returns a coroutine that waits for the end of the work, even if its task is cancelled.
    Concurrent calls always wait, so that they commit in the same order when their run is replayed.
    """
    transaction = attempt.open_transaction
    if transaction.durable:
        return _commit_durable(journal, attempt, result)
    if result.attachments:
        return shielded(_commit(journal, attempt, result))
    unit = commit_unit(attempt, result)
    has_siblings = len(attempt.run.live) > 1
    if not has_siblings and not journal.synced and journal.calls.commit_now(unit):
        transaction.apply()
        return None
    begun = journal.calls.commit_soon(unit)
    if begun is None:
        return shielded(_commit(journal, attempt, result, unit))
    return _finish(begun, journal, attempt, result, unit)


async def _finish(
    begun: Pending[bool], journal: Journal, attempt: Attempt, result: ToolResult[Any], unit: CommitUnit
) -> None:
    """Wait for the record of a call that has used no durable resource, and apply its changes."""
    if await begun.wait():
        attempt.open_transaction.apply()
    else:
        await shielded(_commit(journal, attempt, result, unit))


async def _commit(
    journal: Journal, attempt: Attempt, result: ToolResult[Any], unit: CommitUnit | None = None
) -> None:
    """Record and apply the changes of a prepared call that has used no durable resource."""
    await _store(journal, attempt, result)
    await journal.calls.commit(unit or commit_unit(attempt, result))
    attempt.open_transaction.apply()


async def _store(journal: Journal, attempt: Attempt, result: ToolResult[Any]) -> None:
    """Store the attachments of a result, before the record that refers to them."""
    if result.attachments:
        await store_attachments(journal, attempt.run.log.run_id, result.attachments)


async def _commit_durable(journal: Journal, attempt: Attempt, result: ToolResult[Any]) -> None:
    """Record and apply the changes of a prepared call.

    1. The new bytes are written to the staging folder, and synced if the journal is. Then what the call read and changes
       is claimed among all processes. This step can be cancelled. The bytes of files in a workspace are stored in the journal.
    2. The journal records everything in one transaction, the commit point.
    3. The files are renamed into place.
    4. The journal notes that they are in place. Until then, recovery finds out from the staging folder.
    5. The files that the call replaced move to the history, from which later commits may remove them.

    If somebody changes a file between the check and step 3, their version is kept: all other files are reverted, and the
    record is voided before this raises `Conflict`.
    """
    files, diff = await _stage(journal, attempt)  # 1
    await shielded(_record(journal, attempt, result, files, diff))


async def _record(
    journal: Journal, attempt: Attempt, result: ToolResult[Any], files: list[Mapping[str, Any]], diff: str
) -> None:
    transaction, synced = attempt.open_transaction, journal.synced
    await _store(journal, attempt, result)
    forks, run_id = transaction.recorded_forks(), attempt.run_context.request_id
    deltas = [await _upload(journal, fork, run_id) for fork in forks]
    is_large = transaction.is_large
    unit = await transaction.go_through(
        lambda: commit_unit(attempt, result, files=files, diff=diff, workspaces=deltas)
    )
    transaction.set_pace(_pace_of(attempt))
    await journal.calls.commit(unit)  # 2
    try:
        await run_in_thread(lambda: transaction.apply_durable(synced))  # 3
        transaction.apply_others()
    except BaseException:
        if files:
            await journal.calls.void(unit)
        raise
    try:
        if files:
            await journal.calls.applied(unit)  # 4
    except Exception:  # the files are in place, which recovery will notice
        log.exception("%s is committed and applied, but the journal could not record that", attempt.id)
    finally:
        if is_large:
            await run_in_thread(transaction.confirm)  # 5
        else:
            transaction.confirm()


async def _stage(journal: Journal, attempt: Attempt) -> tuple[list[Mapping[str, Any]], str]:
    """Stage the changes of a call and claim them among all processes. Returns the manifests and the diff.

    If a process has died while it committed a call that this journal may have recorded, that call is finished first.
    """
    transaction, key = attempt.open_transaction, key_of(attempt, journal.id)

    def stage(stop: Stop) -> tuple[list[Mapping[str, Any]], str]:
        transaction.set_pace(_pace_of(attempt, stop))
        diff = transaction.file_diff()
        files = transaction.stage(key, journal.synced)
        transaction.enter(stop, recorded=True)
        if stop():
            raise GaveUp
        return files, diff

    monotonic, pause = attempt.run.monotonic, _FIRST_PAUSE
    until = monotonic() + _RECOVERY_SECONDS
    while True:
        try:
            return await unless_stopped(stage)
        except UnfinishedCommit as unfinished:
            if unfinished.journal != journal.id or monotonic() > until:
                raise
        for part in transaction.parts:
            if isinstance(part.fork, RecoverableFork):
                await part.fork.recover(journal)
        # Other processes may be finishing the same commit, and they or others may die meanwhile.
        await asyncio.sleep(pause)
        pause = min(pause * 2, _LONGEST_PAUSE)


def _pace_of(attempt: Attempt, stop: Stop = never) -> Pace:
    """Return the pace of a commit. It reports its progress as that of the call."""
    return Pace(stop, attempt.report_progress, attempt.run.monotonic)


async def _commit_unrecorded(attempt: Attempt) -> None:
    """Apply the changes of a prepared call that has used a durable resource and is not recorded."""
    transaction, key = attempt.open_transaction, key_of(attempt)

    is_large = transaction.is_large

    def apply(stop: Stop) -> None:
        transaction.set_pace(_pace_of(attempt, stop))
        transaction.stage(key)
        transaction.enter(stop, recorded=False)
        transaction.apply_durable()

    await unless_stopped(apply)
    transaction.apply_others()
    if is_large:
        await shielded(run_in_thread(transaction.confirm))
    else:
        transaction.confirm()
