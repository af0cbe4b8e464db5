"""The lineage of a run: the session that earlier runs left to it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import count, takewhile
from typing import Any, NamedTuple

import msgspec

from handrail.clock import SYSTEM_CLOCK
from handrail.errors import RunBusy, RunError
from handrail.events import MessageAdded, ResultShortened
from handrail.journal.protocol import Journal
from handrail.journal.records import OVER, CommitUnit, Decision, Entry, RunRow
from handrail.messages import CallAnswered, CallAsked, Compaction, Message, ToolMessage, UserMessage
from handrail.prompt import OPENER
from handrail.run.answer import RecordedAnswer, spent_by
from handrail.run.conversation import Conversation, first_text, root_conversation
from handrail.run.failures import what_stands
from handrail.run.place import RUN, Place
from handrail.run.record.begin import (
    RunOutcome,
    base_of,
    begun_runs,
    check_begun,
    decode_begin,
    decode_outcome,
    decode_request,
    never_begun,
)
from handrail.run.record.format import Advice, InnerCall, attachments_in, text_of
from handrail.run.record.lease import acquire_run
from handrail.run.record.log import RunLog, Told
from handrail.run.record.notices import place_after, place_of_remark, undone_in, untold_message
from handrail.run.record.recorded_session import compactions_in, logs_of, run_end
from handrail.run.search import SEARCHER, loaded_by
from handrail.session import Session
from handrail.session.serialization import decode_item, encode_item, said_in
from handrail.session.slices import name_of


class Lineage(msgspec.Struct, frozen=True):
    """The session as it was when a run began: a saved session, and the commits and messages since it was saved."""

    base: bytes | None
    events: list[bytes]
    said: list[Message]
    shown: list[str]
    logged: list[bytes]
    denied: list[bytes] = []
    """The session's remembered denials and all its revocations. Approvals are left out: they never apply to another session."""
    compaction: Compaction | None = None
    """What of the messages is sent; None if all of them are."""

    def large_results(self) -> Iterator[str]:
        """Yield the digests of the session's large results."""
        facts = [] if self.base is None else said_in(self.base, ResultShortened)
        name = f'{{"type":"{name_of(ResultShortened)}"'.encode()
        facts += [decode_item(each, "") for each in self.logged if each.startswith(name)]
        for fact in facts:
            if fact.whole.digest:
                yield fact.whole.digest


async def lineage_of(journal: Journal, row: RunRow) -> Lineage:
    """Return the session that earlier runs left to this one. Events are not decoded, so their types are not needed.

    Raises `RunError` if this run has not begun, or if an earlier one is not over.
    """
    record = row.record
    check_begun(row)
    runs = await begun_runs(journal, record.session_id, record.principal)
    history = await journal.calls.history(record.session_id)
    undone = (await undone_in(journal, record.session_id, record.principal)).calls
    first = decode_begin(runs[0].record)
    events, said, shown = list(first.events), list(first.said), list(first.shown)
    logged = list(first.logged)
    ids: list[str] = []
    compaction = first.compaction
    for earlier in runs:
        if earlier.record.id == record.id:
            break
        if earlier.status not in OVER:
            raise RunError(
                record.id,
                f"the run {earlier.record.id!r} of the same session, on which it builds, is not over",
                "Resume or cancel that run first.",
            )
        ids.append(earlier.record.id)
        records = [each for run_id, each in history if run_id == earlier.record.id]
        outcome = decode_outcome(earlier)
        logs = logs_of(earlier, records)
        logged += [*logs.copied(), *outcome.logged, encode_item(run_end(earlier, logs), record.session_id)]
        said += outcome.messages
        shown += outcome.opened
        compaction = [compaction, *compactions_in(records).values()][-1]
    for run_id, each in history:
        if isinstance(each, CommitUnit) and run_id in ids and each.call_id not in undone:
            events += [bytes(event) for event in each.events]
    decisions = await journal.decisions.read(record.session_id, record.principal)
    denied = [*first.denied, *(each.body for each in decisions if not _approves(each))]
    return Lineage(base_of(runs), events, said, shown, logged, denied, compaction)


def _approves(decision: Decision) -> bool:
    return decision.kind == "remembered" and decode_item(decision.body, decision.session_id).approved


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
            if answer.stop.reason == "interrupted" and not answer.text:
                continue  # it was stopped before it had said anything
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
        for often in count(1):
            remark = self._found.get(("remark", place_of_remark(RUN.answer(number), often)))
            if remark is None:
                break
            told = msgspec.msgpack.decode(remark, type=Told)
            for each in told.said:
                self._say(each)

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
            value = msgspec.json.decode(unit.result)["value"] if call.name == SEARCHER else None
            shows, definitions = loaded_by(call.name, value)
            failed = unit.status != "ok"
            return CallAnswered(call.id, call.name, text, failed, shows, attached, definitions)
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
        return [unit.tool for unit in units if unit.status == "ok" and unit.has_changed]


def _settled(found: Mapping[tuple[str, Place], bytes], place: Place) -> list[str]:
    """Return the external effects of an unfinished call's inner calls."""
    return [
        done.what
        for (kind, each), body in found.items()
        if kind == "inner call" and each.attempt_at(place)
        for done in msgspec.msgpack.decode(body, type=InnerCall).settled
    ]


UNFINISHED = Unfinished(
    "This call did not run: the run was cancelled first.",
    "This call was in progress when its run was cancelled, and its outcome is unknown. "
    "Find out what it did before you repeat it.",
)


NEVER_BEGAN = never_begun("cancelled", "it was cancelled before it began")


async def end_cancelled(journal: Journal, run_id: str) -> None:
    """End a run as cancelled, unless it is over. Each of its calls then has a result. Raises `RunBusy` if a process executes it.

    Another run may work on the session meanwhile, because nothing more is committed to it.
    """
    async with acquire_run(journal, run_id, turn="none") as row:
        if row.status == "queued":
            await journal.runs.leave(run_id, "cancelled", NEVER_BEGAN)
        elif row.status not in OVER:
            entries, units = await journal.calls.entries(run_id), await journal.calls.load(run_id)
            usage, cost = spent_by(entries)
            was_parked = row.status == "parked"  # otherwise a request may have been lost
            log = RunLog(journal, run_id, SYSTEM_CLOCK, entries, units)
            spent = {
                "tokens": usage.tokens,
                "requests": usage.requests,
                "tool_calls": log.charged_in(RUN),
            }
            messages = await retold(journal, row, UNFINISHED)
            if row.has_messages:
                place, now = place_after(log), journal.clock.now().timestamp()
                told = await untold_message(journal.messages, run_id, place, now)
                messages += () if told is None else told.said
            outcome = RunOutcome(
                stop_reason="cancelled",
                messages=messages,
                usage=usage,
                cost=cost if was_parked else None,
                spent={**spent, **({} if cost is None else {"money": cost})} if was_parked else {},
                opened=_opened(units),
            )
            await journal.runs.leave(run_id, "cancelled", msgspec.msgpack.encode(outcome))


async def end_stopped(journal: Journal, run_id: str) -> bool:
    """End a run as cancelled if somebody asked for that and its process left it unfinished. Returns whether it was ended here.

    Submitted runs are left to the workers, which end them.
    """
    row = await journal.runs.get(run_id)
    if not row.stopping or row.queue or row.status in OVER:
        return False
    try:
        await end_cancelled(journal, run_id)
    except RunBusy:
        return False
    return True


def _opened(units: Sequence[CommitUnit]) -> list[str]:
    """Return the paths of the sections that the run's model has opened."""
    found: list[str] = []
    for unit in units:
        place = Place.parse(unit.place)
        if unit.tool == OPENER and unit.status == "ok" and (place.parent, place.kind) == (RUN, "call"):
            found += msgspec.json.decode(unit.result)["value"]
    return list(dict.fromkeys(found))
