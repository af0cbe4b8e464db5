"""An app whose runs are observed in processes of their own: `python -m support.traced_app COMMAND [TRACEPARENT]`."""

from __future__ import annotations

import asyncio
import os
import signal
import sys

from handrail import (
    Adapter,
    CapabilityPolicy,
    LaterEnvironment,
    Prompt,
    ScriptedModel,
    SqliteJournal,
    ToolCall,
    ToolContext,
    tool,
)
from handrail.errors import RunParked
from handrail.question import Answer
from support.traced import observe


@tool(effect="staged", capabilities=["pay"])
async def pay(amount: int) -> str:
    """Pay an amount."""
    return f"paid {amount}"


inner = Prompt("clerk", "Pay.", tools=[pay], policies=[CapabilityPolicy({"pay": "ask"})])


@tool(effect="idempotent")
async def delegate(context: ToolContext) -> str:
    """Let a clerk pay."""
    return (await context.adapter.evaluate(inner, "Pay 5.")).text


@tool
async def die() -> str:
    """End the process as a crash would, the first time."""
    if not os.path.exists("died"):
        open("died", "w").close()
        os.kill(os.getpid(), signal.SIGKILL)
    return "survived"


def play(request: object) -> object:
    messages = request.messages  # type: ignore[attr-defined]
    names = {each.tool.name for each in request.tools}  # type: ignore[attr-defined]
    if len(messages) > 1:
        return "done"
    return (
        ToolCall("pay", {"amount": 5})
        if "pay" in names
        else ToolCall("die" if "die" in names else "delegate", {})
    )


prompt = Prompt("boss", "Delegate.", tools=[delegate])
mortal = Prompt("mortal", "Die.", tools=[die])


async def main(command: str, *given: str) -> None:
    journal = SqliteJournal("runs.db")
    adapter = Adapter(ScriptedModel(play), journal=journal, environment=LaterEnvironment())  # pyright: ignore
    try:
        match command:
            case "begin":
                await adapter.evaluate(prompt, "Go.", run_id="r1", traceparent=given[0] if given else None)
            case "die":
                await adapter.evaluate(mortal, "Go.", run_id="r1")
            case "revive":
                await adapter.resume("r1", mortal)
            case "answer":
                [question] = await journal.questions.open("r1")
                answer = Answer(
                    question_id=question.id,
                    digest=question.digest,
                    by=question.principal,
                    value={"approved": True},
                )
                journal.questions.answer(answer)
            case _:
                await adapter.resume("r1", prompt)
    except RunParked:
        print("parked")
    finally:
        journal.close()


if __name__ == "__main__":
    observe()
    asyncio.run(main(*sys.argv[1:]))
