"""`Subagents`: nested runs in AG-UI, each started once in a leg and closed in it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ag_ui.core import (
    SubagentErrorEvent,
    SubagentFinishedEvent,
    SubagentFinishedSuspendedOutcome,
    SubagentStartedEvent,
)

from handrail.place import Place
from handrail.question import Question
from handrail.serve.agui.interrupts import CallAt, holder, interrupt_id, place_of_question
from handrail.serve.agui.message_writer import OpenRun
from handrail.serve.agui.wire_events import Event, clean, wire_event


class Subagents:
    """The nested runs of one run, as one leg shows them.

    A nested run is started with its first event, after the run around it. Before an interrupt it closes as
    suspended; the next leg starts it again under the same id.
    """

    def __init__(self, root: str, call_at: CallAt) -> None:
        self._root = root
        self._call_at = call_at
        self._runs: dict[str, OpenRun] = {root: OpenRun(root, None)}
        self._open: dict[str, None] = {}
        """The nested runs that are open in this leg, outer ones first."""
        self._closed: set[str] = set()

    def run(self, run_id: str) -> OpenRun:
        """The state of a run, created if it is new."""
        run = self._runs.get(run_id)
        if run is None:
            run = self._runs[run_id] = OpenRun(run_id, run_id)
        return run

    def __iter__(self) -> Iterator[OpenRun]:
        return iter(tuple(self._runs.values()))

    def enter(self, run: OpenRun) -> list[Event]:
        """Start a nested run and those around it, unless they are started in this leg."""
        if run.tag is None or run.id in self._open or run.id in self._closed:
            return []
        outer = self._outer(run.id)
        before = [] if outer is None else self.enter(self.run(outer))
        self._open[run.id] = None
        return [*before, self._started(run, outer)]

    def _outer(self, run_id: str) -> str | None:
        """The nested run around this one; None if that is the outermost run."""
        found = Place.from_id(run_id, self._root).run
        return None if found.parent is None else found.id(self._root)

    def _started(self, run: OpenRun, outer: str | None) -> Event:
        call = holder(Place.from_id(run.id, self._root), self._root, self._call_at)
        started = SubagentStartedEvent(
            subagent_run_id=run.id,
            name=run.name or "agent",
            parent_subagent_run_id=outer,
            parent_tool_call_id=None if call is None else call.call_id,
        )
        return wire_event(started, run.id)

    def end(self, run: OpenRun, reason: str) -> list[Event]:
        """End a nested run."""
        before = self.enter(run)
        if self._open.pop(run.id, 0) == 0:
            return before
        self._closed.add(run.id)
        del self._runs[run.id]
        failed = reason == "cancelled" or reason.startswith("failed")
        end = (
            self._error(run.id, reason)
            if failed
            else wire_event(SubagentFinishedEvent(subagent_run_id=run.id), run.id)
        )
        return [*before, end]

    def _error(self, run_id: str, reason: str) -> Event:
        said, _, why = reason.partition(": ")
        error = SubagentErrorEvent(subagent_run_id=run_id, message=clean(why or said), code=said)
        return wire_event(error, run_id)

    def suspend(self, questions: Sequence[Question]) -> list[Event]:
        """Close every open run as suspended, inner ones first."""
        asked: dict[str, list[str]] = {}
        for question in questions:
            found = holder(place_of_question(question), self._root, self._call_at)
            if found is not None:
                asked.setdefault(found.run_id, []).append(interrupt_id(question))
        events: list[Event] = []
        for run_id in reversed(self._open):
            outcome = SubagentFinishedSuspendedOutcome(interrupt_ids=asked.get(run_id))
            events.append(wire_event(SubagentFinishedEvent(subagent_run_id=run_id, outcome=outcome), run_id))
        return events

    def abandon(self, reason: str) -> list[Event]:
        """Close every open run with an error, inner ones first, because the run ends."""
        return [self._error(run_id, reason) for run_id in reversed(self._open)]

    def so_far(self) -> list[Event]:
        """The events for a reader who joins now."""
        return [self._started(self.run(run_id), self._outer(run_id)) for run_id in self._open]

    def end_leg(self) -> None:
        self._open.clear()
        self._closed.clear()
