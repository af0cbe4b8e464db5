"""pydantic-ai: FunctionModel in process, and OpenAIChatModel over HTTP."""

# pyright: basic, reportMissingImports=false
# The framework is installed in its own venv, which the type checker does not see.

from __future__ import annotations

from pydantic_ai import Agent, RunContext, UsageLimits
from pydantic_ai.messages import ModelResponse, TextPart, ToolCallPart
from pydantic_ai.models.function import FunctionModel
from pydantic_ai.usage import RequestUsage

from peer import Peer, main
from work import PROMPT, SYSTEM, TOOL_DOC, Context, Script

NO_LIMIT = UsageLimits(request_limit=None)  # the default stops at 50 requests


def stub(script: Script) -> FunctionModel:
    async def answer(messages, info) -> ModelResponse:
        turn = await script.aturn(messages[-1].parts[-1].content)
        # The usage is given, because FunctionModel would otherwise estimate it from the whole history.
        usage = RequestUsage(input_tokens=10, output_tokens=5)
        if turn.calls:
            parts = [ToolCallPart(call.name, call.args_json, call.id) for call in turn.calls]
            return ModelResponse(parts, usage=usage)
        return ModelResponse([TextPart(turn.text or "")], usage=usage)

    return FunctionModel(answer, model_name="stub")


class PydanticAI(Peer):
    name = "pydantic_ai"
    dists = ("pydantic-ai-slim", "pydantic", "openai", "httpx2")

    def __init__(self, options):
        super().__init__(options)
        if self.http:
            from pydantic_ai.models.openai import OpenAIChatModel
            from pydantic_ai.providers.openai import OpenAIProvider

            self.provider = OpenAIProvider(base_url=self.base_url, api_key="x")
            self.chat_model = OpenAIChatModel

    def build(self, script):
        if self.http:
            model = self.chat_model(script.model_name, provider=self.provider)
        else:
            model = stub(script)
        agent = Agent(model, deps_type=Context, system_prompt=SYSTEM)

        @agent.tool(description=TOOL_DOC)
        async def work(ctx: RunContext[Context], index: int, label: str) -> dict:
            return ctx.deps.work(index, label)

        return agent

    async def run(self, agent, context):
        return (await agent.run(PROMPT, deps=context, usage_limits=NO_LIMIT)).output


if __name__ == "__main__":
    main(PydanticAI)
