"""`Call`: the tool and the arguments that were requested, and the call's place in its run.

Once its arguments are parsed, a call no longer changes.
"""

from __future__ import annotations

from asyncio import AbstractEventLoop, get_running_loop
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec.structs import force_setattr

from handrail.errors import DefinitionError
from handrail.run.failures import Refused
from handrail.run.place import Place, inner_call_id
from handrail.schema.problems import describe_kind
from handrail.tools import Tool

if TYPE_CHECKING:
    from handrail.run.attempt import Attempt
    from handrail.run.gate import Gate
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
