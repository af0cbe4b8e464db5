"""smolagents' ToolCallingAgent: a `Model` stub in process, and OpenAIModel over HTTP.

It is synchronous, so each run has a thread. It can't pass a context to a tool, so the tool object holds the context.
The answer is a call of `final_answer`, and results go back to the model as user text.
"""

# pyright: basic, reportMissingImports=false
# The framework is installed in its own venv, which the type checker does not see.

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from smolagents import LogLevel, Tool, ToolCallingAgent
from smolagents.models import (
    ChatMessage,
    ChatMessageToolCall,
    ChatMessageToolCallFunction,
    MessageRole,
    Model,
    TokenUsage,
)

from peer import Peer, main
from work import PROMPT, TOOL_DOC, Script


class StubModel(Model):
    def __init__(self, script: Script):
        super().__init__(model_id="stub")
        self.script = script

    def generate(self, messages, *args, **rest):
        if self.script.delay_ms:
            time.sleep(self.script.delay_ms / 1000)
        calls = [
            ChatMessageToolCall(
                function=ChatMessageToolCallFunction(name=call.name, arguments=call.args_json),
                id=call.id,
                type="function",
            )
            for call in self.script.turn(messages[-1].content).calls
        ]
        usage = TokenUsage(10, 5)
        return ChatMessage(role=MessageRole.ASSISTANT, content=None, token_usage=usage, tool_calls=calls)


class Work(Tool):
    name = "work"
    description = TOOL_DOC
    inputs = {  # noqa: RUF012 (the framework reads it from the class)
        "index": {"type": "integer", "description": "index"},
        "label": {"type": "string", "description": "label"},
    }
    output_type = "object"
    context: Any = None

    def forward(self, index: int, label: str) -> dict:
        return self.context.work(index, label)


class Smolagents(Peer):
    name = "smolagents"
    dists = ("smolagents", "openai", "pydantic", "httpx2", "httpx")
    final_tool = "final_answer"
    fresh_agent_per_run = True

    def __init__(self, options):
        super().__init__(options)
        self.pool = ThreadPoolExecutor(max(self.runs, 8) if self.scenario == "concurrency" else 1)
        self.models: dict[str, object] = {}

    def build(self, script):
        tool = Work()
        agent = ToolCallingAgent(
            model=self.model(script), verbosity_level=LogLevel.OFF, max_steps=100_000, tools=[tool]
        )
        return agent, tool

    def model(self, script):
        if not self.http:
            return StubModel(script)
        if script.model_name not in self.models:  # one model and client for all runs of a script
            from smolagents import OpenAIModel

            self.models[script.model_name] = OpenAIModel(
                script.model_name, api_base=self.base_url, api_key="x"
            )
        return self.models[script.model_name]

    async def run(self, agent, context):
        runner, tool = agent
        tool.context = context
        return await asyncio.get_running_loop().run_in_executor(self.pool, lambda: runner.run(PROMPT))

    async def close(self) -> None:
        self.pool.shutdown()


if __name__ == "__main__":
    main(Smolagents)
