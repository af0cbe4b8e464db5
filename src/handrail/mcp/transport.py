"""Transports to MCP servers: the standard streams of a command, or HTTP.

What a command may send is limited: a message has a maximum size, and a server that sends a great many messages that nobody
asked for, or lines that are not JSON-RPC, is killed.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple, cast

import anyio
import httpx2
from mcp.client.stdio import get_default_environment
from mcp.client.streamable_http import streamable_http_client
from mcp.shared.message import SessionMessage
from mcp_types import JSONRPCError, JSONRPCResponse, jsonrpc_message_adapter

log = logging.getLogger("handrail.mcp")

MAX_MESSAGE = 16 * 1024 * 1024
"""Maximum number of bytes in one message from a server."""
MAX_UNASKED = 5_000
"""Maximum number of messages that a server may send between two answers to requests."""
MAX_RUBBISH = 100
"""Maximum number of lines in a row that are not JSON-RPC messages."""
_SILENCE = 300
"""Seconds for which an HTTP server may send nothing. It may keep a stream open for later events, so this is long."""
_ENDED = "it ended"
_GRACE = 2.0
"""How many seconds a server has to exit after its input ends, and again after it is told to terminate."""


class Address(NamedTuple):
    """Where a server is: a command to start it with, or the URL of a server that is already running."""

    command: tuple[str, ...] = ()
    url: str = ""
    env: Mapping[str, str] = {}
    cwd: str | Path | None = None
    headers: Mapping[str, str] = {}

    def __str__(self) -> str:
        return self.url or " ".join(self.command[:3])

    def open(self, lost: Callable[[str], None]) -> AbstractAsyncContextManager[Any]:
        """Return the transport to the server. When a server with a command goes away, `lost` is called with the reason."""
        return _http(self) if self.url else _stdio(self, lost)


@asynccontextmanager
async def _http(address: Address) -> AsyncGenerator[Any, None]:
    async with (
        httpx2.AsyncClient(
            headers=dict(address.headers), timeout=httpx2.Timeout(30, read=_SILENCE)
        ) as client,
        streamable_http_client(address.url, http_client=client) as streams,
    ):
        yield streams


@asynccontextmanager
async def _stdio(address: Address, lost: Callable[[str], None]) -> AsyncGenerator[Any, None]:
    """Start a server and exchange JSON-RPC lines with it. Its whole process group ends with the context."""
    process = await asyncio.create_subprocess_exec(
        *address.command,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        env={**get_default_environment(), **address.env},
        cwd=address.cwd,
        limit=MAX_MESSAGE,
        start_new_session=True,
    )
    incoming, read = anyio.create_memory_object_stream[Any](0)
    write, outgoing = anyio.create_memory_object_stream[SessionMessage](0)
    reader = asyncio.create_task(_read(process, incoming, lost))
    writer = asyncio.create_task(_write(process, outgoing, incoming))
    try:
        yield read, write
    finally:
        for task in (reader, writer):
            task.cancel()
        for stream in (incoming, read, write, outgoing):
            stream.close()
        await asyncio.shield(asyncio.ensure_future(_stop(process, reader, writer)))


async def _read(process: asyncio.subprocess.Process, incoming: Any, lost: Callable[[str], None]) -> None:
    stdout = process.stdout
    assert stdout is not None
    unasked = rubbish = 0
    why = _ENDED
    with suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):
        while True:
            try:
                line = await stdout.readline()
            except ValueError:
                why = f"it sent a message of more than {MAX_MESSAGE // 1024 // 1024} MB"
                break
            if not line.endswith(b"\n"):
                break
            try:
                message = jsonrpc_message_adapter.validate_json(line, by_name=False)
            except ValueError:
                rubbish += 1
                if rubbish > MAX_RUBBISH:
                    why = f"it sent {rubbish} lines in a row that are not MCP messages"
                    break
                continue
            rubbish = 0
            unasked = 0 if isinstance(message, JSONRPCResponse | JSONRPCError) else unasked + 1
            if unasked > MAX_UNASKED:
                why = f"it sent {unasked:,} messages without an answer"
                break
            await incoming.send(SessionMessage(message))
    if why != _ENDED:
        _kill(process, signal.SIGKILL)
    lost(why)
    incoming.close()


async def _write(process: asyncio.subprocess.Process, outgoing: Any, incoming: Any) -> None:
    stdin = process.stdin
    assert stdin is not None
    try:
        async for sent in outgoing:
            text = sent.message.model_dump_json(by_alias=True, exclude_unset=True)
            stdin.write(text.encode() + b"\n")
            await stdin.drain()
    except (OSError, anyio.ClosedResourceError):
        incoming.close()  # the session sees the end of the connection


async def _stop(process: asyncio.subprocess.Process, *tasks: asyncio.Task[None]) -> None:
    """End a server: close its input, then terminate its process group, then kill what is left of it."""
    await asyncio.gather(*tasks, return_exceptions=True)
    if process.stdin is not None:
        process.stdin.close()
    draining = asyncio.ensure_future(_drain(process.stdout))
    for number in (None, signal.SIGTERM, signal.SIGKILL):
        if number is not None:
            _kill(process, number)
        try:
            await asyncio.wait_for(process.wait(), _GRACE)
            break
        except TimeoutError:
            continue
    _kill(process, signal.SIGKILL)  # what the server started and left
    draining.cancel()
    await asyncio.gather(draining, return_exceptions=True)
    transport: Any = getattr(process, "_transport")  # noqa: B009  # asyncio has no public way to close the pipes
    transport.close()


def _kill(process: asyncio.subprocess.Process, number: signal.Signals) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)


async def _drain(stdout: asyncio.StreamReader | None) -> None:
    """Discard the remaining output, because a server that is stuck writing can't exit."""
    while stdout is not None and await stdout.read(65536):
        pass


def check_command(command: object) -> tuple[str, ...] | None:
    """Return a command as a tuple, or None if it is not a non-empty list of strings."""
    if isinstance(command, str) or not isinstance(command, Sequence) or not command:
        return None
    words = tuple(cast("Sequence[Any]", command))
    return words if all(isinstance(word, str) and "\0" not in word for word in words) and words[0] else None
