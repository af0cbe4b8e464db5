"""Handlers: find the handler of a call, check that it may run, start it, and check what it returned."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator
from typing import Any

import msgspec

from handrail.concurrency.cancellation import CancelScope
from handrail.concurrency.operation import Operation
from handrail.content import attachments_in
from handrail.context import ToolContext, WorkerContext
from handrail.errors import CapabilityMissing, DepthExceededError, ToolValidationError, TransientError
from handrail.run.call import Attempt, Call
from handrail.run.failures import (
    Refused,
    SignatureMismatch,
    Unsuccessful,
    WrongResult,
    retry_delay,
    transient_in,
)
from handrail.run.limits import Heartbeat
from handrail.run.tickets import take_up_tickets
from handrail.schema import to_json
from handrail.schema.problems import describe, describe_kind
from handrail.text.raised_errors import in_short, words_of
from handrail.text.spelling import nearest
from handrail.tools import EFFECTS, Tool, ToolResult
from handrail.tools.effect import effect_refusal
from handrail.tools.result import clean_text, keep_rendering, lacks_value, renders

_RETRIES = 2
"""Maximum number of times that a call is retried after transient failures."""
_LONGEST_PAUSE = 60.0
"""Longest time in seconds that a call waits before it is retried."""
_MOST_NAMED = 20
"""Maximum number of tools that the refusal of an unknown one names."""


def look_up(attempt: Attempt) -> Tool[Any, Any]:
    """Look up the tool that a call names.

    Raises `Refused`, with a hint, if there is no such tool or it has no handler, and `CapabilityMissing` if the tool
    requires something that this run does not have.
    """
    call, tools, workers = attempt.call, attempt.run.tools, attempt.run.workers
    tool = call.tool if call.kind.is_part else tools.get(call.name)
    if tool is None and workers is not None:
        tool = workers.find(call.name, attempt)
    if tool is None or tool.handler is None:
        names = [name for name, each in tools.items() if each.handler is not None]
        near = nearest(call.name, names)
        others = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
        named = ", ".join(names[:_MOST_NAMED]) or "none"
        hint = f"Did you mean {near}?" if near else f"Available tools: {named}{others}."
        if tool is None and workers is not None:
            hint = workers.why_not(call.name) or hint
        raise Refused("invalid", f"There is no tool {call.name!r} that can be called. {hint}")
    if tool.needs:
        attempt.resolve(tool)
        check_needs(attempt, tool)
    return tool


def check_nesting(call: Call, outer: Attempt) -> None:
    """Raise `DepthExceededError` beyond the depth limit, and `Refused` if the outer call's effect does not allow this one's."""
    limit = call.run.options.depth_limit
    if call.depth > limit:
        raise DepthExceededError(call.path, limit, call.depth)
    why_not = effect_refusal(outer.tool.effect, call.tool.effect)
    if why_not is not None:
        advice = f"If it is meant to, define {outer.name} with effect={call.tool.effect!r}."
        raise Refused("denied", f"{outer.name} may not call {call.name}: {why_not}. {advice}")


def check_needs(attempt: Attempt, tool: Tool[Any, Any]) -> None:
    if "user" in tool.needs and attempt.wait_for is None:
        raise CapabilityMissing(
            tool.name,
            "wait_for",
            "Run it in the run mode 'user', with an environment in which a person can be asked.",
        )
    if "model" in tool.needs and attempt.prompt_model is None:
        raise CapabilityMissing(
            tool.name,
            "prompt_model",
            "Run it in the run mode 'agent', with an environment in which a model stands in for the user.",
        )
    if "worker" in tool.needs and attempt.worker is None:
        raise CapabilityMissing(
            tool.name, "a worker", "List it under `tools:` in a worker's file, and run that worker."
        )


def check_limits(attempt: Attempt) -> None:
    """Raise an error if the run was cancelled, its deadline has passed or its budget allows no more calls. Otherwise charge the call, once.

    Compensations and probes, and the calls inside them, are neither checked nor charged. Other parts of a call use no budget.
    """
    run, call = attempt.run, attempt.call
    if call.kind.undoes:
        return
    run.cancellation.check()
    if run.deadline is not None:
        run.deadline.check(f"{call.name} could run")
    if run.budget is not None and not attempt.passage.charged and not call.kind.is_part:
        run.budget.reserve(tool_calls=1).settle()
        attempt.passage.charged = True


def context_in_worker(tool: Tool[Any, Any]) -> type[ToolContext]:
    """Return the context type of a handler in a worker: `WorkerContext`, unless it requires a person or a model."""
    return WorkerContext if tool.context_type is ToolContext else tool.context_type


def begin(handler: Any, params: Any, context: ToolContext) -> Any:
    """Call a synchronous handler. The gate does this in a thread. Raises `SignatureMismatch` if it does not take params and a context."""
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
    """Start the tool's timeout and its watchdog, if it has them, and keep the lease of its job alive, if it runs in one."""
    tool = attempt.call.tool
    if attempt.run.lease is not None:
        attempt.heartbeat.keep(attempt.call.loop)
    if not tool.is_timed:
        return
    attempt.passage.hold_timers(scope)
    timeout, heartbeat, clock = tool.timeout, tool.heartbeat, attempt.work_clock
    if timeout is not None:
        scope.start_timeout(timeout, clock)
    if heartbeat is not None:
        attempt.heartbeat.heard = scope.hear
        scope.start_watchdog(heartbeat, clock)


def stop_timers(attempt: Attempt, scope: CancelScope) -> None:
    """Stop what `start_timers` started.

    Raises `TimedOut` if the timeout or the watchdog cancelled the handler, unless it was also cancelled from outside.
    """
    if attempt.run.lease is not None:
        attempt.heartbeat.stop()
    try:
        scope.stop_timeout()
    finally:
        scope.stop_watchdog()


async def wait_to_retry(
    attempt: Attempt, error: TransientError | BaseExceptionGroup[Any], scope: CancelScope
) -> None:
    """Wait before the next retry.

    Raises the error if it is not transient, if the tool's effect does not allow retries, if no retry is left, if the
    pause would be too long, or if inner calls have committed separately, since a retry would repeat them. A group
    counts as transient if it contains a transient failure. The timeout and the deadline keep running during the pause,
    and the job's lease is renewed.
    """
    failure = transient_in(error)
    if failure is None or not EFFECTS[attempt.tool.effect].retried or attempt.passage.retries >= _RETRIES:
        raise error
    if attempt.open_transaction.kept:
        raise error
    pause, run = retry_delay(failure), attempt.run
    if pause is None:
        pause = 0.1 * 2**attempt.passage.retries
    deadline = run.deadline
    if pause > _LONGEST_PAUSE or pause >= scope.timeout_left():
        raise error
    if deadline is not None and pause >= deadline.remaining():
        raise error
    attempt.passage.retries += 1
    attempt.close()
    heartbeat = Heartbeat(run.lease, run.clock)
    heartbeat.keep(attempt.call.loop)
    try:
        await asyncio.sleep(pause)
    finally:
        heartbeat.stop()


def check_finished(
    attempt: Attempt, tool: Tool[Any, Any], result: Any, scope: CancelScope
) -> Coroutine[Any, Any, None] | None:
    """Check what the handler returned, and close its context.

    Returns a coroutine that must be awaited to finish this, or None if it is finished. Raises `Unsuccessful` for a result
    with `success=False`, and what `check_result` raises. If the call was cancelled while its handler ran, nothing is
    checked, and the coroutine raises the cancellation.
    """
    if scope.is_stopped():
        return cancelled_after_all()
    check_result(tool, result, attempt)
    if not result.success:
        raise Unsuccessful(result)
    if attempt.tickets is not None:
        return take_up_tickets(attempt)
    attempt.close()
    return None


async def cancelled_after_all() -> None:
    """Raise the cancellation that a handler suppressed, so that nothing is committed."""
    import anyio.lowlevel

    await anyio.lowlevel.checkpoint_if_cancelled()
    raise asyncio.CancelledError


_SIMPLE = frozenset([int, float, bool, type(None)])
_CONTAINERS = frozenset([dict, list, tuple])
_RESULT: Any = ToolResult
_ITERATOR: Any = Iterator
_is_ascii = str.isascii


def check_result(tool: Tool[Any, Any], result: Any, attempt: Attempt) -> None:
    """Check that a handler's result can be shown and, if it is a success, has the declared type.

    Raises `Unsuccessful` if the result is a failure whose value can't be shown, and `WrongResult` for any other problem. In
    each case the call is not committed yet, so it is undone.
    """
    declared = tool.result_class
    if type(result) is _RESULT:
        try:
            if declared is str:
                if _is_ascii(result.message) and _is_ascii(result.value):
                    return  # it can certainly be rendered
            elif type(result.value) is declared:
                if declared in _SIMPLE:
                    if _is_ascii(result.message):
                        return
                elif declared in _CONTAINERS and _keep_json(result, attempt):
                    return
        except TypeError:
            pass  # the message or the value is not text
    elif not isinstance(result, _RESULT):
        raise WrongResult(f"its handler returned {describe_kind(result)} instead of a ToolResult")
    value = result.value
    if (
        declared is not None
        and not isinstance(value, declared)
        and result.success
        and not lacks_value(result)
    ):
        raise WrongResult(f"it returned {_described(value)} but declares {describe(tool.result)}")
    _check_rendering(tool, result, attempt)


def _keep_json(result: ToolResult[Any], attempt: Attempt) -> bool:
    """Render a result whose value is a plain container, as `_check_rendering` does, but faster.

    Returns False if the result needs all checks.
    """
    message, call = result.message, attempt.call
    if result.exclude_value_from_context or call.kind.is_part or call.parent is not None:
        return False
    if type(message) is not str:
        return False
    try:
        json = to_json(result.value).decode()
    except Exception:  # `_check_rendering` raises it again, and says what it means
        return False
    keep_rendering(result, clean_text(f"{message}\n{json}" if message else json), json)
    return True


def _check_rendering(tool: Tool[Any, Any], result: ToolResult[Any], attempt: Attempt) -> None:
    """Check that a result can be rendered.

    Raises `WrongResult` if its message is not text, or if the value of a success can't be shown. A failure whose value
    can't be shown raises `Unsuccessful`, without the value. The rendering is kept if it was corrected. It is also kept if
    it is slow to make, unless the call is an inner one.
    """
    message: Any = result.message
    if not isinstance(message, str):
        said = f": {words_of(message)}" if isinstance(message, BaseException) else ""
        raise WrongResult(f"the message of its result must be text, not {describe_kind(message)}{said}")
    try:
        text, json = _render(tool, result, attempt)
    except WrongResult as error:
        if result.success:
            raise
        told = f"{message.rstrip('.')}. The value of its result is left out: {error}."
        raise Unsuccessful(ToolResult.error(clean_text(told))) from error
    found = attachments_in(result.value)
    if found and not result.attachments:
        msgspec.structs.force_setattr(result, "attachments", found)
    is_quick = type(result) is ToolResult and (isinstance(result.value, str) or type(result.value) in _SIMPLE)
    whole = clean_text(text)
    if whole is not text or (
        not is_quick and attempt.parent is None
    ):  # an inner call's result is rarely shown
        keep_rendering(result, whole, json)


def _render(tool: Tool[Any, Any], result: ToolResult[Any], attempt: Attempt) -> tuple[str, str | None]:
    """Return the text of a result, and its value as JSON, which is None if it was not needed.

    The text of a part's result is "", unless its value has attachments. Raises `WrongResult` if the value can't be shown.
    """
    value: Any = result.value
    json: str | None = None
    if isinstance(value, Operation):
        raise WrongResult(f"it returned {_described(value)}")
    try:
        if isinstance(value, str):
            json = None if value.isascii() else to_json(clean_text(value)).decode()
        elif renders(value):
            if tool.result is Any:
                to_json(value)  # a value without a declared type may be recorded, so it must be JSON
        elif attachments_in(value):
            text = "\n".join(map(_rendered_item, value))
            shown = "" if result.exclude_value_from_context else text
            return "\n".join(filter(None, (result.message, shown))) or "done", to_json(value).decode()
        elif isinstance(value, _ITERATOR):
            raise WrongResult(
                f"it returned {describe_kind(value)}, which can be read only once: return a list instead"
            )
        elif value is not None and (tool.result is Any or not result.exclude_value_from_context):
            json = to_json(value).decode()
        if attempt.kind.is_part:
            return "", json  # nobody is shown the result of a part
        is_json = json is not None and not isinstance(value, str) and not result.exclude_value_from_context
        if type(result) is ToolResult and is_json:
            text = f"{result.message}\n{json}" if result.message else json
        else:
            text = result.render()
    except ToolValidationError as error:
        raise WrongResult(f"its return value {words_of(error)}") from None
    except WrongResult:
        raise
    except Exception as error:  # raised by the value itself
        raise WrongResult(f"its return value can't be shown: {in_short(error)}") from error
    if not isinstance(text, str):  # pyright: ignore[reportUnnecessaryIsInstance]  # a `render` may return anything
        raise WrongResult(f"its return value is rendered as {describe_kind(text)}, not as text")
    return text, json


def _rendered_item(item: Any) -> str:
    """Return the text of one item in a list with attachments."""
    if isinstance(item, str):
        return item
    return item.render() if renders(item) else to_json(item).decode()


def _described(value: Any) -> str:
    if isinstance(value, Operation):
        value.close()  # the error says enough, so a warning is not needed
        return f"the operation {value.name}, which has not run (its `await` or `.wait()` is missing)"
    return "None" if value is None else describe_kind(value)
