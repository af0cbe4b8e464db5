"""Operations on recorded runs: list, show, cancel, fork, export, import and forget."""

import asyncio
import json
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr

from handrail import (
    Adapter,
    LaterEnvironment,
    MarkdownSection,
    Prompt,
    ScriptedModel,
    Session,
    ToolContext,
    tool,
)
from handrail.errors import DefinitionError, PromptEvaluationError, RunBusy, RunError, RunParked, RunUnknown
from handrail.events import MessageAdded
from handrail.journal.sqlite import MemoryJournal, SqliteJournal
from handrail.messages import AssistantMessage, Price, ToolMessage, Traits, Usage, UserMessage
from handrail.models.scripted import Reply
from handrail.prompt import OPENER
from handrail.run.record.begin import decode_outcome
from handrail.runs import cancel, export, forget, fork, import_, list_runs, show
from support.damage import set_lease
from support.recorded import PROMPT, TOOLS, Counted, Noted, Recorder, call
from support.texts import RUN_ID_TAKEN


@pytest.fixture
def recorder(tmp_path: Path) -> Iterator[Recorder]:
    made = Recorder(tmp_path)
    yield made
    made.close()


async def parked(recorder: Recorder, run_id: str, *script: Any, **options: Any) -> None:
    with pytest.raises(RunParked):
        await recorder.run(run_id, *script, **options)


# --- list and show --------------------------------------------------------------------------------------


async def test_runs_of_a_session_come_in_pages_too(recorder: Recorder):
    """The next page of a session's runs begins after the mark of the last run on the previous page."""
    session = Session(id="s")
    for run_id in ("one", "two", "three"):
        await recorder.run(run_id, "ok", session=session)
    first = await list_runs(recorder.journal, session_id="s", limit=2)
    after = await list_runs(recorder.journal, session_id="s", before=first[-1].row.record.mark)
    assert [[line.id for line in lines] for lines in (first, after)] == [["three", "two"], ["one"]]


async def test_runs_are_listed_as_they_stand(recorder: Recorder):
    """Runs are listed with their standings, oldest last. A running run without a live owner is interrupted.

    The list can be limited to some standings and to a number of runs.
    """
    await recorder.run("done", "ok")
    await parked(recorder, "waits", call("choose"), "ok")
    other = SqliteJournal(recorder.journal.path, watch=None)
    record = (await other.runs.get("done")).record
    import msgspec

    for id, owner in (("gone", "elsewhere/1/1/x"), ("ours", other.owner)):
        await other.runs.begin(msgspec.structs.replace(record, id=id, session_id=id, began_at=9e9))
        set_lease(other, id, owner, 0 if id == "gone" else 9e12)
    lines = await list_runs(recorder.journal)
    assert {line.id: line.standing for line in lines} == {
        "done": "done", "waits": "parked", "gone": "interrupted", "ours": "running",
    }  # fmt: skip
    assert [line.id for line in lines][-1] == "done"
    assert [line.row.questions for line in lines if line.id == "waits"] == [1]
    assert [line.id for line in await list_runs(recorder.journal, standing=["parked"])] == ["waits"]
    assert len(await list_runs(recorder.journal, limit=2)) == 2
    other.close()


async def test_a_tree_has_turns_calls_diffs_and_questions(recorder: Recorder):
    """A run's tree contains its turns, calls, diffs and questions, with inner calls and nested runs in their places.

    It sums up the usage, and an unknown run is refused.
    """

    @tool(effect="staged")
    async def outer(context: ToolContext) -> str:
        """Do several things."""
        inner = await context.call("note", text="inner")
        said = await context.adapter.evaluate(Prompt("nested", "Be nested.", tools=TOOLS), "nested")
        return f"{inner.message} {said.text}"

    prompt = Prompt("work", "Do.", tools=[*TOOLS, outer])
    script = [
        call("write", path="a.txt", text="new\n"),
        call("outer"),
        call("count", number=1),
        "deep",
        call("choose"),
        "end",
    ]
    await parked(recorder, "r", *script, prompt=prompt)
    tree = await show(recorder.journal, "r")
    assert tree.standing == "parked"
    assert [[each.tool for each in turn.calls] for turn in tree.turns] == [["write"], ["outer"], ["choose"]]
    write, outer_node, choose = (turn.calls[0] for turn in tree.turns)
    assert "+new" in write.diff
    assert write.status == "ok"
    assert write.seconds is not None
    assert write.writes == ["file a.txt"]
    assert json.loads(write.arguments) == {"path": "a.txt", "text": "new\n"}
    assert [(each.tool, str(each.place), each.status) for each in outer_node.calls] == [
        ("note", ".2~1.1", "ok")
    ]
    assert [each.name for each in outer_node.runs] == ["nested"]
    assert [[each.tool for each in turn.calls] for turn in outer_node.runs[0].turns] == [["count"], []]
    assert outer_node.runs[0].turns[0].calls[0].message == "counted 1"
    assert choose.status == "open"
    assert choose.verbs == ["wait_for pick"]
    assert [(asked.question.name, asked.answer) for asked in choose.questions] == [("pick", None)]
    assert tree.usage.requests == 5
    with pytest.raises(RunUnknown):
        await show(recorder.journal, "nobody")


# --- cancel ----------------------------------------------------------------------------------------------


def well_formed(messages: list[Any]) -> bool:
    for at, message in enumerate(messages):
        if isinstance(message, AssistantMessage) and message.calls:
            after = messages[at + 1]
            if not isinstance(after, ToolMessage) or [c.id for c in message.calls] != [
                r.id for r in after.results
            ]:
                return False
    return True


async def test_a_run_without_an_owner_is_cancelled_and_its_session_continues(recorder: Recorder):
    """When a run without an owner is cancelled, its open calls get results, and its finished calls are kept.

    The run can be cancelled again, but not resumed, and its session can continue.
    """
    session = Session(id="s")
    await recorder.run("first", "hello", session=session)
    await parked(recorder, "second", [call("note", text="kept"), call("choose")], "no", session=session)
    row = await cancel(recorder.journal, "second")
    assert (row.status, row.questions) == ("cancelled", 0)
    assert (await cancel(recorder.journal, "second")).status == "cancelled"
    with pytest.raises(PromptEvaluationError) as refused:
        await recorder.adapter().resume("second", PROMPT)
    assert refused.value.phase == "cancelled"
    await parked(recorder, "third", call("choose"), "fine", session=session)
    (question,) = await recorder.journal.questions.open("third")
    recorder.answer(question, {"n": 3})
    response = await recorder.adapter("fine").resume("third", PROMPT)
    assert response.text == "fine"
    messages = [each.message for each in response.session[MessageAdded].all()]
    assert well_formed(messages)
    results = [r.text for m in messages if isinstance(m, ToolMessage) for r in m.results]
    assert results[0] == "noted kept"
    assert "not run: the run was cancelled" in results[1]
    assert results[2] == "got 3"
    assert [each.text for each in response.session[Noted].all()] == ["kept"]


async def test_a_cancelled_run_costs_what_its_answers_cost(recorder: Recorder):
    """A parked run that is cancelled has the usage and cost of its recorded answers."""
    asks = Reply(calls=[call("choose")], usage=Usage(10, 5, requests=1))
    priced = Traits(Price(Decimal(1_000_000), Decimal(1_000_000)))
    adapter = Adapter(
        ScriptedModel([asks], traits=priced), journal=recorder.journal, environment=LaterEnvironment()
    )
    with pytest.raises(RunParked):
        await adapter.evaluate(PROMPT, "go", run_id="r")
    await cancel(recorder.journal, "r")
    tree = await show(recorder.journal, "r")
    assert (tree.standing, tree.usage.tokens, tree.cost) == ("cancelled", 15, 15)


async def test_a_call_that_had_begun_is_said_to_be_unknown(recorder: Recorder):
    """When a run is cancelled, the result of a call that had begun says that its outcome is unknown."""
    stop = asyncio.Event()

    @tool
    async def pay(context: ToolContext) -> str:
        """Pay."""
        stop.set()
        await asyncio.sleep(3600)
        return "paid"

    task = asyncio.ensure_future(recorder.run("r", call("pay"), prompt=Prompt("p", "Do.", tools=[pay])))
    await stop.wait()
    set_lease(recorder.journal, "r", "h/1/1/x")
    other = SqliteJournal(
        recorder.journal.path, watch=None
    )  # opened as another process would, because this process still has the task
    row = await cancel(other, "r")
    other.close()
    assert row.status == "cancelled"
    (results,) = [m.results for m in decode_outcome(row).messages if isinstance(m, ToolMessage)]
    assert "its outcome is unknown" in results[0].text
    task.cancel()
    with pytest.raises((asyncio.CancelledError, RunBusy)):
        await task


async def test_a_run_that_a_process_has_is_stopped_by_it(recorder: Recorder, monkeypatch: pytest.MonkeyPatch):
    """A cancel request reaches the run's owner through the journal. The owner ends the run and tells its caller."""
    monkeypatch.setattr(recorder.journal, "lease", 0.2)
    began = asyncio.Event()

    @tool(effect="staged")
    async def long(context: ToolContext) -> str:
        """Take long."""
        context.session.dispatch(Noted("never"))
        began.set()
        await asyncio.sleep(3600)
        return "never"

    session = Session(id="s")
    task = asyncio.ensure_future(
        recorder.run("r", call("long"), prompt=Prompt("p", "Do.", tools=[long]), session=session)
    )
    await began.wait()
    other = SqliteJournal(recorder.journal.path, watch=None)
    row = await cancel(other, "r")
    assert (row.status, row.stopping) in {("running", True), ("cancelled", False)}, (
        "the run was not asked to stop"
    )
    with pytest.raises(PromptEvaluationError) as ended:
        await task
    assert ended.value.phase == "cancelled"
    assert task.cancelling() == 0
    row = await other.runs.get("r")
    assert (row.status, row.owner, row.stopping) == ("cancelled", "", False)
    assert well_formed([each.message for each in session[MessageAdded].all()])
    assert session[Noted].all() == ()
    other.close()


@pytest.mark.parametrize("resumed", [False, True])
@pytest.mark.parametrize("when", ["before it is parked", "after it is parked"])
async def test_a_run_that_is_cancelled_while_it_is_parked_ends_as_cancelled(
    recorder: Recorder, when: str, resumed: bool, monkeypatch: pytest.MonkeyPatch
):
    """A cancel request is not lost if the run's lease is not renewed after it.

    It may be recorded just before the run is parked, or just after that by somebody who had found the run busy.
    """
    other = SqliteJournal(recorder.journal.path, watch=None)
    asked, may_ask = asyncio.Event(), asyncio.Event()
    stop = other.runs.stop

    @tool(effect="read")
    async def ask(context: ToolContext) -> str:
        """Ask for a number."""
        assert context.wait_for is not None
        if resumed:
            await context.wait_for("first", {}, int)
        asked.set()
        await may_ask.wait()
        return str(await context.wait_for("second", {}, int))

    async def stop_after_parking(run_id: str) -> None:
        if when == "after it is parked":
            may_ask.set()
            await asyncio.wait({task})
        await stop(run_id)

    monkeypatch.setattr(other.runs, "stop", stop_after_parking)
    prompt, session = Prompt("p", "Do.", tools=[ask, *TOOLS]), Session(id="s")
    script = [call("note", text="kept"), call("ask")]
    if resumed:
        await parked(recorder, "r", script, "no", prompt=prompt, session=session)
        (question,) = await recorder.journal.questions.open("r")
        recorder.answer(question, 1)
        task = asyncio.ensure_future(recorder.adapter("no").resume("r", prompt))
    else:
        task = asyncio.ensure_future(recorder.run("r", script, "no", prompt=prompt, session=session))
    await asked.wait()
    row = await cancel(other, "r")
    may_ask.set()
    if when == "after it is parked":
        assert row.status == "cancelled"
        with pytest.raises(RunParked):
            await task
    else:
        assert row.stopping
        with pytest.raises(PromptEvaluationError) as ended:
            await task
        assert ended.value.phase == "cancelled"
    row = await other.runs.get("r")
    assert (row.status, row.owner, row.stopping, row.questions) == ("cancelled", "", False, 0)
    messages = decode_outcome(row).messages
    assert well_formed(messages)
    (results,) = [each.results for each in messages if isinstance(each, ToolMessage)]
    assert results[0].text == "noted kept"
    assert "the run was cancelled first" in results[1].text
    other.close()


# --- fork ------------------------------------------------------------------------------------------------


async def test_a_fork_shares_the_beginning_and_continues_by_itself(recorder: Recorder):
    """A fork starts with the state at its step, does not repeat earlier steps, and leaves the original run unchanged."""
    session = Session(id="s")
    await recorder.run("zero", call("note", text="before"), "hi", session=session)
    script = [
        call("note", text="one"),
        [call("count", number=2), call("send", text="x")],
        call("note", text="three"),
        "end",
    ]
    await recorder.run("r", *script, session=session)
    row = await fork(recorder.journal, "r", 2, "f")
    assert (row.status, row.record.forked_from, row.record.session_id) == ("parked", "r#2", "f")
    assert await recorder.ids("f") == (await recorder.ids("r"))[:3]
    response = await recorder.adapter(call("notes"), "other end").resume("f", PROMPT)
    assert response.text == "other end"
    assert [each.text for each in response.session[Noted].all()] == ["before", "one"]
    assert [each.number for each in response.session[Counted].all()] == [2]
    messages = [each.message for each in response.session[MessageAdded].all()]
    assert well_formed(messages)
    assert [m.text for m in messages if isinstance(m, UserMessage)] == ["go", "go"]
    assert [r.text for m in messages if isinstance(m, ToolMessage) for r in m.results] == [
        "noted before", "noted one", "counted 2", "sent x", "before, one",
    ]  # fmt: skip
    assert len(await recorder.ids("r")) == 4


@pytest.mark.parametrize("step", [-1, 3])
async def test_a_step_that_is_not_there_is_refused(recorder: Recorder, step: int):
    """A fork at a step that the run does not have, or with an id that exists, is refused and creates nothing."""
    await recorder.run("r", call("note", text="one"), "end")
    with pytest.raises(RunError, match="a step from 0, its beginning, to 2"):
        await fork(recorder.journal, "r", step, "f")
    with pytest.raises(RunError, match=RUN_ID_TAKEN):
        await fork(recorder.journal, "r", 1, "r")
    assert [line.id for line in await list_runs(recorder.journal)] == ["r"]


async def test_a_fork_from_the_beginning_asks_the_model_anew(recorder: Recorder):
    """A fork at step 0 has only the user's message, and when it is resumed, the model is asked again."""
    await recorder.run("r", call("note", text="one"), "end")
    await fork(recorder.journal, "r", 0, "f")
    response = await recorder.adapter("again").resume("f", PROMPT)
    assert (response.text, response.session[Noted].all()) == ("again", ())


async def test_what_was_done_once_is_not_done_again_in_a_fork(recorder: Recorder):
    """A fork does not repeat a payment that `once` recorded in the original run."""
    paid: list[str] = []

    @tool(effect="idempotent")
    async def pay(context: ToolContext) -> str:
        """Pay, then ask."""

        async def once() -> str:
            paid.append("paid")
            return "receipt"

        receipt = await context.once("pay", once)
        assert context.wait_for
        return f"{receipt} {(await context.wait_for('pick', {}, int))}"

    prompt = Prompt("p", "Do.", tools=[pay])
    await parked(recorder, "r", call("pay"), "end", prompt=prompt)
    await fork(recorder.journal, "r", 1, "f")
    with pytest.raises(RunParked):
        await recorder.adapter("end").resume("f", prompt)
    (question,) = await recorder.journal.questions.open("f")
    recorder.answer(question, 5)
    response = await recorder.adapter("end").resume("f", prompt)
    assert response.text == "end"
    assert paid == ["paid"]


# --- export and import -----------------------------------------------------------------------------------


async def test_a_run_goes_through_a_file_into_another_journal(recorder: Recorder, tmp_path: Path):
    """An exported run can be imported into another journal, shown, and resumed with its session.

    Its file changes are not applied there. Importing it again needs a new id.
    """
    session = Session(id="s")
    await recorder.run("zero", call("note", text="before"), "hi", session=session)
    await parked(recorder, "r", call("write", path="a", text="x"), call("choose"), "end", session=session)
    lines = await export(recorder.journal, "r", tmp_path / "r.jsonl")
    assert (tmp_path / "r.jsonl").stat().st_mode & 0o777 == 0o600, "a conversation is private"
    assert [each.name for each in tmp_path.iterdir() if each.name.startswith(".r.jsonl")] == []
    assert lines == len((tmp_path / "r.jsonl").read_bytes().splitlines())
    elsewhere = Recorder(tmp_path / "else" if (tmp_path / "else").mkdir() is None else tmp_path)
    await import_(elsewhere.journal, tmp_path / "r.jsonl")
    here, there = await show(recorder.journal, "r"), await show(elsewhere.journal, "r")
    assert [[c.tool for c in t.calls] for t in there.turns] == [[c.tool for c in t.calls] for t in here.turns]
    assert there.turns[0].calls[0].diff == here.turns[0].calls[0].diff != ""
    with pytest.raises(RunParked):
        await elsewhere.adapter("end").resume("r", PROMPT)
    (question,) = await elsewhere.journal.questions.open("r")
    elsewhere.answer(question, {"n": 9})
    response = await elsewhere.adapter("end").resume("r", PROMPT)
    assert response.text == "end"
    assert [each.text for each in response.session[Noted].all()] == ["before"]
    assert not (elsewhere.folder / "a").exists()
    with pytest.raises(RunError, match=RUN_ID_TAKEN):
        await import_(elsewhere.journal, tmp_path / "r.jsonl")
    again = await import_(elsewhere.journal, tmp_path / "r.jsonl", run_id="r2")
    assert (again.record.id, again.record.session_id, again.status) == ("r2", "r2", "parked")
    elsewhere.close()


async def test_an_export_holds_no_secret(recorder: Recorder, tmp_path: Path):
    """In an exported file, secret arguments are masked."""

    @tool
    async def login(password: SecretStr) -> str:
        """Log in."""
        return "in"

    await recorder.run(
        "r", call("login", password="hunter2-hunter2"), "end", prompt=Prompt("p", "Do.", tools=[login])
    )
    await export(recorder.journal, "r", tmp_path / "r.jsonl")
    text = (tmp_path / "r.jsonl").read_bytes()
    import base64

    blob = text + b"".join(
        base64.b64decode(each["body"])
        for line in text.splitlines()
        if (each := json.loads(line).get("entry"))
    )
    assert b"hunter2" not in blob
    assert b"**********" in blob


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "not an exported run"),
        (b'{"handrail": "session", "version": 1}', "not an exported run"),
        (
            b'{"handrail": "run", "version": 2, "run_id": "r"}',
            "exported in format 2",
        ),
        (b'{"handrail": "run", "version": 1, "run_id": "r"}', "truncated"),
        (b'{"handrail": "run", "version": 1, "run_id": "r"}\n{"entry": 3}', "line 2 of r.jsonl is damaged"),
        *(
            (
                b'{"handrail": "run", "version": 1, "run_id": "r"}\n'
                b'{"entry": {"kind": "%s", "key": "call 2", "at": 0.0, "body": ""}}' % kind,
                "line 2 of r.jsonl is damaged: 'call 2' is not a place",
            )
            for kind in (b"inner call", b"told", b"attachments", b"remote work", b"deadline")
        ),
    ],
)
async def test_a_file_that_is_no_run_is_refused(
    recorder: Recorder, tmp_path: Path, content: bytes, said: str
):
    """A file that is damaged, has a different format or is not a run is refused with an explanation. Nothing is imported."""
    (tmp_path / "r.jsonl").write_bytes(content)
    with pytest.raises(RunError, match=said):
        await import_(recorder.journal, tmp_path / "r.jsonl")
    assert await list_runs(recorder.journal) == ()


async def test_an_import_has_an_id_that_can_be_printed(recorder: Recorder, tmp_path: Path):
    """A run whose id contains unprintable characters, which could fake output, is imported only under a new id."""
    await recorder.run("r", "end")
    await export(recorder.journal, "r", tmp_path / "r.jsonl")
    lines = (tmp_path / "r.jsonl").read_bytes()
    for id in (r"x\n\u001b[2J", r"x\u202e"):
        (tmp_path / "odd.jsonl").write_bytes(lines.replace(b'"id":"r"', f'"id":"{id}"'.encode()))
        assert (tmp_path / "odd.jsonl").read_bytes() != lines
        with pytest.raises(RunError, match=r"the id .* can't be printed"):
            await import_(recorder.journal, tmp_path / "odd.jsonl")
    imported = await import_(recorder.journal, tmp_path / "odd.jsonl", run_id="other")
    assert imported.record.id == "other"


# --- retention -------------------------------------------------------------------------------------------


async def test_sessions_of_different_principals_are_forgotten_separately(recorder: Recorder):
    """An unfinished run does not keep the runs of another principal's session with the same id."""
    await recorder.run("ada's", "x", session=Session(id="s", principal="ada"))
    await parked(recorder, "bob's", call("choose"), session=Session(id="s", principal="bob"))
    assert await forget(recorder.journal, keep=0) == ("ada's",)
    assert [line.id for line in await list_runs(recorder.journal)] == ["bob's"]


async def test_only_whole_sessions_that_are_over_are_forgotten(recorder: Recorder):
    """Only sessions whose runs are all finished are forgotten, and none of those runs' records remain."""
    live, over = Session(id="live"), Session(id="over")
    await recorder.run("live1", call("note", text="a"), "x", session=live)
    await recorder.run("over1", call("note", text="b"), "x", session=over)
    await recorder.run("over2", call("write", path="a", text="b"), "x", session=over)
    await parked(recorder, "live2", call("choose"), "x", session=live)
    later = datetime.now(UTC) + timedelta(hours=1)
    assert await forget(recorder.journal, before=later, dry=True) == ("over2", "over1")
    assert await forget(recorder.journal, before=later - timedelta(hours=2)) == ()
    assert await forget(recorder.journal, before=later, keep=2) == ()
    assert set(await forget(recorder.journal, before=later)) == {"over1", "over2"}
    assert {line.id for line in await list_runs(recorder.journal)} == {"live1", "live2"}
    for column in ("chain FROM records", "chain FROM chains", "run_id FROM questions"):
        rows = recorder.journal._database.transact_now(  # pyright: ignore[reportPrivateUsage]
            lambda c, what=column: c.execute(f"SELECT DISTINCT {what}").fetchall()
        )
        # `live` is the session that remains. The list of sessions records that the other one was forgotten.
        assert {row[0].rpartition(" ")[2] for row in rows} <= {"live1", "live2", "live", "sessions"}
    (question,) = await recorder.journal.questions.open("live2")
    recorder.answer(question, {"n": 1})
    response = await recorder.adapter("y").resume("live2", PROMPT)
    assert [each.text for each in response.session[Noted].all()] == ["a"]
    with pytest.raises(DefinitionError, match="which runs to delete"):
        await forget(recorder.journal)


# --- a journal in memory -----------------------------------------------------------------------------------


async def test_a_journal_in_memory_does_the_same():
    """Listing, showing, forking and forgetting runs work with a journal in memory too."""
    from handrail import Adapter
    from handrail.models.scripted import ScriptedModel

    journal = MemoryJournal()
    adapter = Adapter(
        ScriptedModel([call("note", text="one"), call("count", number=1), "end"]), journal=journal
    )
    await adapter.evaluate(PROMPT.__class__("p", "Do.", tools=TOOLS[:3]), "go", run_id="r")
    tree = await show(journal, "r")
    assert [turn.calls[0].tool for turn in tree.turns if turn.calls] == ["note", "count"]
    await fork(journal, "r", 1, "f")
    response = await Adapter(ScriptedModel(["other"]), journal=journal).resume(
        "f", Prompt("p", "Do.", tools=TOOLS[:3])
    )
    assert (response.text, [each.text for each in response.session[Noted].all()]) == ("other", ["one"])
    assert set(await forget(journal, keep=0)) == {"r", "f"}
    assert await list_runs(journal) == ()


# --- later runs of a session -------------------------------------------------------------------------------


async def test_a_history_that_was_given_is_there_once(recorder: Recorder):
    """When a run is resumed, the history that was passed to it is not added a second time."""
    history = [UserMessage("before"), AssistantMessage("said")]
    await parked(recorder, "r", call("choose"), "end", history=history)
    (question,) = await recorder.journal.questions.open("r")
    recorder.answer(question, {"n": 1})
    response = await recorder.adapter("end").resume("r", PROMPT)
    messages = [each.message for each in response.session[MessageAdded].all()]
    assert messages[:2] == history
    assert [m.text for m in messages if isinstance(m, UserMessage)] == ["before", "go"]


@pytest.mark.parametrize("how", ["resumed", "forked", "after a cancelled one"])
async def test_sections_opened_in_an_earlier_run_stay_open(recorder: Recorder, how: str):
    """Sections that an earlier run of the session opened are open in a later run, even in one that is resumed or forked."""
    more = MarkdownSection(
        "More", "more", "More.", tools=[TOOLS[0]], summary="There is more.", visibility="summary"
    )
    prompt = Prompt("p", [MarkdownSection("Main", "main", "Do.", tools=[TOOLS[5]]), more])
    session = Session(id="s")
    opening = call(OPENER, sections=["more"])
    if how == "after a cancelled one":
        await parked(recorder, "one", opening, call("choose"), prompt=prompt, session=session)
        await cancel(recorder.journal, "one")
    else:
        await recorder.run("one", opening, "end", prompt=prompt, session=session)
    await parked(recorder, "two", call("choose"), prompt=prompt, session=session)
    run_id = "two"
    if how == "forked":
        await fork(recorder.journal, "two", 0, "f")
        run_id = "f"
    else:
        (question,) = await recorder.journal.questions.open("two")
        recorder.answer(question, {"n": 1})
    await recorder.adapter(call("note", text="y"), "end").resume(run_id, prompt)
    assert [unit.status for unit in await recorder.journal.calls.load(run_id)][-1] == "ok"
