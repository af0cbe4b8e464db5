"""`handrail doctor`, on set-ups that work and on broken ones."""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
import subprocess
from collections.abc import Mapping
from pathlib import Path

import psycopg
import pytest
from typer.testing import CliRunner

from handrail.cli import doctor_command
from handrail.cli.commands import app
from support import postgres
from support.killed_postgres import started_server
from support.pgbouncer import pooled_url
from support.programs import HANDRAIL, environment, handrail
from support.reserved_port import reserved_port

pytestmark = pytest.mark.once  # processes and servers do not depend on the Python version

APP = """
from handrail import Agent

agent = Agent("openai:gpt-5", "Help.")
"""
DEMO = """
from handrail import Agent, ScriptedModel

agent = Agent(ScriptedModel(lambda request: "hello"), "Help.")
"""


def findings(folder: Path, *words: str, code: int, **variables: str) -> Mapping[str, tuple[str, str]]:
    """Run the doctor, and return the state and text of each check."""
    result = handrail("doctor", *words, "--json", cwd=folder, env=environment(**variables))
    assert result.returncode == code, (result.stdout, result.stderr)
    found = json.loads(result.stdout)
    assert found["exit_code"] == code
    return {each["check"]: (each["state"], each["text"]) for each in found["findings"]}


def recorded(folder: Path) -> Path:
    """Record a run of an app in the folder, and return the journal."""
    (folder / "desk.py").write_text(DEMO)
    journal = folder / "runs.db"
    assert not handrail("run", "desk.py", "Hello.", "--journal", str(journal), cwd=folder).returncode
    return journal


def rows(journal: Path) -> list[str]:
    with contextlib.closing(sqlite3.connect(journal)) as connection:
        return list(connection.iterdump())


# --- set-ups that work ---


def test_an_app_whose_set_up_works_has_no_problem_and_nothing_is_changed(tmp_path: Path) -> None:
    journal = recorded(tmp_path)
    before = rows(journal)
    found = findings(tmp_path, "desk.py", "--journal", str(journal), code=0)
    assert {state for state, _ in found.values()} == {"ok"}
    assert set(found) == {"python", "extras", "sandbox", "key", "journal", "app", "models"}
    assert "1 run verified" in found["journal"][1]
    assert "runs.db.key" in found["key"][1]
    assert rows(journal) == before


def test_a_journal_that_does_not_exist_is_not_created(tmp_path: Path) -> None:
    found = findings(tmp_path, "--journal", "sub/runs.db", code=0)
    assert found["journal"][0] == "ok"
    assert "does not exist yet" in found["journal"][1]
    assert not list(tmp_path.iterdir())


def test_a_key_that_the_first_run_would_refuse_is_a_problem_before_it(tmp_path: Path) -> None:
    missing = findings(tmp_path, "--journal", "runs.db", HANDRAIL_KEY_FILE=str(tmp_path / "none"), code=1)
    assert missing["key"][0] == "problem"
    found = findings(tmp_path, "--journal", "runs.db", HANDRAIL_KEY=postgres.KEY, code=0)
    assert (found["key"][0], found["journal"][0]) == ("ok", "ok")


def test_an_empty_database_is_not_given_a_journal(tmp_path: Path) -> None:
    url = postgres.new_url()
    found = findings(tmp_path, HANDRAIL_JOURNAL=url, HANDRAIL_KEY=postgres.KEY, code=0)
    assert "no journal yet" in found["journal"][1]
    assert "of 200 connections in use" in found["database"][1]
    assert found["clock"][0] == "ok"
    again = findings(tmp_path, HANDRAIL_JOURNAL=url, HANDRAIL_KEY=postgres.KEY, code=0)
    assert "no journal yet" in again["journal"][1]


def test_people_read_one_line_for_each_check(tmp_path: Path) -> None:
    result = handrail("doctor", "--journal", "runs.db", cwd=tmp_path)
    lines = result.stdout.splitlines()
    assert [line.split()[:2] for line in lines[:-1]] == [
        ["ok", each] for each in ("python", "extras", "sandbox", "journal", "models")
    ]
    assert lines[-1] == "Everything that is needed works."


# --- set-ups that are broken ---


def test_a_key_that_is_too_short(tmp_path: Path) -> None:
    journal = recorded(tmp_path)
    state, text = findings(tmp_path, "--journal", str(journal), HANDRAIL_KEY="short", code=1)["key"]
    assert state == "problem"
    assert "openssl rand -hex 32" in text


def test_a_key_that_is_not_the_journals(tmp_path: Path) -> None:
    journal = recorded(tmp_path)
    state, text = findings(tmp_path, "--journal", str(journal), HANDRAIL_KEY="x" * 32, code=1)["journal"]
    assert state == "problem"
    assert "HANDRAIL_KEY" in text


def test_a_journal_of_a_newer_version(tmp_path: Path) -> None:
    journal = recorded(tmp_path)
    with contextlib.closing(sqlite3.connect(journal, isolation_level=None)) as connection:
        connection.execute("UPDATE about SET value = '999' WHERE key IN ('schema', 'oldest')")
    state, text = findings(tmp_path, "--journal", str(journal), code=1)["journal"]
    assert state == "problem"
    assert "999" in text


def test_a_record_that_was_altered(tmp_path: Path) -> None:
    journal = recorded(tmp_path)
    with contextlib.closing(sqlite3.connect(journal, isolation_level=None)) as connection:
        connection.execute("UPDATE runs SET principal = 'mallory'")
    state, text = findings(tmp_path, "--journal", str(journal), code=1)["journal"]
    assert state == "problem"
    assert text.count("handrail runs verify") == 1


def test_of_a_large_journal_only_the_newest_runs_are_verified(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = recorded(tmp_path)
    monkeypatch.setattr(doctor_command, "_MOST_RUNS", 1)
    result = CliRunner().invoke(app, ["doctor", "--journal", str(journal)])
    assert result.exit_code == 0
    assert "the newest 20 runs verified" in result.output


def test_a_database_that_is_down(tmp_path: Path) -> None:
    with reserved_port() as port:
        url = f"postgresql://ann:opensesame@127.0.0.1:{port}/handrail"
        found = findings(tmp_path, HANDRAIL_JOURNAL=url, HANDRAIL_KEY=postgres.KEY, code=1)
    state, text = found["database"]
    assert state == "problem"
    assert str(port) in text
    assert "opensesame" not in str(found)


def test_a_pooler_in_transaction_mode_and_no_key(tmp_path: Path) -> None:
    with pooled_url("transaction") as url:
        found = findings(tmp_path, HANDRAIL_JOURNAL=url, code=1)
    assert found["key"][0] == "problem"
    assert found["database"][0] == "problem"
    assert "pool_mode = session" in found["database"][1]


def test_a_database_whose_connections_are_almost_all_in_use(tmp_path: Path) -> None:
    with started_server() as server, contextlib.ExitStack() as stack:
        for _ in range(165):
            stack.enter_context(psycopg.connect(server.url()))
        found = findings(tmp_path, HANDRAIL_JOURNAL=server.url(), HANDRAIL_KEY=postgres.KEY, code=0)
    assert found["database"][0] == "warning"
    assert "max_connections" in found["database"][1]


def test_a_model_without_its_key_and_an_app_that_can_not_be_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    (tmp_path / "desk.py").write_text(APP)
    (tmp_path / "bad.py").write_text("import nowhere")
    found = findings(tmp_path, "desk.py", "--journal", "runs.db", code=1)
    said = [found.get("models"), found.get("app")]
    assert any(each and each[0] == "problem" and "OPENAI_API_KEY" in each[1] for each in said), said
    state, text = findings(tmp_path, "bad.py", "--journal", "runs.db", code=1)["app"]
    assert state == "problem"
    assert "nowhere" in text


def test_a_machine_without_a_sandbox_is_a_warning_and_with_strict_a_failure(tmp_path: Path) -> None:
    """Commands of an app need the sandbox, but not every app has commands."""
    # In a user namespace that allows no further one, a process without capabilities can't make any.
    limited = (
        "echo 0 > /proc/sys/user/max_user_namespaces && exec setpriv --bounding-set=-all --inh-caps=-all "
    )
    words = " ".join([*HANDRAIL, "doctor", "--journal", "runs.db"])
    for option, code in (("", 0), (" --strict", 1)):
        result = subprocess.run(
            ["unshare", "--map-root-user", "sh", "-c", f"{limited} {words}{option}"],
            cwd=tmp_path,
            env=environment(PYTHONPATH=os.environ.get("PYTHONPATH", "")),
            capture_output=True,
            text=True,
        )
        assert result.returncode == code, result
        assert "warning  sandbox   commands of a Shell are refused" in result.stdout


def test_an_extra_that_is_only_partly_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = [
        "starlette>=1; extra == 'serve'",
        "handrail-missing>=1; extra == 'serve'",
        "nothing; extra == 'other'",
    ]
    monkeypatch.setattr(doctor_command, "requires", lambda name: wanted)
    result = CliRunner().invoke(app, ["doctor", "--journal", str(tmp_path / "runs.db")])
    assert result.exit_code == 0
    assert "pip install 'handrail[NAME]' (serve lacks handrail-missing; other lacks nothing)" in result.output
