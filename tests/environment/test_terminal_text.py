"""Escaping text for a terminal."""

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from handrail.text.rendering import escape, escape_line
from handrail.text.terminal import format_arguments, format_value

ANYTHING = st.text(st.characters(exclude_categories=())) | st.text("\x1b[31m\r\n\t\x00\u202e\u200bé漢 a")
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | ANYTHING,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(ANYTHING, inner, max_size=3),
    max_leaves=8,
)


def moves_nothing(text: str) -> bool:
    """Return whether a text has no control characters, and none of four invisible characters that hide, reverse or break text."""
    return not any(
        ord(each) < 32 or 0x7F <= ord(each) < 0xA0 or each in "\u202e\u2066\u200b\u2028" for each in text
    )


@given(ANYTHING)
def test_nothing_shown_moves_the_cursor(text: str):
    """Escaped text has no lone surrogates, and no control characters except line breaks and tabs."""
    shown = escape(text)
    assert moves_nothing(shown.replace("\n", "").replace("\t", ""))
    shown.encode()  # no lone surrogate is left


def test_invisible_characters_are_escaped():
    """Surrogates, invisible formatting characters, and control characters except line breaks and tabs are escaped."""
    hidden = [chr(code) for code in range(0x110000) if unicodedata.category(chr(code)) in ("Cc", "Cs")]
    hidden += [chr(code) for code in (0xAD, *range(0x200B, 0x2010), *range(0x2060, 0x2070), 0xFEFF)]
    left = [each for each in hidden if each not in "\t\n" and each in escape(each)]
    assert left == []


@given(ANYTHING, st.integers(1, 50))
def test_a_line_is_short_enough(text: str, most: int):
    """An escaped line has no control characters, and is no longer than the given limit."""
    line = escape_line(text, most)
    assert moves_nothing(line)
    assert len(line) <= most


@given(JSON)
def test_formatted_values_are_escaped(value: object):
    """The formatted lines of any JSON value contain no line breaks, and no control characters except tabs."""
    for line in format_value(value):
        assert "\n" not in line
        assert moves_nothing(line.replace("\t", ""))
    assert moves_nothing(format_arguments(value, 60))


@given(st.text("abcé漢 .,[bold]\n", max_size=40))
def test_plain_text_is_unchanged(text: str):
    """Visible text is unchanged, even if it looks like markup."""
    assert escape(text) == text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[2Jgone", "\\x1b[2Jgone"),
        ("a\rb", "a\\rb"),
        ("a\r\nb", "a\nb"),
        ("\u202eevil", "\\u202eevil"),
        ("\x9b31m", "\\x9b31m"),
        ("\ud800", "\\ud800"),
        ("[red]x[/red]", "[red]x[/red]"),
        ("a\u3164b\U000e0100", "a\\u3164b\\U000e0100"),
        ("\u2714\ufe0f", "\u2714\ufe0f"),
    ],
)
def test_what_is_escaped(text: str, shown: str):
    """Escape sequences, lone carriage returns and invisible characters are escaped. Markup and emoji are not."""
    assert escape(text) == shown


def test_arguments_in_one_line():
    """In a line of arguments, single words are not quoted, and text with spaces is. A long line is cut."""
    assert (
        format_arguments({"path": "a/b.md", "text": "two words", "n": 3}, 60)
        == 'path=a/b.md text="two words" n=3'
    )
    assert format_arguments({"text": "x" * 100}, 20) == "text=xxxxxxxxxxxxxx…"
    assert format_arguments({}, 20) == ""
    assert format_arguments(None, 20) == ""


def test_longer_text_is_below_its_name():
    """Multi-line text and nested values are indented below their names."""
    assert list(format_value({"text": "a\nb", "list": [1, {"x": ""}], "none": None, "empty": []})) == [
        "text:",
        "  a",
        "  b",
        "list:",
        "  - 1",
        "  -",
        '    x: ""',
        "none: null",
        "empty: []",
    ]
