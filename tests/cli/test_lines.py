"""Tests for the lines that the program shows about a run: finished calls, calls in progress, and streamed text."""

import math
import re
from decimal import Decimal
from typing import Any

import pytest
from pydantic import SecretStr
from rich.console import Console
from rich.text import Text

from handrail import (
    Adapter,
    CapabilityPolicy,
    Prompt,
    ProviderTool,
    ScriptedModel,
    ToolCall,
    ToolContext,
    by,
    tool,
)
from handrail.cli.activity import (
    Activity,
    Row,
    format_money,
    format_progress,
    format_seconds,
    row_line,
)
from handrail.cli.screens import indented
from handrail.clock import SYSTEM_CLOCK
from handrail.events import ModelFailed, ModelRequested, ModelResponded, Progress, ToolStarted
from handrail.messages import Price, Traits, Usage
from handrail.models.scripted import Reply
from handrail.testing import RecordingSubscriber


@pytest.mark.parametrize(
    ("spent", "said"), [(0.04, "0.0 s"), (3.25, "3.2 s"), (9.96, "10 s"), (59.4, "59 s"), (125, "2 m 05 s")]
)
def test_times_are_short(spent: float, said: str):
    """Times that round to less than ten seconds are shown with tenths, and times of a minute or more with minutes."""
    assert format_seconds(spent) == said


@pytest.mark.parametrize(
    ("cost", "said"),
    [
        (None, "cost unknown"),
        (Decimal(0), "no cost"),
        (Decimal("1.239"), "$1.24"),
        (Decimal("0.00012345"), "$0.00012"),
    ],
)
def test_money_keeps_significant_digits(cost: Decimal | None, said: str):
    """A small amount is not rounded to zero, and an unknown cost is not shown as free."""
    assert format_money(cost) == said


def test_a_row_has_a_spinner_its_time_and_a_bar():
    """The row of a call in progress has a spinner, its time and a bar, and is indented by the depth of its path."""
    row = Row("index", ("outer", "index"), since=10.0, message="files", done=5, total=20)
    text = row_line(row, 13.21).plain
    assert text.startswith("    ")
    assert text.endswith("index  3.2 s  ━━━━━─────────────── 25% files")
    assert row_line(row, 13.21).plain[4] != row_line(row, 13.31).plain[4]


@pytest.mark.parametrize(
    ("done", "total", "said"),
    [
        (None, None, "m"),
        (3, None, "3 m"),
        (3, 0, "3 m"),
        (50, 10, "━━━━━━━━━━━━━━━━━━━━ 100% m"),
        (-1, 10, "──────────────────── 0% m"),
        (math.nan, 10, "m"),
        (3, math.nan, "3 m"),
        (math.inf, math.inf, "m"),
        ("half", 2, "m"),
    ],
)
def test_invalid_progress_is_still_shown(done: Any, total: Any, said: str):
    """Progress with an unusable amount or total has no bar, and progress outside its range is clamped to 0% or 100%."""
    assert format_progress(Row("t", ("t",), 0, "m", done, total)) == said


@tool(effect="read")
async def look(path: str) -> str:
    """Return the path, or fail for `none`."""
    if path == "none":
        raise ValueError("there is none")
    return path


@tool(effect="read")
async def hide(key: SecretStr) -> str:
    """Take a secret."""
    return "hidden"


@tool(effect="idempotent")
async def ask_guide(question: str, context: ToolContext) -> str:
    """Ask a guide in a nested run."""
    context.report_progress("asking", done=1, total=2)
    return (await context.adapter.evaluate(Prompt("guide", "You live there.", tools=[look]), question)).text


def free(request: Any) -> Any:
    if request.system.startswith("You live"):
        if len(request.messages) == 1:
            return Reply(
                calls=[ToolCall("look", {"path": "a.md"}), ToolCall("look", {"path": "b.md"})],
                usage=Usage(10, 5, requests=1),
            )
        return Reply("Rain.", usage=Usage(10, 5, requests=1))
    if len(request.messages) == 1:
        return Reply(
            calls=[ToolCall("ask_guide", {"question": "weather?"}), ToolCall("look", {"path": "none"})],
            usage=Usage(10, 5, requests=1),
        )
    return Reply("It rains.", usage=Usage(10, 5, requests=1))


async def run_and_say(
    model: ScriptedModel, *, verbose: bool = False, **more: Any
) -> tuple[Activity, list[str]]:
    """Run a prompt with this model, and return an `Activity` of the run and the lines it gave, without durations."""
    activity = Activity(SYSTEM_CLOCK, verbose)
    said: list[str] = []
    options: dict[str, Any] = {"tools": [look, hide, ask_guide], **more}
    prompt = Prompt("desk", "Answer.", **options)
    async for event in Adapter(model).stream(prompt, "How is it?"):
        said += [line for text in activity.update(event) for line in text.plain.split("\n")]
    return activity, [_timeless(line) for line in said]


@tool(effect="irreversible")
async def insist(context: ToolContext) -> str:
    """Ask, and go on without an approval."""
    return "asked" if (await context.request_approval("May I?")).approved else "went on"


@tool(effect="irreversible")
async def pay() -> str:
    """Pay."""
    return "paid"


async def test_a_denial_is_told_once():
    """The line of a call says that it was denied, and no other line does."""
    model = ScriptedModel([[ToolCall("pay"), ToolCall("insist")], "done"])
    lines = await run_and_say(model, policies=[CapabilityPolicy()], tools=[pay, insist])
    told = "\n".join(lines[1])
    assert "  ⊘ pay\n    pay was not approved (nobody there)" in told
    assert told.count("not approved") == 2


async def test_a_handler_that_goes_on_after_a_denial_is_told_of():
    """The denial of what a handler asked stands before the line of its call, which succeeded."""
    model = ScriptedModel([[ToolCall("insist")], "done"])
    _, lines = await run_and_say(model, tools=[insist])
    assert lines == ["  · insist: not approved (nobody there)", "  ✓ insist"]


def test_a_wrapped_line_keeps_its_indent():
    """What does not fit on a line is below its text, and its mark, its styles and its words are kept."""
    text = Text("    ✗ look\n      one two three four five six")
    text.stylize("red", 4, 5)
    lines = indented(text, Console(width=20)).split("\n")
    assert [line.plain.rstrip() for line in lines] == [
        "    ✗ look",
        "      one two three",
        "      four five six",
    ]
    shown = indented(Text("  · a long line about a call"), Console(width=16)).split("\n")
    assert [line.plain.rstrip() for line in shown] == ["  · a long line", "    about a call"]
    assert str(lines[0].spans[0].style) == "red"


def _timeless(line: str) -> str:
    """Return a line without its duration, which may be longer on a busy machine."""
    return re.sub(r"  (\d+ m )?\d+(\.\d)? s\b", "", line)


async def test_nested_calls_are_below_a_heading():
    """Inner calls are indented below a heading. The outer call's own line follows them, with its cost."""
    model = ScriptedModel(free, traits=Traits(Price(Decimal(1000), Decimal(2000)), native_output=True))
    activity, said = await run_and_say(model)
    assert "  ✗ look path=none" in said
    assert any("there is none" in line for line in said)
    at = said.index("  ▸ ask_guide")
    assert said[at + 1 : at + 3] == ["    ✓ look path=a.md", "    ✓ look path=b.md"]
    assert said[-1].startswith('  ✓ ask_guide question="weather?"')
    assert said[-1].endswith(" · $0.04")  # two requests of 10 tokens in and 5 out
    assert activity.rows == {}
    assert len(activity.done) == 3


async def test_a_call_whose_nested_run_has_an_unknown_cost_shows_none():
    """A call's line shows the cost of its nested runs only if all of it is known."""
    priced, unpriced = (
        ScriptedModel(free, name=name, traits=Traits(price, native_output=True))
        for name, price in (("a:1", Price(Decimal(1000), Decimal(2000))), ("b:1", None))
    )
    model = by(lambda request: priced if len(request.messages) == 1 else unpriced)
    activity, said = Activity(SYSTEM_CLOCK), list[str]()
    prompt = Prompt("desk", "Answer.", tools=[look, ask_guide])
    async for event in Adapter(model).stream(prompt, "How is it?"):
        said += [line.plain for line in activity.update(event)]
    (line,) = [line for line in said if line.startswith("  ✓ ask_guide")]
    assert "$" not in line
    assert (activity.usage.input, activity.cost) == (40, None)


@pytest.mark.parametrize("verbose", [False, True])
async def test_a_thought_is_folded(verbose: bool):
    """The first line of a model's thinking is shown with the number of other lines, or all lines if the view is verbose."""
    thinks = Reply("Rain.", thinking="First I look.\n\nThen I say\x1b[2J it.")
    _, said = await run_and_say(ScriptedModel([thinks]), verbose=verbose)
    lines = [line for line in said if line.startswith("∴")]
    if verbose:
        assert lines == ["∴ First I look.", "∴ Then I say\\x1b[2J it."]
    else:
        assert lines == ["∴ First I look. (+1 line; -v shows it)"]


async def test_what_the_provider_ran_is_not_folded():
    """A line about what the provider ran itself is always shown, and so is the line about a tool that is not offered."""
    thinks = Reply("Rain.", thinking="First I look.\nHm.\nweb_search, run by the provider: rain\n")
    activity, lines = Activity(SYSTEM_CLOCK), list[str]()
    deny = CapabilityPolicy({"net": "deny"})
    prompt = Prompt("p", "x", tools=[ProviderTool("web_search")], policies=[deny])
    async for event in Adapter(ScriptedModel([thinks])).stream(prompt, "Go."):
        lines += [line.plain for line in activity.update(event)]
    assert lines[:3] == [
        "· web_search is not offered to the model: web_search is not allowed: web_search uses 'net', which is not allowed here.",
        "∴ First I look. (+1 line; -v shows it)",
        "∴ web_search, run by the provider: rain",
    ]


async def test_secrets_are_masked_in_lines():
    """A tool's secret arguments are masked in its line."""
    _, said = await run_and_say(ScriptedModel([ToolCall("hide", {"key": "hunter2"}), "Done."]))
    assert "hunter2" not in "\n".join(said)
    assert any(line.startswith('  ✓ hide key="**') for line in said)


async def test_every_started_call_is_live_until_it_ends():
    """Each call in progress has a row, and so does a pending model request. At the end there are none."""
    activity = Activity(SYSTEM_CLOCK)
    seen: list[str] = []
    async for event in Adapter(ScriptedModel(free)).stream(
        Prompt("desk", "Answer.", tools=[look, ask_guide]), "?"
    ):
        activity.update(event)
        if isinstance(event, ModelRequested):
            assert activity.live_lines(5)
        if isinstance(event, ToolStarted | Progress):
            seen += [text.plain for text in activity.live_lines(5)]
    assert any("ask_guide" in row and "━━━━━━━━━━────────── 50% asking" in row for row in seen)
    assert activity.live_lines(5) == []


def test_more_rows_than_fit_are_counted():
    """If more calls are in progress than fit, the number of the others is shown."""
    activity = Activity(SYSTEM_CLOCK)
    activity.rows = {str(number): Row(f"t{number}", ("t",), number) for number in range(9)}
    assert [text.plain for text in activity.live_lines(3)][-1] == "… 6 more in progress"


async def test_a_failed_request_and_its_retry_are_shown(monkeypatch: pytest.MonkeyPatch):
    """A failed model request has a line with the error and the time until the next attempt."""
    session_events: list[object] = []
    from handrail import Session
    from handrail.models import ModelUnavailable

    session = Session()
    with RecordingSubscriber(session) as heard:
        model = ScriptedModel([ModelUnavailable("m", "it is busy\x1b[31m", retry_after=0.01), "Done."])
        await Adapter(model).evaluate(Prompt("p", "Go."), "?", session=session)
        session_events += heard.of(ModelFailed) + heard.of(ModelResponded)
    failed = next(event for event in session_events if isinstance(event, ModelFailed))
    said = Activity(SYSTEM_CLOCK).update(failed)[0].plain
    assert "it is busy\\x1b[31m" in said
    assert "trying again in" in said
