"""Virtual time: an event loop whose clock jumps to the next timer instead of waiting for it.

A test of a three-day timeout takes no time and gives the same result every time.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from datetime import UTC, datetime, timedelta
from typing import Any, TypeVar

from handrail.concurrency.threads import threads_at_work

T = TypeVar("T")

_THREAD_GRACE = 0.05
"""Maximum real seconds to wait for a handler's thread before time jumps."""


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """An event loop on which sleeping takes no real time.

    Time stands still while anything can run and jumps to the next timer when nothing can. Threads run in
    real time: while a handler's thread is working, a jump waits briefly for it.
    """

    def __init__(self) -> None:
        self._virtual_now = 0.0
        super().__init__(_JumpingSelector(self))
        # Timers this close together are due at once. After 100 days of virtual time, asyncio's default resolution of a
        # nanosecond would be too fine, because a float that large can't represent the next nanosecond.
        self._clock_resolution = 1e-6

    def time(self) -> float:
        return self._virtual_now

    def advance(self, seconds: float) -> None:
        self._virtual_now += seconds

    async def shutdown_default_executor(self, timeout: float | None = None) -> None:
        """Wait until the executor's threads have ended. The time limit is ignored, because virtual time would jump past it."""
        await super().shutdown_default_executor()

    def meet_threads(self) -> bool:
        """Schedule the callbacks that threads have handed over, and return whether there were any.

        If there were, time does not jump. This class never has any; `SimulatedLoop` overrides the method.
        """
        return False


class _JumpingSelector(selectors.DefaultSelector):
    def __init__(self, loop: VirtualTimeLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if self._loop.meet_threads():
            timeout = 0
        if timeout is None:
            return super().select(None)  # there is no timer, so only a thread or a socket can wake the loop
        grace = _THREAD_GRACE if timeout > 0 and threads_at_work(self._loop) else 0
        ready = super().select(grace)
        if not ready and timeout > 0:
            self._loop.advance(timeout)
        return ready


class VirtualClock:
    """A `Clock` that shows a virtual loop's time. It starts at the beginning of 2030."""

    __slots__ = ("_start", "_time")

    def __init__(self, loop: asyncio.AbstractEventLoop | None = None) -> None:
        self._time = (loop or asyncio.get_running_loop()).time
        self._start = datetime(2030, 1, 1, tzinfo=UTC)

    def now(self) -> datetime:
        return self._start + timedelta(seconds=self._time())

    def monotonic(self) -> float:
        return self._time()


def run_virtual(main: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run an async function until it ends, in virtual time, and return its result."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(main())
