"""`CallStates`: the calls in progress in a run: their places, status, progress and cost."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from ag_ui.core import ActivityDeltaEvent, ActivitySnapshotEvent

from handrail.clock import Clock
from handrail.events import ModelResponded, Progress, ToolInvoked, ToolRolledBack, ToolStarted
from handrail.messages import AssistantMessage, Usage
from handrail.place import Place, outer_call_ids
from handrail.serve.agui.message_writer import OpenRun
from handrail.serve.agui.wire_events import Event, clean, custom, wire_event

CALL = "handrail.call"


@dataclass(slots=True)
class OpenCall:
    """A call in progress."""

    id: str
    tool: str
    run: OpenRun
    place: Place | None
    """Where it is in the run, if that is known."""
    around: str | None
    """The id of the call that made it, for an inner call."""
    facts: dict[str, Any]
    progress: dict[str, Any] | None = None
    usage: Usage | None = None
    cost: Decimal | None = None


class CallStates:
    """Tracks the calls of one run, and of the runs nested in it."""

    def __init__(self, root: str, clock: Clock) -> None:
        self._root = root
        self._clock = clock
        self._live: dict[str, OpenCall] = {}
        self._places: dict[str, Place] = {}
        """The place of each call, by its id."""
        self._asked_for: dict[Place, str] = {}
        """The calls that models made, by place."""
        self._shown: set[str] = set()
        """The calls whose progress has been sent in this leg."""

    def __iter__(self) -> Iterator[OpenCall]:
        return iter(self._live.values())

    def at(self, place: Place) -> str | None:
        """The id of the call that a model made at this place."""
        return self._asked_for.get(place)

    def inside(self, call_id: str) -> list[tuple[str, Place]]:
        """The ids and places of the calls that models of runs nested in a call made."""
        place = self._places.get(call_id)
        if place is None:
            return []
        return [(id, at) for at, id in self._asked_for.items() if at.attempt_at(place)]

    def number(self, run: OpenRun, message: AssistantMessage) -> None:
        """Give the calls of an answer their places."""
        within = Place.from_id(run.id, self._root)
        for call in message.calls:
            run.calls += 1
            place = within.child(run.calls)
            self._places[call.id] = place
            self._asked_for[place] = call.id

    # Status.

    def start(self, event: ToolStarted, run: OpenRun) -> list[Event]:
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
        """The call that made an inner call, if it is known here."""
        for outer, attempt, number in outer_call_ids(call_id):
            place = self._places.get(outer)
            if place is not None:
                self._places[call_id] = place.attempt(attempt).child(number)
                return outer
        return None

    def set_waiting(self, call_id: str, waits: bool) -> list[Event]:
        """A call starts to wait for an answer, or continues."""
        call = self._live.get(call_id)
        status = "waiting" if waits else "running"
        if call is None or call.facts["status"] == status:
            return []
        call.facts["status"] = status
        return [_call_event(call)]

    def roll_back(self, event: ToolRolledBack, run: OpenRun) -> list[Event]:
        call = self._live.get(event.call_id)
        if call is not None:
            call.facts["rolled_back"] = {"reason": clean(event.reason), "not_undone": list(event.not_undone)}
        return []

    def finish(self, event: ToolInvoked, run: OpenRun) -> list[Event]:
        call = self._live.pop(event.call_id, None)
        if call is None:
            facts = {"call_id": event.call_id, "tool": event.tool, "run_id": self._root}
            call = OpenCall(event.call_id, event.tool, run, None, None, facts)
        call.facts |= {"status": event.status, "seconds": round(event.seconds, 6)}
        if event.status == "ok":
            call.facts.pop("rolled_back", None)  # of an earlier attempt
        return [_call_event(call)]

    def commit(self, call_id: str, diff: str, paths: list[str]) -> Event:
        """The file changes of a finished call."""
        return custom(CALL, {"call_id": call_id, "diff": diff, "paths": paths, "run_id": self._root})

    def add_usage(self, event: ModelResponded) -> None:
        """Add the usage of a nested run to the calls around it."""
        place = Place.from_id(event.run_context.run_id, self._root)
        for call in self._live.values():
            if call.place is not None and place.attempt_at(call.place):
                first = call.usage is None
                call.usage = (call.usage or Usage()) + event.usage
                known = event.cost is not None and (first or call.cost is not None)
                call.cost = (
                    (call.cost or Decimal(0)) + event.cost if known and event.cost is not None else None
                )
                call.facts["usage"] = usage_json(call.usage)
                call.facts["cost"] = None if call.cost is None else str(call.cost)

    # Progress.

    def progress(self, event: Progress, run: OpenRun) -> list[Event]:
        content = {
            "callId": event.call_id,
            "tool": event.tool,
            "message": clean(str(event.message)),
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
        return [wire_event(ActivityDeltaEvent.model_validate(told), run.tag)]

    def so_far(self) -> list[Event]:
        """The events for a reader who joins now."""
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
    shown = ActivitySnapshotEvent(
        message_id=f"progress-{call_id}", activity_type="progress", content=dict(content)
    )
    return wire_event(shown, tag)


def _finite(value: Any) -> float | None:
    """A finite number, or None."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return value if math.isfinite(value) else None


def usage_json(usage: Usage) -> dict[str, int]:
    """Tokens, as the page takes them."""
    return {"input": usage.input, "output": usage.output}
