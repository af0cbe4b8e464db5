"""`Broadcasts`: the live output of runs, for people who watch a session from another process.

A broadcast is not a record, and can be lost. A process that misses one reads the journal's records instead.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Protocol

import msgspec


class Watcher(msgspec.Struct, frozen=True):
    """A process in which somebody watches a session."""

    id: str
    joins: int
    """How many times somebody in this process has joined. After each join, an active run broadcasts its state so far."""


class Batch(msgspec.Struct, frozen=True):
    """The output of one leg of a run during a short interval."""

    position: int
    """Orders the batches of a session."""
    run_id: str
    leg: int
    number: int
    """1-based number of this batch in its leg. A gap in the numbers means that output was lost or left out."""
    body: bytes


class Broadcasts(Protocol):
    """Batches of output, by session. A batch is kept until `sweep` finds it old, or until the session's last watcher leaves."""

    async def watch(self, watcher: Watcher, session_id: str, /, *, seconds: float) -> None:
        """Record that a process watches a session for the next `seconds`, and notify every listener."""
        ...

    async def leave(self, watcher_id: str, session_id: str, /) -> None:
        """Record that a process no longer watches a session, and notify every listener.

        If no other process watches the session, its batches are deleted.
        """
        ...

    async def watchers(self, session_ids: Collection[str], /) -> Mapping[str, Sequence[Watcher]]:
        """Return the watchers of each of these sessions. A session that nobody watches is left out."""
        ...

    async def add(self, session_id: str, run_id: str, leg: int, number: int, body: bytes, /) -> None:
        """Add a batch, and notify every listener."""
        ...

    async def last(self, session_id: str, /) -> int:
        """Return the position of a session's newest batch, or 0 if it has none."""
        ...

    async def read(self, session_id: str, after: int, /) -> Sequence[Batch]:
        """Return the batches of a session after a position, in order. Batches that were altered are left out."""
        ...

    async def sweep(self) -> None:
        """Delete old batches, and watchers whose time ended a while ago."""
        ...

    async def listen(self, heard: Callable[[str, bool], None], /) -> Callable[[], None]:
        """Call `heard(session_id, True)` when a session's watchers have changed, and `heard(session_id, False)` for a new batch.

        The id is "" if notices may have been missed. `heard` is called in another thread. Returns a function that
        unsubscribes it.
        """
        ...
