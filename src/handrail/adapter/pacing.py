"""How often and how soon a model is asked: trying again after a failure, and holding back before one."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from handrail.clock import SYSTEM_CLOCK, Clock
from handrail.errors import DefinitionError, ModelError
from handrail.ids import Chance, random_fraction
from handrail.threads import forget_closed


@dataclass(frozen=True, slots=True)
class Retry:
    """When a request that failed for a passing reason is tried again.

    The waits double, each cut by chance so that many runs do not come back at once. Where the provider
    says when to come back, it is not asked before; if that is more than `longest_wait` away, it is not
    asked again at all. Nothing is ever tried past the run's deadline.
    """

    attempts: int = 5
    first_wait: float = 0.5
    longest_wait: float = 60.0
    chance: Chance = random_fraction

    def __post_init__(self) -> None:
        if type(self.attempts) is not int or self.attempts < 1:
            raise DefinitionError(f"{self.attempts!r} attempts are not possible. Give at least 1.")
        waits = (self.first_wait, self.longest_wait)
        if not all(type(each) in (int, float) for each in waits) or not 0 <= waits[0] <= waits[1]:
            raise DefinitionError(
                f"waits from {self.first_wait!r} to {self.longest_wait!r} seconds are not possible. "
                "Give two numbers of at least 0, the first not above the second."
            )

    def wait_after(self, attempt: int, error: ModelError) -> float | None:
        """Seconds until the next attempt; None when there is none."""
        if not error.transient or attempt >= self.attempts:
            return None
        wanted = error.retry_after
        if wanted is not None:
            return wanted * (1 + self.chance() / 10) if wanted <= self.longest_wait else None
        highest = min(self.longest_wait, self.first_wait * 2.0 ** min(attempt - 1, 64))
        return highest * (1 + self.chance()) / 2


class Throttle:
    """Holds requests back: so many at once, so many a minute; and all of them after a rate limit.

    One throttle is shared by every run of an adapter, and can be shared by adapters.
    """

    def __init__(
        self, *, at_once: int | None = None, per_minute: float | None = None, clock: Clock = SYSTEM_CLOCK
    ) -> None:
        if at_once is not None and (type(at_once) is not int or at_once < 1):
            raise DefinitionError(
                f"at_once={at_once!r} is no number of requests. Give a whole number from 1 on."
            )
        if per_minute is not None and (
            type(per_minute) not in (int, float) or not 0 < per_minute < float("inf")
        ):
            raise DefinitionError(
                f"per_minute={per_minute!r} would let nothing through, or everything. Give a positive number, or leave it out."
            )
        self._at_once = at_once
        self._spacing = 0.0 if per_minute is None else 60.0 / per_minute
        self._clock = clock
        self._next = 0.0
        self._slots: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()

    def hold(self, seconds: float) -> None:
        """Let nothing through for so long."""
        self._next = max(self._next, self._clock.monotonic() + seconds)

    async def enter(self) -> None:
        """Wait for a turn. Every `enter` has its `leave`."""
        if self._at_once is not None:
            loop = asyncio.get_running_loop()
            slot = self._slots.get(loop)
            if slot is None:
                forget_closed(self._slots)
                slot = self._slots[loop] = asyncio.Semaphore(self._at_once)
            await slot.acquire()
        if not self._next and not self._spacing:
            return
        try:
            now = self._clock.monotonic()
            begin = max(now, self._next)
            self._next = begin + self._spacing
            if begin > now:
                await asyncio.sleep(begin - now)
        except BaseException:
            self.leave()
            raise

    def leave(self) -> None:
        """The request is over."""
        if self._at_once is not None:
            self._slots[asyncio.get_running_loop()].release()
