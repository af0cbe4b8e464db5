"""Settings for the MCP tests."""

import pytest
from mcp.client import session

from handrail.mcp import calls, connection, issuer, login, remote_tasks, tasks, transport, url_transport
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
    monkeypatch.setattr(transport, "_LAST_MOMENTS", PATIENCE)
    monkeypatch.setattr(issuer, "_FETCH_SECONDS", PATIENCE)
    monkeypatch.setattr(calls, "STOP_SECONDS", PATIENCE)
    monkeypatch.setattr(login, "_READ_SECONDS", PATIENCE)
    monkeypatch.setattr(remote_tasks, "CANCEL_SECONDS", PATIENCE)
    monkeypatch.setattr(tasks, "TASK_AFTER", PATIENCE)
