"""What the options of the command line mean."""

from __future__ import annotations

import importlib
import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from handrail.cli.ending import UsageError, complain, journal_path
from handrail.environment.text import is_terminal

if TYPE_CHECKING:
    from handrail.deadline import Deadline
    from handrail.journal.sqlite import SqliteJournal
    from handrail.limits import Budget
    from handrail.resources.directory import DirectoryFilesystem
    from handrail.workers import Worker

_MODES = {"ask": None, "all": "approve_all", "strict": "strict"}
_UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}
_MOST_INPUT = 16 * 1024 * 1024


def approvals(word: str, *, can_wait: bool = False) -> Any:
    """The approval mode a run gets. `ask` asks whoever is there, and nobody is a no.

    Where a run can wait, `later` is known too: who is asked then is the environment's to say.
    """
    modes = {**_MODES, "later": None} if can_wait else _MODES
    if word not in modes:
        raise UsageError(f"--approve {word!r} is none of {', '.join(modes)}. Give one of these.")
    return modes[word]


def look_here() -> None:
    """Let modules be found in the current folder, as `python -m` does."""
    here = os.getcwd()
    if here not in sys.path:
        sys.path.insert(0, here)


def model(named: str | None) -> Any:
    """A model by its name, provider:name, or one of the user's own, as module:name; None for none."""
    if named is None:
        return None
    from handrail.models import model_named

    return _own_model(named) or model_named(named)


def _own_model(named: str) -> Any:
    """What the user's own module has under this name, if it is a model; None where there is no such module."""
    from handrail.models import PROVIDERS

    module, _, name = named.partition(":")
    if module in PROVIDERS or not all(part.isidentifier() for part in (*module.split("."), name)):
        return None
    look_here()
    try:
        found: Any = getattr(importlib.import_module(module), name, None)
    except Exception as error:  # whatever the user's own module does when it is imported
        if isinstance(error, ModuleNotFoundError) and f"{module}.".startswith(f"{error.name}."):
            return None
        raise UsageError(
            f"--model {named}: the module {module!r} can't be loaded: {type(error).__name__}: {error}. "
            "Correct it there."
        ) from error
    return found if hasattr(found, "stream") else None


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


def opened_journal(given: Path | None) -> SqliteJournal:
    """The journal that is meant, made where there is none, or `UsageError` with why it can't be."""
    from handrail.errors import JournalError
    from handrail.journal.sqlite import SqliteJournal

    path = journal_path(given)
    mend = "Name another: --journal FILE."
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not is_named(given):
            path.with_name(".gitignore").write_text("*\n")  # what happened here is nobody's source
        return SqliteJournal(path)
    except JournalError as error:
        raise UsageError(f"{error} {mend}") from None
    except OSError as error:
        raise UsageError(f"journal {str(path)!r}: it can't be made: {error.strerror}. {mend}") from None


def is_named(journal: Path | None) -> bool:
    """Did somebody say where runs are recorded?"""
    return journal is not None or bool(os.environ.get("HANDRAIL_JOURNAL"))


def journal(given: Path | None, off: bool) -> SqliteJournal | None:
    """Where runs are recorded. Where nobody named a place and none can be made, that is said, and it goes on."""
    if off and given is not None:
        raise UsageError("--journal says where to record, --no-journal not to. Give one of them.")
    if off:
        return None
    try:
        return opened_journal(given)
    except UsageError as error:
        if is_named(given):
            raise
        complain(f"nothing is recorded. {error}", "yellow")
        return None


def read_input(given: str | None) -> str:
    """The input of a run: as given, or all of standard input where that is `-` or not a terminal."""
    if given is not None and given != "-":
        return given
    if given is None and is_terminal(sys.stdin):
        raise UsageError('there is no input. Write it behind the worker, "like this", or pipe it in.')
    raw = sys.stdin.buffer.read(_MOST_INPUT + 1)
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
            "at a terminal, run its prompt from Python: Adapter(model, environment=TerminalEnvironment())."
        )
    return WorkerRegistry.worker_at(path)
