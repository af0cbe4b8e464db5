"""Scenarios of calls that a model does not make by themselves: in a script, and after it has found their tools.

The simulation crashes them at every point.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import AsyncGenerator
from typing import Any

from handrail import Adapter, CodeMode, Prompt, ToolContext, tool
from handrail.environment import LaterEnvironment
from handrail.guard import CapabilityPolicy
from handrail.messages import ModelPart, ModelRequest, Traits
from handrail.run.call import ToolCall
from handrail.testing import Person
from handrail.testing.simulation import Play, Scenario, Seen, Stage
from handrail.testing.simulation.scenario import Said, SimulatedModel
from support.strict_wires import bodies
from testing.simulated import AnyTool, Noted


def scripting_tools(stage: Stage) -> list[AnyTool]:
    world = stage.world

    @tool(effect="pure")
    def weigh(n: int) -> int:
        """Weigh something."""
        return 2 * n

    @tool(effect="staged")
    async def enter(text: str, context: ToolContext) -> None:
        """Write into the book."""
        context.filesystem.write("book.md", f"{context.filesystem.read('book.md')}{text}\n")
        context.session.dispatch(Noted(text))

    @tool(effect="idempotent")
    async def stamp(what: str, context: ToolContext) -> str:
        """Stamp something."""

        async def was_stamped() -> bool:
            return world.count("stamped", what=what) > 0

        await context.once("stamp", lambda: world.happened("stamped", what=what), probe=was_stamped)
        return what

    async def was_booked(params: Any, *, context: ToolContext) -> bool:
        return world.count("booked") > 0

    async def unbook(params: Any, value: Any, *, context: ToolContext) -> None:
        world.happened("unbooked")

    @tool(effect="compensable", compensate=unbook, probe=was_booked)
    async def book(context: ToolContext) -> str:
        """Book a table."""
        world.happened("booked")
        return "booked"

    @tool(effect="staged", capabilities={"fs.write"})
    async def sign(name: str, context: ToolContext) -> str:
        """Sign the contract, after a person has seen what changes."""
        context.filesystem.write("contract.md", f"{context.filesystem.read('contract.md')}{name}\n")
        return name

    return [weigh, enter, stamp, book, sign]


SIX_CALLS = """
weight = await weigh(n=2)
print(await book())
await enter(text=f"it weighs {weight}")
name = await sign(name="ann")
stamped = await stamp(what=name)
await enter(text=f"{stamped} has signed")
weight
"""
AT_ONCE = """
import asyncio

async def first():
    weight = await weigh(n=1)
    return [weight, await sign(name="bob"), await weigh(n=weight)]

async def second():
    await enter(text="second")
    return [await weigh(n=10), await stamp(what="second")]

print(await asyncio.gather(first(), second()))
"""


def scripting(stage: Stage) -> Play:
    """Return the play of two scripts, in each of which a person must approve a call in the middle."""
    rules = CapabilityPolicy(
        {"fs.write": "ask"}, effects={"idempotent": "allow", "compensable": "allow", "staged": "allow"}
    )
    prompt = Prompt(
        "scripts", ["You write scripts.", CodeMode()], tools=scripting_tools(stage), policies=[rules]
    )
    said = [ToolCall("run_script", {"script": script}) for script in (SIX_CALLS, AT_ONCE)]
    adapter = Adapter(
        stage.model({"You write scripts": [*said, "All is done."]}),
        journal=stage.journal,
        filesystem=stage.files,
        environment=LaterEnvironment(),
        clock=stage.clock,
        new_id=stage.new_id,
    )
    return Play(adapter, prompt, "Begin.", Person(approve=True))


def each_inner_call_made_once(seen: Seen) -> str | None:
    """Return a problem if something outside happened twice, although no other process took the run over."""
    for what, most in (("booked", 1), ("stamped", 2)):
        if seen.world.count(what) > most + (seen.overtaken and most):
            return f"{what} {seen.world.count(what)} times"
    return None


SCRIPTING = Scenario(
    name="scripts",
    play=scripting,
    files={"book.md": "# Book\n", "contract.md": "# Contract\n"},
    laws=[each_inner_call_made_once],
)


# --- searches: found tools, called one by one, with an approval, and from a script -----------------------


class Searching(SimulatedModel):
    """A simulated model that notes what it is sent."""

    def __init__(self, stage: Stage, said: Said, *, loads: bool) -> None:
        super().__init__(stage.world, said, 1.0)
        self.traits = Traits(native_output=True, loads_deferred=loads)
        self._stage = stage

    async def stream(self, request: ModelRequest, /) -> AsyncGenerator[ModelPart]:
        for wire, body in bodies(request).items():
            self._stage.world.happened("sent", wire=wire, sent=hashlib.sha256(body).hexdigest())
        async for part in super().stream(request):
            yield part


def searching(stage: Stage, *, loads: bool = False) -> Play:
    """Return the play of a run that searches its tools, and calls what it finds, once from a script."""
    rules = CapabilityPolicy(
        {"fs.write": "ask"}, effects={"idempotent": "allow", "compensable": "allow", "staged": "allow"}
    )
    tools = scripting_tools(stage)
    prompt = Prompt("searches", ["You search.", CodeMode()], tools=tools, search=True, policies=[rules])

    def found(name: str, /, **arguments: Any) -> ToolCall:
        called = {"name": name, "arguments": arguments}
        return ToolCall(name, arguments) if loads else ToolCall("call_tool", called)

    said = [
        ToolCall("search_tools", {"query": "contract"}),
        [found("enter", text="begun"), found("sign", name="ann")],
        [ToolCall("search_tools", {"query": "stamp"}), found("stamp", what="ann")],
        ToolCall("run_script", {"script": FOUND}),
        "All is done.",
    ]
    adapter = Adapter(
        Searching(stage, {"You search": said}, loads=loads),
        journal=stage.journal,
        filesystem=stage.files,
        environment=LaterEnvironment(),
        clock=stage.clock,
        new_id=stage.new_id,
    )
    return Play(adapter, prompt, "Begin.", Person(approve=True))


FOUND = """
await enter(text="found")
await stamp(what=await sign(name="bob"))
"""


def loading(stage: Stage) -> Play:
    """Return the same play with a model whose provider loads the tools."""
    return searching(stage, loads=True)


def the_same_requests(seen: Seen) -> str | None:
    """Return a problem if a request was sent that is not one of those without a crash, or if one of these is missing."""
    sent, expected = (
        {json.dumps(each.details) for each in world.all("sent")} for world in (seen.world, seen.uncrashed)
    )
    return (
        None if sent == expected else f"{len(sent - expected)} other requests, {len(expected - sent)} missing"
    )


SEARCHING, LOADING = (
    Scenario(
        name=name,
        play=play,
        files={"book.md": "# Book\n", "contract.md": "# Contract\n"},
        laws=[each_inner_call_made_once, the_same_requests],
    )
    for name, play in (("searches", searching), ("loads", loading))
)
