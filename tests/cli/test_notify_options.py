"""Tests for what operators set on the command line: addresses, of which nothing shows more than the host, and bad ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from handrail.cli.commands import app
from handrail.notify import Address
from handrail.serve.people import People, people_path
from support.passwords import cheap_hashes

__all__ = ["cheap_hashes"]

HOOK = "https://hooks.example/T0/s3cret"


def run(*words: str, code: int = 0) -> str:
    done = CliRunner().invoke(app, [*words, "--journal", "runs.db"])
    assert done.exit_code == code, (done.output, done.exception)
    return done.output


def test_users_have_addresses_that_nothing_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    added = run(
        "users", "add", "fay", "--role", "finance", "--notify", HOOK, "--notify", "json://127.0.0.1:1/s3cret"
    )
    secret = added.partition("verifies them with: ")[2].split()[0]
    assert secret.startswith("whsec_")
    assert run("journal", "webhook-secret", HOOK).split() == [secret]
    listed = run("users", "list")
    assert "https://hooks.example/…  json://…" in listed
    with_people = People(people_path(Path("runs.db")))
    assert with_people.addresses() == {"fay": [Address(HOOK), Address("json://127.0.0.1:1/s3cret")]}
    changed = run("users", "notify", "fay", "https://other.example/s3cret")
    assert "fay is told at https://other.example/…." in changed
    assert "https://other.example/…" in run("users", "list")
    assert "not told anything" in run("users", "notify", "fay")
    assert with_people.addresses() == {}
    with_people.close()
    entries = run("audit")
    assert [json.loads(line)["action"] for line in entries.splitlines()] == [
        "user added", "addresses changed", "addresses changed"
    ]  # fmt: skip
    assert "s3cret" not in added + listed + changed + entries


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("users", "add", "gus", "--notify", "hooks.example/s3cret"), "not a URL"),
        (("users", "add", "gus", "--notify", "nosuch://s3cret"), "apprise can't use this URL"),
        (("users", "notify", "gus", "https://u:s3cret@hooks.example/"), "no password"),
        (("users", "notify", "gus", HOOK), "there is no user 'gus'"),
        (("journal", "webhook-secret", "slack://s3cret"), "not a webhook"),
        (("serve", "desk.py", "--port", "0", "--notify", HOOK), "--public-url"),
        (
            ("serve", "desk.py", "--port", "0", "--notify", "nosuch://s3cret", "--public-url", "https://x/"),
            "apprise",
        ),
        (("serve", "desk.py", "--port", "0", "--public-url", "x"), "public URL"),
    ],
)
def test_what_is_wrong_is_said_and_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], problem: str
):
    monkeypatch.chdir(tmp_path)
    Path("desk.py").write_text(
        "from handrail import Agent, ScriptedModel\nagent = Agent(ScriptedModel(['Hi.']), 'Help.')\n"
    )
    run("users", "add", "ann", "--notify", HOOK)
    said = " ".join(run(*words, code=2).split())
    assert problem in said
    assert "s3cret" not in said
    assert "gus" not in run("users", "list")
