"""Tests for the tables of attacks in docs/security.md and of faults in docs/reliability.md: each row names tests that exist."""

import re
from collections.abc import Iterator

import pytest

from support import ROOT

TESTS = ROOT / "tests"


def rows(page: str) -> Iterator[tuple[str, list[str]]]:
    """Yield the section and the cells of each table row of a page, except the header rows."""
    section = ""
    lines = (ROOT / "docs" / page).read_text().splitlines()
    for line, following in zip(lines, [*lines[1:], ""], strict=True):
        if line.startswith("## "):
            section = line[3:]
        elif line.startswith("|") and not line.startswith("| ---") and not following.startswith("| ---"):
            yield section, [cell.strip() for cell in line[1:-1].split("|")]


ATTACKS = list(rows("security.md"))
FAULTS = [(section, cells) for section, cells in rows("reliability.md") if section == "Faults"]
ROWS = [*ATTACKS, *FAULTS]


@pytest.mark.parametrize(("table", "least"), [(ATTACKS, 21), (FAULTS, 15)], ids=["attacks", "faults"])
def test_every_row_is_complete(table: list[tuple[str, list[str]]], least: int) -> None:
    """Each row has an attack or a fault, two cells about it, and a test."""
    assert len(table) >= least
    for _, cells in table:
        assert len(cells) == 4, cells[0]
        assert cells[0], cells
        assert cells[1], cells
        assert "test_" in cells[3], cells[0]


@pytest.mark.parametrize("cells", [pytest.param(cells, id=f"{part}-{cells[0][:40]}") for part, cells in ROWS])
def test_every_test_it_names_exists(cells: list[str]) -> None:
    """Every test that the page names exists.

    A file is found by its path or its name, a function in the named file or else in any file, and a quoted case in its file.
    """
    for named in re.findall(r"`([^`]*test_[^`]*)`", cells[3]):
        file, _, function = named.rpartition("::") if "::" in named else (named, "", "")
        if not file.endswith(".py"):
            file, function = "test_*.py", named
        found = [path for path in TESTS.rglob(file.rpartition("/")[2]) if path.match(file)]
        assert found, f"{named}: there is no such file"
        texts = [path.read_text() for path in found]
        assert not function or any(f"def {function}(" in text for text in texts), (
            f"{named}: there is no such test"
        )
    for file, cases in re.findall(r"`([^`]*\.py)`: ((?:\"[^\"]+\"(?:, )?)+)", cells[3]):
        text = "".join(path.read_text() for path in TESTS.rglob(file.rpartition("/")[2]))
        for case in re.findall(r'"([^"]+)"', cases):
            assert case in text, f"{case!r} is not in {file}"
