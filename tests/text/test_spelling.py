"""Suggesting the nearest known name, with bounded work."""

import difflib
from typing import Any

import pytest

from handrail import open_gate, tool
from handrail.text.spelling import nearest


def test_a_misspelt_name_is_recognised() -> None:
    """`nearest` returns the most similar known name, or None if no name is similar."""
    assert nearest("read_flie", ["write_file", "read_file"]) == "read_file"
    assert nearest("zzz", ["read_file"]) is None


def test_a_long_name_is_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names that are too long are not compared. Only the first 500 known names are compared."""
    compared: list[int] = []

    def close(name: str, known: Any, **options: Any) -> list[str]:
        compared.append(len(name) * len(known))
        return []

    monkeypatch.setattr(difflib, "get_close_matches", close)
    assert nearest("a" * 1_000_000, ["a" * 90]) is None
    assert nearest("a", ["b" * 1_000_000]) is None
    assert nearest("a" * 100, (f"name{number}" for number in range(100_000))) is None
    assert max(compared) <= 100 * 500


@tool(description="Pay.")
async def pay(amount: int) -> None:
    pass


async def test_thousands_of_unknown_arguments_make_a_bounded_message() -> None:
    """The message about thousands of unknown arguments has a bounded length."""
    result = await open_gate([pay]).invoke("pay", {f"field{number}": 1 for number in range(20_000)})
    assert not result.success
    assert len(result.message) < 20_000
