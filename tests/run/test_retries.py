"""Retries of calls that raised `TransientError`: how long the gate waits before each, and what limits the wait."""

from __future__ import annotations

import asyncio
import contextlib
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from handrail import Deadline, ToolContext, TransientError, tool
from handrail.errors import PromptEvaluationError
from handrail.events import ToolInvoked
from handrail.testing import VirtualClock
from support.rig import Rig

pytestmark = pytest.mark.virtual_time

LONGEST = 60.0
"""The longest time that the gate waits before a retry."""


def flaky(asked: Any, *, timeout: float | None = None, takes: float = 0.0) -> Any:
    @tool(effect="read", timeout=timeout)
    async def flaky(context: ToolContext) -> str:
        """Fail as if the service were busy."""
        await asyncio.sleep(takes)
        error = TransientError("busy")
        error.retry_after = asked
        raise error

    return flaky


async def outcome(tool_: Any, **options: Any) -> tuple[ToolInvoked, float]:
    """Call the tool, and return its `ToolInvoked` event and the seconds of virtual time that the call took."""
    rig, loop = Rig([tool_], **options), asyncio.get_running_loop()
    before = loop.time()
    with contextlib.suppress(PromptEvaluationError):  # the deadline may end the run
        await rig.call("flaky")
    (ended,) = rig.of(ToolInvoked)
    return ended, loop.time() - before


ASKED = st.one_of(
    st.none(),
    st.floats(),
    st.integers(),
    st.sampled_from(
        [86_400, 10**400, -(10**400), True, "30", "soon", b"1", [], 1e308, 5e-324, math.nan, math.inf]
    ),
)


@given(
    asked=ASKED,
    timeout=st.none() | st.sampled_from([0.5, 5.0, 100.0]),
    deadline=st.none() | st.sampled_from([0.5, 30.0, 1000.0]),
    takes=st.sampled_from([0.0, 0.4, 20.0]),
)
async def test_no_pause_outlasts_the_timeout_the_deadline_or_the_cap(
    asked: Any, timeout: float | None, deadline: float | None, takes: float
) -> None:
    """Whatever `retry_after` is, no pause outlasts the timeout, the deadline or the cap. If the call ends with an error, the model is told why."""
    clock = VirtualClock(asyncio.get_running_loop())
    limit = None if deadline is None else Deadline.after(deadline, clock=clock)
    ended, took = await outcome(flaky(asked, timeout=timeout, takes=takes), deadline=limit)
    bounds = [each for each in (timeout, deadline) if each is not None]
    assert took <= min([3 * takes + 2 * LONGEST, *bounds]) + 1e-6
    assert ended.status in ("error", "timed out")
    if ended.status == "error":
        assert "busy" in ended.result.message


@pytest.mark.parametrize("asked", [60.001, 86_400, 10**400, 1e308, math.inf])
async def test_a_call_that_would_wait_too_long_fails_at_once(asked: float) -> None:
    """If `retry_after` exceeds the cap, the call fails at once.

    The model is told how long to wait, unless that is centuries.
    """
    ended, took = await outcome(flaky(asked))
    assert (ended.status, ended.attempts, took) == ("error", 1, 0)
    hint = f". It may work after {asked:g} seconds." if asked <= 86_400 else ""
    assert ended.result.message.endswith(hint)
    assert ("It may work after" in ended.result.message) == bool(hint)


@pytest.mark.parametrize("asked", [math.nan, -1, -math.inf, "30", True, None])
async def test_a_wait_that_is_no_number_of_seconds_is_replaced_by_the_usual_one(asked: Any) -> None:
    """If `retry_after` is None or invalid, the call is retried after the usual waits."""
    ended, took = await outcome(flaky(asked))
    assert (ended.status, ended.attempts) == ("error", 3)
    assert took == pytest.approx(0.1 + 0.2)


async def test_a_subclass_without_a_wait_is_retried() -> None:
    """A call is retried if it raises a subclass of `TransientError` that does not call `TransientError.__init__`."""

    class Busy(TransientError):
        def __init__(self) -> None:
            Exception.__init__(self, "busy")

    @tool(effect="read")
    async def flaky(context: ToolContext) -> str:
        """Fail twice."""
        if context.invocation.attempt < 3:
            raise Busy
        return "fine"

    ended, _ = await outcome(flaky)
    assert (ended.status, ended.attempts) == ("ok", 3)


async def test_attempts_and_pauses_share_the_timeout() -> None:
    """A timeout applies to the whole call, so earlier attempts and pauses count towards it."""
    ended, took = await outcome(flaky(3, timeout=10, takes=4))  # attempts at 0-4 and 7-11 s
    assert (ended.status, took) == ("timed out", 10)
    assert "longer than 10 seconds" in ended.result.message
    ended, took = await outcome(flaky(3, timeout=12, takes=4))  # a third attempt at 14 s is too late
    assert (ended.status, ended.attempts, took) == ("error", 2, 11)
    ended, took = await outcome(flaky(3, timeout=30, takes=4))
    assert (ended.status, ended.attempts, took) == ("error", 3, 18)


async def test_the_job_is_kept_during_a_pause() -> None:
    """While the gate waits to retry, it renews the job's lease, even if the handler sends heartbeats itself."""

    class Lease:
        interval = 10.0

        def __init__(self) -> None:
            self.extended: list[float] = []

        def extend(self) -> None:
            self.extended.append(asyncio.get_running_loop().time())

    @tool(effect="read")
    async def flaky(context: ToolContext) -> str:
        """Fail once."""
        context.beat()
        if context.invocation.attempt == 1:
            raise TransientError("busy", retry_after=55)
        return "fine"

    lease = Lease()
    start = asyncio.get_running_loop().time()
    ended, took = await outcome(flaky, lease=lease)
    assert (ended.status, took) == ("ok", 55)
    gaps = [b - a for a, b in zip([start, *lease.extended], lease.extended, strict=False)]
    assert max(gaps) <= Lease.interval
