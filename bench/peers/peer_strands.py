"""strands-agents: a `Model` stub in process, and OpenAIModel without streaming over HTTP.

An agent keeps its conversation, so each run needs a new agent. Its loop recurses once per turn. With Python's default
recursion limit a run fails after about 320 calls, so `growth` raises the limit.
"""

# pyright: basic, reportMissingImports=false
# The framework is installed in its own venv, which the type checker does not see.

from __future__ import annotations

import sys

from strands import Agent, ToolContext, tool
from strands.agent.conversation_manager import NullConversationManager
from strands.models.model import Model

from peer import Peer, main
from work import PROMPT, SYSTEM, TOOL_DOC, Script


class StubModel(Model):
    def __init__(self, script: Script):
        self.script = script
        self.config = {"model_id": "stub", "context_window_limit": 1_000_000}

    def update_config(self, **config):
        self.config.update(config)

    def get_config(self):
        return self.config

    async def structured_output(self, *args, **rest):
        raise NotImplementedError
        yield

    async def stream(self, messages, *args, **rest):
        newest = messages[-1]["content"][-1]
        result = newest["toolResult"]["content"][0] if "toolResult" in newest else newest["text"]
        turn = await self.script.aturn(result)
        yield {"messageStart": {"role": "assistant"}}
        for call in turn.calls:
            yield {"contentBlockStart": {"start": {"toolUse": {"name": call.name, "toolUseId": call.id}}}}
            yield {"contentBlockDelta": {"delta": {"toolUse": {"input": call.args_json}}}}
            yield {"contentBlockStop": {}}
        if not turn.calls:
            yield {"contentBlockStart": {"start": {}}}
            yield {"contentBlockDelta": {"delta": {"text": turn.text}}}
            yield {"contentBlockStop": {}}
        yield {"messageStop": {"stopReason": "tool_use" if turn.calls else "end_turn"}}
        usage = {"inputTokens": 10, "outputTokens": 5, "totalTokens": 15}
        yield {"metadata": {"usage": usage, "metrics": {"latencyMs": 0}}}


@tool(description=TOOL_DOC, context=True)
async def work(index: int, label: str, tool_context: ToolContext) -> dict:
    return tool_context.invocation_state["context"].work(index, label)


class Strands(Peer):
    name = "strands"
    dists = ("strands-agents", "openai", "pydantic", "httpx")
    fresh_agent_per_run = True

    def __init__(self, options):
        super().__init__(options)
        if self.scenario == "growth":
            sys.setrecursionlimit(50_000)
        if self.http:
            from openai import AsyncOpenAI
            from strands.models.openai import OpenAIModel

            self.openai_model = OpenAIModel
            # All runs share one client. By default the model opens a client for each request.
            self.client = AsyncOpenAI(base_url=self.base_url, api_key="x")

    def build(self, script):
        if self.http:
            model = self.openai_model(
                client=self.client, model_id=script.model_name, stream=False, context_window_limit=1_000_000
            )
        else:
            model = StubModel(script)
        return Agent(
            model=model,
            system_prompt=SYSTEM,
            callback_handler=None,
            # The default manager keeps only the last 40 messages, which would change the work.
            conversation_manager=NullConversationManager(),
            name="agent",
            tools=[work],
        )

    async def run(self, agent, context):
        return str(await agent.invoke_async(PROMPT, invocation_state={"context": context}))


if __name__ == "__main__":
    main(Strands)
