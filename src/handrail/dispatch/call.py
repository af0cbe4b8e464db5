"""`Call`: what was asked for, and where in its run. It does not change once its arguments are parsed."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec.structs import force_setattr

from handrail.place import Place, inner_call_id
from handrail.tools import Tool

if TYPE_CHECKING:
    from handrail.dispatch.attempt import Attempt
    from handrail.dispatch.frame import Frame
    from handrail.dispatch.gate import Gate

NO_TOOL: Tool[Any, Any] = Tool("unknown", "Stands for a tool that was asked for and does not exist.")


class CallKind(msgspec.Struct, frozen=True):
    """What the gate leaves out for a call."""

    is_part: bool = False
    """Part of the call around it: its tool is given, and that call was allowed and charged."""
    only_asks: bool = False
    """Part of a call that only asks somebody: asked again if its answer was not kept."""
    undoes: bool = False
    """Undoes a call or finds out whether it happened, or is inside a call that does. Neither a cancelled run nor a
    deadline stops it, and it is never replayed.
    """
    is_auxiliary: bool = False
    """A compensation or a probe itself, which passes the gate beside the call it is about. It has a transaction,
    events and a record. It needs no approval, costs nothing of the budget, is not numbered and is never undone.
    """


CALL = CallKind()
PART = CallKind(is_part=True)
AUXILIARY = CallKind(is_part=True, undoes=True, is_auxiliary=True)
INSIDE_AUXILIARY = CallKind(undoes=True)


class Call(msgspec.Struct, frozen=True, eq=False):
    """One call as it was asked for.

    The gate looks its tool up in step 1 and settles its arguments in step 2. Nothing else ever changes it.
    """

    gate: Gate
    name: str
    arguments: Any
    id: str
    path: tuple[str, ...]
    """The names of the calls around it, outermost first, and its own."""
    loop: asyncio.AbstractEventLoop
    number: int
    """1-based index in its run, or among the verbs of the attempt around it; 0 if it is not counted."""
    parent: Attempt | None = None
    """The attempt it was made in; None for a call of the outermost run."""
    depth: int = 0
    message_id: str | None = None
    kind: CallKind = CALL
    has_secret: bool = False
    """Part of a call that was given a secret before: the secret is not recorded, so nobody can give it again."""
    tool: Tool[Any, Any] = NO_TOOL
    _place: Place | None = None

    @property
    def frame(self) -> Frame:
        """The run it is a call of."""
        return self.gate.frame

    @property
    def place(self) -> Place:
        """Where this call is in the outermost run."""
        place = self._place
        if place is None:
            parent = self.parent
            if parent is None or parent.frame is not self.frame:
                place = self.frame.place.child(self.number)
            else:
                place = parent.place.child(self.number)
            force_setattr(self, "_place", place)
        return place

    @property
    def key(self) -> str:
        """Identifies the call: the same however often it, or what is around it, is tried."""
        return f"{self.frame.run_context.request_id}{self.place.key}"

    # For the gate, in steps 1 and 2.

    def resolve(self, tool: Tool[Any, Any]) -> None:
        """Settle which tool the name stands for."""
        force_setattr(self, "tool", tool)

    def settle(self, arguments: Any) -> None:
        """Settle the arguments, as a value that nobody else holds."""
        force_setattr(self, "arguments", arguments)


def new_call(
    gate: Gate,
    name: str,
    arguments: Any,
    id: str | None = None,
    parent: Attempt | None = None,
    message_id: str | None = None,
) -> Call:
    """A call of the tool called `name`, inside `parent` or the call this whole run is nested in."""
    frame = gate.frame
    outer = frame.outer
    if parent is None and outer is None:
        number = next(frame.counter)
        loop = asyncio.get_running_loop()
        return Call(
            gate,
            name,
            arguments,
            id or f"{frame.call_prefix}{number}",
            (name,),
            loop,
            number,
            None,
            0,
            message_id,
        )
    if parent is None or parent is outer:
        assert outer is not None
        parent, number = outer, next(frame.counter)
        id = id or f"{frame.call_prefix}{number}"
    else:
        number = parent.next_number()
        id = id or inner_call_id(parent.call.id, parent.number, number)
    around = parent.call
    kind = INSIDE_AUXILIARY if around.kind.undoes else CALL
    path = (*around.path, name)
    return Call(
        gate, name, arguments, id, path, around.loop, number, parent, around.depth + 1, message_id, kind
    )


def new_part(
    parent: Attempt, tool: Tool[Any, Any], *, only_asks: bool = False, has_secret: bool = False
) -> Call:
    """A part of a call, as a call of its own whose tool is given."""
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
        parent,
        call.depth,
        None,
        kind,
        has_secret,
        tool,
    )


def new_auxiliary(attempt: Attempt, id: str, tool: Tool[Any, Any], place: Place) -> Call:
    """A compensation or a probe, beside the call of `attempt` and inside the same transaction as that."""
    call = attempt.call
    return Call(
        call.gate,
        tool.name,
        None,
        id,
        (*call.path, tool.name),
        call.loop,
        0,
        call.parent,
        call.depth,
        kind=AUXILIARY,
        tool=tool,
        _place=place,
    )
