"""Colour for a terminal, or none: one place decides whether, and few words say which."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Literal, TextIO

Style = Literal["bold", "dim", "red", "green", "yellow", "cyan"]

_CODES: dict[Style, str] = {
    "bold": "1",
    "dim": "2",
    "red": "31",
    "green": "32",
    "yellow": "33",
    "cyan": "36",
}


def is_terminal(stream: TextIO | None) -> bool:
    """Is somebody looking at this stream? One that is closed or missing is nobody's."""
    try:
        return stream is not None and stream.isatty()
    except ValueError:
        return False


def wants_colour(stream: TextIO | None, environ: Mapping[str, str] | None = None) -> bool:
    """`NO_COLOR` goes before everything, then `FORCE_COLOR`; else a terminal that is not a dumb one."""
    environ = os.environ if environ is None else environ
    if environ.get("NO_COLOR"):
        return False
    if environ.get("FORCE_COLOR", "0") not in ("", "0"):
        return True
    return is_terminal(stream) and environ.get("TERM", "") not in ("dumb", "")


class Ink:
    """Writes text in a style, or as it is where there is no colour."""

    __slots__ = ("colour",)

    def __init__(self, colour: bool) -> None:
        self.colour = colour

    def __call__(self, text: str, *styles: Style) -> str:
        if not self.colour or not styles or not text:
            return text
        return f"\x1b[{';'.join(_CODES[style] for style in styles)}m{text}\x1b[0m"


def coloured_diff(lines: list[str], ink: Ink) -> list[str]:
    """Lines of a unified diff as people know them: green comes, red goes."""
    return [ink(line, *_style_of(line)) for line in lines]


def _style_of(line: str) -> tuple[Style, ...]:
    if line.startswith(("diff --git", "+++ ", "--- ")):
        return ("bold",)
    if line.startswith("@@"):
        return ("cyan",)
    if line.startswith("+"):
        return ("green",)
    return ("red",) if line.startswith("-") else ()
