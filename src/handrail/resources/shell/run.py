"""One run of a command, on a thread: its turn, a back end, its end, and what it wrote."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from handrail.clock import Clock
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
from handrail.resources.shell.command import Followed, Stop, follow, turn
from handrail.resources.shell.copying import Copy, discard
from handrail.resources.shell.finished import Backend, Finished
from handrail.resources.shell.order import Answer, Order
from handrail.resources.shell.rules import shown
from handrail.resources.shell.secrets import cleaned_environment, hidden_places, interpreter_folders
from handrail.resources.shell.support import Support, probe

_NOT_FILES = ("/dev/", "/proc/", "/sys/")
_TAKEN = ("/", "/tmp", "/var/tmp", "/run", "/var/run", "/dev/shm")


@dataclass(frozen=True, slots=True)
class Settings:
    """How a shell runs whatever it runs."""

    backend: Literal["auto", "overlay", "copy"]
    contained: bool
    network: bool
    output_limit: int
    environment: Mapping[str, str]
    hidden: tuple[str, ...]
    processes: int
    clock: Clock


class Run:
    """Call it on a thread; `stop` may be wished for from any other."""

    def __init__(
        self,
        settings: Settings,
        argv: tuple[str, ...],
        layers: Layers,
        cwd: str,
        stdin: bytes,
        timeout: float,
    ) -> None:
        self._settings = settings
        self._argv = argv
        self._layers = layers
        self._cwd = cwd
        self._stdin = stdin
        self._timeout = timeout
        self.stop = Stop()

    def __call__(self) -> Finished:
        _check_layers(self._layers)
        with self.stop, turn(os.path.realpath(self._layers.upper), self.stop):
            support = probe(self._layers.work)
            backend, notes = _choose(self._settings, support)
            # A folder of its own, since an overlay wants an empty one for each mount.
            shelter = Path(tempfile.mkdtemp(prefix="run-", dir=self._layers.work)).resolve()
            try:
                for name in ("work", "home", "tmp"):
                    (shelter / name).mkdir()
                order = self._order(support, shelter)
                followed = self._follow(order) if backend == "overlay" else None
                if (
                    followed is not None
                    and followed.answer.failed == "overlay"
                    and self._settings.backend == "auto"
                ):
                    notes = (f"No overlay could be mounted: {followed.answer.detail}.",)
                    followed = None
                if followed is None:
                    backend = "copy"
                    followed, more = self._on_a_copy(order, shelter)
                    notes += more
                return self._finished(followed, backend, support.contained, notes)
            finally:
                discard(str(shelter))

    def _order(self, support: Support, shelter: Path) -> Order:
        settings, layers = self._settings, self._layers
        home, temporary = f"{shelter}/home", f"{shelter}/tmp"
        if support.contained:
            home, temporary = "/tmp/home", "/tmp"
        return Order(
            walls=support.walls,
            argv=list(self._argv),
            environment={**cleaned_environment(home, temporary), **settings.environment},
            root=os.path.realpath(layers.root),
            cwd=self._cwd,
            view="overlay",
            lowers=[os.path.realpath(lower) for lower in layers.lowers],
            upper=os.path.realpath(layers.upper),
            work=f"{shelter}/work",
            network=settings.network,
            processes=settings.processes,
            hidden=hidden_places(settings.hidden),
            exposed=interpreter_folders(),
        )

    def _follow(self, order: Order) -> Followed:
        settings = self._settings
        return follow(order, self._stdin, self._timeout, settings.output_limit, self.stop, settings.clock)

    def _on_a_copy(self, order: Order, shelter: Path) -> tuple[Followed, tuple[str, ...]]:
        began = self._settings.clock.monotonic()
        target = shelter / "copy"
        copy = Copy(self._layers.lowers, self._layers.upper, target, self.stop.check)
        copy.make()
        took = self._settings.clock.monotonic() - began
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
            timed_out=followed.timed_out and code == -9,  # it may have ended by itself just then
            output=text,
            omitted=omitted,
            seconds=followed.seconds,
            backend=backend,
            contained=contained,
            notes=notes,
        )


def _choose(settings: Settings, support: Support) -> tuple[Backend, tuple[str, ...]]:
    """Which back end to use, and what to say about it; refuses where nothing that was asked for works."""
    lacking = "; ".join(support.missing)
    if not support.contained and settings.contained:
        raise ShellUnavailable(
            f"commands can't be held in on this machine, which lacks {lacking}",
            "Allow the process user namespaces, or run it as root with CAP_SYS_ADMIN; "
            "or say contained=False to run without walls on a copy of the folder.",
        )
    if settings.backend == "overlay" and not support.overlay:
        raise ShellUnavailable(
            f"an overlay can't be mounted here: {lacking}",
            "Say backend='auto' to work on a copy instead.",
        )
    if settings.backend != "copy" and support.overlay:
        return "overlay", ()
    notes: list[str] = []
    if not support.contained:
        notes.append(f"It ran without walls around it, since this machine lacks {lacking}.")
    elif settings.backend != "copy":
        notes.append(f"No overlay could be mounted: {lacking}.")
    return "copy", tuple(notes)


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
