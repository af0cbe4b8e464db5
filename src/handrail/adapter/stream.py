"""`RunStream`: a run as a stream of events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from typing import TYPE_CHECKING, Any, Generic, NoReturn, TypeVar

from handrail.adapter.response import PromptResponse
from handrail.errors import OperationUsedTwice
from handrail.operation import Operation, cancel_and_await
from handrail.place import is_in_run
from handrail.protocols import EventBus
from handrail.threads import background_loop, run_on

OutputT = TypeVar("OutputT")

_END = object()


class RunStream(Generic[OutputT]):
    """The events of a run and of everything nested in it, and its response.

    Iterate with `async for`, or with `for` in a script. `.response` is an operation that returns the response or
    raises the error that ended the run; iterating does not raise that error. Leaving a `for` loop early, or calling
    `aclose()`, cancels the run at once. Leaving an `async for` cancels it once the generator is closed.
    """

    def __init__(
        self,
        begin: Callable[[], Coroutine[Any, Any, PromptResponse[OutputT]]],
        bus: EventBus,
        run_id: str,
        name: str,
    ) -> None:
        self._begin = begin
        self._bus = bus
        self._run_id = run_id
        self._name = name
        self._task: asyncio.Task[PromptResponse[OutputT]] | None = None
        self._iterated = False

    @property
    def run_id(self) -> str:
        return self._run_id

    if not TYPE_CHECKING:  # type checkers report unknown attributes by themselves

        def __getattr__(self, name: str) -> NoReturn:
            raise AttributeError(
                f"a stream has no {name!r}: it yields the run's events. The response is "
                f"`(await stream.response)`, or `stream.response.wait()` in a script."
            )

    @property
    def response(self) -> Operation[PromptResponse[OutputT]]:
        """The run's response. Awaiting it starts the run, unless iterating has already started it."""
        return Operation(self._finish, f"stream({self._name!r}).response")

    async def _finish(self) -> PromptResponse[OutputT]:
        task = self._start()
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if not task.done():
                await cancel_and_await([task])
            raise

    async def aclose(self) -> None:
        """Cancel the run and wait until it has ended. Does nothing if the run is over or has not started."""
        if self._task is not None and not self._task.done():
            await cancel_and_await([self._task])

    def _start(self) -> asyncio.Task[PromptResponse[OutputT]]:
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._begin())
            self._task.add_done_callback(_seen)
        return self._task

    def __aiter__(self) -> AsyncIterator[object]:
        if self._iterated:
            raise OperationUsedTwice(
                f"stream({self._name!r})",
                "it has been iterated already. A stream can be iterated once, so create another.",
            )
        self._iterated = True
        return self._events()

    async def _events(self) -> AsyncIterator[object]:
        loop = asyncio.get_running_loop()
        queue: asyncio.Queue[object] = asyncio.Queue()

        def put(event: object) -> None:
            context = getattr(event, "run_context", None)
            run_id = getattr(context, "run_id", None) or getattr(event, "run_id", "")
            if is_in_run(run_id, self._run_id):
                if asyncio._get_running_loop() is loop:  # pyright: ignore[reportPrivateUsage]  # asyncio documents it for this
                    queue.put_nowait(event)
                else:
                    loop.call_soon_threadsafe(queue.put_nowait, event)

        stop = self._bus.subscribe(object, put)
        task = self._start()
        task.add_done_callback(lambda _: queue.put_nowait(_END))
        try:
            while (event := await queue.get()) is not _END:
                yield event
        finally:
            stop()
            if not task.done():
                await cancel_and_await([task])

    def __iter__(self) -> Iterator[object]:
        events = self.__aiter__()
        loop = background_loop()
        name = f"stream({self._name!r})"
        try:
            while True:
                try:
                    yield run_on(loop, _next(events), name)
                except StopAsyncIteration:
                    return
        finally:
            run_on(loop, _close(events), name)


def _seen(task: asyncio.Task[Any]) -> None:
    if not task.cancelled():
        # Marks the error as retrieved, so that asyncio does not log it; `.response` raises it.
        task.exception()


async def _next(events: AsyncIterator[object]) -> object:
    return await anext(events)


async def _close(events: Any) -> None:
    await events.aclose()
