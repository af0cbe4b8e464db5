"""A resumed run does not publish its recorded steps again. It starts its interrupted calls again, and publishes what follows."""

import asyncio
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from handrail import (
    Adapter,
    LaterEnvironment,
    Prompt,
    ScriptedModel,
    Session,
    ToolCall,
    ToolContext,
    WorkerRegistry,
    tool,
)
from handrail.errors import RunError, RunParked
from handrail.events import (
    MessageAdded,
    ModelResponded,
    PromptExecuted,
    PromptRendered,
    QuestionAnswered,
    QuestionAsked,
    TextDelta,
    ToolInvoked,
    ToolResumed,
    ToolStarted,
)
from handrail.messages import ModelPart, ModelRequest
from handrail.run.record.parking import Parking
from handrail.session import Dispatcher
from support import journals
from support.parked_runs import answer_to
from support.rig import Note


class Pick(BaseModel):
    number: int


@tool(effect="staged")
async def note(text: str, context: ToolContext) -> str:
    """Note something."""
    context.session.dispatch(Note(text))
    return f"noted {text}"


@tool(effect="staged")
async def ask(context: ToolContext) -> str:
    """Ask somebody for a number."""
    assert context.wait_for is not None
    return f"got {(await context.wait_for('pick', {}, Pick)).number}"


@tool(effect="idempotent")
async def delegate(context: ToolContext) -> str:
    """Have one agent note something, then another ask."""
    first = await context.adapter.evaluate(Prompt("first", "Note.", tools=[note]), "go")
    second = await context.adapter.evaluate(Prompt("second", "Ask.", tools=[note, ask]), "go")
    return f"{first.text} {second.text}"


PROMPT: Prompt[None] = Prompt("p", "Do.", tools=[note, ask, delegate])


@pytest.fixture(autouse=True, params=journals.KINDS)
def kind(request: pytest.FixtureRequest) -> Iterator[None]:
    with journals.of_kind(request.param):
        yield


class Recorded:
    """A run that is parked, then resumed as if by another process."""

    def __init__(self, folder: Path, *script: Any) -> None:
        self.model = ScriptedModel(list(script))
        self.path = folder / "runs.db"
        self.first: list[object] = []

    def adapter(self) -> Adapter:
        self.journal = journals.open_at(self.path, watch=None)
        return Adapter(self.model, journal=self.journal, environment=LaterEnvironment())

    async def park(self) -> None:
        stream = self.adapter().stream(PROMPT, "go", run_id="run")
        self.first = [event async for event in stream]
        with pytest.raises(RunParked) as parked:
            await stream.response
        for question in parked.value.questions:
            self.journal.questions.answer(answer_to(question))


def said(events: list[object]) -> list[tuple[str, str]]:
    """Return the main events as pairs of short strings, and skip all others."""
    found: list[tuple[str, str]] = []
    for event in events:
        match event:
            case MessageAdded():
                found.append((event.conversation.partition(".")[0], type(event.message).__name__))
            case ToolStarted() | ToolResumed() | ToolInvoked():
                found.append((type(event).__name__, event.tool))
            case PromptRendered() | PromptExecuted():
                found.append((type(event).__name__, event.prompt))
            case ModelResponded() | QuestionAsked() | QuestionAnswered():
                found.append((type(event).__name__, ""))
            case _:
                pass
    return found


async def test_only_what_is_new_is_heard(tmp_path: Path):
    """A resumed run publishes no finished call again, continues the parked call, and streams the new answer."""
    recorded = Recorded(tmp_path, ToolCall("note", {"text": "a"}), [ToolCall("ask")], "done")
    await recorded.park()
    assert ("ToolInvoked", "note") in said(recorded.first)
    assert ("ToolInvoked", "ask") not in said(recorded.first)
    stream = recorded.adapter().resume_stream("run", PROMPT)
    events = [event async for event in stream]
    assert said(events) == [
        ("PromptRendered", "p"),
        ("ToolResumed", "ask"),
        ("QuestionAnswered", ""),
        ("ToolInvoked", "ask"),
        ("root", "ToolMessage"),
        ("ModelResponded", ""),
        ("root", "AssistantMessage"),
        ("PromptExecuted", "p"),
    ]
    assert "".join(event.text for event in events if isinstance(event, TextDelta)) == "done"
    response = await stream.response
    assert response.text == "done"
    messages = [type(each.message).__name__ for each in response.session[MessageAdded].all()]
    assert messages == [
        "UserMessage",
        "AssistantMessage",
        "ToolMessage",
        "AssistantMessage",
        "ToolMessage",
        "AssistantMessage",
    ]
    assert [each.tool for each in response.session[ToolInvoked].all()] == ["note", "ask"]


async def test_of_nested_runs_only_the_one_under_way_is_heard(tmp_path: Path):
    """A finished nested run is replayed without events, and one in progress publishes events as it continues."""
    script = [
        ToolCall("delegate"),
        ToolCall("note", {"text": "a"}),
        "first",
        ToolCall("note", {"text": "b"}),
        ToolCall("ask"),
        "second",
        "done",
    ]
    recorded = Recorded(tmp_path, *script)
    await recorded.park()
    assert ("PromptExecuted", "first") in said(recorded.first)
    events = [event async for event in recorded.adapter().resume_stream("run", PROMPT)]
    assert said(events) == [
        ("PromptRendered", "p"),
        ("ToolResumed", "delegate"),
        ("PromptRendered", "second"),
        ("ToolResumed", "ask"),
        ("QuestionAnswered", ""),
        ("ToolInvoked", "ask"),
        ("run", "ToolMessage"),
        ("ModelResponded", ""),
        ("run", "AssistantMessage"),
        ("PromptExecuted", "second"),
        ("ToolInvoked", "delegate"),
        ("root", "ToolMessage"),
        ("ModelResponded", ""),
        ("root", "AssistantMessage"),
        ("PromptExecuted", "p"),
    ]


async def test_everything_is_heard_once_of_a_run_that_was_parked(tmp_path: Path):
    """The events before and after parking together contain each call's start and end once and each message once."""
    script = [ToolCall("note", {"text": "a"}), [ToolCall("ask"), ToolCall("note", {"text": "b"})], "done"]
    recorded = Recorded(tmp_path, *script)
    await recorded.park()
    second = [event async for event in recorded.adapter().resume_stream("run", PROMPT)]
    both = said([*recorded.first, *second])
    assert [each for each in both if each[0] == "ToolInvoked"] == [
        ("ToolInvoked", "note"),
        ("ToolInvoked", "note"),
        ("ToolInvoked", "ask"),
    ]
    assert [kind for key, kind in both if key == "root"] == [
        "UserMessage",
        "AssistantMessage",
        "ToolMessage",
        "AssistantMessage",
        "ToolMessage",
        "AssistantMessage",
    ]
    assert both.count(("ModelResponded", "")) == 3
    assert both.count(("ToolStarted", "ask")) == 1
    assert both.count(("QuestionAsked", "")) == both.count(("QuestionAnswered", "")) == 1


async def test_a_run_cut_while_its_model_was_asked_says_what_the_model_says_then(tmp_path: Path):
    """If a run was parked during a model request, the resumed run publishes the model's new answer."""
    asked = asyncio.Event()

    class Stopping(LaterEnvironment):
        def run_started(self, parking: Parking) -> None:
            self.parking = parking

    class Slow(ScriptedModel):
        async def stream(self, request: ModelRequest, /) -> AsyncGenerator[ModelPart]:
            if len(request.messages) > 1:
                asked.set()
                await asyncio.get_running_loop().create_future()
            async for part in super().stream(request):
                yield part

    there, recorded = Stopping(), Recorded(tmp_path, "done")
    recorded.adapter()
    slow = Adapter(Slow([ToolCall("note", {"text": "a"})]), journal=recorded.journal, environment=there)
    run = asyncio.ensure_future(slow.evaluate(PROMPT, "go", run_id="run"))
    await asked.wait()
    there.parking.park(by_force=True)
    with pytest.raises(RunParked):
        await run
    events = [event async for event in recorded.adapter().resume_stream("run", PROMPT)]
    assert said(events) == [
        ("PromptRendered", "p"),
        ("ModelResponded", ""),
        ("root", "AssistantMessage"),
        ("PromptExecuted", "p"),
    ]


async def test_a_bus_and_a_session_of_ones_own_hear_the_same(tmp_path: Path):
    recorded = Recorded(tmp_path, ToolCall("ask"), "done")
    await recorded.park()
    heard: list[object] = []
    bus = Dispatcher()
    bus.subscribe(object, heard.append)
    session = Session(id=(await recorded.journal.runs.get("run")).record.session_id)
    stream = recorded.adapter().resume_stream("run", PROMPT, session=session, bus=bus)
    events = [event async for event in stream]
    assert heard == events != []
    assert (await stream.response).session is session


async def test_a_run_that_is_over_streams_nothing_and_answers(tmp_path: Path):
    recorded = Recorded(tmp_path, ToolCall("note", {"text": "a"}), "done")
    adapter = recorded.adapter()
    await adapter.evaluate(PROMPT, "go", run_id="run")
    stream = adapter.resume_stream("run", PROMPT)
    assert [event async for event in stream] == []
    assert (await stream.response).text == "done"


async def test_what_can_not_be_resumed_is_said_by_the_response(tmp_path: Path):
    recorded = Recorded(tmp_path, ToolCall("ask"), "done")
    await recorded.park()
    stream = recorded.adapter().resume_stream("run", Prompt("other", "Do."))
    assert [event async for event in stream] == []
    with pytest.raises(RunError, match="began with the prompt 'p'"):
        await stream.response


async def test_a_stream_that_is_left_cancels_the_resumed_run(tmp_path: Path):
    """Abandoning a resumed run's stream cancels the run."""
    going = asyncio.Event()

    @tool(effect="pure")
    async def wait() -> str:
        """Wait."""
        going.set()
        await asyncio.get_running_loop().create_future()
        return ""

    prompt = Prompt("p", "Do.", tools=[note, ask, delegate, wait])
    recorded = Recorded(tmp_path, ToolCall("ask"), ToolCall("wait"))
    await recorded.park()
    stream = recorded.adapter().resume_stream("run", prompt)

    async def listen() -> None:
        async for _ in stream:
            pass

    listening = asyncio.ensure_future(listen())
    await going.wait()
    listening.cancel()
    with pytest.raises(asyncio.CancelledError):
        await listening
    assert (await recorded.journal.runs.get("run")).status == "cancelled"


async def test_a_worker_is_resumed_as_a_stream(tmp_path: Path):
    (tmp_path / "helper.md").write_text("---\ndescription: Helps.\ntools: [ask]\npolicies: []\n---\nHelp.\n")
    (tmp_path / "tools.py").write_text(
        "from pydantic import BaseModel\n"
        "from handrail import ToolContext, tool\n"
        "class Pick(BaseModel):\n    number: int\n"
        "@tool(effect='staged')\n"
        "async def ask(context: ToolContext) -> str:\n"
        '    """Ask."""\n'
        "    return str((await context.wait_for('pick', {}, Pick)).number)\n"
    )
    registry = WorkerRegistry(tmp_path)
    journal = journals.open_at(tmp_path / "runs.db", watch=None)
    there, model = LaterEnvironment(), ScriptedModel([ToolCall("ask"), "done"])
    with pytest.raises(RunParked) as parked:
        await registry.run("helper", "go", model=model, journal=journal, run_id="run", environment=there)
    journal.questions.answer(answer_to(parked.value.questions[0]))
    stream = registry.resume_stream("helper", "run", model=model, journal=journal, environment=there)
    events = [event async for event in stream]
    assert ("ToolInvoked", "ask") in said(events)
    assert (await stream.response).text == "done"
