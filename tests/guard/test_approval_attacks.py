"""Attacks through answers: a forged answer is refused and runs nothing, and an open question still accepts the genuine answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from handrail import CapabilityPolicy, MemoryFilesystem, Session, ToolContext, open_gate, tool
from handrail.errors import AnswerRefused
from handrail.events import ApprovalDecided, ApprovalRemembered
from handrail.guard import Broker
from handrail.journal.sqlite import MemoryJournal
from handrail.question import Answer, Question
from handrail.testing import Person, VirtualClock

pytestmark = pytest.mark.virtual_time

ran: list[str] = []


@pytest.fixture(autouse=True)
def _nothing_ran() -> None:
    ran.clear()


@tool
async def pay(amount: int, context: ToolContext) -> str:
    """Pay somebody."""
    ran.append(f"pay {amount}")
    return "paid"


@tool(effect="staged", capabilities={"fs.write"})
async def rewrite(path: str, context: ToolContext) -> str:
    """Convert a file to capitals."""
    context.filesystem.write(path, context.filesystem.read(path).upper())
    return "done"


class Desk:
    """Calls whose questions stay open for 60 seconds, or until the test answers them."""

    def __init__(self) -> None:
        self.clock = VirtualClock()
        self.journal = MemoryJournal(self.clock)
        self.broker = Broker(self.journal.questions, Person(after=asyncio.Event()))
        self.files = MemoryFilesystem()
        self.session = Session(principal="ada")
        self.calls: list[asyncio.Future[Any]] = []

    async def ask(self, name: str = "pay", session: Session | None = None, **arguments: Any) -> Question:
        """Make a call, and return the question that it waits for."""
        gate = open_gate(
            [pay, rewrite],
            session=session or self.session,
            policies=[CapabilityPolicy({"fs.write": "ask"})],
            environment=Person(after=asyncio.Event()),
            filesystem=self.files,
            approvals=self.broker,
            approval_seconds=60,
            clock=self.clock,
        )
        self.calls.append(asyncio.ensure_future(gate.invoke(name, arguments)))
        await asyncio.sleep(1)
        return (await self.journal.questions.open())[-1]

    def refused(self, answer: Answer) -> str:
        """Give an answer that must be refused, and return the reason for the refusal."""
        with pytest.raises(AnswerRefused) as refused:
            self.journal.questions.answer(answer)
        return refused.value.problem


def yes(question: Question, **changed: Any) -> Answer:
    """Return an answer that approves the question, with the given fields replaced."""
    fields: dict[str, Any] = {
        "question_id": question.id,
        "digest": question.digest,
        "by": question.principal,
        "value": {"approved": True},
    }
    return Answer(**{**fields, **changed})


FORGED: dict[str, tuple[dict[str, Any], str]] = {
    "an invented digest": ({"digest": "0" * 64}, "digest"),
    "no digest": ({"digest": ""}, "digest"),
    "a digest that is half a character": ({"digest": "\udc80"}, "digest"),
    "wrong principal": ({"by": "eve"}, "'eve' may not answer it"),
    "nobody": ({"by": ""}, "'' may not answer it"),
    "unknown id": ({"question_id": "run.1~1?9"}, "there is no such question"),
    "an unknown outcome": ({"outcome": "approved"}, "'approved' is not a valid outcome"),
    "not a truth value": ({"value": {"approved": "true"}}, "schema: approved"),
    "no approval at all": ({"value": {}}, "schema: approved"),
    "a plain yes": ({"value": True}, "match the schema"),
    "an unknown field": ({"value": {"approved": True, "for": "ever"}}, "match the schema"),
    "an unknown way to remember": (
        {"value": {"approved": True, "remember": "always"}},
        "schema: remember",
    ),
    "a scope that was not offered": (
        {"value": {"approved": True, "remember": "scope", "scope": "fs.write under /"}},
        "the scope 'fs.write under /' was not offered. Use one of 'pay (any arguments)'",
    ),
    "the scope of another tool": (
        {"value": {"approved": True, "remember": "scope", "scope": "rewrite (any arguments)"}},
        "the scope 'rewrite (any arguments)' was not offered",
    ),
    "a scope that is not text": (
        {"value": {"approved": True, "remember": "scope", "scope": ["pay (any arguments)"]}},
        "schema: scope",
    ),
    "a scope for once": (
        {"value": {"approved": True, "scope": "pay (any arguments)"}},
        "the answer has a scope but also remember='once'. Answer with remember='scope'",
    ),
    "a scope for exactly this": (
        {"value": {"approved": True, "remember": "exact", "scope": "pay (any arguments)"}},
        "also remember='exact'",
    ),
}


@pytest.mark.parametrize("attack", FORGED)
async def test_a_forged_answer_is_refused(attack: str):
    """A forged or invalid answer is refused, runs nothing and is not remembered.

    The question stays open and accepts a genuine answer.
    """
    changed, words = FORGED[attack]

    desk = Desk()
    question = await desk.ask(amount=1)
    assert words in desk.refused(yes(question, **changed))
    await asyncio.sleep(1)
    assert ran == []
    assert await desk.journal.questions.open() == (question,)
    desk.journal.questions.answer(yes(question, value={"approved": False}))
    assert not (await desk.calls[0]).success
    assert desk.session[ApprovalRemembered].all() == ()
    assert ran == []


async def changed_arguments(desk: Desk) -> str:
    """Answer the question about a large payment with the answer to the question about a small one."""
    small = await desk.ask(amount=1)
    large = await desk.ask(amount=1000)
    return desk.refused(yes(small, question_id=large.id))


async def replayed_for_the_same_arguments(desk: Desk) -> str:
    """Use the answer to one call's question for a second, identical call."""
    first = await desk.ask(amount=1)
    desk.journal.questions.answer(yes(first))
    await asyncio.sleep(1)
    assert ran == ["pay 1"]
    ran.clear()
    second = await desk.ask(amount=1)
    desk.journal.questions.answer(yes(first))  # repeating the answer to its own question is harmless
    return desk.refused(yes(first, question_id=second.id))


async def of_another_session(desk: Desk) -> str:
    """Use the answer to one session's question in another session of the same principal."""
    other = await desk.ask(session=Session(principal="ada"), amount=1)
    mine = await desk.ask(amount=1)
    return desk.refused(yes(other, question_id=mine.id))


async def of_another_sessions_principal(desk: Desk) -> str:
    """Answer one principal's question in another principal's name."""
    theirs = await desk.ask(session=Session(principal="bob"), amount=1)
    return desk.refused(yes(theirs, by="ada"))


async def late(desk: Desk) -> str:
    """Answer after the question has expired."""
    question = await desk.ask(amount=1)
    await asyncio.sleep(60)
    assert "timed out" in (await desk.calls[0]).message
    return desk.refused(yes(question))


async def late_by_a_hair(desk: Desk) -> str:
    """Answer at the exact moment when the question expires."""
    question = await desk.ask(amount=1)
    refusals: list[str] = []
    asyncio.get_running_loop().call_later(59, lambda: refusals.append(desk.refused(yes(question))))
    assert "timed out" in (await desk.calls[0]).message
    await asyncio.sleep(1)
    return refusals[0]


async def after_another_answer(desk: Desk) -> str:
    """Approve a question that was already denied."""
    question = await desk.ask(amount=1)
    desk.journal.questions.answer(yes(question, value={"approved": False}))
    return desk.refused(yes(question))


async def that_remembers_more(desk: Desk) -> str:
    """Repeat a denial, this time with a wider scope to remember."""
    question = await desk.ask(amount=1)
    desk.journal.questions.answer(yes(question, value={"approved": False, "remember": "exact"}))
    return desk.refused(yes(question, value={"approved": False, "remember": "scope"}))


async def after_it_was_withdrawn(desk: Desk) -> str:
    """Approve a question whose call was cancelled."""
    question = await desk.ask(amount=1)
    desk.calls[0].cancel()
    await asyncio.sleep(1)
    return desk.refused(yes(question))


async def changed_diff(desk: Desk) -> str:
    """Use the answer to an outdated diff for the question that replaced it."""
    desk.files.write("a.txt", "one\n")
    seen = await desk.ask("rewrite", path="a.txt")
    desk.files.write("a.txt", "two\n")
    desk.journal.questions.answer(yes(seen))
    await asyncio.sleep(1)
    (now,) = await desk.journal.questions.open()
    assert "-one" in seen.payload["diff"]
    assert "-two" in now.payload["diff"]
    assert desk.files.read("a.txt") == "two\n"
    return desk.refused(yes(seen, question_id=now.id))


SCENES: list[tuple[Callable[[Desk], Any], str]] = [
    (changed_arguments, "digest"),
    (changed_diff, "digest"),
    (replayed_for_the_same_arguments, "digest"),
    (of_another_session, "digest"),
    (of_another_sessions_principal, "'ada' may not answer it"),
    (late, "expired"),
    (late_by_a_hair, "expired"),
    (after_another_answer, "the question is over: answered"),
    (that_remembers_more, "the question is over: answered"),
    (after_it_was_withdrawn, "there is no such question"),
]


@pytest.mark.parametrize(("attack", "words"), SCENES, ids=[attack.__name__ for attack, _ in SCENES])
async def test_an_answer_fits_nothing_but_its_own_question(attack: Any, words: str):
    """An answer to a different question, in the wrong name or to a question that is over is refused and runs nothing."""
    desk = Desk()
    desk.files.write("a.txt", "two\n")
    assert words in await attack(desk)
    await asyncio.sleep(1)
    assert ran == []
    for question in await desk.journal.questions.open():
        desk.journal.questions.answer(yes(question, value={"approved": False}))
    await asyncio.gather(*desk.calls, return_exceptions=True)
    assert desk.files.read("a.txt") == "two\n"
    assert ran == []


async def test_the_same_answer_again_is_harmless():
    """Giving the same answer several times runs its call once and records one decision."""
    desk = Desk()
    question = await desk.ask(amount=1)
    for _ in range(3):
        desk.journal.questions.answer(yes(question))
    assert (await desk.calls[0]).success
    desk.journal.questions.answer(yes(question))
    assert len(desk.session[ApprovalDecided]) == 1
    assert ran == ["pay 1"]


@pytest.mark.parametrize(
    "forged", [{"scope": "more"}, {"remember": "for ever"}, {"scope": "pay (any arguments)"}]
)
async def test_the_person_is_told_what_was_wrong_and_asked_again(forged: dict[str, Any]):
    """After an invalid answer the person is told what was wrong and asked again, and the second answer counts."""
    person = Person(True, wrong_first={"approved": True, "remember": "once", **forged})

    gate = open_gate([pay], policies=[CapabilityPolicy()], environment=person)
    assert (await gate.invoke("pay", {"amount": 1})).success
    first, second = person.questions
    assert second.message.startswith(f"{first.message}\nit does not match")
