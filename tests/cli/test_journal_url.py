"""`--journal` and `HANDRAIL_JOURNAL` accept the URL of a PostgreSQL journal, and refuse URLs of other kinds."""

import asyncio
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from handrail import PostgresJournal
from handrail.cli.commands import app
from handrail.journal.records import RunRecord
from support import postgres


@pytest.fixture
def url(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("HANDRAIL_KEY", postgres.KEY)
    return postgres.new_url()


def test_runs_are_listed_and_verified_by_url(url: str, monkeypatch: pytest.MonkeyPatch):
    journal = PostgresJournal(url)
    run = RunRecord(id="far", session_id="s", principal="ada", prompt="p", model="m", began_at=1.0)
    asyncio.run(journal.runs.begin(run))
    asyncio.run(journal.runs.leave("far", "done"))
    journal.close()
    listed = CliRunner().invoke(app, ["runs", "list", "--json", "--journal", url])
    assert [each["run_id"] for each in json.loads(listed.stdout)["runs"]] == ["far"]
    monkeypatch.setenv("HANDRAIL_JOURNAL", url)
    assert "nothing was altered" in CliRunner().invoke(app, ["runs", "verify"]).stdout


def test_a_journal_that_cannot_be_opened_is_told_without_its_password(url: str):
    wrong = postgres.schema_url("x", user=postgres.LOCKED_USER, password="not this one")
    told = CliRunner().invoke(app, ["runs", "list", "--journal", wrong])
    assert told.exit_code == 1
    assert "password authentication failed" in told.output
    assert "not this" not in told.output


@pytest.mark.parametrize(
    "named", ["mysql://ada:secret@db/x", "PostgreSQL://ada:secret@db/x", "sqlite:///x.db"]
)
@pytest.mark.parametrize("words", [["runs", "list"], ["workspaces", "put", "w", "."]], ids=" ".join)
def test_a_url_of_another_kind_is_not_taken_for_a_file(
    named: str, words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    told = CliRunner().invoke(app, [*words, "--journal", named])
    assert told.exit_code == 2
    assert f"not {named.partition('//')[0]}//... Name a file, or write postgresql://" in told.output
    assert "secret" not in told.output
    assert list(tmp_path.iterdir()) == []
