"""`Pace`: long work in slices. Between two slices, others get a turn, and the work notices that it must stop."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator
from typing import Any, TypeVar

from handrail.claims import GaveUp, Stop, never
from handrail.threads import is_on_loop

T = TypeVar("T")

SLICE = 256
"""How many entries of long work are handled before others get a turn. Work on fewer entries is done at once."""
_TURN = 0.0005
"""Seconds for which a lock is given up between two slices, so that a thread that waits for it can take it."""
_SECONDS = 1.0
"""Seconds before the progress of work is reported, and between two reports."""

Report = Callable[[str, float, float], object]
"""A function that is told what is done, how many entries of it are done, and how many there are. A thread calls it."""


class Pace:
    """How one piece of work goes through its entries: when it stops, and whom it tells how far it is."""

    __slots__ = ("_clock", "_report", "_told", "stop")

    def __init__(
        self, stop: Stop = never, report: Report | None = None, clock: Callable[[], float] | None = None
    ) -> None:
        self.stop = stop
        self._report = report
        self._clock = clock
        self._told = 0.0 if clock is None else clock()

    def to_its_end(self) -> Pace:
        """Return a pace for the work that follows this one and must not stop. It reports like this one."""
        pace = Pace(report=self._report, clock=self._clock)
        pace._told = self._told
        return pace

    def each(self, entries: Collection[T], doing: str = "", *, lock: Any = None) -> Iterator[T]:
        """Yield the entries. After each slice of them, raise `GaveUp` if the work must stop.

        If `doing` says what is done, progress is reported about once a second. A `lock` that the caller holds, however often, is given
        up for a moment after each slice, so what it protects may change there. On an event loop, nobody gets a turn.
        """
        total = len(entries)
        if total <= SLICE:
            return iter(entries)
        return self._sliced(entries, doing, total, lock)

    def _sliced(self, entries: Collection[T], doing: str, total: int, lock: Any) -> Iterator[T]:
        for done, entry in enumerate(entries, 1):
            yield entry
            if not done % SLICE:
                self.turn(lock)
                self._tell(doing, done, total)

    def turn(self, lock: Any = None) -> None:
        """End a slice. Raises `GaveUp` if the work must stop."""
        if self.stop():
            raise GaveUp
        if lock is not None and not is_on_loop():
            threading.Condition(lock).wait(_TURN)  # gives up an `RLock` completely, and takes it again

    def _tell(self, doing: str, done: int, total: int) -> None:
        if doing and self._report is not None and self._clock is not None:
            now = self._clock()
            if now - self._told >= _SECONDS:
                self._told = now
                self._report(doing, done, total)


AT_ONCE = Pace()
"""A pace that neither stops nor reports."""
