"""The links of notifications, in a real browser: each leads to the sign-in, and then to exactly that question, or to nothing."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect

from handrail import Adapter, CapabilityPolicy, Prompt, ScriptedModel, ToolContext, tool
from handrail.guard import ask
from handrail.notify.address import link_to
from handrail.serve.oidc import OidcProvider
from handrail.serve.people import People
from handrail.serve.sources import PromptSource
from support.browsers import PATIENCE, browser
from support.oidc_provider import provider
from support.passwords import cheap_hashes
from support.served import Served, serving
from support.serving import play

pytestmark = pytest.mark.once
__all__ = ["browser", "cheap_hashes"]

ANN, FAY, MAX = "ann@example.org", "fay@example.org", "max@example.org"
ROLES: dict[str, Sequence[str]] = {ANN: ["user"], FAY: ["finance"], MAX: ["user"]}
PASSWORD = "a long password of everybody"


@tool(capabilities={"money"})
async def pay(amount: int, context: ToolContext) -> str:
    """Pay somebody."""
    return f"paid {amount}"


@contextmanager
def desk(folder: Path, issuer: str = "") -> Generator[Served]:
    people = People(folder / "people.db")
    for name, roles in ROLES.items():
        people.add(name, roles, PASSWORD)
    people.close()
    policy = CapabilityPolicy({"money": ask(role="finance")})
    prompt = Prompt("desk", "Help.", tools=[pay], policies=[policy])
    source = PromptSource(prompt, Adapter(ScriptedModel(play)))
    oidc = OidcProvider(issuer, "handrail", "secret") if issuer else None
    with serving(folder, source=source, oidc=oidc) as server:
        yield server


@contextmanager
def window(browser: Browser, url: str) -> Generator[Page]:
    context = browser.new_context(viewport={"width": 1100, "height": 760}, reduced_motion="reduce")
    context.set_default_timeout(PATIENCE)
    try:
        page = context.new_page()
        page.goto(url)
        yield page
    finally:
        context.close()


def sign_in(page: Page, name: str) -> None:
    page.get_by_label("Name").fill(name)
    page.get_by_label("Password").fill(PASSWORD)
    page.keyboard.press("Enter")


def ask_twice(page: Page, url: str) -> list[str]:
    """Ask two questions in two threads, and return their ids."""
    ids: list[str] = []
    for number in (1, 2):
        page.goto(f"{url}/#/t/thread-{number}")
        page.get_by_label("Message", exact=True).fill(f'call pay {{"amount": {number}}}')
        expect(page.locator(".composer").get_by_role("button", name="Send")).to_be_enabled()
        page.keyboard.press("Enter")
        asked = page.get_by_role("group", name="Approval of pay")
        expect(asked).to_be_visible()
        ids.append(asked.get_attribute("data-question") or "")
    return ids


def expect_focus(page: Page, id: str) -> None:
    expect(page.locator(f'[data-question="{id}"]')).to_be_focused()


def test_a_link_leads_to_the_sign_in_and_then_to_exactly_that_question(browser: Browser, tmp_path: Path):
    with desk(tmp_path) as server, window(browser, server.url) as mine:
        sign_in(mine, ANN)
        expect(mine.get_by_label("Message", exact=True)).to_be_visible()
        ids = ask_twice(mine, server.url)
        links = [link_to(f"{server.url}/", id) for id in ids]
        mine.goto(f"{server.url}/")
        for number in (1, 2):  # the same tab follows one after the other
            mine.goto(links[number - 1])
            expect_focus(mine, ids[number - 1])
            assert mine.url == f"{server.url}/#/t/thread-{number}"
        for place in (0, 1):
            with window(browser, links[place]) as theirs:
                sign_in(theirs, FAY)
                expect(theirs.get_by_role("dialog", name="Inbox")).to_be_visible()
                expect_focus(theirs, ids[place])
        with window(browser, links[0]) as others:
            sign_in(others, MAX)
            expect(others.get_by_role("alert")).to_have_text(
                "This question is closed, or you may not answer it."
            )
            expect(others.get_by_role("group", name="Approval of pay")).to_have_count(0)
            others.goto(f"{server.url}/#/q/%E0%A4%A")  # no id at all
            expect(others.get_by_role("alert")).to_be_visible()


def test_a_sign_in_with_a_provider_returns_to_the_question(browser: Browser, tmp_path: Path):
    claims = [{"sub": "1", "email": FAY, "email_verified": True}]
    with provider(claims) as issuer, desk(tmp_path, issuer) as server, window(browser, server.url) as mine:
        sign_in(mine, ANN)
        expect(mine.get_by_label("Message", exact=True)).to_be_visible()
        ids = ask_twice(mine, server.url)
        with window(browser, link_to(f"{server.url}/", ids[1])) as theirs:
            theirs.get_by_role("button", name="Sign in with your organisation").click()
            theirs.locator("input[name=sub]").fill("1")
            theirs.locator("button[type=submit], input[type=submit]").first.click()
            expect_focus(theirs, ids[1])
            assert theirs.url == link_to(f"{server.url}/", ids[1])
            assert theirs.evaluate("sessionStorage.length") == 0
        with window(browser, server.url) as theirs:  # only a route of the page is returned to
            theirs.get_by_role("button", name="Sign in with your organisation").click()
            theirs.locator("input[name=sub]").fill("1")
            theirs.locator("button[type=submit], input[type=submit]").first.click()
            expect(theirs.get_by_role("button", name=f"Menu of {FAY}")).to_be_visible()
            assert theirs.url == f"{server.url}/"
