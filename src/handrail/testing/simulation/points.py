"""Crash points: every journal write and every step of the event loop in a process."""

from __future__ import annotations

import asyncio
import os
import threading
from collections import deque
from collections.abc import Callable
from contextvars import Context
from typing import Any, Literal, NamedTuple, get_args

from handrail.concurrency.threads import threads_at_work
from handrail.errors import DefinitionError
from handrail.journal.sql.connection import Connection
from handrail.testing.virtual_time import VirtualTimeLoop

PointKind = Literal[
    "before write", "after write", "step", "overtaken before write", "overtaken at step", "parked at step"
]
"""The kind of a point, which determines what happens there.

The process dies just before a write, just after a write that nothing has reacted to yet, or before a step of
its event loop. If overtaken, it pauses there until another process has taken its run, and then continues. If
parked, it is told to stop there, parks its run by force, and ends.
"""

CRASHED = 137
"""The exit status of a process that ended at its point, as after `kill -9`."""


class Point(NamedTuple):
    """One point in a run, at which its process dies, is overtaken, or is parked.

    Pass its text, such as `before write 12`, to `simulate(..., at=...)` to repeat it.
    """

    kind: PointKind
    number: int

    def __str__(self) -> str:
        return f"{self.kind} {self.number}"

    @property
    def is_overtaken(self) -> bool:
        return self.kind.startswith("overtaken")

    @property
    def is_parked(self) -> bool:
        return self.kind.startswith("parked")

    @property
    def moment(self) -> str:
        """The moment of the point, without what happens there: `before write`, `after write` or `step`."""
        return self.kind.removeprefix("overtaken ").removeprefix("parked ").removeprefix("at ")

    @classmethod
    def parse(cls, text: str) -> Point:
        kind, _, number = text.rpartition(" ")
        if kind not in get_args(PointKind) or not number.isdecimal():
            raise DefinitionError(
                f"{text!r} is not a crash point. Pass one from a report, such as 'before write 12' or 'step 40'."
            )
        return cls(kind, int(number))  # pyright: ignore[reportArgumentType]  # it is one of the kinds


class Points:
    """Counts the writes and steps of one process, and calls `reached` at the point `at`, if there is one."""

    def __init__(self, at: Point | None, reached: Callable[[], None]) -> None:
        self._at = None if at is None else (at.moment, at.number)
        self.reached = reached
        self._armed = False
        self._changes = 0
        self.transactions = 0
        self.steps = 0
        self.writes: list[int] = []
        """The numbers of the transactions that changed the journal."""
        self.on_write: Callable[[Connection], None] | None = None

    def arm(self) -> None:
        """Start counting. Writes and steps before this belong to the harness."""
        self._armed = True

    def disarm(self) -> None:
        self._armed = False

    def transaction(self, moment: Literal["before", "after"], connection: Connection) -> None:
        """Count a journal transaction before it begins. Once it is durable, note its number if it has changed the journal."""
        if not self._armed:
            return
        if moment == "before":
            self.transactions += 1
            self._changes = connection.total_changes
            self._reach("before write", self.transactions)
        else:
            self._reach("after write", self.transactions)
            if connection.total_changes > self._changes:
                self.writes.append(self.transactions)
                if self.on_write is not None:
                    self.on_write(connection)

    def step(self) -> None:
        """Count a callback that the event loop is about to run."""
        if self._armed:
            self.steps += 1
            self._reach("step", self.steps)

    def _reach(self, moment: str, number: int) -> None:
        if self._at == (moment, number):
            self._at = None
            self.reached()


def crash() -> None:
    """End this process as `kill -9` would, without cleanup or flushing."""
    os._exit(CRASHED)


_PATIENCE = 2.0
"""Maximum real seconds to wait for a thread before the event loop continues without it."""
_IMPATIENCE = 0.002
"""Maximum real seconds to wait for threads after one has taken too long, because that one may itself wait for the loop."""


class SimulatedLoop(VirtualTimeLoop):
    """An event loop in virtual time that counts its callbacks, and waits for threads before it continues.

    A run therefore takes the same steps each time. Only the order of concurrent threads depends on the
    machine.
    """

    def __init__(self, points: Points, start: float) -> None:
        self._points = points
        self._arrived: deque[tuple[Callable[..., object], tuple[Any, ...], Context | None]] = deque()
        self._arrival = threading.Event()
        self._home = threading.get_ident()
        self._patience = _PATIENCE
        super().__init__()
        self.advance(start)

    def call_soon(
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        return super().call_soon(self._step, callback, args, context=context)

    def call_at(
        self, when: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        return super().call_at(when, self._step, callback, args, context=context)

    def call_soon_threadsafe(
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        if threading.get_ident() == self._home:
            return super().call_soon_threadsafe(self._step, callback, args, context=context)
        self._arrived.append((callback, args, context))
        self._arrival.set()
        return super().call_soon_threadsafe(_wake)

    def meet_threads(self) -> bool:
        at_work = threads_at_work(self)
        while len(self._arrived) < at_work:
            self._arrival.clear()
            if len(self._arrived) < at_work and not self._arrival.wait(self._patience):
                self._patience = _IMPATIENCE
                break
        if not at_work:
            self._patience = _PATIENCE
        met = bool(self._arrived)
        while self._arrived:
            callback, args, context = self._arrived.popleft()
            super().call_soon(self._step, callback, args, context=context)
        return met

    def _step(self, callback: Callable[..., object], args: tuple[Any, ...]) -> None:
        self._points.step()
        callback(*args)


def _wake() -> None:
    """Do nothing. Scheduling this callback wakes the event loop."""
