"""Random transactions on files, and the plain dictionary that they are compared with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import count
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from handrail.errors import (
    Conflict,
    ContextExpired,
    FileError,
    FileInTheWay,
    FileMissing,
)
from handrail.protocols import Match
from handrail.resources.memory import MemoryFilesystem
from handrail.resources.paths import split
from support.filesystems import Files, outcome, tree

Plain = dict[str, str | None]


GLOBS: Mapping[str, Callable[[str, str | None], bool]] = {
    "**": lambda path, text: text is not None,
    "*": lambda path, text: text is not None and "/" not in path,
    "a/*": lambda path, text: text is not None and path.startswith("a/") and path.count("/") == 1,
    "**/b": lambda path, text: text is not None and path.split("/")[-1] == "b",
    "**/": lambda path, text: text is None,
}


def parents(path: str) -> list[str]:
    """Return the folders that contain a path, outermost first."""
    names = path.split("/")
    return ["/".join(names[:n]) for n in range(1, len(names))]


def below(files: Plain, path: str) -> list[str]:
    """Return all paths inside a folder, at any depth."""
    return [other for other in files if other.startswith(f"{path}/")]


def make_way(files: Plain, folders: list[str]) -> None:
    """Create the folders in this list that are missing. Raises `FileInTheWay` if one of the paths is a file."""
    if any(files.get(folder) is not None for folder in folders):
        raise FileInTheWay("", "")
    files.update({folder: None for folder in folders if folder not in files})


def plainly(files: Plain, verb: str, *args: str) -> object:
    """Apply a verb to files in a plain dict.

    Returns the verb's result, or raises a `FileError` as a filesystem would.
    """
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
    """Apply a verb to a real filesystem, and return its result in the form that `plainly` uses."""
    if verb == "list":
        return tuple((info.path, info.is_directory, info.size) for info in files.list(*args))
    if verb == "prune":
        return files.delete(args[0], recursive=True)
    return getattr(files, verb)(*args)


class Call:
    """A fork under test, with a record of everything that it did and read."""

    def __init__(self, fork: Any, parent: Call | None, born: int) -> None:
        self.fork = fork
        self.parent = parent
        self.born = born
        self.done: list[tuple[tuple[str, ...], object]] = []
        self.over = False

    def outermost(self) -> Call:
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
    """Concurrent and nested calls, whose commits must be equivalent to some serial order.

    The model is a plain dict. When a call is committed into the root, its actions are replayed on the model and must
    give the same results as in its fork. This reveals stale reads that were not reported, missed conflicts, and
    writes that leaked. A reported conflict must have a cause.
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
        """Return a call in progress, or start a new one, which may be nested in another."""
        if at < len(self.calls):
            return self.calls[at]
        parent = self.calls[-1] if nested and self.calls else None
        self.calls.append(
            Call((parent.fork if parent else self.root).fork("call"), parent, next(self.numbers))
        )
        return self.calls[-1]

    def filled(self, deed: tuple[str, ...]) -> tuple[str, ...]:
        """Add new content to an action that writes, so that every change is visible."""
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
        """Act in a call, which may then end. If `at` is 4, act on the root directly."""
        call = self.pick(at, nested) if at < 4 else None
        for deed in map(self.filled, some):
            try:
                result = outcome(lambda deed=deed: really(call.fork if call else self.root, *deed))
            except Conflict as conflict:  # the values read earlier are no longer available
                assert call, "a direct action on the root conflicted"
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
            for path, node, base in fork._tree.changes():
                now = under._tree.look(*split(path))
                assert now.version == base.version or (now.is_folder and node.is_folder), (
                    "a commit overwrote a change that it had not seen"
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
        """Check that each of these conflicts has a cause.

        Since the call began, something outside it must have touched the path, one of its parents or a path below it.
        """
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
            assert self.root._tree.usage() == (len(self.model), size)
        assert self.root._store.claimed == {}
