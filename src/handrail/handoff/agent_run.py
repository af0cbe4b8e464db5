"""`run_as_agent`: runs a handoff's `client` act with a model."""

from __future__ import annotations

import copy
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, TypedDict, Unpack

import msgspec
from typing_extensions import TypeVar

from handrail.callbacks import Callback
from handrail.clock import Clock
from handrail.deadline import Deadline
from handrail.dispatch.call import PART, new_call
from handrail.dispatch.frame import open_frame
from handrail.dispatch.gate import Gate
from handrail.dispatch.options import RunOptions
from handrail.environment import AgentEnvironment
from handrail.errors import DefinitionError
from handrail.events import Emitted
from handrail.guard.outer_policy import policies_around
from handrail.handoff.acts import fill
from handrail.handoff.handoff import Handoff
from handrail.ids import NewId
from handrail.limits import Budget, BudgetTracker
from handrail.messages import Model
from handrail.operation import Operation
from handrail.place import is_in_run
from handrail.protocols import ToolPolicy
from handrail.schema.kinds import describe_kind
from handrail.session import Session
from handrail.tools import Tool, ToolResult

ParamsT = TypeVar("ParamsT")
AnswerT = TypeVar("AnswerT")


class ActArguments(TypedDict, total=False):
    """Arguments of `run_as_agent`."""

    session: Session | None
    deadline: Deadline | None
    budget: Budget | BudgetTracker | None
    clock: Clock
    new_id: NewId


def run_as_agent(
    handoff: Handoff[ParamsT, AnswerT],
    public: object,
    params: ParamsT | None = None,
    *,
    model: Model | str,
    on_emit: Callable[[object], Awaitable[None] | None] | None = None,
    tools: Iterable[Tool[Any, Any]] = (),
    policies: Iterable[ToolPolicy] = (),
    **arguments: Unpack[ActArguments],
) -> Operation[AnswerT]:
    """Run the `client` act on this public data with a model, and return the act's answer.

    Neither `before` nor `after` runs. To run all acts, use `gate.invoke` or `context.call`. The act may
    `call` the given `tools`, and what it emits is passed to `on_emit` at once; an async `on_emit` is awaited. Nobody can approve anything, so a call
    that needs approval is denied. If a handler calls this, whatever the policies of its run deny is denied too. An act
    that fails raises `CallFailed`.
    """
    if not isinstance(handoff, Handoff):  # pyright: ignore[reportUnnecessaryIsInstance]  # callers might not be type-checked
        raise DefinitionError(
            f"run_as_agent takes a Handoff, not {describe_kind(handoff)}. "
            "Call any other tool through a gate: open_gate([...]).invoke(...)."
        )
    acts = handoff.acts
    act = copy.copy(acts.asking(acts.public.parse_value(public)))
    fill(act, "run_mode", "agent")
    options = RunOptions(outer_policies=policies_around()).updated("run_as_agent", ActArguments, arguments)
    sent = b"{}"
    if params is not None:
        sent = handoff.clear(params)
    elif acts.client is not None and acts.client.wants_params and handoff.params is not None:
        raise DefinitionError(
            f"the `client` of handoff {handoff.name!r} takes params, and none were given. "
            "Write run_as_agent(handoff, public, params, model=...)."
        )
    else:
        fill(act, "_schema", None)  # nothing is parsed, because the act takes no params
        fill(act, "_quick", None)
        fill(act, "secret", False)

    async def run() -> AnswerT:
        frame = open_frame(options.replace(environment=AgentEnvironment(model)), tools, policies)
        where = frame.session
        run_id = frame.run_context.run_id

        tell = None if on_emit is None else Callback(on_emit, "on_emit")

        def told(event: Emitted) -> None:
            if tell is not None and is_in_run(event.run_context.run_id, run_id):
                tell(event.event)

        stop = where.dispatcher.subscribe(Emitted, told)
        gate = Gate(frame)
        try:
            return (await _run_alone(gate, act, sent)).unwrap()
        finally:
            stop()
            if tell is not None:
                await tell.finish()
            frame.cancellation.close()
            await frame.world.resources.close_logged()

    return Operation(run, f"run_as_agent({handoff.name!r})")


async def _run_alone(gate: Gate, act: Tool[Any, Any], arguments: bytes) -> ToolResult[Any]:
    """Run one act alone, as the only call of a run."""
    call = new_call(gate, act.name, arguments)
    return await gate.pass_through(msgspec.structs.replace(call, kind=PART, tool=act))
