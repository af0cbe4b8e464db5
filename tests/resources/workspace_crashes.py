"""A program that is killed at a chosen point while it opens a workspace, changes it, or undoes changes to it.

Run as a script, it reads one JSON line per attempt, as `resources.directory.crashing` does. It can be killed before each change to
a file or folder on this host, and before and after each transaction of the journal.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

from handrail import SqliteJournal, ToolCall, runs
from resources.directory.crashing import Points, killing_journal, serve
from resources.workspaces import run, steps

BEFORE = steps("write a one", "write d/b two", "write d/e/c three", "mkdir empty", "write gone x")
CHANGES = ToolCall(
    "command",
    {
        "line": "echo new > a; chmod 700 a; rm -r d/e gone; mkdir new; echo n > new/n; ln -s a link; echo x > d/e"
    },
)
_CHANGES = {
    "os.rename",
    "os.remove",
    "os.mkdir",
    "os.rmdir",
    "os.chmod",
    "os.symlink",
    "os.link",
    "shutil.rmtree",
}


def _watch(base: Path, points: Points) -> None:
    """Install an audit hook that reaches a point before each change to the files on this host.

    These are the operations in `_CHANGES`, and the opening of a file below `base` for writing.
    """

    def heard(event: str, arguments: tuple[Any, ...]) -> None:
        is_written = (
            event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR)
        )
        if event in _CHANGES or (is_written and str(arguments[0]).startswith(str(base))):
            points.reach()

    sys.addaudithook(heard)


async def _attempt(order: dict[str, Any], points: Points) -> None:
    base = Path(order["base"])
    journal = killing_journal(base / "journal.db", points)
    _watch(base, points)
    if order["what"] == "change":
        await run(journal, base / "here", CHANGES, run_id="r2")
    elif order["what"] == "open":
        await run(journal, base / "there", run_id="r2")
    else:
        await runs.undo(journal, "r1", order["call"])
    (base / "passed").write_text(json.dumps(points.passed))
    journal.close()


def attempt(order: dict[str, Any]) -> None:
    asyncio.run(_attempt(order, Points(order["at"])))


async def prepare(base: Path, *, with_changes: bool = False) -> str:
    """Create a journal, fill a workspace in its run `r1` on the host `here`, and return the id of the run's last call."""
    from handrail.events import ToolInvoked

    journal = SqliteJournal(base / "journal.db")
    response = await run(journal, base / "here", BEFORE, *([CHANGES] if with_changes else []), run_id="r1")
    journal.close()
    return response.session[ToolInvoked].all()[-1].call_id


if __name__ == "__main__":
    serve(attempt)
