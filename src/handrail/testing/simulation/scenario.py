"""Scenarios: a run, its tools, who answers, and the laws that must hold whatever happens.

A `World` records events that no rollback can undo, in a file that all processes share.
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

from handrail.clock import Clock
from handrail.errors import DefinitionError
from handrail.journal.any_journal import AnyJournal
from handrail.messages import AssistantMessage, ModelPart, ModelRequest, Traits, Usage, UserMessage
from handrail.models.scripted import Reply, Scripted, ScriptedModel
from handrail.prompt import Prompt
from handrail.protocols import Environment
from handrail.resources.directory import DirectoryFilesystem
from handrail.run.adapter import Adapter
from handrail.session import Session


class Happening(NamedTuple):
    """An event in a world's record, and the number of the process that recorded it."""

    what: str
    process: int
    """The number of the process: 0 for the first one, 1 for the next, and so on."""
    details: dict[str, Any]


class World:
    """A record of what happened, in order, in a file that outlives every process.

    Each line is written with one system call, so a crash leaves either the complete line or nothing.
    """

    def __init__(self, path: Path, process: int = 0) -> None:
        self.path = path
        self.process = process
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)

    def happened(self, what: str, /, **details: Any) -> None:
        """Record an event that no rollback can undo, such as a payment, an email, or something shown to a person."""
        os.write(self._file, json.dumps([what, self.process, details], default=str).encode() + b"\n")

    def all(self, what: str | None = None, /, **details: Any) -> list[Happening]:
        """Return the events with these details, oldest first; only those of kind `what` if it is given."""
        lines = self.path.read_bytes().splitlines()
        found = [Happening(*json.loads(line)) for line in lines]
        return [
            each
            for each in found
            if (what is None or each.what == what) and details.items() <= each.details.items()
        ]

    def count(self, what: str, /, **details: Any) -> int:
        """Return the number of events of this kind with these details."""
        return len(self.all(what, **details))

    def close(self) -> None:
        os.close(self._file)


RUN = "run"
"""The id of the simulated run."""

Said = Mapping[str, Sequence[Scripted]]
"""A model's script: the answers to each prompt, in order. Each key is a string in the prompt's instructions."""


@dataclass(eq=False)
class Stage:
    """The objects from which one process of a simulation creates the scenario's adapter and tools."""

    world: World
    """The record of what happened. It outlives the process."""
    files: DirectoryFilesystem
    """A real folder with the scenario's initial files. Its content is checked after each crash."""
    folder: Path
    """A folder for any other data that must survive the process."""
    journal: AnyJournal
    clock: Clock
    process: int
    """The number of this process: 0 for the first one, 1 for the next, and so on."""
    _ids: count[int] = field(default_factory=count)

    def new_id(self) -> str:
        """Return an id that no other process of the simulation uses."""
        return f"id-{self.process}-{next(self._ids)}"

    def model(self, said: Said, *, seconds: float = 1.0) -> SimulatedModel:
        """Create a model that gives the same answers in each process. The number of answers so far selects the next one."""
        return SimulatedModel(self.world, said, seconds)


class Play(NamedTuple):
    """A scenario's parts, created for one process."""

    adapter: Adapter
    prompt: Prompt[Any]
    params: object = None
    person: Environment | None = None
    """The environment that answers the run's questions; None if nobody does."""
    one_at_a_time: bool = False
    """Whether only the first of several open questions is answered before the run continues."""
    unanswered: Sequence[str] = ()
    """The names of the questions that nobody answers, so that they expire. A connected person must not answer them either."""
    session: Callable[[], Session] | None = None
    """A function that creates an empty session with a fixed id. It is needed only if the session has its own slice rules."""


class Seen(NamedTuple):
    """The argument of a law: the record of a crashed run, and that of the same run without a crash."""

    point: str
    world: World
    """Everything that happened in the crashed process and in those that resumed the run."""
    uncrashed: World
    overtaken: bool
    """Whether the first process was not killed, but continued after another process had taken its run."""


Law = Callable[[Seen], str | None]
"""A function that returns a description of what is broken, or None if nothing is."""


class Scenario(msgspec.Struct, frozen=True, kw_only=True):
    """A run to be crashed at every possible point.

    `play` is called in every process and creates everything again: adapter, prompt and tools. It must be a
    function that another process can import, and it must be deterministic: no randomness, no clock but the
    stage's, and no ids but the stage's.
    """

    name: str
    play: Callable[[Stage], Play]
    files: Mapping[str, str] = {}
    """The initial files of the folder, by path."""
    laws: Sequence[Law] = ()
    """The scenario's own laws, in addition to those that always hold."""
    secrets: Sequence[str] = ()
    """Strings that must not be shown to a person."""
    unrecorded: Sequence[str] = ()
    """Strings that must be neither shown to a person nor recorded, such as secrets in arguments or answers."""


class SimulatedModel:
    """A model whose answer is chosen from the script by the prompt and the number of answers so far."""

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
                f"the script has no answers for the prompt {request.system[:60]!r}. Add them under words that the prompt contains."
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
    """Give each answer in a conversation a different usage, so that an answer that is counted twice is noticed.

    A `Reply` or an exception is returned unchanged.
    """
    if isinstance(scripted, Reply | Exception):
        return scripted
    usage = Usage(100 + answers, 10, requests=1)
    if isinstance(scripted, str):
        return Reply(scripted, usage=usage)
    calls = scripted if isinstance(scripted, Sequence) else (scripted,)
    return Reply(calls=calls, usage=usage)
