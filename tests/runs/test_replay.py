"""Replaying a run with the current code finds the first difference and its kind."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, ConfigDict, field_validator

from handrail import (
    Attachment,
    MarkdownSection,
    PolicyDecision,
    Prompt,
    ProviderTool,
    Session,
    Tool,
    ToolContext,
    tool,
)
from handrail.errors import RunParked
from handrail.prompt import OPENER
from handrail.resources.memory import MemoryFilesystem
from handrail.runs import Divergence, replay
from handrail.runs.check import Tally
from support.recorded import PROMPT, TOOLS, Recorder, call, note


@pytest.fixture
def recorder(tmp_path: Path) -> Iterator[Recorder]:
    made = Recorder(tmp_path)
    yield made
    made.close()


SCRIPT = (
    call("note", text="one"),
    [call("notes"), call("count", number=2)],
    call("send", text="x"),
    call("note"),
    "end",
)


async def replayed(recorder: Recorder, prompt: Prompt[Any], **options: Any) -> Divergence:
    found = await replay(recorder.journal, "r", prompt, **options)
    assert found is not None
    return found


async def test_the_same_code_does_the_same(recorder: Recorder):
    """Replaying with unchanged code finds no difference, repeats no irreversible call, and records nothing."""
    sent: list[str] = []

    @tool(name="send")
    async def send(text: str) -> str:
        """Send something away, irreversibly."""
        sent.append(text)
        return f"sent {text}"

    prompt = Prompt("work", "Do what is asked.", tools=[*TOOLS[:-1], send])
    await recorder.run("r", *SCRIPT, prompt=prompt)
    units = await recorder.journal.calls.load("r")
    tally = Tally()
    assert await replay(recorder.journal, "r", prompt, tally=tally) is None
    assert (tally.steps, tally.ran, tally.taken) == (5, 3, 2)
    assert sent == ["x"]
    assert await recorder.journal.calls.load("r") == units


async def test_a_changed_prompt_is_found_first(recorder: Recorder):
    """A changed prompt is reported as the first difference, with the lines that differ."""
    await recorder.run("r", *SCRIPT)
    found = await replayed(recorder, Prompt("work", "Do what is asked, politely.", tools=TOOLS))
    assert (found.what, found.step, found.where) == ("prompt", 0, "work")
    assert "+Do what is asked, politely." in found.diff()
    assert "the system text differs" in str(found)


async def test_other_tools_are_found(recorder: Recorder):
    """A tool that is missing or has a different schema is reported."""
    await recorder.run("r", *SCRIPT)
    found = await replayed(recorder, Prompt("work", "Do what is asked.", tools=TOOLS[1:]))
    assert (found.what, found.step) == ("tools", 0)
    assert "-note" in found.diff().splitlines()

    @tool(name="note", effect="staged")
    async def changed(text: str, loud: bool = False) -> str:
        """Note something down."""
        return text

    found = await replayed(recorder, Prompt("work", "Do what is asked.", tools=[changed, *TOOLS[1:]]))
    assert (found.what, found.where) == ("tools", "note")
    assert '"loud"' in found.now
    assert '"loud"' not in found.recorded


async def test_a_changed_tool_is_found_by_its_result(recorder: Recorder):
    """A changed tool is reported at the first call whose result differs, with its step."""
    await recorder.run("r", *SCRIPT)

    @tool(name="notes", effect="read")
    async def changed(context: ToolContext) -> str:
        """Return everything that was noted down."""
        return "nothing"

    tools = [TOOLS[0], changed, *TOOLS[2:]]
    found = await replayed(recorder, Prompt("work", "Do what is asked.", tools=tools))
    ids = await recorder.ids("r")
    assert (found.what, found.step, found.call_id) == ("result", 2, ids[1])
    assert (found.recorded, found.now) == ("one", "nothing")


async def test_a_tool_that_fails_now_is_found(recorder: Recorder):
    """A tool that now fails is reported with its error."""
    await recorder.run("r", *SCRIPT)

    @tool(name="count", effect="staged")
    async def changed(number: int) -> str:
        """Keep a number."""
        raise ValueError("no more")

    tools = [*TOOLS[:2], changed, *TOOLS[3:]]
    found = await replayed(recorder, Prompt("work", "Do what is asked.", tools=tools))
    assert (found.what, found.recorded) == ("result", "counted 2")
    assert found.now.startswith("failed: ")


async def test_arguments_that_are_taken_otherwise_are_found(recorder: Recorder):
    """A changed validator is reported if it refuses recorded arguments, even if the schema is unchanged."""
    await recorder.run("r", *SCRIPT)
    from typing import Annotated

    from pydantic import AfterValidator

    def refuse(text: str) -> str:
        raise ValueError("not today")

    @tool(name="send")
    async def changed(text: Annotated[str, AfterValidator(refuse)]) -> str:
        """Send something away, irreversibly."""
        return text

    found = await replayed(recorder, Prompt("work", "Do what is asked.", tools=[*TOOLS[:-1], changed]))
    assert (found.what, found.step) == ("arguments", 3)
    assert "not today" in found.now


@dataclass
class Denies:
    """A policy that denies one tool, or asks about it."""

    tool: str
    name: str = "denies"
    kind: str = "deny"

    def check(self, tool: Any, params: Any, *, context: ToolContext) -> PolicyDecision:
        if tool.name != self.tool:
            return PolicyDecision.allow()
        return PolicyDecision.deny("not this") if self.kind == "deny" else PolicyDecision.ask("is it fine")

    def on_result(self, tool: Any, params: Any, result: Any, *, context: ToolContext) -> None:
        return None


@pytest.mark.parametrize("kind", ["deny", "ask"])
async def test_a_changed_policy_is_found(recorder: Recorder, kind: str):
    """A changed policy is reported, whether it is stricter or more lenient than when the run was recorded."""
    await recorder.run("r", *SCRIPT)
    strict = Prompt("work", "Do what is asked.", tools=TOOLS, policies=[Denies("send", kind=kind)])
    found = await replayed(recorder, strict)
    assert (found.what, found.step, found.recorded) == ("policy", 3, "allow")
    assert found.now.startswith(f"{kind}: ")
    recorder2 = await recorder.adapter(*SCRIPT, approvals="approve_all", environment=None).evaluate(
        strict, "go", run_id="s"
    )
    assert recorder2.text == "end"
    back = await replay(recorder.journal, "s", PROMPT)
    assert back is not None
    assert (back.what, back.step, back.now) == ("policy", 3, "allow")
    assert await replay(recorder.journal, "s", strict) is None


async def test_files_are_read_as_they_were_or_not_at_all(recorder: Recorder):
    """A call that used files reruns only if a filesystem is passed and the files are not known to have changed since.

    Otherwise, its recorded result is used.
    """
    (recorder.folder / "a").write_text("first")
    (recorder.folder / "b").write_text("steady")
    script = [
        call("read", path="a"),
        call("write", path="a", text="second"),
        call("read", path="a"),
        call("read", path="b"),
        "end",
    ]
    await recorder.run("r", *script)
    tally = Tally()
    assert await replay(recorder.journal, "r", PROMPT, filesystem=recorder.files, tally=tally) is None
    assert (tally.ran, tally.taken) == (1, 3)
    tally = Tally()
    assert await replay(recorder.journal, "r", PROMPT, tally=tally) is None
    assert (tally.ran, tally.taken) == (0, 4)
    files = MemoryFilesystem()
    files.write("a", "first")
    files.write("b", "steady")
    tally = Tally()
    assert await replay(recorder.journal, "r", PROMPT, filesystem=files, tally=tally) is None
    assert (tally.ran, tally.taken) == (4, 0)
    assert files.read("a") == "first"  # the replay wrote to a fork, which was dropped
    files.write("b", "other")
    found = await replayed(recorder, PROMPT, filesystem=files)
    assert (found.what, found.step, found.recorded, found.now) == ("result", 4, "steady", "other")
    assert (recorder.folder / "a").read_text() == "second"


async def test_an_answer_that_does_not_fit_any_more_is_found(recorder: Recorder):
    """A recorded answer that a changed validator refuses is reported, even if the schema is unchanged."""

    class Answer(BaseModel):
        city: str

    class Checked(Answer):
        model_config = ConfigDict(title="Answer")

        @field_validator("city")
        @classmethod
        def known(cls, city: str) -> str:
            raise ValueError("no such city")

    await recorder.run("r", '{"city": "Oslo"}', prompt=Prompt("p", "Say.", output=Answer))
    assert await replay(recorder.journal, "r", Prompt("p", "Say.", output=Answer)) is None
    found = await replayed(recorder, Prompt("p", "Say.", output=Checked))
    assert (found.what, found.step) == ("output", 1)
    assert "no such city" in found.now


@pytest.mark.parametrize(("now", "shown"), [(list[int], "integer"), (None, "")])
async def test_another_schema_of_the_answer_is_found(recorder: Recorder, now: Any, shown: str):
    """The model was shown the schema of the answer, so a different one is a difference, or none at all."""
    await recorder.run("r", '{"value": ["1"]}', prompt=Prompt("p", "Say.", output=list[str]))
    assert await replay(recorder.journal, "r", Prompt("p", "Say.", output=list[str])) is None
    found = await replayed(recorder, Prompt("p", "Say.", output=now))
    assert (found.what, found.step, found.where) == ("schema", 0, "p")
    assert shown in found.now
    assert '"string"' in found.recorded


# --- sections, attachments and the provider's tools ---


def renamed(text: str) -> Tool[Any, Any]:
    """Return the tool `note` with a different description."""

    @tool(name="note", description=text, effect="staged")
    async def changed(text: str, context: ToolContext) -> str:
        return f"noted {text}"

    return changed


def sectioned(
    text: str = "More.",
    offered: Tool[Any, Any] = note,
    files: Sequence[Attachment] = (),
    *,
    tools: Sequence[Tool[Any, Any]] = TOOLS[1:2],
    attachments: Sequence[Attachment] = (),
) -> Prompt[Any]:
    """Return a prompt with the section `main`, and the section `more`, which is shown as a summary.

    The first three arguments are for `more`, and the others for `main`.
    """
    main = MarkdownSection("Main", "main", "Do.", tools=tools, attachments=attachments)
    more = MarkdownSection(
        "More",
        "more",
        text,
        tools=[offered],
        attachments=files,
        summary="There is more.",
        visibility="summary",
    )
    return Prompt("p", [main, more])


OPENED = (call(OPENER, sections=["more"]), call("note", text="x"), "end")


async def test_sections_that_were_opened_are_open(recorder: Recorder):
    """Sections that the run had opened are open in the replay, so their tools can be called."""
    await recorder.run("r", *OPENED, prompt=sectioned())
    assert await replay(recorder.journal, "r", sectioned()) is None


async def test_a_changed_section_is_found_when_it_is_opened(recorder: Recorder):
    """The text and the attachments of an opened section are compared, and the names, descriptions and schemas of its tools."""
    await recorder.run("r", *OPENED, prompt=sectioned())
    (opened, _) = await recorder.ids("r")
    found = await replayed(recorder, sectioned("More than before."))
    assert (found.what, found.step, found.where, found.call_id) == ("section", 1, "more", opened)
    assert "+More than before." in found.diff()
    found = await replayed(recorder, sectioned(files=[Attachment(b"x", "x.txt")]))
    assert (found.what, found.step) == ("section", 1)
    found = await replayed(recorder, sectioned(offered=TOOLS[2]))
    assert (found.what, found.step) == ("section", 1)
    assert "count" in found.now
    found = await replayed(recorder, sectioned(offered=renamed("Note it.")))
    assert (found.what, found.step, found.where) == ("tools", 1, "note")
    assert "Note it." in found.now


async def test_sections_that_were_opened_in_one_answer(recorder: Recorder):
    """Each call in an answer opens its sections as if the others had not. Their tools can be called from the next answer on."""
    both = [call(OPENER, sections=["more"]), call(OPENER, sections=["more"]), call("note", text="too soon")]
    await recorder.run("r", both, call("note", text="x"), "end", prompt=sectioned())
    assert [unit.status for unit in await recorder.journal.calls.load("r")] == ["ok", "ok", "invalid", "ok"]
    assert await replay(recorder.journal, "r", sectioned()) is None


async def test_sections_that_an_earlier_run_opened_are_open(recorder: Recorder):
    """The next run of a session has the tools of the sections that were opened before, so a replay has them too."""
    session = Session(id="s")
    await recorder.run("first", *OPENED, prompt=sectioned(), session=session)
    await recorder.run("r", call("note", text="y"), "end", prompt=sectioned(), session=session)
    assert await replay(recorder.journal, "r", sectioned()) is None
    found = await replayed(recorder, sectioned(offered=renamed("Note it.")))
    assert (found.what, found.step, found.where) == ("tools", 0, "note")


async def test_a_section_inside_a_closed_one_stays_open_for_the_next_run(recorder: Recorder):
    """If the model opens a section inside another summary, the next run of the session has its tools, live and replayed."""
    inner = MarkdownSection("In", "in", "In.", tools=[note], summary="Inside.", visibility="summary")
    more = MarkdownSection("More", "more", "More.", children=[inner], summary="More.", visibility="summary")
    prompt, session = Prompt("p", [more]), Session(id="s")
    await recorder.run("first", call(OPENER, sections=["more.in"]), "end", prompt=prompt, session=session)
    await recorder.run("r", call("note", text="y"), "end", prompt=prompt, session=session)
    assert [unit.status for unit in await recorder.journal.calls.load("r")] == ["ok"]
    assert await replay(recorder.journal, "r", prompt) is None


async def test_a_resumed_run_records_what_it_was_offered(recorder: Recorder):
    """Tools of a section that was opened before the run was parked are recorded once, when they are first offered."""
    prompt = sectioned(tools=[*TOOLS[1:2], TOOLS[5]])
    with pytest.raises(RunParked):
        await recorder.run("r", call(OPENER, sections=["more"]), call("choose"), prompt=prompt)
    (question,) = await recorder.journal.questions.open("r")
    recorder.answer(question, {"n": 1})
    await recorder.adapter("end").resume("r", prompt)
    assert await replay(recorder.journal, "r", prompt) is None
    changed = sectioned(offered=renamed("Note it."), tools=[*TOOLS[1:2], TOOLS[5]])
    assert (await replayed(recorder, changed)).where == "note"


async def test_changed_attachments_of_a_section_are_found(recorder: Recorder):
    """A section's picture with other bytes, or without them, is a difference from the first request on."""
    plan = Attachment(b"one", "plan.txt")
    await recorder.run(
        "r", "end", prompt=sectioned(attachments=[plan]), attachments=[Attachment(b"m", "m.txt")]
    )
    assert await replay(recorder.journal, "r", sectioned(attachments=[plan])) is None
    for files in ([], [Attachment(b"two", "plan.txt")]):
        found = await replayed(recorder, sectioned(attachments=files))
        assert (found.what, found.step, found.where) == ("attachments", 0, "p")


async def test_a_changed_attachment_of_a_result_is_found(recorder: Recorder):
    """A result with the same text and different bytes is a difference."""

    def drawing(content: bytes) -> Prompt[Any]:
        @tool(effect="pure")
        async def draw() -> Attachment:
            """Draw."""
            return Attachment(content, "plan.txt")

        return Prompt("p", "Draw.", tools=[draw])

    await recorder.run("r", call("draw"), "end", prompt=drawing(b"one"))
    assert await replay(recorder.journal, "r", drawing(b"one")) is None
    found = await replayed(recorder, drawing(b"two"))
    assert (found.what, found.step) == ("result", 1)
    assert found.recorded != found.now


async def test_other_tools_of_the_provider_are_found(recorder: Recorder):
    """A tool that the provider runs counts as one of the offered tools, with its limits."""
    search = ProviderTool("web_search", max_uses=3)
    await recorder.run("r", "end", prompt=Prompt("p", "Do.", tools=[search]))
    assert await replay(recorder.journal, "r", Prompt("p", "Do.", tools=[search])) is None
    found = await replayed(recorder, Prompt("p", "Do."))
    assert (found.what, found.recorded, found.now) == ("tools", "web_search", "")
    found = await replayed(recorder, Prompt("p", "Do.", tools=[ProviderTool("web_search", max_uses=4)]))
    assert (found.what, found.where) == ("tools", "web_search")
    assert '"max_uses": 4' in found.now


async def test_a_run_that_is_not_over_is_replayed_as_far_as_it_is(recorder: Recorder):
    """An unfinished run is replayed as far as it is recorded, and calls that asked a person are not rerun."""
    with pytest.raises(RunParked):
        await recorder.run("r", call("note", text="x"), call("choose"), "end")
    tally = Tally()
    assert await replay(recorder.journal, "r", PROMPT, tally=tally) is None
    assert (tally.steps, tally.ran, tally.taken) == (2, 1, 0)
    (question,) = await recorder.journal.questions.open("r")
    recorder.answer(question, {"n": 1})
    await recorder.adapter("end").resume("r", PROMPT)
    tally = Tally()
    assert await replay(recorder.journal, "r", PROMPT, tally=tally) is None
    assert (tally.ran, tally.taken) == (1, 1)
