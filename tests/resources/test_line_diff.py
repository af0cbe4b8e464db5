"""Line diffs are correct for any two files, and the work is bounded even in the worst case."""

import difflib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from handrail.resources import diff as line_diff
from handrail.resources.diff import MAX_PAIRS, matching_blocks, unified_diff

FILES = st.lists(st.sampled_from([f"{letter}\n" for letter in "abcdefgh"]), max_size=40)


@given(FILES, FILES)
def test_blocks_are_equal_lines_in_order(before: list[str], after: list[str]) -> None:
    """A block has the same lines on both sides. Blocks do not overlap, and adjacent ones are joined."""
    a = b = 0
    for at, there, size in matching_blocks(before, after):
        assert size > 0
        assert at >= a
        assert there >= b
        assert before[at : at + size] == after[there : there + size]
        assert (at, there) != (a, b) or not a
        a, b = at + size, there + size


@given(FILES, FILES)
def test_a_diff_leads_from_one_side_to_the_other(before: list[str], after: list[str]) -> None:
    """With the whole file as context, a diff contains both files. Equal files have an empty diff."""
    lines = list(unified_diff(before, after, "a", "b", 100))
    if before == after:
        assert lines == []
        return
    assert [line[1:] for line in lines[3:] if line[0] in " -"] == before
    assert [line[1:] for line in lines[3:] if line[0] in " +"] == after


@pytest.mark.parametrize("context", [0, 1, 3])
def test_an_ordinary_diff_is_that_of_difflib(context: int) -> None:
    """For files with a few edits, the diff is the same as difflib's."""
    before = [f"line {number}\n" for number in range(100)]
    after = [*before[:10], "new\n", *before[12:50], *before[51:90], "x\n", "y\n", *before[90:]]
    expected = list(difflib.unified_diff(before, after, "a", "b", n=context))
    assert list(unified_diff(before, after, "a", "b", context)) == expected


def every_other(count: int) -> tuple[list[str], list[str]]:
    return [f"{n}\n" if n % 2 else f"a{n}\n" for n in range(count)], [
        f"{n}\n" if n % 2 else f"b{n}\n" for n in range(count)
    ]


def repeated(count: int) -> tuple[list[str], list[str]]:
    return [f"{n * n % 97}\n" for n in range(count)], [f"{n * n * n % 97}\n" for n in range(count)]


@pytest.mark.parametrize("files", [every_other, repeated])
def test_the_worst_files_are_compared_in_bounded_steps(files: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of line pairs compared is bounded, even for the worst files."""
    compared: list[int] = []

    class Counted(difflib.SequenceMatcher[str]):
        def __init__(self, junk: Any, a: Any, b: Any, autojunk: bool) -> None:
            compared.append(len(a) * len(b))
            super().__init__(junk, a, b, autojunk=autojunk)

    monkeypatch.setattr(line_diff.difflib, "SequenceMatcher", Counted)
    before, after = files(20_000)
    blocks = matching_blocks(before, after)
    assert sum(compared) <= MAX_PAIRS
    assert max(compared, default=0) <= 2500
    if files is every_other:
        assert len(blocks) == 10_000
