"""A run's attachments are sent with the message, recorded once, and still there after a resume, a fork and an export."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import pytest

from handrail import (
    Adapter,
    Agent,
    AgentContext,
    AgentEnvironment,
    Attachment,
    Budget,
    MemoryJournal,
    ScriptedModel,
    Session,
    ToolCall,
    ToolContext,
    ToolResult,
    tool,
)
from handrail.environment import LaterEnvironment
from handrail.errors import PromptEvaluationError, RunParked
from handrail.messages import AssistantMessage, ToolMessage, Traits, UserMessage
from handrail.models.media import CHAT_TAKES
from handrail.models.scripted import Reply
from handrail.prompt import Prompt
from handrail.run.record.log import attached_to
from handrail.runs.copies import export, fork, import_
from support.parked_runs import answer_to

PNG = b"\x89PNG\r\n\x1a\n" + b"\0" * 20
PHOTO = Attachment(PNG + b"photo", "photo.png")
PLOT = Attachment(PNG + b"plot", "plot.png")


@tool(effect="read")
def plot() -> Attachment:
    """Draw a plot."""
    return PLOT


@tool(effect="staged")
async def twice(context: ToolContext) -> ToolResult[int]:
    """Plot in an inner call, and ask somebody before the plot is passed on."""
    inner = await context.call("plot")
    await context.request_approval("go on")
    return ToolResult.ok(len(inner.unwrap().content), attachments=inner.attachments)


PROMPT = Prompt("p", "x", tools=[plot, twice])


def contents(script: ScriptedModel, request: int = -1) -> list[bytes]:
    return [each.content for each in attached_to(script.requests[request].messages)]


async def parked(journal: MemoryJournal, *calls: Any) -> None:
    """Run until `twice` asks for approval and the run is parked, then approve."""
    model = ScriptedModel([*calls, ToolCall("twice", {})])
    with pytest.raises(RunParked) as stop:
        await Adapter(model, journal=journal).evaluate(
            PROMPT, "look", attachments=[PHOTO], run_id="run", environment=LaterEnvironment()
        )
    (question,) = stop.value.questions
    journal.questions.answer(answer_to(question, {"approved": True}))


async def test_a_message_has_its_attachments(tmp_path: Path) -> None:
    """`evaluate` and `stream` take attachments, paths and addresses, with or without a text message."""
    file = tmp_path / "a.png"
    file.write_bytes(PNG)
    script = ScriptedModel(["ok", "ok"])
    given: Any = [PHOTO, file, "https://example.org/b.png"]
    await Adapter(script).evaluate(PROMPT, "look", attachments=given)
    (message,) = script.requests[0].messages
    assert isinstance(message, UserMessage)
    assert [each.name for each in message.attachments] == ["photo.png", "a.png", "b.png"]
    async for _ in Adapter(script).stream(PROMPT, "look", attachments=given):
        pass
    assert len(script.requests) == 2
    assert list(script.requests[0].messages) == list(script.requests[1].messages)[:1]
    await Adapter(alone := ScriptedModel(["ok"])).evaluate(PROMPT, attachments=[PHOTO])
    assert alone.requests[0].messages[0].text == ""


async def test_a_run_that_a_handler_starts_by_hand_takes_attachments() -> None:
    inner = ScriptedModel(["A photo."])

    @tool(effect="read")
    async def describe() -> str:
        """Describe the photo."""
        return (await Adapter(inner).evaluate(Prompt("q", "x"), "look", attachments=[PHOTO])).text

    outer = ScriptedModel([ToolCall("describe", {}), "done"])
    await Adapter(outer).evaluate(Prompt("p", "x", tools=[describe]), "go")
    assert contents(inner) == [PHOTO.content]


async def test_the_journal_has_the_bytes_once() -> None:
    """However often a run refers to the same bytes, the journal stores them once, and its records only refer to them."""
    journal = MemoryJournal()
    script = ScriptedModel([ToolCall("plot", {}), ToolCall("plot", {}), "ok"])
    await Adapter(script, journal=journal).evaluate(PROMPT, "look", attachments=[PHOTO, PHOTO], run_id="run")
    assert sorted(await journal.blobs.list("run")) == sorted([PHOTO.digest, PLOT.digest])
    row = await journal.runs.get("run")
    written = [row.record.begin, row.outcome, *(unit.result for unit in await journal.calls.load("run"))]
    written += [entry.body for entry in await journal.calls.entries("run")]
    assert not any(b"\x89PNG" in each or b"iVBOR" in each for each in written)
    assert any(PLOT.digest.encode() in each for each in written)


async def test_a_resumed_run_has_its_attachments() -> None:
    """In a resumed run, the attachments of the message, of finished calls and of inner calls still have their bytes."""
    journal = MemoryJournal()
    await parked(journal, ToolCall("plot", {}))
    script = ScriptedModel(["ok"])
    await Adapter(script, journal=journal).resume("run", PROMPT, environment=LaterEnvironment())
    assert contents(script) == [PHOTO.content, PLOT.content, PLOT.content]


async def test_a_later_run_of_a_restored_session_has_them() -> None:
    """A run of a session restored from a journal gets the earlier runs' attachments with their bytes.

    The journal lists them for that run too.
    """
    journal = MemoryJournal()
    first = ScriptedModel([ToolCall("plot", {}), "ok"])
    session = Session(id="s")
    await Adapter(first, journal=journal).evaluate(
        PROMPT, "look", attachments=[PHOTO], run_id="a", session=session
    )
    restored = (await Adapter(ScriptedModel([]), journal=journal).resume("a", PROMPT)).session
    script = ScriptedModel(["ok"])
    await Adapter(script, journal=journal).evaluate(PROMPT, "again", session=restored, run_id="b")
    assert contents(script) == [PHOTO.content, PLOT.content]
    assert sorted(await journal.blobs.list("b")) == sorted([PHOTO.digest, PLOT.digest])


@pytest.mark.parametrize("photo_of", ["person", "model"])
@pytest.mark.parametrize("copied", ["fork", "export"])
async def test_a_copy_has_its_attachments(tmp_path: Path, copied: str, photo_of: str) -> None:
    """A fork has what was attached, and what the model made, with their bytes, even if the run was imported into another journal."""
    journal = MemoryJournal()
    made, attached = ([PHOTO], []) if photo_of == "model" else ([], [PHOTO])
    first = ScriptedModel([Reply("a", [ToolCall("plot", {})], attachments=made), "ok"])
    await Adapter(first, journal=journal).evaluate(PROMPT, "look", attachments=attached, run_id="run")
    if copied == "export":
        await export(journal, "run", tmp_path / "run.jsonl")
        journal = MemoryJournal()
        await import_(journal, tmp_path / "run.jsonl")
    await fork(journal, "run", 1, "copy")
    script = ScriptedModel(["ok"])
    await Adapter(script, journal=journal).resume("copy", PROMPT)
    assert contents(script) == [PHOTO.content, PLOT.content]


async def test_a_nested_run_gets_attachments() -> None:
    """A handler can pass attachments to a nested run."""
    inner = ScriptedModel(["a photo"])

    @tool(effect="idempotent")
    async def describe(context: ToolContext) -> str:
        """Describe a photo with another model."""
        found = await context.adapter.evaluate(Prompt("q", "x"), "what?", model=inner, attachments=[PHOTO])
        return found.text

    script = ScriptedModel([ToolCall("describe", {}), "ok"])
    await Adapter(script).evaluate(Prompt("p", "x", tools=[describe]), "go")
    assert contents(inner) == [PHOTO.content]
    last = script.requests[-1].messages[-1]
    assert isinstance(last, ToolMessage)
    assert last.text == "a photo"


async def test_a_prompt_to_the_model_has_attachments(tmp_path: Path) -> None:
    """`prompt_model` sends attachments with its prompt. It also accepts paths and addresses."""
    file = tmp_path / "a.png"
    file.write_bytes(PNG)

    @tool(effect="idempotent")
    async def color(context: AgentContext) -> str:
        """Ask for a color."""
        found: list[Attachment | Path | str] = [PHOTO, file, "https://example.org/b.png"]
        return await context.prompt_model("Which color?", Literal["red", "blue"], attachments=found)

    inner = ScriptedModel(['{"value": "red"}'])
    script = ScriptedModel([ToolCall("color", {}), "ok"])
    prompt = Prompt("p", "x", tools=[color])
    await Adapter(script).evaluate(prompt, "go", environment=AgentEnvironment(inner))
    (asked,) = inner.requests[0].messages
    assert isinstance(asked, UserMessage)
    assert asked.text == "Which color?"
    assert [each.name for each in asked.attachments] == ["photo.png", "a.png", "b.png"]
    last = script.requests[-1].messages[-1]
    assert isinstance(last, ToolMessage)
    assert last.text == "red"


async def test_a_prompt_to_the_model_refuses_invalid_attachments() -> None:
    """`prompt_model` refuses a single path, and a kind of attachment that its model does not take, before it asks."""
    script = ScriptedModel([ToolCall("one", {}), ToolCall("sound", {}), "ok"])
    inner = ScriptedModel([], traits=Traits(native_output=True, takes=CHAT_TAKES))

    @tool(effect="idempotent")
    async def one(context: AgentContext) -> str:
        """Attach a single file."""
        return await context.prompt_model("what?", str, attachments="photo.png")

    @tool(effect="idempotent")
    async def sound(context: AgentContext) -> str:
        """Attach a sound."""
        return await context.prompt_model("what?", str, attachments=[Attachment(b"OggS", "clip.ogg")])

    prompt = Prompt("p", "x", tools=[one, sound])
    await Adapter(script).evaluate(prompt, "go", environment=AgentEnvironment(inner))
    texts = [each.text for each in script.requests[-1].messages if isinstance(each, ToolMessage)]
    assert inner.requests == []
    assert "attachments is a single str" in texts[0]
    assert "clip.ogg: it takes no audio/ogg, only audio/mpeg, audio/wav" in texts[1]


async def test_a_budget_counts_attachments() -> None:
    """A budget reserves tokens for a picture before the request, so a picture that would exceed the budget is not sent."""
    script = ScriptedModel(["ok"])
    assert (await Adapter(script).evaluate(PROMPT, "look", budget=Budget(tokens=4000))).text == "ok"
    script = ScriptedModel(["ok"])
    with pytest.raises(PromptEvaluationError, match="tokens"):
        await Adapter(script).evaluate(PROMPT, "look", budget=Budget(tokens=4000), attachments=[PHOTO])
    assert script.requests == []


# --- what a model makes ------------------------------------------------------------------------------


MADE = Reply("Here.", attachments=[PLOT])


async def test_a_resumed_run_has_what_its_model_made() -> None:
    """An answer from the record has its pictures with their bytes, in the next request and in the response."""
    journal = MemoryJournal()
    await parked(journal, Reply("Here.", [ToolCall("plot", {})], attachments=[PLOT]))
    script = ScriptedModel([Reply("ok", attachments=[PHOTO])])
    response = await Adapter(script, journal=journal).resume("run", PROMPT, environment=LaterEnvironment())
    assert contents(script) == [PHOTO.content, *[PLOT.content] * 3]
    assert [each.content for each in response.attachments] == [PLOT.content, PHOTO.content]


async def test_a_nested_run_gives_what_its_model_made() -> None:
    """What an inner agent's model made is attached to the result of the call that ran the agent."""
    artist = Agent(ScriptedModel([MADE]), "Draw.", name="artist", description="Draws.")
    script = ScriptedModel([ToolCall("artist", {"message": "a cat"}), "done"])
    journal = MemoryJournal()
    response = await Agent(script, "Ask.", tools=[artist.as_tool()]).run("go", journal=journal)
    assert contents(script) == [PLOT.content]
    assert response.attachments == (), "the outer model made nothing"
    assert await journal.blobs.has(PLOT.digest)


async def test_a_history_is_not_what_a_run_made() -> None:
    """The response has what the run's own model made, and neither what earlier runs made nor what its history contains."""
    session, journal = Session(id="s"), MemoryJournal()
    adapter = Adapter(ScriptedModel([MADE, "ok"]), journal=journal)
    history = [UserMessage("hi"), AssistantMessage("Hi", attachments=(PHOTO,))]
    first = await adapter.evaluate(PROMPT, "one", session=session, history=history, run_id="a")
    second = await adapter.evaluate(PROMPT, "two", session=session, run_id="b")
    assert (first.attachments, second.attachments) == ((PLOT,), ())
    again = await adapter.resume("a", PROMPT)
    assert [each.content for each in again.attachments] == [PLOT.content]


def test_the_parts_of_an_answer_are_in_order() -> None:
    """Attachments without an offset follow the text, and offsets that go back or too far lose nothing."""
    answer = AssistantMessage("abc", attachments=(PHOTO, PLOT), offsets=(1,))
    assert answer.parts == ("a", PHOTO, "bc", PLOT)
    assert AssistantMessage("abc", attachments=(PHOTO, PLOT), offsets=(2, 1)).parts == (
        "ab",
        PHOTO,
        PLOT,
        "c",
    )
    assert AssistantMessage("abc", attachments=(PHOTO,), offsets=(9,)).parts == ("abc", PHOTO)
    assert AssistantMessage(attachments=(PHOTO,)).parts == (PHOTO,)
