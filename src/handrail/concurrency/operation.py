"""`Operation`: the return value of every verb that waits. It can be run from sync and async code.

`await` it, start it in a task group, or call `.wait()` where there is no event loop: in a script, in
a synchronous handler, or in your own thread. Each verb is written once; there are no `_sync` variants.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import warnings
from collections.abc import Awaitable, Callable, Coroutine, Generator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar, overload

from handrail.concurrency.cancellation import CancelScope, open_scope
from handrail.concurrency.threads import background_loop, run_on
from handrail.errors import (
    ContextExpired,
    HandrailError,
    OperationError,
    OperationHasNoTruth,
    OperationNeverAwaited,
    OperationUsedTwice,
    WaitOnLoopThread,
)

T = TypeVar("T")
A = TypeVar("A")
B = TypeVar("B")
C = TypeVar("C")
D = TypeVar("D")


class Home:
    """The lifetime of one call's operations, and the loop they run on.

    A call has one home. When it is closed, the operations that run in other tasks end with `ContextExpired`, and later
    ones are refused.
    """

    __slots__ = ("_live", "_owned", "call", "closed", "loop")

    def __init__(self, loop: asyncio.AbstractEventLoop, call: str) -> None:
        self.loop = loop
        self.call = call
        self.closed = False
        self._live: dict[Operation[Any], CancelScope] | None = None
        self._owned: set[asyncio.Task[Any]] | None = None

    def check(self) -> None:
        """Raise `ContextExpired` if the call has ended."""
        if self.closed:
            raise ContextExpired(self.call)

    def close(self) -> None:
        """End the call's operations in other tasks, and refuse later ones. Must be called on the loop's thread."""
        self.closed = True
        if self._live:
            # The members of a gather are left to the gather, which cancels each of them once and waits for them.
            spared = {asyncio.current_task(self.loop), *(self._owned or ())}
            innermost = {scope.task: scope for scope in self._live.values()}
            for task, scope in innermost.items():
                if task not in spared:
                    scope.end()

    async def run(self, operation: Operation[T], factory: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run an operation's work and return its value.

        Raises `ContextExpired` if the home is closed, before or during the work, and `OperationError` on any event loop
        other than the call's.
        """
        self.check()
        if asyncio.get_running_loop() is not self.loop:
            raise OperationError(
                operation.name,
                "it was awaited on a different event loop than its call's. Await it in the handler itself; "
                "from a thread with its own loop, call `.wait()` outside that loop.",
            )
        live = self._live
        if live is None:
            live = self._live = {}
        scope = live[operation] = open_scope()
        try:
            value = await factory()
        except BaseException as error:
            has_ended = scope.take_back() and not scope.interrupted
            del (
                scope
            )  # to avoid a cycle: the scope refers to a task with the error, and the error to this frame
            if has_ended and isinstance(error, asyncio.CancelledError):
                raise ContextExpired(self.call) from None
            raise
        finally:
            del live[operation]
        if scope.take_back():
            raise ContextExpired(self.call)  # the work ignored its cancellation
        return value

    @contextlib.contextmanager
    def own(self, tasks: Sequence[asyncio.Task[Any]]) -> Generator[None]:
        """Exempt these tasks from cancellation if the home is closed during the block. The caller must end them."""
        owned = self._owned
        if owned is None:
            owned = self._owned = set()
        owned.update(tasks)
        try:
            yield
        finally:
            owned.difference_update(tasks)


class Operation(Coroutine[Any, Any, T]):
    """A piece of work that has been described but not started.

    - *Cold*: nothing happens until it is awaited, started in a task group, or waited for.
    - *Single-use*: a second use raises `OperationUsedTwice`.
    - *Without a truth value*: `if context.request_approval(...)` raises, since its `await` is missing.
    - *Never silent*: an operation that is dropped unused warns with `OperationNeverAwaited`.
    - *Bound to its call*: an operation from a context's verb does not outlive the context.

    It is a coroutine to the rest of Python, so `asyncio.TaskGroup.create_task(operation)` accepts it.
    """

    __slots__ = ("__weakref__", "_factory", "_in_task", "_running", "_task", "home", "name")

    def __init__(
        self, factory: Callable[[], Coroutine[Any, Any, T]], name: str, home: Home | None = None
    ) -> None:
        self._factory: Callable[[], Coroutine[Any, Any, T]] | None = factory
        self.name = name
        self.home = home
        self._running: Coroutine[Any, Any, T] | None = None
        self._task: asyncio.Task[Any] | None = None
        self._in_task = False

    def __await__(self) -> Generator[Any, Any, T]:
        factory = self._factory
        if factory is None or self.home is not None:
            return self._begin().__await__()
        self._factory = None
        return factory().__await__()

    def __call__(self) -> Coroutine[Any, Any, T]:
        """Return the operation itself, for task groups that take a function, such as anyio's."""
        return self

    def wait(self) -> T:
        """Run the operation from synchronous code, and return its value or raise its error.

        An operation from a context's verb runs on the loop of its call, from any thread. Any other operation runs on one
        background loop, which all of them share. Ctrl-C cancels the operation, waits for its cleanup, and then
        raises `KeyboardInterrupt`; a second Ctrl-C does not wait. Raises `WaitOnLoopThread` on a thread that runs
        an event loop, `ContextExpired` if its call is over, and `LoopGone` if its loop is closed.
        """
        if asyncio._get_running_loop() is not None:  # pyright: ignore[reportPrivateUsage]  # asyncio documents it for this
            self._factory = None
            raise WaitOnLoopThread(
                self.name,
                "`.wait()` was called on a thread that runs an event loop, and would wait for itself. "
                "In async code write `await` instead; to call sync code that waits, run it in a thread "
                "with `asyncio.to_thread`.",
            )
        begin = self.give_up()
        if self.home is not None:
            self.home.check()
        loop = self.home.loop if self.home is not None else background_loop()
        try:
            return run_on(loop, _begun(begin), self.name)
        except HandrailError as error:
            if error.hides_frames:
                error.__traceback__ = None
            raise

    def _begin(self) -> Coroutine[Any, Any, T]:
        factory, home = self._take(), self.home
        if home is None:
            return factory()
        home.check()
        return home.run(self, factory)

    def give_up(self) -> Callable[[], Coroutine[Any, Any, T]]:
        """Return the operation's work, for the caller to run. The operation then counts as used."""
        factory, home = self._take(), self.home
        return factory if home is None else lambda: home.run(self, factory)

    def _take(self) -> Callable[[], Coroutine[Any, Any, T]]:
        factory = self._factory
        if factory is None:
            raise self._used_twice()
        self._factory = None
        return factory

    def _used_twice(self) -> OperationUsedTwice:
        return OperationUsedTwice(
            self.name,
            "it has already been used. An operation runs only once: call the verb again for a new one.",
        )

    # The coroutine protocol, for task groups.

    def send(self, value: Any, /) -> Any:
        task = _current_task()
        if self._running is None:
            self._in_task = True
            self._running, self._task = self._begin(), task
        elif task is not self._task:
            raise self._used_twice()  # two tasks were created from this operation
        try:
            return self._running.send(value)
        except BaseException:
            self._task = None
            raise

    @overload
    def throw(
        self,
        typ: type[BaseException],
        val: BaseException | object = None,
        tb: TracebackType | None = None,
        /,
    ) -> Any: ...
    @overload
    def throw(self, typ: BaseException, val: None = None, tb: TracebackType | None = None, /) -> Any: ...
    def throw(
        self,
        typ: type[BaseException] | BaseException,
        val: BaseException | object = None,
        tb: TracebackType | None = None,
        /,
    ) -> Any:
        error = typ if isinstance(typ, BaseException) else _instance(typ, val).with_traceback(tb)
        if self._running is None:
            self._in_task = True
            self._factory = None
            raise error
        if _current_task() is not self._task:
            raise error  # the cancellation was meant for a second task of this operation, which has not started
        try:
            return self._running.throw(error)
        except BaseException:
            self._task = None
            raise
        finally:
            del error, typ, val, tb  # to avoid a cycle: the error's traceback refers to this frame

    def close(self) -> None:
        self._factory = None
        if self._running is not None:
            self._running.close()

    def __bool__(self) -> NoReturn:
        if self._in_task or _is_a_tasks(self):
            # From Python 3.12 on, the repr of a task tests its coroutine for truth.
            return True  # pyright: ignore[reportGeneralTypeIssues]  # for type checkers, this never returns
        self._factory = None  # the error says enough, so no warning is needed
        raise OperationHasNoTruth(
            self.name,
            "it was used as a condition, but it has not run yet and has no truth value. "
            "Write `await` before it, or `.wait()` after it in synchronous code.",
        )

    def __del__(self) -> None:
        if getattr(self, "_factory", None) is not None and not sys.is_finalizing():
            self._factory = None
            warnings.warn(
                f"operation {self.name} was created but never run: `await` it, or call `.wait()`",
                OperationNeverAwaited,
                stacklevel=2,
                source=self,
            )

    if not TYPE_CHECKING:  # hidden, so that type checkers report unknown attributes

        def __getattr__(self, name: str) -> NoReturn:
            if name in Operation.__slots__:  # the operation's own constructor has failed
                raise AttributeError(name)
            raise AttributeError(
                f"operation {self.name} has no {name!r}: it is an operation, not the value that it returns. "
                "Write `await` before it, or `.wait()` after it in synchronous code."
            )

    def __repr__(self) -> str:
        return f"<Operation {self.name}{'' if self._factory is not None else ', used'}>"


def _is_a_tasks(operation: Operation[Any]) -> bool:
    """Return whether a task of the running loop was created from this operation."""
    try:
        tasks = asyncio.all_tasks()
    except RuntimeError:
        return False  # no loop is running here
    return any(task.get_coro() is operation for task in tasks)


def _current_task() -> asyncio.Task[Any] | None:
    loop = asyncio._get_running_loop()  # pyright: ignore[reportPrivateUsage]  # asyncio documents it for this
    return None if loop is None else asyncio.current_task(loop)


def _instance(kind: type[BaseException], value: BaseException | object) -> BaseException:
    if isinstance(value, BaseException):
        return value
    return kind() if value is None else kind(value)


async def _begun(begin: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Create the coroutine on the loop that runs it, not on the waiting thread, and return its value."""
    return await begin()


class Done:
    """The result of a verb that acts immediately. Awaiting it is optional."""

    __slots__ = ()

    def __await__(self) -> Generator[Any, Any, None]:
        return
        yield  # makes this function a generator, as the protocol requires

    def wait(self) -> None:
        """Do nothing, because the work is already done."""


DONE = Done()


@overload
def gather(a: Awaitable[A], /) -> Operation[tuple[A]]: ...
@overload
def gather(a: Awaitable[A], b: Awaitable[B], /) -> Operation[tuple[A, B]]: ...
@overload
def gather(a: Awaitable[A], b: Awaitable[B], c: Awaitable[C], /) -> Operation[tuple[A, B, C]]: ...
@overload
def gather(
    a: Awaitable[A], b: Awaitable[B], c: Awaitable[C], d: Awaitable[D], /
) -> Operation[tuple[A, B, C, D]]: ...
@overload
def gather(*operations: Awaitable[T]) -> Operation[tuple[T, ...]]: ...
def gather(*operations: Awaitable[Any]) -> Operation[tuple[Any, ...]]:
    """Run several operations concurrently and return their values in order.

    If one fails or is cancelled, the others are cancelled **and awaited** before its error is raised, so
    nothing is left running. Operations that were passed to `gather` can't be used separately any more.
    """
    members = [each if isinstance(each, Operation) else _as_operation(each) for each in operations]
    home = next((each.home for each in members if each.home is not None), None)
    work = [each.give_up() for each in members]
    return Operation(lambda: _gather(work, home), f"gather({', '.join(each.name for each in members)})", home)


def _as_operation(awaitable: Awaitable[T]) -> Operation[T]:
    return Operation(lambda: _await(awaitable), type(awaitable).__name__)


async def _await(awaitable: Awaitable[T]) -> T:
    return await awaitable


async def _gather(
    work: Sequence[Callable[[], Coroutine[Any, Any, Any]]], home: Home | None
) -> tuple[Any, ...]:
    loop = asyncio.get_running_loop()
    tasks = [loop.create_task(begin()) for begin in work]
    if not tasks:
        return ()
    settled: asyncio.Future[None] = loop.create_future()
    left = len(tasks)
    failed: asyncio.Task[Any] | None = None

    def ended(task: asyncio.Task[Any]) -> None:
        nonlocal left, failed
        left -= 1
        # Retrieving the exception also marks it as seen, so asyncio does not log it.
        unsuccessful = task.cancelled() or task.exception() is not None
        if unsuccessful and failed is None:
            failed = task
        if (left == 0 or failed is not None) and not settled.done():
            settled.set_result(None)

    for task in tasks:
        task.add_done_callback(ended)
    with home.own(tasks) if home is not None else contextlib.nullcontext():
        try:
            await settled
        finally:
            await cancel_and_await(tasks)
    if failed is not None:
        failed.result()  # raises the task's error, which may be `CancelledError`
    return tuple(task.result() for task in tasks)


async def cancel_and_await(tasks: Sequence[asyncio.Task[Any]]) -> None:
    """Cancel these tasks and wait until they end. If the caller is cancelled meanwhile, `CancelledError` is raised afterwards."""
    cancelled: asyncio.CancelledError | None = None
    unfinished: list[asyncio.Task[Any]] = [task for task in tasks if not task.done()]
    for task in unfinished:
        task.cancel()
    while unfinished:
        try:
            await asyncio.wait(unfinished)
        except asyncio.CancelledError as error:
            cancelled = error
        unfinished = [task for task in unfinished if not task.done()]
    for task in tasks:
        if not task.cancelled():
            task.exception()  # marks the exception as seen, so asyncio does not log it
    if cancelled is not None:
        raise cancelled
