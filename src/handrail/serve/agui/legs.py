"""What is done with an AG-UI input: a run is begun, or goes on with answers; and what is told where it is not.

By the protocol one input answers every open interrupt, and while one is open nothing else can be said. An input
that is against that is answered by a stream that says so: clients show what is in a stream, and hide what is in
the body of a refused request. The same input again does nothing a second time: it is told how things stand.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from handrail.errors import AnswerRefused, HandrailError, QuestionsOpen, RequestRefused
from handrail.messages import UserMessage
from handrail.question import Answer, Question
from handrail.serve.agui.inputs import Asked, Given
from handrail.serve.agui.interrupts import interrupt_id, is_pending_call
from handrail.serve.agui.translator import Translator
from handrail.serve.agui.wire_events import Event

if TYPE_CHECKING:
    from handrail.records import Asked as Recorded
    from handrail.serve.thread import Thread

Say = Callable[..., Awaitable[Any]]
"""Begins a run with a text, in a leg, with tools and history."""


class Begun(NamedTuple):
    """Where the answer to an input is found."""

    leg: str
    """The leg to follow; "" where there is none to follow."""
    refused: list[Event]
    """What is told in its place."""


async def begin(thread: Thread, asked: Asked, recorded: Sequence[Recorded], say: Say) -> Begun:
    """Do what an input asks for. `recorded` are the questions of the thread's newest run."""
    try:
        return Begun(await _begin(thread, asked, recorded, say), [])
    except RequestRefused:
        raise
    except HandrailError as error:
        told = Translator(thread.id, "")
        return Begun("", [*told.begin_leg(asked.run_id), *told.fail(str(error), type(error).__name__)])


async def _begin(thread: Thread, asked: Asked, recorded: Sequence[Recorded], say: Say) -> str:
    open = [each.question for each in recorded if each.answer is None]
    answers = [_answer(thread.principal, given, recorded) for given in asked.answers]
    answers += _of_tools(thread.principal, asked, open)
    said = await thread.said()
    new = tuple(asked.said[len(_said_before(said, asked.said)) :])
    thread.named.update(_names(said, asked.named))
    if answers:
        _check_all_answered(thread.id, open, answers)
        return await thread.answer(answers, leg=asked.run_id)
    if not new and not open:
        raise RequestRefused(
            422,
            "NothingSaid",
            "there is nothing new in this input. Add a user message, or answer what is open with `resume`.",
            fields=[("/messages", "a user message after what was answered")],
        )
    if open:
        raise QuestionsOpen(thread.id, len(open))
    history = () if await thread.newest() is not None else asked.history
    run_id: str = await say("\n\n".join(new), leg=asked.run_id, tools=asked.tools, history=history)
    thread.named.update(_names([*said, (run_id, UserMessage(new[-1]))], asked.named))
    return asked.run_id


def _names(said: Sequence[tuple[str, Any]], named: Sequence[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    """What a client calls the messages that began runs: the same words in the same order are the same."""
    at = 0
    taken: set[str] = set()
    for run_id, message in said:
        if not isinstance(message, UserMessage) or message.by_run:
            continue
        for number in range(at, len(named)):
            id, text = named[number]
            if text == message.text and id not in taken:
                taken.add(id)
                at = number + 1
                yield run_id, id
                break


def _said_before(said: Sequence[tuple[str, Any]], now: Sequence[str]) -> list[str]:
    """What the person says in this input that they had said: to a run that came to nothing, say."""
    last: list[str] = []
    for _, message in reversed(said):
        if not isinstance(message, UserMessage):
            break
        if not message.by_run:
            last.insert(0, message.text)
    return last if tuple(last) == tuple(now[: len(last)]) else []


def _answer(principal: str, given: Given, recorded: Sequence[Recorded]) -> Answer:
    found = next((each for each in recorded if each.question.id == given.question_id), None)
    if found is None or not found.question.digest.startswith(given.digest) or len(given.digest) < 16:
        raise AnswerRefused(
            given.question_id, "no such question is open here", "Look at the thread again: it may be over."
        )
    question = found.question
    return Answer(
        question_id=question.id,
        digest=question.digest,
        by=principal,
        outcome="answered" if given.resolved else "cancelled",
        value=given.value if given.resolved else None,
    )


def _of_tools(principal: str, asked: Asked, open: Sequence[Question]) -> list[Answer]:
    """The outcomes of the client's own tools, for the calls that wait for one."""
    found: list[Answer] = []
    for question in open:
        outcome = asked.outcomes.get(question.call_id)
        if outcome is not None and is_pending_call(question):
            value = {"content": outcome.content, "error": outcome.error}
            found.append(Answer(question_id=question.id, digest=question.digest, by=principal, value=value))
    return found


def _check_all_answered(thread_id: str, open: Sequence[Question], answers: Sequence[Answer]) -> None:
    """Every interrupt at once, or none; calls that are pending may be answered one by one."""
    given = {answer.question_id for answer in answers}
    left = [each for each in open if each.id not in given and not is_pending_call(each)]
    if left and any(each.id in given and not is_pending_call(each) for each in open):
        names = ", ".join(interrupt_id(each) for each in left)
        raise AnswerRefused(
            left[0].id, f"{names} is not answered", "One resume answers every open interrupt."
        )
