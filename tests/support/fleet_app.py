"""An app for workers. Its tools, except `keep`, write what they do to the file that `FLEET_LOG` names."""

import asyncio
import os
import socket
from dataclasses import dataclass

from handrail import (
    Adapter,
    Prompt,
    RateLimitPolicy,
    ScriptedModel,
    ToolCall,
    ToolContext,
    UserContext,
    tool,
)
from handrail.messages import ModelRequest, ToolMessage, UserMessage


def note(what: str) -> None:
    fd = os.open(os.environ["FLEET_LOG"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.write(fd, f"{what}\n".encode())
    os.close(fd)


@tool(effect="idempotent")
async def pay(account: str) -> str:
    """Pay an account."""
    note(f"pay {account} {socket.gethostname()}")
    return f"paid {account}"


@tool
async def ship(parcel: str) -> str:
    """Ship a parcel, once."""
    note(f"ship {parcel}")
    return f"shipped {parcel}"


@tool(effect="pure")
async def sleep(seconds: float) -> str:
    """Wait."""
    note("asleep")
    try:
        await asyncio.sleep(seconds)
    except asyncio.CancelledError:
        note("woken")
        raise
    return "rested"


@tool(effect="pure")
async def doze() -> str:
    """Wait until the file `$FLEET_LOG.wake` exists."""
    note("asleep")
    while not os.path.exists(f"{os.environ['FLEET_LOG']}.wake"):
        await asyncio.sleep(0.005)
    return "rested"


@dataclass
class Choice:
    name: str


@tool(effect="pure")
async def choose(what: str, *, context: UserContext) -> str:
    """Ask a person."""
    chosen = await context.wait_for("pick", {"what": what}, Choice)
    note(f"chose {chosen.name}")
    return f"chose {chosen.name}"


@tool(effect="pure")
async def hurry(what: str, *, context: UserContext) -> str:
    """Ask a person, who has an hour to answer."""
    note(f"hurry {what}")
    return (await context.wait_for("pick", {"what": what}, Choice, timeout=3600)).name


@tool(effect="staged")
async def keep(text: str, *, context: ToolContext) -> str:
    """Add a line to the file `kept`."""
    files = context.filesystem
    files.append("kept", f"{text}\n")
    return " ".join(files.read("kept").split())


def answer(request: ModelRequest) -> ToolCall | str:
    """Answer as the model. On `pay X`, `ship X`, `sleep N`, `doze`, `choose X`, `hurry X` or `keep X`, call that tool, then repeat its result.

    Any other message is repeated, with the number of the turn.
    """
    last = request.messages[-1]
    if isinstance(last, ToolMessage):
        return f"Result: {last.text}"
    said = [each.text for each in request.messages if isinstance(each, UserMessage) and not each.by_run]
    verb, _, rest = said[-1].partition(" ")
    calls = {
        "pay": ("account", rest),
        "ship": ("parcel", rest),
        "choose": ("what", rest),
        "hurry": ("what", rest),
        "keep": ("text", rest),
        "sleep": ("seconds", 0.0),
    }
    if verb == "doze":
        return ToolCall(verb)
    if verb in calls:
        name, value = calls[verb]
        return ToolCall(verb, {name: float(rest) if verb == "sleep" else value})
    return f"Turn {len(said)}: {said[-1]}"


adapter = Adapter(ScriptedModel(answer))
prompt = Prompt(
    "shop",
    "You run a shop.",
    tools=[pay, ship, sleep, doze, choose, hurry, keep],
    policies=[RateLimitPolicy(2, 3600.0, tools={"choose"})],
)
