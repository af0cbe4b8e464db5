"""A served app on loopback, and a client that can send any bytes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from handrail import (
    Adapter,
    CapabilityPolicy,
    DirectoryFilesystem,
    Prompt,
    ScriptedModel,
    SqliteJournal,
    ToolCall,
    ToolContext,
    tool,
)
from handrail.clock import SYSTEM_CLOCK, Clock
from handrail.messages import AssistantMessage, ModelRequest, ToolMessage, UserMessage
from handrail.models.scripted import Reply, Scripted
from handrail.serve.app import ServedApp, asgi
from handrail.serve.limits import Limits
from handrail.serve.people import People
from handrail.serve.server import address_of, listen, server_for
from handrail.serve.sources import PromptSource
from support import PATIENCE

TOKEN = "a-token-that-nobody-guesses"
BEARER = {"Authorization": f"Bearer {TOKEN}"}


@dataclass
class Order:
    seats: int
    name: str = ""


@tool(effect="staged", capabilities=["fs.write"])
async def write(path: str, text: str, context: ToolContext) -> str:
    """Write a file."""
    context.filesystem.write(path, text)
    return f"wrote {path}"


@tool
async def pay(amount: int, context: ToolContext) -> str:
    """Pay somebody."""
    return f"paid {amount}"


@tool(effect="read")
async def look(context: ToolContext) -> str:
    """Look around."""
    return "seen"


@tool(effect="read")
async def order(context: ToolContext) -> str:
    """Ask the person what to order."""
    assert context.wait_for is not None
    wanted = await context.wait_for("order", {"menu": ["soup"]}, Order)
    return f"{wanted.seats} for {wanted.name}"


def play(request: ModelRequest) -> Scripted:
    """Return the model's answer to the newest message.

    `call NAME JSON` calls a tool, `long N` makes an answer of N pieces, and `hold` delays the answer by a minute. Any
    other message is echoed, and so is a tool's result.
    """
    last = request.messages[-1]
    if isinstance(last, ToolMessage):
        return f"Done: {last.results[-1].text}"
    assert isinstance(last, UserMessage)
    word, _, rest = last.text.partition(" ")
    if word == "call":
        name, _, arguments = rest.partition(" ")
        return ToolCall(name, json.loads(arguments or "{}"))
    if word == "long":
        return Reply(pieces=["word " * 20] * int(rest), text="word " * 20 * int(rest))
    if word == "hold":
        return Reply("held", delay=60.0)
    return f"You said: {last.text}"


def source(folder: Path | None = None, model: Any = None) -> PromptSource:
    files = None if folder is None else DirectoryFilesystem(folder)
    tools = [pay, look, order, *([write] if files is not None else [])]
    prompt = Prompt("desk", "Help.", tools=tools, policies=[CapabilityPolicy()])
    return PromptSource(
        prompt, Adapter(model or ScriptedModel(play), filesystem=files), description="A desk."
    )


@dataclass
class Said:
    """A server's response."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def kind(self) -> str:
        """The kind of the error in the response."""
        return self.json["error"]["kind"]


class Still:
    """A clock that stands still."""

    def now(self) -> datetime:
        return datetime(2026, 5, 31, tzinfo=UTC)

    def monotonic(self) -> float:
        return 0.0


class Client:
    """A client that writes HTTP/1.1 itself, so that no library corrects its requests."""

    def __init__(self, address: str, app: ServedApp, headers: dict[str, str] | None = None) -> None:
        self.address = address
        self.headers = headers or {}
        """Headers that are sent with every request that does not override them. The value `-` removes a header."""
        self.app = app
        self.host = address.removeprefix("http://").rstrip("/")
        name, _, port = self.host.rpartition(":")
        self.name, self.port = name.strip("[]"), int(port)

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection(self.name, self.port)

    def head(self, method: str, path: str, headers: dict[str, str] | None = None, body: bytes = b"") -> bytes:
        given = {"Host": self.host, **self.headers, **(headers or {})}
        if body or method == "POST":
            given = {"Content-Type": "application/json", "Content-Length": str(len(body)), **given}
        lines = [f"{name}: {value}" for name, value in given.items() if value != "-"]
        return "\r\n".join([f"{method} {path} HTTP/1.1", *lines, "", ""]).encode("latin-1")

    async def ask(
        self,
        method: str,
        path: str,
        body: Any = None,
        headers: dict[str, str] | None = None,
        *,
        raw: bytes | None = None,
    ) -> Said:
        data = raw if raw is not None else b"" if body is None else json.dumps(body).encode()
        return await self.send(self.head(method, path, headers, data) + data)

    async def send(self, data: bytes) -> Said:
        """Send bytes over a new connection, and return the response."""
        reader, writer = await self.connect()
        try:
            writer.write(data)
            return await answer(reader)
        finally:
            writer.close()

    @asynccontextmanager
    async def stream(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
    ) -> AsyncGenerator[Stream]:
        """Send a request, and yield its streaming response."""
        data = b"" if body is None else json.dumps(body).encode()
        reader, writer = await self.connect()
        try:
            writer.write(self.head(method, path, headers, data) + data)
            status, found = await start(reader)
            yield Stream(status, found, reader)
        finally:
            writer.close()

    async def say(self, thread: str, text: str, headers: dict[str, str] | None = None) -> str:
        said = await self.ask("POST", f"/threads/{thread}/messages", {"text": text}, headers)
        assert said.status == 202, said.body
        return said.json["run_id"]

    async def until(
        self, thread: str, ready: Callable[[Any], bool], headers: dict[str, str] | None = None
    ) -> Any:
        """Poll the thread's snapshot until the condition holds for it, and return the snapshot.

        Raises `AssertionError` if the condition holds for none of 6,000 snapshots.
        """
        said = Said(0, {}, b"")
        for _ in range(6000):
            said = await self.ask("GET", f"/threads/{thread}", headers=headers)
            if said.status == 200 and ready(said.json):
                return said.json
            await asyncio.sleep(0.05)
        raise AssertionError(f"the condition never held: {said.body[:500]!r}")

    async def idle(self, thread: str, headers: dict[str, str] | None = None) -> Any:
        return await self.until(
            thread, lambda seen: seen["status"] in ("idle", "failed", "cancelled"), headers
        )

    async def asked(self, thread: str, headers: dict[str, str] | None = None) -> Any:
        """Wait for an open question, and return it."""
        seen = await self.until(thread, lambda seen: bool(seen["questions"]), headers)
        return seen["questions"][0]

    async def serves(self, headers: dict[str, str] | None = None) -> None:
        """Check that the server still works, by sending a message and waiting for its run to end."""
        thread = f"well-{id(object())}-{asyncio.get_running_loop().time()}"
        await self.say(thread, "hello", headers)
        assert (await self.idle(thread, headers))["status"] == "idle"


class Stream:
    """A stream of server-sent events."""

    def __init__(self, status: int, headers: dict[str, str], reader: asyncio.StreamReader) -> None:
        self.status, self.headers = status, headers
        self._reader = reader

    async def chunks(self) -> AsyncIterator[bytes]:
        async for chunk in _chunks(self._reader):
            yield chunk

    async def events(self) -> AsyncIterator[tuple[str, dict[str, Any]]]:
        """Yield each event that has data, with its id."""
        left = b""
        async for chunk in self.chunks():
            left += chunk
            while b"\n\n" in left:
                block, _, left = left.partition(b"\n\n")
                fields = dict(
                    line.split(b": ", 1) for line in block.split(b"\n") if not line.startswith(b":")
                )
                if b"data" in fields:
                    yield fields.get(b"id", b"").decode(), json.loads(fields[b"data"])

    async def all(self) -> list[dict[str, Any]]:
        return [event async for _, event in self.events()]


async def start(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    first, *rest = head.strip().split("\r\n")
    headers: dict[str, str] = {}
    for line in rest:
        name, _, value = line.partition(": ")
        earlier = headers.get(name.lower())
        # The values of repeated headers are joined, except cookies, which cannot be.
        headers[name.lower()] = (
            value if earlier is None or name.lower() == "set-cookie" else f"{earlier}, {value}"
        )
    return int(first.split()[1]), headers


async def answer(reader: asyncio.StreamReader) -> Said:
    status, headers = await start(reader)
    if status == 100:
        status, headers = await start(reader)
    if headers.get("transfer-encoding") == "chunked":
        return Said(status, headers, b"".join([chunk async for chunk in _chunks(reader)]))
    if "content-length" not in headers and headers.get("connection") == "close":
        return Said(status, headers, await reader.read())
    return Said(status, headers, await reader.readexactly(int(headers.get("content-length", "0"))))


async def _chunks(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    while True:
        size = int(await reader.readline(), 16)
        chunk = await reader.readexactly(size + 2)
        if not size:
            return
        yield chunk[:-2]


def patient(limits: Limits | None) -> Limits:
    """Return the limits with `PATIENCE` in place of each time limit that has its default, since a busy machine may exceed the default."""
    limits, usual = limits or Limits(), Limits()
    names = ("body_seconds", "header_seconds", "idle_seconds", "write_seconds")
    return replace(
        limits, **{name: PATIENCE for name in names if getattr(limits, name) == getattr(usual, name)}
    )


@asynccontextmanager
async def serving(
    folder: Path,
    served: PromptSource | None = None,
    *,
    host: str = "127.0.0.1",
    limits: Limits | None = None,
    people_file: str = "people.db",
    clock: Clock = SYSTEM_CLOCK,
    **options: Any,
) -> AsyncGenerator[Client]:
    """Start a server in this process, as `handrail serve` would, and yield a client for it.

    If neither the options nor users in the folder determine who may use the server, it has a token, which the client
    sends. `clock` determines when sessions end and when questions expire.
    """
    journal = SqliteJournal(folder / "runs.db", clock=clock)
    people = People(folder / people_file, clock=clock)
    headers: dict[str, str] = {}
    if not options.keys() & {"authenticate", "token"} and not people.has_users():
        options["token"] = TOKEN
        headers = BEARER
    app = asgi(
        served or source(), journal=journal, people=people, limits=patient(limits), grace=0.2, **options
    )
    try:
        async with served_at(app, host) as address:
            yield Client(address, app, headers)
    finally:
        journal.close()
        people.close()


@asynccontextmanager
async def served_at(app: Any, host: str = "127.0.0.1") -> AsyncGenerator[str]:
    """Start an app and serve it on this event loop until the block ends. Yields its address."""
    listening = listen(host, 0)
    ready = asyncio.Event()
    server = server_for(app, ready.set)
    server.config.timeout_graceful_shutdown = int(PATIENCE)  # not reached: connections close sooner
    await app.start()
    task = asyncio.create_task(server.serve([listening]))
    await ready.wait()
    try:
        yield address_of(listening)
    finally:
        await app.stop()
        server.should_exit = True
        await task


async def signed_in(client: Client, **given: str) -> dict[str, str]:
    """Sign in, and return the headers that the page sends with later requests."""
    said = await client.ask("POST", "/login", given)
    assert said.status == 200, said.body
    return {
        "Authorization": "-",
        "Cookie": said.headers["set-cookie"].partition(";")[0],
        "Handrail-Key": said.json["key"],
    }


def said_by(messages: Any) -> list[str]:
    """Return the model's texts among a snapshot's messages."""
    return [each["content"] for each in messages if each["role"] == "assistant"]


__all__ = ["AssistantMessage", "Client", "Limits", "Said", "Still", "Stream", "serving", "source"]
