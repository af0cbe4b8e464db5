"""MCP servers over HTTP: limits on what they may send, and servers that fail."""

import itertools
import socket
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest

from handrail import Adapter, Prompt, ScriptedModel, ToolCall
from handrail.mcp import McpTools, UrlServer, transport
from handrail.mcp import url_transport as addresses
from handrail.mcp.connection import ServerUnavailable
from handrail.mcp.url_transport import Reach
from handrail.messages import ToolMessage
from support.mcp_http import Reply, Request, listening, ordinary
from support.texts import MCP_OUTCOME_UNKNOWN

JSON = {"Content-Type": "application/json"}
EVENTS = {"Content-Type": "text/event-stream"}
CALL = ToolCall("echo", {"text": "a"})


async def told(section: McpTools, *calls: ToolCall) -> list[str]:
    """Make the calls in one run, and return the results that the model received."""
    model = ScriptedModel([*calls, "Done."])
    await Adapter(model).evaluate(Prompt("guide", ["Go.", section]), "hi")
    messages = model.requests[-1].messages
    return [one.text for each in messages if isinstance(each, ToolMessage) for one in each.results]


def many(line: bytes) -> Iterator[bytes]:
    return itertools.repeat(line)


NOTICE = b'data: {"jsonrpc":"2.0","method":"notifications/message","params":{"level":"info","data":"x"}}\n\n'


@pytest.mark.parametrize(
    ("reply", "why"),
    [
        (Reply(200, JSON, many(b"[" * 1000)), "more than 0 MB"),
        (Reply(200, EVENTS, many(b"data: " + b"x" * 1000)), "exceeded"),
        (Reply(200, EVENTS, many(NOTICE)), "without an answer"),
        (Reply(200, {**JSON, "Content-Encoding": "gzip"}, [b"x"]), "compressed"),
        (Reply(200, JSON, [b"{"]), "not valid MCP"),
        (Reply(200, EVENTS, [b"data: {\n\n"]), "not valid MCP"),
        (Reply(500, JSON, [b"{}"]), "Server returned an error response"),
        (Reply(200, {"Content-Type": "text/html"}, [b"<p>"]), "text/html"),
        (Reply(503, {"Content-Type": "text/html"}, [b"<p>"]), "HTTP status 503"),
        (Reply(401, {}, []), "header with a valid token"),
        (None, "it closed the connection"),
    ],
)
async def test_bad_answer_to_a_call(reply: Reply | None, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bad answer fails its call with a reason, and the next call works.

    Unless the call was refused, the model is told that the call may have happened.
    """
    monkeypatch.setattr(transport, "MAX_MESSAGE", 100_000)
    monkeypatch.setattr(transport, "MAX_UNASKED", 50)
    bad = [reply]

    def answer(request: Request) -> Reply | None:
        if request.message.get("method") == "tools/call" and bad:
            return bad.pop()
        return ordinary(request)

    async with listening(answer) as url, McpTools("trial", url=url) as section:
        first, second = await told(section, CALL, CALL)
    assert why in first, first
    is_refused = reply is not None and 400 <= reply.status < 500
    assert (MCP_OUTCOME_UNKNOWN in first) is not is_refused, first
    assert second == "a"


async def test_restarted_server_gets_the_call_again() -> None:
    """A server that no longer knows the session did not accept the call, so the call is sent again in a new session."""
    sessions = ["one", "two"]
    calls: list[str] = []

    def answer(request: Request) -> Reply:
        if request.message.get("method") == "tools/call":
            calls.append(request.headers["mcp-session-id"])
            if calls == ["one"]:
                return Reply(404)
        return ordinary(request, sessions[0] if not calls else sessions[1])

    async with listening(answer) as url, McpTools("trial", url=url) as section:
        assert await told(section, CALL) == ["a"]
    assert calls == ["one", "two"]


async def test_server_that_is_not_there() -> None:
    """If nothing listens at the address, the error says so, and does not show the address's query."""
    async with listening(ordinary) as url:
        pass
    section = McpTools("trial", server=UrlServer(f"{url}?key=abcdef", {"X-Api-Key": "hunter2hunter2"}))
    with pytest.raises(ServerUnavailable, match="can't connect") as caught:
        await section.connect()
    assert "abcdef" not in str(caught.value)


async def test_headers_are_sent_and_hidden() -> None:
    """The headers given to `UrlServer` are sent with every request. If the server repeats a token from them, the model does not see it."""
    seen: list[Any] = []

    def answer(request: Request) -> Reply:
        seen.append(request.headers.get("authorization"))
        if request.message.get("method") == "tools/call":
            request.message["params"]["arguments"]["text"] = request.headers["authorization"].split()[1]
        return ordinary(request)

    async with listening(answer) as url:
        server = UrlServer(url, {"Authorization": "Bearer very-secret-token"})
        async with McpTools("trial", server=server) as section:
            assert await told(section, CALL) == ["[secret]"]
    assert set(seen) == {"Bearer very-secret-token"}


@pytest.mark.parametrize("where", ["initialize", "tools/list", "tools/call", "GET"])
@pytest.mark.parametrize("status", [302, 307])
async def test_a_redirect_leads_nowhere_else(where: str, status: int) -> None:
    """A redirect to a different origin is not followed, so nothing that was meant for the server is sent there."""
    sent: list[Request] = []

    def elsewhere(request: Request) -> Reply:
        sent.append(request)
        return ordinary(request)

    async with listening(elsewhere, "127.0.0.2") as there:

        def answer(request: Request) -> Reply:
            if where in (request.method, request.message.get("method")):
                return Reply(status, {"Location": there})
            return ordinary(request, "one")

        async with listening(answer) as url:
            section = McpTools("trial", server=UrlServer(url, {"Authorization": "Bearer very-secret-token"}))
            if where in ("initialize", "tools/list"):
                with pytest.raises(ServerUnavailable, match="not followed"):
                    await section.connect()
            else:
                async with section:
                    [result] = await told(section, CALL)
                assert ("not followed" in result) == (where == "tools/call")
    assert sent == []


async def test_a_server_does_not_move_to_an_internal_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """A public server whose name changes its address can't have this program connect to this machine, also by a new connection."""
    found, at, sent = socket.getaddrinfo, ["127.0.0.1"], list[Request]()

    def lookup(host: Any, *arguments: Any, **options: Any) -> Any:
        return found(at[-1] if host in ("server.test", b"server.test") else host, *arguments, **options)

    def internal(request: Request) -> Reply:
        sent.append(request)
        return ordinary(request)

    def answer(request: Request) -> Reply | None:
        if request.message.get("method") != "tools/call":
            return ordinary(request)
        at.append("127.0.0.2")
        return None  # the connection is closed, so that there is a new one

    monkeypatch.setattr(socket, "getaddrinfo", lookup)
    monkeypatch.setattr(
        addresses, "reach_of", lambda each: Reach.PUBLIC if each == "127.0.0.1" else Reach.LOOPBACK
    )
    async with listening(answer) as url:
        port = urlsplit(url).port or 0
        server = UrlServer(f"http://server.test:{port}/mcp", {"Authorization": "Bearer very-secret-token"})
        async with listening(internal, "127.0.0.2", port), McpTools("trial", server=server) as section:
            _, second = await told(section, CALL, CALL)
    assert "changed from a public one to a loopback one" in second
    assert sent == []
