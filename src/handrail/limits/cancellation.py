"""Cancellation: one cancel stops a whole tree of runs and calls, the innermost first."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from typing import Any

log = logging.getLogger("handrail.limits")

Watcher = Callable[[], None]


class Cancellation:
    """One run's place in the tree of what can be cancelled; `tasks` says what is at work there.

    Cancelling marks this and everything below, then cancels the tasks at work, children first. Each
    call rolls back and gets its end event before the one around it goes on unwinding. What was
    cancelled before keeps its reason and is not disturbed while it unwinds.
    """

    __slots__ = ("_children", "_parent", "_tasks", "_watchers", "cancelled", "reason")

    def __init__(
        self, tasks: Callable[[], Iterable[asyncio.Task[Any]]], parent: Cancellation | None = None
    ) -> None:
        self.cancelled = parent.cancelled if parent is not None else False
        self.reason = parent.reason if parent is not None else ""
        self._parent = parent
        self._children: dict[Cancellation, None] = {}
        self._tasks = tasks
        self._watchers: list[Watcher] = []
        if parent is not None:
            parent._children[self] = None

    def close(self) -> None:
        """This run is over; nothing here can be cancelled any more."""
        if self._parent is not None:
            self._parent._children.pop(self, None)

    def on_cancel(self, watcher: Watcher) -> Callable[[], None]:
        """Call `watcher` when this is cancelled, at once if it is; what is returned takes it back."""
        if self.cancelled:
            _tell(watcher)
        else:
            self._watchers.append(watcher)
        return lambda: self._watchers.remove(watcher) if watcher in self._watchers else None

    def cancel(self, reason: str = "cancelled") -> None:
        """Stop everything here and below. To be called on the loop's own thread."""
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
        """Mark this and everything below, and list it, children first."""
        self.cancelled = True
        self.reason = reason
        for child in self._children:
            if not child.cancelled:
                child._mark(reason, stopping)
        stopping.append(self)

    def _stop(self, done: set[asyncio.Task[Any]]) -> None:
        for task in tuple(self._tasks()):
            if task not in done and not task.done():
                done.add(task)
                task.cancel()

    def _tell_watchers(self) -> None:
        watchers, self._watchers = self._watchers, []
        for watcher in watchers:
            _tell(watcher)


def _tell(watcher: Watcher) -> None:
    try:
        watcher()
    except Exception:
        log.exception("a watcher of a cancellation raised; the cancellation goes on")
