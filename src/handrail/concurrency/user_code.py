"""Isolation of user code that runs in Handrail's own task.

The code runs in a copy of the task's context, and each cancellation is delivered to it through this module.

Listeners of a task are told of a cancellation before it lands. asyncio cancels a task by cancelling what the task waits for. So a
task with listeners waits for a `Watched` in place of a future. When a cancellation comes from outside the listeners' work, the
`Watched` tells the listeners, and cancels the future in the next pass of the loop.
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
from typing import Any, Generic, Protocol, TypeVar

CAN_WATCH = hasattr(asyncio.Future, "_asyncio_future_blocking")
"""Whether a task can wait for a `Watched`, which takes an undocumented detail of asyncio.

If not, listeners are not told of a cancellation of their task before it lands.
"""


class Listener(Protocol):
    """An object that is told before its work is cancelled."""

    @property
    def work(self) -> object: ...
    def is_cancelled_from_outside(self) -> bool:
        """Return whether the requested cancellation comes from outside the work, and the work has not been told of it yet.

        A timeout or a task group inside the work may also cancel the task. The work is not told of such a cancellation.
        """
        ...

    def stop(self) -> None:
        """Tell the work that it is about to be cancelled."""
        ...


class Listeners:
    """The listeners of one task."""

    __slots__ = ("held", "held_for", "told")

    def __init__(self) -> None:
        self.told: list[Listener] = []
        """The listeners that are told of a cancellation."""
        self.held: asyncio.CancelledError | None = None
        """A cancellation that lands the next time the task waits; None if there is none.

        It could not land before, because the listeners completed the future that the task was waiting for.
        """
        self.held_for: list[Listener] = []


listeners: dict[asyncio.Task[Any], Listeners] = {}
"""The listeners of each task that has any."""


def listen(task: asyncio.Task[Any], listener: Listener) -> None:
    """Tell `listener` of each cancellation that comes from outside its work, before the cancellation lands. `forget` ends this.

    If the task is already waiting, this takes effect the next time it waits.
    """
    listeners.setdefault(task, Listeners()).told.append(listener)


def forget(task: asyncio.Task[Any], listener: Listener) -> None:
    """Stop telling the listener, because its work is over."""
    found = listeners.get(task)
    if found is not None and listener in found.told:
        found.told.remove(listener)
        if listener in found.held_for:
            found.held = None  # the work is over, and the code that closes its scope raises the cancellation
        if not found.told:
            del listeners[task]


def cancel_without_notice(task: asyncio.Task[Any]) -> None:
    """Cancel a task without telling its listeners, for example because they already know of the cancellation."""
    found = listeners.pop(task, None)
    try:
        task.cancel()
    finally:
        if found is not None:
            listeners[task] = found


class Watched:
    """A stand-in for the future that a task with listeners waits for."""

    __slots__ = (
        "_asyncio_future_blocking",
        "_future",
        "_message",
        "_task",
        "is_late",
        "is_pending",
        "stopped",
    )

    def __init__(self, future: Any, task: asyncio.Task[Any]) -> None:
        future._asyncio_future_blocking = False
        self._asyncio_future_blocking = True  # asyncio requires this of an object that a coroutine yields
        self._future = future
        self._task = task
        self._message: Any = None
        self.is_pending = False
        """Whether a cancellation has been requested but has not cancelled the future."""
        self.is_late = False
        """Whether the future was done when the cancellation was requested."""
        self.stopped: list[Listener] = []
        """The listeners that were told, if telling them completed the future; otherwise empty."""

    def get_loop(self) -> asyncio.AbstractEventLoop:
        return self._future.get_loop()

    def done(self) -> bool:
        return self._future.done()

    def add_done_callback(self, callback: Callable[[Any], object], *, context: Any = None) -> None:
        self._future.add_done_callback(callback, context=context)

    def cancel(self, msg: Any = None) -> bool:
        """Tell the listeners of a cancellation from outside, and cancel the future in the next pass of the loop, unless it is done.

        Any other cancellation cancels the future at once.
        """
        if self.is_pending:
            return True
        found = listeners.get(self._task)
        stopping = [] if found is None else [each for each in found.told if each.is_cancelled_from_outside()]
        if not stopping:
            return self._future.cancel(msg)
        self.is_pending, self._message = True, msg
        self.is_late = self._future.done()
        for each in stopping:
            each.stop()
        if not self._future.done():
            self.get_loop().call_soon(self._land)
        elif not self.is_late:
            self.stopped = stopping
        return True

    def _land(self) -> None:
        if self._future.cancel(self._message):
            self.is_pending = False

    def cancel_at_once(self, error: asyncio.CancelledError) -> None:
        """Cancel the future because of a cancellation that the listeners already know of.

        If the future is done, the cancellation stays pending.
        """
        message = error.args[0] if error.args else None
        if not self._future.cancel(message):
            self.is_pending, self._message = True, message

    def take(self) -> asyncio.CancelledError | None:
        """Return the pending cancellation, or None if there is none. A second call returns None."""
        if not self.is_pending:
            return None
        self.is_pending = False
        return asyncio.CancelledError(*(() if self._message is None else (self._message,)))


def watch(waiting: Any, task: asyncio.Task[Any]) -> Generator[Any, Any, BaseException | None]:
    """Let the task wait for `waiting`, which its work has yielded. Returns the error to throw into the work, if any.

    If what the work waits for ends before a cancellation lands, the work still gets the cancellation, at once or the
    next time that it waits.
    """
    found, watched = listeners[task], _watched(waiting, task) if CAN_WATCH else None
    if watched is None:
        return (yield from _thrown_into(waiting))
    if found.held is not None:
        held, found.held = found.held, None
        watched.cancel_at_once(held)
    thrown = yield from _thrown_into(watched)
    error = watched.take()
    if error is None or isinstance(thrown, asyncio.CancelledError):
        return thrown
    if watched.stopped:
        found.held, found.held_for = error, watched.stopped
        return None
    if watched.is_late:
        return (yield from _thrown_into(None)) or error
    return error


def _thrown_into(waiting: Any) -> Generator[Any, Any, BaseException | None]:
    """Yield to the task, and return the error that it throws, if any."""
    try:
        yield waiting
    except GeneratorExit:
        raise
    except BaseException as error:
        return error
    return None


def _watched(waiting: Any, task: asyncio.Task[Any]) -> Watched | None:
    """Return the `Watched` for what the work has yielded; None if that is not a future that the task can wait for."""
    future: Any = waiting
    if waiting is None:  # as in `sleep(0)`; listeners can be told in time only if there is a future to cancel
        future = task.get_loop().create_future()
        future.set_result(None)
        future._asyncio_future_blocking = True
    if isinstance(waiting, Watched):  # it was made for work that is nested in this work
        return waiting
    if not isinstance(future, asyncio.Future) or future is task or not future._asyncio_future_blocking:
        return None
    return Watched(future, task)


T = TypeVar("T")

TASK_GROUPS_UNCANCEL = sys.version_info >= (3, 13)
"""Whether an `asyncio.TaskGroup` takes back every cancellation that it requested, as it does from Python 3.13 on."""

_GROUP_EXIT = None if TASK_GROUPS_UNCANCEL else asyncio.TaskGroup.__aexit__.__code__

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
        except BaseException:
            task = None  # to avoid a cycle: the error, which the task may hold, refers to this frame
            raise
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
        del task


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


log = logging.getLogger("handrail.concurrency.user_code")


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
