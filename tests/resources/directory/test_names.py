"""Names that are not UTF-8 and paths that are longer than a system call accepts."""

import asyncio
import os
from pathlib import Path
from typing import Annotated, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from handrail import DirectoryFilesystem, PathArg, ToolContext, tool
from handrail.errors import FileMissing, PathRefused
from handrail.journal.records import CallKey
from handrail.journal.sqlite import MemoryJournal
from handrail.resources.directory import DirectoryFork
from handrail.resources.paths import MAX_PATH, on_disk, parse_path, spelled
from handrail.resources.shell import probe
from handrail.tools.result import clean_text
from support.filesystems import Folders, commit
from support.folders import PYTHON, anything
from support.rig import Rig

ODD = {
    b"latin\xe9": r"latin\xe9",
    b"new\nline": r"new\x0aline",
    b"back\\slash": r"back\x5cslash",
    b"like\\xe9": r"like\x5cxe9",
    b"tab\t": r"tab\x09",
    "next\u0085line".encode(): r"next\xc2\x85line",
    b"\xff\xfe": r"\xff\xfe",
    b"half\xc3": r"half\xc3",
    "größe".encode(): "größe",
}


@pytest.fixture(params=["overlay", "copy"])
def backend(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    support = probe(tmp_path)
    if not support.contained or (request.param == "overlay" and not support.overlay):
        pytest.skip("; ".join(support.missing))
    return request.param


def run(fork: DirectoryFork, backend: str, code: str, **options: Any) -> str:
    """Run Python code as a command on a fork, and return its output."""
    ran = asyncio.run(anything(backend).run_on(fork, [PYTHON, "-c", f"import os\n{code}"], **options))
    assert ran.ok, ran.output
    return ran.output


def kept(fork: DirectoryFork, call_id: str = "call") -> None:
    """Commit a fork as a call that can be undone."""
    fork.prepare()
    fork.stage(CallKey(call_id))
    fork.apply()
    fork.applied()


def raw(files: DirectoryFilesystem, folder: str = "") -> set[bytes]:
    return set(os.listdir(os.fsencode(files.root / folder)))


# --- spelling ------------------------------------------------------------------------------------------

names = st.binary(min_size=1, max_size=40).filter(
    lambda name: not {0, 0x2F} & set(name) and name not in (b".", b"..")
)


@given(names)
def test_each_name_has_one_spelling(name: bytes):
    """Any name on disk has a spelling that is valid UTF-8, is accepted as a path, and leads back to the name."""
    path = spelled(os.fsdecode(name))
    path.encode()
    assert os.fsencode(on_disk(path)) == name
    assert parse_path(f"d/{path}").path == f"d/{path}"


@given(st.text(alphabet="ax41\\c3e9/.~0\n", min_size=1, max_size=20))
def test_a_path_that_is_accepted_is_the_spelling_of_its_name(path: str):
    """The normalised form of an accepted path is the one spelling of its name on disk. No part of the name is `..`."""
    try:
        at = parse_path(path).path
    except PathRefused:
        return
    assert spelled(on_disk(at)) == at
    assert ".." not in on_disk(at).split("/")


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("src\\main.py", "Separate folders with '/'"),
        (r"a\xE9", "Separate folders with '/'"),
        (r"a\x41", "Write it as aA"),
        (r"a\xc3\xa9", "Write it as aé"),
        (r"a\x2fb", "Write it as a/b"),
        (r"\x2e\x2e/x", r"Write it as ../x"),
        (r"\x2ehandrail/x", "Write it as .handrail/x"),
        (r"a\x00", "control character"),
    ],
)
def test_other_escapes_are_refused(folders: Folders, path: str, said: str):
    """An unnecessary or invalid escape is refused. The error says how to write the path, or what it must not contain."""
    files = folders({})
    with pytest.raises(PathRefused) as refused:
        files.write(path, "")
    assert said in str(refused.value)
    assert raw(files) == set()


def test_a_text_keeps_the_bytes_of_a_name():
    """A name that a tool lists without Handrail is shown to the model in the spelling that tools accept.

    Other lone surrogates are replaced, and surrogate pairs are joined into one character.
    """
    assert clean_text(os.fsdecode(b"caf\xe9")) == r"caf\xe9"
    assert clean_text("\ud83d\ude00 \ud800 \ud83d\udca9") == "😀 � 💩"


# --- names on disk -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ODD)
def test_any_name_works_everywhere(folders: Folders, name: bytes):
    """A file with any name can be listed, found, read, edited, moved, shown in a diff and deleted, and a commit can be undone."""
    path = f"d/{ODD[name]}"
    files = folders({})
    os.mkdir(files.root / "d")
    at = os.path.join(os.fsencode(files.root), b"d", name)
    Path(os.fsdecode(at)).write_text("old odd\n")
    assert [info.path for info in files.list("d")] == [path]
    assert files.glob("**") == files.glob("d/*") == files.glob(path) == (path,)
    assert [match.path for match in files.grep("odd")] == [path]
    assert files.stat(path).size == 8
    fork = files.fork("call")
    assert fork.read(path) == "old odd\n"
    fork.edit(path, "old", "new")
    assert fork.changed == (path,)
    shown = fork.diff()
    shown.encode()
    assert shown.startswith(f"diff --git a/{path} b/{path}\n--- a/{path}\n+++ b/{path}\n@@ -1 +1 @@\n")
    again = files.fork("again")
    again.redo(fork.file_changes())
    fork.drop()
    again.move(path, f"e/{ODD[name]}")
    kept(again)
    assert raw(files, "e") == {name}
    assert files.read(f"e/{ODD[name]}") == "new odd\n"
    assert files.undo("call")
    assert files.read(path) == "old odd\n"
    with pytest.raises(FileMissing) as missing:
        files.read(f"{path}x")
    assert path in str(missing.value)
    files.delete(path)
    assert raw(files, "d") == set()


def test_a_name_that_python_has_decoded_is_accepted(folders: Folders):
    """A tool may pass a name as Python's `os.fsdecode` returns it."""
    files = folders({})
    files.write(os.fsdecode(b"caf\xe9"), "x")
    assert raw(files) == {b"caf\xe9"}
    assert files.read(r"caf\xe9") == "x"


def test_commands_and_files_mean_the_same_names(folders: Folders, backend: str):
    """A command sees files under their real names, and files that it creates with odd names are committed."""
    files = folders({"d/a": "1"})
    fork = files.fork("call")
    fork.write(r"d/caf\xe9/x", "1")
    fork.write(r"gone\xe9", "1")
    run(
        fork,
        backend,
        "open(b'd/caf\\xe9/x', 'a').write('2'); os.unlink(b'gone\\xe9'); open(b'd/n\\n', 'w').close()",
    )
    assert run(fork, backend, "print(open('x').read())", cwd=r"d/caf\xe9") == "12\n"
    run(fork, backend, "os.symlink(b'caf\\xe9', b'd/l\\xe9')")
    assert fork.read(r"d/l\xe9/x") == "12"
    assert set(fork.changed) == {r"d/caf\xe9/", r"d/caf\xe9/x", r"d/n\x0a", r"d/l\xe9"}
    kept(fork)
    assert raw(files, "d") == {b"a", b"caf\xe9", b"n\n", b"l\xe9"}
    assert files.read(r"d/l\xe9/x") == "12"
    files.undo("call")
    assert raw(files, "d") == {b"a"}


# --- long paths ----------------------------------------------------------------------------------------

DEEP = "/".join(["n" * 250] * 20)
assert 4096 < len(DEEP) < MAX_PATH


def bottom(files: DirectoryFilesystem) -> int:
    """Return an open descriptor for the deepest folder."""
    here = os.open(files.root, os.O_RDONLY)
    for name in DEEP.split("/"):
        inner = os.open(name, os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = inner
    return here


@pytest.fixture
def deep(folders: Folders) -> DirectoryFilesystem:
    files = folders({"top": "1"})
    files.write(f"{DEEP}/file", "old\n")
    return files


def test_a_long_path_is_no_trouble(deep: DirectoryFilesystem):
    """Files at a path longer than a system call accepts can be listed, edited, created, moved, shown in a diff and removed.

    Each of these changes can be committed and undone.
    """
    assert [info.path for info in deep.list(DEEP)] == [f"{DEEP}/file"]
    assert deep.glob("**/file") == (f"{DEEP}/file",)
    fork = deep.fork("call")
    fork.edit(f"{DEEP}/file", "old", "new")
    fork.write(f"{DEEP}/more/x", "x")
    assert "+new" in fork.diff()
    again = deep.fork("again")
    again.redo(fork.file_changes())
    fork.drop()
    kept(again)
    here = bottom(deep)
    assert sorted(os.listdir(here)) == ["file", "more"]
    deep.undo("call")
    assert os.listdir(here) == ["file"]
    os.close(here)
    assert deep.read(f"{DEEP}/file") == "old\n"
    fork = deep.fork("call")
    fork.move("n" * 250, "m")
    kept(fork, "move")
    assert deep.read(f"m{DEEP[250:]}/file") == "old\n"
    deep.undo("move")
    fork = deep.fork("call")
    fork.delete("n" * 250, recursive=True)
    kept(fork, "delete")
    assert os.listdir(deep.root) == ["top"]
    deep.undo("delete")
    assert deep.read(f"{DEEP}/file") == "old\n"


def test_commands_work_in_long_paths(deep: DirectoryFilesystem, backend: str):
    """A command sees the files that a call wrote at a long path, and its own changes there are committed."""
    fork = deep.fork("call")
    fork.write(f"{DEEP}/mine", "mine\n")
    run(
        fork,
        backend,
        f"""
for name in {DEEP!r}.split("/"):
    os.chdir(name)
assert sorted(os.listdir(".")) == ["file", "mine"], os.listdir(".")
open("file", "a").write("new" + open("mine").read())
os.unlink("mine")
os.makedirs("{"e" * 200}/{"e" * 200}")
open("{"e" * 200}/{"e" * 200}/x", "w").close()
os.symlink("file", "link")
os.mkfifo("pipe")
os.setxattr(".", "user.note", b"1")
""",
    )
    assert fork.read(f"{DEEP}/link") == "old\nnewmine\n"
    run(
        fork,
        backend,
        f"""
for name in {DEEP!r}.split("/"):
    os.chdir(name)
assert sorted(os.listdir(".")) == ["{"e" * 200}", "file", "link", "pipe"], os.listdir(".")
""",
    )
    kept(fork)
    here = bottom(deep)
    assert sorted(os.listdir(here)) == ["e" * 200, "file", "link", "pipe"]
    deep.undo("call")
    assert os.listdir(here) == ["file"]
    os.close(here)
    fork = deep.fork("call")
    run(fork, backend, f"import shutil; shutil.rmtree({'n' * 250!r})")
    commit(fork)
    assert os.listdir(deep.root) == ["top"]


# --- tools ---------------------------------------------------------------------------------------------


@tool(effect="staged")
def rewrite(path: Annotated[str, PathArg("write")], *, context: ToolContext) -> str:
    """Rewrite a file, and list the files beside it."""
    context.filesystem.write(path, "new")
    return " ".join(each.path for each in context.filesystem.list("."))


async def test_a_tool_works_on_any_name_and_its_run_is_recorded(folders: Folders):
    """A tool works on a file under the name that a listing shows, and the journal records the change under that name."""
    files = folders({})
    Path(os.fsdecode(os.path.join(os.fsencode(files.root), b"caf\xe9"))).write_text("old")
    journal = MemoryJournal()
    rig = Rig([rewrite], files=files, journal=journal)
    (name,) = [info.path for info in files.list()]
    result = await rig.call("rewrite", path=name)
    assert result.success, result.message
    assert result.value == name == r"caf\xe9"
    (unit,) = await journal.calls.load(rig.gate.run.run_context.run_id)
    (manifest,) = unit.files
    assert [step["path"] for step in manifest["steps"]] == [name]
    assert raw(files) == {b"caf\xe9"}
    assert files.read(name) == "new"
