"""`Facts`: the mode, owner, group and extended attributes of a file or folder.

Access control lists are extended attributes too. The attributes for file capabilities, for integrity checks (IMA and EVM)
and for overlays are never copied.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import struct
from collections.abc import Generator, Iterable, Iterator

import msgspec

ACCESS_LIST, DEFAULT_LIST = "system.posix_acl_access", "system.posix_acl_default"
SET_ID = stat.S_ISUID | stat.S_ISGID
_PRIVILEGES = ("security.capability", "security.ima", "security.evm")
_UNSUPPORTED = {errno.ENOTSUP, errno.EPERM, errno.EACCES, errno.EINVAL, errno.ENODATA}
_LISTS = {ACCESS_LIST: "access list", DEFAULT_LIST: "default access list"}
_TAGS = {1: "user:", 2: "user:{}", 4: "group:", 8: "group:{}", 16: "mask:", 32: "other:"}
_SHOWN = 60

Attributes = tuple[tuple[str, bytes], ...]
"""Names and values of extended attributes, sorted by name."""


class Facts(msgspec.Struct, frozen=True, omit_defaults=True):
    """The mode, owner, group and extended attributes of a file or folder."""

    mode: int
    uid: int = -1
    """The id of the owner, or -1 for the owner that a new file gets."""
    gid: int = -1
    """The id of the group, or -1 for the group that a new file gets."""
    attributes: Attributes = ()


def facts_at(at: str | os.PathLike[str] | int, status: os.stat_result) -> Facts:
    """Return the facts of the file at a path or descriptor, given its status. Does not follow a link."""
    return Facts(stat.S_IMODE(status.st_mode), status.st_uid, status.st_gid, read_attributes(at))


def read_attributes(at: str | os.PathLike[str] | int, *, follow: bool = False) -> Attributes:
    """Return the attributes that a copy of this file should have, except those that can't be read.

    Without `follow`, a link is not followed.
    """
    follow = follow or isinstance(at, int)
    try:
        names = os.listxattr(at, follow_symlinks=follow)
    except OSError:
        return ()
    found: list[tuple[str, bytes]] = []
    for name in sorted(names):
        if is_copied(name):
            with contextlib.suppress(OSError):
                found.append((name, os.getxattr(at, name, follow_symlinks=follow)))
    return tuple(found)


def is_copied(name: str) -> bool:
    """Return whether copying a file also copies an attribute with this name."""
    return ".overlay." not in name and name not in _PRIVILEGES


def is_portable(name: str) -> bool:
    """Return whether every user can read and set an attribute with this name on their own files."""
    return name.startswith("user.") or name in _LISTS


def write_facts(at: str | os.PathLike[str] | int, wanted: Facts) -> None:
    """Give a file or folder these facts, as far as this process may. Don't pass a link.

    Only root can change the owner. Other users can still set the group, if they are members of it. Raises `OSError` if
    the mode can't be set or the disk reports an error.
    """
    now = os.stat(at)
    uid, gid = (now.st_uid if wanted.uid < 0 else wanted.uid), (now.st_gid if wanted.gid < 0 else wanted.gid)
    if (now.st_uid, now.st_gid) != (uid, gid):
        try:
            os.chown(at, uid, gid)
        except PermissionError:
            with contextlib.suppress(PermissionError):
                os.chown(at, -1, gid)
    if stat.S_IMODE(now.st_mode) != wanted.mode or now.st_gid != gid:
        os.chmod(at, wanted.mode)
    write_attributes(at, wanted.attributes)


def write_attributes(at: str | os.PathLike[str] | int, wanted: Attributes) -> None:
    """Give a file or folder these attributes and remove its others, as far as this process may.

    Attributes that are never copied (see `is_copied`) are not removed. An attribute that the process or the disk does not
    allow is skipped. Raises `OSError` for any other error, for example if the disk is full.
    """
    try:
        names = os.listxattr(at)
    except OSError:
        names = []
    given = dict(wanted)
    for name in names:
        if name not in given and is_copied(name):
            with _as_far_as_allowed():
                os.removexattr(at, name)
    for name, value in wanted:
        with _as_far_as_allowed():
            os.setxattr(at, name, value)


@contextlib.contextmanager
def _as_far_as_allowed() -> Generator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise


def born_in(at: str, status: os.stat_result) -> Facts | None:
    """Return facts for a private folder that passes on to new files what `at` does, or None if it passes on nothing.

    A set-group-ID folder passes on its group. A default access list decides who may access new files.
    """
    try:
        default = os.getxattr(at, DEFAULT_LIST)
    except OSError:
        default = b""
    if not default and not status.st_mode & stat.S_ISGID:
        return None
    mode = 0o700 | status.st_mode & stat.S_ISGID
    return Facts(mode, -1, status.st_gid, ((DEFAULT_LIST, default),) if default else ())


def differences(before: Facts | None, after: Facts | None) -> Iterator[str]:
    """Yield a line of a diff for each difference in owner, group or attributes.

    For a new file, only attributes are shown, and for a removed file nothing. An owner or group of -1 is not compared.
    """
    if before is not None and after is not None:
        for what, old, new in (("owner", before.uid, after.uid), ("group", before.gid, after.gid)):
            if old != new and -1 not in (old, new):
                yield f"{what} {old} becomes {new}"
    if after is None:
        return
    old, new = dict(before.attributes if before else ()), dict(after.attributes)
    for name in sorted(old.keys() | new.keys()):
        what = _LISTS.get(name, f"attribute {name}")
        if name not in new:
            yield f"{what} removed"
        elif old.get(name) != new[name]:
            yield f"{what}: {_shown_list(new[name]) if name in _LISTS else _shown_value(new[name])}"


def _shown_value(value: bytes) -> str:
    try:
        text = value.decode()
    except UnicodeDecodeError:
        text = "\0"
    if text.isprintable() and len(text) <= _SHOWN:
        return f'"{text}"'
    cut = "…" if len(value) > _SHOWN // 2 else ""
    return f"{len(value)} bytes {value[: _SHOWN // 2].hex()}{cut}"


def _shown_list(value: bytes) -> str:
    """Format an access list like `getfacl`, with numbers for users and groups. A malformed list is shown like any other attribute."""
    try:
        entries = list(struct.iter_unpack("<HHI", value[4:]))
        return ",".join(_shown_entries(entries))
    except (struct.error, KeyError):
        return _shown_value(value)


def _shown_entries(entries: Iterable[tuple[int, int, int]]) -> Iterator[str]:
    for tag, permissions, number in entries:
        letters = "".join(
            letter if permissions & bit else "-" for letter, bit in zip("rwx", (4, 2, 1), strict=True)
        )
        yield f"{_TAGS[tag].format(number)}:{letters}"
