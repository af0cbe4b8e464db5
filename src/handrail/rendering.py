"""What people are shown of a value: text in which every character can be seen.

A person may approve only what they can read. So every environment shows the same rows, made here. A character
that is invisible, looks like a space, controls a terminal or changes the direction of text is written as an
escape, such as `\\u202e`. Numbers are exact. No two values have the same rows.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Iterator, Mapping
from typing import Any, cast

import msgspec

FOLD_CHARACTERS = 600
FOLD_LINES = 12
"""What is shown of a long value before the rest of it is folded."""

_MOST_MARKS = 3
"""Combining marks that one character may carry. More of them would draw over the text around it."""

# Unicode's "default ignorable" characters, except U+FE0F, which ends every other emoji.
_INVISIBLE = (
    "\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u2028-\u202e\u2060-\u206f"
    "\u3164\ufe00-\ufe0e\ufeff\uffa0\ufff0-\ufffb\ud800-\udfff\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0000-\U000e0fff"
)
_BLANK = "\xa0\u1680\u2000-\u200a\u202f\u205f\u2800\u3000"
_IMITATED = r"\\(?=x[0-9a-f]{2}|u[0-9a-f]{4}|U[0-9a-f]{8})"

_HIDDEN = re.compile(f"[{_INVISIBLE}]")
_UNCLEAR = re.compile(f"[\t{_INVISIBLE}{_BLANK}]|{_IMITATED}")
_UNCLEAR_BUT_TABS = re.compile(f"[{_INVISIBLE}{_BLANK}]|{_IMITATED}")
_BREAK = re.compile("[\t\n]")


class Row(msgspec.Struct, frozen=True, omit_defaults=True):
    """A name and its value as text. What is folded of a long value is `rest`."""

    name: str
    text: str
    rest: str = ""
    folded: int = 0
    """How many characters `rest` has."""

    @property
    def whole(self) -> str:
        return self.text + self.rest


def escape(text: str) -> str:
    """Escape what can't be seen in running text: every invisible character except line breaks and tabs."""
    return _HIDDEN.sub(_escape_plainly, text.replace("\r\n", "\n"))


def escape_line(text: str, limit: int | None = None) -> str:
    """Escape text into a single line, cut to at most `limit` characters."""
    line = _BREAK.sub(_escape_plainly, escape(text))
    return line if limit is None or len(line) <= limit else f"{line[: max(limit - 1, 0)]}…"


def exact(text: str, *, tabs: bool = False) -> str:
    """Write every character of a text so that it can be seen, except line breaks. No two texts look the same.

    A backslash that would make the text look like an escape is escaped itself. With `tabs`, tabs are left as
    they are too: a diff of indented code could not be read otherwise.
    """
    clear = (_UNCLEAR_BUT_TABS if tabs else _UNCLEAR).sub(_escape_match, text)
    return clear if clear.isascii() else "".join(_escape_marks(clear))


def rows_of(values: Mapping[str, Any]) -> tuple[Row, ...]:
    """The rows of named JSON values, each folded if it is long."""
    return tuple(
        [_fold(exact(str(name)).replace("\n", r"\x0a"), _written(value)) for name, value in values.items()]
    )


def _written(value: Any) -> str:
    """A JSON value as text. A string is written as it is, unless that could be taken for something else."""
    if isinstance(value, str) and not _is_unclear(value):
        return exact(value)
    nested = isinstance(value, dict | list) and len(cast(Any, value)) > 0
    text = json.dumps(value, ensure_ascii=False, indent=2 if nested else None)
    return exact(text)


def _is_unclear(text: str) -> bool:
    """Whether a string must be quoted: it is empty, begins or ends with a space, or reads as JSON."""
    if not text or text != text.strip() or text[0] in '"{[':
        return True
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def _fold(name: str, text: str) -> Row:
    lines = text.split("\n", FOLD_LINES)
    shown = min(FOLD_CHARACTERS, len(text) if len(lines) <= FOLD_LINES else len(text) - len(lines[-1]) - 1)
    if len(text) - shown < 40:  # shorter than the words that say so
        return Row(name, text)
    return Row(name, text[:shown], text[shown:], len(text) - shown)


def _escape_match(found: re.Match[str]) -> str:
    """Escape a character by its number, always in the same form."""
    return f"\\x{ord(found[0]):02x}" if ord(found[0]) < 0x100 else _escape_plainly(found)


def _escape_plainly(found: re.Match[str]) -> str:
    return found[0].encode("unicode_escape", "surrogatepass").decode()


def _escape_marks(text: str) -> Iterator[str]:
    """Escape combining marks where a character carries more than a script needs."""
    marks = 0
    for character in text:
        marks = marks + 1 if unicodedata.category(character) in ("Mn", "Me") else 0
        yield character if marks <= _MOST_MARKS else character.encode("unicode_escape").decode()
