"""Tests of compacted conversations on the page, in a real browser."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Locator, Page, expect

from handrail import Adapter, Compact, Prompt, ToolCall, tool
from handrail.serve.sources import PromptSource
from support.browsers import PATIENCE, browser
from support.served import serving
from support.windows import Provider, in_turn

pytestmark = pytest.mark.once
__all__ = ["browser"]

SUMMARY = "**Ada** wants a summary of the archive. Pages 1 to 4 were read: *nothing about the flood yet*."


@tool(effect="pure")
async def read_page(page: int) -> str:
    """Read a page of the archive."""
    return f"Page {page} of the archive. " + "It rained, and the river rose. " * 190


@pytest.fixture
def page(browser: Browser, tmp_path: Path) -> Iterator[Page]:
    calls = [ToolCall("read_page", {"page": number}) for number in range(1, 6)]
    answers = in_turn(*calls, "The flood is on page 5.", summary=SUMMARY)
    prompt: Prompt[Any] = Prompt("p", "Be brief.", tools=[read_page], compact=Compact(by="summary"))
    with serving(tmp_path, source=PromptSource(prompt, Adapter(Provider(answers).model))) as server:
        context = browser.new_context(viewport={"width": 1100, "height": 760}, reduced_motion="reduce")
        context.set_default_timeout(PATIENCE)
        server.sign_in(context)
        page = context.new_page()
        wrong: list[str] = []
        page.on("pageerror", lambda error: wrong.append(str(error.stack)))
        page.goto(server.url)
        page.get_by_label("Message", exact=True).fill("Find the flood in the archive.")
        page.keyboard.press("Enter")
        expect(page.get_by_role("log")).to_contain_text("The flood is on page 5.")
        yield page
        context.close()
        assert wrong == []


def compaction(page: Page) -> Locator:
    return page.locator(".compacted")


def check_folded_and_opened(page: Page) -> None:
    """The row is folded. The keyboard opens it, and it shows the summary, what was left out, and the tokens from the cache."""
    row = compaction(page)
    expect(row).to_have_count(1)
    expect(row).to_contain_text("Conversation compacted:")
    expect(row.get_by_text("nothing about the flood yet")).to_have_count(0)
    row.locator("summary").focus()
    page.keyboard.press("Enter")
    expect(row).to_contain_text("3 messages shortened, summarised")
    expect(row.locator("strong")).to_have_text("Ada")
    listed = row.get_by_role("list", name="Sent to the model in short form")
    expect(listed.get_by_role("listitem").first).to_contain_text("Page 1 of the archive.")
    expect(row).to_contain_text("Request for the summary:")
    expect(row).to_contain_text("from the provider’s cache")


def test_a_compaction_is_folded_and_shows_what_was_left_out(page: Page):
    """The row stands between the calls around it, live and after the page is loaded again. What was left out stays in the log."""
    for _ in range(2):
        check_folded_and_opened(page)
        order = page.get_by_role("log").evaluate(
            "log => [...log.querySelectorAll('.card, .compacted')].map((each) => each.className.split(' ')[0])"
        )
        assert sorted(order) == ["card"] * 5 + ["compacted"]
        assert 0 < order.index("compacted") < 5
        expect(page.get_by_role("group", name="read_page, done")).to_have_count(5)
        page.reload()
        expect(page.get_by_role("log")).to_contain_text("The flood is on page 5.")


def test_the_timeline_names_the_turn_before_which_it_was_compacted(page: Page):
    page.get_by_role("tab", name="Timeline").click()
    compacted = page.get_by_role("treeitem", name="compacted before: ")
    expect(compacted).to_have_count(1)
    expect(compacted).to_contain_text("· compacted")
