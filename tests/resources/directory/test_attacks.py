"""Attempts to escape from a folder through paths, links, races and odd names, with and without `openat2`."""

import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from handrail.errors import Conflict, FileError, FileMissing, PathRefused
from handrail.journal.records import CallKey
from handrail.resources.directory import DirectoryFilesystem, disk
from handrail.resources.paths import MAX_PATH
from support.filesystems import Folders

SECRET = "the secret outside"


@pytest.fixture(params=["openat2", "by steps"], autouse=True)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run each test twice: with paths opened by `openat2`, and with paths opened one component at a time.

    Skips the first run if the kernel has no `openat2`.
    """
    if request.param == "openat2":
        if not disk.has_openat2:
            pytest.skip("this kernel has no openat2")
    else:
        monkeypatch.setattr(disk, "has_openat2", False)
    return request.param


class World:
    """A folder, and files beside it that must not be reachable through it."""

    def __init__(self, base: Path, folders: Folders) -> None:
        self.outside = base / "outside"
        (self.outside / "inner").mkdir(parents=True)
        (self.outside / "secret.txt").write_text(SECRET)
        (self.outside / "inner" / "secret.txt").write_text(SECRET)
        self.files = folders({"ok.txt": "ok", "d/x.txt": "x", "d/e/y.txt": "y"})
        self.root = self.files.root
        self.before = self.look()

    def look(self) -> dict[str, Any]:
        return {
            str(path): (path.lstat().st_ino, path.read_bytes() if path.is_file() else None)
            for path in sorted(self.outside.rglob("*"))
        }

    def link(self, name: str, target: str) -> None:
        (self.root / name).symlink_to(target)


@pytest.fixture
def world(tmp_path: Path, folders: Folders) -> World:
    return World(tmp_path, folders)


VERBS: dict[str, Callable[[Any, str], Any]] = {
    "read": lambda f, p: f.read(p),
    "read_bytes": lambda f, p: f.read_bytes(p),
    "stat": lambda f, p: f.stat(p),
    "exists": lambda f, p: f.exists(p),
    "list": lambda f, p: f.list(p),
    "glob": lambda f, p: f.glob(p),
    "glob inside": lambda f, p: f.glob(f"{p}/**"),
    "grep": lambda f, p: f.grep("secret", glob=p),
    "grep inside": lambda f, p: f.grep("secret", glob=f"{p}/**"),
    "write": lambda f, p: f.write(p, "overwritten"),
    "write inside": lambda f, p: f.write(f"{p}/new.txt", "written"),
    "append": lambda f, p: f.append(p, "appended"),
    "edit": lambda f, p: f.edit(p, "secret", "edited"),
    "mkdir": lambda f, p: f.mkdir(f"{p}/made"),
    "move in": lambda f, p: f.move("ok.txt", f"{p}/moved.txt"),
    "move out": lambda f, p: f.move(f"{p}/secret.txt", "stolen.txt"),
    "delete inside": lambda f, p: f.delete(f"{p}/secret.txt"),
    "delete": lambda f, p: f.delete(p, recursive=True),
    "move": lambda f, p: f.move(p, "stolen"),
}

PATHS = [
    "..",
    "../outside/secret.txt",
    "../../../../../../../../etc/passwd",
    "d/../../outside/secret.txt",
    "d/e/../../../outside/secret.txt",
    "./../outside/secret.txt",
    ".//..//outside/secret.txt",
    "d/./../../outside/secret.txt",
    "d/..",
    "/etc/passwd",
    "//etc/passwd",
    "/",
    "/proc/self/root/etc/passwd",
    "file:///etc/passwd",
    "C:/windows/system.ini",
    "\\\\server\\share\\secret.txt",
    "..\\outside\\secret.txt",
    "d\\..\\..\\outside",
    "~/secret.txt",
    "~",
    "ok.txt\0/../../outside/secret.txt",
    "\0",
    "d\n/../x",
    "x" * 256,
    "x/" * 17_000 + "y",
    "\ud800/secret.txt",
    "d/\udc7f",
    "d/\\x2e\\x2e/\\x2e\\x2e/outside/secret.txt",
    "d\\x2f..\\x2f..\\x2foutside",
    "",
    "\u2028",
    "\x7f",
]
LINKS: dict[str, str] = {
    "absolute file": "{outside}/secret.txt",
    "absolute folder": "{outside}",
    "relative file": "../outside/secret.txt",
    "relative folder": "../outside",
    "through a folder": "d/../../outside",
    "through itself and out": "./d/e/../../../outside/inner/..",
    "to the parent": "..",
    "to the system": "/",
    "passwords": "/etc/passwd",
    "magic root": "/proc/self/root/{outside}",
    "magic folder": "/proc/self/cwd",
    "magic file": "/proc/self/fd/0",
    "a device": "/dev/zero",
    "to itself": "link",
    "to its own inside": "link/link",
    "the staging folder": "../.root0.handrail",
    "like the root, and longer": "{root}-other/secret.txt",
    "by way of the root": "{root}/../outside",
}


def attack(world: World, files: Any, path: str, verb: str) -> None:
    """Run the operation `verb` on the path, commit if `files` is a fork, and check that nothing outside was read or changed."""
    said, refused = "", ""
    try:
        said = repr(VERBS[verb](files, path))
    except (FileError, Conflict) as error:
        refused = str(error)
    assert SECRET not in said + refused
    assert not (verb in ("list", "glob inside") and "secret.txt" in said)
    if hasattr(files, "prepare"):
        files.prepare()
        files.apply()
    assert world.look() == world.before
    for inside in world.root.rglob("*"):
        if inside.is_file() and not inside.is_symlink():
            assert SECRET not in inside.read_text()


@pytest.mark.parametrize("path", PATHS, ids=[f"{number}" for number in range(len(PATHS))])
def test_a_path_out_is_refused(world: World, path: str):
    """No operation reads or changes anything outside the folder through an invalid path or a path that leads out.

    Most operations refuse such a path.
    """
    for verb, do in VERBS.items():
        if "glob" in verb or "grep" in verb or "inside" in verb or verb in ("mkdir", "move in", "move out"):
            continue
        with pytest.raises(PathRefused):
            do(world.files.fork("call"), path)
    for verb in VERBS:
        attack(world, world.files.fork("call"), path, verb)


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("link", LINKS)
def test_a_link_out_is_not_followed(world: World, link: str, verb: str):
    """No operation reads or changes anything outside through a link, whether the link is used directly or through others."""
    (world.root.parent / f"{world.root.name}-other").mkdir()
    (world.root.parent / f"{world.root.name}-other" / "secret.txt").write_text(SECRET)
    world.link("link", LINKS[link].format(outside=world.outside, root=world.root))
    world.link("hop", "link")
    world.link("d/up", "../hop")
    for path in ("link", "hop", "d/up"):
        attack(world, world.files.fork("call"), path, verb)
        attack(world, world.files, path, verb)


@pytest.mark.parametrize("verb", ["read", "write", "list", "append"])
def test_a_link_out_says_so(world: World, verb: str):
    """The error for a link that leads outside names the given path, not the link's target."""
    world.link("link", "../outside")
    with pytest.raises(PathRefused, match=r"'link.*': a link in it leads out of the root") as caught:
        VERBS[verb](world.files.fork("call"), "link" if verb == "list" else "link/secret.txt")
    assert str(world.outside) not in str(caught.value)


def test_links_that_stay_inside_work(world: World):
    """A link to a target inside the folder works: relative or absolute, to a file or a folder, even through other links."""
    world.link("file", "d/x.txt")
    world.link("folder", "d")
    world.link("absolute", str(world.root / "d" / "e"))
    world.link("d/e/back", "../../folder/x.txt")
    fork = world.files.fork("call")
    assert fork.read("file") == fork.read("folder/x.txt") == fork.read("absolute/back") == "x"
    assert [info.path for info in fork.list("absolute")] == ["d/e/back", "d/e/y.txt"]
    assert fork.stat("folder").is_directory
    assert fork.glob("folder/*.txt") == ("folder/x.txt",)
    assert fork.glob("**/x.txt") == ("d/x.txt",)
    assert fork.glob("*") == ("file", "ok.txt")
    fork.write("absolute/back", "through three links")
    fork.write("folder/new.txt", "in the real folder")
    fork.delete("file")
    fork.prepare()
    fork.apply()
    assert (world.root / "d" / "x.txt").read_text() == "through three links"
    assert (world.root / "d" / "new.txt").exists()
    assert (world.root / "folder").is_symlink()
    assert not (world.root / "file").is_symlink()


def test_a_link_that_was_followed_was_read(world: World):
    """A fork is stale once a link that it followed points elsewhere."""
    world.link("link", "ok.txt")
    fork = world.files.fork("call")
    fork.read("link")
    (world.root / "link").unlink()
    world.link("link", "d/x.txt")
    assert fork.stale() == ("link",)


def test_links_in_a_circle_end(world: World):
    """Reading a link that is part of a cycle is refused, and a glob skips the cycle."""
    world.link("a", "b")
    world.link("b", "a")
    world.link("d/round", "..")
    fork = world.files.fork("call")
    with pytest.raises(PathRefused, match="form a cycle"):
        fork.read("a")
    assert fork.glob("**/*.txt") == ("d/e/y.txt", "d/x.txt", "ok.txt")


def test_pipes_sockets_and_devices_are_not_opened(world: World):
    """Pipes and sockets count as existing, but reading them is refused, and a search skips them."""
    os.mkfifo(world.root / "pipe")
    with tempfile.TemporaryDirectory() as short, socket.socket(socket.AF_UNIX) as listening:
        listening.bind(f"{short}/s")
        os.rename(f"{short}/s", world.root / "socket")
    fork = world.files.fork("call")
    for path in ("pipe", "socket"):
        assert fork.exists(path)
        with pytest.raises(FileError, match="a pipe, a socket or a device"):
            fork.read(path)
    assert fork.grep("anything") == ()


def test_odd_names_stay_the_same_bytes(world: World):
    """Files with odd names are listed and found, and moving, deleting or restoring their folder includes them."""
    odd = [b"latin\xe9", b"new\nline", b"back\\slash", b"tab\t"]
    for name in odd:
        (Path(os.fsdecode(bytes(world.root) + b"/d/" + name))).write_text("odd")
    fork = world.files.fork("call")
    shown = [r"d/back\x5cslash", r"d/latin\xe9", r"d/new\x0aline", r"d/tab\x09"]
    assert [info.path for info in fork.list("d")] == sorted([*shown, "d/e", "d/x.txt"])
    assert fork.glob("d/*") == tuple(sorted([*shown, "d/x.txt"]))
    assert [match.path for match in fork.grep("odd")] == shown
    fork.move("d", "moved")
    fork.prepare()
    fork.stage(CallKey("call"))
    fork.apply()
    fork.applied()
    assert {name for name in os.listdir(os.fsencode(world.root / "moved")) if name in odd} == set(odd)
    assert not (world.root / "d").exists()
    world.files.undo("call")
    assert {name for name in os.listdir(os.fsencode(world.root / "d")) if name in odd} == set(odd)
    world.files.delete("d", recursive=True)
    assert sorted(os.listdir(world.root)) == ["ok.txt"]


def test_the_longest_paths_are_no_trouble(world: World):
    """A path as long as Handrail allows works, although it is many times longer than a system call accepts."""
    longest = "/".join(["n" * 254] * 128) + "/" + "m" * 128
    assert len(longest) == MAX_PATH
    world.files.write(longest, "deep")
    assert world.files.read(longest) == "deep"
    assert world.files.fork("call").glob("**/" + "m" * 128) == (longest,)
    world.files.delete("n" * 254, recursive=True)
    assert sorted(os.listdir(world.root)) == ["d", "ok.txt"]


RACER = """
import os, sys
from handrail.resources.directory.disk import exchange
root, outside = sys.argv[1:]
os.symlink(outside, os.path.join(root, "other"))
folder = os.open(root, os.O_RDONLY)
print("ready", flush=True)
while True:  # swap the folder and a link that leads outside as fast as possible
    exchange(folder, "race", folder, "other")
"""


def test_no_race_between_a_check_and_a_use_leads_out(world: World):
    """While another process keeps swapping a folder with a link that leads outside, nothing outside is read or changed."""
    (world.root / "race").mkdir()
    (world.root / "race" / "secret.txt").write_text("inside")
    racer = subprocess.Popen(
        [sys.executable, "-c", RACER, str(world.root), str(world.outside)], stdout=subprocess.PIPE, text=True
    )
    assert racer.stdout is not None
    assert racer.stdout.readline() == "ready\n"
    done = {"read": 0, "refused": 0, "written": 0}
    try:
        for number in range(1500):
            fork = world.files.fork("call")
            try:
                assert fork.read("race/secret.txt") == "inside"
                done["read"] += 1
                fork.write("race/new.txt", str(number))
                fork.append("race/secret.txt", "")
                fork.list("race")
                fork.prepare()
                fork.apply()
                done["written"] += 1
            except (FileError, Conflict):
                done["refused"] += 1
            finally:
                fork.drop()
    finally:
        racer.kill()
        racer.wait()
        racer.stdout.close()
    assert world.look() == world.before
    assert min(done.values()) > 0, done


def test_the_folder_may_be_named_by_a_link(world: World, tmp_path: Path):
    """The root folder itself may be opened through a link. The filesystem's `root` is then the folder, not the link."""
    (tmp_path / "alias").symlink_to(world.root)
    files = DirectoryFilesystem(tmp_path / "alias")
    assert files.read("ok.txt") == "ok"
    assert files.root == world.root
    with pytest.raises(FileMissing):
        files.read("alias/ok.txt")
    files.close()
