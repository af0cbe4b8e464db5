"""Timers: a timeout is postponed by exactly the time that listeners take, on the loop or on threads."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any, Literal

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from handrail import Deadline, ToolContext, tool
from handrail.concurrency.cancellation import TimedOut, open_scope
from handrail.concurrency.timers import LostTime, WorkClock, timers_of
from handrail.errors import DeadlineExceededError
from handrail.events import Progress, ToolInvoked
from handrail.session import Session
from handrail.session.bus import Dispatcher
from handrail.testing import VirtualClock, VirtualTimeLoop, run_virtual, virtual_time
from support import PATIENCE
from support.rig import Rig

Listener = tuple[Literal["loop", "thread"], int, int]
Span = tuple[float, float]

listeners = st.lists(
    st.tuples(st.sampled_from(["loop", "thread"]), st.integers(0, 30), st.integers(1, 40)), max_size=6
)


def virtual_loop() -> VirtualTimeLoop:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualTimeLoop)
    return loop


def run_listeners(clock: WorkClock, drawn: list[Listener]) -> list[Span]:
    """Schedule listeners on the loop and on threads, and return the list to which their spans are added."""
    loop, spans = virtual_loop(), list[Span]()

    def block(seconds: int) -> None:
        before = loop.time()
        loop.advance(seconds)
        timers_of(loop).lost.add(before, loop.time())
        spans.append((before, loop.time()))

    def enter(seconds: int) -> None:
        loop.call_later(seconds, leave, clock.enter())

    def leave(before: float) -> None:
        clock.leave(before)
        spans.append((before, loop.time()))

    for where, at, seconds in drawn:
        loop.call_at(at, block if where == "loop" else enter, seconds)
    return spans


def moment_after(seconds: float, spans: list[Span]) -> float:
    """Return the time at which this many seconds outside of all spans have passed."""
    covered = 0.0
    for start, end in sorted(spans):
        if max(start, covered) - covered >= seconds:
            break
        seconds -= max(start - covered, 0.0)
        covered = max(covered, end)
    return covered + seconds


@given(drawn=listeners, seconds=st.integers(0, 40))
@example(drawn=[("loop", 3, 10)], seconds=5)
@example(drawn=[("thread", 3, 10)], seconds=5)
@example(drawn=[("thread", 3, 40), ("loop", 4, 20)], seconds=5)
@example(drawn=[("thread", 3, 10), ("thread", 5, 20)], seconds=5)
def test_a_timeout_is_postponed_by_exactly_what_listeners_took(drawn: list[Listener], seconds: int) -> None:
    """A timeout cancels work once the given seconds have passed.

    The time that listeners take does not count, whether they run one after another, nest or overlap.
    """

    async def main() -> tuple[float, list[Span]]:
        loop = virtual_loop()
        clock = WorkClock(timers_of(loop))
        spans = run_listeners(clock, drawn)
        scope = open_scope()
        scope.start_timeout(seconds + 0.5, clock)  # not a whole second, at which listeners begin and end
        with pytest.raises(asyncio.CancelledError):
            await asyncio.Event().wait()
        ended = loop.time()
        with pytest.raises(TimedOut):
            scope.stop_timeout()
        await asyncio.sleep(300)  # until the last listener has returned
        return ended, spans

    ended, spans = run_virtual(main)
    assert ended == moment_after(seconds + 0.5, spans)


@given(
    drawn=listeners,
    seconds=st.integers(1, 20),
    silence=st.none() | st.integers(1, 20),
    blocked=st.integers(0, 30),
    asks=st.none() | st.integers(1, 30),
    waits=st.integers(0, 40),
    restarts=st.booleans(),
)
@example(drawn=[], seconds=5, silence=None, blocked=3, asks=None, waits=3, restarts=False)
@example(drawn=[], seconds=5, silence=None, blocked=9, asks=None, waits=3, restarts=False)
@example(drawn=[], seconds=5, silence=None, blocked=3, asks=9, waits=3, restarts=True)
def test_timers_that_are_armed_at_the_first_wait_fire_at_the_same_moment(
    drawn: list[Listener],
    seconds: int,
    silence: int | None,
    blocked: int,
    asks: int | None,
    waits: int,
    restarts: bool,
) -> None:
    """Timers that a scope holds until its work first waits end the work as those that are armed at once do.

    Before it waits, the work may block the loop, and the timers may be paused. A later timeout goes on with the time that is left.
    """

    async def main(*, held: bool) -> list[tuple[str, float, float]]:
        loop, ends = virtual_loop(), list[tuple[str, float, float]]()
        clock = WorkClock(timers_of(loop))
        run_listeners(clock, drawn)
        scope = open_scope()
        if held:
            scope.hold_timers()
        for _ in range(1 + restarts):
            scope.start_timeout(seconds + 0.5, clock)
            if silence is not None:
                scope.start_watchdog(silence + 0.75, clock)
            loop.advance(blocked)
            if asks is not None:
                loop.call_at(loop.time() + asks, scope.pause())
            ended = "in time"
            try:
                if waits:
                    scope.arm_timers()
                    await asyncio.sleep(waits)
            except asyncio.CancelledError:
                ended = "cancelled"
            try:
                try:
                    scope.stop_timeout()
                finally:
                    scope.stop_watchdog()
            except TimedOut as error:
                ended = type(error).__name__
            ends.append((ended, loop.time(), scope.timeout_left()))
            scope.continue_timeout()
        assert not scope.interrupted
        return ends

    assert run_virtual(lambda: main(held=True)) == run_virtual(lambda: main(held=False))


@given(drawn=listeners, beats=st.lists(st.integers(1, 20), max_size=4))
def test_silence_is_counted_in_the_same_way(drawn: list[Listener], beats: list[int]) -> None:
    """The time that listeners take does not count as silence for the watchdog."""

    async def main() -> tuple[float, list[Span], float]:
        loop, heard = virtual_loop(), [0.0]
        clock = WorkClock(timers_of(loop))
        spans = run_listeners(clock, drawn)
        scope = open_scope()
        scope.start_watchdog(10.5, clock)

        def beat() -> None:
            scope.hear()
            heard.append(loop.time())

        for at in beats:
            loop.call_at(at + 0.25, beat)
        with pytest.raises(asyncio.CancelledError):
            await asyncio.Event().wait()
        ended, last = loop.time(), heard[-1]
        with pytest.raises(TimedOut):
            scope.stop_watchdog()
        await asyncio.sleep(300)
        return ended, spans, last

    ended, spans, last = run_virtual(main)
    since = [(max(start, last), end) for start, end in spans if end > last]
    assert ended == last + moment_after(10.5, [(start - last, end - last) for start, end in since])


@given(st.lists(st.tuples(st.integers(0, 100), st.integers(0, 30)), max_size=20))
def test_overlapping_spans_count_once(drawn: list[tuple[int, int]]) -> None:
    """The lost time is the length of the union of all spans, in whatever order they are added."""
    lost = LostTime()
    for start, length in drawn:
        lost.add(start, start + length)
    assert lost.seconds == len({second for start, length in drawn for second in range(start, start + length)})


@tool(effect="pure", timeout=10)
async def in_task(context: ToolContext) -> str:
    """Report progress, then wait for ever."""
    context.report_progress("half")
    await asyncio.Event().wait()
    return "fine"


@pytest.mark.parametrize("kind", ["async", "sync"])
@pytest.mark.virtual_time
async def test_handlers_of_both_kinds_time_out_at_the_same_moment(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A listener that blocks the loop for 40 seconds postpones a timeout of 10 seconds to 50 seconds."""
    monkeypatch.setattr(virtual_time, "_THREAD_GRACE", 0.0)
    over = threading.Event()

    @tool(effect="pure", timeout=10)
    def in_thread(context: ToolContext) -> str:
        """Wait until the test is over."""
        over.wait(PATIENCE)
        return "fine"

    loop = virtual_loop()
    dispatcher = Dispatcher(clock=VirtualClock(loop))
    rig = Rig([in_task, in_thread], session=Session(dispatcher=dispatcher))
    dispatcher.subscribe(_Tick, lambda event: loop.advance(40))
    loop.call_later(3, lambda: dispatcher.publish(_Tick()))
    result = await rig.call("in_task" if kind == "async" else "in_thread")
    over.set()
    assert not result.success
    assert loop.time() == 50
    (ended,) = rig.of(ToolInvoked)
    assert (ended.status, ended.seconds) == ("timed out", 10)


class _Tick: ...


@pytest.mark.virtual_time
async def test_an_outer_call_waits_for_listeners_on_a_thread_of_an_inner_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The timeout of an async handler is postponed by a listener on the thread of a sync handler that it calls."""
    entered, leave = threading.Event(), threading.Event()

    @tool(effect="pure")
    def inner(context: ToolContext) -> str:
        """Report progress."""
        context.report_progress("half")
        return "fine"

    @tool(effect="pure", timeout=10)
    async def outer(context: ToolContext) -> str:
        """Call the other tool."""
        return str((await context.call("inner")).value)

    def wait(event: Progress) -> None:
        entered.set()
        leave.wait(PATIENCE)

    loop = virtual_loop()
    dispatcher = Dispatcher(clock=VirtualClock(loop))
    rig = Rig([outer, inner], session=Session(dispatcher=dispatcher))
    dispatcher.subscribe(Progress, wait)
    call = asyncio.ensure_future(rig.call("outer"))
    await asyncio.to_thread(entered.wait, PATIENCE)
    loop.advance(40)
    with monkeypatch.context() as impatient:
        impatient.setattr(virtual_time, "_THREAD_GRACE", 0.0)
        await asyncio.sleep(0.001)
    assert not call.done()
    leave.set()
    assert (await call).success


@pytest.mark.virtual_time
async def test_a_paused_deadline_that_is_nearly_over_does_not_spin() -> None:
    """A deadline that is paused for ten seconds just before its end is checked fewer than 1,000 times."""
    loop, looks = virtual_loop(), 0
    clock = VirtualClock(loop)
    deadline = Deadline.after(10 + 1e-4, clock=clock, pauses_for_people=True)
    scope, remaining = open_scope(), Deadline.remaining

    def counted(self: Deadline) -> float:
        nonlocal looks
        looks += 1
        return remaining(self)

    loop.call_at(10, deadline.pause)
    loop.call_at(20, deadline.resume)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Deadline, "remaining", counted)
        scope.start_deadline(deadline)
        with pytest.raises(asyncio.CancelledError) as caught:
            await asyncio.sleep(60)
    assert isinstance(scope.explain(caught.value, "waiting"), DeadlineExceededError)
    assert 20 <= loop.time() <= 20.1
    assert looks < 1000


def test_a_timer_that_was_held_goes_on_when_the_loop_is_closed() -> None:
    """A listener that returns after its loop was closed raises nothing."""
    clocks: list[tuple[WorkClock, float]] = []
    loops: list[Any] = []

    async def main() -> None:
        loop = virtual_loop()
        loops.append(loop)  # timers have only a weak reference to their loop
        clock = WorkClock(timers_of(loop))
        clocks.append((clock, clock.enter()))
        fired: Callable[[], object] = lambda: None  # noqa: E731  # it is only ever passed on
        timers_of(loop).start(1, fired, clock)

    run_virtual(main)
    for clock, before in clocks:
        clock.leave(before)
