"""A fixture for the fleet tests: more time for interrupted legs."""

import pytest

from support import PATIENCE


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give interrupted legs enough time to end on a busy machine."""
    monkeypatch.setattr("handrail.fleet.runner._CUT_SECONDS", PATIENCE)
