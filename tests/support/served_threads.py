"""Threads on a journal, with tools that ask, work, wait and change things, for the tests of the server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec

from handrail import Adapter, Prompt, ScriptedModel, SqliteJournal, Tool, ToolContext, tool
from handrail.clock import SYSTEM_CLOCK
from handrail.guard import CapabilityPolicy
from handrail.messages import AssistantMessage, ModelPart, ModelRequest, ToolMessage, UserMessage
from handrail.question import Question
from handrail.resources.directory import DirectoryFilesystem
from handrail.run.record.begin import RunBegin
from handrail.serve.feed import Feed
from handrail.serve.sources import PromptSource
from handrail.serve.thread import Thread
from handrail.serve.threads import Threads
from support.parked_runs import answer_to
from support.recorded import Noted, Pick, call, choose, note, notes, read, send, write


def plan(*turns: Any) -> str:
    """Return a message that tells the test model what to answer in each turn.

    A turn is a text, or a list of calls, each given by its name and arguments.
    """
    return json.dumps(turns)


def follow(request: ModelRequest) -> Any:
    """Answer as a model that follows the newest plan. It keeps no state, so any process can continue the run."""
    answers = 0
    for message in reversed(request.messages):
        if isinstance(message, AssistantMessage):
            answers += 1
        elif isinstance(message, UserMessage) and not message.by_run:
            turns = json.loads(message.text)
            turn = turns[answers] if answers < len(turns) else "done"
            return turn if isinstance(turn, str) else [call(name, **given) for name, given in turn]
    raise AssertionError("the conversation has no user message")


class SlowModel(ScriptedModel):
    """A scripted model that waits a millisecond before each part of an answer."""

    async def stream(self, request: ModelRequest, /) -> AsyncGenerator[ModelPart]:
        async for part in super().stream(request):
            await asyncio.sleep(0.001)
            yield part


class Held:
    """Makes a tool that works until it is released, and counts its starts, ends and cancellations."""

    def __init__(self, name: str = "hold", effect: Any = "staged") -> None:
        self.began = self.ended = self.cut = 0
        self.may_end = asyncio.Event()
        self.has_begun = asyncio.Event()

        @tool(name=name, description="Work for a while.", effect=effect)
        async def hold(context: ToolContext) -> str:
            self.began += 1
            self.has_begun.set()
            try:
                await self.may_end.wait()
            except asyncio.CancelledError:
                self.cut += 1
                raise
            self.ended += 1
            context.session.dispatch(Noted("held"))
            return "held"

        self.tool: Tool[Any, Any] = hold


@tool(effect="staged")
async def pick_two(context: ToolContext) -> str:
    """Ask for one number, then for another."""
    assert context.wait_for
    first = await context.wait_for("first", {}, Pick)
    second = await context.wait_for("second", {}, Pick)
    return f"{first.n} and {second.n}"


class App:
    """An app on one folder and journal, whose server can be restarted."""

    def __init__(self, base: Path, *, tools: Sequence[Tool[Any, Any]] = (), **options: Any) -> None:
        self.base = base
        self.folder = base / "files"
        self.folder.mkdir(exist_ok=True)
        self.tools = (note, notes, write, read, choose, send, pick_two, *tools)
        self.options = options
        self.files = DirectoryFilesystem(self.folder)
        self.clock = options.setdefault("clock", SYSTEM_CLOCK)
        self.journal = self.open()
        self.prompt_name = options.pop("prompt_name", "work")
        self.app_name = options.pop("app_name", "")
        self.policies = [CapabilityPolicy()]
        self.model_type: type[ScriptedModel] = options.pop("model_type", ScriptedModel)
        self.adapter_options: dict[str, Any] = options.pop("adapter_options", {})
        self.options.setdefault("poll_seconds", None)
        self.threads = self.make()

    def open(self) -> SqliteJournal:
        return SqliteJournal(self.base / "runs.db", watch=0.01, clock=self.clock)

    def make(self) -> Threads:
        prompt: Prompt[None] = Prompt(
            self.prompt_name, "Do what is asked.", tools=self.tools, policies=self.policies
        )
        self.model = self.model_type(follow)
        adapter = Adapter(self.model, filesystem=self.files, **self.adapter_options)
        source = PromptSource(prompt, adapter, shown=[Noted], app=self.app_name)
        return Threads(source, self.journal, **self.options)

    def close(self) -> None:
        self.files.close()
        self.journal.close()

    def thread(self, id: str = "t", principal: str = "ada") -> Thread:
        return self.threads.thread(principal, id)

    async def restart(self, grace: float = 0.05) -> None:
        """Stop this server and start another on the same journal."""
        await self.threads.stop(grace)
        self.journal.close()
        self.journal = self.open()
        self.threads = self.make()
        await self.threads.start()


@asynccontextmanager
async def served(base: Path, **options: Any) -> AsyncGenerator[App]:
    app = App(base, **options)
    await app.threads.start()
    try:
        yield app
    finally:
        await app.threads.stop(0.05)
        app.close()


def events(feed: Feed, after: int = 0) -> list[dict[str, Any]]:
    return [json.loads(item.data) for item in feed.since(after)]


def kinds(feed: Feed, after: int = 0) -> list[str]:
    """Return the start and the outcome of each leg in a feed, in order."""
    found: list[str] = []
    for event in events(feed, after):
        if event["type"] == "RUN_STARTED":
            found.append("started")
        elif event["type"] == "RUN_FINISHED":
            found.append(event["outcome"]["type"])
        elif event["type"] == "RUN_ERROR":
            found.append(f"error {event['code']}")
    return found


async def settle(thread: Thread) -> None:
    """Wait until the thread's run waits for answers, or ends."""
    while thread.live is not None and (thread.live.leg or not thread.live.has_started):
        await thread.feed.after(thread.feed.last)


async def over(thread: Thread) -> None:
    """Wait until no run of the thread is active in this process."""
    while thread.live is not None:
        await thread.live.over()
        await asyncio.sleep(0)


async def give(thread: Thread, question: Question, value: Any, **options: Any) -> str:
    return await thread.answer([answer_to(question, value, by=thread.principal)], **options)


def texts(messages: Sequence[Any]) -> list[str]:
    """Return the conversation as lines of text, one for each message or tool result."""
    found: list[str] = []
    for message in messages:
        if isinstance(message, ToolMessage):
            found += [f"{result.name}: {result.text}" for result in message.results]
        elif isinstance(message, AssistantMessage):
            found.append("; ".join([message.text, *(f"{each.name}()" for each in message.calls)]).strip("; "))
        else:
            found.append(f"> {message.text}")
    return found


def begin(message: str) -> bytes:
    return msgspec.msgpack.encode(
        RunBegin(
            message=message, params=None, history=[], system="", tools=[], opened=[], temperature=None,
            max_tokens=None, deadline=None, pauses=False, budget=None, base=None,
        )
    )  # fmt: skip
