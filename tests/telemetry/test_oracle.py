"""Our spans beside those of OpenTelemetry's own emitter for GenAI, `opentelemetry-util-genai`, for the same run."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest

from handrail import Adapter, Prompt, ScriptedModel, ToolCall, tool
from handrail.messages import Usage
from handrail.models.scripted import Reply
from handrail.telemetry import names
from support.traced import Seen, traced

ONLY_OURS = {
    names.PROVIDER_NAME: "on the agent too: the emitter has it only for agents elsewhere, and backends group by it",
    names.RESPONSE_FINISH_REASONS: "the emitter takes it from output messages, if it is given some",
    names.USAGE_CACHE_READ_INPUT_TOKENS: "on the agent: the emitter counts the cache only for agents elsewhere",
    names.USAGE_CACHE_WRITE_INPUT_TOKENS: "as above",
    names.TOOL_TYPE: "the emitter sets it only if it is told",
}
"""Attributes of the conventions that only our spans have, with the reason. Those that begin with `handrail.` are always ours."""


@tool(effect="pure")
async def greet(name: str) -> str:
    """Greet somebody."""
    return f"Hello, {name}."


async def ours(seen: Seen) -> str:
    """Run an agent with one call, and return the id of its session."""
    usage = Usage(input=10, output=5, cached=4, cache_writes=2, requests=1)
    script = [
        Reply(calls=[ToolCall("greet", {"name": "Ada"}, id="c1")], usage=usage),
        Reply("Done.", usage=usage),
    ]
    adapter = Adapter(ScriptedModel(script, name="openai:gpt"), max_tokens=100, temperature=0.5)
    response = await adapter.evaluate(Prompt("host", "Greet.", tools=[greet]), "Greet Ada.")
    return response.session.id


def theirs(seen: Seen, session: str) -> None:
    """Emit the same run with OpenTelemetry's emitter."""
    handler: Any = import_module("opentelemetry.util.genai.handler").TelemetryHandler(
        tracer_provider=seen.provider
    )

    def ask() -> None:
        with handler.inference("openai", request_model="gpt", conversation_id=session) as request:
            request.max_tokens, request.temperature = 100, 0.5
            request.response_model_name = "gpt"
            request.input_tokens, request.output_tokens = 10, 5
            request.cache_read_input_tokens, request.cache_write_input_tokens = 4, 2
            request.output_type = "text"

    with handler.invoke_local_agent(request_model="gpt", agent_name="host", conversation_id=session) as agent:
        agent.input_tokens, agent.output_tokens = 20, 10
        ask()
        with handler.tool("greet") as call:
            call.tool_call_id = "c1"
        ask()


@pytest.mark.parametrize("name", ["invoke_agent host", "chat gpt", "execute_tool greet"])
async def test_our_spans_are_those_of_opentelemetrys_emitter(name: str) -> None:
    """Names, kinds and nesting are equal, and so is every attribute that the emitter sets. What only ours have is listed."""
    with traced() as seen:
        session = await ours(seen)
        own, own_tree = seen.all(name), seen.tree()
        seen.clear()
        theirs(seen, session)
        reference, tree = seen.all(name), seen.tree()
    assert own_tree == tree
    assert [(span.name, span.kind) for span in own] == [(span.name, span.kind) for span in reference]
    for mine, other in zip(own, reference, strict=True):
        common = {key: value for key, value in mine.attributes.items() if not key.startswith("handrail.")}
        missing = {key: value for key, value in other.attributes.items() if common.get(key) != value}
        assert missing == {}
        assert common.keys() - other.attributes.keys() <= ONLY_OURS.keys()
