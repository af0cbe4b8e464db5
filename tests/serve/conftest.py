"""Longer timeouts for the tests of the server."""

import pytest

from support import PATIENCE


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait longer for runs that are cut off and for sign-in providers, because the machine may be busy."""
    monkeypatch.setattr("handrail.run.host._MIN_CUT_SECONDS", PATIENCE)
    monkeypatch.setattr("handrail.serve.oidc._FETCH_SECONDS", PATIENCE)
