"""What was said in a thread, nested runs too, as messages: out of a session in memory, and out of the record."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from handrail.adapter.answer import RecordedAnswer
from handrail.adapter.conversation import ROOT, Conversation
from handrail.dispatch.replaying import InnerCall
from handrail.events import MessageAdded
from handrail.messages import AssistantMessage, CallAnswered, Message, ToolMessage
from handrail.place import Place, split_run_id
from handrail.records import Entry, Journal, RunRow
from handrail.runs.tree import text_of
from handrail.serve.agui.message_writer import call_json, result_id
from handrail.serve.agui.shortening import shortened
from handrail.serve.agui.wire_events import clean
from handrail.serve.said import messages
from handrail.session import Session


class Inside(NamedTuple):
    """Something said in a nested run."""

    run_id: str
    """Of the nested run: the id of the run around all, and a place."""
    message: Message


# --- messages ---------------------------------------------------------------------------------------------


def told_in(
    said: Sequence[tuple[str, Message]], nested: Sequence[Inside], named: Mapping[str, str]
) -> list[dict[str, Any]]:
    """A thread's messages: each run's own, and after an answer that led to nested runs, what was said in those.

    `named` has the ids that a client gave to what the person said, by the runs these began. Under another id
    a client that has such a message would take it for a new one, and put it last.
    """
    ids = {f"{run_id}/user": id for run_id, id in named.items()}
    own = [{**each, "id": ids.get(each["id"], each["id"])} for each in messages(said)]
    calls: dict[str, list[str]] = {}
    for run_id, message in said:
        if isinstance(message, AssistantMessage):
            calls.setdefault(run_id, []).extend(call.id for call in message.calls)
    inside: dict[str, list[Inside]] = {}
    for each in nested:
        root, place = split_run_id(each.run_id)
        number = 0 if place.outermost_call is None else place.outermost_call.number
        if 0 < number <= len(calls.get(root, ())):
            inside.setdefault(calls[root][number - 1], []).append(each)
    out: list[dict[str, Any]] = []
    waiting: list[Inside] = []
    for message in own:
        if message["role"] != "tool" and waiting:
            out += shown_nested(waiting)
            waiting = []
        out.append(message)
        for call in message.get("toolCalls", ()):
            waiting += inside.get(call["id"], ())
    return [*out, *shown_nested(waiting)]


def shown_nested(said: Iterable[Inside]) -> Iterator[dict[str, Any]]:
    """What was said in nested runs, as messages that say so."""
    turns: dict[str, int] = {}
    for run_id, message in said:
        if isinstance(message, AssistantMessage):
            turns[run_id] = turns.get(run_id, 0) + 1
            told: dict[str, Any] = {
                "id": f"{run_id}/{turns[run_id]}",
                "role": "assistant",
                "content": message.text,
            }
            calls = [call_json(call.id, call.name, call.arguments) for call in message.calls]
            yield {**told, **({"toolCalls": calls} if calls else {}), "subagentRunId": run_id}
        elif isinstance(message, ToolMessage):
            for result in message.results:
                yield {
                    "id": result_id(result.id),
                    "role": "tool",
                    "toolCallId": result.id,
                    "content": clean(shortened(result.text, run_id)),
                    "subagentRunId": run_id,
                }


def merged(recorded: Sequence[Inside], heard: Sequence[Inside]) -> list[Inside]:
    """What a session has heard goes before what is recorded: of a run it has, it has all."""
    there = {each.run_id for each in heard}
    return [*(each for each in recorded if each.run_id not in there), *heard]


def nested_in(session: Session) -> list[Inside]:
    """What a session in memory has heard of nested runs."""
    return [
        Inside(fact.conversation, fact.message)
        for fact in session[MessageAdded].all()
        if fact.conversation != ROOT
    ]


async def said_nested(journal: Journal, rows: Sequence[RunRow]) -> list[Inside]:
    """What the record has of nested runs. Calls get the ids they had: these follow from the order of answers."""
    found: list[Inside] = []
    session = Session(id=rows[0].record.session_id) if rows else Session()
    talks: dict[str, Conversation] = {}
    for row in rows:
        run_id = row.record.id
        entries = await journal.entries(run_id)
        ends = {entry.key: entry for entry in entries if entry.kind == "inner call"}
        made: dict[Place, int] = {}
        for entry in entries:
            if entry.kind != "model answer":
                continue
            place = Place.parse(entry.key).run
            key = ROOT if place.parent is None else place.id(run_id)
            talk = talks.setdefault(key, Conversation(session, key))
            answer = msgspec.msgpack.decode(entry.body, type=RecordedAnswer)
            calls = talk.fresh_ids(answer.calls)
            if place.parent is not None:
                found.append(Inside(key, AssistantMessage(answer.text, calls)))
                began = made.get(place, 0)
                ended = (ends.get(str(place.child(at))) for at in range(began + 1, began + len(calls) + 1))
                results = [
                    CallAnswered(call.id, call.name, _told(end))
                    for call, end in zip(calls, ended, strict=True)
                    if end is not None
                ]
                if results:
                    found.append(Inside(key, ToolMessage(tuple(results))))
                made[place] = began + len(calls)
    return found


def _told(entry: Entry) -> str:
    return text_of(msgspec.msgpack.decode(entry.body, type=InnerCall).result)
