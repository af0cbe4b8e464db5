"""The location of a journal: the default for each project, and the checks that only its owner can use its files."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shlex
import stat
from pathlib import Path

from handrail.errors import JournalError, JournalExposed

RESERVED = ".handrail"
"""The name of a folder that tools never see, at any depth below the folder that they may change."""

_OTHERS = stat.S_IRWXG | stat.S_IRWXO
_PARTS = ("", "-wal", "-shm", ".key")
"""The suffixes of a journal's files, which follow the name of the journal itself."""


def default_journal(project: Path) -> Path:
    """Return the journal of the project in this folder, below `$XDG_STATE_HOME/handrail`.

    The journal's folder is named after the project's real path: its last part, for readability, and a digest of the
    whole path, so that no two projects share a journal. Raises `JournalError` if there is no home folder.
    """
    real = os.path.realpath(project)
    readable = re.sub(r"[^A-Za-z0-9_.-]+", "_", os.path.basename(real)).lstrip(".")[:40] or "root"
    digest = hashlib.sha256(os.fsencode(real)).hexdigest()[:20]
    return state_folder() / f"{readable}-{digest}" / "runs.db"


def state_folder() -> Path:
    """Return the folder that holds the journals of all projects."""
    given = os.environ.get("XDG_STATE_HOME", "")
    if os.path.isabs(given):  # the XDG specification says to ignore relative paths
        return Path(given) / "handrail"
    try:
        return Path.home() / ".local" / "state" / "handrail"
    except RuntimeError:
        raise JournalError(
            "runs.db",
            "there is no home folder to keep it in",
            "Set XDG_STATE_HOME, or pass the path of a file.",
        ) from None


def make_private_folder(folder: Path) -> None:
    """Create the folder of a default journal for its owner alone. Raises `JournalExposed` if other users can reach it."""
    create_folders(folder)
    for each in (folder.parent, folder):
        check_private(str(folder), each)


def create_folders(folder: Path) -> None:
    """Create a folder and the missing folders above it, for their owner alone. Folders that exist are not changed.

    `Path.mkdir(parents=True, mode=...)` applies the mode only to the last folder.
    """
    try:
        folder.mkdir(exist_ok=True, mode=0o700)
    except FileNotFoundError:
        if folder.parent == folder:
            raise
        create_folders(folder.parent)
        folder.mkdir(exist_ok=True, mode=0o700)


def create_private_file(path: str) -> None:
    """Create a journal's file for its owner alone, if it does not exist. SQLite gives its other files the same mode."""
    with contextlib.suppress(FileExistsError):
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))


def check_private_files(path: str) -> None:
    """Raise `JournalExposed` if other users can read or change one of a journal's files."""
    for part in _PARTS:
        check_private(path, Path(path + part))


def check_private(journal: str, path: Path) -> None:
    """Raise `JournalExposed` if other users can read or change a file or folder of a journal."""
    try:
        mode = path.stat().st_mode
    except OSError:
        return  # it does not exist yet, or opening it will report the problem
    if mode & _OTHERS and (stat.S_ISDIR(mode) or stat.S_ISREG(mode)):
        wanted = "700" if stat.S_ISDIR(mode) else "600"
        raise JournalExposed(
            journal,
            f"other users can access {str(path)!r} (mode {stat.S_IMODE(mode):o})",
            f"Check that nobody has changed it, then run `chmod {wanted} {shlex.quote(str(path))}`.",
        )


def check_out_of_reach(journal: str, folder: str) -> None:
    """Raise `JournalExposed` if a journal is in a folder that tools may change, since they could forge answers.

    Symbolic links are resolved. A file with several hard links is refused, because one of them may be in the folder.
    A journal below `.handrail` in the folder is allowed: tools can't see that name.
    """
    if not folder or journal == ":memory:" or not journal:
        return
    root, real = os.path.realpath(folder), os.path.realpath(journal)
    advice = "Choose a file outside it, or leave it out to use the default, which tools can't reach."
    inside = os.path.relpath(real, root).split(os.sep)
    if inside[0] not in (os.pardir, RESERVED):
        raise JournalExposed(journal, f"it is in {root!r}, which tools may change", advice)
    for part in _PARTS:
        try:
            names = os.stat(real + part).st_nlink
        except OSError:
            continue
        if names > 1:
            raise JournalExposed(
                journal,
                f"{real + part!r} has {names} hard links, and tools may reach it through another one",
                f"Remove the others: `find / -samefile {shlex.quote(real + part)}` lists them.",
            )
