"""Measure runs with attachments: the bytes sent, the bytes in the journal, and the CPU time per turn.

    python bench/attachments.py [TURNS [MEGABYTES]]

Two runs are measured on each wire, one with ten pictures and one without. Their turns alternate with a bare POST of as
many bytes as the pictures have in base64. The POST is the minimum cost of a turn with the pictures, since every request
contains the whole conversation. The server is a separate process.
"""

from __future__ import annotations

import asyncio
import io
import itertools
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from pathlib import Path
from typing import Any

import aiohttp

from handrail import Adapter, Attachment, Prompt, SqliteJournal, tool
from handrail.messages import Model, ModelPart, ModelRequest, SentPart, StopPart, TextPart
from handrail.models.anthropic import AnthropicModel
from handrail.models.gemini import GeminiModel
from handrail.models.openai import OpenAIModel

GROWTH_LIMIT = 1.5
"""Maximum cost of a turn in the second half of a run, as a multiple of a turn in the first half."""
SENDING_LIMIT = 2.5
"""Maximum cost of the attachments in one turn, in bare POSTs of the same bytes."""
JOURNAL_LIMIT = 1.05
"""Maximum number of bytes that attachments add to the journal, as a multiple of their own size."""

WIRES: dict[str, Callable[[str], Model]] = {
    "chat": lambda url: OpenAIModel("m", base_url=url, key_variable=None),
    "mistral": lambda url: OpenAIModel("m", provider="mistral", base_url=url, key_variable=None),
    "responses": lambda url: OpenAIModel("m", api="responses", base_url=url, key_variable=None),
    "anthropic": lambda url: AnthropicModel("m", base_url=url, key_variable=None),
    "gemini": lambda url: GeminiModel("m", base_url=url, key_variable=None),
}

# --- the server ---

ANSWERS = {
    "/chat/completions": '{"choices":[{"message":{"content":null,"tool_calls":[{"id":"c%d","type":"function","function":'
    '{"name":"look","arguments":"{}"}}]},"finish_reason":"tool_calls"}]}',
    "/responses": '{"output":[{"type":"function_call","call_id":"c%d","name":"look","arguments":"{}"}],"status":"completed"}',
    "/v1/messages": '{"content":[{"type":"tool_use","id":"c%d","name":"look","input":{}}],"stop_reason":"tool_use"}',
    ":generateContent": '{"candidates":[{"content":{"role":"model","parts":[{"functionCall":{"id":"c%d","name":"look",'
    '"args":{}}}]},"finishReason":"STOP"}]}',
}
"""The response body for each end of a request's path. It makes one call, and `%d` is replaced by the call's number."""


async def serve() -> None:
    """Answer every request with a call, until standard input is closed."""
    numbers = itertools.count(1)

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
                left = int(head.split("content-length: ")[1].split("\r\n")[0])
                while left:
                    left -= len(await reader.read(min(left, 1 << 20)))
                path = head.split(" ")[1]
                answer = next(each for end, each in ANSWERS.items() if path.endswith(end.lower()))
                body = (answer % next(numbers)).encode()
                reply = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%s"
                writer.write(reply % (len(body), body))
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    server = await asyncio.start_server(connected, "127.0.0.1", 0, limit=1 << 20)
    print(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
    await asyncio.to_thread(sys.stdin.read)


# --- the runs ---


@tool(effect="read")
async def look() -> str:
    """Look once more."""
    return "the same as before"


PROMPT = Prompt("bench", "Look at everything.", tools=[look])


class Measured:
    """A model that measures each turn of a run, and ends the run after a number of turns."""

    def __init__(self, model: Model, turns: int) -> None:
        self.name, self.traits = model.name, model.traits
        self._model, self._turns = model, turns
        self.sent = 0
        self.gates: asyncio.Queue[None] = asyncio.Queue()
        self.waits = asyncio.Event()

    async def stream(self, request: ModelRequest, /) -> AsyncGenerator[ModelPart]:
        self.waits.set()
        await self.gates.get()
        if not self._turns:
            yield TextPart("done")
            yield StopPart("done")
            return
        self._turns -= 1
        async for part in self._model.stream(request):
            if isinstance(part, SentPart):
                self.sent += len(part.body)
            yield part

    async def turn(self) -> float:
        """Let the run do one turn, and return its CPU time."""
        began = time.process_time()
        self.waits.clear()
        self.gates.put_nowait(None)
        await self.waits.wait()
        return time.process_time() - began


async def post(client: aiohttp.ClientSession, url: str, body: bytes) -> float:
    """Post some bytes, and return the CPU time that it takes."""
    began = time.process_time()
    async with client.post(f"{url}/chat/completions", data=io.BytesIO(body)) as response:
        await response.read()
    return time.process_time() - began


def size_of(path: Path) -> int:
    return sum(os.stat(each).st_size for each in path.parent.glob(f"{path.name}*"))


async def two_runs(
    wire: str, url: str, folder: Path, turns: int, pictures: Sequence[Attachment]
) -> tuple[list[Measured], list[list[float]], list[int]]:
    """Do one run with the pictures and one without, in alternating turns, and a bare POST after each pair of turns.

    Return the models, the cost of each turn of both runs and of each POST, and the sizes of the journals.
    """
    body = bytes(sum(each.size for each in pictures) * 4 // 3)
    models = [Measured(WIRES[wire](url), turns) for _ in range(2)]
    paths = [folder / f"{wire}-{number}.db" for number in range(2)]
    journals = [SqliteJournal(path) for path in paths]
    runs: list[asyncio.Future[Any]] = []
    for model, journal, attached in zip(models, journals, (pictures, ()), strict=True):
        run = Adapter(model, journal=journal).evaluate(PROMPT, "look", attachments=attached)
        runs.append(asyncio.ensure_future(run))
        await model.waits.wait()
    spent: list[list[float]] = [[], [], []]
    async with aiohttp.ClientSession() as client:
        for _ in range(turns):
            for model, costs in zip(models, spent[:2], strict=True):
                costs.append(await model.turn())
            spent[2].append(await post(client, url, body))
    for model, run in zip(models, runs, strict=True):
        model.gates.put_nowait(None)
        await run
    for journal in journals:
        journal.close()
    return models, spent, [size_of(path) for path in paths]


def say(what: str, figure: str, missed: bool = False) -> None:
    print(f"{what:<64}{figure:>16}{'   MISSED' if missed else ''}")


def low(costs: Sequence[float]) -> float:
    """Return the lower quartile, because other processes on the machine only ever add to a cost."""
    return statistics.quantiles(costs, n=4)[0]


def ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms"


async def measure(url: str, folder: Path, turns: int, megabytes: float) -> None:
    each = int(megabytes * 1e6 / 10)
    pictures = [
        Attachment(b"\x89PNG\r\n\x1a\n" + os.urandom(each - 8), f"{number}.png") for number in range(10)
    ]
    attached = sum(picture.size for picture in pictures)
    for wire in WIRES:
        (model, plain), spent, (size, plain_size) = await two_runs(wire, url, folder, turns, pictures)
        cost, plain_cost, least = map(low, spent)
        half = turns // 2
        growth = low(spent[0][half:]) / low(spent[0][:half])
        added = (size - plain_size) / attached
        sending = (cost - plain_cost) / least
        say(f"{wire}: bytes sent in {turns} turns", f"{model.sent / 1e6:.1f} MB")
        say("  without attachments", f"{plain.sent / 1e6:.3f} MB")
        say("  bytes in the journal", f"{size / 1e6:.2f} MB")
        say("  added by the attachments, as a multiple of their own", f"{added:.3f}", added > JOURNAL_LIMIT)
        say("  CPU time of a turn", ms(cost))
        say("  without attachments", ms(plain_cost))
        say(f"  a bare POST of {attached * 4 // 3 / 1e6:.1f} MB", ms(least))
        say("  what the attachments cost, in bare POSTs", f"{sending:.2f}", sending > SENDING_LIMIT)
        say(
            "  the second half of the turns, as a multiple of the first",
            f"{growth:.2f}",
            growth > GROWTH_LIMIT,
        )


def main(turns: int = 50, megabytes: float = 10) -> None:
    command = [sys.executable, __file__, "serve"]
    with (
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server,
        tempfile.TemporaryDirectory() as folder,
    ):
        assert server.stdout is not None
        url = server.stdout.readline().strip()
        asyncio.run(measure(url, Path(folder), turns, megabytes))
        server.communicate()


if __name__ == "__main__":
    if sys.argv[1:2] == ["serve"]:
        asyncio.run(serve())
    else:
        main(*map(int, sys.argv[1:3]))
