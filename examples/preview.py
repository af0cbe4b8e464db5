"""Approve what you see: an agent on a real folder, whose changes a person is shown before they happen.

Three times the same run: approved, denied, and with somebody editing the file while it is looked at. Then
a command that fails half-way, and the folder is as it was; and a call that was approved, undone afterwards.
The model is scripted and the person answers by rule; everything else is real. It ends by itself.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from handrail import (
    Adapter,
    Allow,
    CapabilityPolicy,
    DirectoryFilesystem,
    FileTools,
    Prompt,
    ScriptedModel,
    Session,
    Shell,
    ShellTools,
    ToolCall,
)
from handrail.events import ToolInvoked
from handrail.question import Question
from handrail.testing import Person

SHELL = Shell([Allow("make", ...)])
PROMPT = Prompt(
    "tidy",
    [FileTools(), ShellTools(SHELL)],
    policies=[CapabilityPolicy({"fs.write": "ask", "proc.exec": "allow"})],
)
READ = ToolCall("read_file", {"path": "plan.md"})


def edit(id: str) -> ToolCall:
    return ToolCall("edit_file", {"path": "plan.md", "old": "monday", "new": "Monday"}, id)


def run(folder: Path, person: Person, *calls: ToolCall) -> Session:
    """One run of the prompt on the folder, with these calls."""
    session = Session()
    session.dispatcher.subscribe(ToolInvoked, show)
    model = ScriptedModel([READ, *calls, "Done."])
    files = DirectoryFilesystem(folder)
    Adapter(model, environment=person).evaluate(PROMPT, "Tidy up.", session=session, filesystem=files).wait()
    files.close()
    return session


def show(event: ToolInvoked) -> None:
    if event.tool != "read_file":
        print(indented(f"{event.tool}: {event.result.render()}"))


def indented(text: str) -> str:
    return "\n".join(f"   {line}" for line in text.rstrip().splitlines())


def asking(answer: bool, meanwhile: Path | None = None) -> Person:
    """A person who is shown the diff, and answers; somebody else may be at the file meanwhile."""
    asked: list[Question] = []

    def approve(question: Question) -> bool:
        asked.append(question)
        print(f"   {question.message}. This is what it did:\n{indented(question.payload['diff'])}")
        if meanwhile is not None and len(asked) == 1:
            print("   (somebody adds a line to the file while you look)")
            meanwhile.write_text(meanwhile.read_text() + "call mum\n")
        print(f"   > {'yes' if answer else 'no'}")
        return answer

    return Person(approve=approve)


def main() -> None:
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary, "work")
        folder.mkdir()
        plan = folder / "plan.md"
        plan.write_text("see Anna on monday\n")

        print("1. Denied: nothing happened.")
        run(folder, asking(False), edit("denied"))
        print(f"   plan.md: {plan.read_text()!r}\n")

        print(
            "2. Somebody changes the file meanwhile: their line stays, and a yes to the old is no yes to the new."
        )
        run(folder, asking(True, meanwhile=plan), edit("too late"), READ, edit("approved"))
        print(f"   plan.md: {plan.read_text()!r}\n")

        print("3. A command that fails half-way leaves the folder as it was.")
        (folder / "Makefile").write_text("all:\n\techo half > made.txt\n\trm plan.md\n\tfalse\n")
        run(folder, asking(True), ToolCall("run_command", {"command": ["make", "-s"]}))
        print(f"   in the folder: {', '.join(sorted(path.name for path in folder.iterdir()))}\n")

        print("4. What was approved can be undone, as long as nobody has changed it since.")
        files = DirectoryFilesystem(folder)
        print(f"   undone: {', '.join(files.undo('approved'))}")
        print(f"   plan.md: {plan.read_text()!r}")
        files.close()


if __name__ == "__main__":
    main()
