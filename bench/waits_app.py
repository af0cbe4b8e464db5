"""The app of bench/waits.py. Its model writes when each request arrives to the file that `WAITS_LOG` names.

    python bench/waits_app.py JOURNAL SECONDS

This serves the app on a free port, and prints the port. Runs that wait for an answer are parked after SECONDS.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import sys
import time
from contextlib import closing
from typing import Any, NamedTuple

from handrail import (
    Adapter,
    Agent,
    CapabilityPolicy,
    Journal,
    LaterEnvironment,
    Prompt,
    ScriptedModel,
    SqliteJournal,
    ToolCall,
    ToolContext,
    tool,
)
from handrail.messages import ModelRequest, ToolMessage, UserMessage

LOG = "WAITS_LOG"
TOKEN = "a-token-for-the-bench"
HANGING = asyncio.Event()
"""Set when a call of `hang` has begun in this process."""


@tool
async def send(to: str) -> str:
    """Send a letter, which needs approval."""
    return f"sent to {to}"


@tool(effect="pure")
async def look() -> str:
    """Look around."""
    return "nothing"


@tool(effect="pure")
async def choose(context: ToolContext) -> str:
    """Ask somebody for a number."""
    assert context.wait_for
    return str(await context.wait_for("pick", {}, int))


@tool(effect="pure")
async def hang() -> None:
    """Wait until the call is cancelled."""
    HANGING.set()
    await asyncio.Event().wait()


def play(request: ModelRequest) -> ToolCall | str:
    """Answer as the model. The message `look N` leads to N calls of `look` and then always to one of `choose`.

    A line of the file has the last message, the number of calls since then, and the time in nanoseconds.
    """
    at = time.monotonic_ns()
    calls, text = 0, ""
    for message in reversed(request.messages):
        calls += isinstance(message, ToolMessage)
        if isinstance(message, UserMessage):
            text = message.text
            break
    fd = os.open(os.environ[LOG], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.write(fd, f"{text} {calls} {at}\n".encode())
    os.close(fd)
    verb, _, count = text.partition(" ")
    if verb == "look":
        return ToolCall("look" if calls < int(count) else "choose")
    if verb == "hang":
        return ToolCall("hang")
    return ToolCall("send", {"to": "Oslo"}) if verb == "send" and not calls else "Done."


adapter = Adapter(ScriptedModel(play))
prompt = Prompt("waits", "Do what is asked.", tools=[send, look, choose, hang], policies=[CapabilityPolicy()])
agent = Agent(adapter, prompt)


def adapter_with(journal: Journal) -> Adapter:
    """Return an adapter whose runs are recorded, and parked when they wait."""
    return Adapter(ScriptedModel(play), journal=journal, environment=LaterEnvironment())


class Client(NamedTuple):
    """A client of a server on loopback."""

    port: int

    def request(self, method: str, path: str, body: Any = None) -> Any:
        """Make a request, and return the decoded response, or None if it is not JSON."""
        with closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)) as connection:
            headers = {"Authorization": f"Bearer {TOKEN}", "Content-Type": "application/json"}
            connection.request(method, path, None if body is None else json.dumps(body), headers)
            response = connection.getresponse()
            content = response.read()
        if response.status >= 300:
            raise RuntimeError(f"{method} {path}: {response.status} {content.decode()}")
        return json.loads(content) if response.headers.get_content_type() == "application/json" else None

    def say(self, thread: str, text: str) -> None:
        """Send a message to a thread, and wait until its run is over."""
        id = text.replace(" ", "-")
        message = {"id": id, "role": "user", "content": text}
        body = {"threadId": thread, "runId": f"{thread}-{id}", "messages": [message], "tools": []}
        self.request("POST", "/agent", {**body, "context": [], "state": {}, "forwardedProps": {}})


def serve(journal: str, park_after: float) -> None:
    from handrail.serve import Limits, PromptSource, asgi
    from handrail.serve.server import listen, run

    limits = Limits(burst=100_000)
    source = PromptSource(prompt, adapter)
    app = asgi(source, journal=SqliteJournal(journal), token=TOKEN, limits=limits, park_after=park_after)
    listening = listen("127.0.0.1", 0)
    port = listening.getsockname()[1]
    asyncio.run(run(app, listening, ready=lambda: print(port, flush=True)))


if __name__ == "__main__":
    serve(sys.argv[1], float(sys.argv[2]))
