"""Isolation of user code that runs in Handrail's own task.

The code runs in a copy of the task's context, and each cancellation is delivered to it through this module.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import sys
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Generator
from contextvars import Context, ContextVar, copy_context
from types import coroutine
from typing import Any, Generic, TypeVar

from handrail.concurrency.cancel_notice import listeners, watch

T = TypeVar("T")

TASK_GROUPS_UNCANCEL = sys.version_info >= (3, 13)
"""Whether an `asyncio.TaskGroup` takes back every cancellation that it requested, as it does from Python 3.13 on."""

_GROUP_EXIT = asyncio.TaskGroup.__aexit__.__code__

deliveries: dict[asyncio.Task[Any], tuple[asyncio.CancelledError, int]] = {}
"""Cancellations that are being delivered now, by task, each with the task's cancellation count before it."""


_ENDED = object()


def begin_isolated(work: Coroutine[Any, Any, None]) -> Awaitable[None] | None:
    """Run work that calls user code, until it first waits. Returns an awaitable for the rest, or None if the work is done.

    The work runs in the current task, but in a copy of its context: context variables that it sets are not set outside.
    A separate task would do the same, at ten times the cost.

    Before Python 3.13, a task group whose member fails while the group waits at its end cancels the task
    and never takes that back. The task then looks as if it had been cancelled from outside. So every cancellation
    is delivered by this module, and taken back if its traceback shows that such a group caught it.
    """
    context, steps = copy_context(), work.__await__()
    waiting = context.run(next, steps, _ENDED)
    return None if waiting is _ENDED else _drive(steps, waiting, context)


async def isolated(work: Awaitable[T]) -> T:
    """Await user code, isolated in the same way as in `begin_isolated`, and return its value.

    If the code raises `GeneratorExit`, this raises `RuntimeError` instead.
    """
    value: Any = None

    async def keep() -> None:
        nonlocal value
        try:
            value = await work
        except GeneratorExit as error:
            if is_closing():
                raise
            # A `GeneratorExit` would look as if the coroutine that awaits this had been closed.
            raise RuntimeError("user code raised GeneratorExit") from error

    rest = begin_isolated(keep())
    if rest is not None:
        await rest
    return value


@coroutine
def _drive(steps: Generator[Any, Any, None], waiting: Any, context: Context) -> Generator[Any, Any, None]:
    """Drive suspended work to its end in its context, and watch each cancellation that is delivered to it."""
    task: Any = asyncio.current_task()
    while waiting is not _ENDED:
        counted = task.cancelling()
        thrown: BaseException | None = None
        try:
            if listeners and task in listeners:
                thrown = yield from watch(waiting, task)
            else:
                yield waiting
        except GeneratorExit:
            context.run(_close, steps)
            raise
        except BaseException as error:
            thrown = error
        try:
            if thrown is None:
                waiting = context.run(next, steps, _ENDED)
            else:
                waiting = context.run(_deliver, steps, thrown, task, counted)
        finally:
            thrown = None  # to avoid a cycle: the error's traceback refers to this frame


_is_closing: ContextVar[bool] = ContextVar("handrail_is_closing", default=False)


def is_closing() -> bool:
    """Return whether the isolated work in this context is being closed, so that it can't await anything any more.

    If it is not being closed, a `GeneratorExit` is an error like any other, which user code has raised.
    """
    return _is_closing.get()


def _close(steps: Generator[Any, Any, None]) -> None:
    _is_closing.set(True)
    steps.close()


def _deliver(steps: Generator[Any, Any, None], error: Any, task: asyncio.Task[Any], counted: int) -> Any:
    """Throw an error into suspended work, and return what the work waits for next; `_ENDED` if the work is done.

    If the error is a cancellation that a task group requested and caught, take it back.
    """
    error.__traceback__ = (
        error.__traceback__ and error.__traceback__.tb_next
    )  # drop the caller's frame, as if the error had not passed through here
    is_outermost = task not in deliveries
    if not TASK_GROUPS_UNCANCEL and isinstance(error, asyncio.CancelledError):
        deliveries[task] = error, counted
    try:
        return steps.throw(error)
    except StopIteration:
        return _ENDED
    finally:
        del error
        settle(task)
        if is_outermost:
            deliveries.pop(task, None)


def settle(task: asyncio.Task[Any]) -> None:
    """Take back the cancellation that is being delivered, if a task group requested it while waiting at its end."""
    if task not in deliveries:
        return
    error, counted = deliveries[task]
    caught = error.__traceback__
    if caught is None or caught.tb_frame.f_code is not _GROUP_EXIT or task.cancelling() <= counted:
        return
    group: Any = caught.tb_frame.f_locals["self"]
    body_raised = caught.tb_frame.f_locals["et"] is not None
    if group._parent_cancel_requested and not body_raised:  # if the body raised, the group has taken it back
        group._parent_cancel_requested = False  # later cancellations are not from the group
        error.__traceback__ = None
        task.uncancel()


log = logging.getLogger("handrail.concurrency.isolation")


class Callback(Generic[T]):
    """Passes values to a function, which may be async. A callback may be called from any thread.

    The function is called at once, in the caller's thread. The awaitables that it returns are awaited later, one by one
    and in the order of the calls. `finish` waits for all of them. An exception is logged and does not affect the run.
    """

    def __init__(self, function: Callable[[T], Awaitable[Any] | Any], name: str) -> None:
        """Create a callback whose awaitables are awaited on the running event loop. `name` is for log messages."""
        self._function = function
        self._name = name
        self._loop = asyncio.get_running_loop()
        self._waiting: deque[Awaitable[Any]] = deque()
        self._task: asyncio.Task[None] | None = None

    def __call__(self, value: T) -> None:
        try:
            came = self._function(value)
        except (Exception, GeneratorExit):
            log.exception("%s raised; the run goes on", self._name)
            return
        if inspect.isawaitable(came):
            self._waiting.append(came)
            if asyncio._get_running_loop() is self._loop:  # pyright: ignore[reportPrivateUsage]  # asyncio documents it for this
                self._start()
            else:
                self._loop.call_soon_threadsafe(self._start)

    async def finish(self) -> None:
        """Wait until all awaitables have finished. If this is cancelled, the current one is cancelled and the rest are dropped."""
        self._start()
        while self._task is not None:
            task = self._task
            try:
                await asyncio.shield(task)
            except asyncio.CancelledError:
                task.cancel()
                while self._waiting:
                    _close_awaitable(self._waiting.popleft())
                raise
            self._start()

    def _start(self) -> None:
        if self._waiting and (self._task is None or self._task.done()):
            self._task = self._loop.create_task(self._await_all())
        elif self._task is not None and self._task.done():
            self._task = None

    async def _await_all(self) -> None:
        while self._waiting:
            try:
                await isolated(self._waiting.popleft())
            except Exception:
                log.exception("%s raised; the run goes on", self._name)


def _close_awaitable(awaitable: Awaitable[Any]) -> None:
    if inspect.iscoroutine(awaitable):
        awaitable.close()
