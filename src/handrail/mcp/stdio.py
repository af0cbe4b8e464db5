"""`serve_one`: serves one MCP client over standard input and output, until the client goes away or the process is to stop."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import signal
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Generator
from typing import Any, cast

from mcp.server.lowlevel.server import Server
from mcp.server.stdio import stdio_server

from handrail.concurrency.operation import cancel_and_await
from handrail.concurrency.threads import run_in_thread

DRAIN_SECONDS = 5.0
"""Maximum seconds for requests to end, and for their responses to be read, once the input has ended."""


async def serve_one(server: Server[Any], park: Callable[[], Awaitable[None]]) -> None:
    """Serve a client until the input ends, nobody reads the output any more, or SIGINT or SIGTERM arrives.

    None of these is an error. On a signal, `park` is called before the requests in progress end. Otherwise they are cancelled,
    because nobody waits for them. A second signal ends the process at once. While a client is served, handlers and their
    child processes read nothing from standard input, and what they print goes to standard error.
    """
    over = asyncio.Event()
    with _wire() as (reads, writes), _signals() as stopped:
        given, said = _Input(reads, over), _Output(writes, over)

        async def serve() -> None:
            async with stdio_server(cast("Any", given), cast("Any", said)) as (read, write):
                await server.run(read, write, server.create_initialization_options())

        async def stop() -> None:
            await stopped.wait()
            await park()
            over.set()

        serving, stopping = asyncio.ensure_future(serve()), asyncio.ensure_future(stop())
        ending = asyncio.ensure_future(over.wait())
        try:
            await asyncio.wait([serving, ending], return_when=asyncio.FIRST_COMPLETED)
            await asyncio.wait([serving], timeout=DRAIN_SECONDS)
        finally:
            await cancel_and_await([serving, stopping, ending])
        if not serving.cancelled():
            serving.result()


class _Input:
    """The lines that a client sends, until the input ends or `over` is set."""

    def __init__(self, descriptor: int, over: asyncio.Event) -> None:
        self._file = os.fdopen(descriptor, "rb", closefd=False)
        self._over = over

    async def __aiter__(self) -> AsyncIterator[str]:
        over = asyncio.ensure_future(self._over.wait())
        try:
            while True:
                # in a thread that may be left behind: nothing else ends the read while the client keeps the input open
                line = asyncio.ensure_future(run_in_thread(self._file.readline))
                await asyncio.wait([line, over], return_when=asyncio.FIRST_COMPLETED)
                if self._over.is_set() or not line.result():
                    line.cancel()
                    return
                yield line.result().decode("utf-8", "replace")
        finally:
            self._over.set()
            over.cancel()


class _Output:
    """What the client reads. If it can't be written, `over` is set, and nothing more is written."""

    def __init__(self, descriptor: int, over: asyncio.Event) -> None:
        self._descriptor = descriptor
        self._over = over
        self._is_broken = False
        self._text = ""

    async def write(self, text: str) -> None:
        self._text += text

    async def flush(self) -> None:
        data, self._text = self._text.encode("utf-8", "replace"), ""
        if not self._is_broken:
            try:
                await run_in_thread(lambda: self._write(data))
            except OSError:  # nobody reads it any more
                self._is_broken = True
                self._over.set()

    def _write(self, data: bytes) -> None:
        left = memoryview(data)
        while left:
            left = left[os.write(self._descriptor, left) :]


@contextlib.contextmanager
def _wire() -> Generator[tuple[int, int]]:
    """Yield private copies of standard input and output. Until the block ends, the public ones lead nowhere and to standard error.

    The copies stay open, because a thread may still read or write them.
    """
    reads, writes = (fcntl.fcntl(each, fcntl.F_DUPFD_CLOEXEC, 3) for each in (0, 1))
    sys.stdout.flush()
    nowhere = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nowhere, 0)
    os.close(nowhere)
    os.dup2(2, 1)
    try:
        yield reads, writes
    finally:
        sys.stdout.flush()
        os.dup2(writes, 1)
        os.dup2(reads, 0)


@contextlib.contextmanager
def _signals() -> Generator[asyncio.Event]:
    """Yield an event that the first SIGINT or SIGTERM sets. The second one ends the process. Other threads get no signals."""
    loop, stopped = asyncio.get_running_loop(), asyncio.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stopped
        return

    def handle(number: int) -> None:
        if stopped.is_set():
            os._exit(128 + number)
        stopped.set()

    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    for number in before:
        loop.add_signal_handler(number, handle, number)
    try:
        yield stopped
    finally:
        for number, handler in before.items():
            loop.remove_signal_handler(number)
            signal.signal(number, handler)
