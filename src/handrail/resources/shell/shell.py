"""`Shell`: runs commands on a folder, with walls around them and their writes caught in a layer above it."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import math
import os
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Literal

from handrail.clock import SYSTEM_CLOCK, Clock
from handrail.errors import (
    CommandMissing,
    CommandRefused,
    FileError,
    FileMissing,
    PathRefused,
    ShellError,
    ShellUnavailable,
)
from handrail.resources.layers import Layers
from handrail.resources.paths import place
from handrail.resources.shell.command import Followed, Stop, Stopped, follow, turn
from handrail.resources.shell.copying import Copy, discard
from handrail.resources.shell.finished import Backend, Finished
from handrail.resources.shell.order import Answer, Order
from handrail.resources.shell.rules import Allow, Rules, shown
from handrail.resources.shell.secrets import cleaned_environment, hidden_places
from handrail.resources.shell.support import Support, probe
from handrail.threads import run_in_thread

OUTPUT_LIMIT = 64 * 1024
"""Bytes of output that are kept unless a shell is told otherwise: about what a model reads at once."""

_NOT_FILES = ("/dev/", "/proc/", "/sys/")
_TAKEN = ("/", "/tmp", "/var/tmp", "/run", "/var/run", "/dev/shm")


class Shell:
    """Runs commands that rules allow, on a folder whose real files they can't change.

    What a command writes in the folder goes to the upper layer of `layers`, in overlay format. It
    works at the folder's own path, so absolute paths hold. Everything else on the machine is read
    only to it; `/tmp`, `/dev/shm`, `/run` and its home are its own and gone afterwards; it sees no
    processes but its own, no environment but what is given to it, no network unless `network`, and
    none of the usual places of secrets. When `run` returns or raises, all that it started has ended.

    It does not keep a command from *reading* other files that this user can read, nor from using up
    memory or disk.

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
            raise ValueError(f"backend is 'auto', 'overlay' or 'copy', not {backend!r}")
        if output_limit < 2 or processes < 1:
            raise ValueError("output_limit is at least 2 bytes, and processes at least 1")
        self.rules = Rules(rules)
        self.contained = contained
        self.network = network
        self.timeout = _checked_timeout(timeout)
        self.output_limit = output_limit
        self.backend: Literal["auto", "overlay", "copy"] = backend
        """What was asked for; where that is `auto`, what was found once something has run."""
        self._wanted = backend
        self._environment = dict(environment or {})
        for name, value in self._environment.items():
            if not name or "=" in name or "\0" in name + value:
                raise ValueError(
                    f"environment: {name!r} can't be the name of a variable, or not with this value"
                )
        self._hidden = [os.fspath(path) for path in hidden]
        self._processes = processes
        self._clock = clock

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
        run = _Run(self, tuple(argv), layers, place(cwd).path or ".", data, limit)
        task = asyncio.create_task(run_in_thread(run))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            run.stop.wish()
            await _outlast(task)
            raise
        finally:
            run.stop.close()

    async def probe(self, folder: Path) -> Support:
        """What can be had for commands on that folder's filesystem, and what is missing."""
        return await run_in_thread(lambda: probe(folder))

    def order(
        self, argv: tuple[str, ...], layers: Layers, cwd: str, support: Support, shelter: Path
    ) -> Order:
        """The command as the keeper is told it, with an overlay as its view."""
        walled = support.contained
        home, temporary = ("/tmp/home", "/tmp") if walled else (f"{shelter}/home", f"{shelter}/tmp")
        return Order(
            walls=support.walls,
            argv=list(argv),
            environment=cleaned_environment(home, temporary) | self._environment,
            root=os.path.realpath(layers.root),
            cwd=cwd,
            view="overlay",
            lowers=[os.path.realpath(lower) for lower in layers.lowers],
            upper=os.path.realpath(layers.upper),
            work=f"{shelter}/work",
            network=self.network,
            processes=self._processes,
            hidden=hidden_places(self._hidden),
        )

    def choose(self, support: Support) -> tuple[Backend, tuple[str, ...]]:
        """Which back end to use, and what to say about it; refuses where nothing that was asked for works."""
        lacking = "; ".join(support.missing)
        if not support.contained and self.contained:
            raise ShellUnavailable(
                f"commands can't be held in on this machine, which lacks {lacking}",
                "Allow the process user namespaces, or run it as root with CAP_SYS_ADMIN; "
                "or say contained=False to run without walls on a copy of the folder.",
            )
        if self._wanted == "overlay" and not support.overlay:
            raise ShellUnavailable(
                f"an overlay can't be mounted here: {lacking}",
                "Say backend='auto' to work on a copy instead.",
            )
        if self._wanted != "copy" and support.overlay:
            return "overlay", ()
        notes: list[str] = []
        if not support.contained:
            notes.append(f"It ran without walls around it, since this machine lacks {lacking}.")
        elif self._wanted != "copy":
            notes.append(f"No overlay could be mounted: {lacking}.")
        return "copy", tuple(notes)

    def can_fall_back(self) -> bool:
        return self._wanted == "auto"

    @property
    def clock(self) -> Clock:
        return self._clock


class _Run:
    """One run, on a thread."""

    def __init__(
        self, shell: Shell, argv: tuple[str, ...], layers: Layers, cwd: str, stdin: bytes, timeout: float
    ) -> None:
        self._shell = shell
        self._argv = argv
        self._layers = layers
        self._cwd = cwd
        self._stdin = stdin
        self._timeout = timeout
        self.stop = Stop()

    def __call__(self) -> Finished:
        _check_layers(self._layers)
        with turn(os.path.realpath(self._layers.upper), self.stop):
            support = probe(self._layers.work)
            backend, notes = self._shell.choose(support)
            # A folder of its own, since an overlay wants an empty one for each mount.
            shelter = Path(tempfile.mkdtemp(prefix="run-", dir=self._layers.work)).resolve()
            try:
                for name in ("work", "home", "tmp"):
                    (shelter / name).mkdir()
                order = self._shell.order(self._argv, self._layers, self._cwd, support, shelter)
                if backend == "overlay":
                    followed = self._follow(order)
                    if followed.answer.failed == "overlay" and self._shell.can_fall_back():
                        notes = (f"No overlay could be mounted: {followed.answer.detail}.",)
                        backend = "copy"
                if backend == "copy":
                    followed, more = self._on_a_copy(order, shelter)
                    notes += more
                self._shell.backend = backend
                return self._finished(followed, backend, support.contained, notes)  # pyright: ignore[reportPossiblyUnboundVariable]  (one of the two)
            finally:
                discard(str(shelter))

    def _follow(self, order: Order) -> Followed:
        shell = self._shell
        return follow(order, self._stdin, self._timeout, shell.output_limit, self.stop, shell.clock)

    def _on_a_copy(self, order: Order, shelter: Path) -> tuple[Followed, tuple[str, ...]]:
        began = self._shell.clock.monotonic()
        target = shelter / "copy"
        copy = Copy(self._layers.lowers, self._layers.upper, target, self.stop.check)
        copy.make()
        took = self._shell.clock.monotonic() - began
        view = "plain" if order.walls == "none" else "bind"
        followed = self._follow(order._replace(view=view, lowers=[str(target)]))
        if not followed.answer.failed:
            copy.write_back()
        notes = [
            f"It worked on a copy of the folder: {copy.files} files, {copy.size} bytes, {took:.3g} s to make."
        ]
        if copy.unread:
            notes.append(f"{copy.unread} files could not be read and were not in it.")
        return followed, tuple(notes)

    def _finished(
        self, followed: Followed, backend: Backend, contained: bool, notes: tuple[str, ...]
    ) -> Finished:
        answer = followed.answer
        if answer.failed:
            raise _problem(self._argv, self._cwd, answer)
        if answer.status is None:
            raise ShellError(shown(self._argv), "what kept it has died, and it with that")
        text, omitted = followed.output.read()
        code = os.waitstatus_to_exitcode(answer.status)
        return Finished(
            argv=self._argv,
            exit_code=code if code >= 0 else None,
            signal=-code if code < 0 else None,
            timed_out=followed.timed_out,
            output=text,
            omitted=omitted,
            seconds=followed.seconds,
            backend=backend,
            contained=contained,
            notes=notes,
        )


def _problem(argv: tuple[str, ...], cwd: str, answer: Answer) -> Exception:
    """The error for a step that failed."""
    command, program = shown(argv), argv[0]
    if answer.failed == "exec":
        if answer.error == errno.ENOENT:
            return CommandMissing(
                command, program, f"there is no program {program!r} here, or what its first line names"
            )
        if answer.error in (errno.EACCES, errno.ENOEXEC, errno.EISDIR, errno.ENOTDIR):
            return CommandMissing(
                command, program, f"{program!r} is not a program that can be run: {answer.detail}"
            )
    if answer.failed == "folder":
        if answer.error == errno.ENOENT:
            return FileMissing(cwd, "there is no such folder to run in")
        if answer.error == errno.EPERM:
            return PathRefused(cwd, "it leads out of the folder. Name a folder inside")
        return FileError(cwd, f"it can't be run in: {answer.detail}")
    return ShellError(command, f"it could not be begun ({answer.failed}: {answer.detail})")


def _check_layers(layers: Layers) -> None:
    root = os.path.realpath(layers.root)
    if root in _TAKEN or ((root + "/").startswith(_NOT_FILES) and not root.startswith("/dev/shm/")):
        raise CommandRefused("", f"no command runs on {root!r}: it works on the folder of a project")
    for folder in (*layers.lowers, layers.upper, layers.work):
        if not folder.is_dir():
            raise FileMissing(str(folder), "there is no such folder")


def _checked_timeout(seconds: float) -> float:
    if not (seconds > 0 and math.isfinite(seconds)):
        raise ValueError(f"timeout is a number of seconds above zero, not {seconds!r}")
    return float(seconds)


async def _outlast(task: asyncio.Task[Finished]) -> None:
    """Wait for the end of a task however often this one is cancelled meanwhile."""
    while not task.done():
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait({task})
    if not task.cancelled():
        task.exception()  # looked at, so that nobody warns of it


__all__ = ["OUTPUT_LIMIT", "Shell", "Stopped"]
