"""Tests for the audit log and the access log: who did what, and what must not be recorded."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest
from typer.testing import CliRunner

from handrail.cli.commands import app
from handrail.serve.people import People, people_path
from support.passwords import cheap_hashes
from support.serving import Client, serving, signed_in, source

__all__ = ["cheap_hashes"]

pytestmark = pytest.mark.once
SECRET = "correct horse battery"


def by(name: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {name}:{SECRET}"}


async def used(client: Client) -> None:
    """Sign in, run a call and undo it, approve another call, and sign out."""
    page = await signed_in(client, name="ann", password=SECRET)
    await client.say("t", 'call write {"path": "a.txt", "text": "secret text"}', page)
    await client.idle("t", page)
    [change] = (await client.ask("GET", "/threads/t/files", headers=page)).json["changes"]
    await client.ask("POST", f"/threads/t/calls/{change['call_id']}/undo", {}, page)
    await client.say("p", 'call pay {"amount": 5}', page)
    question = await client.asked("p", page)
    given = {"question_id": question["id"], "digest": question["digest"], "value": {"approved": True}}
    assert (await client.ask("POST", "/threads/p/answers", given, page)).status == 200
    await client.idle("p", page)
    await client.ask("POST", "/logout", {}, page)


async def test_what_people_do_is_noted_with_who_when_and_on_what(tmp_path: Path):
    people = People(tmp_path / "people.db")
    people.add("ann", secret=SECRET)
    people.add("ada", ["admin"], SECRET)
    (tmp_path / "files").mkdir()
    async with serving(tmp_path, source(tmp_path / "files"), access_log=tmp_path / "access.jsonl") as client:
        await used(client)
        assert (await client.ask("GET", "/audit", headers=by("ann"))).kind == "RoleMissing"
        said = await client.ask("GET", "/audit", headers=by("ada"))
        entries = [json.loads(line) for line in said.body.splitlines()]
        assert [each["number"] for each in entries] == sorted(each["number"] for each in entries)
        later = await client.ask("GET", f"/audit?after={entries[2]['number']}", headers=by("ada"))
        assert json.loads(later.body.splitlines()[0])["number"] == entries[3]["number"]
        assert (await client.ask("GET", "/audit?after=x", headers=by("ada"))).kind == "BadNumber"
    people.close()
    mine = [each for each in entries if each["who"] == "ann" and each["action"] != "saw"]
    assert [each["action"] for each in mine] == [
        "signed in", "sent a message", "undid", "sent a message", "answered", "signed out"
    ]  # fmt: skip
    undid, answered = mine[2], mine[4]
    assert (undid["thread"], bool(undid["call"])) == ("t", True)
    assert (answered["thread"], answered["outcome"], len(answered["digest"]) > 20) == ("p", "answered", True)
    assert {"thread": "t"}.items() <= next(each for each in entries if each["action"] == "saw").items()
    assert all(each["at"].endswith("Z") and each["address"] == "127.0.0.1" for each in mine)
    lines = [json.loads(line) for line in (tmp_path / "access.jsonl").read_text().splitlines()]
    assert stat.S_IMODE((tmp_path / "access.jsonl").stat().st_mode) == 0o600
    assert {"who": "ann", "method": "POST", "route": "/threads/{id}/messages", "status": 202}.items() <= next(
        each for each in lines if each["route"] == "/threads/{id}/messages"
    ).items()
    written = (tmp_path / "access.jsonl").read_text() + json.dumps(entries)
    for private in (SECRET, "secret text", "amount"):
        assert private not in written


async def test_a_refused_action_is_not_noted_as_done(tmp_path: Path):
    people = People(tmp_path / "people.db")
    people.add("ann", secret=SECRET)
    async with serving(tmp_path) as client:
        await client.ask("POST", "/threads/t/calls/none/undo", {}, by("ann"))
        await client.ask("GET", "/threads/none", headers=by("ann"))
    assert people.audit() == []
    people.close()


def test_the_command_exports_json_lines_and_manages_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)

    def run(*words: str, code: int = 0, given: str = "") -> str:
        done = CliRunner().invoke(app, [*words, "--journal", "runs.db"], input=given)
        assert done.exit_code == code, (done.output, done.exception)
        return done.output

    assert "no audit log" in " ".join(run("audit", code=2).split())
    added = run("users", "add", "ann", "--role", "approver", "--role", "finance")
    assert "Added ann with roles: approver, finance." in added
    token = added.partition("not be shown again: ")[2].split()[0]
    assert len(token) == 32
    run("users", "add", "bob", "--password", given=f"{SECRET}\n")
    assert "12 characters" in " ".join(
        run("users", "add", "cid", "--password", given="short\n", code=2).split()
    )
    path = people_path(Path("runs.db"))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    people = People(path)
    assert people.verify("ann", token) is not None
    assert people.verify("bob", SECRET) is not None
    session = people.sign_in("ann", host="h", issuer="people", address="192.0.2.7")
    people.sign_in("ann", host="h", issuer="people", address="192.0.2.8")
    people.close()
    listed = run("users", "list")
    assert "ann  approver, finance  2 sessions" in listed
    assert "bob  user  0 sessions" in listed
    assert "1 session ended" in run("users", "revoke", session.id)
    assert "1 session ended" in run("users", "revoke", "ann")
    assert "has no session" in " ".join(run("users", "revoke", "ann", code=2).split())
    assert "Removed bob." in run("users", "remove", "bob")
    assert "no user 'bob'" in " ".join(run("users", "remove", "bob", code=2).split())
    entries = [json.loads(line) for line in run("audit").splitlines()]
    assert [each["action"] for each in entries] == [
        "user added", "user added", "sessions revoked", "sessions revoked", "user removed"
    ]  # fmt: skip
    assert token not in str(entries)
    assert run("audit", "--after", str(entries[3]["number"])).count("\n") == 1
    assert run("audit", "--who", "nobody") == ""
