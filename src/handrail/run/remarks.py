"""Remarks: what people say along with their answers to a run's questions, and how its model is told."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import msgspec

from handrail.journal.protocol import Journal
from handrail.messages import UserMessage
from handrail.question import Answer
from handrail.run.place import Place
from handrail.run.record.attachments import load
from handrail.run.record.log import Told

if TYPE_CHECKING:
    from handrail.run.evaluation import Evaluation


async def tell_remarks(evaluation: Evaluation, place: Place) -> None:
    """Tell the model of the outermost run, before a request, what people have said along with their answers since the last one.

    Does nothing in a nested run, or if nothing was said. Each remark is told once, also over resumptions: a replay repeats the message.
    """
    log = evaluation.run.log
    if evaluation.run.outer is not None:
        return
    told = log.find("remark", place, Told)
    if told is None:
        said = untold(evaluation)
        if not said or log.has("model answer", place):
            return
        evaluation.leave_record()
        told = Told(list(said), _message_of(said.values()))
        await load(log.journal, log.run_id, told.message.attachments)
        _forget(evaluation)
        evaluation.say(
            told.message
        )  # before it is recorded as told, so that others always find it in one place or the other
        await log.note("remark", place, told)
        return
    await load(log.journal, log.run_id, told.message.attachments)
    evaluation.say(told.message)


def untold(evaluation: Evaluation) -> Mapping[str, Answer]:
    """Return the answers whose remarks the run's model has not been told, by question id; none for a nested run."""
    run = evaluation.run
    if run.outer is not None:
        return {}
    return _in_order({**run.log.remarks, **run.people.questions.remarks})


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


def _in_order(said: Mapping[str, Answer]) -> Mapping[str, Answer]:
    """Return the answers in the order of their questions' places, which does not depend on when they arrived."""
    return {id: said[id] for id in sorted(said, key=lambda id: (len(id), id))}


def _forget(evaluation: Evaluation) -> None:
    evaluation.run.people.questions.remarks.clear()
    if evaluation.run.log.remarks:
        evaluation.run.log.remarks = {}


def _message_of(answers: Iterable[Answer]) -> UserMessage:
    said = list(answers)
    text = "\n\n".join(each.remark for each in said if each.remark)
    files = tuple(file for each in said for file in each.attachments)
    return UserMessage(text, attachments=files, midway=True)
