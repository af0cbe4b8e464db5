"""An app for `handrail mcp` that is killed while it asks. It notes what it does in the file $HANDRAIL_NOTES.

The first line that each process writes names its process id. $HANDRAIL_DAYS sets the process's clock forward.
"""

import os
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

from handrail import Handoff, Parked, Prompt, ToolContext, ToolResult, UserContext, tool
from handrail.clock import SystemClock
from handrail.mcp import tasks

NOTES = Path(os.environ["HANDRAIL_NOTES"])
AHEAD = timedelta(days=int(os.environ["HANDRAIL_DAYS"]))


def note(text: str) -> None:
    with NOTES.open("a") as file:
        file.write(f"{text}\n")


seconds = time.time
time.time = lambda: seconds() + AHEAD.total_seconds()
SystemClock.now = lambda self: datetime.now(UTC) + AHEAD
note(f"process {os.getpid()}")
# With the usual limit, a call that is merely slow would become a task on a busy machine.
tasks.TASK_AFTER = 300.0


@tool(effect="read")
async def order(product: str, *, context: UserContext) -> str:
    """Order a product."""
    note("order")
    size = await context.wait_for("size", {"product": product}, int)
    note(f"size {size}")
    return f"{product} {size}"


@tool(effect="read", capabilities=["mcp.task"])
async def job(*, context: UserContext) -> str:
    """Ask in a task."""
    return f"{await context.wait_for('size', {}, int)} done"


pick: Handoff[None, int] = Handoff("pick", "Let the person pick a card.")


@pick.before
def deal(params: None, *, context: ToolContext) -> Parked[dict[str, int], dict[str, int]]:
    note("deal")
    return Parked({"secret": 3}, {"cards": 5})


@pick.after
def settle(hidden: dict[str, int], picked: int, *, context: ToolContext) -> ToolResult[str]:
    note("settle")
    return ToolResult.ok(f"{picked} of {hidden['secret']}")


prompt = Prompt("shop", "Sell.", tools=[order, job, pick])
