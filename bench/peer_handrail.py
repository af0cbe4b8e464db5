"""Handrail among its peers: the same work as theirs, through Handrail's own public interface.

It runs inside the peers' bench, which brings `common.py` (the work, the checks, the scenarios);
`bench/README.md` says how. The context of the work reaches a tool as a resource; every call goes
through the gate as it would anywhere.
"""

# pyright: reportMissingImports=false, reportUnknownParameterType=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false, reportUntypedBaseClass=false
# What comes from `common` has no types here.

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from common import PROMPT, SYSTEM, TOOL_DOC, Ctx, Peer, Report, Script, Spec, main

from handrail import Adapter, Binding, Prompt, ToolContext, tool
from handrail.messages import (
    AssistantMessage,
    CallPart,
    ModelPart,
    ModelRequest,
    StopPart,
    TextPart,
    ToolMessage,
    Traits,
    Usage,
    UsagePart,
    UserMessage,
)
from handrail.resources.registry import given

USAGE = Usage(10, 5, 0, 0, 1)


class Stub:
    """The scripted model, through the one method a model has."""

    name = "bench:stub"
    traits = Traits(native_output=True)

    def __init__(self, script: Script) -> None:
        self.script = script

    async def stream(self, request: ModelRequest) -> AsyncIterator[ModelPart]:
        last = request.messages[-1]
        results = last.results if isinstance(last, ToolMessage) else ()
        if self.script.spec.kind == "fan":
            turn = await self.script.aturn("", len(results))
        else:
            turn = await self.script.aturn(results[-1].text if results else last.text)
        if turn.text:
            yield TextPart(turn.text)
        for index, call in enumerate(turn.calls):
            yield CallPart(index, call.id, call.name, call.args_json)
        yield UsagePart(USAGE)
        yield StopPart("calls" if turn.calls else "done")


class Agent:
    def __init__(self, adapter: Adapter, prompt: Prompt[Any]) -> None:
        self.adapter = adapter
        self.prompt = prompt


class Handrail(Peer):
    name = "handrail"
    dists = ("handrail", "pydantic", "msgspec", "aiohttp")
    imports = "from handrail import Adapter, Prompt, ToolContext, tool"
    imports_http = imports + "\nfrom handrail import OpenAIModel\nimport aiohttp"

    def model(self, spec: Spec) -> Any:
        script = self.script(spec)
        if not self.http:
            return Stub(script)
        from handrail import OpenAIModel

        return OpenAIModel(script.model_name, base_url=self.base_url)

    def build(self, spec: Spec) -> Agent:
        @tool(description=TOOL_DOC)
        async def work(index: int, label: str, context: ToolContext) -> dict[str, Any]:
            return context.resources.get(Ctx).work(index, label)

        @tool(description=TOOL_DOC)
        async def slow_work(index: int, label: str, context: ToolContext) -> dict[str, Any]:
            return await context.resources.get(Ctx).slow_work(index, label)

        adapter = Adapter(self.model(spec), depth_limit=20)
        if spec.kind == "nest":
            child = self.build(spec.child)

            @tool(name=spec.delegate_tool, description="Delegate a task.")
            async def delegate(task: str, context: ToolContext) -> str:
                answer = await context.adapter.evaluate(child.prompt, task, model=child.adapter.model)
                return answer.text

            return Agent(adapter, Prompt("bench", SYSTEM, tools=[delegate]))
        if spec.kind == "struct":
            return Agent(adapter, Prompt("bench", SYSTEM, output=Report))
        return Agent(adapter, Prompt("bench", SYSTEM, tools=[slow_work if spec.kind == "fan" else work]))

    async def run(self, agent: Agent, spec: Spec, ctx: Ctx, history: Any = None) -> Any:
        bindings: list[Binding[Any]] = [given(Ctx, ctx)]
        response = await agent.adapter.evaluate(
            agent.prompt, PROMPT, resources=bindings, history=history or ()
        )
        return response.output if spec.kind == "struct" else response.text

    def history(self, m: int) -> Any:
        kinds = (UserMessage, AssistantMessage)
        return [kinds[i % 2](f"message {i} " + "x" * 80) for i in range(m)]


if __name__ == "__main__":
    main(Handrail)
