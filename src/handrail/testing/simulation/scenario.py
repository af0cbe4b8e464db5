"""Scenarios: a run, its tools, who answers, and the laws that must hold whatever happens.

A `World` records what happens outside a process. It can't be undone.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from handrail.adapter import Adapter
from handrail.clock import Clock
from handrail.errors import DefinitionError
from handrail.journal.sqlite import SqliteJournal
from handrail.messages import AssistantMessage, ModelPart, ModelRequest, Traits, Usage, UserMessage
from handrail.models.scripted import Reply, Scripted, ScriptedModel
from handrail.prompt import Prompt
from handrail.protocols import Environment
from handrail.resources.directory import DirectoryFilesystem
from handrail.session import Session


class Happening(NamedTuple):
    """An event outside, and the process of the simulation that caused it."""

    what: str
    process: int
    """The number of the process: 0 for the first, which crashes; one more for each restart."""
    details: dict[str, Any]


class World:
    """Records what happened, in order, in a file that outlives every process.

    Each line is written with one system call, so a crash leaves either the complete line or nothing.
    """

    def __init__(self, path: Path, process: int = 0) -> None:
        self.path = path
        self.process = process
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)

    def happened(self, what: str, /, **details: Any) -> None:
        """Record an event that no rollback undoes: a payment, a mail, something shown to a person."""
        os.write(self._file, json.dumps([what, self.process, details], default=str).encode() + b"\n")

    def all(self, what: str | None = None, /, **details: Any) -> list[Happening]:
        """Return the events of this kind with these details, oldest first."""
        lines = self.path.read_bytes().splitlines()
        found = [Happening(*json.loads(line)) for line in lines]
        return [
            each
            for each in found
            if (what is None or each.what == what) and details.items() <= each.details.items()
        ]

    def count(self, what: str, /, **details: Any) -> int:
        """Return how often an event of this kind with these details happened."""
        return len(self.all(what, **details))

    def close(self) -> None:
        os.close(self._file)


RUN = "run"
"""The id of the simulated run."""

Said = Mapping[str, Sequence[Scripted]]
"""A model's script: the answers for each prompt, in order. A prompt is found by words in its instructions."""


@dataclass(eq=False)
class Stage:
    """The parts that one process of a simulation has. Everything in a scenario is created from it."""

    world: World
    """The record of what happened outside. It survives the process."""
    files: DirectoryFilesystem
    """A real folder with the scenario's initial files. It is checked after each crash."""
    folder: Path
    """A folder for any other data that survives the process."""
    journal: SqliteJournal
    clock: Clock
    process: int
    """The number of the process: 0 for the one that crashes, 1 for the next, and so on."""
    _ids: count[int] = field(default_factory=count)

    def new_id(self) -> str:
        """Return an id that no other process of the simulation uses."""
        return f"id-{self.process}-{next(self._ids)}"

    def model(self, said: Said, *, seconds: float = 1.0) -> SimulatedModel:
        """Create a model that says the same in each process: it answers by the length of its conversation."""
        return SimulatedModel(self.world, said, seconds)


class Play(NamedTuple):
    """A scenario as one process plays it."""

    adapter: Adapter
    prompt: Prompt[Any]
    params: object = None
    person: Environment | None = None
    """The environment that answers the questions of a parked run."""
    one_at_a_time: bool = False
    """Whether only the first of several open questions is answered before the run continues."""
    session: Callable[[], Session] | None = None
    """Creates an empty session with a fixed id, for slices that have their own rules."""


class Seen(NamedTuple):
    """The input of a law: a crashed run, and the same run without a crash."""

    point: str
    world: World
    """Everything that happened, in the crashed run and in those that resumed it."""
    uncrashed: World
    overtaken: bool
    """Whether the first process did not die, but continued after another had taken its run."""


Law = Callable[[Seen], str | None]
"""Returns what is broken, as text, or None if nothing is."""


class Scenario(msgspec.Struct, frozen=True, kw_only=True):
    """A run to be crashed at every possible point.

    `play` is called in every process and creates everything again: adapter, prompt, tools. It must be a
    function that another process can import, and it must be deterministic: no randomness, no time but the
    stage's clock, no ids but the stage's.
    """

    name: str
    play: Callable[[Stage], Play]
    files: Mapping[str, str] = {}
    """The initial content of the folder."""
    laws: Sequence[Law] = ()
    """The scenario's own laws, beside those that always hold."""
    secrets: Sequence[str] = ()
    """Texts that no person may be shown."""
    unrecorded: Sequence[str] = ()
    """Texts that no journal may contain either: secrets in a model's arguments or a person's answers."""


class SimulatedModel:
    """Answers from the script by prompt and by the number of answers so far."""

    name = "scripted:simulation"
    traits = Traits(native_output=True)

    def __init__(self, world: World, said: Said, seconds: float) -> None:
        self._world = world
        self._said = said
        self._seconds = seconds

    async def stream(self, request: ModelRequest, /) -> AsyncGenerator[ModelPart]:
        key = next((key for key in self._said if key in request.system), None)
        if key is None:
            raise DefinitionError(
                f"the script has nothing for the prompt {request.system[:60]!r}. Pass answers under words of it."
            )
        answers = sum(isinstance(message, AssistantMessage) for message in request.messages)
        first = next((each.text for each in request.messages if isinstance(each, UserMessage)), "")
        self._world.happened("asked", prompt=key, message=first, answer=answers + 1)
        await asyncio.sleep(self._seconds)
        script = self._said[key]
        reply = _with_usage(
            script[answers] if answers < len(script) else "There is nothing more to say.", answers
        )
        async for part in ScriptedModel([reply]).stream(request):
            yield part


def _with_usage(scripted: Scripted, answers: int) -> Scripted:
    """Give each answer a different usage, so that one counted twice is noticed."""
    if isinstance(scripted, Reply | Exception):
        return scripted
    usage = Usage(100 + answers, 10, requests=1)
    if isinstance(scripted, str):
        return Reply(scripted, usage=usage)
    calls = scripted if isinstance(scripted, Sequence) else (scripted,)
    return Reply(calls=calls, usage=usage)
