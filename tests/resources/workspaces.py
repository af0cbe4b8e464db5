"""Tools and functions for runs in a workspace, and a program to kill. Each host is a folder with copies of workspaces.

WORKSPACE_DIES=1 python -m resources.workspaces JOURNAL CACHE
    begins the run `r`, prints `ready` in the middle of a call, and waits
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from handrail import (
    Adapter,
    Allow,
    Prompt,
    ScriptedModel,
    Shell,
    SqliteJournal,
    ToolCall,
    ToolContext,
    Workspace,
    tool,
)
from handrail.errors import ToolError
from handrail.journal.protocol import Journal

SHELL = Shell([Allow(...)])


@tool(effect="staged")
async def act(steps: list[list[str]], *, context: ToolContext) -> str:
    """Do each step with the files: `write PATH TEXT`, `append`, `mkdir`, `delete` or `move`."""
    files = context.filesystem
    for verb, path, *rest in steps:
        if verb == "delete":
            files.delete(path, recursive=True)
        else:
            getattr(files, verb)(path, *rest)
    return "done"


@tool(effect="read")
async def read(path: str, *, context: ToolContext) -> str:
    """Read a file."""
    return context.filesystem.read(path)


@tool(effect="staged")
async def command(line: str, *, context: ToolContext) -> str:
    """Run a command."""
    finished = await SHELL.run_on(context.filesystem, ["sh", "-c", line])
    if not finished.ok:
        raise ToolError(finished.render())
    return "done"


@tool(effect="staged")
async def half(*, context: ToolContext) -> str:
    """Write a file, and wait to be killed if `WORKSPACE_DIES` is set."""
    context.filesystem.write("half", "first" if os.environ.get("WORKSPACE_DIES") else "second")
    if os.environ.get("WORKSPACE_DIES"):
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        await asyncio.sleep(1000)
    return "whole"


@tool(effect="staged")
async def outer(steps: list[list[str]], *, context: ToolContext) -> str:
    """Do the first step in this call and the others in inner calls."""
    verb, path, *rest = steps[0]
    getattr(context.filesystem, verb)(path, *rest)
    for step in steps[1:]:
        await context.call("act", steps=[step])
    return "done"


TOOLS: Sequence[Any] = [act, read, command, half, outer]
PROMPT = Prompt("files", "Work.", tools=TOOLS)


def adapter(*calls: ToolCall | list[ToolCall] | str) -> Adapter:
    """Return an adapter whose model answers with each of these in turn, and then with `ok`."""
    return Adapter(ScriptedModel([*calls, "ok"]))


def steps(*lines: str) -> ToolCall:
    """Return a call to `act`. Each line is a step."""
    return ToolCall("act", {"steps": [line.split(" ") for line in lines]})


async def run(
    journal: Journal, cache: Path, *calls: ToolCall | list[ToolCall] | str, run_id: str = "r", **options: Any
) -> Any:
    """Run these calls in the workspace `w`, on the host whose copies are in `cache`."""
    return await adapter(*calls).evaluate(
        PROMPT, "go", run_id=run_id, journal=journal, filesystem=Workspace("w", cache=cache), **options
    )


def tree(cache: Path) -> dict[str, Any]:
    """Return what is at each path of a host's copy.

    A link is given as `-> target`, a file as its bytes and mode, and a folder as None and its mode.
    """
    [root] = cache.glob("*/w/1/files")
    found: dict[str, Any] = {}
    for path in sorted(root.rglob("*")):
        name, mode = str(path.relative_to(root)), path.lstat().st_mode & 0o777
        if path.is_symlink():
            found[name] = f"-> {os.readlink(path)}"
        else:
            found[name] = (None if path.is_dir() else path.read_bytes(), mode)
    return found


def contents(cache: Path) -> dict[str, str]:
    """Return the text of each file in a host's copy."""
    return {
        path: state[0].decode()
        for path, state in tree(cache).items()
        if isinstance(state, tuple) and state[0] is not None
    }


async def _main() -> None:
    journal = SqliteJournal(sys.argv[1])
    await run(journal, Path(sys.argv[2]), steps("write a one", "write d/b two"), ToolCall("half", {}))


if __name__ == "__main__":
    asyncio.run(_main())
