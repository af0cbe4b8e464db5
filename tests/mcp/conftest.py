"""Settings for the tests of MCP."""

import pytest
from mcp.client import session

from handrail.mcp import connection, url_transport
from support import PATIENCE


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give servers enough time on a busy machine.

    If a server does not answer the SDK's first request in time, the SDK uses an older version of the protocol.
    """
    monkeypatch.setattr(session, "DISCOVER_TIMEOUT_SECONDS", PATIENCE)
    for limit in ("CONNECT_TIMEOUT", "PROBE_TIMEOUT"):
        monkeypatch.setattr(connection, limit, PATIENCE)
    monkeypatch.setattr(url_transport, "_CONNECT", PATIENCE)
