"""An approval survives a restart. One process asks and ends, another answers, and a third continues.

    python examples/approval_over_restart.py                   # runs all three, each in its own process
    python examples/approval_over_restart.py ask FOLDER        # or one at a time, as days go by
    python examples/approval_over_restart.py answer FOLDER yes   # or: no "not on a Friday"
    python examples/approval_over_restart.py resume FOLDER

The page is written to FOLDER/site. The call runs before it is approved, in its own fork, so the question
that waits in the journal FOLDER/runs.db has a diff. `--model provider:name` uses a real model, in `ask` and in `resume`.
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
    Agent,
    Answer,
    CapabilityPolicy,
    DirectoryFilesystem,
    LaterEnvironment,
    PathArg,
    Prompt,
    RunParked,
    ScriptedModel,
    SqliteJournal,
    ToolCall,
    ToolContext,
    tool,
)
from handrail.messages import ModelRequest

RUN = "opening-hours"


@tool(effect="staged", capabilities={"fs.write"})
async def publish(page: Annotated[str, PathArg("write")], text: str, context: ToolContext) -> str:
    """Publish a page of the site. Somebody has to approve it."""
    print("  publish was entered")
    context.filesystem.write(page, f"{text}\n")
    return f"{page} is published"


EDITOR = Prompt(
    "editor",
    "Publish the requested page in one call, then say in one sentence whether it was published.",
    tools=[publish],
    policies=[CapabilityPolicy({"fs.write": "ask"})],
)


def script(request: ModelRequest) -> str | ToolCall:
    """Answer as a model might. The answer depends only on the conversation, so another process can continue."""
    if len(request.messages) == 1:
        return ToolCall("publish", {"page": "hours.txt", "text": "Open from 10 to 18."})
    return f"I was told: {request.messages[-1].text}"


def editor(folder: Path, model: str | None) -> Agent[None]:
    """Create the agent with its journal, its files, and a person who answers later."""
    site = folder / "site"
    site.mkdir(parents=True, exist_ok=True)
    adapter = Adapter(
        model or ScriptedModel(script),
        journal=SqliteJournal(folder / "runs.db"),
        filesystem=DirectoryFilesystem(site),
        environment=LaterEnvironment(),
    )
    return Agent(adapter, EDITOR)


def ask(folder: Path, model: str | None) -> None:
    """Start the run. It is parked as soon as its call waits for approval."""
    try:
        editor(folder, model).run("Publish our hours, 10 to 18, as hours.txt.", run_id=RUN).wait()
    except RunParked as parked:
        (question,) = parked.questions
        print(f"  the run is parked; it waits for: {question.message}")


def answer(folder: Path, yes: bool, reason: str) -> None:
    """Answer from any process that has the journal. The digest binds the answer to exactly what was shown."""
    journal = SqliteJournal(folder / "runs.db")
    (question,) = asyncio.run(journal.questions.open(RUN))
    print("\n".join(f"  {line}" for line in question.payload["diff"].splitlines()))
    value = {"approved": yes, "reason": reason}
    journal.questions.answer(
        Answer(question_id=question.id, digest=question.digest, by=question.principal, value=value)
    )
    print(f"  answered: {'yes' if yes else f'no, {reason}'}")


def resume(folder: Path, model: str | None) -> None:
    """Continue where the run stopped. The model's recorded answers are not requested again."""
    print(f"  {editor(folder, model).resume(RUN).wait().text}")


def play(model: str | None) -> None:
    """Run all three steps twice. The first time the change is approved, the second time it is denied."""
    for said in (["yes"], ["no", "not on a Friday"]):
        with tempfile.TemporaryDirectory() as folder:
            for act in (["ask", folder], ["answer", folder, *said], ["resume", folder]):
                extra = ["--model", model] if model and act[0] != "answer" else []
                print(f"{act[0]}, in its own process:", flush=True)
                subprocess.run([sys.executable, __file__, *act, *extra], check=True)
                print(
                    f"  in the folder: {[path.name for path in Path(folder, 'site').iterdir()]}", flush=True
                )
            print(flush=True)


def main() -> None:
    options = argparse.ArgumentParser(description="An approval that survives a restart.")
    options.add_argument("act", nargs="?", choices=["play", "ask", "answer", "resume"], default="play")
    options.add_argument("folder", nargs="?", type=Path)
    options.add_argument("answer", nargs="?", choices=["yes", "no"], default="no")
    options.add_argument("reason", nargs="?", default="")
    options.add_argument("--model", help="provider:name; without it, a scripted model is used")
    given = options.parse_args()
    if given.act == "play":
        play(given.model)
    elif given.folder is None:
        options.error(f"name a folder: {given.act} FOLDER")
    elif given.act == "ask":
        ask(given.folder, given.model)
    elif given.act == "answer":
        answer(given.folder, given.answer == "yes", given.reason)
    else:
        resume(given.folder, given.model)


if __name__ == "__main__":
    main()
