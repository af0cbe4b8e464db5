"""The end of a command: its exit code, its error message, and the streams its output goes to."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import shlex
import sys
import traceback
from collections.abc import Generator
from pathlib import Path
from typing import Any, NamedTuple

from handrail.cli.json_log import JsonStream
from handrail.cli.streams import unguarded
from handrail.errors import (
    DefinitionError,
    HandrailError,
    LimitError,
    PromptEvaluationError,
    PromptRenderError,
    RunParked,
)
from handrail.journal.location import default_journal
from handrail.journal.postgres.address import is_url, parse_url
from handrail.text.raised_errors import place_of
from handrail.text.rendering import escape
from handrail.text.terminal import Style, Styler, is_terminal, wants_colour

DONE, FAILED, USAGE, NOT_APPROVED, LIMIT, PARKED, CANCELLED, TERMINATED = 0, 1, 2, 3, 4, 5, 130, 143

EXIT_CODES = (
    (DONE, "done"),
    (FAILED, "the run failed, or its answer was cut off, refused or incomplete"),
    (USAGE, "the command line or a worker's file is wrong; nothing ran"),
    (NOT_APPROVED, "the run ended, but something it wanted to do was not approved"),
    (LIMIT, "the run reached its deadline or budget"),
    (PARKED, "the run is parked until it gets an answer (handrail runs answer)"),
    (CANCELLED, "cancelled by Ctrl-C; unfinished calls were undone (143: by SIGTERM)"),
)

_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
CANCEL_NOTE = "Cancelled. Unfinished calls were undone."


class UsageError(Exception):
    """Raised if a command can't be carried out with the given arguments. The message is for the user."""


class Failure(NamedTuple):
    """The reason that a command failed or ended early, with its exit code."""

    code: int
    kind: str
    message: str

    @classmethod
    def of(cls, error: BaseException, journal: str = "") -> Failure:
        """Convert an exception to an exit code and a message.

        `journal` is the path or the URL of the run's journal, or "" if the run has none.
        """
        message = escape(str(error)) or type(error).__name__
        kind = type(error).__name__
        if isinstance(error, RunParked):
            return cls(PARKED, kind, _parked_message(error, journal))
        if isinstance(error, PromptEvaluationError):
            return cls(LIMIT if error.phase in ("deadline", "budget") else FAILED, kind, message)
        if isinstance(error, LimitError):
            return cls(LIMIT, kind, message)
        if isinstance(error, UsageError | DefinitionError | PromptRenderError):
            return cls(USAGE, kind, message)
        if isinstance(error, HandrailError | OSError):
            return cls(FAILED, kind, message)
        place = place_of(error)
        whose = f"It was raised in {escape(place)}." if place else "This is a bug in Handrail."
        advice = "Set HANDRAIL_DEBUG=1 and run it again to see the traceback."
        return cls(FAILED, kind, f"{kind}: {message.rstrip('.')}. {whose} {advice}")

    def as_json(self) -> dict[str, str]:
        return {"kind": self.kind, "message": self.message}


def _parked_message(error: RunParked, journal: str) -> str:
    names = ", ".join(escape(question.name) for question in error.questions)
    answer, resume = (runs_command(verb, error.run_id, journal) for verb in ("answer", "resume"))
    if not names:
        return f"The run was parked, and it has no open question. Continue it with `{resume}`."
    how = f"Answer with `{answer}`, then `{resume}`."
    if any(question.secret for question in error.questions):
        how = f"The answer may be a secret, which is not recorded. `{resume}` asks for it at a terminal."
    return f"The run waits for an answer to {names}. {how}"


def classify_stop(stop_reason: str, denied: list[str]) -> tuple[int, str]:
    """Return the exit code of a finished run, and a note to print with its answer, or ""."""
    notes = {
        "length": "The answer was cut off at the model's length limit.",
        "refused": "The model refused to answer.",
        "incomplete": "The run ended before its task was complete.",
        "stopped": "The run was stopped before its task was complete.",
        "wrapped up": "The run was told to finish, so its task may not be complete.",
    }
    if stop_reason in notes:
        return FAILED, notes[stop_reason]
    if denied:
        return NOT_APPROVED, f"Not approved, so it did not run: {escape(', '.join(dict.fromkeys(denied)))}."
    return DONE, ""


def journal_path(given: str | None) -> Path:
    """Return the path of the journal to use: the given file, else $HANDRAIL_JOURNAL, else the current folder's default.

    For a journal in a database, this is also the current folder's default.
    """
    named = _journal_name(given)
    return Path(named) if named and not is_url(named) else default_journal(Path.cwd())


def journal_url(given: str | None) -> str | None:
    """Return the URL of the journal to use, or None if it is in a file.

    Raises `UsageError` for a URL of another kind. As a path, it would lead to a folder such as `http:` being created.
    """
    named = _journal_name(given)
    if is_url(named):
        return named
    if found := _SCHEME.match(named):
        raise UsageError(
            f"a journal is a file or a PostgreSQL database, not {found[0]}... Name a file, or write "
            "postgresql://USER@HOST/DATABASE."
        )
    return None


def _journal_name(given: str | None) -> str:
    return given or os.environ.get("HANDRAIL_JOURNAL", "")


def runs_command(verb: str, run_id: str, journal: str) -> str:
    """Return the `handrail runs` command to type for a run. It names the journal, unless that is "" or the default."""
    if is_url(journal):
        default = _journal_name(None)
        is_default = is_url(default) and parse_url(default).shown == journal
    else:
        is_default = not journal or Path(journal) == journal_path(None)
    return f"handrail runs {verb} {run_id}{'' if is_default else f' --journal {shlex.quote(journal)}'}"


# --- printing ---


def fail(failure: Exception | Failure, *, as_json: bool = False, verbose: bool = False) -> int:
    """Report a failed command, as text or, with `as_json`, as JSON, and return its exit code.

    With `verbose`, or if `HANDRAIL_DEBUG` is set, the traceback of an exception is printed too.
    """
    found = failure if isinstance(failure, Failure) else Failure.of(failure)
    if as_json:
        print_json({"ok": False, "exit_code": found.code, "run_id": None, "error": found.as_json()})
    else:
        print_error(found.message, "yellow" if found.code == CANCELLED else "red")
    if isinstance(failure, Exception):
        print_traceback(failure, verbose)
    return found.code


def print_error(message: str, colour: Style = "red") -> None:
    """Print a message to standard error, with its first line in colour if the stream takes colour."""
    stream = unguarded(sys.stderr)
    if isinstance(stream, JsonStream):
        stream.report(logging.ERROR if colour == "red" else logging.WARNING, message)
        return
    style = Styler(wants_colour(sys.stderr))
    head, _, rest = escape(message).partition("\n")
    stream.write(f"{style(f'handrail: {head}', colour)}\n{rest}{chr(10) if rest else ''}")
    stream.flush()


def print_line(line: str) -> None:
    """Print a line to standard output at once, even if that is a pipe."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def print_json(data: dict[str, Any]) -> None:
    print_line(json.dumps(data))


def print_traceback(error: BaseException, verbose: bool) -> None:
    if verbose or is_debugging():
        sys.stderr.write(escape("".join(traceback.format_exception(error))))


def is_debugging() -> bool:
    return bool(os.environ.get("HANDRAIL_DEBUG"))


@contextlib.contextmanager
def divert_stdout(even_on_a_terminal: bool = False) -> Generator[None]:
    """Send what tools and their child processes print inside this block to standard error.

    Standard output is reserved for the answer. Unless `even_on_a_terminal` is set, nothing is diverted on a terminal,
    because both streams appear there.
    """
    out = sys.stdout
    if is_terminal(out) and not even_on_a_terminal:
        yield
        return
    out.flush()
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.redirect_stdout(sys.stderr))
        # A stream without a descriptor raises here. Child processes do not inherit it, so nothing more is diverted.
        with contextlib.suppress(OSError, ValueError):
            number, kept = out.fileno(), os.dup(out.fileno())
            stack.callback(os.close, kept)
            os.dup2(sys.stderr.fileno(), number)
            stack.callback(os.dup2, kept, number)
        yield
