"""An app for tests in which workers execute runs and people watch them.

Its runs wait at gates. A test opens a gate by creating a file in the folder that `GATES` names.
"""

import asyncio
import os
import time
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path

from pydantic import SecretStr

from handrail import (
    Adapter,
    CapabilityPolicy,
    Prompt,
    ScriptedModel,
    ToolCall,
    ToolContext,
    UserContext,
    tool,
)
from handrail.guard import ask
from handrail.messages import ModelPart, ModelRequest, StopPart, TextPart, ToolMessage, Traits, UserMessage
from handrail.models.scripted import Reply

PASSWORD = "correct horse battery"


def gate(name: str) -> Path:
    return Path(os.environ["GATES"]) / name


async def passed(name: str) -> None:
    while not gate(name).exists():
        await asyncio.sleep(0.01)


@tool(effect="pure")
async def hold(*, context: ToolContext) -> str:
    """Wait at the gate."""
    context.report_progress("waiting at the gate")
    try:
        await passed("hold")
    except asyncio.CancelledError:
        gate("cancelled").touch()
        raise
    return "held"


@tool(effect="pure")
async def choose(what: str, *, context: UserContext) -> str:
    """Ask a person."""
    return await context.wait_for("pick", {"what": what}, str)


@tool(effect="pure")
async def sign_in(password: SecretStr, *, context: ToolContext) -> str:
    """Sign in."""
    return f"signed in with {len(password.get_secret_value())} characters"


@tool(capabilities={"money"})
async def pay(amount: int, *, context: ToolContext) -> str:
    """Pay somebody, if two others approve it."""
    return f"paid {amount}"


@tool(capabilities={"books"})
async def book(amount: int, *, context: ToolContext) -> str:
    """Book an amount, if the finance department approves it."""
    return f"booked {amount}"


class Teller:
    """A model that does what the message says. It tells a story in pieces, with a gate in the middle."""

    name = "scripted:teller"
    traits = Traits()

    async def stream(self, request: ModelRequest, /) -> AsyncGenerator[ModelPart]:
        last = request.messages[-1]
        said = [each.text for each in request.messages if isinstance(each, UserMessage) and not each.by_run][
            -1
        ]
        pieces: Sequence[str] = ()
        if isinstance(last, ToolMessage):
            reply = f"Result: {last.text}"
        elif said == "hold":
            reply = ToolCall("hold", {})
        elif said in ("pay", "book"):
            reply = ToolCall(said, {"amount": 5})
        elif said == "choose":
            reply = ToolCall("choose", {"what": "tea"})
        elif said == "sign in":
            reply = ToolCall("sign_in", {"password": PASSWORD})
        elif said == "tell":
            pieces = ("The ", "first ", "half. ", "middle", "The ", "second ", "half.")
            reply = Reply("".join(each for each in pieces if each != "middle"))
        elif said.startswith("times "):
            pieces = [""] * int(said.split()[1])
            reply = Reply("")
        elif attached := [
            each
            for message in request.messages
            if isinstance(message, UserMessage)
            for each in message.attachments
        ]:
            reply = f"You sent: {', '.join(f'{each.name} {each.text()}' for each in attached)}"
        else:
            reply = f"You said: {said}"
        if pieces:
            for piece in pieces:
                if piece == "middle":
                    await passed("middle")
                else:
                    if not piece:
                        await asyncio.sleep(0.03)
                    yield TextPart(piece or f"{time.time():.6f} ")
            yield StopPart("done")
            return
        async for part in ScriptedModel([reply]).stream(request):
            yield part


OTHERS = CapabilityPolicy({"money": ask(approvals=2), "books": ask(role="finance")})
adapter = Adapter(Teller())
prompt = Prompt("teller", "Tell stories.", tools=[hold, choose, sign_in, pay, book], policies=[OTHERS])
