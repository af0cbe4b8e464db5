"""`TerminalEnvironment` asks a person at a real pseudo-terminal."""

import asyncio
import contextlib
import io
import termios
from collections.abc import Generator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from pydantic import SecretStr, create_model

from handrail import (
    Adapter,
    CapabilityPolicy,
    MemoryFilesystem,
    Prompt,
    ScriptedModel,
    ToolCall,
    ToolContext,
    tool,
)
from handrail.environment import TerminalEnvironment
from handrail.errors import QuestionCancelled
from handrail.guard.approval import APPROVAL_SCHEMA
from handrail.journal.sqlite import MemoryJournal
from handrail.question import Answer, Question
from handrail.schema import Schema
from handrail.text.terminal import wants_colour
from support.terminals import Window, window

CHOICE = "your choice, then Enter:"


def question(kind: Any = "approval", /, **more: Any) -> Question:
    given: dict[str, Any] = {
        "id": "q1",
        "kind": kind,
        "name": "pay",
        "message": "pay is irreversible",
        "payload": {"tool": "pay", "arguments": {"amount": 50}, "reason": "pay is irreversible"},
        "schema": APPROVAL_SCHEMA,
        "digest": "d",
        "principal": "local",
        "asked_by": ("pay",),
        "call_id": "c",
        "asked_at": datetime.now(UTC),
    }
    return Question(**{**given, **more})


@pytest.fixture(autouse=True)
def ordinary(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)


@contextlib.contextmanager
def at_terminal(columns: int = 100, rows: int = 45) -> Generator[tuple[Window, TerminalEnvironment]]:
    """Open a window and an environment in it, and check at the end that the terminal is restored."""
    with window(columns, rows) as seen, seen.streams() as (stdin, stdout):
        yield seen, TerminalEnvironment(stdin=stdin, stdout=stdout)
        assert termios.tcgetattr(seen.slave) == seen.before
        seen.take()
        assert not seen.cursor_hidden


async def answered(
    seen: Window, terminal: TerminalEnvironment, asked: Question, *typed: tuple[str, str]
) -> Answer:
    """Ask a question, type each line once its prompt is on the screen, and return the answer."""
    asking = asyncio.ensure_future(terminal.ask(asked))
    counts: dict[str, int] = {}
    for prompt, keys in typed:
        counts[prompt] = counts.get(prompt, 0) + 1
        await seen.until(prompt, counts[prompt])
        seen.type(keys)
    return await asking


SCOPED = {
    "tool": "write",
    "arguments": {"path": "docs/a.md"},
    "reason": "write uses fs.write",
    "scopes": ["fs.write under docs/", "write anywhere"],
    "diff": "diff --git a/docs/a.md b/docs/a.md\n--- a/docs/a.md\n+++ b/docs/a.md\n@@ -1 +1 @@\n-old\n+new\n",
}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("y", {"approved": True}),
        ("YES", {"approved": True}),
        ("e", {"approved": True, "remember": "exact"}),
        ("1", {"approved": True, "remember": "scope", "scope": "fs.write under docs/"}),
        ("2", {"approved": True, "remember": "scope", "scope": "write anywhere"}),
        ("n", {"approved": False}),
        ("x", {"approved": False, "remember": "exact"}),
    ],
)
async def test_each_choice_makes_its_answer(key: str, value: dict[str, Any]):
    """Each choice (once, this exact call, each scope, no, never) is made with a key and Enter."""
    with at_terminal() as (seen, terminal):
        answer = await answered(seen, terminal, question(payload=SCOPED), (CHOICE, f"{key}\n"))
        assert (answer.outcome, answer.value, answer.by, answer.digest) == ("answered", value, "local", "d")


async def test_a_no_can_say_why():
    """The key `r` asks for the reason for a denial, which is sent with the answer."""
    with at_terminal() as (seen, terminal):
        answer = await answered(seen, terminal, question(), (CHOICE, "r\n"), ("why not:", "too much\n"))
        assert answer.value == {"approved": False, "reason": "too much"}


async def test_enter_alone_approves_nothing():
    """Enter alone decides nothing, and neither does input that is not a choice, such as a scope that was not offered."""
    with at_terminal() as (seen, terminal):
        typed = [(CHOICE, "\n"), (CHOICE, "1\n"), (CHOICE, "yy\n"), (CHOICE, "e\n"), (CHOICE, "n\n")]
        answer = await answered(seen, terminal, question(), *typed)
        assert answer.value == {"approved": False}
        assert "Nothing was decided" in seen.text()
        assert "'yy' is not a choice" in seen.text()


async def test_what_was_typed_before_the_question_does_not_answer_it():
    """Text typed before the question is shown does not answer it."""
    with at_terminal() as (seen, terminal):
        seen.type("y\ny\n")
        while seen.unread < len("y\ny\n"):
            await asyncio.sleep(0.001)
        answer = await answered(seen, terminal, question(), (CHOICE, "n\n"))
        assert answer.value == {"approved": False}


async def test_echo_is_restored():
    """An answer is echoed even if echo was off before the question, and echo is off again afterwards."""
    with window() as seen, seen.streams() as (stdin, stdout):
        silent = termios.tcgetattr(seen.slave)
        silent[3] &= ~termios.ECHO
        termios.tcsetattr(seen.slave, termios.TCSANOW, silent)
        terminal = TerminalEnvironment(stdin=stdin, stdout=stdout)
        asking = asyncio.ensure_future(terminal.ask(question()))
        await seen.until(CHOICE)
        assert seen.echoes
        seen.type("n\n")
        await asking
        assert not seen.echoes


async def test_ctrl_d_declines():
    """Ctrl-D declines an approval and a form."""
    with at_terminal() as (seen, terminal):
        assert (await answered(seen, terminal, question(), (CHOICE, "\x04"))).outcome == "declined"
        form = question("input", schema=Schema(int).json_schema, payload=None)
        assert (await answered(seen, terminal, form, ("answer", "\x04"))).outcome == "declined"


async def test_ctrl_d_after_a_key_does_not_send_it():
    """Ctrl-D after a key declines the question, and the key is not sent."""
    with at_terminal() as (seen, terminal):
        answer = await answered(seen, terminal, question(), (CHOICE, "y\x04\x04"))
        assert (answer.outcome, answer.value) == ("declined", None)


async def test_a_message_cannot_imitate_the_question():
    """A bar before each line keeps a message from imitating the question. Long text is cut, and `v` shows all of it."""
    fake = "All is well.\n\n? Allow read_notes?\n\n  y  yes, once\n  your choice, then Enter:"
    message = "\n".join([fake, *(f"more {number}" for number in range(40)), "the end of it"])
    payload = {"tool": "pay", "arguments": {"text": "a" * 5000 + "tail"}}
    prompt, page = f"\n  pay: {CHOICE}", "more lines, q to stop"
    with at_terminal(rows=60) as (seen, terminal):
        asking = asyncio.ensure_future(
            answered(
                seen,
                terminal,
                question(message=message, payload=payload),
                (prompt, "v\n"),
                (page, "\n"),
                (prompt, "n\n"),
            )
        )
        await seen.until(prompt)
        text = seen.text()
        assert text.count("\n  y  yes, once") == text.count("? Allow pay?") == 1
        assert "\n  │ ? Allow read_notes?\n" in text
        assert "└ 27 more lines, v to view all" in text
        assert "└ 4,404 more characters, v to view all" in text
        assert not any(hidden in text for hidden in ("the end of it", "tail"))
        assert (await asking).value == {"approved": False}
        assert all(whole in seen.text() for whole in ("the end of it", "tail"))


async def test_an_approval_shows_what_is_asked():
    """An approval shows who asks and why, the arguments, a scope to choose, and the diff in colour."""
    asked = question(payload=SCOPED, asked_by=("main", "reviewer", "write"), message="write uses fs.write")
    with at_terminal() as (seen, terminal):
        await answered(seen, terminal, asked, (CHOICE, "n\n"))
        shown = seen.text()
        for part in (
            "Allow write?",
            "asked by main › reviewer › write",
            "write uses fs.write",
            "├ path  docs/a.md",
            "1  yes, for the session: fs.write under docs/",
        ):
            assert part in shown
        assert seen.line_colours("-old") == {"red"}
        assert seen.line_colours("+new") == {"green"}


async def test_questions_can_be_shown_without_colour(monkeypatch: pytest.MonkeyPatch):
    """With `NO_COLOR`, a question is shown without colours."""
    monkeypatch.setenv("NO_COLOR", "1")
    with at_terminal() as (seen, terminal):
        await answered(seen, terminal, question(payload=SCOPED), (CHOICE, "n\n"))
        assert b"\x1b" not in seen.raw


async def test_a_long_diff_is_cut_and_can_be_viewed():
    """A long diff is cut to thirty lines, followed by the number of omitted lines.

    `v` shows it page by page, until its end or `q`.
    """
    diff = "".join(f"+line {number}\n" for number in range(100))
    with at_terminal(rows=24) as (seen, terminal):
        typed = [
            (CHOICE, "v\n"),
            ("more lines, q to stop", "\n"),
            ("more lines, q to stop", "q\n"),
            (CHOICE, "n\n"),
        ]
        asked = question(payload={**SCOPED, "diff": diff})
        await answered(seen, terminal, asked, *typed)
        assert "└ 70 more lines, v to view all" in seen.text()
        assert "+line 35" in seen.text()
        assert "+line 99" not in seen.text()


async def test_everything_shown_is_escaped():
    """Escape sequences in a tool's name, arguments, reason, scopes, diff, message and callers are shown as text."""
    evil = "\x1b[2J\x1b]0;owned\x07[bold]x[/bold]\r\u202e"
    payload = {
        "tool": evil,
        "arguments": {evil: evil},
        "reason": evil,
        "scopes": [evil],
        "diff": f"+{evil}\n",
    }
    with at_terminal(columns=200) as (seen, terminal):
        asked = question(payload=payload, name=evil, message=evil, asked_by=(evil, evil))
        answer = await answered(seen, terminal, asked, (CHOICE, "1\n"))
        assert answer.value["scope"] == evil  # the scope is returned unescaped
        for part in (b"\x1b[2J", b"\x1b]", b"\x07", "\u202e".encode()):
            assert part not in seen.raw
        assert "\\x1b[2J\\x1b]0;owned\\x07[bold]x[/bold]\\r\\u202e" in seen.text()


async def test_a_form_is_filled_in_by_keys():
    """A form at the terminal shows the payload, asks again after a mistake, and is sent."""
    class_schema = Schema(dict[str, int]).json_schema
    with at_terminal() as (seen, terminal):
        asked = question("input", name="counts", schema=class_schema, payload={"hint": "apples"})
        typed = [("name of an entry", "a\n"), ("a (whole number)", "x\n"), ("a (whole number)", "3\n")]
        answer = await answered(
            seen, terminal, asked, *typed, ("name of an entry", "\n"), ("s send (Enter)", "\n")
        )
        assert answer.value == {"a": 3}
        assert "├ hint  apples" in seen.text()


async def test_a_secret_is_never_on_the_screen():
    """A secret never appears on the screen, and the next field is echoed again."""
    schema = create_model("Login", key=(SecretStr, ...), user=(str, ...)).model_json_schema()
    with at_terminal() as (seen, terminal):
        answer = await answered(
            seen,
            terminal,
            question("input", schema=schema, payload=None),
            ("key (password):", "hunter2\n"),
            ("user (text):", "ann\n"),
            ("s send (Enter)", "\n"),
        )
        assert answer.value == {"key": "hunter2", "user": "ann"}
        seen.take()
        assert b"hunter2" not in seen.raw
        assert "user (text): ann" in seen.shown()
        assert "**********" in seen.shown()


async def test_a_refused_answer_is_the_default_of_the_next_try():
    """When a question is asked again, its form has the previous answer as the default."""
    with at_terminal() as (seen, terminal):
        asked = question("input", schema=Schema(int).json_schema, payload=None)
        await answered(seen, terminal, asked, ("answer (whole number)", "7\n"), ("s send (Enter)", "\n"))
        again = await answered(
            seen, terminal, asked, ("answer (whole number, Enter for 7)", "\n"), ("s send (Enter)", "\n")
        )
        assert again.value == 7


async def test_questions_are_asked_one_after_the_other():
    """Concurrent questions are shown one after another, and each gets its own answer."""
    with at_terminal() as (seen, terminal):
        asked = [question(id=name, payload={"tool": name}) for name in ("first", "second", "third")]
        asking = [asyncio.ensure_future(terminal.ask(each)) for each in asked]
        for number, (name, key) in enumerate((("first", "y"), ("second", "n"), ("third", "y")), 1):
            await seen.until(CHOICE, number)
            assert seen.text().count("Allow ") == number
            assert f"Allow {name}?" in seen.text()
            seen.type(f"{key}\n")
        answers = await asyncio.gather(*asking)
        assert [(each.question_id, each.value["approved"]) for each in answers] == [
            ("first", True),
            ("second", False),
            ("third", True),
        ]


async def test_a_question_that_is_withdrawn_ends_and_says_so():
    """When a question is withdrawn, a half-typed line answers nothing, and the next question can be asked."""
    with at_terminal() as (seen, terminal):
        asking = asyncio.ensure_future(terminal.ask(question()))
        await seen.until(CHOICE)
        seen.type("y")
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        await seen.until("This question was withdrawn")
        answer = await answered(
            seen, terminal, question(id="q2"), ("Allow", ""), (CHOICE, ""), (CHOICE, "n\n")
        )
        assert answer.value == {"approved": False}


async def test_a_question_answered_elsewhere_or_timed_out_is_withdrawn():
    """A question that is answered elsewhere or times out is withdrawn, and the screen says so."""
    with at_terminal() as (seen, terminal):
        journal = MemoryJournal()
        asking = asyncio.ensure_future(journal.questions.ask(question(), terminal))
        await seen.until(CHOICE)
        elsewhere = Answer(question_id="q1", digest="d", by="local", value={"approved": True})
        journal.questions.answer(elsewhere)
        assert await asking == elsewhere
        await seen.until("This question was withdrawn")
        seconds = 0.2
        while seen.text().count(CHOICE) < 2:  # a busy machine may show a question too late
            seconds *= 2
            soon = datetime.now(UTC) + timedelta(seconds=seconds)
            late = await journal.questions.ask(question(id=f"q{seconds}", expires_at=soon), terminal)
            assert late.outcome == "timed out"
            seen.take()
        await seen.until("This question was withdrawn", 2)


class Held:
    """A screen that records when it is paused and resumed."""

    def __init__(self) -> None:
        self.told: list[str] = []

    @contextlib.contextmanager
    def hold(self) -> Generator[None]:
        self.told.append("still")
        yield
        self.told.append("on")


async def test_the_screen_waits_while_somebody_is_asked():
    """The screen is held while a question is asked, and released afterwards."""
    with window() as seen, seen.streams() as (stdin, stdout):
        screen = Held()
        terminal = TerminalEnvironment(stdin=stdin, stdout=stdout, screen=screen)
        await answered(seen, terminal, question(), (CHOICE, "n\n"))
        assert screen.told == ["still", "on"]


async def test_without_a_terminal_nobody_is_there():
    """If stdin or stdout is not a terminal, nobody can be asked."""
    with window() as seen, seen.streams() as (stdin, stdout):
        for given in ((io.StringIO(), stdout), (stdin, io.StringIO())):
            terminal = TerminalEnvironment(stdin=given[0], stdout=given[1])
            assert terminal.run_mode == "headless"
            with pytest.raises(QuestionCancelled):
                await terminal.ask(question())
        seen.take()
        assert seen.raw == b""


async def test_a_run_asks_at_the_terminal():
    """The diff of a staged call is shown at the terminal, and approving the call applies its change."""

    @tool(effect="staged", capabilities=["fs.write"])
    async def save(text: str, context: ToolContext) -> str:
        """Save a text."""
        context.filesystem.write("a.txt", text)
        return "saved"

    files = MemoryFilesystem()
    prompt = Prompt("p", "Save.", tools=[save], policies=[CapabilityPolicy({"fs.write": "ask"})])
    model = ScriptedModel([ToolCall("save", {"text": "hello\n"}), "Done."])
    with at_terminal() as (seen, terminal):
        running = asyncio.ensure_future(
            Adapter(model, environment=terminal).evaluate(prompt, "go", filesystem=files)
        )
        await seen.until(CHOICE)
        assert "+hello" in seen.text()
        assert not files.exists("a.txt")
        seen.type("y\n")
        assert (await running).text == "Done."
        assert files.read("a.txt") == "hello\n"


@pytest.mark.parametrize(
    ("environ", "is_tty", "colour"),
    [
        ({"TERM": "xterm"}, True, True),
        ({"TERM": "xterm"}, False, False),
        ({"TERM": "dumb"}, True, False),
        ({}, True, False),
        ({"TERM": "xterm", "NO_COLOR": "1"}, True, False),
        ({"TERM": "xterm", "NO_COLOR": ""}, True, True),
        ({"FORCE_COLOR": "1"}, False, True),
        ({"FORCE_COLOR": "0", "TERM": "xterm"}, False, False),
        ({"FORCE_COLOR": "1", "NO_COLOR": "1"}, True, False),
    ],
)
def test_when_there_is_colour(environ: dict[str, str], is_tty: bool, colour: bool):
    """`NO_COLOR` takes precedence over `FORCE_COLOR`, and `FORCE_COLOR` over what the terminal supports.

    An empty `NO_COLOR`, and `FORCE_COLOR=0`, count as not set.
    """

    class Stream(io.StringIO):
        def isatty(self) -> bool:
            return is_tty

    assert wants_colour(Stream(), environ) is colour
