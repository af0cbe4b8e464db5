"""openai-agents: a `Model` stub in process, and OpenAIChatCompletionsModel over HTTP.

Tracing is off, because its exporter sends data to the provider.
"""

# pyright: basic, reportMissingImports=false
# The framework is installed in its own venv, which the type checker does not see.

from __future__ import annotations

import os

os.environ["OPENAI_AGENTS_DISABLE_TRACING"] = "1"

from agents import Agent, Model, ModelResponse, RunContextWrapper, Runner, Usage, function_tool
from openai.types.responses import ResponseFunctionToolCall, ResponseOutputMessage, ResponseOutputText

from peer import Peer, main
from work import PROMPT, SYSTEM, TOOL_DOC, Context, Script


class StubModel(Model):
    def __init__(self, script: Script):
        self.script = script

    async def get_response(
        self, system_instructions, input, model_settings, tools, output_schema, handoffs, tracing, **rest
    ) -> ModelResponse:
        newest = input if isinstance(input, str) else input[-1].get("output", input[-1].get("content"))
        turn = await self.script.aturn(newest)
        output: list = [
            ResponseFunctionToolCall(
                call_id=call.id, name=call.name, arguments=call.args_json, type="function_call"
            )
            for call in turn.calls
        ]
        if turn.text:
            text = ResponseOutputText(text=turn.text, type="output_text", annotations=[])
            output.append(
                ResponseOutputMessage(
                    id="msg", role="assistant", status="completed", type="message", content=[text]
                )
            )
        usage = Usage(requests=1, input_tokens=10, output_tokens=5, total_tokens=15)
        return ModelResponse(output=output, usage=usage, response_id=None)

    def stream_response(self, *args, **rest):
        raise NotImplementedError


@function_tool(description_override=TOOL_DOC)
async def work(ctx: RunContextWrapper[Context], index: int, label: str) -> dict:
    return ctx.context.work(index, label)


class OpenAIAgents(Peer):
    name = "openai_agents"
    dists = ("openai-agents", "openai", "pydantic", "httpx2")

    def __init__(self, options):
        super().__init__(options)
        if self.http:
            from agents import OpenAIChatCompletionsModel
            from openai import AsyncOpenAI

            self.client = AsyncOpenAI(base_url=self.base_url, api_key="x")
            self.chat_model = OpenAIChatCompletionsModel

    def build(self, script):
        if self.http:
            model = self.chat_model(model=script.model_name, openai_client=self.client)
        else:
            model = StubModel(script)
        return Agent[Context](name="agent", instructions=SYSTEM, model=model, tools=[work])

    async def run(self, agent, context):
        # The default stops at 10 turns.
        return (await Runner.run(agent, PROMPT, context=context, max_turns=10_000)).final_output


if __name__ == "__main__":
    main(OpenAIAgents)
