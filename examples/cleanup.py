"""Clean up data with a preview. Nothing changes before somebody has seen the change.

    python examples/cleanup.py                                   # a small table, a scripted model, a rule that answers
    python examples/cleanup.py --model anthropic:claude-sonnet-5   # a real model; you are asked at the terminal
    python examples/cleanup.py --model openai:gpt-5 --folder ~/data "Clean up contacts.csv."

A call that changes a file runs first in a fork. The person who approves it sees the diff, and approving it
commits exactly that diff. If the file changes meanwhile, the call runs again and the new diff needs approval too.
"""

from __future__ import annotations

import argparse
import csv
import io
import re
import tempfile
from pathlib import Path
from typing import Annotated

from handrail import (
    Agent,
    CapabilityPolicy,
    DirectoryFilesystem,
    FileTools,
    PathArg,
    Prompt,
    ScriptedModel,
    Session,
    TerminalEnvironment,
    ToolCall,
    ToolContext,
    tool,
)
from handrail.events import ToolInvoked
from handrail.question import Question
from handrail.testing import Person

Table = Annotated[str, PathArg("write")]


def rows_of(path: str, context: ToolContext) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(context.filesystem.read(path))))


def save(path: str, rows: list[dict[str, str]], context: ToolContext) -> None:
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    context.filesystem.write(path, text.getvalue())


@tool(effect="staged", capabilities={"fs.write"})
async def tidy_phones(path: Table, column: str, context: ToolContext) -> str:
    """Write the phone numbers of a column in one format: digits only, with +47 in front."""
    rows = rows_of(path, context)
    for row in rows:
        row[column] = "+47" + re.sub(r"\D", "", row[column]).removeprefix("47")
    save(path, rows, context)
    return f"{len(rows)} numbers"


@tool(effect="staged", capabilities={"fs.write"})
async def drop_repeated(path: Table, column: str, context: ToolContext) -> str:
    """Remove each row whose value in a column an earlier row already has, ignoring case."""
    rows = rows_of(path, context)
    first = {row[column].casefold(): row for row in reversed(rows)}
    kept = [row for row in rows if first[row[column].casefold()] is row]
    save(path, kept, context)
    return f"{len(kept)} of {len(rows)} rows kept"


CLEANER = Prompt(
    "cleaner",
    [
        "Clean up the table: phone numbers in one format, nobody listed twice. Read it first. If a call is refused, do as the reason says.",
        FileTools(),
    ],
    tools=[tidy_phones, drop_repeated],
    policies=[CapabilityPolicy({"fs.write": "ask"})],
)
CONTACTS = (
    "name,mail,phone\n"
    "Anna Berg,anna@example.org,22 33 44 55\n"
    "Anna Berg,berg@example.com,+47 99-88-77-66\n"
    "Tom Li,tom@example.org,47 11 22 33 44\n"
    "Tom Li,TOM@example.org,11223344\n"
)
SCRIPT = ScriptedModel(
    [
        ToolCall("read_file", {"path": "contacts.csv"}),
        ToolCall("tidy_phones", {"path": "contacts.csv", "column": "phone"}),
        ToolCall("drop_repeated", {"path": "contacts.csv", "column": "name"}),
        ToolCall("read_file", {"path": "contacts.csv"}),
        ToolCall("drop_repeated", {"path": "contacts.csv", "column": "mail"}, "by-mail"),
        "The numbers have one format, and Tom Li is listed once.",
    ]
)


def rule(folder: Path) -> Person:
    """Return a person who denies a change that removes a row for Anna and adds none, and approves every other change.

    While the first question is open, a row is added to the file, as if somebody else had edited it.
    """
    asked: list[Question] = []

    def look(question: Question) -> bool | str:
        asked.append(question)
        print(f"\n? {question.message}\n{question.payload['diff']}")
        if len(asked) == 1:
            print("  (somebody adds a row to the file while the question is open)")
            with Path(folder, "contacts.csv").open("a") as file:
                file.write("Eve Ode,eve@example.org,55 66 77 88\n")
        lost = "-Anna" in question.payload["diff"] and "+Anna" not in question.payload["diff"]
        answer = "those are two people; go by the mail" if lost else True
        print(f"> {'yes' if answer is True else f'no: {answer}'}")
        return answer

    return Person(approve=look)


def show(event: ToolInvoked) -> None:
    if event.tool != "read_file":
        print(f"- {event.tool}: {event.result.render()}")


def main() -> None:
    options = argparse.ArgumentParser(
        description="Clean up a table; every change is shown before it is made."
    )
    options.add_argument("task", nargs="?", default="Clean up contacts.csv.")
    options.add_argument(
        "--model", help="provider:name; without it, a scripted model cleans the sample table"
    )
    options.add_argument("--folder", type=Path, help="your own folder")
    given = options.parse_args()
    if given.folder and not given.model:
        options.error("the script only cleans the sample table. Name a model: --model provider:name.")
    with tempfile.TemporaryDirectory() as temporary:
        folder: Path = given.folder or Path(temporary, "data")
        if not given.folder:
            folder.mkdir()
            Path(folder, "contacts.csv").write_text(CONTACTS)
        session, files = Session(), DirectoryFilesystem(folder)
        session.dispatcher.subscribe(ToolInvoked, show)
        person = TerminalEnvironment() if given.model else rule(folder)
        agent = Agent(given.model or SCRIPT, CLEANER)
        response = agent.run(given.task, session=session, environment=person, filesystem=files).wait()
        print(f"\n{response.text}")
        if not given.model:
            print(f"\n{Path(folder, 'contacts.csv').read_text()}")
            print(f"The last change is undone in: {', '.join(files.undo('by-mail', run_id=response.run_id))}")
            print(f"{len(Path(folder, 'contacts.csv').read_text().splitlines()) - 1} rows again.")


if __name__ == "__main__":
    main()
