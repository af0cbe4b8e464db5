"""`Emissions`: the events that a served run's tools emitted, for the page and for the journal."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from handrail.clock import Clock
from handrail.errors import HandrailError, RunBusy
from handrail.events import Emitted
from handrail.journal.protocol import Journal
from handrail.journal.records import Entry
from handrail.serve.agui.wire_events import plain_json

log = logging.getLogger("handrail.serve")

_MOST = 100
"""Maximum number of events that are kept for each call. The page shows the same number."""


class Emissions:
    """The newest events that each call of a live run emitted.

    The events of a call are recorded when it ends, or when this process no longer executes the run. A call that is
    executed again emits its events again, and these replace the recorded ones.
    """

    def __init__(self, journal: Journal, run_id: str, clock: Clock) -> None:
        self._journal = journal
        self._run_id = run_id
        self._clock = clock
        self._calls: dict[str, list[dict[str, Any]]] = {}
        self._unrecorded: set[str] = set()
        self._recording: set[asyncio.Task[None]] = set()

    def add(self, event: Emitted) -> None:
        shown = {"tool": event.tool, "type": type(event.event).__name__, "event": plain_json(event.event)}
        self._calls[event.call_id] = [*self._calls.get(event.call_id, ()), shown][-_MOST:]
        self._unrecorded.add(event.call_id)

    def by_call(self) -> Mapping[str, Sequence[Any]]:
        """Return the events by the id of the call that emitted them."""
        return dict(self._calls)

    def end_call(self, call_id: str) -> None:
        """Start recording the events of a call that has ended."""
        if call_id in self._unrecorded:
            task = asyncio.get_running_loop().create_task(self._record(call_id))
            self._recording.add(task)
            task.add_done_callback(self._recording.discard)

    async def finish(self) -> None:
        """Record all events that are not recorded yet. Called when this process no longer executes the run."""
        if self._recording:
            await asyncio.wait(tuple(self._recording))
        for call_id in sorted(self._unrecorded):
            await self._record(call_id, is_over=True)

    async def _record(self, call_id: str, *, is_over: bool = False) -> None:
        """Record the events of a call. A failure is logged.

        If this process no longer owns the run, nothing is recorded without `is_over`.
        """
        shown = self._calls[call_id]
        entry = Entry("emitted", call_id, self._clock.now().timestamp(), msgspec.msgpack.encode(shown))
        note = self._journal.calls.note
        try:
            try:
                await note(self._run_id, entry)
            except RunBusy:
                if not is_over:
                    return  # this process no longer owns the run, and `finish` tries again
                await note(self._run_id, entry, from_outside=True)
        except HandrailError:
            log.warning("could not record the events that %s emitted", call_id, exc_info=True)
            return
        if self._calls[call_id] is shown:
            self._unrecorded.discard(call_id)
