"""Notice of a cancellation: the listeners of a task are told of it before the cancellation lands.

asyncio cancels a task by cancelling what the task waits for. So a task with listeners waits for a `Watched` in
place of a future. When a cancellation comes from outside the listeners' work, the `Watched` tells the listeners, and
cancels the future in the next pass of the loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator
from typing import Any, Protocol


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
    found, watched = listeners[task], _watched(waiting, task)
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
