"""The app whose runs the journals of released versions contain. Every version that wrote one must be able to import it.

`answer` stands in for the model. It makes the calls that the newest message names, one after another, and then says what they returned.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from handrail import (
    Adapter,
    Handoff,
    LaterEnvironment,
    Parked,
    PolicyDecision,
    Prompt,
    ScriptedModel,
    ToolCall,
    ToolContext,
    ToolResult,
    UserContext,
    kept,
    tool,
)
from handrail.guard import Trigger
from handrail.messages import ModelRequest, ToolMessage, UserMessage
from handrail.question import Quorum


@kept(key=lambda noted: noted.topic)
@dataclass(frozen=True)
class Noted:
    """A note; a newer one on the same topic replaces it."""

    topic: str
    text: str


@dataclass(frozen=True)
class Sold:
    """A sale."""

    what: str


@dataclass
class Choice:
    """What a person chooses."""

    name: str


@dataclass
class Till:
    """The private part of a handoff."""

    coins: int


@dataclass
class Bill:
    """The public part of a handoff."""

    cents: int


def world(what: str) -> None:
    """Note an effect in the file that `SHOP_WORLD` names."""
    fd = os.open(os.environ["SHOP_WORLD"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.write(fd, f"{what}\n".encode())
    os.close(fd)


@tool(effect="staged")
async def note(topic: str, text: str, *, context: ToolContext) -> str:
    """Note something down."""
    context.session.dispatch(Noted(topic, text))
    return f"noted {text}"


@tool(effect="staged")
async def write(path: str, text: str, *, context: ToolContext) -> str:
    """Write a file."""
    context.filesystem.write(path, text)
    return f"wrote {path}"


@tool(effect="read")
async def read(path: str, *, context: ToolContext) -> str:
    """Read a file."""
    return str(context.filesystem.read(path))


@tool
async def sell(what: str, *, context: ToolContext) -> str:
    """Sell something, which can't be taken back."""
    context.session.dispatch(Sold(what))
    world(f"sold {what}")
    return f"sold {what}"


@tool(effect="idempotent")
async def pay(what: str, *, context: ToolContext) -> str:
    """Pay for something."""
    await context.once("pay", lambda: world(f"paid {what}"))
    return f"paid {what}"


@tool(effect="pure")
async def choose(what: str, *, context: UserContext) -> str:
    """Ask a person."""
    return f"chose {(await context.wait_for('pick', {'what': what}, Choice)).name}"


@tool(effect="staged")
async def nested(what: str, *, context: ToolContext) -> str:
    """Write a file and ask, in inner calls."""
    written = await context.call("write", path=f"{what}.txt", text=what)
    chosen = await context.call("choose", what=what)
    return f"{written.render()}; {chosen.render()}"


@tool(effect="pure")
async def linger() -> str:
    """Block in a process that is to be killed meanwhile."""
    if "SHOP_LINGERS" in os.environ:
        world("lingers")
        time.sleep(600)  # the process is killed
    return "rested"


async def take_back(params: Any, value: Any, *, context: ToolContext) -> None:
    """Undo a loan."""
    world(f"took back {value}")


@tool(effect="compensable", compensate=take_back)
async def lend(what: str) -> str:
    """Lend something."""
    world(f"lent {what}")
    return f"lent {what}"


cash = Handoff("cash", "Let a person pay in cash.", params=Bill)


@cash.before
async def ask_cash(bill: Bill, *, context: ToolContext) -> Parked[Till, Bill]:
    """Show the bill."""
    world(f"opened the till for {bill.cents}")
    return Parked(Till(17), bill)


@cash.after
async def take_cash(till: Till, paid: Bill, *, context: ToolContext) -> ToolResult[str]:
    """Take the money."""
    world(f"took {paid.cents} into the till with {till.coins}")
    return ToolResult.ok(f"paid {paid.cents}")


class Approvals:
    """Asks the run's principal before a sale, and two others before the sale of a house."""

    name = "approvals"

    def check(self, tool: Any, params: Any, *, context: ToolContext) -> PolicyDecision:
        if tool.name != "sell":
            return PolicyDecision.allow()
        others = (Quorum(None, 2),) if params.what == "house" else ()
        return PolicyDecision.ask("it can't be taken back", *others)

    def on_result(self, tool: Any, params: Any, result: Any, *, context: ToolContext) -> None:
        """Do nothing."""


class Later(LaterEnvironment):
    """Lets two people vote."""

    def voters(self, quorum: Quorum, principal: str, /) -> Any:
        return {"bob": 0.0, "cid": 0.0}


class Praise:
    """Advises after each call, at most twice."""

    name = "praise"
    trigger = Trigger(calls=1)
    cap = 2

    def advise(self, state: Any) -> str:
        return f"well done, {state.calls} so far"


class Manners:
    """Objects once to an answer that does not end politely."""

    name = "manners"
    cap = 1

    def missing(self, state: Any) -> str | None:
        return None if state.text.endswith("please") else "say please"


def answer(request: ModelRequest) -> ToolCall | list[ToolCall] | str:
    """Make the calls that the newest message of a person lists as JSON, one turn for each list in it. Then say the last result."""
    messages = list(request.messages)
    at = max(at for at, each in enumerate(messages) if isinstance(each, UserMessage) and not each.by_run)
    since = messages[at + 1 :]
    turns = json.loads(messages[at].text)
    done = sum(isinstance(each, ToolMessage) for each in since)
    for turn in turns:
        if done < len(turn):
            return [ToolCall(name, arguments) for name, arguments in turn]
        done -= len(turn)
    results = [each.text for each in since if isinstance(each, ToolMessage)]
    advice = [each.text for each in since if isinstance(each, UserMessage)]
    return f"{results[-1] if results else 'nothing'} | {len(advice)} times advised"


TOOLS: list[Any] = [note, write, read, sell, pay, choose, nested, linger, lend, cash]
adapter = Adapter(ScriptedModel(answer), environment=Later())
prompt = Prompt("shop", "You run a shop.", tools=TOOLS, policies=[Approvals()])
advised = Prompt("advised", "You run a shop.", tools=TOOLS, feedback=[Praise()], completion=[Manners()])


def adapter_on(journal: Any, files: Any = None, **options: Any) -> Adapter:
    """Return the app's adapter on a journal."""
    return Adapter(ScriptedModel(answer), journal=journal, filesystem=files, environment=Later(), **options)


def said(*turns: Any) -> str:
    """Return the message that lets the model make these calls: each turn is one call or a list of calls, as (name, arguments)."""
    return json.dumps([[turn] if isinstance(turn, tuple) else list(turn) for turn in turns])


HERE = Path(__file__).parent
