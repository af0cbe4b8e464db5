"""A scenario for simulations: a run in a workspace. Each process is on a different host from the one before it."""

from __future__ import annotations

from typing import Any

from handrail import Adapter, Agent, LaterEnvironment, Prompt, ToolContext, UserContext, Workspace, tool
from handrail.run.call import ToolCall
from handrail.testing import Person
from handrail.testing.simulation import Play, Scenario, Seen, Stage
from testing.simulated import Colour


def _tools(stage: Stage) -> list[Any]:
    @tool(effect="staged")
    async def jot(path: str, text: str, context: ToolContext) -> str:
        """Add a line to a file."""
        context.filesystem.append(path, f"{text}\n")
        return f"jotted {text}"

    @tool(effect="staged")
    async def tidy(context: ToolContext) -> str:
        """Move a file, and delete another."""
        context.filesystem.move("book", "shelf/book")
        context.filesystem.delete("scrap")
        return "tidied"

    @tool
    async def send(context: ToolContext) -> str:
        """Send a letter, and keep a copy of it."""
        stage.world.happened("sent")
        context.filesystem.append("book", "sent\n")
        return "sent"

    @tool(effect="staged")
    async def paint(context: UserContext) -> str:
        """Ask for a colour, and keep it."""
        colour = await context.wait_for("colour", None, Colour)
        context.filesystem.write("colour", colour.name)
        return colour.name

    @tool(effect="read")
    async def show(context: ToolContext) -> str:
        """Show all files. Its result is the same even if a letter's copy is missing because its outcome is unknown."""
        files = context.filesystem
        shown = {path: files.read(path) for path in files.glob("**") if files.stat(path).size}
        stage.world.happened("shown files", files=shown)
        return "shown"

    return [jot, tidy, send, paint, show]


def play(stage: Stage) -> Play:
    """Return the play of a run that changes files, lets an agent change some, and shows them all."""
    jot, tidy, send, paint, show = _tools(stage)
    script = stage.model(
        {
            "You write": [
                ToolCall("jot", {"path": "book", "text": "one"}),
                ToolCall("jot", {"path": "scrap", "text": "two"}),
                ToolCall("clerk", {"message": "Go."}),
                ToolCall("tidy"),
                ToolCall("show"),
                "All is written.",
            ],
            "You are a clerk": [ToolCall("send"), ToolCall("paint"), "Sent."],
        }
    )
    clerk = Agent(script, "You are a clerk.", name="clerk", description="Sends.", tools=[send, paint])
    adapter = Adapter(
        script,
        journal=stage.journal,
        filesystem=Workspace("w", cache=stage.folder / f"host{stage.process % 2}"),
        environment=LaterEnvironment(),
        clock=stage.clock,
        new_id=stage.new_id,
    )
    prompt = Prompt("writer", "You write.", tools=[jot, tidy, clerk.as_tool(), show])
    return Play(adapter, prompt, "Go.", Person(approve=True, answers={"colour": {"name": "blue"}}))


def sent_at_most_once(seen: Seen) -> str | None:
    sent = seen.world.count("sent")
    return None if sent <= 1 else f"sent {sent} times"


def files_are_those_of_the_committed_calls(seen: Seen) -> str | None:
    """Return a problem if a line is missing or appears twice, on whichever host the run ended. Otherwise, return None.

    If the call that sends the letter was interrupted, its outcome is unknown, and the letter's copy and the colour may be
    missing.
    """
    shown = seen.world.all("shown files")
    if not shown:
        return None
    files = shown[-1].details["files"]
    book, rest = files.pop("shelf/book", ""), {path: text for path, text in files.items() if path != "colour"}
    is_whole = book == "one\nsent\n" and files.get("colour") == "blue"
    if rest or not (is_whole or book == "one\n"):
        return f"the files are {shown[-1].details['files']}, and the book is {book!r}"
    return None


WRITING = Scenario(
    name="a writer moves from host to host",
    play=play,
    laws=[sent_at_most_once, files_are_those_of_the_committed_calls],
)
