"""Questions in AG-UI: interrupts for people, and pending calls for a client's own tools.

Clients know the calls that models make. They do not know the calls inside a call (inner calls, the acts of a
handoff), so whatever concerns those is attached to the nearest call around them that a model made.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec
from ag_ui.core import Interrupt, RunFinishedEvent, RunFinishedInterruptOutcome, RunFinishedSuccessOutcome

from handrail.place import Place
from handrail.question import Question
from handrail.serve.agui.wire_events import Event, dump, plain_json

FRONTEND_TOOL = "frontend_tool"
"""The name of a question that a tool of the client answers."""


def question_json(question: Question) -> dict[str, Any]:
    """A question as the page takes it."""
    shown: dict[str, Any] = plain_json(msgspec.to_builtins(question))
    del shown["principal"], shown["lasting"]
    return shown


def interrupt_id(question: Question) -> str:
    """The id that an answer names: the question's, and the start of its digest."""
    return f"{question.id}#{question.digest[:16]}"


def is_pending_call(question: Question) -> bool:
    """Whether a tool of the client answers it, by a tool message."""
    return question.kind == "input" and question.name == FRONTEND_TOOL


def interrupt_leg(
    thread_id: str, leg_id: str, questions: Sequence[Question], call_at: CallAt, usage: Any
) -> Event:
    """The event that ends a leg in which everything waits.

    If only tools of the client are waited for, that is not an interrupt: their calls are pending.
    """
    asked = [question for question in questions if not is_pending_call(question)]
    pending = [question.call_id for question in questions if is_pending_call(question)]
    if asked:
        outcome = RunFinishedInterruptOutcome(interrupts=[interrupt(each, call_at) for each in asked])
        older = RunFinishedInterruptOutcome(interrupts=[interrupt(each, call_at, True) for each in asked])
    else:
        outcome = RunFinishedSuccessOutcome(pending_tool_call_ids=pending)
        older = RunFinishedSuccessOutcome()
    finished = RunFinishedEvent(thread_id=thread_id, run_id=leg_id, outcome=outcome, usage=usage)
    before = RunFinishedEvent(thread_id=thread_id, run_id=leg_id, outcome=older, usage=usage)
    return Event(dump(finished), False, dump(before))


def interrupt(question: Question, call_at: CallAt, older: bool = False) -> Interrupt:
    """A question as an interrupt, attached to a call that the client knows."""
    place = place_of_question(question)
    found = (outermost if older else holder)(place, question.run_id, call_at)
    nested = found is not None and found.run_id != question.run_id
    return Interrupt(
        id=interrupt_id(question),
        reason="tool_call" if question.kind == "approval" else "input_required",
        message=question.message,
        tool_call_id=None if found is None else found.call_id,
        response_schema=question.schema,
        expires_at=None if question.expires_at is None else question.expires_at.isoformat(),
        subagent_run_id=found.run_id if found is not None and nested else None,
        metadata={"handrail": question_json(question)},
    )


# --- the calls around a place ---------------------------------------------------------------------------


class Holder(NamedTuple):
    """A call that the client knows, to attach something to."""

    call_id: str
    run_id: str
    """The run whose model made the call."""


CallAt = Callable[[Place], str | None]
"""The id of the call that a model made at a place, or None."""


def place_of_question(question: Question) -> Place:
    """The place of a question in its run."""
    return Place.from_id(question.id, question.run_id)


def holder(place: Place, root: str, call_at: CallAt) -> Holder | None:
    """The nearest call that a model made, at or around a place."""
    for each in (place, *place.parents):
        found = call_at(each) if each.kind == "call" else None
        if found is not None:
            return Holder(found, each.run.id(root))
    return None


def outermost(place: Place, root: str, call_at: CallAt) -> Holder | None:
    """The call of the outermost run around a place, for clients that see no nested runs."""
    call = place.outermost_call
    found = None if call is None else call_at(call)
    return None if found is None else Holder(found, root)
