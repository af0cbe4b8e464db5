"""The operations of a filesystem and their errors, in memory and on a real folder."""

import tracemalloc
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from itertools import count
from typing import Any

import pytest

from handrail.errors import (
    Conflict,
    EditRefused,
    FileError,
    FileInTheWay,
    FileLimitReached,
    FileMissing,
    HandrailError,
    PathRefused,
)
from handrail.protocols import FileInfo, Filesystem, Fork, Forkable, Match
from handrail.resources import search
from handrail.resources.memory import FileLimits, MemoryFilesystem
from handrail.resources.search import find, line_pattern, matches
from support.filesystems import Files, NewFiles, commit, tree


class SteppingClock:
    """A clock that advances one second per reading."""

    def __init__(self) -> None:
        self._seconds = count(1)

    def now(self) -> datetime:
        return datetime(2030, 1, 1, tzinfo=UTC) + timedelta(seconds=next(self._seconds))

    def monotonic(self) -> float:
        return 0.0


@pytest.fixture(params=["root", "fork", "fork of a fork"])
def files(request: pytest.FixtureRequest, new_files: NewFiles) -> Files:
    """Run each test on the same small tree: in a filesystem, in a fork of it, and in a fork of that fork."""
    root = new_files({"readme.md": "hello\n", "src/main.py": "x = 1\ny = x\n", "src/data.bin": b"\xff\0"})
    if request.param == "root":
        return root
    fork = root.fork("outer")
    return fork if request.param == "fork" else fork.fork("inner")


# --- operations -----------------------------------------------------------------------------------


def test_it_satisfies_the_protocols():
    """A filesystem and its forks satisfy the protocols of a filesystem and of a forkable resource."""
    root: Filesystem = MemoryFilesystem()
    fork = MemoryFilesystem().fork("call")
    as_fork: Fork = fork
    assert isinstance(root, Filesystem)
    assert isinstance(root, Forkable)
    assert isinstance(fork, Filesystem)
    assert isinstance(fork, Forkable)
    assert as_fork.stale() == ()


def test_text_and_bytes_come_back(files: Files):
    """Text is stored as UTF-8 and bytes are stored unchanged. Missing parent folders are created."""
    files.write("new/deep/a.txt", "grüße\r\n")
    files.write("new/b.bin", b"\0\xff")
    assert files.read("new/deep/a.txt") == "grüße\r\n"
    assert files.read_bytes("new/deep/a.txt") == "grüße\r\n".encode()
    assert files.read_bytes("new/b.bin") == b"\0\xff"
    assert files.stat("new/deep").is_directory


def test_every_spelling_of_a_path_is_one_file(files: Files):
    """`./a`, `a//b` and `a/./b` refer to the same files as the normalised paths."""
    for spelling in ("./src/main.py", "src//main.py", "src/./main.py", ".//src/.//main.py"):
        assert files.read(spelling) == "x = 1\ny = x\n"
    files.write("./src//./main.py", "z")
    assert [info.path for info in files.list("src/")] == ["src/data.bin", "src/main.py"]
    assert files.read("src/main.py") == "z"


def test_append_makes_and_extends(files: Files):
    """Appending creates a missing file, and extends an existing one at its end."""
    files.append("log", "a")
    files.append("log", b"b")
    assert files.read("log") == "ab"


def test_edit_replaces_what_is_unique_or_everything(files: Files):
    """`edit` replaces text that occurs only once, or every occurrence with `all=True`."""
    assert files.edit("readme.md", "hello", "bye") == 1
    assert files.read("readme.md") == "bye\n"
    assert files.edit("src/main.py", "x", "zz", all=True) == 2
    assert files.read("src/main.py") == "zz = 1\ny = zz\n"


def test_list_and_stat_say_what_is_there():
    """`list` returns sorted entries, and `stat` returns the size and the time of the last change. The root is '.'."""
    files = MemoryFilesystem({"b": "12", "a/c": ""}, clock=SteppingClock())
    first = datetime(2030, 1, 1, tzinfo=UTC).timestamp()
    # The clock is read once for each file and for each new folder.
    assert files.list() == (FileInfo("a", True, 0, first + 2), FileInfo("b", False, 2, first + 1))
    assert files.stat("a/c") == FileInfo("a/c", False, 0, first + 3)
    assert files.stat(".") == FileInfo(".", True, 0, 0.0)
    files.edit("b", "1", "7")
    assert files.stat("b").modified == first + 4
    files.move("b", "d")
    assert files.stat("d").modified == first + 4
    assert files.exists("a")
    assert files.exists(".")
    assert not files.exists("b")


def test_folders_stay_until_they_are_deleted(files: Files):
    """An empty folder stays, whether it was created empty or became empty."""
    files.mkdir("one/two")
    files.mkdir("one/two")
    files.delete("src/main.py")
    files.delete("src/data.bin")
    assert files.list("src") == ()
    assert files.glob("**/") == ("one/", "one/two/", "src/")
    files.delete("src")
    files.delete("one", recursive=True)
    assert files.glob("**/") == ()


def test_a_folder_moves_with_everything_in_it(files: Files):
    """Moving a folder moves everything in it and creates the new parent folders."""
    files.mkdir("src/empty/er")
    files.move("src", "lib/py/src")
    assert files.read("lib/py/src/main.py") == "x = 1\ny = x\n"
    assert files.exists("lib/py/src/empty/er")
    assert not files.exists("src")
    files.move("readme.md", "docs/readme.md")
    assert files.read("docs/readme.md") == "hello\n"
    assert not files.exists("readme.md")


@pytest.mark.parametrize(
    ("pattern", "found"),
    [
        ("*", ["a.py", "b.txt"]),
        ("**", ["a.py", "b.txt", "d/a.py", "d/e/.h", "d/e/c.py"]),
        ("**/*.py", ["a.py", "d/a.py", "d/e/c.py"]),
        ("**/**/c.py", ["d/e/c.py"]),
        ("d/**", ["d/a.py", "d/e/.h", "d/e/c.py"]),
        ("d/**/c.py", ["d/e/c.py"]),
        ("*/*.py", ["d/a.py"]),
        ("?.py", ["a.py"]),
        ("[a-b].*", ["a.py", "b.txt"]),
        ("[!a].*", ["b.txt"]),
        ("./d//*.py", ["d/a.py"]),
        ("d/e/c.py", ["d/e/c.py"]),
        ("d/e", []),
        ("*/", ["d/"]),
        ("**/", ["d/", "d/e/"]),
        ("d/e/", ["d/e/"]),
        ("nowhere/*", []),
        ("a.py/*", []),
        (".", []),
    ],
)
def test_glob(new_files: NewFiles, pattern: str, found: list[str]):
    """Each kind of glob pattern finds the expected paths, sorted."""
    files = new_files(dict.fromkeys(["a.py", "b.txt", "d/a.py", "d/e/c.py", "d/e/.h"], ""))
    assert list(files.glob(pattern)) == found
    assert list(files.fork("call").glob(pattern)) == found


def test_grep_finds_lines(new_files: NewFiles):
    """`grep` returns matching lines without line ends, numbered from one.

    It shortens long lines and skips files that are not text.
    """
    long = "x" * 600
    files = new_files(
        {"b": "no\r\nfox\r\n", "a/z": f"fox\n\nfox {long}", "bin": b"fox\0", "latin": b"fox\xff"}
    )
    assert files.grep("fox$") == (Match("a/z", 1, "fox"), Match("b", 2, "fox"))
    assert [(m.path, m.line, len(m.text)) for m in files.grep("x{5}")] == [("a/z", 3, 500)]
    assert [m.path for m in files.grep("fox", glob="*")] == ["b"]
    assert [m.line for m in files.grep("^", glob="b")] == [1, 2]


def test_a_very_deep_tree_is_no_trouble():
    """A path with two thousand parts can be found, moved and deleted, because no operation recurses."""
    deep = "/".join("d" * 2000)
    files = MemoryFilesystem({deep: "bottom"}).fork("call")
    assert files.glob("**") == (deep,)
    files.move("d", "e")
    assert files.read("e" + deep[1:]) == "bottom"
    files.delete("e", recursive=True)
    assert files.list() == ()


# --- refusals ------------------------------------------------------------------------------------

BAD: dict[str, tuple[Callable[[Files], Any], type[HandrailError], str]] = {
    "empty path": (
        lambda f: f.read(""),
        PathRefused,
        "the path is empty. Name a file or a folder; '.' is the root",
    ),
    "absolute": (lambda f: f.read("/etc/passwd"), PathRefused, "it is absolute. Paths start at the root"),
    "drive": (lambda f: f.read("C:/x"), PathRefused, "it is absolute"),
    "address": (lambda f: f.read("file:///etc/passwd"), PathRefused, "it is absolute"),
    "home": (lambda f: f.read("~/x"), PathRefused, "there is no home folder here"),
    "up": (
        lambda f: f.write("a/../../x", ""),
        PathRefused,
        "'..' is not allowed, because it could lead out of the root",
    ),
    "up alone": (lambda f: f.list(".."), PathRefused, "Write the path"),
    "nul": (lambda f: f.exists("a\0b"), PathRefused, r"the control character '\x00'"),
    "newline": (
        lambda f: f.write("a\nb", ""),
        PathRefused,
        r"the control character '\n'. Remove it",
    ),
    "backslash": (lambda f: f.read("src\\main.py"), PathRefused, "Separate folders with '/'"),
    "surrogate": (lambda f: f.read("docs/a\ud800"), PathRefused, r"'\ud800' can't be encoded as UTF-8"),
    "long name": (lambda f: f.write("ü" * 128, ""), PathRefused, "longer than 255 bytes. Use a shorter one"),
    "long path": (lambda f: f.write("abc/" * 8193 + "x", ""), PathRefused, "longer than 32768 bytes"),
    "not text": (lambda f: f.read(3), PathRefused, "a path must be a str, not an int. Pass a str"),  # pyright: ignore[reportArgumentType]
    "unhashable": (lambda f: f.write([], ""), PathRefused, "not a list"),  # pyright: ignore[reportArgumentType]
    "write to root": (lambda f: f.write(".", ""), PathRefused, "this names a folder, not a file"),
    "write with slash": (lambda f: f.write("a/", ""), PathRefused, "Name a file, as in 'docs/notes.txt'"),
    "content": (lambda f: f.write("a", 3), FileError, "the content is an int, and files hold text or bytes"),  # pyright: ignore[reportArgumentType]
    "bad text": (
        lambda f: f.write("a", "ab\ud800"),
        FileError,
        "character 2 of the content can't be encoded",
    ),
    "missing": (lambda f: f.read("gone"), FileMissing, "nothing exists at this path. List '.' to see"),
    "misspelt": (lambda f: f.read("src/mian.py"), FileMissing, "Did you mean 'src/main.py'?"),
    "wrong case": (lambda f: f.read("README.MD"), FileMissing, "Did you mean 'readme.md'?"),
    "missing folder": (
        lambda f: f.read("scr/x/y"),
        FileMissing,
        "there is no folder 'scr'. Did you mean 'src'?",
    ),
    "file as folder": (lambda f: f.stat("readme.md/x"), FileMissing, "there is no folder 'readme.md'"),
    "read folder": (lambda f: f.read("src"), FileError, "this is a folder, not a file. List it"),
    "read binary": (
        lambda f: f.read("src/data.bin"),
        FileError,
        "not UTF-8 text (byte 0 is invalid). Use read_bytes",
    ),
    "list file": (
        lambda f: f.list("readme.md"),
        FileError,
        "this is a file, not a folder",
    ),
    "list missing": (lambda f: f.list("sr"), FileMissing, "Did you mean 'src'?"),
    "write on folder": (lambda f: f.write("src", ""), FileInTheWay, "this is a folder. Choose another path"),
    "write below file": (
        lambda f: f.write("readme.md/a/b", ""),
        FileInTheWay,
        "'readme.md': this is a file",
    ),
    "mkdir on file": (
        lambda f: f.mkdir("readme.md"),
        FileInTheWay,
        "this is a file, so it can't contain others",
    ),
    "edit missing": (lambda f: f.edit("readme", "a", "b"), FileMissing, "Did you mean 'readme.md'?"),
    "edit nothing": (lambda f: f.edit("readme.md", "", "b"), EditRefused, "the text to replace is empty"),
    "edit same": (
        lambda f: f.edit("readme.md", "hello", "hello"),
        EditRefused,
        "the old and the new text are equal",
    ),
    "edit absent": (
        lambda f: f.edit("readme.md", "Hello", "b"),
        EditRefused,
        "does not contain the text to replace. Read the file and copy",
    ),
    "edit twice": (
        lambda f: f.edit("src/main.py", "x", "b"),
        EditRefused,
        "the text to replace 2 times. Include more of the surrounding text",
    ),
    "edit binary": (lambda f: f.edit("src/data.bin", "x", "b"), FileError, "not UTF-8 text"),
    "delete root": (lambda f: f.delete("."), PathRefused, "the root can't be deleted"),
    "delete missing": (lambda f: f.delete("gone"), FileMissing, "nothing exists at this path"),
    "delete full": (lambda f: f.delete("src"), FileError, "this folder is not empty. Pass recursive=True"),
    "move root": (lambda f: f.move(".", "a"), PathRefused, "the root can't be moved"),
    "move onto root": (lambda f: f.move("src", "."), PathRefused, "Pass the full new path"),
    "move missing": (lambda f: f.move("gone", "a"), FileMissing, "nothing exists at this path"),
    "move onto file": (
        lambda f: f.move("src/main.py", "readme.md"),
        FileInTheWay,
        "a file exists there already. Delete it first",
    ),
    "move onto folder": (
        lambda f: f.move("readme.md", "src"),
        FileInTheWay,
        "give the full new path: 'src/readme.md'",
    ),
    "move onto itself": (lambda f: f.move("src", "./src"), FileInTheWay, "a folder exists there already"),
    "move into itself": (lambda f: f.move("src", "src/a"), PathRefused, "'src' can't be moved into itself"),
    "move below file": (lambda f: f.move("src", "readme.md/a"), FileInTheWay, "'readme.md': this is a file"),
    "glob out": (lambda f: f.glob("../*"), PathRefused, "'..' is not allowed"),
    "glob braces": (
        lambda f: f.glob("*.{py,md}"),
        PathRefused,
        "don't support {a,b} alternatives. Search once for each",
    ),
    "grep pattern": (
        lambda f: f.grep("(a"),
        FileError,
        "this is not a valid regular expression: unclosed group",
    ),
    "grep type": (lambda f: f.grep(None), FileError, "a pattern must be a str, not a NoneType"),  # pyright: ignore[reportArgumentType]
}


@pytest.mark.parametrize("case", BAD)
def test_a_wrong_call_is_told_what_to_do(files: Files, case: str):
    """A wrong call raises the expected error, whose message says what is wrong or what to do. It adds and removes no file."""
    call, kind, words = BAD[case]
    before = [info.path for info in files.list("src")]
    with pytest.raises(kind) as caught:
        call(files)
    assert type(caught.value) is kind
    assert words in str(caught.value)
    assert isinstance(caught.value, OSError)
    assert [info.path for info in files.list("src")] == before
    assert [info.path for info in files.list()] == ["readme.md", "src"]


def test_a_suggestion_is_not_searched_among_very_many_names(new_files: NewFiles):
    """In a folder with thousands of names, a similar name is not suggested unless it differs only in case."""
    files = new_files({f"file{number}": "" for number in range(3000)})
    with pytest.raises(FileMissing, match=r"List '\.'"):
        files.read("fiel7")
    with pytest.raises(FileMissing, match="Did you mean 'file7'"):
        files.read("FILE7")


def test_limits():
    """File size, the number of files and folders, and total size are limited. Deleting makes room."""
    limits = FileLimits(max_file_size=4, max_files=3, max_total_size=6)
    for files in (MemoryFilesystem(limits=limits), MemoryFilesystem(limits=limits).fork("call")):
        with pytest.raises(FileLimitReached, match="would have 5 bytes, and the limit for a file is 4"):
            files.write("a", "12345")
        files.write("d/a", "1234")
        with pytest.raises(FileLimitReached, match="limit of 6 bytes in total"):
            files.write("b", "123")
        files.write("b", "12")
        with pytest.raises(FileLimitReached, match="limit of 3 files and folders"):
            files.mkdir("e")
        with pytest.raises(FileLimitReached, match="limit for a file is 4"):
            files.append("d/a", "5")
        files.delete("d", recursive=True)
        files.write("c", "1234")
        for path, text in (("n/big", "12345"), ("n/m/many", ""), ("n/full", "")):
            with pytest.raises(FileLimitReached):
                files.write(path, text)
        assert tree(files) == {"b": "12", "c": "1234"}


def _peak(work: Callable[[], object]) -> int:
    """Return the peak memory that `work` allocates, in bytes."""
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_a_result_that_is_too_large_is_refused_before_it_is_built(new_files: NewFiles):
    """An edit or append whose result would exceed the limit is refused before the result is built in memory."""
    files = new_files({"a": "é" * 100_000}, limits=FileLimits(max_file_size=1 << 20))

    def work() -> None:
        with pytest.raises(FileLimitReached, match="would have 200000000 bytes"):
            files.edit("a", "é", "ü" * 1000, all=True)
        with pytest.raises(FileLimitReached, match="would have 1200000 bytes"):
            files.append("a", "x" * 1_000_000)

    assert _peak(work) < 10 << 20
    assert files.edit("a", "é", "üü", all=True) == 100_000
    assert files.read("a") == "üü" * 100_000
    with pytest.raises(FileError, match="can't be encoded"):
        files.edit("a", "ü", "\ud800", all=True)


def test_a_search_that_finds_too_many_lines_is_refused(new_files: NewFiles):
    """A search that matches too many lines is refused, even if no single file has too many."""
    files = new_files({"a": "\n" * 60_000, "b": "\n" * 60_000})
    assert len(files.grep("", glob="a")) == 60_000
    with pytest.raises(FileLimitReached, match="more than 100000 lines match"):
        files.grep("")
    assert files.grep("nothing") == ()


@pytest.mark.parametrize(
    "text", ["", "\n", "x", "x\n", "\n\nx", "x\n\n", "xx\nyx\r\n\nzzzzx\nx", "xxxxxxxxx\ny\nx\n"]
)
def test_a_file_is_searched_in_pieces(monkeypatch: pytest.MonkeyPatch, text: str):
    """A search finds the same lines, whatever the size of the chunks into which it splits a file."""
    whole = tuple(matches(line_pattern("x|^$"), "a", text.encode()))
    for size in (1, 2, 3, 5):
        monkeypatch.setattr(search, "_PIECE", size)
        assert tuple(matches(line_pattern("x|^$"), "a", text.encode())) == whole


def test_a_commit_that_deletes_makes_room():
    """Committing a fork that deletes a tree frees the tree's files and bytes."""
    root = MemoryFilesystem({"d/e/f": "1", "d/g": "1"}, limits=FileLimits(max_files=4, max_total_size=2))
    fork = root.fork("call")
    fork.delete("d", recursive=True)
    commit(fork)
    root.write("a/b/c/d", "12")
    assert tree(root) == {"a": None, "a/b": None, "a/b/c": None, "a/b/c/d": "12"}


def test_two_forks_that_are_too_much_together_conflict():
    """If two forks exceed a limit only together, the later one's `prepare` raises `Conflict`."""
    root = MemoryFilesystem(limits=FileLimits(max_files=1))
    one, two = root.fork("one"), root.fork("two")
    one.write("a", "")
    two.write("b", "")
    commit(one)
    with pytest.raises(Conflict, match="b"):
        two.prepare()
    assert tree(root) == {"a": ""}


class CountedFolder(dict[str, bool]):
    """A folder's names as a dict that counts how often it is iterated."""

    visits = 0

    def items(self) -> Any:
        self.visits += 1
        return super().items()


def test_a_glob_goes_through_each_folder_once():
    """A glob lists each folder once, even if the pattern has several `**` in a row."""
    folders = {"/".join(["a"] * depth): CountedFolder(a=depth < 4, b=False) for depth in range(5)}
    found = find("/".join(["**"] * 400 + ["b"]), lambda path: None, folders.__getitem__)
    assert len(found) == 5
    assert [folder.visits for folder in folders.values()] == [1] * 5


def test_a_name_with_many_stars_is_matched_at_once(new_files: NewFiles):
    """Matching a name of the maximum length against a glob with a hundred stars is fast.

    A backtracking match would not end before the test's timeout.
    """
    files = new_files({"a" * 255: ""})
    assert list(files.glob("*a" * 100 + "*b")) == []
    assert list(files.glob("*a" * 100 + "*")) == ["a" * 255]
