"""The gate: every call, no matter who makes it, takes these eleven steps in this order.

    1  look up the name                     7   open the transaction
    2  parse the arguments                  8   run the handler, under its timeout and the deadline
    3  check the policies; none may deny    9   commit a success after `on_result`; roll back a failure
    4  ask for approval if required         10  publish ToolInvoked
    5  check deadline and budget            11  return the result
    6  build the context

`Gate.pass_through` takes these steps from top to bottom. Parts of a call, compensations and probes skip some of them: see
`CallKind`. If a call runs before it is approved (see `runs_first`), or has made changes that need approval (see `why_ask`),
step 4 comes after step 8, and the approval is for the changes in the call's fork.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Mapping
from functools import partial
from typing import Any
from weakref import ref

import msgspec

from handrail.concurrency.cancellation import CancelScope, open_scope, shielded
from handrail.concurrency.claims import Turns
from handrail.concurrency.isolation import begin_isolated, is_closing
from handrail.concurrency.operation import Operation
from handrail.concurrency.threads import run_in_thread
from handrail.context import Approval, ToolContext
from handrail.errors import Conflict, TransientError
from handrail.events import CallStatus, ToolInvoked, ToolResumed, ToolRolledBack, ToolStarted
from handrail.protocols import RenderedPromptView
from handrail.run.approval import ask_approval, diff_of, outside_scope, runs_first, why_ask
from handrail.run.attempt import Attempt
from handrail.run.call import Call, check_name, new_call
from handrail.run.call_log import had_started, leave_to_outcome, record_unrepeated
from handrail.run.current_call import entered
from handrail.run.effects import compensate
from handrail.run.failures import Failure, Refused, SignatureMismatch, failure_of, not_approved
from handrail.run.handlers import (
    begin,
    check_finished,
    check_limits,
    check_nesting,
    check_outer,
    context_in_worker,
    look_up,
    refuse_misfit,
    start_timers,
    stop_timers,
    wait_to_retry,
)
from handrail.run.policies import (
    check_policies,
    close_policy_context,
    close_resources,
    reason_to_ask,
    tell_policies,
)
from handrail.run.record.commits import commit_recorded, commit_unrecorded, record_end
from handrail.run.record.format import InnerCall, inner_call, mark_begun, note_attempt
from handrail.run.record.log import store_attachments
from handrail.run.record.recorded_calls import decide_interrupted, replay_call, resume_attempt
from handrail.run.run import Run
from handrail.run.tickets import answer_for_tickets
from handrail.run.transaction import Transaction, new_transaction, note_past
from handrail.run.views import end_subscriptions
from handrail.schema import clear_json
from handrail.text.raised_errors import forget_frames, log_error, without_frames
from handrail.tools import EFFECTS, ToolResult

log = logging.getLogger("handrail.gate")


async def undo(attempt: Attempt, reason: str) -> tuple[str, ...]:
    """Drop the attempt's forks and, unless the run continues elsewhere, compensate its effects, last first.

    Returns the effects that could not be undone. A compensation that fails does not stop the others.
    """
    attempt.close()
    if attempt.is_undone:
        return ()
    transaction, run = attempt.open_transaction, attempt.run
    if transaction.is_large:
        await shielded(run_in_thread(transaction.drop))
    else:
        transaction.drop()
    if run.left_to_the_record:
        return ()  # parked, or taken over: the process that continues the run decides
    attempt.settle_effect(transaction)
    if attempt.tickets is not None:
        await shielded(answer_for_tickets(attempt, transaction))
    compensated, left = tuple[str, ...](), tuple[str, ...]()
    if transaction.settled:
        compensated, left = await shielded(compensate(attempt, transaction.settled))
    if attempt.made_resources is not None or attempt.policies_made_resources:
        try:
            await close_resources(attempt)
        except Exception as error:
            log_error(log, logging.ERROR, "closing the resources of %s failed", attempt.name, error=error)
    if attempt.policy_context is not None:
        close_policy_context(attempt)
    _record(attempt, reason, compensated, left)
    return left


def abandon(attempt: Attempt, reason: str) -> tuple[str, ...]:
    """Drop the attempt's forks when nothing can be awaited any more. Returns the effects that were not undone.

    In a run with a journal, the record says that the call began, but not that it ended, as after a crash. So the
    process that resumes the run undoes these effects, even if the call is irreversible and its own outcome is unknown.
    The model is told about those that can't be undone.
    """
    attempt.close()
    if attempt.is_undone:
        return ()
    transaction = attempt.open_transaction
    transaction.drop()
    attempt.settle_effect(transaction)
    left = tuple(dict.fromkeys(done.what for done in transaction.settled or ()))
    _record(attempt, reason, (), left)
    return left


def _record(attempt: Attempt, reason: str, compensated: tuple[str, ...], left: tuple[str, ...]) -> None:
    if attempt.token is not None:
        context = attempt.run.run_context
        fact = ToolRolledBack(attempt.id, attempt.name, reason, compensated, left, context)
        record_unrepeated(attempt, fact)


Arguments = str | bytes | Mapping[str, Any]

_FOREIGN = 2
"""How many times a call may be run again because somebody other than a call has changed what it read or previewed."""
_CONFLICTS, _CONFLICT_SECONDS = 1000, 600.0
"""When a call that keeps conflicting with other calls gives up: after this many runs, or this much time."""
_TURN_SECONDS = 5.0
"""How long a call waits for others that conflicted, if none of them ends, before it runs again beside them."""
_TOKEN = object()
"""Token without which no handler starts. Only step 7 issues it."""


class Passage(msgspec.Struct, eq=False):
    """One call on its way through the gate: the state that its attempts share, and its outcome."""

    call: Call
    attempt: Attempt
    """The newest attempt."""
    approved: Approval | None = None
    conflicts: int = 0
    """How many times the call was run again because of other calls."""
    foreign: int = 0
    """How many times the call was run again because of somebody other than a call."""
    conflicted_at: float = 0.0
    turns: Turns | None = None
    """Where the call takes turns with others that it conflicted with; None if it does not."""
    left: tuple[str, ...] = ()
    """Effects of earlier attempts that could not be undone."""
    status: CallStatus = "ok"
    result: ToolResult[Any] | None = None
    error: BaseException | None = None
    recorded: bool = False
    """Whether the end of the call is in the journal."""
    start: type[ToolStarted] | type[ToolResumed] = ToolStarted
    """The event with which the call begins in this leg of its run."""


class Gate:
    """The gate of one run. Its only state is the run."""

    __slots__ = ("run",)

    def __init__(self, run: Run) -> None:
        self.run = run

    @property
    def prompt(self) -> RenderedPromptView | None:
        """The prompt that the gate was opened for, as it was rendered; None if there is none."""
        return self.run.model.rendered

    def invoke(
        self, name: str, arguments: Arguments = "{}", *, call_id: str | None = None
    ) -> Operation[ToolResult[Any]]:
        """Call a tool by name, with its arguments as JSON text or a mapping, as a model would.

        A call that fails has a result with `success=False`. Awaiting the operation raises only errors that end the run.
        """
        check_name(name)
        go = self.pass_through
        return Operation(lambda: go(new_call(self, name, arguments, call_id)), "invoke")

    def cancel(self, reason: str = "cancelled") -> None:
        """Stop the calls of this run and of the runs nested in it, innermost first, except those that undo other calls.

        Call this on the loop's thread.
        """
        self.run.cancellation.cancel(reason)

    async def close(self) -> None:
        """End the run and close its resources, in reverse order of creation.

        Raises an `ExceptionGroup` with the errors that closing raised, after all resources were closed.
        """
        self.run.cancellation.close()
        await self.run.world.resources.close()

    def open(self, call: Call) -> Passage:
        """Return the passage of a call that has not passed the gate yet, with its first attempt."""
        return Passage(call, Attempt(call, self.run, 1, 0, call.has_secret))

    async def pass_through(self, call: Call, passage: Passage | None = None) -> ToolResult[Any]:
        """Take a call through the eleven steps and return its result. Raises the error that ends the run, if there is one.

        A call whose recorded end still applies is replayed instead. `passage` receives the outcome, even if this raises. The call
        has its own copy of the context variables, so that what its policies and its handler set stays in it.
        """
        passage = passage or Passage(call, Attempt(call, self.run, 1, 0, call.has_secret))
        waiting = begin_isolated(self._take_steps(call, passage))
        if waiting is not None:
            await waiting
        result: Any = passage.result
        return result

    async def _take_steps(self, call: Call, passage: Passage) -> None:
        run = self.run
        attempt, kind, record = passage.attempt, call.kind, run.log
        if record.resumed and await self._replay(passage):
            return
        monotonic, publish = run.monotonic, run.publish  # a local name is faster to call than a slot
        attempt.started = started = monotonic() - run.began
        if run.lost.seconds:  # a listener has blocked the loop, or it is not known yet whether one has
            attempt.lost = run.note_lost(call.loop)
        scope = open_scope(None if kind.undoes else run.cancellation, call.loop)
        if run.told.get(passage.start, True):  # there are, or may be, listeners
            publish(passage.start(call.id, call.name, call.path, started, run.run_context))
        run.live[attempt] = scope
        if run.deadline is not None and not kind.undoes:
            scope.start_deadline(run.deadline)
        ending: BaseException | None = None
        try:
            tool = run.open_tools.get(call.name) or look_up(attempt)  # 1
            if tool is not call.tool:
                call.resolve(tool)
            if call.parent is not None:
                check_nesting(call, call.parent)
                attempt.transaction = new_transaction(attempt, tool)  # at the root, created on first use
            policies = () if kind.is_part else run.policies
            if policies and type(call.arguments) is not str and type(call.arguments) is not bytes:
                call.settle(clear_json(call.arguments))  # a copy: what is checked is what runs
            done = record.resumed and await self._was_done(passage)
            if not done:
                attempt.params = tool.parse(call.arguments)  # 2
            while not done:
                if policies:
                    if (waiting := check_policies(attempt, policies)) is not None:  # 3
                        await waiting
                    if attempt.decision != "allow" and passage.approved is None:
                        await self._approve_first(passage)  # 4
                if run.limited or run.cancellation.cancelled:
                    check_limits(attempt)  # 5
                context_type = tool.context_type if run.worker is None else context_in_worker(tool)
                context = context_type(attempt)  # 6
                if record.is_kept:
                    await mark_begun(attempt)
                attempt.token = _TOKEN  # 7
                try:
                    timed = tool.is_timed or run.lease is not None
                    begun = self._timed(attempt, context, scope) if timed else self._start(attempt, context)
                    result = attempt.finished = await begun  # 8
                    if (waiting := check_finished(attempt, tool, result, scope)) is not None:
                        await waiting
                    made = attempt.transaction
                    if attempt.preview or (made and (made.durable or (made.parent and made.is_large))):
                        await self._approve_changes(passage)  # 4, its changes
                    if policies and (waiting := tell_policies(attempt, iter(attempt.checked))) is not None:
                        await waiting
                    if run.journal is not None:  # 9, success
                        done = await self._commit_journaled(passage)
                    elif attempt.transaction is None:
                        done = True
                    elif (committed := self._commit(attempt.transaction, passage)) is not None:
                        done = committed
                    else:
                        done = await self._commit_claimed(passage)
                except Conflict as error:
                    self._count_conflict(passage, error)
                except (TransientError, BaseExceptionGroup) as error:
                    await wait_to_retry(attempt, error, scope)
                if not done:
                    attempt = await self._again(passage, scope)
            passage.result = attempt.finished
        except BaseException as error:
            if isinstance(error, GeneratorExit) and is_closing():
                self._abandon(passage, error, scope)
                raise
            ending = await self._roll_back(passage, error, scope)  # 9, failure
            attempt = passage.attempt
        del run.live[attempt]
        if run.parking is not None:
            run.parking.ending.add(attempt)
        if attempt.made_resources is not None or attempt.policies_made_resources or record.is_kept:
            ending = await self._close(passage, ending)
        self._end(passage, ending)  # 10
        if scope.close() and ending is None:
            ending = asyncio.CancelledError()  # the call was cancelled during a shielded step
        if ending is not None:
            raise ending

    async def _replay(self, passage: Passage) -> bool:
        """Replay the call if its end is recorded and still applies, and return whether it was replayed.

        Otherwise the call continues at its last attempt.
        """
        passage.left = resume_attempt(passage.attempt)
        passage.result = await replay_call(passage.attempt)
        if had_started(passage.attempt):
            passage.start = ToolResumed
        return passage.result is not None

    async def _was_done(self, passage: Passage) -> bool:
        """Return whether the call happened before the process ended and is now committed."""
        return await decide_interrupted(passage.attempt) and await shielded(self._commit_journaled(passage))

    # 4

    async def _approve_first(self, passage: Passage) -> None:
        """Ask for the call's approval, unless it can run first and have its changes approved. Raises `Refused` if it is denied."""
        attempt, reason = passage.attempt, reason_to_ask(passage.attempt)
        if runs_first(attempt):
            attempt.preview = reason
            return
        await self._approve(passage, reason)
        attempt.checked.clear()
        if (waiting := check_policies(attempt, self.run.policies)) is not None:
            await waiting  # the state may have changed while the question was open

    async def _approve(self, passage: Passage, reason: str, diff: str = "") -> None:
        name = passage.call.name
        self._end_turn(passage)  # nobody waits for a person to answer
        approval, how = await ask_approval(passage.attempt, "call", name, reason, diff)
        if not approval.approved:
            raise Refused("denied", not_approved(name, approval, how, reason, bool(diff)))
        if how != "remembered":  # a remembered decision is looked up again if the call is run again
            passage.approved = approval

    async def _approve_changes(self, passage: Passage) -> None:
        """Ask for an approval of the changes that a call made in its fork, if they need one. Raises `Refused` if it is denied."""
        attempt = passage.attempt
        transaction = attempt.open_transaction
        if transaction.is_large:
            transaction.seal()  # so that nothing is changed behind the checks, which take a while
            await transaction.go_through(lambda: outside_scope(attempt))  # `on_result` will need it
        if not (attempt.preview or transaction.durable):
            return  # an inner call: its changes are approved with those of the outer call
        if why := await transaction.go_through(lambda: why_ask(attempt)):
            await self._approve(passage, why, await transaction.go_through(lambda: diff_of(transaction)))

    # 8

    def _start(self, attempt: Attempt, context: ToolContext) -> Awaitable[Any]:
        """Start the handler, and return an awaitable for its result. Raises `SignatureMismatch` if it can't be called."""
        tool = attempt.call.tool
        handler: Any = tool.handler
        if attempt.token is not _TOKEN or handler is None:
            raise SignatureMismatch("it did not pass the gate")
        entered.set(ref(attempt))
        if not tool.is_async:
            return run_in_thread(partial(begin, handler, attempt.params, context))
        try:
            return handler(attempt.params, context=context)
        except TypeError as error:
            refuse_misfit(error)
            raise

    async def _timed(self, attempt: Attempt, context: ToolContext, scope: CancelScope) -> Any:
        """Run the handler under its timeout, its watchdog and the lease of its job. Raises `TimedOut` if its time is over."""
        start_timers(attempt, scope)
        try:
            attempt.finished = await self._start(attempt, context)  # kept even if its time is over
        finally:
            stop_timers(attempt, scope)
        return attempt.finished

    # 9

    def _commit(
        self, transaction: Transaction, passage: Passage, record: InnerCall | None = None
    ) -> bool | None:
        """Commit the call's forks at once. Returns False if the call must run again, and None if the commit would have to wait.

        If the call can't commit, raises an error such as `Conflict`. `record` is the record of an inner call, which the
        calls around it may need; None if there is none.
        """
        call, attempt = passage.call, passage.attempt
        changed = None if call.parent is None else check_outer(attempt, call.parent)
        if transaction.touched:
            locks = (
                transaction.lock()
            )  # no other commit may happen between the version check and the last change
            if locks is None:
                return None
            try:
                if self._must_run_again(passage, transaction.stale()):
                    return False
                transaction.prepare()
                transaction.apply()
            finally:
                for lock in locks:
                    lock.release()
            transaction.publish()
        self._pass_on(passage, changed, record)
        return True

    def _pass_on(self, passage: Passage, changed: bool | None, record: InnerCall | None) -> None:
        """Tell the calls around a committed call what it did. `changed` is what `check_outer` returned."""
        attempt, transaction = passage.attempt, passage.attempt.open_transaction
        if transaction.parent is not None and not passage.call.kind.is_auxiliary:
            # If the outer call fails, it must undo or report the external effects of its inner calls.
            transaction.parent.inherit(transaction)
            attempt.settle_effect(transaction.parent)
        if changed is not None:
            note_past(attempt, changed, *(() if record is None else (record.changes,)))

    async def _commit_inside(self, passage: Passage, record: InnerCall | None) -> bool:
        """Commit an inner call with many files, or after another one with many files, as `_commit` does."""
        attempt, outer = passage.attempt, passage.call.parent
        transaction = attempt.open_transaction
        claims = await transaction.claim_outer()
        try:
            if self._must_run_again(passage, await transaction.go_through(transaction.stale)):
                return False
            await transaction.go_through(transaction.prepare)
            changed = None if outer is None else check_outer(attempt, outer)
            await shielded(transaction.apply_inside())
        finally:
            await claims.leave()
        transaction.publish()
        self._pass_on(passage, changed, record)
        return True

    async def _commit_journaled(self, passage: Passage) -> bool:
        """Commit a call in a run with a journal, or an inner call into its outer call. Returns False if it must run again."""
        attempt, result = passage.attempt, passage.attempt.finished
        journal, log, transaction = self.run.journal, self.run.log, attempt.open_transaction
        if journal is None or transaction.parent is not None:
            # The call becomes part of the outer call's record. Its result is kept in case the outer handler is re-entered.
            inner = await transaction.go_through(lambda: inner_call(attempt, result)) if log.is_kept else None
            done = self._commit(transaction, passage, inner)
            if done is None:
                done = await self._commit_claimed(passage, inner)
            if done and log.is_kept:
                if result.attachments:
                    await shielded(store_attachments(log.journal, log.run_id, result.attachments))
                passage.recorded = await shielded(log.note("inner call", passage.call.place, inner))
            return done
        return await self._commit_claimed(passage)

    async def _commit_claimed(self, passage: Passage, record: InnerCall | None = None) -> bool:
        """Commit a call while nobody else can commit to what it read or changed. Returns False if it must run again."""
        attempt, result, journal = passage.attempt, passage.attempt.finished, self.run.journal
        transaction = attempt.open_transaction
        if transaction.parent is not None:
            return await self._commit_inside(passage, record)
        claims = await transaction.claim(recorded=journal is not None)
        try:
            changed = None if attempt.parent is None else check_outer(attempt, attempt.parent)
            stale = await transaction.go_through(transaction.stale)
            if self._must_run_again(passage, stale):
                return False
            await transaction.go_through(transaction.prepare)
            if journal is not None:
                if transaction.only_read:
                    await claims.leave(but=self.run.session.claims)  # nobody waits while it is recorded
                if (waiting := commit_recorded(journal, attempt, result)) is not None:
                    await waiting
            elif transaction.durable is not None:
                await commit_unrecorded(attempt)
            else:
                transaction.apply()
            if changed is not None:
                note_past(attempt, changed)
        finally:
            await claims.leave()
        passage.recorded = journal is not None
        transaction.publish()
        return True

    def _must_run_again(self, passage: Passage, stale: tuple[str, ...]) -> bool:
        """Return whether the call must run again: something that it read has changed (`stale`), and it can be undone completely.

        Raises `Conflict` if the call would have to run again, but has conflicted too often, or if its tool's `reenters` is true.
        """
        tool = passage.call.tool
        if stale and EFFECTS[tool.effect].transactional:
            self._count_conflict(passage, Conflict(stale), has_read=True)
            return True
        passage.attempt.stale = stale
        return False

    def _count_conflict(self, passage: Passage, error: Conflict, *, has_read: bool = False) -> None:
        """Count a conflict after which the call is run again. Raises `error` if it is not.

        Conflicts with other calls end, because those that conflicted run one after another. Somebody other than a call
        may go on for ever, and must not be overwritten by a call that has neither read nor previewed what they changed.
        """
        tool, transaction = passage.call.tool, passage.attempt.open_transaction
        is_previewed = passage.attempt.preview is not None
        can_repeat = EFFECTS[tool.effect].transactional and not tool.reenters and not transaction.kept
        if can_repeat and transaction.others_committed():
            now = self.run.monotonic()
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

    def _end_turn(self, passage: Passage) -> None:
        turns, passage.turns = passage.turns, None
        if turns is not None:
            turns.leave(passage)

    async def _roll_back(
        self, passage: Passage, error: BaseException, scope: CancelScope
    ) -> BaseException | None:
        """Set the outcome of a call that raised, and undo it if that was not done yet. Returns the error that ends the run, if any."""
        attempt, name = passage.attempt, passage.call.name
        error = scope.explain(error, f"{name} was done")
        failure = failure_of(attempt, error, scope.is_stopped())
        if failure.loses_run:
            self.run.log.close()
        if failure.status in ("cancelled", "timed out"):
            attempt.stop()
        passage.status, passage.error, passage.result = failure.status, error, failure.result
        if failure.status == "error":
            log_error(log, logging.INFO, "%s failed", name, error=error)
        undone: tuple[str, ...] = ()
        try:
            undone = await undo(attempt, failure.result.message)
        except (Exception, GeneratorExit) as problem:  # the call must end properly, whatever happens here
            if isinstance(problem, GeneratorExit) and is_closing():
                self._abandon(passage, problem, scope)
                raise
            log.exception("undoing %s failed", name)
        kept = () if attempt.transaction is None else attempt.transaction.kept
        passage.result = failure.told(tuple(dict.fromkeys((*passage.left, *undone))), kept)
        return None if passage.call.kind.is_auxiliary else failure.reraise

    def _abandon(self, passage: Passage, error: BaseException, scope: CancelScope) -> None:
        """End a call whose coroutine was closed from outside, so that nothing can be awaited any more."""
        attempt = passage.attempt
        message = f"{passage.call.name} was abandoned: its coroutine was closed."
        failure = Failure("cancelled", message)
        passage.status, passage.error = "cancelled", error
        passage.result = failure.told((*passage.left, *abandon(attempt, message)))
        self.run.live.pop(attempt, None)
        scope.ignore()
        self._end(passage, error)

    async def _again(self, passage: Passage, scope: CancelScope) -> Attempt:
        """Undo this attempt and start the next one. Raises `CancelledError` if the call is cancelled in the meantime."""
        run, attempt = self.run, passage.attempt
        passage.left = (*passage.left, *await undo(attempt, "it is run again"))
        attempt.transaction, attempt.is_undone = None, True
        end_subscriptions(attempt)
        another = attempt.next()
        await note_attempt(another, passage.left)
        if passage.turns is not None:
            await passage.turns.take(passage, _TURN_SECONDS)
        if scope.interrupted:
            raise asyncio.CancelledError  # the cancellation came while this attempt was being undone
        if attempt.preview is not None:
            passage.approved = None
        else:
            scope.continue_timeout()
        another.params = passage.call.tool.parse(passage.call.arguments)
        another.transaction = new_transaction(another, passage.call.tool)
        del run.live[attempt]
        run.live[another] = scope
        passage.attempt = another
        return another

    # 10

    async def _close(self, passage: Passage, ending: BaseException | None) -> BaseException | None:
        """Close the call's own resources, and record its end unless it is recorded. Returns the error that ends the run, if any."""
        try:
            await close_resources(passage.attempt)
            if self.run.log.is_kept and not passage.recorded and passage.result is not None:
                passage.recorded = await record_end(passage.attempt, passage.result, passage.status, ending)
        except GeneratorExit as error:
            if is_closing():
                self._end(passage, error)
                raise
            return RuntimeError(f"closing the resources of {passage.call.name} raised GeneratorExit")
        except Exception as error:
            return error
        return ending

    def _end(self, passage: Passage, ending: BaseException | None) -> None:
        run, call, attempt = self.run, passage.call, passage.attempt
        self._end_turn(passage)
        if attempt.policy_home is not None:
            attempt.policy_home.close()
        attempt.policy_context = attempt.made_resources = None  # breaks reference cycles with the attempt
        result: Any = passage.result
        shown, parking, error = call.tool.shown, run.parking, passage.error
        monotonic, record = run.monotonic, run.record
        if error is not None and error is ending:
            error = without_frames(error)  # it collects frames while it propagates
        if parking is None or not parking.parked or passage.recorded:  # else the resumed run ends the call
            seconds = monotonic() - run.began - attempt.started
            if run.lost.seconds or attempt.clock is not None:
                seconds = max(0.0, seconds - attempt.excused())
            end = ToolInvoked(
                call.id,
                call.name,
                call.path,
                passage.status,
                result if shown is None else shown(result),
                attempt.params,
                seconds,
                attempt.retries + 1,
                attempt.stale,
                error,
                run.run_context,
            )
            record(end)
            if run.journal is not None and not passage.recorded:
                leave_to_outcome(attempt, end)
        if run.subscriptions:
            end_subscriptions(attempt)
        if error is not None:
            forget_frames(error)  # listeners have seen its traceback
        if parking is not None:
            parking.ended(attempt)
