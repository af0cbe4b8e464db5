"""Real folders with layers over them, for the shell's tests."""

from __future__ import annotations

import asyncio
import os
import stat
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from handrail.resources.mount import is_opaque
from handrail.resources.shell import Allow, CommandResult, Layers, Shell
from handrail.resources.shell.folder_copy import changes, members
from support import PATIENCE

Tree = dict[str, tuple[Any, ...]]


class Folder:
    """A real folder with an empty layer over it, and methods that run commands and take snapshots."""

    def __init__(self, base: Path, *, over: Sequence[Path] = ()) -> None:
        self.base = base
        for name in ("root", "upper", "work"):
            (base / name).mkdir(parents=True, exist_ok=True)
        self.root, self.upper = base / "root", base / "upper"
        self.layers = Layers((*over, self.root), self.upper, base / "work")

    def add(self, path: str, content: str | bytes = "", mode: int = 0o644) -> Path:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content.encode() if isinstance(content, str) else content)
        file.chmod(mode)
        return file

    def real(self) -> Tree:
        """Return a snapshot of the real folder, with bytes, inodes and times."""
        return tree(self.root, exact=True)

    def caught(self) -> list[tuple[str, str]]:
        """Return the changes in the upper layer, sorted by path."""
        return sorted(changes(self.upper), key=lambda change: change[1])

    def run(self, shell: Shell, *argv: str, **options: Any) -> CommandResult:
        return asyncio.run(shell.run(list(argv), self.layers, **options))

    def sh(self, shell: Shell, script: str, **options: Any) -> CommandResult:
        return self.run(shell, "sh", "-c", script, **options)

    def merged(self) -> Tree:
        """Return a snapshot of the folder as seen through its layers."""
        found: Tree = {}
        stack = [str(self.upper), *map(str, self.layers.lowers)]
        _merge(stack[:1] if is_opaque(stack[0]) else stack, "", found)
        return found


def anything(backend: Any = "auto", timeout: float = PATIENCE, **options: Any) -> Shell:
    """Return a shell that allows every command."""
    return Shell([Allow(...)], backend=backend, timeout=timeout, **options)


def tree(root: Path, *, exact: bool = False) -> Tree:
    """Return everything below a folder with kind, mode, owner and content, and with `exact` also inodes and times."""
    found: Tree = {}
    for folder, folders, files in os.walk(root):
        for name in (*folders, *files):
            path = os.path.join(folder, name)
            facts = os.lstat(path)
            more = (facts.st_ino, facts.st_mtime_ns, facts.st_ctime_ns) if exact else ()
            found[os.path.relpath(path, root)] = (*_facts(path), *more)
    return found


def _merge(stack: Sequence[str], prefix: str, found: Tree) -> None:
    for name, places in members(stack).items():
        found[prefix + name] = _facts(places[0])
        if os.path.isdir(places[0]) and not os.path.islink(places[0]):
            _merge(places, f"{prefix}{name}/", found)


def _facts(path: str) -> tuple[Any, ...]:
    facts = os.lstat(path)
    content: Any = None
    if stat.S_ISLNK(facts.st_mode):
        content = os.readlink(path)
    elif stat.S_ISREG(facts.st_mode):
        content = Path(path).read_bytes()
    return facts.st_mode, facts.st_uid, facts.st_gid, content


def processes_with(marker: str) -> list[str]:
    """Return the command lines that contain this text, among those of all other processes on the machine."""
    found: list[str] = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue
            if marker in line:
                found.append(line)
    return found


PYTHON = "/usr/bin/python3" if os.path.exists("/usr/bin/python3") else sys.executable
"""A Python interpreter for commands: the system's, or the one that runs the tests if the system has none."""
_THEIR_OWN = ("/tmp", "/var/tmp", "/run", "/dev/shm")


def is_seen(path: Path) -> bool:
    """Return whether a path is outside the folders that each command has its own version of, such as /tmp."""
    return not any(path.resolve().is_relative_to(own) for own in _THEIR_OWN)


def outside_tmp() -> Path:
    """Return a writable folder for which `is_seen` is true. Skips the test if there is none."""
    for place in (Path(__file__).parent, Path.home(), Path("/opt"), Path("/srv"), Path("/var/lib")):
        if is_seen(place) and os.access(place, os.W_OK):
            return place
    pytest.skip("there is no writable folder outside /tmp")
