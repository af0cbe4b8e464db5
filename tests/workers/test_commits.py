"""`commit: each`: each of a worker's calls commits on its own, and stands even if the worker fails later."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from handrail import (
    Adapter,
    CapabilityPolicy,
    DirectoryFilesystem,
    LaterEnvironment,
    MemoryFilesystem,
    MemoryJournal,
    Prompt,
    PromptResponse,
    ScriptedModel,
    Session,
    SqliteJournal,
    ToolCall,
    WorkerRegistry,
)
from handrail.errors import RunParked, ToolValidationError, TransientError, UndoRefused
from handrail.events import ToolInvoked
from handrail.run.record.begin import decode_outcome
from handrail.runs import cancel, replay, show, undo
from handrail.testing import Person
from handrail.workers.creation import check_rights
from handrail.workers.front_matter import FrontMatter
from support import SUPPORT, importing_support
from support.parked_runs import answer_to
from support.recorded import Noted
from support.stepwise_workers import FAILS, TOOLS, models, team, to, written
from support.worker_folders import folder, sound


@pytest.fixture(params=["memory", "directory"])
def files(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    (tmp_path / "files").mkdir()
    return MemoryFilesystem() if request.param == "memory" else DirectoryFilesystem(tmp_path / "files")


@pytest.fixture(params=["journal", "no journal"])
def journal(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Any]:
    found = SqliteJournal(tmp_path / "runs.db") if request.param == "journal" else None
    yield found
    if found is not None:
        found.close()


def paths(files: Any) -> list[str]:
    return sorted(each.path for each in files.list("."))


def noted(session: Session) -> list[str]:
    return [each.text for each in session[Noted].all()]


def last_result(model: ScriptedModel) -> str:
    return model.requests[-1].messages[-1].text


def undone_by(registry: WorkerRegistry) -> list[str]:
    """Return the rooms whose booking was undone, as the registry's `tools.py` has noted them."""
    return globals_of(registry)["undone"]


def globals_of(registry: WorkerRegistry) -> dict[str, Any]:
    book: Any = next(tool for tool in registry["main"].prompt.tools if tool.name == "book")
    return book.compensate.__globals__


async def test_the_calls_of_a_failed_worker_stand_only_with_commit_each(
    tmp_path: Path, files: Any, journal: Any
) -> None:
    """If a worker fails, its files, state and bookings stand with `commit: each`, and are undone without it."""
    registry = team(tmp_path, steps=FAILS, whole=FAILS)
    said = models(
        main=[to("steps"), to("whole")],
        steps=[written("a"), ToolCall("book", {"room": "1"})],
        whole=[written("b"), ToolCall("book", {"room": "2"})],
    )
    session = Session(id="s")
    await registry.run("main", "go", models=said, filesystem=files, journal=journal, session=session)
    assert paths(files) == ["a"]
    assert noted(session) == ["a"]
    assert undone_by(registry) == ["2"]
    first, second = (said["main"].requests[n].messages[-1].text for n in (1, 2))
    assert first.startswith("steps failed")
    assert "Each of its calls commits separately, so these stand: write, book." in first
    assert second.startswith("whole failed")
    assert "stand" not in second


async def test_a_later_call_of_the_worker_and_of_its_caller_see_what_was_committed(
    tmp_path: Path, files: Any
) -> None:
    """The next calls of the worker and of its caller see committed state. The state is published when it is committed."""
    registry, session, heard = team(tmp_path), Session(id="s"), list[Any]()
    session.dispatcher.subscribe(Noted, heard.append)
    session.dispatcher.subscribe(ToolInvoked, lambda event: heard.append(event.tool))
    said = models(main=[to("steps"), ToolCall("notes")], steps=[written("a"), ToolCall("notes")])
    await registry.run("main", "go", models=said, filesystem=files, session=session)
    assert last_result(said["steps"]) == "a"
    assert last_result(said["main"]) == "a"
    assert heard == [Noted("a"), "write", "notes", "steps", "notes"]


async def test_an_outer_transaction_holds_back_what_a_worker_inside_has_committed(
    tmp_path: Path, files: Any, journal: Any
) -> None:
    """If a worker without `commit: each` fails, calls of a `commit: each` worker inside it are undone and compensated."""
    registry, session = team(tmp_path, outer="limits: {requests: 4}", steps=FAILS), Session(id="s")
    said = models(
        main=[to("outer")],
        outer=[to("steps"), ToolCall("notes")],
        steps=[written("a"), ToolCall("book", {"room": "1"})],
    )
    await registry.run("main", "go", models=said, filesystem=files, journal=journal, session=session)
    assert "these stand: write, book" in said["outer"].requests[1].messages[-1].text
    assert paths(files) == []
    assert noted(session) == []
    assert undone_by(registry) == ["1"]
    assert "stand" not in last_result(said["main"])


async def test_a_failed_worker_inside_leaves_its_calls_to_the_outer_transaction(
    tmp_path: Path, files: Any, journal: Any
) -> None:
    """If only the inner `commit: each` worker fails, the outer worker keeps the inner one's changes and commits them."""
    registry, session = team(tmp_path, steps=FAILS), Session(id="s")
    said = models(
        main=[to("outer")],
        outer=[to("steps"), ToolCall("notes")],
        steps=[written("a"), ToolCall("book", {"room": "1"})],
    )
    await registry.run("main", "go", models=said, filesystem=files, journal=journal, session=session)
    assert last_result(said["outer"]) == "a"
    assert paths(files) == ["a"]
    assert noted(session) == ["a"]
    assert undone_by(registry) == []


async def test_a_worker_inside_is_one_transaction_unless_it_commits_each_call_too(
    tmp_path: Path, files: Any, journal: Any
) -> None:
    """Inside a `commit: each` worker, a worker without it commits as a whole, and one with it call by call."""
    registry, session = (
        team(tmp_path, steps="limits: {requests: 7}", whole=FAILS, more=FAILS),
        Session(id="s"),
    )
    said = models(
        main=[to("steps")],
        steps=[to("whole"), to("more"), written("d")],
        whole=[written("a"), written("b")],
        more=[written("c"), ToolCall("notes")],
    )
    await registry.run("main", "go", models=said, filesystem=files, journal=journal, session=session)
    assert paths(files) == ["c", "d"]
    assert noted(session) == ["c", "d"]


async def test_parallel_workers_commit_side_by_side_and_run_again_after_a_conflict(
    tmp_path: Path, files: Any, journal: Any
) -> None:
    """Workers called in one turn commit to one filesystem. If two calls write the same path at once, one of them runs again."""
    registry, session = team(tmp_path), Session(id="s")
    same = ToolCall("meet", {"path": "same"})
    said = models(
        main=[[to("steps"), to("more")]],
        steps=[written("a"), same, written("b")],
        more=[written("c"), same, written("d")],
    )
    await registry.run("main", "go", models=said, filesystem=files, journal=journal, session=session)
    assert paths(files) == ["a", "b", "c", "d", "same"]
    assert sorted(noted(session)) == ["a", "b", "c", "d"]
    met = {event.call_id: event.status for event in session[ToolInvoked].all() if event.tool == "meet"}
    assert list(met.values()) == ["ok", "ok"]
    assert files.read("same") in met


async def parked_and_resumed(
    at: Path, files: Any, said: dict[str, Any], later: dict[str, Any]
) -> tuple[PromptResponse[Any], WorkerRegistry]:
    """Run until an approval is asked for. Then reopen the journal and the registry, approve, and resume the run.

    Returns the run's response, and the registry that resumed it.
    """
    opened = SqliteJournal(at / "runs.db")
    registry = WorkerRegistry(at / "team")
    arguments: Any = {"filesystem": files, "environment": LaterEnvironment()}
    with pytest.raises(RunParked) as parked:
        await registry.run("main", "go", models=said, journal=opened, run_id="run", **arguments)
    opened.close()
    opened = SqliteJournal(at / "runs.db")
    opened.questions.answer(answer_to(parked.value.questions[0], {"approved": True}))
    registry = WorkerRegistry(at / "team")
    response = await registry.resume("main", "run", models=later, journal=opened, **arguments)
    opened.close()
    return response, registry


async def test_an_approval_inside_parks_the_run_and_finished_calls_are_not_repeated(
    tmp_path: Path, files: Any
) -> None:
    """When a run that was parked inside the worker is resumed, the worker's committed calls stand and are not repeated."""
    team(tmp_path, steps="limits: {requests: 4}")
    said = models(main=[to("steps")], steps=[written("a"), ToolCall("ask")])
    later = models(main=[], steps=[ToolCall("notes"), written("b")])
    response, _ = await parked_and_resumed(tmp_path, files, said, later)
    assert response.text == "main is done"
    assert later["steps"].requests[1].messages[-1].text == "a"
    assert paths(files) == ["a", "b"]
    assert noted(response.session) == ["a", "b"]
    assert "these stand: write (2 times)." in last_result(later["main"]), (
        "the result leaves out what an earlier process committed"
    )


async def test_a_resumed_worker_knows_the_commits_of_a_worker_inside_it(tmp_path: Path, files: Any) -> None:
    """If a resumed worker fails, the calls that a finished `commit: each` worker had committed inside it are named too."""
    team(tmp_path, steps="limits: {requests: 6}")
    said = models(
        main=[to("steps")],
        steps=[to("more"), ToolCall("ask")],
        more=[written("a"), ToolCall("book", {"room": "1"})],
    )
    later = models(main=[], steps=[written("b")])
    await parked_and_resumed(tmp_path, files, said, later)
    assert paths(files) == ["a", "b"]
    assert "these stand: write (2 times), book." in last_result(later["main"])


@pytest.mark.parametrize("fails", ["", "limits: {requests: 9}"])
async def test_a_resumed_outer_transaction_has_what_a_worker_inside_had_committed(
    tmp_path: Path, files: Any, fails: str
) -> None:
    """A resumed outer worker gets the commits of a finished `commit: each` worker from the record.

    If the outer worker fails, they are undone.
    """
    team(tmp_path, more=FAILS, outer=fails, steps="attachments: {count: 1}")
    files.write("a", "0")
    said = models(
        main=[to("outer")],
        outer=[ToolCall("steps", {"input": "go", "attachments": ["a"]}), ToolCall("ask")],
        steps=[written("a", "1"), to("more"), written("b")],
        more=[written("a", "2"), ToolCall("book", {"room": "1"})],
    )
    later = models(main=[], outer=[ToolCall("notes")])
    response, registry = await parked_and_resumed(tmp_path, files, said, later)
    assert response.text == "main is done"
    if fails:
        assert paths(files) == ["a"]
        assert files.read("a") == "0"
        assert noted(response.session) == []
        assert undone_by(registry) == ["1"]
    else:
        assert last_result(later["outer"]) == "a, a, b"
        assert paths(files) == ["a", "b"]
        assert files.read("a") == "2"
        assert noted(response.session) == ["a", "a", "b"]


async def test_a_cancelled_worker_keeps_what_it_has_committed(
    tmp_path: Path, files: Any, journal: Any
) -> None:
    """Cancelling the run keeps what finished calls have committed, and undoes the call in progress."""
    registry, session = team(tmp_path), Session(id="s")
    said = models(main=[to("steps")], steps=[written("a"), ToolCall("hang", {"path": "b"})])
    run = asyncio.ensure_future(
        registry.run("main", "go", models=said, filesystem=files, journal=journal, session=session)
    )
    while not globals_of(registry)["here"]:
        await asyncio.sleep(0)
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run
    assert paths(files) == ["a"]
    assert noted(session) == ["a"]
    ended = {event.tool: event.status for event in session[ToolInvoked].all()}
    assert ended == {"write": "ok", "hang": "cancelled", "steps": "cancelled"}


@pytest.mark.parametrize("fails", ["", FAILS])
async def test_undoing_the_worker_undoes_each_of_its_calls(tmp_path: Path, fails: str) -> None:
    """Undoing the worker's call undoes its commits, last first, even if the worker failed. The model is told once."""
    (tmp_path / "files").mkdir()
    files, journal, session = DirectoryFilesystem(tmp_path / "files"), MemoryJournal(), Session(id="s")
    registry = team(tmp_path, steps=fails)
    said = models(main=[to("steps")], steps=[written("a", "1"), written("a", "2")])
    arguments: Any = {"filesystem": files, "journal": journal, "session": session}
    await registry.run("main", "go", models=said, run_id="run", **arguments)
    units = await journal.calls.load("run")
    assert [(unit.tool, unit.status) for unit in units] == [
        ("write", "ok"),
        ("write", "ok"),
        ("steps", "error" if fails else "ok"),
    ]
    first, second, worker = (unit.call_id for unit in units)
    with pytest.raises(UndoRefused, match="a later call"):
        await undo(journal, "run", first, files, session=session)
    done = await undo(journal, "run", worker, files, session=session)
    assert (done.paths, done.slices) == (["a"], ["slice Noted"])
    assert paths(files) == []
    assert noted(session) == []
    tree = await show(journal, "run")
    assert {call.id for call in tree.calls if call.undone} == {first, second, worker}
    with pytest.raises(UndoRefused, match="already been undone"):
        await undo(journal, "run", worker, files)
    next_model = ScriptedModel(["Seen."])
    await registry.run("main", "and now?", model=next_model, **arguments)
    (told,) = [each.text for each in next_model.requests[0].messages if "was undone" in each.text]
    assert told.count("was undone") == 1
    assert "The call steps" in told


async def written_by_steps(at: Path, files: Any, *calls: ToolCall, **options: Any) -> tuple[Any, list[str]]:
    """Run a worker that commits each of these calls. Returns its journal, and the ids of the run's calls, the worker's last."""
    journal = MemoryJournal()
    said = models(main=[to("steps")], steps=[*calls])
    await team(at).run("main", "go", models=said, filesystem=files, journal=journal, run_id="run", **options)
    return journal, [unit.call_id for unit in await journal.calls.load("run")]


async def test_an_undo_that_would_stop_half_way_is_refused_first(tmp_path: Path) -> None:
    """If somebody has changed the file of one inner call, none is undone, and the error names the call and the file."""
    (tmp_path / "files").mkdir()
    session = Session(id="s")
    with DirectoryFilesystem(tmp_path / "files") as files:
        calls = [written("a"), written("b"), written("c")]
        journal, (first, *_, worker) = await written_by_steps(tmp_path, files, *calls, session=session)
        (tmp_path / "files" / "a").write_text("mine")
        with pytest.raises(UndoRefused, match="Nothing was changed") as refused:
            await undo(journal, "run", worker, files, session=session)
        assert (refused.value.call_id, refused.value.places, refused.value.undone) == (first, ("a",), ())
        assert paths(files) == ["a", "b", "c"]
        assert noted(session) == ["a", "b", "c"]
        assert not [node for node in (await show(journal, "run")).calls if node.undone]


async def test_an_undo_of_more_calls_than_are_kept_is_refused_first(tmp_path: Path) -> None:
    """A folder keeps what its last calls replaced. If it no longer does for one of the inner calls, none is undone."""
    (tmp_path / "files").mkdir()
    with DirectoryFilesystem(tmp_path / "files", keep_calls=2) as files:
        calls = [written("a"), written("b"), written("c")]
        journal, (first, *_, worker) = await written_by_steps(tmp_path, files, *calls)
        with pytest.raises(UndoRefused, match="only the last 2 calls are kept") as refused:
            await undo(journal, "run", worker, files)
        assert (refused.value.call_id, refused.value.undone) == (first, ())
        assert paths(files) == ["a", "b", "c"]


async def test_calls_that_change_the_same_file_are_undone_one_after_another(tmp_path: Path) -> None:
    """Before an undo, each file is compared with what the undo of the later calls will have restored."""
    (tmp_path / "files").mkdir()
    with DirectoryFilesystem(tmp_path / "files") as files:
        files.write("a", "0")
        calls = [written("a", "1"), written("b/c"), written("a", "2"), written("b/c", "3"), written("a", "4")]
        journal, (*_, worker) = await written_by_steps(tmp_path, files, *calls)
        done = await undo(journal, "run", worker, files)
        assert sorted(done.paths) == ["a", "b", "b/c"]
        assert files.read("a") == "0"
        assert paths(files) == ["a"]


class Meddled:
    """A folder in which somebody changes a file while an undo is under way, once it was checked."""

    def __init__(self, files: DirectoryFilesystem, path: Path) -> None:
        self.files, self.path = files, path

    def check_undo(self, calls: Any, /) -> None:
        self.files.check_undo(calls)
        self.path.write_text("mine")

    def undo(self, call_id: str, /, **which: Any) -> tuple[str, ...]:
        return self.files.undo(call_id, **which)


async def test_an_undo_that_stops_half_way_says_what_it_has_undone(tmp_path: Path) -> None:
    """If somebody changes a file during an undo, only later inner calls are undone. The error names them, and the model is told."""
    (tmp_path / "files").mkdir()
    session, files = Session(id="s"), DirectoryFilesystem(tmp_path / "files")
    calls = [written("a"), written("b"), written("c")]
    journal, (_, second, third, worker) = await written_by_steps(tmp_path, files, *calls, session=session)
    with pytest.raises(UndoRefused, match=f"These calls stay undone: {third}, {second}") as refused:
        await undo(journal, "run", worker, Meddled(files, tmp_path / "files" / "a"), session=session)
    assert refused.value.undone == (third, second)
    assert paths(files) == ["a"]
    assert noted(session) == ["a"]
    next_model = ScriptedModel(["Seen."])
    registry = WorkerRegistry(tmp_path / "team")
    await registry.run(
        "main", "and now?", model=next_model, filesystem=files, journal=journal, session=session
    )
    (told,) = [each.text for each in next_model.requests[0].messages if "was undone" in each.text]
    assert told.count("which was made inside another call, was undone later") == 2
    assert "steps" not in told


async def test_a_worker_that_has_committed_calls_is_not_retried(tmp_path: Path, files: Any) -> None:
    """After a transient failure, a worker that has committed calls is not retried, and one that has changed nothing is."""
    front = "---\ntools: [write, notes]\npolicies: []"
    registry = sound(
        tmp_path / "team",
        TOOLS,
        main=f"{front}\nworkers: [steps]\n---\nGo.",
        steps=f"{front}\ncommit: each\n---\nGo.",
    )
    busy = [TransientError("busy", retry_after=0)]
    said = {
        "main": ScriptedModel([to("steps"), "main is done"]),
        "steps": ScriptedModel([ToolCall("notes"), *busy, written("a"), *busy, written("b")]),
    }
    await registry.run("main", "go", models=said, filesystem=files)
    assert paths(files) == ["a"]
    told = last_result(said["main"])
    assert "TransientError: busy." in told
    assert "so these stand: write." in told


async def test_a_replay_takes_over_what_the_worker_has_committed(tmp_path: Path) -> None:
    """A replay uses the state that the calls of a `commit: each` worker have left, and finds no difference."""
    journal, registry = MemoryJournal(), team(tmp_path)
    said = models(
        main=[to("steps"), ToolCall("notes")], steps=[written("a"), ToolCall("book", {"room": "1"})]
    )
    await registry.run(
        "main", "go", models=said, filesystem=MemoryFilesystem(), journal=journal, run_id="run"
    )
    worker = registry["main"]
    assert await replay(journal, "run", worker.prompt, params=worker.render("go")) is None


async def test_the_scope_of_an_outer_policy_holds_for_each_commit(tmp_path: Path, journal: Any) -> None:
    """A policy around the worker judges the paths that its calls change before they commit, because afterwards it is too late."""
    (tmp_path / "files").mkdir()
    registry, files, session = team(tmp_path), DirectoryFilesystem(tmp_path / "files"), Session(id="s")
    policy = CapabilityPolicy(scope=["docs"])
    for asked, expected in ((None, ["docs"]), (Person(approve=True), ["docs", "secret"])):
        model = ScriptedModel([to("steps"), written("docs/a"), written("secret"), "Well.", "Done."])
        prompt = Prompt("caller", "Go.", tools=[registry.tool("steps")], policies=[policy])
        await Adapter(model).evaluate(
            prompt, "go", filesystem=files, journal=journal, session=session, environment=asked
        )
        assert paths(files) == expected
    refused, allowed = [event.result for event in session[ToolInvoked].all() if event.tool == "write"][1::2]
    assert "changes paths outside its scope: secret" in refused.message
    assert allowed.success


async def test_a_worker_that_a_call_has_created_can_be_called_at_once(tmp_path: Path) -> None:
    """A worker with `commit: each` can call a worker that it created, as soon as the creating call has committed."""
    registry = team(tmp_path, steps="create: true")
    made = ToolCall("create_worker", {"name": "helper", "description": "Helps.", "instructions": "Help."})
    said = models(main=[to("steps")], steps=[to("helper"), made, to("helper"), "Helped."])
    await registry.run(
        "main", "go", models=said, filesystem=MemoryFilesystem(), environment=Person(approve=True)
    )
    assert last_result(said["steps"]) == "Helped."


async def test_a_created_worker_can_not_commit_its_calls_one_by_one(tmp_path: Path) -> None:
    """A created worker with `commit: each`, which only an altered session can contain, is refused."""
    maker = team(tmp_path, steps="create: true")["steps"]
    with pytest.raises(ToolValidationError, match="commit its calls one by one"):
        check_rights(maker, FrontMatter(commit="each", policies=[]))


async def test_a_cancelled_run_says_what_its_unfinished_worker_has_done(tmp_path: Path) -> None:
    """If a parked run is cancelled, the last message of its outcome names the worker's calls that have committed and stand."""
    registry, journal = team(tmp_path), MemoryJournal()
    said = models(main=[to("steps")], steps=[written("a"), ToolCall("book", {"room": "1"}), ToolCall("ask")])
    arguments: Any = {"filesystem": MemoryFilesystem(), "environment": LaterEnvironment()}
    with pytest.raises(RunParked):
        await registry.run("main", "go", models=said, journal=journal, run_id="run", **arguments)
    row = await cancel(journal, "run")
    assert "so these stand: write, book." in decode_outcome(row).messages[-1].text


def test_a_wrong_value_is_reported_by_file_and_line(tmp_path: Path) -> None:
    """`commit` takes `all` or `each`. Anything else is reported with its file and line."""
    registry = folder(tmp_path, bad="---\ncommit: every\n---\nGo.", good="---\ncommit: all\n---\nGo.")
    (problem,) = registry.check()
    assert (Path(problem.file).name, problem.line) == ("bad.md", 2)
    assert "`commit` must be" in problem.problem


@pytest.mark.once
def test_a_process_killed_between_two_commits_leaves_the_first_and_the_run_goes_on(tmp_path: Path) -> None:
    """After `kill -9`, finished calls stand and are not made again, and the resumed worker continues after them."""
    (tmp_path / "files").mkdir()
    script = SUPPORT / "stepwise_workers.py"
    killed = subprocess.run(
        [sys.executable, str(script), str(tmp_path)],
        check=False,
        capture_output=True,
        env=importing_support(),
    )
    assert killed.returncode == -9, killed.stderr
    assert [path.name for path in (tmp_path / "files").iterdir()] == ["a"]
    asyncio.run(_resume_killed(tmp_path))


async def _resume_killed(at: Path) -> None:
    registry, journal = WorkerRegistry(at / "team"), SqliteJournal(at / "runs.db")
    files = DirectoryFilesystem(at / "files")
    said = models(main=[], steps=[ToolCall("notes")])
    response = await registry.resume("main", "run", models=said, filesystem=files, journal=journal)
    assert response.text == "main is done"
    assert said["steps"].requests[0].messages[-1].text == "went on"
    assert last_result(said["steps"]) == "a"
    assert noted(response.session) == ["a"]
    tools = [unit.tool for unit in await journal.calls.load("run")]
    assert tools == ["write", "book", "stop", "notes", "steps"]
    assert undone_by(registry) == []
    journal.close()
