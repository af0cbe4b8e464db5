"""Every way to nest a run or a call, behind one interface. Each leads from the model's call to a call of `probe`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import Any

from handrail import (
    Adapter,
    Agent,
    AgentContext,
    ModelSettings,
    Parked,
    Prompt,
    ScriptedModel,
    Tool,
    ToolCall,
    ToolContext,
    ToolResult,
    WorkerRegistry,
    open_gate,
    run_as_agent,
    tool,
)
from handrail.ids import random_id
from support.cards import Deal, Deck, Offer, Pick, card_game
from support.worker_folders import folder, sound

Body = Callable[[ToolContext], Awaitable[object]]

TOOLS = """
    from handrail import ToolContext, tool
    from run.nestings import PROBES

    @tool(effect="idempotent")
    async def probe(context: ToolContext) -> str:
        \"\"\"Probe.\"\"\"
        await PROBES[0](context)
        return "probed"
"""

PROBES: list[Body] = []
"""The body of the current test's probe. A worker's tools are in a file, whose code can reach the body only through this list."""

DEPTHS = {
    "call": 1,
    "call_worker": 2,
    "worker as tool": 1,
    "agent as tool": 1,
    "context.adapter.evaluate": 1,
    "Adapter.evaluate": 1,
    "prompt_model": 1,
    "run_as_agent": 1,
    "run_as_agent of a handoff": 2,
    "open_gate": 1,
    "start of a handoff": 1,
    "finish of a handoff": 1,
}
"""The ways to nest, each with the depth of `probe` below the model's call."""

OWN_MODEL = {"agent as tool", "Adapter.evaluate", "run_as_agent", "run_as_agent of a handoff"}
"""The ways that name their own model."""

BY_HAND = [
    "context.adapter.evaluate",
    "Adapter.evaluate",
    "run_as_agent",
    "run_as_agent of a handoff",
    "open_gate",
    "start of a handoff",
    "finish of a handoff",
]
"""The ways that take arguments for the nested run."""

IN_A_FILE = ["call_worker", "worker as tool"]
"""The ways whose nested run is described in a worker's file."""


class Nesting:
    """One way to nest, used by a run that has its own model and is nested in a root run.

    `body` is what `probe` does.
    """

    def __init__(self, way: str, at: Path, body: Body, inner_calls: int = 1, limits: str = "{}") -> None:
        self.way = way
        self.given: dict[str, Any] = {}
        """Arguments for the nested run, for the ways in `BY_HAND`."""
        self.asked: list[tuple[str, str]] = []
        """The model's name and the last line of the system prompt, for each request to a model."""
        self.settings: list[tuple[str, ModelSettings]] = []
        """The last line of the system prompt and the settings, for each request to a model."""
        self.middle_settings = ModelSettings()
        self.ran = 0
        self.inner_calls = inner_calls
        self._body = body
        PROBES[:] = [self._run]
        front = f"---\ntools: [probe]\nworkers: [leaf]\npolicies: []\nlimits: {limits}\ndescription: Probes.\n---\nInner."
        # `sound` loads all workers to check them, which most ways don't need.
        write = sound if way in IN_A_FILE else folder
        self.workers: WorkerRegistry = write(at, TOOLS, inner=front, leaf="---\n---\nLeaf.")

    async def _run(self, context: ToolContext) -> None:
        self.ran += 1
        await self._body(context)

    @property
    def probe(self) -> Tool[Any, Any]:
        @tool(effect="idempotent")
        async def probe(context: ToolContext) -> str:
            """Run the test's body."""
            await self._run(context)
            return "probed"

        return probe

    def model(self, name: str) -> ScriptedModel:
        """Return a model whose answers depend on the last line of the system prompt."""
        calls = [0]

        def answer(request: Any) -> Any:
            system = request.system.strip().splitlines()[-1]
            self.asked.append((name, system))
            self.settings.append((system, request.settings))
            first = len(request.messages) == 1
            if system == "Root.":
                return ToolCall("middle", {}) if first else "root done"
            if system == "Middle.":
                name_of, arguments = self.called
                return ToolCall(name_of, arguments) if first else "middle done"
            if system == "Inner." and calls[0] < self.inner_calls:
                calls[0] += 1
                return ToolCall("probe", {})
            return '{"index": 0}' if system == "Inner." and self.way == "prompt_model" else '"done"'

        return ScriptedModel(answer, name=f"scripted:{name}")

    @property
    def called(self) -> tuple[str, dict[str, str]]:
        """The name and the arguments of the model's call that leads to the nested run or call."""
        if self.way == "worker as tool":
            return "inner", {"input": "go"}
        return "outer", {"message": "go"} if self.way == "agent as tool" else {}

    def outer(self, resources: Iterable[Any] = ()) -> Tool[Any, Any]:
        """Return the tool that `called` names. The nested run binds `resources`, if this way to nest takes any."""
        probe, own = self.probe, self.model("own")
        inner = Prompt("inner", "Inner.", tools=[probe], resources=resources)
        if self.way == "worker as tool":
            return self.workers.tool("inner")
        if self.way == "agent as tool":
            prompt = Prompt("outer", "Inner.", tools=[probe], resources=resources)
            return Agent(own, prompt, description="Probes.").as_tool()
        if self.way == "prompt_model":

            @tool(run_mode="agent")
            async def outer(context: AgentContext) -> str:
                """Ask a model that may call `probe`."""
                return str(await context.prompt_model("go", Pick, system="Inner.", tools=[probe]))

            return outer

        async def choose(offer: Offer, *, context: ToolContext) -> Pick:
            (await context.call("probe")).unwrap()
            return Pick(0)

        async def begin(deal: Deal, *, context: ToolContext) -> Parked[Deck, Offer]:
            await self._run(context)
            return Parked(Deck([]), Offer(1))

        async def end(deck: Deck, pick: Pick, *, context: ToolContext) -> ToolResult[str]:
            await self._run(context)
            return ToolResult.ok("ended")

        async def nest(context: ToolContext) -> object:
            if self.way == "call":
                return (await context.call("probe")).unwrap()
            if self.way == "call_worker":
                return await context.call_worker("inner", "go")
            if self.way == "context.adapter.evaluate":
                return await context.adapter.evaluate(inner, "go", **self.given)
            if self.way == "Adapter.evaluate":
                given = dict(self.given)
                by_hand = Adapter(own, workers=given.pop("workers", None))
                return await by_hand.evaluate(inner, "go", **given)
            if self.way == "run_as_agent":
                return await run_as_agent(probe, model=own, resources=resources, **self.given)
            if self.way == "open_gate":
                gate = open_gate([probe], resources=resources, **self.given)
                result = await gate.invoke("probe")
                await gate.close()
                return result.unwrap()
            if self.way == "start of a handoff":
                half = card_game("probe", before=begin, effect="idempotent")
                return await half.start(Deal(), resources=resources, **self.given)
            if self.way == "finish of a handoff":
                half = card_game("probe", after=end, effect="idempotent")
                parked = Parked(Deck([]), Offer(1), random_id())
                return await half.finish(parked, Pick(0), resources=resources, **self.given)
            game = card_game(client=choose, effect="idempotent")
            return await run_as_agent(
                game, Offer(1), model=own, tools=[probe], resources=resources, **self.given
            )

        @tool(name="outer")
        async def nesting(context: ToolContext) -> str:
            """Nest in the way under test."""
            await nest(context)
            return "nested"

        return nesting

    async def run(
        self,
        resources: Iterable[Any] = (),
        policies: Iterable[Any] = (),
        *,
        outer_resources: Iterable[Any] = (),
        depth_limit: int = 9,
        **options: Any,
    ) -> Any:
        """Run everything, and return the root run's response. `resources` are passed to `outer`."""
        tools = [self.outer(resources), *([self.probe] if self.way == "call" else [])]
        chosen = self.model("chosen")

        @tool
        async def middle(context: ToolContext) -> str:
            """Evaluate a prompt with its own model."""
            return (
                await context.adapter.evaluate(
                    Prompt("m", "Middle.", tools=tools, model_settings=self.middle_settings),
                    "go",
                    model=chosen,
                )
            ).text

        prompt = Prompt("root", "Root.", tools=[middle], policies=policies)
        adapter = Adapter(self.model("root"), workers=self.workers, depth_limit=depth_limit)
        return await adapter.evaluate(prompt, "go", resources=outer_resources, **options)
