"""Recorded file changes whose folder is gone are reported and stay unapplied until it is back or they are discarded."""

import asyncio
import json
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest
from typer.testing import CliRunner

from handrail import ToolContext, ToolResult, open_gate, tool
from handrail.cli.runs_commands import app
from handrail.errors import RunError, RunParked, UndoRefused
from handrail.events import MessageAdded
from handrail.messages import UserMessage
from handrail.resources.directory import DirectoryFilesystem
from handrail.runs import discard, forget, list_runs, show, unapplied, undo
from support.damage import unapply
from support.recorded import PROMPT, Noted, Recorder, call


@pytest.fixture
def recorder(tmp_path: Path) -> Iterator[Recorder]:
    made = Recorder(tmp_path)
    yield made
    made.close()


async def lose(recorder: Recorder) -> str:
    """Record a parked run that wrote a file, as if its process had ended before the file was renamed into place.

    Its folder is moved away, and an empty folder takes its place. Returns the id of the call that wrote the file.
    """
    with pytest.raises(RunParked):
        await recorder.run(
            "r", call("note", text="x"), call("write", path="a", text="1"), call("choose"), "end"
        )
    _, wrote = await recorder.ids("r")
    unapply(recorder.base / "runs.db", wrote)
    recorder.files.close()
    recorder.folder.rename(recorder.base / "away")
    recorder.folder.mkdir()
    recorder.files = DirectoryFilesystem(recorder.folder)
    return wrote


async def test_a_run_is_not_resumed_until_its_changes_are_applied_or_discarded(recorder: Recorder):
    """While a call's changes are unapplied, its run can't be resumed, and the call can't be undone.

    Once the changes are discarded, the run can be resumed, and the model is told that they were lost.
    """
    wrote = await lose(recorder)
    (question,) = await recorder.journal.questions.open("r")
    recorder.answer(question, {"n": 1})
    with pytest.raises(
        RunError, match=f"what its call '{wrote}' changed in .* is not applied.*runs discard r {wrote}"
    ):
        await recorder.adapter("end").resume("r", PROMPT)
    with pytest.raises(UndoRefused, match="its changes are not applied yet"):
        await undo(recorder.journal, "r", wrote, recorder.files)
    assert await discard(recorder.journal, "r", wrote) == ["a"]
    assert await unapplied(recorder.journal) == ()
    response = await recorder.adapter("end").resume("r", PROMPT)
    assert [each.text for each in response.session[Noted].all()] == ["x"]
    told = [
        each.message for each in response.session[MessageAdded].all() if isinstance(each.message, UserMessage)
    ]
    assert told[-1].text.startswith(
        f"The call write ({wrote}) was recorded, but its changes to files were lost"
    )
    assert "file a" in told[-1].text
    with pytest.raises(UndoRefused, match="it has already been discarded"):
        await undo(recorder.journal, "r", wrote, recorder.files)


async def test_the_changes_are_applied_where_the_folder_is(recorder: Recorder):
    """If the folder was moved and is opened at its new place, the run continues and its changes are applied there."""
    await lose(recorder)
    recorder.files.close()
    recorder.files = DirectoryFilesystem(recorder.base / "away")
    (question,) = await recorder.journal.questions.open("r")
    recorder.answer(question, {"n": 1})
    await recorder.adapter("end").resume("r", PROMPT)
    assert await unapplied(recorder.journal) == ()
    assert (recorder.base / "away" / "a").read_text() == "1"


async def test_runs_show_what_is_not_applied(recorder: Recorder):
    """The list of runs counts a run's calls whose changes are not applied. The run's tree says which they are, and why."""
    wrote = await lose(recorder)
    (line,) = await list_runs(recorder.journal)
    assert line.unapplied == 1
    (found,) = (await show(recorder.journal, "r")).unapplied
    assert (found.run_id, found.call_id, found.root) == ("r", wrote, str(recorder.folder))
    assert found.problem.startswith(
        "a different folder is there now. If the folder was moved, open it at its new place"
    )
    recorder.folder.rmdir()
    (found,) = await unapplied(recorder.journal, "r")
    assert found.problem.startswith("the folder is not there.")
    assert await unapplied(recorder.journal, "other") == ()


async def test_a_run_with_changes_that_are_not_applied_is_not_forgotten(recorder: Recorder):
    """A finished run is not forgotten until its changes are applied or discarded."""
    await recorder.run("done", call("write", path="a", text="1"), "end")
    unapply(recorder.base / "runs.db")
    now = datetime.max.replace(tzinfo=UTC)
    assert await forget(recorder.journal, before=now) == ()
    (wrote,) = await recorder.ids("done")
    await discard(recorder.journal, "done", wrote)
    assert await forget(recorder.journal, before=now) == ("done",)


async def test_only_what_waits_to_be_applied_is_discarded(recorder: Recorder):
    """Changes that have been applied can't be discarded."""
    await recorder.run("r", call("write", path="a", text="1"), "end")
    (wrote,) = await recorder.ids("r")
    with pytest.raises(RunError, match=f"its call '{wrote}' has no changes that wait to be applied"):
        await discard(recorder.journal, "r", wrote)


def test_the_command_line_says_what_is_not_applied_and_discards_it(recorder: Recorder):
    """`list` and `show` report changes that are not applied. `show` says how to give them up, and `discard` gives them up."""
    wrote = asyncio.run(lose(recorder))
    recorder.journal.close()
    journal = ["--journal", str(recorder.base / "runs.db")]

    def said(*words: str) -> str:
        result = CliRunner().invoke(app, [*words, *journal], prog_name="handrail runs")
        assert result.exit_code == 0, result.output
        return result.output

    assert "\t1 answer, 1 folder\t" in said("list")
    assert json.loads(said("list", "--json"))["runs"][0]["unapplied"] == 1
    shown = said("show", "r")
    assert (
        f"! What the call '{wrote}' of run 'r' changed in '{recorder.folder}' is not applied: a different"
        in shown
    )
    assert "To give these changes up: handrail runs discard r" in shown
    assert json.loads(said("show", "r", "--json"))["unapplied"][0]["call_id"] == wrote
    assert said("discard", "r", wrote).startswith(
        f"Discarded the recorded changes of {wrote}: a. The model is told"
    )
    assert "\t1 answer\t" in said("list")
    assert "not applied" not in said("show", "r")


DYING = """
    import os, sys
    from handrail import Adapter, DirectoryFilesystem, Prompt, ScriptedModel, SqliteJournal, ToolCall, ToolContext, tool
    from handrail.resources.directory.disk import Disk

    class Dying(Disk):
        def exchange(self, *arguments):
            os._exit(9)

    @tool(effect="staged")
    async def change(context: ToolContext) -> None:
        '''Change a file.'''
        context.filesystem.write("x", "theirs")

    files = DirectoryFilesystem(sys.argv[1], disk=Dying())
    adapter = Adapter(ScriptedModel([ToolCall("change", {}), "done"]), journal=SqliteJournal(sys.argv[2]))
    adapter.evaluate(Prompt("p", "Change.", tools=[change]), filesystem=files, run_id="r").wait()
"""


@pytest.mark.once
def test_files_are_free_again_once_the_changes_of_a_dead_process_are_discarded(tmp_path: Path):
    """A call with another journal is told to discard them. Then it can change the file, which is as it was before."""
    root = tmp_path / "root"
    root.mkdir()
    (root / "x").write_text("1")
    path = str(tmp_path / "runs.db")
    script = [sys.executable, "-c", textwrap.dedent(DYING), str(root), path]
    assert subprocess.run(script, check=False).returncode == 9

    @tool(effect="staged")
    async def extend(context: ToolContext) -> None:
        """Extend a file."""
        context.filesystem.append("x", "+")

    async def extended() -> ToolResult[None]:
        with DirectoryFilesystem(root) as files:
            return await open_gate([extend], filesystem=files).invoke("extend")

    remedy = re.search("handrail runs (discard r .*)`", asyncio.run(extended()).message)
    assert remedy
    said = CliRunner().invoke(app, [*remedy[1].split(), "--journal", path], prog_name="handrail runs")
    assert said.exit_code == 0, said.output
    assert asyncio.run(extended()).success
    assert (root / "x").read_text() == "1+"
