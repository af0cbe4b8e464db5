"""The page survives unusual Markdown: text that can't be rendered is shown as it was written."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, expect

from handrail import Adapter, Prompt, ToolCall, tool
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
WHOLE = """diff --git a/plan.md b/plan.md
index 83db48f..bf269f4 100644
--- a/plan.md
+++ b/plan.md
@@ -1,2 +1,2 @@
 The plan:
-monday
+Monday
"""
SHAPES = f"""The \\(a_1 \\cdot b_1\\) of $x*y*z$ costs $5 **in all**.

3. third

| name | price |
|:-----|------:|
| tea  |  2.50 |

```diff
{WHOLE}```

```diff
@@ somewhere @@
-old
+new <b>text</b>
```
"""
FOUND = {"big": 12345678901234567890, "who": {"name": "<i>Ann</i>"}, "list": [*range(250)], "none": []}


@tool(effect="read")
async def look() -> str:
    """Return JSON."""
    return json.dumps(FOUND)


PLAYS: dict[str, list[Scripted]] = {
    **{name: [said(text)] for name, text in TEXTS.items()},
    "boom": [said("This makes boom.")],
    "hello": [said("Hello, **you**.")],
    "shapes": [said(SHAPES)],
    "look": [said("", ToolCall("look", {})), said("Seen.")],
}


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Served]:
    with serving(
        tmp_path, source=PromptSource(Prompt("assistant", "Help.", tools=[look]), Adapter(PlayedModel(PLAYS)))
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


def test_diffs_tables_and_formulas_keep_their_shape(context: BrowserContext, server: Served):
    """A whole diff is drawn as one, another one as its lines. A table is aligned, and the keyboard scrolls it. Formulas are as written."""
    page = context.new_page()
    page.goto(server.url)
    say(page, "shapes")
    prose = page.locator(".message.assistant .prose")
    expect(prose.locator("p").first).to_have_text(r"The \(a_1 \cdot b_1\) of $x*y*z$ costs $5 in all.")
    expect(prose.locator("ol")).to_have_attribute("start", "3")
    table = page.get_by_role("region", name="Table")
    price = table.get_by_role("cell", name="2.50")
    assert price.evaluate("(cell) => getComputedStyle(cell).textAlign") == "right"
    table.focus()
    expect(table).to_be_focused()
    drawn, lines = page.locator("figure.code").all()
    expect(drawn.locator(".diff-sum")).to_have_text("1 file, 1 line added, 1 removed")
    assert drawn.locator("td").first.evaluate("(cell) => getComputedStyle(cell).borderWidth") == "0px"
    expect(drawn.locator("tr.is-added .diff-text")).to_have_text("Monday")
    expect(lines.locator(".diff")).to_have_count(0)
    expect(lines.locator(".is-added")).to_have_text("+new <b>text</b>")
    expect(lines.locator(".is-removed")).to_have_text("-old")


def test_a_result_in_json_is_a_tree(context: BrowserContext, server: Served):
    """The keyboard opens its parts, long lists come in pages, and the text is one click away."""
    page = context.new_page()
    page.goto(server.url)
    say(page, "look")
    expect(page.get_by_text("Seen.")).to_be_visible()
    page.get_by_role("button", name="look").click()
    result = page.locator(".result")
    expect(result.locator("> .tree > li").first).to_have_text("big 12345678901234567890")
    expect(result.locator("> .tree > li").nth(3)).to_contain_text("0 items")
    result.locator("summary", has_text="who").press("Enter")
    expect(result.get_by_text("<i>Ann</i>")).to_be_visible()
    result.locator("summary", has_text="list").press("Enter")
    expect(result.locator(".tree .tree li")).to_have_count(1 + 101)
    result.get_by_role("button", name="150 more").click()
    expect(result.locator(".tree .tree li")).to_have_count(1 + 201)
    result.get_by_role("button", name="As text").click()
    expect(result.locator("pre")).to_have_text(json.dumps(FOUND))
    result.get_by_role("button", name="As a tree").click()
    expect(result.get_by_text("12345678901234567890")).to_be_visible()
