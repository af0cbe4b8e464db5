"""Cheap timers: a heap of due times, served by a single timer of the event loop.

In this module, a listener is a subscriber to an event bus.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import threading
from collections.abc import Callable, Generator, Iterable
from contextvars import Context
from typing import Any, Protocol
from weakref import WeakKeyDictionary, ref

import msgspec

from handrail.concurrency.threads import forget_closed

_FEW = 64
"""The heap is cleaned up once it has more than this many invalid entries and they are more than half of it.

Also the maximum number of spans that a `LostTime` remembers.
"""
_LONGEST_EXCUSE = 60.0
"""Maximum seconds for which a call's clock stands still while a listener runs on a thread, in case it never returns."""
_threads = threading.Lock()
"""Guards the fields of a `WorkClock`, which threads and the loop both change."""
_NO_CONTEXT = Context()
"""The context in which timers fire. The context of the code that starts a timer would keep its call in memory."""


class LostTime(msgspec.Struct, eq=False):
    """The time that listeners have taken, which is not charged to calls. Time in which several ran counts once."""

    seconds: float = 0.0
    spans: tuple[tuple[float, float], ...] = ()
    """The latest spans that were added, in order. They do not overlap."""

    def add(self, before: float, after: float) -> None:
        """Add the time between two readings of the loop's clock. Time that was added before is not counted again."""
        apart: list[tuple[float, float]] = []
        for start, end in self.spans:
            if end < before or start > after:
                apart.append((start, end))
            else:
                before, after = min(before, start), max(after, end)
                self.seconds -= end - start
        self.seconds += after - before
        self.spans = tuple(sorted([*apart, (before, after)])[-_FEW:])

    def overlap(self, other: LostTime) -> float:
        """Return how many seconds are in the spans of both."""
        return sum(
            max(0.0, min(end, other_end) - max(start, other_start))
            for start, end in self.spans
            for other_start, other_end in other.spans
        )


class TimerClock(Protocol):
    """A clock for timers. Its reading, in seconds, may stand still."""

    def time(self) -> float: ...

    def standstill(self, timer: Timer) -> float:
        """Return by how many seconds to postpone the timer's next check because the reading stands still; 0 if it does not.

        If the reading advances again earlier, the clock may call `timer.clock_moves`.
        """
        ...


class Timer(msgspec.Struct, eq=False):
    """A timer that calls a function once its clock has advanced by `seconds`, unless it is stopped first."""

    _timers: Timers
    _call: Callable[[], object] | None
    seconds: float
    _clock: TimerClock
    _due: float
    """The clock's reading at which the timer fires."""
    _when: float | None = None
    """When the timer is checked next, on the loop's clock; None if it is not armed yet."""
    _left: float | None = None
    """The seconds that are left while the timer is paused; None if it is not paused."""
    _pauses: int = 0
    _has_fired: bool = False

    def stop(self) -> bool:
        """Stop the timer, so that it never fires. Returns whether it has already fired; a second call returns False."""
        if self._call is not None:
            self._call = None
            self._leave_heap()
        fired, self._has_fired = self._has_fired, False
        return fired

    def pause(self) -> None:
        """Pause the timer until there has been a `resume` for every `pause`."""
        self._pauses += 1
        if self._call is not None and self._left is None:
            left = self.left()
            self._leave_heap()
            self._left = left

    def resume(self) -> None:
        """Continue with the remaining time, once `resume` has been called as often as `pause`."""
        self._pauses -= 1
        left = self._left
        if self._pauses == 0 and self._call is not None and left is not None:
            self._due, self._left = self._clock.time() + left, None
            self.wait(left)

    def restart(self) -> None:
        """Start over with the full time, from now or from the end of the pause. This may be called from any thread."""
        if self._left is None:
            self._due = self._clock.time() + self.seconds
        else:
            self._left = self.seconds

    def left(self) -> float:
        """Return the seconds until the timer is due, or would be due if it had not been stopped."""
        return self._due - self._clock.time() if self._left is None else self._left

    def arm(self) -> None:
        """Let the event loop check the timer, if it was started unarmed. Until then, it never fires, but its time runs."""
        if self._when is None and self._call is not None and self._left is None:
            self.wait(self.left())

    def _leave_heap(self) -> None:
        if self._when is not None and self._left is None:
            self._timers.count_stopped()

    def is_due(self, when: float) -> bool:
        """Return whether the heap's entry for this time is still valid."""
        return self._call is not None and self._left is None and self._when == when

    def wait(self, left: float) -> None:
        """Check the timer again when its clock is expected to have advanced by `left` seconds."""
        self._when = self._timers.loop.time() + left + self._clock.standstill(self)
        self._timers.put(self, self._when)

    def clock_moves(self) -> None:
        """Reschedule the timer, because its clock advances again earlier than `standstill` said."""
        if self._when is not None and self._call is not None and self._left is None:
            self.wait(self.left())
            self._timers.count_stopped()  # the timer's old entry in the heap is invalid now

    def fire(self) -> None:
        """Call the function if the time is up; otherwise wait for the rest."""
        left, now = self.left(), self._timers.loop.time()
        if now + left > now:  # otherwise the time is up, or the rest is too short to measure
            self.wait(left)
            return
        call, self._call = self._call, None
        if call is not None:
            self._has_fired = True
            call()


class Timers:
    """The timers of one event loop, and their usual clock: the loop's, without the time lost to listeners."""

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

    def time(self) -> float:
        loop: Any = self._loop()
        return loop.time() - self.lost.seconds

    def standstill(self, timer: Timer) -> float:
        return 0.0  # it stands still only while a listener blocks the loop, and then nothing is checked

    def start(
        self,
        seconds: float,
        call: Callable[[], object],
        clock: TimerClock | None = None,
        left: float | None = None,
        armed: bool = True,
    ) -> Timer:
        """Start a timer that calls `call` after this many seconds, or after `left` seconds if that is given.

        `clock` measures the seconds. By default, time in which listeners block the loop does not count. A timer that is not
        `armed` fires only after `Timer.arm`, which is cheaper if it is likely to be stopped before the loop could check it.
        """
        clock, left = clock or self, seconds if left is None else left
        timer = Timer(self, call, seconds, clock, clock.time() + left)
        if armed:
            timer.wait(left)
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
        # A timer that waits again may have scheduled a wake-up that is too late for the next entry in the heap.
        if self._heap and (self._handle is None or self._heap[0][0] < self._next):
            self._schedule(self._heap[0][0])


class WorkClock(msgspec.Struct, eq=False):
    """The clock of one call: the loop's clock, minus the time that listeners take on the loop or on the handler's threads.

    It stands still while a listener runs on a thread, for up to a minute.
    """

    timers: Timers
    lost: LostTime | None = None
    """The time that listeners took on threads; None if none was called there."""
    _entered: tuple[float, ...] = ()
    """When each listener that still runs on a thread was called."""
    _held: tuple[Timer, ...] = ()
    """Timers to reschedule as soon as no listener runs on a thread."""

    def time(self) -> float:
        time = self.timers.time()
        return time if self.lost is None else time - self.lost_on_threads()

    def lost_on_threads(self) -> float:
        """Return the seconds that listeners have taken on threads so far. Time in which one also blocked the loop does not count."""
        with _threads:
            if self.lost is None:
                return 0.0
            lost = LostTime(self.lost.seconds, self.lost.spans)
            entered = self._entered
        now = self.timers.loop.time()
        for start in entered:
            lost.add(start, min(now, start + _LONGEST_EXCUSE))
        return lost.seconds - lost.overlap(self.timers.lost)

    def standstill(self, timer: Timer) -> float:
        with _threads:
            if not self._entered:
                return 0.0
            if timer not in self._held:
                self._held = (*self._held, timer)
            return max(0.0, max(self._entered) + _LONGEST_EXCUSE - self.timers.loop.time())

    def enter(self) -> float:
        """Note that a listener is called on a thread, and return when."""
        before = self.timers.loop.time()
        with _threads:
            self.lost = self.lost or LostTime()
            self._entered = (*self._entered, before)
        return before

    def leave(self, before: float) -> None:
        """Note that a listener that was called on a thread at this time has returned."""
        after = self.timers.loop.time()
        with _threads:
            at = self._entered.index(before)
            self._entered = self._entered[:at] + self._entered[at + 1 :]
            assert self.lost is not None, "`enter` has made it"
            self.lost.add(before, after)
            held = () if self._entered else self._held
            if held:
                self._held = ()
        if held:
            with contextlib.suppress(RuntimeError):  # the loop has been closed
                self.timers.loop.call_soon_threadsafe(_move, held)

    def is_on(self, lost: LostTime) -> bool:
        """Return whether `lost` is the lost time of this clock's loop."""
        return self.timers.lost is lost


@contextlib.contextmanager
def taken_from(clocks: Iterable[WorkClock]) -> Generator[None]:
    """Make these clocks stand still during the block, which calls listeners on a thread without an event loop."""
    entered = [(clock, clock.enter()) for clock in clocks]
    try:
        yield
    finally:
        for clock, before in entered:
            clock.leave(before)


def _move(timers: Iterable[Timer]) -> None:
    for timer in timers:
        timer.clock_moves()


_timers: WeakKeyDictionary[asyncio.AbstractEventLoop, Timers] = WeakKeyDictionary()


def timers_of(loop: asyncio.AbstractEventLoop) -> Timers:
    """Return the timers of this loop."""
    found = _timers.get(loop)
    if found is None:
        forget_closed(_timers)
        found = _timers[loop] = Timers(loop)
    return found
