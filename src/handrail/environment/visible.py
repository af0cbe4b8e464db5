"""Text from anywhere, made safe to show: what a model, a tool or a file says moves no cursor.

Everything shown in a terminal goes through here first. What a reader would not see, or what would move
or recolour what they see (control characters, escape sequences, marks that turn the direction of text),
is written out as an escape.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

# What Unicode says may be ignored in a display, but for U+FE0F, which every other emoji ends in.
_UNSEEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u2028-\u202e\u2060-\u206f"
    "\u3164\ufe00-\ufe0e\ufeff\uffa0\ufff0-\ufffb\ud800-\udfff\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0000-\U000e0fff]"
)
_UNSEEN_IN_LINE = re.compile("[\t\n]")


def visible(text: str) -> str:
    """The text with line breaks and tabs kept, and everything else that can't be seen written out."""
    return _UNSEEN.sub(_escaped, text.replace("\r\n", "\n"))


def on_one_line(text: str, most: int | None = None) -> str:
    """The text as one line of at most so many characters, breaks and tabs written out too."""
    line = _UNSEEN_IN_LINE.sub(_escaped, visible(text))
    return line if most is None or len(line) <= most else f"{line[: max(most - 1, 0)]}…"


def _escaped(found: re.Match[str]) -> str:
    return found[0].encode("unicode_escape", "surrogatepass").decode()


def compact(value: Any) -> str:
    """A JSON value in the fewest words: text without quotes where that can't be mistaken."""
    if isinstance(value, str) and re.fullmatch(r"[\w./@:+-]+", value):
        return value
    return json.dumps(value, ensure_ascii=False, default=str)


def arguments_line(arguments: Any, most: int) -> str:
    """The arguments of a call, in one line of at most so many characters: `path=notes.md text="a b"`."""
    if arguments is None or arguments == {}:
        return ""
    if not isinstance(arguments, dict):
        return on_one_line(compact(arguments), most)
    named: dict[str, Any] = arguments  # pyright: ignore[reportUnknownVariableType]
    return on_one_line(" ".join(f"{name}={compact(value)}" for name, value in named.items()), most)


def laid_out(value: Any, indent: str = "") -> Iterator[str]:
    """A JSON value as lines for a person: a name and its value a line, longer text below its name."""
    if isinstance(value, dict) and value:
        named: dict[Any, Any] = value  # pyright: ignore[reportUnknownVariableType]
        for name, each in named.items():
            yield from _entry(f"{indent}{on_one_line(str(name))}:", each, indent)
    elif isinstance(value, list) and value:
        items: list[Any] = value  # pyright: ignore[reportUnknownVariableType]
        for each in items:
            yield from _entry(f"{indent}-", each, indent)
    else:
        yield from (f"{indent}{line}" for line in _scalar(value).split("\n"))


def _entry(label: str, value: Any, indent: str) -> Iterator[str]:
    nested = isinstance(value, dict | list) and bool(value)  # pyright: ignore[reportUnknownArgumentType]
    text = "" if nested else _scalar(value)
    if nested or "\n" in text:
        yield label
        yield from laid_out(value, f"{indent}  ")
    else:
        yield f"{label} {text}"


def _scalar(value: Any) -> str:
    if isinstance(value, str):
        return visible(value) if value else '""'
    return visible(json.dumps(value, ensure_ascii=False, default=str))
