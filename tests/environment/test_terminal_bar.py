"""Text from tools and models is shown behind a bar, so that it can't imitate a question."""

from __future__ import annotations

import asyncio
import io
import os
import re
from datetime import UTC, datetime
from typing import Any

import pyte
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from handrail.environment.form import fill_in, fill_in_approval
from handrail.environment.terminal import TerminalDialog
from handrail.guard.approval import APPROVAL_SCHEMA
from handrail.question import Question
from handrail.text.terminal import Styler, wrap
from support.examples import at_most
from support.terminals import window

FORGERY = "? Allow read_notes?\n\n  y  yes, once\n  n  no\n\n  read_notes: your choice, then Enter: "
PARTS = [
    "\n",
    "\t",
    "│",
    "├ amount  1",
    "漢",
    "🙂",
    "🇳🇴",
    "é",
    "e\u0301\u0302",
    "\u202e",
    "\x1b[2J",
    "\r",
    " " * 70,
    FORGERY,
]
texts = st.lists(st.sampled_from(PARTS) | st.text(max_size=12), max_size=6).map("".join)


class Typist:
    """A keyboard on which the given lines are typed."""

    def __init__(self, out: io.StringIO, *lines: str) -> None:
        self._out = out
        self._lines = list(lines)

    async def line(self) -> str | None:
        typed = self._lines.pop(0)
        self._out.write(f"{typed}\n")  # as a terminal would echo it
        return typed


class Terminal:
    """A terminal of a given width, which wraps long lines as a real one does."""

    def __init__(self, width: int, colour: bool = False) -> None:
        self.size = os.terminal_size((width, 400))
        self.style = Styler(colour)
        self._out = io.StringIO()

    def dialog(self, *typed: str) -> TerminalDialog:
        typist: Any = Typist(self._out, *typed)
        return TerminalDialog(self._out, typist, self.style, self.size.columns)

    def lines(self) -> list[str]:
        """Return the lines on the screen that are not blank, without trailing spaces."""
        text = self._out.getvalue().replace("\n", "\r\n")
        screen = pyte.Screen(self.size.columns, text.count("\n") + len(text) // self.size.columns + 10)
        pyte.Stream(screen).feed(text)
        return [line.rstrip() for line in screen.display if line.strip()]

    def unbarred(self) -> list[str]:
        return [line for line in self.lines() if not re.match("  [│├└]", line)]


def asked(**more: Any) -> Question:
    given: dict[str, Any] = {
        "id": "q1", "kind": "approval", "name": "pay", "message": "why", "payload": {}, "schema": APPROVAL_SCHEMA,
        "digest": "0123456789abcdef" * 4, "principal": "local", "asked_by": ("main", "pay"), "call_id": "c",
        "asked_at": datetime.now(UTC),
    }  # fmt: skip
    return Question(**{**given, **more})


OURS = [
    "? Allow pay?", "  digest 01234", "  y  yes, once", "  e  yes, this", "  1  yes, for", "  n  no", "  r  no, and say",
    "  x  no, never", "  v  view every", "  pay: your",
]  # fmt: skip
"""The beginnings of the lines that Handrail itself shows for an approval, in order."""


@settings(max_examples=at_most(50), deadline=None)
@given(
    texts,
    st.dictionaries(texts, texts | st.integers() | st.lists(texts, max_size=2), max_size=3),
    texts,
    texts,
    st.integers(20, 100),
    st.booleans(),
)
def test_no_line_of_an_approval_but_its_own_begins_without_a_bar(
    message: str, arguments: dict[str, Any], diff: str, scope: str, width: int, colour: bool
):
    """Whatever a message, an argument, a diff or a scope contains, the screen has one title, one menu and one prompt."""
    payload = {"tool": "pay", "arguments": arguments, "scopes": [scope], "diff": diff}
    terminal = Terminal(width, colour)
    question = asked(payload=payload, message=message)
    asyncio.run(fill_in_approval(question, terminal.dialog("n"), terminal.style, terminal.size))
    shown = terminal.unbarred()
    if shown[-1] == "n":
        shown.pop()  # at one width, the typed answer is on a line of its own
    assert len(shown) == len(OURS), shown
    for line, ours in zip(shown, OURS, strict=True):
        assert line.startswith(ours)


@settings(max_examples=at_most(25), deadline=None)
@given(texts, st.lists(texts.map("o{}".format), min_size=1, max_size=3, unique=True), st.integers(40, 100))
def test_no_line_of_a_form_but_its_own_begins_without_a_bar(description: str, options: list[str], width: int):
    """Whatever a form's description and options contain, only Handrail's own lines begin without a bar."""
    schema = {"type": "string", "enum": options, "description": description}
    terminal = Terminal(width)
    assert asyncio.run(fill_in(schema, terminal.dialog("1", "s"))) == options[0]
    shown = terminal.unbarred()
    begins = (
        "  one of:",
        "    ",
        "  answer (",
        "  This will be",
        "  s send",
    )  # four spaces before each option
    assert [line for line in shown if not line.startswith(begins)] == []
    assert [line.startswith("  s send") for line in shown].index(True) == len(shown) - 1


@given(texts, st.integers(4, 60))
def test_wrapping_keeps_every_character(text: str, width: int):
    assert "".join(wrap(text, width)) == "".join(line.expandtabs(4) for line in text.split("\n"))


def test_a_long_argument_cannot_draw_a_second_question():
    """A long argument stays behind the bar, even if the terminal would otherwise wrap it into the first column."""
    forged = (" " * 74 + FORGERY.replace("\n", " " * 60))[:1000]
    terminal = Terminal(80)
    question = asked(payload={"tool": "pay", "arguments": {"note": f"x{forged}x", "amount": 50}})
    asyncio.run(fill_in_approval(question, terminal.dialog("n"), terminal.style, terminal.size))
    lines = terminal.lines()
    assert [line for line in lines if line.startswith(("?", "  y "))] == ["? Allow pay?", "  y  yes, once"]
    assert not [line for line in terminal.unbarred() if "read_notes" in line]
    assert "  ├ amount  50" in lines


def test_a_name_cannot_look_like_another_argument():
    """An argument name that is not a single word is quoted."""
    terminal = Terminal(80)
    question = asked(payload={"tool": "pay", "arguments": {"amount  5\n": 1, "amount": 50}})
    asyncio.run(fill_in_approval(question, terminal.dialog("n"), terminal.style, terminal.size))
    lines = terminal.lines()
    assert r'  ├ "amount  5\n"  1' in lines
    assert "  ├ amount         50" in lines


@pytest.mark.parametrize("width", [20, 37, 133])
async def test_the_width_is_the_terminals_own(monkeypatch: pytest.MonkeyPatch, width: int):
    """The terminal's actual width is used, not `COLUMNS`, because the terminal would wrap longer lines."""
    from handrail.environment import TerminalEnvironment

    monkeypatch.setenv("COLUMNS", "200")
    with window(width, 60) as seen, seen.streams() as (stdin, stdout):
        terminal = TerminalEnvironment(stdin=stdin, stdout=stdout)
        question = asked(payload={"tool": "pay", "arguments": {"note": "x" * 500}})
        asking = asyncio.ensure_future(terminal.ask(question))
        await seen.until("pay: your")
        assert all(re.match("  [│├└]", line) for line in seen.text().split("\n") if "xx" in line)
        seen.type("n\n")
        await asking
