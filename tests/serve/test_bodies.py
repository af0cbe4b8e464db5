"""Request bodies: each route of each server has a limit, and nobody's bodies fill the memory or stop the event loop."""

from __future__ import annotations

import asyncio
import json
import re
import sys
import threading
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.routing import Route
from starlette.types import ASGIApp

from handrail import Prompt, ScriptedModel
from handrail.journal.sqlite import MemoryJournal
from handrail.mcp import HttpServer, ToolServer
from handrail.schema.size import MOST_VALUES
from handrail.serve import requests
from handrail.serve.app import ServedApp
from handrail.serve.limits import Limits
from handrail.serve.model_server import app_for
from handrail.serve.oidc import OidcProvider
from handrail.serve.people import People
from handrail.serve.requests import replay
from support.serving import TOKEN, serving, source

pytestmark = pytest.mark.once

LIMITS = Limits(body_bytes=200_000, attachment_bytes=30_000, requests_per_second=1000.0, burst=1000)
FILES = 200_000 + 30_000 * 4 // 3


async def send(app: ASGIApp, method: str, path: str, body: bytes) -> tuple[int, str]:
    """Send a request, in pieces and without its length. Returns the status and the body of the response."""
    pieces = [body[at : at + 4000] for at in range(0, len(body), 4000)]
    said: list[dict[str, Any]] = []

    async def receive() -> Any:
        if not pieces:
            return {"type": "http.disconnect"}
        return {"type": "http.request", "body": pieces.pop(0), "more_body": bool(pieces)}

    async def keep(message: Any) -> None:
        said.append(message)

    given = {"host": "127.0.0.1", "content-type": "application/json", "authorization": f"Bearer ann:{TOKEN}"}
    headers = [(name.lower().encode(), value.encode()) for name, value in given.items()]
    scope = {"type": "http", "method": method, "path": path, "raw_path": path.encode(), "query_string": b"", "headers": headers,
             "scheme": "http", "server": ("127.0.0.1", 80), "client": ("127.0.0.1", 1), "root_path": ""}  # fmt: skip
    await app(scope, receive, keep)
    return said[0]["status"], b"".join(each.get("body", b"") for each in said).decode()


def served(folder: Path) -> ServedApp:
    people = People(folder / "people.db")
    people.add("ann", ["admin", "user"], TOKEN)
    oidc = OidcProvider("https://login.example", "a", "b")
    return ServedApp(source(), journal=MemoryJournal(), people=people, oidc=oidc, limits=LIMITS)


SERVERS: dict[str, Callable[[Path], Any]] = {
    "serve": served,
    "mcp": lambda folder: HttpServer(
        ToolServer(Prompt("p", "P.")), authenticate=lambda request: "ann", limits=LIMITS
    ),
    "model": lambda folder: app_for(ScriptedModel(["x"])),
}
METHODS = ("POST", "DELETE")
LARGER = {
    "/agent": (FILES, 5 * MOST_VALUES),
    "/threads/{id}/messages": (FILES, MOST_VALUES),
    "/threads/{id}/answers": (200_000, MOST_VALUES),
    "/threads/{id}/runs/{run_id}/messages": (200_000, MOST_VALUES),
    "/threads/{id}/runs/{run_id}/messages/{message_id}": (200_000, MOST_VALUES),
    "/threads/{id}/runs/{run_id}/orders": (200_000, MOST_VALUES),
    "/inbox/answers": (200_000, MOST_VALUES),
    "/mcp": (200_000, 2 * MOST_VALUES),
    "/question": (200_000, MOST_VALUES),
    "/v1/chat/completions": (4 << 20, 5 * MOST_VALUES),
    "/v1/responses": (4 << 20, 5 * MOST_VALUES),
}
"""The size and the number of values that each route takes, if it takes more than 4 KiB."""
WITHOUT_BODY = ("/threads/{id}/runs/{run_id}/messages/{message_id}", "DELETE")
"""A route that takes less than the other one with its path."""


def routes_of(app: Any) -> Sequence[Route]:
    """Return all routes of a server, from the guard that reads the bodies, or from the app itself if it has no guard."""
    found: Sequence[Any] = app.routes if isinstance(app, Starlette) else app._guard.routes
    assert all(isinstance(each, Route) for each in found)
    return found


@pytest.mark.parametrize("name", SERVERS)
async def test_every_route_has_a_limit(name: str, tmp_path: Path) -> None:
    """Each route refuses a body that is too large, or that has too many values, and takes one that is not."""
    app, larger = SERVERS[name](tmp_path), set[str]()
    if not isinstance(app, Starlette):
        await app.start()
    taken = {(each.path, method) for each in routes_of(app) for method in each.methods or METHODS}
    for route, method in product(routes_of(app), METHODS):
        path = re.sub(r"{.*?}", "x", route.path)
        if (route.path, method) not in taken and isinstance(app, Starlette):
            assert (await send(app, method, path, b"{}"))[0] == 405  # no guard reads what no route takes
            continue
        size, values = 4096, MOST_VALUES  # what a route takes that declares nothing
        if route.path in LARGER and (route.path, method) in taken and (route.path, method) != WITHOUT_BODY:
            larger.add(route.path)
            size, values = LARGER[route.path]
            list_of = b"[" + b",".join([b"0"] * values) + b"]"
            status, said = await send(app, method, path, list_of)
            assert (status, f"more than {values:,} values" in said) == (413, True), (route.path, said)
        for length, is_refused in ((size + 1, True), (size, False)):
            status, said = await send(app, method, path, b'"' + b"x" * (length - 2) + b'"')
            assert (status == 413) is is_refused, (method, route.path, status, said)
            assert not is_refused or f"larger than {size} bytes" in said
    assert larger == {path for path in LARGER if path in {route.path for route in routes_of(app)}}
    assert larger
    if not isinstance(app, Starlette):
        await app.stop()


async def test_values_are_counted_before_anything_is_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A body with too many values is not parsed."""
    monkeypatch.setattr(requests, "parse_json", lambda data: pytest.fail("the body was parsed"))
    app = served(tmp_path)
    for path in ("/agent", "/threads/a/messages"):
        status, said = await send(app, "POST", path, b"[" + b"[]," * 60_000 + b"[" * 41_000)
        assert (status, json.loads(said)["error"]["kind"]) == (413, "BodyTooLarge")


async def test_large_bodies_are_parsed_off_the_event_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A large body is parsed in a thread, and a small one on the event loop, which is faster."""
    threads: list[bool] = []

    def parse_json(data: bytes) -> Any:
        threads.append(threading.current_thread() is not threading.main_thread())
        return {}

    monkeypatch.setattr(requests, "parse_json", parse_json)
    app = served(tmp_path)
    await app.start()
    for path in ("/agent", "/threads/a/messages", "/threads/a/answers", "/inbox/answers"):
        for size in (1_000, 150_000):
            status, _ = await send(app, "POST", path, b" " * size)
            assert status in (403, 404, 422), path
    await app.stop()
    assert threads == [False, True] * 4


async def test_unfinished_bodies_are_limited_for_each_principal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bodies that one principal's requests have begun to send are limited together, and others are not affected.

    What a request held is given back when its response begins or its connection ends.
    """
    monkeypatch.setattr("handrail.serve.requests._HELD", 0)  # so that the limit is twice the largest body
    limits = Limits(body_bytes=30_000, attachment_bytes=30_000)  # 70,000 bytes with files

    def who(request: Any) -> str:
        return request.headers["x-user"]

    async with serving(tmp_path, limits=limits, authenticate=who) as client:
        begun: list[asyncio.StreamWriter] = []
        for _ in range(2):
            _, writer = await client.connect()
            head = client.head("POST", "/agent", {"X-User": "eve", "Content-Length": "69000"})
            writer.write(head + b" " * 68_000)
            begun.append(writer)
        held = client.app._guard._bodies.held.held  # type: ignore[attr-defined]
        while held.get("eve") != 2 * 68_000:
            await asyncio.sleep(0.01)
        said = await client.ask("POST", "/threads/a/messages", {"text": "x" * 5_000}, {"X-User": "eve"})
        assert (said.status, said.kind) == (429, "TooManyBytes")
        await client.say("a", "hello", {"X-User": "zoe"})
        for writer in begun:
            writer.close()
        while "eve" in held:
            await asyncio.sleep(0.01)
        await client.say("a", "hello", {"X-User": "eve"})
        assert held == {}
        async with client.stream("GET", "/threads/a/events?follow=1", headers={"X-User": "eve"}):
            assert held == {}


async def test_a_body_that_was_read_is_not_kept() -> None:
    """A stream lasts for hours, and does not keep the body of the request that began it."""
    body = bytes(1_000)

    async def receive() -> Any:
        return {"type": "http.disconnect"}

    again, before = replay(body, receive), sys.getrefcount(body)
    assert (await again())["body"] == body
    assert (await again())["type"] == "http.disconnect"
    assert sys.getrefcount(body) == before - 1


async def test_addresses_without_credentials_have_a_rate(tmp_path: Path) -> None:
    """An address may use the paths that need no credentials so often. The page, its files, `/health` and `/readyz` are always answered."""
    limits = Limits(requests_per_second=1 / 3600, burst=3, wrong_tokens=100)
    async with serving(tmp_path, limits=limits) as client:
        said = [
            await client.ask("POST", "/login", {"token": "x" * 30}, {"Authorization": "-"}) for _ in range(4)
        ]
        assert [each.kind for each in said] == ["TokenWrong"] * 3 + ["TooManyRequests"]
        posted = await client.ask("POST", "/", {}, {"Authorization": "-"})
        assert posted.kind == "TooManyRequests"
        for path in ("/health", "/readyz", "/", "/assets/nothing.js"):
            assert (await client.ask("GET", path, headers={"Authorization": "-"})).status != 429
        assert (await client.ask("GET", "/about")).status == 200
