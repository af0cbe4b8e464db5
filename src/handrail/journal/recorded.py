"""Values as a journal's file has them: plain data, whatever they were."""

from __future__ import annotations

from typing import Any

import msgspec
import pydantic_core

from handrail.errors import DefinitionError, ToolValidationError
from handrail.question import Answer
from handrail.records import Check


def still_fits(answer: Answer, check: Check | None) -> bool:
    """An answer given where nobody could check it is checked when it is read."""
    if answer.seal:
        return False  # the secret in it was not kept: it has to be given again
    if answer.outcome != "answered" or check is None:
        return True
    try:
        check(answer.value)
    except ToolValidationError:
        return False
    return True


def plain(encoded: bytes) -> Answer:
    """An answer as whoever reads the file has it."""
    return msgspec.msgpack.decode(encoded, type=Answer)


class Kept(Answer, frozen=True, kw_only=True):
    """An answer on file: with the time at which it was taken, which is nothing that whoever answers says."""

    at: float | None = None


def encode(value: Any, what: str) -> bytes:
    """The value in bytes; `what` says whose it is, where it can't be."""
    try:
        return msgspec.msgpack.encode(value, enc_hook=pydantic_core.to_jsonable_python)
    except (TypeError, ValueError, OverflowError) as error:
        raise DefinitionError(
            f"{what} something that can't be recorded: {error}. Give plain data, a dataclass or a model."
        ) from error
