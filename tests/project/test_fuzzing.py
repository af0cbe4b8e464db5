"""Hypothesis fuzzes inputs that come from outside. `scripts/fuzz.py` fuzzes the same targets, guided by coverage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from handrail import open_gate
from handrail.errors import JournalError
from handrail.journal.sqlite import SqliteJournal
from project.fuzz_targets import TARGETS, TOOLS, answer_value, argument_values, corpus, good, journal_file

WORDS = [
    b"[" * 1200, b"{", b"}", b'"', b"\\ud800", b"\\u0000", b"\xed\xa0\x80", b"\xff", b"1e999", b"-0", b"NaN", b"9" * 400,
    b"null", b"true", b"---", b"\n", b"\r", b": ", b"*a", b"&a ", b"!!python/object", b"<<: ", b"\xe2\x80\xa8", b"\0", b",", b"''",
]  # fmt: skip


def changed(seeds: list[bytes]) -> st.SearchStrategy[bytes]:
    """Return a strategy for inputs: random bytes, and seeds with pieces removed, repeated, overwritten and inserted."""
    piece = st.one_of(st.sampled_from(WORDS), st.binary(max_size=8))
    edits = st.lists(st.tuples(st.floats(0, 1), st.integers(0, 12), piece, st.integers(0, 2)), max_size=5)

    def edit(seed: bytes, all_: list[tuple[float, int, bytes, int]]) -> bytes:
        for where, length, new, repeat in all_:
            at = int(where * len(seed))
            seed = seed[:at] + new + seed[at : at + length] * repeat + seed[at + length :]
        return seed

    return st.one_of(st.binary(max_size=200), st.builds(edit, st.sampled_from(seeds), edits))


@pytest.mark.parametrize("name", sorted(TARGETS))
def test_seeds_and_earlier_findings(name: str) -> None:
    """Each target handles its seeds, its earlier findings and empty input."""
    target, seeds = TARGETS[name]
    for data in (*seeds, *corpus(name), b""):
        target(data)


@pytest.mark.parametrize("name", sorted(TARGETS.keys() - {"journal_file"}))
@given(data=st.data())
def test_bytes_from_outside_end_in_words(name: str, data: st.DataObject) -> None:
    """Any bytes that come in are handled, or refused with one of Handrail's own errors."""
    target, seeds = TARGETS[name]
    target(data.draw(changed(seeds)))


@settings(max_examples=max(1, settings().max_examples // 10))
@given(changes=st.lists(st.tuples(st.integers(0, 2**24 - 1), st.integers(0, 255)), max_size=6))
def test_a_damaged_journal_ends_in_words(changes: list[tuple[int, int]]) -> None:
    """A journal in which any bytes were overwritten is read, or refused with one of Handrail's own errors."""
    journal_file(b"".join(place.to_bytes(3) + bytes([value]) for place, value in changes))


def test_a_journal_whose_schema_is_not_text_is_refused(tmp_path: Path) -> None:
    """A byte that is not UTF-8 in a table's definition raises `JournalError`, not `UnicodeDecodeError`."""
    path = tmp_path / "base" / "runs.db"
    path.parent.mkdir(mode=0o700)
    SqliteJournal(path).close()
    raw = path.read_bytes()
    assert b"CREATE TABLE" in raw
    path.write_bytes(raw.replace(b"CREATE TABLE", b"CREATE\x80TABLE"))
    with pytest.raises(JournalError, match=r"damaged|altered|opened"):
        SqliteJournal(path)


class Odd:
    """A value that no schema accepts, and whose repr raises an error."""

    def __repr__(self) -> str:
        raise RuntimeError("no words")


FIELDS = [
    "text",
    "count",
    "exact",
    "sure",
    "box",
    "others",
    "on",
    "at",
    "span",
    "who",
    "raw",
    "rows",
    "numbers",
    "name",
    "more",
]

VALUES = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.floats(),
        st.text(st.characters(exclude_categories=())),
        st.binary(max_size=8),
        st.sampled_from([10**400, "\ud800", float("nan"), object, 1j, {1, 2}, range(3)]),
        st.builds(lambda: -(10**5000)),
        st.builds(Odd),
        st.builds(object),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.tuples(inner, inner),
        st.dictionaries(st.text(max_size=3) | st.integers() | st.none(), inner, max_size=3),
        st.fixed_dictionaries({}, optional=dict.fromkeys(FIELDS, inner)),
    ),
    max_leaves=8,
)


@given(name=st.sampled_from([each.name for each in TOOLS]), value=VALUES)
def test_values_as_arguments_end_in_words(name: str, value: Any) -> None:
    """A program may pass arguments of any type: they are accepted, or refused with a message."""
    argument_values(name, value)


@given(value=VALUES)
def test_values_as_answers_end_in_words(value: Any) -> None:
    """An answer of any type is accepted, or refused so that the question is asked again."""
    answer_value(value)


def test_good_arguments_are_accepted() -> None:
    """The seeds for a tool's arguments are valid, so that the fuzzers reach the handlers."""
    for name, data in good.items():
        result = open_gate(TOOLS).invoke(name, data.decode()).wait()
        assert result.success, result.message
