"""`People`: a server's users, their sessions and the audit log, kept in one SQLite file.

The file contains no usable secret: passwords and tokens are hashed with scrypt, session secrets with SHA-256.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import re
import secrets
import sqlite3
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from handrail.clock import SYSTEM_CLOCK, Clock
from handrail.errors import DefinitionError
from handrail.journal.location import create_folders, create_private_file, find_exposure
from handrail.journal.schema import describe_difference, distrust_schema, expected_schema, read_schema
from handrail.serve.roles import ROLES, Action, may

SESSION_SECONDS = 7 * 24 * 3600
MIN_PASSWORD = 12
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")
_ROLE = re.compile(r"[a-z][a-z0-9._-]{0,31}")
RESERVED = "local"
"""The principal of everyone who uses a server without users and without `authenticate`, and of programs on this machine.

No user may have this name.
"""
_SCRYPT = {"n": 2**14, "r": 8, "p": 1, "maxmem": 64 * 2**20, "dklen": 32}
_MOST_VERIFIED = 1000
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


@dataclass(frozen=True, slots=True)
class Person:
    """A person and their current roles."""

    name: str
    roles: frozenset[str]
    session: str = ""
    """The id of the session in which the person sent the request, or "" if there is no request or session."""
    since: float = 0.0
    """When the user was added, as a timestamp; 0 for a principal who is not one of the server's users."""

    def may(self, action: Action) -> bool:
        """Return whether one of the person's roles allows the action."""
        return may(self.roles, action)


@dataclass(frozen=True, slots=True)
class Session:
    """The session of a person who has signed in, without its secrets."""

    id: str
    name: str
    host: str
    address: str
    began_at: float
    ends_at: float


@dataclass(frozen=True, slots=True)
class Credentials:
    """A new session's id and secrets: one secret for the cookie, and a key that the page sends along with the cookie."""

    id: str
    secret: str
    key: str


class People:
    """A server's users, their sessions, and the audit log. Thread-safe. Several processes may share the file.

    Without a path, everything is kept in memory. Raises `DefinitionError` if anyone but the file's owner may read, write or
    replace it, and for a file that Handrail did not write, that has another version, or whose schema was altered.
    """

    def __init__(self, path: Path | None = None, *, clock: Clock = SYSTEM_CLOCK) -> None:
        self.path = path
        self._clock = clock
        self._lock = threading.RLock()
        self._changes = 0
        self._verified: dict[bytes, tuple[str, bytes]] = {}
        """Names and hashes of credentials that were verified, by keyed digest, so that scrypt need not run again."""
        self._cache_key = secrets.token_bytes(32)
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
        self._create_tables()

    def close(self) -> None:
        self._database.close()

    def _create_tables(self) -> None:
        """Create the tables in an empty file. Another process may be creating them at the same time."""
        database = self._database
        database.execute("BEGIN IMMEDIATE")
        try:
            if not read_schema(database):
                for each in _TABLES:
                    database.execute(each)
                database.execute(f"PRAGMA user_version = {VERSION}")
                database.execute(f"PRAGMA application_id = {_APPLICATION}")
            database.execute("COMMIT")
        except BaseException:
            database.execute("ROLLBACK")
            raise

    # Users.

    def add(self, name: str, roles: Iterable[str] = (), secret: str | None = None) -> str:
        """Add a user and return the secret that they sign in with. It is not stored, so it can't be shown again.

        Without a secret, a random one is generated. Every user has at least one of the four built-in roles: if none is given,
        *approver* is added for a user with custom roles, and *user* otherwise. Raises `DefinitionError` for an
        invalid name, role or secret, and for a name that a user already has.
        """
        if not _NAME.fullmatch(name) or name == RESERVED:
            raise DefinitionError(
                f"{name!r} can't be a user's name. Use 1 to 64 letters, digits and . _ @ -, beginning with a letter or digit, "
                f"but not {RESERVED!r}."
            )
        given = set(roles)
        for role in sorted(given):
            if not _ROLE.fullmatch(role):
                raise DefinitionError(
                    f"{role!r} can't be a role. Use {', '.join(ROLES)}, or a name that begins with a lowercase letter and "
                    "has at most 32 lowercase letters, digits, '.', '_' and '-'."
                )
        if given.isdisjoint(ROLES):
            given.add("approver" if given else "user")
        if secret is None:
            secret = secrets.token_urlsafe(24)
        elif len(secret) < MIN_PASSWORD:
            raise DefinitionError(
                f"the password is too easy to guess. Use at least {MIN_PASSWORD} characters."
            )
        salt = secrets.token_bytes(16)
        row = (name, json.dumps(sorted(given)), salt, _hash(secret, salt), self.now())
        try:
            self._write("INSERT INTO users (name, roles, salt, hash, added_at) VALUES (?, ?, ?, ?, ?)", *row)
        except sqlite3.IntegrityError:
            raise DefinitionError(
                f"there is already a user {name!r}. Remove them first: `handrail users remove {name}`."
            ) from None
        return secret

    def remove(self, name: str) -> bool:
        """Remove a user and end their sessions. Returns False if there is no such user."""
        self.revoke(name=name)
        return self._write("DELETE FROM users WHERE name = ?", name) > 0

    def list(self) -> Sequence[tuple[str, frozenset[str], float]]:
        """Return each user's name, roles and the time they were added, sorted by name."""
        rows = self._read("SELECT name, roles, added_at FROM users ORDER BY name")
        return [(name, frozenset(json.loads(roles)), at) for name, roles, at in rows]

    def has_users(self) -> bool:
        return bool(self._read("SELECT 1 FROM users LIMIT 1"))

    def find(self, name: str) -> Person | None:
        """Return a user with their current roles, or None if there is no such user."""
        rows = self._read("SELECT roles, added_at FROM users WHERE name = ?", name)
        return Person(name, frozenset(json.loads(rows[0][0])), since=rows[0][1]) if rows else None

    def who_may_vote(self, role: str | None, besides: str) -> Mapping[str, float]:
        """Return the users, except `besides`, who may vote and have this role: each name, with the time the user was added.

        For None and for `approver`, every user who may vote is included.
        """
        return {
            name: since
            for name, roles, since in self.list()
            if name != besides and may(roles, "vote") and (role in (None, "approver") or role in roles)
        }

    def verify(self, name: str, secret: str) -> Person | None:
        """Return the user with this name and secret, or None if there is no such user. Slow on purpose, so call it in a thread.

        An unknown name takes as long as a wrong secret. A correct pair is cached, so that it need not be hashed each time.
        """
        rows = self._read("SELECT salt, hash FROM users WHERE name = ?", name)
        salt, wanted = rows[0] if rows else (b"nobody has this.", b"")
        mark = hmac.digest(self._cache_key, f"{name}\0{secret}".encode("utf-8", "surrogatepass"), "sha256")
        if rows and self._verified.get(mark) == (name, wanted):
            return self.find(name)
        if not hmac.compare_digest(_hash(secret, salt), wanted):
            return None
        if len(self._verified) >= _MOST_VERIFIED:
            self._verified.clear()
        self._verified[mark] = (name, wanted)
        return self.find(name)

    # Sessions.

    def sign_in(self, name: str, *, host: str, issuer: str, address: str) -> Credentials:
        """Begin a session and return its secrets.

        `host` is the host and port for which the session is valid. `issuer` identifies what was exchanged for the
        session, such as the server's token, and must be the same on each use.
        """
        made = Credentials(secrets.token_hex(8), secrets.token_urlsafe(32), secrets.token_urlsafe(32))
        now = self.now()
        self._write("DELETE FROM sessions WHERE ends_at < ?", now)
        self._write(
            "INSERT INTO sessions (id, secret, key, name, host, issuer, address, began_at, ends_at) "
            "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
            made.id,
            _digest(made.secret),
            _digest(made.key),
            name,
            host,
            issuer,
            address,
            now,
            now + SESSION_SECONDS,
        )
        return made

    def session_of(self, secret: str, key: str | None, *, host: str, issuer: str) -> Session | None:
        """Return the session with this cookie and key; None if no such session is valid now for this host and issuer.

        If `key` is None, the key is not checked.
        """
        rows = self._read(
            "SELECT id, name, host, address, began_at, ends_at, key FROM sessions "
            "WHERE secret = ? AND host = ? AND issuer = ? AND ends_at > ?",
            _digest(secret),
            host,
            issuer,
            self.now(),
        )
        if not rows or (key is not None and not hmac.compare_digest(_digest(key), rows[0][6])):
            return None
        return Session(*rows[0][:6])

    def sessions(self) -> Sequence[Session]:
        """Return the sessions that have not ended, oldest first."""
        query = "SELECT id, name, host, address, began_at, ends_at FROM sessions WHERE ends_at > ? ORDER BY began_at"
        return [Session(*row) for row in self._read(query, self.now())]

    def ends_at(self, id: str) -> float:
        """Return when the session with this id ends, as a timestamp; 0 if there is no such session."""
        rows = self._read("SELECT ends_at FROM sessions WHERE id = ?", id)
        return rows[0][0] if rows else 0.0

    def now(self) -> float:
        """Return the current time as a timestamp, from the clock that decides when sessions end."""
        return self._clock.now().timestamp()

    def revoke(self, *, id: str | None = None, name: str | None = None) -> int:
        """End the session with this id, all sessions of this person, or all sessions.

        Returns how many were deleted, including expired ones.
        """
        wanted = [(column, value) for column, value in (("id", id), ("name", name)) if value is not None]
        where = " AND ".join(f"{column} = ?" for column, _ in wanted) or "1"
        return self._write(f"DELETE FROM sessions WHERE {where}", *(value for _, value in wanted))

    def generation(self) -> tuple[int, int]:
        """Return a value that changes whenever users or sessions change, in any process. It is cheap to read."""
        with self._lock:
            return self._database.execute("PRAGMA data_version").fetchone()[0], self._changes

    # The audit log.

    def note(self, who: str, action: str, address: str = "", **details: Any) -> None:
        """Append an entry to the audit log."""
        text = json.dumps(details, ensure_ascii=False)
        with self._lock:
            self._database.execute(
                "INSERT INTO audit (at, who, action, address, details) VALUES (?, ?, ?, ?, ?)",
                (self.now(), who, action, address, text),
            )

    def audit(
        self, *, who: str | None = None, after: int = 0, limit: int | None = None
    ) -> Sequence[Mapping[str, Any]]:
        """Return the audit log's entries after the entry numbered `after`, oldest first.

        With `who`, only this person's entries are returned. With `limit`, at most this many are returned.
        """
        rows = self._read(
            "SELECT number, at, who, action, address, details FROM audit "
            "WHERE number > ? AND (? IS NULL OR who = ?) ORDER BY number LIMIT ?",
            after,
            who,
            who,
            -1 if limit is None else limit,
        )
        return [
            {
                "number": number,
                "at": at,
                "who": name,
                "action": action,
                "address": address,
                **json.loads(details),
            }
            for number, at, name, action, address, details in rows
        ]

    # The file.

    def _read(self, query: str, *values: Any) -> Sequence[Any]:
        with self._lock:
            return self._database.execute(query, values).fetchall()

    def _write(self, query: str, *values: Any) -> int:
        with self._lock:
            self._changes += 1
            return self._database.execute(query, values).rowcount


def people_path(journal: Path) -> Path:
    """Return the path of a journal's users file, which is in the same folder."""
    return journal.with_name(f"{journal.stem}.people.db")


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


def _hash(secret: str, salt: bytes) -> bytes:
    return hashlib.scrypt(secret.encode("utf-8", "surrogatepass"), salt=salt, **_SCRYPT)


def _digest(text: str) -> bytes:
    """Return the digest of a secret. Session secrets are long and random, so a fast hash is enough."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()
