"""Tests that a call passes few files on its way to a tool's handler, so that following it means opening few of them."""

import re
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "scripts" / "hops.py"
MOST_FILES = {
    "a call without a journal, until its handler": 40,
    "a call with a journal, until its handler": 61,
    "a run that is parked, until its handler": 71,
    "an answered approval, until its handler": 14,
    "a resumed run, until its handler": 71,
}
"""The number of the package's files whose functions are entered. When a way gets shorter, its number here is lowered."""


def test_the_way_of_a_call_has_few_files():
    """No way to a handler enters more of the package's files than it did before."""
    result = subprocess.run([sys.executable, str(SCRIPT)], capture_output=True, text=True, check=True)
    files = {
        way: int(count) for way, count in re.findall(r"(.*): \d+ functions in (\d+) files", result.stdout)
    }
    assert files.keys() >= MOST_FILES.keys(), result.stdout
    longer = {way: files[way] for way, most in MOST_FILES.items() if files[way] > most}
    assert not longer, f"find the files with `python scripts/hops.py --list`: {longer}"


def test_the_files_on_the_written_way_exist():
    """Every file and function that the design's description of the ways names is there."""
    design = (SCRIPT.parents[1] / "docs" / "design.md").read_text()
    way = design.partition("## The way of a call")[2].partition("\n## ")[0]
    package = SCRIPT.parents[1] / "src" / "handrail"
    hops = re.findall(r"`([\w/]+\.py)`(?:, `(?:[A-Z]\w*\.)?(\w+)`)?", way)
    assert len(hops) > 20
    for file, function in hops:
        paths = [each for each in package.rglob(Path(file).name) if each.as_posix().endswith(f"/{file}")]
        assert paths, file
        if function and not function[0].isupper():
            assert any(f"def {function}(" in path.read_text() for path in paths), (file, function)
