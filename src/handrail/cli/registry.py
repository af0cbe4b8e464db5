"""`handrail workers`: what is in a folder of workers, one of them in full, and what is wrong there."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from handrail.cli.codes import DONE, USAGE
from handrail.cli.ending import UsageError, complain, refused
from handrail.cli.options import find_worker
from handrail.cli.streams import nothing_printed
from handrail.environment.text import escape, escape_line, is_terminal, wants_colour
from handrail.errors import HandrailError


def workers(words: list[str]) -> int:
    """`FOLDER`, `list FOLDER`, `show WORKER` or `check FOLDER`; the exit code."""
    command, *rest = words if len(words) == 2 else ["list", *words]
    commands: dict[str, Callable[[str], int]] = {"list": _list, "show": _show, "check": _check}
    try:
        if len(rest) != 1 or command not in commands:
            raise UsageError(
                "write `handrail workers FOLDER`, `handrail workers show WORKER` or `handrail workers check FOLDER`."
            )
        return commands[command](rest[0])
    except (HandrailError, UsageError, OSError) as error:
        return refused(error)


def _registry(folder: str) -> Any:
    from handrail.workers import WorkerRegistry

    if not Path(folder).is_dir():
        raise UsageError(
            f"there is no folder {folder}. `handrail new {Path(folder).name or 'demo'}` makes one."
        )
    return WorkerRegistry(folder)


def _list(folder: str) -> int:
    with nothing_printed():
        registry = _registry(folder)
        found, names = registry.workers, registry.names
    wrong = [name for name in names if name not in found]
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
    if not is_terminal(sys.stdout):  # a line each, for programs
        sys.stdout.write("".join("\t".join(row) + "\n" for row in rows))
    elif rows:
        table = Table(box=None, pad_edge=False, header_style="bold")
        for heading in ("worker", "model", "what it does"):
            table.add_column(heading)
        for row in rows:
            table.add_row(*(Text(cell) for cell in row))
        _console().print(table)
    if wrong:
        complain(f"something is wrong with {', '.join(wrong)}. `handrail workers check {folder}` says what.")
    return USAGE if wrong else DONE


def _show(named: str) -> int:
    with nothing_printed():
        worker = find_worker(named)
    facts = {
        "worker": worker.name,
        "file": str(worker.path),
        "what it does": worker.description or "",
        "model": worker.model or "the caller's",
        "tools": ", ".join(worker.tools) or "none",
        "may call": ", ".join(worker.workers) or "none",
        "limits": _settings(worker.limits) or "none",
        "attachments": _settings(worker.attachments) if worker.attachments.count else "none",
        "locked": "yes" if worker.locked else "no",
    }
    console = _console()
    for name, value in facts.items():
        text = Text(f"{name:<13}", "bold")
        text.append(escape_line(str(value)), "default")
        console.print(text, soft_wrap=True)
    console.print()
    console.print(Text(escape(str(worker.instructions)).strip()), soft_wrap=True)
    return DONE


def _settings(given: Any) -> str:
    """What is set of a part of the front matter."""
    fields: dict[str, Any] = given.model_dump()
    return ", ".join(f"{name} {value}" for name, value in fields.items() if value is not None)


def _check(folder: str) -> int:
    with nothing_printed():
        problems = list(_registry(folder).check())
    for each in problems:
        sys.stdout.write(f"{escape_line(str(each))}\n")
    if problems:
        return USAGE
    sys.stdout.write(f"{folder}: nothing is wrong.\n")
    return DONE


def _console() -> Console:
    colour = wants_colour(sys.stdout)
    return Console(
        no_color=not colour,
        highlight=False,
        markup=False,
        emoji=False,
        color_system="auto" if colour else None,
    )
