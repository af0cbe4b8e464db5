"""`Shell`: runs commands on a folder in a sandbox and captures what they write."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import math
import os
import signal as signals
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from handrail.clock import SYSTEM_CLOCK, Clock
from handrail.errors import DefinitionError, FileError, FileMissing, PathRefused
from handrail.protocols import Filesystem
from handrail.resources.mount import Layered, Layers, remove_tree
from handrail.resources.paths import parse_path
from handrail.resources.shell.command_process import Outcome, Stop, execute, turn
from handrail.resources.shell.folder_copy import Copy
from handrail.resources.shell.request import (
    Reply,
    Request,
    clean_environment,
    hidden_paths,
    interpreter_folders,
)
from handrail.resources.shell.rules import Allow, Rules, shown
from handrail.resources.shell.shell_errors import CommandMissing, CommandRefused, ShellError, ShellUnavailable
from handrail.resources.shell.support import Support, probe
from handrail.threads import run_in_thread

Backend = Literal["overlay", "copy"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandResult:
    """How a command ended. Everything it started has ended too, and its writes are in the upper layer."""

    argv: tuple[str, ...]
    exit_code: int | None = 0
    """The exit code, or None if a signal ended the command."""
    signal: int | None = None
    timed_out: bool = False
    output: str = ""
    """Both streams, in the order they were written. Long output is cut in the middle."""
    omitted: int = 0
    """Number of bytes of output cut from the middle."""
    seconds: float = 0.0
    backend: Backend = "overlay"
    contained: bool = True
    """Whether the command ran in a sandbox."""
    notes: tuple[str, ...] = ()
    """Remarks for the reader, such as that the command worked on a copy and what that cost."""

    @property
    def ok(self) -> bool:
        return self.exit_code == 0

    @property
    def truncated(self) -> bool:
        return self.omitted > 0

    @property
    def ending(self) -> str:
        """How the command ended, as text: `exit code 1`, `killed by SIGSEGV`, `stopped after 60 s`."""
        if self.timed_out:
            return f"stopped after {self.seconds:.3g} s, with everything it had started"
        if self.signal is not None:
            names = {number.value: number.name for number in signals.Signals}
            return f"killed by {names.get(self.signal, f'signal {self.signal}')}"
        return f"exit code {self.exit_code}"

    def render(self) -> str:
        """Return the result as a model reads it: how the command ended, then its output."""
        lines = [f"`{shown(self.argv)}`: {self.ending}", *self.notes]
        return "\n".join([*lines, self.output] if self.output else [*lines, "(no output)"])


OUTPUT_LIMIT = 64 * 1024
"""Default limit of kept output in bytes: about what a model reads at once."""

_NOT_FILES = ("/dev/", "/proc/", "/sys/")
_TAKEN = ("/", "/tmp", "/var/tmp", "/run", "/var/run", "/dev/shm")


class Shell:
    """Runs the commands that its rules allow, on a folder whose real files they can't change.

    A command's writes to the folder go to the upper layer of `layers`, in overlay format. The command
    sees the folder at its real path, so absolute paths work. Everything else on the machine is read
    only; `/tmp`, `/dev/shm`, `/run` and the home folder are private and discarded afterwards. The
    command sees no other processes, no environment variables but those it is given, no network
    unless `network` is set, and none of the usual places of secrets. When `run` returns or raises,
    everything the command started has ended.

    The sandbox does not stop a command from *reading* other files this user can read, nor from using
    up memory or disk. `docs/design.md` lists its other limits.

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
        hidden: Iterable[str | Path] = (),
        processes: int = 1024,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        if backend not in ("auto", "overlay", "copy"):
            raise DefinitionError(f"a shell's backend is {backend!r}. Pass 'auto', 'overlay' or 'copy'.")
        if output_limit < 2 or processes < 1:
            raise DefinitionError(
                f"a shell's output_limit is {output_limit!r} and its processes {processes!r}. "
                "Pass at least 2 bytes and 1 process."
            )
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
        self._settings = _Settings(backend, contained, network, output_limit, given, places, processes, clock)

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
        execution = _Execution(self._settings, tuple(argv), layers, parse_path(cwd).path or ".", data, limit)
        result = await _run_in_thread(execution)
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

    async def probe(self, folder: Path) -> Support:
        """Report what the kernel supports for commands on this folder's filesystem, and what is missing."""
        return await run_in_thread(lambda: probe(folder))


async def _run_in_thread(execution: _Execution) -> CommandResult:
    """Await an execution. If cancelled, however often, stop the command and wait until it has ended."""
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[None] = loop.create_future()

    def work() -> CommandResult:
        try:
            return execution.run()
        finally:
            with contextlib.suppress(RuntimeError):  # the loop is closed, and nothing waits for the result
                loop.call_soon_threadsafe(ended.set_result, None)

    try:
        return await run_in_thread(work)
    except asyncio.CancelledError:
        execution.stop.request()
        while not ended.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait({ended})
        raise


def _checked_timeout(seconds: float) -> float:
    if not (seconds > 0 and math.isfinite(seconds)):
        raise DefinitionError(f"a command's timeout is {seconds!r}. Pass a number of seconds above zero.")
    return float(seconds)


@dataclass(frozen=True, slots=True)
class _Settings:
    """The settings with which a shell runs its commands."""

    backend: Literal["auto", "overlay", "copy"]
    contained: bool
    network: bool
    output_limit: int
    environment: Mapping[str, str]
    hidden: tuple[str, ...]
    processes: int
    clock: Clock


@dataclass(frozen=True, slots=True, eq=False)
class _Execution:
    """One execution of a command. `run` blocks its thread; any other thread may request `stop`."""

    settings: _Settings
    argv: tuple[str, ...]
    layers: Layers
    cwd: str
    stdin: bytes
    timeout: float
    stop: Stop = field(default_factory=Stop)

    def run(self) -> CommandResult:
        _check_layers(self.layers)
        with self.stop, turn(os.path.realpath(self.layers.upper), self.stop):
            support = probe(self.layers.work)
            backend, notes = _choose_backend(self.settings, support)
            # An overlay needs an empty work folder for each mount.
            shelter = Path(tempfile.mkdtemp(prefix="run-", dir=self.layers.work)).resolve()
            try:
                for name in ("work", "home", "tmp"):
                    (shelter / name).mkdir()
                request = self._request(support, shelter)
                outcome = self._execute(request) if backend == "overlay" else None
                if (
                    outcome is not None
                    and outcome.reply.failed == "overlay"
                    and self.settings.backend == "auto"
                ):
                    notes = (f"No overlay could be mounted: {outcome.reply.detail}.",)
                    outcome = None
                if outcome is None:
                    backend = "copy"
                    outcome, more = self._execute_on_copy(request, shelter)
                    notes += more
                return self._result(outcome, backend, support.contained, notes)
            finally:
                remove_tree(shelter)

    def _request(self, support: Support, shelter: Path) -> Request:
        settings, layers = self.settings, self.layers
        home, temporary = f"{shelter}/home", f"{shelter}/tmp"
        if support.contained:
            home, temporary = "/tmp/home", "/tmp"
        return Request(
            isolation=support.isolation,
            argv=list(self.argv),
            environment={**clean_environment(home, temporary), **settings.environment},
            root=os.path.realpath(layers.root),
            cwd=self.cwd,
            view="overlay",
            lowers=[os.path.realpath(lower) for lower in layers.lowers],
            upper=os.path.realpath(layers.upper),
            work=f"{shelter}/work",
            network=settings.network,
            processes=settings.processes,
            hidden=hidden_paths(settings.hidden),
            exposed=interpreter_folders(),
        )

    def _execute(self, request: Request) -> Outcome:
        settings = self.settings
        return execute(request, self.stdin, self.timeout, settings.output_limit, self.stop, settings.clock)

    def _execute_on_copy(self, request: Request, shelter: Path) -> tuple[Outcome, tuple[str, ...]]:
        began = self.settings.clock.monotonic()
        target = shelter / "copy"
        copy = Copy(self.layers.lowers, self.layers.upper, target, self.stop.check)
        copy.make()
        took = self.settings.clock.monotonic() - began
        view = "plain" if request.isolation == "none" else "bind"
        outcome = self._execute(request._replace(view=view, lowers=[str(target)]))
        if not outcome.reply.failed:
            copy.write_back()
        notes = [
            f"The command ran on a copy of the folder: {copy.files} files, {copy.size} bytes, {took:.3g} s to make."
        ]
        if copy.unread:
            notes.append(f"{copy.unread} files could not be read and are not in the copy.")
        return outcome, tuple(notes)

    def _result(
        self, outcome: Outcome, backend: Backend, contained: bool, notes: tuple[str, ...]
    ) -> CommandResult:
        reply = outcome.reply
        if reply.failed:
            raise _problem(self.argv, self.cwd, reply)
        if reply.status is None:
            raise ShellError(shown(self.argv), "its sandbox process died, and the command with it")
        text, omitted = outcome.output.read()
        code = os.waitstatus_to_exitcode(reply.status)
        return CommandResult(
            argv=self.argv,
            exit_code=code if code >= 0 else None,
            signal=-code if code < 0 else None,
            timed_out=outcome.timed_out and code == -9,  # the command may have ended by itself at that moment
            output=text,
            omitted=omitted,
            seconds=outcome.seconds,
            backend=backend,
            contained=contained,
            notes=notes,
        )


def _choose_backend(settings: _Settings, support: Support) -> tuple[Backend, tuple[str, ...]]:
    """Choose the backend, with notes about it.

    Raises `ShellUnavailable` if the requested one does not work here.
    """
    lacking = "; ".join(support.missing)
    if not support.contained and settings.contained:
        raise ShellUnavailable(
            f"commands can't be sandboxed on this machine, which lacks {lacking}",
            "Allow the process user namespaces, or run it as root with CAP_SYS_ADMIN; "
            "or pass contained=False to run without a sandbox, on a copy of the folder.",
        )
    if settings.backend == "overlay" and not support.overlay:
        raise ShellUnavailable(
            f"an overlay can't be mounted here: {lacking}",
            "Pass backend='auto' to work on a copy instead.",
        )
    if settings.backend != "copy" and support.overlay:
        return "overlay", ()
    notes: list[str] = []
    if not support.contained:
        notes.append(f"The command ran without a sandbox, since this machine lacks {lacking}.")
    elif settings.backend != "copy":
        notes.append(f"No overlay could be mounted: {lacking}.")
    return "copy", tuple(notes)


def _problem(argv: tuple[str, ...], cwd: str, reply: Reply) -> Exception:
    """Return the error for the step that failed."""
    command, program = shown(argv), argv[0]
    if reply.failed == "exec":
        if reply.error == errno.ENOENT:
            return CommandMissing(
                command,
                program,
                f"the program {program!r}, or the interpreter its first line names, is not installed here",
            )
        if reply.error in (errno.EACCES, errno.ENOEXEC, errno.EISDIR, errno.ENOTDIR):
            return CommandMissing(command, program, f"{program!r} can't be executed: {reply.detail}")
    if reply.failed == "folder":
        if reply.error == errno.ENOENT:
            return FileMissing(cwd, "there is no such folder to run in")
        if reply.error == errno.EPERM:
            return PathRefused(cwd, "it leads out of the folder. Name a folder inside")
        return FileError(cwd, f"no command can run in it: {reply.detail}")
    return ShellError(command, f"it could not be started ({reply.failed}: {reply.detail})")


def _check_layers(layers: Layers) -> None:
    root = os.path.realpath(layers.root)
    if root in _TAKEN or ((root + "/").startswith(_NOT_FILES) and not root.startswith("/dev/shm/")):
        raise CommandRefused("", f"no command runs on {root!r}. Use the folder of a project")
    for folder in (*layers.lowers, layers.upper, layers.work):
        if not folder.is_dir():
            raise FileMissing(str(folder), "there is no such folder")
