"""Forks as overlay layers: what a command sees, and which of its changes are kept."""

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from handrail.errors import Conflict, ContextError, ContextExpired, EffectRefused, FileError
from handrail.journal.records import CallKey
from handrail.resources.directory import DirectoryFork, Layers, layers
from support.filesystems import Folders, commit, tree

UNSHARE = ["unshare", "-m"] if os.geteuid() == 0 else ["unshare", "-r", "-m"]


def mounted(found: Layers, script: str, at: Path) -> subprocess.CompletedProcess[str]:
    """Run a script on an overlay of these layers, in its own namespaces."""
    options = (
        f"userxattr,lowerdir={':'.join(map(str, found.lowers))},upperdir={found.upper},workdir={found.work}"
    )
    at.mkdir(exist_ok=True)
    command = f'mount -t overlay overlay -o "$1" "$2" && cd "$2" && {script}'
    return subprocess.run(
        [*UNSHARE, "sh", "-ec", command, "sh", options, str(at)], capture_output=True, text=True
    )


def command(fork: DirectoryFork, script: str, at: Path) -> tuple[str, tuple[str, ...]]:
    """Run a script on a fork and absorb its writes. Return the output and the changed paths."""
    found = fork.layers()
    ran = mounted(found, script, at)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout, fork.absorb(found.mounted_at)


@pytest.fixture
def at(tmp_path: Path) -> Path:
    """Provide a mount point for an overlay, or skip the test if overlays can't be mounted."""
    for name in ("lower", "upper", "work"):
        (tmp_path / "probe" / name).mkdir(parents=True)
    probe = Layers((tmp_path / "probe/lower",), tmp_path / "probe/upper", tmp_path / "probe/work", 0)
    if shutil.which("unshare") is None or mounted(probe, "true", tmp_path / "mount").returncode:
        pytest.skip("no overlay can be mounted here")
    return tmp_path / "mount"


FILES = {"a": "1\n", "d/x": "x\n", "d/y": "y\n", "keep/z": "z\n"}


def test_a_command_sees_the_fork_and_writes_into_it(folders: Folders, at: Path):
    """A command sees the fork's writes, deletions, moves and folders, and the fork receives the command's changes."""
    files = folders(FILES)
    fork = files.fork("call")
    fork.write("a", "2\n")
    fork.delete("d/x")
    fork.move("keep", "kept")
    fork.mkdir("empty/inner")
    said, taken = command(fork, "cat a; find . | sort; echo more >> a; mkdir new; echo n > new/n", at)
    assert said == "2\n.\n./a\n./d\n./d/y\n./empty\n./empty/inner\n./kept\n./kept/z\n"
    assert taken == ("a", "new/", "new/n")
    expected = {
        "a": "2\nmore\n", "d": None, "d/y": "y\n", "empty": None, "empty/inner": None, "kept": None,
        "kept/z": "z\n", "new": None, "new/n": "n\n",
    }  # fmt: skip
    assert tree(fork) == expected
    assert tree(files) == {**FILES, "d": None, "keep": None}
    commit(fork)
    assert tree(files) == expected
    assert not [name for path in files.root.rglob("*") for name in os.listxattr(path) if "overlay" in name]


SCRIPTS: dict[str, tuple[str, dict[str, str | None]]] = {
    "a file goes": ("rm a", {"d": None, "d/x": "x\n", "d/y": "y\n", "keep": None, "keep/z": "z\n"}),
    "a folder goes": ("rm -r d", {"a": "1\n", "keep": None, "keep/z": "z\n"}),
    "everything goes": ("rm -rf ./*", {}),
    "a folder is made anew": (
        "rm -r d; mkdir d; echo n > d/n",
        {"a": "1\n", "d": None, "d/n": "n\n", "keep": None, "keep/z": "z\n"},
    ),
    "a file becomes a folder": (
        "rm a; mkdir a; echo i > a/i",
        {"a": None, "a/i": "i\n", "d": None, "d/x": "x\n", "d/y": "y\n", "keep": None, "keep/z": "z\n"},
    ),
    "a folder becomes a file": ("rm -r d; echo f > d", {"a": "1\n", "d": "f\n", "keep": None, "keep/z": "z\n"}),
    "a folder is renamed": (
        "mv d e",
        {"a": "1\n", "e": None, "e/x": "x\n", "e/y": "y\n", "keep": None, "keep/z": "z\n"},
    ),
    "a file is replaced": (
        "echo t > t; mv t a",
        {"a": "t\n", "d": None, "d/x": "x\n", "d/y": "y\n", "keep": None, "keep/z": "z\n"},
    ),
    "made and gone": ("echo t > t; mkdir u; rmdir u; rm t", {**FILES, "d": None, "keep": None}),
}  # fmt: skip


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("case", SCRIPTS)
def test_what_a_command_did_is_committed(folders: Folders, at: Path, case: str, nested: bool):
    """After the commit, the folder holds exactly what the command left, even if the command ran in a nested fork."""
    script, expected = SCRIPTS[case]
    files = folders(FILES)
    outer = files.fork("outer")
    fork = outer.fork("inner") if nested else outer
    command(fork, script, at)
    assert tree(fork) == expected
    assert tree(files) == {**FILES, "d": None, "keep": None}
    commit(fork)
    if nested:
        assert tree(outer) == expected
        assert command(outer, "find . -type f | wc -l", at)[0].strip() == str(
            sum(text is not None for text in expected.values())
        )
        commit(outer)
    assert tree(files) == expected


def test_modes_links_and_odd_names_come_along(folders: Folders, at: Path):
    """Modes that a command sets, and links, pipes and odd names that it creates, are committed, and undo reverts them."""
    files = folders(FILES)
    fork = files.fork("call")
    script = (
        "chmod 700 keep; chmod 755 a; ln -s a link; ln -s /etc/passwd out; printf o > 'odd\\name'; mkfifo p"
    )
    taken = command(fork, script, at)[1]
    assert taken == ("a", "keep/", "link", r"odd\x5cname", "out", "p")
    fork.prepare()
    fork.stage(CallKey("call"))
    fork.apply()
    fork.applied()
    assert (files.root / "keep").stat().st_mode & 0o777 == 0o700
    assert (files.root / "a").stat().st_mode & 0o777 == 0o755
    assert os.readlink(files.root / "link") == "a"
    assert os.readlink(files.root / "out") == "/etc/passwd"
    assert (files.root / "odd\\name").read_text() == "o"
    assert files.read("link") == "1\n"
    assert (files.root / "p").is_fifo()
    files.undo("call")
    assert (files.root / "keep").stat().st_mode & 0o777 == 0o755
    assert tree(files) == {**FILES, "d": None, "keep": None}


def test_several_commands_and_writes_take_turns(folders: Folders, at: Path):
    """Commands, writes and inner forks each see the changes made before them."""
    files = folders({"log": ""})
    fork = files.fork("call")
    for number in range(layers.MOST + 4):
        if number % 3 == 0:
            command(fork, f"echo command {number} >> log; echo {number} > c{number}", at)
        elif number % 3 == 1:
            fork.append("log", f"write {number}\n")
        else:
            inner = fork.fork("inner")
            command(inner, f"echo inner {number} >> log; rm -f c{number - 2}", at)
            commit(inner)
    lines = fork.read("log").splitlines()
    assert [line.split()[1] for line in lines] == [str(number) for number in range(layers.MOST + 4)]
    assert len(fork.layers().lowers) <= layers.MOST + 2
    commit(fork)
    assert (files.root / "log").read_text().splitlines() == lines


def test_many_layers_are_made_one(folders: Folders, at: Path):
    """If a fork gets more than `MOST` layers, they are merged without changing the files."""
    files = folders({"a": "0"})
    fork = files.fork("call")
    for number in range(layers.MOST * 2):
        inner = fork.fork("inner")
        command(inner, f"echo {number} > f{number}; rm -f f{number - 3}", at)
        commit(inner)
    found = fork.fork("last").layers()
    assert len(found.lowers) <= layers.MOST + 2
    last = layers.MOST * 2
    assert mounted(found, "ls", at).stdout.split() == ["a", *(f"f{n}" for n in range(last - 3, last))]


def test_what_others_changed_since_the_mount_is_a_conflict(folders: Folders, at: Path):
    """None of a command's changes are kept if somebody has changed one of its paths, or something below it, since the mount.

    Changes to other paths do not matter.
    """
    files = folders(FILES)
    for change, script, places in (
        (lambda: (files.root / "a").write_text("theirs"), "echo mine >> a", ["a"]),
        (lambda: files.write("d/new", "theirs"), "rm -r d", ["d"]),
        (lambda: (files.root / "a").unlink(), "echo mine >> a", ["a"]),
        (lambda: files.write("keep/z", "theirs"), "rm d/x", []),
    ):
        fork = files.fork("call")
        found = fork.layers()
        assert mounted(found, script, at).returncode == 0
        change()
        if places:
            with pytest.raises(Conflict) as caught:
                fork.absorb(found.mounted_at)
            assert list(caught.value.places) == places
            assert fork.changed == ()
        else:
            assert fork.absorb(found.mounted_at) == ("d/x",)
        fork.drop()
        files.write("a", "1\n")


def test_what_a_sibling_committed_since_the_mount_is_a_conflict(folders: Folders, at: Path):
    """If a sibling fork commits a change to a file after the mount, a command's changes to that file are a conflict."""
    outer = folders(FILES).fork("outer")
    fork, sibling = outer.fork("call"), outer.fork("sibling")
    found = fork.layers()
    assert mounted(found, "echo mine >> a; echo mine > n", at).returncode == 0
    sibling.write("a", "theirs")
    commit(sibling)
    with pytest.raises(Conflict, match="has changed a in the meantime"):
        fork.absorb(found.mounted_at)


def test_a_commit_before_the_mount_is_no_conflict(folders: Folders, at: Path):
    """A commit right before the mount does not conflict with the command."""
    files = folders({"a": "0\n"})
    for number in range(20):
        files.write("a", f"{number}\n")
        fork = files.fork("call")
        command(fork, "echo more >> a", at)
        commit(fork)
        assert files.read("a") == f"{number}\nmore\n"


def test_a_fork_that_may_not_write_takes_nothing(folders: Folders, at: Path):
    """A command may run on a read-only fork, but its writes are refused with an error that names the file."""
    fork = folders(FILES).fork("peek", writable=False)
    assert command(fork, "cat a", at) == ("1\n", ())
    found = fork.layers()
    mounted(found, "echo > new", at)
    with pytest.raises(EffectRefused, match="may not write 'new'"):
        fork.absorb(found.mounted_at)


def test_nothing_is_left_of_a_dropped_fork(folders: Folders, at: Path):
    """Dropping a fork removes its layers, even folders in them without read permission."""
    files = folders(FILES)
    outer = files.fork("outer")
    inner = outer.fork("inner")
    with pytest.raises(ContextError, match=r"Call layers\(\) first"):
        inner.absorb(0)
    shut = "mkdir -p shut/in; echo x > shut/in/x; chmod 000 shut/in shut"
    if os.geteuid() == 0:
        command(inner, shut, at)
        commit(inner)
    else:
        with pytest.raises(FileError, match="'shut': a command removed the read permission of this folder"):
            command(inner, shut, at)
        inner.drop()
    outer.drop()
    assert list(files.staging.glob("at-work/*/*")) == []
    with pytest.raises(ContextExpired):
        outer.layers()
    assert tree(files) == {**FILES, "d": None, "keep": None}


def test_where_no_device_can_be_made_a_mark_stands_for_it(
    folders: Folders, at: Path, monkeypatch: pytest.MonkeyPatch
):
    """If devices can't be created, deletions are marked with an extended attribute, which Linux 6.8 and later accept."""

    def refuse(*args: Any) -> None:
        raise PermissionError(1, "not here")

    monkeypatch.setattr(os, "mknod", refuse)
    files = folders(FILES)
    fork = files.fork("call")
    fork.delete("d/x")
    found = fork.layers()
    marks = os.listxattr(found.lowers[0] / "d" / "x")
    assert marks == ["user.overlay.whiteout"]
    if tuple(map(int, os.uname().release.split(".")[:2])) >= (6, 8):
        assert mounted(found, "ls d", at).stdout == "y\n"
    assert fork.absorb(found.mounted_at) == ()
    assert not fork.exists("d/x")
