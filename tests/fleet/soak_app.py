"""The app of the soak: the chaos app with more kinds of runs, on a model that is reached over HTTP and a disk that can fail.

The first word of a message names the calls that the model makes (`PLAYS`); any other message is an order of the chaos
app. `SOAK_MODELS` is the URL of the models, and `SOAK_WEATHER` the folder in which files name the current faults.
`SOAK_FILES` is the folder of runs that have no workspace of their own, if there is one.
"""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from fleet import chaos_app
from handrail import (
    Adapter,
    Allow,
    CapabilityPolicy,
    Compact,
    DirectoryFilesystem,
    OpenAIModel,
    Prompt,
    Shell,
    ToolCall,
    ToolContext,
    tool,
)
from handrail.clock import SystemClock
from handrail.messages import ModelRequest, ToolMessage, UserMessage
from handrail.resources.directory.disk import Disk
from handrail.run.adapter import Retry
from handrail.tools.effect import EFFECTS

APP = f"{__name__}:prompt"
"""The name under which servers and workers load this app."""
DISK = {"full": errno.ENOSPC, "read-only": errno.EROFS, "broken": errno.EIO}
"""What a disk can be, and the error that each change of it then raises."""
_SILENCE = 2.0
"""Seconds without a word from the model after which a request has failed."""


# --- faults -------------------------------------------------------------------------------------------


def weather(what: str) -> str:
    """Return the current fault of `disk` or `clock`; "" if it has none."""
    try:
        return (Path(os.environ["SOAK_WEATHER"]) / what).read_text()
    except FileNotFoundError:
        return ""


class FailingDisk(Disk):
    """A disk on which each change fails while the weather is bad."""

    def __getattribute__(self, name: str) -> Any:
        found = object.__getattribute__(self, name)
        if name.startswith("_") or name == "forget":  # like a real full disk, it lets files be removed
            return found

        def change(*arguments: Any) -> Any:
            if number := DISK.get(weather("disk")):
                raise OSError(number, os.strerror(number))
            return found(*arguments)

        return change


def obey() -> None:
    """Let the weather set this process's clock ahead or behind, through the class from which all clocks are made."""
    right: Callable[[SystemClock], datetime] = SystemClock.now

    def now(self: SystemClock) -> datetime:
        return right(self) + timedelta(seconds=float(weather("clock") or 0))

    SystemClock.now = now


# --- the tools ----------------------------------------------------------------------------------------


@tool(effect="staged")
async def keep(order: str, *, context: ToolContext) -> str:
    """Add an order to one of ten files."""
    context.filesystem.append(f"kept/{int(order) % 10}", f"{order}\n")
    return f"kept {order}"


@tool(effect="idempotent", capabilities=["money"])
async def spend(order: str, *, context: ToolContext) -> str:
    """Spend money, if a person approves it."""
    return await chaos_app.act("spend", order, context.invocation.idempotency_key)


@tool(effect="pure")
async def rest(order: str) -> str:
    """Wait until the run is cancelled."""
    chaos_app.note("begin", "rest", order, "-")
    await asyncio.Event().wait()
    return "never"


@tool(effect="pure")
async def read(order: str) -> str:
    """Read a long page."""
    return f"page {order} " + "All work and no play. " * 150


@tool(effect="idempotent")
async def begin(order: str, *, context: ToolContext) -> str:
    """Begin a background run, which pays for the order."""
    context.spawn(APP, f"pay {order}")
    return f"began {order}"


@tool(effect="idempotent")
async def pay_once(order: str, *, context: ToolContext) -> str:
    """Pay for an order, and write no file."""
    return await chaos_app.act("paid", order, context.invocation.idempotency_key)


SHELL = Shell([Allow("sort", ...)])


@tool(effect="staged")
async def sort(order: str, *, context: ToolContext) -> str:
    """Sort an order's file with a command."""
    context.filesystem.write("sorted", f"b {order}\na {order}\n")
    return (await SHELL.run_on(context.filesystem, ["sort", "-o", "sorted", "sorted"])).render()


# --- the models ---------------------------------------------------------------------------------------

PLAYS: Mapping[str, Sequence[str]] = {
    "keep": ("keep",),
    "spend": ("spend",),
    "rest": ("rest",),
    "read": ("read", "read"),
    "begin": ("begin",),
    "sort": ("sort",),
    "pay": ("pay_once",),
    "tell": (),
}
TOLD = " ".join(f"word{number}" for number in range(200))


def play(request: ModelRequest) -> ToolCall | str:
    """Answer as the model of the shop."""
    messages = list(request.messages)
    for at in reversed(range(len(messages))):
        message = messages[at]
        if isinstance(message, UserMessage) and (word := message.text.split(" ")[0]) in PLAYS:
            break
    else:
        return chaos_app.SHOP(request)
    order, names = message.text.split(" ")[1], PLAYS[word]
    done = sum(isinstance(each, ToolMessage) for each in messages[at:])
    if done < len(names):
        return ToolCall(names[done], {"order": order}, f"{names[done]}-{order}-{done}")
    return TOLD if word == "tell" else f"{word} {order}: {messages[-1].text[:40]}"


MODELS: Mapping[str, Callable[[ModelRequest], ToolCall | str]] = {"shop": play, "clerk": chaos_app.CLERK}
"""What the models on the model server answer, by name."""


_PERSISTENT = Retry(attempts=20, first_wait=0.25, longest_wait=2.0)
"""Enough tries for every request to be answered between the faults. With the usual five, a few runs fail."""


def adapter_for(name: str, files: DirectoryFilesystem | None = None) -> Adapter:
    """Return an adapter for a model of the model server."""
    url = os.environ.get("SOAK_MODELS", "http://127.0.0.1:9/v1")
    model = OpenAIModel(name, base_url=url, key_variable=None, silence=_SILENCE)
    return Adapter(model, retry=_PERSISTENT, filesystem=files)


if "SOAK_WEATHER" in os.environ:
    obey()
folder = os.environ.get("SOAK_FILES")
files = None if folder is None else DirectoryFilesystem(folder, disk=FailingDisk())
adapter = adapter_for("shop", files)
prompt = Prompt(
    "shop",
    "You run a shop.",
    tools=[
        *(
            chaos_app.pay,
            chaos_app.ship,
            chaos_app.clerk_with(adapter_for("clerk")).as_tool(),
            chaos_app.charge,
        ),
        *(keep, spend, rest, read, begin, sort, pay_once),
    ],
    policies=[CapabilityPolicy({"money": "ask"}, effects=dict.fromkeys(EFFECTS, "allow"))],
    compact=Compact(tokens=6_000),
)
