"""Cheap timers: a heap of due times, served by a single timer of the event loop."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable
from contextvars import Context
from weakref import WeakKeyDictionary, ref

import msgspec

from handrail.threads import forget_closed

_FEW = 64
"""The heap is cleaned up once it has more than this many invalid entries and they are more than half of it."""
_NO_CONTEXT = Context()
"""The context in which timers fire. The context of the code that starts a timer would keep its call in memory."""


class LostTime(msgspec.Struct, eq=False):
    """The time in which a loop could not run because a listener blocked it. It is not charged to calls."""

    seconds: float = 0.0
    _spans: list[tuple[float, float]] = msgspec.field(default_factory=list[tuple[float, float]])
    """The latest spans that were added. They do not overlap."""

    def add(self, before: float, after: float) -> None:
        """Add the time between two readings of the loop's clock, except what listeners in between have added."""
        self.seconds += after - before
        while self._spans and self._spans[-1][0] >= before:
            nested = self._spans.pop()
            self.seconds -= nested[1] - nested[0]
        self._spans = [*self._spans[-_FEW:], (before, after)]


class Timer(msgspec.Struct, eq=False):
    """A timer that calls a function at a given time, unless it is stopped first. It can be paused."""

    _timers: Timers
    _call: Callable[[], object] | None
    seconds: float
    _when: float
    _extend: Callable[[], float] | None = None
    _lost: float = 0.0
    """The loop's lost time that the timer has already allowed for."""
    _left: float | None = None
    _pauses: int = 0
    _has_fired: bool = False

    def stop(self) -> bool:
        """Stop the timer, so that it never fires. Returns whether it has already fired; a second call returns False."""
        if self._call is not None:
            self._call = None
            if self._left is None:
                self._timers.count_stopped()
        fired, self._has_fired = self._has_fired, False
        return fired

    def pause(self) -> None:
        """Pause the timer until there has been a `resume` for every `pause`."""
        self._pauses += 1
        if self._call is not None and self._left is None:
            self._left = self.left()
            self._timers.count_stopped()

    def resume(self) -> None:
        """Continue with the remaining time, once `resume` has been called as often as `pause`."""
        self._pauses -= 1
        if self._pauses == 0 and self._call is not None and self._left is not None:
            self._when = self._timers.loop.time() + self._left
            self._left = None
            self._lost = self._timers.lost.seconds
            self._timers.put(self, self._when)

    def left(self) -> float:
        """Return the seconds until the timer is due, or would be due if it had not been stopped."""
        if self._left is not None:
            return self._left
        lost = 0.0 if self._extend is not None else self._timers.lost.seconds - self._lost
        return self._when - self._timers.loop.time() + lost

    def is_due(self, when: float) -> bool:
        """Return whether the heap's entry for this time is still valid."""
        return self._call is not None and self._left is None and self._when == when

    def fire(self) -> None:
        lost = self._timers.lost.seconds
        more = lost - self._lost if self._extend is None else self._extend()
        self._lost = lost
        if more > 0:
            since = self._when if self._extend is None else self._timers.loop.time()
            self._when = since + more
            self._timers.put(self, self._when)
            return
        call, self._call = self._call, None
        if call is not None:
            self._has_fired = True
            call()


class Timers:
    """The timers of one event loop. Time that the loop has lost to listeners postpones them."""

    __slots__ = ("_handle", "_heap", "_loop", "_next", "_number", "_stopped", "lost")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = ref(loop)  # weak, because otherwise the entry in `_timers` would keep the loop alive
        self._heap: list[tuple[float, int, Timer]] = []
        self._number = 0
        self._stopped = 0
        self._handle: asyncio.TimerHandle | None = None
        self._next = 0.0
        self.lost = LostTime()

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        loop = self._loop()
        assert loop is not None, "a timer is only used while its loop exists"
        return loop

    def start(
        self,
        seconds: float,
        call: Callable[[], object],
        extend: Callable[[], float] | None = None,
        left: float | None = None,
    ) -> Timer:
        """Start a timer that calls `call` after this many seconds, or after `left` seconds if that is given.

        Before it fires, `extend`, if given, is called. If that returns a positive number, the timer waits that many more
        seconds instead. Without `extend`, it waits for as long as the loop was blocked meanwhile.
        """
        when = self.loop.time() + (seconds if left is None else left)
        timer = Timer(self, call, seconds, when, extend, self.lost.seconds)
        self.put(timer, when)
        return timer

    def put(self, timer: Timer, when: float) -> None:
        self._number += 1
        heapq.heappush(self._heap, (when, self._number, timer))
        if self._handle is None or when < self._next:
            self._schedule(when)

    def count_stopped(self) -> None:
        """Count an invalid entry in the heap. Invalid entries are removed once there are many."""
        self._stopped += 1
        if self._stopped > _FEW and self._stopped * 2 > len(self._heap):
            self._heap = [entry for entry in self._heap if entry[2].is_due(entry[0])]
            heapq.heapify(self._heap)
            self._stopped = 0

    def _schedule(self, when: float) -> None:
        if self._handle is not None:
            self._handle.cancel()
        self._next = when
        self._handle = self.loop.call_at(when, self._wake, context=_NO_CONTEXT)

    def _wake(self) -> None:
        self._handle = None
        now = self.loop.time()
        while self._heap and self._heap[0][0] <= now:
            when, _, timer = heapq.heappop(self._heap)
            if timer.is_due(when):
                timer.fire()
            elif self._stopped:
                self._stopped -= 1
        # A timer that was extended meanwhile may have scheduled a later time than that of the next one.
        if self._heap and (self._handle is None or self._heap[0][0] < self._next):
            self._schedule(self._heap[0][0])


_timers: WeakKeyDictionary[asyncio.AbstractEventLoop, Timers] = WeakKeyDictionary()


def timers_of(loop: asyncio.AbstractEventLoop) -> Timers:
    """Return the timers of this loop."""
    found = _timers.get(loop)
    if found is None:
        forget_closed(_timers)
        found = _timers[loop] = Timers(loop)
    return found
