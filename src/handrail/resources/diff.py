"""`diff`: formats a fork's changes as a unified diff, in git's format.

Where it leaves content out, it names the content's SHA-256, so different contents never have the same diff: an approval of a
diff must not cover others. Only content that can't be read has no digest. The diff says so, in the words of `UNSHOWN`.
"""

from __future__ import annotations

import difflib
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from hashlib import sha256

from handrail.errors import FileError
from handrail.resources.facts import Facts, differences
from handrail.resources.paths import ancestors
from handrail.resources.tree import Link, Node, is_link, loaded, special_kind
from handrail.text.rendering import UNSHOWN, exact, exact_line

MAX_GAP = 2_500
"""Maximum number of line pairs in a gap that is compared line by line."""
MAX_PAIRS = 200_000
"""Maximum number of line pairs that are compared in all gaps of a file together."""

Block = tuple[int, int, int]
"""A block of equal lines: its start on each side, and the number of lines."""


def unified_diff(
    before: Sequence[str], after: Sequence[str], old: str, new: str, context: int = 3
) -> Iterator[str]:
    """Yield the lines of a unified diff, or nothing if both sides are equal.

    Lines keep their line endings. The last line of a side may have none.
    """
    matcher = _Matcher(before, after)
    for number, group in enumerate(matcher.get_grouped_opcodes(context)):
        if not number:
            yield f"--- {old}\n"
            yield f"+++ {new}\n"
        first, last = group[0], group[-1]
        yield f"@@ -{_range(first[1], last[2])} +{_range(first[3], last[4])} @@\n"
        for kind, a, a_end, b, b_end in group:
            if kind == "equal":
                yield from (f" {line}" for line in before[a:a_end])
            else:
                yield from (f"-{line}" for line in before[a:a_end])
                yield from (f"+{line}" for line in after[b:b_end])


def _range(start: int, stop: int) -> str:
    length = stop - start
    if length == 1:
        return str(start + 1)
    return f"{start + 1 if length else start},{length}"


class _Matcher(difflib.SequenceMatcher[str]):
    """`difflib`'s matcher, with the matching blocks of `matching_blocks`."""

    def __init__(self, before: Sequence[str], after: Sequence[str]) -> None:
        super().__init__(None, "", "", autojunk=False)
        self.a, self.b = before, after

    def get_matching_blocks(self) -> list[difflib.Match]:
        return [
            difflib.Match(*block)
            for block in [*matching_blocks(self.a, self.b), (len(self.a), len(self.b), 0)]
        ]


def matching_blocks(before: Sequence[str], after: Sequence[str]) -> list[Block]:
    """Return the blocks of equal lines, in order. Adjacent blocks are joined.

    `difflib` takes quadratic time for a file in which every other line changed. Here, lines that occur once on each side divide the
    files into gaps, in the time that sorting takes. Small gaps are compared line by line, up to a total for the file. In any
    other gap, everything between the equal lines at its start and end counts as replaced.
    """
    joined: list[Block] = []
    for a, b, size in _blocks(before, after):
        if joined and joined[-1][0] + joined[-1][2] == a and joined[-1][1] + joined[-1][2] == b:
            joined[-1] = (joined[-1][0], joined[-1][1], joined[-1][2] + size)
        elif size:
            joined.append((a, b, size))
    return joined


def _blocks(before: Sequence[str], after: Sequence[str]) -> Iterator[Block]:
    start, before_end, after_end = _ends(before, after, (0, len(before), 0, len(after)))
    yield 0, 0, start
    pairs = MAX_PAIRS
    a, b = start, start
    anchors = _anchors(before, after, (start, before_end, start, after_end))
    for at, there in [*anchors, (before_end, after_end)]:
        size = (at - a) * (there - b)
        if size <= min(MAX_GAP, pairs):
            pairs -= size
            gap = difflib.SequenceMatcher(None, before[a:at], after[b:there], autojunk=False)
            yield from ((a + block.a, b + block.b, block.size) for block in gap.get_matching_blocks())
        else:
            equal, a_end, b_end = _ends(before, after, (a, at, b, there))
            yield a, b, equal
            yield a_end, b_end, at - a_end
        if at < before_end:
            yield at, there, 1
        a, b = at + 1, there + 1
    yield before_end, after_end, len(before) - before_end


def _ends(
    before: Sequence[str], after: Sequence[str], within: tuple[int, int, int, int]
) -> tuple[int, int, int]:
    """Return the number of equal lines at the start, and the index on each side where the equal lines at the end begin."""
    a, a_end, b, b_end = within
    most = min(a_end - a, b_end - b)
    start = 0
    while start < most and before[a + start] == after[b + start]:
        start += 1
    end = 0
    while end < most - start and before[a_end - end - 1] == after[b_end - end - 1]:
        end += 1
    return start, a_end - end, b_end - end


def _anchors(
    before: Sequence[str], after: Sequence[str], within: tuple[int, int, int, int]
) -> list[tuple[int, int]]:
    """Return the longest sequence of lines that occur once on each side and in the same order, as pairs of indexes."""
    a, a_end, b, b_end = within
    counts, others = Counter(before[a:a_end]), Counter(after[b:b_end])
    places = {line: at for at, line in enumerate(after[b:b_end], b) if others[line] == 1}
    shared = [
        (at, places[line])
        for at, line in enumerate(before[a:a_end], a)
        if counts[line] == 1 and line in places
    ]
    ends: list[int] = []  # for each length, the smallest index at which a sequence of that length ends
    links: list[
        tuple[int, int]
    ] = []  # for each shared line, its index in the longest sequence that ends with it, and the line before it, or -1
    last: list[int] = []
    for number, (_, there) in enumerate(shared):
        length = bisect_left(ends, there)
        ends[length : length + 1] = [there]
        last[length : length + 1] = [number]
        links.append((length, last[length - 1] if length else -1))
    found: list[tuple[int, int]] = []
    at = last[-1] if last else -1
    while at >= 0:
        found.append(shared[at])
        at = links[at][1]
    return found[::-1]


MAX_SIZE, MAX_LINES = 1024 * 1024, 20_000
"""Maximum bytes and lines of a file whose content is shown. For a larger file, only its size and digest are shown."""

FactsOf = Callable[[str, Node], Facts | None]


def diff(changes: Iterable[tuple[str, Node, Node]], facts_of: FactsOf, run_by: Mapping[str, str]) -> str:
    """Format changes as a unified diff. Each change is a path, its new node and its old node.

    `run_by` maps each changed or deleted startup file to the program that runs it. The diff marks these files. A file that was
    written again with the same content and attributes is shown as `no change`.
    """
    found = sorted(((path, node, base) for path, node, base in changes), key=lambda change: change[0])
    went = {id(base.data): path for path, node, base in found if base.data is not None and not node.version}
    moved = {
        went[id(node.data)]: path
        for path, node, base in found
        if node.data is not None and not base.version and id(node.data) in went
    }
    origins = {target: source for source, target in moved.items()}
    around = {folder for path, _, _ in found for folder in ancestors(path)}
    lines: list[str] = []
    for path, node, base in found:
        is_said = path in around and path not in run_by and _is_said_inside(path, node, base, facts_of)
        if path in moved or is_said:
            continue  # the change is shown at the new path, or by the changes inside the folder
        said = list(_change(path, node, base, origins.get(path), facts_of))
        program = run_by.get(path) or run_by.get(origins.get(path, ""))
        later = [f"runs later: by {_said(program)}, automatically and outside the sandbox"] if program else []
        # a heading alone would look like an empty file
        lines += [said[0], *later, *(said[1:] or ["no change"])]
    return "".join(f"{line}\n" for line in lines)


def _is_said_inside(path: str, node: Node, base: Node, facts_of: FactsOf) -> bool:
    """Return whether a folder's own entry can be omitted, because changes inside the folder imply it.

    The entry is needed if a file becomes a folder or a folder a file, if the folder's mode, owner, group or attributes
    change, or if a new folder has attributes or mode bits beyond 0755.
    """
    if node.data is not None or base.data is not None:
        return False
    before, after = facts_of(path, base), facts_of(path, node)
    if base.version:
        return before is None or after is None or before == after
    return after is None or not (after.mode & ~0o755 or after.attributes)


def _change(path: str, node: Node, base: Node, origin: str | None, facts_of: FactsOf) -> Iterator[str]:
    old, new = f"a/{_said(origin or path)}", f"b/{_said(path)}"
    yield f"diff --git {old} {new}"
    if origin is not None:
        yield f"rename from {_said(origin)}"
        yield f"rename to {_said(path)}"
        yield f"content: {_summary(node)}"
        return
    before, after = facts_of(path, base), facts_of(path, node)
    if not base.version:
        yield f"new {_kind(node)}{_mode(after)}"
    elif not node.version:
        yield f"deleted {_kind(base)}{_mode(before)}"
    elif _kind(base) != _kind(node):
        yield f"{_kind(base)} becomes {_kind(node)}"
    elif before is not None and after is not None and before.mode != after.mode:
        yield f"old mode {before.mode:o}"
        yield f"new mode {after.mode:o}"
    if node.version:
        yield from map(exact_line, differences(before, after))
    yield from _content(
        old if base.version else "/dev/null", new if node.version else "/dev/null", base, node
    )


def _content(old: str, new: str, base: Node, node: Node) -> Iterator[str]:
    sizes = base.size, node.size
    if max(sizes) > MAX_SIZE:
        yield f"Large files {old} and {new} differ: {_summary(base)} before, {_summary(node)} after"
        return
    try:
        before, after = _text(base), _text(node)
    except FileError:  # for example, the file can't be read, or is too large
        yield f"{old} and {new} differ, and their content {UNSHOWN}"
        return
    if before is None or after is None:
        if _bytes(base) != _bytes(node):
            yield f"Binary files {old} and {new} differ: {_summary(base)} before, {_summary(node)} after"
        return
    counts = _line_count(before), _line_count(after)
    if max(counts) > MAX_LINES:
        yield f"Long files {old} and {new} differ: {_summary(base)} before, {_summary(node)} after"
        return
    for number, line in enumerate(unified_diff(_lines(before), _lines(after), old, new)):
        text = line.removesuffix("\n")
        yield text if number < 2 else exact(text, tabs=True)  # the first two lines are the names
        if text == line:
            yield "\\ No newline at end of file"


def _summary(node: Node) -> str:
    """Describe content that is not shown, such that no other content has the same description."""
    try:
        raw = _bytes(node)
    except FileError:
        return f"{node.size} bytes (their content {UNSHOWN})"
    return f"{len(raw)} bytes (SHA-256 {sha256(raw).hexdigest()})" if raw else "0 bytes"


def _text(node: Node) -> str | None:
    """Return a file's text, or None if the file contains a zero byte or is not UTF-8."""
    raw = _bytes(node)
    if b"\0" in raw:
        return None
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return None


def _line_count(text: str) -> int:
    return text.count("\n") + (not text.endswith("\n") and text != "")


def _lines(text: str) -> list[str]:
    """Split a text into lines with their line endings."""
    *ended, last = text.split("\n")
    return [*(f"{line}\n" for line in ended), *([last] if last else [])]


def _bytes(node: Node) -> bytes:
    if special_kind(node):
        return b""
    if isinstance(node.data, Link):
        return node.data.target.encode("utf-8", "surrogateescape")
    return b"" if node.data is None else loaded(node.data)


def _kind(node: Node) -> str:
    return "folder" if node.is_folder else "link" if is_link(node) else special_kind(node) or "file"


def _mode(facts: Facts | None) -> str:
    return "" if facts is None else f" mode {facts.mode:o}"


def _said(path: str) -> str:
    """Format a file name for the diff.

    A name with unusual characters is escaped and quoted, so that it can't be mistaken for another line of the diff. The
    only backslashes in a path begin escapes, which stay as they are.
    """
    shown = exact_line(path).replace(r"\x5cx", r"\x")
    return shown if shown == path else f'"{shown}"'
