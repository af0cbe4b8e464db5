"""Asking somebody, on behalf of a call: `wait_for`, approvals and permissions, as questions."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from functools import cache
from typing import TYPE_CHECKING, Any

import msgspec
import pydantic_core

from handrail.context import Approval
from handrail.context.verbs import WaitFor
from handrail.deadline import is_span
from handrail.dispatch.deciding import Decided, decide
from handrail.dispatch.parking import waiting_for_a_person
from handrail.dispatch.places import places_of, spelled
from handrail.dispatch.secrets import has_secret, mark_given
from handrail.errors import (
    Declined,
    DefinitionError,
    QuestionCancelled,
    QuestionTimedOut,
    ToolError,
    ToolValidationError,
)
from handrail.events import ApprovalDecided, ApprovalRequested, DecidedBy, QuestionAnswered, QuestionAsked
from handrail.guard.approval import APPROVAL_SCHEMA
from handrail.guard.coverage import NEVER_REMEMBERED, Asks, Coverage, coverage_of
from handrail.guard.memory import Recall
from handrail.journal import digest
from handrail.operation import Operation
from handrail.protocols import ApprovalRequest
from handrail.question import Answer, Lasting, Question, QuestionKind
from handrail.schema import Schema, schema_of, to_json

if TYPE_CHECKING:
    from handrail.dispatch.call import LiveCall


def wait_for(call: LiveCall) -> WaitFor:
    """The verb `wait_for` of one call."""

    def verb(kind: str, payload: object, schema: Any, *, timeout: float | None = None) -> Operation[Any]:
        call.home.check()
        if timeout is not None and not is_span(timeout):
            raise DefinitionError(
                f"wait_for({kind!r}): the timeout is {timeout!r}. Give a positive number of seconds, or None to wait."
            )
        number = call.next_verb(f"wait_for {kind}")
        return Operation(
            lambda: _wait_for(call, number, kind, payload, schema, timeout),
            f"wait_for({kind!r})",
            call.home,
        )

    return verb


async def _wait_for(
    call: LiveCall, number: int, kind: str, payload: object, schema: Any, timeout: float | None
) -> Any:
    await note_verb(call, number, f"wait_for {kind}")
    return await ask_value(
        call, number, "input", kind, f"{call.name} asks: {kind}", payload, _schema(schema), timeout
    )


async def ask_value(
    call: LiveCall,
    number: int,
    of: QuestionKind,
    kind: str,
    message: str,
    payload: object,
    wanted: Schema[Any],
    timeout: float | None = None,
) -> Any:
    """Ask whoever is there for a value of this kind, and take nothing that does not fit."""
    question = question_of(
        call, call.question_id(number), of, kind, message, payload, wanted.json_schema, timeout
    )
    if wanted.secret:
        question = msgspec.structs.replace(question, secret=True)
    call.frame.session.record(QuestionAsked(question.id, call.id, kind, call.path, call.run_context))
    outcome, by = "cancelled", ""
    try:
        with waiting_for_a_person(call):
            answer = await put(call, question, wanted)
        outcome, by = answer.outcome, answer.by
    finally:
        if not call.frame.parked or outcome != "cancelled":  # else it stays open
            call.frame.session.record(QuestionAnswered(question.id, call.id, outcome, by, call.run_context))
    value = _value_of(answer, kind)
    if has_secret(wanted, value):
        await mark_given(call)
    return wanted.parse_given(value)


async def put(call: LiveCall, question: Question, wanted: Schema[Any]) -> Answer:
    """Ask whoever is there. Where nobody is who answers now, the run may be parked meanwhile."""
    frame = call.frame
    mask = wanted.hide if wanted.secret else None
    return await frame.steps.ask(question, frame.environment, wanted.parse_given, mask)


async def note_verb(call: LiveCall, number: int, verb: str) -> None:
    log = call.frame.log
    if log is not None:
        await log.note_verb(call.attempt_place.child(number), verb)


def _value_of(answer: Answer, kind: str) -> Any:
    if answer.outcome == "declined":
        raise Declined(kind, answer.reason)
    if answer.outcome == "timed out":
        raise QuestionTimedOut(kind)
    if answer.outcome == "cancelled":
        plain = QuestionCancelled(kind)
        raise plain if answer.reason in ("", str(plain)) else QuestionCancelled(kind, answer.reason)
    return answer.value


def approval_verb(call: LiveCall, asks: Asks, operation: str, name: str, reason: str) -> Operation[Approval]:
    """The verbs by which a handler asks for an approval for itself."""
    call.home.check()
    number = call.next_verb(f"approval {name}")

    async def ask() -> Approval:
        await note_verb(call, number, f"approval {name}")
        approval, _ = await ask_approval(call, asks, name, reason, question_id=call.question_id(number))
        return approval

    return Operation(ask, operation, call.home)


async def ask_approval(
    call: LiveCall, asks: Asks, name: str, reason: str, diff: str = "", question_id: str | None = None
) -> tuple[Approval, DecidedBy]:
    """Ask the broker at the root, with everything the answer is to be bound to, the diff too."""
    frame = call.frame
    session = frame.session
    params = _params_that_came(call)
    arguments = pydantic_core.from_json(call.tool.dump(params))  # secrets masked
    cover = _covering(call, asks, name, params, arguments, diff)
    keys = cover(session.id)
    kept = call.tool.capabilities.isdisjoint(NEVER_REMEMBERED)
    scopes = {scope.words: scope.key for scope in keys.scopes} if kept else {}
    payload = {"tool": call.name, "arguments": arguments, "reason": reason}
    if kept:
        payload["scopes"] = tuple(scopes)  # without them, whoever asks offers no memory
    if diff:
        payload["diff"] = diff
    lasting = Lasting(
        tool=call.name,
        words=keys.words,
        exact=keys.exact,
        any_diff=keys.any_diff,
        scopes=scopes,
        run_context=call.run_context,
    )
    question = question_of(
        call,
        question_id or call.next_approval_id(),
        "approval",
        name,
        reason,
        payload,
        APPROVAL_SCHEMA,
        frame.options.approval_seconds,
        lasting if kept else None,
    )
    recall = Recall(session, question, cover, frame.clock)
    asked = ApprovalRequest(
        question=question,
        tool=call.name,
        arguments=arguments,
        diff=diff,
        scopes=tuple(scopes),
        recall=recall if kept else None,
    )
    session.record(ApprovalRequested(question.id, call.id, call.name, call.path, reason, call.run_context))
    decided = Decided(Approval(False, "", "", "cancelled"), "asked")
    try:
        with waiting_for_a_person(call):
            decided = await decide(call, asked, recall)
    finally:
        if not frame.parked or decided.approval.outcome != "cancelled":  # else it stays open
            session.record(
                ApprovalDecided(
                    question.id,
                    call.id,
                    call.name,
                    decided.approval,
                    call.run_context,
                    decided.how,
                    decided.remembered,
                )
            )
    return decided.approval, decided.how


def _covering(
    call: LiveCall, asks: Asks, name: str, params: Any, shown: Any, diff: str
) -> Callable[[str], Coverage]:
    """The keys of a request, by the id of the session that they are for."""
    frame = call.frame
    places = places_of(call, params, bool(diff)) if asks == "call" else None
    spellings = spelled(call, params)

    @cache
    def cover(session_id: str) -> Coverage:
        return coverage_of(
            call.tool,
            asks,
            name,
            whose=(session_id, frame.session.principal),
            arguments=call.arguments,
            shown=shown,
            diff=diff,
            paths=places,
            spelled=spellings,
            secret=None if frame.journal is None else frame.journal.key,
        )

    return cover


def _params_that_came(call: LiveCall) -> Any:
    """Parsed anew once the handler has had them: it may have changed its own."""
    if not call.let_through or call.arguments is None:
        return call.params
    return call.tool.parse(call.arguments)


def question_of(
    call: LiveCall,
    question_id: str,
    kind: QuestionKind,
    name: str,
    message: str,
    payload: object,
    schema: dict[str, Any],
    timeout: float | None,
    lasting: Lasting | None = None,
) -> Question:
    frame = call.frame
    now = frame.clock.now()
    try:
        shown = to_json(payload)
    except ToolValidationError as error:
        raise ToolError(f"what {call.name} wants to ask can't be shown: {error}") from None
    principal = frame.session.principal
    covered = (
        call.tool.name,
        call.tool.json_schema,
        _text(call.arguments),
        call.id,
        question_id,
        principal,
    )
    return Question(
        id=question_id,
        kind=kind,
        name=name,
        message=message,
        payload=pydantic_core.from_json(shown),
        schema=schema,
        digest=digest(frame.key, kind, name, message, shown.decode(), schema, *covered),
        principal=principal,
        asked_by=call.path,
        call_id=call.id,
        asked_at=now,
        expires_at=None if timeout is None else now + timedelta(seconds=timeout),
        run_id=frame.run_context.request_id,
        lasting=lasting,
    )


def _text(arguments: Any) -> str:
    """The arguments themselves, secrets and all: they go into the digest, which gives nothing away."""
    return arguments.decode() if isinstance(arguments, bytes) else str(arguments)


def _schema(wanted: Any) -> Schema[Any]:
    try:
        return schema_of(wanted)
    except TypeError:  # an adapter, or a type that can't be hashed
        return Schema(wanted)
