"""`People`: a server's users with their roles, their sessions and the audit log, kept in the journal's database or in a file.

No usable secret of theirs is kept: passwords and tokens are hashed with scrypt, session secrets with SHA-256.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import logging
import re
import secrets
import shlex
import sqlite3
import threading
from collections.abc import Collection, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import msgspec

from handrail.clock import SYSTEM_CLOCK, Clock
from handrail.errors import DefinitionError
from handrail.journal.location import create_folders, create_private_file, find_exposure
from handrail.journal.protocol import Account, Accounts, Note, SignIn
from handrail.journal.sql.connection import compact
from handrail.journal.sql.schema import describe_difference, distrust_schema, expected_schema, read_schema
from handrail.notify.address import Address

if TYPE_CHECKING:
    from handrail.journal.protocol import Journal


Action = Literal["see", "run", "vote", "audit"]
"""The kinds of action that roles allow.

- *see*: read your own conversations, their history, and the server's metrics
- *run*: send messages, answer your own questions, cancel, undo, delete
- *vote*: see other people's questions and vote on them, if a policy lets one of your roles do so
- *audit*: read the audit log
"""

ACTIONS: tuple[Action, ...] = get_args(Action)
ROLES = ("viewer", "user", "approver", "admin")
"""The built-in roles. Policies can require other roles too, but those allow no action on their own."""

ALLOWED: Mapping[str, frozenset[Action]] = {
    "viewer": frozenset({"see"}),
    "user": frozenset({"see", "run"}),
    "approver": frozenset({"see", "run", "vote"}),
    "admin": frozenset({"see", "run", "vote", "audit"}),
}


def may(roles: Collection[str], action: Action) -> bool:
    """Return whether one of these roles allows the action."""
    return any(action in ALLOWED.get(role, ()) for role in roles)


log = logging.getLogger("handrail.serve")

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
    """A server's users, their sessions, and the audit log. Thread-safe.

    `where` is the path of a file, which several processes may share, or the `accounts` of a journal in PostgreSQL, which several
    servers share. Without it, everything is kept in memory. Raises `DefinitionError` for a file as `AccountsFile` does.
    """

    def __init__(self, where: Path | Accounts | None = None, *, clock: Clock = SYSTEM_CLOCK) -> None:
        self._accounts: Accounts = AccountsFile(where) if isinstance(where, Path | None) else where
        self._clock = clock
        self._verified: dict[bytes, tuple[str, bytes]] = {}
        """Names and hashes of credentials that were verified, by keyed digest, so that scrypt need not run again."""
        self._cache_key = secrets.token_bytes(32)

    @classmethod
    def of(cls, journal: Journal | None, file: Path) -> People:
        """Return the people of a journal: those in its database or, if it is not in PostgreSQL, those in the file.

        Logs a warning if the file has users and the database has none.
        """
        if journal is None or journal.accounts is None:
            return cls(file)
        people = cls(journal.accounts, clock=journal.clock)
        if file.exists() and not people.has_users():
            with contextlib.suppress(DefinitionError), contextlib.closing(cls(file)) as others:
                if others.has_users():
                    log.warning(
                        "the users in %s do not count, because the journal is in PostgreSQL, and nobody is a user there. "
                        "Copy them: handrail users copy %s",
                        *(file, shlex.quote(str(file))),
                    )
        return people

    def close(self) -> None:
        self._accounts.close()

    # Users.

    def add(
        self,
        name: str,
        roles: Iterable[str] = (),
        secret: str | None = None,
        notify: Iterable[Address] = (),
    ) -> str:
        """Add a user and return the secret that they sign in with. It is not stored, so it can't be shown again.

        At the addresses in `notify`, they are told about questions that wait for them.

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
        urls = tuple(each.url for each in notify)
        account = Account(name, tuple(sorted(given)), salt, _hash(secret, salt), self.now(), notify=urls)
        if not self._accounts.add(account):
            raise DefinitionError(
                f"there is already a user {name!r}. Remove them first: `handrail users remove {name}`."
            )
        return secret

    def copy(self, others: People) -> Sequence[str]:
        """Add the users of `others`, with their roles and secrets, and return the names that were added.

        A name that a user here already has is left alone.
        """
        now = self.now()
        return [
            each.name
            for each in others._accounts.all().values()
            if each.removed_at is None and self._accounts.add(msgspec.structs.replace(each, added_at=now))
        ]

    def tell_at(self, name: str, addresses: Iterable[Address]) -> bool:
        """Replace the addresses at which a user is told about questions. Returns False if there is no such user."""
        return self._accounts.tell_at(name, tuple(each.url for each in addresses))

    def addresses(self) -> Mapping[str, Sequence[Address]]:
        """Return the addresses at which each user is told about questions. Users without any are left out."""
        found = self._accounts.all().values()
        return {
            each.name: [Address(url) for url in each.notify]
            for each in found
            if each.notify and each.removed_at is None
        }

    def remove(self, name: str) -> bool:
        """Remove a user and end their sessions. Returns False if there is no such user."""
        return self._accounts.remove(name)

    def list(self) -> Sequence[tuple[str, frozenset[str], float]]:
        """Return each user's name, roles and the time they were added, sorted by name."""
        found = self._accounts.all().values()
        return [
            (each.name, frozenset(each.roles), each.added_at) for each in found if each.removed_at is None
        ]

    def has_users(self) -> bool:
        return bool(self.list())

    def find(self, name: str) -> Person | None:
        """Return a user with their current roles, or None if there is no such user."""
        found = self._accounts.find(name)
        if found is None or found.removed_at is not None:
            return None
        return Person(name, frozenset(found.roles), since=found.added_at)

    def may_run(self, name: str) -> bool:
        """Return whether a principal's runs may go on: not those of a user who was removed or lost the role for it.

        This is for a process that executes the runs of servers. A principal who never was a user may be known to a server's own hook.
        """
        found = self._accounts.find(name)
        return found is None or (found.removed_at is None and may(found.roles, "run"))

    def who_may_vote(self, role: str | None, besides: str) -> Mapping[str, float]:
        """Return the users, except `besides`, who may vote and have this role: each name, with the time the user was added.

        For None and for `approver`, every user who may vote is included. Changes by other processes are included too.
        """
        self._accounts.refresh()
        return {
            name: since
            for name, roles, since in self.list()
            if name != besides and may(roles, "vote") and (role in (None, "approver") or role in roles)
        }

    def verify(self, name: str, secret: str) -> Person | None:
        """Return the user with this name and secret, or None if there is no such user. Slow on purpose, so call it in a thread.

        An unknown name takes as long as a wrong secret. A correct pair is cached, so that it need not be hashed each time.
        """
        self._accounts.refresh()
        found = self._accounts.find(name)
        salt, wanted = (b"nobody has this.", b"") if found is None else (found.salt, found.hash)
        mark = hmac.digest(self._cache_key, f"{name}\0{secret}".encode("utf-8", "surrogatepass"), "sha256")
        if found and self._verified.get(mark) == (name, wanted):
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
        digests = _digest(made.secret), _digest(made.key)
        self._accounts.begin(
            SignIn(made.id, name, host, issuer, address, now, now + SESSION_SECONDS, *digests)
        )
        return made

    def session_of(self, secret: str, key: str | None, *, host: str, issuer: str) -> Session | None:
        """Return the session with this cookie and key; None if no such session is valid now for this host and issuer.

        If `key` is None, the key is not checked.
        """
        found = self._accounts.session(secret=_digest(secret))
        if found is None or (found.host, found.issuer) != (host, issuer) or found.ends_at <= self.now():
            return None
        if key is not None and not hmac.compare_digest(_digest(key), found.key):
            return None
        return _without_secrets(found)

    def sessions(self) -> Sequence[Session]:
        """Return the sessions that have not ended, oldest first."""
        now = self.now()
        return [_without_secrets(each) for each in self._accounts.sessions() if each.ends_at > now]

    def ends_at(self, id: str) -> float:
        """Return when the session with this id ends, as a timestamp; 0 if there is no such session."""
        found = self._accounts.session(id=id)
        return 0.0 if found is None else found.ends_at

    def now(self) -> float:
        """Return the current time as a timestamp, from the clock that decides when sessions end."""
        return self._clock.now().timestamp()

    def revoke(self, *, id: str | None = None, name: str | None = None) -> int:
        """End the session with this id, all sessions of this person, or all sessions.

        Returns how many were deleted, including expired ones.
        """
        return self._accounts.end(id=id, name=name)

    def generation(self) -> tuple[Any, ...]:
        """Return a value that changes whenever users or sessions change, in any process. It is cheap to read."""
        return self._accounts.generation()

    # The audit log.

    def note(self, who: str, action: str, address: str = "", **details: Any) -> None:
        """Append an entry to the audit log."""
        text = json.dumps(details, ensure_ascii=False)
        self._accounts.note(Note(self.now(), who, action, address, text))

    def audit(
        self, *, who: str | None = None, after: int = 0, limit: int | None = None
    ) -> Sequence[Mapping[str, Any]]:
        """Return the audit log's entries after the entry numbered `after`, oldest first.

        With `who`, only this person's entries are returned. With `limit`, at most this many are returned.
        """
        return [
            {
                "number": number,
                "at": note.at,
                "who": note.who,
                "action": note.action,
                "address": note.address,
                **json.loads(note.details),
            }
            for number, note in self._accounts.notes(who=who, after=after, limit=limit)
        ]


def people_path(journal: Path) -> Path:
    """Return the path of a journal's users file, which is in the same folder."""
    return journal.with_name(f"{journal.stem}.people.db")


def _without_secrets(found: SignIn) -> Session:
    return Session(found.id, found.name, found.host, found.address, found.began_at, found.ends_at)


def _hash(secret: str, salt: bytes) -> bytes:
    return hashlib.scrypt(secret.encode("utf-8", "surrogatepass"), salt=salt, **_SCRYPT)


def _digest(text: str) -> bytes:
    """Return the digest of a secret. Session secrets are long and random, so a fast hash is enough."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()


# --- the file -----------------------------------------------------------------------------------------


VERSION = 2
"""Version of the file's format. A file of version 1, which has no addresses, gets them; one with any other version is refused."""
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
_ADDRESSES = "CREATE TABLE addresses (name TEXT NOT NULL, url TEXT NOT NULL)"
_ACCOUNT = """SELECT name, roles, salt, hash, added_at,
    (SELECT json_group_array(url) FROM addresses WHERE addresses.name = users.name) FROM users"""
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
            found = read_schema(database)
            for each in () if found else _TABLES:
                database.execute(each)
            if "addresses" not in found:
                database.execute(_ADDRESSES)
                database.execute(f"PRAGMA user_version = {VERSION}")
                database.execute(f"PRAGMA application_id = {_APPLICATION}")

    def add(self, account: Account, /) -> bool:
        row = (account.name, json.dumps(account.roles), account.salt, account.hash, account.added_at)
        query = "INSERT INTO users (name, roles, salt, hash, added_at) VALUES (?, ?, ?, ?, ?)"
        try:
            with self._transaction():
                self._write(query, *row)
                self._put_addresses(account.name, account.notify)
        except sqlite3.IntegrityError:
            return False
        return True

    def tell_at(self, name: str, urls: tuple[str, ...], /) -> bool:
        with self._transaction():
            is_known = self.find(name) is not None
            self._put_addresses(name, urls if is_known else ())
            return is_known

    def _put_addresses(self, name: str, urls: tuple[str, ...]) -> None:
        self._write("DELETE FROM addresses WHERE name = ?", name)
        for url in urls:
            self._write("INSERT INTO addresses VALUES (?, ?)", name, url)

    def remove(self, name: str, /) -> bool:
        with self._transaction():
            return self._remove(name)[1] > 0

    def _remove(self, name: str) -> tuple[int, int]:
        """Delete a user's sessions and the user. Returns how many of each there were."""
        self._put_addresses(name, ())
        return self.end(name=name), self._write("DELETE FROM users WHERE name = ?", name)

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

    def erase(self, name: str, note: Note, /) -> int:
        with self._transaction() as database:
            about = [
                (number,) for number, each in self.notes(who=None, after=0, limit=None) if each.is_about(name)
            ]
            database.executemany("DELETE FROM audit WHERE number = ?", about)
            if any(self._remove(name)) or about:
                self.note(note)
        return len(about)

    def compact(self) -> bool:
        with self._lock:
            return compact(self._database)

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
    name, roles, *others, urls = row
    return Account(name, tuple(json.loads(roles)), *others, notify=tuple(json.loads(urls)))


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
    if version not in (1, VERSION):
        raise _refusal(
            path,
            f"its format has version {version}, but this version of Handrail uses {VERSION}: use the version that wrote it",
        )
    if problem := describe_difference(
        found, expected_schema(_TABLES if version == 1 else (*_TABLES, _ADDRESSES))
    ):
        raise _refusal(path, problem)


def _refusal(path: Path, problem: str) -> DefinitionError:
    return DefinitionError(
        f"the users file {str(path)!r}: {problem}. Nothing was changed. Restore the original file, or move this one "
        "away and add the users again."
    )
