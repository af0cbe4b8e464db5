"""A real folder as a filesystem: disk features, the paths that a commit changes, and undo."""

import fcntl
import os
import struct
import subprocess
import sys
import textwrap
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from handrail import DirectoryFilesystem
from handrail.errors import (
    Conflict,
    ContextError,
    DefinitionError,
    FileError,
    FileLimitReached,
    PathRefused,
    UndoRefused,
)
from handrail.journal.records import CallKey
from handrail.protocols import Filesystem, Forkable
from handrail.resources.directory import DirectoryFork
from handrail.resources.directory.area import Area
from handrail.resources.directory.disk import Disk, Jail
from handrail.resources.memory import FileLimits
from support.filesystems import Folders, aside, commit, fill, marks, tree
from support.texts import NO_COMMIT_KEPT


def committed(files: DirectoryFilesystem, call_id: str, *deeds: Callable[[DirectoryFork], Any]) -> None:
    """Commit a call that makes these changes, as the gate does."""
    fork = files.fork("call")
    for deed in deeds:
        deed(fork)
    fork.prepare()
    fork.stage(CallKey(call_id))
    fork.apply()
    fork.applied()


# --- disk features ---------------------------------------------------------------------------------


def test_it_is_a_filesystem_that_can_be_forked(folders: Folders):
    """The folder and its forks satisfy the filesystem protocols."""
    files = folders()
    assert isinstance(files, Filesystem)
    assert isinstance(files, Forkable)
    assert isinstance(files.fork("call"), Filesystem)


def test_reading_makes_nothing_beside_the_folder(folders: Folders):
    """Reading creates nothing beside the folder. The first write creates a private staging folder there."""
    files = folders({"a": "1"})
    fork = files.fork("call")
    assert (fork.read("a"), fork.list()[0].path, fork.glob("**")) == ("1", "a", ("a",))
    commit(fork)
    assert os.listdir(files.root.parent) == ["root0"]
    fork = files.fork("call")
    fork.write("a", "2")
    fork.drop()
    assert sorted(os.listdir(files.root.parent)) == [".root0.handrail", "root0"]
    assert files.staging.stat().st_mode & 0o777 == 0o700
    assert (files.read("a"), aside(files)) == ("1", [])


def test_a_read_walks_nothing(folders: Folders, monkeypatch: pytest.MonkeyPatch):
    """Looking up single paths lists no folder."""
    files = folders({f"f{number}": "" for number in range(50)})

    def refuse(*args: Any) -> None:
        raise AssertionError("a folder was listed")

    monkeypatch.setattr(os, "scandir", refuse)
    monkeypatch.setattr(os, "listdir", refuse)
    fork = files.fork("call")
    fork.read("f7")
    fork.exists("f8/x")
    fork.stat("f9")
    assert fork.stale() == ()
    commit(fork)


def test_a_write_looks_a_file_up_once(folders: Folders, monkeypatch: pytest.MonkeyPatch):
    """A write looks its path up once and reads the file's attributes once, and a diff repeats neither."""
    looked: list[str] = []
    for name in ("look", "attributes"):
        found = getattr(Jail, name)

        def counted(jail: Jail, path: str, found: Any = found, name: str = name) -> Any:
            looked.append(f"{name} {path}")
            return found(jail, path)

        monkeypatch.setattr(Jail, name, counted)
    files = folders({"d/a": "1"})
    fork = files.fork("call")
    fork.write("d/a", "2")
    assert "d/a" in fork.diff()
    assert looked == ["look d/a", "attributes d/a"]
    fork.drop()


def test_modes_and_times_keep(folders: Folders):
    """Rewritten and moved files and folders keep their modes, and a file in a moved folder also keeps its modification time."""
    files = folders({"run.sh": "a", "secret": "b", "shut/x": "c"})
    for name, mode in (("run.sh", 0o755), ("secret", 0o600), ("shut", 0o700), ("shut/x", 0o640)):
        (files.root / name).chmod(mode)
    os.utime(files.root / "shut" / "x", ns=(10**18, 10**18))
    fork = files.fork("call")
    fork.append("run.sh", "more")
    fork.edit("secret", "b", "c")
    fork.move("run.sh", "bin/run.sh")
    fork.move("shut", "opened")
    fork.write("new", "")
    commit(fork)
    modes = {str(p.relative_to(files.root)): p.stat().st_mode & 0o777 for p in files.root.rglob("*")}
    umask = os.umask(0)
    os.umask(umask)
    assert modes == {
        "bin": 0o777 & ~umask, "bin/run.sh": 0o755, "new": 0o666 & ~umask, "opened": 0o700,
        "opened/x": 0o640, "secret": 0o600,
    }  # fmt: skip
    assert (files.root / "opened" / "x").stat().st_mtime_ns == 10**18


def test_a_file_that_is_moved_is_not_copied(folders: Folders):
    """A large file that is moved keeps its inode instead of being copied, even through nested forks."""
    files = folders({"big": "x"})
    os.truncate(files.root / "big", 1 << 33)
    inode = (files.root / "big").stat().st_ino
    outer = files.fork("outer")
    inner = outer.fork("inner")
    inner.move("big", "d/large")
    commit(inner)
    commit(outer)
    assert (files.root / "d" / "large").stat().st_ino == inode
    with pytest.raises(FileLimitReached, match="files of at most 16777216 bytes can be read"):
        files.read("d/large")
    assert files.grep("x") == ()


def test_only_what_was_touched_is_touched(folders: Folders):
    """A commit replaces only the files that it touches. Other files keep their inodes and times."""
    files = folders({"a": "1", "b": "1", "d/x": "1", ".venv/lib/y": "1"})
    before = marks(files.root)
    fork = files.fork("call")
    fork.write("a", "2")
    fork.read("b")
    fork.write("d/new", "2")
    commit(fork)
    after = marks(files.root)
    assert {path for path in after if after[path] != before.get(path)} == {"a", "d/new"}


def test_a_delete_takes_only_what_was_seen(folders: Folders):
    """A recursive delete conflicts if another program adds a file to the folder before the commit."""
    files = folders({"d/x": "1", "d/e/y": "1"})
    for late in ("d/new", "d/e/new"):
        fork = files.fork("call")
        fork.delete("d", recursive=True)
        fill(files.root, {late: "theirs"})
        with pytest.raises(Conflict, match=late):
            fork.prepare()
        assert (files.root / late).read_text() == "theirs"
        (files.root / late).unlink()


class MeddlingDisk(Disk):
    """A disk that calls `meddle` with a name just before it renames something to or from that name."""

    def __init__(self, meddle: Callable[[str], None]) -> None:
        self._meddle = meddle

    def exchange(self, source: int, name: str, target: int, other: str) -> None:
        self._meddle(other)
        super().exchange(source, name, target, other)

    def place(self, source: int, name: str, target: int, new_name: str) -> None:
        self._meddle(new_name)
        self._meddle(name)
        super().place(source, name, target, new_name)


MEDDLING: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "edited": ("rewritten", lambda root: (root / "rewritten").write_text("theirs")),
    "replaced": ("rewritten", lambda root: ((root / "t").write_text("t"), (root / "t").rename(root / "rewritten"))),
    "deleted": ("rewritten", lambda root: (root / "rewritten").unlink()),
    "new mode": ("rewritten", lambda root: (root / "rewritten").chmod(0o700)),
    "made": ("made", lambda root: (root / "made").write_text("theirs")),
    "edited, to be deleted": ("deleted", lambda root: (root / "deleted").write_text("theirs")),
    "put into a folder that goes": ("tree", lambda root: (root / "tree" / "new").write_text("theirs")),
    "edited in a folder that goes": ("tree", lambda root: (root / "tree" / "e" / "x").write_text("theirs")),
}  # fmt: skip


@pytest.mark.parametrize("case", MEDDLING)
def test_what_somebody_changes_in_the_last_moment_stays(folders: Folders, case: str):
    """If another program changes a path just before the commit does, the commit conflicts and reverts only its own changes."""
    name, change = MEDDLING[case]
    meddled: list[str] = []

    def meddle(at: str) -> None:
        if at == name and not meddled:
            meddled.append(at)
            change(files.root)

    was = {"rewritten": "1", "deleted": "1", "tree/e/x": "1", "tree/y": "1", "needed/z": "1", "last": "1"}
    files = folders(was, disk=MeddlingDisk(meddle))
    beside = folders(was)
    change(beside.root) if case != "made" else fill(beside.root, {"made": "theirs"})
    fork = files.fork("call")
    fork.write("rewritten", "ours")
    fork.write("made", "ours")
    fork.delete("deleted")
    fork.delete("tree", recursive=True)
    fork.write("needed/in", "ours")
    fork.mkdir("new/folder")
    fork.write("last", "ours")
    untouched = marks(files.root)
    fork.prepare()
    with pytest.raises(Conflict):
        fork.apply()
    assert tree(files) == tree(beside)
    now = marks(files.root)
    assert {path for path, mark in untouched.items() if now.get(path, mark) != mark} <= {
        *([name] if name != "tree" else ["tree/e/x"])
    }
    assert (files.root / "rewritten").exists() == (beside.root / "rewritten").exists()
    assert aside(files) == []


def test_a_disk_that_refuses_half_way_changes_nothing(folders: Folders):
    """If the disk fails in the middle of the renames, the commit raises an error and everything is restored."""

    class FullDisk(Disk):
        def exchange(self, source: int, name: str, target: int, other: str) -> None:
            if other == "b":
                raise OSError(28, "No space left on device")
            super().exchange(source, name, target, other)

    files = folders({"a": "1", "b": "1", "gone": "1"}, disk=FullDisk())
    before = marks(files.root)
    fork = files.fork("call")
    for name in ("a", "b"):
        fork.write(name, "2")
    fork.delete("gone")
    fork.prepare()
    with pytest.raises(FileLimitReached, match="'b': the disk is full"):
        fork.apply()
    assert marks(files.root) == before
    assert aside(files) == []


def test_where_nothing_can_be_exchanged_it_is_linked_and_replaced(
    folders: Folders, monkeypatch: pytest.MonkeyPatch
):
    """On a disk that can't exchange two names atomically, commits and undo still work."""
    from handrail.resources.directory import disk

    def refuse(*args: Any) -> None:
        raise NotImplementedError

    monkeypatch.setattr(disk, "exchange", refuse)
    monkeypatch.setattr(disk, "_renameat2", None)
    files = folders({"a": "1", "d/x": "1"})
    committed(
        files, "call", lambda f: f.write("a", "2"), lambda f: f.write("n", "2"), lambda f: f.move("d", "e")
    )
    assert tree(files) == {"a": "2", "e": None, "e/x": "1", "n": "2"}
    files.undo("call")
    assert tree(files) == {"a": "1", "d": None, "d/x": "1"}


def test_what_was_read_can_be_read_again(folders: Folders):
    """A fork that reads a file again gets the same content, even if the file has changed since.

    Reading a file that has changed since its `stat` raises `Conflict`.
    """
    files = folders({"read": "1", "seen": "1"})
    fork = files.fork("call")
    assert (fork.read("read"), fork.stat("seen").size) == ("1", 1)
    fill(files.root, {"read": "22", "seen": "22"})
    assert fork.read("read") == "1"
    with pytest.raises(Conflict, match="seen"):
        fork.read("seen")
    assert fork.stale() == ("read", "seen")


def test_a_listing_depends_on_names_alone(folders: Folders):
    """A glob depends on names and kinds: replacing a file with a folder makes the fork stale, but new content does not."""
    files = folders({"d/a": "1", "d/b": "1"})
    fork = files.fork("call")
    assert fork.glob("d/*") == ("d/a", "d/b")
    files.write("d/a", "2")
    assert (fork.read("d/a"), fork.stale()) == ("2", ())
    (files.root / "d" / "b").unlink()
    (files.root / "d" / "b").mkdir()
    assert fork.stale() == ("d/",)


def test_limits_hold_for_what_one_call_changes(folders: Folders):
    """Limits apply only to what one call changes. Files that already exist do not count."""
    files = folders({f"f{n}": "x" * 10 for n in range(5)}, limits=FileLimits(20, 2, 30))
    fork = files.fork("call")
    with pytest.raises(FileLimitReached, match=r"would have 21 bytes, .* file is 20"):
        fork.write("a", "x" * 21)
    fork.write("a", "x" * 20)
    fork.write("b", "")
    with pytest.raises(FileLimitReached, match="limit of 2 files and folders"):
        fork.write("c", "")
    commit(fork)
    files.write("c", "")


# --- undo -------------------------------------------------------------------------------------------

FILES = {"a": "1", "gone": "1", "moved": "1", "tree/e/x": "1", "swap": "1", "pack/y": "1"}
DEEDS: list[Callable[[Any], Any]] = [
    lambda f: f.write("a", "2"),
    lambda f: f.delete("gone"),
    lambda f: f.move("moved", "n/m"),
    lambda f: f.delete("tree", recursive=True),
    lambda f: (f.delete("swap"), f.write("swap/in", "2")),
    lambda f: (f.delete("pack", recursive=True), f.write("pack", "2")),
    lambda f: f.mkdir("empty"),
]


def test_undo_gives_everything_back(folders: Folders):
    """Undo restores the same files, with their inodes, times and modes. A second undo is refused."""
    files = folders(FILES)
    (files.root / "a").chmod(0o750)
    before, was = marks(files.root), tree(files)
    committed(files, "call", *DEEDS)
    assert tree(files)["a"] == "2"
    paths = ("a", "empty", "gone", "moved", "n", "n/m", "pack", "swap", "swap/in", "tree")
    assert files.undo("call") == paths
    assert (tree(files), marks(files.root)) == (was, before)
    assert (files.root / "a").stat().st_mode & 0o777 == 0o750
    assert aside(files) == []
    with pytest.raises(UndoRefused, match=f"'call' can't be undone: {NO_COMMIT_KEPT}"):
        files.undo("call")


@pytest.mark.parametrize(
    ("change", "places"),
    [
        (lambda root: (root / "a").write_text("theirs"), ("a",)),
        (lambda root: (root / "gone").write_text("theirs"), ("gone",)),
        (lambda root: (root / "n" / "m").unlink(), ("n/m",)),
        (lambda root: (root / "pack").chmod(0o600), ("pack",)),
        (lambda root: ((root / "tree").mkdir(), (root / "swap" / "in").write_text("t")), ("swap/in", "tree")),
    ],
)
def test_undo_is_refused_where_something_newer_was_done(folders: Folders, change: Any, places: Any):
    """Undo is refused if paths that the call changed have changed since. The error names them, and nothing changes."""
    files = folders(FILES)
    committed(files, "call", *DEEDS)
    change(files.root)
    before = marks(files.root)
    with pytest.raises(UndoRefused, match=rf"someone else \({', '.join(places)}\)") as caught:
        files.undo("call")
    assert caught.value.places == places
    assert marks(files.root) == before


def test_undo_goes_back_call_by_call(folders: Folders):
    """Undoing the later of two calls restores the earlier call's files, and then the earlier call can be undone."""
    files = folders({"a": "1"})
    committed(files, "one", lambda f: f.write("a", "2"))
    committed(files, "two", lambda f: f.write("a", "3"))
    with pytest.raises(UndoRefused, match="a"):
        files.undo("one")
    files.undo("two")
    assert files.read("a") == "2"
    files.undo("one")
    assert files.read("a") == "1"


def test_a_folder_that_others_use_stays_when_it_is_undone(folders: Folders):
    """Undo removes the call's files, but keeps a folder that now contains other files."""
    files = folders()
    committed(files, "call", lambda f: f.write("n/mine", ""))
    fill(files.root, {"n/theirs": "t"})
    files.undo("call")
    assert tree(files) == {"n": None, "n/theirs": "t"}


def test_undo_waits_for_nobody(folders: Folders):
    """Undo raises a conflict for a path that a prepared call is about to change, and does not wait for that call."""
    files = folders({"a": "1"})
    committed(files, "call", lambda f: f.write("a", "2"))
    fork = files.fork("other")
    fork.write("a", "3")
    fork.prepare()
    with pytest.raises(Conflict, match="a"):
        files.undo("call")
    fork.apply()


def test_undo_outlives_the_process(folders: Folders):
    """Undo still works after the folder is closed and opened again, as by a later process."""
    files = folders({"a": "1"})
    committed(files, "call", lambda f: f.write("a", "2"))
    files.close()
    again = DirectoryFilesystem(files.root)
    assert again.undo("call") == ("a",)
    assert again.read("a") == "1"
    again.close()


def test_what_is_kept_is_bounded(folders: Folders):
    """The history that undo needs is limited in calls and in bytes.

    The oldest call is dropped first, except that a call with more than half of the allowed bytes is dropped before it.
    """
    files = folders({"a": "x" * 1000}, keep_calls=3, keep_bytes=5000)
    for number in range(6):
        committed(files, f"call{number}", lambda f, number=number: f.write("a", str(number) * 1000))
    assert len(list(files.staging.glob("done/*"))) == 3
    with pytest.raises(UndoRefused, match="too old"):
        files.undo("call2")
    committed(files, "large", lambda f: f.write("b", "x" * 5000))
    committed(files, "larger", lambda f: f.delete("b"))
    assert sum(path.stat().st_size for path in files.staging.glob("done/*/*")) <= 5000
    with pytest.raises(
        UndoRefused, match="what it replaced was too large to keep, because at most 5000 bytes"
    ):
        files.undo("larger")
    assert files.undo("call5") == ("a",)
    assert files.read("a") == "4" * 1000


# --- the staging folder, and folders that can't be used ---------------------------------------------


def test_the_staging_folder_can_lie_elsewhere(folders: Folders, tmp_path: Path):
    """The staging folder may be elsewhere on the disk, or inside the folder itself, where calls can't see or change it."""
    files = folders({"a": "1"}, staging=tmp_path / "aside")
    files.write("a", "2")
    assert (tmp_path / "aside" / "done").is_dir()
    inside = tmp_path / "inside"
    fill(inside, {"a": "1"})
    files = DirectoryFilesystem(inside, staging=inside / ".changes")
    files.write("a", "2")
    assert (inside / ".changes" / "done").is_dir()
    fork = files.fork("call")
    assert [info.path for info in fork.list()] == ["a"]
    assert (fork.glob("**"), files.glob("**/")) == (("a",), ())
    for path in (".changes", ".changes/done", "./.changes/x"):
        for verb in ("read", "mkdir", "exists", "delete"):
            with pytest.raises(PathRefused, match="uncommitted changes are staged there"):
                getattr(fork, verb)(path)
    (inside / "link").symlink_to(".changes/done")
    with pytest.raises(PathRefused):
        files.fork("call").list("link")
    files.close()


@pytest.mark.parametrize(
    ("root", "staging", "words"),
    [
        ("missing", None, "can't be opened: No such file or directory"),
        ("file", None, "is not a folder"),
        ("root", "root", "is the folder itself or contains it"),
        ("root", ".", "is the folder itself"),
        ("root", "root/a/b", "is deep inside the folder"),
    ],
)
def test_a_folder_that_can_not_be_used_is_said_so(tmp_path: Path, root: str, staging: str | None, words: str):
    """A root or staging folder that can't be used is refused when the filesystem is created, and the error says why."""
    fill(tmp_path, {"file": "", "root/a/x": ""})
    with pytest.raises(DefinitionError, match=words):
        DirectoryFilesystem(tmp_path / root, staging=None if staging is None else tmp_path / staging)


def test_a_staging_folder_on_another_disk_is_refused(folders: Folders):
    """A staging folder on a different disk is refused at the first write, and reading still works."""
    shm = Path("/dev/shm")
    if not shm.is_dir() or shm.stat().st_dev == Path("/tmp").stat().st_dev:
        pytest.skip("no second disk")
    files = folders({"a": "1"}, staging=shm / f"handrail-test-{os.getpid()}")
    try:
        with pytest.raises(FileError, match=r"is on a different disk from .* Pass staging="):
            files.fork("call").write("a", "2")
        assert files.read("a") == "1"
    finally:
        Disk().forget(files.staging)


def test_a_read_only_folder_is_said_so(tmp_path: Path):
    """In a read-only folder, reading works. The first write is refused with an error that says that the folder is read-only."""
    fill(tmp_path, {"root/a": "1"})
    script = textwrap.dedent("""
        import sys
        from handrail import DirectoryFilesystem
        files = DirectoryFilesystem(sys.argv[1])
        print(files.fork("call").read("a"))
        try:
            files.fork("call").write("a", "2")
        except OSError as error:
            print(error)
    """)
    said = run_mounted(tmp_path / "root", 'mount --bind "$1" "$1" && mount -o remount,ro,bind "$1"', script)
    assert said == f"1\n'.': '{tmp_path}/root' is read-only. Make it writable, or use another folder\n"


def run_mounted(root: Path, mount: str, script: str) -> str:
    """Run a script on a folder for which something is mounted, and return its output. Skips the test if that is not possible."""
    unshare = ["unshare", "-m"] if os.geteuid() == 0 else ["unshare", "-r", "-m"]

    def run(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [*unshare, "sh", "-ec", code, "sh", str(root), *arguments]
        return subprocess.run(command, capture_output=True, text=True)

    mounted = run(mount)
    if mounted.returncode:
        pytest.skip(f"nothing can be mounted here: {mounted.stderr}")
    ran = run(f'{mount} && exec "$2" -c "$3" "$1"', sys.executable, script)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


@pytest.mark.parametrize("inner", ["mount --bind", "mount -t tmpfs"])
def test_nothing_is_changed_in_a_mount_below_the_root(tmp_path: Path, inner: str):
    """A call that changes files in a mount below the root is refused, and changes nothing elsewhere. The mount can't be removed either."""
    fill(tmp_path, {"root/a": "1", "root/inner/x": "2", "other/x": "2"})
    script = textwrap.dedent("""
        import sys
        from pathlib import Path
        from handrail import DirectoryFilesystem
        root = Path(sys.argv[1])
        inner = root / "inner"
        (inner / "x").write_text("2")
        files = DirectoryFilesystem(root)
        changes = {
            "write": lambda fork: fork.write("inner/x", "3"),
            "create": lambda fork: fork.write("inner/y", "3"),
            "delete": lambda fork: fork.delete("inner/x"),
            "move": lambda fork: fork.move("inner/x", "x"),
            "remove": lambda fork: fork.delete("inner", recursive=True),
        }
        for name, change in changes.items():
            fork = files.fork(name)
            fork.write("a", "changed")
            change(fork)
            try:
                fork.prepare()
                fork.apply()
            except OSError as error:
                print(name, "mount" in str(error) or "busy" in str(error))
            fork.drop()
        print((root / "a").read_text(), *[f"{each.name}={each.read_text()}" for each in inner.iterdir()])
    """)
    source = tmp_path / "other" if "bind" in inner else "none"
    said = run_mounted(tmp_path / "root", f'{inner} {source} "$1/inner"', script)
    expected = [f"{name} True" for name in ("write", "create", "delete", "move", "remove")]
    assert said.splitlines() == [*expected, "1 x=2"]


def test_a_folder_that_ignores_case_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A case-insensitive folder is refused: when it is opened if it has the flag, otherwise by a probe at the first write."""
    fill(tmp_path, {"root/a": "1"})
    os.link(tmp_path / "root" / "a", tmp_path / "root" / "A")
    files = DirectoryFilesystem(tmp_path / "root")
    exists = Path.exists
    monkeypatch.setattr(Path, "exists", lambda path: path.name == "pROBE" or exists(path))  # pyright: ignore[reportUnknownArgumentType]
    with pytest.raises(DefinitionError, match="does not distinguish 'a' from 'A'"):
        files.write("a", "2")
    files.close()
    monkeypatch.setattr(fcntl, "ioctl", lambda *args: struct.pack("l", 0x40000000))
    with pytest.raises(DefinitionError, match="Use a folder on a case-sensitive disk"):
        DirectoryFilesystem(tmp_path / "root")


def test_a_folder_nobody_may_write_in_is_said_so(folders: Folders):
    """A folder without write permission is refused before anything is renamed, and the error names it."""
    if os.geteuid() == 0:
        pytest.skip("root may write everywhere")
    files = folders({"shut/a": "1", "b": "1"})
    (files.root / "shut").chmod(0o555)
    fork = files.fork("call")
    fork.write("b", "2")
    fork.write("shut/a", "2")
    fork.prepare()
    with pytest.raises(FileError, match="'shut': permission denied: the folder is not writable"):
        fork.apply()
    assert files.read("b") == "1"
    (files.root / "shut").chmod(0o755)


def test_what_a_dead_process_left_is_cleared_away(folders: Folders):
    """A dead process's forks are removed and its unfinished commit is completed. A live process's forks stay."""
    files = folders({"a": "1", "b": "1"})
    script = textwrap.dedent("""
        import os, sys
        from handrail import DirectoryFilesystem
        from handrail.journal.records import CallKey
        from handrail.resources.directory.disk import Disk
        class Dying(Disk):
            def exchange(self, source, name, target, other):
                super().exchange(source, name, target, other)
                os._exit(1)
        files = DirectoryFilesystem(sys.argv[1], disk=Dying())
        fork = files.fork("call")
        fork.write("a", "2")
        fork.write("b", "2")
        fork.layers()
        fork.prepare()
        fork.stage(CallKey("call"))
        fork.apply()
    """)
    files.fork("alive").write("x", "")
    subprocess.run([sys.executable, "-c", script, str(files.root)], check=False)
    assert sorted(tree(files).values(), key=str) == ["1", "2"]
    other = DirectoryFilesystem(files.root)
    other.write("c", "1")
    assert tree(other) == {"a": "2", "b": "2", "c": "1"}
    assert len(list(files.staging.glob("at-work/*"))) == 2
    assert other.undo("call") == ("a", "b")
    other.close()


def test_an_undo_cut_by_a_crash_is_finished_and_can_not_be_undone(folders: Folders):
    """An undo that was cut short by a crash is completed by the next process, and its call can't be undone again."""
    files = folders({"a": "1", "b": "1"})
    committed(files, "call", lambda f: f.write("a", "2"), lambda f: f.write("b", "2"))
    files.close()
    script = textwrap.dedent("""
        import os, sys
        from handrail import DirectoryFilesystem
        from handrail.resources.directory.disk import Disk
        class Dying(Disk):
            def exchange(self, source, name, target, other):
                super().exchange(source, name, target, other)
                os._exit(1)
        DirectoryFilesystem(sys.argv[1], disk=Dying()).undo("call")
    """)
    subprocess.run([sys.executable, "-c", script, str(files.root)], check=False)
    other = DirectoryFilesystem(files.root)
    assert sorted(tree(other).values(), key=str) == ["1", "2"]
    other.write("c", "1")
    assert tree(other) == {"a": "1", "b": "1", "c": "1"}
    with pytest.raises(UndoRefused, match=NO_COMMIT_KEPT):
        other.undo("call")
    other.close()


def test_undo_finds_a_call_only_with_its_run(folders: Folders):
    """If two runs have calls with the same id, undo needs the run id to find one of them."""
    files = folders()
    for run_id in ("ann", "bob"):
        fork = files.fork("call")
        fork.write(run_id, "")
        fork.prepare()
        fork.stage(CallKey("call", run_id, ".1"))
        fork.apply()
        fork.applied()
    with pytest.raises(UndoRefused, match="name the run with run_id="):
        files.undo("call")
    with pytest.raises(UndoRefused, match=f"{NO_COMMIT_KEPT} in run 'ann'"):
        files.undo("call", run_id="ann", place=".2")
    assert files.undo("call", run_id="ann") == ("ann",)
    assert tree(files) == {"bob": ""}


def test_a_fork_is_staged_only_when_prepared(folders: Folders):
    """A fork can be staged only after it has been prepared."""
    fork = folders({"a": "1"}).fork("call")
    fork.write("a", "2")
    with pytest.raises(ContextError, match=r"is not prepared, .* can't be staged"):
        fork.stage(CallKey("call"))


def test_areas_are_numbered_apart(folders: Folders):
    """Two filesystems on the same folder have separate staging areas, and their forks conflict as those of two processes do."""
    files = folders({"a": "1"})
    other = DirectoryFilesystem(files.root)
    parts: list[Area] = [files._store.area, other._store.area]
    assert parts[0].mine != parts[1].mine
    one, two = files.fork("one"), other.fork("two")
    one.write("a", "one")
    two.write("a", "two")
    commit(one)
    with pytest.raises(Conflict, match="a"):
        two.prepare()
    other.close()


# --- diff -------------------------------------------------------------------------------------------


def test_diff_says_what_a_commit_changes(folders: Folders):
    """A diff shows changes to text as a unified diff, and names all other changes."""
    files = folders({"a.py": "one\ntwo\nthree\n", "bin": b"\0", "old": "moved\n", "gone": "bye\n", "d/x": ""})
    (files.root / "link").symlink_to("a.py")
    fork = files.fork("call")
    fork.edit("a.py", "two", "2")
    fork.write("bin", b"\0\1")
    fork.move("old", "n/new")
    fork.delete("gone")
    fork.write("end", "no newline")
    fork.mkdir("empty")
    fork.delete("link")
    fork.delete("d", recursive=True)
    expected = """\
        diff --git a/a.py b/a.py
        --- a/a.py
        +++ b/a.py
        @@ -1,3 +1,3 @@
         one
        -two
        +2
         three
        diff --git a/bin b/bin
        Binary files a/bin and b/bin differ: {was} before, {now} after
        diff --git a/d/x b/d/x
        deleted file mode 644
        diff --git a/empty b/empty
        new folder
        diff --git a/end b/end
        new file
        --- /dev/null
        +++ b/end
        @@ -0,0 +1 @@
        +no newline
        \\ No newline at end of file
        diff --git a/gone b/gone
        deleted file mode 644
        --- a/gone
        +++ /dev/null
        @@ -1 +0,0 @@
        -bye
        diff --git a/link b/link
        deleted link
        --- a/link
        +++ /dev/null
        @@ -1 +0,0 @@
        -a.py
        \\ No newline at end of file
        diff --git a/old b/n/new
        rename from old
        rename to n/new
        content: {moved}
    """
    digests = {"was": described(b"\0"), "now": described(b"\0\1"), "moved": described(b"moved\n")}
    assert fork.diff() == textwrap.dedent(expected).format(**digests)
    fork.prepare()
    assert fork.diff() == textwrap.dedent(expected).format(**digests)


def described(content: bytes) -> str:
    """Return what a diff says about content that it does not show."""
    return f"{len(content)} bytes (SHA-256 {sha256(content).hexdigest()})"


def test_diff_in_memory_is_the_same_words(new_files: Any):
    """Apart from file modes, diffs have the same format in memory and on disk. They omit the content of a large file."""
    fork = new_files({"a": "1\n", "b": "1\n"}).fork("call")
    fork.write("a", "2\n")
    fork.delete("b")
    large = "x\n" * 600_000
    fork.write("large", large)
    lines = [
        line for line in fork.diff().splitlines() if "mode" not in line and not line.startswith("deleted")
    ]
    assert lines == [
        "diff --git a/a b/a", "--- a/a", "+++ b/a", "@@ -1 +1 @@", "-1", "+2",
        "diff --git a/b b/b", "--- a/b", "+++ /dev/null", "@@ -1 +0,0 @@", "-1",
        "diff --git a/large b/large", "new file",
        f"Large files /dev/null and b/large differ: 0 bytes before, {described(large.encode())} after",
    ]  # fmt: skip
