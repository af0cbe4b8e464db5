"""Cases: a recorded run as a file, which replays without a difference as long as the code does the same."""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import SecretStr

from handrail import (
    Agent,
    Attachment,
    CapabilityPolicy,
    MarkdownSection,
    PolicyDecision,
    PostgresJournal,
    Prompt,
    ScriptedModel,
    ToolCall,
    ToolContext,
    Workspace,
    tool,
)
from handrail.errors import PathRefused, RunError, RunParked
from handrail.fleet import FleetApp, Runner
from handrail.journal.sqlite import SqliteJournal
from handrail.messages import ModelRequest, ToolMessage
from handrail.models.scripted import Reply
from handrail.resources.directory import DirectoryFilesystem
from handrail.run.place import RUN
from handrail.runs import Case, CaseResult, children, make_case, replay_case, undo
from handrail.runs.cases import LARGEST, CaseFile, _readable, _restored
from handrail.runs.tree import answers_in
from handrail.testing import Person
from handrail.testing.simulation import Play, Scenario, Stage, World
from handrail.testing.simulation.process import Attempts, Points, SimulatedLoop, _until_over
from handrail.testing.simulation.storage import storage_at
from handrail.testing.virtual_time import VirtualClock
from support import PATIENCE, postgres
from support.background_app import HELPER, HOST, host
from support.recorded import PROMPT, Recorder, call
from support.worker_folders import sound
from testing import simulated, simulated_messages, simulated_scripts
from testing.simulated_workspace import WRITING

SCENARIOS = [
    simulated.SHOPPING,
    simulated.ERRANDS,
    simulated.DECIDING,
    simulated.DELIVERING,
    simulated.EXPIRING,
    simulated_messages.READING,
    simulated_messages.REMARKING,
    simulated_scripts.SCRIPTING,
    simulated_scripts.SEARCHING,
    simulated_messages.STEERING,
    simulated_messages.BEGETTING,
    WRITING,
]


@pytest.fixture
def recorder(tmp_path: Path) -> Iterator[Recorder]:
    made = Recorder(tmp_path)
    yield made
    made.close()


def same_answers(case: Case) -> ScriptedModel:
    """Return a model that gives the answers that the case has recorded."""
    answers = answers_in(case.record.entries)
    script = [answers[RUN.answer(number)] for number in range(1, len(answers) + 1)]
    calls = [[ToolCall(each.name, each.arguments, each.id) for each in answer.calls] for answer in script]
    replies = zip(script, calls, strict=True)
    return ScriptedModel(
        [Reply(answer.text, asked, attachments=answer.attachments) for answer, asked in replies]
    )


async def saved(case: Case, folder: Path) -> Case:
    """Return the case after it was written to a file and loaded again."""
    path = folder / f"{case.name}.case.json"
    case.save(path)
    loaded = Case.load(path)
    assert msgspec.msgpack.encode(loaded) == msgspec.msgpack.encode(case)
    return loaded


async def made(recorder: Recorder, run_id: str = "r", **options: Any) -> Case:
    return await saved(await make_case(recorder.journal, run_id, **options), recorder.base)


# --- whatever the run did -----------------------------------------------------------------------------


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda each: each.name)
def test_an_unchanged_run_has_no_difference(scenario: Scenario, tmp_path: Path):
    """Runs with everything that a run can have replay as cases without a difference, with and without their files.

    So they do on another model that gives the same answers, with recorded results. Nothing happens in the world then.
    """
    with asyncio.Runner(loop_factory=lambda: SimulatedLoop(Points(None, lambda: None), 0.0)) as runner:
        runner.run(_replays(scenario, tmp_path))


async def _replays(scenario: Scenario, base: Path) -> None:
    for folder in ("files", "before", "rest"):
        (base / folder).mkdir()
        for path, text in scenario.files.items() if folder != "rest" else ():
            (base / folder / path).write_text(text)
    clock, world, files = VirtualClock(), World(base / "world"), DirectoryFilesystem(base / "files")
    journal = storage_at(None).open(base, clock, lambda moment, connection: None)
    play = scenario.play(Stage(world, files, base / "rest", journal, clock, 0))
    await _until_over(Attempts(world), journal, play, None)
    text = (await journal.runs.get("run")).outcome
    happened = world.path.read_bytes()
    case = await saved(await make_case(journal, "run"), base)
    with_files = await saved(await make_case(journal, "run", files=base / "before"), base)
    for each in (case,) if scenario is WRITING else (case, with_files):
        result = await replayed(each, play)
        assert (str(result), result.tally.steps) == ("No differences.", result.tree.steps)
        assert result.tree.row.outcome == text
    result = await replayed(case, play, model=same_answers(case))
    assert str(result) == "No differences."
    assert result.tally.taken
    assert world.path.read_bytes() == happened
    for each in (journal, files, world):
        each.close()


async def replayed(case: Case, play: Play, **options: Any) -> CaseResult:
    session = None if play.session is None else play.session()
    return await replay_case(case, play.prompt, session=session, **options)


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers(-(2**40), 2**40) | st.floats() | st.text() | st.binary(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.just("$json"), inner),
    )
)
def test_bytes_are_read_as_they_were_written(value: Any):
    """Whatever is in the bytes of a record, a case has exactly these bytes."""
    for data in (msgspec.msgpack.encode(value), repr(value).encode("utf-8", "surrogatepass"), b"\xff\x00"):
        shown = msgspec.json.decode(msgspec.json.encode(_readable({"body": [data]})))
        assert _restored(shown) == {"body": [data]}


# --- what differs ---------------------------------------------------------------------------------------


@tool(effect="staged")
async def append(path: str, text: str, context: ToolContext) -> str:
    """Add a line to a file."""
    context.filesystem.append(path, f"{text}\n")
    return "added"


@tool(effect="read")
async def cat(path: str, context: ToolContext) -> str:
    """Read a file."""
    return context.filesystem.read(path)


SENT: list[str] = []


@tool
async def post(text: str) -> str:
    """Send a letter."""
    SENT.append(text)
    return f"sent {text}"


WRITER = Prompt("writer", "You write.", tools=[append, cat, post])
SCRIPT = [
    call("append", path="book", text="two"),
    call("cat", path="book"),
    call("post", text="the book"),
    "The book is sent.",
]


async def written(recorder: Recorder, **options: Any) -> Case:
    """Return the case of a run that adds to a file, reads it and sends it away. Its file has one line before it."""
    (recorder.base / "before").mkdir()
    for folder in (recorder.folder, recorder.base / "before"):
        (folder / "book").write_text("one\n")
    await recorder.run("r", *SCRIPT, prompt=WRITER)
    SENT.clear()
    return await made(recorder, files=recorder.base / "before", **options)


async def test_a_case_has_its_files_and_repeats_nothing_that_lasts(recorder: Recorder):
    """Calls run again in a copy of the files. What can't be undone has its recorded result."""
    case = await written(recorder)
    result = await replay_case(case, WRITER)
    assert (result.differences, result.text) == ([], "The book is sent.")
    assert (result.tally.ran, result.tally.taken, SENT) == (2, 1, [])
    assert (recorder.folder / "book").read_text() == "one\ntwo\n"


async def test_without_files_the_calls_that_used_some_have_their_recorded_results(recorder: Recorder):
    """A folder's files are not recorded. Without them, a case says which calls are not run."""
    await written(recorder)
    case = await made(recorder)
    ids = await recorder.ids("r")
    assert case.lacking == [f"append ({ids[0]})", f"cat ({ids[1]})"]
    result = await replay_case(case, WRITER)
    assert (result.differences, result.tally.ran, result.tally.taken) == ([], 0, 3)


async def test_a_call_that_failed_is_not_run_without_files(recorder: Recorder):
    """A call that did not find its file does not fail for another reason just because the case has no files."""
    await recorder.run("r", call("read", path="gone"), call("write", path="a", text="x"), "end")
    result = await replay_case(await made(recorder), PROMPT)
    assert (result.differences, result.tally.ran) == ([], 0)


async def test_the_first_difference_is_named_with_its_step(recorder: Recorder):
    """A changed prompt, tool, result, file, missing tool and answer are named, each with its step."""
    case = await written(recorder)

    async def difference(instructions: str = "You write.", *tools: Any) -> tuple[str, int, str]:
        named = {each.name: each for each in (append, cat, post, *tools) if each is not None}
        [found] = (
            await replay_case(case, Prompt("writer", instructions, tools=list(named.values())))
        ).differences
        assert found.diff()
        return found.what, found.step, found.where.partition(" ")[0]

    @tool(name="append", effect="staged")
    async def louder(path: str, text: str, context: ToolContext) -> str:
        """Add a line to a file."""
        context.filesystem.append(path, f"{text}!\n")
        return "added"

    @tool(name="append", effect="staged")
    async def wordy(path: str, text: str, context: ToolContext) -> str:
        """Add a line to a file."""
        context.filesystem.append(path, f"{text}\n")
        return "It was added."

    @tool(name="post")
    async def stricter(text: str, to: str) -> str:
        """Send a letter."""
        return text

    assert await difference("You write well.") == ("prompt", 0, "writer")
    assert await difference("You write.", louder) == ("files", 1, "append")
    assert await difference("You write.", wordy) == ("result", 1, "append")
    assert await difference("You write.", stricter) == ("tools", 0, "post")
    gone = await replay_case(case, Prompt("writer", "You write.", tools=[append, cat]))
    assert "-post" in str(gone).splitlines()


async def test_tools_are_run_or_not_as_the_case_says(recorder: Recorder):
    """A tool that is marked as real runs although it can't be undone; one marked as recorded does not."""
    case = await written(recorder, tools={"post": "real", "cat": "recorded"})
    result = await replay_case(case, WRITER)
    assert (result.differences, result.tally.ran, result.tally.taken) == ([], 2, 1)
    assert SENT == ["the book"]


async def test_an_undone_call_stays_undone(recorder: Recorder):
    """What an undone call had changed is not there for the calls after its undo."""
    script = [call("note", text="one"), call("choose"), call("notes"), "end"]
    with pytest.raises(RunParked) as parked:
        await recorder.run("r", *script[:2])
    await undo(recorder.journal, "r", (await recorder.ids("r"))[0], recorder.files)
    recorder.answer(parked.value.questions[0], {"n": 3})
    adapter = recorder.adapter(*script[2:])
    assert (await adapter.resume("r", PROMPT)).text == "end"
    result = await replay_case(await made(recorder), PROMPT)
    assert (result.differences, result.tally.ran) == ([], 1)


async def test_a_run_that_is_parked_replays_as_far_as_it_went(recorder: Recorder):
    """A run that waits for an answer can be a case already."""
    with pytest.raises(RunParked):
        await recorder.run("r", call("note", text="one"), call("choose"), "end")
    result = await replay_case(await made(recorder), PROMPT)
    assert (result.differences, result.tree.row.status, result.tally.ran) == ([], "parked", 1)


# --- another model --------------------------------------------------------------------------------------


async def test_another_model_has_recorded_results_and_a_call_without_one_is_a_difference(recorder: Recorder):
    """Results are found by tool and arguments, in any order. A model is told if there is none, and the run goes on."""
    case = await written(recorder)
    script = [
        call("post", text="the book"),
        call("cat", path="book"),
        [call("cat", path="book"), call("post", text="the book"), call("post", text="a letter")],
        "Only the book is sent.",
    ]
    result = await replay_case(case, WRITER, model=ScriptedModel(script))
    assert [(each.what, each.step, each.now) for each in result.differences] == [
        ("call", 3, '{"text":"the book"}'),
        ("call", 3, '{"text":"a letter"}'),
    ]
    assert result.differences[0].recorded == '{"text":"the book"}'
    assert (result.text, SENT, result.tally.taken) == ("Only the book is sent.", [], 3)
    told = [each.message for turn in result.tree.turns for each in turn.calls]
    assert told[:3] == ["sent the book", "one\ntwo\n", "one\ntwo\n"]
    assert all("no result for these arguments" in each for each in told[3:])


async def test_another_model_continues_the_session_as_it_was(recorder: Recorder):
    """The other model is told what was said in earlier runs of the session, and not what was said later."""
    for number, run_id in enumerate(("first", "r", "later")):
        await recorder.run(run_id, f"answer {number}", session="s", message=f"question {number}")
    model = ScriptedModel(["another"])
    result = await replay_case(await made(recorder), PROMPT, model=model)
    assert [each.text for each in model.requests[0].messages] == ["question 0", "answer 0", "question 1"]
    assert (result.text, result.differences) == ("another", [])


async def test_approvals_are_decided_as_they_were(recorder: Recorder):
    """A call that a person has denied is denied again, and one that was approved is approved."""
    asks = Prompt("writer", "You write.", tools=[post], policies=[CapabilityPolicy()])
    script = [call("post", text="yes"), call("post", text="no"), "end"]
    person = Person(approve=lambda question: "yes" in str(question.payload) or "too rude")
    await recorder.adapter(*script, environment=person).evaluate(asks, "go", run_id="r")
    SENT.clear()
    case = await made(recorder)
    assert (await replay_case(case, asks)).differences == []
    result = await replay_case(case, asks, model=ScriptedModel(script))
    calls = [each for turn in result.tree.turns for each in turn.calls]
    assert [each.status for each in calls] == ["ok", "denied"]
    assert calls[1].was_not_approved
    assert (result.differences, SENT) == ([], [])


@dataclass
class Denies:
    """A policy that denies everything."""

    name: str = "denies"

    def check(self, tool: Any, params: Any, *, context: ToolContext) -> PolicyDecision:
        return PolicyDecision.deny("not today")

    def on_result(self, tool: Any, params: Any, result: Any, *, context: ToolContext) -> None:
        return None


async def test_policies_decide_again_for_another_model(recorder: Recorder):
    """A call that today's policies deny has no recorded result."""
    case = await written(recorder)
    strict = Prompt("writer", "You write.", tools=[append, cat, post], policies=[Denies()])
    result = await replay_case(case, strict, model=same_answers(case))
    assert [each.status for turn in result.tree.turns for each in turn.calls] == ["denied"] * 3


async def test_large_results_and_attachments_come_from_the_record(recorder: Recorder):
    """A shortened result is whole again for the other model's run, and files that a call returned have their bytes."""

    picture = Attachment(b"\x89PNG\r\n\x1a\n" + bytes(16))

    @tool(effect="read")
    async def page() -> str:
        """Return a long page."""
        return "word " * 2000

    @tool(effect="idempotent")
    async def draw() -> Attachment:
        """Draw a picture."""
        return picture

    prompt = Prompt("reader", "You read.", tools=[page, draw], result_limit=500)
    letter = Attachment(b"Dear all", name="letter.txt")
    await recorder.run("r", call("page"), call("draw"), "end", prompt=prompt, attachments=[letter])
    case = await made(recorder)
    assert str(await replay_case(case, prompt)) == "No differences."

    def answer(request: ModelRequest) -> Any:
        results = [
            each for said in request.messages if isinstance(said, ToolMessage) for each in said.results
        ]
        if not results:
            return call("page")
        if len(results) == 1:
            assert len(results[0].text) < 1000
            return [call("draw"), call("read_result", call_id=results[0].id, start=5000, end=5009)]
        assert results[1].attachments[0].content == picture.content
        return results[2].text

    model = ScriptedModel(answer)
    result = await replay_case(case, prompt, model=model)
    assert (result.differences, result.text.endswith("word word")) == ([], True)
    said: Any = model.requests[0].messages[0]
    assert said.attachments[0].content == letter.content


async def test_a_nested_run_is_part_of_its_call(recorder: Recorder):
    """An agent inside a call is not asked again; its call has the recorded result."""
    asked: list[str] = []

    def answer(request: ModelRequest) -> str:
        asked.append(request.messages[-1].text)
        return "It rains."

    clerk = Agent(ScriptedModel(answer), "You look.", name="clerk", description="Looks.")
    prompt = Prompt("boss", "You lead.", tools=[clerk.as_tool()])
    script = [call("clerk", message="How is the weather?"), "end"]
    await recorder.run("r", *script, prompt=prompt)
    case = await made(recorder)
    for model in (None, ScriptedModel(script)):
        result = await replay_case(case, prompt, model=model)
        assert (result.differences, result.tally.taken) == ([], 1)
    assert asked == ["How is the weather?"]


# --- where the run came from ----------------------------------------------------------------------------


async def test_a_workspace_gives_the_files_with_which_the_run_began(tmp_path: Path):
    """The files are those before the run's first call, whatever the run and later ones did to them."""
    journal = SqliteJournal(tmp_path / "runs.db")
    files = Workspace("w", cache=tmp_path / "cache")

    async def run(run_id: str, *script: Any) -> None:
        agent = Agent(ScriptedModel(list(script)), WRITER)
        await agent.run("go", journal=journal, filesystem=files, run_id=run_id)

    await run(
        "first", call("append", path="book", text="one"), call("append", path="deep/er", text="x"), "end"
    )
    await run("r", *SCRIPT)
    await run("later", call("append", path="book", text="three"), call("append", path="new", text="x"), "end")
    case = await saved(await make_case(journal, "r"), tmp_path)
    assert case.files is not None
    assert {path: file.lines for path, file in case.files.items()} == {"book": ["one\n"], "deep/er": ["x\n"]}
    result = await replay_case(case, WRITER)
    assert (result.differences, result.tally.ran) == ([], 2)
    journal.close()


async def test_files_of_all_kinds_are_as_they_were(recorder: Recorder):
    """Binary files, programs and links are in a case too; what may hold keys is not, and calls that read it are not run."""
    before = recorder.folder
    (before / "data").write_bytes(b"\xff\x00")
    (before / "run.sh").write_text("#!/bin/sh\n")
    (before / "run.sh").chmod(0o755)
    (before / "link").symlink_to("data")
    (before / ".env").write_text("KEY=abcdefgh\n")
    await recorder.run("r", call("read", path=".env"), call("read", path="run.sh"), "end")
    case = await made(recorder, files=before)
    assert (case.left_out, case.lacking) == ([".env"], [f"read ({(await recorder.ids('r'))[0]})"])
    with case.opened() as files:
        assert files is not None
        root = Path(files.root)
        assert (root / "data").read_bytes() == (root / "link").read_bytes() == b"\xff\x00"
        assert (root / "run.sh").stat().st_mode & 0o111
        assert not (root / ".env").exists()
    result = await replay_case(case, PROMPT)
    assert (result.differences, result.tally.ran, result.tally.taken) == ([], 1, 1)


@pytest.mark.parametrize("path", ["../out", "/tmp/out", "a/../../out"])
async def test_a_case_writes_no_file_outside_of_its_folder(recorder: Recorder, path: str):
    """A case is a file that somebody else may have changed."""
    await recorder.run("r", "end")
    case = msgspec.structs.replace(await made(recorder), files={path: CaseFile(lines=["x\n"])})
    with pytest.raises(PathRefused), case.opened():
        pass


async def test_a_case_writes_no_file_through_a_link(recorder: Recorder, tmp_path: Path):
    """A link is made when the files are there, so it leads nothing out of the folder."""
    await recorder.run("r", "end")
    files = {"a": CaseFile(link=str(tmp_path)), "a/out": CaseFile(lines=["x\n"])}
    with pytest.raises(FileExistsError), msgspec.structs.replace(await made(recorder), files=files).opened():
        pass
    assert not (tmp_path / "out").exists()


async def test_a_background_run_is_a_case_of_its_own_under_the_policies_of_its_parent(tmp_path: Path):
    """What the parent's policies deny is denied in a replay too."""
    journal = SqliteJournal(tmp_path / "runs.db")
    await host.run('{"message": "pay rent"}', journal=journal, run_id="r", app=HOST)
    runner, stop = Runner(journal, [FleetApp.load(HELPER)]), asyncio.Event()
    task = asyncio.ensure_future(runner.run(stop, grace=PATIENCE))
    [child] = await children(journal, "r")
    async with asyncio.timeout(PATIENCE):
        while (await journal.runs.get(child.record.id)).status != "done":
            await asyncio.sleep(0.005)
    stop.set()
    await task
    for run_id in ("r", child.record.id):
        case = await saved(await make_case(journal, run_id), tmp_path)
        result = await replay_case(case)
        assert (str(result), result.tally.steps) == ("No differences.", 2)
        result = await replay_case(case, model=same_answers(case))
        assert str(result) == "No differences."
        statuses = {each.status for turn in result.tree.turns for each in turn.calls}
        assert statuses == ({"ok"} if run_id == "r" else {"denied"})
    journal.close()


async def test_a_worker_is_found_by_its_file(tmp_path: Path):
    """A case of a worker renders the worker's current file, and another model calls its workers from the record."""
    tools = """
        from handrail import tool
        @tool
        def ring() -> str:
            "Ring a bell."
            return "rung"
    """
    main = "---\ndescription: Rings.\nworkers: [helper]\ntools: [ring]\n---\nYou ring for {{ input }}."
    registry = sound(tmp_path / "w", tools, main=main, helper="---\ndescription: Helps.\n---\nYou help.")
    journal = SqliteJournal(tmp_path / "runs.db")
    script = [[call("helper", input="Wait."), call("ring")], "Helped.", "Rung."]
    app = str(tmp_path / "w" / "main.md")
    await registry.run(
        "main",
        "Ada",
        model=ScriptedModel(script),
        journal=journal,
        run_id="r",
        app=app,
        environment=Person(approve=True),
    )
    case = await saved(await make_case(journal, "r"), tmp_path)
    assert str(await replay_case(case)) == "No differences."
    model = ScriptedModel([script[0], "Rung again."])
    result = await replay_case(case, model=model)
    assert (str(result), result.text, result.tally.taken) == ("No differences.", "Rung again.", 2)
    assert "You ring for Ada." in model.requests[0].system
    (tmp_path / "w" / "main.md").write_text(main.replace("You ring", "You knock"))
    [found] = (await replay_case(case)).differences
    assert found.what == "prompt"
    assert "You knock for Ada." in found.now
    journal.close()


async def test_a_run_in_postgres_is_a_case_too(monkeypatch: pytest.MonkeyPatch):
    """The journal is of no importance to a case."""
    monkeypatch.setenv("HANDRAIL_KEY", postgres.KEY)
    journal = PostgresJournal(postgres.new_url())
    agent = Agent(ScriptedModel([call("note", text="one"), call("notes"), "end"]), PROMPT)
    await agent.run("go", journal=journal, run_id="r")
    result = await replay_case(await make_case(journal, "r"), agent)
    assert (result.differences, result.tally.ran) == ([], 2)
    journal.close()


# --- secrets and refusals -------------------------------------------------------------------------------


async def test_a_secret_is_masked_and_its_call_is_not_run(recorder: Recorder):
    """A secret argument is not in the case, and the call that had it has its recorded result."""

    @tool(effect="staged")
    async def login(password: SecretStr) -> str:
        """Log in."""
        return f"in with {len(password.get_secret_value())}"

    prompt = Prompt("secrets", "You log in.", tools=[login])
    script = [call("login", password="hunter2-hunter2"), "end"]
    await recorder.run("r", *script, prompt=prompt)
    case = await made(recorder)
    assert "hunter2" not in (recorder.base / "r.case.json").read_text()
    result = await replay_case(case, prompt)
    assert (result.differences, result.tally.taken) == ([], 1)


async def test_a_case_with_a_secret_of_the_environment_is_refused(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch
):
    """What an environment variable with a secret's name holds is not written, whoever has said it."""
    monkeypatch.setenv("SHOP_API_KEY", 'sk-"very"-secret')
    await recorder.run("r", 'It is sk-"very"-secret.')
    case = await make_case(recorder.journal, "r")
    with pytest.raises(RunError, match="SHOP_API_KEY"):
        case.save(recorder.base / "r.case.json")
    assert not (recorder.base / "r.case.json").exists()


@dataclass(frozen=True)
class Login:
    """The params of a prompt, with a secret."""

    password: SecretStr


async def test_secret_params_are_refused(recorder: Recorder):
    """A run can't begin again without the secret in its params."""
    prompt = Prompt("secrets", [MarkdownSection[Login]("Log in", "log_in", "Use $password.")])
    await recorder.adapter("end").evaluate(prompt, Login(SecretStr("hunter2-hunter2")), run_id="r")
    with pytest.raises(RunError, match="its params contain a secret"):
        await make_case(recorder.journal, "r")


async def test_what_a_case_lacks_is_named(recorder: Recorder, tmp_path: Path):
    """A folder that is not there, too many files, and a case without its agent are named."""
    await recorder.run("r", "end")
    with pytest.raises(RunError, match="no folder"):
        await make_case(recorder.journal, "r", files=tmp_path / "gone")
    (recorder.folder / "large").write_bytes(bytes(LARGEST + 1))
    with pytest.raises(RunError, match="a case takes at most"):
        await make_case(recorder.journal, "r", files=recorder.folder)
    case = await made(recorder)
    with pytest.raises(RunError, match="it does not name its agent"):
        await replay_case(case)
    for app in ("support.recorded:gone", "no_such_module:agent", str(tmp_path / "gone.md")):
        with pytest.raises(RunError, match="r"):
            await replay_case(msgspec.structs.replace(case, app=app))


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda text: text[:100], "damaged"),
        (lambda text: "[]", "damaged"),
        (lambda text: "{}", "it is not a case"),
        (lambda text: text.replace('"version": 1', '"version": 2', 1), "it has the format 2"),
        (lambda text: text.replace('"status": "done"', '"status": "dancing"'), "damaged"),
        (lambda text: text.replace('"$msgpack"', '"$base64"', 1), "damaged"),
    ],
)
async def test_a_damaged_case_is_refused(recorder: Recorder, change: Any, problem: str):
    """A file that is no case says what is wrong with it."""
    await recorder.run("r", "end")
    await made(recorder)
    path = recorder.base / "r.case.json"
    path.write_text(change(path.read_text()))
    with pytest.raises(RunError, match=problem):
        await replay_case(path, PROMPT)
    with pytest.raises(RunError, match="it can't be read"):
        await replay_case(recorder.base / "gone.case.json", PROMPT)


async def test_an_edited_case_replays_as_edited(recorder: Recorder):
    """What a person changes in the file counts."""
    case = await written(recorder)
    path = recorder.base / "r.case.json"
    path.write_text(path.read_text().replace('"one\\n"', '"zero\\n"'))
    [found] = (await replay_case(path, WRITER)).differences
    assert (found.what, found.step) == ("files", 1)
    assert case.name == "r"
