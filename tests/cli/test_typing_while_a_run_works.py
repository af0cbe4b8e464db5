"""Tests of a chat on a pseudo-terminal in which somebody types while a run works."""

from collections.abc import Generator
from pathlib import Path

import pytest

from handrail.cli.line_editor import LineEditor
from support.programs import HANDRAIL, environment, handrail
from support.terminals import Window, window

PROMPT = "\n›"
APP = '''
import asyncio
from pathlib import Path

from handrail import Agent, ScriptedModel, ToolCall, ToolContext, tool
from handrail.messages import ToolMessage, UserMessage


@tool(effect="pure")
async def wait(context: ToolContext) -> str:
    """Wait for the file `go`."""
    context.report_progress("at it")
    while not Path("go").exists():
        await asyncio.sleep(0.005)
    Path("go").unlink()
    return "waited"


def reply(request):
    said = [each.text for each in request.messages if isinstance(each, UserMessage)]
    if said[-1] == "wait" and not isinstance(request.messages[-1], ToolMessage):
        return ToolCall("wait", {})
    return "heard " + ", ".join(said)


agent = Agent(ScriptedModel(reply), "Help.", tools=[wait])
'''


@pytest.fixture
def seen(tmp_path: Path) -> Generator[Window]:
    (tmp_path / "app.py").write_text(APP)
    with window() as made:
        yield made


def begin(seen: Window, folder: Path, *options: str, **env: str) -> None:
    """Start a chat whose first run works until `go` is called."""
    seen.start([*HANDRAIL, "chat", "app.py", *options], env=environment(**env), cwd=folder)
    seen.wait_for(PROMPT)
    seen.type("wait\n")
    seen.wait_for("at it")


@pytest.mark.once
@pytest.mark.parametrize("options", [(), ("--no-journal",)])
def test_what_is_typed_is_queued_edited_withdrawn_and_told(
    tmp_path: Path, seen: Window, options: tuple[str, ...]
):
    """A typed line is shown, queued, and told before the next step or afterwards, unless it was withdrawn."""
    begin(seen, tmp_path, *options)
    assert not seen.echoes
    seen.type("use metrez\x7fs")
    seen.wait_for("» use metres▏")
    seen.type("\n")
    seen.wait_for("⋯ queued: use metres")
    seen.type("/later then rest\n/later oops\n")
    seen.wait_for("⋯ queued, afterwards: oops")
    seen.type("/withdraw\n/undo\n")
    seen.wait_for("· withdrawn: oops")
    seen.wait_for("/undo has to wait until the run is over.")
    seen.type("and the ne")
    seen.wait_for("» and the ne▏")
    (tmp_path / "go").touch()
    seen.wait_for("» told: use metres")
    seen.wait_for("» told: then rest")
    seen.wait_for("heard wait, use metres, then rest")
    seen.wait_for("\n› and the ne")
    assert "queued" not in seen.shown()
    assert "Not told" not in seen.text()
    seen.type("xt\n")
    seen.wait_for("heard wait, use metres, then rest, and the next")
    seen.wait_for(PROMPT, 3)
    seen.type("/withdraw\n")
    seen.wait_for("Nothing waits to be told.")
    seen.type("/now then go\n")
    seen.wait_for("and the next, then go")
    seen.wait_for(PROMPT, 6)
    seen.type("\x04")
    assert seen.end() == 0
    assert seen.echoes


@pytest.mark.once
def test_what_a_cancelled_run_was_not_told_is_said(tmp_path: Path, seen: Window):
    """Ctrl-C cancels the run as ever. What it was not told belongs to the conversation, and the unfinished line to the prompt."""
    begin(seen, tmp_path)
    seen.type("and quickly\nhalf")
    seen.wait_for("» half▏")
    seen.type("\x03")
    seen.wait_for("Cancelled. Unfinished calls were undone.")
    seen.wait_for("Not told yet: and quickly")
    seen.wait_for("\n› half")
    seen.type(" a line\n")
    seen.wait_for("heard wait, and quickly, half a line")
    seen.wait_for(PROMPT, 3)
    seen.type("\x04")
    assert seen.end() == 0


@pytest.mark.once
def test_a_dumb_terminal_hears_whole_lines(tmp_path: Path, seen: Window):
    """Without a screen that is redrawn, the terminal shows and edits the line, and each message gets a line of its own."""
    begin(seen, tmp_path, TERM="dumb")
    assert seen.echoes
    seen.type("use metres\n")
    seen.wait_for("⋯ queued: use metres")
    (tmp_path / "go").touch()
    seen.wait_for("» told: use metres")
    seen.wait_for("heard wait, use metres")
    seen.wait_for(PROMPT, 2)
    seen.type("\x04")
    assert seen.end() == 0


@pytest.mark.once
def test_piped_lines_stay_turns_of_their_own(tmp_path: Path, seen: Window):
    """A program's lines are told one after the other, also those that arrive while a run works."""
    (tmp_path / "go").touch()
    done = handrail("chat", "app.py", "-q", cwd=tmp_path, stdin="wait\nthen rest\n")
    assert done.stdout == "heard wait\nheard wait, then rest\n"


@pytest.mark.parametrize(
    ("typed", "lines", "rest"),
    [
        (b"one\ntwo\rthr", ["one", "two"], "thr"),
        (b"caf\xc3\xa9\x7f\be\n", ["cae"], ""),
        (b"one two \x17three\x15four", [], "four"),
        (b"one two \x17three", [], "one three"),
        (b"a\x1b[A\x1b[1;5Cb\x1bOPc\x1b\x04\td", [], "abcd"),
        (b"one\\\ntwo\n", ["one\ntwo"], ""),
        (b"\n", [""], ""),
    ],
)
def test_a_line_is_edited(typed: bytes, lines: list[str], rest: str):
    """Keys delete as in a terminal's own line mode; other control keys do nothing."""
    whole, pieces = LineEditor(), LineEditor()
    assert (whole.feed(typed), whole.text) == (lines, rest)
    if b"\x1b" not in typed:  # a key arrives in one piece
        assert [line for at in range(len(typed)) for line in pieces.feed(typed[at : at + 1])] == lines
        assert pieces.text == rest
