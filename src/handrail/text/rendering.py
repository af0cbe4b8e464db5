"""Text for people, in which every character is visible.

People can only judge what they can read, so every environment shows the rows that are made here. A character
that is invisible, looks like a space, controls a terminal or changes the direction of text is written as an
escape, such as `\\u202e`. Numbers are exact. No two values have the same rows.

Not covered: letters that look alike, such as a Cyrillic `а`, and letters that are written from right to left.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, cast

import msgspec

UNSHOWN = "can't be shown"
"""The words of a diff for changes that it leaves out. An approval of such a diff is not remembered as exact."""

FOLD_CHARACTERS = 600
FOLD_LINES = 12
"""Maximum number of characters and lines of a value that are shown. The rest is folded, unless it is short."""

_MAX_MARKS = 3
"""Maximum number of combining marks on one character. More of them would cover the text around it."""

# Control characters, line separators, surrogates, and Unicode's "default ignorable" characters, except U+FE0F, which is
# part of many emoji.
_INVISIBLE = (
    "\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u2028-\u202e\u2060-\u206f"
    "\u3164\ufe00-\ufe0e\ufeff\uffa0\ufff0-\ufffb\ud800-\udfff\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0000-\U000e0fff"
)
_HIDDEN = re.compile(f"[{_INVISIBLE}]")
_BREAK = re.compile("[\t\n]")

_UNCLEAR_CATEGORIES = frozenset(["Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp", "Zs"])
_IGNORABLE = re.compile(f"[{_INVISIBLE}\ufe0f]")
_BLANK = frozenset("\u2800\U00013441\U00013442\U00016fe4\U0001d159")
"""Characters that are drawn as blanks, although their category counts as visible."""

_RETURN = "↵"
"""Marks a line break in a value. Without it, a break would look like a line that an environment has wrapped."""

_UNCLEAR_ASCII = re.compile("[\x00-\x09\x0b-\x1f\x7f]")
_UNCLEAR_ASCII_BUT_TABS = re.compile("[\x00-\x08\x0b-\x1f\x7f]")
_IMITATED = re.compile(r"\\(?=x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8})")
_SCALAR = re.compile("-?[0-9][0-9.eE+-]*|true|false|null|NaN|-?Infinity")
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_.-]+")


class Row(msgspec.Struct, frozen=True, omit_defaults=True):
    """A name and its value as text. If the value is long, `text` is its beginning and `rest` is folded."""

    name: str
    text: str
    rest: str = ""
    folded: int = 0
    """The number of characters in `rest`."""

    @property
    def whole(self) -> str:
        """The value, unfolded."""
        return self.text + self.rest


def escape(text: str) -> str:
    """Return text with its invisible characters escaped. Newlines and tabs are kept, and CRLF becomes a newline."""
    return _HIDDEN.sub(_escape_match, text.replace("\r\n", "\n"))


def escape_line(text: str, limit: int | None = None) -> str:
    """Return text escaped into a single line. If it is longer than `limit`, it is cut and ends with `…`."""
    line = _BREAK.sub(_escape_match, escape(text))
    return line if limit is None or len(line) <= limit else f"{line[: max(limit - 1, 0)]}…"


def exact(text: str, *, tabs: bool = False) -> str:
    """Return a string with every character made visible. Different strings give different texts. Line breaks are kept.

    A backslash that would look like the start of an escape is itself escaped. With `tabs`, tabs are kept too,
    since a diff of indented code could not be read otherwise.
    """
    return visible(_IMITATED.sub(r"\\x5c", text), tabs=tabs)


def visible(text: str, *, tabs: bool = False) -> str:
    """Return a string with every character made visible, except line breaks, and tabs if `tabs` is true.

    Backslashes are kept, so the function is idempotent.
    """
    clear = (_UNCLEAR_ASCII_BUT_TABS if tabs else _UNCLEAR_ASCII).sub(lambda found: _number(found[0]), text)
    if clear.isascii():
        return clear
    escapes = {ord(each): _number(each) for each in set(clear) if _is_unclear(each)}
    clear = clear.translate(escapes) if escapes else clear
    return "".join(_escape_marks(clear)) if any(map(_is_mark, set(clear))) else clear


def exact_line(text: str) -> str:
    """Return a string as `exact` does, but on one line: line breaks are escaped too."""
    return exact(text).replace("\n", r"\x0a")


def rows_of(values: Mapping[str, Any]) -> tuple[Row, ...]:
    """Return named JSON values as rows, each folded if it is long."""
    return tuple([_fold(_written_name(str(name)), _written(value)) for name, value in values.items()])


def _written_name(name: str) -> str:
    """Return a name, quoted unless it is a plain word, so that it can't look like a name followed by a value."""
    return name if _PLAIN_NAME.fullmatch(name) else exact_line(_quoted(name))


def _written(value: Any) -> str:
    """Return a JSON value as text. Strings are quoted only if they could be mistaken for a different value."""
    if isinstance(value, str) and not _needs_quotes(value):
        text = exact(value)
        first = _number(text[0]) if text[0] in " \n" else text[0]  # blanks at the ends would be invisible
        last = _number(text[-1]) if text[-1] in " \n" else text[-1]
        if len(text) == 1:
            return first
        whole = f"{first}{text[1:-1]}{last}"
        return whole.replace(_RETURN, _number(_RETURN)).replace("\n", f"{_RETURN}\n")
    return exact("".join(_json(value, "\n")))


def _needs_quotes(text: str) -> bool:
    """Return whether a string must be quoted: it is empty, begins like a JSON string, object or list, or looks like another JSON value."""
    return not text or text.lstrip()[:1] in ('"', "{", "[") or bool(_SCALAR.fullmatch(text.strip()))


def _json(value: Any, line: str) -> Iterator[str]:
    """Yield the parts of a JSON text over several lines. In strings, only quotes, backslashes and newlines are escaped."""
    if isinstance(value, dict) and value:
        named, before = cast("dict[str, Any]", value), "{"
        for name, each in named.items():
            yield f"{before}{line}  {_quoted(str(name))}: "
            yield from _json(each, f"{line}  ")
            before = ","
        yield f"{line}}}"
    elif isinstance(value, list) and value:
        before = "["
        for each in cast("list[Any]", value):
            yield f"{before}{line}  "
            yield from _json(each, f"{line}  ")
            before = ","
        yield f"{line}]"
    elif isinstance(value, str):
        yield _quoted(value)
    else:
        import json

        yield json.dumps(value)


def _quoted(text: str) -> str:
    inside = text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
    return f'"{inside}"'


def _fold(name: str, text: str) -> Row:
    lines = text.split("\n", FOLD_LINES)
    shown = min(FOLD_CHARACTERS, len(text) if len(lines) <= FOLD_LINES else len(text) - len(lines[-1]) - 1)
    if len(text) - shown < 40:  # a note about the rest would be as long
        return Row(name, text)
    return Row(name, text[:shown], text[shown:], len(text) - shown)


def _is_unclear(character: str) -> bool:
    if character.isascii():
        return False  # handled by the caller
    import unicodedata  # most text has no such characters

    hidden = unicodedata.category(character) in _UNCLEAR_CATEGORIES or character in _BLANK
    return hidden or _IGNORABLE.match(character) is not None


def _is_mark(character: str) -> bool:
    import unicodedata

    return unicodedata.category(character) in ("Mn", "Me")


def _number(character: str) -> str:
    """Return a character's code point as an escape."""
    number = ord(character)
    if number < 0x100:
        return f"\\x{number:02x}"
    return f"\\u{number:04x}" if number < 0x10000 else f"\\U{number:08x}"


def _escape_match(found: re.Match[str]) -> str:
    return found[0].encode("unicode_escape", "surrogatepass").decode()


def _escape_marks(text: str) -> Iterator[str]:
    """Yield a string's characters. Combining marks without a base character, or beyond `_MAX_MARKS` on one, are escaped."""
    marks = _MAX_MARKS
    for character in text:
        marks = marks + 1 if _is_mark(character) else 0
        if character in "\n\t ":
            marks = _MAX_MARKS
        yield character if marks <= _MAX_MARKS else _number(character)


def counted(number: int, noun: str) -> str:
    """Return a number and its noun, which gets an `s` unless the number is 1: `1 call`, `2 calls`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
