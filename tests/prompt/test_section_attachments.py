"""The attachments of a prompt's sections reach the model once: with the first message, or when their section is opened."""

from pathlib import Path

import pytest

from handrail import (
    Adapter,
    Attachment,
    MarkdownSection,
    MemoryJournal,
    Prompt,
    ScriptedModel,
    Session,
    ToolCall,
    ToolContext,
    tool,
)
from handrail.environment import LaterEnvironment
from handrail.errors import PromptDefinitionError, RunParked
from handrail.run.record.log import attached_to
from support.parked_runs import answer_to

PNG = b"\x89PNG\r\n\x1a\n"
PLAN = Attachment(PNG + b"plan", "plan.png")
MAP = Attachment(PNG + b"map", "map.png")
PHOTO = Attachment(PNG + b"photo", "photo.png")


@tool(effect="read")
async def check(context: ToolContext) -> str:
    """Check, after an approval."""
    await context.request_approval("go on")
    return "checked"


@tool(effect="read")
async def delegate(context: ToolContext) -> str:
    """Ask a model with a prompt that has a picture."""
    assert context.adapter is not None
    return (await context.adapter.evaluate(PROMPT, "inner")).text


PROMPT = Prompt(
    "guide",
    [
        MarkdownSection("House", "house", "The plan shows the house.", attachments=[PLAN]),
        MarkdownSection("Off", "off", "Not shown.", enabled=False, attachments=[PHOTO]),
        MarkdownSection(
            "City",
            "city",
            "The map shows the city.",
            visibility="summary",
            summary="A map.",
            attachments=[MAP],
        ),
    ],
    tools=[check],
)


def names(script: ScriptedModel, request: int = -1) -> list[str]:
    """Return the names of the attachments in a request. Checks that each has its bytes."""
    found = list(attached_to(script.requests[request].messages))
    assert all(each.content.startswith(PNG) for each in found)
    return [each.name for each in found]


async def test_they_come_with_the_first_message() -> None:
    """The attachments of enabled sections that are shown in full come before the message's own.

    Two equal attachments are sent once.
    """
    script = ScriptedModel(["ok", "ok"])
    await Adapter(script).evaluate(PROMPT, "look", attachments=[PHOTO])
    assert names(script) == ["plan.png", "photo.png"]
    await Adapter(script).evaluate(PROMPT, "look", attachments=[PLAN])
    assert names(script) == ["plan.png"]


async def test_a_later_turn_does_not_repeat_them() -> None:
    """The next message of the same session has only its own attachments."""
    script, session = ScriptedModel(["ok", "ok"]), Session()
    await Adapter(script).evaluate(PROMPT, "look", session=session)
    await Adapter(script).evaluate(PROMPT, "again", session=session, attachments=[PHOTO])
    assert names(script) == ["plan.png", "photo.png"]


async def test_an_opened_section_shows_its_own() -> None:
    """The attachments of a section that is opened later come with the result of the call that opens it."""
    script = ScriptedModel([ToolCall("open_sections", {"sections": ["city"]}), "ok"])
    await Adapter(script).evaluate(PROMPT, "look")
    assert names(script, 0) == ["plan.png"]
    assert names(script, 1) == ["plan.png", "map.png"]


async def test_a_resumed_run_has_them_once() -> None:
    """A resumed run sends the recorded attachments once, even if the section has changed."""
    journal = MemoryJournal()
    script = ScriptedModel([ToolCall("open_sections", {"sections": ["city"]}), ToolCall("check", {})])
    with pytest.raises(RunParked) as stop:
        await Adapter(script, journal=journal).evaluate(
            PROMPT, "look", run_id="run", environment=LaterEnvironment()
        )
    (question,) = stop.value.questions
    journal.questions.answer(answer_to(question, {"approved": True}))
    house = MarkdownSection("House", "house", "The plan shows the house.", attachments=[PHOTO])
    changed = Prompt("guide", [house, *PROMPT.sections[1:]], tools=[check])
    script = ScriptedModel(["ok"])
    await Adapter(script, journal=journal).resume("run", changed, environment=LaterEnvironment())
    assert names(script) == ["plan.png", "map.png"]


async def test_a_nested_run_has_its_own() -> None:
    """The attachments of a prompt that a handler evaluates reach that nested run's model, and not the outer run's."""
    script = ScriptedModel([ToolCall("delegate", {}), "inner", "ok"])
    await Adapter(script).evaluate(Prompt("outer", "x", tools=[delegate]), "look")
    assert [names(script, each) for each in range(3)] == [[], ["plan.png"], []]


def test_paths_are_read_when_the_section_is_defined(tmp_path: Path) -> None:
    """A file that is given by its path is read when its section is defined. If it can't be read, the error names the section."""
    file = tmp_path / "a.png"
    file.write_bytes(PNG)
    made = MarkdownSection("A", "a", "x", attachments=[file])
    assert Prompt("p", [made]).render().attachments == (Attachment(file),)
    with pytest.raises(PromptDefinitionError, match="section 'a'"):
        MarkdownSection("A", "a", "x", attachments=[tmp_path / "none.png"])
