"""`Execution`: one command, from the choice of a backend to its result.

`Support` says which sandbox features this machine supports, found by trying them once.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import shutil
import signal as signals
import sys
import tempfile
import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from handrail.clock import SYSTEM_CLOCK, Clock
from handrail.concurrency.threads import run_in_thread
from handrail.errors import DefinitionError, FileError, FileMissing, HandrailError, PathRefused
from handrail.resources.installation import Place, installed_in, is_below, resolve
from handrail.resources.mount import Layers, mask_reserved, remove_tree
from handrail.resources.paths import MAX_PATH, on_disk, spelled
from handrail.resources.shell.command_process import Outcome, Stop, execute, turn
from handrail.resources.shell.folder_copy import Copy, changes
from handrail.resources.shell.request import (
    Isolation,
    Limits,
    Reply,
    Request,
    View,
    clean_environment,
    hidden_paths,
)
from handrail.resources.shell.rules import shown
from handrail.resources.shell.sandbox import SYSTEM
from handrail.resources.shell.shell_errors import CommandMissing, CommandRefused, ShellError, ShellUnavailable

log = logging.getLogger("handrail.shell")

UNLIMITED = "buffers of pipes and sockets, files on their way through a socket, and what a command uses between two checks"
"""What the limits of a command do not cover unless the kernel enforces them."""
_WHY_UNLIMITED = (
    "this process can't create cgroups. Give it a writable cgroup with the memory controller, such as systemd's Delegate=yes, "
    "or run commands that you don't trust in a virtual machine."
)
_SECONDS = 30.0

_STEPS = {
    "namespaces": "namespaces (kernel 5.12 or later, not forbidden by a container)",
    "mounts": "private mounts",
    "overlay": "an overlay mount here",
    "privileges": "dropping privileges",
}


@dataclass(frozen=True, slots=True)
class Support:
    """The sandbox features that work for commands on a folder."""

    isolation: Isolation
    """`user` (namespaces under a user namespace), `root` (without one), or `none`."""
    overlay: bool
    """Whether an overlay mount can capture writes. If not, commands work on a copy."""
    missing: tuple[str, ...] = ()
    """Descriptions of the features that do not work on this machine, including those that have a fallback."""
    kernel_limits: bool = False
    """Whether the kernel limits the memory of commands. If not, `UNLIMITED` is not limited at all."""

    @property
    def contained(self) -> bool:
        return self.isolation != "none"


_known: dict[tuple[int, int], Support] = {}
_lock = threading.Lock()


def probe(folder: Path) -> Support:
    """Find out which sandbox works in `folder`. The result is cached for the folder's disk and the user.

    On Linux, a sandbox is tried with a real overlay, in which each kind of mark is created once. If only the overlay fails,
    the sandbox is tried without one.
    """
    if sys.platform != "linux":
        return Support("none", False, ("Linux",))
    key = os.stat(folder).st_dev, os.geteuid()
    with _lock:
        if key not in _known:
            found = _known[key] = _probe(folder)
            if found.contained and not found.kernel_limits:
                log.warning("the limits of commands do not cover %s: %s", UNLIMITED, _WHY_UNLIMITED)
        return _known[key]


def forget() -> None:
    """Clear the cache, so that the next probe tries again."""
    with _lock:
        _known.clear()


def _probe(folder: Path) -> Support:
    missing: list[str] = []
    kinds: tuple[Isolation, ...] = ("user", "root") if os.geteuid() == 0 else ("user",)
    for isolation in kinds:
        problem, limited = _try(folder, isolation, "overlay")
        if not problem:
            return Support(isolation, True, tuple(missing), limited)
        missing.append(problem)
        if problem.startswith(_STEPS["overlay"]):
            problem, limited = _try(folder, isolation, "bind")
            if not problem:
                return Support(isolation, False, tuple(missing), limited)
    return Support("none", False, tuple(missing))


def _try(folder: Path, isolation: Isolation, view: View) -> tuple[str, bool]:
    """Try one kind of sandbox. Returns the missing feature, or "" if the sandbox works, and whether the kernel limits memory."""
    place = Path(tempfile.mkdtemp(prefix="probe-", dir=folder)).resolve()
    try:
        for name in ("root/folder", "upper", "work"):
            (place / name).mkdir(parents=True)
        for name in ("root/file", "root/folder/file"):
            (place / name).touch()
        request = Request(
            isolation=isolation,
            argv=[],
            environment={},
            root=f"{place}/root",
            cwd=".",
            view=view,
            lowers=[f"{place}/root"],
            upper=f"{place}/upper",
            work=f"{place}/work",
            network=False,
            limits=Limits(1 << 28, 60.0, 1 << 20, 1000, 1024),
            hidden=[],
            exposed=[],
            kept=[],
        )
        stop = Stop()
        with stop:
            reply = execute(request, b"", _SECONDS, 1000, stop, SYSTEM_CLOCK).reply
        if reply.failed:
            return f"{_STEPS.get(reply.failed, reply.failed)}: {reply.detail}", False
        if reply.status != 0:
            return f"{_STEPS['namespaces']}: the probe ended with status {reply.status}", False
        if view == "overlay" and list(changes(place / "upper")) != [
            ("deleted", "file"),
            ("replaced", "folder"),
        ]:
            return f"{_STEPS['overlay']}: it does not mark deletions correctly", False
        return "", reply.limited == "kernel"
    except HandrailError as error:
        return str(error), False
    finally:
        remove_tree(place)


_NEVER = ("/", "/dev", "/proc", "/sys", "/tmp", "/var/tmp", "/run")
_PROGRAM_FOLDERS = ("bin", "sbin", "shims")
_COMPANIONS = {".cargo": ".rustup"}


def checked_exposed(given: Iterable[str | Path]) -> tuple[Place, ...]:
    """Return the paths to expose, normalized, with `~` expanded, and resolved. Raises `DefinitionError` if one can't be exposed."""
    if isinstance(given, str):
        raise DefinitionError(
            f"a shell's expose is the string {str(given)!r}. Pass a list: expose=[{str(given)!r}]."
        )
    found: list[Place] = []
    for each in given:
        path = os.path.normpath(os.path.expanduser(str(each)))
        if not os.path.isabs(path):
            raise DefinitionError(
                f"a shell exposes {str(each)!r}, which is relative. Pass an absolute path, or one that starts with '~'."
            )
        if os.path.realpath(path) in _NEVER:
            raise DefinitionError(
                f"a shell exposes {str(each)!r}, but commands have their own folder there. Expose only the file or folder in it that they need."
            )
        if not os.path.exists(path):
            raise DefinitionError(
                f"a shell exposes {str(each)!r}, which does not exist. Remove it, or create it."
            )
        found.append(resolve(path))
    return tuple(found)


def needed_exposure(program: str, folder: str, search: str, seen: Iterable[str]) -> tuple[str, ...]:
    """Return the folders to expose so that commands can see a program.

    Returns () if the host does not have the program, or if commands see it already. `folder` is the folder that the
    command runs in, `search` is its PATH, and `seen` are the paths it sees besides the system's.
    """
    found = os.path.join(folder, program) if "/" in program else shutil.which(program, path=search)
    if found is None or not os.path.exists(found):
        return ()
    visible = (*SYSTEM, *seen)
    wanted: dict[str, None] = {}
    for path in (found, os.path.realpath(found), *_interpreter(found)):
        if not any(is_below(path, place) or is_below(os.path.realpath(path), place) for place in visible):
            wanted.update(dict.fromkeys(_home_of(path)))
    return tuple(wanted)


def hidden_search(search: str, seen: Iterable[str]) -> tuple[str, ...]:
    """Return the folders in a PATH that exist on the host but are hidden from commands."""
    visible = (*SYSTEM, *seen)
    return tuple(
        path
        for path in dict.fromkeys(search.split(":"))
        if os.path.isdir(path) and not any(is_below(os.path.realpath(path), place) for place in visible)
    )


def _home_of(path: str) -> list[str]:
    """Return the folder that a program is installed in, such as `~/.cargo` for `~/.cargo/bin/cargo`.

    A companion folder that the program needs, such as `~/.rustup`, is returned too.
    """
    home = os.path.expanduser("~")
    folder = os.path.dirname(path)
    above = os.path.dirname(folder)
    if os.path.basename(folder) in _PROGRAM_FOLDERS and above not in (home, f"{home}/.local", "/"):
        folder = above
    companion = _COMPANIONS.get(os.path.basename(folder))
    beside = f"{os.path.dirname(folder)}/{companion}"
    return [folder, beside] if companion and os.path.isdir(beside) else [folder]


def _interpreter(path: str) -> list[str]:
    """Return the path of the interpreter that a script's first line names, twice: as written, and with links resolved.

    Returns an empty list if the line names no existing interpreter.
    """
    try:
        with open(path, "rb") as file:
            first = file.readline(256)
    except OSError:
        return []
    words = first[2:].split()
    if not first.startswith(b"#!") or not words:
        return []
    named = os.fsdecode(words[0])
    return [named, os.path.realpath(named)] if os.path.exists(named) else []


Backend = Literal["overlay", "copy"]
_STAGED_INSIDE = (
    "No overlay could be mounted, because changes are staged in the folder itself. This happens if the folder is a mount "
    "point, or if nothing can be created beside it."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandLimits:
    """Limits for a command together with everything it starts. A command that exceeds a limit is ended.

    The defaults are meant for builds. In a sandbox, total usage is checked ten times a second, and the disk less often if
    there are many files and no more of the disk is in use. If Handrail may create cgroups, the kernel limits memory and
    processes too, at somewhat higher values. If not, a warning is logged that says what is not limited. Without a sandbox, these
    limits do not apply.
    """

    memory: int | None = None
    """Maximum bytes of memory, including files in `/tmp`. None means 75% of the machine's memory, at most 8 GiB."""
    cpu_seconds: float = 3600.0
    """Maximum seconds of CPU time, on all cores together."""
    disk: int | None = None
    """Maximum bytes of disk space that writes to the folder may add. None means half of the free disk space, at most 8 GiB."""
    files: int = 1_000_000
    """Maximum number of files and folders in the upper layer, or in the copy if the command runs on a copy.

    Each private folder, such as `/tmp`, may hold as many, but at most one for each KiB of `memory`. It may always hold 1024.
    """
    processes: int = 1024
    """Maximum number of processes and threads at a time."""

    def __post_init__(self) -> None:
        for name in ("memory", "cpu_seconds", "disk", "files", "processes"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise DefinitionError(f"the command limit {name!r} is {value!r}. Pass a number above zero.")

    def for_folder(self, folder: Path) -> Limits:
        """Return these limits for a command that writes to this folder. A limit of None is replaced by the default."""
        memory = self.memory or min(
            8 << 30, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") * 3 // 4
        )
        space = os.statvfs(folder)
        disk = self.disk or min(8 << 30, space.f_bavail * space.f_frsize // 2)
        return Limits(memory, self.cpu_seconds, disk, self.files, self.processes)


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandResult:
    """The result of a command. Everything the command started has ended, and its writes to the folder are in the upper layer."""

    argv: tuple[str, ...]
    exit_code: int = 0
    """The exit code. If a signal ended the command, or part of it at a limit, it is the signal's number, negated, as in `subprocess`."""
    timed_out: bool = False
    limit: str = ""
    """The limit that the command exceeded, such as `512 MiB of memory`, or "" if it exceeded none."""
    output: str = ""
    """Standard output and standard error, in the order they were written. Long output is cut in the middle."""
    omitted: int = 0
    """Number of bytes of output cut from the middle."""
    seconds: float = 0.0
    backend: Backend = "overlay"
    contained: bool = True
    """Whether the command ran in a sandbox."""
    notes: tuple[str, ...] = ()
    """Notes about how the command ran, such as that it ran on a copy of the folder."""

    @property
    def ok(self) -> bool:
        return self.exit_code == 0

    @property
    def signal(self) -> int | None:
        """The number of the signal that ended the command; None if it ended by itself."""
        return -self.exit_code if self.exit_code < 0 else None

    @property
    def truncated(self) -> bool:
        return self.omitted > 0

    @property
    def ending(self) -> str:
        """How the command ended, such as `exit code 1` or `killed by SIGSEGV`."""
        if self.limit:
            return f"stopped, with everything it had started, because it used more than its limit of {self.limit}"
        if self.timed_out:
            return f"stopped after {self.seconds:.3g} s, with everything it had started"
        if self.signal is not None:
            names = {number.value: number.name for number in signals.Signals}
            return f"killed by {names.get(self.signal, f'signal {self.signal}')}"
        return f"exit code {self.exit_code}"

    def render(self) -> str:
        """Format the result for a model: how the command ended, the notes and the output."""
        command = shown(self.argv)
        if len(command) > _COMMAND:  # keep the first line short, so that the ending is not cut off
            command = f"{command[: _COMMAND - 1]}…"
        lines = [f"`{command}`: {self.ending}", *self.notes]
        return "\n".join([*lines, self.output] if self.output else [*lines, "(no output)"])


_COMMAND = 80
"""Maximum characters of the command line in a rendered result."""
_NOT_FOUND = 127
"""The exit code with which shells and build tools report that a program is missing."""
_NOT_FILES = ("/dev/", "/proc/", "/sys/")
_TAKEN = ("/", "/tmp", "/var/tmp", "/run", "/var/run", "/dev/shm")


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings with which a shell runs its commands."""

    backend: Literal["auto", "overlay", "copy"]
    contained: bool
    network: bool
    output_limit: int
    environment: Mapping[str, str]
    interpreter: tuple[Place, ...]
    exposed: tuple[Place, ...]
    hidden: tuple[str, ...]
    limits: CommandLimits
    clock: Clock
    mounted: tuple[Place, ...] = ()
    """Folders to show read-only like those in `exposed`, which hold nothing but files."""


@dataclass(frozen=True, slots=True, eq=False)
class Execution:
    """One execution of a command. `run` blocks the calling thread. Any other thread may call `stop.request()`."""

    settings: Settings
    argv: tuple[str, ...]
    layers: Layers
    cwd: str
    stdin: bytes
    timeout: float
    stop: Stop = field(default_factory=Stop)

    def run(self) -> CommandResult:
        _check_layers(self.layers, (*self.settings.exposed, *self.settings.mounted))
        with self.stop, turn(os.path.realpath(self.layers.upper), self.stop):
            support = probe(self.layers.work)
            backend, notes = _choose_backend(self.settings, support)
            if backend == "overlay" and self.settings.backend == "auto" and self._is_staged_inside():
                backend, notes = "copy", (_STAGED_INSIDE,)
            # Each command gets new folders, because an overlay needs an empty work folder for each mount.
            shelter = Path(tempfile.mkdtemp(prefix="run-", dir=self.layers.work)).resolve()
            try:
                for name in ("work", "home", "tmp", "mask"):
                    (shelter / name).mkdir()
                if backend == "overlay":
                    mask_reserved(shelter / "mask", self.layers.root)
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

    def _is_staged_inside(self) -> bool:
        """Return whether changes are staged in the folder itself. The kernel refuses an overlay over such a folder."""
        root = os.path.realpath(self.layers.root)
        return os.path.realpath(self.layers.upper).startswith(f"{root}/")

    def _request(self, support: Support, shelter: Path) -> Request:
        settings, layers = self.settings, self.layers
        root = os.path.realpath(layers.root)
        home, temporary = f"{shelter}/home", f"{shelter}/tmp"
        if support.contained:
            home, temporary = "/tmp/home", "/tmp"
        return Request(
            isolation=support.isolation,
            argv=list(self.argv),
            environment={**clean_environment(home, temporary), **settings.environment},
            root=root,
            cwd=on_disk(self.cwd),
            view="overlay",
            lowers=[*(os.path.realpath(lower) for lower in layers.lowers[:-1]), f"{shelter}/mask", root],
            upper=os.path.realpath(layers.upper),
            work=f"{shelter}/work",
            network=settings.network,
            limits=settings.limits.for_folder(layers.upper),
            hidden=hidden_paths(settings.hidden),
            exposed=[*settings.interpreter, *settings.exposed, *settings.mounted],
            kept=[*installed_in(root), *_inside(settings.mounted, root)],
        )

    def _execute(self, request: Request) -> Outcome:
        settings = self.settings
        return execute(request, self.stdin, self.timeout, settings.output_limit, self.stop, settings.clock)

    def _execute_on_copy(self, request: Request, shelter: Path) -> tuple[Outcome, tuple[str, ...]]:
        began = self.settings.clock.monotonic()
        target = shelter / "copy"
        view = "plain" if request.isolation == "none" else "bind"
        # Without a sandbox, nothing makes these paths read-only. Python writes bytecode to them, so this is no reason to fail.
        kept = request.kept if view == "plain" else []
        copy = Copy(
            self.layers.lowers,
            self.layers.upper,
            target,
            self.stop.check,
            kept=kept,
            closed=view == "plain",
        )
        copy.make()
        took = self.settings.clock.monotonic() - began
        outcome = self._execute(request._replace(view=view, lowers=[str(target)]))
        if not outcome.reply.failed:
            try:
                copy.write_back()
            except PermissionError as error:
                where = spelled(os.path.relpath(error.filename or target, target))
                problem = "a command removed the read permission of this folder. Keep its mode"
                raise FileError(where, problem) from None
            except OSError as error:
                if error.errno != errno.ENAMETOOLONG:
                    raise
                problem = f"the command nested its folders too deeply. Keep paths below {MAX_PATH} bytes"
                raise FileError(self.cwd, problem) from None
        notes = [
            f"The command ran on a copy of the folder: {copy.files} files, {copy.size} bytes, {took:.3g} s to make."
        ]
        if copy.unread:
            notes.append(f"{copy.unread} files could not be read and are not in the copy.")
        if kept:
            notes.append(f"Changes to the installation that runs Handrail are discarded: {', '.join(kept)}.")
        if copy.omitted:
            notes.append(f"{copy.omitted} links lead out of the folder and are not in the copy.")
        return outcome, tuple(notes)

    def _result(
        self, outcome: Outcome, backend: Backend, contained: bool, notes: tuple[str, ...]
    ) -> CommandResult:
        reply = outcome.reply
        if reply.failed:
            raise self._problem(reply)
        if reply.status is None:
            raise ShellError(
                shown(self.argv),
                "the process that controls it died or was not started, so it did not run to its end. Try again",
            )
        text, omitted = outcome.output.read()
        code, limit = os.waitstatus_to_exitcode(reply.status), self._limit_met(reply)
        return CommandResult(
            argv=self.argv,
            exit_code=-signals.SIGKILL if limit and not code else code,
            limit=limit,
            timed_out=outcome.timed_out
            and code == -9
            and not reply.limit,  # the command may have ended on its own at the deadline
            output=text,
            omitted=omitted,
            seconds=outcome.seconds,
            backend=backend,
            contained=contained,
            notes=(*notes, *self._notes_on(code, reply)) if contained else notes,
        )

    def _limit_met(self, reply: Reply) -> str:
        if (
            reply.limit and not reply.used
        ):  # the kernel killed a process for lack of memory, and the command may have continued without it
            return f"{self.settings.limits.for_folder(self.layers.upper).memory >> 20} MiB of memory"
        return reply.used

    def _problem(self, reply: Reply) -> Exception:
        """Return the exception for the setup step that failed."""
        command, program, cwd = shown(self.argv), self.argv[0], self.cwd
        if reply.failed == "exec":
            if reply.error == errno.ENOENT:
                return CommandMissing(command, program, self._why_missing(program))
            if reply.error in (errno.EACCES, errno.ENOEXEC, errno.EISDIR, errno.ENOTDIR):
                return CommandMissing(command, program, f"{program!r} can't be executed: {reply.detail}")
        if reply.failed == "folder":
            if reply.error == errno.ENOENT:
                return FileMissing(cwd, "there is no such folder to run in. Choose one that exists")
            if reply.error == errno.EPERM:
                return PathRefused(cwd, "it leads out of the folder. Name a folder inside it")
            return FileError(cwd, f"no command can run in it: {reply.detail}")
        return ShellError(command, f"it could not be started ({reply.failed}: {reply.detail})")

    def _why_missing(self, program: str) -> str:
        root = os.path.realpath(self.layers.root)
        needed = needed_exposure(program, os.path.join(root, self.cwd), self._search, self._seen)
        if needed:
            listed = ", ".join(map(repr, needed))
            return (
                f"the program {program!r} is on this machine, in a folder that commands don't see. "
                f"To let them use it, create the shell with expose=[{listed}]"
            )
        return f"the program {program!r}, or the interpreter its first line names, is not installed here"

    def _notes_on(self, code: int, reply: Reply) -> tuple[str, ...]:
        """Return a note if the command may have failed to start processes, or to find a program in a hidden folder; otherwise ()."""
        if reply.near and not reply.limit:
            return (
                f"It came close to its limit of {reply.near}, and may have failed to start some of them.",
            )
        folders = hidden_search(self._search, self._seen) if code == _NOT_FOUND else ()
        if not folders:
            return ()
        return (
            f"Commands don't see these folders of PATH: {', '.join(folders)}. "
            "If a program in one of them is needed, create the shell with expose=[...] for it.",
        )

    @property
    def _search(self) -> str:
        return {**clean_environment("", ""), **self.settings.environment}["PATH"]

    @property
    def _seen(self) -> tuple[str, ...]:
        root = os.path.realpath(self.layers.root)
        places = (*self.settings.interpreter, *self.settings.exposed)
        return (root, *(place.path for place in places if not place.leads_through(root)))


def _choose_backend(settings: Settings, support: Support) -> tuple[Backend, tuple[str, ...]]:
    """Return the backend to use, and notes for the result.

    Raises `ShellUnavailable` if the requested backend or sandbox does not work on this machine.
    """
    lacking = "; ".join(support.missing)
    if not support.contained and settings.contained:
        raise ShellUnavailable(
            f"commands can't be sandboxed, because this machine lacks {lacking}",
            "Allow this process to use user namespaces, run it as root with CAP_SYS_ADMIN, or pass contained=False "
            "to run commands without a sandbox, on a copy of the folder.",
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
        notes.append(f"The command ran without a sandbox, because this machine lacks {lacking}.")
    elif settings.backend != "copy":
        notes.append(f"No overlay could be mounted: {lacking}.")
    return "copy", tuple(notes)


def _inside(places: Iterable[Place], root: str) -> Iterator[str]:
    """Yield the places in a folder, relative to it. "" stands for the folder itself."""
    return (each.real[len(root) + 1 :] for each in places if is_below(each.real, root))


def _check_layers(layers: Layers, exposed: tuple[Place, ...]) -> None:
    root = os.path.realpath(layers.root)
    if root in _TAKEN or ((root + "/").startswith(_NOT_FILES) and not root.startswith("/dev/shm/")):
        raise CommandRefused("", f"commands can't run on {root!r}. Use a project's folder")
    for place in exposed:
        if place.leads_through(root):
            problem = (
                "leads through a link in the command's folder, which an earlier command may have put there"
            )
            raise CommandRefused(
                "", f"the exposed path {place.path!r} {problem}. Expose {place.real!r} instead"
            )
    for folder in (*layers.lowers, layers.upper, layers.work):
        if not folder.is_dir():
            raise FileMissing(
                str(folder), "the layers name this folder, but it does not exist. Create it first"
            )


async def run_execution(execution: Execution) -> CommandResult:
    """Run a command on a thread. If cancelled, even repeatedly, stops the command and waits until it has ended."""
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[None] = loop.create_future()

    def work() -> CommandResult:
        try:
            return execution.run()
        finally:
            with contextlib.suppress(
                RuntimeError
            ):  # the event loop is closed, so nothing waits for the result
                loop.call_soon_threadsafe(ended.set_result, None)

    try:
        return await run_in_thread(work)
    except asyncio.CancelledError:
        execution.stop.request()
        while not ended.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait({ended})
        raise
