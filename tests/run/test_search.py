"""Tool search: a model finds tools by searching, and every part of a run sees the tool that it calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
import pytest
from pydantic import Field, SecretStr

from handrail import (
    Adapter,
    CapabilityPolicy,
    LaterEnvironment,
    MarkdownSection,
    MemoryJournal,
    Prompt,
    ScriptedModel,
    Session,
    Tool,
    ToolCall,
    runs,
    tool,
)
from handrail.errors import RunParked
from handrail.events import ToolInvoked
from handrail.messages import ModelRequest, ToolMessage, Traits
from handrail.models import anthropic
from handrail.run.search import ToolIndex
from handrail.testing import Person
from support import strict_wires
from support.parked_runs import answer_to

DEFERS = Traits(loads_deferred=True)


def numbered(count: int) -> list[Tool[Any, Any]]:
    """Return tools `task_0`, `task_1` and so on."""

    def one(number: int) -> Tool[Any, Any]:
        @tool(name=f"task_{number}", effect="pure", description=f"Does the chore with the number {number}.")
        async def run(size: Annotated[int, Field(description="How much of it.")]) -> str:
            return f"{number}: {size}"

        return run

    return [one(number) for number in range(count)]


sent: list[str] = []


@tool(effect="irreversible", capabilities={"mail.send"})
async def send_mail(to: str, text: str) -> str:
    """Send a letter to somebody by electronic mail."""
    sent.append(to)
    return f"sent to {to}"


def found(name: str, **arguments: Any) -> ToolCall:
    return ToolCall("call_tool", {"name": name, "arguments": arguments})


def search(query: str) -> ToolCall:
    return ToolCall("search_tools", {"query": query})


def run(
    *calls: ToolCall, tools: Any = None, traits: Traits | None = None, **options: Any
) -> tuple[ScriptedModel, Sequence[Any]]:
    """Make these calls in order in one run, and return the model and the calls' events."""
    session, model = Session(), ScriptedModel([*calls, "Done."], traits=traits)
    prompt = Prompt(
        "p", "Work.", tools=[*numbered(100), send_mail] if tools is None else tools, search=True, **options
    )
    environment = Person(approve=lambda question: True)
    Adapter(model, environment=environment).evaluate(prompt, "go", session=session).wait()
    return model, session[ToolInvoked].all()


def names(request: ModelRequest) -> list[str]:
    return [each.tool.name for each in request.tools]


def test_a_tool_is_found_and_called() -> None:
    """The model is offered two tools, and a call of the second is a call of the tool that it names."""
    model, calls = run(search("letter by mail"), found("send_mail", to="Ann", text="Hi."))
    assert names(model.requests[0]) == ["search_tools", "call_tool"]
    first = msgspec.json.decode(calls[0].result.render().splitlines()[0])
    assert (first["name"], sorted(first["parameters"]["properties"])) == ("send_mail", ["text", "to"])
    assert calls[1].tool == "send_mail"
    assert calls[1].result.render() == "sent to Ann"


def test_every_wire_takes_the_two_tools() -> None:
    """The requests with `call_tool`, whose arguments have any form, are valid on all wires, before and after its calls."""
    model, _ = run(search("mail"), found("task_1", size=2))
    for request in model.requests:
        assert strict_wires.check_everywhere(request) == []
    model, _ = run(search("mail"), traits=DEFERS)
    assert strict_wires.check_everywhere(model.requests[-1]) == []


def test_the_conversation_keeps_what_the_model_wrote() -> None:
    """The message with the call, and its result, have the name that the model wrote, so that the provider accepts them."""
    model, _ = run(found("task_1", size=2))
    call, results = list(model.requests[-1].messages)[-2:]
    assert call.calls[0].name == "call_tool"  # pyright: ignore[reportAttributeAccessIssue]
    assert isinstance(results, ToolMessage)
    assert (results.results[0].name, results.results[0].text) == ("call_tool", "1: 2")


def test_the_list_of_tools_never_changes() -> None:
    """Over fifty turns with searches and calls, each request begins with all the bytes of the one before."""
    calls = [
        each for number in range(25) for each in (search(f"chore {number}"), found(f"task_{number}", size=1))
    ]
    for traits in (None, DEFERS):
        turns = [*calls] if traits is None else [search(f"chore {number}") for number in range(50)]
        model, _ = run(*turns, traits=traits)
        assert len(model.requests) == 51
        offered = [[(each.tool.name, each.deferred) for each in request.tools] for request in model.requests]
        assert all(each == offered[0] for each in offered)


def test_a_provider_that_loads_tools_is_sent_all_of_them_deferred() -> None:
    """Such a provider has the real tools from the start, and a result of a search names those that it found."""
    model, calls = run(search("letter"), ToolCall("send_mail", {"to": "Ann", "text": "Hi."}), traits=DEFERS)
    offered = {each.tool.name: each.deferred for each in model.requests[0].tools}
    assert offered["search_tools"] is False
    assert "call_tool" not in offered
    assert sum(offered.values()) == 101
    results = model.requests[1].messages[-1]
    assert isinstance(results, ToolMessage)
    assert results.results[0].shows[0] == "send_mail"
    assert calls[1].result.success
    sent_message = anthropic._message(model.traits.takes, "messages", frozenset(), results)
    assert b'{"type":"tool_reference","tool_name":"send_mail"}' in sent_message


def test_a_search_that_finds_nothing_says_so() -> None:
    """The model is told how many tools there are, and to search with other words."""
    _, calls = run(search("zebra"), search("?!"))
    assert [each.result.success for each in calls] == [False, False]
    assert "101 tools" in calls[0].result.render()


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"name": 5, "arguments": {}},
        {"name": "call_tool", "arguments": {}},
        {"name": "call_tool", "arguments": {"name": "task_1", "arguments": {"size": 1}}},
        {"name": "task_1", "arguments": []},
    ],
)
def test_a_call_that_names_no_tool_is_an_error(arguments: Any) -> None:
    """Nothing runs, and the model is told what is wrong with its arguments."""
    _, calls = run(ToolCall("call_tool", arguments))
    assert [each.result.success for each in calls] == [False]


def test_a_tool_that_was_not_offered_is_an_error() -> None:
    """The error names the tool that the model asked for, and only a few of the others."""
    _, calls = run(found("erase_everything"))
    assert not calls[0].result.success
    assert "erase_everything" in calls[0].result.render()
    assert "and 83 more" in calls[0].result.render()


def test_wrong_arguments_are_the_real_tools_errors() -> None:
    """The arguments are checked by the schema of the tool that was found."""
    _, calls = run(found("task_1", size="much"))
    assert not calls[0].result.success
    assert "size" in calls[0].result.render()


def test_policies_decide_on_the_real_tool() -> None:
    """A policy on the tool's capability holds, whatever the tool is called by."""
    sent.clear()
    _, calls = run(
        found("send_mail", to="Ann", text="Hi."), policies=[CapabilityPolicy({"mail.send": "deny"})]
    )
    assert not calls[0].result.success
    assert sent == []


@pytest.mark.parametrize("search_later", [True, False])
async def test_an_approval_shows_the_real_tool_in_another_process(search_later: bool) -> None:
    """A found tool that must be approved parks the run. The question shows the tool and its arguments, and it runs once.

    The tool may have become a listed one when the answer comes.
    """
    sent.clear()
    journal = MemoryJournal()
    prompt = Prompt(
        "p", "Work.", tools=[send_mail], search=True, policies=[CapabilityPolicy({"mail.send": "ask"})]
    )
    script = [search("mail"), found("send_mail", to="Ann", text="Hi."), "Done."]
    with pytest.raises(RunParked) as parked:
        await Adapter(ScriptedModel(script), journal=journal).evaluate(
            prompt, "go", environment=LaterEnvironment()
        )
    (question,) = parked.value.questions
    assert "send_mail" in str(question)
    assert question.payload["arguments"] == {"to": "Ann", "text": "Hi."}
    journal.questions.answer(answer_to(question, {"approved": True}))
    model = ScriptedModel(script[2:])
    later = Prompt(
        "p",
        "Work.",
        tools=[send_mail],
        search=search_later,
        policies=[CapabilityPolicy({"mail.send": "ask"})],
    )
    response = await Adapter(model, journal=journal).resume(
        parked.value.run_id, later, environment=LaterEnvironment()
    )
    assert (response.text, sent) == ("Done.", ["Ann"])


def test_a_tool_with_secrets_stays_in_the_list() -> None:
    """It is called by its own name, by which its secrets are masked. Called through `call_tool`, it does not run and nothing is kept."""

    @tool(effect="pure")
    async def log_in(password: SecretStr) -> str:
        """Log in."""
        return "in"

    session, model = (
        Session(),
        ScriptedModel(
            [found("log_in", password="hunter2"), ToolCall("log_in", {"password": "hunter2"}), "Done."]
        ),
    )
    journal = MemoryJournal()
    prompt = Prompt("p", "Work.", tools=[log_in, *numbered(2)], search=True)
    Adapter(model, journal=journal).evaluate(prompt, "go", session=session).wait()
    assert names(model.requests[0]) == ["log_in", "search_tools", "call_tool"]
    assert [each.result.success for each in session[ToolInvoked].all()] == [False, True]


@dataclass
class Answer:
    number: int


def test_built_in_tools_do_the_same_through_call_tool() -> None:
    """A section that the model opens through `call_tool` is open, and an answer that it gives like that is the run's."""
    closed = MarkdownSection[Any](
        title="More", key="more", template="More.", summary="More.", visibility="summary", tools=numbered(1)
    )
    prompt = Prompt("p", ["Work.", closed], tools=[send_mail], search=True, output=Answer)
    session, script = Session(), [found("open_sections", sections=["more"]), found("task_0", size=1)]
    model = ScriptedModel([*script, found("final_answer", number=5)], traits=Traits(native_output=False))
    response = Adapter(model).evaluate(prompt, "go", session=session).wait()
    assert response.output == Answer(5)
    assert [(each.tool, each.status) for each in session[ToolInvoked].all()] == [
        ("open_sections", "ok"),
        ("task_0", "ok"),
        ("final_answer", "ok"),
    ]


@tool(effect="pure", name="call_tool")
async def dial(name: str, code: SecretStr) -> str:
    """Dial somebody's number."""
    return f"called {name}"


@pytest.mark.parametrize("search", [False, True])
async def test_a_tool_of_the_apps_own_that_is_called_like_the_fixed_one(search: bool) -> None:
    """Where no `call_tool` is offered, the name is free: such a tool is called itself, and its secrets are masked."""
    session, journal = Session(), MemoryJournal()
    call = ToolCall("call_tool", {"name": "task_0", "code": "hunter2"})
    prompt = Prompt("p", "Work.", tools=[dial, *numbered(1)], search=search)
    model = ScriptedModel([call, "Done."], traits=DEFERS)
    await Adapter(model, journal=journal).evaluate(prompt, "go", session=session, run_id="r")
    assert [(each.tool, each.result.value) for each in session[ToolInvoked].all()] == [
        ("call_tool", "called task_0")
    ]
    assert not any(b"hunter2" in each.body for each in await journal.calls.entries("r"))


async def test_what_is_beside_the_arguments_of_a_found_tool_is_refused_and_masked() -> None:
    """A value that `call_tool` has no place for is an error. It may be a secret, so it is not kept."""
    session, journal = Session(), MemoryJournal()
    call = ToolCall("call_tool", {"name": "task_0", "arguments": {"size": 1}, "code": "hunter2"})
    prompt = Prompt(
        "p", "Work.", tools=[tool(name="log_in", effect="pure")(log_in), *numbered(1)], search=True
    )
    model = ScriptedModel([call, "Done."])
    await Adapter(model, journal=journal).evaluate(prompt, "go", session=session, run_id="r")
    assert [each.tool for each in session[ToolInvoked].all() if each.result.success] == []
    assert not any(b"hunter2" in each.body for each in await journal.calls.entries("r"))


async def log_in(password: SecretStr) -> str:
    """Log in."""
    return "in"


async def test_a_session_with_another_tool_named_search_tools_is_read() -> None:
    """What a run's own tool of that name returned is no list of tools that were loaded, whatever it is."""

    @tool(effect="pure")
    async def search_tools() -> list[Any]:
        """Look for hammers and saws."""
        return ["a saw", {"name": "a hammer"}]

    journal = MemoryJournal()
    prompt = Prompt(
        "p", "Work.", tools=[search_tools, send_mail], policies=[CapabilityPolicy({"mail.send": "ask"})]
    )
    model = ScriptedModel([ToolCall("search_tools"), ToolCall("send_mail", {"to": "Ann", "text": "Hi."})])
    with pytest.raises(RunParked) as parked:
        await Adapter(model, journal=journal).evaluate(
            prompt, "go", session=Session(id="s"), environment=LaterEnvironment()
        )
    await runs.cancel(journal, parked.value.run_id)
    session = await runs.session(journal, "s", principal="local")
    model = ScriptedModel(["Done."])
    await Adapter(model).evaluate(Prompt("p", "Work."), "go", session=session)
    told = [each for each in model.requests[0].messages if isinstance(each, ToolMessage)]
    assert (told[0].results[0].shows, "hammer" in told[0].results[0].text) == ((), True)


def test_names_are_found_by_their_words() -> None:
    """A name is found by its parts, in whatever case it joins them, and a tool of exactly the name that is asked for comes first."""
    humps = tool(name="dig", effect="pure", description="Like shovelEarth.")(lambda: "dug")
    index = ToolIndex([*numbered(100), send_mail, humps])
    assert index.find("shovel")[0] is humps
    assert index.find("mail")[0] is send_mail
    assert index.find("task_7")[0].name == "task_7"
    assert index.find("chores 55")[0].name == "task_55"
    assert index.find('" OR NEAR( *') == []
