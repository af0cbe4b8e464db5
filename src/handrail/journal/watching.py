"""Looking now and then whether another process has answered what is waited for here."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Generator, Mapping

from handrail.errors import JournalError

log = logging.getLogger("handrail.questions")


class Watch:
    """Calls `look` with the id of every question that is waited for, every so many seconds."""

    def __init__(self, every: float | None, look: Callable[[str], Awaitable[None]]) -> None:
        self._every = every
        self._look = look
        self._waiting: dict[asyncio.AbstractEventLoop, dict[str, None]] = {}
        """By the loop that waits: a thread has one of its own, and each looks for itself."""
        self._tasks: dict[asyncio.AbstractEventLoop, asyncio.Task[None]] = {}

    @contextlib.contextmanager
    def on(self, question_id: str) -> Generator[None]:
        """While this lasts, an answer from elsewhere is found."""
        loop = asyncio.get_running_loop()
        waiting = self._waiting.setdefault(loop, {})
        waiting[question_id] = None
        if self._every is not None and loop not in self._tasks:
            self._tasks[loop] = loop.create_task(self._keep_looking(self._every, waiting))
        try:
            yield
        finally:
            waiting.pop(question_id, None)
            if not waiting:
                self._waiting.pop(loop, None)
                task = self._tasks.pop(loop, None)
                if task is not None:
                    task.cancel()

    async def _keep_looking(self, every: float, waiting: Mapping[str, None]) -> None:
        while True:
            await asyncio.sleep(every)
            for question_id in tuple(waiting):
                try:
                    await self._look(question_id)
                except JournalError:
                    log.warning(
                        "could not look for an answer to %s; it is tried again", question_id, exc_info=True
                    )
