"""The bridge to pydantic-ai, mostly with models that answer in process. test_contract.py tests it over HTTP."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any, get_args

import pytest
from pydantic_ai.exceptions import (
    ModelConnectionError,
    ModelHTTPError,
    ModelQuotaExceededError,
    UnexpectedModelBehavior,
)
from pydantic_ai.messages import (
    BinaryContent,
    FilePart,
    ModelMessage,
    ModelResponse,
    TextPart,
    ThinkingPart,
    ToolCallPart,
)
from pydantic_ai.models import KnownModelName
from pydantic_ai.models.function import AgentInfo, DeltaThinkingPart, DeltaToolCall, FunctionModel
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.models.test import TestModel
from pydantic_ai.usage import RequestUsage

from handrail import Adapter, Prompt, Session, tool
from handrail.errors import DefinitionError, ModelError
from handrail.events import ThoughtDelta, ToolInvoked
from handrail.messages import (
    AssistantMessage,
    CallAnswered,
    CallAsked,
    CallPart,
    ModelPart,
    ModelRequest,
    Offered,
    Sent,
    StopPart,
    ToolMessage,
    Usage,
    UsagePart,
    UserMessage,
)
from handrail.models import (
    ModelAnswerBroken,
    ModelRateLimited,
    ModelRequestRefused,
    ModelUnavailable,
)
from handrail.models.bridge import BridgedModel, kept_of, messages_of
from handrail.models.names import model_named
from handrail.models.providers import BRIDGED, PROVIDERS
from handrail.run.adapter import Retry
from handrail.schema import Schema
from support.raw_server import raw_server, whole
from support.stages import openai_provider


@dataclass(frozen=True)
class City:
    """The output type that the model is asked for."""

    name: str


@tool(effect="read")
async def weather(city: str) -> str:
    """The weather in a city."""
    return f"rain in {city}"


def asking(*messages: Any, **more: Any) -> ModelRequest:
    return ModelRequest("Be brief.", Sent(messages or [UserMessage("hi")]), Sent([Offered(weather)]), **more)


async def parts_of(model: BridgedModel, request: ModelRequest) -> list[ModelPart]:
    return [part async for part in model.stream(request)]


@pytest.mark.parametrize("arguments", ["[" * 1200, "[]", "{", '{"a": "\\ud800"}'])
@pytest.mark.parametrize("name", ["multi_tool_use.parallel", "weather", "w" * 65])
async def test_what_goes_back_through_the_bridge_is_accepted(name: str, arguments: str) -> None:
    """Calls that an API would refuse are normalised before pydantic-ai converts them. The test's server checks them."""
    call = {"id": "i" * 41, "type": "function", "function": {"name": name, "arguments": arguments}}
    answers = [
        {**said_by, "object": "chat.completion", "id": "x", "created": 1, "model": "m"}
        for said_by in (
            {
                "choices": [
                    {
                        "index": 0,
                        "message": {"role": "assistant", "tool_calls": [call]},
                        "finish_reason": "tool_calls",
                    }
                ]
            },
            {
                "choices": [
                    {"index": 0, "message": {"role": "assistant", "content": "ok"}, "finish_reason": "stop"}
                ]
            },
        )
    ]
    async with raw_server(*map(whole, answers)) as server:
        provider = openai_provider(server.url)
        adapter = Adapter(BridgedModel(OpenAIChatModel("m", provider=provider)), retry=Retry(attempts=1))
        response = await adapter.evaluate(Prompt("p", "Go.", tools=[weather]), "hi")
    assert response.text == "ok"
    assert len(server.bodies) == 2


@pytest.mark.parametrize("calls", [(), (CallAsked("a", "a.b", "["), CallAsked("b", "weather", "{}"))])
def test_an_answer_that_was_kept_with_different_calls_is_sent_without_what_was_kept(calls: Any) -> None:
    """The kept parts of an answer are sent only if they have exactly the message's calls.

    Names, arguments and ids that the provider would refuse are replaced.
    """
    kept = kept_of(
        "test:m", ModelResponse([ThinkingPart("hm", signature="s"), ToolCallPart("a.b", "[", "x")])
    )
    said = [UserMessage("hi"), AssistantMessage("t", calls, kept)]
    [_, _, sent] = messages_of("test:m", asking(*said))
    assert [part.part_kind for part in sent.parts] == ["text", *["tool-call"] * len(calls)]
    [_, _, sent] = messages_of(
        "test:m", asking(said[0], AssistantMessage("t", (CallAsked("a", "a.b", "["),), kept))
    )
    assert [part.part_kind for part in sent.parts] == ["thinking", "tool-call"]
    assert (sent.parts[1].tool_name, sent.parts[1].args) == ("a_b", '{"unreadable":"["}')
    [_, _, strict] = messages_of(
        "bedrock:m", asking(said[0], AssistantMessage("", (CallAsked("f.a:0", "a", ""),)))
    )
    assert strict.parts[0].tool_call_id.startswith("hr-")


def test_every_provider_of_the_bridge_is_known_by_name():
    """Every provider of pydantic-ai is listed in Handrail, so that a user's module can't take its name."""
    names = get_args(KnownModelName.__value__)
    providers = {name.partition(":")[0].partition("/")[0] for name in names}
    assert providers <= BRIDGED | PROVIDERS.keys()


async def test_a_run_over_the_bridge():
    """A run through the bridge, with pydantic-ai's test model, calls the tool and then answers."""
    session = Session()
    invoked: list[ToolInvoked] = []
    session.dispatcher.subscribe(ToolInvoked, invoked.append)
    response = await Adapter(BridgedModel(TestModel(custom_output_text="Fine."))).evaluate(
        Prompt("guide", "Be brief.", tools=[weather]), "hi", session=session
    )
    assert (response.text, response.stop_reason, response.usage.requests) == ("Fine.", "done", 2)
    assert [(each.tool, each.result.success) for each in invoked] == [("weather", True)]


async def test_what_is_sent_is_the_conversation_and_the_tools():
    """A request has the system prompt, the messages with ids and failures, the tools with schemas, and the settings."""
    seen: list[Any] = []

    def answer(messages: list[ModelMessage], info: AgentInfo) -> ModelResponse:
        seen.append((messages, info))
        return ModelResponse(
            [TextPart("ok")], usage=RequestUsage(input_tokens=9, cache_read_tokens=4, output_tokens=2)
        )

    parts = await parts_of(
        BridgedModel(FunctionModel(answer), options={"top_p": 0.5}),
        asking(
            UserMessage("Weather?"),
            AssistantMessage("I look.", (CallAsked("c1", "weather", '{"city": "Oslo"}'),)),
            ToolMessage((CallAnswered("c1", "weather", "no such city", failed=True),)),
            UserMessage("Again."),
            temperature=0.25,
            max_tokens=7,
            output=Schema(dict[str, int]),
        ),
    )
    [(messages, info)] = seen
    kinds = [
        (part.part_kind, getattr(part, "content", None)) for message in messages for part in message.parts
    ]
    assert kinds == [
        ("system-prompt", "Be brief."),
        ("user-prompt", "Weather?"),
        ("text", "I look."),
        ("tool-call", None),
        ("tool-return", "no such city"),
        ("user-prompt", "Again."),
    ]
    called, returned = messages[2].parts[1], messages[3].parts[0]
    assert (called.tool_call_id, called.args) == ("c1", '{"city": "Oslo"}')
    assert (returned.tool_call_id, returned.outcome) == ("c1", "failed")
    [offered] = info.function_tools
    assert (offered.name, offered.parameters_json_schema) == ("weather", weather.json_schema)
    assert {**info.model_settings} == {
        "timeout": 300.0,
        "max_retries": 0,
        "temperature": 0.25,
        "max_tokens": 7,
        "top_p": 0.5,
    }
    assert info.model_request_parameters.output_mode == "native"
    assert parts[-2:] == [UsagePart(Usage(9, 2, 4, 0, 1)), StopPart("done")]


async def test_thoughts_are_shown_and_go_back_as_they_came():
    """Thinking is not part of the text, and is sent back to the provider with its signature."""
    seen: list[list[ModelMessage]] = []

    def answer(messages: list[ModelMessage], info: AgentInfo) -> ModelResponse:
        seen.append(messages)
        if len(seen) > 1:
            return ModelResponse([TextPart("It rains.")])
        thought = ThinkingPart("Look outside.", signature="signed", provider_name="function")
        return ModelResponse([thought, ToolCallPart("weather", {"city": "Oslo"}, "theirs")])

    model = BridgedModel(FunctionModel(answer))
    response = await Adapter(model).evaluate(Prompt("guide", "Be brief.", tools=[weather]), "hi")
    assert response.text == "It rains."
    asked = seen[1][2]
    assert isinstance(asked, ModelResponse)
    thought, call = asked.parts
    assert isinstance(thought, ThinkingPart)
    assert (thought.content, thought.signature) == ("Look outside.", "signed")
    assert isinstance(call, ToolCallPart)
    [result] = seen[1][3].parts
    assert getattr(result, "tool_call_id", None) == call.tool_call_id


async def test_what_a_model_makes_goes_back_as_it_came():
    """A file in an answer is an attachment of the message, and is sent back. What is kept for that does not repeat its bytes."""
    seen: list[list[ModelMessage]] = []
    png = b"\x89PNG\r\n\x1a\n" + bytes(range(64))

    def answer(messages: list[ModelMessage], info: AgentInfo) -> ModelResponse:
        seen.append(messages)
        return ModelResponse([FilePart(BinaryContent(png, media_type="image/png")), TextPart("Here.")])

    adapter, session = Adapter(BridgedModel(FunctionModel(answer))), Session()
    response = await adapter.evaluate(Prompt("artist", "Draw."), "hi", session=session)
    assert [each.content for each in response.attachments] == [png]
    said = response.messages[-1]
    assert isinstance(said, AssistantMessage)
    assert said.kept is not None
    assert b"iVBOR" not in said.kept.data
    await adapter.evaluate(Prompt("artist", "Draw."), "again", session=session)
    [back] = [each for each in seen[1] if isinstance(each, ModelResponse)]
    file = back.parts[0]
    assert isinstance(file, FilePart)
    assert file.content.data == png


async def test_a_stream_comes_in_pieces():
    """Thinking, text and the arguments of two calls arrive in chunks. The arguments of each call are put together."""

    async def answer(messages: list[ModelMessage], info: AgentInfo) -> AsyncIterator[Any]:
        if len(messages) > 2:
            yield "It "
            yield "rains."
            return
        yield {0: DeltaThinkingPart(content="Hm.")}
        yield {1: DeltaToolCall(name="weather", json_args='{"city": ', tool_call_id="a")}
        yield {1: DeltaToolCall(json_args='"Oslo"}')}
        yield {2: DeltaToolCall(name="weather", json_args='{"city": "Rome"}', tool_call_id="b")}

    model = BridgedModel(FunctionModel(stream_function=answer))
    session = Session()
    thoughts: list[str] = []
    session.dispatcher.subscribe(ThoughtDelta, lambda event: thoughts.append(event.text))
    stream = Adapter(model).stream(Prompt("guide", "Be brief.", tools=[weather]), "hi", session=session)
    results = [event.result.render() async for event in stream if isinstance(event, ToolInvoked)]
    assert sorted(results) == ["rain in Oslo", "rain in Rome"]
    assert thoughts == ["Hm."]
    assert (await stream.response).text == "It rains."


async def test_arguments_that_come_as_an_object_are_written_whole():
    """Arguments that arrive as an object are streamed as one chunk of JSON at the end of the answer."""
    parts = await parts_of(BridgedModel(TestModel()), asking(stream=True))
    calls = [part for part in parts if isinstance(part, CallPart)]
    assert [part.name for part in calls] == ["weather", ""]
    weather.parse(calls[-1].arguments)
    assert parts[-1] == StopPart("calls")


@pytest.mark.parametrize(
    ("raised", "kind", "status", "wait"),
    [
        (ModelHTTPError(429, "m", headers={"Retry-After": "3"}), ModelRateLimited, 429, 3.0),
        (
            ModelHTTPError.for_category(ModelQuotaExceededError, status_code=429, model_name="m"),
            ModelRequestRefused,
            429,
            None,
        ),
        (ModelHTTPError(503, "m"), ModelUnavailable, 503, None),
        (ModelHTTPError(408, "m"), ModelUnavailable, 408, None),
        (ModelHTTPError(400, "m", {"error": {"message": "no such field"}}), ModelRequestRefused, 400, None),
        (ModelConnectionError("m", "refused"), ModelUnavailable, None, None),
        (UnexpectedModelBehavior("half an answer"), ModelAnswerBroken, None, None),
        (ValueError("not JSON"), ModelAnswerBroken, None, None),
    ],
)
async def test_failures_are_in_our_words(
    raised: Exception, kind: type[ModelError], status: int | None, wait: float | None
):
    """Each failure in the library becomes a Handrail error with its status and retry time, and without a cause."""

    def answer(messages: list[ModelMessage], info: AgentInfo) -> ModelResponse:
        raise raised

    with pytest.raises(kind) as caught:
        await parts_of(BridgedModel(FunctionModel(answer)), asking())
    assert (caught.value.status, caught.value.retry_after) == (status, wait)
    assert caught.value.__cause__ is None


async def test_a_key_that_is_said_back_is_not_repeated(monkeypatch: pytest.MonkeyPatch):
    """A key that the provider echoes in an error is masked, even if its variable belongs to no known provider."""
    monkeypatch.setenv("SOME_API_KEY", "sk-planted-1234")

    def answer(messages: list[ModelMessage], info: AgentInfo) -> ModelResponse:
        raise ModelHTTPError(401, "m", {"error": {"message": "wrong key sk-planted-1234"}})

    with pytest.raises(ModelRequestRefused, match=r"wrong key \[the key\]"):
        await parts_of(BridgedModel(FunctionModel(answer)), asking())


async def test_must_call_asks_for_a_call():
    """If a provider can't constrain output to a schema, a structured answer is requested as a tool call."""
    model = BridgedModel(TestModel())
    assert not model.traits.native_output
    response = await Adapter(model).evaluate(Prompt("typed", "Be brief.", output=City), "hi")
    assert isinstance(response.output, City)


async def test_a_missing_key_is_said_when_it_is_needed(monkeypatch: pytest.MonkeyPatch):
    """A model can be made without a key. Its requests are refused, and the error names the variable to set."""
    monkeypatch.delenv("TOGETHER_API_KEY", raising=False)
    model = model_named("together:deepseek-chat")
    assert isinstance(model, BridgedModel)
    with pytest.raises(ModelRequestRefused, match="TOGETHER_API_KEY"):
        await parts_of(model, asking())


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nowhere:model", "'nowhere:model' is not a model of a known provider"),
        ("nothing", "'nothing' is not a model"),
        ("mistral:small", "needs its provider's package: .*mistral"),
        (7, "7 can't be bridged"),
    ],
)
def test_what_cannot_be_bridged_is_refused_at_once(name: Any, message: str):
    """A name whose provider is unknown or lacks its package is refused at once, and so is an object that is not a model."""
    with pytest.raises(DefinitionError, match=message):
        BridgedModel(name)


def test_without_the_library_its_extra_is_named():
    """The bridge can be imported without pydantic-ai, and the error on its first use names the extra to install."""
    script = """
import sys
import handrail.models.bridge as bridge
assert not any(name.startswith("pydantic_ai") for name in sys.modules)
sys.modules["pydantic_ai.models"] = None
try:
    bridge.BridgedModel("google:gemini")
except ValueError as error:
    print(error)
"""
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=500)
    assert "pip install 'handrail[bridge]'" in run.stdout, run.stderr
