"""The program's secrets leave its environment before an app's code runs: neither tools nor their commands can read them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path

import psycopg
import pytest

from handrail import PostgresJournal
from handrail.errors import JournalError
from handrail.journal.digest import shared_key
from handrail.journal.postgres import address
from handrail.journal.postgres.address import hold_name, hold_password, parse_url, with_password
from handrail.journal.records import RunRecord
from support import postgres

pytestmark = pytest.mark.once

APP = '''"""A desk whose tool looks for secrets, in its own process and in one that it starts."""
import json, os, pathlib, subprocess, sys
from handrail import Agent, ScriptedModel, ToolCall, ToolContext, tool
from handrail.messages import ToolMessage

at_import = dict(os.environ)

@tool(effect="read")
def spy(context: ToolContext) -> str:
    """Look for secrets."""
    child = subprocess.run([sys.executable, "-c", "import os; print(dict(os.environ))"], capture_output=True, text=True)
    places = {"import": at_import, "tool": dict(os.environ), "child": child.stdout,
              "proc": pathlib.Path("/proc/self/environ").read_bytes()}
    return json.dumps([name for name, place in places.items() if "hidden-" in str(place)])

def play(request):
    last = request.messages[-1]
    return last.results[-1].text if isinstance(last, ToolMessage) else ToolCall("spy", {})

agent = Agent(ScriptedModel(play), "Help.", tools=[spy])
'''
SECRETS = {
    "HANDRAIL_KEY": "hidden-key-of-the-journal",
    "PGPASSWORD": "hidden-password",
    "HANDRAIL_TOKEN": "hidden-token-of-the-server",
    "HANDRAIL_OIDC_SECRET": "hidden-client-secret",
    "HANDRAIL_DISPATCH_URL": "postgresql://ada:hidden-too@nowhere/db",
}


def handrail(folder: Path, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "handrail", *arguments],
        cwd=folder,
        env={**os.environ, "XDG_STATE_HOME": str(folder / "state"), **env},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("command", ["run", "chat"])
def test_a_tool_finds_no_secret_of_the_program(tmp_path: Path, command: str):
    """Neither the variables nor the memory that Linux shows as the environment have them, not even while the app is imported."""
    (tmp_path / "desk.py").write_text(APP)
    given = (command, "desk.py", *(["go"] if command == "run" else []), "--journal", "runs.db")
    program = [sys.executable, "-m", "handrail", *given]
    env = {**os.environ, **SECRETS, "XDG_STATE_HOME": str(tmp_path / "state")}
    ended = subprocess.run(
        program, cwd=tmp_path, env=env, input="go\n", capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr
    assert "[]" in ended.stdout
    # the key is used all the same: another key does not open the journal
    said = handrail(tmp_path, "runs", "list", "--journal", "runs.db", HANDRAIL_KEY="another key of a journal")
    assert "not written with this key" in said.stderr
    said = handrail(tmp_path, "runs", "list", "--journal", "runs.db", **SECRETS)
    assert said.returncode == 0, said.stderr


@pytest.mark.parametrize("how", ["password", "url"])
def test_a_command_uses_a_password_that_left_the_environment(tmp_path: Path, how: str):
    """Neither PGPASSWORD nor the password in HANDRAIL_JOURNAL is found by a tool, and the journal is opened with it."""
    (tmp_path / "desk.py").write_text(APP.replace("hidden-", postgres.PASSWORD))
    password = postgres.PASSWORD if how == "url" else ""
    env = {
        "HANDRAIL_JOURNAL": _locked_url(tmp_path, password),
        "HANDRAIL_KEY": postgres.KEY,
        **({} if how == "url" else {"PGPASSWORD": postgres.PASSWORD}),
    }
    said = handrail(tmp_path, "run", "desk.py", "go", **env)
    assert (said.returncode, said.stdout.strip()) == (0, "[]"), said.stderr


URL = "postgresql://ada:hidden-word@127.0.0.1:9/x"


@pytest.mark.usefixtures("nothing_held")
@pytest.mark.parametrize(
    "name",
    [
        URL.replace("postgresql", "POSTGRESQL"),
        f" {URL}",
        URL.replace(":9/", ":99999/"),
        URL.replace(":9/", ":9,localhost:9/"),
        "postgresql://ada@127.0.0.1:9/x?PASSWORD=hidden-word",
        "postgresql://ada@127.0.0.1:9/x?pass=hidden-word",
        URL.replace("//", "/"),
        URL.removeprefix("postgresql:"),
        URL.removeprefix("postgresql://"),
        "mysql://ada:hidden-word@db/x",
        "host=127.0.0.1 user=ada password = hidden-word",
    ],
)
def test_an_address_whose_password_can_not_be_told_apart_is_refused(name: str):
    """The error does not contain the password."""
    with pytest.raises(JournalError) as refused:
        hold_name(name)
    assert "hidden-" not in str(refused.value)


@pytest.mark.parametrize("journal", [f" {URL}", f"{URL}?PASSWORD=hidden-too"])
def test_a_journal_that_can_not_be_read_is_refused_before_the_app_is_loaded(tmp_path: Path, journal: str):
    """The variable is named, and its value is neither shown nor taken for a file."""
    (tmp_path / "desk.py").write_text("open('loaded', 'w').close()\n" + APP)
    said = handrail(tmp_path, "run", "desk.py", "go", HANDRAIL_JOURNAL=journal)
    assert said.returncode == 2
    assert "HANDRAIL_JOURNAL" in said.stderr
    assert "hidden-" not in said.stdout + said.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["desk.py"]


@pytest.mark.usefixtures("nothing_held")
@pytest.mark.parametrize("name", ["runs.db", "/a b/é=1/x@y:z.db", "./a=b", "../postgresql", "C:/runs.db"])
def test_a_plain_path_is_kept(name: str):
    """Only what may be an address is refused."""
    assert hold_name(name) == name


@pytest.mark.usefixtures("nothing_held")
def test_a_lost_connection_is_opened_again_with_the_held_password(tmp_path: Path):
    """libpq reads the variable at each connection, so the password is among the connection's own parameters."""
    url = _locked_url(tmp_path)
    hold_password(postgres.PASSWORD)
    with contextlib.closing(PostgresJournal(url, key_file=str(tmp_path / "key"))) as journal:
        run = RunRecord(id="r", session_id="s", principal="ada", prompt="p", model="m", began_at=1.0)
        asyncio.run(journal.runs.begin(run))
        with psycopg.connect(parse_url(postgres.new_url()).conninfo, autocommit=True) as other:
            ended = "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE usename = %s"
            assert other.execute(ended, (postgres.LOCKED_USER,)).fetchall() != [(0,)]
        assert asyncio.run(journal.runs.get("r")).record.id == "r"


def _locked_url(folder: Path, password: str = "") -> str:
    """Create a journal, and return its URL for the user who needs a password. Its key is in the folder's file `key`."""
    url, user, key = postgres.new_url(), postgres.LOCKED_USER, folder / "key"
    key.write_text(postgres.KEY)
    key.chmod(0o600)
    PostgresJournal(url, key_file=str(key)).close()  # the user may create no schema
    schema = parse_url(url).schema
    with psycopg.connect(parse_url(url).conninfo, autocommit=True) as connection:
        for what in ("SCHEMA", "ALL TABLES IN SCHEMA", "ALL SEQUENCES IN SCHEMA"):
            connection.execute(f'GRANT ALL ON {what} "{schema}" TO {user}')  # pyright: ignore[reportArgumentType, reportCallIssue]  # plain names
    return postgres.schema_url(schema, user=user, password=password)


@pytest.fixture
def nothing_held(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget afterwards what a test gives this process to hold."""
    monkeypatch.setattr(address, "_held_password", "")
    monkeypatch.setattr(address, "_held_urls", {})


@pytest.mark.usefixtures("nothing_held")
def test_a_held_password_is_added_where_a_url_has_none_and_is_never_shown():
    hold_password("p@ss w&rd/é")
    made = parse_url("postgresql://ada@db/x?schema=s&sslmode=require")
    assert made.conninfo == "postgresql://ada@db/x?sslmode=require&password=p%40ss%20w%26rd/%C3%A9"
    assert made.shown == "postgresql://ada@db/x?schema=s&sslmode=require"
    assert made.without_secret("wrong: p@ss w&rd/é") == "wrong: ***"
    assert with_password("postgresql://db/x") == "postgresql://db/x?password=p%40ss%20w%26rd%2F%C3%A9"
    for own in ("postgresql://ada:own@db/x", "postgresql://db/x?password=own"):
        assert "%40" not in parse_url(own).conninfo, "a password in the URL comes first, as for libpq"
        assert with_password(own) == own


@pytest.mark.usefixtures("nothing_held")
def test_a_held_url_is_completed_in_this_process_only():
    shown = hold_name("postgresql://ada:own@db/x?sslpassword=k&schema=s")
    assert shown == "postgresql://ada@db/x?schema=s"
    assert parse_url(shown).conninfo == "postgresql://ada:own@db/x?sslpassword=k"
    assert parse_url("postgresql://ada@other/x?schema=s").secrets == ()


def test_importing_handrail_leaves_the_environment_alone():
    """A process that embeds Handrail keeps its variables, and they are read where they are."""
    code = (
        "import json, os; before = dict(os.environ)\n"
        "import handrail, handrail.cli, handrail.cli.commands, handrail.serve, handrail.journal.digest\n"
        "from handrail.journal.digest import shared_key\n"
        "print(json.dumps([before == dict(os.environ), shared_key('j', None).hex()]))"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **SECRETS},
        capture_output=True,
        text=True,
        check=True,
    )
    is_same, key = json.loads(ran.stdout)
    assert is_same
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HANDRAIL_KEY", SECRETS["HANDRAIL_KEY"])
        assert shared_key("j", None).hex() == key
