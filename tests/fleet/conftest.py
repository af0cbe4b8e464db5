"""A longer time limit for the tests of workers."""

import pytest

from support import PATIENCE


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give interrupted legs as long as a busy machine needs."""
    monkeypatch.setattr("handrail.fleet.runner._CUT_SECONDS", PATIENCE)
