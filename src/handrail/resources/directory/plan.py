"""The plan of a commit: its steps as plain data, which a restarted process can finish.

There are three kinds of step. *put*: a slot of the commit's own folder is exchanged with what is at the
path, or moved there if nothing is. *take*: what is at the path moves into a slot. *mode*: a folder gets
another mode. Each step is one rename, says what it expects to displace, and has one of the three as its
opposite. So reverting, continuing after a crash and undoing are the same mechanism.
"""

from __future__ import annotations

import binascii
import hashlib
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal

import msgspec

from handrail.resources.directory.content import Folder, identity, mode_of
from handrail.resources.layer import Node, Over
from handrail.resources.paths import ancestors, join


class Step(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """One change of one path."""

    do: Literal["put", "take", "mode"]
    path: str
    """The path for display, with each byte that is not UTF-8 written as `\\xff`. Use `where` to access it."""
    bytes: str = ""
    """The path in hexadecimal, if it is not UTF-8."""
    slot: str = ""
    """The slot's name in the commit's folder: holds the new content, afterwards what was displaced."""
    before: str = ""
    """The identity of what is displaced; "" for nothing."""
    after: str = ""
    """The identity of the new content."""
    tree: str = ""
    """For a displaced folder, a digest of everything in it."""
    folder: bool = False
    """Whether the new content is a folder; an existing folder is as good."""
    mode: int = 0
    old_mode: int = 0

    @property
    def where(self) -> str:
        """The path as the disk knows it."""
        return os.fsdecode(binascii.unhexlify(self.bytes)) if self.bytes else self.path

    def opposite(self) -> Step:
        """Return the step that reverts this one."""
        if self.do == "mode":
            return msgspec.structs.replace(self, mode=self.old_mode, old_mode=self.mode)
        if self.do == "take":
            return Step(do="put", path=self.path, bytes=self.bytes, slot=self.slot, after=self.before)
        if self.before:
            back = msgspec.structs.replace(self, before=self.after, after=self.before, folder=False)
        else:
            back = Step(do="take", path=self.path, bytes=self.bytes, slot=self.slot, before=self.after)
        return msgspec.structs.replace(back, tree=EMPTY if self.folder else "")


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """One commit to one folder."""

    call_id: str
    root: str
    staging: str
    folder: str
    """The folder of the slots, relative to the staging folder."""
    journal: str = ""
    """The id of the journal that decides whether this was committed; "" for none."""
    steps: tuple[Step, ...] = ()

    @property
    def paths(self) -> tuple[str, ...]:
        return tuple(step.where for step in self.steps)


class Change(msgspec.Struct, frozen=True):
    """One changed path of a fork: the new node and the node it replaces."""

    path: str
    node: Node
    base: Node


def step_at(path: str, **fields: Any) -> Step:
    """Return a step for any path a disk can have."""
    try:
        path.encode()
    except UnicodeEncodeError:
        raw = os.fsencode(path)
        return Step(path=raw.decode(errors="backslashreplace"), bytes=raw.hex(), **fields)
    return Step(path=path, **fields)


def shown_version(version: int) -> str:
    """Format a version's identity for a manifest."""
    return f"{identity(version):x}" if version else ""


def digest(members: Iterable[tuple[str, str]]) -> str:
    """Compute a digest of a folder's content at any depth, from relative paths and identities."""
    found = hashlib.blake2b(digest_size=16)
    for path, version in sorted(members):
        found.update(os.fsencode(path) + b"\0" + version.encode() + b"\0")
    return found.hexdigest()


EMPTY = digest(())


def in_order(over: Over) -> Iterator[Change]:
    """Yield removals first, innermost first; then additions, outermost first.

    A removed folder takes everything in it along, in one step.
    """
    folders = sorted(over, key=len)
    trees = {
        join(folder, name)
        for folder in folders
        for name, (node, base) in over[folder].items()
        if base.is_folder and not node.is_folder
    }
    for folder in reversed(folders):
        if folder in trees or any(path in trees for path in ancestors(folder)):
            continue
        for name, (node, base) in over[folder].items():
            if base.version and not node.version:
                yield Change(join(folder, name), node, base)
    for folder in folders:
        for name, (node, base) in over[folder].items():
            if node.version and not (node.is_folder and base.is_folder and not _other_mode(node, base)):
                yield Change(join(folder, name), node, base)


def tree_digest(over: Over, path: str) -> str:
    """Return the digest of what a fork saw in a folder that it removes."""
    prefix = f"{path}/"
    return digest(
        (join(folder, name)[len(prefix) :], shown_version(base.version))
        for folder, changes in over.items()
        if folder == path or folder.startswith(prefix)
        for name, (_, base) in changes.items()
        if base.version
    )


def opposites(steps: Sequence[Step]) -> tuple[Step, ...]:
    """Return the steps that revert these, in the order to apply them."""
    return tuple(step.opposite() for step in reversed(steps))


def _other_mode(node: Node, base: Node) -> bool:
    return isinstance(node, Folder) and mode_of(base) not in (None, node.mode)
