"""`handrail.testing.people`: the person, the stand-ins and the recorder that tests use."""

import asyncio
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import pytest

from handrail import Declined, ToolContext, tool
from handrail.context import RunContext
from handrail.errors import QuestionCancelled, QuestionTimedOut
from handrail.events import ToolInvoked, ToolStarted
from handrail.question import Answer, Question, QuestionKind
from handrail.run import open_gate
from handrail.session import Session
from handrail.testing import Agent, Nobody, Person, RecordingSubscriber, run_virtual
from handrail.tools import ToolResult


def asking(name: str = "pick", kind: QuestionKind = "input", payload: Any = None, id: str = "q1") -> Question:
    return Question(
        id=id,
        kind=kind,
        name=name,
        message="?",
        payload=payload,
        schema={},
        digest="d" * 64,
        principal="ada",
        asked_by=(),
        call_id="c",
        asked_at=datetime(2030, 1, 1, tzinfo=UTC),
    )


def said(person: Person, question: Question) -> Answer:
    async def main() -> Answer:
        return await person.ask(question)

    return run_virtual(main)


@pytest.mark.parametrize(
    ("approve", "approved", "reason"),
    [
        (True, True, ""),
        (False, False, ""),
        ("not today", False, "not today"),
        (lambda question: question.name == "pay", True, ""),
        (lambda question: (False, f"no {question.name}"), False, "no pay"),
        (lambda question: (True, "fine"), True, "fine"),
    ],
)
def test_a_person_approves_by_rule(approve: Any, approved: bool, reason: str):
    """A person approves, denies with or without a reason, or answers as a function decides."""
    answer = said(Person(approve), asking("pay", "approval"))
    assert (answer.outcome, answer.value) == ("answered", {"approved": approved, "reason": reason})
    assert (answer.question_id, answer.digest, answer.by) == ("q1", "d" * 64, "ada")


@pytest.mark.parametrize("as_function", [True, False])
def test_a_person_can_give_the_whole_answer(as_function: bool):
    """A person can give a complete answer with `remember`, either fixed or as a function of the question."""
    whole = {"approved": True, "reason": "fine", "remember": "scope", "scope": "pay (any arguments)"}
    person = Person(approve=(lambda question: whole) if as_function else whole)
    assert said(person, asking("pay", "approval")).value == whole


def test_a_person_who_was_told_nothing_says_no():
    """A person without prepared answers denies approvals and declines questions."""
    assert said(Person(), asking(kind="approval")).value["approved"] is False
    assert said(Person(), asking()).outcome == "declined"
    assert said(Person(), asking()).reason == "no answer was prepared for 'pick'"


@pytest.mark.parametrize(
    ("laid_out", "outcome", "value", "reason"),
    [
        ({"selected": "tea"}, "answered", {"selected": "tea"}, ""),
        (None, "answered", None, ""),
        (lambda payload: payload * 2, "answered", 8, ""),
        (Declined("pick", "no"), "declined", None, "no"),
        (QuestionCancelled("pick"), "cancelled", None, ""),
        (QuestionTimedOut("pick"), "timed out", None, ""),
    ],
)
def test_a_person_answers_by_kind(laid_out: Any, outcome: str, value: Any, reason: str):
    """A prepared answer may be a value, a function of the payload, or an exception that stands for a missing answer."""
    answer = said(Person(answers={"pick": laid_out}), asking(payload=4))
    assert (answer.outcome, answer.value, answer.reason) == (outcome, value, reason)


def test_another_exception_is_the_environments():
    """A prepared exception that does not stand for a missing answer is raised by `ask`."""
    with pytest.raises(OSError, match="line dead"):
        said(Person(answers={"pick": OSError("line dead")}), asking())


@pytest.mark.parametrize("forge", ["digest", "principal", "question"])
def test_a_forger_changes_that_and_nothing_else(forge: Any):
    """A forged answer differs from the genuine one in a single field, so that a test shows which check refuses it."""
    true, false = (
        said(Person(True), asking(kind="approval")),
        said(Person(True, forge=forge), asking(kind="approval")),
    )
    changed = {
        name
        for name in ("question_id", "digest", "by", "outcome", "value")
        if getattr(true, name) != getattr(false, name)
    }
    assert changed == {{"digest": "digest", "principal": "by", "question": "question_id"}[forge]}


@pytest.mark.virtual_time
async def test_a_slow_person_waits_for_the_event_or_the_time():
    """A slow person gets the question at once, and answers after the given event or time."""
    event = asyncio.Event()
    person = Person(answers={"pick": 1}, after=event)
    answering = asyncio.ensure_future(person.ask(asking()))
    await asyncio.sleep(1000)
    assert not answering.done()
    assert len(person.questions) == 1
    event.set()
    assert (await answering).value == 1
    start = asyncio.get_running_loop().time()
    await Person(after=5).ask(asking())
    assert asyncio.get_running_loop().time() - start == 5


@pytest.mark.virtual_time
async def test_wrong_first_is_wrong_once_for_each_question():
    """With `wrong_first`, each question gets one wrong answer before the prepared one."""
    person = Person(answers={"pick": 1}, wrong_first="x")
    assert [(await person.ask(asking(id=id))).value for id in ("q1", "q1", "q2", "q1", "q2")] == [
        "x",
        1,
        "x",
        1,
        1,
    ]


def test_who_is_there():
    """Only `Person` has the run mode `user`. `Agent` and `Nobody` do not, although they would approve if they were asked."""
    assert [each.run_mode for each in (Person(), Agent(), Nobody())] == ["user", "agent", "headless"]
    assert said(Agent(), asking(kind="approval")).value["approved"] is True
    assert said(Nobody(), asking(kind="approval")).value["approved"] is True


@dataclass(frozen=True)
class Note:
    text: str


@pytest.mark.virtual_time
async def test_the_recorder_keeps_everything_in_order():
    """The recorder returns events by type and the status of each call, and stops recording when it is closed."""

    @tool(effect="staged")
    async def note(fail: bool, context: ToolContext) -> str:
        """Emit a note, or fail."""
        context.session.dispatch(Note("x"))
        if fail:
            raise ValueError("no")
        return "noted"

    session = Session()
    with RecordingSubscriber(session) as seen:
        gate = open_gate([note], session=session)
        await gate.invoke("note", {"fail": True})
        await gate.invoke("note", {"fail": False})
        await gate.invoke("nothing")
    await gate.invoke("note", {"fail": False})
    assert seen.statuses() == [("note", "error"), ("note", "ok"), ("nothing", "invalid")]
    assert seen.of(Note) == [Note("x")]
    assert len(seen.of(object)) == len(seen.events)
    seen.assert_paired()


RUN = RunContext("r", "r", "s", 1, "w", "t", "p")
START = ToolStarted("c", "t", ("t",), 0, RUN)
END = ToolInvoked("c", "t", ("t",), "ok", ToolResult.ok(1), None, 0, 1, (), None, RUN)


@pytest.mark.parametrize(
    ("events", "words"),
    [
        ([START, END], None),
        ([], None),
        ([START], "never ended: \\['c'\\]"),
        ([END], "ended before it started"),
        ([END, START], "ended before it started"),
        ([START, END, END], "ended twice"),
        ([START, START, END], "started twice"),
        ([START, END, START, END], "started twice"),
    ],
)
def test_pairs_are_checked(events: list[object], words: str | None):
    """Each call must have one start and then one end. Otherwise, the check fails and names the call."""
    seen = RecordingSubscriber(Session())
    seen.events.extend(events)
    if words is None:
        seen.assert_paired()
    else:
        with pytest.raises(AssertionError, match=words):
            seen.assert_paired()
