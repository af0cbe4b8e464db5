"""Backups of a journal, with its key and its users, taken while other processes use it.

A backup is a folder. It gets its name when it is complete and on the disk, so no half of one is ever taken for a whole.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sqlite3
import subprocess
import tempfile
from collections.abc import Generator
from pathlib import Path

from handrail.errors import JournalError
from handrail.journal.location import KEY_SUFFIX, create_folders
from handrail.journal.postgres.address import is_url, parse_url

_DUMP, _FILE = "journal.dump", "runs.db"
_PEOPLE = ".people.db"


def back_up(journal: str, folder: Path) -> None:
    """Copy a journal to a new folder, as it is at one moment.

    Of a SQLite journal, the key and the users beside it are copied too. A PostgreSQL journal is copied by `pg_dump`, without the key.
    Raises `JournalError` if the folder exists or can't be written, and then leaves nothing behind.
    """
    with _reported(str(folder)), _completed(folder) as made:
        if is_url(journal):
            words = [f"--schema={parse_url(journal).schema}", "--format=custom", f"--file={made / _DUMP}"]
            _run_client("pg_dump", journal, words)
        else:
            _copy_files(Path(journal), made / _FILE)
        for each in (*made.iterdir(), made):
            _sync(each)


def restore(folder: Path, journal: str) -> None:
    """Create a journal from a backup. Raises `JournalError` if there is one already, or if the backup can't be read or written out."""
    name = _DUMP if is_url(journal) else _FILE
    if not (folder / name).is_file():
        hint = "Name a folder that `handrail journal backup` made, and a journal of the same kind."
        raise JournalError(str(folder), f"it has no {name!r}", hint)
    with _reported(journal):
        if is_url(journal):
            words = [
                "--single-transaction",
                "--exit-on-error",
                "--no-owner",
                "--no-privileges",
                str(folder / _DUMP),
            ]
            return _run_client("pg_restore", journal, words)
        path = Path(journal)
        for each in _targets(folder, path):
            if os.path.lexists(each):
                hint = "Restore to another file, or move this one away."
                raise JournalError(
                    journal, "it exists already" if each == path else f"{each.name} lies beside it", hint
                )
        create_folders(path.parent)
        with tempfile.TemporaryDirectory(prefix=f".{path.name}-", dir=path.parent) as made:
            copied = Path(made) / path.name
            _copy_files(folder / _FILE, copied)
            for each in sorted(
                Path(made).iterdir(), key=lambda each: each == copied
            ):  # the journal comes last
                _sync(each)
                os.link(each, path.with_name(each.name))  # unlike a rename, this replaces nothing
        _sync(path.parent)


def _targets(folder: Path, path: Path) -> list[Path]:
    """Return the files that a restored journal consists of, and the logs of an earlier one, which SQLite would apply to it."""
    people = path.with_name(f"{path.stem}{_PEOPLE}")
    logs = [Path(f"{each}{suffix}") for each in (path, people) for suffix in ("-wal", "-shm", "-journal")]
    key = [Path(f"{path}{KEY_SUFFIX}")] if (folder / f"{_FILE}{KEY_SUFFIX}").exists() else []
    return [path, people, *key, *logs]


def _copy_files(source: Path, target: Path) -> None:
    _copy_database(source, target)
    for beside, copy in (
        (source.with_name(f"{source.stem}{_PEOPLE}"), target.with_name(f"{target.stem}{_PEOPLE}")),
        (Path(f"{source}{KEY_SUFFIX}"), Path(f"{target}{KEY_SUFFIX}")),
    ):
        if beside.is_file():
            (_copy_key if beside.suffix == KEY_SUFFIX else _copy_database)(beside, copy)


def _copy_key(source: Path, target: Path) -> None:
    fd = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "wb") as file:
        file.write(source.read_bytes())


def _copy_database(source: Path, target: Path) -> None:
    """Copy a database in one step, which lets other processes write to it meanwhile."""
    target.touch(0o600)
    with (
        contextlib.closing(sqlite3.connect(f"{source.absolute().as_uri()}?mode=ro", uri=True)) as opened,
        contextlib.closing(sqlite3.connect(target)) as copy,
    ):
        opened.backup(copy)


def _run_client(program: str, journal: str, words: list[str]) -> None:
    """Run one of PostgreSQL's programs on a journal's database. The password is in its environment, not in its arguments."""
    from psycopg.conninfo import conninfo_to_dict, make_conninfo

    address = parse_url(journal)
    options = conninfo_to_dict(address.conninfo)
    password = options.pop("password", None)
    secret = {} if password is None else {"PGPASSWORD": str(password)}
    if shutil.which(program) is None:
        hint = "Install PostgreSQL's client programs: apt-get install postgresql-client"
        raise JournalError(address.shown, f"{program} is not installed", hint)
    result = subprocess.run(
        [program, f"--dbname={make_conninfo('', **options)}", "--no-password", *words],
        env={**os.environ, **secret},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    if result.returncode:
        said = address.without_secret(result.stderr).strip().splitlines()
        raise JournalError(
            address.shown,
            f"{program} failed: {said[0] if said else f'status {result.returncode}'}",
            "Nothing was written. Solve this, and try again.",
        )


@contextlib.contextmanager
def _completed(folder: Path) -> Generator[Path]:
    """Yield a new private folder that gets this name when the block ends, or is removed if it fails."""
    if os.path.lexists(folder):
        raise JournalError(str(folder), "it exists already", "Name a folder that does not exist.")
    made = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        yield made
        made.rename(folder)
        _sync(folder.parent)
    except BaseException:
        shutil.rmtree(made, ignore_errors=True)
        raise


@contextlib.contextmanager
def _reported(place: str) -> Generator[None]:
    try:
        yield
    except (OSError, sqlite3.Error) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
        hint = "Nothing was changed, and no half of a copy is left. Check the place and its free space, and try again."
        raise JournalError(place, f"the copy failed: {reason}", hint) from error


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
