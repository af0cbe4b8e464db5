"""`--journal` and `HANDRAIL_JOURNAL` take the URL of a journal in PostgreSQL wherever they take a file."""

import asyncio
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from handrail import PostgresJournal
from handrail.cli.commands import app
from handrail.records import RunRecord
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


@pytest.mark.parametrize("words", [["runs", "list"], ["submit", "app.py", "Hello."], ["users", "list"]])
def test_a_misspelled_url_is_not_a_file(words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "app.py").write_text(
        "from handrail import Agent, ScriptedModel\nagent = Agent(ScriptedModel([]), 'Help.')\n"
    )
    told = CliRunner().invoke(app, [*words, "--journal", "postgressql://ada:secret@db/handrail"])
    assert told.exit_code == 2
    assert "the journal's URL begins with postgressql://, which is not supported" in told.output
    assert "secret" not in told.output
    assert not list(tmp_path.glob("postgres*"))


def test_a_journal_that_cannot_be_opened_is_told_without_its_password(url: str):
    wrong = postgres.schema_url("x", user=postgres.LOCKED_USER, password="not this one")
    told = CliRunner().invoke(app, ["runs", "list", "--journal", wrong])
    assert told.exit_code == 1
    assert "password authentication failed" in told.output
    assert "not this" not in told.output
