"""What was said in a thread, as AG-UI messages, under the ids that its feed has for them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from handrail.adapter.conversation import ROOT
from handrail.events import MessageAdded
from handrail.messages import AssistantMessage, Message, UserMessage
from handrail.serve.agui.message_writer import call_json, result_id
from handrail.serve.agui.shortening import shortened
from handrail.serve.agui.wire_events import Event
from handrail.session import Session

Said = tuple[str, Message]
"""A message, and the run in which it was said."""


def said_in(session: Session) -> list[Said]:
    """What was said in a session, oldest first."""
    return [(fact.run_id, fact.message) for fact in session[MessageAdded].all() if fact.conversation == ROOT]


def messages(said: Sequence[Said]) -> list[dict[str, Any]]:
    """A conversation as AG-UI messages.

    In each run what the person said comes first; what is before that was said elsewhere, and was
    brought by a client that knew of it.
    """
    began = {
        run_id: number
        for number, (run_id, message) in enumerate(said)
        if isinstance(message, UserMessage) and not message.by_run
    }
    turns: dict[str, int] = {}
    out: list[dict[str, Any]] = []
    for number, (run_id, message) in enumerate(said):
        elsewhere = number < began.get(run_id, 0)
        out += _shown(message, f"{run_id}/before-{number}" if elsewhere else "", run_id, turns)
    return out


def _shown(message: Message, id: str, run_id: str, turns: dict[str, int]) -> Iterable[dict[str, Any]]:
    if isinstance(message, UserMessage):
        if not message.by_run:
            yield {"id": id or f"{run_id}/user", "role": "user", "content": message.text}
    elif isinstance(message, AssistantMessage):
        if not id:
            turns[run_id] = turns.get(run_id, 0) + 1
        told: dict[str, Any] = {
            "id": id or f"{run_id}/{turns[run_id]}",
            "role": "assistant",
            "content": message.text,
        }
        calls = [call_json(call.id, call.name, call.arguments) for call in message.calls]
        yield {**told, "toolCalls": calls} if calls else told
    else:
        for result in message.results:
            yield {
                "id": result_id(result.id),
                "role": "tool",
                "toolCallId": result.id,
                "content": shortened(result.text, run_id),
            }


def open_messages(events: Iterable[Event]) -> list[dict[str, Any]]:
    """What is being said, out of the events that somebody is told who joins now."""
    out: dict[str, dict[str, Any]] = {}
    calls: dict[str, dict[str, Any]] = {}
    for event in events:
        data = event.data
        tag = {"subagentRunId": data["subagentRunId"]} if data.get("subagentRunId") else {}
        id = data.get("messageId") or data.get("parentMessageId") or ""
        match data["type"]:
            case "TEXT_MESSAGE_START":
                out[id] = {"id": id, "role": "assistant", "content": "", **tag}
            case "REASONING_MESSAGE_START":
                out[id] = {"id": id, "role": "reasoning", "content": "", **tag}
            case "TEXT_MESSAGE_CONTENT" | "REASONING_MESSAGE_CONTENT":
                out[id]["content"] += data["delta"]
            case "TOOL_CALL_START":
                call = calls[data["toolCallId"]] = call_json(data["toolCallId"], data["toolCallName"], "")
                message = out.setdefault(id, {"id": id, "role": "assistant", "content": "", **tag})
                message.setdefault("toolCalls", []).append(call)
            case "TOOL_CALL_ARGS":
                calls[data["toolCallId"]]["function"]["arguments"] += data["delta"]
            case "ACTIVITY_SNAPSHOT":
                out[id] = {
                    "id": id,
                    "role": "activity",
                    "activityType": data["activityType"],
                    "content": data["content"],
                    **tag,
                }
            case _:
                pass
    return list(out.values())
