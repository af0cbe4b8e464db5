"""Forks of filesystems, in memory and on a real folder: what they see, what they can commit, and nested forks."""

from collections.abc import Callable
from typing import Any

import pytest

from handrail.errors import (
    Conflict,
    ContextError,
    EffectRefused,
    FileInTheWay,
    FileMissing,
)
from handrail.resources.memory import MemoryFilesystem
from support.filesystems import Files, NewFiles, commit, outcome, tree

# --- what a fork sees ----------------------------------------------------------------------------


def test_a_fork_is_apart_until_it_is_applied(new_files: NewFiles):
    """The root and other forks do not see a fork's changes until it is applied. Then the root has all of them."""
    root = new_files({"a": "1", "d/x": "1", "d/y": "1"})
    fork, other = root.fork("call"), root.fork("other")
    fork.write("a", "2")
    fork.delete("d", recursive=True)
    fork.mkdir("e")
    fork.write("d", "a file now")
    assert tree(other) == tree(root) == {"a": "1", "d": None, "d/x": "1", "d/y": "1"}
    after = tree(fork)
    assert after == {"a": "2", "d": "a file now", "e": None}
    commit(fork)
    assert tree(root) == after
    if isinstance(root, MemoryFilesystem):
        assert root._store.usage() == (3, 11)


def test_a_dropped_fork_leaves_nothing(new_files: NewFiles):
    """A dropped fork changes nothing, whether or not it was prepared. Dropping it again has no effect."""
    root = new_files({"a": "1"})
    fork = root.fork("call")
    fork.write("b", "2")
    fork.delete("a")
    fork.drop()
    fork.drop()
    assert (tree(root), fork.changed, fork.stale()) == ({"a": "1"}, (), ())
    prepared = root.fork("call")
    prepared.write("a", "2")
    prepared.prepare()
    prepared.drop()
    root.write("a", "3")
    assert tree(root) == {"a": "3"}


READS: dict[str, tuple[Callable[[Files], Any], Callable[[Files], Any], tuple[str, ...]]] = {
    "read": (lambda f: f.read("d/a"), lambda f: f.write("d/a", "new"), ("d/a",)),
    "read_bytes": (lambda f: f.read_bytes("d/a"), lambda f: f.append("d/a", "new"), ("d/a",)),
    "stat": (lambda f: f.stat("d/a"), lambda f: f.edit("d/a", "1", "2"), ("d/a",)),
    "exists": (lambda f: f.exists("d/a"), lambda f: f.delete("d/a"), ("d/a",)),
    "absence": (lambda f: f.exists("d/new"), lambda f: f.write("d/new", ""), ("d/new",)),
    "absence of a folder": (lambda f: f.exists("n"), lambda f: f.write("n/x", ""), ("n",)),
    "moved away": (lambda f: f.read("d/a"), lambda f: f.move("d", "n"), ("d/a",)),
    "folder gone": (lambda f: f.stat("d"), lambda f: f.delete("d", recursive=True), ("d/",)),
    "list, appears": (lambda f: f.list("d"), lambda f: f.write("d/new", ""), ("d/",)),
    "list, goes": (lambda f: f.list("d"), lambda f: f.delete("d/a"), ("d/", "d/a")),
    "list, size": (lambda f: f.list("d"), lambda f: f.write("d/a", "longer"), ("d/a",)),
    "list of the root": (lambda f: f.list(), lambda f: f.mkdir("n"), ("./",)),
    "glob": (lambda f: f.glob("d/*"), lambda f: f.write("d/new", ""), ("d/",)),
    "glob below": (lambda f: f.glob("**/x"), lambda f: f.write("d/e/x", ""), ("d/e/",)),
    "grep": (lambda f: f.grep("1"), lambda f: f.write("d/a", "2"), ("d/a",)),
    "grep, appears": (lambda f: f.grep("1"), lambda f: f.write("d/new", "1"), ("d/",)),
}


@pytest.mark.parametrize("case", READS)
@pytest.mark.parametrize("nested", [False, True])
def test_a_read_is_repeatable_and_tracked(new_files: NewFiles, case: str, nested: bool):
    """Reading again in a fork gives the same result. Once another commit changes what was read, the fork is stale."""
    read, change, places = READS[case]
    root = new_files({"d/a": "1", "d/e/b": "1"})
    parent = root.fork("parent") if nested else root
    fork, other, untouched = parent.fork("call"), parent.fork("other"), parent.fork("untouched")
    before = read(fork)
    assert fork.stale() == ()
    change(other)
    assert fork.stale() == ()
    commit(other)
    assert fork.stale() == places
    assert read(fork) == before
    assert untouched.stale() == ()
    assert outcome(lambda: read(untouched)) != before


def test_a_glob_does_not_depend_on_what_is_in_the_files():
    """A glob depends only on the names in the folders that it lists, not on contents or on other folders."""
    root = MemoryFilesystem({"d/a": "1"})
    fork = root.fork("call")
    assert fork.glob("d/*") == ("d/a",)
    root.write("d/a", "2")
    root.write("elsewhere", "2")
    assert fork.stale() == ()
    assert (fork.read("d/a"), fork.stale()) == ("1", ("d/a",))


def test_a_blind_write_is_no_read(new_files: NewFiles):
    """A fork that only writes files, makes new folders and reads its own writes is not stale after others write."""
    root = new_files({"a": "1"})
    fork = root.fork("call")
    fork.write("a", "2")
    fork.write("n/b", "2")
    fork.mkdir("m")
    assert fork.read("a") == fork.read("n/b") == "2"
    for path in ("a", "n/c"):
        root.write(path, "3")
    assert fork.stale() == ()


def test_a_refusal_reveals_and_so_is_a_read(new_files: NewFiles):
    """A refused operation counts as a read of the obstacle or of the missing file."""
    root = new_files({"a": "1", "d/x": ""})
    fork = root.fork("call")
    for path in ("a/b", "d"):
        with pytest.raises(FileInTheWay):
            fork.write(path, "")
    with pytest.raises(FileMissing):
        fork.delete("gone")
    for path in ("a", "d"):
        root.delete(path, recursive=True)
    root.write("gone", "")
    assert fork.stale() == ("a", "d/", "gone")


def test_what_a_listing_left_out_stays_out(new_files: NewFiles):
    """What others add to a folder after a fork has listed or deleted it is invisible in the fork, at any depth."""
    root = new_files({"d/a": "1", "e/x/y": ""})
    fork = root.fork("call")
    fork.list("d")
    fork.delete("e", recursive=True)
    for path in ("d/new/deep", "e/z/new"):
        root.write(path, "")
        assert not fork.exists(path)
    assert fork.glob("**") == ("d/a",)


def test_what_was_written_stays_where_it_was_written(new_files: NewFiles):
    """The parent folders of a file that a fork wrote still exist in the fork after another call deletes them."""
    root = new_files({"d/e/x": "1"})
    fork = root.fork("call")
    fork.write("z", "")
    assert not fork.exists("gone")
    fork.write("d/e/y", "2")
    root.delete("d", recursive=True)
    inner = fork.fork("inner")
    assert tree(fork) == tree(inner) == {"d": None, "d/e": None, "d/e/y": "2", "z": ""}
    with pytest.raises(FileInTheWay):
        fork.write("d", "a file")
    commit(fork)
    assert tree(root) == {"d": None, "d/e": None, "d/e/y": "2", "z": ""}


def test_the_first_write_stays_where_it_was_written(new_files: NewFiles):
    """The same for the first file that a fork writes, after it has looked at other paths."""
    root = new_files({"d/e/x": "1"})
    fork = root.fork("call")
    assert not fork.exists("gone")
    assert not fork.exists("gone too")
    fork.write("d/e/y", "2")
    root.delete("d", recursive=True)
    assert tree(fork) == {"d": None, "d/e": None, "d/e/y": "2"}


def test_what_was_read_stays_where_it_was_read(new_files: NewFiles):
    """The parent folders of a file that a fork read still exist in the fork after another call deletes them."""
    root = new_files({"d/e/x": "1", "d/y": "1"})
    fork = root.fork("call")
    fork.read("d/e/x")
    root.delete("d", recursive=True)
    assert tree(fork) == {"d": None, "d/e": None, "d/e/x": "1"}


def test_a_folder_that_was_to_be_made_and_was_there_is_relied_on(new_files: NewFiles):
    """Making a folder that already exists counts as a read, so the fork is stale once the folder is removed."""
    root = new_files({"d/x": "1"})
    fork = root.fork("call")
    fork.mkdir("d")
    assert (fork.changed, fork.stale()) == ((), ())
    root.delete("d", recursive=True)
    assert fork.stale() == ("d/",)


def test_what_is_in_a_folder_that_was_not_there_is_not_there(new_files: NewFiles):
    """A fork that found a folder missing never sees files that another call puts there."""
    root = new_files({"a/x/y": ""})
    outer = root.fork("outer")
    assert not outer.exists("b")
    root.move("a", "b")
    inner = outer.fork("inner")
    inner.write("b/x/z", "")
    assert [info.path for info in inner.list("b/x")] == ["b/x/z"]
    inner.delete("b/x", recursive=True)
    commit(inner)


# --- what a fork may commit ----------------------------------------------------------------------

WRITES: dict[str, tuple[Callable[[Files], Any], Callable[[Files], Any], tuple[str, ...]]] = {
    "both write": (lambda f: f.write("d/a", "x"), lambda f: f.write("d/a", "y"), ("d/a",)),
    "both create": (lambda f: f.write("n/m", "x"), lambda f: f.write("n/m", "y"), ("n/m",)),
    "both write the same": (lambda f: f.write("n", ""), lambda f: f.write("n", ""), ("n",)),
    "both delete": (lambda f: f.delete("d/a"), lambda f: f.delete("d/a"), ("d/a",)),
    "write, delete": (lambda f: f.write("d/a", "x"), lambda f: f.delete("d/a"), ("d/a",)),
    "delete, write": (lambda f: f.delete("d/a"), lambda f: f.append("d/a", "y"), ("d/a",)),
    "move, write": (lambda f: f.move("d/a", "n"), lambda f: f.write("d/a", "y"), ("d/a",)),
    "write, move": (lambda f: f.write("n/d/a", ""), lambda f: f.move("d", "n/d"), ("n/d/a",)),
    "file, folder": (lambda f: f.write("n", "x"), lambda f: f.mkdir("n"), ("n",)),
    "folder, file": (lambda f: f.mkdir("n/m"), lambda f: f.write("n", "y"), ("n",)),
    "below what became a file": (
        lambda f: f.write("d/new", "x"),
        lambda f: (f.delete("d", recursive=True), f.write("d", "y")),
        ("d",),
    ),
    "folder goes, file comes": (
        lambda f: f.delete("d", recursive=True),
        lambda f: f.write("d/new", ""),
        ("d/new",),
    ),
    "made and gone": (lambda f: (f.write("n", ""), f.delete("n")), lambda f: f.write("n", "y"), ("n",)),
}


@pytest.mark.parametrize("case", WRITES)
@pytest.mark.parametrize("nested", [False, True])
def test_the_later_of_two_that_wrote_one_path_conflicts(new_files: NewFiles, case: str, nested: bool):
    """The later of two commits that clash raises a conflict that names the path, and none of its changes are applied.

    Both change the same path, the earlier one replaces a folder that the later one writes to, or the later one
    deletes a folder that the earlier one writes to.
    """
    one, two, places = WRITES[case]
    root = new_files({"d/a": "1", "b": "1"})
    parent = root.fork("parent") if nested else root
    later, earlier = parent.fork("later"), parent.fork("earlier")
    later.write("b", "changed")
    one(later)
    two(earlier)
    commit(earlier)
    after = tree(parent)
    with pytest.raises(Conflict) as caught:
        later.prepare()
    assert caught.value.places == places
    assert tree(parent) == after
    with pytest.raises(ContextError, match="the fork of 'later' is not prepared"):
        later.apply()


BESIDE: dict[str, tuple[Callable[[Files], Any], Callable[[Files], Any], dict[str, str | None]]] = {
    "different files": (
        lambda f: f.write("d/b", "x"),
        lambda f: f.write("d/a", "y"),
        {"d/a": "y", "d/b": "x"},
    ),
    "the same folder": (lambda f: f.mkdir("n/m"), lambda f: f.mkdir("n/m"), {"n": None, "n/m": None}),
    "in one new folder": (
        lambda f: f.write("n/b", ""),
        lambda f: f.write("n/a", ""),
        {"n": None, "n/a": "", "n/b": ""},
    ),
    "a folder that went": (
        lambda f: f.write("d/n", ""),
        lambda f: f.delete("d", recursive=True),
        {"d": None, "d/n": ""},
    ),
}


@pytest.mark.parametrize("case", BESIDE)
@pytest.mark.parametrize("nested", [False, True])
def test_others_commit_beside_each_other(new_files: NewFiles, case: str, nested: bool):
    """Commits to different paths are merged.

    A folder that both make exists afterwards. So does one that the earlier commit deletes and the later one writes to.
    """
    one, two, expected = BESIDE[case]
    root = new_files({"d/a": "1"})
    parent = root.fork("parent") if nested else root
    later, earlier = parent.fork("later"), parent.fork("earlier")
    one(later)
    two(earlier)
    commit(earlier)
    commit(later)
    base = {"d": None, "d/a": "1"} if "d/n" not in expected else {}
    assert tree(parent) == {**base, **expected}


def test_a_path_is_taken_from_prepare_on(new_files: NewFiles):
    """From a fork's `prepare` until its `apply`, another fork can't prepare the same paths, and direct writes to them fail."""
    root = new_files({"d/a": "1"})
    first, same, inside, around, beside = (
        root.fork(name) for name in ("first", "same", "inside", "around", "beside")
    )
    first.write("n/x", "first")
    same.write("n/x", "second")
    inside.write("n/x/y", "second")
    around.write("n", "second")
    beside.write("n/y", "beside")
    first.prepare()
    for fork, place in ((same, "n/x"), (inside, "n/x"), (around, "n")):
        with pytest.raises(Conflict, match=place):
            fork.prepare()
    with pytest.raises(Conflict, match="n/x"):
        root.write("n/x", "direct")
    beside.prepare()
    beside.apply()
    first.apply()
    root.write("n/x", "direct")
    assert tree(root) == {"d": None, "d/a": "1", "n": None, "n/x": "direct", "n/y": "beside"}


def test_changes_for_a_diff(new_files: NewFiles):
    """`changes` yields the old and new bytes of each changed file, but skips a file created and deleted in the fork."""
    root = new_files({"a": "1", "b": "1", "c/d": "1", "e": "1"})
    fork = root.fork("call")
    fork.write("a", "2")
    fork.write("a", "3")
    fork.delete("b")
    fork.move("c", "n")
    fork.write("tmp", "")
    fork.delete("tmp")
    assert fork.changed == ("a", "b", "c/", "c/d", "n/", "n/d")
    changes = [("a", b"1", b"3"), ("b", b"1", None), ("c/d", b"1", None), ("n/d", None, b"1")]
    assert list(fork.changes()) == changes
    fork.prepare()
    assert list(fork.changes()) == changes


def test_a_fork_that_may_not_write_does_not(new_files: NewFiles):
    """A read-only fork and its inner forks can read. Every change is refused with an error that names the path."""
    root = new_files({"a": "1", "d/x": ""})
    reader = root.fork("peek", writable=False)
    calls: list[Callable[[Files], Any]] = [
        lambda f: f.write("a", ""),
        lambda f: f.append("a", ""),
        lambda f: f.edit("a", "1", "2"),
        lambda f: f.delete("a"),
        lambda f: f.mkdir("a"),
        lambda f: f.move("a", "b"),
    ]
    for fork in (reader, reader.fork("inner", writable=True)):
        for call in calls:
            with pytest.raises(
                EffectRefused,
                match=r"declares an effect that only reads: it may not write 'a', which needs effect='staged'",
            ):
                call(fork)
        assert fork.read("a") == "1"
        assert fork.changed == ()


# --- nested forks --------------------------------------------------------------------------------


def test_forks_nest_several_levels(new_files: NewFiles):
    """Each fork commits into its parent, and only the outermost commit reaches the root."""
    root = new_files({"a": "0"})
    forks = [root.fork("1")]
    for level in ("2", "3", "4"):
        forks.append(forks[-1].fork(level))
    for number, fork in enumerate(forks):
        fork.write(f"w{number}", str(number))
        assert fork.read("a") == "0"
    forks[3].write("a", "4")
    forks[3].delete("w1")
    for number in (3, 2, 1, 0):
        assert root.read("a") == "0"
        commit(forks[number])
    assert tree(root) == {"a": "4", "w0": "0", "w2": "2", "w3": "3"}


def test_what_an_inner_fork_read_was_read_by_the_outer_one_also_if_it_was_dropped(new_files: NewFiles):
    """An outer fork depends on what its inner forks read, even if they were dropped."""
    root = new_files({"a": "1", "b": "1", "d/x": "1"})
    outer = root.fork("outer")
    dropped, committed = outer.fork("dropped"), outer.fork("committed")
    dropped.read("a")
    committed.read("b")
    committed.glob("d/*")
    dropped.drop()
    commit(committed)
    for path in ("a", "b", "d/y"):
        root.write(path, "2")
    assert outer.stale() == ("a", "b", "d/")
    assert (outer.read("b"), outer.glob("d/*")) == ("1", ("d/x",))


def test_what_an_inner_fork_read_of_the_outer_ones_work_is_no_read_below(new_files: NewFiles):
    """If an inner fork reads a file that its outer fork wrote, this does not count as a read by the outer fork."""
    root = new_files({"a": "1"})
    outer = root.fork("outer")
    outer.write("a", "2")
    inner = outer.fork("inner")
    assert inner.read("a") == "2"
    commit(inner)
    root.write("a", "3")
    assert outer.stale() == ()
    with pytest.raises(Conflict, match="a"):
        outer.prepare()


def test_inner_reads_that_disagree_make_the_outer_fork_stale(new_files: NewFiles):
    """If two inner forks read different versions of a file or folder, the outer fork is stale once both have ended."""
    root = new_files({"a": "1", "d/x": ""})
    outer = root.fork("outer")
    one, two = outer.fork("one"), outer.fork("two")
    one.read("a")
    one.list("d")
    root.write("a", "2")
    root.write("d/y", "")
    two.read("a")
    two.list("d")
    commit(two)
    assert outer.stale() == ()
    commit(one)
    assert outer.stale() == ("a", "d/")


def test_a_file_made_and_deleted_inside_a_nested_fork_counts_as_written(new_files: NewFiles):
    """Creating and deleting a file in a nested fork counts as a write, and conflicts if another call creates the file."""
    files = new_files()
    outer, other = files.fork("outer"), files.fork("other")
    inner = outer.fork("inner")
    inner.write("a", "x")
    inner.delete("a")
    inner.prepare()
    inner.apply()
    other.write("a", "y")
    other.prepare()
    other.apply()
    with pytest.raises(Conflict, match="has changed a in the meantime"):
        outer.prepare()
    outer.drop()
    assert files.read("a") == "y"
