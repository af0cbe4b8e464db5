"""`make run`: the embedded model sorts the inbox. Its process is killed half-way, and another one resumes the run.

python examples/inbox [--messages N] [--kill-after N]
"""

from __future__ import annotations

import sys

if __name__ == "__main__" and "--begin" not in sys.argv:
    print("Sorting a family's inbox: loading Handrail and an embedded model …", flush=True)

import argparse
import asyncio
import os
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

from app import adapter_for, new_mail, prompt
from rule import SmallBills

import report
from handrail import AgentEnvironment, LocalModel, SqliteJournal
from handrail.events import ModelRequested, ToolInvoked
from handrail.runs import show
from handrail.session import Dispatcher

WORK = Path(".handrail", "inbox")
FILES, RECORD = WORK / "files", WORK / "runs.db"
RUN = "sort-the-inbox"


def alone() -> dict[str, Any]:
    """Return the arguments for a run without a person: a model sorts the messages, and a rule approves the bills."""
    return {
        "environment": AgentEnvironment(LocalModel(max_tokens=64)),
        "approvals": SmallBills(report.decided),
    }


async def begin(kill_after: int) -> None:
    """Sort the inbox, and kill this process with SIGKILL as soon as `kill_after` messages are sorted."""
    bus, sorted_ones = Dispatcher(), 0

    def count(event: ToolInvoked) -> None:
        nonlocal sorted_ones
        report.call_ended(event)
        sorted_ones += event.tool == "sort_message"
        if sorted_ones == kill_after:
            os.kill(os.getpid(), signal.SIGKILL)

    bus.subscribe(ToolInvoked, count)
    adapter = adapter_for(FILES, SqliteJournal(RECORD))
    await adapter.evaluate(prompt, "Please sort the inbox.", bus=bus, run_id=RUN, **alone())


async def go_on(before: report.Listing) -> None:
    """Resume the killed run, and report the results."""
    journal, bus, asked = SqliteJournal(RECORD), Dispatcher(), list[ModelRequested]()
    killed = await show(journal, RUN)
    report.killed(killed)
    bus.subscribe(ModelRequested, asked.append)
    bus.subscribe(ToolInvoked, report.call_ended)
    await adapter_for(FILES, journal).resume(RUN, prompt, bus=bus, **alone())
    report.summary(killed, await show(journal, RUN), len(asked), before, FILES)


def main() -> None:
    options = argparse.ArgumentParser(prog="examples/inbox", description="Sort a family's inbox.")
    options.add_argument("--messages", type=int, default=12, help="number of messages to sort")
    options.add_argument(
        "--kill-after", type=int, default=5, help="number of messages after which the process is killed"
    )
    options.add_argument("--begin", action="store_true", help=argparse.SUPPRESS)
    given = options.parse_args()
    if given.begin:
        asyncio.run(begin(given.kill_after))
        sys.exit("the run ended before it could be killed")

    shutil.rmtree(WORK, ignore_errors=True)
    new_mail(FILES, given.messages)
    before = report.listing(FILES)
    report.title(given.messages)
    child = subprocess.run([sys.executable, __file__, "--begin", f"--kill-after={given.kill_after}"])
    if child.returncode != -signal.SIGKILL:
        sys.exit(f"the first process should have been killed, but exited with {child.returncode}")
    asyncio.run(go_on(before))


if __name__ == "__main__":
    main()
