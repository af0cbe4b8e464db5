"""Tools, and functions that record runs, for tests of the commands that work on recorded runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from handrail import Adapter, Prompt, Tool, ToolContext, tool
from handrail.environment import LaterEnvironment
from handrail.journal.sqlite import SqliteJournal
from handrail.models.scripted import ScriptedModel
from handrail.question import Question
from handrail.resources.directory import DirectoryFilesystem
from handrail.run.call import ToolCall
from support.parked_runs import answer_to


@dataclass(frozen=True)
class Noted:
    """A piece of state that the tool `note` adds."""

    text: str


@dataclass(frozen=True)
class Counted:
    """A piece of state that the tool `count` adds."""

    number: int


class Pick(BaseModel):
    """The answer that the tool `choose` asks for."""

    n: int


@tool(effect="staged")
async def note(text: str, context: ToolContext) -> str:
    """Note something down."""
    context.session.dispatch(Noted(text))
    return f"noted {text}"


@tool(effect="read")
async def notes(context: ToolContext) -> str:
    """Return everything that was noted down."""
    return ", ".join(each.text for each in context.session[Noted].all())


@tool(effect="staged")
async def count(number: int, context: ToolContext) -> str:
    """Keep a number."""
    context.session.dispatch(Counted(number))
    return f"counted {number}"


@tool(effect="staged")
async def write(path: str, text: str, context: ToolContext) -> str:
    """Write a file."""
    context.filesystem.write(path, text)
    return f"wrote {path}"


@tool(effect="read")
async def read(path: str, context: ToolContext) -> str:
    """Read a file."""
    return str(context.filesystem.read(path))


@tool(effect="staged")
async def choose(context: ToolContext) -> str:
    """Ask somebody for a number."""
    assert context.wait_for
    return f"got {(await context.wait_for('pick', {}, Pick)).n}"


@tool
async def send(text: str) -> str:
    """Send something away, irreversibly."""
    return f"sent {text}"


TOOLS: Sequence[Tool[Any, Any]] = (note, notes, count, write, read, choose, send)
PROMPT: Prompt[None] = Prompt("work", "Do what is asked.", tools=TOOLS)


def call(name: str, **arguments: Any) -> ToolCall:
    return ToolCall(name, arguments)


class Recorder:
    """A journal and a folder, with methods that record runs in them."""

    def __init__(self, base: Path, **options: Any) -> None:
        self.base = base
        self.folder = base / "files"
        self.folder.mkdir(exist_ok=True)
        self.journal = SqliteJournal(base / "runs.db", watch=None, **options)
        self.files = DirectoryFilesystem(self.folder)

    def close(self) -> None:
        self.files.close()
        self.journal.close()

    def adapter(self, *script: Any, **options: Any) -> Adapter:
        options.setdefault("environment", LaterEnvironment())
        return Adapter(ScriptedModel(list(script)), journal=self.journal, filesystem=self.files, **options)

    async def run(
        self, run_id: str, *script: Any, prompt: Prompt[Any] = PROMPT, message: str = "go", **options: Any
    ) -> Any:
        return await self.adapter(*script).evaluate(prompt, message, run_id=run_id, **options)

    async def ids(self, run_id: str) -> list[str]:
        """Return the ids of a run's recorded calls, in order."""
        return [unit.call_id for unit in await self.journal.calls.load(run_id)]

    def answer(self, question: Question, value: Any) -> None:
        self.journal.questions.answer(answer_to(question, value))
