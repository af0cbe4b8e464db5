"""Threads and event loops: run a function in a thread, or a coroutine on a loop from a thread.

The number of threads for synchronous handlers is unlimited. A handler may wait for another handler,
so any limit would cause a deadlock at some depth of nesting. The threads are daemons, because a handler that
outlives its timeout must not keep the program alive.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import contextvars
import inspect
import os
import threading
from collections import deque
from collections.abc import Callable, Coroutine
from queue import Empty, SimpleQueue
from typing import Any, Generic, TypeVar
from weakref import WeakKeyDictionary

from handrail.errors import LoopGone

T = TypeVar("T")

_IDLE_SECONDS = 30.0
"""Seconds for which an idle thread is kept for its next job."""


async def run_in_thread(function: Callable[[], T]) -> T:
    """Run `function` in a thread and return its value or raise its error.

    `StopIteration` and `GeneratorExit` are raised as `RuntimeError`. Context variables are passed on. If the awaiting
    task is cancelled, the thread is abandoned, not stopped, and its later result is dropped.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()
    job = _Job(contextvars.copy_context(), function, loop, future)
    job.running.add(job)
    _submit(job)
    try:
        return await future
    finally:
        del future, job  # to avoid a cycle: the error's traceback refers to this frame


def is_on_loop() -> bool:
    """Return whether an event loop runs in this thread, so that the thread must not wait."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


async def call_either(function: Callable[..., Any], *given: Any, **named: Any) -> Any:
    """Call an async function in this task, or a plain function in a thread, and return its value.

    If the plain function returns an awaitable, it is awaited in this task.
    """
    if inspect.iscoroutinefunction(function):
        return await function(*given, **named)
    value = await run_in_thread(lambda: function(*given, **named))
    return await value if inspect.isawaitable(value) else value


def threads_at_work(loop: asyncio.AbstractEventLoop) -> int:
    """Return the number of unfinished jobs of this loop that do not wait for the loop itself.

    `run_in_thread` starts a job, which is unfinished until its outcome has reached the loop. Jobs that wait for work on
    the loop, in `run_on`, are left out.
    """
    return sum(not job.waits for job in tuple(_running.get(loop, ())))


class _Job:
    """A function to run in a thread, and the future for its outcome."""

    __slots__ = ("context", "function", "future", "loop", "running", "waits")

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
        self.running = _jobs_of(loop)
        self.waits = False
        """Whether the function waits for work on `loop`. Only that loop's thread sets it."""

    def run(self) -> None:
        value: Any = None
        error: BaseException | None = None
        _current.job = self
        try:
            value = self.context.run(self.function)
        except (StopIteration, GeneratorExit) as raised:
            # A future can't carry `StopIteration`, and `GeneratorExit` from one would close the coroutine that awaits it.
            error = RuntimeError(f"the function raised {type(raised).__name__}")
            error.__cause__ = raised
        except BaseException as raised:
            error = raised
        try:
            self.loop.call_soon_threadsafe(self._settle, value, error)
        except RuntimeError:
            self.running.discard(self)  # the loop is closed, so nobody waits for the outcome
        finally:
            _current.job = None
            error = None  # breaks a cycle: the error's traceback refers to this frame

    def _settle(self, value: Any, error: BaseException | None) -> None:
        # The job counts as running until here, because virtual time must not advance while an outcome is on its way.
        self.running.discard(self)
        future = self.future
        del self.future  # to avoid a cycle: the error's traceback refers to the frame of `run`
        if future.done():
            return
        if error is None:
            future.set_result(value)
        else:
            future.set_exception(error)


class _Worker:
    """One thread and the queue it takes jobs from."""

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
                    continue  # a job is being handed over right now
                return
            job.run()
            del job
            _idle.append(self)


_idle: deque[_Worker] = deque()
_running: WeakKeyDictionary[asyncio.AbstractEventLoop, set[_Job]] = WeakKeyDictionary()
"""The unfinished jobs of each event loop. If a loop is closed before the outcome of a job has reached it, the job stays among them."""


def _jobs_of(loop: asyncio.AbstractEventLoop) -> set[_Job]:
    """Return the set of the loop's unfinished jobs."""
    jobs = _running.get(loop)
    if jobs is None:
        forget_closed(_running)
        jobs = _running[loop] = set()
    return jobs


class _Current(threading.local):
    """The job that this thread runs; None if it runs none."""

    job: _Job | None = None


_current = _Current()


def _submit(job: _Job) -> None:
    try:
        worker = _idle.pop()
    except IndexError:
        _Worker(job)
    else:
        worker.jobs.put(job)


def run_on(loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, T], name: str) -> T:
    """Run `work` as a task on `loop`, which runs in another thread, wait for it here, and return its value.

    Context variables are passed on. Ctrl-C cancels the task and waits for it before raising
    `KeyboardInterrupt`; a second Ctrl-C does not wait. Raises `LoopGone` if the loop is closed.
    """
    outcome: _Outcome[T] = _Outcome()
    context = contextvars.copy_context()
    started: list[asyncio.Task[T]] = []
    job = _current.job
    if job is not None and job.loop is not loop:
        job = None

    def start() -> None:
        task = loop.create_task(work, name=name, context=context)
        started.append(task)
        if job is not None:
            job.waits = True
        task.add_done_callback(end)

    def end(task: asyncio.Task[T]) -> None:
        if job is not None:
            job.waits = False
        _report(task, outcome)

    def stop() -> None:
        if started:
            started[0].cancel()
        else:
            work.close()  # interrupted before the work was handed over
            outcome.settle(None, asyncio.CancelledError())

    try:
        _hand_over(loop, start, work, name)
        while not outcome.wait():
            if loop.is_closed() and not outcome.is_settled():
                raise LoopGone(
                    name,
                    "the event loop it belongs to was closed while it ran. Keep the loop open until it has ended.",
                )
    except KeyboardInterrupt:
        if not outcome.is_settled():
            with contextlib.suppress(RuntimeError):  # the loop is closed, so there is nothing to stop
                loop.call_soon_threadsafe(stop)
                # A signal that arrives just before a wait does not interrupt it, so a wait without a limit could miss a Ctrl-C.
                while not outcome.wait() and not loop.is_closed():
                    pass
        raise
    started.clear()  # to avoid a cycle: the task refers to its error, whose traceback refers to this frame
    return outcome.take()


def _hand_over(
    loop: asyncio.AbstractEventLoop, start: Callable[[], None], work: Coroutine[Any, Any, Any], name: str
) -> None:
    try:
        loop.call_soon_threadsafe(start)
    except RuntimeError:
        work.close()
        raise LoopGone(
            name, "the event loop it belongs to is closed. Run it before the loop is closed."
        ) from None


_LOOK_SECONDS = 1.0
"""Maximum seconds that a thread waits at a time, so that it notices a closed loop and a Ctrl-C."""


class _Outcome(Generic[T]):
    """The outcome of work on a loop, for the thread that waits for it."""

    __slots__ = ("_error", "_settled", "_value")

    def __init__(self) -> None:
        self._settled = threading.Event()
        self._value: Any = None
        self._error: BaseException | None = None

    def settle(self, value: T | None, error: BaseException | None) -> None:
        self._value, self._error = value, error
        self._settled.set()

    def is_settled(self) -> bool:
        return self._settled.is_set()

    def wait(self) -> bool:
        """Wait for the outcome for up to `_LOOK_SECONDS`. Returns whether it is there."""
        return self._settled.wait(_LOOK_SECONDS)

    def take(self) -> T:
        """Return the value or raise the error. The error is not kept here, because its traceback refers to this object."""
        error, self._error = self._error, None
        try:
            if error is not None:
                raise error
            return self._value
        finally:
            del error


def _report(task: asyncio.Task[T], outcome: _Outcome[T]) -> None:
    if task.cancelled():
        outcome.settle(None, asyncio.CancelledError(f"{task.get_name()} was cancelled"))
    elif (error := task.exception()) is not None:
        outcome.settle(None, error)
    else:
        outcome.settle(task.result(), None)


_background: asyncio.AbstractEventLoop | None = None
_background_lock = threading.Lock()


def background_loop() -> asyncio.AbstractEventLoop:
    """Return the event loop on which `.wait()` runs operations that belong to no call. Its tasks continue between the waits."""
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
            # A task raised this, which stopped the loop. The code that waits for the task gets the error, so run the loop again.
            continue
        return


_EXIT_SECONDS = 2.0
"""Maximum seconds at exit for the background loop's tasks to clean up, and again for its async generators."""


def _end_background(loop: asyncio.AbstractEventLoop, thread: threading.Thread) -> None:
    if loop is not _background:
        return  # in a forked child, the loop's thread does not exist

    async def end() -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        if others:
            await asyncio.wait(others, timeout=_EXIT_SECONDS)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_EXIT_SECONDS):
                await loop.shutdown_asyncgens()  # this includes generators that hold connections open
        loop.stop()

    asyncio.run_coroutine_threadsafe(end(), loop)
    thread.join(2 * _EXIT_SECONDS + 1.0)
    if not thread.is_alive():
        loop.close()


def forget_closed(kept: WeakKeyDictionary[asyncio.AbstractEventLoop, Any]) -> None:
    """Drop the entries of closed loops. Weak keys do not suffice, because a value may hold a reference to its loop."""
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
