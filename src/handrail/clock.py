"""Clocks, through which Handrail reads the time.

Tests inject their own clock. No other module of the package calls `time.monotonic` or `datetime.now`.
"""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import Protocol, runtime_checkable


@runtime_checkable
class Clock(Protocol):
    """A source of the time of day, for people and records, and of monotonic time, for measuring durations."""

    def now(self) -> datetime:
        """Return the time of day in UTC. It can jump, because a machine's clock can be set."""
        ...

    def monotonic(self) -> float:
        """Return a number of seconds that never decreases. Only differences between two results are meaningful."""
        ...


class SystemClock:
    """The machine's own clocks."""

    __slots__ = ()

    def now(self) -> datetime:
        return datetime.now(UTC)

    monotonic = staticmethod(time.monotonic)


SYSTEM_CLOCK = SystemClock()
