"""`Accounts`: the accounts of a server's users, their sign-ins, and the audit log. In a journal's database, several servers share them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import msgspec


class Account(msgspec.Struct, frozen=True):
    """The account of a user. It contains no usable secret."""

    name: str
    roles: tuple[str, ...]
    salt: bytes
    hash: bytes
    added_at: float
    """When the user was added, as a timestamp. It tells the account from an earlier one of the same name."""
    removed_at: float | None = None
    """When the user was removed, as a timestamp; None if they were not."""


class SignIn(msgspec.Struct, frozen=True):
    """A session that began with a sign-in. It contains digests of its secrets only."""

    id: str
    name: str
    host: str
    issuer: str
    address: str
    began_at: float
    ends_at: float
    secret: bytes
    key: bytes


class Note(msgspec.Struct, frozen=True):
    """An entry of the audit log."""

    at: float
    who: str
    action: str
    address: str
    details: str
    """JSON."""


class Accounts(Protocol):
    """The accounts of users, their sign-ins, and the audit log. Thread-safe.

    What this process has changed is read at once. A change by another process is read after a moment, and at the latest after
    `refresh`. Methods that read raise `JournalError` if the database does not answer for a while.
    """

    def add(self, account: Account, /) -> bool:
        """Add an account. Returns False, and adds nothing, if there is one of this name. No two accounts have the same name and time."""
        ...

    def remove(self, name: str, /) -> bool:
        """Remove an account and end its sessions, atomically. Returns False if there is none of this name."""
        ...

    def all(self) -> Mapping[str, Account]:
        """Return the accounts by name, sorted. A removed one may be among them."""
        ...

    def find(self, name: str, /) -> Account | None:
        """Return the account of this name, which may be a removed one; None if there is none."""
        ...

    def begin(self, sign_in: SignIn, /) -> None:
        """Begin a session, and forget those that have ended."""
        ...

    def session(self, *, secret: bytes = b"", id: str = "") -> SignIn | None:
        """Return the session with the secret of this digest, or with this id; None if there is none. It may have ended."""
        ...

    def sessions(self) -> Sequence[SignIn]:
        """Return all sessions, oldest first. Some may have ended."""
        ...

    def end(self, *, id: str | None = None, name: str | None = None) -> int:
        """End the session with this id, all sessions of this name, or all sessions. Returns how many were deleted."""
        ...

    def note(self, note: Note, /) -> None:
        """Append an entry to the audit log."""
        ...

    def notes(self, *, who: str | None, after: int, limit: int | None) -> Sequence[tuple[int, Note]]:
        """Return the entries numbered above `after`, oldest first, each with its number. With `who`, return only this person's."""
        ...

    def refresh(self) -> None:
        """Forget what was read, so that what follows reads the newest accounts and sessions."""
        ...

    def generation(self) -> tuple[Any, ...]:
        """Return a value that changes whenever accounts or sessions change, in any process. It is cheap to read."""
        ...

    def close(self) -> None:
        """Close the file, if the accounts have one of their own."""
        ...
