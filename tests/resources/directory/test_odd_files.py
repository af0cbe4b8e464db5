"""Any sequence of changes leaves a folder exactly as the same changes without Handrail would, and undo reverts each.

The changes are writes, new folders, moves and deletions, and changes that only commands can make: new attributes,
access lists, groups, modes, pipes, sockets and links. Files have odd names, some paths are longer than a system call
accepts, and some folders pass on their group and a default access list.
"""

import contextlib
import os
import socket
import stat
import struct
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from handrail import DirectoryFilesystem
from handrail.journal.records import CallKey
from handrail.resources.mount import remove_tree
from handrail.resources.paths import reach, spelled
from handrail.resources.shell.folder_copy import Copy

DEFAULT, ACCESS = "system.posix_acl_default", "system.posix_acl_access"
ANYBODY = 0xFFFFFFFF
ENTRIES = ((1, 7, ANYBODY), (2, 6, 1234), (4, 5, ANYBODY), (16, 7, ANYBODY), (32, 0, ANYBODY))
LIST = struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *entry) for entry in ENTRIES)
LONG = b"/".join([b"n" * 250] * 17)
NAMES = [b"a", b"b\xff", b"n\n", b"back\\x41", "ü".encode()]

names = st.sampled_from(NAMES)
paths = st.lists(names, min_size=1, max_size=3).map(b"/".join)
folders = st.sampled_from([b"", b"shared/", b"shared/", LONG + b"/"])
places = st.tuples(folders, paths).map(b"".join)
values = st.sampled_from([b"1", b"\0\xff"])
modes = st.sampled_from([0o600, 0o640, 0o755, 0o770])
deeds = st.one_of(
    st.tuples(st.just("write"), places, st.sampled_from(["x", "long\n" * 3])),
    st.tuples(st.just("move"), places, places),
    st.tuples(st.sampled_from(["mkdir", "delete", "pipe", "socket", "list", "group"]), places),
    st.tuples(st.just("link"), places.map(lambda place: place + b"-link")),
    st.tuples(st.just("attribute"), places, values),
    st.tuples(st.just("chmod"), places, modes),
)


def snapshot(root: bytes) -> dict[bytes, tuple[Any, ...]]:
    """Return everything in a folder: names as bytes, kinds, modes, owners, groups, attributes and content."""
    found: dict[bytes, tuple[Any, ...]] = {}
    pending = [b""]
    while pending:
        folder = pending.pop()
        with reach(os.fsdecode(os.path.join(root, folder))) as here:
            for name in os.listdir(os.fsencode(here)):
                at = os.path.join(os.fsencode(here), name)
                path = os.path.join(folder, name)
                status = os.lstat(at)
                attributes = {
                    each: os.getxattr(at, each, follow_symlinks=False)
                    for each in os.listxattr(at, follow_symlinks=False)
                }
                content = b""
                if stat.S_ISREG(status.st_mode):
                    content = Path(os.fsdecode(at)).read_bytes()
                elif stat.S_ISLNK(status.st_mode):
                    content = os.readlink(at)
                elif stat.S_ISDIR(status.st_mode):
                    pending.append(path)
                found[path] = status.st_mode, status.st_uid, status.st_gid, attributes, content
    return found


def begin(root: Path) -> None:
    """Create a folder that passes on its group and an access list, a file with attributes, and very deep folders."""
    (root / "shared").mkdir()
    if os.geteuid() == 0:
        os.chown(root / "shared", 0, 4321)
    (root / "shared").chmod(0o2775)
    os.setxattr(root / "shared", DEFAULT, LIST)
    (root / "a").write_text("old")
    os.setxattr(root / "a", "user.first", b"1")
    os.setxattr(root / "a", ACCESS, LIST)
    here = os.open(root, os.O_RDONLY)
    for name in LONG.split(b"/"):
        os.mkdir(name, dir_fd=here)
        inner = os.open(name, os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = inner
    os.close(here)


def parents(root: Path, path: bytes) -> None:
    """Create the folders above a path."""
    for end in [at for at, byte in enumerate(path) if byte == ord("/")]:
        with reach(root / os.fsdecode(path[:end])) as at, contextlib.suppress(FileExistsError):
            os.mkdir(at)


def by_hand(root: Path, deed: tuple[Any, ...]) -> None:
    """Make a change without Handrail. Raises `OSError` if it is impossible."""
    verb, path, *rest = deed
    if verb in ("write", "mkdir", "pipe", "socket", "link"):
        parents(root, path)
    with reach(root / os.fsdecode(path)) as at:
        if verb == "write":
            if os.path.lexists(at) and not stat.S_ISREG(os.lstat(at).st_mode):
                raise OSError
            Path(at).write_text(rest[0])
        elif verb == "mkdir":
            if not os.path.isdir(at) or os.path.islink(at):
                os.mkdir(at)
        elif verb == "delete":
            os.lstat(at)
            remove_tree(Path(at))
        elif verb == "pipe":
            os.mkfifo(at)
        elif verb == "socket":
            with (
                tempfile.TemporaryDirectory(dir=root.parent) as short,
                socket.socket(socket.AF_UNIX) as bound,
            ):
                bound.bind(f"{short}/s")
                os.rename(f"{short}/s", _absent(at))
        elif verb == "link":
            os.symlink(b"to\xff", os.fsencode(at))
        elif verb == "move":
            os.lstat(at)
            if rest[0] == path or rest[0].startswith(path + b"/"):
                raise OSError
            parents(root, rest[0])
            with reach(root / os.fsdecode(rest[0])) as target:
                os.rename(at, _absent(target))
        else:
            _change(at, verb, *rest)


def _absent(path: str) -> str:
    if os.path.lexists(path):
        raise FileExistsError
    return path


def _change(at: str, verb: str, *rest: Any) -> None:
    """Change the metadata of a file or folder. Raises `OSError` for anything else."""
    status = os.lstat(at)
    if not (stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)):
        raise OSError
    if verb == "attribute":
        os.setxattr(at, "user.note", rest[0])
    elif verb == "list":
        os.setxattr(at, ACCESS, LIST)
        if stat.S_ISDIR(status.st_mode):
            os.setxattr(at, DEFAULT, LIST)
    elif verb == "group":
        os.chown(at, -1, 98 if os.geteuid() == 0 else os.getegid())
    elif verb == "chmod":
        os.chmod(at, rest[0])


def with_handrail(files: DirectoryFilesystem, deed: tuple[Any, ...], number: int) -> bool:
    """Make a change with Handrail, as one call: with the fork's own methods, or as a command on a copy of the folder.

    Returns whether there was anything to commit.
    """
    verb, path, *rest = deed
    fork = files.fork("call")
    try:
        at = spelled(os.fsdecode(path))
        if verb == "write":
            fork.write(at, rest[0])
        elif verb == "mkdir":
            fork.mkdir(at)
        elif verb == "delete":
            fork.delete(at, recursive=True)
        elif verb == "move":
            fork.move(at, spelled(os.fsdecode(rest[0])))
        else:
            _command(fork, lambda copy: by_hand(copy, deed))
        shown = fork.diff()
        shown.encode()
        again = files.fork("again")
        again.redo(fork.file_changes())
        assert verb == "move" or again.diff() == shown  # a redone move is shown as a deletion and a new file
        again.drop()
        fork.prepare()
        staged = fork.stage(CallKey(f"call {number}"))
        fork.apply()
        fork.applied()
        return staged is not None
    finally:
        fork.drop()


def _command(fork: Any, do: Callable[[Path], None]) -> None:
    layers = fork.layers()
    copy = Copy(layers.lowers, layers.upper, layers.work / "copy", lambda: None)
    copy.make()
    do(layers.work / "copy")
    copy.write_back()
    remove_tree(layers.work / "copy")
    fork.absorb(layers.mounted_at)


@pytest.fixture(autouse=True)
def needs_attributes(tmp_path: Path) -> None:
    try:
        os.setxattr(tmp_path, ACCESS, LIST)
    except OSError:
        pytest.skip("this disk has no access lists")


@settings(max_examples=500 if os.environ.get("HANDRAIL_DEEP") else 5)
@given(st.lists(deeds, min_size=1, max_size=5))
def test_any_changes_are_as_without_handrail_and_can_be_undone(changes: list[tuple[Any, ...]]):
    """After each call the folder equals its twin, which was changed without Handrail, and each undo reverts its call."""
    base = Path(tempfile.mkdtemp(prefix="handrail-test-"))
    root, twin = base / "root", base / "twin"
    for folder in (root, twin):
        folder.mkdir()
        begin(folder)
    files = DirectoryFilesystem(root)
    try:
        before: list[tuple[int, dict[bytes, Any]]] = []
        last = snapshot(os.fsencode(root))
        assert last == snapshot(os.fsencode(twin))
        for number, deed in enumerate(changes):
            if _both(files, twin, deed, number):
                before.append((number, last))
            last = snapshot(os.fsencode(root))
            assert last == snapshot(os.fsencode(twin)), deed
        for number, expected in reversed(before):
            files.undo(f"call {number}")
            assert snapshot(os.fsencode(root)) == expected
    finally:
        files.close()
        remove_tree(base)


def _both(files: DirectoryFilesystem, twin: Path, deed: tuple[Any, ...], number: int) -> bool:
    """Make a change in both folders. Returns False if it is impossible in both, or if there was nothing to commit."""
    try:
        by_hand(twin, deed)
    except OSError:
        with pytest.raises(OSError):  # noqa: PT011 (which one depends on the change)
            with_handrail(files, deed, number)
        return False
    return with_handrail(files, deed, number)
