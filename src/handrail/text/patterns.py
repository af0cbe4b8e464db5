"""`Pattern`: a regular expression from a model, a client or a rule, matched in bounded time.

Python's own engine backtracks, so a pattern of a dozen characters can keep it busy for years while every other run in
the process waits. Patterns from outside are therefore matched by Rust's engine, which is part of pydantic-core. The
time that it takes is at most proportional to the length of the text times the size of the pattern. The size is limited
too, because a short pattern such as `(a?){20000}` can be large.

Patterns use Python's syntax and are translated to Rust's. Features that need a backtracking engine (lookaround,
backreferences, conditionals, atomic groups, possessive repeats) are refused, and the error names them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache

import pydantic_core
from pydantic_core import core_schema

MAX_LENGTH = 1000
"""Maximum number of characters in a pattern."""
MAX_SIZE = 1000
"""Maximum size of a pattern: about the number of its characters, classes and groups, with counted repeats written out."""
MAX_STEPS = 20_000_000
"""Maximum product of the size of a pattern and the length of the string that it is matched against."""
_STEPS_AT_ONCE = 1_000_000
"""About how many steps `matching` takes in one call to the engine; more if a single line needs them. Other threads can run between calls."""

_PLAIN = re.compile(r"[^\\.^$*+?{}\[\]|()\x00-\x1f]+\Z")
_COUNTED = re.compile(r"\{(\d*)(?:(,)(\d*))?\}")
_POSIX = re.compile(r"\[:\^?[a-z]+:\]")
_BRACED_ESCAPE = re.compile(r"\\[pPxuU]\{[^{}]*\}")
_WIDE_ESCAPES = frozenset("wWdDsSpP")
_WIDE = 4
"""The size of a part that matches characters of several UTF-8 lengths, such as `.` or `\\w`."""


def is_plain(pattern: str) -> bool:
    """Return whether a pattern is not empty and has no special or control characters. Such a pattern matches only itself."""
    return _PLAIN.match(pattern) is not None


@lru_cache(maxsize=128)
def compile_pattern(text: str) -> Pattern:
    """Compile a pattern. If it can't be used, raises a `ValueError` that says why."""
    return Pattern(text)


class Pattern:
    """A compiled pattern. Searching a string for it takes at most `size * len(string)` steps.

    Raises `ValueError` if the pattern is too long or too large, is not valid, or uses something that is not
    supported.
    """

    __slots__ = ("_fits", "_matching", "plain", "size")

    plain: str | None
    """The text to search for, if `is_plain` is true for the pattern; otherwise None."""

    size: int
    """Size of the pattern with its counted repeats written out. Plain text has size 1."""

    def __init__(self, text: str) -> None:
        if len(text) > MAX_LENGTH:
            raise ValueError(
                f"the pattern has {len(text)} characters, and the limit is {MAX_LENGTH}. Write a shorter one"
            )
        self.plain = text if is_plain(text) else None
        if self.plain is not None:
            rust, self.size = text, 1
        else:
            translation = _Translation(text)
            rust, self.size = translation.rust, max(translation.size, 1)
        if self.size > MAX_SIZE:
            raise ValueError(
                f"the pattern is too large: with its counted repeats written out it has about {self.size} parts, "
                f"and the limit is {MAX_SIZE}. Use smaller counts, or * and +"
            )
        matched = core_schema.str_schema(pattern=rust, regex_engine="rust-regex")
        try:
            self._fits: Callable[[str], bool] = pydantic_core.SchemaValidator(matched).isinstance_python
        except (pydantic_core.SchemaError, UnicodeError) as error:
            raise ValueError(_worded(error)) from None
        each = core_schema.with_default_schema(matched, on_error="omit")
        self._matching: Callable[[Sequence[str]], list[str]] = pydantic_core.SchemaValidator(
            core_schema.list_schema(each)
        ).validate_python

    @property
    def longest(self) -> int:
        """Maximum length of a string that this pattern may be matched against."""
        return MAX_STEPS // self.size

    def found_in(self, text: str) -> bool:
        """Return whether the pattern matches anywhere in a string. Raises `ValueError` if the string is too long."""
        if len(text) > self.longest:
            raise ValueError(
                f"the text has {len(text)} characters, and this pattern can be matched against at most "
                f"{self.longest}. Use a shorter text or a smaller pattern"
            )
        return self._fits(text)

    def matching(self, lines: Sequence[str]) -> Iterator[tuple[int, str]]:
        """Yield the lines that contain a match, each with its 1-based number. No line may be longer than `longest`."""
        steps = self.size * sum(map(len, lines))
        at_once = max(len(lines) * _STEPS_AT_ONCE // max(steps, 1), 1)
        for start in range(0, len(lines), at_once):
            yield from self._matching_of(lines[start : start + at_once], start + 1)

    def _matching_of(self, lines: Sequence[str], first: int) -> Iterator[tuple[int, str]]:
        """Yield the matching lines. Many are matched in one call to the engine, which is faster than one call for each."""
        if len(lines) > 1 and self.size * sum(map(len, lines)) > 2 * _STEPS_AT_ONCE:
            middle = len(lines) // 2
            yield from self._matching_of(lines[:middle], first)
            yield from self._matching_of(lines[middle:], first + middle)
            return
        at = 0
        for line in self._matching(lines):  # the matches are in order, and equal lines match alike
            at = lines.index(line, at) + 1
            yield first + at - 1, line


def _worded(error: Exception) -> str:
    reason = str(error).rpartition("error: ")[2].rpartition("SchemaError: ")[2].strip().rstrip(".")
    if "size limit" in reason:
        return "the pattern is too large: it repeats a class such as \\w too often. Use smaller counts, or * and +"
    return f"this is not a valid regular expression: {reason}. Escape special characters with a backslash"


_REFUSED_GROUPS = {
    "(?=": "lookahead, (?=...)",
    "(?!": "negative lookahead, (?!...)",
    "(?<=": "lookbehind, (?<=...)",
    "(?<!": "negative lookbehind, (?<!...)",
    "(?P=": "a backreference, (?P=name)",
    "(?(": "a conditional, (?(1)...)",
    "(?>": "an atomic group, (?>...)",
}
_RENAMED_ESCAPES = {"\\Z": "\\z", "\\<": "<", "\\>": ">"}


class _Translation:
    """Translates a pattern to Rust's syntax and computes its size, in one pass from left to right."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._sums = [0]
        """The size so far of the whole pattern, then of each open group, outermost first."""
        self._last = 0
        """The size of the part that a repeat would repeat."""
        parts: list[str] = []
        while self._at < len(text):
            parts.append(self._next())
        while len(self._sums) > 1:
            self._close()
        self.rust = "".join(parts)
        self.size = self._sums[0]

    def _next(self) -> str:
        char = self._text[self._at]
        if char == "\\":
            return self._escape()
        if char == "[":
            return self._class()
        if char == "(":
            return self._open()
        if char == "{":
            return self._count()
        if char in "*+?":
            return self._repeat(char, 1)
        self._at += 1
        if char == ")":
            self._close()
        else:
            self._add(_WIDE if char == "." or char > "\x7f" else 1)
        return char

    def _add(self, size: int) -> None:
        self._last = size
        self._sums[-1] += size

    def _open(self) -> str:
        text, start = self._text, self._at
        if text.startswith("(?#", start):
            end = text.find(")", start)
            self._at = len(text) if end < 0 else end + 1
            return ""
        for begin, name in _REFUSED_GROUPS.items():
            if text.startswith(begin, start):
                raise _refused(name)
        self._sums.append(1)
        self._at += 1
        if text.startswith("?", self._at):  # not a repeat
            self._at += 1
            return "(?"
        return "("

    def _close(self) -> None:
        if len(self._sums) > 1:
            self._add(self._sums.pop())

    def _escape(self) -> str:
        whole = _BRACED_ESCAPE.match(self._text, self._at)
        escape = whole[0] if whole else self._text[self._at : self._at + 2]
        self._at += len(escape)
        if escape[1:2] in "123456789" and len(escape) > 1:
            raise _refused(f"a backreference, {escape}")
        self._add(_WIDE if escape[1:2] in _WIDE_ESCAPES else 1)
        return _RENAMED_ESCAPES.get(escape, escape)

    def _class(self) -> str:
        """Translate a character class. Characters that would start a nested class or a set operation in Rust are escaped."""
        text = self._text
        parts = ["["]
        self._at += 1
        if text.startswith("^", self._at):
            parts.append("^")
            self._at += 1
        first = self._at
        while self._at < len(text) and (text[self._at] != "]" or self._at == first):
            posix = _POSIX.match(text, self._at)
            if posix:
                parts.append(posix[0])
                self._at += len(posix[0])
            elif text[self._at] == "\\":
                braced = _BRACED_ESCAPE.match(text, self._at)
                parts.append(braced[0] if braced else text[self._at : self._at + 2])
                self._at += len(parts[-1])
            else:
                char = text[self._at]
                doubled = char == "-" and parts[-1] == "-"
                parts.append(f"\\{char}" if char in "[&~" or doubled else char)
                self._at += 1
        if self._at < len(text):
            parts.append("]")
            self._at += 1
        wide = parts[1:2] == ["^"] or any(part > "\x7f" or part[1:2] in _WIDE_ESCAPES for part in parts[1:-1])
        self._add(_WIDE if wide else 1)
        return "".join(parts)

    def _count(self) -> str:
        counted = _COUNTED.match(self._text, self._at)
        if counted is None or not (counted[1] or counted[2]):
            self._at += 1  # in Python, a brace that does not start a count is literal
            self._add(1)
            return "\\{"
        least, most = counted[1] or "0", counted[3] or ""
        if max(len(least), len(most)) > 6:
            raise ValueError(
                f"the pattern repeats something {counted[0]} times. Use a smaller count, or * and +"
            )
        times = int(most) if most else int(least) + bool(counted[2])
        self._at += len(counted[0]) - 1
        return self._repeat(f"{{{least}{counted[2] or ''}{most}}}", times)

    def _repeat(self, written: str, times: int) -> str:
        self._at += 1
        more = self._last * (max(times, 1) - 1)
        self._sums[-1] += more
        self._last += more
        following = self._text[self._at : self._at + 1]
        if following == "+":
            raise _refused(f"a possessive repeat, {written}+")
        if following == "?":
            self._at += 1
            return f"{written}?"
        return written


def _refused(name: str) -> ValueError:
    return ValueError(
        f"patterns can't contain {name}: matching it could take forever. Write a pattern without it. If it then matches too "
        "many lines, filter them yourself"
    )
