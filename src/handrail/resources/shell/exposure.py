"""The host's paths that a shell exposes to its commands, and those to expose so that commands find a missing program."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from pathlib import Path

from handrail.errors import DefinitionError
from handrail.resources.installation import Place, is_below, resolve
from handrail.resources.shell.view import SYSTEM

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
