"""Questions as AG-UI has them: interrupts for people, and calls left pending for a client's own tools."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
from ag_ui.core import Interrupt, RunFinishedEvent, RunFinishedInterruptOutcome, RunFinishedSuccessOutcome

from handrail.question import Question
from handrail.serve.agui.places import CallAt, holder, outermost, place_of_question
from handrail.serve.agui.wire_events import Event, plain_json

FRONTEND_TOOL = "frontend_tool"
"""What a question is called that a tool of the client's own answers."""


def question_json(question: Question) -> dict[str, Any]:
    """A question as our own page takes it."""
    shown: dict[str, Any] = plain_json(msgspec.to_builtins(question))
    del shown["principal"], shown["lasting"]
    return shown


def interrupt_id(question: Question) -> str:
    """What an answer names: the question, and what it was about when it was seen."""
    return f"{question.id}#{question.digest[:16]}"


def is_pending_call(question: Question) -> bool:
    """Does a tool of the client's own answer it, by a tool message?"""
    return question.kind == "input" and question.name == FRONTEND_TOOL


def pending_calls(questions: Iterable[Question]) -> list[str]:
    """The calls that the client is to answer itself."""
    return [question.call_id for question in questions if is_pending_call(question)]


def rest(thread_id: str, leg_id: str, questions: Sequence[Question], call_at: CallAt, usage: Any) -> Event:
    """The end of a leg in which everything waits.

    Where only tools of the client's own are waited for, that is no interrupt: the calls are pending.
    """
    asked = [question for question in questions if not is_pending_call(question)]
    pending = pending_calls(questions)
    if asked:
        outcome = RunFinishedInterruptOutcome(interrupts=[interrupt(each, call_at) for each in asked])
        older = RunFinishedInterruptOutcome(interrupts=[interrupt(each, call_at, True) for each in asked])
    else:
        outcome = RunFinishedSuccessOutcome(pending_tool_call_ids=pending)
        older = RunFinishedSuccessOutcome()
    finished = RunFinishedEvent(thread_id=thread_id, run_id=leg_id, outcome=outcome, usage=usage)
    before = RunFinishedEvent(thread_id=thread_id, run_id=leg_id, outcome=older, usage=usage)
    return Event(
        finished.model_dump(mode="json", by_alias=True), False, before.model_dump(mode="json", by_alias=True)
    )


def interrupt(question: Question, call_at: CallAt, older: bool = False) -> Interrupt:
    """A question, under the call that a client knows it belongs to."""
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
