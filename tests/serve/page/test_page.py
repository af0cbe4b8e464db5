"""Tests of the page in a real browser with a real server. They find most elements by role and label."""

from __future__ import annotations

import re
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, BrowserContext, Locator, Page, expect

from support.browsers import PATIENCE, browser
from support.damage import unapply
from support.served import GATES, Served, serving, source_in

pytestmark = pytest.mark.once
__all__ = ["browser"]
SIGN_IN: dict[str, str] = {}
"""The default of `sign_in`: the window signs in with a new link."""


class Desk:
    """A server and the windows that show its page. An error or warning in a window fails the test."""

    def __init__(self, browser: Browser, folder: Path) -> None:
        self._browser = browser
        self.folder = folder
        self.wrong: list[str] = []
        self.server: Served | None = None
        self._contexts: list[BrowserContext] = []

    @contextmanager
    def served(self, *, pace: float = 0.0, **options: Any) -> Generator[Served]:
        with serving(self.folder, source=source_in(self.folder, pace=pace), **options) as self.server:
            yield self.server

    def window(
        self,
        at: str = "",
        *,
        size: tuple[int, int] = (1100, 760),
        sign_in: dict[str, str] | None = SIGN_IN,
        **options: Any,
    ) -> Page:
        """Open a window with its own storage. It signs in first, unless `sign_in` is None."""
        assert self.server is not None
        context = self._browser.new_context(
            viewport={"width": size[0], "height": size[1]}, reduced_motion="reduce", **options
        )
        context.set_default_timeout(PATIENCE)
        self._contexts.append(context)
        if sign_in is not None:
            self.server.sign_in(context, **sign_in)
        page = context.new_page()
        page.on("pageerror", lambda error: self.wrong.append(str(error.stack)))
        page.on("console", lambda said: self._hear(said.type, said.text))
        page.goto(f"{self.server.url}/{at}")
        return page

    def close(self) -> None:
        for context in self._contexts:
            context.close()

    def _hear(self, kind: str, text: str) -> None:
        # The browser logs each refused request as an error. Ignore it: the tests check how the page reacts.
        if kind in ("error", "warning") and not text.startswith("Failed to load resource"):
            self.wrong.append(text)


@pytest.fixture
def desk(browser: Browser, tmp_path: Path) -> Iterator[Desk]:
    for gate in ("sheep", "wait"):
        GATES[gate].clear()
    made = Desk(browser, tmp_path)
    yield made
    made.close()
    assert made.wrong == []


@pytest.fixture
def page(desk: Desk) -> Iterator[Page]:
    """Fixture: a window that shows the page of its own server."""
    with desk.served():
        yield desk.window()
        for gate in ("sheep", "wait"):
            GATES[gate].set()
        desk.close()


def say(page: Page, text: str) -> None:
    """Type a message, and send it as soon as the page can send it."""
    page.get_by_label("Message", exact=True).fill(text)
    expect(page.locator(".composer").get_by_role("button", name="Send")).to_be_enabled()
    page.keyboard.press("Enter")


def begin(page: Page) -> None:
    """Start a thread that the page then follows, so that later events arrive live."""
    say(page, "hello")
    expect(log(page)).to_contain_text("Hello to you.")


def log(page: Page) -> Locator:
    return page.get_by_role("log", name="Conversation")


def to_be_at_the_end(page: Page) -> None:
    page.wait_for_function(
        "box => box.scrollHeight - box.scrollTop - box.clientHeight < 60", arg=log(page).element_handle()
    )


def card(page: Page, tool: str) -> Locator:
    return page.get_by_role("group", name=re.compile(rf"^{tool}, "))


def question(page: Page, name: str) -> Locator:
    return page.get_by_role("group", name=name)


def revoke_the_one(page: Page) -> Locator:
    """Revoke the only remembered decision, which is about `pay`, and return the panel, which stays open."""
    choose(page, "Remembered approvals")
    panel = page.get_by_role("dialog", name="Remembered approvals")
    expect(panel.get_by_role("listitem")).to_have_count(1)
    panel.get_by_role("button", name="Revoke pay").click()
    expect(panel).to_contain_text("No decisions are remembered")
    return panel


def choose(page: Page, item: str) -> None:
    """Choose an item of the person's menu."""
    page.get_by_role("button", name="Menu of local").click()
    page.get_by_role("menuitem", name=item).click()


def always(asked: Locator, item: str) -> None:
    """Choose what to allow without asking from now on."""
    asked.get_by_role("button", name="Always…").click()
    asked.get_by_role("menuitem", name=item).click()


def plan(desk: Desk) -> str:
    return (desk.folder / "work" / "plan.md").read_text()


# --- the chat -----------------------------------------------------------------------------------------


def test_a_message_is_answered(page: Page):
    """Enter sends a message and Shift+Enter starts a new line. The log shows the message and the answer."""
    field = page.get_by_label("Message", exact=True)
    expect(field).to_be_focused()
    expect(page.get_by_role("heading", name="assistant", level=1)).to_be_visible()
    field.press_sequentially("hello")
    field.press("Shift+Enter")
    expect(field).to_have_value("hello\n")
    field.press("Enter")
    expect(log(page)).to_contain_text("Hello to you.")
    expect(log(page).get_by_text("hello", exact=True)).to_have_count(1)
    expect(field).to_have_value("")
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    log(page).get_by_text("Hello to you.").hover()
    log(page).get_by_role("button", name="Copy the answer").click()
    assert page.evaluate("navigator.clipboard.readText()") == "Hello to you."


def test_an_empty_page_suggests_messages(page: Page):
    """Without threads, the page has no list and no tabs, but the app's starters. A click sends one."""
    threads = page.get_by_role("navigation", name="Threads")
    expect(threads).to_have_count(0)
    expect(page.get_by_role("tab")).to_have_count(0)
    page.get_by_role("list", name="Suggestions").get_by_role("button", name="hello").click()
    expect(log(page)).to_contain_text("Hello to you.")
    expect(threads.get_by_role("listitem")).to_have_count(1)
    expect(page.get_by_role("tab")).to_have_count(3)


def test_markdown_is_shown_and_nothing_in_it_is_obeyed(page: Page, desk: Desk):
    """Markdown headings, tables, code and links are rendered. Links open in a new tab, without access to the page.

    Scripts, images, forms and script links are not rendered, and nothing is loaded from other sites.
    """
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    say(page, "show")
    expect(log(page)).to_contain_text("That is all.")
    expect(log(page).get_by_role("heading", name="What Markdown can do")).to_be_visible()
    expect(log(page).get_by_role("cell", name="Anna")).to_be_visible()
    expect(log(page).get_by_role("button", name="Copy", exact=True)).to_be_visible()
    link = log(page).get_by_role("link", name="links")
    expect(link).to_have_attribute("rel", re.compile("noopener"))
    expect(link).to_have_attribute("target", "_blank")
    expect(log(page).get_by_role("link", name="bad link")).to_have_count(0)
    assert log(page).locator("img, script, form, input, style, iframe").count() == 0
    expect(log(page)).to_contain_text("<script>window.attacked")  # the text is shown, but not executed
    assert page.evaluate("window.attacked") is None
    assert [url for url in asked if "example.org" in url] == []


def test_it_stays_at_the_end_only_while_the_reader_is_there(desk: Desk):
    """A reader who has scrolled up stays in place while text streams in, and can jump to the newest text."""
    with desk.served(pace=0.01):
        page = desk.window()
        say(page, "long")
        expect(log(page)).to_contain_text("Paragraph 30 of")
        box = log(page)
        to_be_at_the_end(page)
        expect(page.get_by_role("button", name="Newest")).to_have_count(0)
        box.evaluate("box => { box.scrollTop = 40 }")
        expect(page.get_by_role("button", name="Newest")).to_be_visible()
        shown = page.get_by_text("Paragraph 3 of a long story.")
        before = shown.bounding_box()
        height = box.evaluate("box => box.scrollHeight")
        page.wait_for_function(
            "([box, height]) => box.scrollHeight > height + 400", arg=[box.element_handle(), height]
        )
        assert shown.bounding_box() == before
        page.get_by_role("button", name="Newest").click()
        expect(page.get_by_role("button", name="Newest")).to_have_count(0)
        expect(log(page)).to_contain_text("Paragraph 119 of")
        to_be_at_the_end(page)
        desk.close()


def test_a_failed_run_says_so(page: Page):
    """The log says that a run failed, the last message can be sent again, and the thread can continue."""
    say(page, "fail")
    expect(log(page).get_by_role("alert")).to_contain_text("The run failed.")
    again = log(page).get_by_role("button", name="Try again")
    again.click()
    expect(log(page).get_by_role("alert").filter(has_text="The run failed.")).to_have_count(2)
    expect(log(page).get_by_text("fail", exact=True)).to_have_count(2)
    expect(again).to_have_count(1)  # only the last failure can be tried again
    say(page, "hello")
    expect(log(page)).to_contain_text("Hello to you.")


def test_a_run_is_stopped(page: Page):
    """The Stop button and the Escape key each stop a run, and its unfinished calls are marked as cancelled."""
    say(page, "wait")
    expect(card(page, "wait_at")).to_contain_text("running")
    page.get_by_role("button", name="Stop").click()
    expect(log(page)).to_contain_text("Stopped.")
    expect(card(page, "wait_at")).to_contain_text("cancelled")
    say(page, "wait")
    expect(card(page, "wait_at").nth(1)).to_contain_text("running")
    page.keyboard.press("Escape")
    expect(log(page).get_by_text("Stopped.")).to_have_count(2)


# --- cards --------------------------------------------------------------------------------------------


def test_a_call_is_a_card_with_what_it_was_given_and_what_came(page: Page):
    """A call's card shows its arguments, status, progress, time and result, and the page's header shows the cost."""
    begin(page)
    say(page, "sheep")
    sheep = card(page, "count_sheep")
    expect(sheep.get_by_role("progressbar")).to_have_attribute("value", "4")
    expect(sheep).to_contain_text("4 of 8")
    expect(sheep).to_contain_text("running")
    GATES["sheep"].set()
    expect(sheep).to_contain_text("8 sheep")
    expect(sheep).to_contain_text("done")
    expect(sheep.get_by_role("progressbar")).to_have_count(0)
    expect(sheep.get_by_role("definition")).to_have_count(0)
    sheep.get_by_role("button", name=re.compile("^count_sheep 8")).click()
    expect(sheep.get_by_role("definition").first).to_have_text("8")
    expect(sheep.locator("time")).to_have_text(re.compile(r"\d"))
    expect(page.get_by_role("banner")).to_contain_text("$0.0060")


def test_progress_without_an_end_is_shown_too(page: Page):
    """Progress without a total is shown as an indeterminate bar, with its text."""
    begin(page)
    say(page, "wait")
    bar = card(page, "wait_at").get_by_role("progressbar", name="Progress of wait_at")
    expect(bar).to_be_visible()
    assert bar.get_attribute("value") is None
    expect(card(page, "wait_at")).to_contain_text("waiting at the gate")


def test_what_was_rolled_back_is_shown(page: Page, desk: Desk):
    """The card of a call that failed half-way says that it was rolled back."""
    begin(page)
    say(page, "break")
    expect(log(page)).to_contain_text("It failed.")
    broken = card(page, "break_off")
    expect(broken).to_contain_text("failed")
    expect(broken).to_contain_text("Rolled back")
    page.reload()
    expect(broken).to_contain_text("Its changes to files and state were rolled back.")
    assert not (desk.folder / "work" / "half.txt").exists()


FRAMES = """(asked) => {
  const found = [];
  for (let each = asked; !each.matches(".log"); each = each.parentElement) {
    const { borderTopStyle: style, borderTopWidth: width, borderTopColor: color } = getComputedStyle(each);
    if (style === "solid" && width !== "0px" && color !== "rgba(0, 0, 0, 0)") found.push(each.className);
  }
  return found;
}"""
"""Returns the classes of the elements around a question that have a visible border."""


def test_nested_agents_are_a_tree_that_opens(page: Page):
    """A call's card shows the text and calls of its agents. A nested question opens the cards around it."""
    begin(page)
    say(page, "research")
    outer = card(page, "research")
    did = outer.get_by_role("group", name="Activity of researcher")
    expect(did).to_contain_text("I begin with the literature.")
    expect(question(page, "Approval of pay")).to_be_visible()
    expect(question(page, "Approval of pay")).to_contain_text("asked by")
    assert question(page, "Approval of pay").evaluate(FRAMES) == ["card waiting"]
    readers = did.get_by_text("reader", exact=True)
    expect(readers).to_have_count(2)
    question(page, "Approval of pay").get_by_role("button", name="Allow once").click()
    expect(log(page)).to_contain_text("It is known now.")
    expect(outer).to_contain_text("Umbrellas help against rain.")
    expect(did).not_to_be_visible()  # what is done is folded
    outer.get_by_role("button", name=re.compile("^research umbrellas")).click()
    did.get_by_role("button", name=re.compile("^review umbrellas")).click()
    if not did.get_by_text("I read.", exact=True).is_visible():
        readers.first.click()
    expect(did.get_by_text("I read.", exact=True)).to_be_visible()
    expect(outer.get_by_text("Umbrellas help against rain.")).to_have_count(
        1
    )  # its agent said it, so it is no result too
    expect(outer).to_contain_text("$0.01")


def test_a_later_viewer_sees_the_same(page: Page):
    """After a reload in the middle of a run, the page shows the run's progress, agents and questions.

    The run then continues to its end.
    """
    begin(page)
    say(page, "sheep")
    expect(card(page, "count_sheep")).to_contain_text("4 of 8")
    page.reload()
    expect(card(page, "count_sheep")).to_contain_text("4 of 8")
    expect(card(page, "count_sheep")).to_contain_text("running")
    GATES["sheep"].set()
    expect(log(page)).to_contain_text("All counted.")
    expect(log(page).get_by_text("All counted.")).to_have_count(1)
    say(page, "research")
    expect(question(page, "Approval of pay")).to_be_visible()
    page.reload()
    did = card(page, "research").get_by_role("group", name="Activity of researcher")
    expect(did).to_contain_text("I begin with the literature.")
    did.get_by_role("button", name="Allow once").click()
    expect(log(page)).to_contain_text("It is known now.")
    expect(card(page, "research")).to_have_count(1)
    expect(log(page).get_by_text("research", exact=True).first).to_be_visible()


# --- approvals ----------------------------------------------------------------------------------------


def test_a_change_is_approved_after_its_diff_was_seen_and_undone_from_its_card(page: Page, desk: Desk):
    """A person reads a diff and allows the change once. The file changes, and undo in the call's card restores it.

    While the question is open, the title and the list of threads count it. The layout chosen for its diff is
    stored, and the diff in the call's card uses it too.
    """
    say(page, "edit")
    asked = question(page, "Approval of edit_file")
    expect(asked).to_contain_text("see Anna on Monday")
    asked.get_by_role("button", name="Side by side").click()
    assert page.evaluate("localStorage.getItem('handrail.diff')") == "split"
    expect(page).to_have_title(re.compile(r"^\(1\) "))
    expect(page.get_by_role("navigation", name="Threads")).to_contain_text("1 question")
    asked.get_by_role("button", name="Allow once").click()
    expect(log(page)).to_contain_text("It says Monday now.")
    assert "Monday" in plan(desk)
    expect(page).to_have_title("edit")
    edited = card(page, "edit_file")
    expect(edited.get_by_text("see Anna on monday")).to_have_count(0)  # the call is folded into its line
    edited.get_by_role("button", name=re.compile("^edit_file plan.md")).click()
    expect(edited).to_contain_text("see Anna on monday")
    expect(edited.get_by_role("button", name="Side by side")).to_have_attribute("aria-pressed", "true")
    edited.get_by_role("button", name="Undo edit_file").click()
    edited.get_by_role("group", name="Undo edit_file?").get_by_role("button", name="Undo").click()
    expect(edited).to_contain_text("undone")
    assert "monday" in plan(desk)


def test_a_change_is_denied_by_keys_with_a_reason(page: Page, desk: Desk):
    """Alt+Q focuses the question, R asks for a reason, and Enter sends the denial. The call's card shows the reason.

    Keys typed into the message field do not answer the question.
    """
    say(page, "edit")
    expect(question(page, "Approval of edit_file")).to_be_visible()
    page.keyboard.press("a")  # in the message field, A is just a letter
    expect(page.get_by_label("Message", exact=True)).to_have_value("a")
    page.keyboard.press("Alt+q")
    expect(question(page, "Approval of edit_file")).to_be_focused()
    expect(question(page, "Approval of edit_file")).to_have_class(re.compile("ready"))
    page.keyboard.press("r")
    page.get_by_label("Reason (the model sees it)").fill("days are written small here")
    page.keyboard.press("Enter")
    expect(card(page, "edit_file")).to_contain_text("days are written small here")
    expect(card(page, "edit_file")).to_contain_text("denied")
    assert "monday" in plan(desk)
    expect(page.get_by_label("Message", exact=True)).to_be_focused()


def test_what_was_allowed_for_the_session_is_not_asked_again_until_it_is_revoked(page: Page):
    """A call that was allowed for the session is not asked about again until the decision is revoked in the panel."""
    say(page, "pay")
    always(question(page, "Approval of pay"), "Always allow this exact call")
    expect(log(page)).to_contain_text("Paid.")
    say(page, "pay")
    expect(card(page, "pay").nth(1)).to_contain_text("paid 30")
    panel = revoke_the_one(page)
    page.keyboard.press("Escape")
    expect(panel).to_have_count(0)
    say(page, "pay")
    expect(question(page, "Approval of pay")).to_be_visible()


def test_what_was_decided_for_the_session_outlives_the_server(desk: Desk):
    """After a restart, the new server lists an earlier decision, applies it without asking, and can revoke it."""
    with desk.served():
        page = desk.window()
        say(page, "pay")
        always(question(page, "Approval of pay"), "Always allow this exact call")
        expect(log(page)).to_contain_text("Paid.")
        thread = page.url.rpartition("/")[2]
    with desk.served():
        page = desk.window(f"#/t/{thread}")
        expect(log(page)).to_contain_text("Paid.")
        say(page, "pay")
        expect(card(page, "pay").nth(1)).to_contain_text("paid 30")
        revoke_the_one(page)
    with desk.served():
        page = desk.window(f"#/t/{thread}")
        say(page, "pay")
        expect(question(page, "Approval of pay")).to_be_visible()


def test_a_scope_is_allowed(page: Page):
    """A person can allow a scope, and the panel lists this decision."""
    say(page, "edit")
    asked = question(page, "Approval of edit_file")
    always(asked, "fs.write of plan.md")
    expect(log(page)).to_contain_text("It says Monday now.")
    choose(page, "Remembered approvals")
    expect(page.get_by_role("dialog").get_by_role("listitem")).to_contain_text("fs.write of plan.md")


# --- questions ----------------------------------------------------------------------------------------


def test_a_form_is_filled_and_its_errors_stand_beside_its_fields(page: Page):
    """Values that violate the schema or one of the server's own rules are reported beside their fields."""
    say(page, "book")
    asked = page.locator("[data-question]")
    asked.get_by_label("Seats").fill("40")
    asked.get_by_label("Day").fill("2027-03-01")
    asked.get_by_role("button", name="Send").click()
    expect(asked.get_by_label("Seats")).to_have_attribute("aria-invalid", "true")
    asked.get_by_label("Seats").fill("4")
    asked.get_by_role("button", name="Send").click()
    expect(asked).to_contain_text("we are closed on Mondays")
    expect(asked.get_by_label("Day")).to_have_attribute("aria-invalid", "true")
    expect(asked.get_by_label("Seats")).to_have_value("4")
    asked.get_by_label("Day").fill("2027-03-02")
    asked.get_by_label("terrace").check()
    asked.get_by_role("button", name="Send").click()
    expect(card(page, "book_table")).to_contain_text("booked for 4 on 2027-03-02, terrace")


def test_yes_or_no_is_two_buttons(page: Page):
    """A question whose answer is yes or no has a button for each, and no form."""
    say(page, "sure")
    asked = page.locator("[data-question]")
    expect(asked).to_contain_text("Really?")
    expect(asked.locator("form, input")).to_have_count(0)
    asked.get_by_role("button", name="No").click()
    expect(log(page)).to_contain_text("So be it.")
    expect(card(page, "confirm")).to_contain_text("answered False")


def test_a_question_is_declined(page: Page):
    """A question can be declined with a reason, which the call's card shows."""
    say(page, "book")
    asked = page.locator("[data-question]")
    asked.get_by_role("button", name=re.compile("Decline")).click()
    asked.get_by_label(re.compile("Reason")).fill("not today")
    page.keyboard.press("Enter")
    expect(page.locator("[data-question]")).to_have_count(0)
    expect(log(page)).to_contain_text("It is booked.")  # the scripted model continues after any answer
    expect(card(page, "book_table")).to_contain_text("not today")


def test_two_questions_are_answered_one_by_one(page: Page):
    """If one of two questions is answered, the other stays open and keeps what was typed into it."""
    say(page, "book two")
    asked = page.locator("[data-question]")
    expect(asked).to_have_count(2)
    expect(page).to_have_title(re.compile(r"^\(2\) "))
    ben = card(page, "book_table").filter(has_text="Ben")
    anna = card(page, "book_table").filter(has_text="Anna")
    ben.get_by_label("Seats").fill("7")
    anna.get_by_label("Seats").fill("2")
    anna.get_by_label("Day").fill("2027-03-02")
    anna.get_by_role("button", name="Send").click()
    expect(asked).to_have_count(1)
    expect(ben.get_by_label("Seats")).to_have_value("7")
    expect(page).to_have_title(re.compile(r"^\(1\) "))
    ben.get_by_label("Day").fill("2027-03-03")
    ben.get_by_role("button", name="Send").click()
    expect(log(page)).to_contain_text("Both are booked.")
    expect(ben).to_contain_text("booked for 7")


def test_a_question_answered_elsewhere_closes_with_a_word(page: Page, desk: Desk):
    """If a question is answered in one window, the other window shows the outcome, and follows the conversation."""
    say(page, "pay")
    expect(question(page, "Approval of pay")).to_be_visible()
    other = desk.window(page.url.partition("/#")[2] and "#" + page.url.partition("#")[2])
    expect(log(other).get_by_text("pay", exact=True).first).to_be_visible()
    question(other, "Approval of pay").get_by_role("button", name="Deny", exact=False).first.click()
    expect(question(page, "Approval of pay")).to_have_count(0)
    expect(card(page, "pay")).to_contain_text(re.compile("Denied|Answered"))
    say(other, "hello")
    expect(log(page)).to_contain_text("Hello to you.")
    expect(log(page).get_by_text("hello", exact=True)).to_have_count(1)


def test_an_app_brings_its_own_renderer(desk: Desk):
    """The renderer that is registered for a question's name shows the question. If it fails, the form is shown."""
    own = desk.folder / "renderers.js"
    own.write_text(
        'import { html, register } from "../assets/renderers.js";\n'
        'register("colour", ({ question, submit }) =>'
        ' html`<button onClick=${() => submit("green")}>Green, for ${question.payload.question}</button>`);\n'
        'register("table", () => { throw new Error("broken on purpose"); });\n'
    )
    with desk.served(renderers=own):
        page = desk.window()
        say(page, "colour")
        page.get_by_role("button", name="Green, for Which colour?").click()
        expect(card(page, "choose")).to_contain_text("green")
        say(page, "book")
        expect(page.get_by_label("Seats")).to_be_visible()
        assert any("broken on purpose" in text for text in desk.wrong)
        desk.wrong.clear()
        desk.close()


# --- threads ------------------------------------------------------------------------------------------


def test_threads_are_listed_opened_and_forgotten(page: Page):
    """Each thread has a URL, keeps its history after a reload, and disappears from the list when it is deleted."""
    say(page, "hello")
    expect(log(page)).to_contain_text("Hello to you.")
    threads = page.get_by_role("navigation", name="Threads")
    expect(threads.get_by_role("link", name=re.compile("^hello"))).to_be_visible()
    first = page.url
    assert "#/t/" in first
    threads.get_by_role("link", name="New thread").click()
    expect(log(page)).to_contain_text("It plans, books and counts sheep.")
    expect(page.get_by_role("tab")).to_have_count(0)
    expect(page.get_by_label("Message", exact=True)).to_be_focused()
    say(page, "show")
    expect(log(page)).to_contain_text("That is all.")
    assert page.url != first
    threads.get_by_role("link", name=re.compile("^hello")).click()
    expect(log(page)).to_contain_text("Hello to you.")
    assert page.url == first
    page.reload()
    expect(log(page)).to_contain_text("Hello to you.")
    expect(threads.get_by_role("listitem")).to_have_count(2)
    threads.get_by_role("button", name="Delete hello").click()
    threads.get_by_role("button", name="Delete", exact=True).click()
    expect(threads.get_by_role("listitem")).to_have_count(1)
    expect(log(page)).to_contain_text("It plans, books and counts sheep.")


def test_a_change_that_is_not_applied_is_shown(page: Page, desk: Desk):
    """If a recorded change is not in the files, because the folder is gone, the call's card and the Files tab say so."""
    say(page, "edit")
    question(page, "Approval of edit_file").get_by_role("button", name="Allow once").click()
    expect(log(page)).to_contain_text("It says Monday now.")
    expect(card(page, "edit_file")).not_to_contain_text("not applied")
    unapply(desk.folder / "runs.db")
    (desk.folder / "work").rename(desk.folder / "away")
    page.reload()
    edited = card(page, "edit_file")
    expect(edited).to_contain_text("not applied")
    expect(edited).to_contain_text("These changes are recorded, but not in the files")
    expect(edited.get_by_role("button", name="Undo")).to_have_count(0)
    page.get_by_role("tab", name="Files").click()
    panel = page.get_by_role("tabpanel")
    expect(panel.get_by_text("Not applied", exact=True)).to_be_visible()
    expect(panel.get_by_role("button", name="Undo")).to_have_count(0)
    expect(page.locator("body")).not_to_contain_text(str(desk.folder))


def test_files_and_timeline_are_tabs(page: Page, desk: Desk):
    """The arrow keys move between the tabs. The Files tab can undo a change, and the Timeline tab shows the run."""
    say(page, "edit")
    question(page, "Approval of edit_file").get_by_role("button", name="Allow once").click()
    expect(log(page)).to_contain_text("It says Monday now.")
    page.get_by_role("tab", name="Chat").focus()
    page.keyboard.press("ArrowRight")
    expect(page.get_by_role("tab", name="Files")).to_have_attribute("aria-selected", "true")
    expect(page.get_by_role("tab", name="Files")).to_be_focused()
    panel = page.get_by_role("tabpanel")
    expect(
        panel.get_by_role("group", name="Changed files").get_by_role("button", name="plan.md changed")
    ).to_be_visible()
    panel.get_by_role("button", name=re.compile("Undo")).first.click()
    panel.get_by_role("button", name=re.compile("Undo|Yes")).first.click()
    expect(panel).to_contain_text(re.compile("undone", re.IGNORECASE))
    assert "monday" in plan(desk)
    page.keyboard.press("Escape")
    page.get_by_role("tab", name="Timeline").click()
    expect(page.get_by_role("tabpanel")).to_contain_text("edit_file")
    page.get_by_role("treeitem").first.click()
    expect(page.get_by_role("dialog")).to_contain_text(
        re.compile("Trace *[0-9a-f]{32}.*A person wrote *edit")
    )
    page.reload()
    expect(page.get_by_role("tab", name="Timeline")).to_have_attribute("aria-selected", "true")


# --- the connection -----------------------------------------------------------------------------------


def test_a_server_that_comes_back_is_followed_again_and_its_question_still_stands(desk: Desk):
    """While the connection is lost, the conversation stays visible. After a restart, the open question can still be answered."""
    with desk.served() as server:
        page = desk.window()
        say(page, "pay")
        expect(question(page, "Approval of pay")).to_be_visible()
        port = server.port
    expect(page.get_by_text("Reconnecting…")).to_be_visible()
    expect(log(page)).to_contain_text("pay is irreversible")
    with desk.served(port=port):
        expect(page.get_by_text("Reconnecting…")).to_have_count(0)
        question(page, "Approval of pay").get_by_role("button", name="Allow once").click()
        expect(log(page)).to_contain_text("Paid.")
        expect(log(page).get_by_text("pay", exact=True).first).to_be_visible()
        expect(card(page, "pay")).to_have_count(1)
        desk.close()


def test_a_link_opens_the_page_once_and_a_token_opens_it_too(desk: Desk):
    """A sign-in link works once and is removed from the URL. The right token opens the page, and a wrong one is refused.

    Signing out or losing the cookie ends the session.
    """
    with desk.served(token="a-long-enough-token-for-this") as server:
        page = desk.window(sign_in=None)
        page.get_by_label("Token").fill("wrong")
        page.keyboard.press("Enter")
        expect(page.get_by_role("alert")).to_be_visible()
        page.get_by_label("Token").fill("a-long-enough-token-for-this")
        page.keyboard.press("Enter")
        say(page, "hello")
        expect(log(page)).to_contain_text("Hello to you.")
        link = f"#link={server.app.principals.new_link()}"
        linked = desk.window(link, sign_in=None)
        expect(linked.get_by_label("Message", exact=True)).to_be_visible()
        assert "link" not in linked.url
        expect(linked.get_by_role("navigation", name="Threads")).to_contain_text("hello")
        expect(desk.window(link, sign_in=None).get_by_role("alert")).to_contain_text("has already been used")
        linked.reload()
        choose(linked, "Sign out")
        expect(linked.get_by_label("Token")).to_be_visible()
        linked.reload()
        expect(linked.get_by_label("Token")).to_be_visible()
        page.context.clear_cookies()
        say(page, "hello")
        expect(page.get_by_label("Token")).to_be_visible()
        desk.close()


def test_a_server_that_does_not_answer_is_reported_and_tried_again(page: Page):
    """While the server does not answer, the page says so. Once it answers, the Try again button opens the page."""
    page.route("**/about", lambda route: route.abort())
    page.reload()
    expect(page.get_by_role("alert")).to_contain_text("The server is not responding")
    page.unroute("**/about")
    page.get_by_role("button", name="Try again").click()
    expect(page.get_by_label("Message", exact=True)).to_be_visible()


# --- themes, widths and keyboard ----------------------------------------------------------------------


def test_the_theme_is_chosen_and_kept(desk: Desk):
    """The theme is the system's until another is chosen, and the choice survives a reload."""
    with desk.served():
        page = desk.window(color_scheme="dark")
        shade = "getComputedStyle(document.body).backgroundColor"
        menu = page.get_by_role("button", name="Menu of local")
        chosen = page.get_by_role("menuitemradio", checked=True)
        menu.click()
        expect(chosen).to_have_text("System theme")
        dark = page.evaluate(shade)
        page.get_by_role("menuitemradio", name="Light theme").click()
        expect(chosen).to_have_text("Light theme")
        light = page.evaluate(shade)
        assert light != dark
        page.reload()
        menu.click()
        expect(chosen).to_have_text("Light theme")
        assert page.evaluate(shade) == light
        desk.close()


def test_at_phone_width_threads_are_a_sheet_and_nothing_is_wider_than_the_screen(desk: Desk):
    """On a phone, threads are in a sheet that closes on Escape or when a thread is chosen, and nothing is wider than the screen."""
    with desk.served():
        page = desk.window(size=(360, 740))
        say(page, "edit")
        expect(question(page, "Approval of edit_file")).to_be_visible()
        assert page.evaluate("document.documentElement.scrollWidth") <= 360
        assert log(page).evaluate("box => box.scrollWidth <= box.clientWidth")
        page.get_by_role("button", name=re.compile("^Threads")).click()
        sheet = page.get_by_role("dialog", name="Threads")
        expect(sheet.get_by_role("link", name=re.compile("^edit"))).to_be_visible()
        page.keyboard.press("Escape")
        expect(sheet).to_have_count(0)
        page.get_by_role("button", name=re.compile("^Threads")).click()
        sheet.get_by_role("link", name="New thread").click()
        expect(sheet).to_have_count(0)
        expect(log(page)).to_contain_text("It plans, books and counts sheep.")
        desk.close()


def to_the_top(page: Page) -> None:
    """Move the focus to the beginning of the page, so that the Tab key reaches its first control."""
    page.evaluate(
        "document.body.tabIndex = -1; document.body.focus(); document.body.removeAttribute('tabindex')"
    )


def test_what_is_only_read_aloud_does_not_lengthen_the_page(desk: Desk):
    """Text for screen readers does not make the page taller than the window."""
    with desk.served():
        page = desk.window(size=(1100, 420))
        say(page, "book two")
        expect(page.get_by_role("button", name="Send")).to_have_count(2)
        assert page.evaluate("document.documentElement.scrollHeight - innerHeight") == 0
        desk.close()


def test_a_malformed_address_opens_a_new_thread(desk: Desk):
    """A malformed address, which a model may have written, opens a new thread."""
    with desk.served():
        for address in ("#/t/%E0%A4", "#link=%E0%A4"):
            page = desk.window(address)
            begin(page)
        desk.close()


def test_the_keyboard_reaches_everything_in_order(page: Page):
    """The Tab key reaches the skip link first, and then the page's main controls."""
    begin(page)
    expect(page.get_by_label("Message", exact=True)).to_be_focused()
    to_the_top(page)
    page.keyboard.press("Tab")
    skip = page.get_by_role("link", name="Skip to the message field")
    expect(skip).to_be_focused()
    expect(skip).to_be_in_viewport()
    page.keyboard.press("Enter")
    expect(page.get_by_label("Message", exact=True)).to_be_focused()
    reached: list[str] = []
    to_the_top(page)
    for _ in range(14):
        page.keyboard.press("Tab")
        now = "document.activeElement"
        reached.append(page.evaluate(f"{now}.getAttribute('aria-label') || {now}.innerText || {now}.id"))
    for name in ("New thread", "Menu of local", "Chat", "Conversation"):
        assert any(name in each for each in reached), (name, reached)
