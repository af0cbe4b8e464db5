"""Listeners that block are named in a warning, and no call is charged for the time they take."""

from __future__ import annotations

import asyncio
import functools
import logging
import threading
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from handrail import ToolContext, tool
from handrail.events import Emitted, Fact, Progress, ToolInvoked, ToolStarted
from handrail.run.call import ToolCall, run_turn
from handrail.session import Session
from handrail.session.bus import ALLOWANCE, MOST, SLOW, Dispatcher, OwnThread
from handrail.testing import VirtualClock, VirtualTimeLoop, virtual_time
from support import PATIENCE
from support.rig import Note, Rig

pytestmark = pytest.mark.virtual_time


def new_rig(tools: list[Any], **options: Any) -> Rig:
    """Return a rig whose listeners are measured in virtual time, as its calls are."""
    clock = VirtualClock(asyncio.get_running_loop())
    return Rig(tools, session=Session(dispatcher=Dispatcher(clock=clock)), **options)


def block(seconds: float) -> None:
    """Let time pass while nothing else on the loop can run."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualTimeLoop)
    loop.advance(seconds)


def slow(event: object) -> None:
    block(2.5)


def quick(event: object) -> None: ...


class Slow:
    def __call__(self, event: object) -> None:
        block(2.5)

    def method(self, event: object) -> None:
        block(2.5)


@tool(effect="staged", timeout=10)
async def work(seconds: float, context: ToolContext) -> str:
    """Report progress, dispatch an event, sleep for this long and emit an event."""
    context.report_progress("half")
    context.session.dispatch(Note("changed"))
    await asyncio.sleep(seconds)
    context.emit(Note("told"))
    return "fine"


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.getMessage() for each in caplog.records if each.levelno == logging.WARNING]


@pytest.mark.parametrize(
    ("listener", "name"),
    [
        (slow, "test_blocking_listeners.slow"),
        (Slow(), "test_blocking_listeners.Slow"),
        (Slow().method, "test_blocking_listeners.Slow.method"),
        (functools.partial(lambda _, event: block(2.5), 1), "<lambda>"),
    ],
)
async def test_a_listener_that_blocks_is_named_once(
    listener: Callable[[Any], None], name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A warning names the listener, the event type and the duration, once for each listener and event type."""
    rig = new_rig([work])
    for each in (quick, listener, quick):
        rig.session.dispatcher.subscribe(ToolStarted, each)
        rig.session.dispatcher.subscribe(Progress, each)
    for _ in range(3):
        assert (await rig.call("work", seconds=1)).success
    said = warnings_in(caplog)
    assert len(said) == 2
    for text, kind in zip(said, ("ToolStarted", "Progress"), strict=True):
        assert name in text
        assert "2.50 s" in text
        assert kind in text


async def test_a_listener_to_a_tools_own_event_is_named_too(caplog: pytest.LogCaptureFixture) -> None:

    rig = new_rig([work])
    rig.session.dispatcher.subscribe(Note, slow)
    assert (await rig.call("work", seconds=1)).success
    assert [
        "test_blocking_listeners.slow took 2.50 s for the event Note" in each for each in warnings_in(caplog)
    ] == [True]


@given(
    heard=st.lists(
        st.tuples(
            st.sampled_from([ToolStarted, Progress, Emitted, Note, Fact, ToolInvoked]),
            st.sampled_from([0.0, SLOW / 2, 2.5, 40.0]),
        ),
        max_size=4,
    ),
    durations=st.lists(st.sampled_from([0.0, 3.0, 9.0, 11.0]), min_size=1, max_size=3),
)
@example(heard=[(Progress, 40.0)], durations=[11.0])
async def test_no_call_is_charged_for_blocking_listeners(
    heard: list[tuple[type, float]], durations: list[float]
) -> None:
    """However long listeners block, no more calls time out than without them. A call is charged at most for its own time and short blocks."""
    rig = new_rig([work])
    for kind, seconds in heard:
        rig.session.dispatcher.subscribe(kind, lambda event, seconds=seconds: block(seconds))
    await run_turn(rig.gate, [ToolCall("work", {"seconds": each}) for each in durations])
    short = len(heard) * SLOW * 10 * len(durations)  # blocks of up to SLOW seconds are charged
    ends = rig.of(ToolInvoked)
    late = sum(each.status == "timed out" for each in ends)
    assert all(each.status in ("ok", "timed out") for each in ends)
    # A listener that blocks while another call sleeps shortens the time that the sleeping call is charged for.
    may_be_shortened = len(durations) > 1 and bool(heard)
    most = sum(each > 10 for each in durations)
    assert late <= most if may_be_shortened else late == most
    for ended, expected in zip(
        sorted(each.seconds for each in ends), sorted(min(each, 10) for each in durations), strict=True
    ):
        assert 0 <= ended <= expected + short


async def test_another_sessions_listener_is_not_charged() -> None:
    """If a listener blocks the event loop, no session's calls time out because of it."""
    mine, other = new_rig([work]), new_rig([work])
    other.session.dispatcher.subscribe(ToolInvoked, lambda event: block(60))
    results = await asyncio.gather(mine.call("work", seconds=9), other.call("work", seconds=1))
    assert [each.success for each in results] == [True, True]
    (ended,) = mine.of(ToolInvoked)
    assert 1 <= ended.seconds <= 9  # its sleep may have ended while the loop was blocked


async def test_a_nested_listener_is_counted_once() -> None:
    """If one listener runs inside another, the time that the inner one blocks is subtracted from the call's time once."""
    rig = new_rig([work])
    bus = rig.session.dispatcher

    def outer(event: Progress) -> None:
        block(2)
        bus.publish(Note("inner"))
        block(2)

    bus.subscribe(Progress, outer)
    bus.subscribe(Note, lambda event: block(4) if event.text == "inner" else None)
    result = await rig.call("work", seconds=20)
    assert not result.success
    (ended,) = rig.of(ToolInvoked)
    assert (ended.status, ended.seconds) == ("timed out", 10)
    assert asyncio.get_running_loop().time() == 18


async def test_a_listener_on_a_handlers_thread_is_not_charged(monkeypatch: pytest.MonkeyPatch) -> None:
    """A listener that a synchronous handler triggers runs on the handler's thread and postpones the timeout."""
    entered, leave = threading.Event(), threading.Event()

    @tool(effect="pure", timeout=10)
    def in_thread(context: ToolContext) -> str:
        """Report progress."""
        context.report_progress("half")
        return "fine"

    def wait(event: Progress) -> None:
        entered.set()
        leave.wait(PATIENCE)

    rig = new_rig([in_thread])
    rig.session.dispatcher.subscribe(Progress, wait)
    loop: Any = asyncio.get_running_loop()
    call = asyncio.ensure_future(rig.call("in_thread"))
    await asyncio.sleep(0)
    assert entered.wait(PATIENCE)
    loop.advance(40)  # four times the timeout
    with monkeypatch.context() as impatient:
        impatient.setattr(virtual_time, "_THREAD_GRACE", 0.0)
        await asyncio.sleep(0.001)
    assert not call.done()
    leave.set()
    assert (await call).success
    (ended,) = rig.of(ToolInvoked)
    assert ended.seconds < 10


async def test_a_listener_that_never_returns_does_not_hold_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """A listener that hangs on a handler's thread postpones the timeout by about a minute, and not longer."""
    leave = threading.Event()

    @tool(effect="pure", timeout=10)
    def in_thread(context: ToolContext) -> str:
        """Report progress."""
        context.report_progress("half")
        return "fine"

    loop = asyncio.get_running_loop()

    def hang(event: Progress) -> None:
        monkeypatch.setattr(virtual_time, "_THREAD_GRACE", 0.0)
        loop.call_soon_threadsafe(lambda: None)  # ends the wait for this thread
        leave.wait(PATIENCE)

    rig = new_rig([in_thread])
    rig.session.dispatcher.subscribe(Progress, hang)
    result = await rig.call("in_thread")
    assert not result.success
    assert 60 <= loop.time() <= 71
    leave.set()


async def test_a_clock_of_ones_own_is_left_alone() -> None:
    """If the dispatcher has a different clock from the run, the time that listeners take is not subtracted from a call's time."""
    now = 1e6

    class Own(VirtualClock):
        def monotonic(self) -> float:
            nonlocal now
            now += 5
            return now

    loop = asyncio.get_running_loop()
    rig = Rig([work], session=Session(dispatcher=Dispatcher(clock=Own(loop))))
    rig.session.dispatcher.subscribe(ToolStarted, quick)
    await rig.call("work", seconds=7)
    (ended,) = rig.of(ToolInvoked)
    assert ended.seconds == 7


async def test_a_listener_holds_other_runs_up_for_a_bounded_time_only(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A listener that blocks for each event is moved to its own thread, which is said once, and gets every event in order."""
    heard, threads, over = list[str](), set[int](), threading.Event()

    loop: Any = asyncio.get_running_loop()
    bus = Dispatcher(clock=VirtualClock(loop))

    def blocks(event: Note) -> None:
        heard.append(event.text)
        threads.add(threading.get_ident())
        if threading.current_thread() is threading.main_thread():
            block(4)
        if event.text == "49":
            over.set()

    bus.subscribe(Note, blocks)
    quick_ones: list[Any] = []
    bus.subscribe(Note, quick_ones.append)
    for number in range(50):
        bus.publish(Note(str(number)))
    assert loop.time() <= ALLOWANCE + 4
    assert len(quick_ones) == 50
    assert over.wait(PATIENCE)
    assert heard == [str(number) for number in range(50)]
    assert len(threads) > 1
    said = [each.getMessage() for each in caplog.records if each.levelno == logging.ERROR]
    assert len(said) == 1
    assert "blocks has blocked the event loop" in said[0]


async def test_a_listener_that_blocks_rarely_stays_on_the_loop() -> None:
    """What a listener has used of its allowance is restored over time, so one that blocks now and then is not moved."""
    threads = set[int]()

    loop: Any = asyncio.get_running_loop()
    bus = Dispatcher(clock=VirtualClock(loop))

    def blocks(event: Note) -> None:
        threads.add(threading.get_ident())
        block(1)

    bus.subscribe(Note, blocks)
    for _ in range(100):
        bus.publish(Note("now and then"))
        loop.advance(20)
    assert threads == {threading.get_ident()}


def test_a_listener_that_is_stuck_on_its_own_thread_holds_nobody_up(caplog: pytest.LogCaptureFixture) -> None:
    """On its own thread, a listener may block for ever. Its events wait up to a limit, and are dropped when it unsubscribes."""
    entered, leave = threading.Event(), threading.Event()
    heard: list[int] = []

    def hang(event: int) -> None:
        heard.append(event)
        entered.set()
        leave.wait(PATIENCE)

    own = OwnThread(hang, "hang")
    for number in range(MOST + 10):
        own(number)
        assert entered.wait(PATIENCE)
    assert [each.getMessage() for each in caplog.records] == [
        f"{MOST} events wait for the subscriber hang; newer ones are dropped"
    ]
    own.stop()
    leave.set()
    assert heard == [0]


async def test_a_moved_listener_that_raises_or_unsubscribes_harms_nobody(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """On its own thread, an error is logged and later events still arrive. Nothing arrives after the subscription has ended."""
    heard, moved, over = list[str](), list[bool](), threading.Event()

    loop: Any = asyncio.get_running_loop()
    bus = Dispatcher(clock=VirtualClock(loop))

    def raises(event: Note) -> None:
        heard.append(event.text)
        moved.append(threading.current_thread() is not threading.main_thread())
        if event.text == "first":
            block(ALLOWANCE + 1)
        elif event.text == "second":
            raise GeneratorExit
        else:
            over.set()

    stop = bus.subscribe(Note, raises)
    for text in ("first", "second", "third"):
        bus.publish(Note(text))
    assert over.wait(PATIENCE)
    stop()
    assert not bus.listens_for(Note)
    bus.publish(Note("fourth"))
    assert heard == ["first", "second", "third"]
    assert moved == [False, True, True]
    assert any("a subscriber to Note raised" in each.getMessage() for each in caplog.records)
