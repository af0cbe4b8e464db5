"""Tests for a server's users: how they are stored, what each role allows, and how wrong passwords are slowed down."""

from __future__ import annotations

import asyncio
import contextlib
import re
import sqlite3
import stat
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.requests import Request

from handrail import SqliteJournal
from handrail.errors import DefinitionError
from handrail.serve.limits import Limits
from handrail.serve.people import ACTIONS, ALLOWED, ROLES, SESSION_SECONDS, Action, People
from handrail.serve.principals import Principals
from handrail.serve.refusals import RequestRefused
from handrail.serve.requests import LoginBody
from handrail.serve.sources import PrincipalFiles, folder_name
from support.passwords import COST, cheap_hashes
from support.serving import Client, serving, signed_in, source

__all__ = ["cheap_hashes"]

SECRET = "correct horse battery"


class Clock:
    """A clock that stands still until it is moved."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def now(self) -> datetime:
        return datetime(2026, 5, 31, tzinfo=UTC) + timedelta(seconds=self.seconds)

    def monotonic(self) -> float:
        return self.seconds


# --- the file of users --------------------------------------------------------------------------------


def test_the_file_is_private_and_holds_nothing_that_can_be_used(tmp_path: Path):
    path = tmp_path / "state" / "people.db"
    people = People(path)
    given = people.add("ann", ["approver"])
    made = people.sign_in("ann", host="h", issuer="people", address="a")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    kept = b"".join(file.read_bytes() for file in path.parent.iterdir())
    for secret in (given, made.secret, made.key):
        assert secret.encode() not in kept
    assert b"ann" in kept
    people.close()
    path.chmod(0o640)
    with pytest.raises(DefinitionError, match="chmod 600"):
        People(path)


@pytest.mark.parametrize("name", ["", "local", "a b", "a:b", "../x", "a/b", "-x", "é", "x" * 65])
def test_a_name_that_could_be_taken_for_another_is_refused(name: str):
    with pytest.raises(DefinitionError, match="name"):
        People().add(name)


def test_weak_passwords_bad_roles_and_second_users_are_refused():
    people = People()
    with pytest.raises(DefinitionError, match="at least 12"):
        people.add("ann", secret="short")
    with pytest.raises(DefinitionError, match="can't be a role"):
        people.add("ann", ["Finance Team"])
    people.add("ann")
    with pytest.raises(DefinitionError, match="already"):
        people.add("ann")


def test_everybody_has_a_built_in_role():
    people = People()
    people.add("ann")
    people.add("fay", ["finance"])
    people.add("vic", ["viewer", "finance"])
    assert [(name, sorted(roles)) for name, roles, _ in people.list()] == [
        ("ann", ["user"]),
        ("fay", ["approver", "finance"]),
        ("vic", ["finance", "viewer"]),
    ]
    assert list(people.who_may_vote("finance", "ann")) == ["fay"]
    assert people.who_may_vote("finance", "fay") == {}


def test_a_secret_opens_its_own_name_only_and_not_after_removal():
    people = People()
    people.add("ann", secret=SECRET)
    people.add("bob", secret=SECRET + "!")
    for _ in range(2):  # the second time, the pair is recognised without scrypt
        assert people.verify("ann", SECRET) is not None
    assert people.verify("bob", SECRET) is None
    assert people.verify("eve", SECRET) is None
    assert people.verify("ann", "") is None
    people.remove("ann")
    assert people.verify("ann", SECRET) is None
    people.add("ann", secret="another horse battery")
    assert people.verify("ann", SECRET) is None


def test_a_guess_takes_sixteen_mebibytes():
    """Outside of tests, hashing a password takes 16 MiB of memory, so guessing is expensive. `maxmem` allows it."""
    assert 128 * COST["n"] * COST["r"] * COST["p"] == 16 * 2**20 < COST["maxmem"]


def test_sessions_end_by_time_and_by_revocation():
    clock = Clock()
    people = People(clock=clock)
    one, two = (people.sign_in("ann", host="h", issuer="i", address="a") for _ in range(2))

    def works(made: Any, **other: str) -> bool:
        at = {"host": "h", "issuer": "i", **other}
        return people.session_of(made.secret, made.key, **at) is not None

    assert works(one)
    assert not works(one, host="other")
    assert not works(one, issuer="other")
    assert people.session_of(one.secret, two.key, host="h", issuer="i") is None
    before = people.generation()
    assert people.revoke(id=one.id) == 1
    assert people.generation() != before
    assert (works(one), works(two)) == (False, True)
    clock.seconds = SESSION_SECONDS - 1
    assert works(two)
    clock.seconds = SESSION_SECONDS
    assert not works(two)
    assert people.sessions() == []


def run_sql(path: Path, *statements: str) -> None:
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as database:
        for each in statements:
            database.execute(each)


OTHER_FILES: dict[str, tuple[Sequence[str], str]] = {
    "newer": (["PRAGMA user_version = 99"], "its format has version 99"),
    "without a version": (["PRAGMA user_version = 0"], "it is a database, but not a users file"),
    "a different use": (["PRAGMA application_id = 7"], "not a users file"),
    "a planted trigger": (
        ["CREATE TRIGGER promote AFTER INSERT ON users BEGIN UPDATE users SET roles = '[\"admin\"]'; END"],
        "altered its schema: the trigger 'promote' was added",
    ),
    "a planted view": (["CREATE VIEW more AS SELECT 1"], "the view 'more' was added"),
    "a changed table": (["ALTER TABLE users ADD COLUMN more"], "the table 'users' was changed"),
    "a missing table": (["DROP TABLE audit"], "the table 'audit' was removed"),
}


@pytest.mark.parametrize(("statements", "problem"), OTHER_FILES.values(), ids=OTHER_FILES)
def test_a_file_that_handrail_did_not_write_this_way_is_refused_and_left_alone(
    tmp_path: Path, statements: Sequence[str], problem: str
):
    """A users file with another version, another application id or an altered schema is refused, and its bytes stay the same."""
    path = tmp_path / "people.db"
    with contextlib.closing(People(path)) as people:
        people.add("ann")
    run_sql(path, *statements)
    assert_refused(path, problem)


@pytest.mark.parametrize("mode", ["WAL", "DELETE"])
def test_another_program_s_database_is_refused_and_left_alone(tmp_path: Path, mode: str):
    """Another program's database is refused, and its bytes stay the same."""
    path = tmp_path / "people.db"
    path.touch(0o600)
    run_sql(path, f"PRAGMA journal_mode = {mode}", "CREATE TABLE users (name)", "PRAGMA user_version = 1")
    assert_refused(path, "not a users file")


def test_a_file_that_is_no_database_is_refused_and_left_alone(tmp_path: Path):
    path = tmp_path / "people.db"
    path.touch(0o600)
    path.write_text("name,role\nann,admin\n" * 100)
    assert_refused(path, "it is not a database that can be read")


def test_a_journal_is_no_file_of_users(tmp_path: Path):
    SqliteJournal(tmp_path / "runs.db").close()
    assert_refused(tmp_path / "runs.db", "not a users file")


def assert_refused(path: Path, problem: str) -> None:
    before = path.read_bytes()
    with pytest.raises(DefinitionError, match=re.escape(problem)) as refused:
        People(path)
    assert str(path) in str(refused.value)
    assert "Nothing was changed" in str(refused.value)
    assert path.read_bytes() == before


def test_another_process_s_revocation_is_noticed(tmp_path: Path):
    here, there = People(tmp_path / "people.db"), People(tmp_path / "people.db")
    here.sign_in("ann", host="h", issuer="i", address="a")
    before = here.generation()
    assert here.generation() == before
    there.revoke(name="ann")
    assert here.generation() != before
    here.close()
    there.close()


# --- failed attempts ----------------------------------------------------------------------------------


def request_from(address: str, **headers: str) -> Request:
    given = [(name.encode(), value.encode()) for name, value in {"host": "h", **headers}.items()]
    scope = {"type": "http", "method": "POST", "path": "/login", "headers": given, "client": (address, 1),
             "server": ("127.0.0.1", 80), "scheme": "http", "query_string": b""}  # fmt: skip
    return Request(scope)


async def refusal(principals: Principals, address: str, name: str, password: str) -> str:
    try:
        await principals.sign_in(request_from(address), LoginBody(name=name, password=password))
    except RequestRefused as refused:
        return refused.kind
    return ""


async def test_guesses_sent_at_once_are_counted_like_any_others():
    """Secrets from one address, or for one name, are checked one after the other, so the limit on guesses also holds for a burst."""
    clock = Clock()
    people = People(clock=clock)
    people.add("ann", secret=SECRET)
    principals = Principals(people, limits=Limits(wrong_tokens=2), clock=clock)
    guesses = [*["x"] * 6, SECRET]
    said = await asyncio.gather(*(refusal(principals, "1.1.1.1", "ann", guess) for guess in guesses))
    assert said == [*["SignInWrong"] * 2, *["TooManyWrongTokens"] * 5]
    clock.seconds += 3600
    spread = [refusal(principals, f"2.2.{number}.2", "ann", "x") for number in range(24)]
    assert sorted(await asyncio.gather(*spread))[:20] == ["SignInWrong"] * 20
    assert await refusal(principals, "3.3.3.3", "ann", SECRET) == "TooManyWrongTokens"


async def test_wrong_passwords_are_slowed_by_address_and_by_name_and_logged():
    clock = Clock()
    people = People(clock=clock)
    people.add("ann", secret=SECRET)
    people.add("bob", secret=SECRET)
    principals = Principals(people, limits=Limits(wrong_tokens=2), clock=clock)
    assert [await refusal(principals, "1.1.1.1", "ann", "x") for _ in range(3)] == [
        "SignInWrong",
        "SignInWrong",
        "TooManyWrongTokens",
    ]
    assert await refusal(principals, "1.1.1.1", "ann", SECRET) == "TooManyWrongTokens", (
        "the response shows that the password was right"
    )
    assert await refusal(principals, "2.2.2.2", "ann", SECRET) == "", "others are not locked out"
    clock.seconds += 6
    assert await refusal(principals, "1.1.1.1", "ann", SECRET) == ""
    # wrong attempts from other addresses slow down all attempts for the name
    for number in range(17):
        await refusal(principals, f"3.3.3.{number}", "ann", "x")
    assert await refusal(principals, "4.4.4.4", "ann", "x") == "SignInWrong"
    assert await refusal(principals, "5.5.5.5", "ann", "x") == "SignInWrong"
    assert await refusal(principals, "6.6.6.6", "ann", "x") == "TooManyWrongTokens"
    assert await refusal(principals, "6.6.6.6", "bob", SECRET) == ""
    await refusal(principals, "7.7.7.7", "my password typed as a name", "x")
    entries = people.audit()
    wrong = [entry for entry in entries if entry["action"] == "sign-in refused"]
    assert {entry["who"] for entry in wrong} == {"ann", ""}
    assert "typed" not in str(entries)
    assert SECRET not in str(entries)


# --- roles --------------------------------------------------------------------------------------------

MAY: dict[str, set[Action]] = {
    "viewer": {"see"},
    "user": {"see", "run"},
    "approver": {"see", "run", "vote"},
    "admin": {"see", "run", "vote", "audit"},
}


def headers_of(name: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {name}:{SECRET}"}


def path_of(path: str) -> str:
    for part in ("{id}", "{run_id}", "{call_id:path}", "{approval_id:path}", "{question_id:path}"):
        path = path.replace(part, "x")
    return path


@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize("role", ROLES)
async def test_each_role_may_do_what_the_table_says_and_no_more(tmp_path: Path, role: str, action: Action):
    """Over HTTP, a role may use every endpoint of the actions in its row of the table, and no other endpoint."""
    people = People(tmp_path / "people.db")
    people.add("somebody", [role], SECRET)
    people.close()
    async with serving(tmp_path) as client:
        tried = [each for each in endpoints(client) if each[2] == action]
        assert tried
        for method, path, *_ in tried:
            said = await client.ask(
                method, path_of(path), {} if method == "POST" else None, headers_of("somebody")
            )
            refused = said.status == 403 and said.kind == "RoleMissing"
            assert refused == (action not in MAY[role]), (method, path, said.status, said.body)
    assert ALLOWED[role] == MAY[role]


def endpoints(client: Client) -> Any:
    return client.app.routes.guarded()


async def test_a_role_of_one_s_own_allows_nothing_and_an_unknown_endpoint_is_open_to_nobody(tmp_path: Path):
    people = People(tmp_path / "people.db")
    people.add("vic", ["viewer", "finance"], SECRET)
    people.close()
    async with serving(tmp_path) as client:
        said = await client.ask("POST", "/threads/a/messages", {"text": "hi"}, headers_of("vic"))
        assert (said.status, said.kind) == (403, "RoleMissing")
        assert "user or approver or admin" in said.json["error"]["message"]
        open_paths = {"/", "/assets/{name:path}", "/login", "/health", "/readyz"}
        paths = {each.path for each in client.app.routes.list()}  # type: ignore[attr-defined]
        assert paths - {path for _, path, *_ in endpoints(client)} == open_paths


# --- sessions over HTTP -------------------------------------------------------------------------------


async def test_people_sign_in_see_their_own_and_sign_out(tmp_path: Path):
    people = People(tmp_path / "people.db")
    for name in ("ann", "bob"):
        people.add(name, secret=f"{SECRET} {name}")
    async with serving(tmp_path) as client:
        ann = await signed_in(client, name="ann", password=f"{SECRET} ann")
        bob = await signed_in(client, name="bob", password=f"{SECRET} bob")
        assert (await client.ask("GET", "/about", headers=ann)).json["principal"] == "ann"
        await client.say("t", "hello", ann)
        await client.idle("t", ann)
        assert (await client.ask("GET", "/threads/t", headers=bob)).kind == "ThreadUnknown"
        wrong = await client.ask("POST", "/login", {"name": "bob", "password": f"{SECRET} ann"})
        assert (wrong.status, wrong.kind) == (401, "SignInWrong")
        out = await client.ask("POST", "/logout", {}, ann)
        assert (out.status, "Max-Age=0" in out.headers["set-cookie"]) == (200, True)
        assert (await client.ask("GET", "/about", headers=ann)).status == 401
        assert (await client.ask("GET", "/about", headers=bob)).status == 200
    people.close()


async def test_a_revoked_session_ends_its_open_stream_before_anything_more_is_sent(tmp_path: Path):
    people = People(tmp_path / "people.db")  # stands in for another process, such as `handrail users revoke`
    people.add("ann", secret=SECRET)
    async with serving(tmp_path) as client:
        page = await signed_in(client, name="ann", password=SECRET)
        await client.say("t", "hello", page)
        await client.idle("t", page)
        async with client.stream("GET", "/threads/t/events?follow=1", headers=page) as stream:
            reader = stream.events()
            await anext(reader)
            people.revoke(name="ann")
            await client.say("t", "a secret said later", headers_of("ann"))
            rest = [event async for _, event in reader]
        assert "said later" not in str(rest)
        assert (await client.ask("GET", "/about", headers=page)).status == 401
        people.remove("ann")
        assert (await client.ask("GET", "/about", headers=headers_of("ann"))).status == 401
    people.close()


@pytest.mark.parametrize("kind", ["events", "agent"])
async def test_an_expired_session_ends_its_open_stream_before_anything_more_is_sent(
    tmp_path: Path, kind: str
):
    """Once its session has expired, a stream does not send the end of the run, and opening it again gives a 401."""
    people, clock = People(tmp_path / "people.db"), Clock()
    people.add("ann", secret=SECRET)
    message = {"id": "m", "role": "user", "content": "hold"}
    input: Any = {"threadId": "t", "runId": "r", "messages": [message], "tools": [], "context": []}
    async with serving(tmp_path, clock=clock) as client:
        page = await signed_in(client, name="ann", password=SECRET)
        if kind == "events":
            await client.say("t", "hold", page)
            opened = client.stream("GET", "/threads/t/events?follow=1", headers=page)
        else:
            opened = client.stream("POST", "/agent", input, page)
        async with opened as stream:
            reader = stream.events()
            await anext(reader)
            clock.seconds = SESSION_SECONDS
            await client.ask("POST", "/threads/t/cancel", {}, headers_of("ann"))
            async for _, event in reader:
                assert event["type"] not in ("RUN_FINISHED", "RUN_ERROR")
        again = await client.ask("GET", "/threads/t/events?follow=1", headers=page)
        assert again.status == 401
    people.close()


def test_a_stream_is_not_allowed_if_its_person_was_removed_before_it_opened():
    people = People()
    people.add("ann", secret=SECRET)
    principals = Principals(people, limits=Limits())
    person = people.find("ann")
    assert person is not None
    assert principals.watch(person)()
    people.remove("ann")
    assert not principals.watch(person)()


@pytest.mark.parametrize("change", ["removed", "added again", "without a role"])
@pytest.mark.parametrize("way", ["session", "token"])
async def test_a_person_who_was_removed_or_lost_a_role_reads_no_more_of_an_open_stream(
    tmp_path: Path, change: str, way: str
):
    """That holds however they authenticated, and also if a user with the same name was added in the meantime."""
    people, clock = People(tmp_path / "people.db", clock=Clock()), Clock()
    people.add("ann", ["user", "finance"], SECRET)
    people.add("bob", ["admin"], SECRET)
    async with serving(tmp_path, clock=clock) as client:
        page = headers_of("ann")
        if way == "session":
            page = await signed_in(client, name="ann", password=SECRET)
        await client.say("t", "hold", page)
        async with client.stream("GET", "/threads/t/events?follow=1", headers=page) as stream:
            reader = stream.events()
            await anext(reader)
            if change == "without a role":
                run_sql(tmp_path / "people.db", "UPDATE users SET roles = '[\"user\"]' WHERE name = 'ann'")
            else:
                people.remove("ann")
            if change == "added again":
                people._clock.seconds = 60.0  # type: ignore[attr-defined]  # pyright: ignore[reportPrivateUsage]
                people.add("ann", ["user", "finance"], SECRET)
            thread = client.app.threads.find("ann", "t")
            assert thread is not None
            await thread.cancel()
            async for _, event in reader:
                assert event["type"] not in ("RUN_FINISHED", "RUN_ERROR")
    people.close()


async def test_a_role_that_changed_counts_at_once(tmp_path: Path):
    people = People(tmp_path / "people.db")
    people.add("ann", ["viewer"], SECRET)
    async with serving(tmp_path) as client:
        page = await signed_in(client, name="ann", password=SECRET)
        assert (await client.ask("POST", "/threads/t/messages", {"text": "hi"}, page)).kind == "RoleMissing"
        run_sql(tmp_path / "people.db", "UPDATE users SET roles = '[\"user\"]'")
        await client.say("t", "hi", page)
    people.close()


async def test_a_live_session_is_replaced_only_after_signing_out(tmp_path: Path):
    """Whoever is signed in stays so until they sign out, whatever else their browser is made to send."""
    people = People(tmp_path / "people.db")
    for name in ("ann", "bob"):
        people.add(name, secret=SECRET)
    people.close()
    bob = {"name": "bob", "password": SECRET}
    async with serving(tmp_path) as client:
        page = await signed_in(client, name="ann", password=SECRET)
        refused = await client.ask("POST", "/login", bob, page)
        assert (refused.status, refused.kind) == (409, "SignedIn")
        assert "set-cookie" not in refused.headers
        link = {"link": client.app.principals.new_link("bob")}
        assert (await client.ask("POST", "/login", link, page)).kind == "SignedIn"
        again = await client.ask("POST", "/login", {"name": "ann", "password": SECRET}, page)
        assert again.status == 200, "the same person may sign in again"
        assert (await client.ask("GET", "/about", headers=page)).json["principal"] == "ann"
        assert (await client.ask("POST", "/logout", {}, page)).status == 200
        assert (await client.ask("POST", "/login", bob, page)).status == 200


FOREIGN = [
    {"Origin": "http://127.0.0.1:1"},
    {"Origin": "null"},
    {"Origin": "https://friend.example"},
    {"Sec-Fetch-Site": "same-site"},
    {"Sec-Fetch-Site": "cross-site"},
    {"Content-Type": "text/plain"},
]


@pytest.mark.parametrize("headers", FOREIGN, ids=str)
async def test_no_page_of_another_site_or_port_signs_anybody_in(tmp_path: Path, headers: dict[str, str]):
    people = People(tmp_path / "people.db")
    people.add("ann", secret=SECRET)
    people.close()
    async with serving(tmp_path, origins=["https://friend.example"]) as client:
        said = await client.ask("POST", "/login", {"name": "ann", "password": SECRET}, headers)
        assert said.status in (403, 415)
        assert "set-cookie" not in said.headers


# --- a folder for each principal -----------------------------------------------------------------------


def test_folder_names_tell_every_two_principals_apart():
    names = ["ann", "Ann", "ANN", "a.n", ".ann", "..", ".", "a/b", "a%2fb", "a%2Fb", "a\\b", "ann ", "é", "e\u0301", "x=y", "x%3dy",
             "b" * 300, "b" * 301, "%" * 100, "local", ".handrail", "~root", "-x", "a\u200bb", "ab"]  # fmt: skip
    found = {folder_name(name).casefold() for name in names}
    assert len(found) == len(names)
    for name in found:
        assert not name.startswith(".")
        assert "/" not in name
        assert 0 < len(name.encode()) <= 200
    assert folder_name("ann@example.org") == "ann@example.org"


@given(st.text(min_size=1, max_size=40), st.text(min_size=1, max_size=40))
def test_folder_names_are_injective(one: str, other: str):
    assert (folder_name(one).casefold() == folder_name(other).casefold()) == (one == other)


@pytest.mark.parametrize("pattern", ["work", "{principal}/x", "{principal}-{principal}", "none/{principal}"])
def test_a_pattern_without_one_place_for_the_principal_is_refused(pattern: str):
    with pytest.raises(DefinitionError):
        PrincipalFiles(pattern)


async def test_each_person_s_tools_change_their_own_folder_and_undo_their_own(tmp_path: Path):
    people = People(tmp_path / "people.db")
    for name in ("ann", "bob"):
        people.add(name, secret=SECRET)
    people.close()
    (tmp_path / "work").mkdir()
    shared = source(tmp_path / "work")
    shared.files = PrincipalFiles(str(tmp_path / "work" / "u-{principal}"))
    async with serving(tmp_path, shared) as client:
        for name in ("ann", "bob"):
            await client.say("t", f'call write {{"path": "a.txt", "text": "{name}"}}', headers_of(name))
            await client.idle("t", headers_of(name))
        assert {name: (tmp_path / "work" / f"u-{name}" / "a.txt").read_text() for name in ("ann", "bob")} == {
            "ann": "ann",
            "bob": "bob",
        }
        await client.say(
            "up", 'call write {"path": "../u-ann/a.txt", "text": "bob was here"}', headers_of("bob")
        )
        out = await client.idle("up", headers_of("bob"))
        assert "Done: wrote" not in str(out["messages"])
        [change] = (await client.ask("GET", "/threads/t/files", headers=headers_of("ann"))).json["changes"]
        undone = await client.ask("POST", f"/threads/t/calls/{change['call_id']}/undo", {}, headers_of("ann"))
        assert undone.status == 200
    assert not (tmp_path / "work" / "u-ann" / "a.txt").exists()
    assert (tmp_path / "work" / "u-bob" / "a.txt").read_text() == "bob"
