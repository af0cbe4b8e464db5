"""`Agent`: a prompt and a model that can be run, streamed, resumed, served, and called by other agents."""

from __future__ import annotations

import dataclasses
import signal
import subprocess
import sys
from contextlib import closing
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from handrail import (
    Adapter,
    Agent,
    Budget,
    CapabilityPolicy,
    Deadline,
    MarkdownSection,
    MemoryFilesystem,
    MemoryJournal,
    Prompt,
    PromptEvaluationError,
    ScriptedModel,
    Session,
    SqliteJournal,
    ToolCall,
    ToolContext,
    open_gate,
    tool,
)
from handrail.errors import DefinitionError, ModelError
from handrail.events import MessageAdded, PromptExecuted, TextDelta, ToolInvoked
from handrail.messages import ModelRequest, Price, ToolMessage, Traits, Usage
from handrail.models.scripted import Reply
from handrail.serve.sources import PromptSource, load
from handrail.testing import Person
from support import warm_python
from support.serving import serving
from support.texts import NOT_A_MODEL_NAME
from support.worker_folders import PLAIN, sound


@dataclasses.dataclass(frozen=True)
class Report:
    title: str


@dataclasses.dataclass(frozen=True)
class Trip:
    city: str


@tool(effect="read")
async def fare(city: str) -> str:
    """What a ticket to a city costs."""
    return {"Rome": "129 euros"}.get(city, "unknown")


def script() -> ScriptedModel:
    return ScriptedModel([ToolCall("fare", {"city": "Rome"}), "It is 129 euros."])


# --- running -------------------------------------------------------------------------------------


def test_an_agent_runs_its_prompt_on_its_model() -> None:
    agent = Agent(script(), "Answer in one short sentence.", tools=[fare])
    response = agent.run("How much is the ticket to Rome?").wait()
    assert response.text == "It is 129 euros."
    assert [(each.tool, each.status) for each in response.session[ToolInvoked].all()] == [("fare", "ok")]


def test_a_conversation_continues_in_the_same_session() -> None:
    model = ScriptedModel(["Hello.", "Still here."])
    agent, session = Agent(model, "Talk."), Session()
    agent.run("Hi", session=session).wait()
    agent.run("Are you there?", session=session).wait()
    said = [each.message for each in session[MessageAdded].all()]
    assert [getattr(each, "text", "") for each in said] == ["Hi", "Hello.", "Are you there?", "Still here."]


def test_an_agent_streams_its_events() -> None:
    stream = Agent(script(), "Answer.", tools=[fare]).stream("How much?")
    events = list(stream)
    assert [each.tool for each in events if isinstance(each, ToolInvoked)] == ["fare"]
    assert any(isinstance(each, TextDelta) for each in events)
    assert stream.response.wait().text == "It is 129 euros."


def test_the_output_is_typed() -> None:
    agent = Agent(ScriptedModel(['{"title": "Q3"}']), "Report.", output=Report)
    assert agent.run("go").wait().output == Report("Q3")


def test_an_adapter_keeps_its_own_settings() -> None:
    files = MemoryFilesystem()
    adapter = Adapter(script(), filesystem=files)
    agent = Agent(adapter, "Answer.", tools=[fare])
    assert agent.adapter is adapter
    assert agent.adapter.filesystem is files
    assert agent.run("go").wait().text == "It is 129 euros."


def test_run_arguments_reach_the_run() -> None:
    agent = Agent(script(), "Answer.", tools=[fare])
    with pytest.raises(PromptEvaluationError, match="requests"):
        agent.run("go", budget=Budget(requests=1)).wait()


# --- instructions --------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["It costs $5.", "$name", "${x} and $$", "100 % { } \\n"])
def test_text_is_literal(text: str) -> None:
    """Instructions given as text are used literally, so a dollar sign is not a placeholder."""
    seen: list[str] = []

    def answer(request: ModelRequest) -> str:
        seen.append(request.system)
        return "ok"

    Agent(ScriptedModel(answer), text).run("go").wait()
    Agent(ScriptedModel(answer), [text]).run("go").wait()
    assert seen == [text, text]


def test_texts_and_sections_stand_side_by_side() -> None:
    section = MarkdownSection[Trip]("Trip", "trip", "To $city for $$5.")
    agent = Agent(ScriptedModel(["ok"]), ["Costs $5.", section], tools=[fare])
    rendered = agent.prompt.render(Trip("Rome"))
    assert "Costs $5." in rendered.text
    assert "To Rome for $5." in rendered.text
    assert agent.run(params=Trip("Oslo")).wait().text == "ok"


def test_a_prompt_is_taken_as_it_is() -> None:
    prompt = Prompt("guide", "Answer.", tools=[fare], output=Report)
    agent = Agent(ScriptedModel(['{"title": "Q3"}']), prompt)
    assert agent.prompt is prompt
    assert agent.name == "guide"
    assert agent.run("go").wait().output.title == "Q3"


# --- definition ----------------------------------------------------------------------------------


def wrong(*given: Any, **more: Any) -> str:
    with pytest.raises(DefinitionError) as caught:
        Agent(*given, **more)
    return str(caught.value)


def test_what_can_not_work_is_an_error_at_definition() -> None:
    assert f"'gpt-5' {NOT_A_MODEL_NAME}" in wrong("gpt-5", "Answer.")
    assert "Did you mean openai:gpt-5?" in wrong("opnai:gpt-5", "Answer.")
    assert "is not a model" in wrong(42, "Answer.")
    assert "is not a model" in wrong(ScriptedModel, "Answer.")
    wrong("openai:gpt-5", "")
    wrong("openai:gpt-5", None)
    wrong("openai:gpt-5", "Answer.", tools=[len])
    wrong("openai:gpt-5", "Answer.", tools=[fare, dataclasses.replace(fare, description="Another.")])
    wrong("openai:gpt-5", "Answer.", policies=["strict"])
    wrong("openai:gpt-5", "Answer.", output=3)


@pytest.mark.parametrize(
    "more", [{"tools": [fare]}, {"name": "desk"}, {"output": Report}, {"policies": [CapabilityPolicy()]}]
)
def test_a_prompt_brings_its_own_tools_and_name(more: dict[str, Any]) -> None:
    assert "Pass them to the Prompt" in wrong("openai:gpt-5", Prompt("guide", "Answer."), **more)


def test_an_agent_is_frozen() -> None:
    agent: Any = Agent(script(), "Answer.")
    with pytest.raises(dataclasses.FrozenInstanceError):
        agent.prompt = Prompt("other", "Answer.")
    with pytest.raises(dataclasses.FrozenInstanceError):
        agent.tools = ()


def test_a_message_is_text() -> None:
    agent: Any = Agent(script(), "Answer.")
    with pytest.raises(DefinitionError, match=r"^message is a dict\. Pass the user's message as a string"):
        agent.run({"city": "Rome"})


@pytest.mark.parametrize("description", [None, 5])
def test_a_description_is_text(description: Any) -> None:
    """A description that is not text is refused when the agent is defined, not when it becomes a tool."""
    with pytest.raises(
        DefinitionError, match=rf"^description is {description}\. Pass a string, or leave it out\.$"
    ):
        Agent(script(), "Answer.", description=description)


def test_a_misspelt_argument_is_named() -> None:
    agent: Any = Agent(script(), "Answer.")
    with pytest.raises(TypeError, match=r"^run takes no argument 'sesion'\. Did you mean 'session'\?"):
        agent.run("go", sesion=Session())


def test_a_key_is_needed_at_the_first_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """An agent can be defined without a key. A run without one fails, and the error names the variable."""
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    agent = Agent("openai:gpt-5", "Answer.")
    with pytest.raises(PromptEvaluationError) as caught:
        agent.run("go").wait()
    assert "OPENAI_API_KEY" in str(caught.value)
    assert len(str(caught.value).splitlines()) <= 2


def test_naming_a_model_loads_nothing() -> None:
    code = (
        "import sys; from handrail import Agent; Agent('openai:gpt-5', 'Answer.'); "
        "Agent('google:model', 'Answer.'); Agent('cohere:model', 'Answer.'); "
        "print([name for name in sys.modules if name.startswith(('aiohttp', 'handrail.models.openai', "
        "'handrail.models.gemini', 'handrail.models.bridge'))])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=500
    )
    assert done.stdout.strip() == "[]"


def test_an_extra_is_needed_at_the_first_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "handrail.models.bridge", None)
    agent = Agent("cohere:model", "Answer.")
    with pytest.raises((ImportError, DefinitionError, ModelError)):
        agent.run("go")


# --- a recorded run ------------------------------------------------------------------------------


CRASHING = """
import os, signal, sys
from handrail import Agent, ScriptedModel, SqliteJournal, ToolCall, tool

@tool(effect="pure")
async def look() -> str:
    '''Look.'''
    print("looked", flush=True)
    return "seen"

@tool(effect="read")
async def stop() -> str:
    '''Stop.'''
    if "crash" in sys.argv:
        os.kill(os.getpid(), signal.SIGKILL)
    return "stopped"

asked = [ToolCall("look"), ToolCall("stop"), "Done."]
agent = Agent(
    ScriptedModel(lambda request: asked[len([each for each in request.messages if type(each).__name__ == "AssistantMessage"])]),
    "It costs $5.", name="desk", tools=[look, stop],
)
journal = SqliteJournal("runs.db")
if "crash" in sys.argv:
    agent.run("go", run_id="r1", journal=journal).wait()
else:
    print(agent.resume("r1", journal=journal).wait().text)
"""


def test_a_run_is_resumed_after_a_crash(tmp_path: Path) -> None:
    """A run resumed after a crash does not repeat recorded calls: `look` runs only once."""
    (tmp_path / "desk.py").write_text(CRASHING)

    def start(*given: str) -> tuple[int, str, str]:
        done = warm_python.run([tmp_path / "desk.py", *given], cwd=tmp_path)
        return done.returncode, done.stdout.decode(), done.stderr.decode()

    assert start("crash")[:2] == (-signal.SIGKILL, "looked\n")
    assert start() == (0, "Done.\n", "")


def test_the_journal_is_the_adapters_or_given() -> None:
    journal = MemoryJournal()
    agent = Agent(Adapter(script(), journal=journal), "Answer.", tools=[fare])
    first = agent.run("go", run_id="r1").wait()
    assert agent.resume("r1").wait().text == first.text
    other = Agent(script(), "Answer.", tools=[fare])
    assert other.resume("r1", journal=journal).wait().text == first.text


# --- as a tool -----------------------------------------------------------------------------------

PRICED = Traits(Price(Decimal(1_000_000), Decimal(10_000_000)), native_output=True)


def outer(model: Any, inner: Agent[Any], **more: Any) -> Agent[None]:
    return Agent(model, "Ask the desk.", name="outer", tools=[inner.as_tool()], **more)


def calls(name: str = "desk", text: str = "Done.", **arguments: Any) -> ScriptedModel:
    return ScriptedModel([ToolCall(name, arguments or {"message": "Rome?"}), text], traits=PRICED)


def desk(model: Any = None, **more: Any) -> Agent[Any]:
    given: dict[str, Any] = {"name": "desk", "description": "Knows fares.", "tools": [fare]} | more
    return Agent(model or script(), "Answer.", **given)


def test_an_agent_is_a_tool_of_another() -> None:
    session = Session()
    response = outer(calls(), desk()).run("go", session=session).wait()
    assert response.text == "Done."
    done = {each.tool: each for each in session[ToolInvoked].all()}
    assert set(done) == {"fare", "desk"}
    assert done["desk"].result.value == "It is 129 euros."
    assert done["fare"].path == ("desk", "fare")
    assert [each.prompt for each in session[PromptExecuted].all()] == ["desk", "outer"]


def test_it_needs_no_adapter_around_it() -> None:
    """An agent used as a tool can be called through a gate that has no model."""
    result = open_gate([desk().as_tool()]).invoke("desk", {"message": "Rome?"}).wait()
    assert result.value == "It is 129 euros."


def test_its_extras_are_its_own_and_its_callers() -> None:
    """An agent that is called as a tool keeps its adapter's extras, as one that is run. Its caller's are there too."""
    seen: list[Any] = []

    @tool(effect="read")
    async def look(context: ToolContext) -> str:
        """Look at the extras."""
        seen.append({name: context.extras.get(name) for name in ("tenant", "region", "plan")})
        return "seen"

    adapter = Adapter(
        ScriptedModel([ToolCall("look"), "Seen."] * 3), extras={"tenant": "acme", "plan": ["gold"]}
    )
    inner = desk(adapter, tools=[look])
    inner.run("go").wait()
    mine = {"tenant": "umbrella", "region": "eu"}
    outer(Adapter(calls(), extras=mine), inner).run("go").wait()
    open_gate([inner.as_tool()], extras=mine).invoke("desk", {"message": "go"}).wait()
    assert seen == [
        {"tenant": "acme", "region": None, "plan": ["gold"]},
        *[{"tenant": "acme", "region": "eu", "plan": ["gold"]}] * 2,
    ]


def test_its_depth_limit_is_its_own() -> None:
    """An agent that is called as a tool nests no deeper than its adapter allows, as one that is run inside a call."""

    @tool(effect="read")
    async def dig(levels: int, context: ToolContext) -> str:
        """Call itself."""
        return "ground" if levels == 0 else (await context.call("dig", levels=levels - 1)).unwrap()

    for limit, reached in ((1, True), (0, False)):
        adapter = Adapter(ScriptedModel([ToolCall("dig", {"levels": 1}), "Done."]), depth_limit=limit)
        session = Session()
        gate = open_gate([desk(adapter, tools=[dig]).as_tool()], session=session)
        gate.invoke("desk", {"message": "go"}).wait()
        outermost = [each for each in session[ToolInvoked].all() if each.path == ("desk", "dig")]
        assert [each.result.success for each in outermost] == [reached]


def test_its_workers_are_its_own(tmp_path: Path) -> None:
    """An agent that is called as a tool uses its own adapter's workers."""

    @tool
    async def ask(context: ToolContext) -> str:
        """Ask a worker."""
        return str(await context.call_worker("helper", "Rome?"))

    model = ScriptedModel([ToolCall("ask", {}), "129 euros", "It is 129 euros."])
    inner = desk(Adapter(model, workers=sound(tmp_path, helper=PLAIN)), tools=[ask])
    session = Session()
    outer(calls(), inner).run("go", session=session).wait()
    done = {each.tool: each.result.value for each in session[ToolInvoked].all()}
    assert done == {"helper": "129 euros", "ask": "129 euros", "desk": "It is 129 euros."}


@pytest.mark.parametrize("by_model", [True, False])
def test_its_tools_have_its_own_adapter(by_model: bool) -> None:
    """A prompt that an agent's tool evaluates goes to the agent's own model, whether a model or a gate called the agent."""

    @tool
    async def think(context: ToolContext) -> str:
        """Ask the model."""
        response: Any = await context.adapter.evaluate(Prompt("thought", "Think."))
        return response.text

    inner = desk(ScriptedModel([ToolCall("think", {}), "my thought", "I thought."]), tools=[think])
    session = Session()
    if by_model:
        outer(calls(), inner).run("go", session=session).wait()
    else:
        open_gate([inner.as_tool()], session=session).invoke("desk", {"message": "Think."}).wait()
    done = {each.tool: each.result.value for each in session[ToolInvoked].all()}
    assert done == {"think": "my thought", "desk": "I thought."}


def test_its_output_is_the_value_and_its_params_are_the_arguments() -> None:
    section = MarkdownSection[Trip]("Trip", "trip", "To $city.")
    seen: list[str] = []

    def answer(request: ModelRequest) -> str:
        seen.append(request.system)
        return '{"title": "Q3"}'

    inner = Agent(ScriptedModel(answer), [section], name="desk", description="Reports.", output=Report)
    result = open_gate([inner.as_tool()]).invoke("desk", {"city": "Rome"}).wait()
    assert result.value == Report("Q3")
    assert "To Rome." in seen[0]


def test_a_tool_needs_a_description() -> None:
    with pytest.raises(DefinitionError, match="has no description"):
        desk(description=" ").as_tool()


def test_its_effect_is_that_of_its_strongest_tool() -> None:
    @tool
    async def send() -> None:
        """Send something."""

    section = MarkdownSection("More", "more", "More.", tools=[send])
    assert desk().as_tool().effect == "idempotent"
    assert desk(tools=[fare, send]).as_tool().effect == "irreversible"
    nested = Agent(script(), ["Answer.", section], name="desk", description="Sends.")
    assert nested.as_tool().effect == "irreversible"


def test_it_spends_from_the_callers_budget() -> None:
    greedy = desk(ScriptedModel([ToolCall("fare", {"city": "Rome"})] * 9 + ["done"]))
    with pytest.raises(PromptEvaluationError, match="requests"):
        outer(calls(), greedy).run("go", budget=Budget(requests=3)).wait()


def test_its_usage_and_cost_are_the_callers() -> None:
    inner = desk(ScriptedModel([Reply("ok", usage=Usage(input=7, output=1, requests=1))], traits=PRICED))
    reply = Reply(calls=[ToolCall("desk", {"message": "?"})], usage=Usage(input=2, output=3, requests=1))
    model = ScriptedModel([reply, Reply("ok", usage=Usage(input=5, requests=1))], traits=PRICED)
    response = outer(model, inner).run("go").wait()
    assert response.usage == Usage(input=14, output=4, requests=3)
    assert response.cost == Decimal(14 + 40)


def test_it_has_the_callers_deadline_and_session() -> None:
    seen: list[Any] = []
    deadline, session = Deadline.after(3600), Session()

    @tool(effect="read")
    async def look(context: ToolContext) -> str:
        """Record the deadline, the session and the depth."""
        seen.append((context.deadline, context.run_context.session_id, context.depth))
        return "seen"

    inner = desk(ScriptedModel([ToolCall("look"), "ok"]), tools=[look])
    outer(calls(), inner).run("go", deadline=deadline, session=session).wait()
    assert seen == [(deadline, session.id, 1)]


def test_depth_is_counted_through_agents() -> None:
    agent = desk(ScriptedModel(lambda request: "bottom"), tools=[])
    for level in range(7):
        said = {"message": "deeper"}
        below = agent.name

        def answer(request: ModelRequest, below: str = below, said: dict[str, str] = said) -> Any:
            last = request.messages[-1]
            return last.text if isinstance(last, ToolMessage) else ToolCall(below, said)

        agent = Agent(
            ScriptedModel(answer), "Ask.", name=f"level{level}", description="Asks.", tools=[agent.as_tool()]
        )
    assert "limit" in agent.run("go").wait().text


def test_approvals_reach_the_people_of_the_caller() -> None:
    """An inner agent's requests for approval go to its caller's environment, and are denied if the caller has none."""

    @tool(effect="irreversible")
    async def send() -> str:
        """Send something."""
        return "sent"

    def inner() -> Agent[Any]:
        return desk(ScriptedModel([ToolCall("send"), "ok"]), tools=[send], policies=[CapabilityPolicy()])

    person, session = Person(approve=True), Session()
    outer(calls(), inner()).run("go", environment=person, session=session).wait()
    assert [each.status for each in session[ToolInvoked].all() if each.tool == "send"] == ["ok"]
    assert len(person.questions) == 1
    alone = Session()
    outer(calls(), inner()).run("go", session=alone).wait()
    assert [each.status for each in alone[ToolInvoked].all() if each.tool == "send"] == ["denied"]


def test_a_nested_agent_streams_where_its_caller_does() -> None:
    events = list(outer(calls(), desk()).stream("go"))
    texts = [each for each in events if isinstance(each, TextDelta)]
    assert len({each.run_context.run_id for each in texts}) == 2


def test_a_refusal_and_a_cut_answer_are_told() -> None:
    refused = desk(ScriptedModel([Reply("No.", stop="refused")]))
    result = open_gate([refused.as_tool()]).invoke("desk", {"message": "?"}).wait()
    assert (result.success, result.message) == (False, "desk refused: No.")
    cut = desk(ScriptedModel([Reply("Half an", stop="length")]))
    result = open_gate([cut.as_tool()]).invoke("desk", {"message": "?"}).wait()
    assert (result.success, result.value) == (True, "Half an")
    assert "cut off" in result.message


# --- served --------------------------------------------------------------------------------------

APP = '''"""A module with an agent."""
from handrail import Agent, ScriptedModel, tool

desk = Agent(ScriptedModel(lambda request: "It is 129 euros."), "It costs $5.", name="desk", description="Knows fares.")
agent = desk
'''


async def test_an_agent_is_served_like_a_prompt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "fares_desk.py").write_text(APP)
    monkeypatch.syspath_prepend(tmp_path)
    loaded = load("fares_desk:desk")
    assert (loaded.source.name, loaded.source.description) == ("desk", "Knows fares.")
    assert load("fares_desk").source.name == "desk"
    assert isinstance(loaded.source, PromptSource)
    async with serving(tmp_path, loaded.source) as client:
        run_id = await client.say("t1", "How much?")
        seen = await client.idle("t1")
        assert seen["status"] == "idle"
        assert "It is 129 euros." in str(seen)
    with closing(SqliteJournal(tmp_path / "runs.db")) as journal:
        row = await journal.runs.get(run_id)
        assert (row.record.app, row.record.prompt) == ("fares_desk:desk", "desk")


def test_an_app_reference_names_the_agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that was recorded with an app reference can be resumed without naming its prompt."""
    (tmp_path / "recorded_desk.py").write_text(APP)
    monkeypatch.syspath_prepend(tmp_path)
    journal = MemoryJournal()
    agent = load("recorded_desk:desk").source
    assert agent.name == "desk"
    from recorded_desk import desk as found  # type: ignore[import-not-found]  # pyright: ignore

    found.run("go", run_id="r1", app="recorded_desk:desk", journal=journal).wait()
    adapter = Adapter(ScriptedModel([]), journal=journal)
    assert adapter.resume("r1").wait().text == "It is 129 euros."
