"""Replaying a run with the current code finds the first difference and its kind."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from handrail import MarkdownSection, PolicyDecision, Prompt, ToolContext, tool
from handrail.errors import RunParked
from handrail.resources.memory import MemoryFilesystem
from handrail.runs import Divergence, replay
from handrail.runs.replay import Tally
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
    """A recorded answer that no longer matches the output type is reported."""

    @dataclass
    class Old:
        city: str

    @dataclass
    class New:
        city: str
        country: str

    await recorder.run("r", '{"city": "Oslo"}', prompt=Prompt("p", "Say.", output=Old))
    assert await replay(recorder.journal, "r", Prompt("p", "Say.", output=Old)) is None
    found = await replayed(recorder, Prompt("p", "Say.", output=New))
    assert (found.what, found.step) == ("output", 1)
    assert "country" in found.now


async def test_sections_that_were_opened_are_open(recorder: Recorder):
    """Sections that the run had opened are open in the replay, so their tools can be called."""
    from handrail.prompt import OPENER

    def made(key: str) -> Prompt[Any]:
        more = MarkdownSection(
            "More", key, "More.", tools=[note], summary="There is more.", visibility="summary"
        )
        return Prompt("p", [MarkdownSection("Main", "main", "Do.", tools=TOOLS[1:2]), more])

    await recorder.run(
        "r", call(OPENER, sections=["more"]), call("note", text="x"), "end", prompt=made("more")
    )
    assert await replay(recorder.journal, "r", made("more")) is None


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
