"""Undoing a recorded call restores files and state, and is refused if later calls depend on them."""

import asyncio
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from handrail import Adapter, MemoryFilesystem, Prompt, Session, ToolContext, Workspace, tool
from handrail.errors import HandrailError, RunBusy, RunError, RunParked, UndoRefused
from handrail.events import MessageAdded
from handrail.journal.records import CallKey
from handrail.journal.sqlite import SqliteJournal
from handrail.messages import UserMessage
from handrail.models.scripted import ScriptedModel
from handrail.resources.directory import DirectoryFilesystem
from handrail.run.call import ToolCall
from handrail.runs import fork, show, undo, undo_problems
from support.damage import set_lease
from support.examples import at_most
from support.recorded import PROMPT, TOOLS, Counted, Noted, Recorder, call
from support.texts import NO_COMMIT_KEPT


@pytest.fixture
def recorder(tmp_path: Path) -> Iterator[Recorder]:
    made = Recorder(tmp_path)
    yield made
    made.close()


@tool(effect="read")
async def look(folder: str, context: ToolContext) -> str:
    """List a folder."""
    return ", ".join(sorted(each.path for each in context.filesystem.list(folder)))


LAW = Prompt("law", "Do.", tools=[*TOOLS, look])

paths = st.sampled_from(["a", "b", "d/a"])
operations = st.one_of(
    st.builds(lambda n: call("note", text=str(n)), st.integers(0, 9)),
    st.just(call("notes")),
    st.builds(lambda n: call("count", number=n), st.integers(0, 9)),
    st.builds(lambda path, n: call("write", path=path, text=str(n)), paths, st.integers(0, 9)),
    st.builds(lambda path: call("read", path=path), paths),
    st.builds(lambda folder: call("look", folder=folder), st.sampled_from(["", "d"])),
)


def state_of(recorder: Recorder, session: Session) -> Any:
    files = {
        str(path.relative_to(recorder.folder)): path.read_text()
        for path in recorder.folder.rglob("*")
        if path.is_file()
    }
    return files, session[Noted].all(), session[Counted].all()


async def carry_out(base: Path, script: list[Any], split: int, target: int | None) -> Any:
    """Make the calls in two runs of one session, and undo the call `target`, if it is not None.

    Returns the state, the units, and the error if the undo was refused.
    """
    recorder = Recorder(base)
    session = Session(id="s")
    try:
        await recorder.run("one", *script[:split], "end", prompt=LAW, session=session)
        await recorder.run("two", *script[split:], "end", prompt=LAW, session=session)
        units = [*await recorder.journal.calls.load("one"), *await recorder.journal.calls.load("two")]
        refused: UndoRefused | None = None
        if target is not None:
            unit = units[target]
            before = state_of(recorder, session)
            problems = await undo_problems(recorder.journal, "s", recorder.files, principal="local")
            assert state_of(recorder, session) == before
            try:
                await undo(recorder.journal, unit.run_id, unit.call_id, recorder.files, session=session)
            except UndoRefused as error:
                refused = error
                assert state_of(recorder, session) == before
            if any(place.startswith("file ") for place in unit.writes):
                problem = problems.get((unit.run_id, unit.call_id))
                assert (
                    problem is None if refused is None else problem is not None and refused.problem in problem
                )
        return state_of(recorder, session), units, refused
    finally:
        recorder.close()


def overlap(written: str, touched: str) -> bool:
    """Return whether two places overlap: the same slice or path, a folder and a path below it, or a listing and an entry in it."""
    if written.startswith("slice ") or touched.startswith("slice "):
        return written == touched
    one, other = written.removeprefix("file "), touched.removeprefix("file ")
    if other.endswith("/") and Path(one).parent == Path(other or "."):
        return True
    a, b = Path(one), Path(other)
    return a == b or a in b.parents or (b in a.parents and not other.endswith("/"))


@settings(deadline=None, max_examples=at_most(60))
@given(st.data())
def test_undo_is_refused_exactly_where_something_was_built_on_it(data: st.DataObject):
    """Undoing a call that succeeded is refused if and only if a later call depends on it.

    Otherwise, the result is as if the call had never run.
    """
    script = data.draw(st.lists(operations, min_size=1, max_size=6))
    split = data.draw(st.integers(0, len(script)))
    target = data.draw(st.integers(0, len(script) - 1))
    with tempfile.TemporaryDirectory() as base:
        for name in ("with", "without"):
            (Path(base) / name).mkdir()
        state, units, refused = asyncio.run(carry_out(Path(base) / "with", script, split, target))
        unit = units[target]
        touched = [place for later in units[target + 1 :] for place in (*later.reads, *later.writes)]
        built_on = any(overlap(place, other) for place in unit.writes for other in touched)
        if unit.status != "ok":
            assert "nothing that it committed is left to undo" in str(refused)
            return
        assert (refused is not None) == built_on
        if refused is None:
            rest = script[:target] + script[target + 1 :]
            at = split - (target < split)
            expected, _, _ = asyncio.run(carry_out(Path(base) / "without", rest, at, None))
            assert state == expected


async def test_the_places_in_the_way_are_named(recorder: Recorder):
    """A refused undo names the paths that later calls have used. Slices count only within the call's own session."""
    await recorder.run("r", [call("note", text="x"), call("write", path="a", text="x")], "end")
    await recorder.run("other", [call("notes"), call("read", path="a")], "end")
    noted, written = await recorder.ids("r")
    with pytest.raises(UndoRefused, match=r"what it wrote \(file a") as refused:
        await undo(recorder.journal, "r", written, recorder.files)
    assert refused.value.places == ("file a",)
    done = await undo(recorder.journal, "r", noted)
    assert (done.slices, done.paths) == (["slice Noted"], ())


async def test_an_inner_call_is_undone_with_the_call_around_it(recorder: Recorder):
    """The id of an inner call, as `show` prints it, leads to the call that it committed into."""

    @tool(effect="staged")
    async def outer(context: ToolContext) -> str:
        """Note something."""
        return (await context.call("note", text="x")).message

    await recorder.run("r", call("outer"), "end", prompt=Prompt("p", "Do.", tools=[*TOOLS, outer]))
    (node,) = (await show(recorder.journal, "r")).turns[0].calls
    with pytest.raises(RunError, match=f"inside the call '{node.id}', and is undone with that call"):
        await undo(recorder.journal, "r", node.calls[0].id)


async def test_a_compensation_is_not_undone(recorder: Recorder):
    """What a compensation has changed stays: what it undid would otherwise be back, but not the effect."""

    async def unbook(params: Any, value: Any, *, context: ToolContext) -> None:
        context.session.dispatch(Noted("unbooked"))

    @tool(effect="compensable", compensate=unbook)
    async def book() -> str:
        """Book."""
        return "booked"

    @tool
    async def trip(context: ToolContext) -> str:
        """Book, and fail."""
        await context.call("book")
        raise ValueError("no hotel")

    await recorder.run("r", call("trip"), "end", prompt=Prompt("p", "Do.", tools=[book, trip]))
    ids = {unit.tool: unit.call_id for unit in await recorder.journal.calls.load("r")}
    with pytest.raises(UndoRefused, match="made to undo another call"):
        await undo(recorder.journal, "r", ids["book.undo"])


async def problem_of(recorder: Recorder, unit: Any, files: Any = None) -> str | None:
    """Return why a call can't be undone, and check that `undo` then says the same."""
    found = await undo_problems(recorder.journal, unit.session_id, files, principal="local")
    problem = found.get((unit.run_id, unit.call_id))
    if problem is not None:
        with pytest.raises(HandrailError) as refused:
            await undo(recorder.journal, unit.run_id, unit.call_id, files)
        assert problem.partition(" (")[0] in str(refused.value)
    return problem


async def test_what_can_not_be_undone_is_known_before(recorder: Recorder):
    """The problem of each call is that with which an undo would be refused. Calls that can be undone, or changed no files, have none."""
    await recorder.run("r", call("write", path="a", text="1"), call("write", path="b", text="1"), "end")
    await recorder.run("other", call("note", text="x"), "end")
    a, b = await recorder.journal.calls.load("r")
    assert await problem_of(recorder, a, recorder.files) is None
    assert "Pass the filesystem" in str(await problem_of(recorder, a))
    with tempfile.TemporaryDirectory() as elsewhere, DirectoryFilesystem(elsewhere) as files:
        assert NO_COMMIT_KEPT in str(await problem_of(recorder, a, files))
    (recorder.folder / "a").write_text("mine")
    assert "changed since" in str(await problem_of(recorder, a, recorder.files))
    await undo(recorder.journal, "r", b.call_id, recorder.files)
    assert "already been undone" in str(await problem_of(recorder, b, recorder.files))
    (note,) = await recorder.journal.calls.load("other")
    assert await undo_problems(recorder.journal, note.session_id, principal="local") == {}


async def test_nothing_can_be_undone_while_a_run_of_the_session_is_in_progress(recorder: Recorder):
    """A process that executes a run of the session is in the way of every undo in it."""
    session = Session(id="s")
    await recorder.run("r", call("write", path="a", text="1"), "end", session=session)
    (unit,) = await recorder.journal.calls.load("r")
    other = SqliteJournal(recorder.journal.path, watch=None)
    set_lease(other, "r", other.owner, 9e12)
    assert (
        "is in progress"
        in (await undo_problems(recorder.journal, "s", recorder.files, principal="local"))["r", unit.call_id]
    )
    with pytest.raises(RunBusy):
        await undo(recorder.journal, "r", unit.call_id, recorder.files)
    other.close()


async def test_a_live_run_of_somebody_else_is_not_in_the_way(recorder: Recorder):
    """Another principal's session with the same id is a different session."""
    await recorder.run("r", call("note", text="1"), "end", session=Session(id="s", principal="ada"))
    (unit,) = await recorder.journal.calls.load("r")
    other = SqliteJournal(recorder.journal.path, watch=None)
    record = (await recorder.journal.runs.get("r")).record
    await other.runs.begin(msgspec.structs.replace(record, id="bob's", principal="bob"))
    assert (await recorder.journal.runs.get("bob's")).held
    await undo(recorder.journal, "r", unit.call_id)
    other.close()


async def test_a_change_in_a_workspace_that_others_changed_since(recorder: Recorder):
    """Calls of other sessions may have changed the same paths of a workspace."""
    await recorder.run("r", call("write", path="a", text="1"), "end", filesystem=Workspace("w"))
    (unit,) = await recorder.journal.calls.load("r")
    assert await undo_problems(recorder.journal, unit.session_id, principal="local") == {}
    await recorder.run("next", call("write", path="b", text="2"), "end", filesystem=Workspace("w"))
    assert await undo_problems(recorder.journal, unit.session_id, principal="local") == {}
    await recorder.run("last", call("write", path="a", text="3"), "end", filesystem=Workspace("w"))
    problems = await undo_problems(recorder.journal, unit.session_id, principal="local")
    assert "have been changed since" in problems["r", unit.call_id]


async def test_later_calls_that_were_undone_are_not_in_the_way(recorder: Recorder):
    """A later call that was itself undone does not prevent undoing the call before it."""
    await recorder.run("r", call("write", path="a", text="1"), call("write", path="a", text="2"), "end")
    first, second = await recorder.ids("r")
    with pytest.raises(UndoRefused):
        await undo(recorder.journal, "r", first, recorder.files)
    await undo(recorder.journal, "r", second, recorder.files)
    assert (recorder.folder / "a").read_text() == "1"
    await undo(recorder.journal, "r", first, recorder.files)
    assert not (recorder.folder / "a").exists()
    with pytest.raises(UndoRefused, match="already been undone"):
        await undo(recorder.journal, "r", first, recorder.files)
    assert [node.undone for node in (await show(recorder.journal, "r")).calls] == [True, True]


async def test_a_folder_is_the_same_one_after_it_was_moved(recorder: Recorder):
    """A later call in the same folder prevents an undo, even if the folder was moved. One in another folder does not."""
    await recorder.run("one", call("write", path="a", text="1"), "end")
    (first,) = await recorder.ids("one")
    away = recorder.base / "away"
    recorder.folder.rename(away)
    recorder.files.close()
    recorder.folder.mkdir()
    recorder.files = DirectoryFilesystem(recorder.folder)
    await recorder.run("elsewhere", call("write", path="a", text="a file of a different folder"), "end")
    recorder.files.close()
    recorder.files = DirectoryFilesystem(away)
    await recorder.run("two", call("read", path="a"), "end")
    with pytest.raises(UndoRefused, match="a later call has read"):
        await undo(recorder.journal, "one", first, recorder.files)
    (second,) = await recorder.ids("two")
    await undo(recorder.journal, "two", second, recorder.files)
    assert list((await undo(recorder.journal, "one", first, recorder.files)).paths) == ["a"]
    assert (recorder.folder / "a").read_text() == "a file of a different folder"


async def test_the_model_is_told_in_its_next_turn(recorder: Recorder):
    """The model is told about an undo once, before the next run's first request, even if that run is resumed."""
    session = Session(id="s")
    await recorder.run("one", call("note", text="x"), "end", session=session)
    (noted,) = await recorder.ids("one")
    await undo(recorder.journal, "one", noted)
    with pytest.raises(RunParked):
        await recorder.run("two", call("choose"), "end", session=session)
    assert session[Noted].all() == ()  # the call's state was removed when the run began
    (question,) = await recorder.journal.questions.open("two")
    recorder.answer(question, {"n": 1})
    response = await recorder.adapter("end").resume("two", PROMPT)
    said = [
        each.message for each in response.session[MessageAdded].all() if isinstance(each.message, UserMessage)
    ]
    assert [message.by_run for message in said] == [False, False, True]
    assert f"The call note ({noted}) was undone" in said[-1].text
    assert response.session[Noted].all() == ()
    await recorder.run("three", "end", session=response.session)
    said = [each for each in response.session[MessageAdded].all() if isinstance(each.message, UserMessage)]
    assert len(said) == 4


async def test_a_parked_run_continues_without_the_call(recorder: Recorder):
    """After an undo, a parked run continues without the call's state, and the model is told before its next answer."""
    with pytest.raises(RunParked):
        await recorder.run("r", call("note", text="x"), call("choose"), "end")
    (noted,) = await recorder.ids("r")
    await undo(recorder.journal, "r", noted)
    (question,) = await recorder.journal.questions.open("r")
    recorder.answer(question, {"n": 1})
    response = await recorder.adapter("end").resume("r", PROMPT)
    assert response.session[Noted].all() == ()
    last_said = [each.message for each in response.session[MessageAdded].all()][-2]
    assert isinstance(last_said, UserMessage)
    assert "was undone" in last_said.text


async def test_what_can_not_be_undone_is_said(recorder: Recorder):
    """Undo is refused for failed or unknown calls, for file changes if no filesystem is passed, and for file changes in a fork."""
    await recorder.run(
        "r", [call("read", path="none"), call("write", path="a", text="x"), call("send", text="y")], "end"
    )
    failed, written, sent = await recorder.ids("r")
    for id, said, options in (
        (failed, "it failed", {}),
        (written, "Pass the filesystem of that folder", {}),
    ):
        with pytest.raises(UndoRefused, match=said):
            await undo(recorder.journal, "r", id, **options)
    with pytest.raises(RunError, match="has no finished call 'nobody'"):
        await undo(recorder.journal, "r", "nobody")
    with pytest.raises(RunError, match=f"has the id '{written}'"):
        await undo(recorder.journal, "r", ".2")
    await fork(recorder.journal, "r", 1, "f")
    with pytest.raises(UndoRefused, match="undo it there"):
        await undo(recorder.journal, "f", written, recorder.files)
    await undo(
        recorder.journal, "r", written, recorder.files
    )  # the fork's copy of the call does not prevent the undo
    with pytest.raises(UndoRefused, match="does not reverse what it did: send"):
        await undo(recorder.journal, "r", sent)


async def test_a_person_s_edit_is_kept(recorder: Recorder):
    """If a person has changed a file since a call wrote it, undo is refused, and the call does not count as undone."""
    await recorder.run("r", call("write", path="a", text="x"), "end")
    (written,) = await recorder.ids("r")
    (recorder.folder / "a").write_text("mine")
    with pytest.raises(UndoRefused, match="changed since"):
        await undo(recorder.journal, "r", written, recorder.files)
    assert (recorder.folder / "a").read_text() == "mine"
    assert not (await show(recorder.journal, "r")).calls[0].undone


async def test_an_undo_that_was_cut_is_finished_by_the_next(recorder: Recorder):
    """If the process dies after an undo has restored the files, repeating the undo records it."""
    await recorder.run("r", [call("write", path="a", text="x")], "end")
    (written,) = await recorder.ids("r")
    note = recorder.journal.calls.note

    async def cut(run_id: str, entry: Any, /, **options: Any) -> None:
        if entry.kind == "undone":
            raise KeyboardInterrupt
        await note(run_id, entry, **options)

    recorder.journal.calls.note = cut
    with pytest.raises(KeyboardInterrupt):
        await undo(recorder.journal, "r", written, recorder.files)
    recorder.journal.calls.note = note
    assert not (recorder.folder / "a").exists()
    done = await undo(recorder.journal, "r", written, recorder.files)
    assert done.paths == ["a"]


async def test_a_session_at_work_is_left_alone(recorder: Recorder):
    """Undo is refused while another run of the session is in progress."""
    began, go = asyncio.Event(), asyncio.Event()

    @tool(effect="pure")
    async def wait() -> str:
        """Wait."""
        began.set()
        await go.wait()
        return "waited"

    session = Session(id="s")
    await recorder.run("one", call("note", text="x"), "end", session=session)
    (noted,) = await recorder.ids("one")
    prompt = Prompt("p", "Do.", tools=[wait])
    task = asyncio.ensure_future(recorder.run("two", call("wait"), "end", prompt=prompt, session=session))
    await began.wait()
    with pytest.raises(RunBusy):
        await undo(recorder.journal, "one", noted)
    go.set()
    await task
    await undo(recorder.journal, "one", noted)


async def test_the_same_call_id_in_another_conversation_is_another_call(recorder: Recorder):
    """Models may repeat call ids in different conversations. Undoing one call leaves the other call's files alone."""
    for who in ("ann", "bob"):
        asked = ToolCall("write", {"path": f"{who}.txt", "text": who}, "call_1")
        await recorder.run(who, asked, "end", session=Session(id=who, principal=who))
    done = await undo(recorder.journal, "ann", "call_1", recorder.files)
    assert list(done.paths) == ["ann.txt"]
    assert [path.name for path in recorder.folder.iterdir()] == ["bob.txt"]
    with pytest.raises(UndoRefused, match="already been undone"):
        await undo(recorder.journal, "ann", "call_1", recorder.files)
    assert list((await undo(recorder.journal, "bob", "call_1", recorder.files)).paths) == ["bob.txt"]


async def test_the_same_run_and_call_in_another_journal_are_not_touched(recorder: Recorder, tmp_path: Path):
    """If two journals share a folder and have calls with the same ids, undo changes only the files of its own journal's call."""
    (tmp_path / "other").mkdir()
    other = SqliteJournal(tmp_path / "other" / "runs.db", watch=None)
    asked = ToolCall("write", {"path": "mine", "text": "x"}, "call_1")
    await recorder.run("r", asked, "end")
    theirs = ToolCall("write", {"path": "theirs", "text": "x"}, "call_1")
    adapter = Adapter(ScriptedModel([theirs, "end"]), journal=other, filesystem=recorder.files)
    await adapter.evaluate(PROMPT, "go", run_id="r")
    await undo(recorder.journal, "r", "call_1", recorder.files)
    assert [path.name for path in recorder.folder.iterdir()] == ["theirs"]
    with pytest.raises(UndoRefused, match=NO_COMMIT_KEPT):
        recorder.files.undo("call_1")
    other.close()


def test_the_same_call_id_at_another_place_of_a_run_is_another_call(tmp_path: Path):
    """Models may repeat a call id within a run, and undo changes only the files of the call at the given place."""
    (tmp_path / "folder").mkdir()
    files = DirectoryFilesystem(tmp_path / "folder")
    for place in (".1", ".2"):
        fork = files.fork("call_1")
        fork.write(f"at{place}", "x")
        fork.prepare()
        fork.stage(CallKey("call_1", run_id="r", place=place, journal="j"))
        fork.apply()
        fork.applied()
    assert files.undo("call_1", run_id="r", place=".1", journal="j") == ("at.1",)
    assert [path.name for path in (tmp_path / "folder").iterdir()] == ["at.2"]
    for wrong in ({"run_id": "s"}, {"journal": "k"}, {"place": ".3"}):
        with pytest.raises(UndoRefused, match=NO_COMMIT_KEPT):
            files.undo("call_1", **{"run_id": "r", "place": ".2", "journal": "j", **wrong})
    files.close()


@tool(effect="staged")
async def write_and_note(context: ToolContext) -> None:
    """Change a file and the session."""
    context.filesystem.write("node_modules/a", "new")
    context.session.dispatch(Noted("new"))


async def test_a_call_that_changed_files_in_memory_is_not_undone(recorder: Recorder):
    """Files in memory are not recorded, so undo refuses a call that changed them. Its changes to the session stay too."""
    work = Prompt("work", "Do.", tools=[write_and_note])
    session, files = Session(id="s"), MemoryFilesystem()
    await recorder.run("one", call("write_and_note"), "end", prompt=work, session=session, filesystem=files)
    [id] = await recorder.ids("one")
    with pytest.raises(UndoRefused, match="it changed files that are not recorded"):
        await undo(recorder.journal, "one", id, session=session)
    assert session[Noted].all() == (Noted("new"),)
    assert files.read("node_modules/a") == "new"


async def test_a_call_that_changed_ignored_files_is_not_undone(recorder: Recorder):
    """A workspace's ignored files are not recorded, so undo refuses a call that changed them.

    The call's changes to the session stay too.
    """
    work = Prompt("work", "Do.", tools=[write_and_note])
    session, files = Session(id="s"), Workspace("w", cache=recorder.base / "cache")
    await recorder.run("one", call("write_and_note"), "end", prompt=work, session=session, filesystem=files)
    [id] = await recorder.ids("one")
    with pytest.raises(UndoRefused, match="files that are not recorded"):
        await undo(recorder.journal, "one", id, session=session)
    assert session[Noted].all() == (Noted("new"),)
