"""Sessions and conversations, rebuilt from the journal alone."""

from pathlib import Path

import msgspec
import pytest

from handrail import Adapter, Attachment, LaterEnvironment, Prompt, ScriptedModel, Session, ToolResult, tool
from handrail.errors import RunParked, RunUnknown, SessionUnknown
from handrail.events import MessageAdded
from handrail.guard.feedback import RunState, Trigger
from handrail.messages import AssistantMessage, Message, ToolMessage, Traits, UserMessage
from handrail.runs import cancel, said, undo
from handrail.runs import session as session_of
from support.recorded import PROMPT, TOOLS, Noted, Recorder, call

FIRST = Attachment(b"first", "first.txt")
SECOND = Attachment(b"second", "second.txt")
ANSWER = '{"value":3}'


def texts(messages: list[Message]) -> list[str]:
    found: list[str] = []
    for each in messages:
        match each:
            case ToolMessage():
                found += [f"{result.name}: {result.text}" for result in each.results]
            case AssistantMessage() | UserMessage():
                found.append(each.text or " ".join(asked.name for asked in each.calls))  # pyright: ignore[reportAttributeAccessIssue]  # a user's message always has text
    return found


@pytest.fixture
def recorder(tmp_path: Path):
    made = Recorder(tmp_path)
    yield made
    made.close()


async def test_a_session_has_everything_that_was_committed_and_what_was_said_in_finished_runs(
    recorder: Recorder,
):
    """A rebuilt session has the changes of a parked run, which other runs must see, but not its unfinished messages."""
    session = Session(id="chat", principal="ada", config={"lang": "en"})
    await recorder.run("one", call("note", text="a"), "noted", session=session)
    await recorder.run("two", call("note", text="b"), "noted", session=session)
    with pytest.raises(RunParked):
        await recorder.run("three", call("note", text="c"), call("choose"), session=session)
    found = await session_of(recorder.journal, "chat", principal="ada")
    assert [each.text for each in found[Noted].all()] == ["a", "b", "c"]
    assert (found.id, found.principal, found.config) == ("chat", "ada", {"lang": "en"})
    assert len(found[MessageAdded].all()) == 8
    await cancel(recorder.journal, "three")
    found = await session_of(recorder.journal, "chat", principal="ada")
    assert [each.text for each in found[Noted].all()] == ["a", "b", "c"]
    response = await recorder.run("four", call("notes"), "done", session=found)
    assert "a, b, c" in texts([each.message for each in response.session[MessageAdded].all()])[-2]


async def test_nobody_elses_session_is_found(recorder: Recorder):
    await recorder.run("one", "done", session=Session(id="chat", principal="ada"))
    for id, principal in (("chat", "bob"), ("chat", ""), ("other", "ada")):
        with pytest.raises(SessionUnknown, match=f"session '{id}': the journal has no session of"):
            await session_of(recorder.journal, id, principal=principal)


async def test_a_session_whose_first_run_waits_is_as_that_found_it(recorder: Recorder):
    with pytest.raises(RunParked):
        await recorder.run(
            "one", call("choose"), session=Session(id="chat", principal="ada", config={"lang": "en"})
        )
    found = await session_of(recorder.journal, "chat", principal="ada")
    assert (found.config, found[MessageAdded].all()) == ({"lang": "en"}, ())


async def test_what_was_undone_is_not_in_it(recorder: Recorder):
    session = Session(id="chat", principal="ada")
    await recorder.run("one", call("note", text="a"), call("note", text="b"), "noted", session=session)
    await undo(recorder.journal, "one", (await recorder.ids("one"))[1])
    found = await session_of(recorder.journal, "chat", principal="ada")
    assert [each.text for each in found[Noted].all()] == ["a"]


async def test_what_a_parked_run_has_said_so_far(recorder: Recorder):
    """A parked run's conversation contains the results of its finished calls. After a resume, it contains all results."""
    session = Session(id="chat", principal="ada")
    await recorder.run("one", "hello", session=session)
    script = [call("note", text="a"), [call("choose"), call("note", text="b")]]
    with pytest.raises(RunParked) as parked:
        await recorder.run("two", *script, session=session)
    first = await said(recorder.journal, "two")
    assert texts(first) == ["go", "note", "note: noted a", "choose note", "note: noted b"]
    recorder.answer(parked.value.questions[0], {"n": 4})
    response = await recorder.adapter("done").resume("two", PROMPT)
    assert response.text == "done"
    whole = await said(recorder.journal, "two")
    assert texts(whole) == [*texts(first)[:4], "choose: got 4", "note: noted b", "done"]
    assert whole[:4] == first[:4], "the rebuilt messages have other ids"
    assert texts(await said(recorder.journal, "one")) == ["go", "hello"]
    with pytest.raises(RunUnknown):
        await said(recorder.journal, "none")


async def test_a_cancelled_run_keeps_its_attachments(recorder: Recorder):
    """The conversation of a parked run includes the attachments of its message and of its results, also after it is cancelled."""

    @tool(effect="read")
    async def fetch() -> ToolResult[str]:
        """Fetch a file."""
        return ToolResult.ok("here", attachments=[SECOND])

    prompt = Prompt("work", "Do.", tools=[*TOOLS, fetch])
    script = [call("fetch"), call("choose")]
    with pytest.raises(RunParked):
        await recorder.adapter(*script).evaluate(prompt, run_id="one", attachments=[FIRST])
    before = await said(recorder.journal, "one")
    await cancel(recorder.journal, "one")
    for messages in (before, await said(recorder.journal, "one")):
        asked, _, answered, *_ = messages
        assert isinstance(asked, UserMessage)
        assert isinstance(answered, ToolMessage)
        assert (asked.text, asked.attachments) == ("", (FIRST,))
        assert answered.results[0].attachments == (SECOND,)


class Counts:
    """A feedback provider that speaks after each call, and a completion checker that objects once."""

    name = "counts"
    cap = 9
    trigger = Trigger(calls=1)

    def advise(self, state: RunState, /) -> str | None:
        return f"{state.calls} calls"

    def missing(self, state: RunState, /) -> str | None:
        return None if state.given else "Choose first."


async def test_a_cancelled_run_keeps_what_its_model_was_told_about_its_answers(recorder: Recorder):
    """Advice, objections and requests to correct an answer stand where the model got them, also after the run is cancelled."""
    model = ScriptedModel(
        [call("note", text="a"), "no number", ANSWER, call("choose")], traits=Traits(None, True)
    )
    adapter = Adapter(
        model, journal=recorder.journal, filesystem=recorder.files, environment=LaterEnvironment()
    )
    prompt = Prompt("work", "Do.", tools=TOOLS, output=int, feedback=[Counts()], completion=[Counts()])
    with pytest.raises(RunParked):
        await adapter.evaluate(prompt, "go", run_id="one")
    seen = texts(list(model.requests[-1].messages))
    assert [each.split("\n")[0] for each in seen] == [
        *("go", "note", "note: noted a", "[counts] 1 calls", "no number", "Your answer is invalid:", ANSWER),
        "The task is not finished. Choose first. Continue, then answer again.",
    ]
    before = await said(recorder.journal, "one")
    await cancel(recorder.journal, "one")
    assert texts(before) == [*seen, "choose"]
    assert texts(await said(recorder.journal, "one"))[:-1] == [*seen, "choose"]


def test_text_is_recognised_once_its_bytes_are_loaded():
    """A reference is not text until its bytes are loaded, even if it was asked before."""
    reference = msgspec.json.decode(msgspec.json.encode(FIRST), type=Attachment)
    assert not reference.is_text
    reference.load(FIRST.content)
    assert reference.is_text
