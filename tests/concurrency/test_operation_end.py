"""When a call ends, its operations end with `ContextExpired`, wherever they run."""

import asyncio
import threading
from typing import Any

import pytest

from handrail import Operation, gather
from handrail.concurrency.operation import Home
from handrail.concurrency.threads import run_in_thread
from handrail.errors import ContextExpired
from support import PATIENCE
from support.operations import Stuck, failing, nothing_is_logged, use, value_of

__all__ = ["nothing_is_logged"]

pytestmark = pytest.mark.usefixtures("nothing_is_logged")


async def test_closing_ends_operations_in_tasks_the_handler_spawned():
    """When a call ends, its operation in a stray task ends with `ContextExpired` after its cleanup, and the task continues."""
    home = Home(asyncio.get_running_loop(), "call-7")
    stuck = Stuck(home, cleanup=3)
    went_on: list[object] = []

    async def stray() -> None:
        with pytest.raises(ContextExpired, match="'call-7' has ended") as caught:
            await stuck.operation
        assert caught.value.call == "call-7"
        await asyncio.sleep(0)
        task = asyncio.current_task()
        assert task is not None
        went_on.append(task.cancelling())

    task = asyncio.create_task(stray())
    await stuck.has_begun()
    home.close()
    await task
    assert went_on == [0]
    assert stuck.log == ["began", "cancelled", "cleaned up"]


async def test_closing_ends_operations_started_as_tasks_themselves():
    """Closing a call ends an operation that was started as a task, directly or in a task group."""
    home = Home(asyncio.get_running_loop(), "call")
    one, two = Stuck(home), Stuck(home)
    task = asyncio.create_task(one.operation)

    async def group() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(two.operation)

    grouped = asyncio.create_task(group())
    await one.has_begun()
    await two.has_begun()
    home.close()
    with pytest.raises(ContextExpired):
        await task
    with pytest.raises(ExceptionGroup) as caught:
        await grouped
    assert [type(error) for error in caught.value.exceptions] == [ContextExpired]


async def test_closing_ends_operations_that_threads_wait_for():
    """When a call is closed, each thread that waits for one of its operations gets `ContextExpired`."""
    home = Home(asyncio.get_running_loop(), "call")
    several = [Stuck(home, cleanup=1) for _ in range(5)]

    def handler(stuck: Stuck) -> str:
        try:
            stuck.operation.wait()
        except ContextExpired:
            return "expired"
        return "not reached"

    waiting = [asyncio.ensure_future(run_in_thread(lambda each=each: handler(each))) for each in several]
    for each in several:
        await each.has_begun()
    home.close()
    assert await asyncio.gather(*waiting) == ["expired"] * 5
    assert [each.log for each in several] == [["began", "cancelled", "cleaned up"]] * 5


async def test_closing_ends_a_gather_once_with_all_its_members():
    """Closing a call cancels each member of a gather once, and does not interrupt a cleanup that awaits."""
    home = Home(asyncio.get_running_loop(), "call")
    inner = [Stuck(home, cleanup=5) for _ in range(16)]  # many members, because they may end in any order
    log: list[str] = []

    async def around(stuck: Stuck) -> None:
        try:
            await stuck.operation
        finally:
            for _ in range(5):
                await asyncio.sleep(0)
            log.append("outer cleaned up")

    members = [Operation(lambda each=each: around(each), "around", home) for each in inner]
    task = asyncio.create_task(gather(*members))
    for each in inner:
        await each.has_begun()
    home.close()
    with pytest.raises(ContextExpired):
        await task
    assert [each.log for each in inner] == [["began", "cancelled", "cleaned up"]] * 16
    assert log == ["outer cleaned up"] * 16


@pytest.mark.parametrize("first", ["close", "cancel"])
async def test_an_outer_cancellation_at_the_same_time_still_cancels(first: str):
    """A task that is cancelled at the moment when its call ends raises `CancelledError`, not `ContextExpired`."""
    home = Home(asyncio.get_running_loop(), "call")
    stuck = Stuck(home)
    log: list[str] = []

    async def stray() -> None:
        try:
            await stuck.operation
        except ContextExpired:
            log.append("went on")

    task = asyncio.create_task(stray())
    await stuck.has_begun()
    if first == "close":
        home.close()
        task.cancel()
    else:
        task.cancel()
        home.close()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (log, task.cancelled()) == ([], True)


async def test_an_earlier_cancellation_does_not_confuse_the_end_of_the_call():
    """A cancelled task that awaits an operation in its cleanup gets `ContextExpired` when the call ends."""
    home = Home(asyncio.get_running_loop(), "call")
    stuck = Stuck(home)
    log: list[str] = []

    async def stray() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            try:
                await stuck.operation
            except ContextExpired:
                log.append("expired")

    task = asyncio.create_task(stray())
    await asyncio.sleep(0)
    task.cancel()
    await stuck.has_begun()
    home.close()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert log == ["expired"]


@pytest.mark.parametrize("how", ["returns", "raises"])
async def test_work_that_takes_no_notice_leaves_its_task_uncancelled(how: str):
    """If work catches the cancellation at the end of its call, the task that awaits it has no pending cancellation."""
    home = Home(asyncio.get_running_loop(), "call")
    began = asyncio.Event()
    seen: list[object] = []

    async def stubborn() -> str:
        began.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            if how == "raises":
                raise KeyError("broken cleanup") from None
        return "a value nobody may use"

    async def stray() -> None:
        try:
            await Operation(stubborn, "stubborn", home)
        except (ContextExpired, KeyError) as error:
            seen.append(type(error))
        task = asyncio.current_task()
        assert task is not None
        seen.append(task.cancelling())

    task = asyncio.create_task(stray())
    await began.wait()
    home.close()
    await task
    assert seen == [KeyError if how == "raises" else ContextExpired, 0]


async def test_operations_inside_operations_end_together():
    """An operation that awaits another one of the same call ends together with it, and the task continues."""
    home = Home(asyncio.get_running_loop(), "call")
    stuck = Stuck(home)
    log: list[str] = []

    async def outer() -> None:
        try:
            await stuck.operation
        finally:
            log.append("outer ended")

    async def stray() -> int:
        with pytest.raises(ContextExpired):
            await Operation(outer, "outer", home)
        task = asyncio.current_task()
        assert task is not None
        return task.cancelling()

    task = asyncio.create_task(stray())
    await stuck.has_begun()
    home.close()
    assert await task == 0
    assert log == ["outer ended"]


async def test_closing_an_inner_call_leaves_the_outer_one_alone():
    """Closing a nested call does not end an operation of the outer call."""
    loop = asyncio.get_running_loop()
    outer, inner = Home(loop, "outer"), Home(loop, "inner")
    stuck = Stuck(inner)

    async def work() -> str:
        with pytest.raises(ContextExpired, match="'inner'"):
            await stuck.operation
        await asyncio.sleep(0)
        return "went on"

    task = asyncio.create_task(Operation(work, "outer work", outer))
    await stuck.has_begun()
    inner.close()
    assert await task == "went on"


async def test_closing_does_not_cancel_the_closing_task():
    """Closing a call does not cancel the task that closes it, even inside an operation."""
    home = Home(asyncio.get_running_loop(), "call")

    async def work() -> str:
        home.close()
        await asyncio.sleep(0)
        return "finished"

    assert await Operation(work, "closes", home) == "finished"


@pytest.mark.parametrize("way", ["await", "wait", "task", "gather", "gather before"])
async def test_one_made_before_the_end_and_used_after_is_refused(way: str):
    """An operation that was created during a call is refused after the call, and does nothing."""
    happened: list[int] = []

    async def work() -> None:
        happened.append(1)

    home = Home(asyncio.get_running_loop(), "call")
    operation: Operation[Any] = Operation(work, "late", home)
    if way == "gather before":
        operation = gather(operation)
    home.close()
    with pytest.raises(ContextExpired):
        await use(operation, way)
    assert happened == []


async def test_one_handed_to_the_loop_before_the_end_is_refused_when_it_begins(
    monkeypatch: pytest.MonkeyPatch,
):
    """A thread's wait that begins before the call ends, but reaches the loop afterwards, is refused."""
    loop = asyncio.get_running_loop()
    home = Home(loop, "call")
    hand_over, handed_over = loop.call_soon_threadsafe, threading.Event()

    def watched(*arguments: Any, **options: Any) -> object:
        handle = hand_over(*arguments, **options)
        handed_over.set()
        return handle

    monkeypatch.setattr(loop, "call_soon_threadsafe", watched)
    waiting = asyncio.create_task(asyncio.to_thread(value_of(1, home).wait))
    await asyncio.sleep(0)
    assert handed_over.wait(PATIENCE)  # the loop is blocked, so the work has not begun
    home.close()
    with pytest.raises(ContextExpired):
        await waiting


async def test_a_finished_operation_is_not_ended_again():
    """Closing a call does not affect a task whose operation has already ended."""
    home = Home(asyncio.get_running_loop(), "call")
    assert await value_of(1, home) == 1
    with pytest.raises(KeyError):
        await failing(KeyError(), home)
    other = asyncio.create_task(asyncio.sleep(0, "undisturbed"))
    home.close()
    assert await other == "undisturbed"
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0
