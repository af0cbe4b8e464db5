"""`BackgroundTools`: a section with tools that begin runs in the background, list them, wait for them, and say things to them."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Iterable, Mapping
from importlib import import_module
from typing import Annotated, Any

from pydantic import Field

from handrail.context import ToolContext, call_behind
from handrail.errors import DefinitionError
from handrail.prompt import MarkdownSection
from handrail.protocols import ToolPolicy
from handrail.run.limits import Budget
from handrail.schema.problems import describe_kind
from handrail.text.spelling import checked_arguments
from handrail.tools import Tool, tool

_TEMPLATE = """\
A background run works on its own while you go on. You are told its end before your next step. So wait for one only if you can't go on
without its answer. It sees nothing of this conversation. These can be begun: {}."""

_CAPABILITIES = frozenset({"agent"})
Id = Annotated[str, Field(description="The id of the background run.")]


def _background() -> Any:
    return import_module("handrail.fleet.background")  # agents are above sections


def _start(agents: Mapping[str, str], budget: Budget | None, wake: bool) -> Tool[Any, Any]:
    @tool(effect="idempotent", capabilities=_CAPABILITIES, description="Begin a run in the background.")
    async def background_start(
        agent: Annotated[str, Field(description="Who works in the background.")],
        message: Annotated[str, Field(description="Everything that it has to know and do.")],
        *,
        context: ToolContext,
    ) -> str:
        named = agents.get(agent, agent.partition(":")[0])  # a model names no modules
        return f"The background run {context.spawn(named, message, budget=budget, wake=wake).id} begins."

    return background_start


@tool(
    effect="read",
    description="List the background runs that were begun in this conversation: the agent and the status of each, by its id.",
)
async def background_list(context: ToolContext) -> dict[str, str]:
    return await _background().list_background(call_behind(context))


@tool(
    effect="read", timeout=700.0, description="Wait for the end of a background run, and return its answer."
)
async def background_wait(
    id: Id,
    seconds: Annotated[float, Field(description="How long to wait at most.")] = 60.0,
    *,
    context: ToolContext,
) -> str:
    found = await _background().find_background(call_behind(context), id)
    try:
        return await asyncio.wait_for(found.wait(), seconds)
    except TimeoutError:
        return f"It is still at work after {seconds:g} seconds. You are told its end."


@tool(
    effect="idempotent",
    capabilities=_CAPABILITIES,
    description="Say something to a background run while it works.",
)
async def background_say(
    id: Id,
    text: Annotated[str, Field(description="What it is told before its next step.")],
    *,
    context: ToolContext,
) -> str:
    found = await _background().find_background(call_behind(context), id)
    await found.send(text, id=context.call_id)
    return "It is told before its next step."


@tool(
    effect="idempotent",
    capabilities=_CAPABILITIES,
    description="Cancel a background run. What it has done stays.",
)
async def background_cancel(id: Id, *, context: ToolContext) -> str:
    await (await _background().find_background(call_behind(context), id)).cancel()
    return "It is cancelled, unless it was over."


_TOOLS = (background_list, background_wait, background_say, background_cancel)


@checked_arguments
@dataclasses.dataclass(frozen=True, init=False)
class BackgroundTools(MarkdownSection[Any]):
    """A section with tools that let a model begin runs in the background, list them, wait for them, say things to them, and cancel them.

    A model may begin runs of the run's workers, and of `agents`, by the names that it is told: `{"researcher": "shop.agents:researcher"}`.
    Each run has `budget` as its share of the run's budget. `wake` is as for `ToolContext.spawn`.
    """

    def __init__(
        self,
        agents: Mapping[str, str] | None = None,
        *,
        budget: Budget | None = None,
        wake: bool = False,
        policies: Iterable[ToolPolicy] = (),
        title: str = "Background runs",
        key: str = "background",
    ) -> None:
        known: Mapping[str, str] = {} if agents is None else agents
        if not isinstance(known, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]  # callers might not be type-checked
            raise DefinitionError(
                f"agents is {describe_kind(known)}. Pass a mapping from names to 'module:name': {{'helper': 'shop:helper'}}."
            )
        super().__init__(
            title=title,
            key=key,
            template=_TEMPLATE.format(", ".join([*known, "your workers"])).replace("$", "$$"),
            tools=(_start(dict(known), budget, wake), *_TOOLS),
            policies=tuple(policies),
        )
