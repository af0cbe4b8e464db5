"""How a command ends: which exit code, and what is said where something went wrong."""

from __future__ import annotations

import os
from typing import NamedTuple

from handrail.cli.codes import DONE, FAILED, LIMIT, NOT_APPROVED, USAGE, WAITS
from handrail.environment.visible import visible
from handrail.errors import (
    DefinitionError,
    HandrailError,
    LimitError,
    PromptEvaluationError,
    PromptRenderError,
    RunParked,
)


class UsageError(Exception):
    """The command can't begin like this. The message says what to do."""


class Trouble(NamedTuple):
    """Something that ended a command early."""

    code: int
    kind: str
    message: str


def trouble(error: BaseException) -> Trouble:
    """What an exception means to whoever ran the command."""
    message = visible(str(error)) or type(error).__name__
    kind = type(error).__name__
    if isinstance(error, PromptEvaluationError):
        limited = error.phase in ("deadline", "budget")
        return Trouble(LIMIT if limited else FAILED, kind, message)
    if isinstance(error, RunParked):
        asked = ", ".join(visible(question.name) for question in error.questions)
        how = (
            f"Answer with `handrail runs answer {error.run_id}`, then `handrail runs resume {error.run_id}`."
        )
        return Trouble(WAITS, kind, f"It waits for an answer to {asked}. {how}")
    if isinstance(error, LimitError):
        return Trouble(LIMIT, kind, message)
    if isinstance(error, UsageError | DefinitionError | PromptRenderError):
        return Trouble(USAGE, kind, message)
    if isinstance(error, HandrailError):
        return Trouble(FAILED, kind, message)
    if isinstance(error, OSError):
        return Trouble(FAILED, kind, message)
    return Trouble(
        FAILED,
        kind,
        f"{kind}: {message}. This is a defect: run it again with HANDRAIL_DEBUG=1 in the environment to see where.",
    )


def stopped(stop_reason: str, denied: list[str]) -> tuple[int, str]:
    """The exit code of a run that came to an end, and what is said about it beside its answer."""
    said = {
        "length": "The answer was cut off: the model may not write more at once.",
        "refused": "The model refused to answer.",
        "incomplete": "The run ended, and what it was to do is not complete.",
    }
    if stop_reason in said:
        return FAILED, said[stop_reason]
    if denied:
        names = ", ".join(dict.fromkeys(denied))
        return NOT_APPROVED, f"Not approved: {visible(names)}. It did not run."
    return DONE, ""


def debugging() -> bool:
    """Does somebody want to see tracebacks?"""
    return bool(os.environ.get("HANDRAIL_DEBUG"))
