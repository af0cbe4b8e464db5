"""File metadata and special files: mode, owner, group, attributes, access lists, pipes and sockets."""

import asyncio
import os
import socket
import stat
import struct
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from handrail.errors import FileError
from handrail.journal.records import CallKey
from handrail.resources.directory import DirectoryFork
from handrail.resources.shell import probe
from support.filesystems import Folders, commit
from support.folders import PYTHON, anything

ACCESS, DEFAULT = "system.posix_acl_access", "system.posix_acl_default"
ANYBODY = 0xFFFFFFFF

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can change owners")


def acl(*entries: tuple[int, int, int]) -> bytes:
    """Return an access list as the kernel stores it. Each entry is a tag, permissions, and a user or group id."""
    return struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *entry) for entry in entries)


KNOWN = 1234 if os.geteuid() == 0 else os.geteuid()
"""A user id that exists in a command's namespace. The namespace of an ordinary user has only that user's id."""
SHARED = acl((1, 7, ANYBODY), (2, 6, KNOWN), (4, 4, ANYBODY), (16, 6, ANYBODY), (32, 0, ANYBODY))
"""An access list with all permissions for the owner, who must be able to enter folders, and fewer for one user, the group and others."""


@pytest.fixture(params=["overlay", "copy"])
def backend(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    support = probe(tmp_path)
    if not support.contained or (request.param == "overlay" and not support.overlay):
        pytest.skip("; ".join(support.missing))
    return request.param


@pytest.fixture(autouse=True)
def needs_attributes(tmp_path: Path) -> None:
    try:
        os.setxattr(tmp_path, "user.probe", b"")
        os.removexattr(tmp_path, "user.probe")
    except OSError:
        pytest.skip("this disk has no extended attributes")


def run(fork: DirectoryFork, backend: str, code: str) -> None:
    """Run Python code as a command on a fork."""
    ran = asyncio.run(anything(backend).run_on(fork, [PYTHON, "-c", f"import os, socket\n{code}"]))
    assert ran.ok, ran.output


def kept(fork: DirectoryFork, call_id: str = "call") -> None:
    """Commit a fork's changes in such a way that they can be undone."""
    fork.prepare()
    fork.stage(CallKey(call_id))
    fork.apply()
    fork.applied()


def facts(path: Path) -> tuple[Any, ...]:
    """Return a file's kind and mode, owner, group and attributes."""
    found = path.lstat()
    attributes = {
        name: os.getxattr(path, name, follow_symlinks=False)
        for name in os.listxattr(path, follow_symlinks=False)
    }
    return found.st_mode, found.st_uid, found.st_gid, attributes


def dress(path: Path, mode: int) -> None:
    """Give a file a mode, attributes and an access list and, if possible, a different owner and group."""
    path.chmod(mode)
    if os.geteuid() == 0:
        os.chown(path, 1234, 4321)
    os.setxattr(path, "user.note", b"kept \0\xff")
    os.setxattr(path, ACCESS, SHARED)


# --- edits ---------------------------------------------------------------------------------------------

EDITS: dict[str, Callable[[Any], object]] = {
    "write": lambda files: files.write("a", "new"),
    "append": lambda files: files.append("a", "new"),
    "edit": lambda files: files.edit("a", "old", "new"),
    "move and write": lambda files: (files.move("a", "b"), files.write("b", "new"), files.move("b", "a")),
    "twice": lambda files: (files.write("a", "newer"), files.write("a", "new")),
}


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("way", EDITS)
def test_an_edit_keeps_what_a_file_is(folders: Folders, way: str, nested: bool):
    """A rewritten file keeps its mode, owner, group, attributes and access list, and undo restores them."""
    files = folders({"a": "old"})
    dress(files.root / "a", 0o640)
    before = facts(files.root / "a")
    fork = files.fork("call")
    inner = fork.fork("inner") if nested else fork
    EDITS[way](inner)
    if nested:
        commit(inner)
    kept(fork)
    assert "new" in files.read("a")
    assert facts(files.root / "a") == before
    files.undo("call")
    assert files.read("a") == "old"
    assert facts(files.root / "a") == before


def test_an_edit_is_seen_with_everything_by_a_command(folders: Folders, backend: str):
    """A command sees the attributes and access list of a file that its call rewrote, and of the folder above it."""
    files = folders({"d/a": "old", "d/b": "old"})
    for name in ("d", "d/a", "d/b"):
        dress(files.root / name, 0o750)
    os.setxattr(files.root / "d", DEFAULT, SHARED)
    before = {name: facts(files.root / name) for name in ("d", "d/a", "d/b")}
    fork = files.fork("call")
    fork.write("d/a", "new")
    run(
        fork,
        backend,
        f"""
for name in ("d", "d/a"):
    assert os.getxattr(name, "user.note") == b"kept \\0\\xff", name
    assert os.getxattr(name, {ACCESS!r}) == {SHARED!r}, name
assert os.getxattr("d", {DEFAULT!r}) == {SHARED!r}
open("d/b", "a").write("new")
open("d/new", "w").close()
assert {ACCESS!r} in os.listxattr("d/new")
""",
    )
    assert fork.changed == ("d/a", "d/b", "d/new")
    commit(fork)
    assert {name: facts(files.root / name) for name in before} == before
    assert ACCESS in os.listxattr(files.root / "d/new")


def test_a_folder_keeps_what_it_is_when_it_is_moved(folders: Folders):
    """A moved folder and the folders in it keep their modes, owners, groups, attributes and access lists."""
    files = folders({"d/e/a": "old"})
    for name in ("d", "d/e"):
        dress(files.root / name, 0o2750)
        os.setxattr(files.root / name, DEFAULT, SHARED)
    before = [facts(files.root / name) for name in ("d", "d/e")]
    fork = files.fork("call")
    fork.move("d", "f/g")
    kept(fork)
    assert [facts(files.root / name) for name in ("f/g", "f/g/e")] == before
    files.undo("call")
    assert [facts(files.root / name) for name in ("d", "d/e")] == before


def test_privileges_are_not_kept(folders: Folders):
    """A rewritten file loses its set-user-ID and set-group-ID bits and its capabilities."""
    files = folders({"a": "old"})
    (files.root / "a").chmod(0o6755)
    if os.geteuid() == 0:
        os.setxattr(
            files.root / "a", "security.capability", struct.pack("<IIIII", 0x02000001, 1 << 13, 0, 0, 0)
        )
    fork = files.fork("call")
    fork.write("a", "new")
    assert "old mode 6755\nnew mode 755\n" in fork.diff()
    commit(fork)
    assert facts(files.root / "a")[0] == stat.S_IFREG | 0o755
    assert facts(files.root / "a")[3] == {}


# --- new files -----------------------------------------------------------------------------------------


@needs_root
@pytest.mark.parametrize("with_list", [False, True])
def test_new_files_are_made_as_their_folder_says(folders: Folders, with_list: bool):
    """New files and folders in a set-group-ID folder get its group, and the permissions of its default access list if it has one."""
    files = folders({"d/a": "old", "plain/a": "old"})
    os.chown(files.root / "d", 0, 4321)
    (files.root / "d").chmod(0o2775)
    if with_list:
        os.setxattr(files.root / "d", DEFAULT, SHARED)
    fork = files.fork("call")
    fork.write("d/new", "x")
    fork.write("d/e/f/new", "x")
    fork.mkdir("d/made")
    fork.write("plain/new", "x")
    commit(fork)
    by_hand = files.root / "d" / "hand"
    by_hand.mkdir()
    (by_hand / "file").write_text("")
    assert (
        facts(files.root / "d/e")
        == facts(files.root / "d/e/f")
        == facts(files.root / "d/made")
        == facts(by_hand)
    )
    assert facts(files.root / "d/new") == facts(files.root / "d/e/f/new") == facts(by_hand / "file")
    assert facts(by_hand)[2] == 4321
    assert facts(files.root / "plain/new")[2:] == (0, {})


@needs_root
def test_what_a_command_makes_gets_the_group_of_its_folder(folders: Folders, backend: str):
    """A file or folder that is created in a set-group-ID folder gets that folder's group. The folder may be the root."""
    files = folders({"d/a": "old"})
    for folder in (files.root, files.root / "d"):
        os.chown(folder, 0, 4321)
        folder.chmod(0o2775)
    fork = files.fork("call")
    fork.write("d/mine", "")
    run(
        fork,
        backend,
        "open('d/new', 'w').close(); os.mkdir('d/e'); open('d/e/new', 'w').close(); open('new', 'w').close()",
    )
    commit(fork)
    for name in ("d/mine", "d/new", "d/e", "d/e/new", "new"):
        assert facts(files.root / name)[2] == 4321, name


# --- metadata that a command changes -------------------------------------------------------------------

CHANGES = {
    "attribute": ("os.setxattr(name, 'user.note', b'new')", 'attribute user.note: "new"'),
    "another attribute": ("os.setxattr(name, 'user.more', b'\\x00\\xff')", "attribute user.more: 2 bytes 00ff"),
    "attribute removed": ("os.removexattr(name, 'user.note')", "attribute user.note removed"),
    "list removed": (f"os.removexattr(name, {ACCESS!r})", "access list removed"),
    "list": (
        f"os.setxattr(name, {ACCESS!r}, {acl((1, 6, ANYBODY), (2, 7, 99), (4, 4, ANYBODY), (16, 7, ANYBODY), (32, 0, ANYBODY))!r})",
        "access list: user::rw-,user:99:rwx,group::r--,mask::rwx,other::---",
    ),
    "owner": ("os.chown(name, 99, -1)", "owner 1234 becomes 99"),
    "group": ("os.chown(name, -1, 98)", "group 4321 becomes 98"),
}  # fmt: skip


@needs_root
@pytest.mark.parametrize("name", ["a", "d"])
@pytest.mark.parametrize("case", CHANGES)
def test_what_a_command_changes_besides_bytes_is_committed(
    folders: Folders, backend: str, case: str, name: str
):
    """A command's changes to a file's or folder's attributes, access list, owner or group are shown, committed and undone."""
    code, shown = CHANGES[case]
    files = folders({"a": "old", "d/a": "old"})
    dress(files.root / name, 0o770)
    before = facts(files.root / name)
    fork = files.fork("call")
    run(fork, backend, f"name = {name!r}\n{code}")
    assert fork.changed == ("d/" if name == "d" else "a",)
    assert shown in fork.diff().splitlines()
    again = files.fork("again")  # a resumed run redoes the changes like this
    again.redo(fork.file_changes())
    assert again.diff() == fork.diff()
    fork.drop()
    kept(again)
    after = facts(files.root / name)
    assert after != before
    assert (files.root / "d/a").read_text() == "old"
    files.undo("call")
    assert facts(files.root / name) == before


def test_an_attribute_of_a_new_file_is_shown(folders: Folders, backend: str):
    """The diff of a new file or folder shows its attributes."""
    files = folders({})
    fork = files.fork("call")
    run(
        fork,
        backend,
        "os.mkdir('d')\nopen('d/a', 'w').close()\nfor n in ('d', 'd/a'): os.setxattr(n, 'user.x', n.encode())",
    )
    lines = fork.diff().splitlines()
    assert 'attribute user.x: "d"' in lines
    assert 'attribute user.x: "d/a"' in lines
    commit(fork)
    assert facts(files.root / "d")[3] == {"user.x": b"d"}
    assert facts(files.root / "d/a")[3] == {"user.x": b"d/a"}


# --- pipes and sockets ---------------------------------------------------------------------------------

MAKE = {
    "pipe": "os.mkfifo('p', 0o640)",
    "socket": "socket.socket(socket.AF_UNIX).bind('p')",
}
IS = {"pipe": stat.S_ISFIFO, "socket": stat.S_ISSOCK}


@pytest.mark.parametrize("kind", MAKE)
def test_a_pipe_or_socket_that_a_command_makes_is_kept(folders: Folders, backend: str, kind: str):
    """A pipe or socket that a command makes is shown in the diff, committed, and seen by later commands.

    It can be moved and removed, and each of these calls can be undone.
    """
    files = folders({"a": "old"})
    fork = files.fork("call")
    run(fork, backend, MAKE[kind])
    assert fork.changed == ("p",)
    assert f"new {kind} mode" in fork.diff()
    run(fork, backend, "assert os.path.lexists('p')")
    kept(fork)
    assert IS[kind]((files.root / "p").lstat().st_mode)
    second = files.fork("call")
    second.move("p", "d/q")
    run(second, backend, "assert os.path.lexists('d/q') and not os.path.lexists('p')")
    kept(second, "second")
    assert IS[kind]((files.root / "d/q").lstat().st_mode)
    third = files.fork("call")
    run(third, backend, "os.unlink('d/q')")
    assert third.changed == ("d/q",)
    assert f"deleted {kind} mode" in third.diff()
    kept(third, "third")
    for call_id in ("third", "second", "call"):
        files.undo(call_id)
    assert sorted(os.listdir(files.root)) == ["a"]


@pytest.mark.parametrize("resumed", [False, True])
@pytest.mark.parametrize("kind", MAKE)
def test_a_file_that_becomes_a_pipe_or_socket_is_replaced(
    folders: Folders, backend: str, kind: str, resumed: bool
):
    """A command can replace a file with a pipe or a socket, and a pipe or a socket with a file. Both can be undone."""
    files = folders({"p": "old"})
    fork = files.fork("call")
    run(fork, backend, f"os.unlink('p'); {MAKE[kind]}")
    assert fork.changed == ("p",)
    assert f"file becomes {kind}" in fork.diff().splitlines()
    assert [data for _, *data in fork.changes()] == [[b"old", b""]]
    if resumed:
        again = files.fork("again")
        again.redo(fork.file_changes())
        assert again.diff() == fork.diff()
        fork.drop()
        fork = again
    kept(fork)
    assert IS[kind]((files.root / "p").lstat().st_mode)
    back = files.fork("back")
    run(back, backend, "os.unlink('p'); open('p', 'w').write('new')")
    assert f"{kind} becomes file" in back.diff().splitlines()
    kept(back, "back")
    assert files.read("p") == "new"
    files.undo("back")
    assert IS[kind]((files.root / "p").lstat().st_mode)
    files.undo("call")
    assert files.read("p") == "old"


@needs_root
def test_a_device_that_a_command_makes_is_refused(folders: Folders):
    """A device that a command made is refused, because it could lead out of the folder. The error says that it is a device."""
    files = folders({"a": "old"})
    fork = files.fork("call")
    layers = fork.layers()
    os.mknod(layers.upper / "null", stat.S_IFCHR | 0o666, os.makedev(1, 3))
    with pytest.raises(FileError, match="device"):
        fork.absorb(layers.mounted_at)
    fork.drop()


def test_a_pipe_is_neither_written_nor_lost(folders: Folders):
    """A write to a pipe or a socket is refused. Moving or deleting a folder moves or deletes those in it too."""
    files = folders({"d/a": "old"})
    os.mkfifo(files.root / "d/pipe")
    with tempfile.TemporaryDirectory() as short, socket.socket(socket.AF_UNIX) as listening:
        listening.bind(f"{short}/s")
        os.rename(f"{short}/s", files.root / "d/socket")
    for path in ("d/pipe", "d/socket"):
        with pytest.raises(FileError, match="a pipe, a socket"):
            files.write(path, "text")
        with pytest.raises(FileError, match="a pipe, a socket"):
            files.append(path, "text")
    files.move("d", "e")
    assert stat.S_ISFIFO((files.root / "e/pipe").lstat().st_mode)
    assert stat.S_ISSOCK((files.root / "e/socket").lstat().st_mode)
    files.delete("e", recursive=True)
    assert os.listdir(files.root) == []
