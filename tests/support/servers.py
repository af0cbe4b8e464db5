"""Third-party model servers for the tests of the HTTP models.

    with aimock(fixtures) as server: ...      npm's @copilotkit/aimock: answers from fixtures
    with llmock(behaviors) as server: ...     PyPI's llmock: faults, and a verdict on the client
    with embedded() as server: ...            the embedded model behind xllamacpp's own HTTP server

Each server runs in its own process, which ends with the block, and listens on a free loopback port.
conftest.py has them as the fixtures `aimock_server`, `llmock_server` and `embedded_server`. These start once per
session (and per xdist worker), and have no script when a test begins.

    server.openai_url       base of /chat/completions and /responses
    server.anthropic_url    base of /v1/messages
    server.gemini_url       base of /models/NAME:generateContent (aimock, llmock)
    server.script([…])      aimock, llmock: reset the server, and use this script
    server.requests()       aimock, llmock: the requests since the script was set, as `Seen`
    server.pending()        llmock: the part of the script that is not used yet
    server.verdict()        llmock: its verdict: whether the client `passed`, and the `findings`, each with a `code`
    server.busy()           embedded: whether the model is generating

`CAN` says which server can play which case on which wire. Scripts for aimock:

    text, stream        {"match": {"userMessage": "hi"}, "response": {"content": "Hello.", "usage": {…}}}
    calls               "response": {"toolCalls": [{"id": "call_1", "name": "f", "arguments": {…}}, …]}
    pieces              "chunkSize": 6 beside "response": the number of characters in each piece of text or arguments
    second round        "match": {…, "hasToolResult": true}
    length              "response": {"content": …, "finishReason": "length"}
    error               "response": {"error": {"message": …}, "status": 429, "retryAfter": 2}
    500 then fine       two fixtures, "match": {…, "sequenceIndex": 0} and {…, "sequenceIndex": 1}
    slow stream         "latency": 300 beside "response": milliseconds before every event
    timeout             "chaos": {"latencyMs": 30000} beside "response"
    truncated           "truncateAfterChunks": 3, "latency": 20 beside "response": the connection is cut
                        (without a latency it is cut before the first byte)
    malformed           "chaos": {"malformedRate": 1}: status 200 with invalid JSON, also for a stream
    thinking            "response": {"content": …, "reasoning": …, "reasoningSignature": …}, and a model whose
                        name aimock treats as a reasoning model, such as o3 or claude-opus-4-6

Scripts for llmock. Each behaviour applies to the next `"times"` requests (default 1) that fit its `"match"`:

    text                {"type": "reply", "text": "One two."}        one word per event
    calls               {"type": "reply", "tool_calls": [{"name": "f", "arguments": {…}}, …]}
    malformed arguments {"type": "tool_fault", "kind": "malformed_arguments"} after the reply
    unknown tool        {"type": "tool_fault", "kind": "unknown_tool"} after the reply, or a reply that calls an unknown tool
    length              {"type": "reply", "text": …, "finish_reason": "length"}
    error               {"type": "fail", "status": 429, "retry_after": 0.2}; without `retry_after` there is no such header
    500 then fine       {"type": "fail", "status": 500}, then a reply
    stalled stream      {"type": "stream_fault", "kind": "stall", "after_chunks": 2, "stall_seconds": 20}
    timeout             {"type": "delay", "seconds": 30}
    truncated           {"type": "stream_fault", "kind": "truncate", "after_chunks": 3}: ends without an error
    disconnected        the same with "disconnect": the connection is cut
    malformed           the same with "malformed": the JSON of one event is cut in half, and the later events follow unchanged

When a client disconnects, llmock records it: `raw["completed"]` is false, and if the stream was stalled,
`raw["stall_waited"]` is the number of seconds that the client waited. The embedded model stops within a fraction of a
second. aimock does not notice.

aimock records the headers, with keys blanked, and the body converted to the format of chat completions. llmock records
the body as it was sent.

The embedded model (`"model": "smollm2"`) calls a tool if the conversation has about three examples of such calls with
their results and answers; `tool_choice` is not enforced. Its responses wire requires `"type": "message"` and a list
as content in an assistant's item, and always reports `completed`.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import IO, Any

from support import PATIENCE, ROOT, SUPPORT

COMPONENTS = ROOT / ".components"
START_SECONDS = PATIENCE
END_SECONDS = 5.0

CHAT, RESPONSES, MESSAGES, GEMINI = "chat", "responses", "messages", "gemini"
THREE = frozenset({CHAT, RESPONSES, MESSAGES})
ALL = THREE | {GEMINI}

# The wires on which each server can play each case.
CAN: dict[str, dict[str, frozenset[str]]] = {
    "text": {"aimock": ALL, "llmock": ALL, "embedded": THREE},
    "stream": {"aimock": ALL, "llmock": ALL, "embedded": THREE},
    "one call": {"aimock": ALL, "llmock": ALL, "embedded": THREE},
    "second round": {"aimock": ALL, "llmock": ALL, "embedded": THREE},
    "parallel calls": {"aimock": ALL, "llmock": ALL},
    "arguments in pieces": {
        "aimock": THREE,
        "llmock": THREE,
        "embedded": THREE,
    },  # Gemini sends each call in one piece
    "invalid arguments": {"aimock": ALL, "llmock": ALL},
    "unknown tool": {"aimock": ALL, "llmock": ALL},
    "malformed arguments": {"llmock": THREE},  # on the messages wire, only if streamed; Gemini sends objects
    # aimock returns its fixture, llmock invents a value for the schema, and the embedded model's output is constrained to it.
    "structured output": {"aimock": ALL, "llmock": ALL, "embedded": frozenset({CHAT})},
    "usage": {"aimock": ALL, "llmock": ALL, "embedded": THREE},
    "stopped at the end": {"aimock": ALL, "llmock": ALL, "embedded": THREE},
    "stopped for calls": {"aimock": ALL, "llmock": ALL, "embedded": THREE},
    "stopped by length": {"aimock": ALL, "llmock": ALL, "embedded": frozenset({CHAT, MESSAGES})},
    "thinking": {"aimock": ALL},
    # On the other wires, the attachment follows in a separate user message, which no fixture of aimock matches.
    "results with attachments": {"aimock": frozenset({RESPONSES, MESSAGES}), "llmock": ALL},
    "cancelled mid-stream": {"llmock": ALL, "embedded": THREE},
    "timeout": {"aimock": ALL, "llmock": ALL},
    "429 with retry-after": {"aimock": ALL, "llmock": ALL},
    "429 without": {"llmock": ALL},
    "500 then fine": {"aimock": ALL, "llmock": ALL},
    "truncated stream": {"llmock": ALL},
    "connection cut": {"aimock": ALL, "llmock": ALL},
    "malformed JSON in the stream": {"llmock": ALL},
    "malformed JSON as the body": {"aimock": ALL},
    "prompt too long": {"llmock": ALL, "embedded": THREE},
}


class ServerFailed(RuntimeError):
    """Raised if a server did not start, or refused a request to its control routes."""


@dataclass(frozen=True)
class Seen:
    """A request as a server recorded it. `raw` is the server's complete record, in its own format."""

    path: str
    status: int
    body: Any
    raw: dict[str, Any]


@dataclass(frozen=True)
class Server:
    """A running server, with its address and its process id."""

    url: str
    pid: int

    @property
    def openai_url(self) -> str:
        """The base URL of /chat/completions and /responses."""
        return f"{self.url}/v1"

    @property
    def anthropic_url(self) -> str:
        """The base URL of /v1/messages. Like Anthropic's own base URL, it does not end with `/v1`."""
        return self.url

    @property
    def gemini_url(self) -> str:
        """The base URL of /models/NAME:generateContent."""
        return f"{self.url}/v1beta"

    def control(self, method: str, path: str, body: object = None) -> Any:
        """Send a request to one of the server's control routes, and return the JSON of the response.

        Raises `ServerFailed` for an error status.
        """
        host = self.url.removeprefix("http://")
        headers = {"content-type": "application/json"}
        with contextlib.closing(http.client.HTTPConnection(host, timeout=PATIENCE)) as connection:
            connection.request(method, path, json.dumps(body), headers)
            response = connection.getresponse()
            text = response.read().decode()
        if response.status >= 400:
            raise ServerFailed(f"{method} {path} was answered {response.status}: {text}")
        return json.loads(text)


@dataclass(frozen=True)
class Aimock(Server):
    """The server aimock from npm. Its script is a list of fixtures, `{"match": …, "response": …}`."""

    def script(self, fixtures: Sequence[dict[str, Any]]) -> None:
        """Reset the server and use these fixtures. The first one that matches a request answers it."""
        self.control("POST", "/__aimock/reset")
        if fixtures:
            self.control("POST", "/__aimock/fixtures", {"fixtures": list(fixtures)})

    def requests(self) -> list[Seen]:
        """Return all requests since the script was set, in order."""
        return [
            Seen(entry["path"], entry["response"]["status"], entry["body"], entry)
            for entry in self.control("GET", "/__aimock/journal")
        ]


@dataclass(frozen=True)
class Llmock(Server):
    """The server llmock from PyPI. Its script is a queue of behaviours, `{"type": …}`, which requests use up."""

    @property
    def anthropic_url(self) -> str:
        return f"{self.url}/anthropic"

    @property
    def gemini_url(self) -> str:
        return f"{self.url}/gemini/v1beta"

    def script(self, behaviors: Sequence[dict[str, Any]]) -> None:
        """Reset the server and queue these behaviours."""
        self.control("POST", "/_llmock/reset")
        if behaviors:
            self.control("POST", "/_llmock/scenario", {"behaviors": list(behaviors)})

    def pending(self) -> list[dict[str, Any]]:
        """Return the behaviours that no request has used yet."""
        return self.control("GET", "/_llmock/scenario")["pending"]

    def requests(self) -> list[Seen]:
        """Return all requests since the script was set, in order.

        Waits up to 2 seconds for unfinished ones.
        """
        return [
            Seen(record["path"], record["status"], record["body"], record)
            for record in self.control("GET", "/_llmock/requests")["requests"]
        ]

    def verdict(self) -> dict[str, Any]:
        """Return llmock's verdict: whether the client `passed`, and the `findings`, each with a `code`."""
        return self.control("GET", "/_llmock/verdict")


@dataclass(frozen=True)
class Embedded(Server):
    """The embedded model behind xllamacpp's own server. It can't be scripted, and records no requests."""

    def busy(self) -> bool:
        """Return whether the model is generating. It stops generating soon after the client has closed the connection."""
        return any(slot["is_processing"] for slot in self.control("GET", "/slots"))


@contextlib.contextmanager
def aimock(fixtures: Sequence[dict[str, Any]] = ()) -> Generator[Aimock]:
    """Start aimock, and stop it when the block ends."""
    folder = COMPONENTS / "aimock"
    with running(str(folder / "node"), str(SUPPORT / "launch_aimock.mjs"), str(folder)) as (url, pid):
        server = Aimock(url, pid)
        server.script(fixtures)
        yield server


@contextlib.contextmanager
def llmock(behaviors: Sequence[dict[str, Any]] = ()) -> Generator[Llmock]:
    """Start llmock, and stop it when the block ends."""
    python = COMPONENTS / "llmock" / "bin" / "python"
    with running(str(python), str(SUPPORT / "launch_llmock.py")) as (url, pid):
        server = Llmock(url, pid)
        server.script(behaviors)
        yield server


@contextlib.contextmanager
def embedded() -> Generator[Embedded]:
    """Start the embedded model's server, and stop it when the block ends."""
    with running(sys.executable, str(SUPPORT / "launch_embedded.py")) as (url, pid):
        yield Embedded(url, pid)


@contextlib.contextmanager
def running(*command: str) -> Generator[tuple[str, int]]:
    """Run a launcher until the block ends, and yield the address it printed and its process id.

    Raises `ServerFailed` if the launcher is missing or prints no address. A launcher ends when its stdin closes, so it
    also ends when this process is killed. It has its own process group, so Ctrl-C reaches it only through this block.
    If it has not ended after END_SECONDS, its process group is killed.
    """
    with tempfile.TemporaryFile() as log:
        try:
            process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, start_new_session=True
            )
        except FileNotFoundError as error:
            raise ServerFailed(f"{command[0]} is missing: run scripts/components") from error
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            yield address(process.stdout, log), process.pid
        finally:
            process.stdin.close()
            process.stdout.close()
            end(process)


def address(stdout: IO[bytes], log: IO[bytes]) -> str:
    """Return the address that a launcher prints once its server listens. Raises `ServerFailed` if it prints none."""
    ready, _, _ = select.select([stdout], [], [], START_SECONDS)
    line = stdout.readline().decode().strip() if ready else ""
    if not line.startswith("http://127.0.0.1:"):
        log.seek(0)
        wrote = log.read().decode(errors="replace")[-2000:]
        what = f"said nothing for {START_SECONDS:.0f} s"
        if ready:
            what = (
                f"printed {line!r}, which is not its address"
                if line
                else "ended without printing its address"
            )
        raise ServerFailed(f"the server {what}:\n{wrote}")
    return line


def end(process: subprocess.Popen[bytes]) -> None:
    """Wait for the process to end. Kill its process group if it does not end in time."""
    try:
        process.wait(END_SECONDS)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
