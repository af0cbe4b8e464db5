"""The keys of journals and of commits in folders, and keyed digests, which bind an answer to what the person saw."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import logging
import os
import secrets
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec

from handrail.errors import JournalError
from handrail.journal.location import KEY_SUFFIX, check_private, check_secret, create_folders, state_folder
from handrail.schema.problems import to_plain
from handrail.text.rendering import counted

log = logging.getLogger("handrail.journal")

KEY_VARIABLE, KEY_FILE_VARIABLE = "HANDRAIL_KEY", "HANDRAIL_KEY_FILE"
_held = ""
"""The secret from `HANDRAIL_KEY`, if a command has removed the variable from the environment."""
_KEY_BYTES = 32
_SHORTEST_SECRET = 16
"""Minimum length in bytes of a secret from which a key is derived. A shorter one could be guessed."""


def new_key() -> bytes:
    """Return a random key of 32 bytes."""
    return secrets.token_bytes(_KEY_BYTES)


def hold_key(secret: str) -> None:
    """Use this secret wherever `HANDRAIL_KEY` would be read. For programs that remove the variable from their environment."""
    global _held
    _held = secret


def given_key() -> str:
    """Return the secret from `HANDRAIL_KEY`, or "" if there is none."""
    return os.environ.get(KEY_VARIABLE) or _held


def key_beside(journal: str, is_new: bool) -> bytes:
    """Return a journal's key: from the environment if `HANDRAIL_KEY` or `HANDRAIL_KEY_FILE` is set, or else from a file beside it.

    For a new journal, the file beside it is created if it is missing. Raises `JournalError` if the key is missing, damaged or
    too short, or if others can access its file.
    """
    if given_key() or os.environ.get(KEY_FILE_VARIABLE):
        return shared_key(journal, None)
    path = Path(journal + KEY_SUFFIX)
    if is_new and not path.exists():
        _make(path)
    if not path.exists():
        raise JournalError(
            journal,
            f"its key {path.name!r} is missing",
            f"Restore the original file or, if the journal was created with {KEY_VARIABLE} or {KEY_FILE_VARIABLE}, set that again.",
        )
    return _read(path, journal, f"its key {path.name!r}")


def shared_key(journal: str, file: str | None) -> bytes:
    """Return the key of a journal that many machines share, derived from a secret that each of them has.

    The secret is the content of `file`, or else `HANDRAIL_KEY`, or else the content of the file that
    `HANDRAIL_KEY_FILE` names. Raises `JournalError` if none of them is given, if the secret is too short, or if the
    file can't be read or can be accessed by others. Root may own the file and let its group read it. This creates no key,
    since other machines would not have it.
    """
    given = given_key()
    file = file or (None if given else os.environ.get(KEY_FILE_VARIABLE))
    if file is None:
        if not given:
            raise JournalError(
                journal,
                "there is no key with which to detect altered records",
                f"Set {KEY_VARIABLE} to the same secret on every machine, or {KEY_FILE_VARIABLE} to the path of a file with it.",
            )
        return _derived(given.encode(), journal, f"the key in {KEY_VARIABLE}")
    check_secret(journal, Path(file))
    try:
        secret = Path(file).read_bytes().strip()
    except OSError as error:
        raise JournalError(
            journal, f"its key can't be read from {file!r}: {error.strerror}", "Name a readable file."
        ) from None
    return _derived(secret, journal, f"its key file {file!r}")


def _derived(secret: bytes, journal: str, source: str, purpose: bytes = b"key") -> bytes:
    if len(secret) < _SHORTEST_SECRET:
        has = f"has {counted(len(secret), 'byte')}, so it could be guessed" if secret else "is empty"
        advice = "Use a long random secret, such as the output of `openssl rand -hex 32`."
        raise JournalError(journal, f"{source} {has}", advice)
    return hashlib.sha256(b"handrail %s\0%s" % (purpose, secret)).digest()


def folder_key() -> bytes:
    """Return the key with which this user's processes sign the commits that they stage in folders.

    It is derived from `HANDRAIL_KEY` if that is set, or else kept in a file in the state folder. If that file can't be created or
    used, or if the secret is too short, the process uses a random key, which no other process knows.
    """
    given = given_key()
    try:
        if given:
            return _derived(given.encode(), "folders", f"the key in {KEY_VARIABLE}", b"folders")
        return _kept_key(os.environ.get("XDG_STATE_HOME"), os.environ.get("HOME"))
    except (OSError, JournalError) as error:
        return _key_of_this_process(str(error))


@lru_cache(maxsize=8)
def _kept_key(*places: str | None) -> bytes:
    """Return the key in the state folder. The folder and the key are created if they are missing.

    `places` are the values of the variables that determine the folder. They are arguments so that the key is read again
    if one changes. Raises `JournalError` if there is no home folder, or if the key file is not private or has the wrong
    length, and `OSError` if it can't be created or read.
    """
    path = state_folder() / f"folders{KEY_SUFFIX}"
    create_folders(path.parent)
    if not path.exists():
        _make(path)
    return _read(path, str(path), "it")


@lru_cache(maxsize=1)
def _key_of_this_process(problem: str) -> bytes:
    log.warning(
        "there is no usable key for commits in folders, so no other process can finish or undo what this one leaves unfinished: %s",
        problem,
    )
    return new_key()


def key_check(key: bytes, journal: str) -> str:
    """Return a digest that is stored in a new journal, so that a different key is noticed when the journal is opened."""
    return hashlib.blake2b(journal.encode(), key=key, digest_size=16, person=b"handrail key").hexdigest()


def _read(path: Path, journal: str, what: str) -> bytes:
    check_private(journal, path)
    key = path.read_bytes()
    if len(key) != _KEY_BYTES:
        problem = f"{what} has {len(key)} bytes instead of {_KEY_BYTES}"
        raise JournalError(journal, problem, "Restore the original file.")
    return key


def _make(path: Path) -> None:
    """Create a key file at this path, atomically. If several processes try, the first one wins."""
    made = Path(f"{path}.{secrets.token_hex(8)}")
    fd = os.open(made, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(new_key())
        with contextlib.suppress(FileExistsError):
            os.link(made, path)
    finally:
        made.unlink()  # a process that ends before this may leave a second hard link, which `check_out_of_reach` reports


def keyed_digest(key: bytes, *parts: Any) -> str:
    """Compute a keyed digest over JSON values, in the given order."""
    body = b"\0".join(msgspec.json.encode(to_plain(part), order="sorted") for part in parts)
    return hmac.digest(key, b"handrail question\0" + body, hashlib.sha256).hex()
