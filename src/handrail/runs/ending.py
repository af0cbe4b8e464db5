"""Cancelling a run, whoever has it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from handrail.adapter.adapter import NO_MESSAGE
from handrail.adapter.answer import RecordedAnswer
from handrail.adapter.conversation import Conversation, root_conversation
from handrail.adapter.durable import RunOutcome, decode_begin
from handrail.adapter.holding import taken
from handrail.dispatch.replaying import InnerCall
from handrail.errors import RunBusy
from handrail.events import MessageAdded
from handrail.messages import (
    AssistantMessage,
    CallAnswered,
    CallAsked,
    Message,
    ToolMessage,
    Usage,
    UserMessage,
)
from handrail.prompt import OPENER
from handrail.records import OVER, CommitUnit, Entry, Journal, RunRow
from handrail.runs.lineage import lineage_of
from handrail.runs.tree import text_of
from handrail.session import Session
from handrail.session.saving import said_in

_NOT_RUN = "This call was not run: the run was cancelled before it."
_UNKNOWN = "This call was under way when its run was cancelled, and what came of it is not known. Find out before you repeat it."


async def cancel(journal: Journal, run_id: str) -> RunRow:
    """End a run.

    One that nobody has is over when this returns, each of its calls with a result, so that later runs of
    its session can go on. One that another process has is stopped by that process within seconds: until
    then the row that is returned has `stopping`. One that is over stays as it is.
    """
    row = await journal.run(run_id)
    if row.status in OVER:
        return row
    try:
        async with taken(journal, run_id) as row:
            if row.status not in OVER:
                await _end(journal, row)
    except RunBusy:
        await journal.stop(run_id)
    return await journal.run(run_id)


async def _end(journal: Journal, row: RunRow) -> None:
    run_id = row.record.id
    outcome = RunOutcome(
        stop_reason="cancelled",
        messages=await _messages(journal, row),
        usage=_usage(await journal.entries(run_id)),
        opened=_opened(await journal.load(run_id)),
    )
    await journal.leave(run_id, "cancelled", msgspec.msgpack.encode(outcome))


async def _messages(journal: Journal, row: RunRow) -> list[Message]:
    """What the run has added to its conversation, with an end for every call."""
    record = row.record
    begin, lineage = decode_begin(record), await lineage_of(journal, row)
    entries, units = await journal.entries(record.id), await journal.load(record.id)
    session = Session(id=record.session_id)
    for fact in said_in(lineage.base, MessageAdded) if lineage.base is not None else ():
        session.keep(fact)
    for message in lineage.said:
        session.keep(MessageAdded("root", message, ""))
    conversation = root_conversation(session)
    if begin.history and not len(conversation.messages):
        conversation.begin_with(begin.history, record.id)
    began = len(conversation.messages)
    conversation.add(UserMessage(NO_MESSAGE if begin.message is None else begin.message), record.id)
    _Retold(record.id, conversation, entries, units).tell()
    return conversation.messages.since(began)


class _Retold:
    """Goes through a record and says again what was said."""

    def __init__(
        self, run_id: str, conversation: Conversation, entries: Sequence[Entry], units: Sequence[CommitUnit]
    ) -> None:
        self._run_id = run_id
        self._conversation = conversation
        self._found = {(entry.kind, entry.key): entry.body for entry in entries}
        self._units = {unit.place: unit for unit in units}

    def tell(self) -> None:
        number = made = 0
        while (body := self._found.get(("model answer", f"#{number + 1}"))) is not None:
            number += 1
            told: Any = self._found.get(("told", f"#{number}"))
            if told is not None:
                self._say(UserMessage(msgspec.msgpack.decode(told)["text"], True))
            answer = msgspec.msgpack.decode(body, type=RecordedAnswer)
            calls = self._conversation.fresh_ids(answer.calls)
            self._say(AssistantMessage(answer.text, calls, answer.stop.kept))
            if calls:
                self._say(
                    ToolMessage(
                        tuple(self._result(call, f".{made + at}") for at, call in enumerate(calls, 1))
                    )
                )
                made += len(calls)

    def _say(self, message: Message) -> None:
        self._conversation.add(message, self._run_id)

    def _result(self, call: CallAsked, place: str) -> CallAnswered:
        unit = self._units.get(place)
        if unit is not None:
            return CallAnswered(call.id, call.name, text_of(unit.result), unit.status != "ok")
        begun = any(kind == "call begun" and key.startswith(f"{place}~") for kind, key in self._found)
        done = _settled(self._found, place)
        left = f" It had done: {', '.join(done)}." if done else ""
        return CallAnswered(call.id, call.name, f"{_UNKNOWN if begun or done else _NOT_RUN}{left}", True)


def _settled(found: Mapping[tuple[str, str], bytes], place: str) -> list[str]:
    """What inner calls of an open call did to the world."""
    return [
        done.what
        for (kind, key), body in found.items()
        if kind == "inner call" and key.startswith(f"{place}~")
        for done in msgspec.msgpack.decode(body, type=InnerCall).settled
    ]


def _opened(units: Sequence[CommitUnit]) -> list[str]:
    """The sections that the run's model has opened."""
    found: list[str] = []
    for unit in units:
        if unit.tool == OPENER and unit.status == "ok" and unit.place.startswith("."):
            found += msgspec.json.decode(unit.result)["value"]
    return list(dict.fromkeys(found))


def _usage(entries: Sequence[Entry]) -> Usage:
    usage = Usage()
    for entry in entries:
        if entry.kind == "model answer":
            answer = msgspec.msgpack.decode(entry.body, type=RecordedAnswer)
            usage += answer.usage or Usage(requests=1)
    return usage
