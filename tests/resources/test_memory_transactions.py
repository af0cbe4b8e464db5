"""Forks in memory: their use after they have ended, threads, the cost of a commit, and any interleaving of forks."""

import sys
import threading
from collections.abc import Callable
from itertools import count
from typing import Any

import pytest
from hypothesis import settings

from handrail.errors import (
    Conflict,
    ContextExpired,
)
from handrail.resources.memory import MemoryFilesystem
from handrail.resources.staging import FileFork
from resources.file_transactions import Transactions
from support.filesystems import commit, tree
from support.steps import steps_of

# --- ended forks, threads, and the cost of a fork -------------------------------------------------


@pytest.mark.parametrize("end", ["prepare", "apply", "drop", "conflict", "parent"])
def test_nothing_works_after_the_end(end: str):
    """After a fork or its parent has ended, the fork's operations raise `ContextExpired` with the ended call's name and change nothing."""
    root = MemoryFilesystem({"a": "1", "x": "1"})
    outer = root.fork("ended")
    fork = outer.fork("inner") if end == "parent" else outer
    fork.write("x", "2")
    if end == "conflict":
        root.write("x", "3")
        with pytest.raises(Conflict):
            fork.prepare()
    elif end == "apply":
        commit(fork)
    else:
        {"prepare": outer.prepare, "drop": outer.drop, "parent": outer.drop}[end]()
    before = tree(root)
    calls: list[Callable[[FileFork], Any]] = [
        lambda f: f.read("a"),
        lambda f: f.read_bytes("a"),
        lambda f: f.exists("a"),
        lambda f: f.stat("a"),
        lambda f: f.list(),
        lambda f: f.glob("*"),
        lambda f: f.grep("1"),
        lambda f: f.write("a", "2"),
        lambda f: f.append("a", "2"),
        lambda f: f.edit("a", "1", "2"),
        lambda f: f.mkdir("m"),
        lambda f: f.move("a", "b"),
        lambda f: f.delete("a"),
        lambda f: f.fork("late"),
        lambda f: f.prepare(),
    ]
    for call in calls:
        with pytest.raises(ContextExpired, match="the call 'ended' has ended"):
            call(fork)
    assert tree(root) == before


@pytest.mark.parametrize("end", [FileFork.prepare, FileFork.drop])
def test_an_inner_fork_can_not_be_applied_into_one_that_is_over(end: Callable[[FileFork], None]):
    """Applying a prepared inner fork after the outer fork has ended has no effect and raises nothing."""
    root = MemoryFilesystem({"a": "1"})
    outer = root.fork("outer")
    outer.write("b", "outer")
    inner = outer.fork("inner")
    inner.write("a", "late")
    inner.prepare()
    end(outer)
    inner.apply()
    if end is FileFork.prepare:
        outer.apply()
    assert root.read("a") == "1"


@pytest.fixture
def eager_threads():
    """Make threads switch as often as possible."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


def hammer(fork: FileFork, mine: int, busy: threading.Barrier, ends: list[BaseException]) -> None:
    """Use a fork until it raises an error, and record the error."""
    try:
        for number in count():
            if number == 3:
                busy.wait()
            fork.write(f"d/{mine}/{number}", "x")
            fork.glob("**")
            fork.move(f"d/{mine}/{number}", f"e/{mine}/{number}")
            fork.list(f"e/{mine}")
    except BaseException as error:
        ends.append(error)
        if not isinstance(error, ContextExpired):
            busy.abort()  # the other threads must not wait for this one


@pytest.mark.usefixtures("eager_threads")
@pytest.mark.parametrize("end", ["commit", "drop"])
def test_a_thread_that_outlives_its_call_writes_nowhere(end: str):
    """If a fork ends while threads use it, its changes up to then are committed or dropped. Later operations are refused."""
    for _ in range(15):
        root = MemoryFilesystem({"d/start": "1"})
        fork = root.fork("call")
        ends: list[BaseException] = []
        busy = threading.Barrier(5)
        threads = [threading.Thread(target=hammer, args=(fork, mine, busy, ends)) for mine in range(4)]
        for thread in threads:
            thread.start()
        expected = {"d/start": "1"}
        try:
            busy.wait()
            if end == "commit":
                fork.prepare()
                expected |= {path: new.decode() for path, _, new in fork.changes() if new is not None}
                fork.apply()
        finally:
            fork.drop()
            for thread in threads:
                thread.join()
        assert [type(error) for error in ends] == [ContextExpired] * 4
        assert {path: text for path, text in tree(root).items() if text is not None} == expected


@pytest.mark.usefixtures("eager_threads")
def test_no_update_is_lost_between_threads():
    """When forks in four threads increment a number in one file and retry after conflicts, no update is lost."""
    root = MemoryFilesystem({"n": "0"})

    def count_up() -> None:
        for _ in range(50):
            while True:
                fork = root.fork("call")
                fork.write("n", str(int(fork.read("n")) + 1))
                try:
                    commit(fork)
                except Conflict:
                    continue
                break

    threads = [threading.Thread(target=count_up) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert root.read("n") == "200"


def test_a_fork_and_a_commit_take_the_same_steps_at_any_size():
    """A fork and its commit make at most ten more function calls with ten thousand files than with ten."""

    def steps(files: int) -> int:
        root = MemoryFilesystem({f"d{number % 7}/f{number}": "" for number in range(files)})

        def work() -> None:
            fork = root.fork("call")
            fork.write("d1/f1", "x")
            fork.read("d2/f2")
            commit(fork)

        work()
        return steps_of(work)

    assert steps(10_000) <= steps(10) + 10
    fork = MemoryFilesystem({f"f{number}": "" for number in range(1000)}).fork("call")
    fork.write("f1", "x")
    fork.read("f2")
    held = [fork._tree.over, fork._tree.seen, fork._tree.listed]
    assert [sum(map(len, by_folder.values())) if by_folder else 0 for by_folder in held] == [1, 1, 0]


# --- any interleaving of forks -------------------------------------------------------------------


TestTransactions = Transactions.TestCase
TestTransactions.settings = settings(stateful_step_count=40)
