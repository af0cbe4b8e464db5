"""Threads for sync handlers: any number of daemon threads, which are reused, and abandoned rather than stopped."""

import asyncio
import contextlib
import contextvars
import gc
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from handrail.concurrency import threads
from handrail.concurrency.threads import background_loop, run_in_thread, threads_at_work
from support import PATIENCE
from support.operations import run

LABEL: contextvars.ContextVar[str] = contextvars.ContextVar("LABEL", default="none")


@pytest.fixture(autouse=True)
def no_other_threads() -> None:
    """Wait until the threads of earlier tests have ended, so that each test starts without any."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threads, "_IDLE_SECONDS", 0.0)
        last: Any = SimpleNamespace(run=lambda: None)
        while any(thread.name == "handrail-handler" for thread in threading.enumerate()):
            while threads._idle:
                threads._idle.pop().jobs.put(last)
            time.sleep(0.001)
        threads._idle.clear()


async def until(condition: Callable[[], object]) -> None:
    """Let the loop and other threads run until the condition holds."""
    while not condition():
        await asyncio.sleep(0.001)


async def test_it_gives_back_what_the_function_returns():
    """A function runs on one of Handrail's daemon threads, and its value is returned."""
    thread = await run_in_thread(threading.current_thread)
    assert thread is not threading.current_thread()
    assert thread.daemon
    assert thread.name == "handrail-handler"


async def test_it_raises_what_the_function_raises():
    """The caller gets the exception object that the function raised, with its traceback."""
    error = LookupError("mine")

    def fails() -> None:
        raise error

    with pytest.raises(LookupError) as caught:
        await run_in_thread(fails)
    assert caught.value is error
    assert caught.traceback[-1].name == "fails"


async def test_an_idle_thread_is_used_again():
    """An idle thread is reused for the next function."""
    first = await run_in_thread(threading.get_ident)
    for _ in range(20):
        await until(lambda: len(threads._idle) == 1)
        assert await run_in_thread(threading.get_ident) == first


async def test_a_thread_that_raised_is_used_again():
    """A thread on which a function raised an error is reused."""

    def fails() -> None:
        idents.append(threading.get_ident())
        raise KeyError

    idents: list[int] = []

    with pytest.raises(KeyError):
        await run_in_thread(fails)
    await until(lambda: threads._idle)
    assert [await run_in_thread(threading.get_ident)] == idents


async def test_an_idle_thread_ends_after_a_while(monkeypatch: pytest.MonkeyPatch):
    """A thread that is idle for long enough ends, and the next function gets a new one."""
    monkeypatch.setattr(threads, "_IDLE_SECONDS", 0.001)

    thread = await run_in_thread(threading.current_thread)
    await until(lambda: not thread.is_alive())
    assert not threads._idle
    assert await run_in_thread(lambda: "new") == "new"


async def test_a_job_handed_over_as_a_thread_gives_up_is_not_lost(monkeypatch: pytest.MonkeyPatch):
    """A job that is handed to a thread just as the thread gives up waiting is still done."""
    handed: list[asyncio.Future[Any]] = []

    class Idle(deque[Any]):
        """Hands a job to the thread just before the thread removes itself."""

        def remove(self, value: Any, /) -> None:
            if not handed:
                handed.append(job.future)
                threads._submit(job)
            super().remove(value)

    monkeypatch.setattr(threads, "_IDLE_SECONDS", 0.0)
    monkeypatch.setattr(threads, "_idle", Idle())

    job: Any = None
    loop = asyncio.get_running_loop()
    job = threads._Job(contextvars.copy_context(), threading.get_ident, loop, loop.create_future())
    first = await run_in_thread(threading.get_ident)
    await until(lambda: handed)
    assert await handed[0] == first


async def test_jobs_and_threads_that_end_pass_each_other(monkeypatch: pytest.MonkeyPatch):
    """Every job is done, even if threads end as soon as they are idle."""
    monkeypatch.setattr(threads, "_IDLE_SECONDS", 0.0)

    for number in range(300):
        assert await run_in_thread(lambda number=number: number) == number


async def test_there_is_no_limit():
    """The number of threads is unlimited: two hundred functions that wait for each other all end."""
    together = threading.Barrier(200)
    order = await asyncio.gather(*(run_in_thread(lambda: together.wait()) for _ in range(200)))
    assert sorted(order) == list(range(200))


async def test_stop_iteration_becomes_a_runtime_error():
    """`StopIteration`, which a future can't carry, becomes a `RuntimeError`, as in a coroutine."""
    with pytest.raises(RuntimeError, match="StopIteration") as caught:
        await run_in_thread(lambda: next(iter(())))
    assert isinstance(caught.value.__cause__, StopIteration)


async def test_context_variables_go_along_and_do_not_leak_back():
    """A function sees its caller's context variables, and its own changes do not leak back."""

    def body() -> str:
        seen = LABEL.get()
        LABEL.set("inside")
        return seen

    LABEL.set("outside")
    assert await run_in_thread(body) == "outside"
    assert LABEL.get() == "outside"
    await until(lambda: threads._idle)
    assert await run_in_thread(LABEL.get) == "outside"


async def test_cancelling_abandons_the_thread():
    """Cancelling frees the awaiting task at once. The thread continues, and its result is dropped."""
    began, release, ended = threading.Event(), threading.Event(), threading.Event()

    def body() -> str:
        began.set()
        release.wait(PATIENCE)
        ended.set()
        return "dropped"

    task = asyncio.create_task(run_in_thread(body))
    await until(began.is_set)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not ended.is_set()
    assert threads_at_work(asyncio.get_running_loop()) == 1
    release.set()
    await until(lambda: threads_at_work(asyncio.get_running_loop()) == 0)
    assert ended.is_set()


async def test_an_abandoned_error_is_dropped_in_silence():
    """An error that an abandoned function raises is ignored, and its thread becomes idle again."""
    release, began = threading.Event(), threading.Event()

    def body() -> None:
        began.set()
        release.wait(PATIENCE)
        raise KeyError("late")

    task = asyncio.create_task(run_in_thread(body))
    await until(began.is_set)
    task.cancel()
    await asyncio.wait([task])
    release.set()
    await until(lambda: threads._idle)


def test_a_thread_may_outlive_its_loop():
    """A function may return after its event loop was closed. `threads_at_work` counts it until then."""
    release, began = threading.Event(), threading.Event()
    loops: list[asyncio.AbstractEventLoop] = []

    def body() -> None:
        began.set()
        release.wait(PATIENCE)

    async def main() -> None:
        loops.append(asyncio.get_running_loop())
        task = asyncio.create_task(run_in_thread(body))
        await until(began.is_set)
        task.cancel()

    async def after() -> None:
        assert threads_at_work(loops[0]) == 1
        release.set()
        await until(lambda: threads_at_work(loops[0]) == 0)
        await until(lambda: threads._idle)

    run(main)
    run(after)


def test_a_job_of_a_closed_loop_is_forgotten():
    """If a loop is closed before an outcome has reached it, its job is kept only until another loop starts one."""
    release, began = threading.Event(), threading.Event()

    class Thing:
        pass

    thing = Thing()
    gone = weakref.ref(thing)

    def body(thing: Thing) -> None:
        began.set()
        release.wait(PATIENCE)

    async def main(thing: Thing) -> None:
        task = asyncio.create_task(run_in_thread(lambda: body(thing)))
        await until(began.is_set)
        task.cancel()
        await asyncio.wait([task])

    loop = asyncio.new_event_loop()
    loop.run_until_complete(main(thing))
    release.set()
    while not threads._idle:
        time.sleep(0.001)  # the outcome waits for the loop from here on
    loop.close()
    assert threads_at_work(loop) == 1
    del thing

    run(lambda: run_in_thread(lambda: None))
    assert threads_at_work(loop) == 0
    gc.collect()
    assert gone() is None


async def test_threads_at_work_are_counted_by_loop():
    """`threads_at_work` counts only the unfinished functions of the given loop."""
    loop = asyncio.get_running_loop()
    release = threading.Event()
    tasks = [asyncio.create_task(run_in_thread(lambda: release.wait(PATIENCE))) for _ in range(3)]
    await asyncio.sleep(0)
    assert threads_at_work(loop) == 3
    assert threads_at_work(background_loop()) == 0
    release.set()
    assert await asyncio.gather(*tasks) == [True] * 3
    assert threads_at_work(loop) == 0


async def test_a_thread_at_work_is_counted_until_its_outcome_is_there():
    """A function counts as running until its value has arrived, so that virtual time does not jump ahead of it."""
    loop = asyncio.get_running_loop()
    task = asyncio.create_task(run_in_thread(lambda: "value"))
    await asyncio.sleep(0)
    # Block the loop until the thread is idle again, so that only the value is yet to arrive.
    while not threads._idle:
        assert not task.done()
    assert threads_at_work(loop) == 1
    assert await task == "value"
    assert threads_at_work(loop) == 0


async def test_nothing_is_kept_alive_by_an_idle_thread():
    """An idle thread keeps no reference to its last job or to that job's error."""

    class Thing:
        pass

    thing = Thing()
    gone = weakref.ref(thing)

    def fails(thing: Thing) -> None:
        raise KeyError(thing)

    with contextlib.suppress(KeyError):  # pytest.raises would keep the error
        await run_in_thread(lambda kept=thing: fails(kept))
    await until(lambda: threads._idle)
    await asyncio.sleep(0)  # the callback that woke this task also referred to the error
    del thing
    gc.collect()
    assert gone() is None
