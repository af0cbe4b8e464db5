"""Durable runs: parked, resumed, taken over by another process, and replayed."""

import asyncio
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import msgspec
import pytest
from pydantic import BaseModel, Field

from handrail import (
    Adapter,
    Budget,
    DirectoryFilesystem,
    LaterEnvironment,
    Prompt,
    ScriptedModel,
    Session,
    ToolCall,
    ToolContext,
    tool,
)
from handrail.errors import (
    AnswerRefused,
    DefinitionError,
    JournalError,
    PromptEvaluationError,
    RunBusy,
    RunError,
    RunParked,
    RunUnknown,
)
from handrail.events import MessageAdded
from handrail.guard.policy import CapabilityPolicy
from handrail.journal.any_journal import AnyJournal
from handrail.journal.records import RunRecord
from handrail.journal.sqlite import MemoryJournal
from handrail.messages import ToolMessage, Usage
from handrail.models.scripted import Reply
from handrail.protocols import PolicyDecision
from handrail.question import Answer, Question
from handrail.testing import Person
from support import journals, warm_python
from support.damage import set_lease
from support.parked_runs import answer_to
from support.rig import Note
from support.texts import OUTCOME_UNKNOWN, RUN_ID_TAKEN

APP = Path(__file__).with_name("parked_app.py")


class Pick(BaseModel):
    number: Annotated[int, Field(ge=0)]


class Counted:
    """Tools whose handlers record each start."""

    def __init__(self) -> None:
        self.ran: list[str] = []
        ran = self.ran

        @tool(effect="pure")
        async def look() -> str:
            """Look around."""
            ran.append("look")
            return "seen"

        @tool(effect="staged")
        async def ask(context: ToolContext) -> str:
            """Ask a person, after an inner call that changes the session."""
            ran.append("ask")
            await context.call("mark")
            assert context.wait_for is not None
            picked = await context.wait_for("pick", {"of": 3}, Pick)
            return f"picked {picked.number} of {len(context.session[Note].all())}"

        @tool(effect="staged")
        async def mark(context: ToolContext) -> str:
            """Leave a note."""
            ran.append("mark")
            context.session.dispatch(Note("marked"))
            return "marked"

        @tool
        async def send() -> str:
            """Send something."""
            ran.append("send")
            return "sent"

        @tool(effect="idempotent")
        async def delegate(context: ToolContext) -> str:
            """Let another agent look, ask and leave a note."""
            ran.append("delegate")
            inner = Prompt("inner", "Be quick.", tools=[look, ask, mark])
            return (await context.adapter.evaluate(inner, "go")).text

        self.look, self.ask, self.mark, self.send, self.delegate = look, ask, mark, send, delegate
        self.all = [look, ask, mark, send, delegate]


@pytest.fixture(autouse=True, params=journals.KINDS)
def kind(request: pytest.FixtureRequest) -> Iterator[None]:
    with journals.of_kind(request.param):
        yield


def journal_at(tmp_path: Path, **options: Any) -> AnyJournal:
    return journals.open_at(tmp_path / "runs.db", watch=0.02, **options)


async def until_parked(begun: Any) -> RunParked:
    with pytest.raises(RunParked) as parked:
        await begun
    return parked.value


async def test_a_run_in_which_everything_waits_is_parked_and_resumed(tmp_path: Path):
    """Another process answers a parked run's questions one by one, and resumes the run after each.

    Finished calls are not repeated. A handler that waits is entered again, and its inner call is taken from the record.
    Resuming the finished run returns its response.
    """
    tools = Counted()
    script = ScriptedModel([ToolCall("look"), [ToolCall("ask"), ToolCall("send")], "done"])
    prompt = Prompt("p", "Do.", tools=tools.all, policies=[CapabilityPolicy()])
    adapter = Adapter(script, journal=journal_at(tmp_path), environment=LaterEnvironment())
    parked = await until_parked(adapter.evaluate(prompt, "go", run_id="run"))
    assert sorted(each.name for each in parked.questions) == ["pick", "send"]
    assert tools.ran == ["look", "ask", "mark"]

    other = journal_at(tmp_path)  # the journal treats this as a different process
    later = Adapter(script, journal=other, environment=LaterEnvironment())
    assert [row.questions for row in await other.runs.list()] == [2]
    approval = next(each for each in await other.questions.open("run") if each.kind == "approval")
    other.questions.answer(answer_to(approval, {"approved": True}))
    parked = await until_parked(later.resume("run", prompt))
    assert [each.name for each in parked.questions] == ["pick"]
    assert tools.ran == ["look", "ask", "mark", "ask", "send"]

    other.questions.answer(answer_to(parked.questions[0], {"number": 2}))
    response = await later.resume("run", prompt)
    assert response.text == "done"
    assert tools.ran == ["look", "ask", "mark", "ask", "send", "ask"]
    results = [
        each.message for each in response.session[MessageAdded].all() if isinstance(each.message, ToolMessage)
    ]
    assert [each.text for each in results[-1].results] == ["picked 2 of 1", "sent"]
    assert response.session[Note].all() == (Note("marked"),)
    assert [len(request.messages) for request in script.requests] == [1, 3, 5]
    assert (await later.resume("run", prompt)).text == "done"
    assert (await other.runs.get("run")).status == "done"


async def test_a_nested_agent_is_replayed_without_asking_its_model(tmp_path: Path):
    """A nested agent's recorded answers are replayed, not requested again. Its ids stay the same, and its usage counts once."""
    tools = Counted()
    usage = Usage(input=10, output=1, requests=1)
    script = ScriptedModel(
        [
            Reply(calls=[ToolCall("delegate")], usage=usage),
            Reply(calls=[ToolCall("look"), ToolCall("ask")], usage=usage),
            Reply("inner done", usage=usage),
            Reply("outer done", usage=usage),
        ]
    )
    prompt = Prompt("outer", "Do.", tools=[tools.delegate])
    adapter = Adapter(script, journal=journal_at(tmp_path), environment=LaterEnvironment())
    budget = Budget(requests=4, tokens=100_000, tool_calls=4)
    parked = await until_parked(adapter.evaluate(prompt, "go", run_id="run", budget=budget))
    [question] = parked.questions
    assert question.asked_by == ("delegate", "ask")
    assert question.id == "run.1~1/1.2~1?2"
    assert tools.ran == ["delegate", "look", "ask", "mark"]

    other = journal_at(tmp_path)
    other.questions.answer(answer_to(question, {"number": 1}))
    response = await Adapter(script, journal=other, environment=LaterEnvironment()).resume("run", prompt)
    assert response.text == "outer done"
    assert tools.ran == ["delegate", "look", "ask", "mark", "delegate", "ask"]
    assert response.usage == Usage(input=40, output=4, requests=4)
    assert len(script.requests) == 4


async def test_a_process_killed_while_somebody_thinks_three_days(tmp_path: Path):
    """If a process is killed while a question is open, another can resume the run three days later.

    The handoff's `before` and `after` each run once, and the client never sees its private part.
    """
    waiting = warm_python.start([APP, tmp_path, "wait"])
    assert waiting.stdout is not None
    assert (await asyncio.to_thread(waiting.stdout.readline)) == "asked\n"
    waiting.kill()
    assert waiting.wait() == -signal.SIGKILL
    waiting.close()
    done = await asyncio.to_thread(warm_python.run, [APP, tmp_path, "answer"])
    assert (done.stdout, done.returncode) == (b"It is card 2. True\n", 0), done.stderr
    assert (tmp_path / "world").read_text().splitlines() == ["before", "after 2 True"]
    wire = (tmp_path / "wire").read_text()
    assert "back" in wire
    assert "the-ace-of-spades" not in wire


async def test_answers_from_another_process_reach_a_run_that_waits(tmp_path: Path):
    """A run whose own environment has been asked also accepts an answer from another process."""
    tools = Counted()
    asked = asyncio.Event()

    class Thinking(Person):
        async def ask(self, question: Question, /) -> Answer:
            asked.set()
            return await asyncio.get_running_loop().create_future()

    adapter = Adapter(
        ScriptedModel([ToolCall("ask"), "done"]), journal=journal_at(tmp_path), environment=Thinking()
    )
    running = asyncio.ensure_future(adapter.evaluate(Prompt("p", "Do.", tools=tools.all), "go", run_id="run"))
    await asked.wait()
    other = journal_at(tmp_path)
    [question] = await other.questions.open("run")
    with pytest.raises(RunBusy, match="holds its lease"):
        await Adapter(ScriptedModel([]), journal=other).resume("run", Prompt("p", "Do.", tools=tools.all))
    other.questions.answer(answer_to(question, {"number": 3}))
    assert (await running).text == "done"


async def test_an_answer_that_does_not_fit_is_asked_for_again(tmp_path: Path):
    """An answer that does not match the schema is refused at once. If it matches but fails validation, the question is asked again."""
    tools = Counted()
    prompt = Prompt("p", "Do.", tools=tools.all)
    script = ScriptedModel([ToolCall("ask"), "done"])
    adapter = Adapter(script, journal=journal_at(tmp_path), environment=LaterEnvironment())
    [question] = (await until_parked(adapter.evaluate(prompt, "go", run_id="run"))).questions
    other = journal_at(tmp_path)
    with pytest.raises(AnswerRefused, match="number must be a whole number, got 'many'"):
        other.questions.answer(answer_to(question, {"number": "many"}))
    other.questions.answer(answer_to(question, {"number": -1}))
    later = Adapter(script, journal=other, environment=LaterEnvironment())
    [again] = (await until_parked(later.resume("run", prompt))).questions
    other.questions.answer(answer_to(again, {"number": 1}))
    assert (await later.resume("run", prompt)).text == "done"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"digest": "0" * 64}, "digest"),
        ({"by": "mallory"}, "may not answer it"),
        ({"question_id": "run.9~1?1"}, "there is no such question"),
    ],
)
async def test_a_forged_answer_to_a_parked_run_is_refused(tmp_path: Path, change: dict[str, str], words: str):
    """A process that has only opened the journal refuses a forged answer."""
    tools = Counted()
    adapter = Adapter(
        ScriptedModel([ToolCall("ask")]), journal=journal_at(tmp_path), environment=LaterEnvironment()
    )
    [question] = (
        await until_parked(adapter.evaluate(Prompt("p", "Do.", tools=tools.all), "go", run_id="run"))
    ).questions
    forged = msgspec.structs.replace(answer_to(question, {"number": 1}), **change)
    other = journal_at(tmp_path)
    with pytest.raises(AnswerRefused, match=words):
        other.questions.answer(forged)
    assert len(await other.questions.open("run")) == 1


async def test_a_verb_in_another_ones_place_is_a_divergence(tmp_path: Path):
    """If a handler changed while its run was parked and no longer fits the record, the model is told that the call's outcome is unknown."""
    tools = Counted()
    script = ScriptedModel([ToolCall("ask"), "noted"])
    adapter = Adapter(script, journal=journal_at(tmp_path), environment=LaterEnvironment())
    prompt = Prompt("p", "Do.", tools=tools.all)
    [question] = (await until_parked(adapter.evaluate(prompt, "go", run_id="run"))).questions

    @tool(effect="staged")
    async def ask(context: ToolContext) -> str:
        """Ask somebody, without the earlier inner call."""
        assert context.wait_for is not None
        return str(await context.wait_for("pick", {"of": 3}, Pick))

    journal = journal_at(tmp_path)
    journal.questions.answer(answer_to(question, {"number": 1}))
    later = Adapter(script, journal=journal, environment=LaterEnvironment())
    response = await later.resume("run", Prompt("p", "Do.", tools=[ask, tools.mark]))
    told = [each.message.text for each in response.session[MessageAdded].all()][-2]
    assert OUTCOME_UNKNOWN in told
    assert "the record has call mark" in told


async def test_the_conversation_is_sent_as_it_was(tmp_path: Path):
    """A resumed run sends the same system text and messages as before, even if the prompt has changed since."""
    tools = Counted()
    script = ScriptedModel([ToolCall("look"), ToolCall("ask"), "done"])
    adapter = Adapter(script, journal=journal_at(tmp_path), environment=LaterEnvironment())
    parked = await until_parked(
        adapter.evaluate(Prompt("p", "The first words.", tools=tools.all), "go", run_id="run")
    )
    journal = journal_at(tmp_path)
    journal.questions.answer(answer_to(parked.questions[0], {"number": 1}))
    later = Adapter(script, journal=journal, environment=LaterEnvironment())
    await later.resume("run", Prompt("p", "Other words.", tools=tools.all))
    assert [request.system for request in script.requests] == ["The first words."] * 3
    before, after = script.requests[1].messages.since(0)[:3], script.requests[2].messages.since(0)[:3]
    assert before == after


async def test_a_session_of_several_runs_is_rebuilt(tmp_path: Path):
    """A resumed run's session has everything that the session's earlier runs said and changed."""
    tools = Counted()
    script = ScriptedModel([ToolCall("mark"), "first", ToolCall("ask"), "second"])
    adapter = Adapter(script, journal=journal_at(tmp_path), environment=LaterEnvironment())
    prompt = Prompt("p", "Do.", tools=tools.all)
    session = Session(id="chat", config={"lang": "en"})
    await adapter.evaluate(prompt, "one", session=session, run_id="first")
    parked = await until_parked(adapter.evaluate(prompt, "two", session=session, run_id="second"))
    journal = journal_at(tmp_path)
    journal.questions.answer(answer_to(parked.questions[0], {"number": 1}))
    later = Adapter(script, journal=journal, environment=LaterEnvironment())
    response = await later.resume("second", prompt)
    assert response.session.id == "chat"
    assert response.session.config == {"lang": "en"}
    assert response.session[Note].all() == (Note("marked"), Note("marked"))
    said = [each.message.text for each in response.session[MessageAdded].all()]
    assert said[0] == "one"
    assert said[-1] == "second"
    assert len(said) == 8


async def test_what_can_not_be_resumed_says_why(tmp_path: Path):
    """The error says why a run can't be resumed: the run or its prompt is unknown, or the journal is missing or closed.

    A run id can't be used twice.
    """
    journal = journal_at(tmp_path)
    prompt = Prompt("p", "Do.")
    adapter = Adapter(ScriptedModel(["done", ValueError("no")]), journal=journal)
    with pytest.raises(RunUnknown, match="'nobody'"):
        await adapter.resume("nobody", prompt)
    await adapter.evaluate(prompt, "go", run_id="run")
    with pytest.raises(RunError, match=RUN_ID_TAKEN):
        await adapter.evaluate(prompt, "go", run_id="run")
    with pytest.raises(RunError, match="without a reference to its prompt"):
        await adapter.resume("run")
    with pytest.raises(RunError, match="has no journal"):
        await Adapter(ScriptedModel([])).resume("run", prompt)
    journal.close()
    with pytest.raises(JournalError, match="it is closed"):
        await adapter.resume("run", prompt)


async def test_an_app_that_is_not_there_is_refused_by_name(tmp_path: Path):
    """An app that can't be imported is refused when a run begins and when a recorded run is resumed."""
    journal = journal_at(tmp_path)
    adapter = Adapter(ScriptedModel(["Hi."]), journal=journal)
    with pytest.raises(
        DefinitionError, match=r"app is 'no\.such:prompt', which can't be imported: .*leave it out"
    ):
        await adapter.evaluate(Prompt("p", "Do."), "go", run_id="new", app="no.such:prompt")
    with pytest.raises(RunUnknown):
        await journal.runs.get("new")
    record = RunRecord(
        id="old", session_id="s", principal="ada", prompt="p", model="m", began_at=1.0, app="no.such:prompt"
    )
    await journal.runs.begin(record)
    with pytest.raises(
        RunError, match=r"at 'no\.such:prompt', which can't be imported: .*resume\(run_id, prompt\)"
    ):
        await adapter.resume("old")
    journal.close()


async def test_a_failed_run_stays_failed(tmp_path: Path):
    """Resuming a failed run raises its recorded error, and runs nothing again."""
    journal = journal_at(tmp_path)
    tools = Counted()
    adapter = Adapter(ScriptedModel([ToolCall("look"), ToolCall("look")]), journal=journal)
    prompt = Prompt("p", "Do.", tools=tools.all)
    with pytest.raises(PromptEvaluationError):
        await adapter.evaluate(prompt, "go", run_id="run", budget=Budget(requests=1))
    assert (await journal.runs.get("run")).status == "failed"
    with pytest.raises(PromptEvaluationError, match="requests"):
        await adapter.resume("run", prompt)
    assert tools.ran == ["look"]


async def test_an_overtaken_process_stops_and_undoes_nothing(tmp_path: Path):
    """A process whose run was taken over notices at its next write, stops, and compensates nothing."""
    undone: list[str] = []
    taken = asyncio.Event()
    journal = journal_at(tmp_path)

    async def take_back(params: Any, value: Any, *, context: ToolContext) -> None:
        undone.append("undone")

    @tool(effect="compensable", compensate=take_back)
    async def book() -> str:
        """Book."""
        return "booked"

    @tool(effect="idempotent")
    async def outer(context: ToolContext) -> str:
        """Book, then lose the run to another process."""
        await context.call("book")
        other = journal_at(tmp_path)
        set_lease(other, "run")
        await other.runs.take("run")
        taken.set()
        return "done"

    adapter = Adapter(ScriptedModel([ToolCall("outer"), "done"]), journal=journal)
    with pytest.raises(RunBusy):
        await adapter.evaluate(Prompt("p", "Do.", tools=[book, outer]), "go", run_id="run")
    assert taken.is_set()
    assert undone == []
    row = await journal.runs.get("run")
    assert (row.status, row.owner != journal.owner) == ("running", True)


async def test_a_journal_in_memory_parks_too():
    """A journal in memory keeps a parked run's questions until they are answered."""
    tools = Counted()
    journal = MemoryJournal()
    adapter = Adapter(
        ScriptedModel([[ToolCall("ask"), ToolCall("ask")], "done"]),
        journal=journal,
        environment=LaterEnvironment(),
    )
    prompt = Prompt("p", "Do.", tools=tools.all)
    parked = await until_parked(adapter.evaluate(prompt, "go", run_id="run"))
    assert [each.id for each in parked.questions] == [each.id for each in await journal.questions.open("run")]
    first, second = parked.questions
    journal.questions.answer(answer_to(first, {"number": 1}))
    parked = await until_parked(adapter.resume("run", prompt))
    assert [each.id for each in parked.questions] == [second.id]
    journal.questions.answer(answer_to(second, {"number": 2}))
    assert (await adapter.resume("run", prompt)).text == "done"
    assert await journal.questions.open() == ()


async def test_another_prompt_or_no_files_take_nothing(tmp_path: Path):
    """Resuming with a different prompt or without files is refused, and the run stays parked with its question open."""
    tools = Counted()
    script = ScriptedModel([ToolCall("ask"), "done"])
    prompt = Prompt("p", "Do.", tools=tools.all)
    folder = tmp_path / "files"
    folder.mkdir()
    files = DirectoryFilesystem(folder)
    adapter = Adapter(script, journal=journal_at(tmp_path), environment=LaterEnvironment())
    [question] = (
        await until_parked(adapter.evaluate(prompt, "go", run_id="run", filesystem=files))
    ).questions
    with pytest.raises(RunError, match="began with the prompt 'p', and this is 'other'"):
        await adapter.resume("run", Prompt("other", "x"), filesystem=files)
    with pytest.raises(RunError, match=r"works on the files in .* and no files were passed"):
        await adapter.resume("run", prompt)
    journal = journal_at(tmp_path)
    journal.questions.answer(answer_to(question, {"number": 1}))
    assert (await adapter.resume("run", prompt, filesystem=files)).text == "done"


async def test_nothing_that_has_to_be_marked_begins_in_an_overtaken_run(tmp_path: Path):
    """Once a call has noticed that another process took the run, no handler starts if its start has to be recorded."""
    journal = journal_at(tmp_path)
    entered: list[str] = []
    learnt = asyncio.Event()

    @tool(effect="idempotent")
    async def overtaken(context: ToolContext) -> str:
        """Lose the run to another process, and notice it in an inner call."""
        other = journal_at(tmp_path)
        set_lease(other, "run")
        await other.runs.take("run")
        try:
            await context.call("look")
        finally:
            learnt.set()
        return "done"

    @tool(effect="pure")
    async def look() -> str:
        """Look around."""
        return "seen"

    @tool
    async def send() -> str:
        """Send something."""
        entered.append("send")
        return "sent"

    class Slow:
        name = "slow"

        async def check(self, tool: Any, params: Any, *, context: ToolContext) -> PolicyDecision:
            if tool.name == "send":
                await learnt.wait()
            return PolicyDecision.allow()

        def on_result(self, tool: Any, params: Any, result: Any, *, context: ToolContext) -> None: ...

    prompt = Prompt("p", "Do.", tools=[overtaken, look, send], policies=[Slow()])
    adapter = Adapter(ScriptedModel([[ToolCall("overtaken"), ToolCall("send")], "done"]), journal=journal)
    with pytest.raises(RunBusy):
        await adapter.evaluate(prompt, "go", run_id="run")
    assert entered == []
