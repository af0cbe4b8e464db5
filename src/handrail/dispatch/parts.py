"""Parts of a call, such as the acts of a handoff. Each passes the gate as an inner call whose tool is given.

So an act is isolated, commits into the call it is part of, and has its events and its place in the path.
It needs no approval and counts as no further call: the one around it was approved and counted.
"""

from __future__ import annotations

from typing import Any

import msgspec

from handrail.context import ToolContext
from handrail.dispatch.attempt import Attempt
from handrail.dispatch.call import PART, new_call, new_part
from handrail.dispatch.gate import Gate
from handrail.dispatch.questions import ask_value, note_verb
from handrail.errors import NotSupported
from handrail.schema import Schema
from handrail.tools import Tool, ToolResult


class Acting:
    """Runs the acts of one call, in order."""

    __slots__ = ("_attempt", "_ids")

    def __init__(self, context: ToolContext) -> None:
        self._attempt = _attempt_of(context)
        self._ids: dict[str, str] = {}

    async def run(
        self, act: Tool[Any, Any], *, only_asks: bool = False, has_secret: bool = False
    ) -> ToolResult[Any]:
        """Run the next act. Its id is derived from the call's id and the order of acts."""
        attempt = self._attempt
        part = new_part(attempt, act, only_asks=only_asks, has_secret=has_secret)
        self._ids[part.id] = act.name
        return await attempt.gate.pass_through(part)

    def done(self) -> None:
        """All acts are over: from now on the call as a whole is responsible for their effects."""
        transaction = self._attempt.open_transaction
        if transaction.settled is not None:
            transaction.settled = [
                each for each in transaction.settled if self._ids.get(each.call_id) != each.what
            ]


async def run_alone(gate: Gate, act: Tool[Any, Any], arguments: bytes) -> ToolResult[Any]:
    """Run one act by itself, as a run's only call."""
    call = new_call(gate, act.name, arguments)
    return await gate.pass_through(msgspec.structs.replace(call, kind=PART, tool=act))


async def hand_over(
    context: ToolContext, name: str, message: str, public: object, answer: Schema[Any]
) -> Any:
    """Put a handoff to a person or an agent, and return their answer."""
    attempt = _attempt_of(context)
    attempt.home.check()
    number = attempt.next_verb(f"handoff {name}")
    await note_verb(attempt, number, f"handoff {name}")
    return await ask_value(attempt, number, "handoff", name, message, public, answer)


def _attempt_of(context: ToolContext) -> Attempt:
    attempt: object = context._source  # pyright: ignore[reportPrivateUsage]  # the gate's own
    if not isinstance(attempt, Attempt):
        raise NotSupported(
            "a handoff", "Call it through a gate; with a context made for a test, call its acts one by one."
        )
    return attempt
