"""Rendering values for people: readable, exact, and different for different values."""

from __future__ import annotations

import json
import os
import re
import unicodedata
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from handrail.text.rendering import FOLD_CHARACTERS, FOLD_LINES, Row, counted, exact, rows_of

_ESCAPE = re.compile(r"\\(?:x([0-9a-f]{2})|u([0-9a-f]{4})|U([0-9a-f]{8}))")


def read(text: str) -> str:
    """Return the original of a text that `exact` has rendered."""
    return _ESCAPE.sub(lambda found: chr(int(found[1] or found[2] or found[3], 16)), text)


def value_of(row: Row) -> Any:
    """Return the value that was rendered as this row."""
    text = read(row.whole)
    try:
        return json.loads(text, strict=False)
    except ValueError:
        return text


INVISIBLE = [
    "\u200b", "\u200e", "\u200f", "\u202e", "\u2066", "\u2069", "\u061c", "\ufeff", "\xad", "\u034f", "\u115f", "\u1160",
    "\u17b4", "\u180b", "\u180e", "\u2060", "\u2064", "\u2800", "\u3164", "\uffa0", "\ufe00", "\ufe0f", "\U000e0001",
    "\U000e0041", "\U000e0100", "\U0001d159", "\U00016fe4", "\u2028", "\u2029", "\u0378", "\ue000", "\uffff", "\ud800",
]  # fmt: skip

texts = st.text(st.one_of(st.characters(), st.sampled_from('\\xuU09afe \n\t"{[\u202e\u200b\U000e0041\u0301')))
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=8,
)


@given(texts)
def test_no_two_texts_look_the_same(text: str):
    assert read(exact(text)) == text


@given(values)
def test_no_two_values_look_the_same(value: Any):
    (row,) = rows_of({"value": value})
    found = value_of(row)
    assert (found, type(found)) == (value, type(value))


@given(texts)
def test_every_character_can_be_seen(text: str):
    for character in exact(text):
        assert character in "\n " or unicodedata.category(character)[0] not in "CZ"


def kept_by_exact(characters: list[str]) -> set[str]:
    """Return the characters that `exact` does not escape when they follow a letter."""
    kept: set[str] = set()
    for start in range(0, len(characters), 256):
        block = characters[start : start + 256]
        found = _ESCAPE.sub("", exact("".join(f"a{each}" for each in block)))
        kept.update(each for each in block if each in found)
    return kept


def test_no_character_of_unicode_is_hidden():
    """Invisible, blank, unassigned and bidi control characters are escaped, except `\\n` and the plain space."""
    assigned = (*range(0x40000), *range(0xE0000, 0xE1000))  # the other planes are empty or private
    others = range(0x40000, 0x110000, 1 if os.environ.get("HANDRAIL_DEEP") else 41)
    kept = kept_by_exact([chr(each) for each in (*assigned, *others)])
    hidden = [each for each in kept if each not in "\n " and unicodedata.category(each)[0] in "CZ"]
    assert hidden == []
    assert [each for each in INVISIBLE if each in kept] == []
    turning = ("LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI", "BN")
    assert [each for each in kept if unicodedata.bidirectional(each) in turning] == []
    assert {"é", "漢", "א", "🙂", "́"} <= set(kept)


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (2**53 + 1, "9007199254740993"),
        (0.1, "0.1"),
        (True, "true"),
        (None, "null"),
        ("Oslo", "Oslo"),
        ("5", '"5"'),
        ("true", '"true"'),
        ("", '""'),
        (" x", r"\x20x"),
        (" ", r"\x20"),
        ("a file\nof lines\n\n", "a file↵\nof lines↵\n\\x0a"),
        (" 5", '" 5"'),
        ("two\nlines", "two↵\nlines"),
        ("two↵ lines", r"two\u21b5 lines"),
        ("a\u202eb", r"a\u202eb"),
        (r"a\u202eb", r"a\x5cu202eb"),
        (r"a\u202Eb", r"a\x5cu202Eb"),
        (r"C:\users\new", r"C:\users\new"),
        ("\u2764\ufe0f", "\u2764\\ufe0f"),
        ("1" * 30, f'"{"1" * 30}"'),
        ("2024 was good", "2024 was good"),
        ("\u0301", r"\u0301"),
        ("e" + "\u20dd" * 4, "e" + "\u20dd" * 3 + r"\u20dd"),
        (["\x1b\n"], '[\n  "\\x1b\\n"\n]'),
        ("a\u200bb", r"a\u200bb"),
        ("\U000e0041", r"\U000e0041"),
        ("a\xa0b", r"a\xa0b"),
        ("a\tb", r"a\x09b"),
        ("\x1b[2J", r"\x1b[2J"),
        ("a\rb", r"a\x0db"),
        ("né", "né"),
        ("e" + "\u0301" * 5, "e" + "\u0301" * 3 + r"\u0301\u0301"),
        ([1, "a"], '[\n  1,\n  "a"\n]'),
        ({}, "{}"),
    ],
)
def test_how_values_are_written(value: Any, shown: str):
    assert rows_of({"value": value}) == (Row("value", shown),)


@pytest.mark.parametrize(
    ("name", "shown"),
    [("path", "path"), ("a\n\u202eb", r'"a\n\u202eb"'), ("amount  50", '"amount  50"'), ("", '""')],
)
def test_a_name_is_one_line_and_exact(name: str, shown: str):
    assert rows_of({name: 1})[0].name == shown


def test_a_long_value_is_folded_with_a_count():
    (row,) = rows_of({"text": "x" * 10_000})
    assert (len(row.text), row.folded, len(row.whole)) == (FOLD_CHARACTERS, 10_000 - FOLD_CHARACTERS, 10_000)


def test_many_lines_are_folded_with_a_count():
    text = "\n".join(["line"] * 100)
    (row,) = rows_of({"text": text})
    assert row.text.count("\n") == FOLD_LINES - 1
    assert (row.whole, row.folded) == (text.replace("\n", "↵\n"), len(row.rest))


def test_a_little_more_than_fits_is_not_folded():
    assert rows_of({"text": "x" * (FOLD_CHARACTERS + 10)})[0].folded == 0


def test_a_counted_noun_is_singular_for_one_only() -> None:
    """`counted` adds an `s` to the noun, except after 1."""
    assert [counted(number, "call") for number in (0, 1, 2)] == ["0 calls", "1 call", "2 calls"]
