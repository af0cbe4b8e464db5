"""`gather`, which runs several operations concurrently."""

import asyncio
import gc
import warnings

import pytest

from handrail import Operation, gather
from handrail.concurrency.operation import DONE, Home
from handrail.concurrency.threads import run_in_thread
from handrail.errors import (
    OperationNeverAwaited,
    OperationUsedTwice,
)
from support.operations import Stuck, nothing_is_logged, run, value_of

__all__ = ["nothing_is_logged"]

pytestmark = pytest.mark.usefixtures("nothing_is_logged")


async def test_gather_gives_values_in_the_order_given():
    """`gather` returns the values in the order of its arguments, whichever operation ends first."""
    gate = asyncio.Event()

    async def last() -> str:
        await gate.wait()
        return "last"

    async def first() -> str:
        gate.set()
        return "first"

    assert await gather(Operation(last, "last"), Operation(first, "first")) == ("last", "first")


async def test_gather_runs_its_members_at_once():
    """The members of a gather run concurrently: three that wait for each other all end."""
    there: list[int] = []
    all_there = asyncio.Event()

    async def member(number: int) -> int:
        there.append(number)
        if len(there) == 3:
            all_there.set()
        await all_there.wait()
        return number

    operations = [Operation(lambda number=number: member(number), "member") for number in range(3)]
    assert await gather(*operations) == (0, 1, 2)


async def test_when_one_fails_the_others_are_cancelled_and_awaited():
    """When a member fails, its error is raised once all other members have been cancelled and have ended."""
    others = [Stuck(cleanup=3), Stuck(cleanup=7)]

    async def fails() -> None:
        for other in others:
            await other.has_begun()
        raise KeyError("first")

    with pytest.raises(KeyError, match="first"):
        await gather(others[0].operation, Operation(fails, "fails"), others[1].operation)
    assert [other.log for other in others] == [["began", "cancelled", "cleaned up"]] * 2


async def test_the_first_of_several_failures_is_raised():
    """Errors that other members raise while they clean up do not replace the first error, and are not logged."""
    began = asyncio.Event()

    async def fails_late() -> None:
        began.set()
        try:
            await asyncio.Event().wait()
        finally:
            raise ValueError("late")

    async def fails_first() -> None:
        await began.wait()
        raise KeyError("first")

    with pytest.raises(KeyError, match="first"):
        await gather(Operation(fails_late, "late"), Operation(fails_first, "first"))


async def test_gather_cancelled_from_outside_ends_its_members_first():
    """Cancelling a gather cancels every member, and `CancelledError` is raised once all of them have ended."""
    members = [Stuck(cleanup=2), Stuck(cleanup=5)]
    task = asyncio.create_task(gather(*(member.operation for member in members)))
    for member in members:
        await member.has_begun()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert [member.log for member in members] == [["began", "cancelled", "cleaned up"]] * 2


async def test_a_second_cancellation_does_not_leave_members_running():
    """A gather that is cancelled again while its members clean up still waits for them."""
    member = Stuck(cleanup=6)
    task = asyncio.create_task(gather(member.operation))
    await member.has_begun()
    task.cancel()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert member.log == ["began", "cancelled"]
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert member.log == ["began", "cancelled", "cleaned up"]


async def test_a_member_that_raises_cancelled_itself_fails_the_gather():
    """If a member raises `CancelledError` itself, the gather fails after the other members have ended."""
    other = Stuck(cleanup=2)

    async def strange() -> None:
        await other.has_begun()
        raise asyncio.CancelledError("by itself")

    with pytest.raises(asyncio.CancelledError):
        await gather(other.operation, Operation(strange, "strange"))
    assert other.log == ["began", "cancelled", "cleaned up"]
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0


def test_gather_of_nothing_is_empty():
    """A gather without members returns an empty tuple at once."""

    async def main() -> None:
        assert await gather() == ()

    run(main)
    assert gather().wait() == ()


def test_gather_takes_anything_that_can_be_awaited():
    """A gather may mix coroutines, futures, tasks and `Done` with operations."""

    async def native() -> str:
        return "native"

    async def main() -> None:
        future: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        future.set_result("future")
        task = asyncio.create_task(native())
        values = await gather(native(), future, task, value_of("operation"), DONE)
        assert values == ("native", "future", "native", "operation", None)

    run(main)
    assert gather(native(), native()).wait() == ("native", "native")


async def test_gather_can_be_waited_for_from_a_thread():
    """When a thread waits for a gather, every member runs on the call's event loop."""
    loop = asyncio.get_running_loop()
    home = Home(loop, "call")

    async def where() -> object:
        return asyncio.get_running_loop()

    together = gather(Operation(where, "a", home), Operation(where, "b"))
    assert await run_in_thread(together.wait) == (loop, loop)


async def test_gathers_nest():
    """A gather can be a member of another gather, and ends only after its own members have."""
    inner = [Stuck(cleanup=2), Stuck(cleanup=2)]

    async def fails() -> None:
        for each in inner:
            await each.has_begun()
        raise KeyError("outside")

    assert await gather(gather(value_of(1), value_of(2)), value_of(3)) == ((1, 2), 3)
    with pytest.raises(KeyError):
        await gather(gather(*(each.operation for each in inner)), Operation(fails, "fails"))
    assert [each.log for each in inner] == [["began", "cancelled", "cleaned up"]] * 2


async def test_members_belong_to_their_gather():
    """A member of a gather can't be used outside it, or twice in it."""
    member = value_of(1)
    together = gather(member)
    with pytest.raises(OperationUsedTwice):
        await member
    assert await together == (1,)
    twice = value_of(2)
    with pytest.raises(OperationUsedTwice):
        gather(twice, twice)


def test_a_gather_never_awaited_warns_once_for_all():
    """An unused gather warns once and names its members, which do not warn themselves."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        gather(value_of(1), value_of(2))
        gc.collect()
    (warning,) = seen
    assert warning.category is OperationNeverAwaited
    assert "gather(value, value)" in str(warning.message)
