"""Patterns: regular expressions in Python's syntax, matched by Rust's engine with bounded work."""

import re
import warnings

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from handrail.text.patterns import MAX_LENGTH, MAX_SIZE, MAX_STEPS, Pattern, compile_pattern, is_plain


@pytest.mark.parametrize(
    "pattern",
    [
        ".*.*.*.*.*.*x",
        "(a|a)+$",
        "(a+)+$",
        "(.*,){3,}x",
        "(a?){30}b",
        "a?" * 30 + "b",
        "(x+x+)+y",
        "(a*)*b",
        "(a|aa)+$",
    ],
)
def test_patterns_that_make_an_engine_backtrack_end(pattern: str) -> None:
    """A search ends even for a pattern that can keep a backtracking engine busy for years."""
    assert not Pattern(pattern).found_in("a" * 20_000 + "!")


@pytest.mark.parametrize(
    ("pattern", "name"),
    [
        ("a(?=b)", "lookahead"),
        ("a(?!b)", "negative lookahead"),
        ("(?<=a)b", "lookbehind"),
        ("(?<!a)b", "negative lookbehind"),
        (r"(a)\1", r"a backreference, \1"),
        ("(?P<x>a)(?P=x)", "a backreference"),
        ("(?>a)", "an atomic group"),
        ("(a)?(?(1)b|c)", "a conditional"),
        ("a++", "a possessive repeat"),
        ("a{1,2}+", "a possessive repeat"),
    ],
)
def test_what_only_backtracking_can_match_is_refused_by_name(pattern: str, name: str) -> None:
    """A construct that only a backtracking engine supports is refused. The error names it and says what to do."""
    with pytest.raises(ValueError, match=re.escape(f"patterns can't contain {name}")) as refused:
        Pattern(pattern)
    assert "Write a pattern without it" in str(refused.value)


@pytest.mark.parametrize(
    "pattern",
    [
        "(a?){20000}x",
        "((a{0,99}){0,99}){0,99}",
        "a{999999}",
        "a{9999999999999}",
        "[ab]*a[ab]{3000}x",
        r"\w{900}",
        "(((a{9}){9}){9}){9}",
    ],
)
def test_counted_repeats_count_towards_the_size(pattern: str) -> None:
    """A short pattern whose repeats make it large is refused, because its size multiplies the work for each text."""
    with pytest.raises(ValueError, match=r"too large|smaller count"):
        Pattern(pattern)


def test_a_pattern_has_a_limited_length() -> None:
    """A pattern of more than `MAX_LENGTH` characters is refused, even if it is plain text."""
    with pytest.raises(ValueError, match="Write a shorter one"):
        Pattern("a" * (MAX_LENGTH + 1))
    assert Pattern("a" * MAX_LENGTH).size == 1


def test_a_text_has_a_limited_length() -> None:
    """A text is refused if its length times the pattern's size exceeds the limit."""
    large = Pattern("[ab]{900}")
    assert large.size * large.longest <= MAX_STEPS
    with pytest.raises(ValueError, match=f"at most {large.longest}"):
        large.found_in("a" * (large.longest + 1))


@pytest.mark.parametrize("pattern", ["(", "a)", "[a", "*", r"\q", "(?q)"])
def test_an_invalid_pattern_says_what_is_wrong(pattern: str) -> None:
    """The error for an invalid pattern says that it is not a valid regular expression."""
    with pytest.raises(ValueError, match="not a valid regular expression"):
        Pattern(pattern)


@pytest.mark.parametrize("pattern", ["a b", "naïve", "x" * 50, "{{", "foo<bar>"])
def test_plain_text_matches_itself(pattern: str) -> None:
    """Text with spaces, accents, braces or angle brackets matches itself.

    `is_plain` returns whether `re.escape` would change nothing but the spaces.
    """
    assert Pattern(pattern).found_in(f"..{pattern}..")
    assert is_plain(pattern) == (re.escape(pattern).replace("\\ ", " ") == pattern)


_literals = st.sampled_from([*"ab1 _-{}&~<>,", r"\.", r"\{", r"\[", r"\\", r"\-"])
_classes = st.sampled_from(
    [
        ".",
        r"\w",
        r"\d",
        r"\W",
        "[ab]",
        "[^ab]",
        "[a-c]",
        "[]a]",
        "[^]a]",
        "[[a]",
        "[a&&b]",
        "[~~a]",
        "[a{]",
        r"[\]\d-]",
    ]
)
_anchors = st.sampled_from(["^", "$", r"\b", r"\A", r"\Z"])
_repeats = st.sampled_from(["*", "+", "?", "{2}", "{1,2}", "{,2}", "{1,}", "*?", "+?", "??", "{1,2}?"])
_atoms = st.recursive(
    _literals | _classes,
    lambda inner: st.one_of(
        st.tuples(inner, _repeats).map(lambda both: f"(?:{both[0]}){both[1]}"),
        st.lists(inner, min_size=1, max_size=3).map("".join).map("({})".format),
        st.lists(inner, min_size=1, max_size=3).map("|".join).map("(?:{})".format),
        st.tuples(_anchors, inner).map("".join),
        inner.map("(?i:{})".format),
    ),
    max_leaves=6,
)


@given(
    st.lists(_atoms | _anchors, min_size=1, max_size=4).map("".join),
    st.text("abAB12 _-{}[]&~<>,.\\", max_size=12),
)
@example("a{", "a{")
@example("a{,2}b", "aab")
@example("{a}", "{a}")
@example(r"a\Z", "ba")
@example(r"\<a\>", "<a>")
@example("a(?#comment)b", "ab")
@example("[[:alpha:]]", "a]")
def test_python_and_rust_find_the_same(pattern: str, text: str) -> None:
    """For every pattern that both support, Rust's engine finds a match if and only if Python's does."""
    if "[:alpha:]" in pattern:
        assert Pattern(pattern).found_in(text)
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # Python may give `[[` and `&&` a meaning one day
        try:
            python = re.compile(pattern)
        except re.error:
            return
    assert Pattern(pattern).found_in(text) is (python.search(text) is not None)


@given(st.lists(_atoms, min_size=1, max_size=4).map("".join), st.integers(0, 2000))
def test_the_size_counts_every_repetition(pattern: str, times: int) -> None:
    """A pattern that is repeated n times has at least n times its size, or is refused as too large."""
    size = compile_pattern(f"(?:{pattern})").size
    whole = f"(?:{pattern}){{{times}}}"
    if size * times > MAX_SIZE:
        with pytest.raises(ValueError, match="too large"):
            Pattern(whole)
    elif size * max(times, 1) < MAX_SIZE // 2:  # the engine may refuse large classes even below the limit
        assert Pattern(whole).size >= size * times


@given(st.lists(st.text("ab", max_size=4), max_size=300), st.integers(1, 40))
def test_lines_are_numbered_however_they_are_divided(lines: list[str], size: int) -> None:
    """Lines are matched in batches, and the result does not depend on how the lines are divided."""
    pattern = Pattern(f"a{{1,{size}}}b")
    assert list(pattern.matching(lines)) == [(n, line) for n, line in enumerate(lines, 1) if "ab" in line]


def test_other_threads_get_their_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many lines are divided among several calls to the engine, and none of these takes more than two million steps."""
    pattern = Pattern("[ab]{100}x")
    calls: list[int] = []
    match = pattern._matching
    pattern._matching = lambda lines: calls.append(pattern.size * sum(map(len, lines))) or match(lines)
    list(pattern.matching(["ab" * 500] * 200))
    assert len(calls) > 1
    assert max(calls) <= 2_000_000
