"""Plans of concurrent calls: what each call reads and writes, and in which order their steps happen."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import msgspec

from handrail.errors import ToolError
from support.histories import NOBODY, Attempt

Verb = Literal["read", "write", "list", "create"]
Style = Literal["async", "plain", "nested"]
PATIENCE = 60.0
"""Seconds after which a call that waits for its turn gives up, so that a deadlock fails its test."""


class Step(msgspec.Struct, frozen=True, array_like=True):
    """One thing that a call does. `create` writes a file of its own, named after its token, into a folder."""

    verb: Verb
    key: str


class PlannedCall(msgspec.Struct, frozen=True):
    """The steps of a call, and how its handler is written: async, as a plain function, or with the later half in an inner call."""

    steps: tuple[Step, ...]
    style: Style = "async"
    fails: bool = False
    """Whether the handler raises an error at its end."""

    @property
    def writes(self) -> bool:
        return any(step.verb in ("write", "create") for step in self.steps)


class Turn(msgspec.Struct, frozen=True, array_like=True):
    """The next step of a call, or after its last step the end of its handler."""

    call: int
    settles: bool = False
    """Whether the next turn waits until this call has a result or runs again. Only meaningful at the end of a handler."""


class Plan(msgspec.Struct, frozen=True):
    """Calls that run concurrently. The turns order the steps of their first attempts; later attempts are not held up."""

    calls: tuple[PlannedCall, ...]
    turns: tuple[Turn, ...]

    def __str__(self) -> str:
        calls = [f"{call.style}: {[f'{step.verb} {step.key}' for step in call.steps]}" for call in self.calls]
        turns = " ".join(f"{turn.call}{'.' if turn.settles else ''}" for turn in self.turns)
        return f"calls {calls}, turns {turns}"


def plan_of(*calls: str, turns: Sequence[int] = (), style: Style = "async") -> Plan:
    """Return a plan from texts such as `read x, write y`. By default, every call takes a step before any takes its next."""
    made = [PlannedCall(tuple(map(_step, call.split(", "))), style) for call in calls]
    longest = max(len(call.steps) for call in made)
    in_step = [
        at for number in range(longest + 1) for at, call in enumerate(made) if number <= len(call.steps)
    ]
    return Plan(tuple(made), tuple(map(Turn, turns or in_step)))


def _step(text: str) -> Step:
    verb, key = text.split()
    return Step(verb, key)  # type: ignore[arg-type]


def draw_plan(
    draw: random.Random, keys: Sequence[str], folder: str = "", styles: Sequence[Style] = ("async",)
) -> Plan:
    """Return a random plan. With `folder`, calls also list that folder and create files in it."""
    calls = tuple(_draw_call(draw, keys, folder, draw.choice(styles)) for _ in range(draw.randint(2, 5)))
    turns = [at for at, call in enumerate(calls) for _ in range(len(call.steps) + 1)]
    draw.shuffle(turns)
    if draw.random() < 0.5:  # all handlers end after the last step of any
        turns = [*_without_last(turns), *draw.sample(range(len(calls)), len(calls))]
    return Plan(calls, tuple(Turn(at, draw.random() < 0.5) for at in turns))


def _without_last(turns: Sequence[int]) -> list[int]:
    last = {at: number for number, at in enumerate(turns)}
    return [at for number, at in enumerate(turns) if last[at] != number]


def _draw_call(draw: random.Random, keys: Sequence[str], folder: str, style: Style) -> PlannedCall:
    steps = [Step("read", key) for key in draw.sample(keys, draw.randint(0, len(keys)))]
    steps += [Step("write", key) for key in draw.sample(keys, draw.choice((0, 1, 1, 1, 2)))]
    if folder and draw.random() < 0.4:
        steps += [Step("list", folder), *[Step("create", folder)] * draw.randint(0, 1)]
    if draw.random() < 0.3:  # a write before a read
        draw.shuffle(steps)
    return PlannedCall(tuple(steps or [Step("read", keys[0])]), style, fails=draw.random() < 0.1)


class Baton:
    """Lets the first attempts of a plan's calls take their turns, across tasks, threads and forked processes.

    `condition`, `free` and `position` are shared by all who take turns: those of `threading` and lists by default.
    """

    def __init__(
        self, turns: Iterable[Turn], calls: int, condition: Any = None, free: Any = None, position: Any = None
    ) -> None:
        self._turns = tuple(turns)
        self._condition = condition or threading.Condition()
        self._free = free or [0] * calls
        """For each call, whether it takes no more turns."""
        self._position = position or [0]

    def wait(self, call: int) -> None:
        """Wait for this call's turn, unless it takes none any more. Blocks the thread."""
        with self._condition:
            if not self._condition.wait_for(lambda: self._free[call] or self._has_turn(call), PATIENCE):
                raise ToolError(f"call {call} never got its turn: {self._turns[self._position[0] :]}")

    def _has_turn(self, call: int) -> bool:
        at = self._position[0]
        return at < len(self._turns) and self._turns[at].call == call

    def took(self, call: int, is_last: bool = False) -> None:
        """Give the next call its turn, unless this was the end of a handler after which the next turn waits for the result."""
        with self._condition:
            if self._has_turn(call) and not self._free[call]:
                if is_last and self._turns[self._position[0]].settles:
                    return
                self._position[0] += 1
                self._move_on()

    def release(self, call: int) -> None:
        """Skip the turns that this call has left, because it has a result or runs again."""
        with self._condition:
            self._free[call] = 1
            self._move_on()

    def _move_on(self) -> None:
        while self._position[0] < len(self._turns) and self._free[self._turns[self._position[0]].call]:
            self._position[0] += 1
        self._condition.notify_all()


class Recorder:
    """What one attempt at a call has read and written so far."""

    def __init__(self, call: str, number: int) -> None:
        self.call = call
        self.token = f"{call}.{number}"
        self.reads: list[tuple[str, str]] = []
        self.lists: list[tuple[str, tuple[str, ...]]] = []
        self.writes: list[str] = []

    def content(self) -> str:
        """Return the text to write: the token, and everything that was read before."""
        return f"{self.token}\n{msgspec.json.encode([self.reads, self.lists]).decode()}\n"

    def read(self, key: str, text: str) -> None:
        version = version_of(text)
        if key not in self.writes:
            self.reads.append((key, version))
        elif version != self.token:
            raise AssertionError(f"{self.token} does not see its own write of {key}, but {version!r}")

    def listed(self, folder: str, names: Iterable[str]) -> None:
        own = f"{folder}/{self.token}"
        found = tuple(sorted(names))
        if (own in self.writes) != (self.token in found):
            raise AssertionError(f"{self.token} listed {found} in {folder}, and had written {self.writes}")
        self.lists.append((folder, tuple(name for name in found if name != self.token)))

    def attempt(self) -> Attempt:
        return Attempt(
            call=self.call,
            token=self.token,
            reads=tuple(self.reads),
            lists=tuple(self.lists),
            writes=tuple(dict.fromkeys(self.writes)),
        )


def version_of(text: str) -> str:
    """Return the token in a text that a call wrote. Raises `ValueError` if the text is torn."""
    if not text:
        return NOBODY
    token, reads, end = text.split("\n")
    msgspec.json.decode(reads)
    if end:
        raise ValueError(f"torn: {text!r}")
    return token
