"""Time goes on while a run is parked: what ended meanwhile has ended when the run is resumed, as it would have live.

docs/guide/durability.md has the table of everything with a time. Serving, MCP and workers are tested in their own folders.
"""

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from handrail import (
    Adapter,
    Answer,
    Deadline,
    Handoff,
    LaterEnvironment,
    Parked,
    PostgresJournal,
    Prompt,
    ScriptedModel,
    SqliteJournal,
    Tool,
    ToolCall,
    ToolContext,
    ToolResult,
    UserContext,
    tool,
)
from handrail.errors import AnswerRefused, PromptEvaluationError, QuestionTimedOut, RunParked
from handrail.events import ApprovalDecided, QuestionAnswered
from handrail.guard import CapabilityPolicy
from handrail.journal.any_journal import AnyJournal
from handrail.journal.sqlite import MemoryJournal
from handrail.messages import ModelRequest, ToolMessage
from handrail.question import Question
from handrail.resources.memory import MemoryFilesystem
from handrail.session import Dispatcher
from handrail.testing import Person, VirtualClock
from support import postgres
from support.parked_runs import Resting, answer_to

pytestmark = pytest.mark.virtual_time

HOUR = 3600.0


# --- what a run asks, each with an hour's time ------------------------------------------------------------


@tool(effect="staged")
async def pick(context: UserContext) -> str:
    """Ask for a number."""
    return f"got {await context.wait_for('pick', {}, int, timeout=HOUR)}"


@tool(effect="staged")
async def pick_or_guess(context: UserContext) -> str:
    """Ask for a number, and guess if nobody answers."""
    try:
        return f"got {await context.wait_for('pick', {}, int, timeout=HOUR)}"
    except QuestionTimedOut:
        return f"guessed, and then got {await context.wait_for('again', {}, int)}"


@tool
async def send(context: ToolContext) -> str:
    """Send something that can't be taken back."""
    return "sent it"


@tool(effect="staged", capabilities={"fs.write"})
async def write(context: ToolContext) -> str:
    """Write a file, which a person sees before it is kept."""
    context.filesystem.write("a.txt", "written\n")
    return "wrote"


@tool(effect="staged")
async def request(context: ToolContext) -> str:
    """Ask for approval."""
    approval = await context.request_approval("May I?")
    return f"{approval.approved} {approval.outcome}"


@tool(effect="staged")
async def permit(context: ToolContext) -> str:
    """Ask for permission."""
    approval = await context.request_permission("shout")
    return f"{approval.approved} {approval.outcome}"


@dataclass
class Deal:
    cards: int


@dataclass
class Pick:
    number: int


def handoff() -> Tool[Any, Any]:
    deal = Handoff("deal", "Let somebody pick a card.", params=Deal)

    @deal.before
    async def lay_out(params: Deal, *, context: ToolContext) -> Parked[Deal, Deal]:
        return Parked(params, params)

    @deal.client
    async def choose(offer: Deal, *, context: UserContext) -> Pick:
        return await context.wait_for("card", offer, Pick, timeout=HOUR)

    @deal.after
    async def settle(deck: Deal, chosen: Pick, *, context: ToolContext) -> ToolResult[str]:
        return ToolResult.ok(f"card {chosen.number}")

    return deal


ASKING: dict[str, tuple[Tool[Any, Any], str, str]] = {
    "question": (pick, "nobody answered in time", "got 7"),
    "approval": (send, "send was not approved (timed out)", "sent it"),
    "preview": (write, "write was not approved (timed out)", "wrote"),
    "request_approval": (request, "False timed out", "True approved"),
    "request_permission": (permit, "False timed out", "True approved"),
    "handoff": (handoff(), "nobody answered in time", "card 7"),
}
"""What asks, and what the model is told if nobody answers within the hour, and if somebody does."""


def yes(question: Question) -> Answer:
    if question.kind == "approval":
        return answer_to(question, {"approved": True})
    return answer_to(question, {"number": 7} if question.name == "card" else 7)


def follow(request: ModelRequest) -> Any:
    """Call the one tool, and repeat its result."""
    last = request.messages[-1]
    if isinstance(last, ToolMessage):
        return f"It says: {last.text}"
    offered = request.tools[0].tool
    return ToolCall(offered.name, {"cards": 3} if offered.name == "deal" else {})


Opening = Callable[[VirtualClock], AnyJournal]


@pytest.fixture(params=["memory", "sqlite", pytest.param("postgres", marks=pytest.mark.once)])
def opening(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Opening]:
    """Return a function that opens a new journal, whose clock is the virtual one."""
    opened: list[AnyJournal] = []
    monkeypatch.setenv("HANDRAIL_KEY", postgres.KEY)

    def open_journal(clock: VirtualClock) -> AnyJournal:
        if request.param == "memory":
            journal: AnyJournal = MemoryJournal(clock)
        elif request.param == "postgres":
            journal = PostgresJournal(postgres.new_url(), clock=clock, watch=None, inline=True)
        else:
            journal = SqliteJournal(tmp_path / "runs.db", clock=clock, watch=None, inline=True)
        opened.append(journal)
        return journal

    yield open_journal
    for each in opened:
        each.close()


class Going:
    """A run of one tool in virtual time, and what its bus heard."""

    def __init__(self, opening: Opening, asks: Tool[Any, Any], **options: Any) -> None:
        self.clock = VirtualClock()
        self.journal = opening(self.clock)
        self.files = MemoryFilesystem()
        self.heard: list[Any] = []
        policies = [CapabilityPolicy({"fs.write": "ask"}, effects={"compensable": "allow"})]
        if asks.name == "deal":
            policies = []  # only its own question is asked
        self.prompt: Prompt[Any] = Prompt("p", "Do.", tools=[asks], policies=policies)
        given: dict[str, Any] = {"approval_seconds": HOUR, "environment": LaterEnvironment(), **options}
        self.adapter = Adapter(
            ScriptedModel(follow),
            journal=self.journal,
            filesystem=self.files,
            clock=self.clock,
            **given,
        )

    def bus(self) -> Dispatcher:
        bus = Dispatcher()
        bus.subscribe(object, self.heard.append)
        return bus

    async def begin(self, **options: Any) -> str:
        going = self.adapter.evaluate(self.prompt, "go", run_id="run", bus=self.bus(), **options)
        return (await going).text

    async def resume(self, **options: Any) -> str:
        return (await self.adapter.resume("run", self.prompt, bus=self.bus(), **options)).text

    async def park(self) -> Question:
        with pytest.raises(RunParked) as parked:
            await self.begin()
        [question] = parked.value.questions
        return question

    def ends(self) -> list[str]:
        """Return how the questions and approvals ended that the bus heard of."""
        answered = [each.outcome for each in self.heard if isinstance(each, QuestionAnswered)]
        return answered + [each.approval.outcome for each in self.heard if isinstance(each, ApprovalDecided)]


@pytest.mark.parametrize("name", ASKING)
async def test_a_question_that_expires_live_ends(opening: Opening, name: str):
    asks, told, _ = ASKING[name]

    going = Going(opening, asks, environment=Resting())
    assert told in await going.begin()
    assert going.clock.monotonic() == HOUR
    assert going.ends() == ["timed out"]
    assert not going.files.exists("a.txt")


@pytest.mark.parametrize("by", ["nobody", "a person who says yes", "a person who said yes too late"])
@pytest.mark.parametrize("name", ASKING)
async def test_a_question_that_expires_while_its_run_is_parked_ends_as_it_would_live(
    opening: Opening, name: str, by: str
):
    """The run goes on when it is resumed, with what the model would have been told live.

    Nobody is shown the question any more. A person's yes that comes too late is refused, and is not told as a denial.
    """
    asks, told, _ = ASKING[name]

    going = Going(opening, asks)
    question = await going.park()
    await asyncio.sleep(HOUR)
    if by.endswith("late"):
        with pytest.raises(AnswerRefused, match="the question has expired"):
            going.journal.questions.answer(yes(question))
    person = Person(approve=True, answers={"pick": 7, "card": {"number": 7}})
    environment = person if by == "a person who says yes" else LaterEnvironment()
    assert told in await going.resume(environment=environment)
    assert person.questions == []
    assert going.ends() == ["timed out"]
    assert not going.files.exists("a.txt")
    assert (await going.journal.runs.get("run")).status == "done"


@pytest.mark.parametrize("name", ASKING)
async def test_an_answer_in_time_counts_however_late_the_run_is_resumed(opening: Opening, name: str):
    asks, _, told = ASKING[name]

    going = Going(opening, asks)
    question = await going.park()
    await asyncio.sleep(HOUR - 1)
    going.journal.questions.answer(yes(question))
    await asyncio.sleep(HOUR)
    assert told in await going.resume()


@pytest.mark.parametrize("name", ["question", "approval"])
async def test_a_question_of_a_nested_run_ends_too(opening: Opening, name: str):
    asks, told, _ = ASKING[name]

    @tool(effect="idempotent")
    async def nest(context: ToolContext) -> str:
        """Let another agent ask."""
        inner: Prompt[Any] = Prompt("inner", "Do.", tools=[asks], policies=[CapabilityPolicy()])
        return (await context.adapter.evaluate(inner, "go")).text

    going = Going(opening, nest)
    going.prompt = Prompt("p", "Do.", tools=[nest])
    await going.park()
    await asyncio.sleep(HOUR)
    assert told in await going.resume()


async def test_a_handler_that_went_on_after_a_timeout_does_not_ask_again(opening: Opening):
    """The end of a question is recorded like an answer, so a handler that is entered again takes the same way."""
    going = Going(opening, pick_or_guess)
    first = await going.park()
    await asyncio.sleep(HOUR)
    with pytest.raises(RunParked) as parked:
        await going.resume()
    [second] = parked.value.questions
    assert (first.name, second.name) == ("pick", "again")
    await asyncio.sleep(100 * HOUR)
    going.journal.questions.answer(answer_to(second, 5))
    assert "guessed, and then got 5" in await going.resume()
    ended = {each.question.name: each.answer for each in await going.journal.questions.history("run")}
    assert [ended[name].outcome for name in ("pick", "again")] == ["timed out", "answered"]  # pyright: ignore[reportOptionalMemberAccess]


async def test_one_of_two_questions_expires(opening: Opening):
    """The other one stays open, and its answer counts."""

    @tool(effect="staged")
    async def both(context: UserContext) -> str:
        """Ask for two numbers at once."""
        brief = context.wait_for("brief", {}, int, timeout=HOUR)
        answers = await asyncio.gather(brief, context.wait_for("long", {}, int), return_exceptions=True)
        return f"{type(answers[0]).__name__} and {answers[1]}"

    going = Going(opening, both)
    with pytest.raises(RunParked):
        await going.begin()
    await asyncio.sleep(HOUR)
    with pytest.raises(RunParked) as parked:
        await going.resume()
    [left] = parked.value.questions
    assert left.name == "long"
    assert (await going.journal.runs.get("run")).due_at is None
    going.journal.questions.answer(answer_to(left, 2))
    assert "QuestionTimedOut and 2" in await going.resume()


# --- the deadline ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("parks", [False, True])
@pytest.mark.parametrize("name", ["question", "approval"])
async def test_a_deadline_that_passes_while_the_run_is_parked_has_passed(
    opening: Opening, name: str, parks: bool
):
    """A yes that comes after the deadline starts nothing: the run has ended, as it would have live."""
    asks, _, _ = ASKING[name]

    environment = LaterEnvironment() if parks else Resting()
    going = Going(opening, asks, environment=environment, approval_seconds=None)
    deadline = Deadline.after(HOUR / 2, clock=going.clock)
    if parks:
        with pytest.raises(RunParked) as parked:
            await going.begin(deadline=deadline)
        assert (await going.journal.runs.get("run")).due_at == deadline.at.timestamp()
        await asyncio.sleep(HOUR / 2)
        [question] = parked.value.questions
        going.journal.questions.answer(yes(question))
    with pytest.raises(PromptEvaluationError) as failed:
        await (going.resume() if parks else going.begin(deadline=deadline))
    assert failed.value.phase == "deadline"
    assert (await going.journal.runs.get("run")).status == "failed"


async def test_a_deadline_that_pauses_for_people_does_not_go_on(opening: Opening):

    going = Going(opening, pick_or_guess)
    deadline = Deadline.after(60, clock=going.clock, pauses_for_people=True)
    with pytest.raises(RunParked) as parked:
        await going.begin(deadline=deadline)
    [question] = parked.value.questions
    assert (await going.journal.runs.get("run")).due_at == question.expires_at.timestamp()  # pyright: ignore[reportOptionalMemberAccess]
    await asyncio.sleep(HOUR / 2)
    going.journal.questions.answer(answer_to(question, 7))
    assert "got 7" in await going.resume()


async def test_a_tools_timeout_does_not_count_the_time_for_which_its_run_was_parked(opening: Opening):
    """Waiting for a person does not count, live or parked. A handler that is entered again has its whole time again."""

    @tool(effect="staged", timeout=60)
    async def slow(context: UserContext) -> str:
        """Ask for a number, and work for a while."""
        found = await context.wait_for("pick", {}, int)
        await asyncio.sleep(50)
        return f"got {found}"

    going = Going(opening, slow)
    question = await going.park()
    await asyncio.sleep(100 * HOUR)
    going.journal.questions.answer(yes(question))
    assert "got 7" in await going.resume()
