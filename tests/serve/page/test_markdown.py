"""The page survives unusual Markdown: text that can't be rendered is shown as it was written."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, expect

from handrail import Adapter, Prompt
from handrail.models.scripted import Scripted
from handrail.serve.sources import PromptSource
from support.browsers import PATIENCE, browser
from support.served import PlayedModel, Served, said, serving

pytestmark = pytest.mark.once
__all__ = ["browser"]

TEXTS = {
    "quotes": ">" * 3000,
    "marks": "_a__b" * 15_000,
    "nested": "*a " * 1500 + "a* " * 1500,
    "links": "[a " * 400 + "](b)" * 400,
}
PLAYS: dict[str, list[Scripted]] = {
    **{name: [said(text)] for name, text in TEXTS.items()},
    "boom": [said("This makes boom.")],
    "hello": [said("Hello, **you**.")],
}


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Served]:
    with serving(
        tmp_path, source=PromptSource(Prompt("assistant", "Help."), Adapter(PlayedModel(PLAYS)))
    ) as made:
        yield made


@pytest.fixture
def context(browser: Browser, server: Served) -> Iterator[BrowserContext]:
    made = browser.new_context(reduced_motion="reduce")
    made.set_default_timeout(PATIENCE)
    server.sign_in(made)
    yield made
    made.close()


def say(page: Page, text: str) -> None:
    page.get_by_label("Message", exact=True).fill(text)
    page.locator(".composer").get_by_role("button", name="Send").click()


@pytest.mark.parametrize("name", ["quotes", "marks"])
def test_text_beyond_the_limits_is_shown_as_it_was_written(
    name: str, context: BrowserContext, server: Served
):
    page = context.new_page()
    page.goto(server.url)
    say(page, name)
    expect(page.locator(".unrendered")).to_have_text(TEXTS[name])
    say(page, "hello")
    expect(page.get_by_role("log").locator("strong", has_text="you")).to_be_visible()


@pytest.mark.parametrize("name", ["nested", "links"])
def test_the_page_works_after_deeply_nested_marks(name: str, context: BrowserContext, server: Served):
    page = context.new_page()
    page.goto(server.url)
    say(page, name)
    expect(page.locator(".message.assistant")).to_contain_text("a")
    say(page, "hello")
    expect(page.get_by_role("log").locator("strong", has_text="you")).to_be_visible()


def test_an_entry_that_fails_leaves_the_others(context: BrowserContext, server: Served):
    """A component that throws is replaced by a note, and everything before and after it is still shown."""
    broken = (
        'import { html } from "./vendor/standalone.js";\n'
        "export const safe = (text) => text;\n"
        "export const Markdown = ({ text }) => {\n"
        '  if (text.includes("boom")) throw new Error("boom");\n'
        "  return html`<p>${text}</p>`;\n"
        "};\n"
    )
    context.route("**/markdown.js", lambda route: route.fulfill(body=broken, content_type="text/javascript"))
    page = context.new_page()
    page.goto(server.url)
    say(page, "boom")
    expect(page.get_by_text("This part can't be shown.")).to_be_visible()
    say(page, "hello")
    expect(page.get_by_role("log")).to_contain_text("Hello, **you**.")
    expect(page.get_by_role("log")).to_contain_text("boom")  # the message that was sent
