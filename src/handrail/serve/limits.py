"""`Limits`: how much a server takes, and what counts towards it."""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass, fields

from handrail.clock import SYSTEM_CLOCK, Clock
from handrail.errors import DefinitionError, RequestRefused


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What is refused, and when. Each refusal says which of these it was."""

    body_bytes: int = 2**20
    body_seconds: float = 20.0
    """A body has to be there after so long."""
    header_bytes: int = 16 * 1024
    header_seconds: float = 10.0
    """A connection that has sent no whole request after so long is closed."""
    idle_seconds: float = 15.0
    """A connection is kept so long for the next request."""
    write_seconds: float = 30.0
    """A reader that takes nothing for so long, though there is something for it, is let go."""
    connections: int = 1000
    streams: int = 256
    """Streams open at once, of one principal."""
    requests_per_second: float = 50.0
    burst: int = 200
    """Requests of one principal at once, when it was quiet before."""
    wrong_tokens: int = 10
    """Wrong tokens from one address at once; after them, one in six seconds."""
    runs: int = 1000
    """Runs at work at once; those that wait for an answer do not count."""
    runs_per_principal: int = 100
    message_chars: int = 100_000

    def __post_init__(self) -> None:
        for field in fields(self):
            given = getattr(self, field.name)
            if isinstance(given, bool) or not isinstance(given, int | float) or not 0 < given < math.inf:
                raise DefinitionError(
                    f"Limits({field.name}={given!r}) would let nothing through, or bounds nothing. "
                    "Give a positive number."
                )


class Rate:
    """Buckets that fill again with time, one a key; the ones longest unused are forgotten."""

    def __init__(
        self, per_second: float, burst: int, *, clock: Clock = SYSTEM_CLOCK, most: int = 10_000
    ) -> None:
        self._per_second, self._burst, self._most = per_second, burst, most
        self._clock = clock
        self._left: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def take(self, key: str) -> float:
        """Take one: 0.0, or the seconds until there is one again."""
        left, now = self._now(key)
        if left < 1.0:
            return (1.0 - left) / self._per_second
        self._left[key] = (left - 1.0, now)
        self._left.move_to_end(key)
        if len(self._left) > self._most:
            self._left.popitem(last=False)
        return 0.0

    def wait(self, key: str) -> float:
        """The seconds until there is one again, without taking any."""
        left, _ = self._now(key)
        return 0.0 if left >= 1.0 else (1.0 - left) / self._per_second

    def _now(self, key: str) -> tuple[float, float]:
        now = self._clock.monotonic()
        left, at = self._left.get(key, (float(self._burst), now))
        return min(float(self._burst), left + (now - at) * self._per_second), now


class Places:
    """How many of something each principal has at once."""

    def __init__(self, each: int, kind: str, what: str, most: float = math.inf) -> None:
        self._each, self._most = each, most
        self._kind, self._what = kind, what
        self._taken: dict[str, int] = {}
        self.total = 0

    def take(self, principal: str, *, beside: int = 0, beside_total: int = 0) -> None:
        """Take one more, or `RequestRefused`; `beside` are those that are counted elsewhere."""
        taken = self._taken.get(principal, 0)
        if taken + beside >= self._each or self.total + beside_total >= self._most:
            raise RequestRefused(429, self._kind, self._what, retry_after=5.0)
        self._taken[principal] = taken + 1
        self.total += 1

    def give_back(self, principal: str) -> None:
        left = self._taken[principal] - 1
        self.total -= 1
        if left:
            self._taken[principal] = left
        else:
            del self._taken[principal]
