"""A workspace moves with its run: the host that continues the run has what committed calls changed, and nothing else."""

import asyncio
import os
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from handrail import (
    Agent,
    LaterEnvironment,
    Prompt,
    ScriptedModel,
    SqliteJournal,
    ToolCall,
    ToolContext,
    UserContext,
    Workspace,
    runs,
    tool,
)
from handrail.errors import (
    DefinitionError,
    RunBusy,
    RunParked,
    UndoRefused,
    WorkspaceBusy,
    WorkspaceTakenError,
)
from handrail.events import ToolInvoked
from handrail.journal.any_journal import AnyJournal
from handrail.journal.records import RunRecord
from handrail.resources.workspace.workspace import is_ignored
from resources.workspaces import PROMPT, TOOLS, adapter, contents, run, steps, tree
from support import PATIENCE, journals
from support.parked_runs import answer_to


@pytest.fixture(params=["sqlite", "postgres"])
def journal(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[AnyJournal]:
    with journals.of_kind(request.param):
        yield journals.open_at(tmp_path / "runs.db")


@pytest.fixture
def hosts(tmp_path: Path) -> tuple[Path, Path]:
    return tmp_path / "here", tmp_path / "there"


def texts(response: Any) -> list[str]:
    """Return the rendered result of each call in a run."""
    return [event.result.render() for event in response.session[ToolInvoked].all()]


async def test_what_a_run_left_is_there_for_the_next_one_on_another_host(
    journal: AnyJournal, hosts: tuple[Path, Path]
):
    here, there = hosts
    await run(journal, here, steps("write a one", "write d/b two", "mkdir empty"))
    await run(journal, there, steps("append a !", "delete d/b"), run_id="r2")
    assert contents(there) == {"a": "one!"}
    assert {"d", "empty"} <= tree(there).keys()
    await run(journal, here, ToolCall("read", {"path": "a"}), run_id="r3")
    assert tree(here) == tree(there)


async def test_links_modes_and_empty_folders_travel_and_ignored_names_do_not(
    journal: AnyJournal, hosts: tuple[Path, Path]
):
    here, there = hosts
    line = (
        "mkdir -p bin d/empty node_modules/x && echo hi > bin/tool && chmod 750 bin/tool && ln -s bin/tool link && "
        "ln -s nowhere dangling && echo x > node_modules/x/y && chmod 711 d"
    )
    await run(journal, here, ToolCall("command", {"line": line}))
    await run(journal, there, run_id="r2")
    moved = tree(there)
    assert moved == {path: state for path, state in tree(here).items() if not path.startswith("node_modules")}
    assert (moved["bin/tool"], moved["link"]) == ((b"hi\n", 0o750), "-> bin/tool")
    assert (moved["d"], moved["dangling"], "d/empty" in moved) == ((None, 0o711), "-> nowhere", True)
    await run(journal, here, run_id="r3")
    assert "node_modules/x/y" in tree(here)  # ignored files stay where they are


async def test_a_run_is_parked_on_one_host_and_continues_on_another(
    journal: AnyJournal, hosts: tuple[Path, Path]
):
    @tool(effect="staged")
    async def choose(*, context: UserContext) -> str:
        """Ask a person."""
        chosen = await context.wait_for("pick", {}, Choice)
        context.filesystem.append("a", chosen.name)
        return context.filesystem.read("a")

    here, there = hosts
    assert await _moved(journal, hosts, steps("write a one"), choose) == "one!"
    assert (contents(there), contents(here)) == ({"a": "one!"}, {"a": "one"})


@dataclass
class Choice:
    name: str


async def _moved(
    journal: AnyJournal, hosts: tuple[Path, Path], before: ToolCall, asking: Any, arguments: Any = None
) -> str:
    """Run two calls, the second of which asks a person, and continue the run on the other host.

    The person answers `!` while the run is parked. Returns the text of the second call's result.
    """
    here, there = hosts
    prompt = Prompt("files", "Work.", tools=[*TOOLS, asking])
    script = (before, ToolCall(asking.name, arguments or {}))
    options: Any = {"journal": journal, "environment": LaterEnvironment()}
    with pytest.raises(RunParked) as parked:
        await adapter(*script).evaluate(
            prompt, "go", run_id="r", filesystem=Workspace("w", cache=here), **options
        )
    row = await journal.workspaces.get("w")
    assert row is not None
    assert row.run_id == ""  # a parked run releases its workspace
    [question] = parked.value.questions
    journal.questions.answer(answer_to(question, {"name": "!"}))
    response = await adapter("ok").resume("r", prompt, filesystem=Workspace("w", cache=there), **options)
    return texts(response)[-1]


async def test_what_an_inner_call_did_is_there_after_its_call_continues_on_another_host(
    journal: AnyJournal, hosts: tuple[Path, Path]
):
    """The changes of an irreversible inner call are kept when its agent continues on another host.

    The call is not repeated, although the files there have different inodes and times.
    """
    sent: list[str] = []

    @tool
    async def send(*, context: ToolContext) -> str:
        """Change files, and do something that can't be undone."""
        sent.append("sent")
        files = context.filesystem
        files.append("a", "1")
        files.write("d/b", "2")
        files.append("d/c", "3")
        files.delete("gone")
        return files.read(".venv/x")

    @tool(effect="staged")
    async def choose(*, context: UserContext) -> str:
        """Ask a person."""
        chosen = await context.wait_for("pick", {}, Choice)
        context.filesystem.append("a", chosen.name)
        return context.filesystem.read("a")

    model = ScriptedModel([ToolCall("send", {}), ToolCall("choose", {}), "sent and chosen"])
    agent = Agent(model, "Send.", name="sender", description="Sends.", tools=[send, choose])
    before = steps("write a 0", "write d/c 0", "write gone x", "write .venv/x 0")
    assert await _moved(journal, hosts, before, agent.as_tool(), {"message": "go"}) == "sent and chosen"
    assert sent == ["sent"]
    assert contents(hosts[1]) == {"a": "01!", "d/b": "2", "d/c": "03"}


async def test_a_killed_run_continues_on_another_host_without_its_unfinished_call(tmp_path: Path):
    here, there, path = tmp_path / "here", tmp_path / "there", tmp_path / "runs.db"
    program = [sys.executable, "-m", "resources.workspaces", str(path), str(here)]
    environment = {**os.environ, "WORKSPACE_DIES": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(program, stdout=subprocess.PIPE, env=environment, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.kill()
    journal = SqliteJournal(path)
    await adapter("ok").resume("r", PROMPT, journal=journal, filesystem=Workspace("w", cache=there))
    assert contents(there) == {"a": "one", "d/b": "two", "half": "second"}
    assert contents(here) == {"a": "one", "d/b": "two"}
    await run(journal, here, run_id="r2")
    assert tree(here) == tree(there)
    journal.close()


async def test_a_copy_that_missed_a_recorded_commit_gets_it(journal: AnyJournal, hosts: tuple[Path, Path]):
    here, _ = hosts
    await run(journal, here, steps("write a one", "write b two"))
    shutil.copytree(here, f"{here}.before", symlinks=True)
    await run(journal, here, steps("write a three", "delete b", "mkdir c"), run_id="r2")
    after = tree(here)
    shutil.rmtree(here)
    shutil.move(f"{here}.before", here)  # as if the process had died right after the commit point
    await run(journal, here, run_id="r3")
    assert tree(here) == after


async def test_a_second_run_is_refused_with_the_name_of_the_first(
    journal: AnyJournal, hosts: tuple[Path, Path]
):
    here, there = hosts
    begun, end = asyncio.Event(), asyncio.Event()

    @tool(effect="staged")
    async def wait() -> str:
        """Wait for the test."""
        begun.set()
        await end.wait()
        return "waited"

    prompt = Prompt("files", "Work.", tools=[wait])
    first = asyncio.ensure_future(
        adapter(ToolCall("wait", {})).evaluate(
            prompt, "go", run_id="r", journal=journal, filesystem=Workspace("w", cache=here)
        )
    )
    await asyncio.wait_for(begun.wait(), PATIENCE)
    with pytest.raises(WorkspaceBusy, match="in use by the run 'r'"):
        await run(journal, there, run_id="r2")
    end.set()
    await first
    await run(journal, there, steps("write a one"), run_id="r3")


async def test_a_cancellation_while_the_workspace_is_released_is_raised_after_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    journal = SqliteJournal(tmp_path / "runs.db")
    release = journal.workspaces.release

    async def cancelled_meanwhile(*given: Any) -> None:
        running.cancel()
        await asyncio.sleep(0)
        await release(*given)

    running = asyncio.ensure_future(run(journal, tmp_path / "here"))
    with monkeypatch.context() as patched:
        patched.setattr(journal.workspaces, "release", cancelled_meanwhile)
        with pytest.raises(asyncio.CancelledError):
            await running
    await run(journal, tmp_path / "here", run_id="r2")  # the workspace is free


@pytest.mark.parametrize("depth", ["call", "nested agent"])
async def test_a_run_that_loses_its_workspace_stops_and_can_be_resumed(
    journal: AnyJournal, hosts: tuple[Path, Path], depth: str
):
    """If another run takes over the workspace during a call, the run stops with an error and no outcome. A resume repeats the call."""
    here, _ = hosts
    entered: list[str] = []
    other = RunRecord(id="other", session_id="other", principal="p", prompt="p", model="m", began_at=1.0)
    await journal.runs.begin(other)

    @tool(effect="staged")
    async def lose(*, context: ToolContext) -> str:
        """Write a file, and lose the workspace the first time."""
        context.filesystem.write("kept", "yes")
        entered.append("once")
        if len(entered) == 1:
            await journal.workspaces.release("w", "r")
            await journal.workspaces.acquire("w", "other")
        return "written"

    writing = ScriptedModel([ToolCall("lose", {}), "Done."])
    clerk = Agent(writing, "Write.", name="clerk", description="Writes.", tools=[lose])
    prompt = Prompt("files", "Work.", tools=[lose, clerk.as_tool()])
    asked = ToolCall("lose", {}, "c") if depth == "call" else ToolCall("clerk", {"message": "go"}, "c")
    working = adapter(asked)
    with pytest.raises(WorkspaceTakenError, match="the workspace 'w' was taken over"):
        await working.evaluate(
            prompt, "go", run_id="r", journal=journal, filesystem=Workspace("w", cache=here)
        )
    row = await journal.runs.get("r")
    assert (row.status, row.outcome, row.owner) == ("running", b"", "")
    await journal.workspaces.release("w", "other")
    response = await working.resume("r", prompt, journal=journal, filesystem=Workspace("w", cache=here))
    assert response.stop_reason == "done"
    assert contents(here) == {"kept": "yes"}


async def test_a_tool_that_finds_another_workspace_or_run_busy_fails_as_any_call_does(
    journal: AnyJournal, hosts: tuple[Path, Path]
):
    """An error about another run or workspace fails only the call that raises it, and the run continues."""
    here, _ = hosts

    @tool(effect="read")
    async def raises(what: str) -> str:
        """Raise an error about another run or another workspace."""
        raise RunBusy("another", "somebody") if what == "run" else WorkspaceBusy("x", "another", "somebody")

    prompt = Prompt("files", "Work.", tools=[raises])
    calls = [ToolCall("raises", {"what": each}) for each in ("run", "workspace")]
    response = await adapter(*calls).evaluate(
        prompt, "go", run_id="r", journal=journal, filesystem=Workspace("w", cache=here)
    )
    assert response.stop_reason == "done"
    assert (await journal.runs.get("r")).status == "done"
    told = "\n".join(texts(response))
    assert "raises failed" in told
    assert "'another'" in told


async def test_nested_and_parallel_calls_commit_as_usual(journal: AnyJournal, hosts: tuple[Path, Path]):
    here, there = hosts
    nested = ToolCall("outer", {"steps": [["write", "a", "1"], ["write", "b", "2"], ["move", "a", "d/a"]]})
    await run(journal, here, nested, [steps("write x 1"), steps("write y 2"), steps("append b !")])
    await run(journal, there, run_id="r2")
    assert contents(there) == {"b": "2!", "d/a": "1", "x": "1", "y": "2"}


async def test_a_call_is_undone_without_the_host_that_made_it(journal: AnyJournal, hosts: tuple[Path, Path]):
    here, there = hosts
    await run(journal, here, steps("write a one", "write d/b two", "mkdir d/e"))
    line = "rm -r d && echo new > d && chmod 600 a && ln -s a l"
    response = await run(journal, here, ToolCall("command", {"line": line}), run_id="r2")
    before = tree(here)
    shutil.rmtree(here)
    [call] = response.session[ToolInvoked].all()
    done = await runs.undo(journal, "r2", call.call_id)
    assert list(done.paths) == ["a", "d", "d/b", "d/e", "l"]
    await run(journal, there, run_id="r3")
    assert contents(there) == {"a": "one", "d/b": "two"}
    assert "d/e" in tree(there)
    assert before["a"][1] == 0o600 != tree(there)["a"][1]
    with pytest.raises(UndoRefused, match="already"):
        await runs.undo(journal, "r2", call.call_id)


async def test_an_undo_is_refused_once_a_later_call_has_built_on_the_files(
    journal: AnyJournal, hosts: tuple[Path, Path]
):
    here, _ = hosts
    response = await run(journal, here, steps("write a one"), steps("append a two"))
    first, _ = response.session[ToolInvoked].all()
    with pytest.raises(UndoRefused, match="later call"):
        await runs.undo(journal, "r", first.call_id)


def _tampering(here: Path, how: str) -> Any:
    @tool(effect="staged")
    async def tamper() -> str:
        """Change the copy without Handrail."""
        [root] = here.glob("*/w/1/files")
        if how == "change":
            (root / "a").write_text("ONE")
        elif how == "delete":
            (root / "a").unlink()
        else:
            (root / "a").rename(root / "b")
            (root / "a").mkdir()
        return "tampered"

    return tamper


@pytest.mark.parametrize("how", ["change", "delete", "replace"])
@pytest.mark.parametrize(
    "touch",
    [
        ToolCall("read", {"path": "a"}),
        steps("append a !"),
        ToolCall("command", {"line": "echo ! >> a || echo ! > a/x"}),
    ],
    ids=["read", "append", "command"],
)
async def test_a_copy_that_was_changed_by_hand_is_refused_and_then_repaired(
    how: str, touch: ToolCall, tmp_path: Path
):
    here, journal = tmp_path / "here", SqliteJournal(tmp_path / "runs.db")
    prompt = Prompt("files", "Work.", tools=[*TOOLS, _tampering(here, how)])
    response = await adapter(steps("write a one"), ToolCall("tamper", {}), touch).evaluate(
        prompt, "go", run_id="r", journal=journal, filesystem=Workspace("w", cache=here)
    )
    assert "something other than Handrail has" in texts(response)[2]
    assert [list(unit.workspaces) != [] for unit in await journal.calls.load("r")] == [True, False, False]
    await run(journal, here, ToolCall("read", {"path": "a"}), run_id="r2")
    assert contents(here) == {"a": "one"}
    journal.close()


async def test_a_deleted_copy_or_index_is_made_again(tmp_path: Path):
    here, journal = tmp_path / "here", SqliteJournal(tmp_path / "runs.db")
    await run(journal, here, steps("write a one", "write d/b two"))
    before = tree(here)
    [copy] = here.glob("*/w/1")
    (copy / "index").write_bytes(b"\0\0\0\x05nonsense")
    await run(journal, here, run_id="r2")
    assert tree(here) == before
    shutil.rmtree(copy)
    await run(journal, here, run_id="r3")
    assert tree(here) == before
    journal.close()


async def test_a_recorded_commit_is_written_over_a_change_in_the_last_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    here, journal = tmp_path / "here", SqliteJournal(tmp_path / "runs.db")
    commit = journal.calls.commit

    async def commit_late(unit: Any) -> None:
        await commit(unit)
        if unit.call_id.endswith("2") or len(await journal.calls.load("r")) == 2:
            [root] = here.glob("*/w/1/files")
            (root / "a").write_text("ONE")

    monkeypatch.setattr(journal.calls, "commit", commit_late)
    response = await run(
        journal, here, steps("write a one"), steps("append a two"), ToolCall("read", {"path": "a"})
    )
    assert texts(response)[1:] == ["done", "onetwo"]
    assert contents(here) == {"a": "onetwo"}
    journal.close()


async def test_two_copies_are_used_if_the_first_is_in_use_by_another_process(tmp_path: Path):
    here, journal = tmp_path / "here", SqliteJournal(tmp_path / "runs.db")
    await run(journal, here, steps("write a one"))
    [copy] = here.glob("*/w/1")
    program = f"import fcntl; f = open({str(copy / 'lock')!r}); fcntl.flock(f, fcntl.LOCK_EX); print('held', flush=True); input()"
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        await run(journal, here, steps("append a two"), run_id="r2")
        process.kill()
    assert (copy / "files" / "a").read_text() == "one"
    assert (copy.with_name("2") / "files" / "a").read_text() == "onetwo"
    journal.close()


async def test_only_what_differs_is_fetched(journal: AnyJournal, hosts: tuple[Path, Path], monkeypatch: Any):
    here, there = hosts
    await run(journal, here, *[steps(f"write f{number} {number}") for number in range(5)])
    await run(journal, there, run_id="r2")
    await run(journal, here, steps("write f1 new", "move f2 g2", "write g3 3"), run_id="r3")
    fetched: list[Any] = []
    fetch = journal.workspaces.fetch

    async def fetch_counted(digests: Any) -> Any:
        fetched.extend(digests)
        return await fetch(digests)

    monkeypatch.setattr(journal.workspaces, "fetch", fetch_counted)
    await run(journal, there, run_id="r4")
    assert len(fetched) <= 2  # f1, and g2 unless its bytes were still there as f2
    assert tree(there) == tree(here)


def test_what_is_in_an_ignored_folder_is_ignored():
    """Everything in an ignored folder is ignored, whether the pattern is a name or a path. A final slash changes nothing."""
    for ignore in (["out"], ["out/"], ["build/out"], ["build/out/"], ["build/*"]):
        patterns = Workspace("w", ignore=ignore).ignore
        assert is_ignored("build/out", patterns)
        assert is_ignored("build/out/deep/x", patterns)
        assert not is_ignored("src/outer", patterns)
    assert not is_ignored("other/build/out", Workspace("w", ignore=["build/out"]).ignore)


def test_a_workspace_needs_a_good_name_and_a_journal():
    for name in ("", "a/b", "..", "-x", "a" * 101):
        with pytest.raises(DefinitionError, match="name of a workspace"):
            Workspace(name)
    with pytest.raises(DefinitionError, match="ignore is a string"):
        Workspace("w", ignore="x")
    with pytest.raises(DefinitionError, match="startup_files is a string"):
        Workspace("w", startup_files=".envrc")
    with pytest.raises(DefinitionError, match="evaluated or resumed with a journal"):
        adapter().evaluate(PROMPT, "go", filesystem=Workspace("w")).wait()
    assert Workspace.named("workspace:x").name == "x"  # type: ignore[union-attr]
    assert Workspace.named("folder") is None


async def test_a_file_that_is_too_large_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("handrail.resources.workspace.workspace.LARGEST", 10)
    here, journal = tmp_path / "here", SqliteJournal(tmp_path / "runs.db")
    response = await run(
        journal,
        here,
        steps("write a 0123456789x"),
        steps("write a 0123456789"),
        steps("write .venv/a 0123456789x"),
    )
    assert ["at most 10 bytes" in text for text in texts(response)] == [True, False, False]
    assert contents(here)["a"] == "0123456789"
    journal.close()


# --- a workspace compared with a plain folder ----------------------------------------------------------

_paths = st.sampled_from(["a", "b", "d/a", "d/b", "d/e/a"])
_texts = st.sampled_from(["1", "2", "3"])
_lines = st.one_of(
    st.builds("write {} {}".format, _paths, _texts),
    st.builds("delete {}".format, st.sampled_from(["a", "b", "d", "d/a", "d/e"])),
    st.builds("move {} {}".format, _paths, _paths),
    st.builds("mkdir {}".format, st.sampled_from(["m", "d", "d/n"])),
)
_turns = st.lists(
    st.tuples(st.booleans(), st.lists(_lines, min_size=1, max_size=3), st.booleans()), max_size=5
)


@settings(max_examples=15)
@given(turns=_turns)
def test_two_hosts_and_undo_agree_with_a_folder(turns: list[tuple[bool, list[str], bool]]):
    """A workspace that moves between two hosts agrees with a plain folder after any calls and undos."""
    from handrail import DirectoryFilesystem

    async def go(folder: Path) -> None:
        journal, other = SqliteJournal(folder / "runs.db"), SqliteJournal(folder / "plain.db")
        (folder / "plain").mkdir()
        plain = DirectoryFilesystem(folder / "plain")
        for number, (is_here, lines, is_undone) in enumerate(turns):
            run_id, host = f"r{number}", folder / ("here" if is_here else "there")
            one = await run(journal, host, steps(*lines), run_id=run_id)
            two = await adapter(steps(*lines)).evaluate(
                PROMPT, "go", run_id=run_id, journal=other, filesystem=plain
            )
            assert texts(one) == texts(two)
            [mine], [its] = one.session[ToolInvoked].all(), two.session[ToolInvoked].all()
            if is_undone and mine.result.success:
                await runs.undo(journal, run_id, mine.call_id)
                await runs.undo(other, run_id, its.call_id, plain)
            else:
                assert _shape(next(host.glob("*/w/1/files"))) == _shape(folder / "plain")
        await run(journal, folder / "last", run_id="last")
        assert _shape(next((folder / "last").glob("*/w/1/files"))) == _shape(folder / "plain")
        plain.close()
        journal.close()
        other.close()

    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(go(Path(folder)))


def _shape(root: Path) -> dict[str, Any]:
    return {
        str(path.relative_to(root)): (
            None if path.is_dir() else path.read_text(),
            stat.S_IMODE(path.stat().st_mode),
        )
        for path in sorted(root.rglob("*"))
    }
