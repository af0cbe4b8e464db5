"""What is in files: text as bytes and back, found by name, found by its lines, replaced.

Nothing here knows where the files lie: a filesystem passes in how its folders are looked at, and so
sees, and can keep track of, exactly what a search has depended on.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from fnmatch import translate

from handrail.errors import EditRefused, FileError, PathRefused
from handrail.protocols import Match
from handrail.resources.paths import join, place

MAX_LINE = 500
"""Characters of a line that `grep` shows."""

_SPECIAL = re.compile(r"[*?\[]")
_BRACES = re.compile(r"\{[^{}/]*,[^{}/]*\}")

Look = Callable[[str], bool | None]
"""Is a path a folder (True), a file (False) or nothing (None)?"""
Members = Callable[[str], Mapping[str, bool]]
"""The names in a folder, each with whether it is a folder itself. The root is the empty text."""
_Segment = str | Callable[[str], object] | None
"""A name, a test of names, or any number of folders."""


def find(pattern: str, look: Look, members: Members) -> tuple[str, ...]:
    """The files that fit a glob, or with a `/` at its end the folders (each with a `/` too), sorted.

    `*`, `?` and `[...]` stay within one name; `**` is any number of folders, and at the end every
    file below. A name without any of these is looked up, and its folder is not listed for it.
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
    at = place(pattern)
    if _BRACES.search(pattern):
        raise PathRefused(pattern, "a pattern has no {a,b} alternatives. Search once for each of them")
    names = at.path.split("/") if at.path else []
    if names and names[-1] == "**":
        names.append("*")
    segments: list[_Segment] = []
    for name in names:
        if name == "**":
            segments.append(None)
        elif _SPECIAL.search(name):
            segments.append(re.compile(translate(name)).match)
        else:
            segments.append(name)
    return segments, at.as_folder


def line_pattern(pattern: str) -> re.Pattern[str]:
    """The regular expression that `grep` looks for in each line."""
    try:
        return re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        problem = f"this is not a regular expression of Python: {error}. Put a backslash before a character that is meant as itself"
        raise FileError(pattern, problem) from None
    except TypeError:
        problem = f"a pattern is text, and this is a {type(pattern).__name__}. Pass a str"
        raise FileError(str(pattern), problem) from None


def matches(pattern: re.Pattern[str], path: str, data: bytes) -> Iterator[Match]:
    """The lines of one file that the pattern is found in; none where the file is not text."""
    if b"\0" in data:
        return
    try:
        text = data.decode()
    except UnicodeDecodeError:
        return
    lines = text.split("\n")
    if not lines[-1]:
        lines.pop()
    for number, line in enumerate(lines, 1):
        line = line.removesuffix("\r")
        if pattern.search(line):
            yield Match(path, number, line[:MAX_LINE])


def encode(path: str, content: object) -> bytes:
    """Content as it is kept: text as UTF-8, bytes as they are."""
    if isinstance(content, str):
        try:
            return content.encode()
        except UnicodeEncodeError as error:
            problem = f"character {error.start} of the content can't be written as UTF-8. Leave it out, or write bytes"
            raise FileError(path, problem) from None
    if isinstance(content, bytes):
        return content
    problem = (
        f"the content is a {type(content).__name__}, and a file holds text or bytes. Pass a str or bytes"
    )
    raise FileError(path, problem)


def decode(path: str, data: bytes) -> str:
    """A file as text."""
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        problem = f"this is not UTF-8 text (byte {error.start} does not fit). Use read_bytes for its bytes"
        raise FileError(path, problem) from None


def replaced(path: str, text: str, old: str, new: str, *, every: bool) -> tuple[str, int]:
    """The text with `old` replaced, and how many times it was there."""
    if not old:
        raise EditRefused(path, "the text to replace is empty. Give the exact text that is to go")
    if old == new:
        raise EditRefused(path, "the new text is the same as the old. Give the text as it is to be")
    count = text.count(old)
    if not count:
        problem = "the text to replace is not in it. Read the file and copy the text exactly, with its spaces and line ends"
        raise EditRefused(path, problem)
    if count > 1 and not every:
        problem = f"the text to replace is in it {count} times. Give more of the text around the one that is meant, or all=True"
        raise EditRefused(path, problem)
    return text.replace(old, new), count


def sorted_matches(pattern: str, files: Iterable[tuple[str, bytes]]) -> tuple[Match, ...]:
    """What `grep` finds in these files, which come in the order of their paths."""
    compiled = line_pattern(pattern)
    return tuple(match for path, data in files for match in matches(compiled, path, data))
