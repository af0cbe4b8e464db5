"""`Call`: the tool and the arguments that were requested, and the call's place in its run; and turns of calls.

Once its arguments are parsed, a call no longer changes. The calls of one turn run concurrently, except those of tools that must run alone.
"""

from __future__ import annotations

import asyncio
from asyncio import AbstractEventLoop, get_running_loop
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec.structs import force_setattr

from handrail.concurrency.operation import cancel_and_await
from handrail.errors import DefinitionError
from handrail.messages import CallAsked
from handrail.run.failures import Refused
from handrail.run.place import Place, inner_call_id
from handrail.schema.problems import describe_kind
from handrail.tools import Tool, ToolResult

if TYPE_CHECKING:
    from handrail.run.attempt import Attempt
    from handrail.run.gate import Gate, Passage
    from handrail.run.run import Run


NO_TOOL: Tool[Any, Any] = Tool("unknown", "A placeholder for a tool that does not exist.")


class CallKind(msgspec.Struct, frozen=True):
    """The kind of a call, which determines which of the gate's steps it skips."""

    is_part: bool = False
    """Whether the call is a part of another call, such as an act of a handoff, or is auxiliary to one.

    Its tool is passed in, and the other call was already allowed and charged.
    """
    only_asks: bool = False
    """Whether the call is a part that only asks a question. If its answer is not recorded, a resumed run asks again."""
    undoes: bool = False
    """Whether the call undoes another call, finds out whether another call happened, or is inside such a call.

    Neither a cancellation nor the deadline of its run stops it, and it is never replayed.
    """
    is_auxiliary: bool = False
    """Whether the call is a compensation or a probe, which passes the gate alongside the call it belongs to.

    It has a transaction, events and, if the run has a journal, a record. No policy checks it, it uses no budget, and it
    has no number. Once it has succeeded, it is never compensated.
    """


CALL = CallKind()
PART = CallKind(is_part=True)
AUXILIARY = CallKind(is_part=True, undoes=True, is_auxiliary=True)
INSIDE_AUXILIARY = CallKind(undoes=True)


class Call(msgspec.Struct, frozen=True, eq=False):
    """One call as it was requested.

    The gate sets the tool in step 1, or when it replays the call, and may replace the arguments with a copy before step 2.
    Nothing else ever changes.
    """

    gate: Gate
    name: str
    arguments: Any
    id: str
    path: tuple[str, ...]
    """The names of the outer calls, outermost first, followed by the call's own name."""
    loop: AbstractEventLoop
    number: int
    """1-based index in its run, or among the verbs of the outer attempt; 0 for a call that is not counted."""
    tool: Tool[Any, Any] = NO_TOOL
    message_id: str | None = None
    parent: Attempt | None = None
    """The attempt at the call around this one; None if there is no call around it."""
    depth: int = 0
    kind: CallKind = CALL
    has_secret: bool = False
    """Whether the call is a part that receives a secret from an earlier part. Secrets are not recorded."""
    _place: Place | None = None

    @property
    def whole(self) -> Call:
        """The innermost call that is not a part: this call, or one around it. If there is none, the outermost part."""
        whole = self
        while whole.kind.is_part and whole.parent is not None:
            whole = whole.parent.call
        return whole

    @property
    def tool_name(self) -> str:
        """The call's name up to the first dot. For an act, which is named `tool.act`, this is the tool that it belongs to."""
        return self.name.partition(".")[0]

    @property
    def run(self) -> Run:
        """The run that this call belongs to."""
        return self.gate.run

    @property
    def place(self) -> Place:
        """This call's place in the outermost run."""
        place = self._place
        if place is None:
            parent = self.parent
            if parent is None or parent.run is not self.run:
                place = self.run.place.child(self.number)
            else:
                place = parent.place.child(self.number)
            force_setattr(self, "_place", place)
        return place

    @property
    def key(self) -> str:
        """The key that identifies the call. It stays the same however often the call, or an outer one, is attempted."""
        return f"{self.run.run_context.request_id}{self.place.key}"

    # For the gate, in steps 1 and 2.

    def resolve(self, tool: Tool[Any, Any]) -> None:
        """Set the tool that the call's name refers to."""
        force_setattr(self, "tool", tool)

    def restore(self, tool: Tool[Any, Any]) -> None:
        """Set the tool of a call that may be replayed from the record. Unlike `resolve`, this never refuses the call."""
        force_setattr(self, "tool", tool)

    def settle(self, arguments: Any) -> None:
        """Set the arguments to a copy that nothing else refers to."""
        force_setattr(self, "arguments", arguments)


class RefusedCall(Call, frozen=True, eq=False):
    """A call that is refused in step 1, before its tool is used, but has its events, record and result like any other."""

    reason: str = ""

    def resolve(self, tool: Tool[Any, Any]) -> None:
        self.restore(tool)
        raise Refused("invalid", self.reason)


def refuse_call(call: Call, reason: str) -> Call:
    """Return a call that takes the place of this one, and that the gate refuses for this reason."""
    fields: dict[str, Any] = {name: getattr(call, name) for name in call.__struct_fields__}
    fields["tool"] = NO_TOOL  # so that the gate calls `resolve`, which refuses the call
    return RefusedCall(**fields, reason=reason)


def check_name(name: object) -> None:
    """Raise `DefinitionError` if `invoke` was given something other than a tool's name, such as the tool itself."""
    if not isinstance(name, str):
        named = getattr(name, "name", "...")
        raise DefinitionError(
            f"invoke takes the name of a tool, not {describe_kind(name)}. Write invoke({named!r}, ...)."
        )


def new_call(
    gate: Gate,
    name: str,
    arguments: Any,
    id: str | None = None,
    parent: Attempt | None = None,
    message_id: str | None = None,
) -> Call:
    """Create a call to the tool named `name`, inside `parent` or else inside the call that the run is nested in, if any."""
    run = gate.run
    outer = run.outer
    if parent is None and outer is None:
        number = next(run.counter)
        loop = get_running_loop()
        tool = run.open_tools.get(name, NO_TOOL)
        id = id or run.call_prefix + str(number)  # cheaper than an f-string
        return Call(gate, name, arguments, id, (name,), loop, number, tool, message_id)
    if parent is None or parent is outer:
        assert outer is not None
        parent, number = outer, next(run.counter)
        id = id or f"{run.call_prefix}{number}"
    else:
        number = parent.next_number()
        id = id or inner_call_id(parent.call.id, parent.number, number)
    around = parent.call
    kind = INSIDE_AUXILIARY if around.kind.undoes else CALL
    path = (*around.path, name)
    return Call(
        gate,
        name,
        arguments,
        id,
        path,
        around.loop,
        number,
        NO_TOOL,
        message_id,
        parent,
        around.depth + 1,
        kind,
    )


def new_part(
    parent: Attempt, tool: Tool[Any, Any], *, only_asks: bool = False, has_secret: bool = False
) -> Call:
    """Create a call for one part of the call `parent`. Its tool is passed in, not looked up."""
    call, number = parent.call, parent.next_number()
    kind = CallKind(is_part=True, only_asks=only_asks, undoes=call.kind.undoes)
    return Call(
        call.gate,
        tool.name,
        call.arguments,
        inner_call_id(call.id, parent.number, number),
        (*call.path, tool.name),
        call.loop,
        number,
        tool,
        None,
        parent,
        call.depth,
        kind,
        has_secret,
    )


def new_auxiliary(attempt: Attempt, id: str, tool: Tool[Any, Any], place: Place) -> Call:
    """Create the call for a compensation or a probe, alongside the call of `attempt` and in the same outer transaction."""
    call = attempt.call
    return Call(
        call.gate,
        tool.name,
        None,
        id,
        (*call.path, tool.name),
        call.loop,
        0,
        tool,
        None,
        call.parent,
        call.depth,
        kind=AUXILIARY,
        _place=place,
    )


class ToolCall(msgspec.Struct, frozen=True):
    """One call that a model asked for."""

    name: str
    arguments: Any = "{}"
    id: str | None = None


class Turn(msgspec.Struct, frozen=True):
    """The outcome of a turn: a result for every call, and the error that ends the run, if any."""

    results: tuple[ToolResult[Any], ...]
    ending: BaseException | None


class OpenTurn:
    """The calls of one turn. Each gets exactly one result, no matter how `run()` ends."""

    __slots__ = ("_calls", "_gate")

    def __init__(
        self,
        gate: Gate,
        calls: Sequence[ToolCall | CallAsked],
        message_id: str | None = None,
        refused: Mapping[str, str] | None = None,
    ) -> None:
        """Open a turn. `refused` maps the ids of calls that may not run to the reasons that the model is told."""
        self._gate = gate
        self._calls: list[Passage] = []
        for asked in calls:
            call = new_call(gate, asked.name, asked.arguments, asked.id, None, message_id)
            if refused and call.id in refused:
                call = refuse_call(call, refused[call.id])
            self._calls.append(gate.open(call))

    def run(self) -> Coroutine[Any, Any, BaseException | None]:
        """Run the calls, until one of them ends the run. Returns the error that ends the run, or None if no call ended it.

        Raises `CancelledError` if this is cancelled, or if a call that runs by itself is. If calls that run together are
        cancelled, this returns a `CancelledError`, or the error of one of them that failed.
        """
        if len(self._calls) == 1:
            return _run_one(self._gate, self._calls[0])
        return self._run_groups()

    async def _run_groups(self) -> BaseException | None:
        for group in _groups(self._gate, self._calls):
            ending = await _run_group(self._gate, group)
            if ending is not None:
                return ending
        return None

    def is_recorded(self) -> bool:
        """Return whether the record of a resumed run has the results of all calls."""
        log = self._gate.run.log
        return all(log.is_over(each.call.place) for each in self._calls)

    def results(self) -> tuple[ToolResult[Any], ...]:
        """Return a result for every call, in the order in which they were asked for."""
        return tuple([_result_of(each) for each in self._calls])


async def run_turn(gate: Gate, calls: Sequence[ToolCall], message_id: str | None = None) -> Turn:
    """Run the calls of one turn, and return a result for each of them.

    A call that ends the run stops the other calls of the turn, which still get results. Raises `CancelledError` if this is
    cancelled, or if a call that runs by itself is.
    """
    turn = OpenTurn(gate, calls, message_id)
    ending = await turn.run()
    return Turn(turn.results(), ending)


def _groups(gate: Gate, calls: list[Passage]) -> Iterator[list[Passage]]:
    """Yield groups of consecutive calls that run together. A call that must run alone forms its own group."""
    group: list[Passage] = []
    for each in calls:
        tool = gate.run.tools.get(each.call.name)
        if tool is not None and tool.alone:
            if group:
                yield group
                group = []
            yield [each]
        else:
            group.append(each)
    if group:
        yield group


async def _run_one(gate: Gate, passage: Passage) -> BaseException | None:
    try:
        await gate.pass_through(passage.call, passage)
    except asyncio.CancelledError:
        raise
    except BaseException as error:
        return error
    return None


async def _run_group(gate: Gate, group: list[Passage]) -> BaseException | None:
    if len(group) == 1:
        return await _run_one(gate, group[0])
    loop = asyncio.get_running_loop()
    tasks = [loop.create_task(gate.pass_through(each.call, each)) for each in group]
    waiting = set(tasks)
    try:
        while waiting:
            done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_EXCEPTION)
            failed = [task for task in done if task.cancelled() or task.exception() is not None]
            if failed:
                await cancel_and_await(tuple(waiting))
                return next(
                    (task.exception() for task in failed if not task.cancelled()), asyncio.CancelledError()
                )
    except asyncio.CancelledError:
        await cancel_and_await(tuple(waiting))
        raise
    return None


def _result_of(each: Passage) -> ToolResult[Any]:
    if each.result is None:
        return ToolResult.error(f"{each.call.name} did not run: the turn was stopped first.")
    return each.result
