"""What the options of the command line mean."""

from __future__ import annotations

import importlib
import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from handrail.cli.ending import UsageError
from handrail.environment.ink import is_terminal

if TYPE_CHECKING:
    from handrail.deadline import Deadline
    from handrail.journal.sqlite import SqliteJournal
    from handrail.limits import Budget
    from handrail.resources.directory import DirectoryFilesystem
    from handrail.workers import Worker

Approve = Literal["ask", "all", "strict", "later"]
_MODES: dict[Approve, Any] = {"ask": None, "all": "approve_all", "strict": "strict", "later": None}
_UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}
_MOST_INPUT = 16 * 1024 * 1024
JOURNAL = Path(".handrail/runs.db")
"""Where runs are recorded if nobody says otherwise."""


def approvals(approve: Approve) -> Any:
    """The approval mode a run gets. Asked for, it asks whoever is there, and nobody is a no."""
    return _MODES[approve]


def model(named: str | None) -> Any:
    """A model by its name, provider:name, or one of the user's own, as module:name; None for none."""
    if named is None:
        return None
    module, _, name = named.partition(":")
    try:
        found: Any = getattr(importlib.import_module(module), name, None) if name.isidentifier() else None
    except ImportError:
        found = None
    if hasattr(found, "stream"):
        return found
    from handrail.models import model_named

    return model_named(named)


def deadline(text: str | None) -> Deadline | None:
    """`90`, `90s`, `5m`, `1h`: from now on. The time a person takes to answer does not count."""
    if text is None:
        return None
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smh]?)", text.strip())
    if found is None or not float(found[1]):
        raise UsageError(f"--deadline {text!r} is no time. Write seconds, or 90s, 5m, 1h.")
    from handrail.deadline import Deadline

    return Deadline.after(float(found[1]) * _UNITS[found[2]], pauses_for_people=True)


def budget(tokens: int | None, money: float | None, requests: int | None, calls: int | None) -> Budget | None:
    """The bounds there are, or None."""
    if tokens is None and money is None and requests is None and calls is None:
        return None
    from handrail.limits import Budget

    return Budget(tokens, money, requests, calls)


def filesystem(files: Path | None, folder: Path) -> DirectoryFilesystem | None:
    """The folder tools may change: the one named, else `files` beside the worker where there is one."""
    if files is not None and not files.is_dir():
        raise UsageError(f"--files {files}: no such folder. Make it first, or name another.")
    root = files if files is not None else folder / "files"
    if not root.is_dir():
        return None
    from handrail.resources.directory import DirectoryFilesystem

    return DirectoryFilesystem(root)


def journal(given: Path | None, off: bool) -> SqliteJournal | None:
    """Where runs are recorded: the file named, else $HANDRAIL_JOURNAL, else `.handrail/runs.db` here.

    Where nobody named one and none can be made, the run goes on without.
    """
    if off:
        return None
    from handrail.errors import JournalError
    from handrail.journal.sqlite import SqliteJournal

    named = given or os.environ.get("HANDRAIL_JOURNAL")
    path = Path(named) if named else JOURNAL
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not named:
            path.with_name(".gitignore").write_text("*\n")  # what happened here is nobody's source
        return SqliteJournal(path)
    except (OSError, JournalError) as error:
        if named:
            raise UsageError(f"--journal {path}: {error}") from None
        return None


def read_input(given: str | None) -> str:
    """The input of a run: as given, or all of standard input where that is `-` or not a terminal."""
    if given is not None and given != "-":
        return given
    if given is None and is_terminal(sys.stdin):
        raise UsageError('there is no input. Write it behind the worker, "like this", or pipe it in.')
    raw = sys.stdin.buffer.read(_MOST_INPUT + 1) if sys.stdin is not None else b""  # pyright: ignore[reportUnnecessaryComparison]  # there is none under some daemons
    if len(raw) > _MOST_INPUT:
        raise UsageError(f"the input is over {_MOST_INPUT // 2**20} MiB. Attach it as a file: -a FILE.")
    try:
        text = raw.decode()
    except UnicodeDecodeError:
        raise UsageError("the input is not UTF-8 text. Attach it as a file: -a FILE.") from None
    if not text.strip():
        raise UsageError('the input is empty. Write it behind the worker, "like this", or pipe it in.')
    return text


def find_worker(named: str) -> Worker:
    """The worker of `folder/main.md`, `folder/main` or `folder` (then its `main`, or its only one)."""
    from handrail.workers import WorkerRegistry

    path = Path(named)
    if path.is_file() and path.suffix == ".py":
        raise UsageError(
            f"{path} is a module, and a worker (NAME.md) is wanted. A module is served: `handrail serve {path}`; "
            "at a terminal, run its prompt from Python: Adapter(model, environment=Terminal())."
        )
    return WorkerRegistry.worker_at(path)
