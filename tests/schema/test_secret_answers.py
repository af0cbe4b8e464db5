"""Secrets in a person's answers: only the asker receives them, and they are never stored."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import tempfile
from pathlib import Path
from typing import Annotated, Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, Field, SecretStr

from handrail import (
    Adapter,
    Handoff,
    Parked,
    Prompt,
    ScriptedModel,
    Session,
    SqliteJournal,
    Tool,
    ToolCall,
    ToolContext,
    ToolResult,
    tool,
)
from handrail.cli import runs_commands
from handrail.cli.outcome import Failure
from handrail.cli.screens import PlainView
from handrail.clock import SYSTEM_CLOCK
from handrail.environment import LaterEnvironment
from handrail.errors import AnswerRefused, QuestionCancelled, RunParked
from handrail.guard import CapabilityPolicy
from handrail.journal.sqlite import MemoryJournal
from handrail.messages import ToolMessage
from handrail.protocols import Environment
from handrail.question import Answer, Question
from handrail.runs import export, show
from handrail.schema import Schema
from handrail.schema.secrets import MASK
from handrail.serve import snapshots
from handrail.serve.agui.wire_events import plain_json
from handrail.session import save
from handrail.testing import Person
from support import PATIENCE
from support.examples import at_most
from support.parked_runs import answer_to
from support.planted_secrets import (
    MARK,
    WIDER,
    Cut,
    Drawn,
    Key,
    everything,
    logged,
    login_with,
    recorded_in,
    revealed,
    written,
)
from support.served_threads import give, over, plan, served, settle
from support.texts import NO_EFFECTS, OUTCOME_UNKNOWN


@st.composite
def answers(draw: st.DrawFn) -> tuple[Any, Any]:
    """Generate a type with secrets, and an answer of that type as plain JSON."""
    drawn: Drawn = draw(WIDER.filter(lambda each: Schema(each.kind).secret))
    return drawn.kind, json.loads(json.dumps(draw(drawn.values)))


def asking(kind: Any, got: list[Any], effect: Any = "read") -> Tool[Any, Any]:
    """Return a tool that asks for a value of this type."""

    async def handler(params: None, *, context: ToolContext) -> ToolResult[str]:
        assert context.wait_for is not None
        got.append(await context.wait_for("login", {"site": "example"}, kind))
        return ToolResult.ok("in", "Logged in.")

    return Tool("login", "Log in.", handler, params=None, result=str, effect=effect)


def handing_over(kind: Any, got: list[Any]) -> Tool[Any, Any]:
    """Return a handoff whose answer is a value of this type."""
    made: Any = Handoff("login", "Let somebody log in.", params=None, answer=kind, effect="idempotent")

    @made.before
    async def before(params: None, *, context: ToolContext) -> Parked[int, str]:
        return Parked(1, "example")

    @made.after
    async def after(private: int, answer: Any, *, context: ToolContext) -> ToolResult[str]:
        got.append(answer)
        return ToolResult.ok("in", "Logged in.")

    return made


async def _run_and_look(login: Tool[Any, Any], value: Any, folder: Path) -> dict[str, Any]:
    """Run the tool with a person who answers, and return everything that the run shows or records, by place."""
    journal = SqliteJournal(folder / "runs.db")
    model = ScriptedModel([ToolCall("login"), "done"])
    adapter = Adapter(model, journal=journal, environment=Person(answers={"login": value}))
    session = Session(id="session")
    heard: list[object] = []
    session.dispatcher.subscribe(object, heard.append)
    lines = io.StringIO()
    with logged() as log, contextlib.redirect_stderr(lines), contextlib.redirect_stdout(lines):
        view = PlainView(SYSTEM_CLOCK, verbose=True)
        with view.begin():
            stream = adapter.stream(Prompt("p", "Do.", tools=[login]), "go", session=session, run_id="run")
            async for event in stream:
                view.show(event)
            await stream.response
    await export(journal, "run", folder / "run.jsonl")
    tree = await show(journal, "run")
    found = {
        "events": heard,
        "shown events": plain_json(heard),
        "session": save(session),
        "tree": tree,
        "shown tree": snapshots.run_tree(tree),
        "asked": await journal.questions.history("run"),
        "export": written(folder / "run.jsonl"),
        "terminal": lines.getvalue(),
        "log": log.getvalue(),
        "told": list(model.requests[-1].messages),
        "journal": recorded_in(folder),
    }
    journal.close()
    found["closed journal"] = recorded_in(folder)
    return found


@settings(max_examples=at_most(25), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(answers(), st.booleans())
def test_only_the_asker_has_the_answer(drawn: tuple[Any, Any], hands_over: bool) -> None:
    """A secret in the answer to `wait_for` or to a handoff is in no event, session, journal, export, tree, output or log."""
    (kind, value), got = drawn, list[Any]()
    login = (handing_over if hands_over else asking)(kind, got)
    with tempfile.TemporaryDirectory() as folder:
        found = asyncio.run(_run_and_look(login, value, Path(folder)))
    assert [revealed(each) for each in got] == [value], found["told"]
    for where, each in found.items():
        assert MARK not in everything(each), where
    (asked,) = found["asked"]
    assert asked.question.secret
    assert asked.answer.value == Schema(kind).hide(value)
    assert bool(asked.answer.seal) == (MARK in json.dumps(value))


# --- which answer counts -----------------------------------------------------------------------


class _Taking:
    """A journal with one question, whose asker waits in this process."""

    def __init__(self, journal: Any, kind: Any) -> None:
        self.journal, self.schema = journal, Schema[Any](kind)

    async def __aenter__(self) -> _Taking:
        waiting = asyncio.Event()

        class There(Environment):
            run_mode = "user"

            async def ask(self, question: Question, /) -> Answer:
                waiting.set()
                await asyncio.Event().wait()
                raise QuestionCancelled(question.name)

        self.question = Question(
            id="q",
            kind="input",
            name="login",
            message="Log in.",
            payload=None,
            schema=self.schema.json_schema,
            digest="d",
            principal="ann",
            asked_by=("login",),
            call_id="c",
            asked_at=SYSTEM_CLOCK.now(),
            secret=True,
        )
        there: Any = There()
        ask = self.journal.questions.ask(self.question, there, self.schema.parse_given, self.schema.hide)
        self.heard = asyncio.ensure_future(ask)
        await waiting.wait()
        return self

    async def __aexit__(self, *error: object) -> None:
        self.heard.cancel()

    def give(self, value: Any, **more: Any) -> str:
        """Give an answer. Returns why it was refused, or "" if it was accepted."""
        try:
            self.journal.questions.answer(Answer(question_id="q", digest="d", by="ann", value=value, **more))
        except AnswerRefused as refused:
            return str(refused)
        return ""


@settings(max_examples=at_most(20), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(answers(), st.data(), st.booleans())
def test_the_first_answer_counts_by_its_seal(drawn: tuple[Any, Any], data: st.DataObject, file: bool) -> None:
    """Repeating a secret answer is harmless, and a different one is refused, although both have the same mask."""
    kind, value = drawn
    other = json.loads(json.dumps(data.draw(_others(kind, value))))

    async def trial(folder: str) -> None:
        journal = SqliteJournal(Path(folder) / "runs.db") if file else MemoryJournal()
        async with _Taking(journal, kind) as taking:
            assert taking.give(value, seal="made up") == ""
            assert (await taking.heard).value == value
            assert taking.give(value) == ""
            refused = taking.give(other)
            assert (refused == "") == (other == value)
            assert MARK not in refused
            (asked,) = await journal.questions.history("")
            assert MARK not in everything(asked)
        if not isinstance(journal, MemoryJournal):
            journal.close()
            assert MARK.encode() not in recorded_in(Path(folder))
            again = SqliteJournal(
                Path(folder) / "runs.db"
            )  # the seal's key belongs to the journal, not to the process
            taking.journal = again
            assert taking.give(value) == ""
            assert (taking.give(other) == "") == (other == value)
            again.close()

    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(trial(folder))


def _others(kind: Any, value: Any) -> st.SearchStrategy[Any]:
    """Generate either the value itself or a copy whose secrets differ."""

    def changed(each: Any) -> Any:
        if isinstance(each, str):
            return each.replace(MARK, f"{MARK}x")
        if isinstance(each, dict):
            return {key: changed(one) for key, one in each.items()}  # pyright: ignore
        return [changed(one) for one in each] if isinstance(each, list) else each  # pyright: ignore

    return st.sampled_from([value, changed(value)])


async def test_a_mask_is_no_answer() -> None:
    """A mask is refused as an answer, with an explanation. The refusal of an invalid answer does not quote it."""
    async with _Taking(MemoryJournal(), Key) as taking:
        assert "is masked" in taking.give({"key": MASK})
        for wrong in ({"key": {"x": MARK}}, {"key": [MARK]}, MARK):
            refused = taking.give(wrong)
            assert "does not match the schema" in refused
            assert MARK not in refused
        assert taking.give({"key": MARK}) == ""
        assert (await taking.heard).value == {"key": MARK}


async def test_a_seal_is_keyed() -> None:
    """Two journals seal the same answer differently, because each has its own key. A seal without a key would let a password be guessed."""
    seals: list[str] = []
    for journal in (MemoryJournal(), MemoryJournal()):
        async with _Taking(journal, Key) as taking:
            taking.give({"key": MARK})
            (asked,) = await journal.questions.history("")
            assert asked.answer is not None
            seals.append(asked.answer.seal)
    assert seals[0]
    assert seals[0] != seals[1]


# --- parked runs and later answers ------------------------------------------------------------------


@pytest.mark.parametrize("kept", ["memory", "file"])
async def test_an_answer_that_nobody_hears_is_refused_and_asked_for_again(kept: str, tmp_path: Path) -> None:
    """A secret answer to a parked run is refused, because it must not be stored, and is asked for again on resume."""
    got: list[Any] = []
    journal: Any = MemoryJournal() if kept == "memory" else SqliteJournal(tmp_path / "runs.db")
    prompt = Prompt("p", "Do.", tools=[asking(Key, got)])
    model = ScriptedModel([ToolCall("login"), "done"])
    with pytest.raises(RunParked) as parked:
        await Adapter(model, journal=journal, environment=LaterEnvironment()).evaluate(
            prompt, "go", run_id="run"
        )
    (question,) = parked.value.questions
    with pytest.raises(AnswerRefused, match="runs resume") as refused:
        journal.questions.answer(answer_to(question, {"key": MARK}))
    assert MARK not in str(refused.value)
    person = Person(answers={"login": {"key": MARK}})
    adapter = Adapter(model, journal=journal, environment=person)
    assert (await adapter.resume("run", prompt)).text == "done"
    assert [each.id for each in person.questions] == [question.id]
    assert [each.key.get_secret_value() for each in got] == [MARK]


async def test_a_question_with_secrets_can_be_declined_from_elsewhere(tmp_path: Path) -> None:
    """A parked question that asks for a secret can be declined, because declining reveals no secret."""
    journal = SqliteJournal(tmp_path / "runs.db")
    prompt = Prompt("p", "Do.", tools=[asking(Key, [])])
    model = ScriptedModel([ToolCall("login"), "done"])
    adapter = Adapter(model, journal=journal, environment=LaterEnvironment())
    with pytest.raises(RunParked) as parked:
        await adapter.evaluate(prompt, "go", run_id="run")
    (question,) = parked.value.questions
    journal.questions.answer(answer_to(question, None, outcome="declined", reason="not now"))
    assert (await adapter.resume("run", prompt)).text == "done"
    assert "not now" in _told(model)
    journal.close()


def _told(model: ScriptedModel) -> str:
    last = model.requests[-1].messages[-1]
    assert isinstance(last, ToolMessage)
    return last.results[0].text


async def test_a_call_with_a_secret_does_not_wait_until_later() -> None:
    """A call with a secret can't be parked. If nobody can approve it now, it fails, and the model is told why."""
    login, journal = login_with("irreversible"), MemoryJournal()
    model = ScriptedModel([ToolCall("login", login.arguments), "done"])
    adapter = Adapter(model, journal=journal, environment=LaterEnvironment())
    prompt = Prompt("p", "Do.", tools=[login.tool], policies=[CapabilityPolicy()])
    async with asyncio.timeout(PATIENCE):
        await adapter.evaluate(prompt, "go", run_id="run")
    assert "can't wait for a later answer" in _told(model)
    assert "Run it where somebody can answer at once" in _told(model)
    assert login.got == []


async def test_what_is_nested_in_a_call_with_a_secret_does_not_wait_until_later() -> None:
    """An inner call's question fails if nobody can answer it now and the outer call has a secret."""

    @tool(effect="staged")
    async def inner(context: ToolContext) -> str:
        """Ask a person."""
        assert context.wait_for is not None
        return str(await context.wait_for("ok", {}, bool))

    @tool(effect="staged")
    async def outer(key: SecretStr, context: ToolContext) -> str:
        """Call the tool that asks."""
        return (await context.call("inner")).message

    model = ScriptedModel([ToolCall("outer", {"key": MARK}), "done"])
    adapter = Adapter(model, journal=MemoryJournal(), environment=LaterEnvironment())
    async with asyncio.timeout(PATIENCE):
        await adapter.evaluate(Prompt("p", "Do.", tools=[inner, outer]), "go", run_id="run")
    assert "can't wait" in _told(model)


# --- after a crash ------------------------------------------------------------------------------


async def _answered(run: Cut, value: Any, reached: asyncio.Event, *, asks_more: bool = False) -> None:
    """Start the run, answer its question, and park it by force once `reached` is set.

    With `asks_more`, the run is parked while it waits for the answer to its next question.
    """
    going = asyncio.ensure_future(run.adapter.evaluate(run.prompt, "go", run_id="run"))
    await run.there.until_rest()
    (question,) = await run.journal.questions.open("run")
    run.journal.questions.answer(answer_to(question, value))
    await reached.wait()
    parking = await run.there.until_rest() if asks_more else run.there.parking
    assert parking is not None
    assert parking.quiet == asks_more
    assert not parking.may_park
    assert parking.park(by_force=True)
    with pytest.raises(RunParked):
        await going


@pytest.mark.parametrize(
    ("effect", "told"),
    [
        ("read", NO_EFFECTS),
        ("staged", NO_EFFECTS),
        ("idempotent", OUTCOME_UNKNOWN),
        ("irreversible", OUTCOME_UNKNOWN),
    ],
)
async def test_a_call_that_was_answered_with_a_secret_is_not_run_again(effect: Any, told: str) -> None:
    """A call that received a secret answer is not rerun after a crash, because it would get the mask."""
    reached, got = asyncio.Event(), list[Any]()

    @tool(effect=effect)
    async def login(context: ToolContext) -> str:
        """Log in."""
        assert context.wait_for is not None
        got.append((await context.wait_for("login", {}, Key)).key.get_secret_value())
        reached.set()
        await context.wait_for("sure", {}, bool)
        return "in"

    run = Cut([login], ToolCall("login"))
    await _answered(run, {"key": MARK}, reached, asks_more=True)
    said = await run.told()
    assert told in said
    assert "given a secret" in said
    assert got == [MARK]
    assert not await run.journal.questions.open("run")


async def test_a_call_that_was_answered_without_one_is_run_again() -> None:
    """After a crash, a call is rerun if its answer had no secret, even if the answer's type allows one."""
    reached, got = asyncio.Event(), list[Any]()

    class Login(BaseModel):
        user: str
        key: SecretStr | None = None

    @tool(effect="read")
    async def login(context: ToolContext) -> str:
        """Log in."""
        assert context.wait_for is not None
        got.append((await context.wait_for("login", {}, Login)).user)
        if not reached.is_set():
            reached.set()
            await asyncio.Event().wait()
        return "in"

    run = Cut([login], ToolCall("login"))
    going = asyncio.ensure_future(run.adapter.evaluate(run.prompt, "go", run_id="run"))
    await run.there.until_rest()
    run.journal.questions.answer(answer_to((await run.journal.questions.open("run"))[0], {"user": "ann"}))
    await reached.wait()
    assert run.there.parking is not None
    assert run.there.parking.park(by_force=True)
    with pytest.raises(RunParked):
        await going
    assert "in" in await run.told()
    assert got == ["ann", "ann"]


async def test_a_secret_that_was_taken_and_not_heard_is_asked_for_again(tmp_path: Path) -> None:
    """If the process dies before the journal records that the call got the secret, the secret is asked for again."""
    got: list[Any] = []
    prompt = Prompt("p", "Do.", tools=[asking(Key, got)])
    journal = _Ending(tmp_path / "runs.db")
    person = Person(answers={"login": {"key": MARK}})
    script = [ToolCall("login"), "done"]
    adapter = Adapter(ScriptedModel(script), journal=journal, environment=person)
    with pytest.raises(RuntimeError, match="ended here"):
        await adapter.evaluate(prompt, "go", run_id="run")
    (asked,) = await journal.questions.history("run")
    assert asked.answer is not None
    assert asked.answer.seal
    journal.ends = False
    assert (await adapter.resume("run", prompt)).text == "done"
    assert len(person.questions) == 2
    assert [each.key.get_secret_value() for each in got] == [MARK]
    journal.close()


class _Ending(SqliteJournal):
    """A journal that, while `ends` is true, fails before it records that a call has begun or is committed.

    The run is left without an outcome, as if the process had died, so that it can be resumed.
    """

    ends = True

    def __init__(self, path: Path, **options: Any) -> None:
        super().__init__(path, **options)
        noted, committed, left = self.calls.note, self.calls.commit, self.runs.leave

        async def note(run_id: str, entry: Any, /, *, from_outside: bool = False) -> None:
            if self.ends and entry.kind == "call begun":
                raise _Ended("ended here")
            await noted(run_id, entry, from_outside=from_outside)

        async def commit(unit: Any, /) -> None:
            if self.ends:
                raise _Ended("ended here")
            await committed(unit)

        async def leave(run_id: str, status: Any, outcome: bytes = b"", /, **how: Any) -> None:
            if self.ends:
                status, outcome = "parked", b""
            await left(run_id, status, outcome, **how)

        self.calls.note, self.calls.commit, self.runs.leave = note, commit, leave


class _Ended(RuntimeError):
    pass


# --- handoffs ---------------------------------------------------------------------------------


class _Signing:
    """A handoff that is answered with a secret and blocks the first time, in `after` or in its own client."""

    def __init__(self, effect: Any, *, own_client: bool = False, stops_after: bool = True) -> None:
        self.acts: list[str] = []
        self.reached = asyncio.Event()
        made: Any = Handoff("sign", "Let somebody sign.", params=None, answer=Key, effect=effect)

        @made.before
        async def before(params: None, *, context: ToolContext) -> Parked[int, str]:
            self.acts.append("before")
            return Parked(1, "sign this")

        if own_client:

            @made.client
            async def client(public: str, *, context: ToolContext) -> Key:
                assert context.wait_for is not None
                answer = await context.wait_for("sign", public, Key)
                self.acts.append("client")
                if not stops_after:
                    await self._stop()
                return answer

        @made.after
        async def after(private: int, answer: Key, *, context: ToolContext) -> ToolResult[str]:
            self.acts.append(f"after {answer.key.get_secret_value()}")
            await self._stop()
            return ToolResult.ok("signed")

        self.tool: Any = made

    async def _stop(self) -> None:
        if not self.reached.is_set():
            self.reached.set()
            await asyncio.Event().wait()


async def _gone_on_with(run: Cut, value: Any) -> str:
    """Resume the run, answer the questions that it asks again, and return what the model is told."""
    going = asyncio.ensure_future(run.told())
    resting = asyncio.ensure_future(run.there.until_rest())
    await asyncio.wait({going, resting}, return_when=asyncio.FIRST_COMPLETED)
    for question in await run.journal.questions.open("run"):
        run.journal.questions.answer(answer_to(question, value))
    resting.cancel()
    return await going


@pytest.mark.parametrize("own_client", [False, True])
@pytest.mark.parametrize("effect", ["staged", "idempotent", "irreversible"])
async def test_a_handoff_whose_after_had_begun_with_a_secret(effect: Any, own_client: bool) -> None:
    """After a crash in `after`, a staged handoff asks for the secret again. With other effects the outcome is unknown."""
    signing = _Signing(effect, own_client=own_client)
    run = Cut([signing.tool], ToolCall("sign"))
    await _answered(run, {"key": MARK}, signing.reached)
    said = await _gone_on_with(run, {"key": f"{MARK}2"})
    if effect == "staged":
        assert "signed" in said
        assert [each for each in signing.acts if each != "client"] == [
            "before",
            f"after {MARK}",
            f"after {MARK}2",
        ]
    else:
        assert OUTCOME_UNKNOWN in said
        assert "given a secret" in said
        assert [each for each in signing.acts if each != "client"] == ["before", f"after {MARK}"]


@pytest.mark.parametrize("effect", ["staged", "idempotent", "irreversible"])
async def test_a_handoff_whose_after_had_not_begun_asks_again(effect: Any) -> None:
    """If the process dies before `after` begins, a handoff asks again and keeps the recorded result of `before`."""
    signing = _Signing(effect, own_client=True, stops_after=False)
    run = Cut([signing.tool], ToolCall("sign"))
    await _answered(run, {"key": MARK}, signing.reached)
    said = await _gone_on_with(run, {"key": f"{MARK}2"})
    assert "signed" in said
    assert signing.acts == ["before", "client", "client", f"after {MARK}2"]


async def test_an_act_that_was_lost_is_seen_masked() -> None:
    """Neither a run's tree nor its entries reveal the secret answer to a handoff."""
    signing = _Signing("idempotent")
    signing.reached.set()
    run = Cut([signing.tool], ToolCall("sign"))
    person = Person(answers={"sign": {"key": MARK}})
    await Adapter(run.model, journal=run.journal, environment=person).evaluate(run.prompt, "go", run_id="run")
    assert signing.acts == ["before", f"after {MARK}"]
    assert MARK not in everything([await show(run.journal, "run"), await run.journal.calls.entries("run")])


SAID = Annotated[str, Field(json_schema_extra={"writeOnly": True})]


async def test_an_answer_that_only_the_schema_calls_secret_is_masked_too() -> None:
    """An answer that only the JSON Schema marks as secret is masked too, even in a handoff's events."""
    got: list[Any] = []
    login, journal, session = handing_over(SAID, got), MemoryJournal(), Session(id="s")
    heard: list[object] = []
    session.dispatcher.subscribe(object, heard.append)
    person = Person(answers={"login": MARK})
    model = ScriptedModel([ToolCall("login"), "done"])
    await Adapter(model, journal=journal, environment=person).evaluate(
        Prompt("p", "Do.", tools=[login]), "go", session=session, run_id="run"
    )
    assert got == [MARK], _told(model)
    assert MARK not in everything(
        [heard, save(session), await journal.calls.entries("run"), await journal.questions.history("run")]
    )


# --- answers through a server -------------------------------------------------------------------


@pytest.mark.parametrize("how", ["live", "parked", "restarted"])
async def test_somebody_answers_a_server_with_a_secret(how: str, tmp_path: Path) -> None:
    """A server passes a secret answer to a run that is live, parked or left by a stopped server, and stores it nowhere."""
    got: list[Any] = []
    async with served(tmp_path, tools=[asking(Key, got)], park_after=0.0 if how == "parked" else None) as app:
        thread = app.thread()
        await thread.say(plan([["login", {}]], "ok"))
        await (over(thread) if how == "parked" else settle(thread))
        if how == "restarted":
            await app.restart()
            thread = app.thread()
        [question] = await thread.questions()
        with pytest.raises(AnswerRefused, match="does not match the schema") as refused:
            await give(thread, question, {"key": {"x": MARK}})
        assert MARK not in str(refused.value)
        await give(thread, question, {"key": MARK})
        await over(thread)
        assert [each.key.get_secret_value() for each in got] == [MARK]
        assert await give(thread, question, {"key": MARK}) == ""  # repeating the answer is harmless
        with pytest.raises(AnswerRefused, match="already been answered"):
            await give(thread, question, {"key": f"{MARK}2"})
        [row] = await thread.rows()
        found = {
            "feed": [item.data for item in thread.feed.since(0)],
            "snapshot": await snapshots.thread_snapshot(app.journal, thread),
            "messages": await thread.messages(),
            "tree": snapshots.run_tree(await show(app.journal, row.record.id)),
            "journal": recorded_in(tmp_path),
        }
        for where, each in found.items():
            assert MARK not in everything(each), where


async def test_an_answer_to_a_run_that_another_process_has_is_refused(tmp_path: Path) -> None:
    """A process that does not own the run refuses a secret answer, because a journal must not store it."""
    got: list[Any] = []
    async with served(tmp_path, tools=[asking(Key, got)]) as app:
        thread = app.thread()
        await thread.say(plan([["login", {}]], "ok"))
        await settle(thread)
        [question] = await thread.questions()
        other = SqliteJournal(tmp_path / "runs.db")
        with pytest.raises(AnswerRefused, match="not recorded"):
            other.questions.answer(answer_to(question, {"key": MARK}))
        other.close()
        assert MARK.encode() not in recorded_in(tmp_path)
        await give(thread, question, {"key": MARK})
        await over(thread)
        assert len(got) == 1


# --- the command line ---------------------------------------------------------------------------


async def test_the_command_line_refuses_before_a_secret_is_typed(tmp_path: Path) -> None:
    """`runs answer` refuses to answer a question that asks for a secret, before anything is typed."""
    journal = SqliteJournal(tmp_path / "runs.db")
    adapter = Adapter(
        ScriptedModel([ToolCall("login"), "done"]), journal=journal, environment=LaterEnvironment()
    )
    with pytest.raises(RunParked) as parked:
        await adapter.evaluate(Prompt("p", "Do.", tools=[asking(Key, [])]), "go", run_id="run")
    advice = Failure.of(parked.value).message
    assert "`handrail runs resume run` asks for it at a terminal" in advice
    assert "runs answer" not in advice
    for value in (None, json.dumps({"key": MARK})):
        with pytest.raises(AnswerRefused, match="handrail runs resume"):
            await runs_commands.answer(journal, "run", None, value, None, "")
    journal.close()
