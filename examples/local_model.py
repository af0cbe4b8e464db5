"""Answer a question, extract orders and classify reviews with a model in this process, without a key or a network.

The model is SmolLM2 with 135M parameters. It is far too small to choose a tool or to calculate, but with a few examples
it can extract and classify. Its calls go through the gate like those of any model. The program takes half a minute on
one core.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from handrail import Agent, MemoryFilesystem, Session, ToolContext, ToolExample, tool
from handrail.events import ToolInvoked
from handrail.models.local import LocalModel


def hello() -> None:
    """Run the smallest agent. Its model always calls `fare` first."""

    @tool(effect="read")
    async def fare(city: str) -> str:
        """Return the price of a ticket to a city."""
        return {"Rome": "129 euros"}.get(city, "unknown")

    agent = Agent(LocalModel(first_call=fare), "Answer in one short sentence.", tools=[fare])
    print("  ", agent.run("How much is the ticket to Rome?").wait().text)


STOCK = {"desk lamps": 30, "notebooks": 200, "coffee mugs": 12}
MAILS = [
    "Hi, this is Maria Lopez, please send me 3 desk lamps.",
    "Tom Becker would like to order 12 notebooks for the office.",
    "Can you add 40 coffee mugs to my order? Thanks, Yuki Tanaka",
]


def example(mail: str, customer: str, item: str, quantity: int) -> ToolExample[Mapping[str, Any], str]:
    return ToolExample(mail, {"customer": customer, "item": item, "quantity": quantity}, "recorded")


@tool(
    effect="staged",
    examples=[
        example("Hello, Anna Berg here. I want 5 blue pens.", "Anna Berg", "blue pens", 5),
        example("Please ship 20 folders. Best, John Smith", "John Smith", "folders", 20),
    ],
)
async def record_order(customer: str, item: str, quantity: int, context: ToolContext) -> str:
    """Record one order of a customer."""
    context.filesystem.append("orders.csv", f"{customer},{item},{quantity}\n")
    if quantity > STOCK.get(item, 0):
        raise ValueError(f"only {STOCK.get(item, 0)} {item} are left")
    return f"{quantity} {item} for {customer}"


def orders() -> None:
    """Extract orders from emails with a tool. The call for an order that can't be met is undone."""
    files = MemoryFilesystem()
    model = LocalModel(first_call=record_order, max_tokens=48)
    agent = Agent(model, "You are a helpful assistant.", tools=[record_order])
    for mail in MAILS:
        session = Session()
        session.dispatcher.subscribe(ToolInvoked, lambda event: print("     ->", event.result.render()))
        print("  ", mail)
        agent.run(mail, session=session, filesystem=files).wait()
    print("\n   orders.csv:\n     ", files.read("orders.csv").strip().replace("\n", "\n      "))


SHOWN = """\
Review: A wonderful film.
Sentiment: good

Review: It broke after a day.
Sentiment: bad

Review: I love it.
Sentiment: good

Review: A waste of money.
Sentiment: bad

Review: """


def reviews() -> None:
    """Classify reviews. The answer is always one of the choices."""
    model = LocalModel()
    for review in (
        "The soup was cold and the waiter rude.",
        "Works like a charm.",
        "I will never come back.",
    ):
        found = model.complete(f"{SHOWN}{review}\nSentiment:", choices=["good", "bad"]).wait()
        print(f"   {found:5} {review}")


if __name__ == "__main__":
    print(
        f"This is {LocalModel()!r}.\n\n1. The model gets a question, makes the call it is told to make, and answers."
    )
    hello()
    print(
        "\n2. The model extracts orders from emails with a tool. The third order can't be met, so its call is undone."
    )
    orders()
    print("\n3. The model classifies reviews, after a few examples in plain text.")
    reviews()
