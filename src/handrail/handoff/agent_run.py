"""`run_as_agent`: runs a tool, or the `client` act of a handoff, with a model in a person's place."""

from __future__ import annotations

import copy
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import nullcontext
from typing import Any, TypedDict, Unpack, cast, overload

import msgspec
from typing_extensions import TypeVar

from handrail.clock import Clock
from handrail.concurrency.isolation import Callback
from handrail.concurrency.operation import Operation
from handrail.concurrency.timers import Deadline
from handrail.environment import AgentEnvironment
from handrail.errors import DefinitionError
from handrail.events import Emitted
from handrail.handoff.acts import fill
from handrail.handoff.handoff import Handoff
from handrail.ids import NewId
from handrail.messages import Model
from handrail.protocols import Filesystem, ToolPolicy, WorkerSource
from handrail.resources.bindings import Binding
from handrail.run.call import PART, new_call
from handrail.run.current_call import call_around, check_given
from handrail.run.gate import Gate
from handrail.run.limits import Budget, BudgetTracker
from handrail.run.nested import nested_run
from handrail.run.options import RunOptions
from handrail.run.place import is_in_run
from handrail.run.run import Run, open_run, show_tools
from handrail.run.settings import checked_workers
from handrail.schema import clear_json
from handrail.schema.problems import describe_kind
from handrail.session import Session
from handrail.tools import Tool

ParamsT = TypeVar("ParamsT")
AnswerT = TypeVar("AnswerT")
ResultT = TypeVar("ResultT")


class ActArguments(TypedDict, total=False):
    """Optional arguments of `run_as_agent`. Inside a call, only `deadline`, `budget`, `resources` and `workers` of these may be given."""

    session: Session | None
    deadline: Deadline | None
    budget: Budget | BudgetTracker | None
    filesystem: Filesystem | None
    resources: Iterable[Binding[Any]]
    workers: WorkerSource | None
    clock: Clock
    new_id: NewId


@overload
def run_as_agent(
    tool: Handoff[ParamsT, AnswerT],
    public: object,
    params: ParamsT | None = None,
    /,
    *,
    model: Model | str,
    on_emit: Callable[[object], Awaitable[None] | None] | None = None,
    tools: Iterable[Tool[Any, Any]] = (),
    policies: Iterable[ToolPolicy] = (),
    **arguments: Unpack[ActArguments],
) -> Operation[AnswerT]: ...
@overload
def run_as_agent(
    tool: Tool[ParamsT, ResultT],
    params: ParamsT | Mapping[str, Any] | None = None,
    /,
    *,
    model: Model | str,
    on_emit: Callable[[object], Awaitable[None] | None] | None = None,
    tools: Iterable[Tool[Any, Any]] = (),
    policies: Iterable[ToolPolicy] = (),
    **arguments: Unpack[ActArguments],
) -> Operation[ResultT]: ...
def run_as_agent(
    tool: Tool[Any, Any],
    public: object = None,
    params: Any = None,
    /,
    *,
    model: Model | str,
    on_emit: Callable[[object], Awaitable[None] | None] | None = None,
    tools: Iterable[Tool[Any, Any]] = (),
    policies: Iterable[ToolPolicy] = (),
    **arguments: Unpack[ActArguments],
) -> Operation[Any]:
    """Run a tool with a model in a person's place, and return its value.

    If the tool is a handoff, only its `client` act runs, on the given public data, and the act's answer is returned. To run
    all acts, use `gate.invoke` or `context.call`. Any other tool is called with these params, through a gate with these
    `policies`. The tool or act may `call` the given `tools`. The events that it emits are passed to `on_emit` immediately.
    An async `on_emit` is awaited before this returns.

    Raises `CallFailed` if the call fails, `ToolValidationError` if the public data does not fit the handoff, and
    `DefinitionError` if the tool can't run this way, for example because its handler takes a `UserContext`.

    If a handler calls this, the run is nested in the handler's call. It inherits what it is not given, except the model.
    Otherwise it is a run of its own, in which nobody can approve anything, so a call that needs approval is denied.
    """
    if not isinstance(tool, Tool):  # pyright: ignore[reportUnnecessaryIsInstance]  # callers might not be type-checked
        raise DefinitionError(f"run_as_agent takes a tool, not {describe_kind(tool)}. Pass a tool.")
    if isinstance(tool, Handoff):
        played, sent = _act(cast("Handoff[Any, Any]", tool), public, params)
    elif params is not None:
        raise DefinitionError(
            f"{tool.name!r} is not a handoff, so it has no public data. Write run_as_agent(tool, params, model=...)."
        )
    else:
        played, sent = _whole(tool, public)
    environment = AgentEnvironment(model)
    options = RunOptions().updated("run_as_agent", ActArguments, arguments)
    options = options.replace(environment=environment, workers=checked_workers(options.workers))
    around, verb = call_around(), f"run_as_agent {tool.name}"
    if around is None:
        return Operation(
            lambda: _run(open_run(options), options, played, sent, tools, policies, on_emit),
            f"run_as_agent({tool.name!r})",
        )
    check_given(around, "run_as_agent", RunOptions(), arguments)
    number = around.next_verb(verb)

    async def run_inside() -> Any:
        async with nested_run(around, number, verb, options) as run:
            run.model.adapter, run.model.prompt_model = environment.adapter, environment.prompt_model
            return await _run(run, options, played, sent, tools, policies, on_emit)

    return Operation(run_inside, f"run_as_agent({tool.name!r})", around.home)


def _act(handoff: Handoff[Any, Any], public: object, params: Any) -> tuple[Tool[Any, Any], bytes]:
    """Return the `client` act of a handoff for this public data, and its arguments.

    Raises `ToolValidationError` if the public data does not fit, and `DefinitionError` if the act takes params and none
    were given.
    """
    acts = handoff.acts
    act = copy.copy(acts.asking(acts.public.parse_value(public)))
    fill(act, "run_mode", "agent")
    if params is not None:
        return act, handoff.clear(params)
    if acts.client is not None and acts.client.wants_params and handoff.params is not None:
        raise DefinitionError(
            f"the `client` of handoff {handoff.name!r} takes params, and none were given. "
            "Write run_as_agent(handoff, public, params, model=...)."
        )
    fill(act, "_schema", None)  # nothing is parsed, because the act takes no params
    fill(act, "_quick", None)
    fill(act, "secret", False)
    return act, b"{}"


def _whole(tool: Tool[Any, Any], params: Any) -> tuple[Tool[Any, Any], bytes]:
    """Return a copy of a tool that runs with a model in a person's place, and its arguments.

    Raises `DefinitionError` if the tool has no handler, or needs a person.
    """
    tool.check_complete()
    if tool.handler is None:
        raise DefinitionError(f"{tool.name!r} has no handler, so there is nothing to run. Give it one.")
    if "user" in tool.needs:
        raise DefinitionError(
            f"{tool.name!r} needs a person: its handler takes a UserContext. run_as_agent runs tools with a model in "
            "a person's place. Take a ToolContext, and use `prompt_model` if it is not None."
        )
    played = copy.copy(tool)
    fill(played, "run_mode", "agent")
    if params is None:
        return played, b"{}"
    return played, clear_json(cast(object, params)) if isinstance(params, Mapping) else tool.clear(params)


async def _run(
    run: Run,
    options: RunOptions,
    played: Tool[Any, Any],
    arguments: bytes,
    tools: Iterable[Tool[Any, Any]],
    policies: Iterable[ToolPolicy],
    on_emit: Callable[[object], Awaitable[None] | None] | None,
) -> Any:
    """Call a tool as the only call of a run, and return its value. An act is not judged by policies."""
    is_act = "." in played.name
    show_tools(run, tools if is_act else (played, *tools), policies)
    run_id = run.run_context.run_id

    tell = None if on_emit is None else Callback(on_emit, "on_emit")

    def told(event: Emitted) -> None:
        if tell is not None and is_in_run(event.run_context.run_id, run_id):
            tell(event.event)

    stop = run.session.dispatcher.subscribe(Emitted, told)
    gate = Gate(run)
    try:
        async with nullcontext() if options.workers is None else options.workers.enter(run):
            call = new_call(gate, played.name, arguments)
            if is_act:
                call = msgspec.structs.replace(call, kind=PART, tool=played)
            return (await gate.pass_through(call)).unwrap()
    finally:
        stop()
        if tell is not None:
            await tell.finish()
        if run.outer is None:
            run.cancellation.close()
            await run.world.resources.close_logged()
