"""Whether the command line accepts the `handrail` commands that files and documents show, without running them."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

import typer

from handrail.cli.commands import app


def check_command(words: Sequence[str]) -> None:
    """Parse a command as the program does. Raises the program's own error if an option, an argument or a command is unknown."""
    name, *rest = words
    assert name.rpartition("/")[2] == "handrail", words
    command = typer.main.get_command(app)
    context = command.make_context("handrail", list(rest), resilient_parsing=False)
    while (left := [*context._protected_args, *context.args]) and hasattr(context.command, "resolve_command"):
        _, found, others = context.command.resolve_command(context, left)  # type: ignore[attr-defined]
        context = found.make_context(found.name, list(others), parent=context)


def commands_in(script: str) -> list[list[str]]:
    """Return the `handrail` commands of a shell script: the words up to `&`, `|`, `;`, `<` or `>`, also after `exec`."""
    found: list[list[str]] = []
    for line in script.replace("\\\n", " ").splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars="&|;<>()")
        lexer.whitespace_split = True
        words: list[str] = []
        for word in [*lexer, ";"]:
            if not set(word) <= set("&|;<>()"):
                words.append(word)
                continue
            words = words[1:] if words[:1] == ["exec"] else words
            if words and words[0].rpartition("/")[2] == "handrail":
                found.append(words)
            words = []
    return found
