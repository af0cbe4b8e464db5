"""A journal that a released version wrote is upgraded: verified before, signed again, and its runs go on. An altered one is refused."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import psycopg
import pytest

from handrail import PostgresJournal, RunParked, SqliteJournal, Workspace, runs
from handrail.errors import AnswerRefused, JournalError, JournalUpgraded, UndoRefused
from handrail.fleet import FleetApp, Runner
from handrail.journal import upgrade as upgrade_module
from handrail.journal.any_journal import AnyJournal
from handrail.journal.postgres.address import parse_url
from handrail.journal.postgres.statements import PostgresConnection
from handrail.journal.postgres.upgrade import read_catalog
from handrail.journal.sql import schema
from handrail.journal.sql.upgrade import STEPS
from handrail.journal.upgrade import upgrade
from handrail.question import Answer, Question, Vote
from handrail.serve.people import People, people_path
from support import PATIENCE, ROOT, postgres, released
from support.parked_runs import answer_to

DEEP = bool(os.environ.get("HANDRAIL_DEEP"))
APPROVED = {"approved": True}


@pytest.fixture(params=released.KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[str]]:
    """Let the released app be imported, and return a function that reads what its tools have done since."""
    path = tmp_path / "world"
    monkeypatch.setenv("HANDRAIL_KEY", postgres.KEY)
    monkeypatch.setenv("SHOP_WORLD", str(path))
    monkeypatch.syspath_prepend(str(released.FOLDER))
    monkeypatch.chdir(released.FOLDER)
    return lambda: path.read_text().splitlines() if path.exists() else []


@pytest.fixture
def name(kind: str, tmp_path: Path, world: object) -> str:
    """Restore the journal of schema 13, and return its name."""
    return released.restore(kind, 13, tmp_path / "journal")


@pytest.fixture(params=released.VERSIONS)
def written(kind: str, request: pytest.FixtureRequest, tmp_path: Path, world: object) -> str:
    """Restore the journal that any release wrote, and return its name."""
    return released.restore(kind, request.param, tmp_path / "journal")


@pytest.fixture
def file(tmp_path: Path, world: object) -> Path:
    """Restore the journal of schema 13 in a file."""
    return Path(released.restore("sqlite", 13, tmp_path / "journal"))


def contents(name: str) -> Any:
    """Return everything that is stored: the bytes of all files, or all rows and the catalog of a schema."""
    if not name.startswith("postgresql:"):
        return {
            each.name: each.read_bytes() for each in Path(name).parent.iterdir() if "people" not in each.name
        }
    address = parse_url(name)
    with psycopg.connect(address.conninfo, autocommit=True) as raw:
        catalog = read_catalog(PostgresConnection(raw), address.schema)
        tables = [line.split()[1] for line in catalog if line.startswith("table ")]
        select: Any = 'SELECT * FROM "{}"."{}" AS t ORDER BY t::text'
        rows = {each: raw.execute(select.format(address.schema, each)).fetchall() for each in tables}
        return catalog, rows


def alter(name: str, *statements: str) -> None:
    """Change a journal behind Handrail's back."""
    if not name.startswith("postgresql:"):
        with closing(sqlite3.connect(name, isolation_level=None)) as connection:
            for each in statements:
                connection.execute(each)
        return
    address = parse_url(name)
    with psycopg.connect(address.conninfo, autocommit=True) as raw:
        raw.execute(f'SET search_path = "{address.schema}"')  # pyright: ignore[reportArgumentType, reportCallIssue]  # a plain name
        for each in statements:
            raw.execute(each.replace("X'00'", "'\\x00'::bytea"))  # pyright: ignore[reportArgumentType, reportCallIssue]  # our own text


async def resume(
    journal: AnyJournal, run_id: str, *values: Any, prompt: Any = None, files: Any = None
) -> str:
    """Answer the open questions of a run, and resume it; again for each value. Return its text."""
    shop = released.shop()
    adapter, text = shop.adapter_on(journal, files), ""
    for value in values or (None,):
        for question in await journal.questions.open(run_id):
            journal.questions.answer(answer_to(question, value))
        try:
            text = (await adapter.resume(run_id, prompt or shop.prompt)).text
        except RunParked as parked:
            text = f"asks {parked.questions[0].name} again"
    return text


# --- what goes on -------------------------------------------------------------------------------------


def test_an_old_journal_is_opened_only_after_an_upgrade_which_the_error_names(name: str):
    """Opening a journal of a released schema raises an error that names the command. The upgrade says what it found."""
    with pytest.raises(JournalError, match=r"schema has version 13.*handrail journal upgrade --journal"):
        released.opened(name)
    done = upgrade(name)
    assert (done.found, done.version, done.records) == (13, schema.VERSION, 171)
    assert done.runs == {"done": 8, "parked": 11, "queued": 1, "running": 1}
    again = upgrade(name)
    assert (again.found, again.version, again.runs) == (schema.VERSION, schema.VERSION, {})
    released.opened(name).close()


async def test_everything_that_was_recorded_verifies_and_is_read(
    written: str, world: Callable[[], list[str]]
):
    """After the upgrade, every record verifies, and runs, sessions, files and blobs are what they were."""
    shop = released.shop()
    upgrade(written)
    with closing(released.opened(written)) as journal:
        found = await journal.runs.verify()
        assert (found.altered, found.imported) == ([], ["imported"])
        for row in await journal.runs.list(limit=100):
            await runs.show(journal, row.record.id)
        session = await runs.session(journal, "ledger", principal="ann")
        assert session[shop.Noted].all() == (shop.Noted("x", "two"),)
        assert await runs.get_files(journal, "books", Path(os.environ["SHOP_WORLD"]).with_name("out")) == [
            "a.txt", "c.txt", "d/", "d/b.txt"
        ]  # fmt: skip
        (digest,) = await journal.blobs.list("shows")
        assert (await journal.blobs.get(digest)).startswith(b"\x89PNG")
        undone = [each for each in await journal.calls.entries("undone") if each.kind == "undone"]
        assert len(undone) == 2
    assert world() == []


RESUMED: Sequence[tuple[str, tuple[Any, ...], str | None, str, list[str]]] = [
    ("asks", ({"name": "mint"},), None, "chose mint | 0 times advised", []),
    ("advises", ({"name": "mint"},), None, "chose mint | 3 times advised", []),
    ("approves", (APPROVED,), None, "sold jug | 0 times advised", ["sold jug"]),
    ("hands", ({"cents": 250},), None, "paid 250 | 0 times advised", ["took 250 into the till with 17"]),
    ("nests", ({"name": "pie"},), "kitchen", "wrote cake.txt; chose pie | 0 times advised", []),
    ("shows", ({"name": "mint"},), None, "chose mint | 0 times advised", []),
    ("pauses", ({"name": "mint"},), None, "chose mint | 0 times advised", []),
    ("ledger-3", (None, APPROVED), None, "sold cup | 0 times advised", ["sold cup", "sold cup"]),
    ("ledger-4", (APPROVED, APPROVED), None, "sold jug | 0 times advised", ["sold cup", "sold jug"]),
    ("forked", (None,), "books", "noted first | 0 times advised", []),
    ("cut", (None,), "shelf", "rested | 0 times advised", []),
]
"""Unfinished runs: their answers, their workspace, their text, and what their tools do when they go on."""


@pytest.mark.parametrize(
    ("run_id", "answers", "files", "text", "did"), RESUMED, ids=[each[0] for each in RESUMED]
)
async def test_unfinished_runs_go_on_where_they_were(
    written: str,
    world: Callable[[], list[str]],
    run_id: str,
    answers: Any,
    files: str | None,
    text: str,
    did: list[str],
):
    """A parked run takes its answer, and a run whose process was killed goes on. What had been done is not done again."""
    shop = released.shop()
    upgrade(written)
    with closing(released.opened(written)) as journal:
        prompt = shop.advised if run_id == "advises" else shop.prompt
        workspace = None if files is None else Workspace(files)
        assert await resume(journal, run_id, *answers, prompt=prompt, files=workspace) == text
        assert (await journal.runs.get(run_id)).status == "done"
        assert (await journal.runs.verify()).altered == []
    assert world() == did


async def test_votes_count_after_the_upgrade(written: str, world: Callable[[], list[str]]):
    """A vote that was cast before the upgrade counts together with one that is cast after it."""
    upgrade(written)
    with closing(released.opened(written)) as journal:
        (question,) = await journal.questions.open("votes")
        cast = Vote(
            question_id=question.id, digest=question.digest, by="cid", roles=("approver",), approved=True, at=2.0
        )  # fmt: skip
        votes = await journal.votes.cast("votes", cast)
        assert [each.by for each in votes] == ["bob", "cid"]
        answer = Answer(question_id=question.id, digest=question.digest, by="bob, cid", value=APPROVED)
        with pytest.raises(AnswerRefused):
            journal.questions.answer(answer)
        journal.questions.answer(answer_with(question, votes))
        assert await resume(journal, "votes") == "sold house | 0 times advised"
    assert world() == ["sold house"]


def answer_with(question: Question, votes: Sequence[Vote]) -> Answer:
    by = ", ".join(each.by for each in votes)
    return Answer(question_id=question.id, digest=question.digest, by=by, value=APPROVED, votes=tuple(votes))


async def test_a_queued_run_is_adopted_and_executed(written: str, world: Callable[[], list[str]]):
    """A run that was queued for the old code waits for a worker of the new code, once it was adopted."""
    upgrade(written)
    with closing(released.opened(written)) as journal:
        app = FleetApp.load("released_shop.py:prompt")
        await journal.queue.adopt("queued", app.queue)
        runner, stop = Runner(journal, [app]), asyncio.Event()
        task = asyncio.ensure_future(runner.run(stop))
        while (await journal.runs.get("queued")).status != "done":
            await asyncio.sleep(0.01)
        stop.set()
        await asyncio.wait_for(task, PATIENCE)
    assert world() == ["paid hire"]


async def test_calls_are_undone_and_stay_undone(written: str, world: Callable[[], list[str]]):
    """A call that was recorded before the upgrade is undone after it; one that was undone already is not undone twice."""
    shop = released.shop()
    upgrade(written)
    with closing(released.opened(written)) as journal:
        books: Any = Workspace("books")
        (unit,) = await journal.calls.load("again")
        done = await runs.undo(journal, "again", unit.call_id, books)
        assert done.paths == ("c.txt",)
        for run_id in ("undone", "lent", "again"):
            call = (await journal.calls.load(run_id))[-1]
            with pytest.raises(UndoRefused):
                await runs.undo(journal, run_id, call.call_id, books)
        noted = (await journal.calls.load("ledger-2"))[-1]
        await runs.undo(journal, "ledger-2", noted.call_id)
        session = await runs.session(journal, "ledger", principal="ann")
        assert session[shop.Noted].all() == (shop.Noted("x", "one"),)
        assert (await journal.runs.verify()).altered == []
    assert world() == []


async def test_approvals_of_exactly_one_request_are_asked_for_again(name: str):
    """An approval of exactly one request is bound to the tool's description since, so a person is asked once more."""
    upgrade(name)
    with closing(released.opened(name)) as journal:
        assert await resume(journal, "ledger-3") == "asks sell again"
        (decision,) = (await runs.approvals(journal, "ledger", principal="ann")).list()
        assert (decision.tool, decision.approved) == ("sell", True)


def test_the_users_beside_a_file_are_kept(file: Path):
    """The users file of the release is read as it is: users sign in with the secrets that they had."""
    upgrade(file)
    with closing(People(people_path(file))) as people:
        assert [(name, roles) for name, roles, *_ in people.list()] == [
            ("ann", {"user"}),
            ("bob", {"approver"}),
        ]
        assert people.verify("bob", "the secret of bob, who votes") is not None


async def test_an_upgraded_run_is_exported_and_imported(name: str, tmp_path: Path):
    """An upgraded run can be exported, and imported into a new journal."""
    upgrade(name)
    with (
        closing(released.opened(name)) as journal,
        closing(SqliteJournal(tmp_path / "new.db", watch=None)) as new,
    ):
        await runs.export(journal, "done", tmp_path / "done.jsonl")
        row = await runs.import_(new, tmp_path / "done.jsonl")
        assert (row.record.id, row.status) == ("done", "done")
        assert (await new.runs.verify()).altered == []


def test_a_database_has_the_schema_of_a_new_one(world: object, tmp_path: Path):
    """After an upgrade, the catalog of a database is the same as that of a new journal, and that of the release is as listed."""
    name, new = released.restore("postgres", 13, tmp_path / "journal"), postgres.new_url()
    upgrade(name)
    PostgresJournal(new).close()
    assert contents(name)[0] == contents(new)[0]


def test_the_contents_are_signed_again_but_not_changed(file: Path):
    """The upgrade changes no record but the MACs that records name, and what a round of advice says about its answer."""
    query = "SELECT chain, link, kind, key, at, session_id, state, body FROM records ORDER BY number"
    with closing(sqlite3.connect(file)) as connection:
        before = connection.execute(query).fetchall()
    upgrade(file)
    with closing(sqlite3.connect(file)) as connection:
        after = connection.execute(query).fetchall()
    assert [each[:-1] for each in after[: len(before)]] == [each[:-1] for each in before]
    changed = {old[2] for old, new in zip(before, after, strict=False) if old[-1] != new[-1]}
    assert changed == {"run", "decisions", "session", "outside", "fork", "advice"}
    assert all(old[0].startswith("session") for old, new in zip(before, after, strict=False) if old[2] == "run" and old[-1] != new[-1])  # fmt: skip
    assert {each[0].partition(" ")[0] for each in after[len(before) :]} == {"workspace"}


# --- what is refused ----------------------------------------------------------------------------------


def test_a_check_writes_nothing(name: str):
    """A check says what the upgrade would do, and leaves everything as it is."""
    before = contents(name)
    found = upgrade(name, check=True)
    assert (found.found, found.version, found.records) == (13, schema.VERSION, 171)
    assert contents(name) == before


def test_a_check_leaves_the_log_of_a_killed_process(file: Path):
    """A check does not empty a log that a killed process has left."""
    writer = sqlite3.connect(file, isolation_level=None)
    writer.execute("INSERT INTO workers VALUES ('w', 'h', 1.0, X'00', X'00')")
    for suffix in ("", "-wal", "-shm"):
        copied = file.with_name(f"copy.db{suffix}")
        copied.write_bytes(file.with_name(f"{file.name}{suffix}").read_bytes())
        copied.chmod(0o600)
    writer.close()
    log = file.with_name("copy.db-wal").read_bytes()
    assert log
    assert upgrade(file.with_name("copy.db"), check=True).records == 171
    assert file.with_name("copy.db-wal").read_bytes() == log


ALTERED = {
    "a body": ("UPDATE records SET body = X'00' WHERE kind = 'verb' AND chain = 'run asks'", "run 'asks', record"),
    "a removed record": ("DELETE FROM records WHERE chain = 'run done' AND link = 3", "run 'done', record 3"),
    "a seal": ("UPDATE chains SET seal = X'00' WHERE chain = 'run done'", "run 'done'"),
    "a mark": ("UPDATE records SET opens = 0 WHERE chain = 'run done' AND opens = 1", "run 'done'"),
    "a row of a run": ("UPDATE runs SET status = 'done' WHERE id = 'asks'", "run 'asks'"),
    "a removed run": ("DELETE FROM runs WHERE id = 'ledger-1'", "ledger"),
    "a question": ("UPDATE questions SET principal = 'eve' WHERE run_id = 'asks'", "run 'asks'"),
    "a workspace": ("UPDATE workspaces SET version = 1 WHERE name = 'books'", "workspace 'books'"),
    "a file": ("DELETE FROM workspace_files WHERE workspace = 'books' AND path = 'a.txt'", "workspace 'books'"),
    "a file's content": ("UPDATE blobs SET data = X'00'", "blob"),
    "a decision": ("UPDATE records SET body = X'00' WHERE kind = 'remembered'", "decisions"),
    "an answer": ("UPDATE records SET body = X'00' WHERE kind = 'answer'", "answers"),
    "a planted chain": ("INSERT INTO chains VALUES (9999, 'workspace books', 1, X'00')", "workspace"),
    "a column": ("ALTER TABLE runs ADD COLUMN more INTEGER", "runs"),
    "an index": ("DROP INDEX open_questions", "open_questions"),
    "a table": ("CREATE TABLE more (id INTEGER)", "more"),
}  # fmt: skip
PLANTED_IN_POSTGRES = (
    "INSERT INTO chains (chain, links, seal, number) VALUES ('workspace books', 1, X'00', 1)"
)


def test_code_of_the_old_schema_can_add_to_no_chain(world: object, tmp_path: Path):
    """A process that still runs the code of schema 13, which looks at the schema only when it opens a journal, can't add a record."""
    name = released.restore("postgres", 13, tmp_path / "journal")
    added = """INSERT INTO records (number, chain, link, kind, key, at, session_id, body, mac, state, opens)
        VALUES (1, 'outside asks', 1, 'answer', '', 0, '', X'00', X'00', '', 0)"""
    upgrade(name)
    for statement in (added, "UPDATE runs SET stopping = 1"):
        with pytest.raises(psycopg.errors.UndefinedColumn):
            alter(name, statement)


@pytest.mark.parametrize("what", ALTERED)
def test_an_altered_journal_is_refused_and_left_alone(name: str, what: str):
    """Nothing that was altered is signed again: the error names it, and nothing is written."""
    statement, place = ALTERED[what]
    is_file = not name.startswith("postgresql:")
    alter(name, PLANTED_IN_POSTGRES if what == "a planted chain" and not is_file else statement)
    before = contents(name)
    for check in (True, False):
        with pytest.raises(
            JournalError, match=r"something other than Handrail has altered its? ?.*"
        ) as refused:
            upgrade(name, check=check)
        assert place in str(refused.value)
        assert "Nothing was" in str(refused.value)
    if is_file:
        with closing(sqlite3.connect(name)) as connection:
            after = connection.execute("SELECT value FROM about WHERE key = 'schema'").fetchone()
        assert after == ("13",)
        assert set(contents(name)) == set(before)
        assert (
            contents(name)["runs.db"][100:] == before["runs.db"][100:]
        )  # the header says how its log is kept
    else:
        assert contents(name) == before


@pytest.mark.parametrize(
    ("version", "words"),
    [
        (12, "Only those of releases can be upgraded, the first of which is 13"),
        (15, "the first of which is 13"),
    ],
)
def test_other_schemas_are_refused(name: str, version: int, words: str):
    """A schema that no release had, or that is too old, is refused by the upgrade and when the journal is opened."""
    alter(name, f"UPDATE about SET value = '{version}' WHERE key = 'schema'")
    for refuse in (released.opened, upgrade, lambda name: upgrade(name, check=True)):
        with pytest.raises(JournalError, match=f"its schema has version {version}.*{words}"):
            refuse(name)


def test_a_newer_journal_is_refused_unless_it_allows_this_version(name: str):
    """A journal of a newer schema is used if its oldest writer is this version, and refused otherwise."""
    upgrade(name)
    alter(
        name,
        f"UPDATE about SET value = '{schema.VERSION + 1}' WHERE key = 'schema'",
        "CREATE TABLE more (id BIGINT)",
        "CREATE INDEX by_id ON more (id)",
    )
    released.opened(name).close()
    assert upgrade(name).version == schema.VERSION + 1
    alter(name, f"UPDATE about SET value = '{schema.VERSION + 1}' WHERE key = 'oldest'")
    for refuse in (released.opened, upgrade):
        with pytest.raises(JournalUpgraded, match=r"Install a newer version of Handrail") as refused:
            refuse(name)
        assert refused.value.oldest == schema.VERSION + 1


def test_a_newer_journal_must_still_have_what_this_version_knows(file: Path):
    """Tables that a newer schema adds are left alone, but a table that it lacks is an alteration."""
    upgrade(file)
    alter(str(file), "UPDATE about SET value = '99' WHERE key = 'schema'", "DROP INDEX open_questions")
    with pytest.raises(JournalError, match=r"index 'open_questions' was removed"):
        released.opened(str(file))


def test_a_file_in_use_is_refused(file: Path):
    """The upgrade has the file for itself, because code of the old schema would not notice it."""
    with closing(sqlite3.connect(file, isolation_level=None)) as other:
        other.execute("SELECT count(*) FROM runs").fetchone()
        with pytest.raises(JournalError, match=r"another process has it open.*Stop every process"):
            upgrade(file)
    assert upgrade(file).version == schema.VERSION


def test_a_database_in_use_is_refused(world: object, tmp_path: Path):
    """A process that holds a lease, or a worker that is announced, keeps a database from being upgraded."""
    name = released.restore("postgres", 13, tmp_path / "journal")
    alter(name, "UPDATE leases SET leased_until = 1e12")
    with pytest.raises(JournalError, match=r"the process .* uses it.*Stop every process"):
        upgrade(name)
    assert upgrade(name, check=True).found == 13
    alter(
        name,
        "UPDATE leases SET leased_until = 1",
        "INSERT INTO workers VALUES ('w1', 'h', 1e12, X'00', X'00')",
    )
    with pytest.raises(JournalError, match=r"the process w1 uses it"):
        upgrade(name)


def test_the_wrong_key_is_refused(name: str, monkeypatch: pytest.MonkeyPatch):
    """A journal is upgraded only with its own key."""
    monkeypatch.setenv("HANDRAIL_KEY", "somebody else's key")
    with pytest.raises(JournalError, match=r"were not written with this key"):
        upgrade(name)


@pytest.mark.parametrize("content", [b"", b"hello", None])
def test_what_is_no_journal_is_refused(tmp_path: Path, world: object, content: bytes | None):
    """An empty file, a file of another kind and the database of another program are left as they are."""
    path = tmp_path / "other.db"
    path.touch(mode=0o600)
    if content is None:
        alter(str(path), "CREATE TABLE about (id INTEGER)")
    else:
        path.write_bytes(content)
    before = path.read_bytes()
    with pytest.raises(JournalError):
        upgrade(path)
    assert path.read_bytes() == before


def test_a_step_begins_from_each_released_schema():
    """The steps and the schemas of releases are the same, and each leads to a later one."""
    assert tuple(STEPS) == schema.UPGRADABLE
    assert all(found < step.target <= schema.VERSION for found, step in STEPS.items())


# --- cut off ------------------------------------------------------------------------------------------


def test_the_copy_is_a_journal_of_the_release(file: Path):
    """The copy beside the file has what the file had. One that differs is not overwritten."""
    with closing(sqlite3.connect(file)) as connection:
        before = list(connection.iterdump())
    other = file.with_name("runs.db.schema-13")
    other.write_bytes(b"somebody's")
    copy = upgrade(file).copy
    assert (copy, other.read_bytes()) == (f"{other}-2", b"somebody's")
    assert Path(copy).stat().st_mode & 0o777 == 0o600
    with closing(sqlite3.connect(copy)) as connection:
        assert list(connection.iterdump()) == before


@pytest.mark.once
def test_a_full_disk_leaves_the_journal_and_no_half_of_a_copy(tmp_path: Path, world: object):
    """An upgrade whose copy does not fit on the disk says so. The journal is as it was, and is upgraded once there is room."""
    name = released.restore("sqlite", 13, tmp_path / "journal")
    (tmp_path / "small").mkdir()
    words = f"{sys.executable} -m handrail journal upgrade --journal small/journal/runs.db"
    mount = "mount -t tmpfs -o size=500k,mode=700 tmpfs small && cp -a journal small"
    again = f"mount -o remount,size=2m small && {words}; echo code $?"
    done = subprocess.run(
        [
            "unshare",
            "--map-root-user",
            "--mount",
            "sh",
            "-c",
            f"{mount} && {words}; echo code $?; ls small/journal; {again}",
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    first, second = done.stdout.split("code 1\n")
    assert first == ""
    assert second.split("code")[0].split()[:2] == ["runs.db", "runs.people.db"]
    assert "disk is full. Check the disk" in done.stderr
    assert "was upgraded from schema 13" in second
    assert second.endswith("code 0\n")
    assert version_of(name) == 13


def dies_at(name: str, number: int | None) -> Sequence[str] | None:
    """Upgrade a journal in a child process, which is killed before its statement with this number.

    Returns None if it was killed. Without a number, returns the statements.
    """
    reading, writing = os.pipe()
    child = os.fork()
    if child:
        os.close(writing)
        with os.fdopen(reading, "rb") as pipe:
            reply = pipe.read()
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) in (0, -signal.SIGKILL)
        return None if os.WIFSIGNALED(status) else reply.decode().split("\0")[:-1]
    said: list[str] = []

    def count(statement: object) -> None:
        said.append(str(statement))
        if len(said) == number:
            os.kill(os.getpid(), signal.SIGKILL)

    class Counted(sqlite3.Connection):
        def execute(self, sql: str, *values: Any) -> Any:
            count(sql)
            return super().execute(sql, *values)

    connect, execute = sqlite3.connect, psycopg.Connection.execute

    def counted(self: Any, query: Any, *values: Any, **named: Any) -> Any:
        count(query)
        return execute(self, query, *values, **named)

    upgrade_module.sqlite3.connect = lambda *given, **named: connect(*given, factory=Counted, **named)  # type: ignore[attr-defined, assignment]  # only in this child
    psycopg.Connection.execute = counted  # type: ignore[method-assign]  # only in this child
    try:
        upgrade(name)
        with os.fdopen(writing, "wb") as pipe:
            pipe.write("".join(f"{each}\0" for each in said).encode())
    finally:
        os._exit(0)
    return None


def chosen(statements: Sequence[str]) -> list[int]:
    """Return the numbers of all statements or, unless the tests look deep, of the first and the last of each kind and some between."""
    if DEEP:
        return list(range(1, len(statements) + 1))
    first = {each: at for at, each in reversed(list(enumerate(statements, 1)))}
    last = {each: at for at, each in enumerate(statements, 1)}
    writes = [at for at, each in enumerate(statements, 1) if not each.lstrip().startswith("SELECT")]
    kept = {at for each, at in (*first.items(), *last.items()) if not each.lstrip().startswith("SELECT")}
    return sorted({*kept, *writes[:: max(1, len(writes) // 12)]})


@pytest.mark.timeout(1800 if DEEP else 300)
def test_an_upgrade_that_is_cut_off_goes_on(kind: str, tmp_path: Path, world: object):
    """Killed before any of its statements, the upgrade leaves the journal as it was, until it is complete; run again, it goes on."""
    statements = dies_at(released.restore(kind, 13, tmp_path / "whole"), None)
    assert statements
    name = released.restore(kind, 13, tmp_path / "killed")
    commit = max(at for at, each in enumerate(statements, 1) if each == "COMMIT")
    for number in chosen(statements):
        assert dies_at(name, number) is None, statements[
            number - 1
        ]  # it verifies everything before it gets there
        assert version_of(name) == (13 if number <= commit else schema.VERSION), statements[number - 1]
    assert upgrade(name).version == schema.VERSION
    with closing(released.opened(name)) as journal:
        found = asyncio.run(journal.runs.verify())
        assert (found.records, found.altered) == (182, [])
    if kind == "sqlite":
        copies = sorted(each.name for each in Path(name).parent.glob("runs.db.schema-13*"))
        assert copies == ["runs.db.schema-13"]


def version_of(name: str) -> int:
    """Return the version of a journal's schema."""
    query = "SELECT value FROM about WHERE key = 'schema'"
    if not name.startswith("postgresql:"):
        with closing(sqlite3.connect(name)) as connection:
            return int(connection.execute(query).fetchone()[0])
    address = parse_url(name)
    with psycopg.connect(
        address.conninfo, autocommit=True, options=f"-c search_path={address.schema}"
    ) as raw:
        ((version,),) = raw.execute(query).fetchall()
        return int(version)


# --- the command --------------------------------------------------------------------------------------


def run_command(folder: Path, line: str) -> tuple[int, str]:
    """Run a command as the documentation writes it, and return its exit code and output."""
    words = [sys.executable, "-m", "handrail", *shlex.split(line)[1:]]
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


def test_the_commands_of_the_page_upgrade_a_journal(file: Path):
    """Each command on the page about upgrades does what the page says."""
    page = (ROOT / "docs/upgrading.md").read_text()
    commands = [line.strip() for line in page.splitlines() if line.startswith("    handrail ")]
    said = [run_command(file.parent, line) for line in commands]
    assert [code for code, _ in said] == [0] * len(commands)
    check, done, verified = (text for _, text in said)
    found = "21 runs (8 done, 11 parked, 1 queued, 1 running) and 171 records, all verified"
    assert f"can be upgraded from schema 13 to {schema.VERSION}: {found}." in check
    assert "It will be copied to runs.db.schema-13 first. Nothing was written." in check
    assert (
        f"was upgraded from schema 13 to {schema.VERSION}: {found}. It was copied to runs.db.schema-13"
        in done
    )
    assert "nothing was altered" in verified
    assert "needs no upgrade" in run_command(file.parent, commands[1])[1]


def test_the_command_reports_as_json(file: Path):
    """With --json, the command prints one object. A journal that does not exist and one that was altered have exit codes of their own."""
    code, text = run_command(file.parent, "handrail journal upgrade --check --json --journal runs.db")
    found = json.loads(text)
    assert (code, found["ok"], found["check"], found["found"]) == (0, True, True, 13)
    assert found["copy"] == "runs.db.schema-13"
    assert run_command(file.parent, "handrail journal upgrade --journal none.db")[0] == 2
    alter(str(file), "UPDATE chains SET seal = X'00'")
    code, text = run_command(file.parent, "handrail journal upgrade --journal runs.db")
    assert (code, "has altered it" in text) == (1, True)
