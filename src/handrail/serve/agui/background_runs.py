"""Background runs as clients see them: an activity where a call has begun one, and another where its end was told."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ag_ui import core as wire

from handrail.events import BackgroundStarted
from handrail.journal.records import SpawnedRun
from handrail.messages import BackgroundEnd
from handrail.run.record.begin import decode_request
from handrail.serve.agui.wire_events import Event, wire_event
from handrail.tools.result import clean_text

BACKGROUND = "handrail.background"
"""The type of the activities for the beginning and the end of a background run."""


def started_json(started: BackgroundStarted) -> dict[str, Any]:
    """Return the activity for a background run that a call has begun."""
    return _begun(started.background_id, started.agent, started.message, started.call_id)


def spawned_json(calls: Iterable[Sequence[SpawnedRun]], run_id: str) -> list[dict[str, Any]]:
    """Return the activities for the background runs that the calls of a run have begun. A fork of the run has begun none."""
    return [
        _begun(each.run.id, each.run.prompt, decode_request(each.run).message, each.run.parent.call_id)
        for spawned in calls
        for each in spawned
        if each.run.parent is not None and each.run.parent.run_id == run_id
    ]


def _begun(id: str, agent: str, message: str, call_id: str) -> dict[str, Any]:
    content = {"state": "begun", "background_id": id, "agent": agent, "call_id": call_id}
    return _activity(f"{id}/begun", {**content, "message": clean_text(message)})


def ended_json(end: BackgroundEnd) -> dict[str, Any]:
    """Return the activity for the end of a background run that a run's model was told."""
    content = {"state": "ended", "background_id": end.id, "agent": end.agent, "end": end.end}
    return _activity(f"{end.id}/ended", {**content, "text": clean_text(end.text)})


def _activity(id: str, content: Mapping[str, Any]) -> dict[str, Any]:
    return {"id": id, "role": "activity", "activityType": BACKGROUND, "content": content}


def background_event(activity: Mapping[str, Any], tag: str | None = None) -> Event:
    """Return the event that shows one of these activities."""
    shown = wire.ActivitySnapshotEvent(
        message_id=activity["id"], activity_type=BACKGROUND, content=activity["content"]
    )
    return wire_event(shown, tag)


def begun_in(events: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the activities for the background runs that have begun according to these events."""
    shown = (each for each in events if each.get("activityType") == BACKGROUND)
    return [
        _activity(each["messageId"], each["content"]) for each in shown if each["content"]["state"] == "begun"
    ]


def with_begun(
    messages: Iterable[Mapping[str, Any]], begun: Iterable[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Return rendered messages with the activities for background runs, each after the results of the turn whose call has begun it."""
    runs = {each["id"]: each for each in begun}
    if not runs:
        return [{**each} for each in messages]
    out: list[dict[str, Any]] = []
    due: list[dict[str, Any]] = []
    for message in messages:
        if message["role"] != "tool":
            out, due = [*out, *due], []
        out.append({**message})
        tag = {"subagentRunId": message["subagentRunId"]} if "subagentRunId" in message else {}
        for call in message.get("toolCalls", ()):
            due += [
                {**each, **tag} for each in runs.values() if _is_in(call["id"], each["content"]["call_id"])
            ]
    return [*out, *due]


def _is_in(outer: str, call_id: str) -> bool:
    return call_id == outer or call_id.startswith(f"{outer}.")
