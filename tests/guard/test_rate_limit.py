"""The window of `RateLimitPolicy`: it admits what the rate allows, and a call's cost does not grow with the number of calls."""

from __future__ import annotations

import sys
from datetime import UTC, datetime
from types import FrameType
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from handrail import RateLimitPolicy, tool
from handrail.guard.rate_limit import CallCounted, RateCell, RateWindow
from handrail.run import open_gate
from handrail.session import Session

CALLS = 10_000


@tool(effect="pure")
async def nothing() -> str:
    """Do nothing."""
    return "fine"


class StandingClock:
    def now(self) -> datetime:
        return datetime.fromtimestamp(100.0, UTC)

    def monotonic(self) -> float:
        raise NotImplementedError


async def steps_of_a_call(gate: Any) -> int:
    """Make one call, and return how many lines of Python it executes."""
    steps = 0

    def count(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal steps
        steps += event == "line"
        return count

    before = sys.gettrace()
    sys.settrace(count)
    try:
        result = await gate.invoke("nothing")
    finally:
        sys.settrace(before)
    assert result.success
    return steps


async def test_the_ten_thousandth_call_costs_what_the_first_does() -> None:
    """After 10,000 calls, a call runs less than twice as many lines as at first, whether the window holds all of them or 500."""
    for most in (2 * CALLS, 500):
        session = Session()
        policy = RateLimitPolicy(most, 10, clock=StandingClock())
        gate = open_gate([nothing], session=session, policies=[policy])
        await gate.invoke("nothing")
        first = await steps_of_a_call(gate)
        for number in range(CALLS):  # with the lower rate, all of these calls are older than the window
            at = 100.0 if most > CALLS else number / CALLS
            session.dispatch(
                CallCounted("rate_limit", f"call {number}", at, 0.001 if most < CALLS else 10, most)
            )
        assert len(list(RateWindow(session[RateCell], "rate_limit"))) == min(most, CALLS + 2)
        assert await steps_of_a_call(gate) < 2 * first


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["a", "b"]),  # the policy
            st.integers(0, 9),  # the call
            st.floats(0, 3),  # the seconds since the previous call
            st.sampled_from([1, 2, 5]),  # the rate, which an app's next version may change
        ),
        max_size=40,
    )
)
def test_a_window_admits_what_the_rate_allows(counted: list[tuple[str, int, float, int]]) -> None:
    """A stored window behaves like a list of the latest admitted calls, even when the rate changes."""
    session, now, seconds = Session(), 0.0, 4.0
    admitted: dict[str, list[tuple[str, float]]] = {"a": [], "b": []}
    for policy, number, later, most in counted:
        now, call = now + later, f"call {number}"
        session.dispatch(CallCounted(policy, call, now, seconds, most))
        latest = admitted[policy]
        if not (len(latest) >= most and now - latest[-most][1] < seconds):
            admitted[policy] = [*latest, (call, now)][-most:]
        for name, calls in admitted.items():
            window = RateWindow(session[RateCell], name)
            assert [(each.call, each.at) for each in window] == calls
            for each in range(10):
                expected = any(one == f"call {each}" and now - at < seconds for one, at in calls)
                assert window.has(f"call {each}", seconds, now) is expected
    assert len(session[RateCell]) <= 2 * (1 + 5 + 5)
