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

from msgspec.structs import replace

from handrail.concurrency.cancellation import CancelScope, open_scope, shielded
from handrail.concurrency.operation import Operation
from handrail.concurrency.threads import run_in_thread
from handrail.concurrency.user_code import begin_isolated, is_closing
from handrail.context import ToolContext
from handrail.errors import Conflict, TransientError
from handrail.events import (
    CallAccepted,
    CallCommitted,
    ToolInvoked,
    ToolResumed,
    ToolRolledBack,
    shortened_by,
)
from handrail.protocols import RenderedPromptView, ToolPolicy
from handrail.run.approval import ask_approval, diff_of, outside_scope, runs_first, why_ask
from handrail.run.call import Attempt, Call, Passage, check_name, new_call
from handrail.run.call_log import had_started, leave_to_outcome, record_unrepeated
from handrail.run.commit import commit, count_conflict, end_turn, record_end
from handrail.run.current_call import entered
from handrail.run.effects import compensate
from handrail.run.failures import Failure, Refused, SignatureMismatch, failure_of, not_approved
from handrail.run.handlers import (
    begin,
    check_finished,
    check_limits,
    check_nesting,
    context_in_worker,
    look_up,
    refuse_misfit,
    start_timers,
    stop_timers,
    wait_to_retry,
)
from handrail.run.policies import (
    check_policies,
    close_policies,
    close_resources,
    reason_to_ask,
    tell_policies,
)
from handrail.run.record.format import mark_begun, note_attempt
from handrail.run.record.recorded_calls import decide_interrupted, replay_call, resume_attempt
from handrail.run.run import Run
from handrail.run.tickets import answer_for_tickets
from handrail.run.transaction import new_transaction
from handrail.run.views import end_subscriptions
from handrail.schema import clear_json
from handrail.text.raised_errors import forget_frames, log_error, without_frames
from handrail.tools import ToolResult

log = logging.getLogger("handrail.gate")


async def roll_back(attempt: Attempt, reason: str) -> tuple[str, ...]:
    """Drop the attempt's forks and, unless the run continues elsewhere, compensate its effects, last first.

    Returns the effects that could not be undone. A compensation that fails does not stop the others.
    """
    attempt.close()
    if attempt.is_undone:
        return ()
    transaction, run = attempt.open_transaction, attempt.run
    began = run.monotonic()
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
    if attempt.made_resources is not None:
        try:
            await close_resources(attempt)
        except Exception as error:
            log_error(log, logging.ERROR, "closing the resources of %s failed", attempt.name, error=error)
    close_policies(attempt)
    _record(attempt, reason, compensated, left, run.monotonic() - began)
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


def _record(
    attempt: Attempt, reason: str, compensated: tuple[str, ...], left: tuple[str, ...], seconds: float = 0.0
) -> None:
    if attempt.token is not None:
        context = attempt.run.run_context
        fact = ToolRolledBack(attempt.id, attempt.name, reason, compensated, left, context, seconds)
        record_unrepeated(attempt, fact)


Arguments = str | bytes | Mapping[str, Any]

_TURN_SECONDS = 5.0
"""How long a call waits for others that conflicted, if none of them ends, before it runs again beside them."""
_TOKEN = object()
"""Token without which no handler starts. Only step 7 issues it."""


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

    def open(self, call: Call) -> Attempt:
        """Return the first attempt at a call that has not passed the gate yet."""
        return Attempt(call, self.run, Passage(call.has_secret))

    async def pass_through(self, call: Call, attempt: Attempt | None = None) -> ToolResult[Any]:
        """Take a call through the eleven steps and return its result. Raises the error that ends the run, if there is one.

        A call whose recorded end still applies is replayed instead. `attempt` is the first at the call, whose passage receives the
        outcome, even if this raises. The call has its own copy of the context variables, so that what its policies and its handler
        set stays in it.
        """
        attempt = attempt or Attempt(call, self.run, Passage(call.has_secret))
        waiting = begin_isolated(self._take_steps(attempt))
        if waiting is not None:
            attempt.passage.note_wait()
            await waiting
        result: Any = attempt.passage.result
        return result

    async def _take_steps(self, attempt: Attempt) -> None:
        run, passage, record, call = self.run, attempt.passage, self.run.log, attempt.call
        if record.resumed and await self._replay(attempt):
            return
        passage.started = started = run.monotonic() - run.began
        if run.lost.seconds:  # a listener has blocked the loop, or it is not known yet whether one has
            passage.lost = run.note_lost(call.loop)
        undoes = call.kind.undoes
        scope = open_scope(None if undoes else run.cancellation, call.loop)
        if run.told.get(passage.start, True):  # there are, or may be, listeners
            run.publish(passage.start(call.id, call.name, call.path, started, run.run_context))
        run.live[attempt] = scope
        if run.deadline is not None and not undoes:
            passage.hold_timers(scope)
            scope.start_deadline(run.deadline)
        ending: BaseException | None = None
        try:
            policies = self._admit(attempt)  # 1
            done = record.resumed and await self._was_done(attempt)
            call = attempt.call
            tool = call.tool
            if not done:
                attempt.params = tool.parse(call.arguments)  # 2
                if run.told.get(CallAccepted, True):
                    run.publish(CallAccepted(call.id, tool, call.arguments, attempt.params, run.run_context))
            while not done:
                if policies:
                    if (waiting := check_policies(attempt, policies)) is not None:  # 3
                        await waiting
                    if passage.decision != "allow" and passage.approved is None:
                        await self._approve_first(attempt)  # 4
                if run.limited or run.cancellation.cancelled:
                    check_limits(attempt)  # 5
                context_type = tool.context_type if run.worker is None else context_in_worker(tool)
                context = context_type(attempt)  # 6
                if record.is_kept:
                    await mark_begun(attempt)
                attempt.token = _TOKEN  # 7
                try:
                    timed = tool.is_timed or run.lease is not None
                    if timed:
                        start_timers(attempt, scope)
                    try:
                        result = attempt.finished = await self._start(attempt, context)  # 8
                    finally:
                        if timed:
                            stop_timers(attempt, scope)
                    if (waiting := check_finished(attempt, tool, result, scope)) is not None:
                        await waiting
                    made = attempt.transaction
                    if attempt.preview or (made and (made.durable or (made.parent and made.is_large))):
                        await self._approve_changes(attempt)  # 4, its changes
                    if policies and (waiting := tell_policies(attempt)) is not None:
                        await waiting
                    if run.large is not None:
                        attempt.finished = await run.large.shorten(attempt, attempt.finished)
                    if attempt.transaction is None and run.journal is None:  # 9, success
                        done = True
                    else:
                        began = run.monotonic() if run.told.get(CallCommitted, True) else None
                        committed = commit(attempt)
                        done = committed if isinstance(committed, bool) else await committed
                        if done and began is not None:
                            seconds = run.monotonic() - began
                            run.publish(CallCommitted(call.id, call.name, seconds, run.run_context))
                        if done and attempt.transaction is not None and attempt.transaction.spawned:
                            attempt.transaction.begin_spawned()
                except Conflict as error:
                    count_conflict(attempt, error)
                except (TransientError, BaseExceptionGroup) as error:
                    await wait_to_retry(attempt, error, scope)
                if not done:
                    attempt = await self._again(attempt, scope)
            passage.result = attempt.finished
        except BaseException as error:
            if isinstance(error, GeneratorExit) and is_closing():
                self._abandon(attempt, error, scope)
                raise
            ending = await self._roll_back(attempt, error, scope)  # 9, failure
        del run.live[attempt]
        if run.parking is not None:
            run.parking.ending.add(attempt)
        if record.is_kept or attempt.made_resources is not None:
            ending = await self._close(attempt, ending)
        self._end(attempt, ending)  # 10
        if scope.close() and ending is None:
            ending = asyncio.CancelledError()  # the call was cancelled during a shielded step
        if ending is not None:
            try:
                raise ending
            finally:
                del (
                    ending,
                    scope,
                )  # breaks cycles: the error's traceback refers to this frame, and the scope to a task with the error

    # 1

    def _admit(self, attempt: Attempt) -> tuple[ToolPolicy, ...]:
        """Set the call's tool, and return the policies that check the call. Raises the error that refuses it, if there is one."""
        call, run = attempt.call, self.run
        tool = run.open_tools.get(call.name) or look_up(attempt)
        if tool is not call.tool:
            attempt.resolve(tool)
        if call.parent is not None:
            check_nesting(attempt.call, call.parent)
            attempt.transaction = new_transaction(attempt, tool)  # at the root, created on first use
        if call.kind.is_part or not run.policies:
            return ()
        if type(call.arguments) is not str and type(call.arguments) is not bytes:
            copied = clear_json(call.arguments)  # what is checked is what runs
            attempt.call = replace(attempt.call, arguments=copied)
        return run.policies

    async def _replay(self, attempt: Attempt) -> bool:
        """Replay the call if its end is recorded and still applies, and return whether it was replayed.

        Otherwise the call continues at its last attempt.
        """
        passage = attempt.passage
        passage.left = resume_attempt(attempt)
        passage.result = await replay_call(attempt)
        if had_started(attempt):
            passage.start = ToolResumed
        return passage.result is not None

    async def _was_done(self, attempt: Attempt) -> bool:
        """Return whether the call happened before the process ended and is now committed."""
        if not await decide_interrupted(attempt):
            return False
        committed = commit(attempt)
        return committed if isinstance(committed, bool) else await shielded(committed)

    # 4

    async def _approve_first(self, attempt: Attempt) -> None:
        """Ask for the call's approval, unless it can run first and have its changes approved. Raises `Refused` if it is denied."""
        reason, policing = reason_to_ask(attempt), attempt.policing
        if runs_first(attempt):
            attempt.preview = reason
            return
        await self._approve(attempt, reason)
        if policing is not None:
            policing.checked.clear()
        if (waiting := check_policies(attempt, self.run.policies)) is not None:
            await waiting  # the state may have changed while the question was open

    async def _approve(self, attempt: Attempt, reason: str, diff: str = "") -> None:
        name, passage = attempt.name, attempt.passage
        end_turn(passage)  # nobody waits for a person to answer
        approval, how = await ask_approval(attempt, "call", name, reason, diff)
        if not approval.approved:
            raise Refused("denied", not_approved(name, approval, how, reason, bool(diff)))
        if how != "remembered":  # a remembered decision is looked up again if the call is run again
            passage.approved = approval

    async def _approve_changes(self, attempt: Attempt) -> None:
        """Ask for an approval of the changes that a call made in its fork, if they need one. Raises `Refused` if it is denied."""
        transaction = attempt.open_transaction
        if transaction.is_large:
            transaction.seal()  # so that nothing is changed behind the checks, which take a while
            await transaction.go_through(lambda: outside_scope(attempt))  # `on_result` will need it
        if not (attempt.preview or transaction.durable):
            return  # an inner call: its changes are approved with those of the outer call
        if why := await transaction.go_through(lambda: why_ask(attempt)):
            await self._approve(attempt, why, await transaction.go_through(lambda: diff_of(transaction)))

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

    # 9

    async def _roll_back(
        self, attempt: Attempt, error: BaseException, scope: CancelScope
    ) -> BaseException | None:
        """Set the outcome of a call that raised, and undo it if that was not done yet. Returns the error that ends the run, if any."""
        passage, name = attempt.passage, attempt.name
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
            undone = await roll_back(attempt, failure.result.message)
        except (Exception, GeneratorExit) as problem:  # the call must end properly, whatever happens here
            if isinstance(problem, GeneratorExit) and is_closing():
                self._abandon(attempt, problem, scope)
                raise
            log.exception("undoing %s failed", name)
        kept = () if attempt.transaction is None else attempt.transaction.kept
        passage.result = told = failure.told(tuple(dict.fromkeys((*passage.left, *undone))), kept)
        if self.run.large is not None:
            try:
                passage.result = await shielded(self.run.large.shorten(attempt, told))
            except Exception as problem:  # the model is shown the whole result
                log_error(log, logging.WARNING, "the result of %s can't be stored", name, error=problem)
        return None if attempt.kind.is_auxiliary else failure.reraise

    def _abandon(self, attempt: Attempt, error: BaseException, scope: CancelScope) -> None:
        """End a call whose coroutine was closed from outside, so that nothing can be awaited any more."""
        passage = attempt.passage
        message = f"{attempt.name} was abandoned: its coroutine was closed."
        failure = Failure("cancelled", message)
        passage.status, passage.error = "cancelled", error
        passage.result = failure.told((*passage.left, *abandon(attempt, message)))
        self.run.live.pop(attempt, None)
        scope.ignore()
        self._end(attempt, error)

    async def _again(self, attempt: Attempt, scope: CancelScope) -> Attempt:
        """Undo this attempt and start the next one. Raises `CancelledError` if the call is cancelled in the meantime."""
        run, passage, call = self.run, attempt.passage, attempt.call
        passage.left = (*passage.left, *await roll_back(attempt, "it is run again"))
        attempt.transaction, attempt.is_undone = None, True
        end_subscriptions(attempt)
        another = Attempt(call, run, passage, attempt.number + 1)
        await note_attempt(another, passage.left)
        if passage.turns is not None:
            await passage.turns.take(passage, _TURN_SECONDS)
        if scope.interrupted:
            raise asyncio.CancelledError  # the cancellation came while this attempt was being undone
        if attempt.preview is not None:
            passage.approved = None
        else:
            scope.continue_timeout()
        another.params = call.tool.parse(call.arguments)
        another.transaction = new_transaction(another, call.tool)
        del run.live[attempt]
        run.live[another] = scope
        attempt.following, passage.decision, passage.policy, passage.stale = another, "", "", ()
        passage.has_secret = call.kind.is_part and passage.has_secret
        return another

    # 10

    async def _close(self, attempt: Attempt, ending: BaseException | None) -> BaseException | None:
        """Close the call's own resources, and record its end unless it is recorded. Returns the error that ends the run, if any."""
        passage = attempt.passage
        try:
            await close_resources(attempt)
            if self.run.log.is_kept and not passage.recorded and passage.result is not None:
                passage.recorded = await record_end(attempt, passage.result, passage.status, ending)
        except GeneratorExit as error:
            if is_closing():
                self._end(attempt, error)
                raise
            return RuntimeError(f"closing the resources of {attempt.name} raised GeneratorExit")
        except Exception as error:
            return error
        return ending

    def _end(self, attempt: Attempt, ending: BaseException | None) -> None:
        run, call, passage = self.run, attempt.call, attempt.passage
        if passage.turns is not None:
            end_turn(passage)
        if passage.policy_home is not None:
            close_policies(attempt)
        attempt.policy_context = None  # it and the resources are in reference cycles with the attempt
        if attempt.made_resources is not None:
            attempt.made_resources = None
        result: Any = passage.result
        shown, parking, error = call.tool.shown, run.parking, passage.error
        monotonic, record = run.monotonic, run.record
        if error is not None and error is ending:
            error = passage.error = without_frames(error)  # it collects frames while it propagates
        if parking is None or not parking.parked or passage.recorded:  # else the resumed run ends the call
            seconds = monotonic() - run.began - passage.started
            if run.lost.seconds or (passage.clock is not None and passage.clock.lost is not None):
                seconds = max(0.0, seconds - attempt.excused())
            end = ToolInvoked(
                call.id,
                call.name,
                call.path,
                passage.status,
                result if shown is None else shown(result),
                attempt.params,
                seconds,
                passage.retries + 1,
                passage.stale,
                error,
                run.run_context,
                passage.policy,
            )
            record(end)
            if run.large is not None and (shortened := shortened_by(end, result)) is not None:
                record_unrepeated(attempt, shortened)
            if run.journal is not None and not passage.recorded:
                leave_to_outcome(attempt, end)
        if run.subscriptions:
            end_subscriptions(attempt)
        if error is not None:
            forget_frames(error)  # listeners have seen its traceback
        if parking is not None:
            parking.ended(attempt)
