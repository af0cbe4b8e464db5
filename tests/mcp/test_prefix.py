"""Tests for an MCP server below a prefix: mounted in another app, or behind a proxy."""

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import httpx2
import pytest
from mcp.client.streamable_http import streamable_http_client
from mcp_types import ElicitResult
from pydantic import BaseModel, SecretStr
from starlette.applications import Starlette
from starlette.routing import Mount

from handrail import CapabilityPolicy, Prompt, UserContext, tool
from handrail.journal.sqlite import MemoryJournal
from handrail.mcp import HttpServer, ToolServer
from handrail.mcp.issuer import Issuer
from mcp import Client
from support import PATIENCE
from support.served import Served
from support.serving import BEARER, TOKEN

PING = {"jsonrpc": "2.0", "id": 1, "method": "ping"}


class Account(BaseModel):
    """The fields of a login."""

    password: SecretStr


@tool(effect="read")
async def log_in(*, context: UserContext) -> str:
    """Log in."""
    given = await context.wait_for("account", {}, Account)
    return f"{len(given.password.get_secret_value())} characters"


PROMPT = Prompt("shop", "Sell.", tools=[log_in], policies=[CapabilityPolicy()])


@contextmanager
def below(how: str, **options: Any) -> Generator[str]:
    """Serve below `/tools`. Yields the address of the prefix."""
    served = ToolServer(PROMPT, journal=MemoryJournal())
    if how == "mounted":
        app = HttpServer(served, **options)
        front: Any = Starlette(routes=[Mount("/tools", app)], lifespan=app.lifespan)
    else:
        front = HttpServer(served, prefix="/tools", **options)
    server = Served(front)
    server.start()
    try:
        yield f"{server.url}/tools"
    finally:
        server.stop()


@pytest.mark.parametrize("how", ["mounted", "proxied"])
async def test_a_call_and_its_secret_question_below_a_prefix(how: str) -> None:
    """The endpoint works, and the address at which a person answers leads to the server's page."""

    async def answer(context: Any, params: Any) -> ElicitResult:
        page, _, named = params.url.partition("#")
        assert page == f"{base}/"
        assert (await http.get(page)).status_code == 200
        asked = (await http.get(f"{page}question?{named}")).json()
        given = dict(parse_qsl(named))
        body = {**given, "digest": asked["digest"], "value": {"password": "horse"}}
        assert (await http.post(f"{page}question", json=body)).status_code == 200
        return ElicitResult(action="accept")

    with below(how, token=TOKEN) as base:
        async with (
            httpx2.AsyncClient(headers=BEARER, timeout=PATIENCE) as http,
            Client(
                streamable_http_client(f"{base}/mcp", http_client=http),
                mode="legacy",
                elicitation_callback=answer,
            ) as client,
        ):
            result: Any = await client.call_tool("log_in", {})
    assert result.content[0].text == "5 characters"


@pytest.mark.parametrize("how", ["mounted", "proxied"])
async def test_the_metadata_are_below_the_prefix(how: str) -> None:
    """A client without a token is sent to metadata that it can reach: below the prefix, since nothing else leads here.

    The address that RFC 9728 makes of the resource works too, if a proxy passes it on.
    """
    resource = "https://tools.example/tools/mcp"
    with below(how, issuer=Issuer("https://login.example", resource=resource)) as base:
        async with httpx2.AsyncClient(timeout=PATIENCE) as http:
            refused = await http.post(f"{base}/mcp", json=PING)
            where = "https://tools.example/tools/.well-known/oauth-protected-resource/mcp"
            assert refused.headers["www-authenticate"] == f'Bearer resource_metadata="{where}"'
            paths = [urlsplit(where).path]
            if how == "proxied":
                paths.append("/.well-known/oauth-protected-resource/tools/mcp")
            for path in paths:
                found = await http.get(base.removesuffix("/tools") + path)
                assert found.json()["resource"] == resource
                assert found.json()["authorization_servers"] == ["https://login.example/"]


async def test_a_mounted_server_that_is_not_started_says_what_to_do() -> None:
    app = HttpServer(ToolServer(PROMPT, journal=MemoryJournal()), token=TOKEN)
    server = Served(Starlette(routes=[Mount("/tools", app)]))
    server.start()
    async with httpx2.AsyncClient(headers=BEARER, timeout=PATIENCE) as http:
        refused = await http.post(f"{server.url}/tools/mcp", json=PING)
    server.stop()
    error = refused.json()["error"]
    assert (refused.status_code, error["kind"]) == (503, "NotStarted")
    assert "lifespan=desk.lifespan" in error["message"]
