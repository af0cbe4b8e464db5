"""`Operation`: work that async code awaits and sync code waits for."""

import asyncio
import contextvars
import gc
import operator
import sys
import threading
import traceback
import warnings
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, cast

import anyio
import pytest

from handrail import Operation, gather
from handrail.concurrency import threads
from handrail.concurrency.operation import DONE, Done, Home
from handrail.concurrency.threads import background_loop, run_in_thread
from handrail.errors import (
    OperationError,
    OperationHasNoTruth,
    OperationNeverAwaited,
    OperationUsedTwice,
    WaitOnLoopThread,
)
from support import PATIENCE
from support.operations import Stuck, failing, finished, run, script, use, value_of

LABEL: contextvars.ContextVar[str] = contextvars.ContextVar("LABEL", default="none")


def test_a_script_waits_for_it(tmp_path: Any):
    """`.wait()` works at the top level of a script, and the script exits without warnings."""
    text = """
        async def work():
            await asyncio.sleep(0)
            return 42

        print(Operation(work, "answer").wait())
        print(gather(Operation(work, "a"), Operation(work, "b")).wait())
    """
    result = finished(script(tmp_path, text, "-X", "dev", "-W", "error"))
    assert (result.stdout, result.stderr, result.returncode) == ("42\n(42, 42)\n", "", 0)


def test_it_can_be_waited_for_where_no_loop_runs():
    """`.wait()` works on a thread without a running loop."""
    assert value_of(3).wait() == 3


async def test_an_async_handler_awaits_it():
    """`await` runs an operation in the awaiting task."""
    inside: list[object] = []

    async def work() -> int:
        inside.append(asyncio.current_task())
        return 5

    operation = Operation(work, "five", Home(asyncio.get_running_loop(), "call"))
    assert await operation == 5
    assert inside == [asyncio.current_task()]


async def test_a_sync_handler_waits_for_it_on_the_calls_own_loop():
    """In a handler's thread, `.wait()` runs the work on the call's event loop."""
    loop = asyncio.get_running_loop()

    async def work() -> object:
        return asyncio.get_running_loop()

    operation = Operation(work, "loop", Home(loop, "call"))
    assert await run_in_thread(operation.wait) is loop


async def test_a_thread_of_the_users_waits_for_it():
    """Any thread can wait for an operation, because the operation knows its event loop."""
    loop = asyncio.get_running_loop()
    got: list[object] = []
    ended = asyncio.Event()

    async def work() -> object:
        return asyncio.get_running_loop()

    operation = Operation(work, "loop", Home(loop, "call"))

    def body() -> None:
        got.append(operation.wait())
        loop.call_soon_threadsafe(ended.set)

    thread = threading.Thread(target=body)
    thread.start()
    await ended.wait()
    thread.join()
    assert got == [loop]


async def test_asyncio_to_thread_waits_for_it():
    """A thread of asyncio's own executor can wait for an operation."""
    operation = value_of("x", Home(asyncio.get_running_loop(), "call"))
    assert await asyncio.to_thread(operation.wait) == "x"


async def test_asyncios_task_group_starts_it():
    """A task group's `create_task` accepts an operation as a coroutine."""
    home = Home(asyncio.get_running_loop(), "call")
    async with asyncio.TaskGroup() as group:
        one = group.create_task(value_of(1, home))
        two = group.create_task(value_of(2))
    assert (one.result(), two.result()) == (1, 2)


def test_its_task_can_be_shown_and_debugged():
    """The repr of an operation's task, which debug mode shows, neither fails nor uses up the operation."""

    async def main() -> None:
        stuck = Stuck()
        task = asyncio.create_task(stuck.operation)
        assert "Operation" in repr(task)
        await stuck.has_begun()
        assert "Operation" in repr(task)
        task.cancel()
        await asyncio.wait([task])
        assert "Operation" in repr(task)
        assert stuck.log == ["began", "cancelled", "cleaned up"]
        assert await asyncio.create_task(value_of(1)) == 1
        never_begun = asyncio.create_task(value_of(1))
        never_begun.cancel()
        await asyncio.wait([never_begun])
        assert "Operation" in repr(never_begun)
        finished = asyncio.create_task(value_of(1))
        await finished
        assert "Operation" in repr(finished)

    asyncio.run(main(), debug=True)


async def test_a_task_can_test_its_coroutine():
    """An operation that has a task is truthy, because asyncio tests the truth of a task's coroutine."""
    truth: Callable[[object], bool] = operator.truth

    stuck = Stuck()
    task = asyncio.create_task(stuck.operation)
    assert truth(stuck.operation)
    await stuck.has_begun()
    assert truth(stuck.operation)
    task.cancel()
    await asyncio.wait([task])
    assert truth(stuck.operation)
    never_begun = value_of(1)
    task = asyncio.create_task(never_begun)
    task.cancel()
    await asyncio.wait([task])
    assert truth(never_begun)
    with pytest.raises(OperationHasNoTruth):
        truth(value_of(1))


async def test_anyios_task_group_starts_it():
    """anyio's `start_soon` accepts an operation, because calling an operation returns the operation itself."""
    seen: list[int] = []

    async def work() -> None:
        seen.append(1)

    async with anyio.create_task_group() as group:
        group.start_soon(Operation(work, "noted"))
        group.start_soon(Operation(work, "noted", Home(asyncio.get_running_loop(), "call")))
    assert seen == [1, 1]


async def test_asyncios_gather_wait_for_and_shield_take_it():
    """asyncio's `gather`, `wait_for` and `shield` accept an operation."""
    assert await asyncio.gather(value_of(1), value_of(2)) == [1, 2]
    assert await asyncio.wait_for(value_of(3), PATIENCE) == 3
    assert await asyncio.shield(value_of(4)) == 4


async def test_a_task_cancelled_before_it_began_leaves_no_warning():
    """Cancelling an operation's task before it starts counts as a use of the operation."""
    stuck = Stuck()
    task = asyncio.create_task(stuck.operation)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert stuck.log == []


async def test_nested_sync_calls_never_starve():
    """Eight chains of sync handlers, each 200 levels deep and waiting for the next level, all end."""
    depth, chains = 200, 8

    home = Home(asyncio.get_running_loop(), "call")

    def level(left: int) -> int:
        if left == 0:
            return 0
        return 1 + Operation(lambda: run_in_thread(lambda: level(left - 1)), "level", home).wait()

    chain = [Operation(lambda: run_in_thread(lambda: level(depth)), "chain", home) for _ in range(chains)]
    assert await gather(*chain) == (depth,) * chains


# --- the background loop of scripts --------------------------------------------------------------


def test_work_begun_by_one_wait_outlives_it():
    """A task that one `.wait()` leaves behind continues during the next, because both run on one background loop."""
    events: list[asyncio.Event] = []
    tasks: list[asyncio.Task[str]] = []

    async def later() -> str:
        events.append(asyncio.Event())
        await events[0].wait()
        return "done later"

    async def begin() -> None:
        tasks.append(asyncio.create_task(later()))
        await asyncio.sleep(0)

    async def finish() -> str:
        events[0].set()
        return await tasks[0]

    Operation(begin, "begin").wait()
    assert not tasks[0].done()
    assert Operation(finish, "finish").wait() == "done later"


def test_scripts_share_one_loop_and_it_is_not_a_callers_thread():
    """Operations that two threads wait for run on the same event loop, which has its own daemon thread."""

    async def where() -> tuple[object, threading.Thread]:
        return asyncio.get_running_loop(), threading.current_thread()

    first = Operation(where, "where").wait()
    others: list[object] = []
    thread = threading.Thread(target=lambda: others.append(Operation(where, "where").wait()))
    thread.start()
    thread.join()
    assert others == [first]
    assert first[0] is background_loop()
    assert first[1] is not threading.current_thread()
    assert first[1].daemon


def test_many_threads_wait_at_once():
    """Fifty threads can wait at the same time, and each gets its own value."""
    got: list[int] = []
    all_there = threading.Barrier(50)

    def body(number: int) -> None:
        all_there.wait(timeout=300)
        got.append(value_of(number).wait())

    crowd = [threading.Thread(target=body, args=(number,)) for number in range(50)]
    for each in crowd:
        each.start()
    for each in crowd:
        each.join()
    assert sorted(got) == list(range(50))


def test_a_program_ends_what_is_left_on_the_background_loop(tmp_path: Any):
    """When a program exits, tasks left on the background loop are cancelled and clean up, without a warning."""
    text = """
        async def later():
            try:
                await asyncio.Event().wait()
            finally:
                await asyncio.sleep(0)
                print("cleaned up", flush=True)

        async def begin():
            task = asyncio.create_task(later())
            await asyncio.sleep(0)
            return task

        kept = Operation(begin, "begin").wait()
    """
    result = finished(script(tmp_path, text, "-X", "dev", "-W", "error"))
    assert (result.stdout, result.stderr, result.returncode) == ("cleaned up\n", "", 0)


# --- refusals ------------------------------------------------------------------------------------


async def test_waiting_on_the_loops_own_thread_is_an_error_with_a_hint():
    """`.wait()` on a thread that runs an event loop raises an error that says what to write instead."""
    operation = value_of(1, Home(asyncio.get_running_loop(), "call"))
    with pytest.raises(WaitOnLoopThread, match=r"write `await` instead.*asyncio\.to_thread") as caught:
        operation.wait()
    assert caught.value.operation == "value"
    with pytest.raises(WaitOnLoopThread):
        value_of(1).wait()


def test_a_callback_on_the_background_loop_may_not_wait_either():
    """`.wait()` in a coroutine on the background loop is refused."""

    async def inner() -> None:
        value_of(1).wait()

    with pytest.raises(WaitOnLoopThread):
        Operation(inner, "inner").wait()


def test_one_never_awaited_warns_once():
    """An operation that is dropped unused warns once. The warning names it and says what to do."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        operation = Operation(value_of(1).give_up(), "request_approval('x')")
        del operation
        gc.collect()
    (warning,) = seen
    assert warning.category is OperationNeverAwaited
    assert issubclass(OperationNeverAwaited, RuntimeWarning)
    assert "request_approval('x') was created but never run: `await` it, or call `.wait()`" in str(
        warning.message
    )


@pytest.mark.parametrize("way", ["await", "wait", "task", "close", "gather", "truth", "wait on loop"])
def test_one_that_was_used_does_not_warn(way: str):
    """Any use of an operation, even one that raises, prevents the warning about an unused operation."""

    async def use(operation: Operation[int]) -> None:
        if way == "await":
            await operation
        elif way == "task":
            await asyncio.create_task(operation)
        elif way == "gather":
            await gather(operation)
        elif way == "truth":
            with pytest.raises(OperationHasNoTruth):
                bool(operation)
        elif way == "wait on loop":
            with pytest.raises(WaitOnLoopThread):
                operation.wait()
        else:
            operation.close()

    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        if way == "wait":
            value_of(1).wait()
        else:
            asyncio.run(use(value_of(1)))
        gc.collect()
    assert [str(each.message) for each in seen] == []


@pytest.mark.parametrize(
    "use",
    [
        lambda operation: bool(operation),
        lambda operation: not operation,
        lambda operation: operation and 1,
        lambda operation: [1 for _ in "x" if operation],
    ],
    ids=["bool", "not", "and", "if"],
)
def test_it_has_no_truth_value(use: Callable[[Operation[Any]], object]):
    """Using an operation as a condition raises an error that asks for `await` or `.wait()`."""
    with pytest.raises(OperationHasNoTruth, match=r"Write `await` before it, or `.wait\(\)` after") as caught:
        use(value_of(True))
    assert isinstance(caught.value, TypeError)
    assert isinstance(caught.value, OperationError)


@pytest.mark.parametrize("first", ["await", "wait", "task", "gather", "failed", "refused"])
@pytest.mark.parametrize("second", ["await", "wait", "task", "gather"])
async def test_it_is_single_use(first: str, second: str):
    """A second use of an operation, of any kind, raises `OperationUsedTwice`."""
    ran: list[int] = []

    async def work() -> None:
        ran.append(1)
        if first == "failed":
            raise KeyError("x")

    operation = Operation(work, "work", Home(asyncio.get_running_loop(), "call"))

    if first == "failed":
        with pytest.raises(KeyError):
            await operation
    elif first == "refused":
        with pytest.raises(WaitOnLoopThread):
            operation.wait()
    else:
        await use(operation, first)
    with pytest.raises(OperationUsedTwice, match="call the verb again for a new one"):
        await use(operation, second)
    assert ran == ([] if first == "refused" else [1])


async def test_two_tasks_can_not_be_made_of_one():
    """Further tasks made from one operation fail, and the first continues undisturbed."""
    stuck = Stuck()
    first = asyncio.create_task(stuck.operation)
    second = asyncio.create_task(stuck.operation)
    third = asyncio.create_task(stuck.operation)
    await stuck.has_begun()
    third.cancel()
    with pytest.raises(OperationUsedTwice):
        await second
    with pytest.raises((OperationUsedTwice, asyncio.CancelledError)):
        await third
    assert (stuck.log, first.done()) == (["began"], False)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    assert stuck.log == ["began", "cancelled", "cleaned up"]


async def test_a_cancelled_second_task_does_not_cancel_the_first():

    stuck = Stuck()
    first = asyncio.create_task(stuck.operation)
    await stuck.has_begun()
    second = asyncio.create_task(stuck.operation)
    second.cancel()
    with pytest.raises(asyncio.CancelledError):
        await second
    assert stuck.log == ["began"]
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first


def test_it_is_cold():
    """Nothing happens before an operation is used: not even its factory is called."""
    happened: list[str] = []

    def factory() -> Coroutine[Any, Any, None]:
        happened.append("factory")
        return work()

    async def work() -> None:
        happened.append("work")

    operation = Operation(factory, "cold")
    both = gather(Operation(factory, "member"))
    assert happened == []
    operation.wait()
    assert happened == ["factory", "work"]
    both.wait()
    assert happened == ["factory", "work"] * 2


def test_its_repr_says_what_it_is():
    """An operation's repr shows its name and whether it has been used."""
    operation = Operation(value_of(1).give_up(), "call('search')")
    assert repr(operation) == "<Operation call('search')>"
    operation.wait()
    assert repr(operation) == "<Operation call('search'), used>"


@pytest.mark.parametrize("thrown", [ValueError("mine"), ValueError], ids=["an error", "a class"])
@pytest.mark.parametrize("begun", [True, False])
def test_throwing_into_it_raises_there(thrown: Any, begun: bool):
    """`throw` raises the error inside the operation's work. If the work has not started, it never runs."""
    seen: list[str] = []

    async def work() -> None:
        try:
            await asyncio.sleep(0)
        except ValueError as error:
            seen.append(str(error))
            raise

    operation = Operation(work, "work")
    if begun:
        operation.send(None)
    with pytest.raises(ValueError, match="mine" if isinstance(thrown, ValueError) else "^$"):
        operation.throw(thrown)
    assert seen == ([str(thrown) if isinstance(thrown, ValueError) else ""] if begun else [])


# --- context variables, errors ---------------------------------------------------------------------


def test_context_variables_travel_onto_the_loop_and_into_the_thread():
    """The work sees its waiter's context variables, even through a thread. Its own changes do not reach the waiter."""

    async def on_loop() -> list[str]:
        home = Home(asyncio.get_running_loop(), "call")
        there = LABEL.get()
        LABEL.set("on the loop")

        def in_thread() -> list[str]:
            here = LABEL.get()
            LABEL.set("in the thread")
            return [here, Operation(read, "read", home).wait()]

        async def read() -> str:
            return LABEL.get()

        return [there, *await run_in_thread(in_thread), LABEL.get()]

    def start() -> list[str]:
        LABEL.set("in the script")
        seen = Operation(on_loop, "on loop").wait()
        return [*seen, LABEL.get()]

    assert contextvars.copy_context().run(start) == [
        "in the script",
        "on the loop",
        "in the thread",
        "on the loop",
        "in the script",
    ]


@pytest.mark.parametrize("way", ["script", "await", "wait", "task", "gather"])
def test_an_error_keeps_its_type_and_its_traceback(way: str):
    """The waiter gets the exception object that the work raised, with the raising line in its traceback."""
    error = LookupError("original")

    async def the_line_that_raises() -> None:
        raise error

    async def main() -> None:
        operation = Operation(the_line_that_raises, "raises", Home(asyncio.get_running_loop(), "call"))
        await use(operation, way)

    with pytest.raises(LookupError) as caught:
        Operation(the_line_that_raises, "raises").wait() if way == "script" else run(main)
    assert caught.value is error
    assert "the_line_that_raises" in [
        frame.name for frame in traceback.extract_tb(caught.value.__traceback__)
    ]


def test_a_timeout_error_of_the_work_is_its_own():
    """A `TimeoutError` that the work raises is passed on unchanged, although the wait uses a timeout internally."""
    error = TimeoutError("the work's own")
    with pytest.raises(TimeoutError) as caught:
        failing(error).wait()
    assert caught.value is error


def test_an_outcome_that_comes_as_the_wait_looks_up_is_not_lost(monkeypatch: pytest.MonkeyPatch):
    """If the work ends just as the wait's own timeout expires, its value is still returned."""
    real, looks = threads._Outcome[int].wait, list[bool]()

    def wait(self: Any) -> bool:
        is_there = real(self)
        looks.append(is_there)
        return is_there and len(looks) > 1  # at first, the outcome arrives too late for this look

    monkeypatch.setattr(threads._Outcome, "wait", wait)
    assert value_of(8).wait() == 8
    assert looks == [True, True]


@pytest.mark.parametrize(
    "error", [SystemExit(3), KeyboardInterrupt()], ids=["SystemExit", "KeyboardInterrupt"]
)
def test_an_exit_in_the_work_reaches_the_waiter(error: BaseException):
    """`SystemExit` or `KeyboardInterrupt` in the work is raised by the wait, and the shared loop keeps running."""
    with pytest.raises(type(error)) as caught:
        failing(error).wait()
    assert caught.value is error
    assert value_of("still here").wait() == "still here"


def test_an_exit_in_a_handlers_thread_reaches_the_waiter():
    """`SystemExit` from `sys.exit()` on a handler's thread is raised by the wait, and the shared loop keeps running."""

    def leave() -> None:
        sys.exit(4)

    with pytest.raises(SystemExit) as caught:
        Operation(lambda: run_in_thread(leave), "leaves").wait()
    assert caught.value.code == 4
    assert value_of("still here").wait() == "still here"


def test_work_that_is_cancelled_by_itself_is_told_so():
    """If the work raises `CancelledError` itself, the wait raises one that names the operation."""
    with pytest.raises(asyncio.CancelledError, match="failing was cancelled"):
        failing(asyncio.CancelledError()).wait()


# --- `DONE` ----------------------------------------------------------------------------------------


def test_done_may_be_awaited_or_waited_for_or_left():
    """`DONE` may be awaited or waited for any number of times, even on the loop's own thread, or not at all."""

    async def main() -> None:
        assert await cast(Awaitable[None], DONE) is None
        await DONE
        DONE.wait()  # allowed on the loop's own thread: there is nothing to wait for
        await asyncio.gather(DONE, Done())

    run(main)
    DONE.wait()
    Done()


def test_waiting_is_over_as_soon_as_the_work_is(monkeypatch: pytest.MonkeyPatch):
    """A wait returns as soon as the work ends, not at its next periodic check, which is an hour away here."""
    monkeypatch.setattr(threads, "_LOOK_SECONDS", 3600)
    for number in range(200):
        assert value_of(number).wait() == number


def test_an_operation_whose_constructor_fails_is_collected_quietly() -> None:
    """If the constructor of an operation raises, there is no warning about an unused operation."""
    with pytest.raises(TypeError, match="zzz"):
        Operation(zzz=1)  # pyright: ignore[reportCallIssue]
    gc.collect()
