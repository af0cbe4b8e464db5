"""Approvals: who is asked, what the person sees, and what follows each kind of refusal."""

import asyncio
from dataclasses import dataclass
from typing import Any

import pytest
from pydantic import SecretStr

from handrail import Deadline, Tool, ToolContext, ToolResult, gather, tool
from handrail.context import Approval
from handrail.errors import DefinitionError, PromptEvaluationError
from handrail.events import ApprovalDecided, ApprovalRequested, ToolInvoked
from handrail.guard import Broker, CapabilityPolicy
from handrail.guard.approval import APPROVAL_SCHEMA
from handrail.journal.sqlite import MemoryJournal
from handrail.protocols import Environment, PolicyDecision
from handrail.question import Question
from handrail.run import open_gate
from handrail.run.call import ToolCall, run_turn
from handrail.run.gate import Gate
from handrail.session import Session
from handrail.testing import Agent, Nobody, Person, RecordingSubscriber, VirtualClock

pytestmark = pytest.mark.virtual_time

ran: list[str] = []
told: list[Approval] = []


@pytest.fixture(autouse=True)
def _nothing_ran() -> None:
    ran.clear()
    told.clear()


@tool
async def pay(amount: int, context: ToolContext) -> str:
    """Pay somebody."""
    ran.append(f"pay {amount}")
    return "paid"


@tool(effect="read")
async def look(context: ToolContext) -> str:
    """Look without changing anything."""
    ran.append("look")
    return "seen"


@tool(effect="idempotent")
async def pay_by_way_of(amount: int, context: ToolContext) -> str:
    """Pay through another tool."""
    return (await context.call("pay", amount=amount)).message


@tool(effect="idempotent")
async def ask(message: str, context: ToolContext) -> str:
    """Request approval from inside the handler."""
    approval = await context.request_approval(message)
    ran.append(f"{message}: {approval.outcome}")
    told.append(approval)
    return approval.outcome


@tool(effect="idempotent")
async def permit(kind: str, context: ToolContext) -> str:
    """Request a permission."""
    told.append(await context.request_permission(kind))
    return told[-1].outcome


TOOLS = [pay, look, pay_by_way_of, ask, permit]
POLICY = CapabilityPolicy(effects={"idempotent": "allow"})


class Scene:
    """A gate that asks for approval of irreversible calls, with a record of all events."""

    def __init__(self, environment: Environment | None = None, tools: Any = TOOLS, **options: Any) -> None:
        self.session = options.pop("session", None) or Session(principal="ada")
        self.seen = RecordingSubscriber(self.session)
        self.clock = VirtualClock()
        self.journal = MemoryJournal(self.clock)
        options.setdefault(
            "approvals", Broker(self.journal.questions, environment, options.pop("mode", None))
        )
        self.gate: Gate = open_gate(
            tools,
            session=self.session,
            policies=options.pop("policies", [POLICY]),
            environment=environment,
            clock=self.clock,
            **options,
        )

    async def call(self, name: str, /, **arguments: Any) -> ToolResult[Any]:
        result = await self.gate.invoke(name, arguments)
        self.seen.assert_paired()
        return result

    @property
    def decided(self) -> list[Approval]:
        return [event.approval for event in self.seen.of(ApprovalDecided)]


# --- modes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "environment", "outcome", "by", "asked"),
    [
        (None, Person(True), "approved", "ada", 1),
        (None, Person(False), "denied", "ada", 1),
        (None, None, "nobody there", "", 0),
        (None, Nobody(), "nobody there", "", 0),
        (None, Agent(), "nobody there", "", 0),
        ("interactive", Person(True), "approved", "ada", 1),
        ("interactive", Person(False), "denied", "ada", 1),
        ("interactive", None, "nobody there", "", 0),
        ("interactive", Nobody(), "nobody there", "", 0),
        ("interactive", Agent(), "nobody there", "", 0),
        ("approve_all", Person(False), "approved", "approve_all", 0),
        ("approve_all", None, "approved", "approve_all", 0),
        ("approve_all", Agent(), "approved", "approve_all", 0),
        ("strict", Person(True), "denied", "strict", 0),
        ("strict", None, "denied", "strict", 0),
        ("strict", Agent(), "denied", "strict", 0),
    ],
)
async def test_mode_and_who_is_there_decide(mode: Any, environment: Any, outcome: str, by: str, asked: int):
    """The mode and the environment decide whether a call is approved. A model that stands in for a person is never asked."""
    if environment is not None:
        environment.questions.clear()

    scene = Scene(environment, mode=mode)
    result = await scene.call("pay", amount=3)
    assert result.success is (outcome == "approved")
    assert ran == (["pay 3"] if result.success else [])
    own = await scene.call("ask", message="may I?")
    assert own.success
    (approval,) = told
    assert (own.value, approval.outcome, approval.by) == (outcome, outcome, by)
    assert [(each.outcome, each.by) for each in scene.decided] == [(outcome, by)] * 2
    assert bool(approval) is approval.approved is (outcome == "approved")
    assert len(getattr(environment, "questions", ())) == 2 * asked


async def test_no_mode_is_never_approve_all():
    """A gate without an approval mode and without a person denies a call that needs approval."""
    words = (
        "pay was not approved (nobody there). It did not run. It needs approval because pay is irreversible. "
        "Nobody can be asked here: go on without it, and say what was left undone."
    )
    assert (
        await open_gate([pay], policies=[CapabilityPolicy()]).invoke("pay", {"amount": 1})
    ).message == words
    assert ran == []


@pytest.mark.parametrize("seconds", [0, -1, True, "60", float("nan")])
def test_an_invalid_expiry_is_refused(seconds: Any):
    """An invalid `approval_seconds` is refused when the gate is opened."""
    with pytest.raises(DefinitionError, match=r"approval_seconds is .* Pass a positive number"):
        open_gate([pay], approval_seconds=seconds)


async def test_nothing_that_needs_asking_runs_under_strict_by_any_path():
    """Under `strict`, no call that needs approval runs, whether it is made directly, in a turn or by another call."""

    @tool(effect="idempotent")
    async def twice_removed(context: ToolContext) -> str:
        """Pay through a tool that pays through another tool."""
        return (await context.call("pay_by_way_of", amount=4)).value

    scene = Scene(Person(True), [*TOOLS, twice_removed], mode="strict")
    assert "strict" in (await scene.call("pay", amount=1)).message
    await run_turn(scene.gate, [ToolCall("pay", {"amount": 2}), ToolCall("pay_by_way_of", {"amount": 3})])
    assert "strict" in (await scene.call("twice_removed")).value
    assert (await scene.call("look")).success
    assert ran == ["look"]


async def test_approval_can_be_nested_and_says_who_asks():
    """A nested call's question names the whole path of calls that led to it."""
    person = Person(True)

    scene = Scene(person)
    assert (await scene.call("pay_by_way_of", amount=5)).value == ""
    (asked,) = scene.seen.of(ApprovalRequested)
    assert asked.asked_by == ("pay_by_way_of", "pay")
    (question,) = person.questions
    assert question.asked_by == ("pay_by_way_of", "pay")
    assert question.payload == {
        "tool": "pay",
        "arguments": {"amount": 5},
        "reason": "pay is irreversible",
        "scopes": ["pay (any arguments)"],
    }
    assert ran == ["pay 5"]


# --- refusals ------------------------------------------------------------------------------------


async def cancelling(scene: Scene) -> None:
    (question,) = await scene.journal.questions.open()
    await scene.journal.questions.withdraw(question.id)


@pytest.mark.parametrize(
    ("person", "words"),
    [
        (lambda: Person(False), "pay was not approved (denied). It did not run."),
        (lambda: Person("too dear"), "pay was not approved (denied): too dear. It did not run."),
        (
            lambda: Person(lambda question: (False, question.name)),
            "pay was not approved (denied): pay. It did",
        ),
        (lambda: Person(True, after=60), "pay was not approved (timed out). It did not run."),
        (
            lambda: Person(True, forge="digest"),
            "pay was not approved (denied): no valid answer after 3 tries",
        ),
        (lambda: Person(True, forge="principal"), "(denied): no valid answer after 3 tries"),
        (lambda: Person(True, forge="question"), "(denied): no valid answer after 3 tries"),
        (lambda: Broken(), "pay was not approved (cancelled): nobody could be asked: OSError"),
    ],
    ids=range(8),
)
async def test_each_refusal_is_named_and_the_run_continues(person: Any, words: str):
    """After each kind of refusal, the model is told what happened to its call, and the next call runs."""
    scene = Scene(person(), approval_seconds=30)
    result = await scene.call("pay", amount=3)
    assert words in result.message
    assert (await scene.call("look")).success
    assert scene.seen.statuses() == [("pay", "denied"), ("look", "ok")]
    assert ran == ["look"]


class Broken(Person):
    """A person whose connection is lost."""

    async def ask(self, question: Question, /) -> Any:
        raise OSError("connection lost")


async def test_a_withdrawn_question_is_a_cancelled_approval():
    """If a question is withdrawn, its call is not approved, and the next call runs."""
    scene = Scene(Person(True, after=asyncio.Event()))
    paying = asyncio.ensure_future(scene.call("pay", amount=3))
    await asyncio.sleep(1)
    await cancelling(scene)
    assert (await paying).message.startswith("pay was not approved (cancelled). It did not run.")
    assert (await scene.call("look")).success
    assert ran == ["look"]


@pytest.mark.parametrize("verb", ["ask", "permit"])
@pytest.mark.parametrize(
    ("person", "expected"),
    [
        (lambda: Person(True), Approval(True, "", "ada", "approved")),
        (lambda: Person(lambda _: (True, "go")), Approval(True, "go", "ada", "approved")),
        (lambda: Person("no"), Approval(False, "no", "ada", "denied")),
        (lambda: Person(True, after=60), Approval(False, "", "ada", "timed out")),
        (lambda: None, Approval(False, "", "", "nobody there")),
    ],
    ids=["yes", "yes because", "no", "late", "nobody"],
)
async def test_asking_in_a_handler_returns_what_came_of_it(verb: str, person: Any, expected: Approval):
    """`request_approval` and `request_permission` return the outcome, even a denial or a timeout, instead of raising an error."""
    scene = Scene(person(), approval_seconds=30)
    result = await scene.call(verb, **{"message" if verb == "ask" else "kind": "mail.send"})
    assert result.success
    assert told == [expected]
    (decided,) = scene.seen.of(ApprovalDecided)
    (requested,) = scene.seen.of(ApprovalRequested)
    assert decided.approval == expected
    assert decided.question_id == requested.question_id
    assert requested.tool == decided.tool == verb
    assert "mail.send" in requested.reason


async def test_wrong_answer_first_is_asked_again_with_what_was_wrong():
    """An answer whose `approved` is not a boolean is refused, and the person is asked again with the reason."""
    person = Person(True, wrong_first={"approved": "yes"})

    assert (await Scene(person).call("pay", amount=1)).success
    first, second = person.questions
    assert (first.id, first.digest, first.payload) == (second.id, second.digest, second.payload)
    assert second.message.startswith(f"{first.message}\nit does not match")
    assert "schema: approved" in second.message


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        {},
        {"approved": 1},
        {"approved": "true"},
        {"approved": None},
        {"approved": True, "instead": "more"},
        "yes",
        [],
    ],
)
async def test_only_a_truth_value_approves(value: Any):
    """An answer that does not match the schema never approves. Three invalid answers count as a denial."""

    class Mumbles(Person):
        def _approval(self, question: Question) -> Any:
            return value

    assert "no valid answer after 3 tries" in (await Scene(Mumbles()).call("pay", amount=1)).message
    assert ran == []


def test_schema_of_an_approval_is_plain():
    """An approval's schema requires a boolean `approved` and allows a text `reason`, so any client can show it as a form."""
    assert APPROVAL_SCHEMA["required"] == ["approved"]
    assert {key: value["type"] for key, value in APPROVAL_SCHEMA["properties"].items()} == {
        "approved": "boolean",
        "reason": "string",
    }


# --- concurrent requests -------------------------------------------------------------------------


async def test_parallel_requests_each_get_their_own_answer():
    """Each of several concurrent calls gets its own answer, even if the answers arrive in reverse order."""

    class Slow(Person):
        async def ask(self, question: Question, /) -> Any:
            await asyncio.sleep(100 - question.payload["arguments"]["amount"])
            return await super().ask(question)

    person = Slow(lambda question: question.payload["arguments"]["amount"] % 2 == 0)

    scene = Scene(person)
    turn = await run_turn(scene.gate, [ToolCall("pay", {"amount": number}) for number in range(6)])
    assert len({event.question_id for event in scene.seen.of(ApprovalRequested)}) == 6
    assert [result.success for result in turn.results] == [True, False, True, False, True, False]
    assert sorted(ran) == ["pay 0", "pay 2", "pay 4"]
    assert [question.payload["arguments"]["amount"] for question in person.questions] == [5, 4, 3, 2, 1, 0]


async def test_parallel_requests_of_one_handler():
    """Each of one handler's concurrent requests has its own question and answer."""

    @tool(effect="idempotent")
    async def both(context: ToolContext) -> list[str]:
        """Make two requests at once."""
        one, two = await gather(context.request_approval("one"), context.request_approval("two"))
        return [one.outcome, two.outcome]

    assert (await Scene(Person(lambda question: question.name == "two"), [both]).call("both")).value == [
        "denied",
        "approved",
    ]


# --- time ----------------------------------------------------------------------------------------


def hurried(name: str, timeout: float, body: Any) -> Tool[Any, Any]:
    @tool(name=name, description="Do it in time.", effect="idempotent", timeout=timeout)
    async def do(context: ToolContext) -> Any:
        return await body(context)

    return do


async def test_time_a_person_takes_does_not_count_towards_the_timeout():
    """The time that a person takes counts towards no timeout, neither the call's nor an outer call's."""

    async def body(context: ToolContext) -> str:
        await asyncio.sleep(3)
        assert (await context.request_approval("go on?")).approved
        await asyncio.sleep(3)
        return "in time"

    async def around(context: ToolContext) -> str:
        return (await context.call("inner")).value

    scene = Scene(Person(True, after=1000), [hurried("inner", 7, body), hurried("outer", 8, around)])
    assert (await scene.call("inner")).value == "in time"
    assert (await scene.call("outer")).value == "in time"


async def test_the_rest_of_the_time_counts_as_ever():
    """After an answer, a call has as much time left as it had when the person was asked."""

    async def body(context: ToolContext) -> str:
        await asyncio.sleep(3)
        await context.request_approval("go on?")
        await asyncio.sleep(5)
        return "late"

    scene = Scene(Person(True, after=1000), [hurried("slow", 7, body)])
    assert "took longer than 7" in (await scene.call("slow")).message
    assert scene.clock.monotonic() == 1007


async def test_two_people_asked_at_once_both_stop_the_clock():
    """While two questions are open, the timeout stays paused until both are answered."""

    class ByName(Person):
        async def ask(self, question: Question, /) -> Any:
            await asyncio.sleep(float(question.name))
            return await super().ask(question)

    async def body(context: ToolContext) -> str:
        await gather(context.request_approval("10"), context.request_approval("100"))
        return "in time"

    assert (await Scene(ByName(True), [hurried("both", 5, body)]).call("both")).message == ""


@pytest.mark.parametrize(
    ("where", "pauses"),
    [
        ("pay", True),
        ("pay", False),
        ("ask", True),
        ("ask", False),
    ],
)
async def test_a_deadline_pauses_for_people_only_if_it_says_so(where: str, pauses: bool):
    """A deadline that pauses for people ignores the time they take. Any other deadline keeps running, and ends the run while they decide."""
    clock = VirtualClock()
    deadline = Deadline.after(60, clock=clock, pauses_for_people=pauses)
    scene = Scene(Person(True, after=1000), deadline=deadline)
    arguments: dict[str, Any] = {"amount": 1} if where == "pay" else {"message": "?"}
    if pauses:
        assert (await scene.call(where, **arguments)).success
        assert deadline.remaining() == pytest.approx(60)
    else:
        with pytest.raises(PromptEvaluationError):
            await scene.call(where, **arguments)
        scene.seen.assert_paired()
    assert clock.monotonic() == pytest.approx(1000 if pauses else 60)
    assert ran == ([] if not pauses else ["pay 1"] if where == "pay" else ["?: approved"])


# --- questions, events and brokers ---------------------------------------------------------------


@dataclass
class Login:
    user: str
    password: SecretStr
    tokens: list[SecretStr]


async def test_secrets_are_not_shown():
    """A secret reaches the handler. The question shows it masked, and no event contains it."""
    got: list[str] = []

    async def handler(params: Login, *, context: ToolContext) -> ToolResult[str]:
        got.append(params.password.get_secret_value() + params.tokens[0].get_secret_value())
        return ToolResult.ok("in")

    person = Person(True)

    scene = Scene(person, [Tool("login", "Log in.", handler)])
    secrets = {"user": "ada", "password": "hunter2", "tokens": ["swordfish"]}
    assert (await scene.call("login", **secrets)).success
    seen = scene.seen
    assert got == ["hunter2swordfish"]
    (question,) = person.questions
    assert question.payload["arguments"] == {
        "user": "ada",
        "password": "**********",
        "tokens": ["**********"],
    }
    for shown in (repr(question), repr(seen.events)):
        assert "hunter2" not in shown
        assert "swordfish" not in shown


async def test_events_of_an_approval_come_in_order_and_stay_in_the_session():
    """An approval request and its decision precede the end of the call, and stay in the session after a denial."""
    scene = Scene(Person("no"))
    await scene.call("pay", amount=1)
    kinds = [type(event).__name__ for event in scene.seen.events]
    assert [kind for kind in kinds if kind != "ToolRolledBack"] == [
        "ToolStarted",
        "ApprovalRequested",
        "ApprovalDecided",
        "ToolInvoked",
    ]
    assert [each.approval.reason for each in scene.session[ApprovalDecided].all()] == ["no"]
    (requested,) = scene.session[ApprovalRequested].all()
    assert requested.reason == "pay is irreversible"
    (ended,) = scene.seen.of(ToolInvoked)
    assert requested.call_id == ended.call_id


async def test_a_cancelled_run_ends_its_approvals():
    """When a run is cancelled, its open question is closed, and the approval is recorded as cancelled."""
    scene = Scene(Person(True, after=asyncio.Event()))
    paying = asyncio.ensure_future(scene.gate.invoke("pay", {"amount": 1}))
    await asyncio.sleep(1)
    scene.gate.cancel("enough")
    with pytest.raises(asyncio.CancelledError):
        await paying
    scene.seen.assert_paired()
    assert await scene.journal.questions.open() == ()
    assert [each.outcome for each in scene.decided] == ["cancelled"]
    assert ran == []


async def test_an_approval_is_for_one_call():
    """An approval that is not remembered covers one call: the next call with the same arguments is asked about again."""
    person = Person(True)

    scene = Scene(person)
    await scene.call("pay", amount=1)
    await scene.call("pay", amount=1)
    one, two = person.questions
    assert one.id != two.id
    assert one.digest != two.digest


async def test_policies_are_asked_again_once_a_person_has_answered():
    """Policies are checked again after a person has answered, and may then deny the call."""

    class Closes:
        name = "closes"

        def __init__(self) -> None:
            self.open = True

        def check(self, tool: Any, params: Any, *, context: ToolContext) -> Any:
            return PolicyDecision.ask("?") if self.open else PolicyDecision.deny("we have closed")

        def on_result(self, tool: Any, params: Any, result: Any, *, context: ToolContext) -> None:
            return None

    shop = Closes()
    scene = Scene(Person(True, after=3600), policies=[shop])
    paying = asyncio.ensure_future(scene.call("pay", amount=1))
    await asyncio.sleep(60)
    shop.open = False
    assert (await paying).message == "pay is not allowed: we have closed"
    assert ran == []


async def test_a_broker_of_ones_own_decides():
    """Any object with a `decide` method can be a broker."""

    class Odd:
        async def decide(self, request: Any, /) -> Approval:
            even = request.arguments["amount"] % 2 == 0
            return Approval(even, "even" if even else "odd", "odd", "approved" if even else "denied")

    scene = Scene(None, approvals=Odd())
    assert [(await scene.call("pay", amount=amount)).success for amount in (1, 2)] == [False, True]


async def test_a_broker_that_raises_approves_nothing():
    """If the broker raises an error, the call fails, and its handler does not run."""

    class Broken:
        async def decide(self, request: Any, /) -> Approval:
            raise OSError("gone")

    scene = Scene(None, approvals=Broken())
    assert not (await scene.call("pay", amount=1)).success
    assert ran == []
