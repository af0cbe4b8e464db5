"""Signed manifests in a staging folder.

A process finishes or reverts the commits that it finds in a staging folder. So each manifest carries a keyed MAC.
Without the key, nobody can plant a commit that a process would carry out.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
from pathlib import Path

import msgspec

from handrail.journal.digest import folder_key
from handrail.resources.directory.commit import Manifest

log = logging.getLogger("handrail.files")

MANIFEST = "manifest"


class Signed(msgspec.Struct, frozen=True, array_like=True):
    """An encoded manifest with its MAC."""

    mac: bytes
    body: bytes

    def is_genuine(self) -> bool:
        """Return whether this user's Handrail signed it."""
        return hmac.compare_digest(self.mac, _mac(self.body))


def sign(manifest: Manifest) -> bytes:
    """Encode a manifest, with a signature."""
    body = msgspec.msgpack.encode(manifest)
    return msgspec.msgpack.encode(Signed(_mac(body), body))


def read_manifest(folder: Path, name: str = MANIFEST) -> Manifest | None:
    """Read a commit's manifest. Returns None if it is missing, incomplete, or not signed with this user's key."""
    signed = _read(folder, name)
    if signed is None:
        return None
    if not signed.is_genuine():
        log.warning(
            "the commit in %s was not signed by this user's Handrail, so it is not carried out. Remove it if nobody "
            "needs it",
            folder,
        )
        return None
    return msgspec.msgpack.decode(signed.body, type=Manifest)


def is_foreign(folder: Path) -> bool:
    """Return whether a folder has a manifest that was not signed with this user's key."""
    signed = _read(folder, MANIFEST)
    return signed is not None and not signed.is_genuine()


def _mac(body: bytes) -> bytes:
    return hashlib.blake2b(body, key=folder_key(), digest_size=32, person=b"handrail commit").digest()


def _read(folder: Path, name: str) -> Signed | None:
    try:
        return msgspec.msgpack.decode((folder / name).read_bytes(), type=Signed)
    except msgspec.ValidationError:  # something other than a signed manifest
        return Signed(b"", b"")
    except (OSError, msgspec.DecodeError):
        return None
