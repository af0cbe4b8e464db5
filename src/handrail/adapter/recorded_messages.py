"""The messages of a run, read from its record."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import count, takewhile
from typing import Any, NamedTuple

import msgspec

from handrail.adapter.advice import Advice
from handrail.adapter.answer import RecordedAnswer
from handrail.adapter.conversation import Conversation, root_conversation
from handrail.adapter.lineage import lineage_of
from handrail.adapter.loop import first_text
from handrail.adapter.requests import decode_request
from handrail.adapter.run_record import decode_begin
from handrail.dispatch.failures import what_stands
from handrail.events import MessageAdded
from handrail.journals import Journal
from handrail.messages import CallAnswered, CallAsked, Message, ToolMessage, UserMessage
from handrail.place import RUN, Place
from handrail.records import OVER, CommitUnit, Entry, RunRow
from handrail.replay.log import Told
from handrail.replay.records import InnerCall, attachments_in, text_of
from handrail.session import Session
from handrail.session.serialization import said_in


class Unfinished(NamedTuple):
    """The result texts of unfinished calls: for those that had not started, and for those in progress."""

    not_run: str
    under_way: str


async def retold(journal: Journal, row: RunRow, unfinished: Unfinished | None = None) -> list[Message]:
    """Return the messages that a run added to its conversation. With `unfinished`, every call has a result.

    For a run that has not begun, this is the message it was requested with, or nothing if the run is over.
    """
    record = row.record
    if not record.has_begun:
        return [] if row.status in OVER else [UserMessage(decode_request(record).message)]
    begin, lineage = decode_begin(record), await lineage_of(journal, row)
    entries, units = await journal.calls.entries(record.id), await journal.calls.load(record.id)
    session = Session(id=record.session_id)
    for fact in said_in(lineage.base, MessageAdded) if lineage.base is not None else ():
        session.keep(fact)
    for message in lineage.said:
        session.keep(MessageAdded("root", message, ""))
    conversation = root_conversation(session)
    if begin.history and not len(conversation.messages):
        conversation.begin_with(begin.history, record.id)
    began = len(conversation.messages)
    attached = tuple(begin.attached)
    conversation.add(UserMessage(first_text(begin.message, attached), attachments=attached), record.id)
    _Retold(record.id, conversation, entries, units, unfinished).tell()
    return conversation.messages.since(began)


_AT_PLACES = ("model answer", "told", "remark", "call begun", "inner call", "advice", "correction")
"""The kinds of recorded entries that are looked up by place."""


class _Retold:
    """Walks through a run's record and rebuilds the run's messages."""

    def __init__(
        self,
        run_id: str,
        conversation: Conversation,
        entries: Sequence[Entry],
        units: Sequence[CommitUnit],
        unfinished: Unfinished | None,
    ) -> None:
        self._unfinished = unfinished
        self._run_id = run_id
        self._conversation = conversation
        self._found = {
            (entry.kind, Place.parse(entry.key)): entry.body for entry in entries if entry.kind in _AT_PLACES
        }
        self._units = {Place.parse(unit.place): unit for unit in units}
        rounds = (self._found.get(("advice", RUN.advice(number))) for number in count(1))
        self._advice = [msgspec.msgpack.decode(body, type=Advice) for body in takewhile(bool, rounds) if body]

    def tell(self) -> None:
        number = made = 0
        while (body := self._found.get(("model answer", RUN.answer(number + 1)))) is not None:
            number += 1
            told: Any = self._found.get(("told", RUN.answer(number)))
            if told is not None:
                self._say(UserMessage(msgspec.msgpack.decode(told)["text"], True))
            self._say_remark(number)
            answer = msgspec.msgpack.decode(body, type=RecordedAnswer)
            calls = self._conversation.fresh_ids(answer.calls)
            self._say(answer.message(calls))
            found = (self._result(call, RUN.child(made + at)) for at, call in enumerate(calls, 1))
            results = tuple(result for result in found if result is not None)
            if results:
                self._say(ToolMessage(results))
            made += len(calls)
            for text in self._replies(number):
                self._say(UserMessage(text, True))

        self._say_remark(number + 1)

    def _say_remark(self, number: int) -> None:
        """Add what people said before the answer with this number, along with their answers to questions."""
        remark = self._found.get(("remark", RUN.answer(number)))
        if remark is not None:
            self._say(msgspec.msgpack.decode(remark, type=Told).message)

    def _replies(self, number: int) -> Iterator[str]:
        """Yield what the model was told about an answer: how to correct it, or advice."""
        correction = self._found.get(("correction", RUN.answer(number)))
        if correction is not None:
            yield msgspec.msgpack.decode(correction, type=str)
        for advice in self._advice:
            if advice.after == number:
                yield from filter(None, advice.said)

    def _say(self, message: Message) -> None:
        self._conversation.add(message, self._run_id)

    def _result(self, call: CallAsked, place: Place) -> CallAnswered | None:
        unit = self._units.get(place)
        if unit is not None:
            text, attached = text_of(unit.result), attachments_in(unit.result)
            return CallAnswered(call.id, call.name, text, unit.status != "ok", attachments=attached)
        if self._unfinished is None:
            return None
        begun = any(kind == "call begun" and each.attempt_at(place) for kind, each in self._found)
        done, kept = _settled(self._found, place), self._committed(place)
        left = f" It had done: {', '.join(done)}." if done else ""
        if kept:
            left += f" {what_stands(kept)}"
        what = self._unfinished.under_way if begun or left else self._unfinished.not_run
        return CallAnswered(call.id, call.name, f"{what}{left}", True)

    def _committed(self, place: Place) -> list[str]:
        """Return the tool's name for each inner call that committed separately and changed something."""
        units = (unit for each, unit in self._units.items() if each.attempt_at(place))
        return [unit.tool for unit in units if unit.status == "ok" and (unit.effects or unit.writes)]


def _settled(found: Mapping[tuple[str, Place], bytes], place: Place) -> list[str]:
    """Return the external effects of an unfinished call's inner calls."""
    return [
        done.what
        for (kind, each), body in found.items()
        if kind == "inner call" and each.attempt_at(place)
        for done in msgspec.msgpack.decode(body, type=InnerCall).settled
    ]
