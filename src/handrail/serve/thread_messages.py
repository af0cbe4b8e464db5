"""A thread's messages, including those of nested runs: read from a session or the journal, and rendered for AG-UI."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from handrail.events import ConversationCompacted, MessageAdded, ToolInvoked
from handrail.journal.protocol import Journal
from handrail.journal.records import Entry, RunRow
from handrail.messages import (
    AssistantMessage,
    CallAnswered,
    Compaction,
    Message,
    ToolMessage,
    Usage,
    UserMessage,
)
from handrail.run.answer import RecordedAnswer, RecordedCompaction
from handrail.run.compaction import effect_of, stand_in
from handrail.run.conversation import ROOT, Conversation
from handrail.run.place import Place, is_in_run, split_run_id
from handrail.run.record.format import InnerCall, text_of
from handrail.serve.agui.background_runs import ended_json
from handrail.serve.agui.message_writer import COMPACTED, answer_json, call_json, result_id, shorten
from handrail.serve.agui.wire_events import Event
from handrail.serve.attachments import parts_of
from handrail.session import Session
from handrail.tools.result import clean_text, shown_text

if TYPE_CHECKING:
    from handrail.serve.watch import Opening


class RunMessage(NamedTuple):
    """A message, or a compaction of the messages before it, with the id of the run that it belongs to."""

    run_id: str
    """The id of the message's run. The id of a nested run consists of the outermost run's id and a place."""
    message: Message | Compaction


# --- reading ------------------------------------------------------------------------------------------


def messages_in(session: Session) -> list[RunMessage]:
    """Return a session's messages, oldest first, without the messages of nested runs."""
    return _with_open_results(session, _read(session, nested=False))


def nested_messages_in(session: Session) -> list[RunMessage]:
    """Return the messages of a session's nested runs, oldest first."""
    return _with_open_results(session, _read(session, nested=True))


def _read(session: Session, *, nested: bool) -> list[RunMessage]:
    """Return the messages and compactions of nested runs, or of the other runs, oldest first. Of several compactions at once, the last counts."""
    compacted = {
        (fact.conversation, fact.compaction.upto): fact for fact in session[ConversationCompacted].all()
    }
    lengths: Counter[str] = Counter()
    said: list[RunMessage] = []
    for fact in session[MessageAdded].all():
        key = fact.conversation
        if (key != ROOT) is not nested:
            continue
        said.append(RunMessage(key if nested else fact.run_id, fact.message))
        lengths[key] += 1
        here = compacted.get((key, lengths[key]))
        if here is not None:
            said.append(RunMessage(key if nested else here.run_id, here.compaction))
    return said


def with_compactions(
    run_id: str, messages: Iterable[Message], compactions: Mapping[int, Compaction]
) -> list[RunMessage]:
    """Return a run's messages with its compactions, each before the answer with its number."""
    said: list[RunMessage] = []
    left = dict(compactions)
    number = 0
    for message in messages:
        if isinstance(message, AssistantMessage):
            number += 1
            if number in left:
                said.append(RunMessage(run_id, left.pop(number)))
        said.append(RunMessage(run_id, message))
    return [*said, *(RunMessage(run_id, each) for each in left.values())]


def without_compactions(messages: Iterable[RunMessage]) -> list[Message]:
    """Return the messages only."""
    return [message for _, message in messages if not isinstance(message, Compaction)]


def _with_open_results(session: Session, said: list[RunMessage]) -> list[RunMessage]:
    """Add the results of finished calls in turns that still have unfinished calls. Clients already have these results."""
    asked = {call.id for _, each in said if isinstance(each, AssistantMessage) for call in each.calls}
    answered = {result.id for _, each in said if isinstance(each, ToolMessage) for result in each.results}
    if asked <= answered:
        return said
    ended = {
        fact.call_id: fact.result
        for fact in session[ToolInvoked].all()
        if fact.call_id in asked and fact.call_id not in answered
    }
    found: list[RunMessage] = []
    for run_id, message in said:
        found.append(RunMessage(run_id, message))
        results = [
            CallAnswered(call.id, call.name, shown_text(ended[call.id]), not ended[call.id].success)
            for call in (message.calls if isinstance(message, AssistantMessage) else ())
            if call.id in ended
        ]
        if results:
            found.append(RunMessage(run_id, ToolMessage(tuple(results))))
    return found


async def read_nested(journal: Journal, rows: Sequence[RunRow]) -> list[RunMessage]:
    """Return the recorded answers and call results of the runs nested in these runs, as messages.

    Missing and repeated call ids are replaced in the same way as during the run.
    """
    found: list[RunMessage] = []
    session = Session(id=rows[0].record.session_id) if rows else Session()
    conversations: dict[str, Conversation] = {}
    for row in rows:
        run_id = row.record.id
        entries = await journal.calls.entries(run_id)
        ends = {entry.key: entry for entry in entries if entry.kind == "inner call"}
        made: dict[Place, int] = {}
        for entry in entries:
            if entry.kind not in ("model answer", "compaction"):
                continue
            place = Place.parse(entry.key).run
            key = ROOT if place.parent is None else place.id(run_id)
            if entry.kind == "compaction":
                if place.parent is not None:
                    compaction = msgspec.msgpack.decode(entry.body, type=RecordedCompaction).compaction
                    found.append(RunMessage(key, compaction))
                continue
            conversation = conversations.setdefault(key, Conversation(session, key))
            answer = msgspec.msgpack.decode(entry.body, type=RecordedAnswer)
            calls = conversation.fresh_ids(answer.calls)
            if place.parent is not None:
                found.append(RunMessage(key, answer.message(calls)))
                began = made.get(place, 0)
                ended = (ends.get(str(place.child(at))) for at in range(began + 1, began + len(calls) + 1))
                results = [
                    CallAnswered(call.id, call.name, _result_text(end))
                    for call, end in zip(calls, ended, strict=True)
                    if end is not None
                ]
                if results:
                    found.append(RunMessage(key, ToolMessage(tuple(results))))
                made[place] = began + len(calls)
    return found


def _result_text(entry: Entry) -> str:
    return text_of(msgspec.msgpack.decode(entry.body, type=InnerCall).result)


def merge_nested(recorded: Sequence[RunMessage], live: Sequence[RunMessage]) -> list[RunMessage]:
    """Merge the recorded and the live messages of nested runs. If a run has live messages, its recorded ones are dropped."""
    there = {each.run_id for each in live}
    return [*(each for each in recorded if each.run_id not in there), *live]


# --- rendering ----------------------------------------------------------------------------------------


def render(messages: Sequence[RunMessage], named: Mapping[str, str] = {}) -> list[dict[str, Any]]:
    """Render messages as AG-UI messages. `named` maps the ids of users' messages to the ids that the client gave to them."""
    out: list[dict[str, Any]] = []
    shown: list[list[str]] = []
    earlier: Compaction | None = None
    for id, (run_id, message) in zip(_ids(messages, _starts(messages)), messages, strict=True):
        id = named.get(id, id)
        if isinstance(message, Compaction):
            unknown: list[list[str]] = [[]] * (message.upto - len(shown))  # at the beginning
            out.append(_render_compaction(id, message, earlier, [*unknown, *shown[-message.upto :]]))
            earlier = message
        else:
            shown.append(_shown_ids(id, message))
            out += _render_message(id, run_id, message)
    return out


def _shown_ids(id: str, message: Message) -> list[str]:
    """Return the ids under which clients show a message: its own, or those of the calls whose results it has."""
    if isinstance(message, ToolMessage):
        return [result.id for result in message.results]
    is_shown = message.text if isinstance(message, AssistantMessage) else not message.by_run
    return [id] if is_shown else []


def _render_compaction(
    id: str, compaction: Compaction, earlier: Compaction | None, shown: Sequence[Sequence[str]] = ()
) -> dict[str, Any]:
    """Render a compaction as an activity. `shown` are the ids under which clients show each message before it."""
    content: dict[str, Any] = {"by": compaction.by, "why": compaction.why, "tokens": compaction.tokens}
    for name, indices in zip(("left_out", "shortened"), effect_of(compaction, earlier), strict=True):
        ids = dict.fromkeys(each for at in indices if at < len(shown) for each in shown[at])
        content[name] = {"messages": len(indices), "ids": list(ids)}
    content["summary"] = clean_text(stand_in(compaction))
    content["before"], content["spent"] = _cached(compaction.before), _cached(compaction.spent)
    return {"id": f"{id}/compacted", "role": "activity", "activityType": COMPACTED, "content": content}


def _cached(usage: Usage | None) -> dict[str, int] | None:
    """Return the input tokens of a request, and how many of them were read from and written to the provider's cache."""
    if usage is None:
        return None
    return {"input": usage.input, "cached": usage.cached, "cache_writes": usage.cache_writes}


def said_by_people(messages: Sequence[RunMessage]) -> Iterator[tuple[str, str]]:
    """Yield the id, as `render` gives it, and the text of each message that a person wrote."""
    for id, (_, message) in zip(_ids(messages, _starts(messages)), messages, strict=True):
        if isinstance(message, UserMessage) and not message.by_run:
            yield id, message.text


def said_before_answers(messages: Sequence[RunMessage], run_id: str) -> list[list[str]]:
    """Return what people said to a run before each of its answers, and last what they said after them."""
    before: list[list[str]] = [[]]
    start = _starts(messages).get(run_id, 0)
    for each, message in messages[start:]:
        if each == run_id and isinstance(message, AssistantMessage):
            before.append([])
        elif each == run_id and isinstance(message, UserMessage) and message.text and not message.by_run:
            before[-1].append(message.text)
    return before


def _starts(messages: Sequence[RunMessage]) -> Mapping[str, int]:
    """Return where each run starts: with the message of the user that started it. Before that, it has history that a client supplied."""
    return {
        run_id: number
        for number, (run_id, message) in enumerate(messages)
        if isinstance(message, UserMessage) and not message.by_run and not message.midway
    }


def _ids(messages: Iterable[RunMessage], starts: Mapping[str, int]) -> Iterator[str]:
    """Yield the id of each message."""
    turns: Counter[str] = Counter()
    midway: Counter[tuple[str, int]] = Counter()
    for number, (run_id, message) in enumerate(messages):
        if number < starts.get(run_id, 0):
            yield f"{run_id}/before-{number}"
            continue
        turns[run_id] += isinstance(message, AssistantMessage)
        turn = turns[run_id]
        if isinstance(message, UserMessage):
            yield user_id(run_id, turn, message, midway[run_id, turn])
            midway[run_id, turn] += message.midway
        else:
            yield f"{run_id}/{turn}"


def next_remark_id(messages: Sequence[RunMessage]) -> str:
    """Return the id of what a person says along with an answer to a question of the last message's run."""
    said = [*messages, RunMessage(messages[-1].run_id, UserMessage("", midway=True))]
    return list(_ids(said, _starts(said)))[-1]


def user_id(run_id: str, turn: int, message: UserMessage, earlier: int) -> str:
    """Return the id of a person's message.

    `turn` is the number of the model's answers in the run before it, and `earlier` that of other messages midway since the last of them.
    """
    if not message.midway:
        return f"{run_id}/user"
    return f"{run_id}/{turn}/user-{earlier + 1}" if earlier else f"{run_id}/{turn}/user"


def render_thread(
    messages: Sequence[RunMessage], nested: Sequence[RunMessage], named: Mapping[str, str]
) -> list[dict[str, Any]]:
    """Render a thread's messages. The messages of nested runs follow the turn whose calls started those runs.

    `named` maps the ids of users' messages to the ids that the client gave to them. If the ids differed, the client would take
    the message for a new one and show it last.
    """
    own = render(messages, named)
    calls: dict[str, list[str]] = {}
    for run_id, message in messages:
        if isinstance(message, AssistantMessage):
            calls.setdefault(run_id, []).extend(call.id for call in message.calls)
    inside: dict[str, list[RunMessage]] = {}
    for each in nested:
        root, place = split_run_id(each.run_id)
        number = 0 if place.outermost_call is None else place.outermost_call.number
        if 0 < number <= len(calls.get(root, ())):
            inside.setdefault(calls[root][number - 1], []).append(each)
    out: list[dict[str, Any]] = []
    waiting: list[RunMessage] = []
    for message in own:
        if message["role"] != "tool" and waiting:
            out += _render_nested(waiting)
            waiting = []
        out.append(message)
        for call in message.get("toolCalls", ()):
            waiting += inside.get(call["id"], ())
    return [*out, *_render_nested(waiting)]


def render_joined(
    opening: Opening, said: Sequence[RunMessage], nested: Sequence[RunMessage], named: Mapping[str, str]
) -> list[dict[str, Any]]:
    """Render a thread's messages: those of earlier runs from the journal, and those of the active run from its opening."""
    earlier = [each for each in said if each.run_id != opening.run_id]
    inside = [each for each in nested if not is_in_run(each.run_id, opening.run_id)]
    told = ({**each, "id": named.get(each["id"], each["id"])} for each in opening.messages)
    return [*render_thread(earlier, inside, named), *told]


def _render_nested(messages: Sequence[RunMessage]) -> Iterator[dict[str, Any]]:
    earlier: dict[str, Compaction] = {}
    for id, (run_id, message) in zip(_ids(messages, {}), messages, strict=True):
        if isinstance(message, Compaction):
            yield {**_render_compaction(id, message, earlier.get(run_id)), "subagentRunId": run_id}
            earlier[run_id] = message
        elif not isinstance(message, UserMessage):
            for each in _render_message(id, run_id, message):
                content = each["content"]
                said = clean_text(content) if isinstance(content, str) else content
                yield {**each, "content": said, "subagentRunId": run_id}


def _render_message(id: str, run_id: str, message: Message) -> Iterator[dict[str, Any]]:
    if isinstance(message, UserMessage):
        yield from map(ended_json, message.ends)
        if not message.by_run:
            yield {
                "id": id,
                "role": "user",
                "content": parts_of(message.text, message.attachments),
            }
    elif isinstance(message, AssistantMessage):
        if message.thought:
            yield {"id": f"{id}/thought-1", "role": "reasoning", "content": message.thought}
        calls = [call_json(call.id, call.name, call.arguments) for call in message.calls]
        yield from answer_json(id, message.parts, calls)
    else:
        for result in message.results:
            yield {
                "id": result_id(result.id),
                "role": "tool",
                "toolCallId": result.id,
                "content": shorten(result.text, run_id),
            }


def render_open(events: Iterable[Event]) -> list[dict[str, Any]]:
    """Render the messages that are still being written, and the progress of calls, from the events for a new client."""
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
                activity = {"activityType": data["activityType"], "content": data["content"]}
                out[id] = {"id": id, "role": "activity", **activity, **tag}
            case _:
                pass
    return list(out.values())
