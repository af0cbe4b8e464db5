"""The app of bench/fleet.py. Its handlers write what they do, and when, to the file that `FLEET_LOG` names."""

from __future__ import annotations

import asyncio
import os
import time

from pydantic import BaseModel

from handrail import Adapter, Prompt, ScriptedModel, ToolCall, ToolContext, UserContext, tool
from handrail.messages import ModelRequest, ToolMessage, UserMessage


class Pick(BaseModel):
    """The type of the answer that is requested."""

    number: int


def note(what: str) -> None:
    fd = os.open(os.environ["FLEET_LOG"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    os.write(fd, f"{what} {time.time()}\n".encode())
    os.close(fd)


@tool(effect="pure")
async def step(number: int) -> int:
    """Do one step."""
    return number + 1


@tool(effect="pure")
async def wait(seconds: float, *, context: ToolContext) -> str:
    """Wait for this many seconds, unless the call is cancelled."""
    signal = context.signal

    async def watch() -> None:
        await signal.wait()
        note("signalled")

    watching = asyncio.ensure_future(watch())
    note("began")
    try:
        await asyncio.sleep(seconds)
    finally:
        watching.cancel()
    return "waited"


@tool(effect="pure")
async def choose(*, context: UserContext) -> str:
    """Ask somebody for a number."""
    return str((await context.wait_for("pick", {}, Pick)).number)


def answer(request: ModelRequest) -> ToolCall | str:
    """Answer as the model. The message `step N` leads to N calls of `step`, and `wait` or `choose` to one call of that tool."""
    last = next(each for each in request.messages if isinstance(each, UserMessage))
    verb, _, rest = last.text.partition(" ")
    done = sum(isinstance(each, ToolMessage) for each in request.messages)
    if verb == "step" and done < int(rest):
        return ToolCall("step", {"number": done})
    if verb == "wait" and not done:
        return ToolCall("wait", {"seconds": 1000.0})
    if verb == "choose" and not done:
        return ToolCall("choose", {})
    return "Done."


adapter = Adapter(ScriptedModel(answer))
prompt = Prompt("bench", "Do what is asked.", tools=[step, wait, choose])
