"""The end of a fork: threads that outlive it, what it costs, and any interleaving of many."""

import statistics
import sys
import threading
import time
from collections.abc import Callable, Mapping
from itertools import count
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from filesystems import Files
from handrail.errors import (
    Conflict,
    ContextExpired,
    FileError,
    FileInTheWay,
    FileMissing,
)
from handrail.protocols import Match
from handrail.resources.memory import MemoryFilesystem, MemoryFork
from handrail.resources.paths import split
from test_memory_filesystem import commit, outcome, tree

# --- the end, and threads ------------------------------------------------------------------------


@pytest.mark.parametrize("end", ["prepare", "apply", "drop", "conflict", "parent"])
def test_nothing_works_after_the_end(end: str):
    """Every verb raises `ContextExpired` with the name of the call, and nothing lands."""
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
    calls: list[Callable[[MemoryFork], Any]] = [
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


@pytest.mark.parametrize("end", [MemoryFork.prepare, MemoryFork.drop])
def test_an_inner_fork_can_not_be_applied_into_one_that_is_over(end: Callable[[MemoryFork], None]):
    """Prepared in time and applied too late, it lands nowhere, and says nothing: applying can't fail."""
    root = MemoryFilesystem({"a": "1"})
    outer = root.fork("outer")
    outer.write("b", "outer")
    inner = outer.fork("inner")
    inner.write("a", "late")
    inner.prepare()
    end(outer)
    inner.apply()
    if end is MemoryFork.prepare:
        outer.apply()
    assert root.read("a") == "1"


@pytest.fixture
def eager_threads():
    """Threads take turns as often as they can."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


def hammer(fork: MemoryFork, mine: int, busy: threading.Barrier, ends: list[BaseException]) -> None:
    """Use a fork until it refuses."""
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
            busy.abort()  # so that nobody waits for it


@pytest.mark.usefixtures("eager_threads")
@pytest.mark.parametrize("end", ["commit", "drop"])
def test_a_thread_that_outlives_its_call_writes_nowhere(end: str):
    """Threads use a fork while it ends: exactly what was there at its end lands, and they are told."""
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
    """Forks in four threads count up one file: every commit counts, a conflict is tried again."""
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


def test_a_fork_and_a_commit_cost_the_same_at_any_size():
    """Ten files or a hundred thousand: within a factor of two, and nothing is copied."""

    def median_cost(files: int) -> float:
        root = MemoryFilesystem({f"d{number % 7}/f{number}": "" for number in range(files)})
        times: list[float] = []
        for _ in range(15):
            start = time.process_time()
            for _ in range(200):
                fork = root.fork("call")
                fork.write("d1/f1", "x")
                fork.read("d2/f2")
                commit(fork)
            times.append(time.process_time() - start)
        return statistics.median(times)

    assert median_cost(100_000) <= 2 * median_cost(10)
    fork = MemoryFilesystem({f"f{number}": "" for number in range(1000)}).fork("call")
    fork.write("f1", "x")
    fork.read("f2")
    held = [fork._over, fork._seen, fork._listed]
    assert [sum(map(len, by_folder.values())) if by_folder else 0 for by_folder in held] == [1, 1, 0]


# --- any interleaving ----------------------------------------------------------------------------

Plain = dict[str, str | None]
GLOBS: Mapping[str, Callable[[str, str | None], bool]] = {
    "**": lambda path, text: text is not None,
    "*": lambda path, text: text is not None and "/" not in path,
    "a/*": lambda path, text: text is not None and path.startswith("a/") and path.count("/") == 1,
    "**/b": lambda path, text: text is not None and path.split("/")[-1] == "b",
    "**/": lambda path, text: text is None,
}


def parents(path: str) -> list[str]:
    """The folders a path lies in, outermost first."""
    names = path.split("/")
    return ["/".join(names[:n]) for n in range(1, len(names))]


def below(files: Plain, path: str) -> list[str]:
    """What lies in a folder at any depth."""
    return [other for other in files if other.startswith(f"{path}/")]


def make_way(files: Plain, folders: list[str]) -> None:
    """Make folders, or refuse."""
    if any(files.get(folder) is not None for folder in folders):
        raise FileInTheWay("", "")
    files.update({folder: None for folder in folders if folder not in files})


def plainly(files: Plain, verb: str, *args: str) -> object:
    """What a verb does to, and says of, files that are a plain dict."""
    path = args[0]
    if verb == "glob":
        return tuple(sorted(f"{p}/" if t is None else p for p, t in files.items() if GLOBS[path](p, t)))
    if verb == "grep":
        return tuple(Match(p, 1, t) for p, t in sorted(files.items()) if t and t[-1] in "05")
    if verb == "exists":
        return path in files
    if verb in ("write", "append", "mkdir"):
        if verb != "mkdir" and path in files and files[path] is None:
            raise FileInTheWay("", "")
        make_way(files, parents(path) + ([path] if verb == "mkdir" else []))
        if verb != "mkdir":
            files[path] = args[1] if verb == "write" else (files.get(path) or "") + args[1]
        return None
    if path not in files:
        raise FileMissing("", "")
    if verb == "read" and files[path] is None:
        raise FileError("", "")
    if verb == "read":
        return files[path]
    if verb == "list":
        if files[path] is not None:
            raise FileError("", "")
        inner = sorted(p for p in below(files, path) if p.count("/") == path.count("/") + 1)
        return tuple((p, files[p] is None, len(files[p] or "")) for p in inner)
    if verb == "delete" or verb == "prune":
        if verb == "delete" and below(files, path):
            raise FileError("", "")
        for gone in [path, *below(files, path)]:
            del files[gone]
        return None
    assert verb == "move"
    target = args[1]
    if target in files:
        raise FileInTheWay("", "")
    make_way(files, parents(target))
    for old in [path, *below(files, path)]:
        files[target + old[len(path) :]] = files.pop(old)
    return None


def really(files: Files, verb: str, *args: str) -> object:
    """The same with the real thing."""
    if verb == "list":
        return tuple((info.path, info.is_directory, info.size) for info in files.list(*args))
    if verb == "prune":
        return files.delete(args[0], recursive=True)
    return getattr(files, verb)(*args)


class Call:
    """A fork under test, and everything that was done and seen in it."""

    def __init__(self, fork: Any, parent: "Call | None", born: int) -> None:
        self.fork = fork
        self.parent = parent
        self.born = born
        self.done: list[tuple[tuple[str, ...], object]] = []
        self.over = False

    def outermost(self) -> "Call":
        return self if self.parent is None else self.parent.outermost()

    def expired(self) -> bool:
        return self.over or (self.parent is not None and self.parent.expired())


PATHS = ["a", "b", "a/a", "a/b", "b/a", "a/a/a", "a/a/b", "b/a/b"]
paths = st.sampled_from(PATHS)
MOVES = [(one, two) for one in PATHS for two in PATHS if not f"{two}/".startswith(f"{one}/")]
deeds = st.one_of(
    st.tuples(st.sampled_from(["write", "append"]), paths),
    st.tuples(st.sampled_from(["read", "exists", "list"]), paths),
    st.tuples(st.sampled_from(["mkdir", "delete", "prune"]), paths),
    st.sampled_from(MOVES).map(lambda move: ("move", *move)),
    st.sampled_from([*(("glob", pattern) for pattern in GLOBS), ("grep", "[05]$")]),
)
blind = st.tuples(st.sampled_from(["write", "write", "mkdir"]), paths)
several = st.lists(deeds, min_size=1, max_size=3) | st.lists(blind, min_size=1, max_size=3)
thens = st.sampled_from(["go on", "go on", "commit", "commit", "drop"])


class Transactions(RuleBasedStateMachine):
    """Calls side by side and inside each other; whatever commits could have run one after another.

    The model is a plain dict. A call's deeds are replayed on it when the call commits into the root,
    and must then give what they gave in its fork: so a stale read that was not reported, a conflict
    that was missed, and a write that leaked, each show. An alarm must have a cause.
    """

    def __init__(self) -> None:
        super().__init__()
        self.root = self.new_root({"a/a/a": "<0", "a/b": "<1"})
        self.model: Plain = {"a": None, "a/a": None, "a/a/a": "<0", "a/b": "<1"}
        self.calls: list[Call] = []
        self.numbers = count(10)
        self.touched: list[tuple[int, str, Call | None]] = []

    def new_root(self, files: Mapping[str, str]) -> Any:
        return MemoryFilesystem(files)

    def pick(self, at: int, nested: bool = False) -> Call:
        """A call that goes on, or a new one, which may be inside another."""
        if at < len(self.calls):
            return self.calls[at]
        parent = self.calls[-1] if nested and self.calls else None
        self.calls.append(
            Call((parent.fork if parent else self.root).fork("call"), parent, next(self.numbers))
        )
        return self.calls[-1]

    def filled(self, deed: tuple[str, ...]) -> tuple[str, ...]:
        """Every text that is written is another one, so that no change goes back unseen."""
        if deed[0] in ("write", "append"):
            return (*deed, f"<{next(self.numbers)}")
        return deed

    def note(self, deed: tuple[str, ...], call: Call | None) -> None:
        if deed[0] in ("write", "append", "mkdir", "delete", "prune", "move"):
            self.touched += [
                (next(self.numbers), path, call) for path in deed[1 : 3 if deed[0] == "move" else 2]
            ]

    @rule(at=st.integers(0, 4), nested=st.booleans(), some=several, then=thens)
    def act(self, at: int, nested: bool, some: list[tuple[str, ...]], then: str) -> None:
        """In a call, which may then end; or, one time in five, in the root itself."""
        call = self.pick(at, nested) if at < 4 else None
        for deed in map(self.filled, some):
            try:
                result = outcome(lambda deed=deed: really(call.fork if call else self.root, *deed))
            except Conflict as conflict:  # what was seen is no longer to be had
                assert call, "the root has nothing to conflict with"
                self.check_cause(call.outermost(), list(conflict.places))
                call.fork.drop()
                self.end(call)
                return
            if call:
                call.done.append((deed, result))
            else:
                assert outcome(lambda deed=deed: plainly(self.model, *deed)) == result
            self.note(deed, call)
        if call and then != "go on":
            self.finish(call, then)

    def finish(self, call: Call, how: str) -> None:
        fork = call.fork
        alarms = list(fork.stale())
        if not alarms and how == "commit":
            try:
                fork.prepare()
            except Conflict as error:
                alarms = list(error.places)
        if alarms or how == "drop":
            self.check_cause(call, alarms)
            fork.drop()
        else:
            under = call.parent.fork if call.parent else self.root
            for path, node, base in fork._changes():
                now = under._look(*split(path))
                assert now.version == base.version or (now.is_folder and node.is_folder), (
                    "a write that somebody else wrote under"
                )
            fork.apply()
            if call.parent:
                call.parent.done += call.done
            else:
                for deed, result in call.done:
                    assert outcome(lambda deed=deed: plainly(self.model, *deed)) == result
            for deed, _ in call.done:
                self.note(deed, call.parent)
        self.end(call)

    def check_cause(self, call: Call, alarms: list[str]) -> None:
        """Somebody else changed the path, something in it, or something around it, since the call began."""
        for alarm in alarms:
            place = f"{alarm.rstrip('/')}/"
            others = [f"{path}/" for when, path, by in self.touched if when > call.born and by is not call]
            near = [path for path in others if path.startswith(place) or place.startswith(path)]
            assert near or (place == "./" and others), alarm

    def end(self, call: Call) -> None:
        call.over = True
        for other in [other for other in self.calls if other.expired()]:
            with pytest.raises(ContextExpired):
                other.fork.write("late", "late")
            self.calls.remove(other)

    @invariant()
    def the_root_is_the_model(self) -> None:
        assert tree(self.root) == self.model
        if isinstance(self.root, MemoryFilesystem):
            size = sum(len(text or "") for text in self.model.values())
            assert self.root._usage() == (len(self.model), size)
        assert self.root._claimed == {}


TestTransactions = Transactions.TestCase
TestTransactions.settings = settings(stateful_step_count=40)
