"""Journals behind a real pgbouncer."""

from __future__ import annotations

import asyncio

import pytest

from handrail.errors import JournalError
from handrail.journal.postgres.journal import PostgresJournal
from handrail.journal.records import RunRecord
from support import PATIENCE
from support.pgbouncer import pooled_url
from support.postgres import KEY

pytestmark = pytest.mark.once  # pgbouncer starts slowly


@pytest.mark.parametrize("mode", ["transaction", "statement"])
def test_a_pool_that_shares_its_sessions_is_refused_with_the_reason(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each time, and before anything is created."""
    monkeypatch.setenv("HANDRAIL_KEY", KEY)
    with pooled_url(mode) as url:
        for _ in range(2):
            with pytest.raises(JournalError, match="LISTEN") as refused:
                PostgresJournal(url)
            assert "pool_mode = session" in str(refused.value)


async def test_a_pool_with_a_session_for_each_client_works(monkeypatch: pytest.MonkeyPatch) -> None:
    """Notices arrive, and records are kept."""
    monkeypatch.setenv("HANDRAIL_KEY", KEY)
    run = RunRecord(id="a", session_id="s", principal="ada", prompt="p", model="m", began_at=1.0)
    with pooled_url("session") as url:
        one, other = PostgresJournal(url), PostgresJournal(url)
        try:
            await one.queue.wait(
                PATIENCE
            )  # ends with the first notice, which says that the listener has started
            waiting = asyncio.create_task(one.queue.wait(10 * PATIENCE))
            await asyncio.sleep(0)
            await other.runs.begin(run)
            await other.runs.stop("a")
            async with asyncio.timeout(PATIENCE):
                await waiting
            assert (await one.runs.get("a")).stopping
        finally:
            one.close()
            other.close()
