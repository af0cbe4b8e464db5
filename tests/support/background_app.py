"""Two agents: `host` begins runs of `helper` in the background with its tool `start`."""

from __future__ import annotations

import os
from typing import Any, Literal

from handrail import (
    Agent,
    Budget,
    CapabilityPolicy,
    ScriptedModel,
    ToolCall,
    ToolContext,
    tool,
)
from handrail.messages import ModelRequest, ToolMessage

HELPER = "support.background_app:helper"
HOST = "support.background_app:host"


@tool(effect="idempotent", capabilities=["pay"])
async def pay(account: str) -> str:
    """Pay an account."""
    return f"paid {account}"


@tool(effect="pure", capabilities=["book"])
async def book(seat: str) -> str:
    """Book a seat."""
    return f"booked {seat}"


@tool(effect="pure")
async def add(number: str) -> str:
    """Add one to a number."""
    return str(int(number) + 1)


@tool(effect="staged")
async def keep(text: str, *, context: ToolContext) -> str:
    """Write a file."""
    context.filesystem.write("kept", text)
    return f"kept {text}"


@tool(effect="idempotent", capabilities=["start"])
async def start(
    message: str,
    outcome: Literal["commit", "fail", "die"] = "commit",
    tool_calls: int | None = None,
    wake: bool = False,
    agent: str = HELPER,
    files: str | None = None,
    *,
    context: ToolContext,
) -> str:
    """Begin a background run."""
    budget = None if tool_calls is None else Budget(tool_calls=tool_calls)
    begun = context.spawn(agent, message, budget=budget, wake=wake, files=files)
    if outcome == "die" and "BACKGROUND_DIES" in os.environ:
        os._exit(9)
    if outcome == "fail":
        raise ValueError("it fails after it has begun one")
    return begun.id


def help(request: ModelRequest) -> ToolCall | str:
    """Call the tool that the message names, and then repeat its result. Repeat any other message."""
    last = request.messages[-1]
    verb, _, rest = last.text.partition(" ")
    arguments = {
        "pay": {"account": rest},
        "book": {"seat": rest},
        "keep": {"text": rest},
        "add": {"number": rest},
    }
    if not isinstance(last, ToolMessage) and verb in arguments:
        return ToolCall(verb, arguments[verb])
    return last.text


def begin(request: ModelRequest) -> ToolCall | str:
    """Begin a background run with each message that is a JSON object, and repeat any other message."""
    last = request.messages[-1]
    if not isinstance(last, ToolMessage) and last.text.startswith("{"):
        return ToolCall("start", last.text)
    return last.text


helper: Agent[Any] = Agent(
    ScriptedModel(help),
    "You help.",
    name="helper",
    tools=[pay, book, keep, add],
    policies=[CapabilityPolicy({"book": "ask", "pay": "allow"})],
)
host: Agent[Any] = Agent(
    ScriptedModel(begin),
    "You host.",
    name="host",
    tools=[start],
    policies=[CapabilityPolicy({"start": "allow", "pay": "deny"})],
)


@tool(effect="pure")
async def look(context: ToolContext) -> str:
    """Look at what is left of the budget."""
    return f"{context.budget_tracker.remaining()['tool_calls']:g} calls left"


def travel(request: ModelRequest) -> ToolCall | str:
    """Begin a background run, book a seat, which needs an approval, and look at the budget. It keeps no state."""
    done = [
        each.text
        for message in request.messages
        if isinstance(message, ToolMessage)
        for each in message.results
    ]
    if len(done) < 3:
        asked = {"message": "add 1", "tool_calls": 3}
        return [ToolCall("start", asked), ToolCall("book", {"seat": "1a"}), ToolCall("look")][len(done)]
    told = sum("(helper) is done: 2" in each.text for each in request.messages)
    return f"{done[-1]}, told {told}"


TRAVELLER = "support.background_app:traveller"
traveller: Agent[Any] = Agent(
    ScriptedModel(travel),
    "You travel.",
    name="traveller",
    tools=[start, book, look],
    policies=[CapabilityPolicy({"start": "allow", "book": "ask"})],
)
