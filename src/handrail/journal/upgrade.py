"""`upgrade`: brings a journal from the schema of an earlier release to this version's, or says what that would do."""

from __future__ import annotations

import contextlib
import filecmp
import os
import sqlite3
from functools import partial
from importlib.resources import files
from os import PathLike, fspath
from pathlib import Path

import msgspec

from handrail.errors import DefinitionError, JournalError
from handrail.journal.digest import key_beside
from handrail.journal.location import check_private_files, check_surroundings
from handrail.journal.postgres.address import is_url, parse_url
from handrail.journal.sql.chains import Chains
from handrail.journal.sql.connection import is_damage
from handrail.journal.sql.database import unreadable
from handrail.journal.sql.schema import (
    VERSION,
    alteration_of,
    distrust_schema,
    expected_schema,
    find_version,
    is_blank,
    missing_statements,
    read_schema,
)
from handrail.journal.sql.upgrade import IN_USE, Step, Subject, Upgrade, carry_out, examine, next_step
from handrail.journal.sqlite import OpenFile, check_log


def upgrade(name: str | PathLike[str], *, check: bool = False) -> Upgrade:
    """Upgrade the journal in a file, or in a PostgreSQL database if the name is its URL.

    Each step is one transaction: if the process is killed meanwhile, the journal is as it was before the step, and the next
    call goes on. A file is copied before it is changed, to `NAME.schema-N` beside it. With `check`, nothing is written, and the
    outcome says what would be done.

    Raises `JournalError`, and changes nothing, if anything in the journal was altered, if another process uses it and the
    step allows none, if its schema is too old, or if the key is missing or is not the journal's.
    """
    text = fspath(name)
    once = partial(_upgrade_database if is_url(text) else _upgrade_file, text, check)
    first = last = once()
    while not check and last.version not in (VERSION, last.found):
        last = once()
    return msgspec.structs.replace(first, version=max(first.version, VERSION))


# --- a file -------------------------------------------------------------------------------------------

_WAIT = 10.0
"""Seconds to wait for other processes that use the file."""


def _upgrade_file(path: str, check: bool) -> Upgrade:
    check_surroundings(path)
    check_private_files(path)
    file = OpenFile(path, partial(_examine, path))
    try:
        with contextlib.closing(_connect(path, check)) as connection:
            return _upgrade_connected(connection, path, check)
    except (sqlite3.Error, OSError) as error:
        if isinstance(error, sqlite3.Error) and is_damage(error):
            raise unreadable(path, error) from error
        hint = "Check the disk, and whether another program has locked the file. Then try again."
        raise JournalError(path, f"it can't be upgraded: {error}", hint) from error
    finally:
        file.close()


def _examine(path: str) -> None:
    """Look at the file before SQLite does, as when a journal is opened."""
    if is_blank(path, check=find_version):
        raise JournalError(path, "it is empty", "Name the file of a journal.")
    check_log(path)


def _connect(path: str, check: bool) -> sqlite3.Connection:
    # A connection that may write copies a log into the file when it is closed, and one that may not leaves an empty log.
    mode = "ro" if check and _has_log(path) else "rw"
    uri = f"{Path(path).absolute().as_uri()}?mode={mode}"
    connection = sqlite3.connect(uri, uri=True, timeout=_WAIT, isolation_level=None)
    distrust_schema(connection)
    return connection


def _has_log(path: str) -> bool:
    try:
        return os.stat(f"{path}-wal").st_size > 0
    except FileNotFoundError:
        return False


def _upgrade_connected(connection: sqlite3.Connection, path: str, check: bool) -> Upgrade:
    step = next_step(path, find_version(connection, path, read_schema(connection)))
    is_alone = step is not None and step.is_offline and not check
    if is_alone:
        _exclude_others(connection, path)
    connection.execute("BEGIN EXCLUSIVE" if is_alone else "BEGIN")
    subject, step = _open(connection, path)
    outcome = examine(subject, step, f"{path}.schema-{subject.found}")
    if step is None or check:
        return outcome
    connection.execute("COMMIT")  # SQLite copies nothing in a transaction
    outcome = msgspec.structs.replace(outcome, copy=_copy(connection, outcome.copy))
    connection.execute("BEGIN IMMEDIATE")
    subject, step = _open(connection, path)
    if step is not None:  # otherwise another process was faster
        carry_out(subject, step)
    connection.execute("COMMIT")
    return outcome


def _exclude_others(connection: sqlite3.Connection, path: str) -> None:
    """Take the file for this process alone, until the connection is closed. Raises `JournalError` if another process has it open."""
    connection.execute("PRAGMA synchronous = FULL")
    try:
        connection.execute("PRAGMA journal_mode = DELETE")  # only possible while no other connection is open
        connection.execute("PRAGMA locking_mode = EXCLUSIVE")  # from the next transaction on
    except sqlite3.OperationalError:
        raise JournalError(path, "another process has it open", IN_USE) from None


def _open(connection: sqlite3.Connection, path: str) -> tuple[Subject, Step | None]:
    """Return the journal in a file and its next step, in the open transaction. Raises `JournalError` if its schema was altered."""
    found = read_schema(connection)
    version = find_version(connection, path, found)
    step = next_step(path, version)
    if step is not None:
        statements = files("handrail.journal.sql").joinpath(f"schema_{version}.sql").read_text()
        altered = alteration_of(path, found, expected_schema(tuple(statements.split(";\n")[:-1])))
        if altered is not None:
            raise altered
    ((id,),) = connection.execute("SELECT value FROM about WHERE key = 'id'").fetchall()
    key = key_beside(path, False)

    def create() -> None:
        for each in missing_statements(read_schema(connection)):
            connection.execute(each)

    return Subject(connection, path, id, key, version, Chains(id, path, key), create), step


def _copy(connection: sqlite3.Connection, copy: str) -> str:
    """Copy the journal, and return the path of the copy. An equal copy, which an upgrade that was cut off has left, is used again.

    A different one is kept, and the copy gets a number. The file is copied by SQLite, since opening it would release SQLite's locks.
    """
    made = f"{copy}.part"
    Path(made).unlink(missing_ok=True)
    os.close(os.open(made, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    try:
        with contextlib.closing(sqlite3.connect(made)) as target:
            connection.backup(target)
    except BaseException:
        Path(made).unlink(missing_ok=True)
        raise
    number, chosen = 1, copy
    while os.path.exists(chosen) and not filecmp.cmp(chosen, made, shallow=False):
        number += 1
        chosen = f"{copy}-{number}"
    os.replace(made, chosen)
    for each, flags in ((chosen, os.O_RDONLY), (os.path.dirname(os.path.abspath(chosen)), os.O_DIRECTORY)):
        descriptor = os.open(each, flags | os.O_CLOEXEC)
        os.fsync(descriptor)
        os.close(descriptor)
    return chosen


# --- a database ---------------------------------------------------------------------------------------


def _upgrade_database(url: str, check: bool) -> Upgrade:
    address = parse_url(url)
    try:
        from handrail.journal.postgres.upgrade import upgrade_database
    except ModuleNotFoundError as error:
        if error.name is None or not error.name.startswith("psycopg"):
            raise
        raise DefinitionError(
            "a journal in PostgreSQL needs psycopg, which is not installed. "
            "Install it with: pip install 'handrail[postgres]'"
        ) from None
    return upgrade_database(address, check)
