"""`Shell`: runs commands on a folder in a sandbox and captures what they write."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Literal

from handrail.clock import SYSTEM_CLOCK, Clock
from handrail.errors import DefinitionError
from handrail.protocols import Filesystem
from handrail.resources.mount import Layered, Layers
from handrail.resources.paths import parse_path
from handrail.resources.shell.execution import (
    CommandLimits,
    CommandResult,
    Execution,
    Settings,
    run_execution,
)
from handrail.resources.shell.exposure import checked_exposed
from handrail.resources.shell.rules import Allow, Rules
from handrail.resources.shell.shell_errors import ShellUnavailable
from handrail.resources.shell.support import Support, probe
from handrail.threads import run_in_thread

OUTPUT_LIMIT = 64 * 1024
"""Default limit of kept output in bytes: about what a model reads at once."""


class Shell:
    """Runs the commands that its rules allow, on a folder whose real files they can't change.

    A command's writes to the folder go to the upper layer of `layers`, in overlay format. The command
    sees the folder at its real path, so absolute paths work. Beside it, it sees the system's programs
    and libraries, the interpreter that runs Handrail, and an empty home and `/tmp`, which are discarded
    afterwards; nothing else of the host but what `expose` names, read-only. It sees no other processes,
    no environment variables but those it is given, no network unless `network` is set, and nothing at
    the paths in `hidden`. It is ended if it uses more than `limits`. When `run` returns or raises, everything the command started has ended.
    `docs/security.md` says what this does not cover.

    `backend`: `overlay` mounts an overlay, which costs the same for a folder of any size; `copy`
    works on a copy of the folder; `auto` uses an overlay where the kernel allows one. `contained`:
    if the kernel offers no namespaces, commands are refused. With `contained=False` they run on a
    copy without a sandbox instead, and the result says so.
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
                    f"a shell's environment has {name!r}, whose name or value no variable can have. "
                    "Pass a name without '=', and no NUL in either."
                )
        self.rules = Rules(rules)
        self.timeout = _checked_timeout(timeout)
        self.backend: Literal["auto", "overlay", "copy"] = backend
        """The requested backend. `auto` is replaced by the one in use once a command has run."""
        places = tuple(os.fspath(path) for path in hidden)
        self._settings = Settings(
            backend,
            contained,
            network,
            output_limit,
            given,
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
        """Run a command in the folder, or in `cwd` below it, and wait until all of it has ended.

        A command that fails or times out returns a `CommandResult` that says so. Raises
        `CommandRefused` if no rule allows the command, `CommandMissing` if there is no such program,
        and `ShellUnavailable` if it can't be sandboxed here; it has not run then. Commands on the
        same upper layer run one at a time, and waiting does not count towards the timeout. On
        cancellation the command is ended first; discard the upper layer then.
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
        """Run a command on a fork of a real folder; the fork then holds what the command wrote.

        `context.filesystem` is such a fork if the run's filesystem is a `DirectoryFilesystem`. Raises
        `Conflict` if somebody else changed the same files while the command ran. With `keep=False`
        the writes are not taken over, and the fork must be dropped.
        """
        if not isinstance(files, Layered):
            raise ShellUnavailable(
                "commands need a real folder to work on",
                "Give the run a DirectoryFilesystem as its filesystem",
            )
        self.rules.check(argv)  # before the fork's changes are written out
        layers = files.layers()
        result = await self.run(argv, layers, cwd=cwd, stdin=stdin, timeout=timeout)
        if keep:
            await run_in_thread(lambda: files.absorb(layers.mounted_at))
        return result

    @property
    def network(self) -> bool:
        """Whether commands can reach the network."""
        return self._settings.network

    @property
    def exposed(self) -> tuple[str, ...]:
        """What commands see of this machine beside the system and their folder, read-only."""
        return self._settings.exposed

    @property
    def reach(self) -> str:
        """What commands can reach outside their folder, in words; "" if they reach nothing.

        What they do there can't be undone, so such a command is asked about before it runs.
        """
        settings, found = self._settings, list[str]()
        if settings.network:
            found.append("the network")
        if settings.exposed:
            found.append(f"what is exposed of this machine ({', '.join(settings.exposed)})")
        if not settings.contained:
            found.append("everything on this machine, if no sandbox can be made here")
        return f"It has not run yet, because it can reach {' and '.join(found)}" if found else ""

    async def probe(self, folder: Path) -> Support:
        """Report what the kernel supports for commands on this folder's filesystem, and what is missing."""
        return await run_in_thread(lambda: probe(folder))


def _checked_timeout(seconds: float) -> float:
    if not (seconds > 0 and math.isfinite(seconds)):
        raise DefinitionError(f"a command's timeout is {seconds!r}. Pass a number of seconds above zero.")
    return float(seconds)
