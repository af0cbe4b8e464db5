"""Recorded runs as cases of pydantic-evals. `test_inspect.py` has one as a sample."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from pydantic_evals import Dataset
from pydantic_evals.evaluators import EqualsExpected

from handrail import Agent, MemoryFilesystem, MemoryJournal, ScriptedModel, ToolCall, ToolContext, tool
from handrail.errors import DefinitionError, RunError
from handrail.evals import AgentTask, FinalFiles, check_report, recorded_case
from handrail.messages import AssistantMessage, UserMessage
from handrail.runs import make_case


@tool(effect="staged")
async def sell(item: str, context: ToolContext) -> str:
    """Sell an item."""
    left = int(context.filesystem.read(f"{item}.txt")) - 1
    context.filesystem.write(f"{item}.txt", str(left))
    return f"{left} left"


SCRIPT = [ToolCall("sell", {"item": "lamp"}), ToolCall("sell", {"item": "vase"}), "Sold."]


def shop() -> Agent[Any]:
    return Agent(ScriptedModel(SCRIPT), "Sell.", name="shop", tools=[sell])


async def exported(folder: Path, message: str | None = "A lamp.", **arguments: Any) -> Path:
    """Record a run that begins with one lamp, and return the path of its case."""
    stock = folder / "stock"
    stock.mkdir()
    (stock / "lamp.txt").write_text("1")
    journal = MemoryJournal()
    response = await shop().run(message, journal=journal, **arguments)
    case = await make_case(journal, response.run_id, files=stock)
    journal.close()
    case.save(folder / "lamp.case.json")
    return folder / "lamp.case.json"


async def test_a_recorded_run_is_a_case(tmp_path: Path):
    """The case has the run's message, answer, succeeded calls and files, and each run of it begins with these files."""
    path = await exported(tmp_path, filesystem=MemoryFilesystem({"lamp.txt": "1"}))
    case = recorded_case(path)
    assert (case.inputs, case.expected_output) == ("A lamp.", "Sold.")
    assert [each.as_spec().arguments for each in case.evaluators] == [(["sell"],)]
    evaluators = [EqualsExpected(), FinalFiles({"lamp.txt": "0"})]
    for _ in range(2):
        task = AgentTask(shop(), files={"lamp.txt": "7"})
        dataset = Dataset(name="recorded", cases=[recorded_case(path)], evaluators=evaluators)
        report = await dataset.evaluate(task, lifecycle=task.lifecycle, progress=False)
        check_report(report)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"history": [UserMessage("Hello."), AssistantMessage("Hi.")]}, "a history"),
        ({"message": None}, "no message"),
    ],
)
async def test_a_run_that_more_than_a_message_began_is_refused(
    tmp_path: Path, arguments: dict[str, Any], words: str
):
    """A case whose eval would begin differently than its run is refused, and the error says what to use."""
    path = await exported(tmp_path, **arguments)
    with pytest.raises(DefinitionError, match=f"its run began with {words}. Use replay_case"):
        recorded_case(path)


def test_a_file_that_is_no_case_is_refused(tmp_path: Path):
    """A file that is not a case is an error that names it."""
    (tmp_path / "x.case.json").write_text("{}")
    with pytest.raises(RunError, match=r"x\.case\.json"):
        recorded_case(tmp_path / "x.case.json")


def test_a_case_that_is_gone_fails_its_run(tmp_path: Path):
    """If the file is gone when the eval runs, the case fails and the report names the file."""
    path = asyncio.run(exported(tmp_path))
    case = recorded_case(path)
    path.unlink()
    task = AgentTask(shop())
    dataset = Dataset(name="recorded", cases=[case])
    report = asyncio.run(dataset.evaluate(task, lifecycle=task.lifecycle, progress=False))
    assert "lamp.case.json" in report.failures[0].error_message
