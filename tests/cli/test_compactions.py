"""Tests of what the terminal shows about a compacted conversation: while it runs, and of a recorded run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from handrail import Agent, Compact, Session, SqliteJournal, ToolCall
from handrail.cli.activity import Activity
from handrail.cli.runs_commands import app
from handrail.clock import SYSTEM_CLOCK
from handrail.events import ConversationCompacted
from handrail.messages import Usage
from support.windows import Provider, in_turn, look


def read(usage: Usage | None) -> str:
    """Return a request's input tokens as they are shown. Some of them were in the cache."""
    assert usage is not None
    assert 0 < usage.cached < usage.input
    return f"{usage.input:,}, {usage.cached:,}, {usage.cache_writes:,}"


@pytest.mark.parametrize("by", ["trim", "summary"])
def test_a_compaction_is_one_line_of_a_run_and_of_the_record(tmp_path: Path, by: Any):
    """Both say what the request before it and that for the summary have read from the cache; the record also says it of the request after it."""
    provider = Provider(in_turn(*[ToolCall("look", {"words": 1_200})] * 6, "done", summary="They looked."))
    journal = SqliteJournal(tmp_path / "runs.db")
    session, activity = Session(), Activity(SYSTEM_CLOCK)
    lines: list[str] = []
    session.dispatcher.subscribe(
        ConversationCompacted, lambda fact: lines.extend(each.plain for each in activity.update(fact))
    )
    agent = Agent(provider.model, "Be brief.", tools=[look], compact=Compact(by=by))
    agent.run("Go.", session=session, journal=journal, run_id="tea").wait()
    shown = CliRunner().invoke(app, ["show", "tea", "--journal", str(tmp_path / "runs.db")]).output
    (compaction,) = [fact.compaction for fact in session[ConversationCompacted].all()]
    first, second = lines
    named = " (summary)" if by == "summary" else ""
    assert first == f"· conversation compacted{named}: of 9 messages, 0 not sent to the model and 3 shortened"
    before = read(compaction.before)
    assert second.startswith(f"· tokens in, from the cache, into the cache: before {before}")
    if by == "summary":
        assert second.endswith(f" · summary {read(compaction.spent)}")
    flat = " ".join(shown.replace("│", "").split())
    assert f"{first[2:]} {second[2:]} · after " in flat
    assert ("» They looked." in shown) is (by == "summary")
    journal.close()
