"""The scenario our own simulation crashes everywhere: a bit of everything that a run can leave half done."""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import BaseModel

from handrail import Adapter, Prompt, Tool, ToolContext, tool
from handrail.dispatch.turn import ToolCall
from handrail.environment.later import LaterEnvironment
from handrail.guard import CapabilityPolicy
from handrail.testing import Person
from handrail.testing.simulation import Play, Scenario, Seen, Stage, World

SECRET = "the supplier's own price is 3"


@dataclass(frozen=True)
class Noted:
    """An event of the tools."""

    text: str


class Colour(BaseModel):
    """What somebody picks."""

    name: str


def research_tools(stage: Stage) -> list[Tool]:
    @tool(effect="staged")
    async def jot(text: str, context: ToolContext) -> str:
        """Note something down."""
        context.session.dispatch(Noted(text))
        context.filesystem.write("research/notes.md", f"{text}\n")
        return f"noted {text}"

    @tool(effect="read")
    async def notes(context: ToolContext) -> str:
        """Read the notes."""
        return context.filesystem.read("research/notes.md").strip()

    return [jot, notes]


def shop_tools(stage: Stage) -> list[Tool]:
    world = stage.world
    inner = Prompt("research", "You research one thing.", tools=research_tools(stage))

    @tool(effect="idempotent")
    async def research(topic: str, context: ToolContext) -> str:
        """Let another agent find out, and somebody choose."""
        found = await context.adapter.evaluate(inner, f"Find out about {topic}.")
        assert context.wait_for is not None
        colour = await context.wait_for("colour", {"found": found.text}, Colour)
        told = await context.call("jot_down", text=f"{topic} in {colour.name}")
        return f"{found.text} {colour.name} {told.message}"

    @tool(effect="staged")
    async def jot_down(text: str, context: ToolContext) -> str:
        """Write it into the book."""
        book = context.filesystem.read("book.md")
        context.filesystem.write("book.md", f"{book}{text}\n")
        context.filesystem.write("last.md", text)
        context.session.dispatch(Noted(text))
        return f"wrote {text}"

    @tool(effect="idempotent")
    async def pay(amount: int, context: ToolContext) -> str:
        """Pay the supplier."""
        world.happened("asked to pay", amount=amount)

        async def transfer() -> str:
            world.happened("paid", amount=amount)
            return "receipt 17"

        async def was_paid() -> bool:
            return world.count("paid", amount=amount) > 0

        receipt = await context.once("transfer", transfer, probe=was_paid)
        context.filesystem.write("paid.md", f"{amount}\n")
        return f"paid {amount}: {receipt or 'the receipt is with the bank'}"

    @tool
    async def send_mail(to: str, context: ToolContext) -> str:
        """Send the order."""
        world.happened("mailed", to=to)
        return f"sent to {to}"

    @tool(effect="pure")
    def price() -> int:
        """What it costs."""
        return 4

    return [research, jot_down, pay, send_mail, price]


SHOP = [
    [ToolCall("price"), ToolCall("research", {"topic": "paint"})],
    [ToolCall("jot_down", {"text": "ordered"}), ToolCall("send_mail", {"to": "supplier"})],
    ToolCall("pay", {"amount": 4}),
    ToolCall("jot_down", {"text": "all is paid"}),
    "The paint is ordered.",
]
RESEARCH = [ToolCall("jot", {"text": "paint dries"}), ToolCall("notes"), "Paint dries."]


def play(stage: Stage) -> Play:
    """The shop orders paint."""
    prompt = Prompt(
        "shop",
        "You run a shop.",
        tools=shop_tools(stage),
        policies=[CapabilityPolicy(effects={"idempotent": "allow"})],
    )
    adapter = Adapter(
        stage.model({"You run a shop": SHOP, "You research": RESEARCH}),
        journal=stage.journal,
        filesystem=stage.files,
        environment=LaterEnvironment(),
        clock=stage.clock,
        new_id=stage.new_id,
    )
    return Play(adapter, prompt, "Order paint.", Person(approve=True, answers={"colour": {"name": "blue"}}))


def paid_at_most_once(seen: Seen) -> str | None:
    """The bank knows whether it was paid, so it never is twice, unless two processes are at it at once."""
    paid = seen.world.count("paid")
    return None if paid == 1 or (seen.overtaken and paid == 2) else f"it was paid {paid} times"


def mailed_at_most_once(seen: Seen) -> str | None:
    mailed = seen.world.count("mailed")
    return None if mailed <= 1 else f"the mail was sent {mailed} times"


SHOPPING = Scenario(
    name="a shop orders paint",
    play=play,
    files={"book.md": "# Book\n", "other.txt": "nobody touches this\n"},
    laws=[paid_at_most_once, mailed_at_most_once],
    secrets=[SECRET],
)
