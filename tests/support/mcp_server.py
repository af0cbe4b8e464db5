"""An MCP server with protocol version 2025-11-25 that misbehaves on request: `python mcp_server.py [STATE_FILE]`.

It is written without the SDK, so that it can send messages that the SDK would not. The state file, if any, holds the names of
additional tools that the server lists. With a state file, `die` ends the server only once, and `ask` asks for more fields.
"""

import base64
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

TEXT = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}
NOTHING = {"type": "object", "properties": {}}
TOOLS = {
    "echo": {"inputSchema": TEXT, "annotations": {"readOnlyHint": True}},
    "Send.Mail": {"inputSchema": TEXT},
    "pixels": {"inputSchema": NOTHING},
    "die": {"inputSchema": NOTHING, "annotations": {"readOnlyHint": True}},
    "flood": {"inputSchema": NOTHING},
    "huge": {"inputSchema": NOTHING},
    "rubbish": {"inputSchema": TEXT},
    "hang": {"inputSchema": NOTHING},
    "ask": {"inputSchema": NOTHING},
    "change": {"inputSchema": TEXT},
    "crash": {"inputSchema": NOTHING},
    "stop": {"inputSchema": NOTHING},
    "leak": {"inputSchema": TEXT},
    "meta": {"inputSchema": NOTHING},
    "remote": {"inputSchema": {"type": "object", "properties": {"a": {"$ref": "https://example.com/a"}}}},
}
extra: list[str] = []
state = Path(sys.argv[1]) if len(sys.argv) > 1 else None


def send(message: object) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


def reply(id: object, result: object) -> None:
    send({"jsonrpc": "2.0", "id": id, "result": result})


def text(words: str, error: bool = False) -> dict[str, object]:
    return {"content": [{"type": "text", "text": words}], "isError": error}


ANSWERS: dict[str, object] = {
    "answer": {"content": "not a list"},
    "word": "not an object",
    "half": text("half a character: \ud83d"),
    "deep": {**text("deep"), "structuredContent": json.loads('{"a":' * 250 + "1" + "}" * 250)},
}


def notify(method: str, **params: object) -> None:
    send({"jsonrpc": "2.0", "method": method, "params": params})


def listed() -> list[dict[str, object]]:
    more = extra + (state.read_text().split() if state is not None and state.exists() else [])
    names = {**TOOLS, **{name: {"inputSchema": 3 if name == "wrong" else TEXT} for name in more}}
    return [{"name": name, "description": f"Does {name}.", **rest} for name, rest in names.items()]


def call(id: object, name: str, arguments: dict[str, str], meta: dict[str, object]) -> None:
    match name:
        case "die":
            if state is None:
                os._exit(1)
            marked = state.with_suffix(".died")
            if not marked.exists():
                marked.touch()
                os._exit(1)
            reply(id, text("survived"))
        case "flood":
            while True:
                notify("notifications/message", level="info", data="x" * 100)
        case "huge":
            sys.stdout.write("x" * (17 * 1024 * 1024))
            sys.stdout.flush()
            time.sleep(60)
        case "rubbish":
            sys.stdout.write(arguments["text"] + "\n")
            reply(id, ANSWERS.get(arguments["text"]) or text("after rubbish"))
        case "crash":
            sys.stderr.write("first\nloading\nToken is " + os.environ.get("API_TOKEN", "") + "\n")
            sys.stderr.flush()
            os._exit(3)
        case "stop":
            time.sleep(600)
        case "leak":
            said = os.environ["API_TOKEN"]
            if arguments["text"] == "error":
                send({"jsonrpc": "2.0", "id": id, "error": {"code": -32000, "message": f"bad token {said}"}})
            elif arguments["text"] == "file":
                data = base64.b64encode(f"a {said} b".encode()).decode()
                inner = {"uri": f"file:///{said}.txt", "mimeType": "text/plain", "blob": data}
                reply(id, {"content": [{"type": "resource", "resource": inner}]})
            elif arguments["text"] == "question":
                schema = {"type": "object", "properties": {"size": {"type": "integer", "title": said}}}
                params = {"message": f"Is {said} right?", "requestedSchema": schema}
                send({"jsonrpc": "2.0", "id": "q1", "method": "elicitation/create", "params": params})
                answer = json.loads(sys.stdin.readline())["result"]
                reply(id, text(json.dumps(answer)))
            elif arguments["text"] == "value":
                reply(id, {"content": [], "structuredContent": {"token": said, said: [said]}})
            else:
                reply(id, text(f"token {said}"))
        case "hang":
            return
        case "pixels":
            reply(id, {"content": [{"type": "image", "data": "AAAA" * 4000, "mimeType": "image/png"}]})
        case "ask":
            fields: dict[str, Any] = {"size": {"type": "integer"}}
            if state is not None:
                fields["unit"] = {"type": "string", "default": "cm"}
                fields["to"] = {"type": "string", "format": "email"}
                named = [{"const": "a", "title": "A"}, {"const": "b", "title": "B"}]
                fields["pick"] = {"type": "string", "oneOf": named}
                fields["old"] = {"type": "string", "enum": ["x"], "enumNames": ["X"]}
                fields["many"] = {"type": "array", "items": {"anyOf": named}}
            schema = {"type": "object", "properties": fields, "required": ["size"]}
            params = {"message": "Which size?", "requestedSchema": schema}
            send({"jsonrpc": "2.0", "id": "q1", "method": "elicitation/create", "params": params})
            answer = json.loads(sys.stdin.readline())["result"]
            reply(id, text(json.dumps(answer)))
        case "meta":
            reply(id, text(" ".join(sorted(meta))))
        case "change":
            extra.append(arguments["text"])
            notify("notifications/tools/list_changed")
            reply(id, text("changed"))
        case _:
            if "progressToken" in meta:
                notify("notifications/progress", progressToken=meta["progressToken"], progress=1, total=2)
            reply(id, text(f"{name}: {arguments.get('text')}"))


for line in sys.stdin:
    message = json.loads(line)
    id, params = message.get("id"), message.get("params") or {}
    match message.get("method"):
        case "initialize":
            about = {"name": "trial", "version": "1"}
            reply(
                id,
                {
                    "protocolVersion": "2025-11-25",
                    "capabilities": {"tools": {"listChanged": True}},
                    "serverInfo": about,
                },
            )
        case "tools/list":
            reply(id, {"tools": listed()})
        case "tools/call":
            call(id, params["name"], params.get("arguments") or {}, params.get("_meta") or {})
        case _ if id is not None:
            send({"jsonrpc": "2.0", "id": id, "error": {"code": -32601, "message": "no such method"}})
        case _:
            pass
