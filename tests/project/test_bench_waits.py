"""The benchmark of waits measures every wait."""

import re
import subprocess
import sys

import pytest

from support import ROOT


@pytest.mark.once
def test_each_wait_is_measured():
    """A quick run prints a positive figure for each wait."""
    command = [sys.executable, ROOT / "bench" / "waits.py", "--quick"]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    heading, *rows = ended.stdout.splitlines()
    assert heading.endswith(" here")
    figures = {row[:72].strip(): float(row[72:].split()[0].replace(",", "")) for row in rows}
    assert {re.sub("[,:]? .*", "", row) for row in figures} == {
        "committed", "approved", "opened", "submitted", "`handrail", "cancelled", "resumed", "search_files"
    }  # fmt: skip
    assert len(figures) == 12
    assert min(figures.values()) > 0
