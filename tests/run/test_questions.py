"""Questions: which answers are accepted, and how a question ends."""

import asyncio
import threading
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, Literal

import msgspec
import pytest
from pydantic import SecretStr, TypeAdapter

from handrail import (
    Declined,
    HandrailError,
    NoAnswer,
    Tool,
    ToolContext,
    ToolResult,
    UserContext,
    gather,
    tool,
)
from handrail.errors import AnswerRefused, QuestionCancelled, QuestionTimedOut, TransientError
from handrail.events import QuestionAnswered, QuestionAsked, ToolInvoked
from handrail.guard import CapabilityPolicy
from handrail.journal.digest import keyed_digest, new_key
from handrail.journal.local import LocalQuestions
from handrail.journal.sqlite import MemoryJournal
from handrail.question import Answer, Question
from handrail.run import open_gate
from handrail.schema import Schema
from handrail.session import Session
from handrail.testing import Agent, Nobody, Person, RecordingSubscriber, VirtualClock, run_virtual
from support.parked_runs import answer_to


def question(clock: VirtualClock, id: str = "q1", seconds: float | None = None, **more: Any) -> Question:
    now = clock.now()
    return Question(
        id=id,
        kind="input",
        name="pick",
        message="Which?",
        payload={"choices": [1, 2]},
        schema={"type": "integer"},
        digest=more.pop("digest", f"digest of {id}"),
        principal="ada",
        asked_by=("tool",),
        call_id="call",
        asked_at=now,
        expires_at=None if seconds is None else now + timedelta(seconds=seconds),
        **more,
    )


CHECK = Schema[int](int).parse_value


class Desk:
    """A question desk in virtual time with one open question."""

    def __init__(self, seconds: float | None = 60) -> None:
        self.clock = VirtualClock()
        self.desk = LocalQuestions(self.clock)
        self.question = question(self.clock, seconds=seconds)
        self.asking = asyncio.ensure_future(self.desk.ask(self.question, None, CHECK))


# --- attacks -------------------------------------------------------------------------------------


async def wrong_digest(desk: Desk) -> None:
    desk.desk.answer(answer_to(desk.question, 1, digest="digest of q2"))


async def empty_digest(desk: Desk) -> None:
    desk.desk.answer(answer_to(desk.question, 1, digest=""))


async def unreadable_digest(desk: Desk) -> None:
    desk.desk.answer(answer_to(desk.question, 1, digest="\ud800 é"))


async def wrong_principal(desk: Desk) -> None:
    desk.desk.answer(answer_to(desk.question, 1, by="mallory"))


async def unknown_id(desk: Desk) -> None:
    desk.desk.answer(answer_to(desk.question, 1, question_id="q9"))


async def late(desk: Desk) -> None:
    await asyncio.sleep(61)
    desk.desk.answer(answer_to(desk.question, 1))


async def late_by_the_clock(desk: Desk) -> None:
    """Answer when the question has expired but the desk's timer has not fired yet."""
    desk.clock._start += timedelta(seconds=60)
    desk.desk.answer(answer_to(desk.question, 1))


async def second(desk: Desk) -> None:
    desk.desk.answer(answer_to(desk.question, 1))
    desk.desk.answer(answer_to(desk.question, 2))


async def second_declines(desk: Desk) -> None:
    desk.desk.answer(answer_to(desk.question, 1))
    desk.desk.answer(answer_to(desk.question, None, outcome="declined"))


async def after_a_decline(desk: Desk) -> None:
    desk.desk.answer(answer_to(desk.question, None, outcome="declined"))
    desk.desk.answer(answer_to(desk.question, 1))


async def after_cancel(desk: Desk) -> None:
    await desk.desk.withdraw("q1")
    desk.desk.answer(answer_to(desk.question, 1))


async def after_the_asker_went(desk: Desk) -> None:
    desk.asking.cancel()
    await asyncio.wait({desk.asking})
    desk.desk.answer(answer_to(desk.question, 1))


async def unfit(desk: Desk) -> None:
    desk.desk.answer(answer_to(desk.question, "one"))


async def nothing(desk: Desk) -> None:
    desk.desk.answer(answer_to(desk.question, None))


async def odd_outcome(desk: Desk) -> None:
    desk.desk.answer(answer_to(desk.question, 1, outcome="approved"))


async def second_forged(desk: Desk) -> None:
    desk.desk.answer(answer_to(desk.question, 1))
    desk.desk.answer(answer_to(desk.question, 1, digest="another"))


WRONG_DIGEST = (
    "its digest does not match this question's",
    "Read the question again, and answer that version of it.",
)
NO_NUMBER = (
    "it does not match the schema: must be a whole number",
    "Answer with a value that matches the schema.",
)
ONLY_OPEN = "Only an open question can be answered."
ATTACKS: dict[str, tuple[Any, str, str]] = {
    "wrong digest": (wrong_digest, *WRONG_DIGEST),
    "empty digest": (empty_digest, *WRONG_DIGEST),
    "unreadable digest": (unreadable_digest, *WRONG_DIGEST),
    "wrong principal": (wrong_principal, "'mallory' may not answer it", "Only 'ada' may."),
    "unknown id": (unknown_id, "there is no such question", "Answer one of the open questions."),
    "late": (late, "the question has expired", "It ended without an answer"),
    "late by the clock": (late_by_the_clock, "the question has expired", "It ended without an answer"),
    "second": (second, "the question is over: answered", ONLY_OPEN),
    "second declines": (second_declines, "the question is over: answered", ONLY_OPEN),
    "after a decline": (after_a_decline, "the question is over: declined", ONLY_OPEN),
    "after cancel": (after_cancel, "the question is over: cancelled", ONLY_OPEN),
    "after the asker went": (after_the_asker_went, "the question is over: cancelled", ONLY_OPEN),
    "unfit": (unfit, *NO_NUMBER),
    "nothing": (nothing, *NO_NUMBER),
    "odd outcome": (odd_outcome, "'approved' is not a valid outcome", "Use one of 'answered', 'declined'"),
    "second forged": (second_forged, *WRONG_DIGEST),
}


@pytest.mark.parametrize("name", ATTACKS)
def test_an_answer_that_does_not_count_is_refused(name: str):
    """A forged, late, invalid or conflicting answer is refused with a reason.

    If the question is still open and has not expired, it then accepts a valid answer.
    """
    attack, problem, hint = ATTACKS[name]

    async def main() -> tuple[AnswerRefused, Any]:
        desk = Desk()
        await asyncio.sleep(1)
        with pytest.raises(AnswerRefused) as refused:
            await attack(desk)
        if await desk.desk.open() and "expired" not in problem:
            desk.desk.answer(answer_to(desk.question, 2))
        (ended,) = await asyncio.gather(desk.asking, return_exceptions=True)
        return refused.value, ended

    refused, ended = run_virtual(main)
    assert problem in refused.problem
    assert hint in str(refused)
    assert str(refused).startswith(f"answer to {refused.question!r} refused: ")
    assert isinstance(refused, HandrailError)
    assert isinstance(refused, ValueError)
    if name.startswith("late"):
        assert isinstance(ended, Answer)
        assert ended.outcome == "timed out"
    if isinstance(ended, Answer) and ended.outcome == "answered":
        assert ended.value == (1 if name.startswith("second") else 2)


@pytest.mark.parametrize("outcome", ["answered", "declined", "cancelled"])
@pytest.mark.virtual_time
async def test_the_same_answer_again_is_harmless(outcome: Any):
    """Giving the same answer again is harmless, both immediately and after the asker has continued."""
    desk = Desk()
    await asyncio.sleep(1)
    given = answer_to(desk.question, 1, outcome=outcome)
    desk.desk.answer(given)
    desk.desk.answer(given)
    ended = await desk.asking
    await asyncio.sleep(1000)
    desk.desk.answer(given)
    assert ended.outcome == outcome


def test_first_wins_under_threads():
    """Of many simultaneous answers, exactly one is accepted, and the asker gets that one."""
    many = 16

    async def main() -> tuple[list[int], Any]:
        desk = LocalQuestions()
        asked = question(VirtualClock(), seconds=None)
        asking = asyncio.ensure_future(desk.ask(asked, None, CHECK))
        await asyncio.sleep(0)
        taken: list[int] = []
        refused: list[str] = []
        start = threading.Barrier(many)

        def give(value: int) -> None:
            start.wait()
            try:
                desk.answer(answer_to(asked, value))
                taken.append(value)
            except AnswerRefused as error:
                refused.append(error.problem)

        threads = [threading.Thread(target=give, args=(number,)) for number in range(many)]
        for thread in threads:
            thread.start()
        got = await asking
        for thread in threads:
            thread.join()
        assert refused == ["the question is over: answered"] * (many - 1)
        return taken, got.value

    for _ in range(20):
        taken, got = asyncio.run(main())
        assert taken == [got]


async def test_a_check_that_is_slow_does_not_let_a_second_answer_in():
    """If two answers are validated at the same time, only one is accepted."""
    both = threading.Barrier(2)

    def slow(value: Any) -> None:
        both.wait(timeout=300)

    desk = LocalQuestions()
    asked = question(VirtualClock())
    asking = asyncio.ensure_future(desk.ask(asked, None, slow))
    await asyncio.sleep(0)
    refused: list[AnswerRefused] = []

    def give(value: int) -> None:
        try:
            desk.answer(answer_to(asked, value))
        except AnswerRefused as error:
            refused.append(error)

    await asyncio.gather(*(asyncio.to_thread(give, number) for number in (1, 2)))
    await asking
    assert len(refused) == 1


# --- the desk ------------------------------------------------------------------------------------


@pytest.mark.virtual_time
async def test_open_questions_are_listed_oldest_first_until_they_are_over():
    """Open questions are listed oldest first, until they are answered, expire or are withdrawn, or the asker is cancelled."""
    clock = VirtualClock()
    desk = LocalQuestions(clock)
    questions = [question(clock, f"q{number}", seconds=30 if number == 2 else None) for number in range(4)]
    asking = [asyncio.ensure_future(desk.ask(each)) for each in questions]
    lists: list[list[str]] = []

    async def look() -> None:
        await asyncio.sleep(1)
        lists.append([each.id for each in await desk.open()])

    await look()
    desk.answer(answer_to(questions[1], 1))
    await look()
    await asyncio.sleep(30)
    await look()
    await desk.withdraw("q0")
    asking[3].cancel()
    await look()
    await asyncio.gather(*asking, return_exceptions=True)
    assert lists == [["q0", "q1", "q2", "q3"], ["q0", "q2", "q3"], ["q0", "q3"], []]


@pytest.mark.virtual_time
async def test_the_same_question_again_gets_its_answer_and_another_is_refused():
    """A question that is asked again gets its earlier answer. A different question with the same id is refused."""
    clock = VirtualClock()
    desk = LocalQuestions(clock)
    person = Person(answers={"pick": 2}, after=5)
    asked = question(clock)
    one, two = await asyncio.gather(desk.ask(asked, person), desk.ask(asked, person))
    three = await desk.ask(asked, person)
    assert [each.value for each in (one, two, three)] == [2, 2, 2]
    assert len(person.questions) == 1
    with pytest.raises(AnswerRefused, match="another question with this id has already been asked"):
        await desk.ask(question(clock, digest="other"), person)


@pytest.mark.virtual_time
async def test_a_question_without_an_answer_may_be_asked_again():
    """A question that timed out may be asked again."""
    clock = VirtualClock()
    desk = LocalQuestions(clock)
    assert (await desk.ask(question(clock, seconds=10))).outcome == "timed out"
    assert clock.monotonic() == 10
    assert (await desk.ask(question(clock, seconds=10), Person(answers={"pick": 1}))).value == 1


@pytest.mark.virtual_time
async def test_a_question_that_has_expired_already_is_over_at_once():
    """A question that has already expired when it is asked times out immediately."""
    clock = VirtualClock()
    late = msgspec.structs.replace(question(clock), expires_at=clock.now() - timedelta(days=1))
    assert (await LocalQuestions(clock).ask(late)).outcome == "timed out"
    assert clock.monotonic() == 0


class Raises(Person):
    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.error = error

    async def ask(self, question: Question, /) -> Answer:
        await asyncio.sleep(1)
        raise self.error


class Returns(Person):
    async def ask(self, question: Question, /) -> Any:
        return None


@pytest.mark.parametrize(
    ("environment", "outcome", "words"),
    [
        (Raises(OSError("line dead")), "cancelled", "nobody could be asked: OSError"),
        (Raises(Declined("pick", "not now")), "declined", "not now"),
        (Raises(QuestionTimedOut("pick")), "timed out", "nobody answered in time"),
        (Raises(QuestionCancelled("pick")), "cancelled", "cancelled"),
        (Returns(), "cancelled", "AttributeError"),
        (Person(answers={"pick": 1}, forge="question"), "declined", "no valid answer after 3 tries"),
        (Person(answers={"pick": 1}, forge="digest"), "declined", "no valid answer after 3 tries"),
        (Person(answers={"pick": 1}, forge="principal"), "declined", "no valid answer after 3 tries"),
        (Person(answers={"pick": "x"}), "declined", "no valid answer after 3 tries"),
        (Person(), "declined", "no answer was prepared for 'pick'"),
    ],
    ids=range(10),
)
def test_an_environment_that_fails_ends_the_question(environment: Any, outcome: str, words: str):
    """If the environment fails, declines or gives no valid answer, the question ends without an answer instead of hanging."""

    async def main() -> Answer:
        clock = VirtualClock()
        async with asyncio.timeout(1000):
            return await LocalQuestions(clock).ask(question(clock), environment, CHECK)

    ended = run_virtual(main)
    assert ended.outcome == outcome
    assert words in ended.reason
    assert ended.value is None


def test_an_answer_to_another_question_is_not_taken_for_this_one():
    """An answer to another question is refused, and the person is asked again a limited number of times."""

    class MixesUp(Person):
        async def ask(self, question: Question, /) -> Answer:
            self.questions.append(question)
            return answer_to(other, 2)

    async def main() -> tuple[Answer, int]:
        nonlocal other
        clock = VirtualClock()
        desk = LocalQuestions(clock)
        other = question(clock, "q2")
        waiting = asyncio.ensure_future(desk.ask(other))
        await asyncio.sleep(1)
        async with asyncio.timeout(100):
            ended = await desk.ask(question(clock), mixes_up, CHECK)
        open_now = len(await desk.open())
        await desk.withdraw("q2")
        await waiting
        return ended, open_now

    other: Any = None
    mixes_up = MixesUp()
    ended, open_now = run_virtual(main)
    assert ended.reason == "no valid answer after 3 tries"
    assert open_now == 1
    assert "it answers 'q2'" in mixes_up.questions[-1].message


@pytest.mark.virtual_time
async def test_an_answer_from_elsewhere_ends_the_asking():
    """An answer through another channel ends the question, and the environment's `ask` is cancelled."""
    stopped: list[bool] = []

    class Waits(Person):
        async def ask(self, question: Question, /) -> Answer:
            try:
                await asyncio.sleep(1e6)
            except asyncio.CancelledError:
                stopped.append(True)
                raise
            raise AssertionError

    clock = VirtualClock()
    desk = LocalQuestions(clock)
    asked = question(clock)
    asking = asyncio.ensure_future(desk.ask(asked, Waits(), CHECK))
    await asyncio.sleep(1)
    desk.answer(answer_to(asked, 7))
    got = await asking
    await asyncio.sleep(0)
    assert got.value == 7
    assert stopped == [True]


# --- wait_for ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Choice:
    selected: str


@tool
async def choose(choices: list[str], context: UserContext) -> str:
    """Let somebody choose."""
    return (await context.wait_for("pick", {"choices": choices}, Choice, timeout=60)).selected


class Scene:
    def __init__(self, environment: Any, tools: Any = (choose,), **options: Any) -> None:
        self.session = Session(principal="ada")
        self.seen = RecordingSubscriber(self.session)
        self.clock = VirtualClock()
        self.gate = open_gate(
            tools, session=self.session, environment=environment, clock=self.clock, **options
        )

    async def call(self, name: str = "choose", /, **arguments: Any) -> ToolResult[Any]:
        result = await self.gate.invoke(name, arguments or {"choices": ["tea", "milk"]})
        self.seen.assert_paired()
        return result


@pytest.mark.virtual_time
async def test_an_answer_is_validated_and_given_as_its_type():
    """`wait_for` asks the person, and returns the answer as the requested type.

    The question and the answer are each published as an event.
    """
    person = Person(answers={"pick": lambda payload: {"selected": payload["choices"][0]}})

    scene = Scene(person)
    assert (await scene.call()).value == "tea"
    (asked,) = scene.seen.of(QuestionAsked)
    (answered,) = scene.seen.of(QuestionAnswered)
    assert (asked.kind, asked.asked_by) == ("pick", ("choose",))
    assert (answered.outcome, answered.by) == ("answered", "ada")
    assert asked.question_id == answered.question_id == person.questions[0].id
    (question,) = person.questions
    assert question.kind == "input"
    assert question.payload == {"choices": ["tea", "milk"]}
    assert question.schema["required"] == ["selected"]
    assert question.expires_at is not None
    assert question.expires_at - question.asked_at == timedelta(seconds=60)


@pytest.mark.parametrize(
    ("answer", "error", "words"),
    [
        (Declined("pick", "not thirsty"), Declined, "choose failed: question 'pick': declined: not thirsty"),
        (QuestionCancelled("pick"), QuestionCancelled, "question 'pick': cancelled before it was answered"),
        (QuestionTimedOut("pick"), QuestionTimedOut, "question 'pick': nobody answered in time"),
        ({"selected": 3}, Declined, "question 'pick': declined: no valid answer after 3 tries"),
        ("slow", QuestionTimedOut, "question 'pick': nobody answered in time"),
    ],
)
@pytest.mark.virtual_time
async def test_no_answer_raises_and_unhandled_the_result_says_which(
    answer: Any, error: type[NoAnswer], words: str
):
    """Without a valid answer, `wait_for` raises a `NoAnswer` that says why. If the handler does not catch it, the failed result says why."""
    caught: list[NoAnswer] = []

    @tool
    async def try_to_choose(choices: list[str], context: UserContext) -> str:
        """Let somebody choose, or else choose the last one."""
        try:
            return (await context.wait_for("pick", {"choices": choices}, Choice, timeout=60)).selected
        except NoAnswer as none:
            caught.append(none)
            return choices[-1]

    person = Person(answers={"pick": answer}, after=61 if answer == "slow" else None)

    scene = Scene(person, [choose, try_to_choose])
    failed = await scene.call()
    assert (failed.success, words in failed.message) == (False, True)
    handled = await scene.call("try_to_choose", choices=["tea", "milk"])
    assert handled.value == "milk"
    assert [status for _, status in scene.seen.statuses()] == ["error", "ok"]
    assert scene.clock.monotonic() == (120 if answer == "slow" else 0)
    assert isinstance(scene.seen.of(ToolInvoked)[0].error, error)
    assert [type(each) for each in caught] == [error]
    assert caught[0].question == "pick"


@pytest.mark.parametrize("environment", [None, Nobody(), Agent()])
@pytest.mark.virtual_time
async def test_nobody_to_ask_is_said_by_name(environment: Any):
    """If nobody can be asked, a tool that requires a person fails, and the message names the missing `wait_for`.

    Any tool can check whether its `context.wait_for` is None.
    """

    @tool
    async def is_there(context: ToolContext) -> bool:
        """Check whether somebody is there."""
        return context.wait_for is not None

    scene = Scene(environment, [choose, is_there])
    assert "needs 'wait_for', which this run does not have" in (await scene.call()).message
    assert (await scene.gate.invoke("is_there")).value is False
    assert environment is None or environment.questions == []


@pytest.mark.virtual_time
async def test_a_type_that_is_not_a_class_can_be_asked_for():
    """`wait_for` accepts a type that is not a class if it is wrapped in a `TypeAdapter`."""

    @tool
    async def ask_size(context: UserContext) -> str:
        """Ask for a size."""
        return await context.wait_for("size", {}, TypeAdapter(Literal["s", "m"]))

    assert (
        await Scene(Person(answers={"size": "m"}, wrong_first="xl"), [ask_size]).gate.invoke("ask_size")
    ).value == "m"


@pytest.mark.virtual_time
async def test_parallel_questions_of_one_call_each_get_their_answer():
    """Each of a call's concurrent questions has its own id and gets its own answer."""

    @tool
    async def ask_both(context: UserContext) -> list[int]:
        """Ask two questions."""
        return list(await gather(context.wait_for("one", 1, int), context.wait_for("two", 2, int)))

    person = Person(answers={"one": 11, "two": 22})

    assert (await Scene(person, [ask_both]).gate.invoke("ask_both")).value == [11, 22]
    assert len({question.id for question in person.questions}) == 2


@pytest.mark.virtual_time
async def test_a_sync_handler_asks_too(monkeypatch: pytest.MonkeyPatch):
    """A sync handler can ask from its thread, and the person's time does not count towards its timeout."""
    monkeypatch.setattr(
        "handrail.testing.virtual_time._THREAD_GRACE", 2.0
    )  # on a busy machine, threads start late

    @tool(timeout=0.5)
    def ask_slowly(context: UserContext) -> int:
        """Ask from a thread."""
        return context.wait_for("number", {}, int).wait()

    assert (
        await Scene(Person(answers={"number": 5}, after=3600), [ask_slowly]).gate.invoke("ask_slowly")
    ).value == 5


@pytest.mark.virtual_time
async def test_secrets_in_a_payload_are_not_shown():
    """Secrets that a handler puts into a payload are masked for the person."""

    @tool
    async def confirm(context: UserContext) -> bool:
        """Show a secret."""
        return await context.wait_for("ok", {"password": SecretStr("hunter2")}, bool)

    person = Person(answers={"ok": True})

    await Scene(person, [confirm]).gate.invoke("confirm")
    assert person.questions[0].payload == {"password": "**********"}


@pytest.mark.virtual_time
async def test_a_cancelled_call_withdraws_its_question():
    """When a call is cancelled, its question is withdrawn and can no longer be answered."""
    clock = VirtualClock()
    journal = MemoryJournal(clock)
    person = Person(answers={"pick": {"selected": "tea"}}, after=asyncio.Event())
    scene = Scene(person, journal=journal)
    choosing = asyncio.ensure_future(scene.gate.invoke("choose", {"choices": ["tea"]}))
    await asyncio.sleep(1)
    (asked,) = await journal.questions.open()
    scene.gate.cancel()
    with pytest.raises(asyncio.CancelledError):
        await choosing
    with pytest.raises(AnswerRefused, match="there is no such question"):
        journal.questions.answer(answer_to(asked, {"selected": "tea"}))
    assert scene.seen.statuses() == [("choose", "cancelled")]


@pytest.mark.virtual_time
async def test_an_answer_by_the_journal_reaches_the_handler():
    """While a connected person is being asked, an answer through the journal is accepted if it comes first."""
    clock = VirtualClock()
    journal = MemoryJournal(clock)
    scene = Scene(Person(after=asyncio.Event()), journal=journal)
    choosing = asyncio.ensure_future(scene.gate.invoke("choose", {"choices": ["tea"]}))
    await asyncio.sleep(1)
    (asked,) = await journal.questions.open()
    with pytest.raises(AnswerRefused, match="the schema: selected"):
        journal.questions.answer(answer_to(asked, {}))
    journal.questions.answer(answer_to(asked, {"selected": "by post"}))
    assert (await choosing).value == "by post"


# --- digests -------------------------------------------------------------------------------------


@dataclass
class Argument:
    argument: int


@dataclass
class Asks:
    kind: str = "pick"
    payload: str = "p"
    argument: int = 1
    tool: str = "asks"
    principal: str = "ada"
    call: str = "c"
    key: bytes = b"k"
    schema: type = int


def digest_of(asks: Asks) -> str:
    """Return the digest of the question that a call with these values asks."""
    person = Person(answers={asks.kind: asks.schema()})

    async def handler(params: Argument, *, context: UserContext) -> ToolResult[Any]:
        return ToolResult.ok(await context.wait_for(asks.kind, asks.payload, asks.schema))

    async def main() -> None:
        made = Tool(asks.tool, "Ask.", handler)
        session = Session(principal=asks.principal)
        gate = open_gate([made], session=session, environment=person, new_id=lambda: "0" * 32)
        gate.run.people.deciders._key = asks.key
        assert (await gate.invoke(asks.tool, {"argument": asks.argument}, call_id=asks.call)).success

    run_virtual(main)
    return person.questions[0].digest


@pytest.mark.parametrize(
    "changed",
    [
        {"kind": "choose"},
        {"payload": "q"},
        {"argument": 2},
        {"tool": "asks_too"},
        {"principal": "bob"},
        {"call": "d"},
        {"key": b"l"},
        {"schema": str},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_a_digest_covers_each_thing_that_an_answer_is_about(changed: dict[str, Any]):
    """A question's digest changes if any one of these values changes, and stays the same if none does."""
    assert digest_of(Asks()) == digest_of(Asks())
    assert digest_of(replace(Asks(), **changed)) != digest_of(Asks())


@pytest.mark.virtual_time
async def test_a_digest_of_an_approval_covers_what_is_shown_and_asked():
    """An approval's digest covers the call's arguments."""
    asked: list[Question] = []

    def remember(question: Question) -> bool:
        asked.append(question)
        return True

    @tool
    async def pay(amount: int) -> str:
        """Pay."""
        return "paid"

    policies = [CapabilityPolicy()]
    for amount in (1, 1, 2):
        gate = open_gate([pay], policies=policies, environment=Person(remember), new_id=lambda: "0" * 32)
        gate.run.people.deciders._key = b"k"
        assert (await gate.invoke("pay", {"amount": amount}, call_id="c")).success
    one, same, other = (question.digest for question in asked)
    assert one == same != other


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (("ab", "c"), ("a", "bc")),
        (("a", None), ("a", "null")),
        ((1,), ("1",)),
        ((1, 2), (12,)),
        ((1,), (True,)),
        (([],), ({},)),
        (("a",), ("a", "")),
        (("a\0b",), ("a", "b")),
        (("a", "b"), ("b", "a")),
    ],
)
def test_no_two_lists_of_parts_share_a_digest(one: Any, other: Any):
    """Different lists of parts have different digests, even if their texts joined together are equal."""
    assert keyed_digest(b"k", *one) != keyed_digest(b"k", *other)


def test_a_digest_is_keyed_and_keys_are_of_chance():
    """A digest depends on its secret key but not on the order of a mapping's entries, and each new secret key is different."""
    assert keyed_digest(b"k", "a") != keyed_digest(b"l", "a")
    assert keyed_digest(b"k", {"a": 1, "b": 2}) == keyed_digest(b"k", {"b": 2, "a": 1})
    assert new_key() != new_key()
    assert len(new_key()) == 32


@pytest.mark.virtual_time
async def test_a_payload_that_can_not_be_shown_is_the_tools_fault():
    """A payload that can't be shown is reported as the tool's error, not as invalid arguments."""

    @tool
    async def show(context: UserContext) -> int:
        """Show a payload that can't be encoded as JSON."""
        return await context.wait_for("pick", {"it": object()}, int)

    scene = Scene(Person(), [show])
    result = await scene.gate.invoke("show")
    assert "can't be written as JSON" in result.message
    assert scene.seen.statuses() == [("show", "error")]
    assert "Correct them" not in result.message


@pytest.mark.virtual_time
async def test_each_try_asks_a_question_of_its_own():
    """An answer in a call's first attempt does not answer the same question in the second attempt."""
    tries: list[str] = []

    @tool(effect="staged")
    async def order(context: UserContext) -> str:
        """Let somebody choose, and fail the first time."""
        tries.append((await context.wait_for("pick", {}, Choice)).selected)
        if len(tries) == 1:
            raise TransientError("the kitchen is busy")
        return tries[-1]

    scene = Scene(Person(answers={"pick": {"selected": "tea"}}), [order])
    await scene.gate.invoke("order")
    asked = [event.question_id for event in scene.seen.of(QuestionAsked)]
    assert len(asked) == 2
    assert len(set(asked)) == 2
    assert tries == ["tea", "tea"]


@pytest.mark.parametrize("changed", [{"digest": "digest of q2"}, {"by": "mallory"}])
@pytest.mark.virtual_time
async def test_an_answer_recorded_elsewhere_must_be_to_this_question_and_by_somebody_asked(
    changed: dict[str, str],
):

    desk = Desk()
    await asyncio.sleep(0)
    with pytest.raises(AnswerRefused):
        desk.desk.deliver(answer_to(desk.question, 1, **changed))
    desk.desk.deliver(answer_to(desk.question, 2))
    assert (await desk.asking).value == 2
