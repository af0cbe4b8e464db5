"""Clocks: the only seam through which Handrail reads the time.

Tests inject their own clock; nothing else in the package asks the system for the time.
"""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import Protocol, runtime_checkable


@runtime_checkable
class Clock(Protocol):
    """The time of day, for people and records, and a monotonic time, for measuring durations."""

    def now(self) -> datetime:
        """Return the time of day in UTC. It may jump, since a machine's clock can be set."""
        ...

    def monotonic(self) -> float:
        """Return seconds that never go backwards. Only differences have a meaning."""
        ...


class SystemClock:
    """The machine's own clocks."""

    __slots__ = ()

    def now(self) -> datetime:
        return datetime.now(UTC)

    monotonic = staticmethod(time.monotonic)


SYSTEM_CLOCK = SystemClock()
