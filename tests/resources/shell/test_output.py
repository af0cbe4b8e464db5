"""Command output: which part is kept, and how the result describes the end of the command."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from handrail.resources.shell import CommandResult
from handrail.resources.shell.command_process import Output


def fed(limit: int, *parts: bytes) -> tuple[str, int]:
    output = Output(limit)
    for part in parts:
        output.feed(part)
    return output.read()


def test_output_within_the_limit_is_kept_whole():
    """Output that is exactly as long as the limit is kept whole."""
    assert fed(10, b"12345", b"67890") == ("1234567890", 0)


def test_output_beyond_the_limit_loses_its_middle():
    """Output beyond the limit loses its middle. The beginning and the end are kept, and the omitted bytes are counted."""
    assert fed(4, b"abcdefghij") == ("ab\n… 6 bytes left out …\nij", 6)


def test_no_character_is_cut_in_half():
    """A character that the cut would split is left out whole, and its bytes are counted."""
    assert fed(8, "ääääää".encode()[:-1] + b"\xa4") == ("ää\n… 4 bytes left out …\nää", 4)
    text, omitted = fed(7, "€€€€€€".encode())
    assert text == f"€\n… {omitted} bytes left out …\n€"
    assert omitted == 12


def test_what_is_not_utf_8_is_shown_as_bytes():
    """Output bytes that are not UTF-8 are shown escaped. None are lost, and no error is raised."""
    assert fed(100, b"ok\xff\xfe\n") == ("ok\\xff\\xfe\n", 0)


@given(st.lists(st.binary(max_size=50), max_size=30), st.integers(2, 40))
def test_output_keeps_the_ends_however_it_arrives(parts: list[bytes], limit: int):
    """The same bytes give the same text in whatever chunks they arrive, and the omitted bytes are counted."""
    whole = b"".join(parts)
    assert fed(limit, *parts) == fed(limit, whole)
    _, omitted = fed(limit, whole)
    assert omitted == 0 if len(whole) <= limit else omitted >= len(whole) - limit
    assert omitted <= max(0, len(whole) - limit) + 6


def test_memory_does_not_grow_with_the_output():
    """However long the output is, less than 300 kB of it is kept in memory."""
    output = Output(1000)
    for _ in range(500):
        output.feed(b"x" * 100_000)
        assert len(output._tail) < 300_000
    assert output.read()[1] == 50_000_000 - 1000


@pytest.mark.parametrize(
    ("finished", "words"),
    [
        (CommandResult(argv=("a",), exit_code=3), "`a`: exit code 3\n(no output)"),
        (CommandResult(argv=("a b",), output="x\n"), "`'a b'`: exit code 0\nx\n"),
        (CommandResult(argv=("a",), exit_code=-11), "`a`: killed by SIGSEGV\n(no output)"),
        (
            CommandResult(argv=("a",), exit_code=-9, timed_out=True, seconds=60.02, notes=("Note.",)),
            "`a`: stopped after 60 s, with everything it had started\nNote.\n(no output)",
        ),
        (CommandResult(argv=("x" * 500,)), f"`{'x' * 79}…`: exit code 0\n(no output)"),
    ],
)
def test_an_ending_is_worded_for_a_model(finished: CommandResult, words: str):
    """A rendered result contains the command, how it ended, the notes and the output."""
    assert finished.render() == words
    assert finished.ok is (finished.exit_code == 0)
