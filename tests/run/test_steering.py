"""Messages to a run while it works: each is told once, in order, or was withdrawn; and a run does not end before."""

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from handrail import (
    Agent,
    LaterEnvironment,
    ScriptedModel,
    Session,
    SqliteJournal,
    ToolCall,
    ToolContext,
    tool,
)
from handrail.errors import DefinitionError, MessageRefused, PromptEvaluationError, RunParked, RunUnknown
from handrail.events import MessageQueued
from handrail.guard import CapabilityPolicy
from handrail.journal.protocol import Journal
from handrail.journal.sqlite import MemoryJournal
from handrail.messages import (
    AssistantMessage,
    Message,
    ModelPart,
    ModelRequest,
    StopPart,
    TextPart,
    ThinkingPart,
    Usage,
    UsagePart,
    UserMessage,
)
from handrail.runs import cancel, edit, fork, messages, send, show, withdraw
from support.parked_runs import answer_to


def said(request: ModelRequest) -> list[str]:
    """Return what the user has said so far."""
    return [message.text for message in request.messages if isinstance(message, UserMessage)]


class Talker:
    """An agent whose tool `work` says things to its own run before it returns."""

    def __init__(self, script: Any, *, journal: Journal | None = None, **options: Any) -> None:
        self.model = ScriptedModel(script)
        self.journal = journal
        self.sends: list[tuple[str, Any]] = []
        self.receipts: list[Any] = []

        @tool(effect="pure", capabilities=["work"])
        async def work() -> str:
            """Work."""
            for text, when in self.sends:
                self.receipts.append(await self.say(text, when))
            self.sends.clear()
            return "worked"

        self.agent = Agent(self.model, "Help.", tools=[work], **options)
        self.run_id = "r"

    async def say(self, text: str, when: Any = "next step") -> Any:
        if self.journal is None:
            return await self.stream.send(text, when=when)
        return await send(self.journal, self.run_id, text, when=when)

    async def run(self, session: Session | None = None) -> Any:
        self.stream = self.agent.stream("go", run_id=self.run_id, journal=self.journal, session=session)
        return await self.stream.response


@pytest.fixture(params=["journal", "no journal"])
def journal(request: pytest.FixtureRequest) -> Journal | None:
    return MemoryJournal() if request.param == "journal" else None


async def test_a_message_is_told_before_the_next_step(journal: Journal | None) -> None:
    talker = Talker([ToolCall("work", {}), "done"], journal=journal)
    talker.sends = [("use metres", "next step"), ("and kilos", "now")]
    response = await talker.run()
    assert response.text == "done"
    assert said(talker.model.requests[1]) == ["go", "use metres\n\nand kilos"]


async def test_a_run_goes_on_for_what_is_said_for_afterwards(journal: Journal | None) -> None:
    talker = Talker([ToolCall("work", {}), ToolCall("work", {}), "first", "second"], journal=journal)
    talker.sends = [("then write it down", "afterwards")]
    response = await talker.run()
    assert [said(each) for each in talker.model.requests] == [
        ["go"],
        ["go"],
        ["go"],
        ["go", "then write it down"],
    ]
    assert response.text == "second"
    assert [type(each) for each in response.messages][-3:] == [
        AssistantMessage,
        UserMessage,
        AssistantMessage,
    ]


async def test_a_message_that_arrives_as_the_run_ends_is_told_in_the_same_run(
    journal: Journal | None,
) -> None:
    async def script(request: ModelRequest) -> str:
        if len(talker.model.requests) == 1:
            await talker.say("one more thing")
            return "first"
        return "second"

    talker = Talker(script, journal=journal)
    response = await talker.run()
    assert response.text == "second"
    assert said(talker.model.requests[1]) == ["go", "one more thing"]


class Slow:
    """A model that begins an answer, and waits until it is stopped or let go on."""

    name = "scripted:slow"

    def __init__(self, *parts: ModelPart) -> None:
        self.traits = ScriptedModel([]).traits
        self.parts = parts
        self.begun = asyncio.Event()
        self.go_on = asyncio.Event()
        self.requests: list[ModelRequest] = []
        self.asked: list[list[Message]] = []

    async def stream(self, request: ModelRequest, /) -> AsyncGenerator[ModelPart]:
        self.requests.append(request)
        self.asked.append(list(request.messages))
        if len(self.requests) == 1:
            for part in self.parts:
                yield part
            self.begun.set()
            await self.go_on.wait()
        yield TextPart("done")
        yield UsagePart(Usage(5, 2, requests=1))
        yield StopPart("done")


@pytest.mark.parametrize("text", ["I think", ""])
async def test_a_message_for_now_stops_the_answer_and_keeps_its_text(
    text: str, journal: Journal | None
) -> None:
    parts = (ThinkingPart("hm"), *([TextPart(text)] if text else []))
    model = Slow(*parts)
    agent = Agent(model, "Help.")
    stream = agent.stream("go", run_id="r", journal=journal)
    running = asyncio.ensure_future(_response(stream))
    await model.begun.wait()
    await stream.send("stop that", when="now")
    response = await running
    kept = [AssistantMessage(text)] if text else []
    assert model.asked[1] == [UserMessage("go"), *kept, UserMessage("stop that", midway=True)]
    assert response.text == "done"
    assert response.usage.requests == 2
    if journal is not None:
        tree = await show(journal, "r")
        assert tree.usage.requests == 2
        again = await agent.adapter.resume("r", agent.prompt, journal=journal)
        assert (again.text, again.messages) == (response.text, response.messages)


async def _response(stream: Any) -> Any:
    return await stream.response


async def test_an_answer_that_has_begun_is_not_stopped_for_the_next_step(journal: Journal | None) -> None:
    model = Slow(TextPart("I think "))
    stream = Agent(model, "Help.").stream("go", run_id="r", journal=journal)
    running = asyncio.ensure_future(_response(stream))
    await model.begun.wait()
    await stream.send("also this")
    model.go_on.set()
    response = await running
    assert model.asked[1][1:] == [AssistantMessage("I think done"), UserMessage("also this", midway=True)]
    assert response.text == "done"


async def test_a_message_can_be_edited_and_withdrawn_until_it_is_told() -> None:
    journal = MemoryJournal()
    model = Slow()
    stream = Agent(model, "Help.").stream("go", run_id="r", journal=journal)
    running = asyncio.ensure_future(_response(stream))
    await model.begun.wait()
    first, second, third = [(await send(journal, "r", text)).message.id for text in ("one", "two", "three")]
    await edit(journal, "r", first, "uno", when="afterwards")
    await edit(journal, "r", first, when="next step")
    await withdraw(journal, "r", second)
    model.go_on.set()
    await running
    assert model.asked[1][-1] == UserMessage("uno\n\nthree", midway=True)
    assert [(each.text, each.state) for each in await messages(journal, "r")] == [
        ("uno", "told"),
        ("two", "withdrawn"),
        ("three", "told"),
    ]
    with pytest.raises(MessageRefused, match="already told"):
        await edit(journal, "r", third, "drei")
    with pytest.raises(MessageRefused, match="already told"):
        await withdraw(journal, "r", third)


async def test_what_happens_to_a_message_is_published(journal: Journal | None) -> None:
    """Whoever listens to the run learns what was accepted, edited, withdrawn and told, also if somebody else did that."""
    model = Slow()
    session = Session()
    heard: list[tuple[str, str, str]] = []
    session.dispatcher.subscribe(
        MessageQueued,
        lambda fact: heard.append((fact.message.text, fact.message.when, fact.message.state)),
    )
    stream = Agent(model, "Help.").stream("go", run_id="r", journal=journal, session=session)
    running = asyncio.ensure_future(_response(stream))
    await model.begun.wait()
    first = await stream.send("one")
    second = await stream.send("two", when="afterwards")
    await stream.withdraw(second.id)
    expected = [
        ("one", "next step", "waiting"),
        ("two", "afterwards", "waiting"),
        ("two", "afterwards", "withdrawn"),
    ]
    if journal is not None:
        await edit(journal, "r", first.id, "uno")
        expected.append(("uno", "next step", "waiting"))
    with pytest.raises(MessageRefused, match="was withdrawn"):
        await stream.withdraw(second.id)
    model.go_on.set()
    await running
    last = "one" if journal is None else "uno"
    assert heard == [*expected, (last, "next step", "told")]


async def test_what_another_process_sends_is_heard_before_the_lease_is_renewed(tmp_path: Any) -> None:
    """A run looks for it whenever another process has changed the journal. So does one that somebody cancels."""
    journal, other = SqliteJournal(tmp_path / "runs.db"), SqliteJournal(tmp_path / "runs.db")
    journal.lease = 36_000.0
    heard, session = asyncio.Event(), Session()
    session.dispatcher.subscribe(MessageQueued, lambda fact: heard.set())

    @tool(effect="pure")
    async def work(context: ToolContext) -> str:
        """Work."""
        await send(other, context.run_context.run_id, "use metres")
        await heard.wait()
        return "worked"

    model = ScriptedModel([ToolCall("work", {}), "done", ToolCall("work", {})])
    agent = Agent(model, "Help.", tools=[work])
    await agent.run("go", journal=journal, session=session)
    assert said(model.requests[1]) == ["go", "use metres"]
    heard.clear()
    running = asyncio.ensure_future(_response(agent.stream("go", run_id="r", journal=journal)))
    while len(model.requests) < 3:
        await asyncio.sleep(0.005)
    await cancel(other, "r")
    with pytest.raises(PromptEvaluationError, match="cancelled"):
        await running
    journal.close()
    other.close()


async def test_what_is_refused() -> None:
    journal = MemoryJournal()
    model = Slow()
    running = asyncio.ensure_future(
        _response(Agent(model, "Help.").stream("go", run_id="r", journal=journal))
    )
    await model.begun.wait()
    with pytest.raises(DefinitionError, match="empty"):
        await send(journal, "r", " \n")
    with pytest.raises(DefinitionError, match=r"'soon'.*'next step'"):
        await send(journal, "r", "x", when="soon")  # pyright: ignore[reportArgumentType]
    with pytest.raises(MessageRefused, match=r"nested in another run.*'r'"):
        await send(journal, "r.1~1/1", "x")
    with pytest.raises(MessageRefused, match=r"'eve' may not.*Only 'local'"):
        await send(journal, "r", "x", by="eve")
    with pytest.raises(RunUnknown):
        await send(journal, "other", "x")
    one = await send(journal, "r", "x", id="m")
    assert (await send(journal, "r", "x", id="m")).message.id == one.message.id == "m"
    with pytest.raises(MessageRefused, match=r"'m' is that of another message"):
        await send(journal, "r", "y", id="m")
    with pytest.raises(MessageRefused, match=r"no message 'n'.*these: m"):
        await edit(journal, "r", "n", "z")
    with pytest.raises(MessageRefused, match=r"'eve' may not"):
        await withdraw(journal, "r", "m", by="eve")
    await withdraw(journal, "r", "m")
    with pytest.raises(MessageRefused, match="was withdrawn"):
        await edit(journal, "r", "m", "z")
    model.go_on.set()
    await running
    assert len(model.asked) == 1
    with pytest.raises(MessageRefused, match=r"the run is over \(done\).*new run"):
        await send(journal, "r", "late")


async def test_a_parked_run_is_told_after_its_answers() -> None:
    journal = MemoryJournal()
    talker = Talker(
        [ToolCall("work", {}), "done"], journal=journal, policies=[CapabilityPolicy({"work": "ask"})]
    )
    with pytest.raises(RunParked) as parked:
        await talker.agent.run("go", run_id="r", journal=journal, environment=LaterEnvironment())
    receipt = await send(journal, "r", "while you wait")
    assert receipt.status == "parked"
    journal.questions.answer(answer_to(parked.value.questions[0], {"approved": True}))
    response = await talker.agent.adapter.resume(
        "r", talker.agent.prompt, journal=journal, environment=LaterEnvironment()
    )
    assert response.text == "done"
    assert said(talker.model.requests[1]) == ["go", "while you wait"]


async def test_a_failed_run_leaves_what_it_was_not_told_to_the_next_one(journal: Journal | None) -> None:
    async def script(request: ModelRequest) -> Any:
        if len(talker.model.requests) == 1:
            await talker.say("and then rest")
            raise ValueError("broken")
        return "rested"

    talker = Talker(script, journal=journal)
    session = Session(id="s")
    with pytest.raises(Exception, match="broken"):
        await talker.run(session)
    talker.run_id = "r2"
    await talker.run(session)
    assert said(talker.model.requests[1]) == ["go", "and then rest", "go"]
    if journal is not None:
        talker.run_id = "r3"
        await talker.agent.run("go", run_id="r3", journal=journal, session="s")
        assert said(talker.model.requests[2]) == ["go", "and then rest", "go", "go"]


async def test_a_resumed_run_is_told_the_same_in_the_same_places(tmp_path: Any) -> None:
    path = str(tmp_path / "runs.db")
    journal = SqliteJournal(path)
    talker = Talker([ToolCall("work", {}), ToolCall("work", {}), "first", "second", "third"], journal=journal)
    talker.sends = [("one", "next step"), ("last", "afterwards")]
    response = await talker.run()
    journal.close()
    other = SqliteJournal(path)
    row = await fork(other, "r", 2)
    resumed = await talker.agent.adapter.resume(row.record.id, talker.agent.prompt, journal=other)
    told = [each.text for each in resumed.messages if isinstance(each, UserMessage)]
    assert told == ["go", "one"]  # what came after step 2 was not said in the fork
    whole = [each.text for each in response.messages if isinstance(each, UserMessage)]
    assert whole == ["go", "one", "last"]
    other.close()
