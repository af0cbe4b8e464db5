"""Virtual time: a sleep takes no real time, timers keep their order, and threads get time to finish."""

import asyncio
import threading
from datetime import UTC, datetime, timedelta

import anyio
import pytest

from handrail import Deadline
from handrail.concurrency.operation import Home, Operation
from handrail.concurrency.threads import run_in_thread
from handrail.errors import DeadlineExceededError
from handrail.testing import VirtualClock, VirtualTimeLoop, run_virtual

DAY = 86_400.0


def test_three_days_pass_in_no_time():
    """A sleep of three days moves the loop's clock forward by three days."""

    async def main() -> float:
        loop = asyncio.get_running_loop()
        before = loop.time()
        await asyncio.sleep(3 * DAY)
        return loop.time() - before

    assert run_virtual(main) == pytest.approx(3 * DAY)


def test_thirty_years_pass_as_well():
    """After a sleep of decades, the loop neither spins nor loses a timer, however short the next sleep is."""

    async def main() -> float:
        await asyncio.sleep(1e9)
        await asyncio.sleep(0.001)
        await asyncio.sleep(1e-7)
        return asyncio.get_running_loop().time()

    assert run_virtual(main) == pytest.approx(1e9)


def test_time_stands_still_while_something_runs():
    """Running code takes no virtual time, however long it runs."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        for _ in range(1000):
            await asyncio.sleep(0)
        sum(range(100_000))
        assert loop.time() == 0.0

    run_virtual(main)


def test_timers_fire_in_their_order():
    """Timers fire when they are due. Those that are due at the same time fire in the order in which they were set."""
    order: list[tuple[str, float]] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()

        async def after(name: str, seconds: float) -> None:
            await asyncio.sleep(seconds)
            order.append((name, loop.time()))

        await asyncio.gather(
            after("day", DAY),
            after("second", 1),
            after("hour", 3600),
            after("another second", 1),
            after("now", 0),
        )

    run_virtual(main)
    assert [name for name, _ in order] == ["now", "second", "another second", "hour", "day"]
    assert [at for _, at in order] == [0, 1, 1, 3600, DAY]


def test_timeouts_follow_the_virtual_clock():
    """`wait_for`, `asyncio.timeout` and anyio's scopes follow virtual time."""

    async def main() -> list[float]:
        loop = asyncio.get_running_loop()
        seen: list[float] = []
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.sleep(2 * DAY), DAY)
        seen.append(loop.time())
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(60):
                await asyncio.Event().wait()
        seen.append(loop.time())
        with anyio.move_on_after(5) as scope:
            await anyio.sleep(10)
        assert scope.cancelled_caught
        seen.append(loop.time())
        assert await asyncio.wait_for(asyncio.sleep(1, "in time"), DAY) == "in time"
        seen.append(loop.time())
        return seen

    assert run_virtual(main) == [DAY, DAY + 60, DAY + 65, DAY + 66]


def test_it_gives_the_same_every_time():
    """Two runs of the same tasks have the same events in the same order."""

    async def main() -> list[str]:
        story: list[str] = []

        async def runner(name: str, step: float) -> None:
            for _ in range(20):
                await asyncio.sleep(step)
                story.append(name)

        await asyncio.gather(runner("a", 0.7), runner("b", 1.1), runner("c", 0.35))
        return story

    assert run_virtual(main) == run_virtual(main)


def test_a_thread_gets_a_moment_before_time_jumps():
    """A busy thread gets a moment to finish before time jumps, so a timeout does not fire just before the thread returns."""

    async def main() -> float:
        for number in range(50):
            value = await asyncio.wait_for(run_in_thread(lambda number=number: number), timeout=60)
            assert value == number
        return asyncio.get_running_loop().time()

    assert run_virtual(main) == 0.0


def test_a_thread_that_hangs_does_not_stop_time(monkeypatch: pytest.MonkeyPatch):
    """A thread that hangs delays virtual time only briefly, so that the timeout of a stuck handler can be tested."""
    monkeypatch.setattr("handrail.testing.virtual_time._THREAD_GRACE", 0.01)
    release = threading.Event()

    async def main() -> float:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(run_in_thread(lambda: release.wait()), timeout=3600)
        return asyncio.get_running_loop().time()

    assert run_virtual(main) == 3600
    assert not release.is_set()
    release.set()


def test_a_thread_waits_in_virtual_time():
    """A thread that waits for an operation which takes hours of virtual time gets its result at once."""

    async def main() -> tuple[str, float]:
        loop = asyncio.get_running_loop()
        operation = Operation(lambda: asyncio.sleep(3600, "slept"), "sleep", Home(loop, "call"))
        return await run_in_thread(operation.wait), loop.time()

    assert run_virtual(main) == ("slept", 3600)


def test_without_timers_it_waits_for_threads_in_real_time():
    """Without timers, the loop waits in real time until a thread wakes it."""

    async def main() -> str:
        woken = asyncio.Event()
        loop = asyncio.get_running_loop()
        thread = threading.Thread(target=lambda: loop.call_soon_threadsafe(woken.set))
        thread.start()
        await woken.wait()
        thread.join()
        return "woken"

    assert run_virtual(main) == "woken"


def test_time_can_be_moved_by_hand():
    """`advance` moves the time forward and fires the timers that are due."""

    async def main() -> list[float]:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualTimeLoop)
        fired: list[float] = []
        loop.call_later(10, lambda: fired.append(loop.time()))
        loop.advance(25)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        return fired

    assert run_virtual(main) == [25]


def test_the_virtual_clock_reads_the_loops_time():
    """The virtual clock starts in 2030, and both its wall time and its monotonic time follow the loop."""

    async def main() -> None:
        clock = VirtualClock()
        assert clock.now() == datetime(2030, 1, 1, tzinfo=UTC)
        before = clock.monotonic()
        await asyncio.sleep(DAY)
        assert clock.now() == datetime(2030, 1, 2, tzinfo=UTC)
        assert clock.monotonic() - before == DAY

    run_virtual(main)


def test_a_clock_can_be_made_for_a_loop_that_does_not_run_yet():
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        clock = VirtualClock(runner.get_loop())
        runner.run(asyncio.sleep(30))
        assert clock.monotonic() == 30


def test_a_deadline_on_the_virtual_clock():
    """A deadline of days passes at once in virtual time, and pauses while a person takes a week."""

    async def main() -> None:
        clock = VirtualClock()
        deadline = Deadline.after(2 * DAY, clock=clock, pauses_for_people=True)
        await asyncio.sleep(DAY)
        assert deadline.remaining() == DAY
        deadline.pause()
        await asyncio.sleep(7 * DAY)
        deadline.resume()
        assert deadline.remaining() == DAY
        assert deadline.at == datetime(2030, 1, 1, tzinfo=UTC) + timedelta(days=9)
        await asyncio.sleep(DAY)
        with pytest.raises(DeadlineExceededError, match="2030-01-10T00:00:00"):
            deadline.check("the end")

    run_virtual(main)


def test_what_the_function_raises_comes_out():
    """`run_virtual` raises the exception that the function raises, and closes the loop."""
    loops: list[asyncio.AbstractEventLoop] = []

    async def main() -> None:
        loops.append(asyncio.get_running_loop())
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        run_virtual(main)
    assert loops[0].is_closed()
