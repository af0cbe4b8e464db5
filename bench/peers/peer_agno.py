"""agno: a `Model` stub in process, and OpenAIChat over HTTP.

Telemetry is off, because it would send data about each run.
"""

# pyright: basic, reportMissingImports=false
# The framework is installed in its own venv, which the type checker does not see.

from __future__ import annotations

import os

os.environ["AGNO_TELEMETRY"] = "false"

from dataclasses import dataclass
from typing import Any

from agno.agent import Agent
from agno.metrics import MessageMetrics
from agno.models.base import Model
from agno.models.response import ModelResponse
from agno.run import RunContext

from peer import Peer, main
from work import PROMPT, SYSTEM


@dataclass
class StubModel(Model):
    id: str = "stub"
    name: str = "stub"
    provider: str = "stub"
    script: Any = None

    async def ainvoke(self, messages, *args, **rest) -> ModelResponse:
        turn = await self.script.aturn(messages[-1].content)
        return ModelResponse(
            role="assistant",
            content=turn.text,
            tool_calls=[
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.args_json},
                }
                for call in turn.calls
            ],
            response_usage=MessageMetrics(input_tokens=10, output_tokens=5, total_tokens=15),
        )

    def invoke(self, *args, **rest):
        raise NotImplementedError

    invoke_stream = ainvoke_stream = _parse_provider_response = _parse_provider_response_delta = invoke


async def work(run_context: RunContext, index: int, label: str) -> dict:
    """Do one unit of work and return its record."""
    return run_context.dependencies["context"].work(index, label)


class Agno(Peer):
    name = "agno"
    dists = ("agno", "openai", "pydantic", "httpx")

    def __init__(self, options):
        super().__init__(options)
        if self.http:
            from agno.models.openai import OpenAIChat

            self.chat_model = OpenAIChat

    def build(self, script):
        if self.http:
            model = self.chat_model(id=script.model_name, base_url=self.base_url, api_key="x")
        else:
            model = StubModel(script=script)
        return Agent(model=model, system_message=SYSTEM, telemetry=False, tools=[work])

    async def run(self, agent, context):
        return (await agent.arun(PROMPT, dependencies={"context": context})).content


if __name__ == "__main__":
    main(Agno)
