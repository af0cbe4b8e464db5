"""A program that crashes at a chosen point, and is then started again.

Run as a script, it reads one JSON line per start (a folder, a tool, a mode), forks a child for each, and answers with a
line of JSON. Its tools have every kind of effect, and record what they do to the outside world in the folder's file
`world`. In `crash` mode the child begins a run, and ends in the middle of the call, as if by `kill -9`. In every other
mode it resumes that run. In some of them, such as `crash in probe`, it ends early again.
"""

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

from handrail import (
    Adapter,
    DirectoryFilesystem,
    Prompt,
    ScriptedModel,
    SqliteJournal,
    ToolCall,
    ToolContext,
    tool,
)
from handrail.events import ToolInvoked
from handrail.testing import Person


class Start:
    """The folder, tool and mode of the current start."""

    folder = Path()
    tool = ""
    mode = ""


def world(what: str) -> None:
    """Record an effect on the outside world, which no rollback can undo."""
    fd = os.open(Start.folder / "world", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.write(fd, f"{what}\n".encode())
    os.close(fd)


def cut(mode: str = "crash") -> None:
    if Start.mode == mode:
        os._exit(137)


def work(name: str, key: str = "") -> str:
    world(f"begin {name} {key}".strip())
    cut()
    world(f"end {name}")
    return f"{name} done"


@tool(effect="pure")
async def pure() -> str:
    """Compute something."""
    return work("pure")


@tool(effect="read")
async def read() -> str:
    """Read something."""
    return work("read")


@tool(effect="staged")
async def staged(context: ToolContext) -> str:
    """Write a file."""
    context.filesystem.write("a.txt", "new")
    return work("staged")


@tool(effect="idempotent")
async def idempotent(context: ToolContext) -> str:
    """Store something under a key."""
    return work("idempotent", context.invocation.idempotency_key)


async def take_back(params: Any, value: Any, *, context: ToolContext) -> None:
    world("compensated")
    cut("crash in compensation")
    context.filesystem.write("taken back.txt", "yes")
    if Start.mode == "crash after compensation":
        context.event_bus.subscribe(ToolInvoked, lambda ended: os._exit(137))


@tool(effect="compensable", compensate=take_back)
async def compensable() -> str:
    """Book something."""
    return work("compensable")


def probing(found: bool | None) -> Any:
    async def probe(params: Any, *, context: ToolContext) -> bool | None:
        world("probed")
        return found

    return probe


@tool(effect="compensable", compensate=take_back, probe=probing(True))
async def compensable_done() -> str:
    """Book something. The probe finds the booking."""
    return work("compensable_done")


@tool(effect="compensable", compensate=take_back, probe=probing(False))
async def compensable_not_done() -> str:
    """Book something. The probe finds no booking."""
    return work("compensable_not_done")


@tool(effect="compensable", compensate=take_back, probe=probing(None))
async def compensable_unknown() -> str:
    """Book something. The probe can't tell."""
    return work("compensable_unknown")


async def probe_in_vain(params: Any, *, context: ToolContext) -> bool | None:
    context.filesystem.write("probed.txt", "yes")
    world("probed")
    cut("crash in probe")
    raise RuntimeError("nobody answers")


@tool(effect="compensable", compensate=take_back, probe=probe_in_vain)
async def compensable_failing_probe() -> str:
    """Book something whose probe fails."""
    return work("compensable_failing_probe")


def booking(name: str, cut_while_undone: bool) -> Any:
    async def undo(params: Any, value: Any, *, context: ToolContext) -> None:
        world(f"undone {name}")
        if cut_while_undone:
            cut()
        context.filesystem.write(f"{name} undone.txt", "yes")

    @tool(name=name, description="Book it.", effect="compensable", compensate=undo)
    async def book() -> str:
        world(f"booked {name}")
        return "booked"

    return book


flight, hotel = booking("flight", cut_while_undone=True), booking("hotel", cut_while_undone=False)


def trip(name: str, effect: Any) -> Any:
    @tool(name=name, description="Book both, then fail.", effect=effect)
    async def book_both(context: ToolContext) -> str:
        for each in ("flight", "hotel"):
            booked = await context.call(each)
            if not booked.success:
                raise RuntimeError(booked.message)
        raise RuntimeError("there is no car")

    return book_both


@tool
async def irreversible() -> str:
    """Send something."""
    return work("irreversible")


@tool
async def once_settled(context: ToolContext) -> str:
    """Pay once, then crash."""
    await context.once("pay", lambda: world("paid"))
    cut()
    return "done"


@tool(effect="idempotent")
async def once_again(context: ToolContext) -> str:
    """Pay once, then crash; the handler may be run again."""
    await context.once("pay", lambda: world("paid"))
    cut()
    return "done"


def _pay_and_be_cut() -> None:
    world("paid")
    cut()


@tool(effect="idempotent")
async def once_cut(context: ToolContext) -> str:
    """Crash while paying."""
    await context.once("pay", _pay_and_be_cut)
    return "done"


@tool(effect="idempotent")
async def once_probed(context: ToolContext) -> str:
    """Crash while paying, and probe afterwards."""
    await context.once("pay", _pay_and_be_cut, probe=lambda: "paid" in (Start.folder / "world").read_text())
    return "done"


@tool(effect="idempotent")
async def once_failing(context: ToolContext) -> str:
    """Crash while paying; an unknown outcome is an error."""
    await context.once("pay", _pay_and_be_cut, on_unknown="fail")
    return "done"


TOOLS = {
    each.name: each
    for each in (
        pure, read, staged, idempotent, compensable, compensable_done, compensable_not_done,
        compensable_unknown, compensable_failing_probe, irreversible, once_settled, once_again, once_cut, once_probed, once_failing,
        trip("trip_entered_again", "idempotent"), trip("trip_not_entered_again", "irreversible"),
    )
}  # fmt: skip


def answer(request: Any) -> Any:
    """Answer as the model: call the tool, then report its result."""
    world("asked")
    last = request.messages[-1]
    return f"it says: {last.text}" if hasattr(last, "results") else ToolCall(Start.tool)


async def main() -> dict[str, Any]:
    journal = SqliteJournal(Start.folder / "runs.db")
    (Start.folder / "files").mkdir(exist_ok=True)
    person = Person(answers={"did 'pay' happen": {"happened": True}})
    adapter = Adapter(
        ScriptedModel(answer),
        journal=journal,
        filesystem=DirectoryFilesystem(Start.folder / "files"),
        environment=person,
    )
    prompt = Prompt("crash", "Do it.", tools=[TOOLS[Start.tool], flight, hotel])
    begun = (
        adapter.evaluate(prompt, "go", run_id="run")
        if Start.mode == "crash"
        else adapter.resume("run", prompt)
    )
    response = await begun
    return {"text": response.text, "questions": len(person.questions)}


def serve() -> None:
    """Fork a child for every line of standard input. Print its exit code as JSON, with what `main` returned unless it crashed.

    The modules are imported only once, before the first fork.
    """
    for line in sys.stdin:
        folder, Start.tool, Start.mode = json.loads(line)
        Start.folder = Path(folder)
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(reading)
            os.write(writing, json.dumps(asyncio.run(main())).encode())
            os._exit(0)
        os.close(writing)
        with os.fdopen(reading) as said:
            told = said.read()
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        print(json.dumps({"code": code, **json.loads(told or "{}")}), flush=True)


if __name__ == "__main__":
    serve()
