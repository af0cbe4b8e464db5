"""A test with three people in three browsers: an approval by two of them, a folder for each person, and a revoked session."""

from __future__ import annotations

import os
import re
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest
from playwright.sync_api import Browser, BrowserContext, Locator, Page, expect

from handrail import Adapter, CapabilityPolicy, Prompt, ScriptedModel, ToolContext, tool
from handrail.guard import ask
from handrail.serve.people import People
from handrail.serve.sources import PrincipalFiles, PromptSource
from support.browsers import PATIENCE, browser
from support.passwords import cheap_hashes
from support.served import Served, serving
from support.serving import play, write

pytestmark = pytest.mark.once
__all__ = ["browser", "cheap_hashes"]
PASSWORDS = {name: f"a long password of {name}" for name in ("ann", "bob", "fay")}


@tool(capabilities={"money"})
async def pay(amount: int, context: ToolContext) -> str:
    """Pay somebody."""
    return f"paid {amount}"


def desk(folder: Path) -> PromptSource:
    """Return an app in which payments need the approval of two other people, and each person has their own folder."""
    policy = CapabilityPolicy({"money": ask(approvals=2), "fs.write": "allow"})
    prompt = Prompt("desk", "Help.", tools=[pay, write], policies=[policy])
    (folder / "work").mkdir()
    files = PrincipalFiles(str(folder / "work" / "{principal}"))
    return PromptSource(prompt, Adapter(ScriptedModel(play)), files=files)


@contextmanager
def windows(browser: Browser, server: Served, *names: str) -> Generator[list[Page]]:
    """Open a browser context for each person, sign them in on the page, and yield the pages."""
    contexts: list[BrowserContext] = []
    pages: list[Page] = []
    for name in names:
        context = browser.new_context(viewport={"width": 1100, "height": 760}, reduced_motion="reduce")
        context.set_default_timeout(PATIENCE)
        contexts.append(context)
        page = context.new_page()
        page.goto(server.url)
        page.get_by_label("Name").fill(name)
        page.get_by_label("Password").fill(PASSWORDS[name])
        page.keyboard.press("Enter")
        expect(page.get_by_label("Message", exact=True)).to_be_visible()
        pages.append(page)
    try:
        yield pages
    finally:
        for context in contexts:
            context.close()


def say(page: Page, text: str) -> None:
    page.get_by_label("Message", exact=True).fill(text)
    expect(page.locator(".composer").get_by_role("button", name="Send")).to_be_enabled()
    page.keyboard.press("Enter")


def log(page: Page) -> Locator:
    return page.get_by_role("log", name="Conversation")


def shoot(page: Page, name: str) -> None:
    """Take a screenshot if $SCREENSHOTS names a folder."""
    folder = os.environ.get("SCREENSHOTS")
    if folder:
        page.screenshot(path=Path(folder) / f"people-{name}.png")


def read(page: Page) -> Locator:
    """Open the inbox as soon as one question waits in it, and return the inbox."""
    page.get_by_role("button", name=re.compile(r"^Inbox, 1 waiting")).click()
    return page.get_by_role("dialog", name="Inbox")


def test_two_people_and_an_approver_in_three_browsers(browser: Browser, tmp_path: Path):
    people = People(tmp_path / "people.db")
    for name, role in (("ann", "user"), ("bob", "approver"), ("fay", "approver")):
        people.add(name, [role], PASSWORDS[name])
    with (
        serving(tmp_path, source=desk(tmp_path)) as server,
        windows(browser, server, "ann", "bob", "fay") as (ann, bob, fay),
    ):
        expect(ann.get_by_role("button", name=re.compile("^Inbox"))).to_have_count(0)

        # Each person has their own files.
        for page, name in ((ann, "ann"), (bob, "bob")):
            say(page, f'call write {{"path": "note.txt", "text": "{name}"}}')
            expect(log(page)).to_contain_text("Done: wrote note.txt")
        assert {path.parent.name: path.read_text() for path in tmp_path.glob("work/*/note.txt")} == {
            "ann": "ann",
            "bob": "bob",
        }
        expect(bob.get_by_role("navigation", name="Threads").get_by_role("listitem")).to_have_count(1)

        # A payment needs the approval of two other people.
        say(ann, 'call pay {"amount": 5}')
        waiting = ann.get_by_role("group", name="Approval of pay")
        expect(waiting).to_contain_text("Waiting for 2 people who may approve for others.")
        expect(waiting.get_by_role("button", name="Allow once")).to_have_count(0)
        inbox = read(bob)
        expect(inbox).to_contain_text("ann asks")
        expect(inbox).to_contain_text("amount")
        shoot(bob, "inbox")
        inbox.get_by_role("button", name="Allow once").click()
        expect(inbox).to_contain_text("Nothing is waiting for you.")
        expect(inbox.get_by_role("status")).to_contain_text("Your vote for pay for ann counts.")
        bob.keyboard.press("Escape")
        expect(waiting).to_contain_text("Allowed by bob.")
        shoot(ann, "waiting")
        inbox = read(fay)
        expect(inbox).to_contain_text("allowed by bob")
        inbox.get_by_role("button", name="Allow once").click()
        expect(log(ann)).to_contain_text("Done: paid 5")
        expect(log(bob)).not_to_contain_text("paid")
        shoot(ann, "approved")

        # A revoked session ends.
        assert people.revoke(name="fay") == 1
        expect(fay.get_by_label("Password")).to_be_visible()
        shoot(fay, "revoked")
        say(ann, "hello")
        expect(log(ann)).to_contain_text("You said: hello")
    entries = [(each["who"], each["action"]) for each in people.audit()]
    assert [each for each in entries if each[1] == "voted"] == [("bob", "voted"), ("fay", "voted")]
    people.close()
