"""The calls under way in a run: where each stands, what is said of it, and how far it is."""

from __future__ import annotations

import math
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

from ag_ui.core import ActivityDeltaEvent, ActivitySnapshotEvent

from handrail.clock import Clock
from handrail.events import ModelResponded, Progress, ToolInvoked, ToolRolledBack, ToolStarted
from handrail.messages import AssistantMessage, Usage
from handrail.place import Place, outer_call_ids
from handrail.serve.agui.book import CallUnderWay, RunUnderWay
from handrail.serve.agui.wire_events import Event, clean, custom, sent

CALL = "handrail.call"


class Calls:
    """Keeps the facts of the calls of one run, and of the runs nested in it."""

    def __init__(self, root: str, clock: Clock) -> None:
        self._root = root
        self._clock = clock
        self._live: dict[str, CallUnderWay] = {}
        self._places: dict[str, Place] = {}
        """Where each call stands, by its id."""
        self._asked_for: dict[Place, str] = {}
        """The calls that models asked for, by their places."""
        self._shown: set[str] = set()
        """The calls whose progress this leg has shown."""

    def __iter__(self) -> Iterator[CallUnderWay]:
        return iter(self._live.values())

    def at(self, place: Place) -> str | None:
        """The call of a model at this place."""
        return self._asked_for.get(place)

    def inside(self, call_id: str) -> list[tuple[str, Place]]:
        """The calls that models of runs nested in a call asked for: their ids and places."""
        place = self._places.get(call_id)
        if place is None:
            return []
        return [(id, at) for at, id in self._asked_for.items() if at.attempt_at(place)]

    def asked_for(self, run: RunUnderWay, message: AssistantMessage) -> None:
        """A model asked for calls: they are counted, also where this was told before."""
        within = Place.from_id(run.id, self._root)
        for call in message.calls:
            run.calls += 1
            place = within.child(run.calls)
            self._places[call.id] = place
            self._asked_for[place] = call.id

    # What happens to one.

    def started(self, event: ToolStarted, run: RunUnderWay) -> list[Event]:
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
        call = CallUnderWay(event.call_id, event.tool, run, place, around, facts)
        self._live[event.call_id] = call
        return [_told(call)]

    def _around(self, call_id: str) -> str | None:
        """The call that an inner call is made in, if it is known here."""
        for outer, attempt, number in outer_call_ids(call_id):
            place = self._places.get(outer)
            if place is not None:
                self._places[call_id] = place.attempt(attempt).child(number)
                return outer
        return None

    def waits(self, call_id: str, waits: bool) -> list[Event]:
        """A call begins to wait for somebody, or goes on."""
        call = self._live.get(call_id)
        status = "waiting" if waits else "running"
        if call is None or call.facts["status"] == status:
            return []
        call.facts["status"] = status
        return [_told(call)]

    def rolled_back(self, event: ToolRolledBack) -> list[Event]:
        call = self._live.get(event.call_id)
        if call is not None:
            call.facts["rolled_back"] = {"reason": clean(event.reason), "not_undone": list(event.not_undone)}
        return []

    def over(self, event: ToolInvoked, run: RunUnderWay) -> list[Event]:
        call = self._live.pop(event.call_id, None)
        if call is None:
            facts = {"call_id": event.call_id, "tool": event.tool, "run_id": self._root}
            call = CallUnderWay(event.call_id, event.tool, run, None, None, facts)
        call.facts |= {"status": event.status, "seconds": round(event.seconds, 6)}
        if event.status == "ok":
            call.facts.pop("rolled_back", None)  # that was an earlier try
        return [_told(call)]

    def committed(self, call_id: str, diff: str, paths: list[str]) -> Event:
        """What a call that is over did to files."""
        return custom(CALL, {"call_id": call_id, "diff": diff, "paths": paths, "run_id": self._root})

    def spent(self, event: ModelResponded) -> None:
        """What a nested run spent is the business of the calls around it."""
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

    # How far it is.

    def progress(self, event: Progress, run: RunUnderWay) -> list[Event]:
        content = {
            "callId": event.call_id,
            "tool": event.tool,
            "message": clean(str(event.message)),
            "done": _number(event.done),
            "total": _number(event.total),
        }
        call = self._live.get(event.call_id)
        before = None if call is None else call.progress
        if call is not None:
            call.progress = content
        if before is None or event.call_id not in self._shown:
            self._shown.add(event.call_id)
            return [_progress(event.call_id, content, run.tag)]
        patch = [
            {"op": "replace", "path": f"/{key}", "value": value}
            for key, value in content.items()
            if before[key] != value
        ]
        if not patch:
            return []
        told = {"messageId": f"progress-{event.call_id}", "activityType": "progress", "patch": patch}
        return [sent(ActivityDeltaEvent.model_validate(told), run.tag)]

    def so_far(self) -> list[Event]:
        """What somebody has to be told who joins now."""
        told = [_told(call) for call in self._live.values()]
        for call in self._live.values():
            if call.progress is not None:
                told.append(_progress(call.id, call.progress, call.run.tag))
        return told

    def end_leg(self) -> None:
        self._shown.clear()


def _told(call: CallUnderWay) -> Event:
    return custom(CALL, dict(call.facts), call.run.tag)


def _progress(call_id: str, content: dict[str, Any], tag: str | None) -> Event:
    shown = ActivitySnapshotEvent(
        message_id=f"progress-{call_id}", activity_type="progress", content=dict(content)
    )
    return sent(shown, tag)


def _number(given: Any) -> float | None:
    """What a tool gave, where it is a number that JSON has."""
    if isinstance(given, bool) or not isinstance(given, int | float):
        return None
    return given if math.isfinite(given) else None


def usage_json(usage: Usage) -> dict[str, int]:
    """Tokens, as our own page takes them."""
    return {"input": usage.input, "output": usage.output}
