"""`HttpServer` serves MCP over HTTP: tests with the SDK's client in both protocol versions, and with requests that are refused."""

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import httpx2
import pytest
from mcp.client.streamable_http import streamable_http_client
from mcp_types import ElicitResult

from handrail import CapabilityPolicy, Prompt, ToolContext, UserContext, tool
from handrail.journal.sqlite import MemoryJournal
from handrail.mcp import HttpServer, ToolServer
from handrail.mcp import http as mcp_http
from handrail.mcp.calls import CallRefused
from handrail.mcp.http import PATH
from handrail.serve.limits import Limits
from handrail.serve.people import People
from mcp import Client, MCPError
from support import PATIENCE
from support.mcp_served import serving
from support.passwords import cheap_hashes
from support.serving import BEARER, TOKEN

__all__ = ["cheap_hashes"]

INITIALIZE = {
    "jsonrpc": "2.0",
    "id": 1,
    "method": "initialize",
    "params": {
        "protocolVersion": "2025-11-25",
        "capabilities": {},
        "clientInfo": {"name": "test", "version": "1"},
    },
}
modes = pytest.mark.parametrize("mode", ["legacy", "2026-07-28"])


@tool(effect="read")
async def greet(name: str, *, context: ToolContext) -> str:
    """Greet somebody."""
    await context.report_progress("greeting", done=1, total=2)
    return f"Hello, {name}, says {context.session.principal}."


@tool(effect="read")
async def order(*, context: UserContext) -> str:
    """Order a size."""
    return f"size {await context.wait_for('size', {}, int)}"


PROMPT = Prompt("shop", "Sell.", tools=[greet, order], policies=[CapabilityPolicy()])


@asynccontextmanager
async def connected(url: str, mode: Any, token: str = TOKEN) -> AsyncGenerator[Client]:
    """Connect the SDK's client. It answers every question with 4."""

    async def answer(context: Any, params: Any) -> ElicitResult:
        return ElicitResult(action="accept", content={"value": 4})

    headers = {"Authorization": f"Bearer {token}"}
    async with (
        httpx2.AsyncClient(headers=headers, timeout=PATIENCE) as http,
        Client(
            streamable_http_client(url, http_client=http), mode=mode, elicitation_callback=answer
        ) as client,
    ):
        yield client


@modes
async def test_calls_progress_and_questions(mode: str) -> None:
    """Clients with either protocol version call tools, get their progress and answer their questions.

    Each call is a recorded run.
    """
    reported: list[float] = []

    async def report(progress: float, total: float | None, message: str | None) -> None:
        reported.append(progress)

    journal = MemoryJournal()
    async with serving(ToolServer(PROMPT, journal=journal)) as url, connected(url, mode) as client:
        assert [each.name for each in (await client.list_tools()).tools] == ["greet", "order"]
        greeted: Any = await client.call_tool("greet", {"name": "Ann"}, progress_callback=report)
        ordered: Any = await client.call_tool("order", {})
    assert greeted.content[0].text == "Hello, Ann, says local."
    assert ordered.content[0].text == "size 4"
    assert reported == [1]
    assert {row.status for row in await journal.runs.list()} == {"done"}


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 401),
        ({"Authorization": "Bearer wrong"}, 401),
        ({**BEARER, "Host": "evil.example"}, 403),
        ({**BEARER, "Origin": "https://evil.example"}, 403),
        ({**BEARER, "Sec-Fetch-Site": "cross-site"}, 403),
        ({**BEARER, "Content-Type": "text/plain"}, 415),
    ],
)
async def test_strangers_are_refused(headers: dict[str, str], status: int) -> None:
    """A request without the token, for a different host name, from a page of a different site, or with a wrong content type is refused."""
    body = {"jsonrpc": "2.0", "id": 1, "method": "tools/list"}
    sent = {"Content-Type": "application/json", "Accept": "application/json, text/event-stream", **headers}
    async with serving(ToolServer(PROMPT)) as url, httpx2.AsyncClient(timeout=PATIENCE) as http:
        found = await http.post(url, content=json.dumps(body), headers=sent)
    assert found.status_code == status
    assert "greet" not in found.text


async def test_each_caller_is_a_principal() -> None:
    """A call belongs to the principal that the app's own hook returns. Only the principal that opened a session can use it."""
    served = ToolServer(PROMPT, journal=MemoryJournal())

    def authenticate(request: Any) -> str:
        return request.headers.get("authorization", "").removeprefix("Bearer ")

    accepts = {"Accept": "application/json, text/event-stream"}
    async with serving(served, token=None, authenticate=authenticate) as url:
        for name in ("ann", "bob"):
            async with connected(url, "2026-07-28", name) as client:
                found: Any = await client.call_tool("greet", {"name": "you"})
            assert found.content[0].text == f"Hello, you, says {name}."
        async with httpx2.AsyncClient(headers=accepts, timeout=PATIENCE) as http:
            opened = await http.post(url, json=INITIALIZE, headers={"Authorization": "Bearer ann"})
            session = {"Mcp-Session-Id": opened.headers["mcp-session-id"]}
            ping = {"jsonrpc": "2.0", "id": 2, "method": "ping"}
            theirs = await http.post(url, json=ping, headers={**session, "Authorization": "Bearer bob"})
            own = await http.post(url, json=ping, headers={**session, "Authorization": "Bearer ann"})
    assert (theirs.status_code, own.status_code) == (404, 200)
    assert served.calls.journal is not None
    assert {row.record.principal for row in await served.calls.journal.runs.list()} == {"ann", "bob"}


async def test_people_need_a_role_that_runs(tmp_path: Path) -> None:
    """A person with the role `viewer` is refused. A person with the role `user` is served until they are removed."""
    body = {"jsonrpc": "2.0", "id": 1, "method": "ping"}
    accepts = {"Accept": "application/json, text/event-stream"}
    secret = "correct horse battery"
    with closing(People(tmp_path / "people.db")) as people:
        for name, role in (("val", "viewer"), ("uma", "user")):
            people.add(name, [role], secret)
        served = ToolServer(PROMPT, journal=MemoryJournal())
        async with serving(served, token=None, people=people) as url:
            async with httpx2.AsyncClient(headers=accepts, timeout=PATIENCE) as http:
                viewer = await http.post(url, json=body, headers={"Authorization": f"Bearer val:{secret}"})
            async with connected(url, "2026-07-28", f"uma:{secret}") as client:
                found: Any = await client.call_tool("greet", {"name": "you"})
                people.remove("uma")
                with pytest.raises(MCPError, match="error response"):
                    await client.call_tool("greet", {"name": "you"})
    assert (viewer.status_code, viewer.json()["error"]["kind"]) == (403, "RoleMissing")
    assert found.content[0].text == "Hello, you, says uma."


@pytest.mark.parametrize("change", ["removed", "made a viewer"])
@modes
async def test_what_a_removed_user_has_open_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str, change: str
) -> None:
    """When a user is removed, or may no longer run tools, their streams end, and the calls that they wait for are cancelled."""
    monkeypatch.setattr(mcp_http, "CHECK_SECONDS", 0.01)
    secret = "correct horse battery"
    begun, ended = asyncio.Event(), asyncio.Event()

    @tool(effect="read")
    async def slow() -> str:
        """Take time to end."""
        begun.set()
        try:
            return await asyncio.get_running_loop().create_future()
        finally:
            ended.set()

    with closing(People(tmp_path / "people.db")) as people, closing(People(tmp_path / "people.db")) as other:
        for name in ("uma", "vic"):
            people.add(name, ["user"], secret)
        served = ToolServer(Prompt("shop", "Sell.", tools=[slow, greet]), journal=MemoryJournal())
        async with serving(served, token=None, people=people) as url:
            async with (
                opened_stream(url, f"uma:{secret}") as stream,
                connected(url, mode, f"uma:{secret}") as client,
            ):
                call = asyncio.ensure_future(client.call_tool("slow", {}))
                await begun.wait()
                # as another process does it
                other.remove("uma")
                if change != "removed":
                    other.add("uma", ["viewer"], secret)
                await asyncio.wait_for(ended.wait(), PATIENCE)
                with pytest.raises(MCPError):
                    await asyncio.wait_for(call, PATIENCE)
                async with asyncio.timeout(PATIENCE):
                    assert [chunk async for chunk in stream.aiter_text() if "data" in chunk] == []
            async with connected(url, mode, f"vic:{secret}") as client:
                found: Any = await client.call_tool("greet", {"name": "you"})
    assert found.content[0].text == "Hello, you, says vic."


@asynccontextmanager
async def opened_stream(url: str, token: str) -> AsyncGenerator[httpx2.Response]:
    """Open a session, and the stream on which its server can send at any time."""
    sent = {"Authorization": f"Bearer {token}", "Accept": "application/json, text/event-stream"}
    async with httpx2.AsyncClient(headers=sent, timeout=None) as http:
        opened = await http.post(url, json=INITIALIZE)
        session = {"Mcp-Session-Id": opened.headers["mcp-session-id"]}
        async with http.stream("GET", url, headers=session) as stream:
            assert stream.status_code == 200
            yield stream


async def hold(url: str, name: str) -> int:
    """Open a session and read its stream, which stays open. If a request is refused, return its status."""
    sent = {"Authorization": f"Bearer {name}", "Accept": "application/json, text/event-stream"}
    async with httpx2.AsyncClient(headers=sent, timeout=None) as http:
        opened = await http.post(url, json=INITIALIZE)
        if opened.status_code != 200:
            return opened.status_code
        session = {"Mcp-Session-Id": opened.headers["mcp-session-id"]}
        return (await http.get(url, headers=session)).status_code


async def test_one_principal_can_not_take_all_the_room() -> None:
    """A principal can have only a limited number of calls and of requests in progress. Others are not affected."""

    def authenticate(request: Any) -> str:
        return request.headers.get("authorization", "").removeprefix("Bearer ")

    served = ToolServer(PROMPT, journal=MemoryJournal())
    limits = Limits(runs_per_principal=2, streams=3)
    async with serving(served, token=None, authenticate=authenticate, limits=limits) as url:
        for _ in range(2):
            await served.calls.begin(order, {}, principal="ann", asks=True)
        async with connected(url, "2026-07-28", "ann") as client:
            with pytest.raises(MCPError, match="2 calls in progress"):
                await client.call_tool("greet", {"name": "you"})
        held = [asyncio.ensure_future(hold(url, "ann")) for _ in range(4)]
        done, _ = await asyncio.wait(held, return_when=asyncio.FIRST_COMPLETED)
        async with connected(url, "2026-07-28", "bob") as client:
            found: Any = await client.call_tool("greet", {"name": "you"})
        for each in held:
            each.cancel()
        await asyncio.wait(held)
    assert [each.result() for each in done] == [429]
    assert found.content[0].text == "Hello, you, says bob."


async def test_limits_are_enforced() -> None:
    """A body that is too large is refused, and so is a request beyond the rate limit."""
    limits = Limits(body_bytes=2_000, burst=2, requests_per_second=0.001)
    body = {"jsonrpc": "2.0", "id": 1, "method": "ping"}
    async with (
        serving(ToolServer(PROMPT), limits=limits) as url,
        httpx2.AsyncClient(headers=BEARER, timeout=PATIENCE) as http,
    ):
        large = await http.post(url, json={**body, "params": {"_meta": {"x": "x" * 2_000}}})
        await http.post(url, json=body)
        often = await http.post(url, json=body)
    assert (large.status_code, often.status_code) == (413, 429)


def test_a_server_without_people_or_a_hook_accepts_login_links() -> None:
    """A server without people or a hook accepts login links. A server with its own `authenticate` hook does not."""
    assert HttpServer(ToolServer(PROMPT)).principals.has_links
    assert not HttpServer(ToolServer(PROMPT), authenticate=lambda request: "ann").principals.has_links


async def test_a_call_that_is_cancelled_elsewhere() -> None:
    """If a call is cancelled while its request waits for it, the request gets an error, and the session can still be used."""
    journal = MemoryJournal()
    served = ToolServer(PROMPT, journal=journal)

    async def cancel(context: Any, params: Any) -> ElicitResult:
        (row,) = await journal.runs.list()
        call = served.calls.find(row.record.id, "local")
        assert call is not None
        call.cancel()
        await asyncio.wait([call.task])
        return ElicitResult(action="accept", content={"value": 4})

    async with Client(served.server, mode="legacy", elicitation_callback=cancel) as client:
        cancelled: Any = await client.call_tool("order", {})
        greeted: Any = await client.call_tool("greet", {"name": "Ann"})
    assert (cancelled.is_error, cancelled.content[0].text) == (True, "order was cancelled.")
    assert greeted.content[0].text == "Hello, Ann, says local."


async def test_calls_that_come_while_the_server_stops_are_refused() -> None:
    """While a server stops, it refuses new requests, and also calls that earlier requests begin."""
    begun, end = asyncio.Event(), asyncio.Event()

    @tool(effect="read")
    async def slow() -> str:
        """Take time to end."""
        begun.set()
        try:
            return await asyncio.get_running_loop().create_future()
        finally:
            await end.wait()

    served = ToolServer(Prompt("shop", "Sell.", tools=[slow, greet]))
    app = HttpServer(served, token=TOKEN)
    await app.start()
    await served.calls.begin(slow, {}, principal="ann", asks=False)
    await begun.wait()
    stopping = asyncio.ensure_future(app.stop())
    while not served.calls.is_stopping:
        await asyncio.sleep(0)
    transport = httpx2.ASGITransport(app)
    options: Any = {"base_url": "http://127.0.0.1", "headers": BEARER}
    async with httpx2.AsyncClient(transport=transport, timeout=PATIENCE, **options) as http:
        refused = await http.post(PATH, json=INITIALIZE)
    with pytest.raises(CallRefused, match="the server is stopping"):
        await served.calls.begin(greet, {"name": "Ann"}, principal="ann", asks=False)
    assert not stopping.done()
    end.set()
    await stopping
    assert (refused.status_code, refused.json()["error"]["kind"]) == (503, "Stopping")
    assert app.running() == 0


async def test_a_call_that_the_stop_has_parked_is_not_resumed_by_its_request() -> None:
    """If a stop parks a call while its client answers, the client is told that the server is stopping.

    The answer is recorded, and the next process continues the call with it.
    """
    journal = MemoryJournal()
    served = ToolServer(PROMPT, journal=journal)

    async def answer(context: Any, params: Any) -> ElicitResult:
        await served.calls.stop()
        return ElicitResult(action="accept", content={"value": 4})

    async with Client(served.server, mode="legacy", elicitation_callback=answer) as client:
        with pytest.raises(MCPError, match="the server is stopping"):
            await client.call_tool("order", {})
    assert served.calls.running() == 0
    (row,) = await journal.runs.list()
    assert row.status == "parked"
    call: Any = await ToolServer(PROMPT, journal=journal).calls.resume(
        row.record.id, principal="local", asks=True
    )
    assert (await call.task).value == "size 4"
