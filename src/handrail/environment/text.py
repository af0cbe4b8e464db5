"""Text for a terminal: escapes characters that a reader would not see, and styles Handrail's own text.

All text from a model, a tool or a file is escaped here before it is shown, so it can neither move the
cursor nor change colours. Control characters, escape sequences, invisible characters and marks that change
the direction of text are written as escapes.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from typing import Any, Literal, TextIO

# Unicode's "default ignorable" characters, except U+FE0F, which ends every other emoji.
_INVISIBLE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u2028-\u202e\u2060-\u206f"
    "\u3164\ufe00-\ufe0e\ufeff\uffa0\ufff0-\ufffb\ud800-\udfff\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0000-\U000e0fff]"
)
_BREAK = re.compile("[\t\n]")

Style = Literal["bold", "dim", "red", "green", "yellow", "cyan"]

_CODES: dict[Style, str] = {
    "bold": "1",
    "dim": "2",
    "red": "31",
    "green": "32",
    "yellow": "33",
    "cyan": "36",
}


def escape(text: str) -> str:
    """Escape every invisible character except line breaks and tabs."""
    return _INVISIBLE.sub(_escape_match, text.replace("\r\n", "\n"))


def escape_line(text: str, limit: int | None = None) -> str:
    """Escape text into a single line, cut to at most `limit` characters."""
    line = _BREAK.sub(_escape_match, escape(text))
    return line if limit is None or len(line) <= limit else f"{line[: max(limit - 1, 0)]}…"


def _escape_match(found: re.Match[str]) -> str:
    return found[0].encode("unicode_escape", "surrogatepass").decode()


def compact(value: Any) -> str:
    """Format a JSON value briefly: plain words without quotes, everything else as JSON."""
    if isinstance(value, str) and re.fullmatch(r"[\w./@:+-]+", value):
        return value
    return json.dumps(value, ensure_ascii=False, default=str)


def format_arguments(arguments: Any, limit: int) -> str:
    """Format the arguments of a call on one line: `path=notes.md text="a b"`."""
    if arguments is None or arguments == {}:
        return ""
    if not isinstance(arguments, dict):
        return escape_line(compact(arguments), limit)
    named: dict[str, Any] = arguments  # pyright: ignore[reportUnknownVariableType]
    return escape_line(" ".join(f"{name}={compact(value)}" for name, value in named.items()), limit)


def format_value(value: Any, indent: str = "") -> Iterator[str]:
    """Yield the lines of an indented JSON value, each `name: value`, with longer text below its name."""
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
    """Return whether a stream is a terminal. A missing or closed stream is not."""
    try:
        return stream is not None and stream.isatty()
    except ValueError:
        return False


def wants_colour(stream: TextIO | None, environ: Mapping[str, str] | None = None) -> bool:
    """Return whether to write colour to a stream.

    `NO_COLOR` wins over `FORCE_COLOR`. Without either, colour is written to terminals except dumb ones.
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

    def diff(self, lines: list[str]) -> list[str]:
        """Colour the lines of a unified diff: added lines green, removed lines red."""
        return [self(line, *_diff_style(line)) for line in lines]


def _diff_style(line: str) -> tuple[Style, ...]:
    if line.startswith(("diff --git", "+++ ", "--- ")):
        return ("bold",)
    if line.startswith("@@"):
        return ("cyan",)
    if line.startswith("+"):
        return ("green",)
    return ("red",) if line.startswith("-") else ()
