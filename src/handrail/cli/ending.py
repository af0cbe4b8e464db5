"""How a command ends: which exit code, and what is said where something went wrong."""

from __future__ import annotations

import json
import os
import shlex
import sys
import traceback
from pathlib import Path
from typing import Any, NamedTuple

from handrail.cli.codes import DONE, FAILED, LIMIT, NOT_APPROVED, USAGE, WAITS
from handrail.environment.text import Styler, escape, wants_colour
from handrail.errors import (
    DefinitionError,
    HandrailError,
    LimitError,
    PromptEvaluationError,
    PromptRenderError,
    RunParked,
)

JOURNAL = Path(".handrail/runs.db")
"""Where runs are recorded if nobody says otherwise."""


class UsageError(Exception):
    """The command can't begin like this. The message says what to do."""


class Trouble(NamedTuple):
    """Something that ended a command early."""

    code: int
    kind: str
    message: str

    def as_json(self) -> dict[str, str]:
        return {"kind": self.kind, "message": self.message}


def trouble(error: BaseException, journal: str = "") -> Trouble:
    """What an exception means to whoever ran the command; `journal` is where its run is recorded."""
    message = escape(str(error)) or type(error).__name__
    kind = type(error).__name__
    if isinstance(error, PromptEvaluationError):
        limited = error.phase in ("deadline", "budget")
        return Trouble(LIMIT if limited else FAILED, kind, message)
    if isinstance(error, RunParked):
        asked = ", ".join(escape(question.name) for question in error.questions)
        answer, resume = (runs_command(verb, error.run_id, journal) for verb in ("answer", "resume"))
        how = f"Answer with `{answer}`, then `{resume}`."
        if any(question.secret for question in error.questions):
            how = f"It may be a secret, which is not recorded: `{resume}` at a terminal asks for it there."
        return Trouble(WAITS, kind, f"It waits for an answer to {asked}. {how}")
    if isinstance(error, LimitError):
        return Trouble(LIMIT, kind, message)
    if isinstance(error, UsageError | DefinitionError | PromptRenderError):
        return Trouble(USAGE, kind, message)
    if isinstance(error, HandrailError | OSError):
        return Trouble(FAILED, kind, message)
    return Trouble(
        FAILED,
        kind,
        f"{kind}: {message}. This is a defect: run it again with HANDRAIL_DEBUG=1 in the environment to see where.",
    )


def journal_path(given: Path | None) -> Path:
    """Which journal is meant: the file named, else $HANDRAIL_JOURNAL, else `.handrail/runs.db` here."""
    return given or Path(os.environ.get("HANDRAIL_JOURNAL") or JOURNAL)


def runs_command(verb: str, run_id: str, journal: str) -> str:
    """The next command, as it has to be typed for a run in this journal; "" for the one that is meant anyway."""
    usual = not journal or Path(journal) == journal_path(None)
    return f"handrail runs {verb} {run_id}{'' if usual else f' --journal {shlex.quote(journal)}'}"


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
        return NOT_APPROVED, f"Not approved: {escape(names)}. It did not run."
    return DONE, ""


# Saying it.


def refused(error: Exception, *, as_json: bool = False, verbose: bool = False) -> int:
    """Say why a command could not be done, to a person or to a program; the exit code."""
    found = trouble(error)
    if as_json:
        print_json({"ok": False, "exit_code": found.code, "run_id": None, "error": found.as_json()})
    else:
        complain(found.message)
    show_traceback(error, verbose)
    return found.code


def complain(message: str, colour: Any = "red") -> None:
    """Say on standard error what went wrong."""
    ink = Styler(wants_colour(sys.stderr))
    head, _, rest = escape(message).partition("\n")
    sys.stderr.write(f"{ink(f'handrail: {head}', colour)}\n{rest}{chr(10) if rest else ''}")
    sys.stderr.flush()


def print_json(said: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(said) + "\n")
    sys.stdout.flush()


def show_traceback(error: BaseException, verbose: bool) -> None:
    if verbose or debugging():
        sys.stderr.write(escape("".join(traceback.format_exception(error))))


def debugging() -> bool:
    """Does somebody want to see tracebacks?"""
    return bool(os.environ.get("HANDRAIL_DEBUG"))
