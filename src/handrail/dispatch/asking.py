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
    from handrail.dispatch.attempt import Attempt


def wait_for(attempt: Attempt) -> WaitFor:
    """The verb `wait_for` of one call."""

    def verb(kind: str, payload: object, schema: Any, *, timeout: float | None = None) -> Operation[Any]:
        attempt.home.check()
        if timeout is not None and not is_span(timeout):
            raise DefinitionError(
                f"wait_for({kind!r}): the timeout is {timeout!r}. Give a positive number of seconds, or None to wait."
            )
        number = attempt.next_verb(f"wait_for {kind}")
        return Operation(
            lambda: _wait_for(attempt, number, kind, payload, schema, timeout),
            f"wait_for({kind!r})",
            attempt.home,
        )

    return verb


async def _wait_for(
    attempt: Attempt, number: int, kind: str, payload: object, schema: Any, timeout: float | None
) -> Any:
    await note_verb(attempt, number, f"wait_for {kind}")
    return await ask_value(
        attempt, number, "input", kind, f"{attempt.name} asks: {kind}", payload, _schema(schema), timeout
    )


async def ask_value(
    attempt: Attempt,
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
        attempt, attempt.question_id(number), of, kind, message, payload, wanted.json_schema, timeout
    )
    if wanted.secret:
        question = msgspec.structs.replace(question, secret=True)
    attempt.frame.session.record(
        QuestionAsked(question.id, attempt.id, kind, attempt.path, attempt.run_context)
    )
    outcome, by = "cancelled", ""
    try:
        with waiting_for_a_person(attempt):
            answer = await put(attempt, question, wanted)
        outcome, by = answer.outcome, answer.by
    finally:
        if not attempt.frame.parked or outcome != "cancelled":  # else it stays open
            attempt.frame.session.record(
                QuestionAnswered(question.id, attempt.id, outcome, by, attempt.run_context)
            )
    value = _value_of(answer, kind)
    if has_secret(wanted, value):
        await mark_given(attempt)
    return wanted.parse_given(value)


async def put(attempt: Attempt, question: Question, wanted: Schema[Any]) -> Answer:
    """Ask whoever is there. Where nobody is who answers now, the run may be parked meanwhile."""
    frame = attempt.frame
    mask = wanted.hide if wanted.secret else None
    return await frame.steps.ask(question, frame.environment, wanted.parse_given, mask)


async def note_verb(attempt: Attempt, number: int, verb: str) -> None:
    log = attempt.frame.log
    if log is not None:
        await log.note_verb(attempt.place.child(number), verb)


def _value_of(answer: Answer, kind: str) -> Any:
    if answer.outcome == "declined":
        raise Declined(kind, answer.reason)
    if answer.outcome == "timed out":
        raise QuestionTimedOut(kind)
    if answer.outcome == "cancelled":
        plain = QuestionCancelled(kind)
        raise plain if answer.reason in ("", str(plain)) else QuestionCancelled(kind, answer.reason)
    return answer.value


def approval_verb(
    attempt: Attempt, asks: Asks, operation: str, name: str, reason: str
) -> Operation[Approval]:
    """The verbs by which a handler asks for an approval for itself."""
    attempt.home.check()
    number = attempt.next_verb(f"approval {name}")

    async def ask() -> Approval:
        await note_verb(attempt, number, f"approval {name}")
        approval, _ = await ask_approval(attempt, asks, name, reason, question_id=attempt.question_id(number))
        return approval

    return Operation(ask, operation, attempt.home)


async def ask_approval(
    attempt: Attempt, asks: Asks, name: str, reason: str, diff: str = "", question_id: str | None = None
) -> tuple[Approval, DecidedBy]:
    """Ask the broker at the root, with everything the answer is to be bound to, the diff too."""
    frame = attempt.frame
    session = frame.session
    params = _params_that_came(attempt)
    arguments = pydantic_core.from_json(attempt.tool.dump(params))  # secrets masked
    cover = _covering(attempt, asks, name, params, arguments, diff)
    keys = cover(session.id)
    kept = attempt.tool.capabilities.isdisjoint(NEVER_REMEMBERED)
    scopes = {scope.words: scope.key for scope in keys.scopes} if kept else {}
    payload = {"tool": attempt.name, "arguments": arguments, "reason": reason}
    if kept:
        payload["scopes"] = tuple(scopes)  # without them, whoever asks offers no memory
    if diff:
        payload["diff"] = diff
    lasting = Lasting(
        tool=attempt.name,
        words=keys.words,
        exact=keys.exact,
        any_diff=keys.any_diff,
        scopes=scopes,
        run_context=attempt.run_context,
    )
    question = question_of(
        attempt,
        question_id or attempt.next_approval_id(),
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
        tool=attempt.name,
        arguments=arguments,
        diff=diff,
        scopes=tuple(scopes),
        recall=recall if kept else None,
    )
    session.record(
        ApprovalRequested(question.id, attempt.id, attempt.name, attempt.path, reason, attempt.run_context)
    )
    decided = Decided(Approval(False, "", "", "cancelled"), "asked")
    try:
        with waiting_for_a_person(attempt):
            decided = await decide(attempt, asked, recall)
    finally:
        if not frame.parked or decided.approval.outcome != "cancelled":  # else it stays open
            session.record(
                ApprovalDecided(
                    question.id,
                    attempt.id,
                    attempt.name,
                    decided.approval,
                    attempt.run_context,
                    decided.how,
                    decided.remembered,
                )
            )
    return decided.approval, decided.how


def _covering(
    attempt: Attempt, asks: Asks, name: str, params: Any, shown: Any, diff: str
) -> Callable[[str], Coverage]:
    """The keys of a request, by the id of the session that they are for."""
    frame = attempt.frame
    places = places_of(attempt, params, bool(diff)) if asks == "call" else None
    spellings = spelled(attempt, params)

    @cache
    def cover(session_id: str) -> Coverage:
        return coverage_of(
            attempt.tool,
            asks,
            name,
            whose=(session_id, frame.session.principal),
            arguments=attempt.arguments,
            shown=shown,
            diff=diff,
            paths=places,
            spelled=spellings,
            secret=None if frame.journal is None else frame.journal.key,
        )

    return cover


def _params_that_came(attempt: Attempt) -> Any:
    """Parsed anew once the handler has had them: it may have changed its own."""
    if not attempt.let_through or attempt.arguments is None:
        return attempt.params
    return attempt.tool.parse(attempt.arguments)


def question_of(
    attempt: Attempt,
    question_id: str,
    kind: QuestionKind,
    name: str,
    message: str,
    payload: object,
    schema: dict[str, Any],
    timeout: float | None,
    lasting: Lasting | None = None,
) -> Question:
    frame = attempt.frame
    now = frame.clock.now()
    try:
        shown = to_json(payload)
    except ToolValidationError as error:
        raise ToolError(f"what {attempt.name} wants to ask can't be shown: {error}") from None
    principal = frame.session.principal
    covered = (
        attempt.tool.name,
        attempt.tool.json_schema,
        _text(attempt.arguments),
        attempt.id,
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
        asked_by=attempt.path,
        call_id=attempt.id,
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
