"""Timeouts, many at the price of one: a heap of moments and a single timer of the event loop."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary, ref

import msgspec

from handrail.threads import forget_closed

_FEW = 64
"""So many stopped timers may lie in the heap before it is worth clearing them out."""


class Timer(msgspec.Struct, eq=False):
    """Cancels a task at a moment, unless it is stopped before. It can be held while a person thinks."""

    _dog: Watchdog
    _task: asyncio.Task[Any] | None
    _when: float
    extend: Callable[[], float] | None = None
    """Asked when the moment comes: how many more seconds to wait. Nothing more means it fires."""
    fired: bool = False
    _left: float | None = None
    _holds: int = 0

    def stop(self) -> bool:
        """The work is over. True, once, if the timer has cancelled the task: take that back."""
        if self._task is not None:
            self._task = None
            if self._left is None:
                self._dog.stopped()
        fired, self.fired = self.fired, False
        return fired

    def hold(self) -> None:
        """Stand still until everybody who said `hold` has said `go_on`."""
        self._holds += 1
        if self._task is not None and self._left is None:
            self._left = self._when - self._dog.loop.time()
            self._dog.stopped()

    def go_on(self) -> None:
        """Run on with what was left."""
        self._holds -= 1
        if self._holds == 0 and self._task is not None and self._left is not None:
            self._when = self._dog.loop.time() + self._left
            self._left = None
            self._dog.put(self, self._when)

    def is_due(self, when: float) -> bool:
        """Does the entry in the heap for this moment still stand?"""
        return self._task is not None and self._left is None and self._when == when

    def fire(self) -> None:
        more = self.extend() if self.extend is not None else 0.0
        if more > 0:
            self._when = self._dog.loop.time() + more
            self._dog.put(self, self._when)
            return
        task = self._task
        if task is not None:
            self.fired = True
            self._task = None
            task.cancel()


class Watchdog:
    """The timers of one event loop."""

    __slots__ = ("_dead", "_handle", "_heap", "_loop", "_next", "_number")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = ref(loop)  # the loop keeps its watchdog, not the other way round
        self._heap: list[tuple[float, int, Timer]] = []
        self._number = 0
        self._dead = 0
        self._handle: asyncio.TimerHandle | None = None
        self._next = 0.0

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        loop = self._loop()
        assert loop is not None, "a timer is only used while its loop is"
        return loop

    def watch(
        self, task: asyncio.Task[Any], seconds: float, extend: Callable[[], float] | None = None
    ) -> Timer:
        """Cancel `task` in so many seconds, unless the timer is stopped or `extend` gives it more."""
        when = self.loop.time() + seconds
        timer = Timer(self, task, when, extend)
        self.put(timer, when)
        return timer

    def put(self, timer: Timer, when: float) -> None:
        self._number += 1
        heapq.heappush(self._heap, (when, self._number, timer))
        if self._handle is None or when < self._next:
            self._schedule(when)

    def stopped(self) -> None:
        self._dead += 1
        if self._dead > _FEW and self._dead * 2 > len(self._heap):
            self._heap = [entry for entry in self._heap if entry[2].is_due(entry[0])]
            heapq.heapify(self._heap)
            self._dead = 0

    def _schedule(self, when: float) -> None:
        if self._handle is not None:
            self._handle.cancel()
        self._next = when
        self._handle = self.loop.call_at(when, self._wake)

    def _wake(self) -> None:
        self._handle = None
        now = self.loop.time()
        while self._heap and self._heap[0][0] <= now:
            when, _, timer = heapq.heappop(self._heap)
            if timer.is_due(when):
                timer.fire()
            elif self._dead:
                self._dead -= 1
        if self._heap and self._handle is None:
            self._schedule(self._heap[0][0])


_dogs: WeakKeyDictionary[asyncio.AbstractEventLoop, Watchdog] = WeakKeyDictionary()


def watchdog_of(loop: asyncio.AbstractEventLoop) -> Watchdog:
    """The watchdog of this loop."""
    dog = _dogs.get(loop)
    if dog is None:
        forget_closed(_dogs)
        dog = _dogs[loop] = Watchdog(loop)
    return dog
