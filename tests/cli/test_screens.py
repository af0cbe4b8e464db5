"""Tests for the program `handrail` on a pseudo-terminal, whose screen pyte emulates.

The first test follows docs/terminal.md, and compares every screen on that page.
"""

import re
import signal
from collections.abc import Generator
from pathlib import Path

import pytest

from support import ROOT
from support.programs import HANDRAIL, environment, handrail, workers_folder
from support.terminals import Window, window

pytestmark = pytest.mark.once  # starting processes is slow, and the Python version makes no difference

PROMPT = "\n›"
CHOICE = "your choice, then Enter:"
PAGE = ROOT / "docs" / "terminal.md"


@pytest.fixture
def seen() -> Generator[Window]:
    with window() as made:
        yield made


def start(seen: Window, cwd: Path, *arguments: str, **env: str) -> None:
    seen.start([*HANDRAIL, *arguments], env=environment(**env), cwd=cwd)


def sane(seen: Window) -> None:
    """Assert that the terminal is restored: it echoes, and the cursor is visible."""
    assert seen.echoes
    assert not seen.cursor_hidden


def timeless(text: str) -> str:
    """Return a text with its times and digests replaced, since they differ between runs."""
    return re.sub(r"digest [0-9a-f]{16}", "digest 0", re.sub(r"\d+(\.\d)? s\b", "0.0 s", text))


def page_screens() -> list[str]:
    """Return the screens shown on the documentation page."""
    return [timeless(found).rstrip() for found in re.findall(r"```text\n(.*?)```", PAGE.read_text(), re.S)]


def test_the_page_shows_what_a_person_sees(tmp_path: Path, seen: Window):
    """A chat with streamed text, calls, an approval, a form, Ctrl-C and undo looks as it does in the documentation."""
    handrail("new", "demo", cwd=tmp_path)
    notes = tmp_path / "demo/files/notes.txt"
    start(seen, tmp_path, "chat", "demo/main.md")
    seen.wait_for(PROMPT)
    seen.type("buy bread\n")
    seen.wait_for(CHOICE)
    assert seen.line_colours("+- buy bread") == {"green"}
    assert "buy bread" not in notes.read_text()
    screens = [seen.text()]
    seen.type("y\n")
    seen.wait_for(PROMPT, 2)
    assert notes.read_text().endswith("- buy bread\n")
    screens.append(seen.text())

    seen.type("a form please\n")
    for times, prompt, typed in (
        (1, "text (text):", "no"),
        (2, "text (text):", "call Ada"),
        (1, "urgency (choose one", "3"),
        (1, "due (date", "soon"),
        (2, "due (date", "2026-12-24"),
        (1, "1 (text, Enter to finish):", "phone"),
        (1, "2 (text, Enter to finish):", ""),
        (1, "s send (Enter)", ""),
    ):
        seen.wait_for(prompt, times)
        seen.type(f"{typed}\n")
    seen.wait_for(CHOICE, 2)
    screens.append(seen.text())
    seen.type("\x03")
    seen.wait_for(PROMPT, 3)
    assert "Ada" not in notes.read_text()
    screens.append(seen.text())
    seen.type("/undo\n")
    seen.wait_for("Undone: notes.txt. Later calls")
    assert "bread" not in notes.read_text()
    seen.wait_for(PROMPT, 4)
    seen.type("\x04")
    assert seen.end() == 0
    sane(seen)
    whole = timeless(seen.text())
    for screen in page_screens():
        assert screen in whole, f"not on the screen:\n{screen}\n\nbut:\n{whole}"
    assert len(page_screens()) >= 4


# --- single features ---


@pytest.fixture
def team(tmp_path: Path) -> Path:
    workers_folder(tmp_path / "team")
    return tmp_path


def test_a_typed_answer_is_shown_once(tmp_path: Path, seen: Window):
    """A typed answer that was streamed as the model wrote it is not printed again as its value."""
    app = """from handrail import Agent, ScriptedModel
agent = Agent(ScriptedModel(['{"value": [11, 22]}']), "x", output=list[int])
"""
    (tmp_path / "app.py").write_text(app)
    start(seen, tmp_path, "run", "app.py", "go", "--no-journal")
    seen.wait_for("1 request")
    assert seen.end() == 0
    assert '{"value": [11, 22]}' in seen.text()
    assert seen.text().count("22") == 1


def test_a_run_shows_what_is_in_progress(team: Path, seen: Window):
    """A run shows a spinner with a time and a bar, and does not echo what is typed.

    After Ctrl-C it exits with 130, and the unfinished call's file is gone.
    """
    start(seen, team, "run", "team/half.md", "go")
    seen.wait_for("━━━━━─────────────── 25% at it")
    first = next(line for line in seen.shown().split("\n") if "half_done" in line)
    seen.type("impatient\n")
    while next(line for line in seen.shown().split("\n") if "half_done" in line) == first:
        seen.take(0.05)  # until the spinner moves
    assert not seen.echoes
    seen.type("\x03")
    assert seen.end() == 130
    assert "impatient" not in seen.text()
    assert "■ half_done" in seen.text()
    assert "25%" not in seen.shown()  # the call's row is gone from the screen
    assert not (team / "team/files/half.txt").exists()
    sane(seen)


def test_a_second_ctrl_c_leaves_a_sane_terminal(team: Path, seen: Window):
    """A second Ctrl-C ends the program at once, and the cursor and echo are restored."""
    start(seen, team, "run", "team/deaf.md", "go")
    seen.wait_for("deaf")
    seen.type("\x03")
    seen.wait_for("Cancelling")
    seen.type("\x03")
    assert seen.end() == 130
    sane(seen)


def test_a_terminated_run_leaves_a_sane_terminal(team: Path, seen: Window):
    """SIGTERM cancels a run like Ctrl-C, and the terminal is restored."""
    start(seen, team, "run", "team/half.md", "go")
    seen.wait_for("at it")
    assert seen.child is not None
    seen.child.send_signal(signal.SIGTERM)
    assert seen.end() == 143
    sane(seen)


@pytest.mark.parametrize(
    ("key", "code", "content"), [("y", 0, "new\n"), ("n", 3, "old\n"), ("\x04", 3, "old\n")]
)
def test_a_run_asks(team: Path, seen: Window, key: str, code: int, content: str):
    """Approving a change writes the file. A denial or Ctrl-D does not, and the exit code is then 3."""
    start(seen, team, "run", "team/writer.md", "go")
    seen.wait_for(CHOICE)
    seen.type(key if key == "\x04" else f"{key}\n")
    assert seen.end() == code
    assert (team / "team/files/a.txt").read_text() == content
    sane(seen)


def test_an_approval_for_the_session_is_asked_once_listed_and_forgotten(team: Path, seen: Window):
    """A call that was approved with `e` is not asked about again until `/approvals 1` forgets the decision."""
    start(seen, team, "chat", "team/again.md")
    seen.wait_for(PROMPT)
    seen.type("pay\n")
    seen.wait_for(CHOICE)
    seen.type("e\n")
    seen.wait_for(PROMPT, 2)
    seen.type("pay\n")
    seen.wait_for("Paid, or not.", 2)
    seen.wait_for(PROMPT, 3)
    assert seen.text().count(CHOICE) == 1
    assert "pay: approved: (remembered in this session: exactly pay" in seen.text()
    assert seen.text().count("✓ pay amount=5") == 2
    seen.type("/approvals\n")
    seen.wait_for("1  approved  pay")
    seen.type("/approvals 7\n")
    seen.wait_for("There is no decision 7")
    seen.type("/approvals 1\n")
    seen.wait_for("Forgotten")
    seen.type("/approvals\n")
    seen.wait_for("Nothing is remembered")
    seen.type("pay\n")
    seen.wait_for(CHOICE, 2)
    seen.type("n\n")
    seen.wait_for(PROMPT, 8)
    seen.type("/quit\n")
    assert seen.end() == 0


def test_a_screen_is_still_while_somebody_is_asked(team: Path, seen: Window):
    """If a call ends while a question is shown, its line is written only after the answer."""
    start(seen, team, "run", "team/both.md", "go")
    seen.wait_for(CHOICE)
    before = seen.raw
    (team / "go").touch()
    while not (team / "told").exists():
        seen.take(0.05)  # until the other call has ended
    seen.take(0.5)  # long enough for several redraws of the screen
    assert seen.raw == before
    seen.type("y\n")
    assert seen.end() == 0
    text = seen.text()
    assert text.index(CHOICE) < text.index("✓ later") < text.index("Both.")


def test_undo_is_refused_after_another_change(team: Path, seen: Window):
    """An undo after a later change is refused with the name of the file, and the file keeps its content."""
    start(seen, team, "chat", "team/writer.md")
    seen.wait_for(PROMPT)
    seen.type("write\n")
    seen.wait_for(CHOICE)
    seen.type("y\n")
    seen.wait_for(PROMPT, 2)
    file = team / "team/files/a.txt"
    file.write_text("by hand\n")
    seen.type("/undo\n")
    seen.wait_for(PROMPT, 3)
    refused = seen.text().rpartition("/undo")[2]
    assert "a.txt" in refused
    assert "Undone" not in refused
    assert file.read_text() == "by hand\n"
    seen.type("/quit\n")
    assert seen.end() == 0


def test_a_question_shows_the_path_of_its_asker(team: Path, seen: Window):
    """A question from a nested worker's tool shows the path of calls that led to it."""
    start(seen, team, "run", "team/caller.md", "go")
    seen.wait_for(CHOICE)
    assert "payer › pay" in seen.text()
    seen.type("r\n")
    seen.wait_for("why not:")
    seen.type("not on a Friday\n")
    assert seen.end() == 3
    assert "not on a Friday" in seen.text()


def test_questions_work_on_a_dumb_terminal(team: Path, seen: Window):
    """With TERM=dumb, questions are asked without escape sequences."""
    start(seen, team, "run", "team/picker.md", "go", TERM="dumb")
    seen.wait_for("drink (choose one")
    seen.type("tea\n")
    seen.wait_for("s send (Enter)")
    seen.type("\n")
    assert seen.end() == 0
    assert b"\x1b" not in seen.raw
    assert "Picked." in seen.text()


def test_no_colour_on_a_terminal(team: Path, seen: Window):
    """With `NO_COLOR`, the screen has no colours."""
    start(seen, team, "run", "team/writer.md", "go", NO_COLOR="1")
    seen.wait_for(CHOICE)
    seen.type("n\n")
    seen.end()
    assert not re.search(rb"\x1b\[[0-9;]*3[0-9]", seen.raw)


def test_escape_sequences_of_a_model_are_shown_as_text(team: Path, seen: Window):
    """An escape sequence that a model writes is shown as `\\x1b[31m`, and never reaches the terminal."""
    start(seen, team, "run", "team/hello.md", "go")
    assert seen.end() == 0
    assert "Hello\\x1b[31m there." in seen.text()
    assert b"\x1b[31m there" not in seen.raw
    assert "1 request · 12 tokens in, 3 out · cost unknown" in seen.text()


def test_a_screen_of_size_zero_shows_the_answer(team: Path, seen: Window):
    """With `COLUMNS=0`, which some programs set for their child processes, the answer is still shown."""
    start(seen, team, "run", "team/hello.md", "go", COLUMNS="0", LINES="0")
    assert seen.end() == 0
    assert "there." in seen.text()


def test_chat_survives_ctrl_c_at_its_prompt(team: Path, seen: Window):
    """At the chat's prompt, Ctrl-C prints how to leave, and the chat continues."""
    start(seen, team, "chat", "team/hello.md")
    seen.wait_for(PROMPT)
    seen.type("half a li\x03")
    seen.wait_for("Ctrl-D or /quit leaves.")
    seen.type("one\\\n")
    seen.type("two\n")
    seen.wait_for("there.")
    seen.wait_for(PROMPT, 3)
    seen.type("/help\n")
    seen.wait_for(PROMPT, 4)
    seen.type("/undo\n")
    seen.wait_for("Nothing to undo")
    seen.wait_for(PROMPT, 5)  # a terminal that is not at a prompt turns Ctrl-D into an empty line
    seen.type("\x04")
    assert seen.end() == 0
