"""`RateLimitPolicy`, and the window of counted calls that it keeps in the session.

A window is a ring of cells, one for each call that the rate allows, and an index from calls to cells. Unless the
rate has changed, admitting a call replaces only a few cells, however many calls the window holds.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Iterator
from typing import Any, Literal
from zlib import crc32

import msgspec

from handrail.clock import SYSTEM_CLOCK, Clock
from handrail.context import ToolContext
from handrail.errors import DefinitionError
from handrail.guard.policy import CheckOnly
from handrail.protocols import PolicyDecision
from handrail.session import kept
from handrail.text.spelling import checked_arguments
from handrail.tools import Tool


class CallCounted(msgspec.Struct, frozen=True):
    """The event that counts a call towards a rate limit, whatever the call's result, unless the policy's window is full."""

    policy: str
    call: str
    at: float
    window: float
    most: int


def _cell_key(cell: Any) -> Hashable:
    return (cell.policy, cell.part, cell.index)


def _admit(cells: Any, event: CallCounted) -> Any:
    """Add a call to its policy's window, unless the window is full."""
    window = RateWindow(cells, event.policy)
    if window.is_full(event.most, event.window, event.at):
        return cells
    if window.size != event.most:
        window.resize(event.most)
    window.add(event.call, event.at)
    return window.cells


@kept(kind="log", key=_cell_key, reducers={CallCounted: _admit})
class RateCell(msgspec.Struct, frozen=True):
    """A part of a rate limit's window. It is kept even if the calls fail.

    - `call`: one call. Calls are numbered, and call `n` is in the cell `n % size`.
    - `total`: the number of calls added to the ring so far, and the ring's size, in `numbers`.
    - `bucket`: the indexes, in `numbers`, of the cells that hold the calls whose ids hash to this bucket.
    """

    policy: str
    part: Literal["total", "call", "bucket"]
    index: int
    call: str = ""
    at: float = 0.0
    numbers: tuple[int, ...] = ()


class RateWindow:
    """The latest calls that one policy has admitted, as cells of a session's slice."""

    __slots__ = ("_policy", "cells", "size", "total")

    def __init__(self, cells: Any, policy: str) -> None:
        self.cells = cells
        self._policy = policy
        total = cells.get((policy, "total", 0))
        self.total, self.size = (0, 0) if total is None else total.numbers

    def __iter__(self) -> Iterator[RateCell]:
        """Iterate over the calls, oldest first."""
        for number in range(max(0, self.total - self.size), self.total):
            yield self._call(number % self.size)

    def oldest(self, most: int) -> float | None:
        """Return the time of the oldest among the latest `most` calls; None if there are fewer."""
        if min(self.total, self.size) < most:
            return None
        return self._call((self.total - most) % self.size).at

    def is_full(self, most: int, seconds: float, now: float) -> bool:
        """Return whether there were already `most` calls within this many seconds of `now`."""
        oldest = self.oldest(most)
        return oldest is not None and _within(seconds, oldest, now)

    def has(self, call: str, seconds: float, now: float) -> bool:
        """Return whether this call was admitted within this many seconds of `now`."""
        found = (self._call(index) for index in self._bucket(call).numbers)
        return any(each.call == call and _within(seconds, each.at, now) for each in found)

    def add(self, call: str, at: float) -> None:
        """Add a call, which replaces the oldest one if the ring is full."""
        index = self.total % self.size
        if self.total >= self.size:
            bucket = self._bucket(self._call(index).call)
            self._put("bucket", bucket.index, numbers=tuple(n for n in bucket.numbers if n != index))
        self._put("call", index, call, at)
        bucket = self._bucket(call)
        self._put("bucket", bucket.index, numbers=(*bucket.numbers, index))
        self.total += 1
        self._put("total", 0, numbers=(self.total, self.size))

    def resize(self, size: int) -> None:
        """Make room for this many calls, for a new window or a changed rate. The latest calls that fit are kept."""
        calls = list(self)[-size:]
        if self.size:
            self.cells = self.cells.replace([cell for cell in self.cells if cell.policy != self._policy])
        self.total, self.size = 0, size
        for each in calls:
            self.add(each.call, each.at)

    def _call(self, index: int) -> RateCell:
        return self.cells.get((self._policy, "call", index))

    def _bucket(self, call: str) -> RateCell:
        index = crc32(call.encode(errors="surrogatepass")) % self.size if self.size else 0
        return self.cells.get((self._policy, "bucket", index)) or RateCell(self._policy, "bucket", index)

    def _put(
        self,
        part: Literal["total", "call", "bucket"],
        index: int,
        call: str = "",
        at: float = 0.0,
        numbers: tuple[int, ...] = (),
    ) -> None:
        self.cells = self.cells.append(RateCell(self._policy, part, index, call, at, numbers))


def _within(seconds: float, at: float, now: float) -> bool:
    """Return whether `at` is less than this many seconds away from `now`.

    `at` may be ahead of `now`: another thread may have read it later, it may come from another machine's clock, or the
    clock may have been set back. A call ahead of `now` counts until the clock is past it again, so setting the clock back by
    less than the window frees nothing.
    """
    return abs(now - at) < seconds


@checked_arguments
class RateLimitPolicy(CheckOnly):
    """Allows a session at most `most` calls in `per_seconds` seconds, to all tools or only to `tools`. Failed calls count too.

    A call that is retried within this time counts once, and so does one that continues after a crash. A call that this policy
    denied does not count. The cost of a check does not depend on the number of calls. With a journal, the counts are
    recorded with the calls: they apply to resumed runs and continued conversations, in any process.

    Times are those of `clock.now()`, by default the system's wall clock, because counts outlive the process.
    """

    def __init__(
        self,
        most: int,
        per_seconds: float,
        *,
        tools: Collection[str] | None = None,
        name: str = "rate_limit",
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        if type(most) is not int or most < 1 or not 0 < per_seconds < math.inf:
            raise DefinitionError(
                f"policy {name!r}: {most} calls in {per_seconds} seconds is not a valid rate. Pass a whole number of calls, at least 1, and a positive, finite time."
            )
        if isinstance(tools, str):
            raise DefinitionError(f"policy {name!r}: tools is a string. Pass a set of names: {{{tools!r}}}.")
        self.name = name
        self._most = most
        self._window = per_seconds
        self.named_tools = None if tools is None else frozenset(tools)
        self._clock = clock

    def check(self, tool: Tool[Any, Any], params: Any, *, context: ToolContext) -> PolicyDecision:
        if self.named_tools is not None and tool.name not in self.named_tools:
            return PolicyDecision.allow()
        session, call = context.session, context.invocation.idempotency_key
        now = self._clock.now().timestamp()
        window = RateWindow(session[RateCell], self.name)
        if window.has(call, self._window, now):
            return PolicyDecision.allow()
        if not window.is_full(self._most, self._window, now):
            session.dispatch(CallCounted(self.name, call, now, self._window, self._most))
            # The reducer admits only as many calls as the rate allows, even if threads race.
            window = RateWindow(session[RateCell], self.name)
            if window.has(call, self._window, now):
                return PolicyDecision.allow()
        oldest = window.oldest(self._most)
        wait = self._window if oldest is None else oldest + self._window - now
        return PolicyDecision.deny(
            f"{self._most} calls in {self._window:g} seconds is the limit. Wait {wait:.1f} seconds."
        )
