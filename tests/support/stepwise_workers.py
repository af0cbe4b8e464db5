"""Workers that commit each call on its own, and workers that are one transaction each.

Run as a script with the path of a folder, this module runs the worker `main` there with a journal. The tool
`stop` then kills the process.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import Any

from handrail import DirectoryFilesystem, ScriptedModel, SqliteJournal, ToolCall, WorkerRegistry
from support.worker_folders import sound

TOOLS = """
    import asyncio, os, signal

    from handrail import ToolContext, tool
    from support.recorded import Noted

    @tool(effect="staged")
    async def write(path: str, text: str, context: ToolContext) -> str:
        '''Write a file, and note it.'''
        context.filesystem.write(path, text)
        context.session.dispatch(Noted(path))
        return f"wrote {path}"

    @tool(effect="read")
    async def notes(context: ToolContext) -> str:
        '''Return everything that was noted.'''
        return ", ".join(each.text for each in context.session[Noted].all()) or "nothing"

    here = []

    @tool(effect="staged")
    async def meet(path: str, context: ToolContext) -> str:
        '''Write a file, and wait until two calls have done so.'''
        context.filesystem.write(path, context.call_id)
        here.append(path)
        while len(here) < 2:
            await asyncio.sleep(0)
        return f"wrote {path}"

    @tool(effect="staged")
    async def hang(path: str, context: ToolContext) -> str:
        '''Write a file, and never return.'''
        context.filesystem.write(path, "x")
        here.append(path)
        await asyncio.Event().wait()

    undone = []

    async def unbook(params, value, *, context: ToolContext) -> None:
        undone.append(params.room)

    @tool(effect="compensable", compensate=unbook)
    async def book(room: str) -> str:
        '''Book a room.'''
        return f"booked {room}"

    @tool(effect="idempotent")
    async def ask(context: ToolContext) -> str:
        '''Ask for approval.'''
        return (await context.request_approval("Go on?")).outcome

    @tool(effect="staged")
    async def stop() -> str:
        '''End the process, if it is the one to be killed.'''
        if "HANDRAIL_KILLED" in os.environ:
            os.kill(os.getpid(), signal.SIGKILL)
        return "went on"
"""
_OWN = "tools: [write, notes, meet, hang, book, ask, stop]\npolicies: []"
FAILS = "limits: {requests: 2}"
"""Makes a worker fail at its third request."""


def team(at: Path, **front: str) -> WorkerRegistry:
    """Return a registry with the workers `main`, `outer`, `whole`, `steps` and `more`.

    Only `steps` and `more` commit each call. `front` holds more front matter for the workers other
    than `main`, by name.
    """
    texts = {
        "main": f"---\n{_OWN}\nworkers: [outer, steps, more, whole]\n---\nGo.",
        "outer": f"---\n{_OWN}\nworkers: [steps, whole]\n{front.get('outer', '')}\n---\nGo.",
        "whole": f"---\n{_OWN}\n{front.get('whole', '')}\n---\nGo.",
        "steps": f"---\n{_OWN}\nworkers: [whole, more]\ncommit: each\n{front.get('steps', '')}\n---\nGo.",
        "more": f"---\n{_OWN}\ncommit: each\n{front.get('more', '')}\n---\nGo.",
    }
    return sound(at / "team", TOOLS, **texts)


def written(path: str, text: str = "x") -> ToolCall:
    return ToolCall("write", {"path": path, "text": text})


def to(worker: str) -> ToolCall:
    return ToolCall(worker, {"input": "go"})


def models(**turns: list[Any]) -> dict[str, ScriptedModel]:
    """Return models by worker name. Each takes its turns, and then says that the worker is done."""
    return {name: ScriptedModel([*said, f"{name} is done"]) for name, said in turns.items()}


async def _run(folder: Path) -> None:
    files = DirectoryFilesystem(folder / "files")
    said = models(main=[to("steps")], steps=[written("a"), ToolCall("book", {"room": "1"}), ToolCall("stop")])
    journal = SqliteJournal(folder / "runs.db")
    await team(folder).run("main", "go", models=said, filesystem=files, journal=journal, run_id="run")


if __name__ == "__main__":
    os.environ["HANDRAIL_KILLED"] = "yes"
    asyncio.run(_run(Path(sys.argv[1])))
