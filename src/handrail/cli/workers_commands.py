"""`handrail workers` and `handrail new`, which list, show and check workers, and create a folder of them."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from handrail.cli.outcome import DONE, FAILED, USAGE, UsageError, divert_stdout, fail, print_error
from handrail.cli.screens import make_console
from handrail.errors import HandrailError
from handrail.text.rendering import escape, escape_line
from handrail.text.terminal import is_terminal

if TYPE_CHECKING:
    from handrail.workers import WorkerProblem, WorkerRegistry

STARTER = Path(__file__).with_name("starter")
_FOLDER_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_. -]{0,63}")


def workers(words: list[str], imports: bool) -> int:
    """Run `handrail workers` with these words, and return the exit code.

    The words are `list FOLDER`, `show WORKER` or `check PLACE`. A single word is a folder to list. Only `check` with `imports`
    runs the `tools.py` beside the workers; otherwise it is parsed.
    """
    command, *rest = words if len(words) == 2 else ["list", *words]
    check = partial(_check, parsed=not imports)
    commands: dict[str, Callable[[str], int]] = {"list": _list, "show": _show, "check": check}
    try:
        if len(rest) != 1 or command not in commands:
            raise UsageError(
                "the arguments are invalid. Write `handrail workers FOLDER`, `handrail workers show WORKER` "
                "or `handrail workers check PLACE`."
            )
        if imports and command != "check":
            raise UsageError(
                "--import is only for `handrail workers check`, because nothing else runs tools.py."
            )
        return commands[command](rest[0])
    except (HandrailError, UsageError, OSError) as error:
        return fail(error)


def _registry(folder: str, parsed: bool = True) -> WorkerRegistry:
    from handrail.workers import WorkerRegistry
    from handrail.workers.registry import starter_name

    if not Path(folder).is_dir():
        name = starter_name(Path(folder).name) or "demo"
        raise UsageError(f"there is no folder {folder}. Create one with `handrail new {name}`.")
    return WorkerRegistry(folder, parsed=parsed)


def _list(folder: str) -> int:
    with divert_stdout():
        registry = _registry(folder)
        found, names = registry.workers, registry.names
    broken = [name for name in names if name not in found]
    if not names:
        sys.stdout.write(f"{folder} has no workers. A worker is a Markdown file that begins with `---`.\n")
    rows = [
        (
            escape_line(name),
            escape_line(str(worker.model or "the caller's")),
            escape_line(worker.description or ""),
        )
        for name, worker in found.items()
    ]
    if not is_terminal(sys.stdout):  # tab-separated, for programs
        sys.stdout.write("".join("\t".join(row) + "\n" for row in rows))
    elif rows:
        table = Table(box=None, pad_edge=False, header_style="bold")
        for heading in ("worker", "model", "what it does"):
            table.add_column(heading)
        for row in rows:
            table.add_row(*(Text(cell) for cell in row))
        make_console(sys.stdout).print(table)
    if broken:
        print_error(f"can't load {', '.join(broken)}. `handrail workers check {folder}` says why.")
    return USAGE if broken else DONE


def _show(named: str) -> int:
    from handrail.workers import WorkerRegistry

    with divert_stdout():
        worker = WorkerRegistry.worker_at(Path(named), parsed=True)
    facts = {
        "worker": worker.name,
        "file": str(worker.path),
        "what it does": worker.description or "",
        "model": worker.model or "the caller's",
        "tools": ", ".join(worker.tools) or "none",
        "may call": ", ".join(worker.workers) or "none",
        "limits": _format_settings(worker.limits) or "none",
        "attachments": _format_settings(worker.attachments) if worker.attachments.count else "none",
        "locked": "yes" if worker.locked else "no",
    }
    console = make_console(sys.stdout)
    for name, value in facts.items():
        text = Text(f"{name:<13}", "bold")
        text.append(escape_line(str(value)), "default")
        console.print(text, soft_wrap=True)
    console.print()
    console.print(Text(escape(str(worker.instructions)).strip()), soft_wrap=True)
    return DONE


def _format_settings(given: Any) -> str:
    """Format the settings of one part of the front matter, except those that are None."""
    fields: dict[str, Any] = given.model_dump()
    return ", ".join(f"{name} {value}" for name, value in fields.items() if value is not None)


def _check(place: str, *, parsed: bool) -> int:
    """Check a folder of workers, or one worker's file with the `tools.py` beside it."""
    with divert_stdout():
        problems = _problems_at(Path(place), parsed)
    for each in problems:
        sys.stdout.write(f"{escape_line(str(each))}\n")
    if problems:
        return USAGE
    sys.stdout.write(f"{place}: no problems found.\n")
    return DONE


def _problems_at(place: Path, parsed: bool) -> list[WorkerProblem]:
    if not place.is_file():
        return _registry(str(place), parsed).check()
    from handrail.workers import WorkerRegistry

    return WorkerRegistry.check_file(place, parsed=parsed)


def new(name: str) -> int:
    """Create a folder of workers and return the exit code. An existing folder is never touched."""
    from handrail.workers.registry import FILE_SUFFIXES

    folder = Path(name)
    if folder.suffix in FILE_SUFFIXES:
        print_error(f"{name!r} is the name of a file. Name a folder, such as: handrail new {folder.stem}")
        return USAGE
    if not _FOLDER_NAME.fullmatch(folder.name) or folder.name.endswith((" ", ".")):
        print_error(
            f"{name!r} can't name a folder of workers. Use letters, digits, - and _, such as: handrail new demo"
        )
        return USAGE
    # unlike `Path.is_dir`, this returns False for a name that is too long
    if not os.path.isdir(folder.parent):
        print_error(f"there is no folder {folder.parent}. Create it first, or choose another place.")
        return USAGE
    if os.path.lexists(folder):
        print_error(f"{folder} exists already, and was not changed. Choose another name.")
        return USAGE
    try:
        shutil.copytree(STARTER, folder)
        # stored as .txt so that it is not a module of this package
        (folder / "tools.py.txt").rename(folder / "tools.py")
    except OSError as error:
        print_error(f"can't create {folder}: {error.strerror or error}. Choose another place.")
        return FAILED
    sys.stdout.write(
        f"Created {folder} with two workers, their tools and a file of notes. Try:\n"
        f'  handrail run {folder}/main.md "buy bread"\n'
        f"  handrail chat {folder}/main.md\n"
    )
    return DONE
