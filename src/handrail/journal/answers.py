"""The checks that an answer must pass before it counts, and the form in which it is recorded.

The asker gets the answer as it was given. If the answer contains secrets, the record has masks in their place, and a seal: a
digest of the whole value, made with the journal's key. The seal shows whether a later answer has the same value.
"""

from __future__ import annotations

import hmac
from datetime import datetime
from typing import TYPE_CHECKING, Any, cast, get_args

import msgspec
import pydantic_core

from handrail.errors import (
    AnswerRefused,
    ToolValidationError,
)
from handrail.journal.digest import keyed_digest
from handrail.journal.protocol import Check, Mask
from handrail.question import Answer, AnswerOutcome, Question
from handrail.schema import clear_json
from handrail.schema.comparison import Rules
from handrail.schema.problems import Problem
from handrail.schema.secrets import MASK, is_masked

if TYPE_CHECKING:
    pass


def has_expired(question: Question, now: datetime) -> bool:
    """Return whether the question's time is over at `now`."""
    return question.expires_at is not None and now >= question.expires_at


def unanswered(question: Question, outcome: AnswerOutcome, reason: str = "") -> Answer:
    """Return how a question ends that nobody has answered."""
    return Answer(
        question_id=question.id,
        digest=question.digest,
        by=question.principal,
        outcome=outcome,
        reason=reason,
    )


def check_answer(question: Question, answer: Answer) -> None:
    """Raise `AnswerRefused` unless an answer is valid. Whether it is in time is decided where it is recorded.

    It must carry this question's digest, and have a known outcome. If that is `answered`, its value must match the
    schema. `check_sender` decides who may give it.
    """
    check_sender(question, answer)
    check_outcome(question, answer)
    wrong = (
        Rules(question.schema).misfits(answer.value, secret=question.secret)
        if answer.outcome == "answered"
        else ()
    )
    if wrong:
        raise AnswerRefused(
            question.id,
            f"it does not match the schema: {'; '.join(map(str, wrong))}",
            "Answer with a value that matches the schema.",
            problems=[Problem(each.where, each.what) for each in wrong],
        )


def check_sender(question: Question, answer: Answer) -> None:
    """Raise `AnswerRefused` if an answer is for a different question, or from a person who was not asked.

    If quorums decide the question, the votes in an answer with a value are checked instead of the person.
    """
    check_digest(question, answer)
    if question.quorums and answer.outcome == "answered":
        _check_votes(question, answer)
    elif answer.by != question.principal:
        raise AnswerRefused(
            question.id, f"{answer.by!r} may not answer it", f"Only {question.principal!r} may."
        )


def check_digest(question: Question, answer: Answer) -> None:
    """Raise `AnswerRefused` if an answer is for a different question, or for a different version of it."""
    if not hmac.compare_digest(_bytes(answer.digest), _bytes(question.digest)):
        raise AnswerRefused(
            question.id,
            "its digest does not match this question's",
            "Read the question again, and answer that version of it.",
        )


def _check_votes(question: Question, answer: Answer) -> None:
    """Raise `AnswerRefused` unless the votes in an answer decide the question in the same way as the answer."""
    value: Any = answer.value
    approved = isinstance(value, dict) and cast("dict[str, Any]", value).get("approved") is True
    decided = question.decided_by(answer.votes)
    if decided is None or decided != approved:
        needed = " and ".join(map(str, question.quorums))
        raise AnswerRefused(
            question.id,
            f"{answer.by!r} may not answer it alone or against the votes",
            f"It needs the votes of {needed}, not counting {question.principal!r}. They find the question in their inbox on the page.",
        )


def check_outcome(question: Question, answer: Answer) -> None:
    """Raise `AnswerRefused` if the answer's outcome is not a valid one."""
    if answer.outcome not in get_args(AnswerOutcome):
        raise AnswerRefused(
            question.id,
            f"{answer.outcome!r} is not a valid outcome",
            f"Use one of {', '.join(map(repr, get_args(AnswerOutcome)))}.",
        )


def check_value(question: Question, answer: Answer, check: Check | None) -> None:
    """Raise `AnswerRefused` if the answer has a value, and the asker's check rejects it."""
    if answer.outcome != "answered" or check is None:
        return
    try:
        check(answer.value)
    except ToolValidationError as error:
        raise AnswerRefused(
            question.id,
            f"it does not match the schema: {str(error).removesuffix('.')}",
            "Answer with a value that matches the schema.",
            problems=error.problems or (Problem("", str(error)),),
        ) from None


def still_fits(answer: Answer, check: Check | None) -> bool:
    """Return whether a recorded answer can be used: it has no secret, and the asker's check, if there is one, accepts its value.

    The check runs again because the answer may have been given in a process that could not check it.
    """
    if answer.seal:
        return False  # the secret was not recorded, so it has to be given again
    if answer.outcome != "answered" or check is None:
        return True
    try:
        check(answer.value)
    except ToolValidationError:
        return False
    return True


def seal(question: Question, answer: Answer, mask: Mask | None, key: bytes) -> Answer:
    """Return the answer in the form that may be recorded and shown: with its secrets masked, and with a seal.

    An answer without secrets keeps its value and gets no seal. If the question allows secrets and there is no `mask`, the
    whole value is treated as secret. Raises `AnswerRefused` if the question allows secrets and the value can't be written
    as JSON.
    """
    if not question.secret or answer.outcome != "answered":
        return msgspec.structs.replace(answer, seal="") if answer.seal else answer
    given = _plain(question, answer.value)
    shown = MASK if mask is None else mask(answer.value)
    sealed = keyed_digest(key, "answer", question.id, question.digest, given) if is_masked(shown) else ""
    return msgspec.structs.replace(answer, value=shown if sealed else answer.value, seal=sealed)


def check_repeat(question: Question, answer: Answer, before: Answer | None, key: bytes) -> None:
    """Raise `AnswerRefused` unless an answer that may contain a secret repeats the recorded answer.

    This is for a process in which no asker waits for the answer.
    """
    if before is None:
        raise secret_refused(question)
    if before.seal:
        repeated = keyed_digest(key, "answer", question.id, question.digest, _plain(question, answer.value))
        same = hmac.compare_digest(repeated, before.seal) and (answer.by, answer.outcome) == (
            before.by,
            before.outcome,
        )
    else:
        same = answer == before
    if not same:
        raise already_answered(question, before)


def secret_refused(question: Question) -> AnswerRefused:
    """Create the error for an answer that may contain a secret and that no asker in this process waits for."""
    return AnswerRefused(
        question.id,
        "it may contain a secret, secrets are not recorded, and the asker is not waiting in this process",
        f"Answer in the process of the run {question.run_id}: on its server's page, or in a terminal after "
        "`handrail runs resume`, which asks again.",
    )


def already_answered(question: Question, recorded: Answer) -> AnswerRefused:
    """Create the error for an answer to a question that has already ended differently."""
    if recorded.outcome == "timed out":
        return AnswerRefused(
            question.id,
            "the question has expired",
            "It ended without an answer, and its run continues without one.",
        )
    return AnswerRefused(question.id, "it has already been answered", "The first answer counts.")


def _plain(question: Question, value: object) -> Any:
    """Return the value as plain data, including its secrets. It is used only for a digest, which does not reveal them.

    Raises `AnswerRefused` if the value can't be written as JSON.
    """
    try:
        return pydantic_core.from_json(clear_json(value))
    except ToolValidationError:
        raise AnswerRefused(question.id, "it can't be written as JSON", "Pass plain data.") from None


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")  # compare_digest accepts any bytes, but only ASCII text
