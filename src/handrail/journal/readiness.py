"""`Readiness`: whether a process could take work now, for the probes of a load balancer or an orchestrator."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

from handrail.clock import SYSTEM_CLOCK, Clock
from handrail.errors import HandrailError

if TYPE_CHECKING:
    from handrail.journal.protocol import Journal

State = Literal["ready", "stopping", "journal unreachable"]

_EVERY = 1.0
"""Minimum seconds between two checks of the journal, because probes need no authentication."""
_PATIENCE = 2.0
"""Maximum seconds to wait for the journal's answer."""


class Readiness:
    """Whether a process is not stopping, and its journal answers.

    The journal is asked at most once a second and by one question at a time, however many probes there are.
    """

    def __init__(
        self, journal: Journal, is_stopping: Callable[[], bool], clock: Clock = SYSTEM_CLOCK
    ) -> None:
        self._journal = journal
        self._is_stopping = is_stopping
        self._clock = clock
        self._check: asyncio.Future[Any] | None = None
        self._began = 0.0

    async def state(self) -> State:
        """Return the state. This takes at most about two seconds."""
        if self._is_stopping():
            return "stopping"
        check, now = self._check, self._clock.monotonic()
        if check is None or (check.done() and now - self._began >= _EVERY):
            self._began = now
            check = self._check = asyncio.ensure_future(self._ask())
        await asyncio.wait([check], timeout=_PATIENCE)
        return "ready" if check.done() and check.result() else "journal unreachable"

    async def _ask(self) -> bool:
        """Return whether the journal answers a question that workers ask it twice a second."""
        try:
            await self._journal.queue.signalled()
        except HandrailError:
            return False
        return True
