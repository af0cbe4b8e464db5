"""A gate over a session and an in-memory filesystem, and small tools, for tests of the gate."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

from handrail import Tool, ToolContext, ToolResult, tool
from handrail.events import Fact, ToolInvoked, ToolResumed, ToolRolledBack, ToolStarted
from handrail.resources.memory import MemoryFilesystem
from handrail.run import open_gate
from handrail.run.gate import Gate
from handrail.session import Session
from handrail.testing import VirtualClock, VirtualTimeLoop

T = TypeVar("T")


@dataclass(frozen=True)
class Note:
    """A piece of state that the tools add."""

    text: str


class Rig:
    """A session and a filesystem with a gate over them, and a list of all events in the order of publication."""

    def __init__(self, tools: Iterable[Tool[Any, Any]], **options: Any) -> None:
        self.session: Session = options.pop("session", None) or Session(id="session")
        self.files: MemoryFilesystem = options.pop("files", None) or MemoryFilesystem()
        self.events: list[object] = []
        self.session.dispatcher.subscribe(object, self.events.append)
        loop = asyncio.get_running_loop()
        if isinstance(loop, VirtualTimeLoop):
            options.setdefault("clock", VirtualClock(loop))
        self.gate: Gate = open_gate(tools, session=self.session, filesystem=self.files, **options)

    async def call(self, name: str, /, **arguments: Any) -> ToolResult[Any]:
        return await self.gate.invoke(name, arguments)

    def of(self, kind: type[T]) -> list[T]:
        return [event for event in self.events if isinstance(event, kind)]

    def status(self, name: str) -> str:
        """Return the status of this tool's only call."""
        (ended,) = [event for event in self.of(ToolInvoked) if event.tool == name]
        return ended.status

    @property
    def notes(self) -> list[str]:
        return [note.text for note in self.session[Note].all()]

    @property
    def paths(self) -> list[str]:
        return list(self.files.glob("**"))

    def assert_untouched(self) -> None:
        """Assert that calls left no state and no files, and published nothing but facts."""
        assert self.notes == []
        assert self.paths == []
        assert not [event for event in self.events if not isinstance(event, Fact)]

    def assert_paired(self) -> None:
        """Assert that every call has one start, which is its first event, and one end, which is its last.

        A call that continues in a resumed run has started in an earlier leg.
        """
        started = [event.call_id for event in self.events if isinstance(event, ToolStarted | ToolResumed)]
        ended = [event.call_id for event in self.of(ToolInvoked)]
        assert len(set(started)) == len(started)
        assert sorted(started) == sorted(ended)
        for call_id in started:
            order = [type(event) for event in self.events if getattr(event, "call_id", None) == call_id]
            assert order[0] in (ToolStarted, ToolResumed)
            assert order[-1] is ToolInvoked

    def rolled_back(self, name: str) -> list[ToolRolledBack]:
        return [event for event in self.of(ToolRolledBack) if event.tool == name]


def leave_traces(context: ToolContext, text: str) -> None:
    """Change the session and the files, so that a rollback has something to undo."""
    context.session.dispatch(Note(text))
    context.filesystem.write(f"{text}.txt", text)


def staged(body: Callable[[str, ToolContext], Coroutine[Any, Any, Any]], **options: Any) -> Tool[Any, Any]:
    """Return a tool that leaves traces named after its argument `text`, and then runs `body`."""
    name = options.pop("name", "work")
    effect = options.pop("effect", "staged")

    @tool(name=name, description="Leave traces, then do something.", effect=effect, **options)
    async def work(text: str, context: ToolContext) -> Any:
        leave_traces(context, text)
        return await body(text, context)

    return work


async def nothing(text: str, context: ToolContext) -> str:
    """Return the text unchanged. This is the body of a tool that succeeds."""
    return text
