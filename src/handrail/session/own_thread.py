"""`OwnThread`: delivers events to a subscriber that has blocked the event loop for too long, on a thread of its own."""

from __future__ import annotations

import logging
import threading
from asyncio import CancelledError
from collections import deque
from collections.abc import Callable
from typing import Any

log = logging.getLogger("handrail.events")

MOST = 10_000
"""How many events may wait for one subscriber. Later ones are dropped."""


class OwnThread:
    """A subscriber whose events are queued, and delivered in order on a daemon thread.

    The thread exists only while events wait. If more than `MOST` wait, the newest are dropped, and a warning says so once.
    """

    __slots__ = ("_is_running", "_lock", "_name", "_waiting", "_warned", "listener")

    def __init__(self, listener: Callable[[Any], None], name: str) -> None:
        self.listener = listener
        self._name = name
        self._lock = threading.Lock()
        self._waiting: deque[object] = deque()
        self._is_running = False
        self._warned = False

    def __call__(self, event: object) -> None:
        with self._lock:
            if len(self._waiting) >= MOST:
                if not self._warned:
                    self._warned = True
                    log.warning(
                        "%d events wait for the subscriber %s; newer ones are dropped", MOST, self._name
                    )
                return
            self._waiting.append(event)
            if self._is_running:
                return
            self._is_running = True
        threading.Thread(target=self._deliver, name=f"handrail-{self._name}", daemon=True).start()

    def stop(self) -> None:
        """Drop the events that wait, because the subscription has ended."""
        with self._lock:
            self._waiting.clear()

    def _deliver(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    self._is_running = False
                    return
                event = self._waiting.popleft()
            try:
                self.listener(event)
            except (Exception, CancelledError, GeneratorExit):
                log.exception("a subscriber to %s raised; the run goes on", type(event).__name__)
