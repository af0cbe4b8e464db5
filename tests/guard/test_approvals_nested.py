"""Approvals in nested, concurrent runs: which questions an answer decides, cancellation, deadlines and expiry."""

from __future__ import annotations

import asyncio
import itertools
import json
from typing import Any

import pytest

from handrail import (
    Adapter,
    CapabilityPolicy,
    Deadline,
    Prompt,
    PromptEvaluationError,
    PromptResponse,
    ScriptedModel,
    Session,
    ToolCall,
    ToolContext,
    tool,
)
from handrail.events import ApprovalDecided, ApprovalRequested
from handrail.guard import Broker, approvals_of
from handrail.journal.sqlite import MemoryJournal
from handrail.messages import ModelRequest, ToolMessage
from handrail.question import Question
from handrail.testing import Person, RecordingSubscriber, VirtualClock
from support.parked_runs import answer_to

pytestmark = pytest.mark.virtual_time

ran: list[int] = []


@pytest.fixture(autouse=True)
def _nothing_ran() -> None:
    ran.clear()


POLICY = CapabilityPolicy(effects={"idempotent": "allow"})


@tool
async def pay(amount: int, context: ToolContext) -> str:
    """Pay somebody."""
    ran.append(amount)
    return f"paid {amount}"


@tool(effect="idempotent")
async def delegate(amount: int, context: ToolContext) -> str:
    """Let the till pay."""
    till = Prompt("till", "Pay.", tools=[pay], policies=[POLICY])
    return (await context.adapter.evaluate(till, str(amount))).text


@tool(effect="idempotent")
async def manage(amount: int, context: ToolContext) -> str:
    """Let the office arrange the payment."""
    office = Prompt("office", "Delegate.", tools=[delegate], policies=[POLICY])
    return (await context.adapter.evaluate(office, str(amount))).text


FIRM = Prompt("firm", "Manage.", tools=[manage, pay], policies=[POLICY])


def plays(request: ModelRequest) -> Any:
    """Play the model at every level: call the tools that the message names, or else the first tool, then report the results."""
    last = request.messages[-1]
    if isinstance(last, ToolMessage):
        return last.text
    if "{" in last.text:
        return [ToolCall(name, {"amount": int(amount)}) for amount, name in json.loads(last.text).items()]
    return ToolCall(request.tools[0].tool.name, {"amount": int(last.text)})


class Firm:
    """Starts runs of the prompt `FIRM` in one session. By default, a question stays open until a test answers it."""

    def __init__(self, *, person: Person | None = None, **options: Any) -> None:
        self.clock = VirtualClock()
        self.journal = MemoryJournal(self.clock)
        self.person = person or Person(after=asyncio.Event())
        self.session = Session(principal="ada")
        self.seen = RecordingSubscriber(self.session)
        self.adapter = Adapter(
            ScriptedModel(plays),
            environment=self.person,
            approvals=Broker(self.journal.questions, self.person),
            clock=self.clock,
            **options,
        )

    def begin(self, calls: dict[int, str], **options: Any) -> asyncio.Future[PromptResponse[Any]]:
        message = json.dumps({str(amount): name for amount, name in calls.items()})
        return asyncio.ensure_future(self.adapter.evaluate(FIRM, message, session=self.session, **options))

    async def questions(self) -> dict[int, Question]:
        """Return the open questions by the amount that they ask about."""
        await asyncio.sleep(1)
        return {each.payload["arguments"]["amount"]: each for each in await self.journal.questions.open()}

    def answer(self, question: Question, **value: Any) -> None:
        self.journal.questions.answer(answer_to(question, value))


DEEP = ("manage", "delegate", "pay")


@pytest.mark.parametrize("order", list(itertools.permutations((1, 2, 3))))
async def test_each_answer_reaches_its_own_question(order: tuple[int, ...]):
    """Two questions from the third level and one from the first each get their own answer, in whatever order the answers arrive."""
    firm = Firm()
    run = firm.begin({1: "manage", 2: "manage", 3: "pay"})
    questions = await firm.questions()
    assert {amount: each.asked_by for amount, each in questions.items()} == {
        1: DEEP,
        2: DEEP,
        3: ("pay",),
    }
    assert len({each.id for each in questions.values()}) == 3
    for amount in order:
        firm.answer(questions[amount], approved=amount != 2, reason=f"because of {amount}")
        await asyncio.sleep(1)
    one, two, three = (await run).text.splitlines()
    assert (one, three) == ("paid 1", "paid 3")
    assert two.startswith("pay was not approved (denied): because of 2. It did not run.")
    decided = {each.question_id: each.approval for each in firm.session[ApprovalDecided].all()}
    for amount, question in questions.items():
        assert decided[question.id].reason == f"because of {amount}"
    assert [each.asked_by for each in firm.session[ApprovalRequested].all()].count(DEEP) == 2
    firm.seen.assert_paired()
    assert ran == [amount for amount in order if amount != 2]


async def test_a_lasting_answer_at_one_level_holds_at_all():
    """A remembered answer to a nested question decides the other open questions, nested or not, and a later one."""
    firm = Firm()
    run = firm.begin({1: "manage", 2: "pay", 3: "manage"})
    questions = await firm.questions()
    firm.answer(questions[1], approved=True, remember="scope", scope="pay (any arguments)")
    assert sorted((await run).text.splitlines()) == ["paid 1", "paid 2", "paid 3"]
    assert await firm.journal.questions.open() == ()
    assert (await firm.begin({4: "manage"})).text == "paid 4"
    (remembered,) = approvals_of(firm.session)
    assert remembered.asked_by == DEEP
    hows = [each.how for each in firm.session[ApprovalDecided].all()]
    assert sorted(hows) == ["asked", "remembered", "remembered", "remembered"]
    assert sorted(ran) == [1, 2, 3, 4]


async def test_what_is_cancelled_takes_its_questions_along():
    """Cancelling a run closes its own question and a nested run's, and records both as cancelled."""
    firm = Firm()
    run = firm.begin({1: "manage", 2: "pay"})
    questions = await firm.questions()
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run
    assert await firm.journal.questions.open() == ()
    outcomes = [each.approval.outcome for each in firm.session[ApprovalDecided].all()]
    assert outcomes == ["cancelled"] * len(questions) == ["cancelled"] * 2
    firm.seen.assert_paired()
    assert ran == []


# --- time ----------------------------------------------------------------------------------------


class Slow(Person):
    """A person who takes a hundred seconds for each unit of the amount."""

    async def ask(self, question: Question, /) -> Any:
        await asyncio.sleep(100 * question.payload["arguments"]["amount"])
        return await super().ask(question)


@pytest.mark.parametrize("pauses", [True, False])
@pytest.mark.parametrize("calls", [{1: "manage"}, {1: "manage", 3: "manage"}, {1: "pay", 2: "manage"}])
async def test_the_time_a_person_takes_stops_the_deadline_at_every_level(calls: dict[int, str], pauses: bool):
    """A deadline that pauses for people stays paused until the last answer, at any level. Any other deadline ends the run."""
    firm = Firm(person=Slow(True))
    deadline = Deadline.after(60, clock=firm.clock, pauses_for_people=pauses)
    run = firm.begin(calls, deadline=deadline)
    if pauses:
        await run
        assert deadline.remaining() == pytest.approx(60)
    else:
        with pytest.raises(PromptEvaluationError):
            await run
    firm.seen.assert_paired()
    assert firm.clock.monotonic() == pytest.approx(100 * max(calls) if pauses else 60)
    assert sorted(ran) == (sorted(calls) if pauses else [])


async def test_a_tighter_deadline_of_a_nested_run_stands_too():
    """While a person is asked, the deadlines of a nested run and its outer run both pause, if both pause for people."""

    @tool(effect="idempotent")
    async def hurry(amount: int, context: ToolContext) -> float:
        """Let the till pay within half a minute."""
        till = Prompt("till", "Pay.", tools=[pay], policies=[POLICY])
        assert context.deadline is not None
        limit = Deadline.after(30, clock=VirtualClock(), pauses_for_people=True)
        await context.adapter.evaluate(till, str(amount), deadline=limit)
        return limit.remaining()

    firm = Firm(person=Slow(True))
    deadline = Deadline.after(60, clock=firm.clock, pauses_for_people=True)
    prompt = Prompt("firm", "Hurry.", tools=[hurry], policies=[POLICY])
    response = await firm.adapter.evaluate(prompt, "5", session=firm.session, deadline=deadline)
    assert deadline.remaining() == pytest.approx(60)
    assert float(response.text) == pytest.approx(30)
    assert ran == [5]


async def test_what_is_remembered_takes_no_time_and_a_question_expires_for_each():
    """A question without an answer expires. A call that a remembered decision covers takes no time."""
    firm = Firm(approval_seconds=30)
    run = firm.begin({1: "manage", 2: "pay"})
    questions = await firm.questions()
    assert {each.expires_at is not None for each in questions.values()} == {True}
    firm.answer(questions[1], approved=True, remember="exact")
    text = (await run).text
    assert "paid 1" in text
    assert "pay was not approved (timed out)" in text
    assert firm.clock.monotonic() == pytest.approx(30)
    assert (await firm.begin({1: "pay"})).text == "paid 1"
    assert firm.clock.monotonic() == pytest.approx(30)
    assert ran == [1, 1]
