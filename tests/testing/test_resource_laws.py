"""`check_resource` accepts a resource that keeps the laws of transactions, and names the law that another one breaks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from handrail import MemoryFilesystem
from handrail.errors import Conflict, ContextExpired
from handrail.protocols import Fork
from handrail.testing import check_resource


class Number:
    """A number that keeps the laws. The forks of a subclass break one."""

    def __init__(self) -> None:
        self.value, self.version = 1, 0

    def fork(self, owner: str, /, *, writable: bool = True) -> NumberFork:
        return NumberFork(self, self.__class__)

    def is_stale(self, fork: NumberFork) -> bool:
        return fork.has_read and fork.parent.version != fork.began

    def check(self, fork: NumberFork) -> None:
        if fork.version != fork.began and fork.parent.version != fork.began:
            raise Conflict(["number"])

    def end(self, fork: NumberFork) -> None:
        fork.is_over = True

    def put(self, fork: NumberFork) -> None:
        if fork.version != fork.began:
            fork.parent.value, fork.parent.version = fork.value, fork.version

    def write(self, fork: NumberFork, value: int) -> None:
        fork.value, fork.version = value, fork.version + 1


class NumberFork(Fork):
    def __init__(self, parent: Any, rules: type[Number]) -> None:
        self.parent, self.rules = parent, rules()
        self.value, self.version = parent.value, parent.version
        self.began, self.has_read, self.is_over = self.version, False, False

    def fork(self, owner: str, /, *, writable: bool = True) -> NumberFork:
        return NumberFork(self, self.rules.__class__)

    def stale(self) -> Sequence[str]:
        return ["number"] if self.rules.is_stale(self) else []

    def prepare(self) -> None:
        self.rules.check(self)
        self.rules.end(self)

    def apply(self) -> None:
        self.rules.put(self)

    def drop(self) -> None:
        self.rules.end(self)


def look(number: Any) -> int:
    if isinstance(number, NumberFork):
        if number.is_over:
            raise ContextExpired("number")
        number.has_read = True
    return number.value


def change(fork: NumberFork, value: int) -> None:
    if fork.is_over:
        raise ContextExpired("number")
    fork.rules.write(fork, value)


def test_a_resource_that_keeps_the_laws_is_accepted():
    """A resource of one's own and files in memory keep every law."""
    check_resource(Number, look, change)
    files = lambda: MemoryFilesystem({"number": "1"})  # noqa: E731
    check_resource(
        files, lambda each: int(each.read("number")), lambda fork, number: fork.write("number", str(number))
    )


class Leaky(Number):
    def write(self, fork: NumberFork, value: int) -> None:
        super().write(fork, value)
        fork.parent.value = value


class Forgetful(Number):
    def put(self, fork: NumberFork) -> None:
        pass


class Unaware(Number):
    def is_stale(self, fork: NumberFork) -> bool:
        return False


class Anxious(Number):
    def is_stale(self, fork: NumberFork) -> bool:
        return fork.parent.version != fork.began


class Open(Number):
    def end(self, fork: NumberFork) -> None:
        pass


@pytest.mark.parametrize(
    ("broken", "law"),
    [
        (Leaky, "before the fork is applied"),
        (Forgetful, "once the fork is applied"),
        (Unaware, "`stale` names"),
        (Anxious, "has read nothing"),
        (Open, "ContextExpired"),
    ],
)
def test_a_broken_law_is_named(broken: Callable[[], Number], law: str):
    """The error names the law that the resource breaks."""
    with pytest.raises(AssertionError, match=law):
        check_resource(broken, look, change)
