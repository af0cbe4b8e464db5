"""Handlers: find the one to run, start it, and check what it returned."""

from __future__ import annotations

import asyncio
from typing import Any

from handrail.cancellation import CancelScope
from handrail.context import ToolContext, WorkerContext
from handrail.dispatch.attempt import Attempt
from handrail.dispatch.call import Call
from handrail.dispatch.failures import Refused, SignatureMismatch, WrongResult, retry_delay
from handrail.errors import CapabilityMissing, DepthExceededError, ToolValidationError, TransientError
from handrail.limits import Heartbeat
from handrail.operation import Operation
from handrail.schema import to_json
from handrail.schema.kinds import describe_kind
from handrail.spelling import nearest
from handrail.tools import EFFECTS, Tool, ToolResult
from handrail.tools.effect import refusal

_RETRIES = 2
"""How many times a call is retried after a transient failure."""
_LONGEST_PAUSE = 60.0
"""Longest time in seconds that a call waits before it is retried."""


def look_up(attempt: Attempt) -> Tool[Any, Any]:
    """Look up the tool that a call names. Raises `Refused`, with a hint, if there is no such tool."""
    call, tools, workers = attempt.call, attempt.frame.tools, attempt.frame.workers
    tool = call.tool if call.kind.is_part else tools.get(call.name)
    if tool is None and workers is not None:
        tool = workers.find(call.name, attempt)
    if tool is None or tool.handler is None:
        near = nearest(call.name, tools)
        hint = f"Did you mean {near}?" if near else f"There are: {', '.join(tools) or 'none'}."
        if tool is None and workers is not None:
            hint = workers.why_not(call.name) or hint
        raise Refused("invalid", f"There is no tool {call.name!r} that can be called. {hint}")
    if tool.needs:
        call.resolve(tool)
        check_needs(attempt, tool)
    return tool


def check_nesting(call: Call, outer: Attempt) -> None:
    """Raise if a nested call exceeds the depth limit, or if the outer call's effect does not allow its effect."""
    limit = call.frame.options.depth_limit
    if call.depth > limit:
        raise DepthExceededError(call.path, limit)
    why_not = refusal(outer.tool.effect, call.tool.effect)
    if why_not is not None:
        advice = f"If it is meant to, define {outer.name} with effect={call.tool.effect!r}."
        raise Refused("denied", f"{outer.name} may not call {call.name}: {why_not}. {advice}")


def check_needs(attempt: Attempt, tool: Tool[Any, Any]) -> None:
    if "user" in tool.needs and attempt.wait_for is None:
        raise CapabilityMissing(
            tool.name, "wait_for", "Run it with an environment in which a person can be asked."
        )
    if "model" in tool.needs and attempt.prompt_model is None:
        raise CapabilityMissing(
            tool.name, "prompt_model", "Run it with an environment in which a model stands in for the user."
        )
    if "worker" in tool.needs and attempt.worker is None:
        raise CapabilityMissing(
            tool.name, "a worker", "Run it from a worker: list it under `tools:` in the worker's file."
        )


def context_in_worker(tool: Tool[Any, Any]) -> type[ToolContext]:
    """Return the context type of a handler in a worker: `WorkerContext`, unless it requires a person or a model."""
    return WorkerContext if tool.context_type is ToolContext else tool.context_type


def begin(handler: Any, params: Any, context: ToolContext) -> Any:
    """Call a synchronous handler. This runs in a thread."""
    try:
        return handler(params, context=context)
    except TypeError as error:
        refuse_misfit(error)
        raise


def refuse_misfit(error: TypeError) -> None:
    """Raise `SignatureMismatch` if a `TypeError` came from the call to the handler and not from inside it."""
    traceback = error.__traceback__
    if traceback is not None and traceback.tb_next is None:
        raise SignatureMismatch(str(error)) from error


def start_timers(attempt: Attempt, scope: CancelScope) -> None:
    """Start the tool's timeout, if it has one, and keep the lease of its job alive, if it runs in one."""
    if attempt.frame.lease is not None:
        attempt.heartbeat.keep(attempt.call.loop)
    timeout = attempt.tool.timeout
    if timeout is not None:
        scope.start_timeout(timeout, None if attempt.tool.is_async else attempt.excused)


def stop_timers(attempt: Attempt, scope: CancelScope) -> None:
    """Stop what `start_timers` started. Raises `TimedOut` if the timeout ended the handler."""
    if attempt.frame.lease is not None:
        attempt.heartbeat.stop()
    scope.stop_timeout()


async def wait_to_retry(attempt: Attempt, error: TransientError, scope: CancelScope) -> None:
    """Wait before the next retry. Raises the error if no retry is left, or if there is no time to wait.

    The timeout and the deadline go on while the gate waits, and the job's lease is kept.
    """
    if not EFFECTS[attempt.tool.effect].retried or attempt.retries >= _RETRIES:
        raise error
    pause, frame = retry_delay(error), attempt.frame
    if pause is None:
        pause = 0.1 * 2**attempt.retries
    deadline = frame.deadline
    if pause > _LONGEST_PAUSE or pause >= scope.timeout_left():
        raise error
    if deadline is not None and pause >= deadline.remaining():
        raise error
    attempt.retries += 1
    attempt.close()
    heartbeat = Heartbeat(frame.lease, frame.clock)
    heartbeat.keep(attempt.call.loop)
    try:
        await asyncio.sleep(pause)
    finally:
        heartbeat.stop()


async def cancelled_after_all() -> None:
    """Raise the cancellation that a handler suppressed, so that nothing is committed."""
    import anyio.lowlevel

    await anyio.lowlevel.checkpoint_if_cancelled()
    raise asyncio.CancelledError


_SIMPLE = (str, int, float, bool, type(None))


def check_result(tool: Tool[Any, Any], result: Any) -> None:
    """Raise `SignatureMismatch` or `WrongResult` unless a handler's result has the declared type and can be shown."""
    given: type[Any] = type(result)  # pyright: ignore[reportUnknownVariableType]  # whatever it returned
    if given is not ToolResult and not issubclass(given, ToolResult):
        raise SignatureMismatch(f"its handler returned {describe_kind(result)} instead of a ToolResult")
    value = result.value
    kind = tool.result_class
    if kind is not None:
        if not isinstance(value, kind) and result.success:
            raise WrongResult(f"it returned {_described(value)} but declares {tool.result!r}")
    elif type(value) not in _SIMPLE:
        if isinstance(value, Operation):
            raise WrongResult(f"it returned {_described(value)}")
        if tool.result is Any:
            try:
                to_json(value)
            except ToolValidationError as error:
                raise WrongResult(f"its return value {error}") from None


def _described(value: Any) -> str:
    if isinstance(value, Operation):
        value.close()  # the error says enough, so a warning is not needed
        return f"the operation {value.name}, which has not run: its `await` or `.wait()` is missing,"
    return "None" if value is None else describe_kind(value)
