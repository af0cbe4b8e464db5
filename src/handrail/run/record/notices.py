"""Notices: what a run's model is told before a request. Which committed calls were undone since, and what people said along with their answers."""

from __future__ import annotations

from collections.abc import Collection, Coroutine, Iterable, Mapping, Sequence
from itertools import count
from typing import TYPE_CHECKING, Any

import msgspec

from handrail.concurrency.cancellation import finish
from handrail.journal.protocol import Journal, Messages
from handrail.journal.records import Amounts, CommitUnit, QueuedMessage
from handrail.messages import BackgroundEnd, UserMessage
from handrail.question import Answer
from handrail.run.mailbox import Mailbox, deliver
from handrail.run.place import RUN, Place
from handrail.run.record.log import RunLog, Told, load_attachments
from handrail.session import Session
from handrail.session.serialization import decode_item, load_imported

if TYPE_CHECKING:
    from handrail.run.conversation import Conversation
    from handrail.run.evaluation import Evaluation
    from handrail.run.run import Run


class UndoneCall(msgspec.Struct, frozen=True):
    """The record of an undone call. The call's id is the record's key."""

    tool: str
    places: list[str]
    """The paths and slices that were restored; if `discarded`, the paths whose changes were given up."""
    stands: list[str] = []
    """The call's external effects that could not be undone."""
    outer: str = ""
    """The id of the outer call that was to be undone together with this one; "" if there is none.

    If the outer call was undone too, the model is told only about the outer call.
    """
    discarded: bool = False
    """Whether only the call's file changes were given up, because they could not be applied. Its events stand."""
    is_inner: bool = False
    """Whether the call was made inside another call, so that the session's model has not seen its result."""


class _Told(msgspec.Struct, frozen=True):
    calls: list[str]
    text: str


class UndoneCalls:
    """The undone calls of a session, and the undone or discarded calls that its model has not been told about."""

    __slots__ = ("calls", "untold")

    def __init__(self, calls: Mapping[str, UndoneCall], told: Collection[str]) -> None:
        self.calls = {call_id: call for call_id, call in calls.items() if not call.discarded}
        self.untold = {
            call_id: call
            for call_id, call in calls.items()
            if call_id not in told and call.outer not in calls
        }


async def undone_in(journal: Journal, session_id: str, principal: str) -> UndoneCalls:
    """Return the undone calls of a principal's session."""
    calls: dict[str, UndoneCall] = {}
    told: set[str] = set()
    marks = await journal.calls.marks(session_id)
    others = await runs_of_others(journal, session_id, principal) if marks else ()
    for run_id, entry in marks:
        if run_id in others:
            continue
        if entry.kind == "undone":
            calls[entry.key] = msgspec.msgpack.decode(entry.body, type=UndoneCall)
        else:
            told.update(msgspec.msgpack.decode(entry.body, type=_Told).calls)
    return UndoneCalls(calls, told)


async def runs_of_others(journal: Journal, session_id: str, principal: str) -> Collection[str]:
    """Return the ids of the runs in sessions of other principals that have the same id."""
    rows = await journal.runs.list(session_id=session_id)
    return {row.record.id for row in rows if row.record.principal != principal}


async def tell_undone(evaluation: Evaluation, place: Place) -> None:
    """Tell the model of the outermost run, before a request, about the undone calls that it has not been told about.

    Does nothing if there are no such calls. A replay repeats the message.
    """
    log = evaluation.run.log
    told = log.find("told", place, _Told)
    if told is None:
        if not log.untold or log.has("model answer", place):
            return
        evaluation.leave_record()
        told = _Told(list(log.untold), _words(log.untold))
        log.untold = {}
        await log.note("told", place, told)
    evaluation.say(UserMessage(told.text, True))


def _words(undone: Mapping[str, UndoneCall]) -> str:
    lines: list[str] = []
    for call_id, call in undone.items():
        if call.discarded:
            lost = ", ".join(call.places)
            lines.append(
                f"The call {call.tool} ({call_id}) was recorded, but its changes to files were lost before they were "
                f"applied. These were not changed: {lost}."
            )
            continue
        places = f" These were restored: {', '.join(call.places)}." if call.places else ""
        stands = f" Could not be undone: {', '.join(call.stands)}." if call.stands else ""
        which = f"The call {call.tool} ({call_id})"
        if call.is_inner:
            lines.append(f"{which}, which was made inside another call, was undone later.{places}{stands}")
        else:
            lines.append(f"{which} was undone after you got its result.{places}{stands}")
    return "\n".join([*lines, "Check the current state before you rely on it."])


def forget_undone(
    session: Session,
    base: bytes | None,
    before: Iterable[bytes],
    units: Iterable[CommitUnit],
    undone: Mapping[str, UndoneCall],
) -> None:
    """Remove undone calls from a session in memory.

    Only the slices that these calls wrote are rebuilt from the record. No later commit has read or written them, so the
    other slices do not depend on them.
    """
    units = tuple(units)
    names = {
        place
        for unit in units
        if unit.call_id in undone
        for place in unit.writes
        if place.startswith("slice ")
    }
    if not names:
        return
    rules = session.rules
    fresh = Session(id=session.id, slices=rules) if base is None else load_imported(base, rules)
    for event in before:
        fresh.redo(decode_item(event, session.id))
    for unit in units:
        if unit.call_id not in undone:
            for event in unit.events:
                fresh.redo(decode_item(bytes(event), session.id))
    with session.lock:
        state = session.state.copy()
        for kind in [*state]:
            if f"slice {kind.__qualname__}" in names:
                if kind in fresh.state:
                    state[kind] = fresh.state[kind]
                else:
                    del state[kind]
        session.state = state


WRAP_UP = (
    "Finish now: this is your last turn. Say what is done and what is not. You can't call tools any more, except to give "
    "your answer, if it is given by a call."
)
"""What a model is told when its run is ordered to wrap up."""


async def tell_remarks(evaluation: Evaluation, *, is_done: bool = False) -> bool:
    """Tell the model of the outermost run, before its next request, what people have said since the last one: to the run, or along with answers.

    With `is_done`, the model is done, so it is also told what is for afterwards. What was ordered becomes the evaluation's
    `order`. Does nothing if nothing was said. Each remark is told once, also over resumptions: a replay repeats the message.
    Returns whether the model was told anything.
    """
    log, mailbox = evaluation.run.log, evaluation.run.mailbox
    answer, place = evaluation.run.place.answer(evaluation.answers + 1), next_remark(evaluation)
    told = log.find("remark", place, Told)
    if told is None:
        said = untold(evaluation)
        is_due = mailbox is not None and mailbox.is_due(is_done=is_done)
        if not (said or is_due) or log.has("model answer", answer):
            return False
        evaluation.leave_record()
        if mailbox is not None and is_due:
            told = await finish(_tell_messages(evaluation, mailbox, place, said, is_done))
            if told is None:
                return False
        else:
            told = Told(list(said), _message_of(said.values()))
            await load_attachments(log.journal, log.run_id, told.message.attachments)
            _forget(evaluation)
            _say(
                evaluation, told
            )  # before it is recorded as told, so that others always find it in one place or the other
            await log.note("remark", place, told)
    else:
        await load_attachments(log.journal, log.run_id, told.message.attachments)
        _give_back(evaluation, told)
        _say(evaluation, told)
    evaluation.heard += 1
    evaluation.order = told.order
    return bool(told.said)


def next_remark(evaluation: Evaluation) -> Place:
    """Return the place at which what is said next is recorded as told."""
    return place_of_remark(evaluation.run.place.answer(evaluation.answers + 1), evaluation.heard + 1)


def place_of_remark(answer: Place, number: int) -> Place:
    """Return the place of the record that a model was told something for the `number`th time before an answer."""
    return answer if number == 1 else answer.question(number)


def _say(evaluation: Evaluation, told: Told) -> None:
    for each in told.said:
        evaluation.say(each)


async def _tell_messages(
    evaluation: Evaluation, mailbox: Mailbox, place: Place, said: Mapping[str, Answer], is_done: bool
) -> Told | None:
    """Tell the model the messages to the run that are due, after what people have said along with these answers."""
    log = evaluation.run.log
    if said:
        files = _message_of(said.values()).attachments
        await load_attachments(log.journal, log.run_id, files)

    def write(due: Sequence[QueuedMessage]) -> Told | None:
        texts = [each.text for each in due if not each.child]
        if due and due[-1].order == "wrap up" and not is_done:
            texts.append(WRAP_UP)
        if not (said or due):
            return None
        words = _message_of(said.values(), texts)
        return Told(list(said), words, left=_left_by(due), ends=message_of_ends(due))

    told = await mailbox.deliver(str(place), write, is_done=is_done)
    if told is not None:
        _give_back(evaluation, told)
        _forget(evaluation)
        _say(evaluation, told)
    return told


def _left_by(messages: Iterable[QueuedMessage]) -> Amounts:
    """Return what the background runs that have ended have not spent of their shares."""
    left: Amounts = {}
    for each in messages:
        for unit, amount in each.left.items():
            left[unit] = left.get(unit, 0) + amount
    return left


def _give_back(evaluation: Evaluation, told: Told) -> None:
    budget: Any = evaluation.run.budget
    if told.left and budget is not None:
        budget.give_back(told.left)


async def tell_nobody(run: Run, conversation: Conversation) -> None:
    """Add the messages to a run that ends, and that its model was not told, to its conversation, so that the next run's model reads them.

    Each is recorded as if the model were told it before its next answer: if the run is resumed after all, the model is.
    """
    if run.mailbox is not None:
        run.mailbox.is_over = True
    evaluation = run.model.evaluation
    place = place_after(run.log) if evaluation is None else next_remark(evaluation)
    messages = run.options.messages or run.log.journal.messages
    told = await untold_message(messages, run.run_context.run_id, place, run.log.now())
    if told is not None:
        if evaluation is not None:
            evaluation.heard += 1
        for each in told.said:
            conversation.add(each, run.run_context.run_id)


def place_after(log: RunLog) -> Place:
    """Return the place at which what is said next to a run is recorded as told, by its record."""
    answer = next(
        RUN.answer(number) for number in count(1) if not log.has("model answer", RUN.answer(number))
    )
    return next(
        place_of_remark(answer, number)
        for number in count(1)
        if not log.has("remark", place_of_remark(answer, number))
    )


def untold_message(
    messages: Messages, run_id: str, place: Place, now: float
) -> Coroutine[Any, Any, Told | None]:
    """Record at this place the messages to a run that ends and that its model was not told. Returns the record; None if there are none."""

    def write(due: Sequence[QueuedMessage]) -> Told | None:
        words = _message_of((), (each.text for each in due if not each.child))
        return Told([], words, ends=message_of_ends(due)) if due else None

    return deliver(messages, run_id, str(place), now, write, is_over=True)


def untold(evaluation: Evaluation) -> Mapping[str, Answer]:
    """Return the answers whose remarks the run's model has not been told, by question id; none for a nested run."""
    run = evaluation.run
    if run.outer is not None:
        return {}
    said = {**run.log.remarks, **run.people.deciders.remarks}
    return _in_order(said) if said else said


def leave_remarks(evaluation: Evaluation) -> None:
    """Add what the model of an ending run was not told to its conversation, so that the next run's model reads it."""
    said = untold(evaluation)
    if said:
        _forget(evaluation)
        evaluation.say(_message_of(said.values()))


async def unread_remarks(journal: Journal, run_id: str) -> UserMessage | None:
    """Return what people said along with their answers to a run's questions, and its model has not been told; None if there is nothing."""
    records = await journal.questions.history(run_id)
    said = {each.question.id: each.answer for each in records if each.answer and each.answer.has_remark}
    if said:
        for entry in await journal.calls.entries(run_id):
            if entry.kind == "remark":
                for id in msgspec.msgpack.decode(entry.body, type=Told).questions:
                    said.pop(id, None)
    return _message_of(_in_order(said).values()) if said else None


def text_of(message: QueuedMessage) -> str:
    """Return what the model is told for a message."""
    if not message.child:
        return message.text
    how = (
        "was cancelled" if message.end == "cancelled" else "failed" if message.end == "failed" else "is done"
    )
    return f"The background run {message.child} ({message.agent}) {how}: {message.text or 'it said nothing.'}"


def message_of_ends(messages: Iterable[QueuedMessage]) -> UserMessage | None:
    """Return the message that tells the ends of background runs that are among these messages; None if there are none."""
    ended = [each for each in messages if each.child]
    ends = tuple(BackgroundEnd(each.child, each.agent, each.end, each.text) for each in ended)
    return UserMessage("\n\n".join(map(text_of, ended)), True, ends=ends) if ended else None


def _in_order(said: Mapping[str, Answer]) -> Mapping[str, Answer]:
    """Return the answers in the order of their questions' places, which does not depend on when they arrived."""
    return {id: said[id] for id in sorted(said, key=lambda id: (len(id), id))}


def _forget(evaluation: Evaluation) -> None:
    evaluation.run.people.deciders.remarks.clear()
    if evaluation.run.log.remarks:
        evaluation.run.log.remarks = {}


def _message_of(answers: Iterable[Answer], more: Iterable[str] = ()) -> UserMessage:
    said = list(answers)
    text = "\n\n".join(filter(None, [*(each.remark for each in said), *more]))
    files = tuple(file for each in said for file in each.attachments)
    return UserMessage(text, attachments=files, midway=True)
