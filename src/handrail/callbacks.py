"""Callbacks that an application passes in. They may be async."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any, Generic, TypeVar

from handrail.isolation import isolated

log = logging.getLogger("handrail.callbacks")

T = TypeVar("T")


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
                    _close(self._waiting.popleft())
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


def _close(awaitable: Awaitable[Any]) -> None:
    if inspect.iscoroutine(awaitable):
        awaitable.close()
