"""Functions that write folders of workers, and a session that records the events of their runs."""

from __future__ import annotations

import textwrap
from pathlib import Path

from handrail import Session, WorkerRegistry
from handrail.events import ToolInvoked
from handrail.testing import RecordingSubscriber

PLAIN = "---\n---\nDo it."


def folder(at: Path, tools: str = "", **workers: str) -> WorkerRegistry:
    """Write workers (`main="---..."`) and the text of tools.py into a folder, and return their registry."""
    at.mkdir(parents=True, exist_ok=True)
    for name, text in workers.items():
        (at / f"{name}.md").write_text(textwrap.dedent(text).lstrip("\n"))
    if tools:
        (at / "tools.py").write_text(textwrap.dedent(tools))
    return WorkerRegistry(at)


def sound(at: Path, tools: str = "", **workers: str) -> WorkerRegistry:
    """Write workers as `folder` does, assert that their registry reports no problems, and return it."""
    registry = folder(at, tools, **workers)
    assert registry.check() == []
    return registry


class Watched(RecordingSubscriber):
    """A session of its own, and everything that it publishes."""

    def __init__(self) -> None:
        self.session = Session(id="session")
        super().__init__(self.session)

    @property
    def ended(self) -> list[tuple[str, str]]:
        """The path and the status of every call that has ended, in order."""
        return [(" > ".join(event.path), event.status) for event in self.of(ToolInvoked)]
