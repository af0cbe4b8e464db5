"""`Shell`: runs commands on a folder, with walls around them and their writes caught in a layer above it."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Literal

from handrail.clock import SYSTEM_CLOCK, Clock
from handrail.errors import DefinitionError, ShellUnavailable
from handrail.protocols import Filesystem
from handrail.resources.layers import Layered, Layers
from handrail.resources.paths import place
from handrail.resources.shell.finished import Finished
from handrail.resources.shell.rules import Allow, Rules
from handrail.resources.shell.run import Run, Settings
from handrail.resources.shell.support import Support, probe
from handrail.threads import run_in_thread

OUTPUT_LIMIT = 64 * 1024
"""Bytes of output that are kept unless a shell is told otherwise: about what a model reads at once."""


class Shell:
    """Runs commands that rules allow, on a folder whose real files they can't change.

    What a command writes in the folder goes to the upper layer of `layers`, in overlay format. It
    works at the folder's own path, so absolute paths hold. Everything else on the machine is read
    only to it; `/tmp`, `/dev/shm`, `/run` and its home are its own and gone afterwards; it sees no
    processes but its own, no environment but what is given to it, no network unless `network`, and
    none of the usual places of secrets. When `run` returns or raises, all that it started has ended.

    It does not keep a command from *reading* other files that this user can read, nor from using up
    memory or disk; `docs/design.md` says what else the walls do not hold.

    `backend`: `overlay` mounts one, at the same cost however large the folder is; `copy` works on a
    copy, which is as large as the folder; `auto` takes the first where it can be had. `contained`:
    where the kernel gives no namespaces, refuse; when False, run on a copy without walls instead, and
    say so in what is returned.
    """

    def __init__(
        self,
        rules: Iterable[Allow] = (),
        *,
        backend: Literal["auto", "overlay", "copy"] = "auto",
        contained: bool = True,
        network: bool = False,
        timeout: float = 60.0,
        output_limit: int = OUTPUT_LIMIT,
        environment: Mapping[str, str] | None = None,
        hidden: Iterable[str | Path] = (),
        processes: int = 1024,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        if backend not in ("auto", "overlay", "copy"):
            raise DefinitionError(f"a shell's backend is {backend!r}. Give 'auto', 'overlay' or 'copy'.")
        if output_limit < 2 or processes < 1:
            raise DefinitionError(
                f"a shell's output_limit is {output_limit!r} and its processes {processes!r}. "
                "Give at least 2 bytes and 1 process."
            )
        given = dict(environment or {})
        for name, value in given.items():
            if not name or "=" in name or "\0" in name + value:
                raise DefinitionError(
                    f"a shell's environment has {name!r}, whose name or value no variable can have. "
                    "Give a name without '=', and no NUL in either."
                )
        self.rules = Rules(rules)
        self.timeout = _checked_timeout(timeout)
        self.backend: Literal["auto", "overlay", "copy"] = backend
        """What was asked for; where that is `auto`, what was found once something has run."""
        places = tuple(os.fspath(path) for path in hidden)
        self._settings = Settings(backend, contained, network, output_limit, given, places, processes, clock)

    async def run(
        self,
        argv: Sequence[str],
        layers: Layers,
        *,
        cwd: str = ".",
        stdin: str | bytes | None = None,
        timeout: float | None = None,
    ) -> Finished:
        """Run a command in the folder, or in `cwd` below it, and wait until all of it has ended.

        A command that fails or runs out of time is a `Finished` that says so. `CommandRefused`: no rule
        allows it. `CommandMissing`: there is no such program. `ShellUnavailable`: it could not be held
        in here, and was not run. One command at a time works on an upper layer; a second one waits,
        outside its own time limit. Cancelled, it ends the command before it lets go; what the upper
        layer then holds is to be dropped.
        """
        self.rules.check(argv)
        data = stdin.encode() if isinstance(stdin, str) else stdin or b""
        limit = self.timeout if timeout is None else _checked_timeout(timeout)
        run = Run(self._settings, tuple(argv), layers, place(cwd).path or ".", data, limit)
        finished = await _on_a_thread(run)
        self.backend = finished.backend
        return finished

    async def run_on(
        self,
        files: Filesystem,
        argv: Sequence[str],
        *,
        cwd: str = ".",
        stdin: str | bytes | None = None,
        timeout: float | None = None,
        keep: bool = True,
    ) -> Finished:
        """The same on the fork of a real folder: what the command wrote there is the fork's own afterwards.

        That is what `context.filesystem` is, where the run's filesystem is a `DirectoryFilesystem`.
        `Conflict`: somebody else changed, while it ran, what it changed too. Without `keep` nothing of
        what it wrote is taken, and the fork is to be dropped.
        """
        if not isinstance(files, Layered):
            raise ShellUnavailable(
                "commands need a real folder to work on",
                "Give the run a DirectoryFilesystem as its filesystem",
            )
        self.rules.check(argv)  # before anything is written out for it
        layers = files.layers()
        finished = await self.run(argv, layers, cwd=cwd, stdin=stdin, timeout=timeout)
        if keep:
            await run_in_thread(lambda: files.absorb(layers.mounted_at))
        return finished

    @property
    def network(self) -> bool:
        """May commands reach the network?"""
        return self._settings.network

    async def probe(self, folder: Path) -> Support:
        """What can be had for commands on that folder's filesystem, and what is missing."""
        return await run_in_thread(lambda: probe(folder))


async def _on_a_thread(run: Run) -> Finished:
    """Wait for a run; when cancelled, end it and wait for that, however often it is cancelled meanwhile."""
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[None] = loop.create_future()

    def work() -> Finished:
        try:
            return run()
        finally:
            with contextlib.suppress(RuntimeError):  # the loop has ended, and with it whoever waited
                loop.call_soon_threadsafe(ended.set_result, None)

    try:
        return await run_in_thread(work)
    except asyncio.CancelledError:
        run.stop.wish()
        while not ended.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait({ended})
        raise


def _checked_timeout(seconds: float) -> float:
    if not (seconds > 0 and math.isfinite(seconds)):
        raise DefinitionError(f"a command's timeout is {seconds!r}. Give a number of seconds above zero.")
    return float(seconds)
