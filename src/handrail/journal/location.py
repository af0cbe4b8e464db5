"""The location of a journal: the default for each project, and the checks that neither other users nor tools can access its files."""

from __future__ import annotations

import contextlib
import grp
import hashlib
import os
import pwd
import re
import shlex
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from handrail.errors import JournalError, JournalExposed

RESERVED = ".handrail"
"""The name of a folder that tools never see, at any depth below the folder that they may change."""

_PROJECT = "project"
"""The name of the file beside a default journal that holds the device and inode of the project's folder."""

_OTHERS = stat.S_IRWXG | stat.S_IRWXO
KEY_SUFFIX = ".key"
_PARTS_OF_SQLITE = ("-wal", "-shm", "-journal")
_PARTS = ("", *_PARTS_OF_SQLITE, KEY_SUFFIX)
"""The suffixes of a journal's files, which follow the name of the journal itself."""


class Exposure(NamedTuple):
    """How other users could access a file or folder, and what to do about it."""

    problem: str
    hint: str


def default_journal(project: Path) -> Path:
    """Return the path of the default journal of the project in this folder. It is below the state folder.

    The journal's folder is named after the project's real path: its last part, for readability, and a digest of the
    whole path, so that no two projects share a journal. Raises `JournalError` if there is no home folder.
    """
    real = os.path.realpath(project)
    readable = re.sub(r"[^A-Za-z0-9_.-]+", "_", os.path.basename(real)).lstrip(".")[:40] or "root"
    digest = hashlib.sha256(os.fsencode(real)).hexdigest()[:20]
    return state_folder() / f"{readable}-{digest}" / "runs.db"


def state_folder() -> Path:
    """Return the folder that holds the default journals of all projects. Raises `JournalError` if there is no home folder."""
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


def former_journals(project: Path) -> Sequence[Path]:
    """Return the default journals that this folder had under earlier paths, so that a message can name them.

    A moved folder keeps its device and inode. But a new folder can get the device and inode of a removed folder, so these
    journals are only opened if somebody names one. Raises `JournalError` if there is no home folder.
    """
    facts, own = os.stat(project), default_journal(project)
    wanted = f"{facts.st_dev} {facts.st_ino}"
    notes = sorted(state_folder().glob(f"*/{_PROJECT}"))
    found = [note.with_name(own.name) for note in notes if note.read_text() == wanted]
    return [journal for journal in found if journal != own and journal.is_file()]


def make_private_folder(folder: Path, project: Path) -> None:
    """Create the folder of a project's default journal, for its owner only, with a note of the project's device and inode.

    Raises `JournalExposed` if other users can access it or the folder above it.
    """
    create_folders(folder)
    for each in (folder.parent, folder):
        check_private(str(folder), each)
    facts, note = os.stat(project), folder / _PROJECT
    create_private_file(str(note))
    note.write_text(f"{facts.st_dev} {facts.st_ino}")


def create_folders(folder: Path) -> None:
    """Create a folder and the missing folders above it, for their owner only. Existing folders are not changed.

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
    """Create a file for its owner only, if it does not exist. SQLite gives the files beside a journal the same mode."""
    with contextlib.suppress(FileExistsError):
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))


def check_surroundings(path: str) -> None:
    """Raise `JournalExposed` if other users can replace a journal's files, or access the files that SQLite keeps beside it.

    Called before the journal is opened, because SQLite applies the files that it finds beside a database.
    """
    _refuse(path, _surroundings_exposure(path))


def check_private_files(path: str) -> None:
    """Raise `JournalExposed` if other users can read or change one of a journal's files."""
    _refuse(path, _files_exposure(path, _PARTS))


def check_private(journal: str, path: Path) -> None:
    """Raise `JournalExposed` if other users can read or change a file or folder of a journal."""
    _refuse(journal, _exposure(str(path)))


def check_secret(journal: str, path: Path) -> None:
    """Raise `JournalExposed` if a file with a secret is neither private to this user nor given to this user by root.

    A file that belongs to root may be readable by its group. That is how systemd, Kubernetes and administrators give a secret
    to a service.
    """
    _refuse(journal, _exposure(str(path), by_root=True))


def _refuse(journal: str, exposure: Exposure | None) -> None:
    if exposure is not None:
        raise JournalExposed(journal, *exposure)


def find_exposure(path: str) -> Exposure | None:
    """Return how other users could read, change or replace a database's files, or None if they can't.

    The files must belong to this user, and nobody else may access them. The folder must belong to this user or to root.
    The folder and the folders above it may let others write only if they are sticky, as `/tmp` is.
    """
    return _surroundings_exposure(path) or _files_exposure(path, _PARTS)


def _surroundings_exposure(path: str) -> Exposure | None:
    folders = {os.path.realpath(os.path.dirname(path)): None}
    for each in (path, path + KEY_SUFFIX):
        if os.path.islink(each):  # the folders of the link and of its target matter
            folders[os.path.dirname(os.path.realpath(each))] = None
    for each in folders:
        found = _folder_exposure(each)
        if found is not None:
            return found
    return _files_exposure(path, _PARTS_OF_SQLITE)


def _files_exposure(path: str, parts: Sequence[str]) -> Exposure | None:
    paths = (path, os.path.realpath(path)) if os.path.islink(path) else (path,)
    for each in paths:
        for part in parts:
            found = _exposure(each + part)
            if found is not None:
                return found
    return None


def _exposure(path: str, *, by_root: bool = False) -> Exposure | None:
    """Return how other users can access a private file or folder; None if they can't, or if there is no such file or folder.

    With `by_root`, the file may also belong to root, and then its group may read it.
    """
    try:
        facts = os.lstat(path)
        if stat.S_ISLNK(facts.st_mode):
            if facts.st_uid not in (os.geteuid(), 0):
                return _of_another_user(path, facts.st_uid)
            facts = os.stat(path)
    except OSError:
        return None  # it does not exist yet, or opening it will report the problem
    mode = facts.st_mode
    if not (stat.S_ISDIR(mode) or stat.S_ISREG(mode)):
        return None
    is_of_root = by_root and facts.st_uid == 0
    if facts.st_uid != os.geteuid() and not is_of_root:
        return _of_another_user(path, facts.st_uid)
    if mode & (_OTHERS & ~stat.S_IRGRP if is_of_root else _OTHERS):
        # a file of root is of use to a service only if the service's group can read it
        wanted = "700" if stat.S_ISDIR(mode) else "640" if facts.st_uid != os.geteuid() else "600"
        return Exposure(
            f"other users can access {path!r} (mode {stat.S_IMODE(mode):o})",
            f"Check that nobody has changed it, then run `chmod {wanted} {shlex.quote(path)}`.",
        )
    return None


def _folder_exposure(folder: str) -> Exposure | None:
    """Return how other users could replace a file in a folder, or the folder itself; None if they can't."""
    for each in (Path(folder), *Path(folder).parents):
        try:
            facts = os.stat(each)
        except OSError:
            continue
        mode = facts.st_mode
        if str(each) == folder and facts.st_uid not in (os.geteuid(), 0):
            return _of_another_user(folder, facts.st_uid)
        is_shared = mode & stat.S_IWOTH or (mode & stat.S_IWGRP and not _is_own_group(facts.st_gid))
        if is_shared and not mode & stat.S_ISVTX:
            return Exposure(
                f"other users can write to the folder {str(each)!r} (mode {stat.S_IMODE(mode):o})",
                f"Use a file in another folder, or run `chmod go-w {shlex.quote(str(each))}`.",
            )
    return None


def _is_own_group(gid: int) -> bool:
    """Return whether a group is this user's own: it has the user's name, and lists no other member."""
    try:
        name, group = pwd.getpwuid(os.geteuid()).pw_name, grp.getgrgid(gid)
    except KeyError:
        return False
    return group.gr_name == name and set(group.gr_mem) <= {name}


def _of_another_user(path: str, uid: int) -> Exposure:
    try:
        name = pwd.getpwuid(uid).pw_name
    except KeyError:
        name = str(uid)
    return Exposure(
        f"{path!r} belongs to another user ({name})",
        f"Use another file. Or check that nobody has changed it, then run `chown {os.geteuid()} {shlex.quote(path)}`.",
    )


def check_out_of_reach(journal: str, folder: str) -> None:
    """Raise `JournalExposed` if a journal is in a folder that tools may change, since they could forge answers.

    Symbolic links are resolved. A file with several hard links is refused, because one of them may be in the folder.
    A journal below `.handrail` in the folder is allowed, because tools can't see `.handrail`.
    """
    if not folder or journal == ":memory:" or not journal:
        return
    root, real = os.path.realpath(folder), os.path.realpath(journal)
    advice = "Choose a file outside it, or give the tools a different folder."
    if _is_below(real, root):
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


def has_journal(place: str, journal: str) -> bool:
    """Return whether a place is one of a journal's files, or a folder that contains one. Symbolic links are resolved.

    Files below `.handrail` in the folder don't count, because Handrail neither copies nor shows `.handrail`.
    """
    if journal == ":memory:" or not journal:
        return False
    root, real = os.path.realpath(place), os.path.realpath(journal)
    return any(_is_below(real + part, root) for part in _PARTS)


def _is_below(path: str, root: str) -> bool:
    return os.path.relpath(path, root).split(os.sep)[0] not in (os.pardir, RESERVED)
