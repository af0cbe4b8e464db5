"""One commit at a time to a session, whichever gate, task or event loop it comes from."""

from __future__ import annotations

import asyncio
import threading
from types import TracebackType
from weakref import WeakKeyDictionary

from handrail.session import Session
from handrail.threads import forget_closed

_WAIT = 0.001
"""Seconds between two looks at a lock that another event loop holds."""


class CommitLock:
    """Fair among the tasks of one loop, and exclusive among loops."""

    def __init__(self) -> None:
        self._between_loops = threading.Lock()
        self._within: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Lock] = WeakKeyDictionary()

    async def __aenter__(self) -> None:
        loop = asyncio.get_running_loop()
        within = self._within.get(loop)
        if within is None:
            forget_closed(self._within)
            within = self._within[loop] = asyncio.Lock()
        await within.acquire()
        try:
            while not self._between_loops.acquire(blocking=False):
                await asyncio.sleep(_WAIT)
        except BaseException:
            within.release()
            raise

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._between_loops.release()
        self._within[asyncio.get_running_loop()].release()


_locks: WeakKeyDictionary[Session, CommitLock] = WeakKeyDictionary()


def commit_lock_of(session: Session) -> CommitLock:
    """The lock of this session."""
    lock = _locks.get(session)
    if lock is None:
        lock = _locks.setdefault(session, CommitLock())
    return lock
