"""`Broadcast`: writes a leg's events in batches, for watchers of its thread in other processes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec

from handrail.errors import HandrailError
from handrail.journal.protocol import Broadcasts, Watcher
from handrail.serve.agui.wire_events import Event
from handrail.serve.feed import Feed

log = logging.getLogger("handrail.serve")

_PAUSE = 0.05
"""Minimum seconds between two batches. The first event after a pause is written at once."""
_MOST_WAITING = 4096
"""Maximum number of events that wait to be written. Beyond that, they are dropped, and the watchers join again."""


class Opening(msgspec.Struct, frozen=True, kw_only=True):
    """The state of an active run, for a watcher that joins."""

    run_id: str
    leg: str
    """The id of the open leg, or "" if no leg is open. Without an open leg, the journal has everything."""
    messages: list[dict[str, Any]] = []
    """The finished messages of the run and of the runs nested in it."""
    state: Any = None
    emitted: dict[str, list[Any]] = {}
    """The events that calls have emitted, by the call's id."""
    open: list[Event] = []
    """The events that show a watcher what is in progress."""


class Said(msgspec.Struct, frozen=True, omit_defaults=True):
    """One part of a batch: events for all watchers, or an opening for one of them."""

    events: list[Event] = []
    opening: Opening | None = None
    watcher: str = ""
    """The id of the watcher that the opening is for."""
    join: int = 0
    """The number of the watcher's last join when the opening was made."""


def decode(body: bytes) -> list[Said]:
    """Decode a batch."""
    return msgspec.json.decode(body, type=list[Said])


class Broadcast(Feed):
    """The feed of a leg whose readers are in other processes. While nobody watches, new events are dropped.

    Batches are numbered, and written one after another, at least `pause` seconds apart. The run does not wait for
    them. If a batch can't be written, its number is missing, and the watchers join again.
    """

    def __init__(
        self,
        broadcasts: Broadcasts,
        session_id: str,
        run_id: str,
        leg: int,
        *,
        opening: Callable[[], Opening],
        pause: float = _PAUSE,
    ) -> None:
        super().__init__("")
        self.session_id = session_id
        self._broadcasts = broadcasts
        self._run_id = run_id
        self._leg = leg
        self._opening = opening
        self._every = pause
        self._number = 0
        self._joined: dict[str, int] = {}
        """The watchers by id, each with the number of the last join for which it got an opening."""
        self._said: list[Said] = []
        self._count = 0
        self._writing: asyncio.Task[None] | None = None

    @property
    def is_watched(self) -> bool:
        return bool(self._joined)

    def append(self, events: Iterable[Event]) -> None:
        """Add events to the next batch, if somebody watches."""
        if not self._joined:
            return
        found = list(events)
        if not found:
            return
        self._count += len(found)
        if self._count > _MOST_WAITING:
            self._drop()
        elif self._said and self._said[-1].opening is None:
            self._said[-1].events.extend(found)
        else:
            self._add(Said(found))

    def watch(self, watchers: Sequence[Watcher]) -> None:
        """Replace the watchers. Each watcher that has joined since its last opening gets a new opening."""
        if not watchers:
            self._joined.clear()
            return
        if not self._joined and self._number:
            self._number += 1  # a number is skipped, because events were dropped while nobody watched
        known, self._joined = self._joined, {each.id: each.joins for each in watchers}
        for each in watchers:
            if known.get(each.id, 0) < each.joins:
                self._add(Said(opening=self._opening(), watcher=each.id, join=each.joins))

    async def finish(self) -> None:
        """Wait until everything is written."""
        while self._writing is not None:
            await asyncio.wait({self._writing})

    def _add(self, said: Said) -> None:
        self._said.append(said)
        if self._writing is None:
            self._writing = asyncio.get_running_loop().create_task(self._write())

    def _drop(self) -> None:
        self._said.clear()
        self._count = 0
        self._number += 1

    async def _write(self) -> None:
        try:
            while self._said:
                said, self._said, self._count = self._said, [], 0
                self._number += 1
                try:
                    body = msgspec.json.encode(said)
                    await self._broadcasts.add(self.session_id, self._run_id, self._leg, self._number, body)
                except HandrailError:
                    log.warning(
                        "could not broadcast events of run %s; its watchers join again",
                        self._run_id,
                        exc_info=True,
                    )
                await asyncio.sleep(self._every)
        finally:
            self._writing = None
