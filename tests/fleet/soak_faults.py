"""The faults of the soak: of models, of the disk and clock of processes, and of databases. Each lasts until it is over."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sqlite3
from collections.abc import AsyncGenerator, Callable, Mapping
from pathlib import Path
from typing import Any

import psycopg

from handrail.journal.postgres.address import parse_url
from handrail.messages import ModelRequest
from handrail.run.call import ToolCall
from handrail.serve.model_server import request_of
from support.killed_postgres import Server
from support.raw_server import Raw, delta, streamed, whole

MODELS = ("refuses", "429", "hangs", "cuts", "garbage")
"""What the model server can do in place of answering."""
_GARBAGE = streamed(b'{"choices": [{"delta"', end=b"\x00\xff\n\n")


class ModelServer(Raw):
    """A model server on loopback that answers with functions, in chat completions, unless it has a fault."""

    def __init__(self, answers: Mapping[str, Callable[[ModelRequest], ToolCall | str]]) -> None:
        super().__init__((b"",))
        self._functions = answers
        self._changed = asyncio.Event()
        self._server: asyncio.Server | None = None
        self._fault = ""
        self.port = 0

    async def listen(self) -> None:
        self._server = await asyncio.start_server(self.serve, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}/v1"

    async def stop(self) -> None:
        assert self._server is not None
        self._server.close()
        self.close()
        await self.wait_closed()

    async def change(self, fault: str) -> None:
        """Have this fault from now on; "" for none. A server that refuses closes its connections and does not listen."""
        was, self._fault = self._fault, fault
        self._changed.set()
        self._changed = asyncio.Event()
        if fault == "refuses":
            assert self._server is not None
            self._server.close()
            self.close()
        elif was == "refuses":
            await self.listen()

    async def answer(self) -> bytes:
        body = self.bodies[-1]
        self.heads.clear()
        self.bodies.clear()
        if self._fault == "hangs":
            await self._changed.wait()
        if self._fault == "429":
            return whole({"error": {"message": "slow down", "code": "rate_limit_exceeded"}}, 429)
        if self._fault == "garbage":
            return _GARBAGE
        reply = self._functions[body["model"]](request_of(body))
        if isinstance(reply, str):
            chunks = [delta(content=reply[at : at + 40]) for at in range(0, len(reply), 40)] + [delta("stop")]
        else:
            call = {"name": reply.name, "arguments": json.dumps(reply.arguments)}
            chunks = [delta(tool_calls=[{"index": 0, "id": reply.id, "type": "function", "function": call}])]
            chunks.append(delta("tool_calls"))
        text = sum(len(str(each.get("content"))) for each in body["messages"])
        usage = {"prompt_tokens": text // 4, "completion_tokens": 10, "total_tokens": text // 4 + 10}
        made = streamed(*chunks, {"choices": [], "usage": usage})
        return made if self._fault != "cuts" else made[: len(made) // 2] + b"<cut>"


@contextlib.asynccontextmanager
async def model_server(
    answers: Mapping[str, Callable[[ModelRequest], ToolCall | str]],
) -> AsyncGenerator[ModelServer]:
    server = ModelServer(answers)
    await server.listen()
    try:
        yield server
    finally:
        await server.stop()


# --- databases ----------------------------------------------------------------------------------------


def lock_sqlite(path: Path) -> Callable[[], None]:
    """Lock a SQLite file against writers. Returns the function that unlocks it."""
    options: dict[str, Any] = {"isolation_level": None, "check_same_thread": False, "timeout": 30}
    connection = sqlite3.connect(f"{path.as_uri()}?mode=rw", uri=True, **options)
    connection.execute("BEGIN IMMEDIATE")

    def unlock() -> None:
        connection.execute("ROLLBACK")
        connection.close()

    return unlock


def lock_postgres(url: str) -> Callable[[], None]:
    """Lock the table of runs. Returns the function that unlocks it."""
    address = parse_url(url)
    connection = psycopg.connect(address.conninfo)
    connection.execute(f'LOCK TABLE "{address.schema}".runs IN ACCESS EXCLUSIVE MODE')  # pyright: ignore[reportArgumentType, reportCallIssue]  # plain names
    return connection.close


def drop_connections(server: Server) -> None:
    """Drop all connections to the PostgreSQL server."""
    with psycopg.connect(server.url(), autocommit=True) as connection:
        connection.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid != pg_backend_pid() AND usename = 'tests'"
        )
