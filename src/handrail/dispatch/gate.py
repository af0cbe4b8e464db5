"""The gate: every call, whoever makes it, takes the same eleven steps, in this order.

    1  look the name up                     7   open the transaction
    2  parse the arguments                  8   run the handler, under its timeout and the deadline
    3  policies, all must allow             9   success: on_result, commit; failure: roll back
    4  approval where one is needed         10  publish ToolInvoked
    5  deadline and budget                  11  return the result
    6  build the context

`Gate.pass_through` is these steps, top to bottom. Of a call that can be undone as a whole, 4 comes after
8 where somebody is there to look: it is approved by what it did in its fork.
"""

from __future__ import annotations

import asyncio
import difflib
import logging
from collections.abc import Mapping
from typing import Any

from handrail.cancellation import CancelScope, await_foreign, begin_foreign, open_scope
from handrail.context import ToolContext
from handrail.dispatch.asking import ask_approval
from handrail.dispatch.call import LiveCall, new_call
from handrail.dispatch.committing import commit_lock_of
from handrail.dispatch.failures import Refused, SignatureMismatch, Unsuccessful, failure_of, not_approved
from handrail.dispatch.frame import Frame
from handrail.dispatch.policing import (
    close_policy_context,
    policy_context,
    policy_resources,
    tell_policies,
)
from handrail.dispatch.previewing import diff_of, runs_first
from handrail.dispatch.recording import commit_recorded, record_end
from handrail.dispatch.replaying import (
    WasDone,
    decide_interrupted,
    from_the_record,
    inner_call,
    mark_begun,
    note_try,
)
from handrail.dispatch.starting import (
    begin,
    cancelled_after_all,
    check_needs,
    check_result,
    context_in_worker,
    refuse_misfit,
)
from handrail.dispatch.ticketing import answer_for_tickets, take_up_tickets
from handrail.dispatch.transaction import Transaction, new_transaction
from handrail.dispatch.undoing import compensate, forget_locals, shielded
from handrail.errors import Conflict, DefinitionError, DepthExceededError, RunBusy, TransientError
from handrail.events import ToolInvoked, ToolRolledBack, ToolStarted
from handrail.operation import Operation
from handrail.protocols import PolicyDecision
from handrail.schema import clear_json
from handrail.threads import run_in_thread
from handrail.tools import EFFECTS, Tool, ToolResult
from handrail.tools.effect import refusal

log = logging.getLogger("handrail.gate")

Arguments = str | bytes | Mapping[str, Any]

_RETRIES = 2
"""How often a call is tried again after a transient failure."""
_RERUNS = 2
"""How often a call is run again because what it read was changed meanwhile."""
_TOKEN = object()
"""What a call must hold to start a handler; given out in step 7 and nowhere else."""


class Gate:
    """One run's gate. It holds the frame and no state of its own."""

    __slots__ = ("frame",)

    def __init__(self, frame: Frame) -> None:
        self.frame = frame

    def invoke(
        self, name: str, arguments: Arguments = "{}", *, call_id: str | None = None
    ) -> Operation[ToolResult[Any]]:
        """Call a tool by name, with JSON text or a mapping, as a model would."""
        if not isinstance(name, str):  # pyright: ignore[reportUnnecessaryIsInstance]  # callers may not be typed
            named = getattr(name, "name", "...")
            raise DefinitionError(
                f"invoke takes the name of a tool, not a {type(name).__name__}. Write invoke({named!r}, ...)."
            )
        return Operation(lambda: self.pass_through(new_call(self, name, call_id), arguments), "invoke")

    def cancel(self, reason: str = "cancelled") -> None:
        """Stop every call of this run and everything below, children first. On the loop's thread."""
        self.frame.cancellation.cancel(reason)

    async def close(self) -> None:
        """End the run: close its resources, last made first."""
        self.frame.cancellation.close()
        await self.frame.resources.close()

    async def pass_through(self, call: LiveCall, arguments: Arguments) -> ToolResult[Any]:
        """What happens to a call. It always ends in exactly one `ToolInvoked`."""
        frame = self.frame
        if frame.log is not None and (before := await from_the_record(call, arguments)) is not None:
            return before
        call.started, call.arguments = frame.monotonic() - frame.began, arguments
        scope = call.scope = open_scope(None if call.undoing else frame.cancellation, call.loop)
        if frame.told.get(ToolStarted, True):  # somebody listens, or it is not known yet
            frame.publish(ToolStarted(call.id, call.name, call.path, call.started, frame.run_context))
        frame.live[call] = scope.task
        ending: BaseException | None = None
        if frame.deadline is not None and not call.undoing:
            scope.start_deadline(frame.deadline)
        try:
            tool = call.tool = frame.open_tools.get(call.name) or self._look_up(call)  # 1
            if call.parent is not None:
                self._check_nesting(call, call.parent)
            policies = () if call.act else frame.policies
            if policies and type(arguments) is not str and type(arguments) is not bytes:
                arguments = clear_json(arguments)  # what is checked is what runs, whoever holds it
            if frame.log is not None:
                await decide_interrupted(call, arguments)
            call.params, call.arguments = tool.parse(arguments), arguments  # 2
            while True:
                # Opened here and used from step 7 on: what policies look at counts as read by the call.
                call.transaction = new_transaction(call, tool)
                if policies:
                    call.seen = tool.parse_again(call.params, arguments)  # no policy can change the handler's
                    asked = await self.check_policies(call)  # 3
                    if asked is not None and call.approved is None:
                        call.preview = asked if runs_first(call) else None
                        if call.preview is None:
                            await self._approve(call, asked)  # 4
                            await self.check_policies(call)  # what was true when it was asked may not be now
                if frame.limited or frame.cancellation.cancelled:
                    self._check_limits(call)  # 5
                context = (tool.context_type if frame.worker is None else context_in_worker(tool))(call)  # 6
                if frame.log is not None:
                    await mark_begun(call)
                call.token = _TOKEN  # 7
                try:
                    handler = begin_foreign(self._run_handler(call, tool, context, scope))  # 8
                    if handler is not None:
                        await handler
                    result = call.finished
                    if call.preview is not None:  # 4, of what it did
                        await self._approve(call, call.preview, diff_of(call.open_transaction))
                    if policies:
                        await tell_policies(call, result)
                    if frame.journal is None:
                        done = self._commit(call, result)  # 9, success
                    else:
                        done = await self._commit_journaled(call, result)  # 9, with a record
                    if done:
                        break
                except Conflict:
                    if call.preview is None or call.reruns >= _RERUNS:
                        raise
                    call.reruns += 1  # it was approved on ground that has moved: run again, ask again
                except TransientError as error:
                    await self._wait_to_retry(call, error)
                call = await self._again(call, scope)
        except GeneratorExit as error:
            self._abandon(call, error)
            raise
        except BaseException as error:
            error = scope.explain(error, f"{call.name} was done")
            ending = await self._roll_back(call, error, scope.stopped)  # 9, failure
        frame.ends(call)
        if call.made_resources is not None or call.policies_made_resources:
            await self._close_resources(call)
        if frame.log is not None and not call.recorded:
            ending = await record_end(call) or ending
        result = self._end(call)  # 10
        interrupted = scope.close()
        if ending is not None:
            raise ending
        if interrupted:
            raise asyncio.CancelledError  # it came while something was shielded from it
        return result  # 11

    # 1

    def _look_up(self, call: LiveCall) -> Tool[Any, Any]:
        tools = self.frame.tools
        workers = self.frame.workers
        tool = call.tool if call.act else tools.get(call.name)
        if tool is None and workers is not None:
            tool = workers.find(call.name, call)
        if tool is None or tool.handler is None:
            near = difflib.get_close_matches(call.name, tools, n=1)
            hint = f"Did you mean {near[0]}?" if near else f"There are: {', '.join(tools) or 'none'}."
            if tool is None and workers is not None:
                hint = workers.why_not(call.name) or hint
            raise Refused("invalid", f"There is no tool {call.name!r} that can be called. {hint}")
        call.tool = tool
        if tool.needs:
            check_needs(call, tool)
        return tool

    def _check_nesting(self, call: LiveCall, outer: LiveCall) -> None:
        """Calls nest only so deep, and only into effects that the outer one may have."""
        if call.depth > self.frame.depth_limit:
            raise DepthExceededError(call.path, self.frame.depth_limit)
        why_not = refusal(outer.tool.effect, call.tool.effect)
        if why_not is not None:
            mend = f"If it is meant to, define {outer.name} with effect={call.tool.effect!r}."
            raise Refused("denied", f"{outer.name} may not call {call.name}: {why_not}. {mend}")

    # 3, 4

    async def check_policies(self, call: LiveCall) -> str | None:
        """Every policy must allow; one that raises denies. Returns why somebody must be asked."""
        asked: str | None = None
        call.decision = "deny"
        context = call.policy_context
        if context is None:
            context = call.policy_context = policy_context(call)
        for policy in self.frame.policies:
            try:
                decision = policy.check(call.tool, call.seen, context=context)
                if not isinstance(decision, PolicyDecision):
                    decision = await await_foreign(decision)
                kind = decision.kind
            except Exception as error:
                log.exception(
                    "the policy %r raised, or returned no PolicyDecision, on %s", policy.name, call.name
                )
                raise Refused(
                    "denied", f"The policy {policy.name!r} could not decide and so denies {call.name}."
                ) from error
            if kind == "ask":
                asked = asked or decision.reason or f"{policy.name} asks"
            elif kind != "allow":  # also what is none of the three
                raise Refused("denied", f"{call.name} is not allowed: {decision.reason}")
        call.decision = "allow" if asked is None else f"ask: {asked}"
        return asked

    async def _approve(self, call: LiveCall, reason: str, diff: str = "") -> None:
        approval, how = await ask_approval(call, "call", call.name, reason, diff)
        if not approval.approved:
            raise Refused("denied", not_approved(call.name, approval, how, reason, bool(diff)))
        if how != "remembered":  # what is remembered is looked up again if the call is run again
            call.approved = approval

    # 5

    def _check_limits(self, call: LiveCall) -> None:
        frame = self.frame
        if call.undoing:
            return  # what has to be undone is, also in a run that was cancelled or has run out of time
        frame.cancellation.check()
        if frame.deadline is not None:
            frame.deadline.check(f"{call.name} could run")
        if frame.budget is not None and call.spending is None and not call.act:
            call.spending = frame.budget.reserve(tool_calls=1)

    # 8

    async def _run_handler(
        self,
        call: LiveCall,
        tool: Tool[Any, Any],
        context: ToolContext,
        scope: CancelScope,
    ) -> None:
        """Run the handler in this task, or in a thread if it is not async. Its result is `call.finished`."""
        handler: Any = tool.handler
        if call.token is not _TOKEN or handler is None:
            raise SignatureMismatch("it was not let through the gate")
        params = call.params
        leased = self.frame.lease is not None
        if leased:
            call.heartbeat.keep(call.loop)
        if tool.timeout is not None:
            scope.start_timeout(tool.timeout)
        try:
            if tool.is_async:
                try:
                    begun = handler(params, context=context)
                except TypeError as error:
                    refuse_misfit(error)
                    raise
                result = await begun
            else:
                result = await run_in_thread(lambda: begin(handler, params, context))
            call.finished = result
        finally:
            if leased:
                call.heartbeat.stop()
            if tool.timeout is not None:
                scope.stop_timeout()
        if scope.stopped:
            await cancelled_after_all()
        check_result(tool, result)
        if not result.success:
            raise Unsuccessful(result)
        if call.tickets is not None:
            await take_up_tickets(call)
        call.close()

    # 9

    def _commit(self, call: LiveCall, result: ToolResult[Any]) -> bool:
        """Make what the call did part of what it was forked from. False: it must run again."""
        transaction: Any = call.transaction
        if call.parent is not None and call.parent.ended:
            raise Refused("cancelled", f"{call.name} was not applied: the call around it is over.")
        if transaction.touched:
            lock = self.frame.session.lock
            lock.acquire()  # from the version check to the last change nobody else comes in between
            try:
                if self._must_run_again(call, transaction):
                    return False
                transaction.prepare()
                if transaction.durable is None:
                    transaction.apply()
                else:
                    transaction.apply_all(call.id)
            finally:
                lock.release()
            transaction.publish()
        if transaction.parent is not None:
            # What an inner call did to the world is the outer one's to answer for, should it fail.
            transaction.parent.inherit(transaction)
            self._remember(call, transaction.parent)
        call.result = result
        return True

    async def _commit_journaled(self, call: LiveCall, result: ToolResult[Any]) -> bool:
        """The same with a record: checked, recorded, applied, and nobody else commits in between."""
        journal, log, transaction = self.frame.journal, self.frame.log, call.open_transaction
        if journal is None or transaction.parent is not None:
            # It becomes part of the outer call's record; what it left there is kept in case that is entered again.
            inner = None if log is None else inner_call(call, result)
            done = self._commit(call, result)
            if done and log is not None:
                call.recorded = await shielded(log.note("inner call", call.place, inner))
            return done
        async with commit_lock_of(self.frame.session):
            if self._must_run_again(call, transaction):
                return False
            transaction.prepare()
            await shielded(commit_recorded(journal, call, result))
        call.recorded = True
        transaction.publish()
        call.result = result
        return True

    def _must_run_again(self, call: LiveCall, transaction: Transaction) -> bool:
        """Was something the call read changed meanwhile? If all of it can be undone, it runs again."""
        stale = transaction.stale()
        if stale and EFFECTS[call.tool.effect].transactional:
            if call.reruns >= _RERUNS or call.tool.reenters:
                raise Conflict(stale)
            call.reruns += 1
            return True
        call.stale = stale
        return False

    def _remember(self, call: LiveCall, transaction: Transaction) -> None:
        """Note what a finished call did to the world, to be undone or named if that comes to nothing."""
        finished: Any = call.finished
        done = call.own_effect(finished) if isinstance(finished, ToolResult) else None  # pyright: ignore[reportUnknownArgumentType]  # whatever it holds
        if done is not None:
            transaction.settle(done)

    async def _roll_back(self, call: LiveCall, error: BaseException, stopped: bool) -> BaseException | None:
        """Undo the call and find what comes of it. Returns what the run is to hear, if anything."""
        if isinstance(error, WasDone):
            call.result = error.result
            return None
        if isinstance(error, RunBusy) and self.frame.log is not None:
            self.frame.log.closed = True  # another process has the run, and decides what is undone
        failure = failure_of(call, error, stopped)
        if failure.status in ("cancelled", "timed out"):
            call.stop()
        call.status, call.error, call.result = failure.status, error, failure.result
        if failure.status == "error" and log.isEnabledFor(logging.INFO):
            log.info("%s failed", call.name, exc_info=error)
        undone: tuple[str, ...] = ()
        try:
            undone = await self._undo(call, failure.result.message)
        except Exception:  # whatever happens here, the call gets its end
            log.exception("undoing %s failed", call.name)
        call.result = failure.told(tuple(dict.fromkeys((*call.left, *undone))))
        return failure.reraise

    def _abandon(self, call: LiveCall, error: BaseException) -> None:
        """The coroutine was closed from outside: nothing can be awaited any more, so only what needs no waiting."""
        call.close()
        if call.transaction is not None:
            call.transaction.drop()
        call.status, call.error = "cancelled", error
        call.result = ToolResult.error(f"{call.name} was abandoned: its coroutine was closed.")
        self.frame.live.pop(call, None)
        self._end(call)

    async def _undo(self, call: LiveCall, reason: str) -> tuple[str, ...]:
        """Drop the call's forks and compensate inner calls, last first. Returns what stands."""
        call.close()
        transaction = call.transaction
        if transaction is None:
            return ()
        transaction.drop()
        if self.frame.left_to_the_record:
            return ()  # parked, or another process has it: whoever goes on decides
        self._remember(call, transaction)
        if call.tickets is not None:
            await shielded(answer_for_tickets(call, transaction))
        compensated: tuple[str, ...] = ()
        left: tuple[str, ...] = ()
        if transaction.settled:
            compensated, left = await shielded(compensate(self, call, transaction.settled))
        if call.made_resources is not None or call.policies_made_resources:
            await self._close_resources(call)
        if call.policy_context is not None:
            close_policy_context(call)
        if call.token is not None:
            self.frame.record(
                ToolRolledBack(call.id, call.name, reason, compensated, left, self.frame.run_context)
            )
        return left

    async def _again(self, call: LiveCall, scope: CancelScope) -> LiveCall:
        """Undo this try and give the next one the call's place."""
        frame = self.frame
        another = call.again(await self._undo(call, "it is run again"))
        call.transaction = None  # undone, and not to be undone again
        if frame.log is not None:
            await note_try(another)
        if scope.interrupted:
            call.left = another.left
            raise asyncio.CancelledError  # it came while this try was undone
        another.params, another.arguments = call.tool.parse(call.arguments), call.arguments
        del frame.live[call]
        frame.live[another] = scope.task
        return another

    async def _wait_to_retry(self, call: LiveCall, error: TransientError) -> None:
        """Wait before trying again, or raise the error where it may not be tried again."""
        if not EFFECTS[call.tool.effect].retried or call.attempt > _RETRIES:
            raise error
        pause = 0.1 * 2 ** (call.attempt - 1) if error.retry_after is None else error.retry_after
        deadline = self.frame.deadline
        if deadline is not None and pause >= deadline.remaining():
            raise error
        call.attempt += 1
        call.close()
        await asyncio.sleep(pause)

    # 10

    def _end(self, call: LiveCall) -> ToolResult[Any]:
        frame = self.frame
        if call.policy_context is not None:
            close_policy_context(call)
        if call.spending is not None:
            call.spending.settle()
        call.made_resources = None  # it points back here, and only the collector could free the circle
        result: Any = call.result
        if call.first is not None:
            call.first.result = result
        seconds = frame.monotonic() - frame.began - call.started
        shown = call.tool.shown
        parking = frame.parking
        if parking is None or not parking.parked or call.recorded:  # else it has not ended: it is left
            frame.record(
                ToolInvoked(
                    call.id,
                    call.name,
                    call.path,
                    call.status,
                    result if shown is None else shown(result),
                    call.params,
                    seconds,
                    call.attempt,
                    call.stale,
                    call.error,
                    frame.run_context,
                )
            )
        if call.error is not None and call.status != "cancelled":
            forget_locals(call.error)
        if parking is not None:
            frame.ending.discard(call)
            parking.ended(call)
        return result

    async def _close_resources(self, call: LiveCall) -> None:
        for resources in (call.made_resources, policy_resources(call)):
            if resources is not None and not resources.untouched:
                for error in await shielded(resources.close()):
                    log.error("closing a resource of %s raised", call.name, exc_info=error)
