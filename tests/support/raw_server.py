"""A model server that sends exactly the given bytes, to test responses that no correct server would send.

The test fails if the wire's grammar refuses a request.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

from support.strict_wires import note


class Raw:
    """A running server, with its address and the requests it received."""

    def __init__(self, answers: tuple[bytes, ...]) -> None:
        self._answers = list(answers)
        self._writers: list[asyncio.StreamWriter] = []
        self._serving: set[asyncio.Task[Any] | None] = set()
        self.url = ""
        self.heads: list[bytes] = []
        """The request line and headers of each request, in lower case."""
        self.bodies: list[Any] = []
        self.connections = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self._writers.append(writer)
        self._serving.add(asyncio.current_task())
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).lower()
                self.heads.append(head)
                if not head.startswith(b"get "):
                    length = int(head.split(b"content-length:")[1].split(b"\r\n")[0])
                    body = await reader.readexactly(length)
                    self.bodies.append(json.loads(body))
                    note(head.split(b" ")[1].decode(), body)
                answer = await self.answer()
                whole, cut, _ = answer.partition(b"<cut>")
                for piece in whole.split(b"<pause>"):
                    writer.write(piece)
                    await writer.drain()
                    for _ in range(10):  # lets the client process what was sent
                        await asyncio.sleep(0)
                if cut:
                    return
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def answer(self) -> bytes:
        """Return the bytes that answer the newest request. At `<cut>`, the connection is closed."""
        return self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]

    def close(self) -> None:
        for writer in self._writers:
            writer.close()

    async def wait_closed(self) -> None:
        """Wait until the tasks of all connections have ended.

        A task that the event loop cancels at its end is logged, and the log would keep the loop in memory.
        """
        while serving := [task for task in self._serving if task is not None and not task.done()]:
            await asyncio.wait(serving)


@asynccontextmanager
async def raw_server(*answers: bytes) -> AsyncGenerator[Raw]:
    """Serve these answers, one per request. The last one is repeated."""
    raw = Raw(answers)
    server = await asyncio.start_server(raw.serve, "127.0.0.1", 0)
    raw.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield raw
    finally:
        server.close()
        raw.close()
        await raw.wait_closed()


def whole(answer: Any, status: int = 200) -> bytes:
    """Return the bytes of a complete JSON response."""
    body = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
    head = b"HTTP/1.1 %d X\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    return head % (status, len(body)) + body


def streamed(*events: Any, end: bytes = b"data: [DONE]\n\n") -> bytes:
    """Return an event stream for `raw_server`. Each event, and the end, is a separate chunk with a pause after it."""
    chunks = [
        b"data: " + (each if isinstance(each, bytes) else json.dumps(each).encode()) + b"\n\n"
        for each in events
    ]
    said = b"".join(b"%x\r\n%s\r\n<pause>" % (len(chunk), chunk) for chunk in [*chunks, end] if chunk)
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    return head + said + b"0\r\n\r\n"


def said(content: Any = "ok", usage: Any = None, **more: Any) -> bytes:
    """Return the bytes of a response that contains a complete chat completion."""
    answer: dict[str, Any] = {
        "choices": [{"message": {"role": "assistant", "content": content, **more}, "finish_reason": "stop"}]
    }
    return whole(answer | ({"usage": usage} if usage is not None else {}))


def delta(finish: str | None = None, **delta: Any) -> dict[str, Any]:
    """Return one chunk of a streamed chat completion."""
    return {"choices": [{"delta": delta, "finish_reason": finish}]}
