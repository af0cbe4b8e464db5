"""A test in which one handoff is answered on the page, at a terminal, by MCP clients of two generations, and by a model."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import uvicorn
from mcp_types import ElicitResult
from playwright.async_api import async_playwright

from handrail import Adapter, AgentEnvironment, Handoff, Prompt, ScriptedModel, SqliteJournal
from handrail.journal.sqlite import MemoryJournal
from handrail.mcp import ToolServer
from handrail.messages import ModelRequest, ToolMessage
from handrail.serve import PromptSource, asgi
from mcp import Client
from support.browsers import CHROMIUM, PATIENCE, arguments
from support.handoff_patterns import PATTERNS, at_terminal, example, replying
from support.served_threads import plan
from support.serving import BEARER, TOKEN

PATTERN = PATTERNS["flexible"]
SAID = plan([[PATTERN.handoff, dict(PATTERN.arguments)]])

Page = Callable[[str, str, dict[str, Any]], Awaitable[str]]
"""A function that uses the page: it sends a message and the form's values, and returns the model's last text."""


async def in_the_page(address: str, said: str, filled: dict[str, Any]) -> str:
    """Send the requests that the page sends, and return the model's last text."""
    async with aiohttp.ClientSession(address, headers=BEARER) as page:
        await post(page, "/threads/t/messages", {"text": said})
        while not (shown := await get(page, "/threads/t"))["questions"]:
            await asyncio.sleep(0.005)
        [question] = shown["questions"]
        assert (question["kind"], question["name"]) == ("input", "pick")
        assert question["payload"] == PATTERN.public
        given = {"question_id": question["id"], "digest": question["digest"]}
        await post(page, "/threads/t/answers", {**given, "outcome": "answered", "value": filled})
        while (shown := await get(page, "/threads/t"))["status"] in ("running", "waiting"):
            await asyncio.sleep(0.005)
        return shown["messages"][-1]["content"]


async def in_a_browser(address: str, said: str, filled: dict[str, Any]) -> str:
    """Type the message and fill in the form in a browser, and return the model's last text."""
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(
            executable_path=CHROMIUM, args=arguments(), timeout=PATIENCE
        )
        page = await browser.new_page()
        page.set_default_timeout(PATIENCE)
        await page.goto(address)
        await page.get_by_label("Token").fill(TOKEN)
        await page.keyboard.press("Enter")
        await page.get_by_label("Message", exact=True).fill(said)
        await page.keyboard.press("Enter")
        for label, value in filled.items():
            await page.get_by_label(label.capitalize()).fill(value)
        await page.get_by_role("button", name="Send", exact=True).last.click()
        await page.get_by_placeholder(
            "Write a message"
        ).wait_for()  # the run is over, so the page accepts another message
        said_last = await page.get_by_role("log").locator(".assistant").last.inner_text()
        await browser.close()
        return said_last


async def get(page: aiohttp.ClientSession, path: str) -> Any:
    async with page.get(path) as response:
        return await response.json() if response.status == 200 else {"questions": [], "status": "running"}


async def post(page: aiohttp.ClientSession, path: str, body: Any) -> None:
    async with page.post(path, json=body) as response:
        assert response.status in (200, 202), await response.text()


@asynccontextmanager
async def running(app: Any) -> AsyncGenerator[str]:
    """Run the app on a free port, and yield its address."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        config = uvicorn.Config(app, log_level="error", lifespan="on", timeout_keep_alive=PATIENCE // 1000)
        server = uvicorn.Server(config)
        serving = asyncio.ensure_future(server.serve(sockets=[listening]))
        while not server.started:
            assert not serving.done(), "the server did not start"
            await asyncio.sleep(0.005)
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        finally:
            server.should_exit = True
            await serving


async def through_mcp(prompt: Prompt[None], mode: Any) -> str:
    """Call the handoff as an MCP client whose user fills in the form, and return the result's text."""
    asked: list[str] = []

    async def fill(context: Any, params: Any) -> ElicitResult:
        asked.append(params.message)
        return ElicitResult(action="accept", content={"selected": "tea"})

    server = ToolServer(prompt, journal=MemoryJournal())
    async with Client(server.server, mode=mode, elicitation_callback=fill) as client:
        found: Any = await client.call_tool(PATTERN.handoff, dict(PATTERN.arguments))
    assert len(asked) == 1
    assert not found.is_error
    return found.content[0].text


def charged(request: ModelRequest) -> Any:
    """Answer as a model that makes the requested call and then reports its result."""
    last = request.messages[-1]
    if isinstance(last, ToolMessage):
        return last.results[0].text
    assert isinstance(last.text, str)
    [[[name, arguments]]] = json.loads(last.text)
    from support.recorded import call

    return call(name, **arguments)


@pytest.mark.once
@pytest.mark.parametrize("page", [in_the_page, in_a_browser])
async def test_one_handoff_in_the_page_at_a_terminal_through_mcp_and_by_a_model(
    tmp_path: Path, page: Page
) -> None:
    handoff: Handoff[Any, Any] = getattr(example("flexible"), PATTERN.handoff)
    prompt: Prompt[None] = Prompt("waiter", "Serve.", tools=[handoff])
    adapter = Adapter(ScriptedModel(charged))

    journal = SqliteJournal(tmp_path / "runs.db")
    async with running(asgi(PromptSource(prompt, adapter), journal=journal, token=TOKEN)) as address:
        by_page = await page(address, SAID, {"selected": "tea"})
    journal.close()

    at_the_terminal = await at_terminal(
        PATTERN, lambda there: adapter.evaluate(prompt, SAID, environment=there)
    )
    by_model = await adapter.evaluate(prompt, SAID, environment=AgentEnvironment(replying(PATTERN)))

    by_client = {mode: await through_mcp(prompt, mode) for mode in ("2026-07-28", "legacy")}

    told = {**by_client, "page": by_page, "terminal": at_the_terminal.text, "model": by_model.text}
    assert {where: said.split()[0] for where, said in told.items()} == {
        "2026-07-28": "tea",
        "legacy": "tea",
        "page": "tea",
        "terminal": "tea",
        "model": "coffee",
    }
    assert [tool for tool in prompt.tools if tool is handoff] == [handoff], (
        "the prompt does not have exactly this handoff"
    )
