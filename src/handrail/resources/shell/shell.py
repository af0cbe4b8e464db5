"""`Shell`: runs commands on a folder in a sandbox and captures what they write."""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

from handrail.clock import SYSTEM_CLOCK, Clock
from handrail.concurrency.threads import run_in_thread
from handrail.errors import DefinitionError
from handrail.protocols import Filesystem
from handrail.resources.installation import interpreter_places
from handrail.resources.mount import Layered, Layers
from handrail.resources.paths import parse_path
from handrail.resources.shell.execution import (
    CommandLimits,
    CommandResult,
    Execution,
    Settings,
    Support,
    checked_exposed,
    probe,
    run_execution,
)
from handrail.resources.shell.rules import Allow, Rules
from handrail.resources.shell.shell_errors import ShellUnavailable
from handrail.resources.staging import fork_behind
from handrail.text.spelling import checked_arguments

OUTPUT_LIMIT = 64 * 1024
"""Default maximum bytes of output to keep."""


@checked_arguments
class Shell:
    """Runs commands on a folder, in a sandbox in which they can't change the real files. Rules say which commands are allowed.

    A command's writes to the folder go to the upper layer of `layers`, in overlay format. In the sandbox, the command sees
    the folder at its real path, so absolute paths work. It also sees the system's programs, libraries and settings, the interpreter
    that runs Handrail and the paths in `expose` (both read-only and resolved when the shell is created), and an empty home
    and `/tmp`, which are discarded afterwards. It
    sees nothing else of the host: no other processes, no environment variables except harmless ones such as `PATH` and
    those in `environment`, no network unless `network` is set, and nothing at the paths in `hidden`. It is ended if it
    exceeds `limits`. When `run` returns or raises, everything the command started has ended, unless a process is stuck in the
    kernel. `docs/security.md` says what this does not cover.

    - `backend`: `overlay` mounts an overlay, which copies no files. `copy` works on a copy of the folder. `auto` uses an
      overlay if one can be mounted, and a copy otherwise.
    - `contained`: if true, commands are refused where no sandbox can be created. If false, they run there on a copy
      without a sandbox, so that only the rules restrict them. The result says so.
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
        expose: Iterable[str | Path] = (),
        hidden: Iterable[str | Path] = (),
        limits: CommandLimits = CommandLimits(),  # noqa: B008 (it is frozen)
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        if backend not in ("auto", "overlay", "copy"):
            raise DefinitionError(f"a shell's backend is {backend!r}. Pass 'auto', 'overlay' or 'copy'.")
        if output_limit < 2:
            raise DefinitionError(f"a shell's output_limit is {output_limit!r}. Pass at least 2 bytes.")
        given = dict(environment or {})
        for name, value in given.items():
            if not name or "=" in name or "\0" in name + value:
                raise DefinitionError(
                    f"a shell's environment has {name!r}, whose name or value is invalid. "
                    "Pass a name that is not empty and has no '=', and no NUL in either."
                )
        self.rules = Rules(rules)
        self.timeout = _checked_timeout(timeout)
        self.backend: Literal["auto", "overlay", "copy"] = backend
        """The requested backend. Once a command has run, the backend that the last one used."""
        places = tuple(os.fspath(path) for path in hidden)
        self._settings = Settings(
            backend,
            contained,
            network,
            output_limit,
            given,
            interpreter_places(),
            checked_exposed(expose),
            places,
            limits,
            clock,
        )

    async def run(
        self,
        argv: Sequence[str],
        layers: Layers,
        *,
        cwd: str = ".",
        stdin: str | bytes | None = None,
        timeout: float | None = None,
    ) -> CommandResult:
        """Run a command in the folder, or in `cwd` below it, and wait until everything it started has ended.

        If a command fails or times out, the `CommandResult` says so. In these cases the command has not run:

        - `CommandRefused`: it is malformed, no rule allows it, or no command may run on this folder.
        - `CommandMissing`: there is no such program, or it can't be executed.
        - `ShellUnavailable`: the required sandbox or backend does not work on this machine.
        - `FileError`: the command can't run in `cwd`, or a folder of `layers` does not exist.

        Raises `ShellError` if the command can't be started, or if it is unknown how it ended. Raises `FileError` also if its
        changes to a copy of the folder can't be read.

        Commands on the same upper layer run one at a time, and waiting for a turn does not count towards the timeout. On
        cancellation, `run` ends the command before it raises, and the caller must discard the upper layer.
        """
        self.rules.check(argv)
        data = stdin.encode() if isinstance(stdin, str) else stdin or b""
        limit = self.timeout if timeout is None else _checked_timeout(timeout)
        execution = Execution(self._settings, tuple(argv), layers, parse_path(cwd).path or ".", data, limit)
        result = await run_execution(execution)
        self.backend = result.backend
        return result

    async def run_on(
        self,
        files: Filesystem,
        argv: Sequence[str],
        *,
        cwd: str = ".",
        stdin: str | bytes | None = None,
        timeout: float | None = None,
        keep: bool = True,
    ) -> CommandResult:
        """Run a command on a call's files, which are a fork of a real folder. The command's changes become part of the fork.

        `context.filesystem` are such files if the run's filesystem is a `DirectoryFilesystem`. Raises the errors of `run`, and
        `ShellUnavailable` if `files` are not. Raises `Conflict` if someone else changed the same files while the
        command ran, and `EffectRefused` if the fork is read-only and the command changed something. With `keep=False`, the
        command's changes do not become part of the fork, and the fork must be dropped.
        """
        fork = fork_behind(files)
        if not isinstance(fork, Layered):
            raise ShellUnavailable(
                "commands need a call's fork of a real folder to work on",
                "Pass filesystem=DirectoryFilesystem(folder) to the run, and context.filesystem to `run_on`.",
            )
        self.rules.check(argv)  # checked here too, before the fork's changes are written to disk
        layers = await run_in_thread(fork.layers)  # it writes the fork's changes to disk
        result = await self.run(argv, layers, cwd=cwd, stdin=stdin, timeout=timeout)
        if keep:
            await run_in_thread(lambda: fork.absorb(layers.mounted_at))
        return result

    def mounting(self, folder: Path) -> Shell:
        """Return a shell for every command, with this one's settings, whose commands also see a folder, read-only.

        The folder must hold nothing but files and folders. Then commands reach nothing through it that can't be undone, so it is
        not part of `reach`.
        """
        shell = copy.copy(self)
        shell.rules = Rules([Allow(...)])
        shell._settings = replace(
            self._settings, mounted=(*self._settings.mounted, *checked_exposed([folder]))
        )
        return shell

    @property
    def contained(self) -> bool:
        """Whether commands are refused where no sandbox can be created."""
        return self._settings.contained

    @property
    def network(self) -> bool:
        """Whether commands in a sandbox can reach the network."""
        return self._settings.network

    @property
    def exposed(self) -> tuple[str, ...]:
        """The paths in `expose`, made absolute. Commands see them read-only."""
        return tuple(place.path for place in self._settings.exposed)

    @property
    def reach(self) -> str:
        """A sentence that says why a command waits for approval: what it can reach besides its folder and the system.

        It is "" if commands can reach nothing else. Effects outside the folder can't be undone, so such a command needs approval.
        """
        settings, found = self._settings, list[str]()
        if settings.network:
            found.append("the network")
        if settings.exposed:
            found.append(f"the exposed paths of this machine ({', '.join(self.exposed)})")
        if not settings.contained:
            found.append("everything on this machine, if no sandbox can be created here")
        return f"It has not run yet, because it can reach {' and '.join(found)}" if found else ""

    async def probe(self, folder: Path) -> Support:
        """Report which sandbox features work for commands on this folder's disk, and what is missing."""
        return await run_in_thread(lambda: probe(folder))


def _checked_timeout(seconds: float) -> float:
    if not (seconds > 0 and math.isfinite(seconds)):
        raise DefinitionError(
            f"a command's timeout is {seconds!r}. Pass a finite number of seconds above zero."
        )
    return float(seconds)
