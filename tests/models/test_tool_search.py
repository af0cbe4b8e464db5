"""OpenAI's own tool search: the model searches with `tool_search_call`, and the results load the definitions of tools.

Each request is checked by the wire grammar, which knows what the API refuses.
"""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import itertools
import json
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from handrail import (
    Adapter,
    AnthropicModel,
    Budget,
    CapabilityPolicy,
    LaterEnvironment,
    MemoryJournal,
    OpenAIModel,
    Prompt,
    ScriptedModel,
    Session,
    Tool,
    ToolCall,
    first_that_works,
    runs,
    tool,
)
from handrail.errors import RunParked
from handrail.events import ToolInvoked
from handrail.messages import AssistantMessage, Traits
from handrail.models import ModelUnavailable
from support.parked_runs import answer_to
from support.provider_streams import body_of, model_for

Item = dict[str, Any]
DEFERS = Traits(loads_deferred=True)
STREAMED = pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
mailed: list[str] = []


@tool(capabilities={"mail.send"})
async def send_mail(to: str) -> str:
    """Send a letter by electronic mail."""
    mailed.append(to)
    return f"sent to {to}"


def chore(number: int) -> Tool[Any, Any]:
    @tool(name=f"chore_{number}", effect="pure", description=f"Does chore number {number}.")
    async def run(size: int) -> int:
        return number * size

    return run


TOOLS = [*map(chore, range(200)), send_mail]
PROMPT = Prompt("p", "Work.", tools=TOOLS, search=True)
ids = itertools.count()


def search(query: str) -> list[Item]:
    """Return the items with which the model searches."""
    id = f"call_{next(ids)}"
    item = {"type": "tool_search_call", "id": f"tsc_{id}", "call_id": id, "execution": "client"}
    return [thought(), {**item, "status": "completed", "arguments": {"query": query}}]


def call(name: str, /, *, loaded: bool = True, **arguments: Any) -> list[Item]:
    """Return the items with which the model calls a tool. A loaded one is in the namespace of its name."""
    id = f"call_{next(ids)}"
    item = {"type": "function_call", "id": f"fc_{id}", "call_id": id, "name": name, "status": "completed"}
    space = {"namespace": name} if loaded else {}
    return [thought(), {**item, "arguments": json.dumps(arguments), **space}]


def thought() -> Item:
    return {"type": "reasoning", "id": f"rs_{next(ids)}", "summary": [], "encrypted_content": "sealed"}


def say(text: str = "Done.") -> list[Item]:
    part = {"type": "output_text", "text": text, "annotations": []}
    return [{"type": "message", "role": "assistant", "status": "completed", "content": [part]}]


def answer(items: Sequence[Item], stream: bool) -> bytes:
    response = {"status": "completed", "output": items, "usage": {"input_tokens": 9, "output_tokens": 9}}
    if not stream:
        return body_of([response], False)
    events: list[Item] = []
    for index, item in enumerate(items):
        # OpenAI sends a search without its arguments first, and sometimes with another id.
        begun = {**item, "arguments": {}, "call_id": "other"} if item["type"] == "tool_search_call" else item
        if item["type"] == "message":
            events.append({"type": "response.output_text.delta", "delta": item["content"][0]["text"]})
        if item["type"] != "function_call":
            events.append({"type": "response.output_item.added", "output_index": index, "item": begun})
        events.append({"type": "response.output_item.done", "output_index": index, "item": item})
    return body_of([*events, {"type": "response.completed", "response": response}], True)


def played(
    *answers: Sequence[Item], stream: bool = False, name: str = "gpt-5.4"
) -> tuple[OpenAIModel, list[Item]]:
    """Return a model that gives these answers, and the list of the requests that it sends."""
    model = OpenAIModel(name, api="responses", key_variable=None)
    post = model_for("responses", [[answer(each, stream)] for each in answers], stream)._endpoint._post
    sent: list[Item] = []

    @asynccontextmanager
    async def noted(path: str, body: bytes) -> AsyncGenerator[Any]:
        sent.append(json.loads(body))
        async with post(path, body) as response:
            yield response

    model._endpoint._post = noted
    return model, sent


async def run(model: Any, prompt: Prompt[Any] = PROMPT, *, session: Session | None = None, **options: Any):
    return await Adapter(model, **options).evaluate(prompt, "go", session=session)


def kinds(request: Item) -> list[str]:
    return [each["type"] for each in request["input"]]


@STREAMED
async def test_the_model_searches_and_calls_what_it_found(stream: bool):
    """The request lists the search alone. Its result has the definitions, and the call goes back with its namespace."""
    model, sent = played(search("letter"), call("send_mail", to="ann"), say(), stream=stream)
    session = Session()
    adapter = Adapter(model)
    if stream:
        response = await adapter.stream(PROMPT, "go", session=session).response
    else:
        response = await adapter.evaluate(PROMPT, "go", session=session)
    assert response.text == "Done."
    assert [(each.tool, each.status) for each in session[ToolInvoked].all()] == [
        ("search_tools", "ok"),
        ("send_mail", "ok"),
    ]
    (listed,) = sent[0]["tools"]
    assert (listed["type"], listed["execution"]) == ("tool_search", "client")
    assert listed["parameters"]["required"] == ["query"]
    *_, asked, found = sent[1]["input"]
    assert (asked["type"], asked["arguments"]) == ("tool_search_call", {"query": "letter"})
    assert (found["type"], found["call_id"]) == ("tool_search_output", asked["call_id"])
    (definition,) = found["tools"]
    assert definition == {
        "type": "function",
        "name": "send_mail",
        "description": send_mail.description,
        "parameters": send_mail.json_schema,
        "strict": False,
        "defer_loading": True,
    }
    *_, called, result = sent[2]["input"]
    assert (called["name"], called["namespace"]) == ("send_mail", "send_mail")
    assert (result["type"], result["output"]) == ("function_call_output", "sent to ann")


async def test_the_search_is_not_told_as_one_by_the_provider():
    """People are told of searches like of any other call, and not as of calls of the provider's own tools."""
    model, _ = played(search("letter"), say())
    session = Session()
    await run(model, session=session)
    messages = (await run(ScriptedModel(["Done."]), session=session)).messages
    said = [each for each in messages if isinstance(each, AssistantMessage)]
    assert [each.thought for each in said] == [""] * len(said)
    assert said[0].calls[0].name == "search_tools"


async def test_the_prefix_stays_the_same_over_fifty_turns():
    """Each of fifty requests with searches begins with all items and tools of the one before, byte for byte."""
    turns = [
        each for number in range(25) for each in (search(f"chore {number}"), call(f"chore_{number}", size=1))
    ]
    model, sent = played(*turns, say())
    await run(model)
    assert len(sent) == 51
    for earlier, later in itertools.pairwise(sent):
        assert later["input"][: len(earlier["input"])] == earlier["input"]
        assert {**later, "input": []} == {**earlier, "input": []}
    assert len(json.dumps(sent[0])) < 1_000


async def test_a_search_without_success_says_why():
    """The result of such a search has no tools, and a message says why."""
    model, sent = played(search("zebra"), search(""), say())
    await run(model)
    assert kinds(sent[2]) == [
        "message",
        *["reasoning", "tool_search_call", "tool_search_output", "message"] * 2,
    ]
    outputs = [each for each in sent[2]["input"] if each["type"] == "tool_search_output"]
    assert [each["tools"] for each in outputs] == [[], []]
    assert "zebra" in sent[2]["input"][4]["content"]
    assert "query" in sent[2]["input"][8]["content"]


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("gpt-5.4", {"api": "responses"}, True),
        ("gpt-5.6-luna", {"api": "responses"}, True),
        ("gpt-6", {"api": "responses"}, True),
        ("gpt-5.4-nano", {"api": "responses"}, False),
        ("gpt-5.3", {"api": "responses"}, False),
        ("gpt-5", {"api": "responses"}, False),
        ("o3", {"api": "responses"}, False),
        ("gpt-5.4", {"api": "chat"}, False),
        ("gpt-5.4", {"api": "responses", "base_url": "http://localhost:1/v1"}, False),
        ("gpt-5.4", {"api": "responses", "provider": "openrouter"}, False),
    ],
)
def test_only_openais_newer_models_search_by_themselves(name: str, options: Any, expected: bool):
    """Older models, other servers and the chat API get the two fixed tools."""
    assert OpenAIModel(name, key_variable=None, **options).traits.loads_deferred is expected


async def test_an_older_model_gets_the_two_fixed_tools():
    """It calls `call_tool`, and its requests have nothing of the tool search."""
    called = call("call_tool", loaded=False, name="chore_3", arguments={"size": 2})
    model, sent = played(call("search_tools", loaded=False, query="chore 3"), called, say(), name="gpt-5")
    await run(model)
    assert [each["name"] for each in sent[0]["tools"]] == ["search_tools", "call_tool"]
    assert sent[2]["input"][-1]["output"] == "6"


async def test_an_approval_of_a_found_tool_shows_that_tool():
    """The run parks at the call, and goes on in another process with the namespace that the API requires."""
    mailed.clear()
    journal = MemoryJournal()
    prompt = Prompt("p", "Work.", tools=TOOLS, search=True, policies=[CapabilityPolicy({"mail.send": "ask"})])
    first, _ = played(search("letter"), call("send_mail", to="ann"))
    with pytest.raises(RunParked) as parked:
        await run(first, prompt, journal=journal, environment=LaterEnvironment())
    (question,) = parked.value.questions
    assert (question.name, question.payload["arguments"]) == ("send_mail", {"to": "ann"})
    journal.questions.answer(answer_to(question, {"approved": True}))
    second, sent = played(say())
    adapter = Adapter(second, journal=journal)
    await adapter.resume(parked.value.run_id, prompt, environment=LaterEnvironment())
    assert mailed == ["ann"]
    assert [each["name"] for each in sent[0]["input"][3]["tools"]] == ["send_mail"]
    assert sent[0]["input"][5]["namespace"] == "send_mail"


async def test_a_session_goes_on_with_what_it_has_loaded():
    """Another process reads the session from its record, and sends the same items."""
    journal = MemoryJournal()
    first, before = played(search("letter"), call("send_mail", to="ann"), say())
    await run(first, session=Session(id="s"), journal=journal)
    session = await runs.session(journal, "s", principal="local")
    second, after = played(call("send_mail", to="bob"), say())
    await run(second, session=session, journal=journal)
    assert after[0]["input"][: len(before[2]["input"])] == before[2]["input"]
    assert after[1]["input"][-1]["output"] == "sent to bob"


async def test_a_session_goes_on_after_a_run_that_was_cancelled_while_parked():
    """What its search has loaded is read from the record of its calls."""
    journal = MemoryJournal()
    prompt = Prompt("p", "Work.", tools=TOOLS, search=True, policies=[CapabilityPolicy({"mail.send": "ask"})])
    first, _ = played(search("letter"), call("send_mail", to="ann"))
    with pytest.raises(RunParked) as parked:
        await Adapter(first, journal=journal).evaluate(
            prompt, "go", session=Session(id="s"), environment=LaterEnvironment()
        )
    await runs.cancel(journal, parked.value.run_id)
    session = await runs.session(journal, "s", principal="local")
    second, sent = played(say())
    await run(second, session=session, journal=journal)
    assert [each["name"] for each in sent[0]["input"][3]["tools"]] == ["send_mail"]
    assert sent[0]["input"][5]["namespace"] == "send_mail"


async def test_calls_that_other_models_made_get_their_namespace():
    """A tool that was loaded is called by another provider's model. Its call gets the namespace, without which the API refuses it."""
    session = Session()
    model, _ = played(search("letter"), say())
    await run(model, session=session)
    other = ScriptedModel([ToolCall("send_mail", {"to": "ann"}), "Done."], traits=DEFERS)
    await run(other, session=session)
    model, sent = played(say())
    await run(model, session=session)
    (called,) = [each for each in sent[0]["input"] if each["type"] == "function_call"]
    assert called["namespace"] == "send_mail"


async def test_a_choice_of_models_that_load_tools_falls_over():
    """If OpenAI fails, Anthropic's model goes on with the tool that was loaded, and its requests are valid."""
    first, _ = played(search("letter"), [])
    said = [{"type": "tool_use", "id": "toolu_1", "name": "send_mail", "input": {"to": "ann"}}]
    answers: list[Any] = [
        {"content": said, "stop_reason": "tool_use", "usage": {}},
        {"content": [{"type": "text", "text": "Done."}], "stop_reason": "end_turn", "usage": {}},
    ]
    second = model_for("messages", [[body_of([each], False)] for each in answers], False)
    post, left = first._endpoint._post, [1]

    @asynccontextmanager
    async def fails_later(path: str, body: bytes) -> AsyncGenerator[Any]:
        if not left:
            raise ModelUnavailable("gpt-5.4", "it is down")
        left.pop()
        async with post(path, body) as response:
            yield response

    first._endpoint._post = fails_later
    model, session = first_that_works(first, second), Session()
    assert (await run(model, session=session)).text == "Done."
    assert [each.tool for each in session[ToolInvoked].all()] == ["search_tools", "send_mail"]
    assert not first_that_works(first, OpenAIModel("gpt-5", key_variable=None)).traits.loads_deferred


async def test_a_tool_that_was_listed_is_found_later():
    """A call from before the tool was searched gets a namespace only once a search has loaded the tool."""
    session = Session()
    model, _ = played(call("send_mail", loaded=False, to="ann"), say())
    await run(model, Prompt("p", "Work.", tools=[send_mail]), session=session)
    model, sent = played(search("letter"), say())
    await run(model, session=session)
    before, after = ([each for each in one["input"] if each["type"] == "function_call"] for one in sent)
    assert "namespace" not in before[0]
    assert after[0]["namespace"] == "send_mail"


async def test_a_model_without_tool_search_continues():
    """It is sent searches as calls of the search tool, and calls without namespaces."""
    session = Session()
    model, _ = played(search("letter"), search("zebra"), call("send_mail", to="ann"), say())
    await run(model, session=session)
    model, sent = played(say(), name="gpt-5")
    await run(model, session=session)
    items = [each for each in sent[0]["input"] if each["type"].startswith("function_call")]
    assert [each.get("name", "") for each in items] == [
        "search_tools",
        "",
        "search_tools",
        "",
        "send_mail",
        "",
    ]
    assert items[1]["output"] == "Found: send_mail."
    assert not any({"namespace", "execution"} & set(each) for each in items)


async def test_a_session_that_began_without_tool_search_keeps_what_was_found():
    """What the fixed tools found is text. A model with a tool search of its own is sent it as such, since it has loaded nothing."""
    session = Session()
    called = call("call_tool", loaded=False, name="chore_3", arguments={"size": 2})
    model, _ = played(call("search_tools", loaded=False, query="chore 3"), called, say(), name="gpt-5")
    await run(model, session=session)
    model, sent = played(search("letter"), call("send_mail", to="ann"), say())
    await run(model, session=session)
    (found, *_) = [each for each in sent[0]["input"] if each["type"] == "tool_search_output"]
    assert found["tools"] == []
    assert any('"chore_3"' in str(each["content"]) for each in sent[0]["input"] if each["type"] == "message")
    assert sent[2]["input"][-1]["output"] == "sent to ann"


async def test_references_to_tools_of_another_prompt_are_left_out():
    """Anthropic refuses a reference to a tool that the request does not have. Such a result is sent as its text."""
    session = Session()
    await run(
        ScriptedModel([ToolCall("search_tools", {"query": "letter"}), "Done."], traits=DEFERS),
        session=session,
    )
    later = ScriptedModel(["Done."], traits=DEFERS)
    await run(later, Prompt("q", "Rest.", tools=[chore(1)]), session=session)
    body = AnthropicModel("m", key_variable=None)._body(later.requests[0])
    assert b"tool_reference" not in body
    assert b"Found: send_mail." in body
    again = ScriptedModel(["Done."], traits=DEFERS)
    await run(again, session=session)
    assert b"tool_reference" in AnthropicModel("m", key_variable=None)._body(again.requests[0])


async def test_tools_that_are_not_loaded_take_no_tokens():
    """A budget that would not pay for the definitions of all tools pays for a run that loads one."""
    model = ScriptedModel([ToolCall("search_tools", {"query": "letter"}), "Done."], traits=DEFERS)
    budget = Budget(tokens=12_000)
    assert sum(len(json.dumps(each.json_schema)) for each in TOOLS) > 12_000
    assert (await Adapter(model).evaluate(PROMPT, "go", budget=budget)).text == "Done."
