"""An app for workers that are killed while they execute it. Its tools write to a ledger and to the files of their run.

`CHAOS_LEDGER` names the ledger's file. The ledger's lines are `begin WHAT ORDER KEY`, `end WHAT ORDER KEY` and `undone WHAT ORDER KEY`.
If the process's clock is more than 20 seconds wrong, each of these lines is followed by `clock WHAT ORDER SECONDS`. The file `log` in the run's
workspace has a line for each committed call of `pay`, `ship`, `book` and `charge`.
The calls of a run take a moment, so that they can be interrupted.
"""

import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fleet.hosts import obey
from handrail import Adapter, Agent, Prompt, ScriptedModel, ToolCall, ToolContext, UserContext, tool
from handrail.messages import Model, ModelRequest, ToolMessage, UserMessage

obey()


def _show_tasks(*_: object) -> None:
    """Print what each task of this process waits for."""
    for task in asyncio.all_tasks():
        task.print_stack()


if "CHAOS_LEDGER" in os.environ and threading.current_thread() is threading.main_thread():
    signal.signal(signal.SIGUSR1, _show_tasks)

CALLS = 6
"""How many calls a run makes if its budget allows them, including those of its nested agent."""
REQUESTS = 8
"""How many requests to models a run makes if its budget allows its calls, including those of its nested agent."""
_OFF = 20
"""Maximum error of the process's clock, in seconds, that is not noted in the ledger."""
_SECONDS = float(os.environ.get("CHAOS_SECONDS", "0.05"))


def note(*words: str) -> None:
    fd = os.open(os.environ["CHAOS_LEDGER"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.write(fd, f"{' '.join(words)}\n".encode())
    # The file's time comes from the kernel's clock, which is right.
    off = round(time.time() - os.fstat(fd).st_mtime)
    if abs(off) > _OFF:
        os.write(fd, f"clock {words[1]} {words[2]} {off}\n".encode())
    os.close(fd)


def ledger() -> list[list[str]]:
    """Return the lines of the ledger that this process writes to."""
    return read_ledger(Path(os.environ["CHAOS_LEDGER"]))


def read_ledger(path: Path) -> list[list[str]]:
    """Return the four words of each line of a ledger, or [] if there is no ledger yet."""
    return [line.split() for line in path.read_text().splitlines()] if path.exists() else []


async def act(what: str, order: str, key: str = "-", *, seconds: float = _SECONDS) -> str:
    note("begin", what, order, key)
    await asyncio.sleep(seconds)
    note("end", what, order, key)
    return f"{what} {order}"


def log(context: ToolContext, what: str, order: str) -> None:
    """Add a line to the file `log`. The line is there only if the call is committed."""
    context.filesystem.append("log", f"{what} {order}\n")


@tool(effect="idempotent")
async def pay(order: str, context: ToolContext) -> str:
    """Pay for an order."""
    log(context, "pay", order)
    return await act("pay", order, context.invocation.idempotency_key)


@tool
async def ship(order: str, context: ToolContext) -> str:
    """Ship an order, which can't be undone."""
    log(context, "ship", order)
    return await act(
        "ship", order, seconds=8 * _SECONDS
    )  # long enough that some calls are interrupted, and their outcomes are unknown


async def unbook(params: Any, value: Any, *, context: ToolContext) -> None:
    note("undone", "book", params.order, "-")


async def is_booked(params: Any, *, context: ToolContext) -> bool:
    return ["end", "book", params.order, "-"] in ledger()


@tool(effect="compensable", compensate=unbook, probe=is_booked)
async def book(order: str, context: ToolContext) -> str:
    """Book a courier."""
    log(context, "book", order)
    return await act("book", order)


@tool(effect="idempotent")
async def charge(order: str, context: ToolContext) -> str:
    """Charge a fee and a tip, each once. After a crash, a probe looks for the fee, and a person is asked about the tip."""
    is_probed = ["end", "fee", order, "-"]
    await context.once("fee", lambda: act("fee", order), probe=lambda: is_probed in ledger())
    await context.once("tip", lambda: act("tip", order))
    log(context, "charge", order)
    return f"charge {order} {context.filesystem.read(f'choices/{order}')}"


@dataclass
class Choice:
    name: str


@tool(effect="staged")
async def choose(order: str, *, context: UserContext) -> str:
    """Ask a person, and keep the answer in a file."""
    chosen = await context.wait_for("pick", {"order": order}, Choice)
    context.filesystem.write(f"choices/{order}", chosen.name)
    return f"choose {order} {chosen.name}"


def answer_with(*names: str) -> Callable[[ModelRequest], ToolCall | str]:
    """Return a function that calls each of these tools for the order that the message names, and then repeats their results."""

    def answer(request: ModelRequest) -> ToolCall | str:
        said = [each.text for each in request.messages if isinstance(each, UserMessage) and not each.by_run]
        results = [each.text for each in request.messages if isinstance(each, ToolMessage)]
        order = said[-1]
        if len(results) < len(names):
            name = names[len(results)]
            return ToolCall(name, {"message" if name == "clerk" else "order": order}, f"{name}-{order}")
        return " | ".join(results)

    return answer


SHOP, CLERK = answer_with("pay", "ship", "clerk", "charge"), answer_with("choose", "book")
"""What the models of the two agents answer."""


def clerk_with(model: Model | Adapter) -> Agent[None]:
    """Create the nested agent."""
    return Agent(model, "You book couriers.", name="clerk", description="Books.", tools=[choose, book])


clerk = clerk_with(ScriptedModel(CLERK))
adapter = Adapter(ScriptedModel(SHOP))
prompt = Prompt("shop", "You run a shop.", tools=[pay, ship, clerk.as_tool(), charge])
