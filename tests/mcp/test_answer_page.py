"""A person answers a question that asks for a secret, on the page of an MCP server, in a real browser."""

import asyncio
import queue
import threading
from typing import Any

import httpx2
import pytest
from mcp.client.streamable_http import streamable_http_client
from mcp_types import ElicitResult
from playwright.sync_api import Browser, expect
from pydantic import BaseModel, SecretStr

from handrail import CapabilityPolicy, Prompt, UserContext, tool
from handrail.mcp import ToolServer
from mcp import Client
from support.browsers import PATIENCE, browser
from support.mcp_served import serving
from support.serving import BEARER, TOKEN

pytestmark = pytest.mark.once
__all__ = ["browser"]


class Account(BaseModel):
    """The fields of a login."""

    user: str
    password: SecretStr


@tool(effect="read")
async def log_in(*, context: UserContext) -> str:
    """Log in."""
    given = await context.wait_for("account", {"site": "example.org"}, Account)
    return f"{given.user} has {len(given.password.get_secret_value())} characters"


PROMPT = Prompt("shop", "Sell.", tools=[log_in], policies=[CapabilityPolicy()])


class Call(threading.Thread):
    """A thread with a server and a client. The client calls the tool, and puts the address of the question into a queue."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.addresses: queue.Queue[str] = queue.Queue()
        self.result: Any = None

    def run(self) -> None:
        asyncio.run(self._call())

    async def _call(self) -> None:
        async def show(context: Any, params: Any) -> ElicitResult:
            self.addresses.put(params.url)
            return ElicitResult(action="accept")

        async with (
            serving(ToolServer(PROMPT)) as url,
            httpx2.AsyncClient(headers=BEARER, timeout=None) as http,
            Client(
                streamable_http_client(url, http_client=http), mode="legacy", elicitation_callback=show
            ) as client,
        ):
            self.result = await client.call_tool("log_in", {})


def test_a_person_answers_on_the_page(browser: Browser) -> None:
    """The page refuses a wrong token, shows the question, hides the password, and sends the answer to the waiting call."""
    call = Call()
    call.start()
    address = call.addresses.get(timeout=PATIENCE / 1000)
    page = browser.new_page(viewport={"width": 900, "height": 700}, reduced_motion="reduce")
    problems: list[str] = []
    page.on("pageerror", lambda error: problems.append(str(error)))
    try:
        page.goto(address)
        for token in ("wrong", TOKEN):
            page.get_by_label("Token").fill(token)
            page.get_by_role("button", name="Continue").click()
            if token == "wrong":
                expect(page.get_by_role("alert")).to_contain_text("not the server's token")
        expect(page.get_by_text("Please answer: account.")).to_be_visible()
        expect(page.get_by_text("example.org")).to_be_visible()
        expect(page.get_by_text("A call to log_in by local asks this question.")).to_be_visible()
        page.get_by_role("textbox", name="User").fill("ann")
        password = page.get_by_label("Password")
        assert password.get_attribute("type") == "password"
        password.fill("correct horse")
        page.get_by_role("button", name="Answer").click()
        expect(page.get_by_role("heading", name="Answered")).to_be_visible()
    finally:
        page.close()
    call.join(PATIENCE / 1000)
    assert call.result.content[0].text == "ann has 13 characters"
    assert problems == []
