"""Tests that pin the public names of the package, so that one is added or removed only on purpose."""

import re
import tomllib
from pathlib import Path

import pytest

import handrail
from support import ROOT

PINNED = Path(__file__).with_name("public_names.txt")
UPDATE = r""".venv/bin/python -c "import handrail; print(*sorted(handrail.__all__), sep='\n')" > tests/project/public_names.txt"""


def test_public_names_are_the_pinned_ones():
    """`handrail.__all__` equals the list in tests/project/public_names.txt."""
    pinned = PINNED.read_text().split()
    new = sorted(set(handrail.__all__) - set(pinned))
    gone = sorted(set(pinned) - set(handrail.__all__))
    if sorted(handrail.__all__) != pinned:
        pytest.fail(
            f"The public names differ from tests/project/public_names.txt: new {new}, gone {gone}. "
            f"If this is intended (and in the changelog), update the list, sorted and without repeats:\n{UPDATE}",
            pytrace=False,
        )


def test_public_names_can_be_got():
    """Every name in `__all__` can be imported."""
    missing = [name for name in handrail.__all__ if not hasattr(handrail, name)]
    assert missing == []


def test_one_page_lists_the_public_names():
    """The docs page of public names lists every name once, and no others."""
    page = (Path(__file__).parents[2] / "docs/reference/public.md").read_text()
    rows = [line for line in page.splitlines() if line.startswith("|")]
    assert sorted(re.findall(r"`(\w+)`", "\n".join(rows))) == sorted(handrail.__all__)


def test_the_version_is_said_once():
    """`handrail.__version__` equals the version in pyproject.toml."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert handrail.__version__ == project["project"]["version"]
