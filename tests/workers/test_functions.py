"""`tools.py`: which of its functions and tools a worker's file can list."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from handrail import Adapter, Prompt, ScriptedModel, ToolCall
from handrail.errors import WorkerError
from handrail.testing import Nobody, Person, recorded, worker_context
from handrail.workers import WorkerRegistry, WorkerUserContext
from support.texts import ANSWER_NOT_DECLARED
from support.worker_folders import folder, sound

TOOLS = """
from dataclasses import dataclass
from handrail import Agent, Handoff, ScriptedModel, Tool, ToolContext, ToolResult, tool
from handrail.handoff import Parked

@dataclass
class Offer:
    cards: int

@dataclass
class Pick:
    index: int

pick_card = Handoff("pick_card", "Let the other side pick a card.", params=Offer, effect="read")

@pick_card.client
async def choose(offer: Offer, *, context: ToolContext) -> Pick:
    return Pick(offer.cards - 1)

class Loud(Tool):
    pass

def answer(value):
    async def handler(params: Offer, *, context: ToolContext) -> ToolResult[int]:
        return ToolResult.ok(params.cards + value)
    return handler

loud = Loud("add", "Add one.", answer(1), effect="pure")
reader = Agent(ScriptedModel(["I read it."]), "Read.", name="reader", description="Reads.").as_tool()
"""


async def test_any_tool_defined_there_can_be_listed(tmp_path: Path) -> None:
    """A `Handoff`, a subclass of `Tool` and an agent's tool run in a worker that lists them."""
    registry = sound(tmp_path, TOOLS, main="---\ntools: [pick_card, add, reader]\n---\nGo.")
    assert registry["main"].tools == ("pick_card", "add", "reader")
    calls = [
        ToolCall("pick_card", {"cards": 3}),
        ToolCall("add", {"cards": 3}),
        ToolCall("reader", {"message": "x"}),
    ]
    script = ScriptedModel([calls, "end"])
    await registry.run("main", "go", model=script)
    assert script.requests[1].messages[-1].text == '{"index":2}\n4\nI read it.'


def test_an_imported_tool_is_not_defined_there(tmp_path: Path) -> None:
    """Tools that `tools.py` imports, by name, under another name or with `*`, can't be listed. A tool made from one of them can."""
    (tmp_path / "deck_of_cards.py").write_text(textwrap.dedent(TOOLS))
    tools = """
    from deck_of_cards import *
    from deck_of_cards import reader as other
    from deck_of_cards import loud

    def inner():
        loud = other
    own = loud.with_words(description="Add it up.")
    """
    registry = folder(tmp_path, tools, main="---\ntools: [pick_card, reader]\n---\nGo.")
    said = [each.problem for each in registry.check()]
    assert said == [f"there is no function {name!r} defined in tools.py" for name in ("pick_card", "reader")]
    (tmp_path / "main.md").write_text("---\ntools: [add]\n---\nGo.")
    (made,) = WorkerRegistry(tmp_path)["main"].prompt.tools
    assert made.description == "Add it up."


def test_a_handoff_that_is_not_complete_is_reported_at_its_line(tmp_path: Path) -> None:
    """A handoff that does not declare its answer's type is reported in `tools.py`, on the line that creates it."""
    tools = "from handrail import Handoff\n\nask = Handoff('ask', 'Ask somebody.')\n"
    registry = folder(tmp_path, tools, main="---\ntools: [ask]\n---\nGo.", ask="---\n---\nGo.")
    by_file = {Path(each.file).name: each for each in registry.check()}
    assert by_file["tools.py"].line == 3
    assert ANSWER_NOT_DECLARED in by_file["tools.py"].problem
    assert "tools.py:3 also defines a function 'ask'" in by_file["ask.md"].problem


TWICE = """
from typing import overload
from handrail import Tool, ToolContext, ToolResult, tool

@tool
def add(a: int) -> int:
    "Add one."
    return a + 1

@tool
def add(a: int) -> int:
    "Add two."
    return a + 2

def named(value):
    async def handler(params: None, *, context: ToolContext) -> ToolResult[int]: ...
    return handler

one = Tool("take", "Take one.", named(1))
other = Tool("take", "Take two.", named(2))
same = alias = Tool("give", "Give.", named(1))

@overload
def find(a: int) -> int: ...
@overload
def find(a: str) -> str: ...
def find(a):
    "Find it."
    return a

if True:
    def pick() -> str:
        "Pick."
        return "this"
else:
    def pick() -> str:
        "Pick."
        return "that"

def put() -> str:
    "Put."
    return "put"
put = tool(put)
"""


def test_two_tools_of_one_name_are_refused(tmp_path: Path) -> None:
    """Two tools of a listed name are refused with both lines. Overloads, branches and aliases do not count as two."""
    registry = folder(tmp_path, TWICE, main="---\ntools: [add, take]\n---\nGo.")
    assert [each.problem for each in registry.check()] == [
        "there are 2 tools named 'add': tools.py:5 and tools.py:10",
        "there are 2 tools named 'take': tools.py:19 and tools.py:20",
    ]
    sound(tmp_path, TWICE, main="---\ntools: [give, pick, put]\n---\nGo.")
    found = folder(tmp_path, TWICE, main="---\ntools: [find]\n---\nGo.").check()
    assert not any("tools named" in each.problem for each in found)


def test_one_file_is_checked_by_itself(tmp_path: Path) -> None:
    """`check_file` reports the problems of one worker's file.

    Those of `tools.py` are reported too, unless the file is valid and lists no functions.
    """
    folder(
        tmp_path,
        "1 / 0\n",
        plain="---\n---\nGo.",
        bad="---\ntols: [a]\n---\nGo.",
        uses="---\ntools: [a]\n---\nGo.",
    )
    assert WorkerRegistry.check_file(tmp_path / "plain.md") == []
    found = {
        name: [(Path(each.file).name, each.line) for each in WorkerRegistry.check_file(tmp_path / name)]
        for name in ("bad.md", "uses.md")
    }
    assert found == {"bad.md": [("bad.md", 2), ("tools.py", 1)], "uses.md": [("tools.py", 1)]}


# --- a worker with a person -----------------------------------------------------------------------

ASKS = '''
from handrail import tool
from handrail.workers import WorkerUserContext

@tool(effect="read")
async def confirm(context: WorkerUserContext) -> str:
    """Ask which of the workers is meant."""
    name = await context.wait_for("which", {"there": list(context.registry.names)}, str)
    return f"{name} of {', '.join(context.registry.names)}"
'''


async def test_a_workers_tool_can_require_a_person(tmp_path: Path) -> None:
    """A `WorkerUserContext` gives a tool the worker's registry and a person to ask.

    Without a worker or a person, the tool is not offered.
    """
    registry = sound(
        tmp_path, ASKS, main="---\ntools: [confirm]\nworkers: [helper]\n---\nGo.", helper="---\n---\nHelp."
    )
    script = ScriptedModel([ToolCall("confirm", {}), "end"])
    await registry.run("main", "go", model=script, environment=Person(answers={"which": "helper"}))
    assert script.requests[1].messages[-1].text == "helper of helper"
    alone = ScriptedModel(["end"])
    await registry.run("main", "go", model=alone, environment=Nobody())
    assert "confirm" not in [each.tool.name for each in alone.requests[0].tools]
    (confirm,) = [each for each in registry["main"].prompt.tools if each.name == "confirm"]
    outside = ScriptedModel(["end"])
    await Adapter(outside, environment=Person(approve=True)).evaluate(
        Prompt("p", "Go.", tools=[confirm]), "go"
    )
    assert list(outside.requests[0].tools) == []


async def test_a_worker_context_with_answers_has_a_person() -> None:
    """`worker_context(answers=...)` is a `WorkerUserContext`, for testing handlers that take one."""
    context = worker_context(workers={"helper": "Helps."}, answers={"which": "helper"})
    assert isinstance(context, WorkerUserContext)
    assert await context.wait_for("which", None, str) == "helper"
    assert recorded(context).questions == [("which", None)]
    assert not isinstance(worker_context(), WorkerUserContext)


RUNS = "import pathlib\npathlib.Path(__file__).with_name('ran').touch()\n"


def test_a_parsed_folder_is_checked_and_listed_without_running_its_tools(tmp_path: Path) -> None:
    """With `parsed`, whatever a worker can list is found in the source of `tools.py`, and nothing in the file runs."""
    for number, (source, tools) in enumerate(
        [(TOOLS, ("pick_card", "add", "reader")), (TWICE, ("give", "pick", "put", "find"))]
    ):
        here = tmp_path / str(number)
        here.mkdir()
        registry = folder(here, source + RUNS, main=f"---\ntools: [{', '.join(tools)}]\n---\nGo.")
        parsed = WorkerRegistry(registry.folder, parsed=True)
        assert parsed.check() == []
        assert parsed["main"].tools == tools
        assert WorkerRegistry.worker_at(registry.folder, parsed=True).tools == tools
        assert WorkerRegistry.check_file(registry.folder / "main.md", parsed=True) == []
        assert not (registry.folder / "ran").exists()
        with pytest.raises(WorkerError, match="only parsed"):
            parsed.run("main", "go", model=ScriptedModel(["end"]))
        registry.check()
        assert (registry.folder / "ran").exists()


def test_a_parsed_folder_has_the_problems_that_its_source_shows(tmp_path: Path) -> None:
    """A missing or ambiguous function, a name that is taken, and invalid Python are found by parsing, with their lines."""
    source = "def add(a: int) -> int:\n    return a\n\ndef add(b: int) -> int:\n    return b\n\ndef other() -> int: ...\n"
    workers = {"main": "---\ntools: [add, gone, _hidden]\n---\nGo.", "other": "---\n---\nGo."}
    made = folder(tmp_path, source + "def _hidden() -> int: ...\n" + RUNS, **workers).folder
    problems = [each.problem for each in WorkerRegistry(made, parsed=True).check()]
    assert problems == [
        "there are 2 tools named 'add': tools.py:1 and tools.py:4",
        "there is no function 'gone' defined in tools.py",
        "there is no function '_hidden' defined in tools.py",
        f"{made / 'tools.py'}:7 also defines a function 'other'",
    ]
    (made / "tools.py").write_text(RUNS + "def broken(:\n")
    [problem] = WorkerRegistry(made, parsed=True).check()
    assert (Path(problem.file).name, problem.line) == ("tools.py", 3)
    assert not (made / "ran").exists()
