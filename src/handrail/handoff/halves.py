"""Runs that only play a part of a handoff, or a tool, without an adapter.

`start` and `finish` are the two halves of a handoff, for your own orchestrator: `start` parks it, and `finish` takes the
answer. Each half is a call of its own, so each is committed by itself. `finish` can't undo what `start` did.
`run_as_agent` runs a tool, or the `client` act of a handoff, with a model in a person's place.
"""

from __future__ import annotations

import copy
import dataclasses
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping
from contextlib import asynccontextmanager, nullcontext
from typing import Any, TypedDict, Unpack, cast, overload

import msgspec
from typing_extensions import TypeVar

from handrail.clock import Clock
from handrail.concurrency.deadline import Deadline
from handrail.concurrency.operation import Operation
from handrail.concurrency.user_code import Callback
from handrail.context import ToolContext
from handrail.environment import AgentEnvironment
from handrail.errors import AnswerRefused, DefinitionError, OutcomeUnknown
from handrail.events import Emitted, HandoffAnswered, HandoffParked
from handrail.handoff.acts import ActRunner, Acts, Begun, Parked, fill, without_private
from handrail.handoff.handoff import Handoff
from handrail.ids import NewId
from handrail.messages import Model
from handrail.protocols import Filesystem, ToolPolicy, WorkerSource
from handrail.resources.bindings import Binding
from handrail.run.adapter import checked_workers
from handrail.run.call import CALL, PART, Call, CallKind, new_call
from handrail.run.current_call import call_around, check_given
from handrail.run.gate import Gate
from handrail.run.limits import Budget, BudgetTracker
from handrail.run.nested import nested_run
from handrail.run.options import RunOptions
from handrail.run.place import is_in_run
from handrail.run.run import Run, open_run, show_tools
from handrail.schema import clear_json, is_instance
from handrail.schema.problems import describe_kind
from handrail.session import Session
from handrail.tools import Tool, ToolResult

_KEPT = 10_000
"""Maximum number of claims that a process keeps. The oldest are dropped."""

Work = Callable[[], Awaitable[ToolResult[Any]]]


class _Unfinished(Exception):
    """Raised if `after` did not succeed, so that the handoff can be finished again."""

    def __init__(self, error: BaseException | None) -> None:
        self.error = error


class Claim:
    """One attempt to finish a handoff, with the handoff's id and the key of the call that runs `after`.

    It is given up if the `finish` does not succeed. It is kept in this process and, if the run of the `finish` has a journal, in the
    journal, where other processes find it.
    """

    __slots__ = ("_id", "_key", "_name", "_result", "_run")

    def __init__(self, run: Run, id: str, name: str, key: str) -> None:
        self._run = run
        self._id = id
        self._name = name
        self._key = key
        self._result: ToolResult[Any] | None = None

    async def run(self, work: Work) -> ToolResult[Any]:
        """Claim the handoff and run the call. The claim is given up if the call does not succeed.

        Raises `AnswerRefused` if another call has claimed the handoff. Raises `OutcomeUnknown` if an earlier process ended
        while it was finishing the handoff, unless this call belongs to a resumed run.

        A call that is entered again, because its run was resumed or the call around it was attempted again, has the
        same key and keeps its claim.
        """
        before = _claims.take(self._id, self._key)
        if before not in ("", self._key):
            raise self._refusal()
        done = False
        try:
            result = await self._run_recorded(work)
            done = result.success
        finally:
            if not done and not before:
                _claims.release(self._id)
        return result

    async def _run_recorded(self, work: Work) -> ToolResult[Any]:
        """Run the call and record the claim in the journal, if there is one. Raises the errors that `run` names."""
        journal = self._run.journal
        if journal is None:
            return await work()

        async def finish() -> str:
            try:
                self._result = await work()
            except GeneratorExit:
                raise
            except BaseException as error:  # also a cancellation; the gate has rolled the call back
                raise _Unfinished(error) from None
            if not self._result.success:
                raise _Unfinished(None)
            return self._key

        async def decide() -> str:
            if self._run.outer is not None and self._run.log.resumed:
                return await finish()  # the gate treats an interrupted call according to its effect
            raise OutcomeUnknown(
                self._name,
                "A process began to finish this handoff, and did not record the end. Find out what its `after` changed, "
                "then start the handoff again.",
            )

        try:
            by = await journal.steps.run(f"handoff {self._id}", finish, unsettled=decide)
        except _Unfinished as unfinished:
            if unfinished.error is not None:
                raise unfinished.error from None
            assert self._result is not None
            return self._result
        if self._result is not None:
            return self._result
        if by != self._key:
            raise self._refusal()
        return await work()

    def _refusal(self) -> AnswerRefused:
        return AnswerRefused(
            self._id,
            f"the handoff {self._name!r} was finished already, or is being finished",
            "The first answer counts. To ask again, start the handoff again.",
        )


class _Claims:
    """The claims of this process, by the id of the handoff. The newest are kept."""

    def __init__(self) -> None:
        self._keys: dict[str, str] = {}
        self._lock = threading.Lock()

    def take(self, id: str, key: str) -> str:
        """Claim a handoff, unless it is claimed. Returns the key of the earlier claim; "" if there was none."""
        with self._lock:
            before = self._keys.get(id, "")
            if not before:
                self._keys[id] = key
                if len(self._keys) > _KEPT:
                    del self._keys[next(iter(self._keys))]
            return before

    def release(self, id: str) -> None:
        """Give up a claim, because the call did not succeed."""
        with self._lock:
            self._keys.pop(id, None)


_claims = _Claims()


T = TypeVar("T")


def operation(
    verb: str,
    name: str,
    options: RunOptions,
    arguments: Mapping[str, Any],
    work: Callable[[Run], Awaitable[T]],
) -> Operation[T]:
    """Return an operation that works in a run of its own: one at the root, or one nested in the call whose handler starts it."""
    around = call_around()
    if around is None:
        opened, home = lambda: _root_run(options), None
    else:
        check_given(around, verb, RunOptions(), arguments)
        attempt, words = around, f"{verb} {name}"
        number = attempt.next_verb(words)
        opened, home = lambda: nested_run(attempt, number, words, options), attempt.home

    async def work_in_run() -> T:
        async with opened() as run:
            return await work(run)

    return Operation(work_in_run, f"{verb}({name!r})", home)


@asynccontextmanager
async def _root_run(options: RunOptions) -> AsyncGenerator[Run]:
    """Open a run at the root, and close it at the end of the block."""
    run = open_run(options)
    try:
        yield run
    finally:
        run.cancellation.close()
        await run.world.resources.close_logged()


async def start(
    run: Run, acts: Acts, params: Any, policies: Iterable[ToolPolicy]
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
    gate, call = _open(run, half, params, policies, CALL)
    begun = await gate.pass_through(call)
    if not begun.success:
        return begun
    state = cast("Begun[Any, Any, Any]", begun.value)
    if state.parked is not None:
        return dataclasses.replace(state.parked, id=call.key)
    return msgspec.structs.replace(begun, value=state.value)


async def finish(run: Run, acts: Acts, parked: Parked[Any, Any], answer: Any, params: Any) -> ToolResult[Any]:
    """Validate the answer to a parked handoff, and run its `after`."""
    name = acts.handoff.name
    if not isinstance(parked, Parked):  # pyright: ignore[reportUnnecessaryIsInstance]  # callers might not be type-checked
        raise DefinitionError(
            f"finish takes what start parked, not {describe_kind(parked)}. If `start` returned a ToolResult, "
            f"the handoff {name!r} has already ended."
        )
    if not parked.id:
        raise DefinitionError(
            f"the parked data of handoff {name!r} has no id, so it is not known whether it was finished already. Pass what "
            "start returned; if you store its parts, store its id too: Parked(private, public, id)."
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
    # Policies do not judge a part. Those of `start` have judged the call already; those of a run around this half have not.
    kind = PART if run.outer is None else CALL
    gate, call = _open(run, half, params, (), kind)
    return await Claim(run, parked.id, name, call.key).run(lambda: gate.pass_through(call))


def _typed(schema: Any, value: Any) -> Any:
    """Return a value of the schema's type. Data that was stored as plain JSON is parsed."""
    return value if is_instance(value, schema.annotation) else schema.parse_given(value)


def _half(acts: Acts, handler: Callable[..., Any], act: Tool[Any, Any]) -> Tool[Any, Any]:
    half = copy.copy(acts.handoff)
    for field in ("result", "result_class", "_result_schema"):
        fill(half, field, getattr(act, field))
    fill(half, "handler", handler)
    fill(half, "needs", frozenset())  # the needs are those of `client`, which neither half runs
    return half


def _without_params(tool: Tool[Any, Any]) -> Tool[Any, Any]:
    """Return a copy of a tool whose arguments are not parsed, because it does not use its params."""
    made = copy.copy(tool)
    fill(made, "_schema", None)
    fill(made, "_quick", None)
    fill(made, "secret", False)
    return made


def _open(
    run: Run, half: Tool[Any, Any], params: Any, policies: Iterable[ToolPolicy], kind: CallKind
) -> tuple[Gate, Call]:
    """Open the gate of one half, and create the call that is to pass it."""
    show_tools(run, [half], policies)
    gate = Gate(run)
    sent = b"{}" if params is None else half.clear(params)
    call = msgspec.structs.replace(new_call(gate, half.name, sent), tool=half)
    if kind.is_part:
        call = msgspec.structs.replace(call, kind=kind)
    return gate, call


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

    async def play(run: Run) -> Any:
        run.model.adapter, run.model.prompt_model = environment.adapter, environment.prompt_model
        return await _play(run, options, played, sent, tools, policies, on_emit)

    return operation("run_as_agent", tool.name, options, arguments, play)


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
    return _without_params(act), b"{}"


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


async def _play(
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
