"""A program whose tool issues a ticket and waits. Started again, the program redeems the ticket.

Both processes use the same journal and folder.

    python ticket_app.py FOLDER give ok|fail|resume EFFECT   writes the ticket to FOLDER/ticket, and waits for FOLDER/go
    python ticket_app.py FOLDER redeem - EFFECT              redeems the ticket, and prints the result
    python ticket_app.py FOLDER hang - EFFECT                begins to redeem the ticket, prints `begun`, and never ends
"""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

from handrail import (
    Adapter,
    Budget,
    DirectoryFilesystem,
    Prompt,
    ScriptedModel,
    SqliteJournal,
    Tool,
    ToolCall,
    ToolContext,
    tool,
)
from handrail.errors import TicketError
from handrail.run.redemption import redeem
from support.rig import Note


def giving(folder: Path, end: str, effect: Any) -> Tool[Any, Any]:
    @tool(effect=effect, capabilities=["fs.write"])
    async def work(text: str, context: ToolContext) -> str:
        """Have the work done by another process."""
        left = context.budget_tracker.remaining()
        context.session.dispatch(Note(f"{text} here"))
        (folder / "ticket").write_text(context.ticket())
        print("given", flush=True)
        shared = context.budget_tracker.remaining()
        while not (folder / "go").exists():
            await asyncio.sleep(0.01)
        if end == "fail":
            raise RuntimeError("no")
        return json.dumps([left["tool_calls"], shared["tool_calls"]])

    return work


def working(hang: bool, effect: Any) -> Tool[Any, Any]:
    @tool(effect=effect, capabilities=["fs.write"])
    async def work(text: str, context: ToolContext) -> str:
        """Do the work."""
        context.session.dispatch(Note(f"{text} there"))
        context.filesystem.write("done.txt", f"{len(context.session[Note].all())} by {context.call_id}")
        if hang:
            print("begun", flush=True)
            await asyncio.get_running_loop().create_future()
        return f"{text} at depth {context.depth}, {context.budget_tracker.remaining()['tool_calls']:g} left"

    return work


@tool(effect="staged")
async def first(context: ToolContext) -> str:
    """Commit a change."""
    context.session.dispatch(Note("before"))
    return "left"


def answers(request: Any) -> Any:
    return [ToolCall("first"), ToolCall("work", {"text": "done"}), "over"][len(request.messages) // 2]


async def give(folder: Path, end: str, effect: str) -> None:
    journal = SqliteJournal(folder / "runs.db")
    files = DirectoryFilesystem(folder / "files")
    script = ScriptedModel(answers)
    adapter = Adapter(script, journal=journal, filesystem=files)
    prompt = Prompt("p", "Do.", tools=[giving(folder, end, effect), first])
    if end == "resume":
        response = await adapter.resume("run", prompt)
    else:
        response = await adapter.evaluate(prompt, "go", run_id="run", budget=Budget(tool_calls=12))
    notes = [note.text for note in response.session[Note].all()]
    told = [each.text for each in script.requests[-1].messages][-1]
    print(json.dumps({"notes": notes, "told": told, "text": response.text}))
    files.close()
    journal.close()


async def take(folder: Path, hang: bool, effect: str) -> None:
    journal = SqliteJournal(folder / "runs.db")
    files = DirectoryFilesystem(folder / "files")
    text = (folder / "ticket").read_text()
    try:
        work = working(hang, effect)
        result = await redeem(text, {"text": "done"}, tool=work, journal=journal, filesystem=files)
        print(result.render())
    except TicketError as error:
        print(error)
    files.close()
    journal.close()


if __name__ == "__main__":
    where, mode, end, effect = Path(sys.argv[1]), *sys.argv[2:]
    asyncio.run(give(where, end, effect) if mode == "give" else take(where, mode == "hang", effect))
