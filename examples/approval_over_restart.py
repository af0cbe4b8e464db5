"""An approval that waits over a restart: one process asks and ends, another answers, a third goes on.

    python examples/approval_over_restart.py                   # plays all three, each a process of its own
    python examples/approval_over_restart.py ask FOLDER        # or one at a time, as days go by
    python examples/approval_over_restart.py answer FOLDER yes   # or: no "not on a Friday"
    python examples/approval_over_restart.py resume FOLDER

The page is written into FOLDER/site. The call runs before it is approved, in a fork of its own: what waits in the
journal, FOLDER/runs.db, is a question with the diff. `--model provider:name` takes a real model, in `ask` and in `resume`.
"""

from __future__ import annotations

import argparse
import asyncio
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated

from handrail import (
    Adapter,
    CapabilityPolicy,
    DirectoryFilesystem,
    LaterEnvironment,
    PathArg,
    Prompt,
    ScriptedModel,
    SqliteJournal,
    ToolCall,
    ToolContext,
    tool,
)
from handrail.errors import RunParked
from handrail.messages import ModelRequest
from handrail.question import Answer

RUN = "opening-hours"


@tool(effect="staged", capabilities={"fs.write"})
async def publish(page: Annotated[str, PathArg("write")], text: str, context: ToolContext) -> str:
    """Publish a page of the site. Somebody has to approve it."""
    print("  publish was entered")
    context.filesystem.write(page, f"{text}\n")
    return f"{page} is published"


EDITOR = Prompt(
    "editor",
    "Publish the page you are asked for, in one call, then say what became of it in one sentence.",
    tools=[publish],
    policies=[CapabilityPolicy({"fs.write": "ask"})],
)


def script(request: ModelRequest) -> str | ToolCall:
    """What a model might say. It is a function of the conversation, so that it goes on in another process."""
    if len(request.messages) == 1:
        return ToolCall("publish", {"page": "hours.txt", "text": "Open from 10 to 18."})
    return f"I was told: {request.messages[-1].text}"


def adapter(folder: Path, model: str | None) -> Adapter:
    site = folder / "site"
    site.mkdir(parents=True, exist_ok=True)
    return Adapter(
        model or ScriptedModel(script),
        journal=SqliteJournal(folder / "runs.db"),
        filesystem=DirectoryFilesystem(site),
        environment=LaterEnvironment(),
    )


def ask(folder: Path, model: str | None) -> None:
    """Begin the run. It ends when all that is left to do is to wait."""
    try:
        adapter(folder, model).evaluate(
            EDITOR, "Publish our hours, 10 to 18, as hours.txt.", run_id=RUN
        ).wait()
    except RunParked as parked:
        (question,) = parked.questions
        print(f"  the run is parked; it waits for: {question.message}")


def answer(folder: Path, yes: bool, reason: str) -> None:
    """Answer from anywhere that has the journal. The digest binds it to exactly what was seen."""
    journal = SqliteJournal(folder / "runs.db")
    (question,) = asyncio.run(journal.questions.open(RUN))
    print("\n".join(f"  {line}" for line in question.payload["diff"].splitlines()))
    value = {"approved": yes, "reason": reason}
    journal.questions.answer(
        Answer(question_id=question.id, digest=question.digest, by=question.principal, value=value)
    )
    print(f"  answered: {'yes' if yes else f'no, {reason}'}")


def resume(folder: Path, model: str | None) -> None:
    """Go on where it was. The model is not asked again for what it has answered."""
    print(f"  {adapter(folder, model).resume(RUN, EDITOR).wait().text}")


def play(model: str | None) -> None:
    """All of it, twice: once approved and once not."""
    for said in (["yes"], ["no", "not on a Friday"]):
        with tempfile.TemporaryDirectory() as folder:
            for act in (["ask", folder], ["answer", folder, *said], ["resume", folder]):
                extra = ["--model", model] if model and act[0] != "answer" else []
                print(f"{act[0]}, a process of its own:", flush=True)
                subprocess.run([sys.executable, __file__, *act, *extra], check=True)
                print(
                    f"  in the folder: {[path.name for path in Path(folder, 'site').iterdir()]}", flush=True
                )
            print(flush=True)


def main() -> None:
    options = argparse.ArgumentParser(description="An approval that waits over a restart.")
    options.add_argument("act", nargs="?", choices=["play", "ask", "answer", "resume"], default="play")
    options.add_argument("folder", nargs="?", type=Path)
    options.add_argument("answer", nargs="?", choices=["yes", "no"], default="no")
    options.add_argument("reason", nargs="?", default="")
    options.add_argument("--model", help="provider:name; without it, a script")
    given = options.parse_args()
    if given.act == "play":
        play(given.model)
    elif given.folder is None:
        options.error(f"say where: {given.act} FOLDER")
    elif given.act == "ask":
        ask(given.folder, given.model)
    elif given.act == "answer":
        answer(given.folder, given.answer == "yes", given.reason)
    else:
        resume(given.folder, given.model)


if __name__ == "__main__":
    main()
