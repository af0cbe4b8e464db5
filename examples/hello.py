"""Run an agent with one tool, then show how the gate commits, undoes, isolates, refuses and stops calls.

Everything is in memory, and nobody has to answer anything. The model is scripted. To use a real model, pass its name to
`Agent`, such as "openai:gpt-5".
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Annotated

from handrail import (
    Agent,
    CapabilityPolicy,
    MemoryFilesystem,
    PathArg,
    ScriptedModel,
    Session,
    ToolCall,
    ToolContext,
    open_gate,
    tool,
)
from handrail.run.call import run_turn


@tool(effect="read")
async def fare(city: str) -> str:
    """Return the price of a ticket to a city."""
    return {"Rome": "129 euros"}.get(city, "unknown")


@dataclass(frozen=True)
class Line:
    """One line of the shopping list, which is kept in the session."""

    item: str
    count: int


@tool(effect="staged", capabilities={"fs.write"})
async def add_to_list(
    item: str, count: int, file: Annotated[str, PathArg("write")] = "list.txt", *, context: ToolContext
) -> str:
    """Add an item to the shopping list."""
    context.session.dispatch(Line(item, count))
    context.filesystem.append(file, f"{count} x {item}\n")
    if item == "durian":
        raise ValueError("the shop does not sell durians")
    return f"{count} x {item} added"


@tool(effect="irreversible", capabilities={"net"})
async def order(shop: str) -> str:
    """Order everything on the list."""
    return f"ordered at {shop}"


@tool(effect="staged", timeout=0.2)
async def wait_for_discount(context: ToolContext) -> str:
    """Wait until prices fall."""
    context.filesystem.write("discount.txt", "soon")
    await asyncio.sleep(60)
    return "cheaper now"


async def main() -> None:
    print("An agent runs a prompt on a model. It calls its tools through the gate.")
    model = ScriptedModel([ToolCall("fare", {"city": "Rome"}), "It is 129 euros."])
    agent = Agent(model, "Answer in one short sentence.", tools=[fare])
    print("  ", (await agent.run("How much is the ticket to Rome?")).text, "\n")

    session, files = Session(), MemoryFilesystem()
    gate = open_gate(
        [add_to_list, order, wait_for_discount],
        session=session,
        filesystem=files,
        policies=[CapabilityPolicy()],
    )

    def show(title: str) -> None:
        print(
            f"   files: {', '.join(files.glob('**')) or 'none'}   lines: {len(session[Line])}   ({title})\n"
        )

    print("1. A call that succeeds commits its state and its file together.")
    print("  ", (await gate.invoke("add_to_list", {"item": "bread", "count": 2})).render())
    show("kept")

    print("2. A call that fails half-way is undone. It had written both before it failed.")
    print(
        "  ", (await gate.invoke("add_to_list", {"item": "durian", "count": 1, "file": "other.txt"})).render()
    )
    show("as before")

    print(
        "3. The calls of a turn run concurrently and do not see each other's changes. A failure undoes only its own call."
    )
    turn = await run_turn(
        gate,
        [
            ToolCall("add_to_list", {"item": "milk", "count": 1, "file": "milk.txt"}),
            ToolCall("add_to_list", {"item": "durian", "count": 9, "file": "durian.txt"}),
        ],
    )
    for result in turn.results:
        print("  ", result.render())
    show("one of two kept")

    print("4. The arguments of a call are checked, and the model is told about all mistakes at once.")
    print("  ", (await gate.invoke("add_to_list", '{"itme": "eggs", "count": "six"}')).render(), "\n")

    print("5. A call that can't be undone needs approval, and nobody can be asked here.")
    print("  ", (await gate.invoke("order", {"shop": "corner shop"})).render(), "\n")

    print("6. A call that takes too long is stopped and undone.")
    print("  ", (await gate.invoke("wait_for_discount")).render())
    show("as before")


if __name__ == "__main__":
    asyncio.run(main())
