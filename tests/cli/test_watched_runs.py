"""Tests for `handrail runs watch` and `diff`, and for the list of runs on a terminal."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from handrail import Agent, ScriptedModel, ToolCall, ToolContext, runs, tool
from handrail.cli.run_lines import RunLines
from handrail.cli.runs_commands import app
from handrail.cli.runs_view import message_of, short_ids
from handrail.environment import LaterEnvironment
from handrail.errors import PromptEvaluationError, RunParked
from handrail.journal.any_journal import AnyJournal, open_by_name
from handrail.resources.directory import DirectoryFilesystem
from support import postgres
from support.parked_runs import answer_to
from support.programs import HANDRAIL, environment, handrail
from support.terminals import Window, window


@tool(effect="staged")
async def write(path: str, text: str, context: ToolContext) -> str:
    """Write a file."""
    context.filesystem.write(path, text)
    return f"wrote {path}"


@tool(effect="read")
async def ask(context: ToolContext) -> str:
    """Ask which one."""
    assert context.wait_for is not None
    return f"chose {await context.wait_for('pick', schema=int)}"


def desk(*script: Any) -> Agent[Any]:
    return Agent(ScriptedModel(list(script)), "Help.", tools=[write, ask])


@pytest.fixture(params=["sqlite", "postgres"])
def journal(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Generator[AnyJournal]:  # fmt: skip
    """Fixture: a journal, which the commands use too."""
    named = str(tmp_path / "runs.db") if request.param == "sqlite" else postgres.new_url()
    monkeypatch.setenv("HANDRAIL_KEY", postgres.KEY)
    monkeypatch.setenv("HANDRAIL_JOURNAL", named)
    with contextlib.closing(open_by_name(named)) as opened:
        yield opened


async def record(
    journal: AnyJournal, run_id: str, *script: Any, message: str = "Go.", **options: Any
) -> None:
    with contextlib.suppress(RunParked, PromptEvaluationError):
        await desk(*script).run(
            message, run_id=run_id, journal=journal, environment=LaterEnvironment(), **options
        )


async def answer_and_resume(journal: AnyJournal, run_id: str) -> None:
    for question in await journal.questions.open(run_id):
        journal.questions.answer(answer_to(question, 3))
    agent = desk("the end")
    await agent.adapter.resume(run_id, agent.prompt, journal=journal, environment=LaterEnvironment())


def start(seen: Window, *words: str) -> None:
    seen.start([*HANDRAIL, "runs", *words], env=environment(), cwd=Path.cwd())


@pytest.mark.once
async def test_a_run_is_watched_until_it_ends(journal: AnyJournal) -> None:
    """A watcher sees the calls, the question and how to answer it, and what another process does with the run after that."""
    await record(journal, "tea", [ToolCall("ask")], message="Which\x1b[31m one?")
    with window() as seen:
        start(seen, "watch", "te")
        await seen.until("handrail runs answer tea tea")
        assert "» Which\\x1b[31m one?" in seen.text()
        assert "… ask" in seen.text()
        await answer_and_resume(journal, "tea")
        assert await asyncio.to_thread(seen.end) == 0
        for part in ("✓ ask", "→ chose 3", "the end", "? pick: answered"):
            assert part in seen.text()
        assert seen.text().count("Which") == 1
        assert seen.text().count("chose 3") == 1


@pytest.mark.once
async def test_ctrl_c_leaves_a_watched_run_alone(journal: AnyJournal) -> None:
    """A watcher that is stopped ends with 130, and the run can go on."""
    await record(journal, "tea", [ToolCall("ask")])
    with window() as seen:
        start(seen, "watch", "tea")
        await seen.until("runs answer tea")
        seen.type("\x03")
        assert await asyncio.to_thread(seen.end) == 130
        assert "Not watched any more. The run goes on." in seen.text()
    assert (await journal.runs.get("tea")).status == "parked"
    await answer_and_resume(journal, "tea")


async def test_each_line_is_given_once(journal: AnyJournal) -> None:
    """A tree that was seen before has no new lines. A run that failed says why, and the command exits with 1."""
    await record(journal, "tea", [ToolCall("ask")])
    lines = RunLines(journal.path)
    assert lines.new(await runs.show(journal, "tea"))
    assert lines.new(await runs.show(journal, "tea")) == []
    await runs.cancel(journal, "tea")
    said = "\n".join(each.plain for each in lines.new(await runs.show(journal, "tea")))
    assert "■ ask" in said
    assert "cancelled" in said
    result = await asyncio.to_thread(CliRunner().invoke, app, ["watch", "tea", "--json"])
    assert (result.exit_code, json.loads(result.stdout)["standing"]) == (1, "cancelled")


FIRST = [ToolCall("write", {"path": "a.md", "text": "one\n"})], [ToolCall("write", {"path": "b.md", "text": "x\n"})], "end"  # fmt: skip


async def compared(journal: AnyJournal, tmp_path: Path, *script: Any, message: str = "Go.") -> Any:
    for number, each in enumerate((FIRST, script)):
        folder = tmp_path / f"files{number}"
        folder.mkdir()
        with contextlib.closing(DirectoryFilesystem(folder)) as files:
            await record(journal, f"run{number}", *each, message=("Go.", message)[number], filesystem=files)
    return await runs.compare(journal, "run0", "run1")


async def test_runs_that_did_the_same_do_not_differ(journal: AnyJournal, tmp_path: Path) -> None:
    """Ids, times and the order in which arguments were written are no differences."""
    swapped = [ToolCall("write", {"text": "one\n", "path": "a.md"})]
    found = await compared(journal, tmp_path, swapped, *FIRST[1:])
    assert found.difference is None
    assert (found.first.calls, found.first.calls) == ({"write": 2}, found.second.calls)
    assert found.first.files == found.second.files
    assert sorted(found.first.files) == ["a.md", "b.md"]


@pytest.mark.parametrize(
    ("script", "message", "step", "what", "recorded", "now"),
    [
        (FIRST, "Stop.", 0, "message", "Go.", "Stop."),
        ((FIRST[0], [ToolCall("write", {"path": "b.md", "text": "y\n"})], "end"), "Go.", 2, "answer", '"x', '"y'),
        ((*FIRST[:2], "END"), "Go.", 3, "answer", "end", "END"),
        (FIRST[:1], "Go.", 2, "answer", "write", "there is no such step"),
        (([*FIRST[0], ToolCall("ask")], *FIRST[1:]), "Go.", 1, "answer", "write", "ask"),
    ],
)  # fmt: skip
async def test_the_first_difference_is_named(
    journal: AnyJournal, tmp_path: Path, script: Any, message: str, step: int, what: str, recorded: str, now: str
) -> None:  # fmt: skip
    """The difference has the step, what differs, and both texts."""
    found = (await compared(journal, tmp_path, *script, message=message)).difference
    assert (found.step, found.what) == (step, what)
    assert recorded in found.recorded
    assert now in found.now


async def test_a_result_that_differs_is_found_after_equal_answers(
    journal: AnyJournal, tmp_path: Path
) -> None:
    """Two runs whose models answered alike may differ in what their calls did, which is printed as a diff with the runs' names."""
    await record(journal, "run0", *FIRST)  # it has no files
    (tmp_path / "files").mkdir()
    with contextlib.closing(DirectoryFilesystem(tmp_path / "files")) as files:
        await record(journal, "run1", *FIRST, filesystem=files)
    result = await asyncio.to_thread(CliRunner().invoke, app, ["diff", "run0", "run1"])
    assert result.exit_code == 0
    assert "They first differ at step 1, the result differs: write" in result.output
    assert "--- run0\n+++ run1\n" in result.output
    assert "calls of write, error\t2\t0" in result.output
    assert "a.md\t\tchanged" in result.output
    assert json.loads((await asyncio.to_thread(CliRunner().invoke, app, ["diff", "run0", "run1", "--json"])).stdout)["difference"]["what"] == "result"  # fmt: skip


def test_short_ids_tell_runs_apart() -> None:
    """Generated ids are cut where they differ from all others. An id that somebody chose is whole."""
    first, second, third = "0" * 32, "0" * 9 + "1" * 23, "a" * 32
    assert short_ids([first, second, third, "ledger-300000000001"]) == {
        first: "0" * 10, second: "0" * 9 + "1", third: "a" * 8, "ledger-300000000001": "ledger-300000000001"
    }  # fmt: skip
    assert short_ids([third, f"{third}-fork"]) == {third: third, f"{third}-fork": f"{third}-fork"}


@pytest.mark.once
async def test_the_list_on_a_terminal_is_short_and_in_a_pipe_whole(journal: AnyJournal) -> None:
    """At 40 columns, the list has the beginning of the id, which commands take, the standing, the age and the first words."""
    first, second = "c0ffee00" + "0" * 24, "c0ffee11" + "1" * 24
    await record(
        journal, first, "end", message="tell me more\x1b about this long thing that I need to know of"
    )
    await record(journal, second, "end")
    with window(40, 20) as seen:
        start(seen, "list")
        assert await asyncio.to_thread(seen.end) == 0
        assert "RUN       STANDING  STARTED  MESSAGE" in seen.text()
        assert "c0ffee00  done" in seen.text()
        assert "tell" in seen.text()
    piped = await asyncio.to_thread(handrail, "runs", "list", cwd=Path.cwd())
    assert [line.split("\t")[0] for line in piped.stdout.splitlines()] == ["RUN", second, first]
    assert piped.stdout.splitlines()[2].split("\t")[-1].startswith("tell me more\\x1b about")
    ambiguous = await asyncio.to_thread(CliRunner().invoke, app, ["watch", "c0ffee"])
    assert ambiguous.exit_code == 2
    assert f"2 runs begin with 'c0ffee': {second}, {first}" in " ".join(ambiguous.output.split())
    assert message_of((await journal.runs.get(second)).record) == "Go."


@pytest.mark.parametrize("words", [["show"], ["verify"], ["resume"], ["answer"], ["cancel"], ["send", "RUN", "x"], ["pause"],
    ["stop"], ["wrap-up"], ["continue"], ["adopt"], ["approvals"], ["fork", "RUN", "0"], ["undo", "RUN", "c"], ["discard", "RUN", "c"],
    ["replay"], ["export", "RUN", "x.jsonl"], ["watch"], ["diff", "RUN", "RUN"]], ids=lambda each: each[0])  # fmt: skip
async def test_every_command_names_the_runs_that_a_prefix_could_mean(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No command guesses which run is meant."""
    monkeypatch.chdir(tmp_path)
    with contextlib.closing(open_by_name(tmp_path / "runs.db")) as journal:
        await record(journal, "tea", "end")
        await record(journal, "tee", "end")
    given = [words[0], *([each.replace("RUN", "te") for each in words[1:]] or ["te"])]
    result = await asyncio.to_thread(CliRunner().invoke, app, [*given, "--journal", "runs.db", "--json"])
    assert result.exit_code == 2
    assert "2 runs begin with 'te': tee, tea" in json.loads(result.stdout)["error"]["message"]


def test_all_commands_with_a_run_are_tested() -> None:
    """A new command that takes a run is added to the test above."""
    import inspect

    mark = test_every_command_names_the_runs_that_a_prefix_could_mean.pytestmark[-1]  # pyright: ignore[reportFunctionMemberAccess]
    tested = {each[0] for each in mark.args[1]}
    taking = {each.name for each in app.registered_commands if each.callback and "run" in inspect.signature(each.callback).parameters}  # fmt: skip
    assert taking == tested
