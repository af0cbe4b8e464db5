"""Answers with secrets in them: what is recorded of one, and how it is known again.

Whoever asked hears what was given. The record has a mask in the place of each secret, and a seal: a digest of
all of it, made with the journal's key. So the same answer again is known for it, and another one is not.
"""

from __future__ import annotations

import hmac
from typing import Any

import msgspec
import pydantic_core

from handrail.errors import AnswerRefused, ToolValidationError
from handrail.journal.digest import digest
from handrail.question import Answer, Question
from handrail.records import Mask
from handrail.schema import clear_json
from handrail.schema.secrets import MASK, is_masked


def sealed(question: Question, answer: Answer, mask: Mask | None, key: bytes) -> Answer:
    """An answer as it may be recorded and shown; as it is, where nothing in it is secret.

    Where nobody says what in it is, all of it is.
    """
    if not question.secret or answer.outcome != "answered":
        return msgspec.structs.replace(answer, seal="") if answer.seal else answer
    given = _plain(question, answer.value)
    shown = MASK if mask is None else mask(answer.value)
    seal = digest(key, "answer", question.id, question.digest, given) if is_masked(shown) else ""
    return msgspec.structs.replace(answer, value=shown if seal else answer.value, seal=seal)


def check_repeat(question: Question, answer: Answer, before: Answer | None, key: bytes) -> None:
    """An answer that may have secrets in it, where nobody hears it: harmless if it was given before, else refused."""
    if before is None:
        raise not_heard(question)
    if before.seal:
        seal = digest(key, "answer", question.id, question.digest, _plain(question, answer.value))
        same = hmac.compare_digest(seal, before.seal) and (answer.by, answer.outcome) == (
            before.by,
            before.outcome,
        )
    else:
        same = answer == before
    if not same:
        raise AnswerRefused(question.id, "it was answered already", "The first answer counts.")


def not_heard(question: Question) -> AnswerRefused:
    """Why an answer with a secret is not taken for somebody who is not there."""
    return AnswerRefused(
        question.id,
        "there can be a secret in it, which is not recorded, and whoever asked does not wait here to hear it",
        f"Answer where the run {question.run_id} lives: on the page of its server, or in a terminal, after "
        "`handrail runs resume`, which asks again.",
    )


def _plain(question: Question, value: object) -> Any:
    """What was given, secrets and all: it goes into the digest, which gives nothing away."""
    try:
        return pydantic_core.from_json(clear_json(value))
    except ToolValidationError:
        raise AnswerRefused(question.id, "it can't be written as JSON", "Give plain data.") from None
