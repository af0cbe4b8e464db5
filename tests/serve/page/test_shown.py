"""Tests that people approve exactly what they see. The page, the terminal and AG-UI show the same rows, and the digest of the question."""

from __future__ import annotations

import asyncio
import json
import os
import re
from collections.abc import Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import pytest
from playwright.sync_api import Browser, Locator, Page, expect

from handrail import Adapter, CapabilityPolicy, DirectoryFilesystem, Prompt, ToolCall, ToolContext, tool
from handrail.environment import TerminalEnvironment
from handrail.journal.sqlite import SqliteJournal
from handrail.models.scripted import Scripted
from handrail.question import Question
from handrail.serve.sources import PromptSource
from support.browsers import PATIENCE, browser
from support.served import PlayedModel, Served, said, serving
from support.terminals import window

pytestmark = pytest.mark.once
T = TypeVar("T")
__all__ = ["browser"]

LONG = "".join(f"{number:04} of the terms, " for number in range(600))[:9_990] + "pay Mallory"[:10]
ARGUMENTS = {"amount": 2**53 + 1, "to": "Ann \u200f(nnA)", "note": LONG}
ROWS = [("amount", "9007199254740993"), ("to", r"Ann \u200f(nnA)"), ("note", LONG), ("currency", "NOK")]
"""The rows that show the call: the number is exact, the direction mark is escaped, and the default is included."""


@tool(effect="irreversible")
async def transfer(amount: int, to: str, note: str, currency: str = "NOK") -> str:
    """Transfer money."""
    return f"transferred {amount} to {to}"


@tool(effect="staged", capabilities={"fs.write"})
async def write(path: str, text: str, context: ToolContext) -> str:
    """Write a file."""
    context.filesystem.write(path, text)
    return f"wrote {path}"


@tool(effect="idempotent")
async def delegate(context: ToolContext) -> str:
    """Let another agent write."""
    return (await context.adapter.evaluate(WRITER, "inner")).text


POLICY = CapabilityPolicy({"fs.write": "ask"}, effects={"idempotent": "allow"})
WRITER = Prompt("writer", "Write.", tools=[write], policies=[POLICY])
PROMPT = Prompt("assistant", "Help.", tools=[transfer, write, delegate], policies=[POLICY])
PLAYS: dict[str, list[Scripted]] = {
    "transfer": [said("", ToolCall("transfer", ARGUMENTS)), said("Done.")],
    "twice": [
        said(
            "",
            ToolCall("transfer", {**ARGUMENTS, "note": "1"}),
            ToolCall("transfer", {**ARGUMENTS, "note": "2"}),
        ),
        said("Done."),
    ],
    "write": [said("", ToolCall("write", {"path": "a.txt", "text": "new\n"})), said("Written.")],
    "later": [
        said(
            "",
            ToolCall("write", {"path": "a.txt", "text": "new\n"}),
            ToolCall("write", {"path": ".github/workflows/a.yml", "text": "on: push\n"}),
        ),
        said("Written."),
    ],
    "delegate": [said("", ToolCall("delegate", {})), said("Done.")],
    "inner": [said("", ToolCall("write", {"path": "a.txt", "text": "hidden\u202eword\n"})), said("Written.")],
}


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Served]:
    (tmp_path / "work").mkdir()
    adapter = Adapter(PlayedModel(PLAYS), filesystem=DirectoryFilesystem(tmp_path / "work"))
    with serving(tmp_path, source=PromptSource(PROMPT, adapter)) as served:
        yield served


@pytest.fixture
def page(browser: Browser, server: Served) -> Iterator[Page]:
    context = browser.new_context(viewport={"width": 1000, "height": 900}, reduced_motion="reduce")
    context.set_default_timeout(PATIENCE)
    server.sign_in(context)
    page = context.new_page()
    page.goto(server.url)
    yield page
    context.close()


def say(page: Page, text: str) -> None:
    page.get_by_label("Message", exact=True).fill(text)
    page.locator(".composer").get_by_role("button", name="Send").click()


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine in another thread, because playwright's event loop runs in this one."""
    with ThreadPoolExecutor(1) as threads:
        return threads.submit(asyncio.run, work).result()


def rows_of(question: Locator) -> list[tuple[str, str]]:
    """Return the rows with the whole text of each value, but without the line that counts the folded characters."""
    found: list[tuple[str, str]] = question.locator(".rows > div").evaluate_all(
        "rows => rows.map((row) => [row.querySelector('dt').textContent,"
        " [...row.querySelectorAll('dd bdi')].map((part) => part.textContent).join('')])"
    )
    return [(name, text) for name, text in found]


def open_question(folder: Path) -> Question:
    """Return the open question as another process would read it from the journal."""
    journal = SqliteJournal(folder / "runs.db")
    try:
        return run(_only_question(journal))
    finally:
        journal.close()


async def _only_question(journal: SqliteJournal) -> Question:
    from handrail import runs

    (line,) = [line for line in await runs.list_runs(journal) if line.row.questions]
    (question,) = await journal.questions.open(line.id)
    return question


def drawn(question: Question, columns: int) -> str:
    """Ask the question on a terminal, view it in full, deny it, and return all the text on the terminal."""

    async def ask() -> str:
        with window(columns, 400) as seen, seen.streams() as (stdin, stdout):
            asking = asyncio.ensure_future(TerminalEnvironment(stdin=stdin, stdout=stdout).ask(question))
            await seen.until("your choice, then Enter:")
            seen.type("v\n")
            await seen.until("your choice, then Enter:", 2)
            seen.type("n\n")
            answer = await asking
            assert (answer.value, answer.digest) == ({"approved": False}, question.digest)
            return seen.text()

    return run(ask())


def pane_rows(pane: str, columns: int) -> list[tuple[str, str]]:
    """Return the rows in the terminal's full view. A name follows `├`, and its value continues after `│`."""
    whole = pane[pane.index("your choice, then Enter: v") :]
    rows: list[tuple[str, str]] = []
    indent = 0
    for line in whole.split("\n"):
        if line.startswith("  ├ "):
            name, _, value = line[4:].partition(" ")
            indent = len(line[4:]) - len(value.lstrip())
            rows.append((name, value.lstrip().ljust(columns - 5 - indent)))
        elif line.startswith("  │ ") and rows:
            name, before = rows.pop()
            rows.append((name, before + line[4 + indent :].ljust(columns - 5 - indent)))
    return [(name, value.rstrip()) for name, value in rows]


POST = """async ([path, body]) => {
  const headers = { "Content-Type": "application/json", "Handrail-Key": localStorage.getItem("handrail.key") };
  const response = await fetch(path, { method: "POST", headers, body: JSON.stringify(body) });
  return [response.status, await response.text()];
}"""


def interrupt_of(page: Page) -> dict[str, Any]:
    """Send `transfer` as an AG-UI client does, and return the interrupt that the client gets."""
    message = {"id": "m", "role": "user", "content": "transfer"}
    body = {
        "threadId": "agui", "runId": "r", "messages": [message], "tools": [], "context": [], "state": {},
        "forwardedProps": {},
    }  # fmt: skip
    status, text = page.evaluate(POST, ["agent", body])
    assert status == 200, text
    events = [json.loads(line[5:]) for line in text.splitlines() if line.startswith("data:")]
    (interrupt,) = events[-1]["outcome"]["interrupts"]
    return interrupt


def test_the_page_the_terminal_and_ag_ui_show_the_same(page: Page, server: Served, tmp_path: Path):
    """The page, the terminal and AG-UI show large numbers, direction marks, long texts and defaults in the same way."""
    say(page, "transfer")
    asked = page.get_by_role("group", name="Approval of transfer")
    expect(asked).to_contain_text("9007199254740993")
    question = open_question(tmp_path)
    expected = [(row.name, row.whole) for row in question.rows]
    assert expected == ROWS

    assert rows_of(asked) == ROWS
    expect(asked).to_contain_text(f"digest {question.digest[:16]}")
    expect(asked).to_contain_text("9,400 more characters")
    expect(asked.get_by_text("pay Mallor")).not_to_be_visible()
    assert "9007199254740992" not in page.locator("body").inner_text()
    assert not re.search("[\u200e\u200f\u202a-\u202e\u2066-\u2069]", page.locator("body").inner_text())
    asked.get_by_text("9,400 more characters").click()
    expect(asked.get_by_text("pay Mallor")).to_be_visible()
    asked.get_by_text("9,400 more characters").click()
    if picture := os.environ.get("HANDRAIL_PICTURE"):
        page.screenshot(path=picture, full_page=True)

    pane = drawn(question, 100)
    assert pane_rows(pane, 100) == ROWS
    assert f"digest {question.digest[:16]}" in pane
    assert "└ 9,400 more characters, v to view all" in pane
    if picture:
        Path(picture).with_suffix(".txt").write_text(pane)

    interrupt = interrupt_of(page)
    shown = interrupt["metadata"]["handrail"]
    assert [(row["name"], row["text"] + row.get("rest", "")) for row in shown["rows"]] == ROWS
    assert interrupt["id"].endswith(f"#{shown['digest'][:16]}")
    assert shown["rows"] == [
        {"name": row.name, "text": row.text, **({"rest": row.rest, "folded": row.folded} if row.rest else {})}
        for row in question.rows
    ]


def test_a_nested_call_with_a_diff_shows_its_arguments(page: Page):
    """A nested call's arguments are shown beside its diff, and both show invisible characters as escapes."""
    say(page, "delegate")
    asked = page.get_by_role("group", name="Approval of write")
    expect(asked.locator(".diff")).to_contain_text(r"hidden\u202eword")
    assert rows_of(asked) == [("path", "a.txt"), ("text", r"hidden\u202eword\x0a")]


def test_a_question_that_is_asked_again_says_what_changed(page: Page, tmp_path: Path):
    """If a file changes before the approval takes effect, the new question says above its buttons that its diff is different."""
    say(page, "write")
    asked = page.get_by_role("group", name="Approval of write")
    expect(asked.locator(".diff")).to_contain_text("new")
    expect(asked).not_to_contain_text("You are asked again.")
    (tmp_path / "work" / "a.txt").write_text("old\n")
    asked.get_by_role("button", name="Allow once").click()
    for _ in range(2):
        again = asked.get_by_role("status").filter(has_text="You are asked again.")
        expect(again).to_contain_text("The diff is different.")
        expect(asked.locator(".diff")).to_contain_text("old")
        page.reload()
    asked.get_by_role("button", name="Allow once").click()
    expect(page.get_by_role("log")).to_contain_text("Written.")
    assert (tmp_path / "work" / "a.txt").read_text() == "new\n"


def test_questions_of_one_turn_are_allowed_together_once_each_was_on_screen(page: Page):
    """The first question's head is shown at first. The button for both works after both were on screen, from head to end."""
    page.set_viewport_size({"width": 1000, "height": 420})
    say(page, "twice")
    asked = page.get_by_role("group", name="Approval of transfer")
    expect(asked).to_have_count(2)
    expect(asked.first.get_by_role("heading")).to_be_in_viewport()
    together = page.get_by_role("button", name="Allow these 2 once")
    for question in asked.all():
        expect(
            question.get_by_role("button", name="Allow once")
        ).to_be_enabled()  # the delay of new questions is over
    for question in asked.all():
        expect(together).to_be_disabled()
        for part in (question.get_by_role("heading"), question.get_by_role("button", name="Allow once")):
            part.scroll_into_view_if_needed()
            expect(part).to_be_in_viewport()
    together.click()
    expect(page.get_by_role("log")).to_contain_text("Done.")


def test_a_file_that_runs_later_is_never_allowed_together_with_others(page: Page):
    say(page, "later")
    expect(page.get_by_role("group", name="Approval of write")).to_have_count(2)
    expect(page.get_by_role("group").get_by_text("runs later", exact=True)).to_be_visible()
    expect(page.get_by_role("button", name=re.compile("^Allow these"))).to_have_count(0)


def test_a_held_key_answers_one_question(page: Page, tmp_path: Path):
    """Holding A approves only the question that has the focus. The next question gets the focus, and ignores the held key."""
    say(page, "twice")
    asked = page.get_by_role("group", name="Approval of transfer")
    expect(asked).to_have_count(2)
    asked.first.focus()
    expect(asked.first).to_have_class(re.compile("ready"))
    page.keyboard.down("a")
    expect(asked).to_have_count(1)
    expect(asked).to_be_focused()
    for _ in range(5):
        page.keyboard.down("a")  # the key is not released, so each of these is a repetition
    expect(asked).to_have_class(re.compile("ready"))
    for _ in range(5):
        page.keyboard.down("a")
    page.keyboard.up("a")
    expect(asked).not_to_have_class(re.compile("busy"))
    open_question(tmp_path)
    page.keyboard.press("a")
    expect(page.get_by_role("log")).to_contain_text("Done.")


def test_a_question_that_just_got_the_focus_takes_no_key(page: Page, tmp_path: Path):
    """A question ignores a key that is pressed just as it gets the focus, since that key was not meant for it."""
    say(page, "transfer")
    asked = page.get_by_role("group", name="Approval of transfer")
    expect(asked.get_by_role("button", name="Allow once")).to_be_enabled()
    asked.evaluate(
        "question => { question.focus();"
        " question.dispatchEvent(new KeyboardEvent('keydown', { key: 'a', bubbles: true })); }"
    )
    expect(asked).to_have_class(re.compile("ready"))
    expect(asked).not_to_have_class(re.compile("busy"))
    open_question(tmp_path)


def test_an_answer_names_the_digest_that_was_shown(page: Page, server: Served, tmp_path: Path):
    """An answer with a wrong, shortened or missing digest is refused, and the question stays open."""
    say(page, "transfer")
    expect(page.get_by_role("group", name="Approval of transfer")).to_be_visible()
    thread = page.url.rpartition("/")[2]
    question = open_question(tmp_path)
    for digest in ("", "0" * len(question.digest), question.digest[:16], None):
        answer = {"question_id": question.id, "outcome": "answered", "value": {"approved": True}}
        body = answer if digest is None else {**answer, "digest": digest}
        status, _ = page.evaluate(POST, [f"threads/{thread}/answers", body])
        assert status in (409, 422), (digest, status)
    assert open_question(tmp_path).digest == question.digest
