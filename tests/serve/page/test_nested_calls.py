"""Tests that the page shows events, failures and people's answers with the nested calls that they belong to."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect

from handrail import (
    Adapter,
    Agent,
    CapabilityPolicy,
    Handoff,
    MemoryFilesystem,
    Prompt,
    Tool,
    ToolCall,
    ToolContext,
    gather,
    tool,
)
from handrail.models.scripted import Scripted
from handrail.question import Markdown
from handrail.serve.sources import PromptSource
from support.browsers import PATIENCE, browser
from support.served import PlayedModel, said, serving

pytestmark = pytest.mark.once
__all__ = ["browser"]


@dataclass(frozen=True)
class Found:
    """An event that a tool emits."""

    topic: str
    pages: int


@dataclass(frozen=True)
class Visit:
    """The arguments of a handoff."""

    street: str
    terms: Markdown = "Bring **no** dogs."


@tool(effect="read")
async def search(topic: str, context: ToolContext) -> str:
    """Search for a topic."""
    for pages in (1, 2):
        context.emit(Found(topic, pages))
        await asyncio.sleep(0)
    return topic


@tool(effect="staged", capabilities={"fs.write"})
async def note(text: str, context: ToolContext) -> str:
    """Write a note, then fail."""
    context.filesystem.write("note.txt", text)
    raise ValueError("the pencil broke")


@tool(effect="irreversible", capabilities={"money"})
async def pay(amount: int) -> str:
    """Pay."""
    return "paid"


@tool(effect="irreversible")
async def research(context: ToolContext) -> str:
    """Search twice at once, write a note and pay."""
    await gather(context.call("search", topic="tea"), context.call("search", topic="rum"))
    await context.call("note", text="tea")
    await context.call("pay", amount=3)
    return "done all the same"


book = Handoff("book", "Ask when we may come.", params=Visit, effect="staged")


@book.client
async def ask(visit: Visit, *, context: ToolContext) -> str:
    """Ask a person."""
    assert context.wait_for is not None
    return await context.wait_for("visit", visit, message="When shall we come?", title="Your visit")


def desk(topic: str) -> Tool[Any, Any]:
    """Return a tool whose agent searches for this topic."""
    plays = {"go": [said("", ToolCall("search", {"topic": topic})), said("Found.")]}
    return Agent(
        PlayedModel(plays), "Search.", name=f"{topic}_desk", description=f"Knows {topic}.", tools=[search]
    ).as_tool()


POLICY = CapabilityPolicy({"money": "deny"}, effects={"irreversible": "allow"})
PROMPT = Prompt(
    "assistant",
    "Help.",
    tools=[research, search, note, pay, book, desk("tea"), desk("rum")],
    policies=[POLICY],
)
PLAYS: dict[str, list[Scripted]] = {
    "hello": [said("Good day.")],
    "research": [said("", ToolCall("research", {}), ToolCall("search", {"topic": "gin"})), said("Done.")],
    "desks": [
        said("", ToolCall("tea_desk", {"message": "go"}), ToolCall("rum_desk", {"message": "go"})),
        said("Both."),
    ],
    "book": [said("", ToolCall("book", {"street": "Main St"})), said("Booked.")],
}


@pytest.fixture
def page(browser: Browser, tmp_path: Path) -> Iterator[Page]:
    """Fixture: the page of a server that has the tools above."""
    adapter = Adapter(PlayedModel(PLAYS), filesystem=MemoryFilesystem())
    with serving(tmp_path, source=PromptSource(PROMPT, adapter)) as server:
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


def shoot(page: Page, name: str) -> None:
    """Take a screenshot if $HANDRAIL_SHOTS names a folder."""
    folder = os.environ.get("HANDRAIL_SHOTS")
    if folder:
        page.screenshot(path=Path(folder) / f"{name}.png", full_page=True)


def test_nested_calls_show_their_events_and_why_they_failed(page: Page) -> None:
    """Concurrent calls' events are shown separately.

    A nested call that failed or was denied shows why. After a reload, the page shows the same.
    """
    say(page, "hello")  # from now on, the page follows the thread
    expect(page.get_by_text("Good day.")).to_be_visible()
    say(page, "research")
    expect(page.get_by_text("Done.")).to_be_visible()
    card = page.locator(".card").filter(has=page.locator(".call-name code", has_text="research"))
    inside = card.locator(".inner")
    other = page.locator(".card").filter(has=page.locator(".call-name code", has_text=re.compile("^search$")))
    for name in ("two-agents-emitting", "two-agents-reloaded"):
        expect(inside).to_have_count(4)
        assert [each.locator("li").all_text_contents() for each in inside.all()[:2]] == [
            ["Found topic: tea, pages: 1", "Found topic: tea, pages: 2"],
            ["Found topic: rum, pages: 1", "Found topic: rum, pages: 2"],
        ]
        expect(other.locator(".emitted li")).to_have_text(
            ["Found topic: gin, pages: 1", "Found topic: gin, pages: 2"]
        )
        shoot(page, name)
        failed, denied = (card.locator(".inner").filter(has_text=name) for name in ("note", "pay"))
        expect(failed).to_contain_text("the pencil broke")
        expect(failed).to_contain_text("Rolled back")
        expect(denied).to_contain_text("pay")
        expect(denied.locator(".reason")).not_to_be_empty()
        page.reload()
        expect(page.get_by_text("Done.")).to_be_visible()


def test_a_closed_agent_shows_its_newest_event(page: Page) -> None:
    """An agent's branch shows all its events when open, and only the newest one, in its summary, when closed."""
    say(page, "desks")
    expect(page.get_by_text("Both.")).to_be_visible()
    page.reload()  # branches of agents that have ended are closed at first
    cards = page.locator(".log .card").filter(has=page.locator(".agents"))
    line = "> .call-line > "
    newest = ["Found topic: tea, pages: 2", "Found topic: rum, pages: 2"]
    expect(cards.locator(f"{line}.newest-event")).to_have_text(newest)
    expect(cards.locator(f"{line}.newest-event").first).to_be_in_viewport()
    shoot(page, "two-agents-closed")
    for each in cards.all():
        each.locator(f"{line}.call-name").click()
        each.locator(".branch .call-name").click()
        expect(each.locator(".emitted li").first).to_be_visible()
        expect(each.locator(".emitted li")).to_have_count(2)
        expect(each.locator(f"{line}.newest-event")).to_have_count(0)
    shoot(page, "two-agents-open")
    for each in cards.all():
        each.locator(f"{line}.call-name").click()
    expect(cards.locator(f"{line}.newest-event")).to_have_text(newest)


def test_an_answer_stays_visible_after_a_reload(page: Page) -> None:
    """A question shows its title and its message, and the call's card shows the answer even after a reload."""
    say(page, "book")
    asked = page.locator(".question")
    expect(asked.get_by_role("heading")).to_have_text("Your visit")
    expect(asked.locator(".why")).to_have_text("When shall we come?")
    assert ".client" not in asked.inner_text()
    expect(asked.locator("strong")).to_have_text("no")  # the field is declared as Markdown
    expect(asked.get_by_role("definition")).to_have_text(["Main St"])
    asked.get_by_text("As text").click()
    expect(asked.get_by_role("definition")).to_have_text(["Main St", "Bring **no** dogs."])
    shoot(page, "a-question-in-a-sentence")
    asked.get_by_role("textbox").first.fill("Monday at noon")
    asked.get_by_role("button", name="Send").click()
    expect(page.get_by_text("Booked.")).to_be_visible()
    closed = page.locator(".card .closed")
    expect(closed).to_contain_text("When shall we come?")
    page.reload()
    expect(page.get_by_text("Booked.")).to_be_visible()
    expect(closed).to_contain_text("When shall we come?")
    expect(closed.locator(".answer")).to_have_text("Monday at noon")
    shoot(page, "an-answer-after-a-reload")
