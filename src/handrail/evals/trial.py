"""`Trials`: how an agent is tried, and `Trial`: one try, with files, a session and a person of its own."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any

from handrail.agent import Agent
from handrail.concurrency.threads import run_in_thread
from handrail.evals import recordings
from handrail.evals.conduct import Observer
from handrail.protocols import Environment, Filesystem
from handrail.resources.directory import DirectoryFilesystem
from handrail.resources.memory import MemoryFilesystem
from handrail.run.adapter import Adapter
from handrail.run.response import PromptResponse
from handrail.session import Session

Files = Mapping[str, str | bytes] | str | PathLike[str] | Callable[[Any], Filesystem | None]
"""The files of each trial: texts by path, a folder that is copied, or a function of the case that returns the files."""


class Trial:
    """One try of an agent. Its files and its session are fresh."""

    def __init__(self, trials: Trials, files: Filesystem | None, person: Environment | None) -> None:
        self.trials = trials
        self.files = files
        self.person = person
        self.session = Session()
        self.observer = Observer(self.session, files)

    async def run(self, inputs: Any, adapter: Adapter | None = None, **arguments: Any) -> PromptResponse[Any]:
        """Run the agent. A string is the user's message; other inputs are the params of its prompt."""
        message, params = (inputs, None) if isinstance(inputs, str) else (None, inputs)
        return await (adapter or self.trials.agent.adapter).evaluate(
            self.trials.agent.prompt,
            params,
            message=message,
            filesystem=self.files,
            session=self.session,
            environment=self.person,
            **self.trials.arguments,
            **arguments,
        )


@dataclass(frozen=True)
class Trials:
    """How an agent is tried: with which files, with whom, and with which arguments of `Agent.run`."""

    agent: Agent[Any]
    files: Files | None
    person: Callable[[Any], Environment] | None
    arguments: Mapping[str, Any]

    @asynccontextmanager
    async def open(self, case: Any, metadata: Any) -> AsyncGenerator[Trial]:
        """Open a trial of a case. Its files are closed and, if they are a copy, removed at the end of the block."""
        person = None if self.person is None else self.person(case)
        async with self._fresh_files(case, metadata) as files:
            yield Trial(self, files, person)

    @asynccontextmanager
    async def _fresh_files(self, case: Any, metadata: Any) -> AsyncGenerator[Filesystem | None]:
        with recordings.opened(metadata) as files:
            if files is not None:
                yield files
                return
        if self.files is None or callable(self.files):
            yield self.files and self.files(case)
        elif isinstance(self.files, Mapping):
            yield MemoryFilesystem(self.files)
        else:
            with tempfile.TemporaryDirectory(prefix="handrail-eval-") as folder:
                copy = Path(folder, "files")
                await run_in_thread(partial(shutil.copytree, self.files, copy, symlinks=True))
                files = DirectoryFilesystem(copy)
                try:
                    yield files
                finally:
                    files.close()
