"""`CallStates` and `Subagents`: the calls and nested runs in progress, as AG-UI clients see them.

`CallStates` tracks each call's place, status, progress and cost. `Subagents` tracks the nested runs. A nested run
is started at most once in each leg and closed before the leg ends.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from ag_ui import core as wire

from handrail.clock import Clock
from handrail.events import ModelResponded, Progress, ToolInvoked, ToolResumed, ToolRolledBack, ToolStarted
from handrail.messages import AssistantMessage, Usage
from handrail.question import Question
from handrail.run.place import Place, outer_call_ids
from handrail.serve.agui.interrupts import CallAt, holder, interrupt_id, place_of_question
from handrail.serve.agui.message_writer import OpenRun
from handrail.serve.agui.wire_events import Event, custom, wire_event
from handrail.serve.attachments import facts_of
from handrail.tools.result import clean_text

CALL = "handrail.call"


@dataclass(slots=True)
class OpenCall:
    """A call and its state, as clients see them."""

    id: str
    tool: str
    run: OpenRun
    place: Place | None
    """The call's place in the run, or None if it is unknown."""
    around: str | None
    """For an inner call, the id of the call that made it, or None if that is unknown. None for a model's own call."""
    facts: dict[str, Any]
    progress: dict[str, Any] | None = None
    usage: Usage | None = None
    cost: Decimal | None = Decimal(0)


class CallStates:
    """The state of the calls in one run and in the runs nested in it."""

    def __init__(self, root: str, clock: Clock) -> None:
        self._root = root
        self._clock = clock
        self._live: dict[str, OpenCall] = {}
        self._places: dict[str, Place] = {}
        """The places of calls, by call id, as far as they are known."""
        self._asked_for: dict[Place, str] = {}
        """The ids of the calls that models made, by place. Inner calls, which tools make, are not included."""
        self._shown: set[str] = set()
        """The ids of the calls whose progress has been sent in this leg."""

    def __iter__(self) -> Iterator[OpenCall]:
        return iter(self._live.values())

    def at(self, place: Place) -> str | None:
        """Return the id of the call that a model made at this place, or None if there is no such call."""
        return self._asked_for.get(place)

    def inside(self, call_id: str) -> list[tuple[str, Place]]:
        """Return the ids and places of the calls that models made in the runs nested in a call.

        There are none if the call's own place is unknown.
        """
        place = self._places.get(call_id)
        if place is None:
            return []
        return [(id, at) for at, id in self._asked_for.items() if at.attempt_at(place)]

    def number(self, run: OpenRun, message: AssistantMessage) -> None:
        """Assign places to the calls in a model's answer."""
        within = Place.from_id(run.id, self._root)
        for call in message.calls:
            run.calls += 1
            place = within.child(run.calls)
            self._places[call.id] = place
            self._asked_for[place] = call.id

    # Status.

    def start(self, event: ToolStarted | ToolResumed, run: OpenRun) -> list[Event]:
        """Show a call as running. A call that continues in a new leg may have been unknown to this process."""
        around = None if event.call_id in self._places else self._around(event.call_id)
        before = self._live.get(event.call_id)
        facts: dict[str, Any] = {
            "call_id": event.call_id,
            "tool": event.tool,
            "status": "running",
            "began_at": self._clock.now().isoformat() if before is None else before.facts["began_at"],
            "run_id": self._root,
        }
        if around is not None:
            facts["parent_call_id"] = around
        place = self._places.get(event.call_id)
        call = OpenCall(event.call_id, event.tool, run, place, around, facts)
        self._live[event.call_id] = call
        return [_call_event(call)]

    def _around(self, call_id: str) -> str | None:
        """Record the place of an inner call. Returns the id of the call that made it, or None if that is unknown."""
        for outer, attempt, number in outer_call_ids(call_id):
            place = self._places.get(outer)
            if place is not None:
                self._places[call_id] = place.attempt(attempt).child(number)
                return outer
        return None

    def set_waiting(self, call_id: str, waits: bool) -> list[Event]:
        """Mark a call as waiting or running. Returns the event for the change.

        Returns no event if the call is not in progress, or if it already has that status.
        """
        call = self._live.get(call_id)
        status = "waiting" if waits else "running"
        if call is None or call.facts["status"] == status:
            return []
        call.facts["status"] = status
        return [_call_event(call)]

    def roll_back(self, event: ToolRolledBack, run: OpenRun) -> list[Event]:
        call = self._live.get(event.call_id)
        if call is not None:
            call.facts["rolled_back"] = {
                "reason": clean_text(event.reason),
                "not_undone": list(event.not_undone),
            }
        return []

    def finish(self, event: ToolInvoked, run: OpenRun) -> list[Event]:
        call = self._live.pop(event.call_id, None)
        if call is None:
            facts = {"call_id": event.call_id, "tool": event.tool, "run_id": self._root}
            call = OpenCall(event.call_id, event.tool, run, None, None, facts)
        call.facts |= {"status": event.status, "seconds": round(event.seconds, 6)}
        if event.result.attachments:
            call.facts["attachments"] = facts_of(event.result.attachments)
        if event.status == "ok":
            call.facts.pop("rolled_back", None)  # an earlier attempt was rolled back, but this one succeeded
        else:
            call.facts["reason"] = clean_text(event.result.message)
        return [_call_event(call)]

    def commit(self, call_id: str, diff: str, paths: list[str]) -> Event:
        """Return the event that reports the files that a finished call changed."""
        return custom(CALL, {"call_id": call_id, "diff": diff, "paths": paths, "run_id": self._root})

    def add_usage(self, event: ModelResponded) -> None:
        """Add the usage and cost of a model's answer in a nested run to every call in progress that contains that run.

        If the cost of one answer is unknown, so is the cost of the call.
        """
        place = Place.from_id(event.run_context.run_id, self._root)
        for call in self._live.values():
            if call.place is not None and place.attempt_at(call.place):
                call.usage = (call.usage or Usage()) + event.usage
                call.cost = None if call.cost is None or event.cost is None else call.cost + event.cost
                call.facts["usage"] = usage_json(call.usage)
                call.facts["cost"] = None if call.cost is None else str(call.cost)

    def lose_cost(self, run_id: str) -> None:
        """Note that the cost of a nested run is unknown, and so is the cost of every call in progress that contains it."""
        place = Place.from_id(run_id, self._root)
        for call in self._live.values():
            if call.place is not None and place.attempt_at(call.place):
                call.cost = None
                if call.usage is not None:
                    call.facts["cost"] = None

    # Progress.

    def progress(self, event: Progress, run: OpenRun) -> list[Event]:
        content = {
            "callId": event.call_id,
            "tool": event.tool,
            "message": clean_text(str(event.message)),
            "done": _finite(event.done),
            "total": _finite(event.total),
        }
        call = self._live.get(event.call_id)
        before = None if call is None else call.progress
        if call is not None:
            call.progress = content
        if before is None or event.call_id not in self._shown:
            self._shown.add(event.call_id)
            return [_progress_event(event.call_id, content, run.tag)]
        patch = [
            {"op": "replace", "path": f"/{key}", "value": value}
            for key, value in content.items()
            if before[key] != value
        ]
        if not patch:
            return []
        told = {"messageId": f"progress-{event.call_id}", "activityType": "progress", "patch": patch}
        return [wire_event(wire.ActivityDeltaEvent.model_validate(told), run.tag)]

    def so_far(self) -> list[Event]:
        """Return the events that show the calls in progress to a client that joins now."""
        told = [_call_event(call) for call in self._live.values()]
        for call in self._live.values():
            if call.progress is not None:
                told.append(_progress_event(call.id, call.progress, call.run.tag))
        return told

    def end_leg(self) -> None:
        self._shown.clear()


def _call_event(call: OpenCall) -> Event:
    return custom(CALL, dict(call.facts), call.run.tag)


def _progress_event(call_id: str, content: dict[str, Any], tag: str | None) -> Event:
    shown = wire.ActivitySnapshotEvent(
        message_id=f"progress-{call_id}", activity_type="progress", content=dict(content)
    )
    return wire_event(shown, tag)


def _finite(value: Any) -> float | None:
    """Return the value if it is a finite number and not a `bool`. Otherwise, returns None."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return value if math.isfinite(value) else None


def usage_json(usage: Usage) -> dict[str, int]:
    """Return the numbers of input and output tokens in the JSON form that the page reads."""
    return {"input": usage.input, "output": usage.output}


class Subagents:
    """The runs nested in one run, as clients see them in the current leg.

    In a leg, a nested run is started before its first event, and after the run that contains it. Before an interrupt,
    the open nested runs are closed as suspended. A later leg can start them again under the same ids.
    """

    def __init__(self, root: str, call_at: CallAt) -> None:
        self._root = root
        self._call_at = call_at
        self._runs: dict[str, OpenRun] = {root: OpenRun(root, None)}
        self._open: dict[str, None] = {}
        """The ids of the nested runs that are open in this leg. A run comes after the run that contains it."""
        self._closed: set[str] = set()

    def run(self, run_id: str) -> OpenRun:
        """Return a run's state, creating it if the run is new."""
        run = self._runs.get(run_id)
        if run is None:
            run = self._runs[run_id] = OpenRun(run_id, run_id)
        return run

    def __iter__(self) -> Iterator[OpenRun]:
        return iter(tuple(self._runs.values()))

    def enter(self, run: OpenRun) -> list[Event]:
        """Return the events that start a nested run and the nested runs around it, leaving out runs that this leg has started."""
        if run.tag is None or run.id in self._open or run.id in self._closed:
            return []
        outer = self._outer(run.id)
        before = [] if outer is None else self.enter(self.run(outer))
        self._open[run.id] = None
        return [*before, self._started(run, outer)]

    def _outer(self, run_id: str) -> str | None:
        """Return the id of the nested run that contains this one, or None if the outermost run contains it."""
        found = Place.from_id(run_id, self._root).run
        return None if found.parent is None else found.id(self._root)

    def _started(self, run: OpenRun, outer: str | None) -> Event:
        call = holder(Place.from_id(run.id, self._root), self._root, self._call_at)
        started = wire.SubagentStartedEvent(
            subagent_run_id=run.id,
            name=run.name or "agent",
            parent_subagent_run_id=outer,
            parent_tool_call_id=None if call is None else call.call_id,
        )
        return wire_event(started, run.id)

    def end(self, run: OpenRun, reason: str) -> list[Event]:
        """Return the events that end a nested run. They report an error if the run failed or was cancelled.

        Returns no events if this leg has already ended the run.
        """
        before = self.enter(run)
        if self._open.pop(run.id, 0) == 0:
            return before
        self._closed.add(run.id)
        del self._runs[run.id]
        failed = reason == "cancelled" or reason.startswith("failed")
        end = (
            self._error(run.id, reason)
            if failed
            else wire_event(wire.SubagentFinishedEvent(subagent_run_id=run.id), run.id)
        )
        return [*before, end]

    def _error(self, run_id: str, reason: str) -> Event:
        said, _, why = reason.partition(": ")
        error = wire.SubagentErrorEvent(subagent_run_id=run_id, message=clean_text(why or said), code=said)
        return wire_event(error, run_id)

    def suspend(self, questions: Sequence[Question]) -> list[Event]:
        """Return the events that close every open nested run as suspended, innermost first."""
        asked: dict[str, list[str]] = {}
        for question in questions:
            found = holder(place_of_question(question), self._root, self._call_at)
            if found is not None:
                asked.setdefault(found.run_id, []).append(interrupt_id(question))
        events: list[Event] = []
        for run_id in reversed(self._open):
            outcome = wire.SubagentFinishedSuspendedOutcome(interrupt_ids=asked.get(run_id))
            events.append(
                wire_event(wire.SubagentFinishedEvent(subagent_run_id=run_id, outcome=outcome), run_id)
            )
        return events

    def abandon(self, reason: str) -> list[Event]:
        """Return the events that close every open nested run with an error, innermost first, because the outermost run ends."""
        return [self._error(run_id, reason) for run_id in reversed(self._open)]

    def so_far(self) -> list[Event]:
        """Return the events that show the open nested runs to a client that joins now."""
        return [self._started(self.run(run_id), self._outer(run_id)) for run_id in self._open]

    def end_leg(self) -> None:
        self._open.clear()
        self._closed.clear()
