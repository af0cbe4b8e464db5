"""Laws that accounts obey, wherever they are kept: in memory, in a file, or in a journal in PostgreSQL, which several servers share."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import psycopg
import pytest
from typer.testing import CliRunner

from handrail import PostgresJournal
from handrail.cli.commands import app
from handrail.errors import DefinitionError, JournalAltered, JournalError
from handrail.journal.postgres import accounts as postgres_accounts
from handrail.journal.postgres.address import parse_url
from handrail.notify import Address
from handrail.serve.limits import Limits
from handrail.serve.people import VERSION, People
from handrail.serve.principals import Principals
from support import PATIENCE, postgres
from support.passwords import cheap_hashes

__all__ = ["cheap_hashes"]

SECRET = "correct horse battery"
AT = {"host": "h", "issuer": "people"}
POSTGRES = pytest.param("postgres", marks=pytest.mark.once)
"""PostgreSQL is tested under one Python version only, because it starts slowly."""

Opening = Callable[[], People]


@pytest.fixture
def url(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setenv("HANDRAIL_KEY", postgres.KEY)
    # Only `refresh` and notices make a process read again, however slow this machine is.
    monkeypatch.setattr(postgres_accounts, "_FRESH_SECONDS", PATIENCE)
    monkeypatch.setattr(postgres_accounts, "_PATIENCE", PATIENCE)
    found = postgres.borrow_url()
    yield found
    postgres.give_back(found)


@pytest.fixture(params=["memory", "file", POSTGRES])
def opening(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Opening]:
    """Provide a function that opens the same accounts again, as if by another process. In memory, there is only one."""
    with ExitStack() as during:
        if request.param == "memory":
            only = during.enter_context(closing(People()))
            yield lambda: only
        elif request.param == "file":
            yield lambda: during.enter_context(closing(People(tmp_path / "people.db")))
        else:
            found = request.getfixturevalue("url")
            yield lambda: People.of(during.enter_context(closing(PostgresJournal(found))), tmp_path / "no.db")


def names(people: People) -> list[tuple[str, list[str]]]:
    return [(name, sorted(roles)) for name, roles, _ in people.list()]


# --- laws -----------------------------------------------------------------------------------------------


def test_what_one_process_changes_counts_in_the_others(opening: Opening):
    """Users, their votes, secrets and sessions: the others read the change when it matters, which is before a vote and a sign-in."""
    here, there = opening(), opening()
    assert (names(there), there.has_users()) == ([], False)
    assert here.who_may_vote(None, "ann") == {}
    there.add("fay", ["finance"], SECRET)
    there.add("ann", ["user"], SECRET)
    fay = there.find("fay")
    assert fay is not None
    assert here.who_may_vote("finance", "ann") == {"fay": fay.since}
    assert here.who_may_vote("finance", "fay") == {}
    assert here.verify("fay", SECRET) == fay
    assert here.verify("fay", "x") is None
    assert names(here) == [("ann", ["user"]), ("fay", ["approver", "finance"])]
    with pytest.raises(DefinitionError, match="already a user 'fay'"):
        here.add("fay")
    assert there.remove("fay")
    assert not here.remove("fay")
    assert here.who_may_vote("finance", "ann") == {}
    assert here.verify("fay", SECRET) is None
    assert (here.find("fay"), names(here)) == (None, [("ann", ["user"])])


def test_a_user_who_is_added_again_has_another_account(opening: Opening):
    here, there = opening(), opening()
    here.add("fay", ["finance"], SECRET)
    first = here.who_may_vote(None, "ann")
    there.remove("fay")
    there.add("fay", ["finance"], "another horse battery")
    second = here.who_may_vote(None, "ann")
    assert second.keys() == first.keys()
    assert second["fay"] > first["fay"]
    assert here.verify("fay", SECRET) is None


def test_a_session_is_valid_in_every_process_until_one_ends_it(opening: Opening):
    here, there = opening(), opening()
    here.add("ann", ["user"], SECRET)
    made = [here.sign_in("ann", address="a", **AT) for _ in range(4)]
    made.append(here.sign_in("bob", address="a", **AT))

    def valid() -> list[bool]:
        return [there.session_of(each.secret, each.key, **AT) is not None for each in made]

    def ended(number: int) -> bool:
        """Wait until a notice has told `there` about a session that has ended."""
        before = threading.Event()
        while there.session_of(made[number].secret, made[number].key, **AT) is not None:
            before.wait(0.01)
        return True

    there.generation()  # a server asks for it, and then listens
    assert valid() == [True] * 5
    assert there.session_of(made[0].secret, made[1].key, **AT) is None
    assert there.session_of(made[0].secret, made[0].key, host="other", issuer="people") is None
    assert [each.name for each in there.sessions()] == ["ann"] * 4 + ["bob"]
    assert here.revoke(id=made[0].id) == 1
    assert ended(0)
    assert valid() == [False, True, True, True, True]
    assert there.ends_at(made[0].id) == 0.0 < there.ends_at(made[1].id)
    assert here.remove("ann")
    assert ended(1)
    assert valid() == [False] * 4 + [True]
    here.add("ann", ["user"], SECRET)
    assert valid() == [False] * 4 + [True]
    assert here.revoke() == 1


def test_one_of_several_processes_adds_a_user(opening: Opening):
    everybody = [opening() for _ in range(4)]
    added: list[People] = []

    def add(people: People) -> None:
        try:
            people.add("ann", ["user"], SECRET)
        except DefinitionError:
            return
        added.append(people)

    threads = [threading.Thread(target=add, args=(people,)) for people in everybody]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert len(added) == 1
    assert [names(people) for people in added] == [[("ann", ["user"])]]


def test_the_audit_log_of_all_processes_is_one(opening: Opening):
    here, there = opening(), opening()
    here.note("ann", "signed in", "a", session="1")
    list(here.audit())
    there.note("", "user removed", user="ann")
    found = list(there.audit())
    assert [(each["who"], each["action"]) for each in found] == [("ann", "signed in"), ("", "user removed")]
    assert (found[0]["session"], found[1]["user"]) == ("1", "ann")
    assert list(here.audit(after=found[0]["number"])) == found[1:]
    assert list(here.audit(who="ann")) == list(here.audit(limit=1)) == found[:1]


# --- PostgreSQL -----------------------------------------------------------------------------------------


def execute(url: str, *statements: str) -> list[Any]:
    """Execute statements as another role of the database could, and return the rows of the last one."""
    address = parse_url(url)
    with psycopg.connect(address.conninfo, autocommit=True) as connection:
        connection.execute(f'SET search_path = "{address.schema}"')  # pyright: ignore[reportArgumentType, reportCallIssue]  # a plain name
        found = [connection.execute(each) for each in statements][-1]  # pyright: ignore[reportArgumentType, reportCallIssue]  # a test's own text
        return found.fetchall() if found.description else []


FORGED = {
    "other roles": "UPDATE records SET body = replace(encode(body, 'escape'), 'user', 'admi')::bytea WHERE chain = 'users' AND key = 'eve'",
    "another name": "UPDATE records SET key = 'eve' WHERE chain = 'users' AND key = 'ann'",
    "not removed": "DELETE FROM records WHERE chain = 'users' AND kind = 'removed'",
    "one user less": "DELETE FROM records WHERE chain = 'users' AND link = 1",
    "added again": """INSERT INTO records SELECT number + 1000000, chain, link + 10, kind, key, at, session_id, body, mac, state, begins
        FROM records WHERE chain = 'users' AND key = 'fay' AND kind = 'added'""",
    "the end": "DELETE FROM records WHERE chain = 'users' AND link = 4",
    "all": "DELETE FROM records WHERE chain = 'users'",
}


@pytest.mark.once
@pytest.mark.parametrize("statement", FORGED.values(), ids=FORGED)
async def test_whoever_writes_to_the_table_of_users_makes_nobody_a_user(url: str, statement: str):
    """A user who was changed, copied, put back or taken away is noticed by every process: nobody signs in or votes any more."""
    with closing(PostgresJournal(url)) as journal:
        people = People.of(journal, Path("no.db"))
        people.add("ann", ["admin"], SECRET)
        people.add("fay", ["finance"], SECRET)
        people.remove("fay")
        people.add("eve", ["user"], SECRET)
        assert (await journal.runs.verify()).altered == []
        execute(url, statement)
        for act in (
            lambda: people.verify("eve", SECRET),
            lambda: people.who_may_vote(None, "ann"),
            people.list,
            lambda: people.add("max"),
        ):
            with pytest.raises(JournalAltered, match="list of users"):
                act()
        assert "list of users" in str((await journal.runs.verify()).altered[0])


@pytest.mark.once
@pytest.mark.parametrize("change", ["name = 'ann'", "ends_at = ends_at + 1", "id = 'x'", "secret = 'x'"])
async def test_whoever_writes_to_the_table_of_sessions_has_none(url: str, change: str, caplog: Any):
    with closing(PostgresJournal(url)) as journal:
        people = People.of(journal, Path("no.db"))
        people.add("eve", ["user"], SECRET)
        made = people.sign_in("eve", address="a", **AT)
        execute(url, f"UPDATE sign_ins SET {change}")
        people.who_may_vote(None, "eve")
        assert people.session_of(made.secret, made.key, **AT) is None
        assert people.sessions() == []
        [altered] = (await journal.runs.verify()).altered
        assert altered.chain == "sign-in"
    assert "something other than Handrail wrote its row" in caplog.text


@pytest.mark.once
@pytest.mark.parametrize(
    ("statement", "entry"),
    [
        ("UPDATE audit SET who = 'max' WHERE number = 2", 2),
        ("DELETE FROM audit WHERE number = 1", 1),
        ("DELETE FROM audit WHERE number IN (2, 3)", 2),
        ("UPDATE audit SET number = number + 5 WHERE number = 2", 2),
        (
            "INSERT INTO audit SELECT number + 4, at, who, action, address, details, mac FROM audit WHERE number = 1",
            5,
        ),
    ],
    ids=["changed", "first removed", "removed", "moved", "copied"],
)
async def test_an_altered_entry_of_the_audit_log_is_named(url: str, statement: str, entry: int):
    """Both to those who read the log and to those who verify the journal. The entries after it can still be read."""
    with closing(PostgresJournal(url)) as journal:
        people = People.of(journal, Path("no.db"))
        for who in ("eve", "ann", "fay", "gus"):
            people.note(who, "signed in")
        assert [each["number"] for each in people.audit()] == [1, 2, 3, 4]
        assert (await journal.runs.verify()).altered == []
        execute(url, statement)
        with pytest.raises(JournalAltered, match=f"entry {entry} of the audit log") as altered:
            people.audit()
        assert (altered.value.chain, altered.value.id) == ("audit", str(entry))
        assert str((await journal.runs.verify()).altered[0]) == str(altered.value)
        execute(url, "DELETE FROM audit WHERE number > 4")
        assert [each["who"] for each in people.audit(after=3)] == ["gus"]


@pytest.mark.once
def test_the_entries_of_many_processes_have_consecutive_numbers(url: str):
    """Whoever continues to read after an entry misses none, because an entry with a lower number is never added later."""
    with ExitStack() as during:
        everybody = [
            People.of(during.enter_context(closing(PostgresJournal(url))), Path("no.db")) for _ in range(4)
        ]
        for number in range(10):
            for each in everybody:
                each.note("ann", "signed in", session=str(number))
        for each in everybody:
            list(each.audit())  # its own entries come first
        found = everybody[0].audit()
    assert [each["number"] for each in found] == list(range(1, 41))
    assert sorted(each["session"] for each in found) == sorted(
        str(number) for number in range(10) for _ in everybody
    )


@pytest.mark.once
def test_an_entry_waits_for_no_vacuum_and_needs_only_the_right_to_insert(url: str):
    """PostgreSQL vacuums the table now and then, with this lock. An administrator may forbid changing and removing entries."""
    role = f"appends_{parse_url(url).schema}"
    execute(
        url,
        f"CREATE ROLE {role} LOGIN",
        f"GRANT ALL ON SCHEMA {parse_url(url).schema} TO {role}",
        f"GRANT ALL ON ALL TABLES IN SCHEMA {parse_url(url).schema} TO {role}",
        f"REVOKE UPDATE, DELETE, TRUNCATE ON audit FROM {role}",
    )
    address = parse_url(url)
    with (
        psycopg.connect(address.conninfo) as vacuum,
        closing(PostgresJournal(url.replace("tests@", f"{role}@"))) as journal,
    ):
        vacuum.execute(f'LOCK TABLE "{address.schema}".audit IN SHARE UPDATE EXCLUSIVE MODE')  # pyright: ignore[reportArgumentType, reportCallIssue]  # a plain name
        people = People.of(journal, Path("no.db"))
        people.note("ann", "signed in")
        assert [each["who"] for each in people.audit()] == ["ann"]
    execute(url, f"DROP OWNED BY {role}", f"DROP ROLE {role}")


@pytest.mark.once
def test_users_of_a_file_are_copied_to_the_database(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
):
    """They keep their roles, tokens and passwords. Until then, the users in the file count nowhere, and a warning says so."""
    monkeypatch.chdir(tmp_path)

    def run(*words: str, journal: str, code: int = 0) -> str:
        done = CliRunner().invoke(app, ["users", *words, "--journal", journal])
        assert done.exit_code == code, done.output
        return " ".join(done.output.split())

    assert "no users" in run("list", journal="runs.db")
    said = run("add", "ann", "--role", "finance", journal="runs.db")
    token = said.partition("not be shown again: ")[2].split()[0]
    assert "Restart servers" in said
    assert "Restart servers" not in run("add", "eve", journal="runs.db")
    run("add", "bob", journal="runs.db")
    run("remove", "eve", journal="runs.db")
    file = tmp_path / "runs.people.db"
    with closing(PostgresJournal(url)) as journal:
        people = People.of(journal, file)
        assert not people.has_users()
        assert f"handrail users copy {file}" in caplog.text
        caplog.clear()
        people.add("bob", ["admin"], SECRET)
        said = run("copy", "runs.db", journal=url)
        assert ("Added ann." in said, "Left bob" in said, "eve" in said) == (True, True, False)
        run("copy", str(file), journal=url)
        people = People.of(journal, file)
        assert names(people) == [("ann", ["approver", "finance"]), ("bob", ["admin"])]
        assert people.verify("ann", token) == people.find("ann")
        assert people.verify("bob", SECRET) is not None
        assert [(each["action"], each["user"]) for each in people.audit()] == [("user added", "ann")]
        assert caplog.text == ""
    assert "no file" in run("copy", "none.db", journal=url, code=2)
    assert not (tmp_path / "none.people.db").exists()


@pytest.mark.once
def test_a_database_that_does_not_answer_stops_no_server(url: str, monkeypatch: pytest.MonkeyPatch):
    """A request that needs the users fails after a while. The next one fails at once, so the event loop is not stopped again."""
    with closing(PostgresJournal(url)) as journal:
        people = People.of(journal, Path("no.db"))
        people.add("ann", ["user"], SECRET)
        principals = Principals(people, limits=Limits())
        monkeypatch.setattr(postgres_accounts, "_PATIENCE", 0.1)
        address = parse_url(url)
        with psycopg.connect(address.conninfo) as other:
            other.execute(f'LOCK TABLE "{address.schema}".records')  # pyright: ignore[reportArgumentType, reportCallIssue]  # a plain name
            for _ in range(2):
                journal.accounts.refresh()
                with pytest.raises(JournalError, match="does not answer") as silent:
                    principals.may_run("ann")
                assert silent.value.is_lost
        monkeypatch.setattr(postgres_accounts, "_PATIENCE", PATIENCE)
        journal.accounts.refresh()
        assert principals.may_run("ann")


def test_a_file_of_the_first_version_gets_addresses(tmp_path: Path):
    """Its users stay. A file of version 1 that was altered is refused all the same."""
    path = tmp_path / "people.db"
    with closing(People(path)) as people:
        people.add("ann", ["user"], SECRET)
    with closing(sqlite3.connect(path)) as file:
        file.execute("DROP TABLE addresses")
        file.execute("PRAGMA user_version = 1")
    for _ in range(2):
        with closing(People(path)) as people:
            assert people.verify("ann", SECRET) is not None
            people.tell_at("ann", [Address("https://hooks.example/")])
            assert not people.tell_at("bob", [Address("https://hooks.example/")])
            assert list(people.addresses()) == ["ann"]
    with closing(sqlite3.connect(path)) as file:
        assert file.execute("PRAGMA user_version").fetchone() == (VERSION,)
        file.execute("PRAGMA user_version = 1")
    with pytest.raises(DefinitionError, match="'addresses' was added"):
        People(path)


def test_addresses_are_those_of_the_account(opening: Opening):
    """They are shared, replaced and copied, and go with their user."""
    one, other = opening(), opening()
    first, second = Address("https://hooks.example/1"), Address("slack://s3cret/2")
    one.add("ann", ["user"], SECRET, [first, second])
    since = one.list()[0][2]
    other.who_may_vote(None, "")  # reads the users again
    assert other.addresses() == {"ann": [first, second]}
    assert one.tell_at("ann", [second])
    assert not one.tell_at("bob", [second])
    other.who_may_vote(None, "")
    assert other.addresses() == {"ann": [second]}
    assert one.list()[0][2] == since, "the account is the same, so its votes count"
    with closing(People()) as copied:
        copied.copy(one)
        assert copied.addresses() == {"ann": [second]}
    assert one.remove("ann")
    one.add("ann", ["user"], SECRET)
    assert one.addresses() == {}
