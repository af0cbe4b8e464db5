"""langchain's create_agent (langgraph): a BaseChatModel stub in process, and ChatOpenAI over HTTP."""

# pyright: basic, reportMissingImports=false
# The framework is installed in its own venv, which the type checker does not see.

from __future__ import annotations

import os

os.environ["LANGSMITH_TRACING"] = "false"

from typing import Any

from langchain.agents import create_agent
from langchain.tools import ToolRuntime, tool
from langchain_core.language_models.chat_models import BaseChatModel
from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.outputs import ChatGeneration, ChatResult

from peer import Peer, main
from work import PROMPT, SYSTEM, TOOL_DOC, Context

CONFIG = {"recursion_limit": 100_000}


class StubChat(BaseChatModel):
    script: Any

    @property
    def _llm_type(self) -> str:
        return "bench-stub"

    def bind_tools(self, tools, **rest):
        # As in ChatOpenAI, tools are converted when they are bound, not on every turn.
        from langchain_core.utils.function_calling import convert_to_openai_tool

        rest.pop("tool_choice", None)
        return self.bind(tools=[convert_to_openai_tool(each) for each in tools], **rest)

    def _generate(self, messages, stop=None, run_manager=None, **rest):
        raise NotImplementedError

    async def _agenerate(self, messages, stop=None, run_manager=None, **rest) -> ChatResult:
        turn = await self.script.aturn(messages[-1].content)
        message = AIMessage(
            content=turn.text or "",
            tool_calls=[
                {"name": call.name, "args": call.args, "id": call.id, "type": "tool_call"}
                for call in turn.calls
            ],
            usage_metadata={"input_tokens": 10, "output_tokens": 5, "total_tokens": 15},
        )
        return ChatResult(generations=[ChatGeneration(message=message)])


@tool(description=TOOL_DOC)
async def work(index: int, label: str, runtime: ToolRuntime[Context]) -> dict:
    return runtime.context.work(index, label)


class LangGraph(Peer):
    name = "langgraph"
    dists = ("langchain", "langgraph", "langchain-core", "langchain-openai", "openai", "pydantic")

    def __init__(self, options):
        super().__init__(options)
        if self.http:
            from langchain_openai import ChatOpenAI

            self.chat_model = ChatOpenAI

    def build(self, script):
        if self.http:
            model = self.chat_model(
                model=script.model_name, base_url=self.base_url, api_key="x", use_responses_api=False
            )
        else:
            model = StubChat(script=script)
        return create_agent(model, system_prompt=SYSTEM, context_schema=Context, tools=[work])

    async def run(self, agent, context):
        state = await agent.ainvoke({"messages": [HumanMessage(PROMPT)]}, CONFIG, context=context)
        return state["messages"][-1].content


if __name__ == "__main__":
    main(LangGraph)
