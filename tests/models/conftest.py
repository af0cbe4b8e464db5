"""Settings for the tests of models."""

import pytest

from support import PATIENCE


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give connections enough time to open on a busy machine."""
    monkeypatch.setattr("handrail.models.http._CONNECT_SECONDS", PATIENCE)
