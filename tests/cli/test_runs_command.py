"""Tests for `handrail runs`: what its commands print, as text and as JSON, and their exit codes."""

import asyncio
import contextlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner

from handrail import Prompt, tool
from handrail.cli.runs_commands import app
from handrail.errors import RunParked
from handrail.journal.sqlite import SqliteJournal
from handrail.mcp import ToolServer
from handrail.mcp.served_tools import CallMessage
from handrail.protocols import Environment
from handrail.question import Answer, Question
from handrail.resources.directory import DirectoryFilesystem
from handrail.session import Session
from mcp import Client
from support.background_app import HOST, host
from support.parked_runs import answer_to
from support.recorded import Recorder, call
from support.texts import RUN_ID_TAKEN

APP = '''
from support.recorded import TOOLS
from handrail import CapabilityPolicy, Prompt, ToolCall, ToolContext, tool
from handrail.models.scripted import ScriptedModel

prompt = Prompt("work", "Do what is asked.", tools=TOOLS)

@tool(effect="staged", capabilities={"fs.write"})
async def draft(path: str, text: str, context: ToolContext) -> str:
    """Write a file."""
    context.filesystem.write(path, text)
    return f"wrote {path}"

careful = Prompt("work", "Do what is asked.", tools=[draft], policies=[CapabilityPolicy({"fs.write": "ask"})])
model = ScriptedModel(["the end"])
writer = ScriptedModel([ToolCall("write", {"path": ".envrc", "text": "new"}), "the end"])
'''


@tool(effect="read")
def stock() -> int:
    """Return how many items are in stock."""
    return 7


@tool(effect="read")
def order() -> str:
    """Order an item."""
    return "ordered"


class Line:
    """A command line for `handrail runs`, in a folder that has a journal and an app."""

    def __init__(self, base: Path) -> None:
        self.base = base

    def __call__(self, *words: Any, code: int = 0) -> str:
        result = CliRunner().invoke(app, [str(word) for word in words], prog_name="handrail runs")
        assert result.exit_code == code, (result.output, result.exception)
        return result.output

    def json(self, *words: Any, code: int = 0) -> Any:
        said = json.loads(self(*words, "--json", code=code))
        assert (said["ok"], said["exit_code"]) == (code == 0, code)
        return said

    def record(self, run_id: str, *script: Any, app: str = "the_app:prompt", **options: Any) -> list[str]:
        """Record a run of the app in this folder, and return the ids of its calls."""
        from handrail.run.record.begin import prompt_of

        async def main() -> list[str]:
            recorder = Recorder(self.base)
            prompt: Prompt[Any] = prompt_of("", app)
            with contextlib.suppress(RunParked):
                await recorder.run(run_id, *script, prompt=prompt, app=app, **options)
            ids = await recorder.ids(run_id)
            recorder.close()
            return ids

        return asyncio.run(main())


@pytest.fixture
def line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Line]:
    (tmp_path / "the_app.py").write_text(APP)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("HANDRAIL_JOURNAL", str(tmp_path / "runs.db"))
    yield Line(tmp_path)
    sys.modules.pop("the_app", None)


def test_list_and_show(line: Line):
    """`list` prints a line for each run, and `show` prints a tree with calls, results, diffs and open questions.

    Escape sequences are not printed, and both commands can print JSON.
    """
    line.record("tea", call("write", path="a.md", text="hot\x1b[31m\n"), call("choose"))
    assert "tea\tparked\twork" in line("list")
    (row,) = line.json("list")["runs"]
    assert (row["run_id"], row["standing"], row["questions"], row["app"]) == (
        "tea",
        "parked",
        1,
        "the_app:prompt",
    )
    assert line.json("list", "--standing", "done")["runs"] == []
    shown = line("show", "te")  # a prefix of the id is enough
    for part in ("tea  parked", "step 1", "✓ write", "→ wrote a.md", "+hot", "… choose", "pick: waits"):
        assert part in shown
    assert "\x1b" not in shown
    tree = line.json("show", "tea")
    assert tree["turns"][0]["calls"][0]["writes"] == ["file a.md"]
    assert [each["name"] for each in tree["waiting"]] == ["pick"]


def test_a_call_of_an_mcp_client_is_listed_with_its_tool(line: Line):
    """A run for an MCP client's call is listed with the tool's name after the prompt's.

    A message that only looks like such a call does not change its run's line.
    """

    async def serve(*tools: str) -> None:
        journal = SqliteJournal(line.base / "runs.db", watch=None)
        prompt = Prompt("shop", "Sell.", tools=[stock, order])
        async with Client(ToolServer(prompt, journal=journal).server, mode="2026-07-28") as client:
            for name in tools:
                await client.session.call_tool(name, {})
        journal.close()

    asyncio.run(serve("stock", "order"))
    line.record(
        "tea", "done", message=str(CallMessage(run_id="cup", tool="order", arguments=msgspec.Raw(b"{}")))
    )
    listed = [each.split("\t")[2] for each in line("list").splitlines()[1:]]
    assert sorted(listed) == ["shop: order", "shop: stock", "work"]
    found = {(each["prompt"], each["tool"]) for each in line.json("list")["runs"]}
    assert found == {("shop", "order"), ("shop", "stock"), ("work", None)}


def test_answer_and_resume(line: Line):
    """A parked run can be answered and resumed, and a change to its code since its start is reported.

    An answer is refused if it is missing or malformed, its question is not open, or its digest is missing or wrong.
    """
    line.record("tea", call("choose"))
    assert "handrail runs answer tea" in line("resume", "tea", "--model", "the_app:model", code=5)
    waits = line.json("resume", "tea", "--model", "the_app:model", code=5)
    assert waits["questions"][0]["schema"]["required"] == ["n"]
    assert "no answer" in line("answer", "tea", code=2)
    assert "not an approval" in line("answer", "tea", "--approve", code=2)
    assert "not JSON" in line("answer", "tea", "--value", "{", code=2)
    assert "there is no question 'other'" in line("answer", "tea", "other", "--value", "1", code=2)
    assert "--digest is missing" in line("answer", "tea", "--value", '{"n": 3}', code=2)
    digest = waits["questions"][0]["digest"]
    for wrong in ("0" * 16, digest[:15], f"{digest}0"):
        said = line("answer", "tea", "--value", '{"n": 3}', "--digest", wrong, code=2)
        assert "does not match the open question" in " ".join(said.split())
    assert f"digest {digest[:16]}" in line("show", "tea")
    assert "handrail runs resume tea" in line("answer", "tea", "--value", '{"n": 3}', "--digest", digest[:16])
    assert "is not waiting for an answer" in line("answer", "tea", "--value", "1", code=2)
    with (line.base / "the_app.py").open("a") as file:
        file.write("# changed\n")
    said = line("resume", "tea", "--model", "the_app:model")
    assert "The code has changed since the run began." in said
    assert "the end" in said


def test_messages_to_a_run(line: Line):
    """`send` says something to a run, and changes it or takes it back until the model is told; `show` lists what was said."""
    line.record("tea", call("choose"))
    said = line("send", "te", "use\x1b[31m metres")
    assert "waiting, next step" in said
    assert "told after the run's questions are answered" in said
    assert "\x1b" not in said
    sent = [line.json("send", "tea", each, "--when", "afterwards")["message"] for each in ("and kilos", "x")]
    assert [each["when"] for each in sent] == ["afterwards", "afterwards"]
    edited = line.json("send", "tea", "and grams", "--edit", sent[0]["id"], "--when", "next-step")["message"]
    assert {**edited, "at": 0} == {
        **sent[0],
        "text": "and grams",
        "when": "next step",
        "edited": True,
        "at": 0,
    }
    assert "Withdrawn" in line("send", "tea", "--withdraw", sent[1]["id"])
    assert [(each["text"][-5:], each["state"]) for each in line.json("show", "tea")["messages"]] == [
        ("etres", "waiting"),
        ("grams", "waiting"),
        ("x", "withdrawn"),
    ]
    assert "» and grams  waiting, next step" in line("show", "tea")
    line("answer", "tea", "--value", '{"n": 3}', "--digest", line.json("show", "tea")["waiting"][0]["digest"])
    line("resume", "tea", "--model", "the_app:model")
    shown = line("show", "tea")
    assert f"» and grams  told  {edited['id']}" in shown
    assert "» x  withdrawn" in shown
    refused = line.json("send", "tea", "--edit", edited["id"], "and tons", code=1)["error"]
    assert "already told" in refused["message"]


def test_orders_to_a_run(line: Line):
    """`pause`, `continue`, `wrap-up` and `stop` order a run; `show` lists the orders with what was said, and the pause that waits."""
    line.record("tea", call("choose"))
    said = line("pause", "te", "look at the cups")
    assert "» [pause] look at the cups  waiting" in said
    assert "after the run's questions are answered" in said
    assert "not paused any more" in line("continue", "tea")
    assert "is not paused" in line.json("continue", "tea", code=1)["error"]["message"]
    line("pause", "tea")
    line("answer", "tea", "--value", '{"n": 3}', "--digest", line.json("show", "tea")["waiting"][0]["digest"])
    (question,) = line.json("resume", "tea", "--model", "the_app:model", code=5)["questions"]
    assert question["kind"] == "pause"
    assert "The run is paused" in line("show", "tea")
    assert line.json("stop", "tea", "thanks")["message"]["order"] == "stop"
    said = line("resume", "tea", "--model", "the_app:model", code=1)
    assert "stopped before its task was complete" in said
    assert "» [stop] thanks  told" in line("show", "tea")


def test_a_call_that_was_not_approved(line: Line):
    """`show` prints the diff of a call that waits for approval. If the call is denied, `resume` exits with code 3."""
    script = call("draft", path="a.md", text="".join(f"line {n}\n" for n in range(40)))
    line.record("tea", script, app="the_app:careful")
    shown = line("show", "tea")
    assert "│ +line 20" in shown
    assert "more lines, --full shows all" in shown
    assert "│ +line 39" not in shown
    assert "│ +line 39" in line("show", "tea", "--full")
    (waiting,) = line.json("show", "tea")["waiting"]
    line("answer", "tea", "--deny", "--digest", waiting["digest"])
    said = line("resume", "tea", "--model", "the_app:model", code=3)
    assert "did not run: draft." in said
    sys.modules.pop("the_app", None)  # load the module again, because its model has no answers left
    line.record("milk", script, app="the_app:careful")
    (waiting,) = line.json("show", "milk")["waiting"]
    line("answer", "milk", "--deny", "--digest", waiting["digest"])
    assert line.json("resume", "milk", "--model", "the_app:model", code=3)["not_approved"] == ["draft"]


def answer_and_resume(line: Line, run_id: str, *more: str) -> bool:
    """Answer the run's question, resume it with a model that writes `.envrc`, and return whether it was written."""
    (question,) = line.json("resume", run_id, "--model", "the_app:writer", *more, code=5)["questions"]
    line("answer", run_id, "--value", '{"n": 3}', "--digest", question["digest"])
    written = line.base / "files" / ".envrc"
    written.unlink(missing_ok=True)
    sys.modules.pop("the_app", None)
    assert "the end" in line("resume", run_id, "--model", "the_app:writer", "--approve", "all", *more)
    return written.exists()


def test_a_resumed_run_keeps_the_startup_files_it_was_allowed(line: Line):
    """A resumed run may change the startup files allowed at its start, unless it was imported or `--startup-files` names others."""
    (line.base / "files").mkdir()
    allowed = DirectoryFilesystem(line.base / "files", startup_files=[".envrc"])
    line.record("tea", call("choose"), filesystem=allowed)
    line.record("two", call("choose"))
    line.record("three", call("choose"), filesystem=allowed)
    line("export", "three", "three.jsonl")
    line("import", "three.jsonl", "--as", "imported")
    assert answer_and_resume(line, "tea")
    assert not answer_and_resume(line, "two")
    assert not answer_and_resume(line, "three", "--startup-files", "other")
    assert not answer_and_resume(
        line, "imported", "--app", "the_app:prompt"
    )  # nobody here has allowed what the imported file claims


def test_fork_undo_replay(line: Line):
    """`fork`, `undo` and `replay` print their results. A second undo of a call is refused.

    A replay reports the first difference, and that the code has changed.
    """
    note, written = line.record("tea", call("note", text="x"), call("write", path="a", text="1"), "end")
    assert line.json("fork", "tea", 1, "--as", "two")["run_id"] == "two"
    assert "Files are as they are now" in line("fork", "tea", 1)
    assert "No differences: 3 steps" in line("replay", "tea")
    assert "No differences: 3 steps" in line("replay", "tea", "--app", "the_app.py")
    assert "No differences: 3 steps" in line("replay", "tea", "--app", line.base / "the_app.py:prompt")
    assert line.json("undo", "tea", written)["paths"] == ["a"]
    assert not (line.base / "files" / "a").exists()
    assert "already been undone" in line("undo", "tea", written, code=1)
    assert "slice Noted" in line("undo", "tea", note)
    (line.base / "the_app.py").write_text(APP.replace("Do what is asked.", "Do it well."))
    del sys.modules["the_app"]
    found = line.json("replay", "tea", code=1)["divergence"]
    assert (found["what"], found["step"]) == ("prompt", 0)
    said = line("replay", "tea", code=1)
    assert "+Do it well." in said
    assert "The code has changed" in said


def test_a_different_folder_at_the_same_path_is_not_used(line: Line):
    """If another folder has taken the place of a run's folder, commands that need the run's folder require `--files`."""
    (written,) = line.record("tea", call("write", path="a", text="1"), "end")
    folder, away = line.base / "files", line.base / "away"
    folder.rename(away)
    folder.mkdir()
    for words in (("undo", "tea", written), ("replay", "tea")):
        said = " ".join(line(*words, code=2).split())
        assert "is not the one that the run worked in" in said
        assert "--files FOLDER" in said
    assert line.json("undo", "tea", written, "--files", away)["paths"] == ["a"]
    assert list(folder.iterdir()) == []


def test_cancel_export_import_forget(line: Line, monkeypatch: pytest.MonkeyPatch):
    """`cancel` ends a parked run, `export` writes it to a file, `import` reads it from there, and `forget` deletes it.

    A second import needs a new id, and `forget --dry-run` only lists the runs.
    """
    line.record("tea", call("choose"))
    assert line.json("cancel", "tea")["status"] == "cancelled"
    assert "Exported tea to" in line("export", "tea", "tea.jsonl")
    monkeypatch.setenv("HANDRAIL_JOURNAL", str(line.base / "new" / "runs.db"))
    assert "Imported tea, which is cancelled" in line("import", "tea.jsonl")
    assert RUN_ID_TAKEN in line("import", "tea.jsonl", code=1)
    assert line.json("import", "tea.jsonl", "--as", "two")["run_id"] == "two"
    assert set(line.json("forget", "--keep", 0, "--dry-run")["runs"]) == {"tea", "two"}
    assert "0 runs forgotten" in line("forget", "--before", "1d")
    assert "2 runs forgotten" in line("forget", "--keep", 0)
    assert "There are no runs." in line("list")


def test_a_person_is_exported_and_erased(line: Line):
    """`export --principal` writes a folder. `forget --principal` says what it would delete, refuses while a run waits, and deletes."""
    name = "ann"
    line.record("tea", call("choose"), session=Session(id="s", principal=name))
    assert "Exported 1 run and 0 workspaces" in line("export", "person", "--principal", name)
    assert (line.base / "person" / "run-1.jsonl").stat().st_mode & 0o077 == 0
    checked = line("forget", "--principal", name, "--check")
    assert "tea is parked. --cancel cancels it first." in checked
    assert "Would delete 1 run, 1 session, 0 workspaces" in checked
    assert "the run 'tea' is parked. Nothing was deleted." in " ".join(
        line("forget", "--principal", name, code=1).split()
    )
    copy = line.base / "runs.db.schema-13"
    copy.touch(mode=0o600)
    done = line("forget", "--principal", name, "--cancel")
    assert f"Deleted 1 run, 1 session, 0 workspaces of {name}" in done
    assert f"Stays: {copy}, a copy of the journal." in done
    assert "There are no runs." in line("list")
    assert "nothing was altered" in line("verify")
    line.record("cup", "end", session=Session(id="bob/s", principal="bob"))
    assert "1 run forgotten" in line("forget", "--keep", 0)
    assert "Deleted 0 runs" in line("forget", "--principal", "bob")  # only from the list of sessions
    assert line.json("forget", "--principal", name)["holdings"]["runs"] == []  # again, which changes nothing


@pytest.mark.parametrize(
    ("words", "said", "code"),
    [
        (["forget", "--principal", "nobody"], "there is nothing of 'nobody'", 2),
        (["forget", "--principal", "nobody", "--keep", "1"], "Leave out --before", 2),
        (["forget", "--keep", "1", "--cancel"], "--cancel needs --principal", 2),
        (["forget", "--keep", "1", "-s", "parked"], "is not one of cancelled, done, failed", 2),
        (["export", "tea"], "PATH is missing", 2),
        (["export", "tea", "x", "--principal", "nobody"], "name only the folder", 2),
        (["show", "nobody"], "the journal has no such run", 1),
        (["list", "--standing", "odd"], "is not one of queued", 2),
        (["list", "--journal", "nowhere.db"], "there is no journal at nowhere.db", 2),
        (["fork", "tea", "7"], "from 0, its beginning, to 1", 1),
        (["undo", "tea", "call"], "has no finished call", 1),
        (["forget"], "which runs to delete", 2),
        (["forget", "--before", "soon"], "is not a time", 2),
        (["resume", "tea", "--approve", "odd"], "not one of ask, all, strict", 2),
        (
            ["resume", "tea", "--app", "broken:prompt"],
            "can't load the code at 'broken:prompt': ZeroDivisionError",
            2,
        ),
        (["replay", "tea", "--app", "the_app:nothing"], "there is no Prompt at", 1),
        (["replay", "tea", "--app", "nothing.py"], "there is no file 'nothing.py'", 2),
        (["replay", "tea", "--files", "nowhere"], "no such folder", 2),
        (["import", "the_app.py"], "not an exported run", 1),
        (["import", "nowhere.jsonl"], "it can't be read: No such file or directory", 1),
        (["import", "empty.jsonl"], "it is empty", 1),
        (["export", "tea", "nowhere/tea.jsonl"], "can't be written to nowhere/tea.jsonl: No such file", 1),
        (["answer", "tea", "--approve"], "See `handrail runs show tea`", 2),
        (["show", "t"], "2 runs begin with 't'", 2),
        (["send", "tea", "more"], "the run is over (done)", 1),
        (["send", "tea"], "TEXT is missing", 2),
        (["send", "tea", "more", "--withdraw", "m"], "Leave out TEXT", 2),
        (["send", "tea", "more", "--when", "soon"], "when is 'soon'. Pass one of", 2),
        (["send", "tea", "--edit", "m", "more"], "it was sent no message 'm'", 1),
    ],
)
def test_mistakes_are_reported(line: Line, words: list[str], said: str, code: int):
    """Mistakes are reported as text or JSON. The exit code tells a wrong command line (2) from a failed command (1)."""
    line.record("tea", "end")
    line.record("tee", "end")
    (line.base / "broken.py").write_text("1 / 0")
    (line.base / "empty.jsonl").touch()
    if words[0] == "resume":
        words = [*words, "--model", "the_app:model"]
    assert said in " ".join(line(*words, code=code).split())
    assert said in line.json(*words, code=code)["error"]["message"]


def test_a_question_is_asked_at_the_terminal(line: Line, monkeypatch: pytest.MonkeyPatch):
    """`answer` without a value asks the person at the terminal."""

    class There(Environment):
        run_mode = "user"

        def __init__(self, **streams: object) -> None:
            """Take the streams of a terminal, which are not used."""

        async def ask(self, question: Question, /) -> Answer:
            assert question.name == "pick"
            return answer_to(question, {"n": 4})

    line.record("tea", call("choose"))
    monkeypatch.setattr("handrail.environment.TerminalEnvironment", There)
    assert "Answered pick" in line("answer", "tea")
    assert "the end" in line("resume", "tea", "--model", "the_app:model")
    assert line.json("show", "tea")["turns"][0]["calls"][0]["message"] == "got 4"


def test_the_commands_are_those_of_the_program(line: Line):
    """The `handrail` program includes the `runs` commands."""
    from handrail.cli.commands import app as program

    line.record("tea", "end")
    result = CliRunner().invoke(program, ["runs", "list"])
    assert (result.exit_code, "tea\tdone" in result.output) == (0, True)


def test_the_next_command_can_be_typed_as_printed(line: Line, monkeypatch: pytest.MonkeyPatch):
    """The follow-up command that is printed names the journal, unless the command would use that journal anyway."""
    line.record("tea", "end")
    assert "Continue with: handrail runs resume" in (said := line("fork", "tea", 1))
    assert "--journal" not in said
    for part in ("", ".key"):
        (line.base / f"runs.db{part}").rename(line.base / f"other runs.db{part}")
    said = line("fork", "tea", 1, "--journal", "other runs.db")
    assert "--journal 'other runs.db'" in said
    monkeypatch.setenv("HANDRAIL_JOURNAL", str(line.base / "runs.db"))
    (line.base / ".handrail").mkdir()
    for part in ("", ".key"):
        (line.base / f"other runs.db{part}").rename(line.base / ".handrail" / f"runs.db{part}")
    assert "--journal .handrail/runs.db" in line("fork", "tea", 1, "--journal", ".handrail/runs.db")


def test_questions_with_the_same_name_need_an_id(line: Line):
    """If several questions have the given name, the command lists their ids."""
    line.record("tea", (call("choose"), call("choose")))
    said = line("answer", "tea", "pick", "--value", '{"n": 1}', code=2)
    assert "say which question" in said
    assert said.count("  pick") == 2


def test_ctrl_c_cancels_a_command(line: Line, monkeypatch: pytest.MonkeyPatch):
    """If a command is cancelled by Ctrl-C, its message, exit code and JSON say so."""

    async def pressed(*given: Any, **options: Any) -> Any:
        raise KeyboardInterrupt

    line.record("tea", "end")
    monkeypatch.setattr("handrail.runs.show", pressed)
    assert "Cancelled. Unfinished calls were undone." in line("show", "tea", code=130)
    assert line.json("show", "tea", code=130)["error"]["kind"] == "Cancelled"


def test_an_answer_that_is_cut_off_fails(line: Line):
    """If the answer of a resumed run is cut off, the exit code is the same as with `handrail run`."""
    (line.base / "the_app.py").write_text(
        APP.replace('["the end"]', '[Reply("the e", stop="length")]').replace(
            "import ScriptedModel", "import Reply, ScriptedModel"
        )
    )
    line.record("tea", call("choose"))
    digest = line.json("show", "tea")["waiting"][0]["digest"]
    line("answer", "tea", "--value", '{"n": 1}', "--digest", digest)
    assert "The answer was cut off" in line("resume", "tea", "--model", "the_app:model", code=1)


def test_background_runs(line: Line):
    """`list` and `show` name the run that began a background run, and `show` lists a run's background runs and what it was told of them."""
    journal = SqliteJournal(line.base / "runs.db")
    response = host.run('{"message": "hello"}', journal=journal, run_id="parent", app=HOST).wait()
    journal.close()
    assert "parent" in next(each for each in line("list").splitlines() if response.text in each)
    assert line.json("list")["runs"][0]["parent"] == "parent"
    shown = line("show", "parent")
    assert f"helper  queued  {response.text}" in shown
    assert line.json("show", "parent")["children"] == [{"run_id": response.text, "standing": "queued"}]
    line("cancel", response.text)
    assert f"The background run {response.text} (helper) was cancelled" in line("show", "parent")
    assert "begun in the background by parent" in line("show", response.text)
