"""A slice whose class has changed since it was recorded is read by the function that the class declares, or names the field."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from handrail.errors import DefinitionError
from handrail.session import SliceRules, kept
from support import importing_support

APP = '''
import asyncio, json, sys
from dataclasses import dataclass
from handrail import Adapter, LaterEnvironment, Prompt, RunParked, ScriptedModel, Session, SqliteJournal, ToolCall, ToolContext, kept, tool

{type}

@tool(effect="staged")
async def note(*, context: ToolContext) -> str:
    """Note something."""
    context.session.dispatch({item})
    return "noted"

@tool(effect="pure")
async def ask(*, context: ToolContext) -> str:
    """Ask somebody, and say what was noted before."""
    before = [str(each) for each in context.session[Note].all()]
    return f"{{await context.wait_for('name', schema=str)}} {{before}}"

async def main():
    journal = SqliteJournal("runs.db", watch=None)
    model = ScriptedModel([ToolCall("note"), ToolCall("ask")] if sys.argv[1] == "park" else ["end"])
    adapter = Adapter(model, journal=journal, environment=LaterEnvironment())
    prompt = Prompt("p", "Do.", tools=[note, ask])
    if sys.argv[1] == "park":
        try:
            await adapter.evaluate(prompt, "go", run_id="r", session=Session(id="s"))
        except RunParked:
            print("parked")
    else:
        from handrail.question import Answer
        for question in await journal.questions.open("r"):
            journal.questions.answer(Answer(question_id=question.id, digest=question.digest, by=question.principal, value="ann"))
        await adapter.resume("r", prompt)
        print(json.loads((await journal.calls.load("r"))[-1].result)["text"])
    journal.close()

asyncio.run(main())
'''
WAS = "@dataclass(frozen=True)\nclass Note:\n    text: str"
IS = "@kept({how})\n@dataclass(frozen=True)\nclass Note:\n    title: str\n    number: int"
ITEMS = {WAS: 'Note("milk")'}


def run(folder: Path, type: str, what: str) -> str:
    """Run the app with this declaration of its slice, in a process of its own, and return what it printed."""
    item = ITEMS.get(type, 'Note("milk", 1)')
    (folder / "app.py").write_text(APP.format(type=type, item=item))
    command = [sys.executable, "app.py", what]
    done = subprocess.run(command, cwd=folder, env=importing_support(), capture_output=True, text=True)
    return done.stdout if done.returncode == 0 else done.stderr.splitlines()[-1]


def test_a_parked_run_goes_on_with_the_items_that_the_function_makes(tmp_path: Path):
    """A run that was parked with the former class is resumed with the new one: its items are what the function returns."""
    assert run(tmp_path, WAS, "park") == "parked\n"
    resumed = run(tmp_path, IS.format(how='upgrade=lambda value: Note(value["text"].title(), 7)'), "resume")
    assert resumed == """ann ["Note(title='Milk', number=7)"]\n"""


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("", ("SessionError", "an item of Note does not match its type: title: Field required", "@kept(upgrade=...)")),
        ("upgrade=lambda value: value['none']", ("SessionError", "the upgrade of Note raised KeyError: 'none'")),
        ("upgrade=lambda value: value", ("SessionError", "the upgrade of Note returned", "Return an item of the type Note")),
    ],
)  # fmt: skip
def test_a_run_that_can_not_go_on_names_the_slice_and_the_field(
    tmp_path: Path, how: str, words: tuple[str, ...]
):
    """Without a function, the run names the slice and its first field that does not match. A function that fails is named too."""
    run(tmp_path, WAS, "park")
    refused = run(tmp_path, IS.format(how=how or "kind='state'"), "resume")
    assert all(each in refused for each in words), refused
    assert run(tmp_path, WAS, "resume") == """ann ["Note(text='milk')"]\n"""


def test_an_item_that_still_matches_is_not_changed(tmp_path: Path):
    """The function is only called for items that no longer match."""
    same = f"@kept(upgrade=lambda value: 1 / 0)\n{WAS}"
    ITEMS[same] = ITEMS[WAS]
    assert run(tmp_path, same, "park") == "parked\n"
    assert run(tmp_path, same, "resume") == """ann ["Note(text='milk')"]\n"""


def test_an_upgrade_that_is_no_function_is_refused():
    """The argument is checked where the slice is declared."""
    wrong: Any = "title"
    for declare in (lambda: kept(upgrade=wrong), lambda: SliceRules(upgrade=wrong)):
        with pytest.raises(DefinitionError, match="the upgrade of a slice is 'title', not a function"):
            declare()
