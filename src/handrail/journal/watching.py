"""Looking now and then whether another process has answered what is waited for here."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Generator


class Watch:
    """Calls `look` with the id of every question that is waited for, every so many seconds."""

    def __init__(self, every: float | None, look: Callable[[str], Awaitable[None]]) -> None:
        self._every = every
        self._look = look
        self._waiting: dict[str, None] = {}
        self._task: asyncio.Task[None] | None = None

    @contextlib.contextmanager
    def on(self, question_id: str) -> Generator[None]:
        """While this lasts, an answer from elsewhere is found."""
        self._waiting[question_id] = None
        if self._every is not None and (self._task is None or self._task.done()):
            self._task = asyncio.get_running_loop().create_task(self._keep_looking(self._every))
        try:
            yield
        finally:
            self._waiting.pop(question_id, None)
            if not self._waiting and self._task is not None:
                self._task.cancel()
                self._task = None

    async def _keep_looking(self, every: float) -> None:
        while self._waiting:
            await asyncio.sleep(every)
            for question_id in tuple(self._waiting):
                await self._look(question_id)
