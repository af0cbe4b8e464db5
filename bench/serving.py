"""Measure a server: one run after another, many runs at once, idle viewers, and a reader that never reads.

    python bench/serving.py [RUNS] [VIEWERS] [SECONDS]

The server is a separate process on loopback, and the clients are in this process. Each run has two turns of tool
calls and a streamed answer, from a scripted model, and is recorded in a journal. The benchmark ends by itself.
The floor is a bare app on the same server software, which takes the same request and streams the same bytes.
The exit status is 1 if one of the RUNS concurrent runs did not complete, or if a limit is missed: the CPU time of a run with one
viewer, and the share of a core that a thousand idle viewers cost. VIEWERS is the last of three points.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, Generator
from pathlib import Path
from typing import Any, NamedTuple

RUN_LIMIT = 0.007
"""Maximum CPU seconds of the server for a run with one viewer."""
IDLE_LIMIT = 0.015
"""Maximum share of a core for a thousand idle viewers."""
PIECES = 20
_CHUNKS = 6
"""Number of chunks in which the floor streams a run, which is as often as a run wakes its reader."""
TOKEN = "a-token-for-the-bench"
_TICKS = os.sysconf("SC_CLK_TCK")


# --- the server ---------------------------------------------------------------------------------------


def serve(folder: Path) -> None:
    """Serve on a free port, and print the port."""
    from handrail import Adapter, Prompt, ScriptedModel, SqliteJournal, ToolCall, ToolContext, tool
    from handrail.messages import AssistantMessage, ModelRequest
    from handrail.models.scripted import Reply, Scripted
    from handrail.serve.app import asgi
    from handrail.serve.limits import Limits
    from handrail.serve.server import listen, run
    from handrail.serve.sources import PromptSource

    @tool(effect="read")
    async def look(at: str, context: ToolContext) -> str:
        """Look something up."""
        return f"nothing at {at}"

    def play(request: ModelRequest) -> Scripted:
        turns = 0
        for message in reversed(request.messages):
            if isinstance(message, AssistantMessage):
                turns += 1
            elif getattr(message, "text", "").startswith("go"):
                size = int(message.text.partition(" ")[2] or PIECES)
                if turns < 2:
                    return ToolCall("look", {"at": f"place {turns}"})
                return Reply(pieces=["word " * 4] * size, text="word " * 4 * size)
        return "nothing was said"

    model = ScriptedModel(play)
    model.requests = _Nothing()
    source = PromptSource(Prompt("bench", "Do what is asked.", tools=[look]), Adapter(model))
    limits = Limits(connections=4000, streams=4000, runs=4000, runs_per_principal=4000, idle_per_address=8000, burst=100_000,
                    requests=4000, write_seconds=600.0)  # fmt: skip
    app = asgi(source, journal=SqliteJournal(folder / "runs.db"), token=TOKEN, limits=limits)
    listening = listen("127.0.0.1", 0)
    port = listening.getsockname()[1]
    asyncio.run(run(app, listening, ready=lambda: print(port, flush=True)))


def serve_floor(folder: Path) -> None:
    """Serve the file `run` in the folder as a stream on a free port, and print the port."""
    import uvicorn
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import StreamingResponse
    from starlette.routing import Route

    said = (folder / "run").read_bytes()
    size = -(-len(said) // _CHUNKS)

    async def agent(request: Request) -> StreamingResponse:
        await request.json()

        async def chunks() -> AsyncGenerator[bytes]:
            for at in range(0, len(said), size):
                await asyncio.sleep(0)
                yield said[at : at + size]

        return StreamingResponse(chunks(), media_type="text/event-stream")

    app = Starlette(routes=[Route("/agent", agent, methods=["POST"])])
    listening = socket.socket()
    listening.bind(("127.0.0.1", 0))
    config = uvicorn.Config(app, log_level="error", access_log=False, http="h11", loop="asyncio")
    print(listening.getsockname()[1], flush=True)
    asyncio.run(uvicorn.Server(config).serve([listening]))


class _Nothing(list[Any]):
    """A list that keeps nothing, so that the model's recorded requests do not count as the server's memory."""

    def append(self, item: Any, /) -> None: ...


class Server(NamedTuple):
    port: int
    pid: int

    def cpu(self) -> float:
        """Return the CPU seconds that the server has used so far."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / _TICKS

    def resident(self) -> float:
        """Return the server's resident memory in MB."""
        status = Path(f"/proc/{self.pid}/status").read_text()
        return int(status.partition("VmRSS:")[2].split()[0]) / 1024


@contextlib.contextmanager
def server(kind: str = "serve", said: bytes = b"") -> Generator[Server]:
    """Start a server of Handrail's, or with `floor` the bare one, which streams what was `said`."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "run").write_bytes(said)
        process = subprocess.Popen(
            [sys.executable, __file__, kind, folder], stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        try:
            yield Server(int(process.stdout.readline()), process.pid)
        finally:
            process.terminate()
            process.wait(timeout=30)


# --- the clients --------------------------------------------------------------------------------------


class Took(NamedTuple):
    """The times to the first and to the last event of a run. Both are 0 if the run did not complete."""

    first: float
    all: float


def request(port: int, method: str, path: str, body: Any = None) -> bytes:
    data = b"" if body is None else json.dumps(body).encode()
    head = f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\n"
    head += f"Authorization: Bearer {TOKEN}\r\n"
    return f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data


@contextlib.asynccontextmanager
async def connected(port: int) -> AsyncGenerator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**20)
    try:
        yield reader, writer
    finally:
        writer.close()


def asked(port: int, thread: str, text: str) -> bytes:
    message = {"id": "1", "role": "user", "content": text}
    body = {"threadId": thread, "runId": f"r-{thread}", "messages": [message], "tools": [], "context": []}
    return request(
        port, "POST", "/agent", {**body, "state": {}, "forwardedProps": {}, "protocolVersion": "1.0"}
    )


async def stream(port: int, thread: str, text: str = "go") -> Took:
    """Make one run as an AG-UI client does, and return its times."""
    async with connected(port) as (reader, writer):
        began = time.perf_counter()
        writer.write(asked(port, thread, text))
        await reader.readuntil(b"data: ")
        first = time.perf_counter() - began
        try:
            await reader.readuntil(b'"RUN_FINISHED"')
        except asyncio.IncompleteReadError:
            return Took(0, 0)
        return Took(first, time.perf_counter() - began)


async def whole(port: int, thread: str) -> bytes:
    """Make one run, and return the events that it streams."""
    async with connected(port) as (reader, writer):
        writer.write(asked(port, thread, "go"))
        await reader.readuntil(b"\r\n\r\n")
        said = b""
        while size := int(await reader.readline(), 16):
            said += (await reader.readexactly(size + 2))[:-2]
        return said


async def streams(port: int, runs: int, name: str) -> list[Took]:
    return await asyncio.gather(*(stream(port, f"{name}-{number}") for number in range(runs)))


# --- what is measured ---------------------------------------------------------------------------------


def say(what: str, figure: str) -> None:
    print(f"{what:<64}{figure:>20}", flush=True)


def spread(values: list[float]) -> str:
    at = sorted(values)
    return f"{statistics.median(at) * 1000:.0f} / {at[int(len(at) * 0.99) - 1] * 1000:.0f} ms"


async def one_by_one(at: Server, runs: int, rounds: int = 3) -> bool:
    """Make runs one after another, in turn with the floor."""
    spent = {"serve": 0.0, "floor": 0.0}
    with server("floor", await whole(at.port, "whole")) as floor:
        for number in range(-1, rounds):
            for kind, each in (("serve", at), ("floor", floor)):
                cpu = each.cpu()
                for run in range(runs):
                    await stream(each.port, f"one-{number}-{run}")
                if number >= 0:  # the first round warms up
                    spent[kind] += (each.cpu() - cpu) / runs / rounds
    say("a run with one viewer: server CPU", f"{spent['serve'] * 1000:.1f} ms")
    ratio = spent["serve"] / spent["floor"]
    say("  the same bytes from a bare app; the ratio", f"{spent['floor'] * 1000:.1f} ms; {ratio:.1f}")
    return spent["serve"] <= RUN_LIMIT


async def load(at: Server, runs: int) -> bool:
    await streams(at.port, 5, "warm")
    before, cpu, began = at.resident(), at.cpu(), time.perf_counter()
    took = await streams(at.port, runs, "load")
    wall = time.perf_counter() - began
    done = [each for each in took if each.all]
    say(f"{runs} runs streamed at once: completed", f"{len(done)}")
    say("  time to the first event, p50 / p99", spread([each.first for each in done]))
    say("  time to the last event, p50 / p99", spread([each.all for each in done]))
    say("  total time; server CPU per run", f"{wall:.1f} s; {(at.cpu() - cpu) / runs * 1000:.1f} ms")
    say("  server memory before and after", f"{before:.0f} → {at.resident():.0f} MB")
    return len(done) == runs


async def idle(at: Server, viewers: int, seconds: float) -> bool:
    async with contextlib.AsyncExitStack() as stack:
        for _ in range(viewers):
            reader, writer = await stack.enter_async_context(connected(at.port))
            writer.write(request(at.port, "GET", "/threads/warm-0/events?follow=1"))
            await reader.readuntil(b"RUN_FINISHED")
        await asyncio.sleep(1)
        cpu = at.cpu()
        await asyncio.sleep(seconds)
        share = (at.cpu() - cpu) / seconds
        say(f"{viewers} idle viewers for {seconds:g} s: share of a core", f"{share:.2%}")
        return share <= IDLE_LIMIT * max(viewers, 1000) / 1000


async def over(port: int, thread: str) -> None:
    """Wait until a thread has no active run."""
    while True:
        async with connected(port) as (reader, writer):
            writer.write(request(port, "GET", f"/threads/{thread}"))
            head = await reader.readuntil(b"\r\n\r\n")
            size = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
            if b'"status":"idle"' in await reader.readexactly(size):
                return
        await asyncio.sleep(0.2)


async def stalled(at: Server, runs: int, rounds: int = 3) -> None:
    """Measure runs alone, and beside a client that never reads its long answer.

    The two cases alternate, because the machine's speed varies.
    """
    alone: list[Took] = []
    beside: list[Took] = []
    spent = [0.0, 0.0]

    async def measured(name: str, which: int) -> list[Took]:
        cpu = at.cpu()
        took = await streams(at.port, runs, name)
        spent[which] += (at.cpu() - cpu) / runs / rounds * 1000
        return took

    for number in range(rounds):
        alone += await measured(f"alone{number}", 0)
        with socket.socket() as lazy:
            lazy.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            lazy.connect(("127.0.0.1", at.port))
            lazy.sendall(asked(at.port, f"lazy{number}", "go 30000"))
            await asyncio.sleep(0.5)
            await over(at.port, f"lazy{number}")
            beside += await measured(f"beside{number}", 1)
    say(f"{runs} runs alone: last event, p50 / p99", spread([each.all for each in alone]))
    say(f"{runs} runs beside a reader that never reads", spread([each.all for each in beside]))
    say("  server CPU per run, alone and beside it", f"{spent[0]:.1f} and {spent[1]:.1f} ms")


async def main(runs: int, viewers: int, seconds: float) -> int:
    print(f"load of the machine: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores", flush=True)
    with server() as at:
        kept = [await one_by_one(at, 100), await load(at, runs)]
        kept += [await idle(at, viewers // parts, seconds) for parts in (4, 2, 1)]
        await stalled(at, 50)
    return 0 if all(kept) else 1


if __name__ == "__main__":
    if sys.argv[1:2] == ["serve"]:
        serve(Path(sys.argv[2]))
    elif sys.argv[1:2] == ["floor"]:
        serve_floor(Path(sys.argv[2]))
    else:
        numbers = [float(each) for each in sys.argv[1:]] + [500, 2000, 20][len(sys.argv) - 1 :]
        sys.exit(asyncio.run(main(int(numbers[0]), int(numbers[1]), numbers[2])))
