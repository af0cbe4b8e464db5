"""Tests of saying something to a run while it works, on the page in a real browser."""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import Locator, Page, expect

from serve.page.test_page import Desk, begin, card, desk, log, page, question, say
from support.browsers import browser
from support.served import GATES

pytestmark = pytest.mark.once
__all__ = ["browser", "desk", "page"]


def field(page: Page) -> Locator:
    return page.get_by_label("Message", exact=True)


def tray(page: Page) -> Locator:
    return page.get_by_role("region", name="Messages that wait")


def rows(page: Page) -> Locator:
    return tray(page).get_by_role("listitem")


def steer(page: Page, text: str, when: str = "next step") -> None:
    """Say something to the run that works, with the keyboard, and wait until it is accepted."""
    page.locator(".composer").get_by_label("When the model is told").select_option(when)
    field(page).fill(text)
    expect(page.get_by_role("button", name="Say it")).to_be_enabled()
    field(page).press("Enter")
    expect(rows(page).filter(has_text=text)).to_have_count(1)
    expect(field(page)).to_have_value("")


def work(page: Page) -> None:
    """Start a run that works until the gate `wait` opens."""
    say(page, "wait")
    expect(card(page, "wait_at")).to_contain_text("waiting at the gate")


def users(page: Page) -> list[str]:
    return log(page).locator(".message.user .said").all_inner_texts()


def test_what_is_typed_while_a_run_works_waits_in_every_window_and_is_then_told(page: Page):
    """It can be edited and withdrawn with the keyboard, in each window, also after a reload. It moves into the conversation when told."""
    work(page)
    other = page.context.new_page()
    other.goto(page.url)
    steer(page, "hullo")
    steer(page, "hurry")
    steer(other, "show", "afterwards")
    for window in (page, other):
        expect(rows(window)).to_have_count(3)
        expect(rows(window).last).to_contain_text("Afterwards")
    rows(other).first.get_by_role("button", name="Edit: hullo").focus()
    other.keyboard.press("Enter")
    expect(other.get_by_label("Edit the message")).to_be_focused()
    other.keyboard.press("Control+a")
    other.keyboard.type("hello")
    other.keyboard.press("Enter")
    expect(rows(other).first.get_by_role("button", name="Edit: hello")).to_be_focused()
    page.get_by_role("button", name="Withdraw: hurry").press("Enter")
    expect(field(page)).to_be_focused()
    for window in (page, other):
        expect(rows(window)).to_have_count(2)
        expect(rows(window).first).to_contain_text("hello (edited)")
    page.reload()
    expect(rows(page)).to_have_count(2)
    expect(rows(page).first).to_contain_text("hello (edited)")
    GATES["wait"].set()
    for window in (page, other):
        expect(log(window)).to_contain_text("That is all.")
        expect(tray(window)).to_have_count(0)
        assert users(window) == ["wait", "hello", "show"]
        expect(page.get_by_role("button", name="Send")).to_be_visible()
    page.reload()
    expect(log(page)).to_contain_text("That is all.")
    assert users(page) == ["wait", "hello", "show"]


def test_what_is_said_for_now_stops_the_answer_and_keeps_its_text(desk: Desk):
    with desk.served(pace=0.01):
        page = desk.window()
        say(page, "long")
        expect(log(page)).to_contain_text("Paragraph 5 of")
        page.locator(".composer").get_by_label("When the model is told").select_option("now")
        field(page).fill("hello")
        field(page).press("Enter")
        expect(log(page)).to_contain_text("Hello to you.")
        expect(log(page)).to_contain_text("Paragraph 5 of")
        expect(log(page)).not_to_contain_text("Paragraph 119 of")
        assert users(page) == ["long", "hello"]
        page.reload()
        expect(log(page)).to_contain_text("Hello to you.")
        expect(log(page)).to_contain_text("Paragraph 5 of")
        desk.close()


def test_an_edit_that_comes_too_late_says_so_and_keeps_the_text(page: Page):
    """The text can then be sent as a new message, which starts a run if this one is over."""
    work(page)
    steer(page, "hullo")
    page.get_by_role("button", name="Edit: hullo").click()
    editor = page.get_by_label("Edit the message")
    editor.fill("hello")
    GATES["wait"].set()
    expect(tray(page).get_by_role("alert")).to_contain_text("The model was told before you saved.")
    expect(editor).to_have_value("hello")
    expect(log(page)).to_contain_text("what to do about: hullo")
    editor.press("Enter")
    expect(log(page)).to_contain_text("Hello to you.")
    expect(tray(page)).to_have_count(0)
    expect(field(page)).to_be_focused()


def test_a_message_or_an_edit_that_is_not_accepted_keeps_its_text(page: Page):
    """The error is shown beside it, and sending it again works."""
    work(page)
    steer(page, "hullo")
    page.get_by_role("button", name="Edit: hullo").click()
    editor = page.get_by_label("Edit the message")
    editor.fill("hello")
    page.context.set_offline(True)
    editor.press("Enter")
    expect(tray(page).get_by_role("alert")).to_contain_text("The server is not responding.")
    expect(editor).to_have_value("hello")
    field(page).fill("show")
    field(page).press("Enter")
    expect(page.locator(".composer").get_by_role("alert")).to_contain_text("The server is not responding.")
    expect(field(page)).to_have_value("show")
    page.context.set_offline(False)
    field(page).press("Enter")
    expect(rows(page)).to_have_count(2)
    editor.press("Escape")
    expect(rows(page).first).to_contain_text("hullo")
    expect(card(page, "wait_at")).to_contain_text(
        "waiting at the gate"
    )  # Escape in the tray does not stop the run
    GATES["wait"].set()
    expect(log(page)).to_contain_text("I do not know what to do about: hullo show")
    assert users(page) == ["wait", "hullo\n\nshow"]


def test_a_run_that_waits_for_an_answer_is_told_afterwards(page: Page):
    """The message field and the tray say so, and answering goes on as usual."""
    say(page, "pay")
    asked = question(page, "Approval of pay")
    expect(asked).to_be_visible()
    expect(field(page)).to_have_accessible_description(re.compile("told after the open question is answered"))
    steer(page, "hello")
    expect(tray(page)).to_contain_text("1 message waits to be told after your answer")
    asked.get_by_role("button", name="Allow once").click()
    expect(log(page)).to_contain_text("Hello to you.")
    expect(card(page, "pay")).to_contain_text("paid 30")
    assert users(page) == ["pay", "hello"]


def order(page: Page, words: str) -> None:
    """Give the run an order from the menu, with the keyboard."""
    page.get_by_role("button", name="Pause or wrap up").press("Enter")
    expect(page.get_by_role("menuitem").first).to_be_focused()
    for _ in range(5):
        if page.get_by_role("menuitem", name=words).evaluate("item => item === document.activeElement"):
            break
        page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    expect(page.get_by_role("menu")).to_have_count(0)


def test_a_run_is_paused_and_continued(page: Page):
    """The order waits in the tray, where it can be withdrawn. A paused run asks in every window, also after a reload."""
    begin(page)
    work(page)
    order(page, "Stop after this step")
    expect(rows(page)).to_contain_text("Stop after this step")
    page.get_by_role("button", name="Withdraw: Stop after this step").click()
    expect(tray(page)).to_have_count(0)
    order(page, "Pause before the next step")
    expect(rows(page)).to_contain_text("Pause before the next step")
    other = page.context.new_page()
    other.goto(page.url)
    expect(rows(other)).to_contain_text("Pause before the next step")
    GATES["wait"].set()
    for window in (page, other):
        expect(question(window, "The run is paused")).to_be_visible()
        expect(tray(window)).to_have_count(0)
    other.reload()
    page.get_by_role("button", name="Pause or wrap up").click()
    expect(page.get_by_role("menuitem")).to_have_count(2)
    page.keyboard.press("Escape")
    expect(page.get_by_role("button", name="Pause or wrap up")).to_be_focused()
    question(other, "The run is paused").get_by_role("button", name="Continue").click()
    for window in (page, other):
        expect(log(window)).to_contain_text("I waited.")
        expect(question(window, "The run is paused")).to_have_count(0)


@pytest.mark.parametrize(
    ("words", "said", "end"),
    [("Wrap up in one last turn", 1, "Told to finish"), ("Stop here", 0, "Stopped after its step")],
)
def test_a_paused_run_is_wrapped_up_or_stopped(page: Page, words: str, said: int, end: str):
    """The log says how the run ended, also after a reload. What it has done stays, and the thread can then continue."""
    work(page)
    order(page, "Pause before the next step")
    expect(rows(page)).to_have_count(1)
    GATES["wait"].set()
    question(page, "The run is paused").get_by_role("button", name=words).click()
    expect(page.get_by_role("button", name="Send")).to_be_visible()
    expect(card(page, "wait_at")).to_contain_text("done")
    answers = log(page).locator(".message.assistant")
    expect(answers).to_have_count(1 + said)
    expect(log(page)).to_contain_text(end)
    page.reload()
    expect(card(page, "wait_at")).to_contain_text("done")
    expect(log(page)).to_contain_text(end)
    expect(answers).to_have_count(1 + said)
    say(page, "hello")
    expect(log(page)).to_contain_text("Hello to you.")


def test_nothing_jumps(page: Page):
    """The button that sends, and what a reader looks at who has scrolled up, stay in place when a run starts and messages come and go."""
    begin(page)
    say(page, "long")
    expect(log(page)).to_contain_text("Paragraph 119 of")
    send = page.locator(".composer .send:not(.stop)")
    expect(page.get_by_role("button", name="Send")).to_be_visible()
    before = send.bounding_box()
    work(page)
    log(page).evaluate("box => { box.scrollTop = 40 }")
    expect(page.get_by_role("button", name="Newest")).to_be_visible()
    read = page.get_by_text("Paragraph 3 of a long story.")
    place = read.bounding_box()
    assert send.bounding_box() == before
    steer(page, "hello")
    assert (read.bounding_box(), send.bounding_box()) == (place, before)
    GATES["wait"].set()
    expect(tray(page)).to_have_count(0)
    expect(page.get_by_role("button", name="Send")).to_be_visible()
    assert (read.bounding_box(), send.bounding_box()) == (place, before)


def test_a_narrow_window_shows_the_tray_without_scrolling_sideways(desk: Desk):
    with desk.served():
        page = desk.window(size=(360, 640))
        work(page)
        steer(page, "a message with " + "averylongword" * 12)
        page.get_by_role("button", name="Edit: a message").click()
        expect(page.get_by_label("Edit the message")).to_be_focused()
        for part in (tray(page), page.locator(".composer .field")):
            box = part.bounding_box()
            assert box is not None
            assert box["x"] >= 0
            assert box["x"] + box["width"] <= 360
        GATES["wait"].set()
        desk.close()
