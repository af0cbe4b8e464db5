"""Tests of the page's list of many threads in a real browser: older threads, search and the keyboard."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect

from handrail import SqliteJournal
from handrail.journal.records import RunCopy, RunRecord, RunRow
from support.browsers import PATIENCE, browser
from support.served import serving
from support.served_threads import begin

pytestmark = pytest.mark.once
__all__ = ["browser"]

MANY = 230
BEGAN = 1_760_000_000.0


async def fill(folder: Path) -> None:
    """Record old threads. The oldest one and every fiftieth after it are about a boat. The newest belongs to another app."""
    journal = SqliteJournal(folder / "runs.db")
    for number in range(MANY + 1):
        about = f"a boat {number}" if number % 50 == 0 else f"about {number}"
        record = RunRecord(
            id=f"run{number}",
            session_id=f"local/t{number}",
            principal="local",
            prompt="assistant" if number < MANY else "clerk",
            model="m",
            began_at=BEGAN + number,
            begin=begin(about),
        )
        row = RunRow(record=record, status="done", changed_at=BEGAN + number)
        await journal.runs.add(RunCopy(row=row))
    journal.close()


@pytest.fixture
def page(browser: Browser, tmp_path: Path) -> Iterator[Page]:
    with ThreadPoolExecutor(1) as apart:  # playwright's event loop runs in the test's thread
        apart.submit(lambda: asyncio.run(fill(tmp_path))).result()
    with serving(tmp_path) as server:
        context = browser.new_context(viewport={"width": 1100, "height": 760}, reduced_motion="reduce")
        context.set_default_timeout(PATIENCE)
        server.sign_in(context)
        page = context.new_page()
        wrong: list[str] = []
        page.on("pageerror", lambda error: wrong.append(str(error.stack)))
        page.goto(server.url)
        yield page
        context.close()
        assert wrong == []


def test_older_threads_come_when_they_are_wanted(page: Page):
    listed = page.get_by_role("navigation", name="Threads").get_by_role("listitem")
    older = page.get_by_role("button", name="Older threads")
    expect(listed).to_have_count(100)
    older.focus()
    page.keyboard.press("Enter")
    expect(listed).to_have_count(200)
    expect(listed.nth(100).get_by_role("link")).to_be_focused()
    older.click()
    expect(listed).to_have_count(MANY)
    expect(older).to_have_count(0)
    expect(listed.nth(200).get_by_role("link")).to_be_focused()
    page.keyboard.press("ArrowUp")
    expect(listed.nth(199).get_by_role("link")).to_be_focused()
    # An event reloads the newest threads, and the older ones stay in the list.
    page.get_by_label("Message", exact=True).fill("show")
    page.keyboard.press("Enter")
    expect(listed).to_have_count(MANY + 1)
    expect(listed.first.get_by_role("link")).to_contain_text("show")
    # A deleted thread leaves the list.
    expect(listed.last.get_by_role("link")).to_contain_text("a boat 0")
    page.get_by_role("button", name="Delete a boat 0", exact=True).click()
    page.get_by_role("button", name="Delete", exact=True).click()
    expect(listed).to_have_count(MANY)


def test_threads_are_found_by_what_they_begin_with(page: Page):
    listed = page.get_by_role("navigation", name="Threads").get_by_role("listitem")
    search = page.get_by_role("searchbox", name="Search threads")
    search.fill("BOAT")
    expect(listed).to_have_count(5)
    expect(listed.last.get_by_role("link")).to_contain_text("a boat 0")
    search.fill("a boat 150")
    expect(listed).to_have_count(1)
    listed.get_by_role("link").click()
    expect(page).to_have_url(re.compile(r"t150$"))
    search.fill("nothing like it")
    expect(
        page.get_by_role("status").filter(has_text="Nothing with these words was said in your threads.")
    ).to_be_visible()
    search.fill("")
    expect(listed).to_have_count(100)


def test_the_address_of_another_apps_thread_says_whose_it_is(page: Page):
    page.goto(f"{page.url.partition('#')[0]}#/t/t{MANY}")
    expect(page.get_by_role("alert")).to_contain_text("it belongs to the prompt 'clerk'. Serve that prompt.")
