"""The two halves of a handoff, for an orchestrator of one's own: `start` parks it, and `finish` takes the answer.

Each half is a call of its own, so each is committed by itself. `finish` can't undo what `start` did.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable
from typing import Any, cast

import msgspec

from handrail.context import ToolContext
from handrail.dispatch.call import CALL, PART, CallKind, new_call
from handrail.dispatch.current_call import policies_around
from handrail.dispatch.frame import open_frame
from handrail.dispatch.gate import Gate
from handrail.dispatch.options import GateArguments, RunOptions
from handrail.errors import DefinitionError
from handrail.events import HandoffAnswered, HandoffParked
from handrail.handoff.acts import ActRunner, Acts, Begun, Parked, fill, without_private
from handrail.protocols import ToolPolicy
from handrail.schema import is_instance
from handrail.schema.kinds import describe_kind
from handrail.tools import Tool, ToolResult


async def start(
    acts: Acts, params: Any, policies: Iterable[ToolPolicy], arguments: GateArguments
) -> Parked[Any, Any] | ToolResult[Any]:
    """Take a handoff through the gate up to the end of its `before`."""

    async def begin(params: Any, *, context: ToolContext) -> ToolResult[Any]:
        runner = ActRunner(context)
        begun = await acts.begin(runner, params)
        if begun.success:
            parked = cast("Begun[Any, Any, Any]", begun.value).parked
            if parked is not None:
                runner.note(HandoffParked, acts.public.hide(parked.public))
            runner.done()
        return begun

    half = _half(acts, begin, acts.begins)
    fill(half, "shown", without_private)
    options = RunOptions(outer_policies=policies_around()).updated("start", GateArguments, arguments)
    begun = await _run(half, params, options, policies, CALL)
    if not begun.success:
        return begun
    state = cast("Begun[Any, Any, Any]", begun.value)
    if state.parked is not None:
        return state.parked
    return ToolResult(begun.message, state.value, True, begun.exclude_value_from_context)


async def finish(
    acts: Acts, parked: Parked[Any, Any], answer: Any, params: Any, arguments: GateArguments
) -> ToolResult[Any]:
    """Take the answer to a handoff that `start` parked, and run its `after`."""
    name = acts.handoff.name
    if not isinstance(parked, Parked):  # pyright: ignore[reportUnnecessaryIsInstance]  # callers might not be type-checked
        raise DefinitionError(
            f"finish takes what start parked, not {describe_kind(parked)}. If `start` returned a ToolResult, "
            f"the handoff {name!r} has already ended."
        )
    if params is None and acts.after is not None and acts.after.wants_params and acts.handoff.params:
        raise DefinitionError(
            f"the `after` of handoff {name!r} takes params, and none were given. "
            "Write finish(parked, answer, params)."
        )
    value = _typed(acts.answer, answer)
    private = _typed(acts.private, parked.private)

    async def end(params: Any, *, context: ToolContext) -> ToolResult[Any]:
        runner = ActRunner(context)
        runner.note(HandoffAnswered, acts.answer.hide(value))
        ended = await acts.end(runner, private, value)
        if ended.success:
            runner.done()
        return ended

    if params is None:
        acts = dataclasses.replace(acts, ends=_without_params(acts.ends))
        half = _without_params(_half(acts, end, acts.ends))
    else:
        half = _half(acts, end, acts.ends)
    options = RunOptions(outer_policies=policies_around()).updated("finish", GateArguments, arguments)
    return await _run(half, params, options, (), PART)


def _typed(schema: Any, value: Any) -> Any:
    """Return a value of the schema's type. Data that was stored as plain JSON is parsed."""
    return value if is_instance(value, schema.annotation) else schema.parse_given(value)


def _half(acts: Acts, handler: Callable[..., Any], act: Tool[Any, Any]) -> Tool[Any, Any]:
    half = copy.copy(acts.handoff)
    for field in ("result", "result_class", "_result_schema"):
        fill(half, field, getattr(act, field))
    fill(half, "handler", handler)
    fill(half, "needs", frozenset())  # nobody is asked in either half
    return half


def _without_params(tool: Tool[Any, Any]) -> Tool[Any, Any]:
    """Return a copy of a tool whose arguments are not parsed, because it does not use its params."""
    made = copy.copy(tool)
    fill(made, "_schema", None)
    fill(made, "_quick", None)
    fill(made, "secret", False)
    return made


async def _run(
    half: Tool[Any, Any], params: Any, options: RunOptions, policies: Iterable[ToolPolicy], kind: CallKind
) -> ToolResult[Any]:
    frame = open_frame(options, [half], policies)
    gate = Gate(frame)
    sent = b"{}" if params is None else half.clear(params)
    call = msgspec.structs.replace(new_call(gate, half.name, sent), kind=kind, tool=half)
    try:
        return await gate.pass_through(call)
    finally:
        frame.cancellation.close()
        await frame.world.resources.close_logged()
