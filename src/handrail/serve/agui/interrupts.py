"""Questions in AG-UI: interrupts for people, and pending calls for a client's own tools.

Clients know the calls that models make, but not the inner calls, which tools make. Anything that concerns an inner
call is therefore attached to the nearest enclosing call that a model made.

`FrontendTool` is a tool that a client provides. A run's model calls it, and the client executes it. Such a call
is a question to the client: it is recorded in the journal, can wait for days, survives a restart, and is
answered once, by a tool message in a later input of the client.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import msgspec
from ag_ui.core import Interrupt, RunFinishedEvent, RunFinishedInterruptOutcome, RunFinishedSuccessOutcome

from handrail.context import UserContext
from handrail.errors import DefinitionError
from handrail.journal.records import QuestionRecord
from handrail.question import Question
from handrail.run.place import Place
from handrail.schema import to_json
from handrail.schema.immutability import read_only
from handrail.schema.raw import RawSchema, check_foreign
from handrail.serve.agui.wire_events import Event, dump, plain_json
from handrail.tools import Tool, ToolResult
from handrail.tools.definition import deep_copy

FRONTEND_TOOL = "frontend_tool"
"""The name of the questions that are calls to a client's own tools."""


def question_json(question: Question) -> dict[str, Any]:
    """Return a question in the JSON form that the page reads, without its principal and decision keys.

    `rows` holds the payload as people see it.
    """
    shown: dict[str, Any] = plain_json(msgspec.to_builtins(question))
    shown["rows"] = list(msgspec.to_builtins(question.rows))
    shown["quorums"] = [
        {name: value for name, value in quorum.items() if name in ("role", "approvals") or value}
        for quorum in shown["quorums"]
    ]
    del shown["principal"], shown["decision_keys"]
    return shown


def closed_json(asked: QuestionRecord) -> dict[str, Any]:
    """Return a closed question in the JSON form that the page reads, with its outcome and its answer.

    The outcome of an approval that was answered is `approved` or `denied`, and its answer is null.
    """
    question, answer = asked.question, asked.answer
    assert answer is not None
    value: Any = answer.value if answer.outcome == "answered" else None
    outcome: str = answer.outcome
    if question.kind == "approval" and isinstance(value, dict):
        outcome = "approved" if cast("dict[str, Any]", value).get("approved") else "denied"
        value = None
    return {
        "question": question_json(question),
        "outcome": outcome,
        "by": answer.by,
        "answer": plain_json(value),
    }


def interrupt_id(question: Question) -> str:
    """Return the id that an answer refers to: the question's id and a prefix of its digest."""
    return f"{question.id}#{question.digest[:16]}"


def is_pending_call(question: Question) -> bool:
    """Return whether a question is a pending call to one of the client's own tools. A tool message answers it."""
    return question.kind == "input" and question.name == FRONTEND_TOOL


def interrupt_leg(
    thread_id: str, leg_id: str, questions: Sequence[Question], call_at: CallAt, usage: Any
) -> Event:
    """Return the event that ends a leg because everything in the run waits for an answer.

    If the run waits only for the client's own tools, the event reports success and lists the pending calls. For older
    clients it does not list them.
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
    """Return a question as an interrupt, attached to a call that the client knows, if there is one.

    With `older`, that is a call of the outermost run, because older clients don't see nested runs.
    """
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
    """A call that the client knows, to which questions and nested runs can be attached."""

    call_id: str
    run_id: str
    """The id of the run whose model made the call."""


CallAt = Callable[[Place], str | None]
"""A function that returns the id of the call that a model made at a place, or None if there is no such call."""


def place_of_question(question: Question) -> Place:
    """Return the place at which a question was asked."""
    return Place.from_id(question.id, question.run_id)


def holder(place: Place, root: str, call_at: CallAt) -> Holder | None:
    """Return the nearest call that a model made, at a place or around it, or None if there is no such call."""
    for each in (place, *place.parents):
        found = call_at(each) if each.kind == "call" else None
        if found is not None:
            return Holder(found, each.run.id(root))
    return None


def outermost(place: Place, root: str, call_at: CallAt) -> Holder | None:
    """Return the call around a place that the outermost run's model made, for clients that don't see nested runs.

    Returns None if no call contains the place, or if the client does not know the call.
    """
    call = place.outermost_call
    found = None if call is None else call_at(call)
    return None if found is None else Holder(found, root)


_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_OPEN: dict[str, Any] = {"type": "object", "properties": {}}


@dataclass(frozen=True)
class Outcome:
    """The result of a call to a client's own tool, as the client reports it."""

    content: str
    error: str | None = None


class FrontendTool(Tool[Any, Any]):
    """A tool that a client describes and executes. Its arguments are plain JSON."""

    def dump(self, params: Any) -> bytes:
        return to_json(params)


def frontend_tool(name: str, description: str, parameters: Any = None) -> FrontendTool:
    """Build the tool that a client describes. Raises `DefinitionError` if the tool can't be offered to a model."""
    if not _NAME.fullmatch(name):
        raise DefinitionError(
            f"the tool {name!r} can't be offered to a model. Use a name of 1 to 64 letters, digits, - and _."
        )
    schema = _OPEN if parameters is None or parameters == {} else parameters
    if not isinstance(schema, dict) or cast("dict[str, Any]", schema).get("type", "object") != "object":
        raise DefinitionError(
            f'the parameters of the tool {name!r} must be a JSON Schema with "type": "object".'
        )
    check_foreign(cast("object", schema), f"the tool {name!r}")

    async def ask(params: None, *, context: UserContext) -> ToolResult[Any]:
        asked = {"tool": name, "arguments": params}
        came = await context.wait_for(
            FRONTEND_TOOL, asked, Outcome, message=f"The client runs its own tool {name}.", title=name
        )
        if came.error is not None:
            return ToolResult.error(came.error if not came.content else f"{came.error}\n{came.content}")
        return ToolResult.ok(None, came.content)

    made = FrontendTool("frontend", "A tool of the client.", ask, effect="read")
    # Handrail's rules for names and descriptions do not apply to a client's tools.
    for field, value in (
        ("name", name),
        ("description", description.strip() or name),
        ("_schema", RawSchema(cast("dict[str, Any]", schema))),
        ("json_schema", read_only({**cast("dict[str, Any]", schema), "type": "object"})),
        ("copy_params", deep_copy),
    ):
        object.__setattr__(made, field, value)
    return made


def frontend_tools_of(offered: Mapping[str, str], added: Iterable[str]) -> list[FrontendTool]:
    """Rebuild the client's tools that a recorded run was started with, so that the run can be resumed."""
    found: list[FrontendTool] = []
    for name in added:
        description, schema = msgspec.json.decode(offered[name])
        found.append(frontend_tool(name, description, schema))
    return found
