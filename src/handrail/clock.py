"""Time, as the one seam through which all of Handrail reads it.

Tests inject their own clock; nothing else in the package asks the system what time it is.
"""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import Protocol


class Clock(Protocol):
    """What time it is, twice over: for people and records, and for measuring."""

    def now(self) -> datetime:
        """The time of day, in UTC. It may jump: a machine's clock can be set."""
        ...

    def monotonic(self) -> float:
        """Seconds that never go back. Only differences mean anything."""
        ...


class SystemClock:
    """The machine's own clocks."""

    __slots__ = ()

    def now(self) -> datetime:
        return datetime.now(UTC)

    monotonic = staticmethod(time.monotonic)


SYSTEM_CLOCK = SystemClock()
