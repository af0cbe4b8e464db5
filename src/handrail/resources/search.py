"""Searching and editing files: globs, matching lines, replacements and text encoding.

This module does not know where files are stored. A filesystem passes in functions that read its folders, so the
filesystem can record exactly what a search depends on.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from fnmatch import translate

from handrail.errors import EditRefused, FileError, FileLimitReached, PathRefused
from handrail.protocols import Match
from handrail.resources.paths import join, parse_path
from handrail.schema.problems import describe_kind
from handrail.text.patterns import Pattern, compile_pattern

MAX_LINE = 500
"""Maximum number of characters of a line that `grep` shows."""
MAX_MATCHES = 100_000
"""Maximum number of lines that `grep` returns. If more lines match, the search is refused."""
_PIECE = 1 << 20
"""Number of characters after which a piece of a file ends, at the next line end.

Files are split into lines piece by piece, because all lines of a file could take far more memory than the file.
"""
_TOO_LONG = "(not searched: the line has {} characters, and this pattern searches lines of at most {})"

_SPECIAL = re.compile(r"[*?\[]")
_BRACES = re.compile(r"\{[^{}/]*,[^{}/]*\}")

Look = Callable[[str], bool | None]
"""A function that returns True if a path is a folder, False if it is a file, and None if nothing is there."""
Members = Callable[[str], Mapping[str, bool]]
"""A function that maps the names in a folder to True for folders and False for files. The root is the empty string."""
_Segment = str | Callable[[str], object] | None
"""One segment of a glob: a literal name, a function that tests names, or None for any number of folders."""


def find(pattern: str, look: Look, members: Members) -> tuple[str, ...]:
    """Return the files that match a glob, sorted.

    A glob that ends in `/` matches folders, which are returned with a trailing `/`. `*`, `?` and `[...]` match within
    one name. `**` matches any number of folders; at the end of a glob it means `**/*`. A name
    without wildcards is looked up, which does not count as listing its folder. Raises `PathRefused` if the glob is invalid.
    """
    segments, folders = _segments(pattern)
    listed: dict[str, Mapping[str, bool]] = {}
    found: set[str] = set()
    done: set[tuple[str, int]] = set()
    left = [("", 0)] if segments else []
    while left:
        step = left.pop()
        if step in done:
            continue
        done.add(step)
        folder, at = step
        segment = segments[at]
        if folder not in listed and not isinstance(segment, str):
            listed[folder] = members(folder)
        if segment is None:
            left.append((folder, at + 1))
            left.extend((join(folder, name), at) for name, inside in listed[folder].items() if inside)
            continue
        for path, is_folder in _fitting(segment, folder, look, listed.get(folder)):
            if at + 1 < len(segments):
                if is_folder:
                    left.append((path, at + 1))
            elif is_folder == folders:
                found.add(f"{path}/" if folders else path)
    return tuple(sorted(found))


def _fitting(
    segment: str | Callable[[str], object], folder: str, look: Look, members: Mapping[str, bool] | None
) -> Iterator[tuple[str, bool]]:
    if isinstance(segment, str):
        path = join(folder, segment)
        is_folder = look(path) if members is None else members.get(segment)
        if is_folder is not None:
            yield path, is_folder
        return
    for name, is_folder in (members or {}).items():
        if segment(name):
            yield join(folder, name), is_folder


def _segments(pattern: str) -> tuple[list[_Segment], bool]:
    at = parse_path(pattern)
    if _BRACES.search(pattern):
        raise PathRefused(
            pattern, "patterns don't support {a,b} alternatives. Search once for each alternative"
        )
    names = at.path.split("/") if at.path else []
    if names and names[-1] == "**":
        names.append("*")
    segments: list[_Segment] = []
    for name in names:
        if name == "**":
            if segments[-1:] != [None]:  # repeated `**` means the same as one, but would take many more steps
                segments.append(None)
        elif _SPECIAL.search(name):
            segments.append(re.compile(translate(name)).match)
        else:
            segments.append(name)
    return segments, at.as_folder


_MOST_SHOWN = 200
"""Maximum number of characters of a pattern in an error message."""


def line_pattern(pattern: str) -> Pattern:
    """Compile the regular expression that `grep` searches each line for. Raises `FileError` if it is invalid."""
    try:
        return compile_pattern(pattern)
    except ValueError as error:
        shown = pattern if len(pattern) <= _MOST_SHOWN else f"{pattern[:_MOST_SHOWN]}..."
        raise FileError(shown, str(error)) from None
    except TypeError:
        problem = f"a pattern must be a str, not {describe_kind(pattern)}. Pass a str"
        raise FileError(str(pattern), problem) from None


def matches(pattern: Pattern, path: str, data: bytes) -> Iterator[Match]:
    """Yield the matching lines of one file. A file that is not text has none.

    A line that is too long for the pattern is not searched. It is yielded with a note instead of its text.
    """
    if b"\0" in data:
        return
    try:
        text = data.decode()
    except UnicodeDecodeError:
        return
    if pattern.plain is not None and pattern.plain not in text:
        return
    for first, lines in _pieces(text):
        long: dict[int, int] = {}
        if len(text) > pattern.longest and max(map(len, lines)) > pattern.longest:
            long = {at: len(line) for at, line in enumerate(lines, 1) if len(line) > pattern.longest}
            lines = ["" if at in long else line for at, line in enumerate(lines, 1)]
        found = {at: line[:MAX_LINE] for at, line in pattern.matching(lines)}
        found |= {at: _TOO_LONG.format(length, pattern.longest) for at, length in long.items()}
        for at in sorted(found):
            yield Match(path, first + at, found[at])


def _pieces(text: str) -> Iterator[tuple[int, list[str]]]:
    """Split a text into lines, piece by piece. Yields the number of lines before each piece, and the piece's lines."""
    start = before = 0
    while start < len(text):
        end = text.find("\n", start + _PIECE)
        if end < 0:
            end = len(text) - text.endswith("\n")
        piece = text[start:end]
        lines = piece.split("\n")
        yield before, [line.removesuffix("\r") for line in lines] if "\r" in piece else lines
        start = end + 1
        before += len(lines)


def encode(path: str, content: object) -> bytes:
    """Encode text as UTF-8, and return bytes unchanged. Raises `FileError` for anything else, or if UTF-8 can't encode the text."""
    if isinstance(content, str):
        try:
            return content.encode()
        except UnicodeEncodeError as error:
            problem = (
                f"character {error.start} of the content can't be encoded as UTF-8. Remove it, or write bytes"
            )
            raise FileError(path, problem) from None
    if isinstance(content, bytes):
        return content
    problem = f"the content is {describe_kind(content)}, and files hold text or bytes. Pass a str or bytes"
    raise FileError(path, problem)


def decode(path: str, data: bytes) -> str:
    """Decode a file as UTF-8. Raises `FileError` if its bytes are not valid UTF-8."""
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        problem = f"this is not UTF-8 text (byte {error.start} is invalid). Use read_bytes to read its bytes"
        raise FileError(path, problem) from None


def count_replaceable(path: str, text: str, old: str, new: str, *, every: bool) -> int:
    """Return how many times `old` would be replaced by `new` in the text.

    Raises `EditRefused` if `old` is empty, equals `new` or is not in the text, or if it occurs more than once and
    `every` is False.
    """
    if not old:
        raise EditRefused(path, "the text to replace is empty. Pass the exact text to replace")
    if old == new:
        raise EditRefused(path, "the old and the new text are equal. Pass a different new text")
    count = text.count(old)
    if not count:
        problem = "the file does not contain the text to replace. Read the file and copy the text exactly, with its spaces and line endings"
        raise EditRefused(path, problem)
    if count > 1 and not every:
        problem = f"the file contains the text to replace {count} times. Include more of the surrounding text, or pass all=True"
        raise EditRefused(path, problem)
    return count


def sorted_matches(pattern: str, files: Iterable[tuple[str, bytes]]) -> tuple[Match, ...]:
    """Return the lines that match a pattern in these files, which must be sorted by path.

    Raises `FileError` if the pattern is invalid, and `FileLimitReached` if more than `MAX_MATCHES` lines match.
    """
    compiled = line_pattern(pattern)
    found: list[Match] = []
    for path, data in files:
        for match in matches(compiled, path, data):
            if len(found) == MAX_MATCHES:
                problem = f"more than {MAX_MATCHES} lines match. Pass a narrower pattern or fewer files"
                raise FileLimitReached(path, problem)
            found.append(match)
    return tuple(found)
