"""Scenes for model servers and in-process models to play.

A scene is a list of replies. A stage translates it for a third-party model server or for an in-process model, and
returns the model that will receive the replies. See servers.py for the servers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import httpx2
from pydantic_ai.models import create_async_httpx2_client
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

from handrail import (
    AnthropicModel,
    GeminiModel,
    LocalModel,
    OpenAIModel,
    Prompt,
    ScriptedModel,
    ToolCall,
    tool,
)
from handrail.messages import (
    AssistantMessage,
    CallAnswered,
    CallAsked,
    Model,
    ToolMessage,
    Usage,
    UserMessage,
)
from handrail.models import ModelAnswerBroken, ModelRateLimited, ModelUnavailable
from handrail.models.bridge import BridgedModel
from handrail.models.scripted import Reply, Scripted
from support import PATIENCE
from support.servers import CHAT, GEMINI, MESSAGES, RESPONSES, Aimock, Embedded, Llmock

Wire = Literal["chat", "responses", "messages", "gemini"]
SIGNATURE = "c2lnbmVkIGJ5IHRoZSBwcm92aWRlcg=="
"""The signature of the thoughts that aimock plays."""
MESSAGE = "go"
"""The user's message in every scene. The fixtures for aimock match it."""


@dataclass(frozen=True)
class Say:
    """A complete text or, with `length`, one that the length limit cuts off."""

    text: str = "One two three four five six."
    length: bool = False


@dataclass(frozen=True)
class Call:
    """Tool calls that arrive in one reply, after a thought if there is one."""

    calls: Sequence[tuple[str, dict[str, Any]]] = (("get_weather", {"city": "Oslo", "days": 2}),)
    thought: str = ""


@dataclass(frozen=True)
class Fail:
    """A response with an error status."""

    status: int
    retry_after: float | None = None


@dataclass(frozen=True)
class Fault:
    """A response that is malformed, incomplete or late."""

    kind: Literal["truncated", "cut", "malformed", "slow", "hang", "malformed arguments"]
    text: str = "One two three four five six."


Line = Say | Call | Fail | Fault


def model_of(wire: Wire, server: Aimock | Llmock | Embedded, **options: Any) -> Model:
    """Return the model for this wire, connected to this server."""
    name = options.pop("name", "smollm2" if isinstance(server, Embedded) else "gpt-test")
    if wire == MESSAGES:
        return AnthropicModel(name, base_url=server.anthropic_url, key_variable=None, **options)
    if wire == GEMINI:
        return GeminiModel(name, base_url=server.gemini_url, key_variable=None, **options)
    return OpenAIModel(name, api=wire, base_url=server.openai_url, key_variable=None, **options)


def openai_provider(url: str) -> OpenAIProvider:
    """Return pydantic-ai's provider for a server. It does not give up after five seconds without a connection."""
    clients: Any = create_async_httpx2_client
    clients.__kwdefaults__["timeout"] = httpx2.Timeout(PATIENCE)
    return OpenAIProvider(base_url=url, api_key="none")


def bridged(server: Aimock | Llmock | Embedded, **options: Any) -> Model:
    """Return a bridge to pydantic-ai's chat completions model, connected to this server."""
    provider = openai_provider(server.openai_url)
    given: dict[str, Any] = {"native_output": True, **options}
    return BridgedModel(OpenAIChatModel(given.pop("name", "gpt-test"), provider=provider), **given)


@dataclass
class Stage:
    """A server or a script that plays scenes, with the wire on which a model receives them."""

    name: str
    wire: Wire | None
    server: Aimock | Llmock | Embedded | None = None
    options: dict[str, Any] = field(default_factory=dict[str, Any])

    @property
    def is_small(self) -> bool:
        """Whether the model is the embedded one, which can't be scripted and is not very capable."""
        return self.name == "local" or isinstance(self.server, Embedded)

    def play(self, *scene: Line, **options: Any) -> Model:
        """Script the scene, with one line for each request, and return the model that plays it.

        The embedded model plays no script. For `local`, the scene only decides whether the model calls a tool first.
        """
        server = self.server
        if isinstance(server, Aimock):
            server.script([_fixture(line, number) for number, line in enumerate(scene)])
        elif isinstance(server, Llmock):
            server.script([behavior for line in scene for behavior in _behaviors(line)])
        elif self.name == "local":
            return LocalModel(
                first_call="get_weather" if any(isinstance(line, Call) for line in scene) else None
            )
        elif server is None:
            return ScriptedModel([_scripted(line) for line in scene], **options)
        assert self.wire is not None
        if self.name.startswith("bridge@"):
            return bridged(server, **{**self.options, **options})
        return model_of(self.wire, server, **{**self.options, **options})


def _fixture(line: Line, number: int) -> dict[str, Any]:
    made: dict[str, Any] = {"match": {"userMessage": MESSAGE, "sequenceIndex": number}, "chunkSize": 8}
    match line:
        case Say():
            made["response"] = {"content": line.text, "usage": {"prompt_tokens": 11, "completion_tokens": 7}}
            if line.length:
                made["response"]["finishReason"] = "length"
        case Call():
            calls = [
                {"id": f"call_{number}_{index}", "name": name, "arguments": arguments}
                for index, (name, arguments) in enumerate(line.calls)
            ]
            thought = {"reasoning": line.thought, "reasoningSignature": SIGNATURE} if line.thought else {}
            made["response"] = {"toolCalls": calls, **thought}
        case Fail():
            wait = {} if line.retry_after is None else {"retryAfter": line.retry_after}
            made["response"] = {"error": {"message": "scripted failure"}, "status": line.status, **wait}
        case Fault():
            made["response"] = {"content": line.text}
            made |= {
                "cut": {"truncateAfterChunks": 3, "latency": 20},
                "malformed": {"chaos": {"malformedRate": 1}},
                "slow": {"latency": 300},
                "hang": {"chaos": {"latencyMs": 30_000}},
            }[line.kind]
    return made


def _behaviors(line: Line) -> list[dict[str, Any]]:
    match line:
        case Say():
            return [
                {"type": "reply", "text": line.text, **({"finish_reason": "length"} if line.length else {})}
            ]
        case Call():
            calls = [{"name": name, "arguments": arguments} for name, arguments in line.calls]
            return [{"type": "reply", "tool_calls": calls}]
        case Fail():
            wait = {} if line.retry_after is None else {"retry_after": line.retry_after}
            return [{"type": "fail", "status": line.status, **wait}]
        case Fault(kind="malformed arguments"):
            call = {"name": "get_weather", "arguments": {"city": "Oslo", "days": 2}}
            return [
                {"type": "reply", "tool_calls": [call]},
                {"type": "tool_fault", "kind": "malformed_arguments"},
            ]
        case Fault(kind="hang"):
            return [{"type": "delay", "seconds": 30}, {"type": "reply", "text": line.text}]
        case Fault():
            kind = {"truncated": "truncate", "cut": "disconnect", "malformed": "malformed", "slow": "stall"}[
                line.kind
            ]
            fault: dict[str, Any] = {"type": "stream_fault", "kind": kind, "after_chunks": 5}
            if kind == "stall":
                fault["stall_seconds"] = PATIENCE
            return [{"type": "reply", "text": line.text}, fault]


def _scripted(line: Line) -> Scripted:
    match line:
        case Say():
            return Reply(line.text, usage=Usage(11, 7, 0, 0, 1), stop="length" if line.length else None)
        case Call():
            calls = [ToolCall(name, arguments) for name, arguments in line.calls]
            return Reply(calls=calls, thinking=line.thought) if line.thought else calls
        case Fail(status=429):
            return ModelRateLimited(
                "scripted:script", "scripted failure", status=429, retry_after=line.retry_after
            )
        case Fail():
            return ModelUnavailable("scripted:script", "scripted failure", status=line.status)
        case Fault(kind="malformed arguments"):
            return ToolCall("get_weather", '{"city": "Oslo", "da')
        case Fault(kind="truncated"):
            return Reply(line.text, cut=True)
        case Fault(kind="slow"):
            return Reply(line.text, delay=PATIENCE)
        case Fault(kind="hang"):
            return Reply(line.text, delay=30)
        case Fault():
            return Reply(line.text, error=ModelAnswerBroken("scripted:script", "scripted fault"))


WIRES: tuple[Wire, ...] = (CHAT, RESPONSES, MESSAGES, GEMINI)


@tool(name="get_weather")
async def weather_now(city: str) -> str:
    """Get the weather in a city."""
    return f"The weather in {city} is sunny."


SHOWN = Prompt("shown", "You are a helpful assistant.", tools=[weather_now])


EXAMPLES = [
    message
    for city in ("Paris", "Cairo", "Tokyo")
    for message in (
        UserMessage(f"What is the weather in {city}?"),
        AssistantMessage("", (CallAsked(f"call_{city}", "get_weather", f'{{"city": "{city}"}}'),)),
        ToolMessage((CallAnswered(f"call_{city}", "get_weather", "sunny"),)),
        AssistantMessage(f"It is sunny in {city}."),
    )
]
"""Example calls, which the embedded model needs to see before it calls a tool."""
