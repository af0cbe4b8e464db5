"""Longer timeouts for the tests of the server."""

import pytest

from support import PATIENCE


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give runs that are cut off, and sign-in providers, as much time as a busy machine needs."""
    monkeypatch.setattr("handrail.serve.live_run._MIN_CUT_SECONDS", PATIENCE)
    monkeypatch.setattr("handrail.serve.oidc._FETCH_SECONDS", PATIENCE)
