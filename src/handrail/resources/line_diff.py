"""Line diffs: a unified diff of two lists of lines, in bounded time.

`difflib` takes quadratic time for a file in which every other line changed. Here, lines that occur once on each side
divide the files into gaps, in the time that sorting takes. Small gaps are compared line by line, up to a total for the
file. In any other gap, everything between the equal lines at its start and end counts as replaced.
"""

from __future__ import annotations

import difflib
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence

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
    """Return the blocks of equal lines, in order. Adjacent blocks are joined."""
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
