"""Serve chat completions on loopback, for the peers' own HTTP clients.

    python server.py        prints its address and serves until its standard input is closed

The request's `model` names the script. The number of `@r` marks in the body is the number of results that the model has
seen. If a framework loses or repeats a result, it gets the wrong turn, and its run fails the checks. GET /stats returns
the number of other requests so far. The server uses only the standard library.
"""

from __future__ import annotations

import asyncio
import functools
import gc
import json
import sys
from typing import Any, cast

from work import Script, Turn

_USAGE = {"prompt_tokens": 10, "completion_tokens": 5, "total_tokens": 15}


def completion(turn: Turn, model: str) -> bytes:
    """Return the body of the response for a turn."""
    message: dict[str, Any] = {"role": "assistant", "content": turn.text, "refusal": None, "annotations": []}
    if turn.calls:
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.args_json}}
            for call in turn.calls
        ]
    choice = {
        "index": 0,
        "message": message,
        "logprobs": None,
        "finish_reason": "tool_calls" if turn.calls else "stop",
    }
    body = {"id": "chatcmpl-bench", "object": "chat.completion", "created": 1700000000, "model": model}
    return json.dumps(body | {"choices": [choice], "usage": _USAGE, "system_fingerprint": None}).encode()


def reply(status: int, body: bytes) -> bytes:
    """Encode a complete HTTP response."""
    head = b"HTTP/1.1 %d OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    return head % (status, len(body)) + body


@functools.lru_cache(maxsize=4096)
def answer(name: bytes, step: int) -> tuple[float, bytes]:
    """Return the seconds to wait, and the response.

    Responses are cached, so that the server takes as little CPU time from the peers as possible.
    """
    script = Script.named(name)
    return script.delay_ms / 1000, reply(200, completion(script.turn_at(step), script.model_name))


class Connection(asyncio.Protocol):
    """One client's connection, kept alive for as many requests as it sends."""

    served = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        self.buffer = bytearray()

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        while (request := self.take()) is not None:
            self.handle(*request)

    def take(self) -> tuple[bytes, bytes] | None:
        """Return the head and the body of the next request, or None if it is not complete yet."""
        end = self.buffer.find(b"\r\n\r\n")
        if end < 0:
            return None
        head = bytes(self.buffer[:end])
        lower = head.lower()
        if b"transfer-encoding: chunked" in lower:
            taken = self.chunks(end + 4)
        else:
            at = lower.find(b"\r\ncontent-length:")
            size = int(lower[at + 17 :].split(b"\r\n", 1)[0]) if at >= 0 else 0
            whole = len(self.buffer) >= end + 4 + size
            taken = (bytes(self.buffer[end + 4 : end + 4 + size]), end + 4 + size) if whole else None
        if taken is None:
            return None
        body, used = taken
        del self.buffer[:used]
        return head, body

    def chunks(self, position: int) -> tuple[bytes, int] | None:
        """Return the body of a chunked request and the position where it ends, or None if it is not complete yet."""
        body = b""
        while True:
            line = self.buffer.find(b"\r\n", position)
            if line < 0:
                return None
            size = int(self.buffer[position:line].split(b";")[0], 16)
            position = line + 2 + size + 2
            if len(self.buffer) < position:
                return None
            body += self.buffer[line + 2 : line + 2 + size]
            if size == 0:
                return body, position

    def handle(self, head: bytes, body: bytes) -> None:
        if head.startswith(b"GET /stats"):
            self.send(reply(200, json.dumps({"served": Connection.served}).encode()))
            return
        Connection.served += 1
        try:
            if b'"stream":true' in body or b'"stream": true' in body:
                raise ValueError("this server does not stream")
            start = body.find(b"bench-")
            delay, response = answer(body[start : body.find(b"-end", start) + 4], body.count(b"@r"))
        except ValueError as wrong:
            error = {"error": {"message": str(wrong), "type": "bench"}}
            self.send(reply(400, json.dumps(error).encode()))
            return
        if delay:
            asyncio.get_running_loop().call_later(delay, self.send, response)
        else:
            self.send(response)

    def send(self, response: bytes) -> None:
        if not self.transport.is_closing():
            self.transport.write(response)


async def serve() -> None:
    """Serve on a free loopback port, until standard input is closed."""
    server = await asyncio.get_running_loop().create_server(Connection, "127.0.0.1", 0, backlog=2048)
    print(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1", flush=True)
    gc.freeze()
    async with server:
        # If the parent is killed, the system closes this pipe, and the server ends too.
        await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(serve())
