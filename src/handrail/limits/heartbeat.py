"""Heartbeats, which extend the lease on a job while one of its calls runs."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Protocol, runtime_checkable

from handrail.clock import SYSTEM_CLOCK, Clock
from handrail.errors import DefinitionError

log = logging.getLogger("handrail.limits")


@runtime_checkable
class Lease(Protocol):
    """A claim on a job that expires unless it is extended."""

    @property
    def interval(self) -> float:
        """Seconds between extensions, short enough that the lease does not expire."""
        ...

    def extend(self) -> None:
        """Extend the lease.

        This must be quick and must not block: it runs on the event loop or on a handler's thread.
        """
        ...


class Heartbeat:
    """Extends the job's lease while one call runs.

    If the handler never calls `beat`, beats are sent for it until it ends or times out. After the handler's first own
    beat, only its own beats count, so a handler that hangs loses the job. Once the call has ended, nothing extends the
    lease, not even a beat from a thread that outlived the call.

    A tool with `heartbeat=30` promises to beat at least every 30 seconds. Its call is stopped if it does not.
    """

    __slots__ = ("_clock", "_lease", "_over", "_timer", "beats_itself", "heard", "last_beat")

    def __init__(self, lease: Lease | None = None, clock: Clock = SYSTEM_CLOCK) -> None:
        if lease is not None and not lease.interval > 0:
            raise DefinitionError(
                f"the lease's interval is {lease.interval!r} seconds. Make it a positive number."
            )
        self.last_beat: float | None = None
        self.beats_itself = False
        self.heard: Callable[[], None] | None = None
        """A function that is called for each of the handler's own beats; None if its tool does not promise any."""
        self._lease = lease
        self._clock = clock
        self._timer: asyncio.TimerHandle | None = None
        self._over = False

    def beat(self) -> None:
        """Record a beat from the handler itself and extend the lease, if there is one. Raises whatever the lease raises.

        Does nothing once the handler has ended.
        """
        if not self._over:
            self.beats_itself = True
            if self.heard is not None:
                self.heard()
            self._extend()

    def keep(self, loop: asyncio.AbstractEventLoop) -> None:
        """Send beats for the handler from now on, until it calls `beat` itself or `stop` is called.

        Without a lease, nothing is sent. If the lease can't be extended, the error is logged, and the next beat tries again.
        """
        self.stop()
        self._over = False
        if self._lease is None or self.beats_itself:
            return
        try:
            self._extend()
        except Exception:
            log.exception("the lease could not be extended; trying again in %s s", self._lease.interval)
        self._timer = loop.call_later(self._lease.interval, self.keep, loop)

    def stop(self) -> None:
        """Stop sending beats and ignore later ones. This is called when the handler has ended."""
        self._over = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _extend(self) -> None:
        if self._lease is not None:
            self._lease.extend()
        self.last_beat = self._clock.monotonic()
