"""The crossings between threads and event loops: into a thread, and from a thread onto a loop.

Threads for synchronous handlers have no limit, because a handler may wait for another handler: any
limit is a depth at which that deadlocks. They are daemons, because a handler that outlived its
timeout must not hold the program open.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import contextlib
import contextvars
import inspect
import os
import threading
from collections import deque
from collections.abc import Callable, Coroutine
from queue import Empty, SimpleQueue
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from handrail.errors import LoopGone

T = TypeVar("T")

_IDLE_SECONDS = 30.0
"""How long a thread without work is kept for the next piece."""


async def run_in_thread(function: Callable[[], T]) -> T:
    """Run `function` on a thread of its own and give back what it returns or raises.

    Context variables go along. If the awaiting task is cancelled the thread is abandoned, not
    stopped: what it returns later is dropped.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()
    job = _Job(contextvars.copy_context(), function, loop, future)
    _running.add(job)
    _submit(job)
    return await future


async def call_either(function: Callable[..., Any], *given: Any, **named: Any) -> Any:
    """Call a function of either colour: an async one here, a plain one on a thread of its own."""
    if inspect.iscoroutinefunction(function):
        return await function(*given, **named)
    value = await run_in_thread(lambda: function(*given, **named))
    return await value if inspect.isawaitable(value) else value


def threads_at_work(loop: asyncio.AbstractEventLoop) -> int:
    """How many functions begun by `run_in_thread` on this loop have not come back to it yet."""
    return sum(job.loop is loop for job in list(_running))


class _Job:
    """A function on its way to a thread, and where its outcome goes."""

    __slots__ = ("context", "function", "future", "loop")

    def __init__(
        self,
        context: contextvars.Context,
        function: Callable[[], Any],
        loop: asyncio.AbstractEventLoop,
        future: asyncio.Future[Any],
    ) -> None:
        self.context = context
        self.function = function
        self.loop = loop
        self.future = future

    def run(self) -> None:
        value: Any = None
        error: BaseException | None = None
        try:
            value = self.context.run(self.function)
        except StopIteration as stop:
            # A future can't carry StopIteration; an async function turns it into this as well.
            error = RuntimeError("the function raised StopIteration")
            error.__cause__ = stop
        except BaseException as raised:
            error = raised
        try:
            self.loop.call_soon_threadsafe(self._settle, value, error)
        except RuntimeError:
            _running.discard(self)  # the loop has ended, and with it whoever waited
        finally:
            error = None  # its traceback leads to this frame: a cycle otherwise

    def _settle(self, value: Any, error: BaseException | None) -> None:
        # Here, on the loop, and not earlier: virtual time must not jump while an outcome is on its way.
        _running.discard(self)
        if self.future.done():
            return
        if error is None:
            self.future.set_result(value)
        else:
            self.future.set_exception(error)


class _Worker:
    """One thread and the queue it takes its next job from."""

    __slots__ = ("jobs",)

    def __init__(self, first: _Job) -> None:
        self.jobs: SimpleQueue[_Job] = SimpleQueue()
        self.jobs.put(first)
        threading.Thread(target=self._work, name="handrail-handler", daemon=True).start()

    def _work(self) -> None:
        while True:
            try:
                job = self.jobs.get(timeout=_IDLE_SECONDS)
            except Empty:
                try:
                    _idle.remove(self)
                except ValueError:
                    continue  # a job is being handed over at this moment
                return
            job.run()
            del job
            _idle.append(self)


_idle: deque[_Worker] = deque()
_running: set[_Job] = set()


def _submit(job: _Job) -> None:
    try:
        worker = _idle.pop()
    except IndexError:
        _Worker(job)
    else:
        worker.jobs.put(job)


def run_on(loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, T], name: str) -> T:
    """Run `work` as a task on `loop`, which another thread runs, and wait for it here.

    Context variables go along. On Ctrl-C the task is cancelled and waited for, then
    `KeyboardInterrupt` goes on; a second Ctrl-C does not wait.
    """
    outcome: concurrent.futures.Future[T] = concurrent.futures.Future()
    context = contextvars.copy_context()
    started: list[asyncio.Task[T]] = []

    def start() -> None:
        task = loop.create_task(work, name=name, context=context)
        started.append(task)
        task.add_done_callback(lambda task: _report(task, outcome))

    def stop() -> None:
        if started:
            started[0].cancel()
        else:
            work.close()  # interrupted before it was even handed over
            outcome.set_exception(asyncio.CancelledError())

    try:
        _hand_over(loop, start, work, name)
        return _outcome_of(outcome, loop, name)
    except KeyboardInterrupt:
        if not outcome.done():
            with contextlib.suppress(RuntimeError):  # the loop has ended: nothing is left to stop
                loop.call_soon_threadsafe(stop)
                concurrent.futures.wait([outcome])
        raise


def _hand_over(
    loop: asyncio.AbstractEventLoop, start: Callable[[], None], work: Coroutine[Any, Any, Any], name: str
) -> None:
    try:
        loop.call_soon_threadsafe(start)
    except RuntimeError:
        work.close()
        raise LoopGone(name, "the event loop it belongs to has ended.") from None


_LOOK_SECONDS = 1.0
"""How often whoever waits looks whether the loop it waits for is still there."""


def _outcome_of(outcome: concurrent.futures.Future[T], loop: asyncio.AbstractEventLoop, name: str) -> T:
    while True:
        try:
            return outcome.result(timeout=_LOOK_SECONDS)
        except TimeoutError:
            if outcome.done():
                return outcome.result()  # it ended just now, or this is the work's own error
            if loop.is_closed():
                raise LoopGone(name, "the event loop it belongs to ended while it ran.") from None


def _report(task: asyncio.Task[T], outcome: concurrent.futures.Future[T]) -> None:
    if task.cancelled():
        outcome.set_exception(asyncio.CancelledError(f"{task.get_name()} was cancelled"))
    elif (error := task.exception()) is not None:
        outcome.set_exception(error)
    else:
        outcome.set_result(task.result())


_background: asyncio.AbstractEventLoop | None = None
_background_lock = threading.Lock()


def background_loop() -> asyncio.AbstractEventLoop:
    """The one loop that scripts share: what one `.wait()` began goes on after it."""
    global _background
    with _background_lock:
        if _background is None:
            _background = asyncio.new_event_loop()
            thread = threading.Thread(
                target=_run_background, args=(_background,), name="handrail-loop", daemon=True
            )
            thread.start()
            atexit.register(_end_background, _background, thread)
        return _background


def _run_background(loop: asyncio.AbstractEventLoop) -> None:
    while True:
        try:
            loop.run_forever()
        except (SystemExit, KeyboardInterrupt):
            # Raised by some work. asyncio stops the loop on it; whoever waits for that work gets it.
            continue
        return


_EXIT_SECONDS = 2.0
"""How long, at exit, what still runs on the background loop may take to clean up."""


def _end_background(loop: asyncio.AbstractEventLoop, thread: threading.Thread) -> None:
    if loop is not _background:
        return  # this is a forked child, where the loop's thread does not exist

    async def end() -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        if others:
            await asyncio.wait(others, timeout=_EXIT_SECONDS)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_EXIT_SECONDS):
                await loop.shutdown_asyncgens()  # among them those that hold connections open
        loop.stop()

    asyncio.run_coroutine_threadsafe(end(), loop)
    thread.join(2 * _EXIT_SECONDS + 1.0)
    if not thread.is_alive():
        loop.close()


def forget_closed(kept: WeakKeyDictionary[asyncio.AbstractEventLoop, Any]) -> None:
    """Drop what was kept for loops that have ended: it may hold on to its loop, which would never go."""
    for found in kept.keyrefs():
        loop = found()
        if loop is not None and loop.is_closed():
            kept.pop(loop, None)


def _after_fork() -> None:
    global _background, _background_lock
    _idle.clear()
    _running.clear()
    _background = None
    _background_lock = threading.Lock()


os.register_at_fork(after_in_child=_after_fork)  # threads do not survive a fork
