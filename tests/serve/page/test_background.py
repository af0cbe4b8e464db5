"""Tests of background runs on the page, in a real browser."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Locator, Page, expect

from support.browsers import PATIENCE, browser
from support.researched_app import research, source
from support.served import GATES, serving

pytestmark = pytest.mark.once
__all__ = ["browser"]


@pytest.fixture
def page(browser: Browser, tmp_path: Path) -> Iterator[Page]:
    GATES["wait"].clear()
    with serving(tmp_path, source=source()) as server:
        context = browser.new_context(viewport={"width": 1100, "height": 760}, reduced_motion="reduce")
        context.set_default_timeout(PATIENCE)
        server.sign_in(context)
        page = context.new_page()
        wrong: list[str] = []
        page.on("pageerror", lambda error: wrong.append(str(error.stack)))
        page.goto(server.url)
        page.get_by_label("Message", exact=True).fill("Take me to the sea.")
        page.keyboard.press("Enter")
        expect(page.get_by_role("log")).to_contain_text("waiting at the gate")
        yield page
        GATES["wait"].set()
        context.close()
        assert wrong == []


def rows(page: Page) -> Locator:
    return page.get_by_role("log").locator(".background")


def check_working(page: Page) -> None:
    expect(rows(page)).to_have_text(
        [
            "researcher works in the background: Which trains run?",
            "researcher works in the background: Will it rain?",
            "researcher works in the background: And the boats?",
        ]
    )
    order = page.get_by_role("log").evaluate(
        "log => [...log.querySelectorAll('.card, .background')].map((each) => each.className.split(' ')[0])"
    )
    assert order == ["card", "background"] * 3 + ["card"]


def check_ended(page: Page) -> None:
    """Each begun row says how its run has ended. The long answer is folded, and the keyboard opens it."""
    expect(rows(page)).to_have_count(6)
    begun = [rows(page).nth(at).inner_text() for at in range(3)]
    assert [each.partition(":")[0] for each in begun] == [
        "researcher is done in the background",
        "researcher is done in the background",
        "researcher failed in the background",
    ]
    log = page.get_by_role("log")
    expect(log).to_contain_text("researcher is done: It rains on Friday only.")
    expect(log).to_contain_text("the timetable of the boats is not online")
    long = log.locator("details.background")
    expect(long).to_have_count(1)
    expect(long.get_by_role("table")).to_have_count(0)
    long.locator("summary").focus()
    page.keyboard.press("Enter")
    expect(long.get_by_role("table")).to_have_count(1)
    expect(log.locator(".message.user .said")).to_have_text(["Take me to the sea."])


def test_a_background_run_has_a_row_at_its_call_and_one_at_its_end(page: Page, tmp_path: Path):
    """The rows change in every window without a reload, and are the same after one. No end is shown as the person's words."""
    other = page.context.new_page()
    other.goto(page.url)
    for window in (page, other):
        check_working(window)
    page.reload()
    check_working(page)
    with ThreadPoolExecutor() as pool:  # the browser's loop has this thread
        pool.submit(research, tmp_path).result(PATIENCE)
    GATES["wait"].set()
    for window in (page, other):
        check_ended(window)
    other.reload()
    check_ended(other)
