"""A test that no sentence of a message stands in two files of tests, so that rewording a message touches one file."""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from support import ROOT, TESTS

pytestmark = pytest.mark.once

RUN = 8
"""How many words in a row make a sentence."""
SQL = re.compile(r"\b(CREATE|DELETE FROM|INSERT INTO|SELECT|UPDATE)\b")


def strings(path: Path) -> Iterator[tuple[int, str]]:
    """Yield each string of a file with its line: whole literals, and the constant parts of f-strings. Docstrings are left out."""
    alone: set[ast.expr] = set()
    for node in ast.walk(ast.parse(path.read_bytes())):  # a statement comes before its parts
        if isinstance(node, ast.Expr):
            alone.add(node.value)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in alone:
            yield node.lineno, node.value


def runs(text: str) -> Iterator[tuple[str, ...]]:
    words = [word.strip("`'\".,:;()") for word in text.lower().split()]
    return zip(*(words[start:] for start in range(RUN)), strict=False)


def test_no_sentence_of_a_message_stands_in_two_files_of_tests():
    """No eight words in a row of a message in `src` stand in two files of tests. `support/texts.py` has those that several need."""
    ours = {
        run
        for path in (ROOT / "src").rglob("*.py")
        for _, text in strings(path)
        if len(text) > 25
        for run in runs(text)
    }
    assert ours
    found: defaultdict[tuple[str, ...], dict[str, int]] = defaultdict(dict)
    for path in sorted(TESTS.rglob("*.py")):
        for line, text in strings(path):
            for run in () if SQL.search(text) else ours.intersection(runs(text)):
                found[run][str(path.relative_to(TESTS))] = line
    twice = {places: " ".join(run) for run, each in found.items() if len(places := tuple(each.items())) > 1}
    assert not twice, twice
