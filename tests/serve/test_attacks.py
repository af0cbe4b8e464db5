"""The attack table: requests from strangers, other principals and broken clients, and how the server responds.

After every attack, the server must still work. `python tests/serve/test_attacks.py` prints the table.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import tempfile
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from support import PATIENCE
from support.serving import BEARER, TOKEN, Client, Limits, Said, Still, answer, serving, signed_in, source

pytestmark = pytest.mark.once  # sockets, processes and limits do not depend on the Python version

SAY = {"text": "hello"}


@dataclass(frozen=True)
class Attack:
    """One row of the table: an attack, and the server options that it needs."""

    name: str
    do: Callable[[Client], Awaitable[str]]
    options: dict[str, Any]
    files: bool
    alone: bool
    """Whether the attack itself checks that the server still works, so that no further check is needed."""

    def __str__(self) -> str:
        return self.name


ATTACKS: list[Attack] = []


def attack(
    name: str, *, files: bool = False, alone: bool = False, **options: Any
) -> Callable[[Callable[[Client], Any]], None]:
    """Return a decorator that adds a row to the table.

    The decorated function makes the attack and returns a description of the response.
    """

    def add(do: Callable[[Client], Any]) -> None:
        ATTACKS.append(Attack(name, do, options, files, alone))

    return add


def refused(said: Said, status: int, kind: str) -> str:
    assert (said.status, said.kind) == (status, kind), said
    assert "Traceback" not in said.body.decode()
    assert "/handrail/" not in said.body.decode()
    return f"{status} {kind}"


def malformed(said: Said) -> str:
    """Check that uvicorn itself refused a malformed request, before the app was called. Return a description."""
    assert (said.status, said.body) == (400, b"Invalid HTTP request received."), said
    return "400, by uvicorn"


def principal_of(request: Any) -> str | None:
    return request.headers.get("x-who")


def by(who: str) -> dict[str, str]:
    return {"x-who": who}


# --- other sites, other hosts, and clients without a token ---


@attack("a page of another origin posts")
async def _(client: Client) -> str:
    said = await client.ask("POST", "/threads/a/messages", SAY, {"Origin": "http://evil.example"})
    assert (await client.ask("GET", "/threads/a")).status == 404
    return refused(said, 403, "OriginRefused")


@attack("a page of another port of this machine posts")
async def _(client: Client) -> str:
    return refused(
        await client.ask("POST", "/agent", SAY, {"Origin": "http://127.0.0.1:1"}), 403, "OriginRefused"
    )


@attack("a sandboxed page posts (Origin: null)")
async def _(client: Client) -> str:
    return refused(await client.ask("POST", "/agent", SAY, {"Origin": "null"}), 403, "OriginRefused")


@attack("a page of another origin reads a stream")
async def _(client: Client) -> str:
    await client.say("a", "hello")
    headers = {"Origin": "http://evil.example"}
    return refused(await client.ask("GET", "/threads/a/events", headers=headers), 403, "OriginRefused")


@attack("a page of another site reads without an origin (an image)")
async def _(client: Client) -> str:
    headers = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors"}
    return refused(await client.ask("GET", "/threads", headers=headers), 403, "OriginRefused")


@attack("a preflight of another origin")
async def _(client: Client) -> str:
    headers = {"Origin": "http://evil.example", "Access-Control-Request-Method": "POST"}
    said = await client.ask("OPTIONS", "/agent", headers=headers)
    assert not [name for name in said.headers if name.startswith("access-control")]
    return refused(said, 403, "OriginRefused")


@attack("another origin's preflight where one was allowed", origins=["https://chat.example"])
async def _(client: Client) -> str:
    ours = {"Origin": "https://chat.example", "Access-Control-Request-Method": "POST"}
    said = await client.ask("OPTIONS", "/agent", headers=ours)
    assert (said.status, said.headers["access-control-allow-origin"]) == (204, "https://chat.example")
    assert "access-control-allow-credentials" not in said.headers
    return refused(
        await client.ask(
            "OPTIONS", "/agent", headers={**ours, "Origin": "https://chat.example.evil.example"}
        ),
        403,
        "OriginRefused",
    )


@attack("a name that was pointed here (DNS rebinding)")
async def _(client: Client) -> str:
    for host in ("evil.example", f"evil.example:{client.port}", f"localhost.evil.example:{client.port}"):
        refused(await client.ask("GET", "/threads", headers={"Host": host}), 403, "HostRefused")
    return refused(
        await client.ask("GET", "/", headers={"Host": f"evil.example:{client.port}"}), 403, "HostRefused"
    )


@attack("a host with rubbish, another port, or none")
async def _(client: Client) -> str:
    for host in ("", "localhost:1", f"127.0.0.1:{client.port}@evil.example", f"a b:{client.port}", "[::1"):
        said = await client.ask("GET", "/about", headers={"Host": host})
        assert said.status in (400, 403), (host, said)
    said = await client.send(b"GET /about HTTP/1.0\r\n\r\n")
    return refused(said, 403, "HostRefused")


@attack("a host in the answer (cache poisoning)", hosts=["proxy.example"])
async def _(client: Client) -> str:
    said = await client.ask("GET", "/threads/", headers={"Host": "proxy.example"})
    assert "proxy.example" not in str(said.headers) + said.body.decode()
    forwarded = await client.ask("GET", "/about", headers={"X-Forwarded-Host": "evil.example"})
    assert "evil.example" not in str(forwarded.headers) + forwarded.body.decode()
    return refused(said, 404, "NotFound")


@attack("a form posts (CSRF)")
async def _(client: Client) -> str:
    for kind in ("application/x-www-form-urlencoded", "text/plain", "multipart/form-data; boundary=x", "-"):
        said = await client.ask("POST", "/threads/a/messages", SAY, {"Content-Type": kind})
        refused(said, 415, "NotJson")
    assert (await client.ask("GET", "/threads/a")).status == 404
    return "415 NotJson"


@attack("no token", token=TOKEN)
async def _(client: Client) -> str:
    for method, path in [("GET", "/about"), ("GET", "/threads"), ("GET", "/metrics"), ("POST", "/agent")]:
        refused(await client.ask(method, path), 401, "TokenMissing")
    health = await client.ask("GET", "/health")
    assert health.json == {"status": "ok", "secret": "token"}
    return refused(await client.ask("POST", "/threads/a/messages", SAY), 401, "TokenMissing")


@attack("wrong tokens, and many of them", alone=True, token=TOKEN, limits=Limits(wrong_tokens=3))
async def _(client: Client) -> str:
    # the clock stands still, because an address may send another wrong token every six seconds
    client.app.principals._wrong._clock = Still()
    signed = await signed_in(client, token=TOKEN)
    for wrong in (TOKEN[:-1], TOKEN + "x", "\xff\xfe"):
        refused(
            await client.ask("GET", "/about", headers={"Authorization": f"Bearer {wrong}"}), 401, "TokenWrong"
        )
    said = await client.ask("GET", "/about", headers={"Authorization": f"Bearer {TOKEN[:-2]}zz"})
    assert int(said.headers["retry-after"]) >= 1
    # A correct token is refused too, because otherwise the response would show whether a guess is right. People who are
    # signed in are not affected.
    refused(await client.ask("POST", "/login", {"token": TOKEN}), 429, "TooManyWrongTokens")
    await client.serves(signed)
    return refused(said, 429, "TooManyWrongTokens")


@attack("a forged cookie", token=TOKEN)
async def _(client: Client) -> str:
    signed = await client.ask("POST", "/login", {"token": TOKEN})
    cookie = signed.headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=strict" in cookie
    assert TOKEN not in cookie
    name, _, value = cookie.partition(";")[0].partition("=")
    key = {"Handrail-Key": signed.json["key"]}
    assert (await client.ask("GET", "/about", headers={"Cookie": f"{name}={value}", **key})).status == 200
    for each in (value[:-1], value + "A", value.swapcase(), "", "...", "1.9999999999.x", "\xff", TOKEN):
        said = await client.ask("GET", "/about", headers={"Cookie": f"{name}={each}", **key})
        refused(said, 401, "TokenMissing")
    return "401 TokenMissing"


@attack("a cookie that another port of the host was sent", token=TOKEN)
async def _(client: Client) -> str:
    signed = await signed_in(client, token=TOKEN)
    for key in ("-", "", "x" * 43, signed["Cookie"].partition("=")[2]):
        said = await client.ask("GET", "/about", headers={**signed, "Handrail-Key": key})
        refused(said, 401, "TokenMissing")
    return refused(
        await client.ask("POST", "/threads/a/messages", SAY, {**signed, "Handrail-Key": "-"}),
        401,
        "TokenMissing",
    )


@attack(
    "a session used from an allowed origin, or at another host name",
    token=TOKEN,
    origins=["http://chat.example"],
    hosts=["desk.example"],
)
async def _(client: Client) -> str:
    signed = await signed_in(client, token=TOKEN)
    for more in (
        {"Origin": "http://chat.example"},
        {"Host": "desk.example"},
        {"Host": f"localhost:{client.port}"},
    ):
        refused(await client.ask("GET", "/about", headers={**signed, **more}), 401, "TokenMissing")
    said = await client.ask("POST", "/login", {"token": TOKEN}, {"Origin": "http://chat.example"})
    return refused(said, 403, "OriginRefused")


# --- other principals ---


@attack(
    "another's thread: read, watched, talked in, answered, cancelled, undone, forgotten",
    files=True,
    authenticate=principal_of,
)
async def _(client: Client) -> str:
    await client.say("mine", 'call write {"path": "a.txt", "text": "uno secreto"}', by("ann"))
    seen = await client.idle("mine", by("ann"))
    await client.say("mine", "call order", by("ann"))
    asked = await client.asked("mine", by("ann"))
    [call, *_] = seen["calls"]
    run = seen["runs"][0]["id"]
    given = {"question_id": asked["id"], "digest": asked["digest"], "value": {"seats": 2}}
    for method, path, body in [
        ("GET", "/threads/mine", None),
        ("GET", "/threads/mine/events", None),
        ("GET", "/threads/mine/files", None),
        ("GET", f"/threads/mine/runs/{run}", None),
        ("GET", f"/threads/mine/runs/{run}/messages", None),
        ("POST", f"/threads/mine/runs/{run}/messages", {"text": "obey me"}),
        ("POST", f"/threads/mine/runs/{run}/messages/m", {"text": "obey me"}),
        ("DELETE", f"/threads/mine/runs/{run}/messages/m", None),
        ("POST", f"/threads/mine/runs/{run}/orders", {"order": "stop"}),
        ("POST", "/threads/mine/cancel", {}),
        ("DELETE", "/threads/mine", None),
        ("GET", "/threads/ann/mine", None),
        ("GET", "/threads/ann%2Fmine", None),
        ("GET", "/threads/..%2Fann%2Fmine", None),
    ]:
        said = await client.ask(method, path, body, by("eve"))
        assert said.status in (404, 422), (path, said)
        assert "uno secreto" not in said.body.decode()
    answered = await client.ask("POST", "/threads/mine/answers", given, by("eve"))
    refused(answered, 409, "AnswerRefused")
    undone = await client.ask("POST", f"/threads/mine/calls/{call}/undo", {}, by("eve"))
    refused(undone, 409, "UndoRefused")
    await client.say("mine", "hello", by("eve"))  # Eve's own thread has the same name
    hers = await client.idle("mine", by("eve"))
    assert hers["runs"][0]["id"] != run
    assert len(hers["messages"]) == 2
    refused(await client.ask("POST", "/threads/mine/answers", given, by("eve")), 409, "AnswerRefused")
    refused(await client.ask("GET", f"/threads/mine/runs/{run}", headers=by("eve")), 404, "RunUnknown")
    assert [
        each["id"] for each in (await client.ask("GET", "/threads", headers=by("eve"))).json["threads"]
    ] == ["mine"]
    runs = (await client.ask("GET", "/runs", headers=by("eve"))).json["runs"]
    assert run not in [each["id"] for each in runs]
    now = await client.until("mine", lambda seen: bool(seen["questions"]), by("ann"))
    assert now["questions"]
    assert now["messages"][0]["content"].startswith("call write")
    return "404 ThreadUnknown, 409 AnswerRefused, 409 UndoRefused, 404 RunUnknown"


def hook_with_defects(request: Any) -> Any:
    """Return None, an invalid principal or `zoe`, depending on the header `x-who`. Raises `KeyError` without it."""
    defects = {"nobody": None, "number": 7, "line": "a\nb", "long": "x" * 300, "local": "local"}
    return defects.get(request.headers["x-who"], "zoe")


@attack("a hook that raises, or names somebody who can't be", authenticate=hook_with_defects)
async def _(client: Client) -> str:
    refused(await client.ask("GET", "/about", headers=by("nobody")), 401, "NotSignedIn")
    for who in ("number", "line", "long", "local"):
        refused(await client.ask("GET", "/about", headers=by(who)), 500, "ServerError")
    return "500 ServerError, " + refused(await client.ask("GET", "/about"), 401, "NotSignedIn")


# --- overload ---


@attack("a body too large, declared", limits=Limits(body_bytes=1000))
async def _(client: Client) -> str:
    head = client.head("POST", "/threads/a/messages", {"Content-Length": "999999999999"})
    return refused(await client.send(head + b'{"text": "'), 413, "BodyTooLarge")


@attack("a body too large, in chunks", limits=Limits(body_bytes=1000, attachment_bytes=300))
async def _(client: Client) -> str:
    head = client.head("POST", "/threads/a/messages", {"Content-Length": "-", "Transfer-Encoding": "chunked"})
    chunk = b"200\r\n" + b"x" * 512 + b"\r\n"
    return refused(await client.send(head + chunk * 40), 413, "BodyTooLarge")


@attack("a mebibyte of empty lists, without credentials and with them")
async def _(client: Client) -> str:
    lists = b"[" + b"[]," * 340_000 + b"[]]"
    refused(
        await client.ask("POST", "/login", raw=lists, headers={"Authorization": "-"}), 413, "BodyTooLarge"
    )
    return refused(await client.ask("POST", "/agent", raw=lists), 413, "BodyTooLarge")


@attack("a message too long", limits=Limits(message_chars=100))
async def _(client: Client) -> str:
    said = await client.ask("POST", "/threads/a/messages", {"text": "x" * 101})
    return refused(said, 413, "MessageTooLong")


@attack("a body that does not come", limits=Limits(body_seconds=0.2))
async def _(client: Client) -> str:
    head = client.head("POST", "/threads/a/messages", {"Content-Length": "20"})
    return refused(await client.send(head + b'{"te'), 408, "BodyTooSlow")


@attack("headers that do not come", limits=Limits(header_seconds=0.3))
async def _(client: Client) -> str:
    reader, writer = await client.connect()
    writer.write(b"GET /about HTTP/1.1\r\n")

    dripped = 0

    async def drip() -> None:
        nonlocal dripped
        with contextlib.suppress(ConnectionError):
            for number in range(100):
                writer.write(b"X-%d: x\r\n" % number)
                await writer.drain()
                await asyncio.sleep(0.05)
                dripped += 1

    dripping = asyncio.create_task(drip())
    async with asyncio.timeout(PATIENCE):
        said = await answer(reader)
        assert dripped < 100, "the server waited for all headers before it answered"
        with contextlib.suppress(ConnectionError):  # a header sent after the response resets the connection
            assert await reader.read() == b""
    dripping.cancel()
    writer.close()
    return refused(said, 408, "HeadersTooSlow")


@attack("headers too large, dripped and at once", limits=Limits(header_bytes=2000))
async def _(client: Client) -> str:
    reader, writer = await client.connect()
    writer.write(b"GET /about HTTP/1.1\r\nX: " + b"x" * 1500)
    await asyncio.sleep(0.1)
    writer.write(b"x" * 1500)
    malformed(await answer(reader))
    writer.close()
    return refused(await client.ask("GET", "/about", headers={"X": "x" * 2000}), 431, "HeadersTooLarge")


@attack(
    "1,000 connections against a limit of 100",
    limits=Limits(
        connections=100,
        requests=2000,
        streams=2000,
        burst=5000,
        header_seconds=PATIENCE,
        idle_per_address=2000,
    ),
)
async def _(client: Client) -> str:
    await client.say("a", "hello")
    await client.idle("a")
    asking = client.head("GET", "/threads/a/events?follow=1")
    opened = [await client.connect() for _ in range(1000)]
    for _, writer in opened:
        writer.write(asking)
    said = await asyncio.gather(*(reader.readuntil(b"\r\n\r\n") for reader, _ in opened))
    served = [at for at, head in enumerate(said) if head.startswith(b"HTTP/1.1 200")]
    full = [head for head in said if head.startswith(b"HTTP/1.1 503")]
    assert len(served) + len(full) == 1000
    assert 90 <= len(served) <= 100
    assert all(b"\r\nretry-after: 5\r\n" in head for head in full)
    assert (await client.ask("GET", "/health")).json["status"] == "ok"
    refused(await client.ask("GET", "/about"), 503, "TooManyConnections")
    # the open streams still get the events of a new run
    await client.app.threads.thread("local", "a").say("again")
    for at in served:
        async with asyncio.timeout(PATIENCE):
            await opened[at][0].readuntil(b"You said")
    for _, writer in opened:
        writer.close()
    await asyncio.sleep(0.2)
    return f"{len(served)} served, {len(full)} × 503 TooManyConnections, /health 200"


@attack("silent connections against a limit", limits=Limits(connections=20, header_seconds=0.3))
async def _(client: Client) -> str:
    opened = [await client.connect() for _ in range(60)]
    closed = [await reader.read() for reader, _ in opened]
    assert all(each.startswith(b"HTTP/1.1 408") for each in closed)
    for _, writer in opened:
        writer.close()
    return "408 HeadersTooSlow"


@attack(
    "requests too often",
    authenticate=principal_of,
    limits=Limits(requests_per_second=1 / 3600, burst=100),
)
async def _(client: Client) -> str:
    said = [await client.ask("GET", "/about", headers=by("eve")) for _ in range(110)]
    assert [each.status for each in said] == [200] * 100 + [429] * 10
    [*_, last] = said
    assert 1 <= int(last.headers["retry-after"]) <= 3600
    return refused(last, 429, "TooManyRequests")


@attack(
    "bodies without end from one sender",
    authenticate=principal_of,
    limits=Limits(connections=12, requests=3, burst=5000, body_seconds=PATIENCE),
)
async def _(client: Client) -> str:
    """With an account and without one, one sender is refused long before others are, and refusals take nobody's place."""
    opened: list[asyncio.StreamWriter] = []

    async def unfinished(path: str) -> asyncio.StreamReader:
        reader, writer = await client.connect()
        writer.write(client.head("POST", path, {**by("eve"), "Content-Length": "20"}) + b"{")
        opened.append(writer)
        return reader

    for path in ("/threads/a/messages", "/health", "/login"):
        waiting = {asyncio.ensure_future((await unfinished(path)).readuntil(b"\r\n\r\n")) for _ in range(30)}
        while len(waiting) > 3:
            done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            assert all(each.result().startswith(b"HTTP/1.1 429") for each in done)
        assert (await client.ask("GET", "/about", headers=by("ann"))).status == 200
        for each in waiting:
            each.add_done_callback(lambda each: each.cancelled() or each.exception())
    said = await client.ask("GET", "/about", headers=by("eve"))
    for writer in opened:
        writer.close()
    return refused(said, 429, "TooManyRequests")


@attack("streams too many", limits=Limits(streams=3))
async def _(client: Client) -> str:
    await client.say("a", "hello")
    await client.idle("a")
    async with contextlib.AsyncExitStack() as stack:
        for _ in range(3):
            stream = await stack.enter_async_context(client.stream("GET", "/threads/a/events?follow=1"))
            assert stream.status == 200
        said = await client.ask("GET", "/threads/a/events?follow=1")
    while client.app.streams.count:  # a stream's slot is free once its client has disconnected
        await asyncio.sleep(0.02)
    return refused(said, 429, "TooManyStreams")


@attack("runs too many", limits=Limits(runs_per_principal=2))
async def _(client: Client) -> str:
    for name in ("a", "b"):
        await client.say(name, "hold")
    said = await client.ask("POST", "/threads/c/messages", SAY)
    agent = {"threadId": "c", "runId": "r", "messages": [{"id": "1", "role": "user", "content": "x"}],
             "tools": [], "context": [], "state": {}, "forwardedProps": {}}  # fmt: skip
    refused(await client.ask("POST", "/agent", agent), 429, "TooManyRuns")
    for name in ("a", "b"):
        assert (await client.ask("POST", f"/threads/{name}/cancel", {})).status == 202
    return refused(said, 429, "TooManyRuns")


@attack("waiting runs too many", limits=Limits(runs_per_principal=2), park_after=0.001)
async def _(client: Client) -> str:
    for name in ("a", "b"):
        await client.say(name, "call order")
        await client.asked(name)
    said = await client.ask("POST", "/threads/c/messages", SAY)
    while client.app.threads.parked < 2:
        await asyncio.sleep(0.01)
    refused(await client.ask("POST", "/threads/c/messages", SAY), 429, "TooManyRuns")  # parked runs count too
    assert (await client.ask("POST", "/threads/a/cancel", {})).status == 202
    return refused(said, 429, "TooManyRuns")


@attack("idle connections without end", limits=Limits(idle_per_address=5))
async def _(client: Client) -> str:
    streaming = client.stream("GET", "/threads/a/events?follow=1")
    await client.say("a", "hello")
    await client.idle("a")
    async with streaming as stream:
        events = stream.events()
        await anext(events)
        opened = [await client.connect() for _ in range(50)]
        async with asyncio.timeout(PATIENCE):
            for reader, _ in opened[:45]:
                assert await reader.read() == b"", "the longest idle ones are closed"
        reader, writer = opened[-1]
        writer.write(client.head("GET", "/health"))
        assert (await answer(reader)).status == 200, "the newest ones are served"
        await client.say("a", "again")
        await anext(events)  # a connection with a request in progress is not idle
        for _, writer in opened:
            writer.close()
    return "closed"


# --- malformed bytes ---


@attack("ids with line ends, slashes, dots and rubbish")
async def _(client: Client) -> str:
    for id in ("a%0d%0aX-Evil:%201", "a%00", "%ff%fe", "a%20b", "é", "a" * 129, "%7b%7d", "a'b", "a%2fb"):
        said = await client.send(client.head("GET", f"/threads/{id}"))
        assert said.status in (400, 404, 422), said
        assert "x-evil" not in said.headers
    body = {"threadId": "a\r\nX-Evil: 1", "runId": "r", "messages": []}
    assert (await client.ask("POST", "/agent", body)).status in (400, 422)
    return refused(await client.ask("GET", "/threads/a%0d%0aX-Evil:%201"), 422, "BadId")


@attack("paths out of /assets")
async def _(client: Client) -> str:
    for name in (
        "../http.py",
        "..%2fhttp.py",
        "%2e%2e/http.py",
        "%2e%2e%2fhttp.py",
        "..%5chttp.py",
        "/etc/passwd",
        "%2fetc%2fpasswd",
        "....//http.py",
        "vendor/../../http.py",
        ".git/config",
        "index.html%00.js",
        "x" * 5000,
        "",
        "..",
    ):
        said = await client.ask("GET", f"/assets/{name}")
        refused(said, 404, "NotFound")
    return "404 NotFound"


@attack("answers that are forged")
async def _(client: Client) -> str:
    await client.say("a", "call order")
    asked = await client.asked("a")
    await client.say("b", "call order")
    other = await client.asked("b")
    good = {"question_id": asked["id"], "digest": asked["digest"], "value": {"seats": 2, "name": "Ann"}}
    path = "/threads/a/answers"
    for change, status, kind in [
        ({"digest": "0" * 64}, 409, "AnswerRefused"),
        ({"digest": other["digest"]}, 409, "AnswerRefused"),
        ({"question_id": other["id"], "digest": other["digest"]}, 409, "AnswerRefused"),
        ({"question_id": "nothing"}, 409, "AnswerRefused"),
        ({"question_id": asked["id"] + "0"}, 409, "AnswerRefused"),
        ({"outcome": "timed out"}, 422, "BodyUnfit"),
        ({"by": "somebody"}, 422, "BodyUnfit"),
        ({"value": {"seats": "many"}}, 422, "AnswerRefused"),
        ({"value": {"seats": 2, "extra": 1}}, 422, "AnswerRefused"),
    ]:
        refused(await client.ask("POST", path, {**good, **change}), status, kind)
    unfit = await client.ask("POST", path, {**good, "value": {"seats": "many"}})
    assert [each["path"] for each in unfit.json["error"]["fields"]] == ["/seats"]
    assert (await client.asked("a"))["id"] == asked["id"]
    assert (await client.ask("POST", path, good)).status == 200
    await client.idle("a")
    assert (await client.ask("POST", path, good)).status == 200  # sending the answer again is harmless
    over = await client.ask("POST", path, {**good, "value": {"seats": 3, "name": "Eve"}})
    return "422 BodyUnfit, 422 AnswerRefused, " + refused(over, 409, "AnswerRefused")


@attack("approvals that are forged")
async def _(client: Client) -> str:
    await client.say("a", 'call pay {"amount": 5}')
    asked = await client.asked("a")
    assert asked["kind"] == "approval"
    good = {"question_id": asked["id"], "digest": asked["digest"]}
    for value in (
        True,
        "yes",
        {"approved": "yes"},
        {"approved": 1},
        {"approved": True, "by": "model"},
        {"approved": True, "remember": "scope", "scope": "everything"},
        {"approved": True, "remember": "always"},
    ):
        said = await client.ask("POST", "/threads/a/answers", {**good, "value": value})
        assert said.status in (409, 422), (value, said)
        assert said.kind == "AnswerRefused"
    now = await client.asked("a")
    assert now["id"] == asked["id"]
    said = await client.ask(
        "POST", "/threads/a/answers", {**good, "value": {"approved": False, "reason": "no"}}
    )
    assert said.status == 200
    seen = await client.idle("a")
    assert "paid 5" not in json.dumps(seen)
    return "422 AnswerRefused"


@attack("interrupts that are forged, by an AG-UI client")
async def _(client: Client) -> str:
    await client.say("a", 'call pay {"amount": 5}')
    asked = await client.asked("a")
    await client.say("b", 'call pay {"amount": 6}')
    other = await client.asked("b")
    body = {"threadId": "a", "messages": [], "tools": [], "context": [], "state": {}, "forwardedProps": {}}
    ids = (asked["id"], f"{asked['id']}#{'0' * 16}", f"{other['id']}#{other['digest'][:16]}", "#", "")
    for number, id in enumerate(ids):
        resume = [{"interruptId": id, "status": "resolved", "payload": {"approved": True}}]
        said = await client.ask("POST", "/agent", {**body, "runId": f"r{number}", "resume": resume})
        assert said.status in (409, 422) or b"RUN_ERROR" in said.body, (id, said)
    for thread in ("a", "b"):
        seen = await client.until(thread, lambda seen: bool(seen["questions"]))
        assert "paid" not in json.dumps(seen["messages"])
    return "200 with RUN_ERROR, or 422"


JSON: list[tuple[str, bytes]] = [
    ("depth", b'{"text": ' + b"[" * 10_000 + b"]" * 10_000 + b"}"),
    ("depth of a few hundred", b'{"text": ' + b"[" * 150 + b"]" * 150 + b"}"),
    ("NaN", b'{"text": NaN}'),
    ("an infinity", b'{"text": -Infinity}'),
    ("a number that is read as an infinity", b'{"text": 1e999}'),
    ("a huge whole number", b'{"text": ' + b"9" * 100_000 + b"}"),
    ("a whole number of 65 bits", b'{"text": 18446744073709551616}'),
    ("half a character", b'{"text": "\\ud800"}'),
    ("bytes that are not UTF-8", b'{"text": "\xff\xfe"}'),
    ("UTF-16", '{"text": "a"}'.encode("utf-16")),
    ("the same name twice", b'{"text": "a", "text": "b"}'),
    ("no JSON", b"text=a"),
    ("nothing", b""),
    ("two values", b'{"text": "a"} {"text": "b"}'),
]


@attack("JSON that is too deep, ambiguous or invalid")
async def _(client: Client) -> str:
    for name, raw in JSON:
        for path in ("/threads/a/messages", "/threads/a/answers", "/agent"):
            said = await client.ask("POST", path, raw=raw)
            assert (said.status, said.kind) == (400, "BadJson"), (name, path, said)
    return "400 BadJson"


@attack("JSON of another shape, and prototype keys")
async def _(client: Client) -> str:
    for body in ([], "text", 1, None, {}, {"text": 1}, {"text": None}, {"text": ["a"]}, {"text": "   "},
                 {"text": "a", "__proto__": {"admin": True}}, {"text": "a", "constructor": {}}):  # fmt: skip
        said = await client.ask("POST", "/threads/a/messages", raw=json.dumps(body).encode())
        assert said.status == 422, (body, said)
    assert (await client.ask("GET", "/threads/a")).status == 404
    return "422 BodyUnfit"


@attack("a Last-Event-ID that is rubbish")
async def _(client: Client) -> str:
    await client.say("a", "hello")
    seen = await client.idle("a")
    last = seen["last_event_id"]
    boot = last.rpartition("-")[0]
    for id in (
        "x",
        "-",
        "0-0",
        f"{boot}-99999999999999999999",
        f"{boot}--1",
        f"{boot}-１",
        "%ff",
        "a" * 4000,
    ):
        async with client.stream("GET", "/threads/a/events", headers={"Last-Event-ID": id.encode().decode("latin-1")}) as stream:  # fmt: skip
            kinds = [event["type"] for event in await stream.all()]
        assert kinds[0] == "RUN_STARTED", (id, kinds)
        assert "MESSAGES_SNAPSHOT" in kinds
    return "200, a snapshot"


@attack("methods that the path does not accept")
async def _(client: Client) -> str:
    for method in ("PUT", "PATCH", "TRACE", "CONNECT", "PROPFIND", "OPTIONS", "HEAD"):
        reader, writer = await client.connect()
        writer.write(client.head(method, "/threads/a/events?follow=1"))
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 405"), (method, head)
        writer.close()
    override = {"X-HTTP-Method-Override": "DELETE"}
    assert (await client.ask("POST", "/threads/a", {}, override)).status == 405
    return refused(await client.ask("GET", "/agent"), 405, "MethodRefused")


@attack("one request inside another (smuggling)")
async def _(client: Client) -> str:
    inner = client.head("POST", "/threads/smuggled/messages", None, b'{"text": "x"}') + b'{"text": "x"}'
    both = client.head("POST", "/threads/a/cancel", {"Content-Length": "4", "Transfer-Encoding": "chunked"})
    said = await client.send(both + b"0\r\n\r\n" + inner)
    refused(said, 400, "BadRequest")
    for extra in ("Content-Length: 3\r\nContent-Length: 5", "Content-Length: +3", "Transfer-Encoding: xchunked",
                  "Content-Length : 3", "X: a\r\n folded: b\x00"):  # fmt: skip
        raw = f"POST /threads/a/cancel HTTP/1.1\r\nHost: {client.host}\r\nContent-Type: application/json\r\n{extra}\r\n\r\n"
        said = await client.send(raw.encode("latin-1") + b"{}\r\n\r\n" + inner)
        assert said.status in (400, 404, 501), (extra, said)
    await asyncio.sleep(0.1)
    assert (await client.ask("GET", "/threads/smuggled")).status == 404
    return "400 BadRequest"


@attack("requests in a row on one connection, and rubbish behind them (pipelining)")
async def _(client: Client) -> str:
    reader, writer = await client.connect()
    writer.write(client.head("GET", "/about") * 3 + b"\x00\x01rubbish\r\n\r\n")
    for _ in range(3):
        assert (await answer(reader)).status == 200
    said = await answer(reader)
    writer.close()
    return malformed(said)


@attack("bytes that are no HTTP")
async def _(client: Client) -> str:
    said = Said(0, {}, b"")
    for raw in (
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\r\n\r\n",
        b"GET\r\n\r\n",
        b"\r\n\r\n\r\n\x00\r\n\r\n",
    ):
        said = await client.send(raw)
        malformed(said)
    return malformed(said)


@attack("a broken chunk while the answer is being sent", limits=Limits(body_bytes=1000, attachment_bytes=300))
async def _(client: Client) -> str:
    """After a malformed chunk, uvicorn closes the connection, because it can't send a 400 in the middle of a response."""
    reader, writer = await client.connect()
    writer.write(
        client.head("POST", "/threads/a/messages", {"Content-Length": "-", "Transfer-Encoding": "chunked"})
    )
    writer.write(b"7d0\r\n" + b"x" * 2000 + b"\r\n")
    head = await reader.readuntil(b"\r\n\r\n")
    writer.write(b"rubbish\r\n")
    async with asyncio.timeout(PATIENCE):
        await reader.read()
    writer.close()
    assert head.startswith(b"HTTP/1.1 413")
    return "413 BodyTooLarge"


@attack("a websocket")
async def _(client: Client) -> str:
    headers = {
        "Upgrade": "websocket",
        "Connection": "Upgrade",
        "Sec-WebSocket-Key": "x",
        "Sec-WebSocket-Version": "13",
    }
    return refused(await client.ask("GET", "/agent", headers=headers), 405, "MethodRefused")


def headers_of(row: Attack) -> dict[str, str]:
    return by("zoe") if "authenticate" in row.options else BEARER


async def carried_out(row: Attack, folder: Path) -> str:
    files = folder / "files"
    files.mkdir()
    async with serving(folder, source(files if row.files else None), **row.options) as client:
        came = await row.do(client)
        if not row.alone:
            await client.serves(headers_of(row))
        return came


@pytest.mark.parametrize("row", ATTACKS, ids=str)
async def test_attack_is_refused_and_the_server_still_serves(row: Attack, tmp_path: Path):
    await carried_out(row, tmp_path)


if __name__ == "__main__":
    for each in ATTACKS:
        with tempfile.TemporaryDirectory() as made:
            print(f"{each.name:<88} {asyncio.run(carried_out(each, Path(made)))}")
