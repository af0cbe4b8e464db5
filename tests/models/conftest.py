"""Patience for the tests of models."""

import pytest

from support import PATIENCE


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait for connections as long as a busy machine needs."""
    monkeypatch.setattr("handrail.models.http._CONNECT_SECONDS", PATIENCE)
