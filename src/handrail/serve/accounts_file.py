"""`AccountsFile`: the accounts of a server's users, their sign-ins and the audit log in a SQLite file of their own, or in memory."""

from __future__ import annotations

import contextlib
import json
import sqlite3
import threading
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from handrail.errors import DefinitionError
from handrail.journal.accounts import Account, Note, SignIn
from handrail.journal.location import create_folders, create_private_file, find_exposure
from handrail.journal.schema import describe_difference, distrust_schema, expected_schema, read_schema

VERSION = 1
"""Version of the file's format. A file with another version is refused."""
_APPLICATION = 0x48524C50
"""The number in a file's header that marks it as a users file."""
_TABLES = (
    """CREATE TABLE users (
        name TEXT PRIMARY KEY, roles TEXT NOT NULL, salt BLOB NOT NULL, hash BLOB NOT NULL, added_at REAL NOT NULL)""",
    """CREATE TABLE sessions (
        id TEXT PRIMARY KEY, secret BLOB NOT NULL UNIQUE, key BLOB NOT NULL, name TEXT NOT NULL, host TEXT NOT NULL,
        issuer TEXT NOT NULL, address TEXT NOT NULL, began_at REAL NOT NULL, ends_at REAL NOT NULL)""",
    """CREATE TABLE audit (
        number INTEGER PRIMARY KEY AUTOINCREMENT, at REAL NOT NULL, who TEXT NOT NULL, action TEXT NOT NULL,
        address TEXT NOT NULL, details TEXT NOT NULL)""",
)
_ACCOUNT = "SELECT name, roles, salt, hash, added_at FROM users"
_SESSION = "SELECT id, name, host, issuer, address, began_at, ends_at, secret, key FROM sessions"


class AccountsFile:
    """Accounts in a file, which several processes may share. Removed ones are deleted. Without a path, everything is kept in memory.

    Raises `DefinitionError` if anyone but the file's owner may read, write or replace it, and for a file that Handrail did
    not write, that has another version, or whose schema was altered.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._lock = threading.RLock()
        self._changes = 0
        if path is not None:
            _make_private(path)
            with contextlib.closing(_open_unchanged(path)) as unchanged:
                _check_file(unchanged, path)
        self._database = sqlite3.connect(
            ":memory:" if path is None else path, check_same_thread=False, timeout=30, isolation_level=None
        )
        if path is not None:
            distrust_schema(self._database)
            self._database.execute("PRAGMA journal_mode = WAL")
            self._database.execute("PRAGMA synchronous = NORMAL")
        with self._transaction() as database:  # another process may be creating the tables at the same time
            if not read_schema(database):
                for each in _TABLES:
                    database.execute(each)
                database.execute(f"PRAGMA user_version = {VERSION}")
                database.execute(f"PRAGMA application_id = {_APPLICATION}")

    def add(self, account: Account, /) -> bool:
        row = (account.name, json.dumps(account.roles), account.salt, account.hash, account.added_at)
        try:
            return (
                self._write(
                    "INSERT INTO users (name, roles, salt, hash, added_at) VALUES (?, ?, ?, ?, ?)", *row
                )
                > 0
            )
        except sqlite3.IntegrityError:
            return False

    def remove(self, name: str, /) -> bool:
        with self._transaction():
            self.end(name=name)
            return self._write("DELETE FROM users WHERE name = ?", name) > 0

    def all(self) -> Mapping[str, Account]:
        return {row[0]: _account(row) for row in self._read(f"{_ACCOUNT} ORDER BY name")}

    def find(self, name: str, /) -> Account | None:
        return next(map(_account, self._read(f"{_ACCOUNT} WHERE name = ?", name)), None)

    def begin(self, sign_in: SignIn, /) -> None:
        self._write("DELETE FROM sessions WHERE ends_at < ?", sign_in.began_at)
        self._write(
            "INSERT INTO sessions (id, name, host, issuer, address, began_at, ends_at, secret, key) "
            "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
            *msgspec.structs.astuple(sign_in),
        )

    def session(self, *, secret: bytes = b"", id: str = "") -> SignIn | None:
        rows = self._read(f"{_SESSION} WHERE secret = ? OR id = ?", secret, id)
        return SignIn(*rows[0]) if rows else None

    def sessions(self) -> Sequence[SignIn]:
        return [SignIn(*row) for row in self._read(f"{_SESSION} ORDER BY began_at")]

    def end(self, *, id: str | None = None, name: str | None = None) -> int:
        query = "DELETE FROM sessions WHERE (?1 IS NULL OR id = ?1) AND (?2 IS NULL OR name = ?2)"
        return self._write(query, id, name)

    def note(self, note: Note, /) -> None:
        with self._lock:
            self._database.execute(
                "INSERT INTO audit (at, who, action, address, details) VALUES (?, ?, ?, ?, ?)",
                msgspec.structs.astuple(note),
            )

    def notes(self, *, who: str | None, after: int, limit: int | None) -> Sequence[tuple[int, Note]]:
        rows = self._read(
            "SELECT number, at, who, action, address, details FROM audit "
            "WHERE number > ?1 AND (?2 IS NULL OR who = ?2) ORDER BY number LIMIT ?3",
            after,
            who,
            -1 if limit is None else limit,
        )
        return [(number, Note(*row)) for number, *row in rows]

    def refresh(self) -> None:
        """Do nothing: everything is read from the file each time."""

    def generation(self) -> tuple[Any, ...]:
        with self._lock:
            return self._database.execute("PRAGMA data_version").fetchone()[0], self._changes

    def close(self) -> None:
        self._database.close()

    @contextlib.contextmanager
    def _transaction(self) -> Generator[sqlite3.Connection]:
        with self._lock:
            self._database.execute("BEGIN IMMEDIATE")
            try:
                yield self._database
                self._database.execute("COMMIT")
            except BaseException:
                self._database.execute("ROLLBACK")
                raise

    def _read(self, query: str, *values: Any) -> Sequence[Any]:
        with self._lock:
            return self._database.execute(query, values).fetchall()

    def _write(self, query: str, *values: Any) -> int:
        with self._lock:
            self._changes += 1
            return self._database.execute(query, values).rowcount


def _account(row: Sequence[Any]) -> Account:
    name, roles, *others = row
    return Account(name, tuple(json.loads(roles)), *others)


def _make_private(path: Path) -> None:
    """Create the file, if necessary, for its owner only. Raises `DefinitionError` if others may read, write or replace it."""
    create_folders(path.parent)
    found = find_exposure(str(path))
    if found is not None:
        raise DefinitionError(f"the users file {str(path)!r}: {found.problem}. {found.hint}")
    create_private_file(str(path))


def _open_unchanged(path: Path) -> sqlite3.Connection:
    """Open a file read-only, so that checking it can't change it."""
    return sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, timeout=30, isolation_level=None)


def _check_file(database: sqlite3.Connection, path: Path) -> None:
    """Raise `DefinitionError` unless the file is empty, or a users file as this version of Handrail creates it."""
    try:
        found = read_schema(database)
        ((version,),) = database.execute("PRAGMA user_version")
        ((application,),) = database.execute("PRAGMA application_id")
    except sqlite3.DatabaseError as error:
        raise _refusal(path, f"it is not a database that can be read ({error})") from None
    if not found and not version:
        return
    if application != _APPLICATION or not version:
        raise _refusal(path, "it is a database, but not a users file")
    if version != VERSION:
        raise _refusal(
            path,
            f"its format has version {version}, but this version of Handrail uses {VERSION}: use the version that wrote it",
        )
    if problem := describe_difference(found, expected_schema(_TABLES)):
        raise _refusal(path, problem)


def _refusal(path: Path, problem: str) -> DefinitionError:
    return DefinitionError(
        f"the users file {str(path)!r}: {problem}. Nothing was changed. Restore the original file, or move this one "
        "away and add the users again."
    )
