"""A server with real tools and a scripted model, for the tests of AG-UI and of the page.

The user's message selects what the model does (`PLAYS`). The model keeps no state outside the messages, so a server
that is restarted on the same journal continues where the last one stopped.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
from collections.abc import AsyncGenerator, Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import uvicorn
from pydantic import BaseModel, Field, field_validator

from handrail import (
    Adapter,
    CapabilityPolicy,
    DirectoryFilesystem,
    FileTools,
    Prompt,
    ScriptedModel,
    SqliteJournal,
    ToolCall,
    ToolContext,
    gather,
    tool,
)
from handrail.messages import (
    AssistantMessage,
    ModelPart,
    ModelRequest,
    Price,
    TextPart,
    Traits,
    Usage,
    UserMessage,
)
from handrail.models.scripted import Reply, Scripted
from handrail.serve.app import asgi
from handrail.serve.people import People
from handrail.serve.sources import PromptSource, Source
from support import PATIENCE

if TYPE_CHECKING:
    from playwright.sync_api import BrowserContext

# --- gates that tests open ----------------------------------------------------------------------------


class Gates:
    """Points at which a tool waits until a test, on any thread, lets it continue."""

    def __init__(self) -> None:
        self._open: dict[str, threading.Event] = {}

    def __getitem__(self, name: str) -> threading.Event:
        return self._open.setdefault(name, threading.Event())

    async def passed(self, name: str) -> None:
        # This polls, because a thread that blocks would outlive a cancelled run.
        while not self[name].is_set():
            await asyncio.sleep(0.01)


GATES = Gates()


# --- the tools ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Booking:
    """A booked table, shown to clients as state."""

    seats: int
    day: str


class Table(BaseModel):
    """A table to book."""

    seats: int = Field(ge=1, le=12, description="How many come.")
    day: date = Field(description="When they come.")
    where: Literal["inside", "terrace"] = "inside"
    wishes: str | None = Field(None, description="Anything the kitchen should know.")

    @field_validator("day")
    @classmethod
    def _open_then(cls, day: date) -> date:
        # Only the server can check this rule, because no schema can express it.
        if day.weekday() == 0:
            raise ValueError("we are closed on Mondays")
        return day


@tool(effect="staged")
async def book_table(name: str, context: ToolContext) -> str:
    """Book a table, and ask the person for the rest."""
    assert context.wait_for
    table = await context.wait_for("table", {"for": name}, Table)
    context.session.dispatch(Booking(table.seats, str(table.day)))
    return f"booked for {table.seats} on {table.day}, {table.where}"


@tool(effect="read")
async def choose(question: str, context: ToolContext) -> str:
    """Let the person choose a colour."""
    assert context.wait_for
    return await context.wait_for("colour", {"question": question}, str)


@tool(effect="read")
async def confirm(question: str, context: ToolContext) -> str:
    """Let the person say yes or no."""
    assert context.wait_for
    return f"answered {await context.wait_for('sure', {'question': question}, bool)}"


@tool(effect="read")
async def count_sheep(total: int, gate: str = "", *, context: ToolContext) -> str:
    """Count sheep, and report progress."""
    for number in range(1, total + 1):
        context.report_progress(f"sheep {number}", done=number, total=total)
        if gate and number == (total + 1) // 2:
            await GATES.passed(gate)
        await asyncio.sleep(0)
    return f"{total} sheep"


@tool(effect="read")
async def wait_at(gate: str, context: ToolContext) -> str:
    """Wait until the test opens the gate."""
    context.report_progress("waiting at the gate")
    await GATES.passed(gate)
    return "passed"


@tool(effect="staged", capabilities={"fs.write"})
async def break_off(path: str, context: ToolContext) -> str:
    """Write a file, then fail."""
    context.filesystem.write(path, "half")
    raise RuntimeError("the printer's disk is full")


@tool(effect="irreversible")
async def pay(amount: int, context: ToolContext) -> str:
    """Pay somebody. The payment can't be undone."""
    return f"paid {amount}"


@tool(effect="idempotent")
async def research(topic: str, context: ToolContext) -> str:
    """Let a researcher look into a topic."""
    return (await context.adapter.evaluate(RESEARCHER, f"research {topic}")).text


@tool(effect="idempotent")
async def review(topic: str, context: ToolContext) -> str:
    """Let two readers look at a topic at once."""
    one, two = await gather(
        context.adapter.evaluate(READER, f"read {topic}"), context.adapter.evaluate(READER, f"reread {topic}")
    )
    return f"{one.text} {two.text}"


POLICY = CapabilityPolicy({"fs.write": "ask"}, effects={"idempotent": "allow"})
READER = Prompt("reader", "Read.", tools=[count_sheep, wait_at], policies=[POLICY])
RESEARCHER = Prompt(
    "researcher", "Look into it.", tools=[pay, book_table, count_sheep, review], policies=[POLICY]
)
PROMPT = Prompt(
    "assistant",
    [FileTools()],
    tools=[book_table, choose, confirm, count_sheep, wait_at, break_off, pay, research, review],
    policies=[POLICY],
)

# --- the model's plays --------------------------------------------------------------------------------

Play = Sequence[Scripted] | Callable[[], Sequence[Scripted]]
PRICE = Price(Decimal(1), Decimal(10))
EDIT = {"path": "plan.md", "old": "monday", "new": "Monday"}
READ = ToolCall("read_file", {"path": "plan.md"})
USAGE = Usage(input=1200, output=80, requests=1)


def said(text: str, *calls: ToolCall, pieces: Sequence[str] = ()) -> Reply:
    """Return a reply with token usage, so that it has a cost."""
    return Reply(text, calls=calls, pieces=pieces, usage=USAGE)


SHOWN = """## What Markdown can do

It has **bold** words, `code`, [links](https://example.org/) and lists:

- one
- two, with a [bad link](javascript:alert(1)) and ![a picture](https://example.org/pixel.png)

| who | seats |
| --- | ----: |
| Anna | 4 |

```python
def greet(name: str) -> str:
    return f"Hello, {name}"
```

<script>window.attacked = true</script><img src=x onerror="window.attacked = true">
<form action="https://example.org/"><input name="token"></form>

That is all."""

PLAYS: Mapping[str, Sequence[Scripted]] = {
    "hello": [said("Hello to you.")],
    "edit": [said("Let me look.", READ), said("", ToolCall("edit_file", EDIT)), said("It says Monday now.")],
    "book": [said("", ToolCall("book_table", {"name": "Anna"})), said("It is booked.")],
    "book two": [
        said("", ToolCall("book_table", {"name": "Anna"}), ToolCall("book_table", {"name": "Ben"})),
        said("Both are booked."),
    ],
    "colour": [said("", ToolCall("choose", {"question": "Which colour?"})), said("A fine colour.")],
    "sure": [said("", ToolCall("confirm", {"question": "Really?"})), said("So be it.")],
    "sheep": [said("", ToolCall("count_sheep", {"total": 8, "gate": "sheep"})), said("All counted.")],
    "wait": [said("I wait.", ToolCall("wait_at", {"gate": "wait"})), said("I waited.")],
    "break": [said("", ToolCall("break_off", {"path": "half.txt"})), said("It failed.")],
    "pay": [said("", ToolCall("pay", {"amount": 30})), said("Paid.")],
    "research": [said("", ToolCall("research", {"topic": "umbrellas"})), said("It is known now.")],
    "research umbrellas": [
        said("I begin with the literature.", ToolCall("review", {"topic": "umbrellas"})),
        said("It has to be bought.", ToolCall("pay", {"amount": 12})),
        said("Umbrellas help against rain."),
    ],
    "read umbrellas": [said("I read.", ToolCall("count_sheep", {"total": 3})), said("One says yes.")],
    "reread umbrellas": [said("I read again.", ToolCall("count_sheep", {"total": 4})), said("One says no.")],
    "show": [said(SHOWN)],
    "long": [said("\n\n".join(f"Paragraph {number} of a long story." for number in range(1, 120)))],
    "fail": [RuntimeError("the model's provider is down")],
}


class PlayedModel:
    """A model that plays the part that the user's newest message selects, with an optional pause after each piece of text."""

    def __init__(self, plays: Mapping[str, Sequence[Scripted]] = PLAYS, *, pace: float = 0.0) -> None:
        self.name = "scripted:played"
        self.traits = Traits(native_output=True, price=PRICE)
        self._plays = plays
        self._pace = pace

    async def stream(self, request: ModelRequest, /) -> AsyncGenerator[ModelPart]:
        answered = 0
        for message in reversed(request.messages):
            if isinstance(message, AssistantMessage):
                answered += 1
            elif isinstance(message, UserMessage) and not message.by_run:
                play = self._plays.get(
                    message.text, [said(f"I do not know what to do about: {message.text}")]
                )
                break
        else:
            raise AssertionError("the conversation has no user message")
        async for part in ScriptedModel(play[answered : answered + 1]).stream(request):
            yield part
            if self._pace and isinstance(part, TextPart):
                await asyncio.sleep(self._pace)


# --- the server ---------------------------------------------------------------------------------------


STARTERS = ("hello", "show", "book")


def source_in(folder: Path, plays: Mapping[str, Sequence[Scripted]] = PLAYS, *, pace: float = 0.0) -> Source:
    """Return a source for the app. Its files are in `folder/work`, which contains a file to change."""
    work = folder / "work"
    if not work.exists():
        work.mkdir()
        (work / "plan.md").write_text("# Plan\n\nsee Anna on monday\ncall mum\n")
    adapter = Adapter(PlayedModel(plays, pace=pace), filesystem=DirectoryFilesystem(work))
    return PromptSource(
        PROMPT, adapter, shown=(Booking,), starters=STARTERS, description="It plans, books and counts sheep."
    )


class Served:
    """A server on loopback that runs in its own thread."""

    def __init__(self, app: Any, port: int = 0, folder: Path = Path()) -> None:
        self.app = app
        self.folder = folder
        """The folder with the journal and the users."""
        listening = socket.socket()
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(("127.0.0.1", port))
        self.port: int = listening.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._socket = listening
        config = uvicorn.Config(
            app,
            log_level="warning",
            lifespan="on",
            timeout_graceful_shutdown=1,
            timeout_keep_alive=int(PATIENCE),  # a busy client may send its next request late
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._run, name=f"server on {self.port}", daemon=True)

    def sign_in(self, context: BrowserContext, **given: str) -> None:
        """Sign a browser context in as the page does: with the given credentials, or by default with a new link."""
        given = given or {"link": self.app.principals.new_link()}
        said = context.request.post(f"{self.url}/login", data=given)
        assert said.ok, said.text()
        key = json.dumps(said.json()["key"])
        context.add_init_script(f"localStorage.setItem('handrail.key', {key})")

    def start(self) -> None:
        self._thread.start()
        while not self._server.started:
            if not self._thread.is_alive():
                raise AssertionError("the server did not start; its log says why")
            self._thread.join(0.01)

    def stop(self) -> None:
        self._server.should_exit = True
        self._thread.join()

    def _run(self) -> None:
        asyncio.run(self._server.serve(sockets=[self._socket]))


@contextlib.contextmanager
def serving(
    folder: Path, *, source: Source | None = None, port: int = 0, **options: Any
) -> Generator[Served]:
    """Serve the app until the block ends. The journal and the users are in the folder.

    Pages sign in with `Served.sign_in`. With the option `token`, programs can use that token.
    """
    journal = SqliteJournal(folder / "runs.db")
    people = People(folder / "people.db")
    app = asgi(source or source_in(folder), journal=journal, people=people, **options)
    server = Served(app, port, folder)
    server.start()
    try:
        yield server
    finally:
        server.stop()
        journal.close()
        people.close()
