"""Move a run in a workspace of ten thousand files from one host to another, and undo its calls afterwards.

    python bench/workspace.py [FILES] [JOURNAL]

Each host has a folder for copies and its own connection to the journal. JOURNAL is a file or a PostgreSQL URL; the
default is a new SQLite file. The run fills the workspace, is parked, and continues on the second host, where it changes
a few files. Then a second run opens the workspace on the first host again. After each undo, the second host opens it
once more.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import tempfile
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from handrail import (
    Adapter,
    LaterEnvironment,
    Prompt,
    RunParked,
    ScriptedModel,
    ToolCall,
    ToolContext,
    Workspace,
    runs,
    tool,
)
from handrail.events import ToolInvoked
from handrail.journal.any_journal import open_by_name
from handrail.question import Answer


class Pick(BaseModel):
    """The type of the answer that is requested."""

    number: int


@tool(effect="staged")
async def fill(files: int, *, context: ToolContext) -> str:
    """Write the files: about 2 KB each, in folders of a hundred."""
    for number in range(files):
        context.filesystem.write(f"d{number // 100:03}/f{number:05}.txt", f"{number:<2000}\n")
    return "filled"


@tool(effect="staged")
async def choose(*, context: ToolContext) -> str:
    """Ask somebody for a number."""
    assert context.wait_for
    return str((await context.wait_for("pick", {}, Pick)).number)


@tool(effect="staged")
async def change(*, context: ToolContext) -> str:
    """Change ten files, and move one folder."""
    for number in range(10):
        context.filesystem.append(f"d000/f{number:05}.txt", "changed\n")
    context.filesystem.move("d001", "moved")
    return "changed"


PROMPT = Prompt("bench", "Do what is asked.", tools=[fill, choose, change])


class Moved:
    """Counts the files and bytes that pass through `put` and `fetch` of a journal's workspaces."""

    def __init__(self, journal: Any) -> None:
        self.up = self.down = self.files_up = self.files_down = 0
        put, fetch = journal.workspaces.put, journal.workspaces.fetch

        async def put_counted(blobs: Any, **options: Any) -> None:
            self.up += sum(map(len, blobs))
            self.files_up += len(blobs)
            await put(blobs, **options)

        async def fetch_counted(digests: Any) -> Any:
            found = await fetch(digests)
            self.down += sum(map(len, found.values()))
            self.files_down += len(found)
            return found

        journal.workspaces.put, journal.workspaces.fetch = put_counted, fetch_counted

    def take(self) -> str:
        text = f"{self.files_up} files, {self.up / 1e6:.2f} MB up; {self.files_down} files, {self.down / 1e6:.2f} MB down"
        self.up = self.down = self.files_up = self.files_down = 0
        return text


@contextlib.contextmanager
def timed(what: str, *moved: Moved) -> Generator[None]:
    began = time.perf_counter()
    yield
    took = time.perf_counter() - began
    print(f"{what:<58}{took:8.2f} s   {' | '.join(each.take() for each in moved)}", flush=True)


def adapter(*script: Any) -> Adapter:
    return Adapter(ScriptedModel([*script, "Done."]))


def same(one: Path, other: Path) -> bool:
    roots = [next(each.glob("*/bench/1/files")) for each in (one, other)]
    trees = [
        {str(p.relative_to(root)): p.is_dir() or p.read_bytes() for p in root.rglob("*")} for root in roots
    ]
    return trees[0] == trees[1]


async def main(files: int, url: str | None, folder: Path) -> None:
    here, there = (open_by_name(url or folder / "runs.db") for _ in range(2))
    one, two = folder / "one", folder / "two"
    moved_here, moved_there = Moved(here), Moved(there)
    environment = LaterEnvironment()
    on_one: Any = {"filesystem": Workspace("bench", cache=one), "environment": environment}
    on_two: Any = {"filesystem": Workspace("bench", cache=two), "environment": environment}
    print(f"{files} files in {here.path}")
    with timed("host 1: fills the workspace in one call, and parks", moved_here):
        script = (ToolCall("fill", {"files": files}), ToolCall("choose", {}), ToolCall("change", {}))
        with contextlib.suppress(RunParked):
            await adapter(*script).evaluate(PROMPT, "go", run_id="r", journal=here, **on_one)
    [question] = await there.questions.open("r")
    there.questions.answer(
        Answer(question_id=question.id, digest=question.digest, by=question.principal, value={"number": 1})
    )
    with timed("host 2: takes the run, changes 10 files, moves a folder", moved_there):
        response = await adapter(ToolCall("change", {})).resume("r", PROMPT, journal=there, **on_two)
    with timed("host 1: opens the workspace again", moved_here):
        await adapter().evaluate(PROMPT, "go", run_id="r2", journal=here, **on_one)
    print("both copies are equal:", same(one, two))
    made = [event for event in response.session[ToolInvoked].all() if event.tool != "choose"]
    for event in reversed(made):
        with timed(f"host 1: undoes {event.tool!r}", moved_here):
            done = await runs.undo(here, "r", event.call_id)
        print(f"    {len(done.paths)} paths")
        with timed("host 2: opens the workspace", moved_there):
            await adapter().evaluate(PROMPT, "go", run_id=f"after-{event.tool}", journal=there, **on_two)
        left = sum(each.is_file() for each in next(two.glob("*/bench/1/files")).rglob("*"))
        print(f"    {left} files on host 2")
    here.close()
    there.close()


if __name__ == "__main__":
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 10_000
    with tempfile.TemporaryDirectory() as temporary:
        asyncio.run(main(count, sys.argv[2] if len(sys.argv) > 2 else None, Path(temporary)))
