"""An HTTP server in the test's own event loop, which answers each request with the result of a function."""

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from types import MappingProxyType
from typing import Any, NamedTuple
from urllib.parse import parse_qsl

ECHO = {"name": "echo", "inputSchema": {"type": "object", "properties": {"text": {"type": "string"}}}}


class Reply(NamedTuple):
    """One response. Its body may be endless: chunks are sent until none is left or the connection is closed."""

    status: int = 200
    headers: Mapping[str, str] = MappingProxyType({})
    body: Iterable[bytes] = ()


class Request(NamedTuple):
    """One request: its method, its headers by their names in lower case, its body as JSON ({} if it is empty or not JSON), its path, and its form."""

    method: str
    headers: dict[str, str]
    message: dict[str, Any]
    path: str = ""
    form: Mapping[str, str] = MappingProxyType({})


def json_reply(message: dict[str, Any], result: Any, **headers: str) -> Reply:
    """Return a successful answer to a JSON-RPC request."""
    body = json.dumps({"jsonrpc": "2.0", "id": message["id"], "result": result}).encode()
    return Reply(200, {"Content-Type": "application/json", **headers}, [body])


def ordinary(request: Request, session: str = "") -> Reply:
    """Answer as a server with protocol version 2025-11-25 and one tool, which repeats its argument."""
    message = request.message
    match message.get("method"):
        case "initialize":
            about = {"name": "trial", "version": "1"}
            result = {"protocolVersion": "2025-11-25", "capabilities": {"tools": {}}, "serverInfo": about}
            return json_reply(message, result, **({"Mcp-Session-Id": session} if session else {}))
        case "tools/list":
            return json_reply(message, {"tools": [ECHO]})
        case "tools/call":
            text = str(message["params"]["arguments"].get("text"))
            return json_reply(message, {"content": [{"type": "text", "text": text}]})
        case _ if "id" in message:
            body = {"jsonrpc": "2.0", "id": message["id"], "error": {"code": -32601, "message": "no method"}}
            return Reply(200, {"Content-Type": "application/json"}, [json.dumps(body).encode()])
        case _:
            return Reply(202 if request.method == "POST" else 405)


@asynccontextmanager
async def listening(
    answer: Callable[[Request], Reply | None], host: str = "127.0.0.1", port: int = 0
) -> AsyncGenerator[str]:
    """Listen at a host, by default on a free port, and yield the address.

    If `answer` returns None, the connection is closed without a response.
    """

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while first := await reader.readline():
                headers: dict[str, str] = {}
                while (line := (await reader.readline()).strip()) != b"":
                    name, _, value = line.decode().partition(":")
                    headers[name.lower()] = value.strip()
                body = await reader.readexactly(int(headers.get("content-length", 0)))
                method, path, _ = first.decode().split()
                message = json.loads(body) if "json" in headers.get("content-type", "") and body else {}
                form = dict(parse_qsl(body.decode())) if "form" in headers.get("content-type", "") else {}
                reply = answer(Request(method, headers, message, path, form))
                if reply is None:
                    break
                named = "".join(f"{name}: {value}\r\n" for name, value in reply.headers.items())
                writer.write(
                    f"HTTP/1.1 {reply.status} X\r\n{named}Transfer-Encoding: chunked\r\n\r\n".encode()
                )
                for chunk in reply.body:
                    writer.write(b"%x\r\n%s\r\n" % (len(chunk), chunk))
                    await writer.drain()
                writer.write(b"0\r\n\r\n")
                await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(serve, host, port)
    try:
        yield f"http://{host}:{server.sockets[0].getsockname()[1]}/mcp"
    finally:
        server.close()
