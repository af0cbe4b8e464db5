"""A function that runs the `handrail` program in its own process, and a folder of workers for it to run."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from support import warm_python

HANDRAIL = [sys.executable, "-m", "handrail"]

TOOLS = '''
"""Tools for tests, and models that a worker can name."""

import asyncio
import time
from pathlib import Path
from typing import Literal

from pydantic import BaseModel

from handrail import ToolCall, ToolContext, UserContext, tool
from handrail.models import names
from handrail.models import ModelRequestRefused
from handrail.events import ToolInvoked
from handrail.messages import Usage
from handrail.models.scripted import Reply, ScriptedModel


@tool(effect="staged", capabilities=["fs.write"])
def write(path: str, text: str, context: ToolContext) -> str:
    """Write a file."""
    context.filesystem.write(path, text)
    return "written"


@tool(effect="staged")
async def half_done(context: ToolContext) -> str:
    """Write a file, and then wait forever."""
    context.filesystem.write("half.txt", "half")
    context.report_progress("at it", done=1, total=4)
    await asyncio.Event().wait()
    return "never"


@tool(effect="staged")
async def stubborn(context: ToolContext) -> str:
    """Ignore cancellation."""
    context.report_progress("deaf")
    while True:
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            Path("ignored").touch()


@tool
async def pay(amount: int) -> str:
    """Pay somebody."""
    return f"paid {amount}"


@tool(effect="read")
def crash() -> str:
    """Raise an error."""
    raise RuntimeError("a secret place in the code")


@tool(effect="read")
async def later(context: ToolContext) -> str:
    """Wait for the file `go`, and create the file `told` when the end of this call is published."""
    context.event_bus.subscribe(ToolInvoked, lambda event: event.tool == "later" and Path("told").touch())
    while not Path("go").exists():
        await asyncio.sleep(0.01)
    return "late"


class Pick(BaseModel):
    drink: Literal["tea", "coffee"]


@tool(effect="read")
async def pick(context: UserContext) -> str:
    """Let the person pick a drink."""
    return (await context.wait_for("pick", None, Pick)).drink


def script(name, *answers):
    def reply(request):
        said = sum(1 for message in request.messages if type(message).__name__ == "AssistantMessage")
        return answers[min(said, len(answers) - 1)]

    names._made["test:" + name, ""] = ScriptedModel(reply, name="test:" + name)


script("hello", Reply("Hello\\x1b[31m there.", usage=Usage(12, 3, requests=1)))
script("write", Reply("I write.", [ToolCall("write", {"path": "a.txt", "text": "new\\n"})]), "Written.")
script("half", [ToolCall("half_done", {})], "Done.")
script("deaf", [ToolCall("stubborn", {})], "Done.")
script("pay", [ToolCall("pay", {"amount": 5})], "Paid, or not.")
script("crash", [ToolCall("crash", {})], "It crashed.")
script("fail", ModelRequestRefused("test:fail", "the key is wrong"))
script("cut", Reply("Half an ans", stop="length"))
script("loop", [ToolCall("pay", {"amount": 1})])
script("slow", Reply("late", delay=60))
script("pick", [ToolCall("pick", {})], "Picked.")
script("both", [ToolCall("pay", {"amount": 5}), ToolCall("later", {})], "Both.")


def pays_each_time(request):
    over = type(request.messages[-1]).__name__ == "ToolMessage"
    return "Paid, or not." if over else [ToolCall("pay", {"amount": 5})]


names._made["test:again", ""] = ScriptedModel(pays_each_time, name="test:again")
script("call", [ToolCall("payer", {"input": "pay"})], "Called.")
'''

WORKERS = {
    "hello": "model: test:hello\ndescription: Says hello.\nattachments: {count: 1, suffixes: ['.txt']}",
    "writer": "model: test:write\ntools: [write]\npolicies: [{capability: {ask: [fs.write]}}]",
    "half": "model: test:half\ntools: [half_done]",
    "deaf": "model: test:deaf\ntools: [stubborn]",
    "payer": "model: test:pay\ntools: [pay]",
    "crasher": "model: test:crash\ntools: [crash]",
    "failing": "model: test:fail",
    "cut": "model: test:cut",
    "looping": "model: test:loop\ntools: [pay]\npolicies: []",
    "slow": "model: test:slow",
    "picker": "model: test:pick\ntools: [pick]",
    "caller": "model: test:call\nworkers: [payer]",
    "both": "model: test:both\ntools: [pay, later]",
    "again": "model: test:again\ntools: [pay]",
    "shaped": "model: test:hello\noutput: {type: object, properties: {a: {type: integer}}, required: [a]}",
    "nobody": "description: Has no model.",
}


def workers_folder(folder: Path) -> Path:
    """Make a folder with the workers of `WORKERS`, their tools, and a `files` folder that contains one file."""
    folder.mkdir()
    (folder / "tools.py").write_text(TOOLS)
    for name, front in WORKERS.items():
        (folder / f"{name}.md").write_text(f"---\n{front}\n---\n\nYou are {name}.\n")
    (folder / "files").mkdir()
    (folder / "files" / "a.txt").write_text("old\n")
    return folder


def environment(**more: str) -> dict[str, str]:
    """Return this process's environment, with a fixed terminal type and encoding.

    Other variables that affect the output or imports are left out, unless `more` has them.
    """
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in ("NO_COLOR", "FORCE_COLOR", "TERM", "COLUMNS", "LINES", "HANDRAIL_DEBUG", "PYTHONPATH")
    }
    return {**kept, "TERM": "xterm-256color", "PYTHONUTF8": "1", **more}


def handrail(
    *arguments: str, cwd: Path, stdin: str | bytes = "", env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run the program to its end, with this standard input or an empty one."""
    given = stdin.encode() if isinstance(stdin, str) else stdin
    chosen = dict(env or environment())
    if chosen.get("PYTHONUTF8") == "1":
        done = warm_python.run(["-m", "handrail", *arguments], cwd=cwd, env=chosen, stdin=given)
    else:  # Python chooses its encoding when it starts, so this needs a new process
        done = subprocess.run([*HANDRAIL, *arguments], cwd=cwd, env=chosen, input=given, capture_output=True)
    return subprocess.CompletedProcess(done.args, done.returncode, done.stdout.decode(), done.stderr.decode())
