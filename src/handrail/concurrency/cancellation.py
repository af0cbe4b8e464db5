"""Cancellation: whether work must stop, and why.

A `CancelScope` covers a piece of work in one task: a call, a request to a model, a run. Code that must know whether it
was cancelled asks its scope. A `Cancellation` stops a whole tree of runs.

asyncio cancels tasks, not scopes, and counts the cancellations of a task. A scope therefore notes the count when it
is opened, and takes back the cancellations that it requested itself. Those that remain came from outside.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import sys
import threading
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, Generic, TypeVar, cast

import msgspec

from handrail.concurrency import user_code
from handrail.concurrency.claims import GaveUp, Stop
from handrail.concurrency.deadline import Deadline
from handrail.concurrency.threads import run_in_thread
from handrail.concurrency.timers import Timer, WorkClock, timers_of
from handrail.concurrency.user_code import Listener, cancel_without_notice, deliveries, forget, listen, settle
from handrail.errors import DeadlineExceededError

T = TypeVar("T")

log = logging.getLogger("handrail.concurrency.cancellation")

Watcher = Callable[[], None]

_PAUSED = 0.05
"""Seconds by which the next check of a paused deadline's timer is postponed, in addition to the time that is left."""


class TimedOut(Exception):
    """Raised when a scope's timeout has cancelled its work."""


class WentSilent(TimedOut):
    """Raised when a scope has cancelled its work because the work stopped sending heartbeats."""


_listening = threading.Lock()
"""Held while a scope's listener is added or removed: a handler's thread may add it while the loop ends the call."""


class CancelScope(msgspec.Struct, eq=False):
    """A piece of work in one task, from `open_scope` to `close`.

    A cancellation from outside takes precedence: work that was cancelled ends in `CancelledError`, even if its
    timeout or deadline passed at the same moment.
    """

    task: asyncio.Task[Any]
    _before: int
    """The task's cancellation count when the scope was opened, less the cancellations in `_landing`."""
    _run: Cancellation
    _is_ended: bool = False
    _timeout: Timer | None = None
    """The newest timeout, which may have been stopped; None if there was none."""
    _timeout_left: float | None = None
    _deadline: Deadline | None = None
    _deadline_timer: Timer | None = None
    listener: Listener | None = None
    """The listener that is told that the work must stop, one pass of the loop before it is cancelled; None if there is none."""
    _landing: int = 0
    """How many cancellations will be delivered in the next pass of the loop."""
    _watchdog: Timer | None = None
    _is_waiting: bool = True
    """Whether the work has waited for anything, so that its timers can fire. Until then, they are not armed."""
    _unnoticed: int = 0
    """The task's cancellation count with the first cancellation that no listener could be told of; 0 if they are told of each."""

    @property
    def interrupted(self) -> bool:
        """Whether the task has been cancelled since the scope was opened. A cancellation that was taken back does not count."""
        if deliveries:
            settle(self.task)
        return self.task.cancelling() > self._before

    def is_stopped(self) -> bool:
        """Return whether the task has been cancelled since the scope was opened, or the scope's run has been cancelled."""
        if deliveries:
            settle(self.task)
        return self.task.cancelling() > self._before or self._run.cancelled

    def close(self) -> bool:
        """Close the scope. Returns whether the task was cancelled from outside; if so, `CancelledError` must still be raised.

        If the deadline has cancelled the task and `explain` has not taken that back, it is taken back here.
        """
        if self._deadline_timer is not None:
            self._stop(self._deadline_timer)
        if self.listener is not None:
            self.ignore()
        if self.task.cancelling() > self._before:
            self._landing = 0
            return True
        return False

    def listen(self, listener: Listener) -> None:
        """Tell `listener` that the work must stop, one pass of the loop before it is cancelled from outside or by a timer of this scope.

        This replaces a listener for other work. If the scope already has a listener for the same work, that one stays.
        """
        with _listening:
            before = self.listener
            if before is None or before.work is not listener.work:
                if before is not None:
                    forget(self.task, before)  # the listener of an earlier attempt
                if self.interrupted:
                    self._unnoticed = self.task.cancelling()
                else:
                    self._unnoticed = 0 if user_code.CAN_WATCH else self.task.cancelling() + 1
                listen(self.task, listener)
                self.listener = listener

    @property
    def landed(self) -> bool:
        """Whether a cancellation had landed of which no listener could be told before, and was not taken back."""
        return bool(self._unnoticed) and self.task.cancelling() >= self._unnoticed

    def ignore(self) -> None:
        """Remove the listener, because its work is over. Does nothing if there is none."""
        with _listening:
            if self.listener is not None:
                forget(self.task, self.listener)
                self.listener = None

    def interrupt(self) -> None:
        """Cancel the work in the next pass of the loop. Code that waits for the work's signal runs before that."""
        if self.listener is not None:
            self.listener.stop()
        self._landing += 1
        self._before -= 1  # the task counts as cancelled from now on
        self.task.get_loop().call_soon(self._land)

    def _land(self) -> None:
        if self._landing:
            self._withdraw()
            cancel_without_notice(self.task)

    def _withdraw(self) -> None:
        self._landing -= 1
        self._before += 1

    def _run_out(self) -> None:
        """Cancel the work because its time has run out."""
        if self.listener is None:
            cancel_without_notice(self.task)
        else:
            self.interrupt()

    def absorb(self) -> None:
        """Take back every cancellation since the scope was opened, because a different error is raised instead."""
        while self._landing:
            self._withdraw()
        while self.task.cancelling() > self._before:
            self.task.uncancel()

    def end(self) -> None:
        """Cancel the work because its owner has ended."""
        self._is_ended = True
        cancel_without_notice(self.task)

    def take_back(self) -> bool:
        """Take back the cancellation that `end` requested. Returns whether there was one; a second call returns False."""
        if not self._is_ended:
            return False
        self._is_ended = False
        self.task.uncancel()
        return True

    def start_deadline(self, deadline: Deadline) -> None:
        """Cancel the work when the deadline passes. The deadline may be paused in the meantime."""
        self._deadline = deadline
        left, clock = max(deadline.remaining(), 0), _DeadlineClock(deadline)
        self._deadline_timer = timers_of(self.task.get_loop()).start(
            left, self._run_out, clock, armed=self._is_waiting
        )

    def hold_timers(self) -> None:
        """Arm no timer until `arm_timers` is called, because the work may end without ever waiting.

        The time of a timer runs nevertheless, and no timer could fire before the work first waits.
        """
        self._is_waiting = False

    def arm_timers(self) -> None:
        """Arm the timers that have been started, because the work waits for the first time. Later ones are armed as they start."""
        self._is_waiting = True
        for timer in (self._deadline_timer, self._timeout, self._watchdog):
            if timer is not None:
                timer.arm()

    def explain(self, error: BaseException, doing: str) -> BaseException:
        """Return `DeadlineExceededError` if `error` is the deadline's cancellation; otherwise return `error` itself.

        `doing` describes what did not happen in time. This also stops watching the deadline.
        """
        deadline, timer = self._deadline, self._deadline_timer
        if deadline is None or timer is None or not self._stop(timer):
            return error
        if isinstance(error, asyncio.CancelledError) and not self.interrupted:
            return DeadlineExceededError(deadline.at, doing)
        return error

    def start_timeout(self, seconds: float, clock: WorkClock) -> None:
        """Cancel the work after this many seconds on its clock, or after the time that `continue_timeout` kept from an earlier timeout."""
        left = self._timeout_left
        self._timeout = clock.timers.start(seconds, self._run_out, clock, left, self._is_waiting)

    def stop_timeout(self) -> None:
        """Stop the timeout, because the work is over. Raises `TimedOut` if only the timeout cancelled it."""
        timer = self._timeout
        if timer is not None and self._stop(timer) and not self.interrupted:
            raise TimedOut(timer.seconds)

    def timeout_left(self) -> float:
        """Return how many seconds of the timeout are left, even if it was stopped; infinity if none was started."""
        return math.inf if self._timeout is None else self._timeout.left()

    def continue_timeout(self) -> None:
        """Let the next timeout continue with the time that this one has left, because both are for the same work."""
        if self._timeout is not None:
            self._timeout_left = max(self._timeout.left(), 0.0)

    def start_watchdog(self, seconds: float, clock: WorkClock) -> None:
        """Cancel the work once it has not called `hear` for this many seconds on its clock."""
        self._watchdog = clock.timers.start(seconds, self._run_out, clock, armed=self._is_waiting)

    def hear(self) -> None:
        """Note that the work is alive. This may be called from any thread."""
        if self._watchdog is not None:
            self._watchdog.restart()

    def stop_watchdog(self) -> None:
        """Stop the watchdog, because the work is over. Raises `WentSilent` if only the watchdog cancelled it."""
        timer = self._watchdog
        if timer is not None and self._stop(timer) and not self.interrupted:
            raise WentSilent(timer.seconds)

    def pause(self) -> Callable[[], None]:
        """Pause the timeout and the watchdog while a person decides. Call the returned function to resume them."""
        timer, watchdog = self._timeout, self._watchdog
        if watchdog is not None:
            return self._pause_both(timer, watchdog)
        if timer is None:
            return _do_nothing
        timer.pause()
        return timer.resume

    def _pause_both(self, timer: Timer | None, watchdog: Timer) -> Callable[[], None]:
        watchdog.pause()
        if timer is not None:
            timer.pause()

        def resume() -> None:
            self.hear()  # the work could not send heartbeats while it waited
            watchdog.resume()
            if timer is not None:
                timer.resume()

        return resume

    def _stop(self, timer: Timer) -> bool:
        """Stop a timer. If it has cancelled the task, take that back and return True; a second call returns False."""
        if not timer.stop():
            return False
        if self._landing:
            self._withdraw()  # the cancellation has not landed yet
        else:
            self.task.uncancel()
        return True


_current_task: Callable[[asyncio.AbstractEventLoop], Any] = asyncio.current_task
if sys.version_info < (
    3,
    12,
):  # before 3.12, `current_task` is written in Python and accounts for a third of a scope's cost
    _current_task = cast(Any, asyncio.tasks)._current_tasks.get


def open_scope(run: Cancellation | None = None, loop: asyncio.AbstractEventLoop | None = None) -> CancelScope:
    """Open a scope for what the current task does next. If `run` is given, `is_stopped` is also true once that run is cancelled."""
    task: Any = _current_task(loop or asyncio.get_running_loop())
    if deliveries:
        settle(task)
    return CancelScope(task, task.cancelling(), run or NO_RUN)


def scope_of(task: asyncio.Task[Any]) -> CancelScope:
    """Open a scope for what a task does from now on, from outside the task."""
    if deliveries:
        settle(task)
    return CancelScope(task, task.cancelling(), NO_RUN)


def _do_nothing() -> None: ...


class _DeadlineClock(msgspec.Struct, eq=False):
    """Measures how near a deadline is. It stands still while the deadline is paused."""

    _deadline: Deadline

    def time(self) -> float:
        return -self._deadline.remaining()

    def standstill(self, timer: Timer) -> float:
        return _PAUSED if self._deadline.paused else 0.0


async def shielded(work: Coroutine[Any, Any, T]) -> T:
    """Await `work` to its end, even if this task is cancelled meanwhile, and return its value.

    The cancellation is not lost: the task still counts it, and the scope around the work reports it. Where no scope does,
    use `finish`. If the work raises `GeneratorExit`, this raises `RuntimeError` instead.
    """
    return (await _to_its_end(work))[0]


async def finish(work: Coroutine[Any, Any, T]) -> T:
    """Await `work` to its end as `shielded` does, then raise `CancelledError` if this task was cancelled meanwhile.

    If the work itself raises, its error is raised instead of the cancellation.
    """
    value, was_cancelled = await _to_its_end(work)
    if was_cancelled:
        raise asyncio.CancelledError
    return value


async def stoppable(work: Callable[[Callable[[], bool]], T]) -> T:
    """Run `work` in a thread to its end, and return its value. If this task is cancelled, the function passed to `work` returns True.

    The cancellation is not lost, as with `shielded`.
    """
    stop = threading.Event()
    running = run_in_thread(lambda: work(stop.is_set))
    return (await _to_its_end(running, stop.set))[0]


async def unless_stopped(work: Callable[[Stop], T]) -> T:
    """Run `work` in a thread to its end, as `stoppable` does. If it raises `GaveUp`, raise `CancelledError`: this task was cancelled."""
    try:
        return await stoppable(work)
    except GaveUp:
        raise asyncio.CancelledError from None


async def _to_its_end(
    work: Coroutine[Any, Any, T], on_cancel: Callable[[], object] | None = None
) -> tuple[T, bool]:
    """Return the value of `work`, and whether this task was cancelled meanwhile."""
    import anyio

    task, was_cancelled = asyncio.ensure_future(work), False
    with anyio.CancelScope(shield=True):
        while not task.done():
            try:
                await asyncio.wait({task})
            except asyncio.CancelledError:
                was_cancelled = True
                if on_cancel is not None:
                    on_cancel()
    try:
        return task.result(), was_cancelled
    except GeneratorExit as error:
        # A `GeneratorExit` would look as if this coroutine had been closed.
        raise RuntimeError("shielded work raised GeneratorExit") from error


class Pending(Generic[T]):
    """Work in another thread that can't be stopped. One task can wait for its end, even if that task is cancelled meanwhile.

    `shielded` does the same for a coroutine, but needs a task for it. Call `settle` and `wait` on the same loop.
    """

    __slots__ = ("_error", "_is_over", "_value", "_waiter")

    def __init__(self) -> None:
        self._waiter: asyncio.Future[None] | None = None
        self._value: T | None = None
        self._error: BaseException | None = None
        self._is_over = False

    def settle(self, value: T | None, error: BaseException | None) -> None:
        """Set the value of the work, or its error if it has failed, and wake the task that waits for it."""
        self._value, self._error, self._is_over = value, error, True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def wait(self) -> T:
        """Wait until the work is over, and return its value or raise its error."""
        import anyio

        with anyio.CancelScope(shield=True):
            while not self._is_over:
                self._waiter = asyncio.get_running_loop().create_future()
                with contextlib.suppress(asyncio.CancelledError):
                    await self._waiter
        if self._error is not None:
            raise self._error
        return cast(T, self._value)


# --- runs ---------------------------------------------------------------------------------------------


class Cancellation:
    """The cancellation of one run, as a node in the tree of runs. `work` returns the run's active scopes, or its task.

    Cancelling marks this run and every run below it, then cancels their work, children first. A scope is cancelled
    in the next pass of the loop, so code that waits for a call's signal runs before that. Each call rolls back and
    publishes its end before the call around it unwinds. A run that was already cancelled keeps its reason, and is not
    cancelled again while it unwinds.
    """

    __slots__ = ("_children", "_parent", "_watchers", "_work", "cancelled", "reason")

    def __init__(
        self,
        work: Callable[[], Iterable[CancelScope | asyncio.Task[Any]]],
        parent: Cancellation | None = None,
    ) -> None:
        self.cancelled = parent.cancelled if parent is not None else False
        self.reason = parent.reason if parent is not None else ""
        self._parent = parent
        self._children: dict[Cancellation, None] = {}
        self._work = work
        self._watchers: list[Watcher] = []
        if parent is not None:
            parent._children[self] = None

    def close(self) -> None:
        """Leave the tree of runs, because the run has ended."""
        if self._parent is not None:
            self._parent._children.pop(self, None)

    def check(self) -> None:
        """Raise `CancelledError` if the run was cancelled."""
        if self.cancelled:
            raise asyncio.CancelledError(self.reason)

    def on_cancel(self, watcher: Watcher) -> Callable[[], None]:
        """Call `watcher` when the run is cancelled, or now if it already is. Returns a function that unsubscribes it."""
        if self.cancelled:
            _tell(watcher)
        else:
            self._watchers.append(watcher)
        return lambda: self._watchers.remove(watcher) if watcher in self._watchers else None

    def cancel(self, reason: str = "cancelled") -> None:
        """Stop this run and every run below it. Call this only on the event loop's thread."""
        if self.cancelled:
            return
        stopping: list[Cancellation] = []
        self._mark(reason, stopping)
        for each in stopping:
            each._tell_watchers()
        done: set[asyncio.Task[Any]] = set()
        for each in stopping:
            each._stop(done)

    def _mark(self, reason: str, stopping: list[Cancellation]) -> None:
        """Mark this run and the uncancelled runs below it as cancelled, and append each to `stopping`, children first."""
        self.cancelled = True
        self.reason = reason
        for child in self._children:
            if not child.cancelled:
                child._mark(reason, stopping)
        stopping.append(self)

    def _stop(self, done: set[asyncio.Task[Any]]) -> None:
        for each in tuple(self._work()):
            task = each.task if isinstance(each, CancelScope) else each
            if task not in done and not task.done():
                done.add(task)
                if isinstance(each, CancelScope):
                    each.interrupt()
                else:
                    task.cancel()

    def _tell_watchers(self) -> None:
        watchers, self._watchers = self._watchers, []
        for watcher in watchers:
            _tell(watcher)


NO_RUN = Cancellation(tuple)
"""A cancellation that never happens, for work that is stopped only through its task."""


def _tell(watcher: Watcher) -> None:
    try:
        watcher()
    except Exception:
        log.exception("a cancellation watcher raised; the other watchers are still called")
