"""A run whose journal was upgraded meanwhile, and no longer lets this version write to it."""

from __future__ import annotations

import asyncio
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from handrail import Adapter, Prompt, ScriptedModel, SqliteJournal, ToolCall, tool
from handrail.errors import JournalUpgraded
from handrail.journal.sql.schema import VERSION
from handrail.run.record.lease import renew_now


def allow(path: Path, oldest: int) -> None:
    """Let a journal allow code of this schema and of newer ones."""
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("UPDATE about SET value = ? WHERE key = 'oldest'", (str(oldest),))


async def test_a_run_stops_at_the_renewal_of_its_lease(tmp_path: Path):
    """At the next renewal, the run ends with `JournalUpgraded`, and no end is recorded: newer code can resume it."""
    path = tmp_path / "runs.db"
    with closing(SqliteJournal(path, watch=None)) as journal:
        stopped: list[str] = []

        @tool(effect="pure")
        async def linger() -> str:
            """Work for a long time."""
            allow(path, VERSION + 1)
            await renew_now(journal, "r")
            try:
                await asyncio.Event().wait()
            finally:
                stopped.append("stopped")
            return "never"

        adapter = Adapter(ScriptedModel([ToolCall("linger"), "end"]), journal=journal)
        with pytest.raises(JournalUpgraded, match="Install a newer version") as upgraded:
            await adapter.evaluate(Prompt("p", "Do.", tools=[linger]), "go", run_id="r")
        assert (upgraded.value.oldest, stopped) == (VERSION + 1, ["stopped"])
        assert (await journal.runs.get("r")).status == "running"
        with pytest.raises(JournalUpgraded):
            await adapter.evaluate(Prompt("p", "Do."), "go", run_id="other")
        allow(path, VERSION)
        assert [row.record.id for row in await journal.runs.list()] == ["r"]
        assert (await journal.runs.verify()).altered == []
