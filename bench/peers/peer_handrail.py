"""Handrail, through its public interface.

The context of the work reaches the tool as a resource. Every call goes through the gate with its events and its
transaction, and the session keeps the conversation. No feature is switched off.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

from handrail import Adapter, Prompt, ToolContext, tool
from handrail.messages import (
    CallPart,
    ModelPart,
    ModelRequest,
    StopPart,
    TextPart,
    ToolMessage,
    Traits,
    Usage,
    UsagePart,
)
from handrail.resources.bindings import given
from peer import Peer, main
from work import PROMPT, SYSTEM, TOOL_DOC, Context, Script

USAGE = Usage(10, 5, 0, 0, 1)


class Stub:
    """The scripted model in process, with the one method that a model needs."""

    name = "bench:stub"
    traits = Traits(native_output=True)

    def __init__(self, script: Script) -> None:
        self.script = script

    async def stream(self, request: ModelRequest, /) -> AsyncGenerator[ModelPart]:
        last = request.messages[-1]
        turn = await self.script.aturn(last.results[-1].text if isinstance(last, ToolMessage) else last.text)
        if turn.text:
            yield TextPart(turn.text)
        for index, call in enumerate(turn.calls):
            yield CallPart(index, call.id, call.name, call.args_json)
        yield UsagePart(USAGE)
        yield StopPart("calls" if turn.calls else "done")


@tool(description=TOOL_DOC)
async def work(index: int, label: str, context: ToolContext) -> dict[str, Any]:
    return context.resources.get(Context).work(index, label)


class Handrail(Peer):
    name = "handrail"
    dists = ("handrail", "pydantic", "msgspec", "aiohttp")

    def build(self, script: Script) -> Adapter:
        if not self.http:
            return Adapter(Stub(script))
        from handrail import OpenAIModel

        return Adapter(OpenAIModel(script.model_name, base_url=self.base_url))

    async def run(self, agent: Adapter, context: Context) -> str:
        response = await agent.evaluate(PROMPTED, PROMPT, resources=[given(Context, context)])
        return response.text


PROMPTED = Prompt("bench", SYSTEM, tools=[work])

if __name__ == "__main__":
    main(Handrail)
