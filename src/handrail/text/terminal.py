"""Text for a terminal: wrapping, formatting, escaping and colour.

All text from a model, a tool or a file is escaped before it is shown, so it can neither move the
cursor nor change colours. Control characters, escape sequences, invisible characters and marks that change
the direction of text are written as escapes.
"""

from __future__ import annotations

import json
import os
import re
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, TextIO

from handrail.text.rendering import Row, escape, escape_line

MIN_COLUMNS, MIN_LINES = 20, 7
"""The minimum size for which text is laid out, even if the terminal is smaller."""
NAME_CELLS = 20
"""Maximum width of a name that is shown beside its value."""

Style = Literal["bold", "dim", "red", "green", "yellow", "cyan"]

_FIRST_WIDE = "\u1100"
"""This character, and all with a higher code point, count as two cells wide."""

_CODES: dict[Style, str] = {
    "bold": "1",
    "dim": "2",
    "red": "31",
    "green": "32",
    "yellow": "33",
    "cyan": "36",
}


def wrap(text: str, width: int) -> Iterator[str]:
    """Yield the lines of a text, wrapped to at most `width` terminal cells.

    A character that is wider than `width` gets a line of its own. If terminals disagree about the width of a
    character, the greater width counts, so that no terminal has to wrap a line itself.
    """
    for line in text.split("\n"):
        begin = cells = 0
        line = line.expandtabs(4)
        for place, character in enumerate(line):
            wide = _cells(character)
            if cells + wide > width and place > begin:
                yield line[begin:place]
                begin, cells = place, 0
            cells += wide
        yield line[begin:]


def clip(text: str, width: int) -> str:
    """Cut a text to one line of at most `width` terminal cells.

    If anything was cut, the line ends in an ellipsis, which counts as one cell.
    """
    first, *more = wrap(text, width)
    return f"{next(wrap(text, width - 1))}…" if more else first


def _cells(character: str) -> int:
    """Return the maximum number of cells in which any terminal draws a character.

    New versions of Unicode have made some narrow characters wide, but none in the alphabets before `_FIRST_WIDE`.
    """
    if character.isascii():
        return 1
    narrow = unicodedata.east_asian_width(character) in ("Na", "N", "H") and character < _FIRST_WIDE
    return 1 if narrow and unicodedata.category(character) != "So" else 2


def barred(text: str, width: int) -> list[str]:
    """Wrap a text behind a bar, so that it can't imitate text outside the bar."""
    return [f"  │ {line}" for line in wrap(text, width - 5)]


def format_rows(
    rows: Sequence[Row], width: int, *, whole: bool = False, more: str = "v to view all"
) -> list[str]:
    """Format rows as lines behind a bar. Names are to the left of the values, or above them if a name is long or not ASCII.

    Long values are folded, and `more` says how to unfold them; with `whole`, they are shown in full. A `├` marks the
    lines of a name, and a `└` the note on a folded value. No value can draw either in that column.
    """
    column = max((len(row.name) for row in rows), default=0)
    beside = column <= min(NAME_CELLS, width // 4) and all(row.name.isascii() for row in rows)
    indent = " " * (column + 2) if beside else ""
    lines: list[str] = []
    for row in rows:
        value = list(wrap(row.whole if whole else row.text, width - 5 - len(indent)))
        if beside:
            lines.append(f"  ├ {row.name:<{column}}  {value.pop(0)}")
        else:
            first, *others = wrap(row.name, width - 7)
            lines += [f"  ├ {first}", *(f"  ├   {line}" for line in others)]
        lines += [f"  │ {indent}{line}" for line in value]
        if row.folded and not whole:
            note = f"{row.folded:,} more characters, {more}"
            lines += [f"  └ {line}" for line in wrap(note, width - 5)]
    return lines


def compact(value: Any) -> str:
    """Format a JSON value briefly: as JSON, but without the quotes if it is a string of one plain word."""
    if isinstance(value, str) and re.fullmatch(r"[\w./@:+-]+", value):
        return value
    return json.dumps(value, ensure_ascii=False, default=str)


def format_arguments(arguments: Any, limit: int) -> str:
    """Format a call's arguments on one line of at most `limit` characters, such as `path=notes.md text="a b"`.

    Returns "" if there are none.
    """
    if arguments is None or arguments == {}:
        return ""
    if not isinstance(arguments, dict):
        return escape_line(compact(arguments), limit)
    named: dict[str, Any] = arguments  # pyright: ignore[reportUnknownVariableType]
    return escape_line(" ".join(f"{name}={compact(value)}" for name, value in named.items()), limit)


def format_value(value: Any, indent: str = "") -> Iterator[str]:
    """Yield the lines of a JSON value: `name: value` for each field, and `- value` for each list item.

    A nested value, or text of several lines, is indented below its label.
    """
    if isinstance(value, dict) and value:
        named: dict[Any, Any] = value  # pyright: ignore[reportUnknownVariableType]
        for name, each in named.items():
            yield from _format_entry(f"{indent}{escape_line(str(name))}:", each, indent)
    elif isinstance(value, list) and value:
        items: list[Any] = value  # pyright: ignore[reportUnknownVariableType]
        for each in items:
            yield from _format_entry(f"{indent}-", each, indent)
    else:
        yield from (f"{indent}{line}" for line in _format_scalar(value).split("\n"))


def _format_entry(label: str, value: Any, indent: str) -> Iterator[str]:
    nested = isinstance(value, dict | list) and bool(value)  # pyright: ignore[reportUnknownArgumentType]
    text = "" if nested else _format_scalar(value)
    if nested or "\n" in text:
        yield label
        yield from format_value(value, f"{indent}  ")
    else:
        yield f"{label} {text}"


def _format_scalar(value: Any) -> str:
    if isinstance(value, str):
        return escape(value) if value else '""'
    return escape(json.dumps(value, ensure_ascii=False, default=str))


# Colour.


def is_terminal(stream: TextIO | None) -> bool:
    """Return whether a stream is a terminal. A missing or closed stream is not one."""
    try:
        return stream is not None and stream.isatty()
    except ValueError:
        return False


def terminal_size(stream: TextIO) -> os.terminal_size:
    """Return a terminal's size, or 80 by 24 if it is unknown, but at least the minimum.

    `COLUMNS` is ignored, because it may be wrong.
    """
    try:
        size = os.get_terminal_size(stream.fileno())
    except OSError:
        size = os.terminal_size((0, 0))
    return os.terminal_size((max(size.columns or 80, MIN_COLUMNS), max(size.lines or 24, MIN_LINES)))


def wants_colour(stream: TextIO | None, environ: Mapping[str, str] | None = None) -> bool:
    """Return whether to write colour to a stream.

    `NO_COLOR` takes precedence over `FORCE_COLOR`. Without either, colour is written to a terminal, unless `TERM` is
    `dumb` or not set. An empty variable, and `FORCE_COLOR=0`, count as not set.
    """
    environ = os.environ if environ is None else environ
    if environ.get("NO_COLOR"):
        return False
    if environ.get("FORCE_COLOR", "0") not in ("", "0"):
        return True
    return is_terminal(stream) and environ.get("TERM", "") not in ("dumb", "")


class Styler:
    """Adds ANSI styles to text, or returns it unchanged if colour is off."""

    __slots__ = ("colour",)

    def __init__(self, colour: bool) -> None:
        self.colour = colour

    def __call__(self, text: str, *styles: Style) -> str:
        if not self.colour or not styles or not text:
            return text
        return f"\x1b[{';'.join(_CODES[style] for style in styles)}m{text}\x1b[0m"


def diff_style(line: str) -> tuple[Style, ...]:
    """Return the styles for a line of a unified diff, such as green for added lines and red for removed ones.

    Unchanged lines have none.
    """
    if line.startswith(("diff --git", "+++ ", "--- ")):
        return ("bold",)
    if line.startswith("@@"):
        return ("cyan",)
    if line.startswith("runs later: "):
        return ("yellow", "bold")
    if line.startswith("+"):
        return ("green",)
    return ("red",) if line.startswith("-") else ()
