"""A person is erased: nothing of theirs is left in any byte that Handrail wrote, except what is listed, and the chains still verify."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import sqlite3
import subprocess
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager, closing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec
import psycopg
import pytest

from handrail import (
    Adapter,
    Attachment,
    Budget,
    LaterEnvironment,
    PostgresJournal,
    Prompt,
    Spend,
    SqliteJournal,
    ToolContext,
    Workspace,
    runs,
    tool,
)
from handrail.cli.fleet_commands import parse_retention
from handrail.cli.outcome import UsageError
from handrail.context.facts import RunContext
from handrail.errors import DefinitionError, ErasureRefused, JournalAltered, JournalError, RunParked
from handrail.events import ApprovalRemembered
from handrail.fleet.runner import Runner
from handrail.journal import sqlite as sqlite_module
from handrail.journal.any_journal import AnyJournal, open_by_name
from handrail.journal.decisions import written
from handrail.journal.postgres.address import parse_url
from handrail.journal.postgres.database import PostgresDatabase
from handrail.journal.postgres.database import statements as postgres_statements
from handrail.journal.protocol import Watcher
from handrail.journal.records import Entry, RunRecord, SpendRaise
from handrail.journal.sql.connection import compact
from handrail.journal.sql.schema import TABLES, expected_schema
from handrail.journal.sql.upkeep import _OTHERS as OTHERS
from handrail.journal.sql.upkeep import _UNRECORDED as UNRECORDED
from handrail.journal.sql.upkeep import ERASERS
from handrail.models.scripted import ScriptedModel
from handrail.notify.address import Address
from handrail.question import Vote
from handrail.resources.directory import DirectoryFilesystem
from handrail.run.call import ToolCall
from handrail.runs.retention import Retention, keep_sweeping, sweep
from handrail.serve.app import ServedApp
from handrail.serve.people import AccountsFile, People, people_path
from handrail.serve.sources import PromptSource
from handrail.session import Session
from support import postgres
from support.parked_runs import answer_to
from support.recorded import Pick

pytestmark = pytest.mark.once

DEEP = bool(os.environ.get("HANDRAIL_DEEP"))
ANN = "ann-q7x3"
BOB = "bob-k2m9"
WORDS = [
    "message",
    "answer",
    "argument",
    "result",
    "state",
    "remark",
    "attachment",
    "file",
    "displaced",
    "reason",
    "password",
    "draft",
    "reply",
    "key",
    "session",
    "thread",
]
"""What a person says, attaches, is shown or causes. Each becomes a text that occurs nowhere else."""


NOW = datetime(2030, 1, 1, tzinfo=UTC)
CONTEXT = RunContext("r", "q", "s", 1, "w", "t", "p")


def said(word: str, person: str = ANN) -> str:
    return f"{person}-{word}-zq"


@tool(effect="staged")
async def keep(text: str, context: ToolContext) -> str:
    """Keep a text in a file, after somebody has agreed."""
    from support.recorded import Noted

    assert context.wait_for
    owner = text.partition("-argument")[0]
    context.session.dispatch(Noted(said("state", owner)))
    context.filesystem.write("kept.txt", said("displaced", owner))
    await context.wait_for("pick", {"shown": said("thread", owner)}, Pick)
    return said("result", owner)


@tool(effect="staged")
async def over(text: str, context: ToolContext) -> str:
    """Overwrite the file."""
    context.filesystem.write("kept.txt", text)
    return "over"


@tool(effect="irreversible")
async def pay(text: str, context: ToolContext) -> str:
    """Pay."""
    return text


CAPS = [Spend(Budget(tokens=10**9)), Spend(Budget(tokens=10**9), by="app")]
PROMPT: Prompt[None] = Prompt("work", "Do what is asked.", tools=[keep, over, pay])


_LEAVE = "PRAGMA secure_delete = OFF"


class World:
    """A journal with runs of two people, the users of a server, a folder, and workspaces."""

    def __init__(self, name: str, base: Path) -> None:
        self.name = name
        self.base = base
        self.journal = open_by_name(name, watches=False)
        accounts = self.journal.accounts
        self.accounts = (
            accounts if accounts is not None else AccountsFile(people_path(Path(self.journal.path)))
        )
        self.people = People(self.accounts)
        if isinstance(self.journal, SqliteJournal) and isinstance(self.accounts, AccountsFile):
            # Debian's SQLite overwrites what it deletes, and others do not.
            self.journal._database.transact_now(lambda connection: connection.execute(_LEAVE))  # pyright: ignore[reportPrivateUsage]
            self.accounts._database.execute(_LEAVE)  # pyright: ignore[reportPrivateUsage]

    def close(self) -> None:
        self.people.close()
        self.journal.close()

    async def run(
        self, run_id: str, person: str, session: str, files: Any, *script: Any, **options: Any
    ) -> Any:
        adapter = Adapter(
            ScriptedModel(list(script)),
            journal=self.journal,
            filesystem=files,
            environment=LaterEnvironment(),
            spend=CAPS,
        )
        return await adapter.evaluate(
            PROMPT,
            said("message", person),
            run_id=run_id,
            session=Session(id=session, principal=person),
            **options,
        )

    async def resume(self, run_id: str, files: Any, *script: Any) -> Any:
        (question,) = await self.journal.questions.open(run_id)
        answer = answer_to(
            question,
            {"n": 1},
            remark=said("remark", question.principal),
            reason=said("reason", question.principal),
        )
        self.journal.questions.answer(answer)
        adapter = Adapter(
            ScriptedModel(list(script)),
            journal=self.journal,
            filesystem=files,
            environment=LaterEnvironment(),
        )
        return await adapter.resume(run_id, PROMPT)

    async def works(self, person: str, files: Any, session: str = "") -> None:
        """Let a person's run ask, park, be answered, replace a file, and end, and let another be forked from it."""
        run_id = f"{person}-run-{session or 'own'}"
        text = said("argument", person)
        attached = Attachment(said("attachment", person).encode(), said("file", person) + ".txt")
        options = {"attachments": [attached]}
        session = session or said("session", person)
        with pytest.raises(RunParked):
            await self.run(run_id, person, session, files, ToolCall("keep", {"text": text}), **options)
        over = ToolCall("over", {"text": said("draft", person)})
        await self.resume(run_id, files, over, said("answer", person))
        await runs.fork(self.journal, run_id, 1, f"{run_id}-fork")
        await runs.cancel(self.journal, f"{run_id}-fork")

    async def fill(self) -> None:
        folder = self.base / "folder"
        folder.mkdir()
        for person in (BOB, ANN):
            with DirectoryFilesystem(folder) as files:
                await self.works(person, files, "common")
            await self.works(person, Workspace(f"{person}-shelf"))
            await self.works(person, Workspace("team"), f"{person}/thread")
            hook = Address(f"https://{said('hook', person)}.example/")
            self.people.add(person, ["approver"], said("password", person), [hook])
            self.people.sign_in(person, host="h", issuer="i", address=f"{person}-address-zq")
            self.people.note(person, "sent a message", thread=said("thread", person))
            self.people.note("", "user added", user=person)
        request = msgspec.msgpack.encode({"message": said("reply")})
        queued = RunRecord(
            id=f"{ANN}-queued", session_id=f"{ANN}/queue", principal=ANN, prompt="p", model="m", began_at=1.0,
            app="app:x", code="1", request=request,
        )  # fmt: skip
        await self.journal.queue.submit(queued, at=9e9, key=said("key"))
        with pytest.raises(RunParked):
            await self.run("votes", BOB, "bobs", Workspace("team"), ToolCall("keep", {"text": "x"}))
        for number, (by, session, principal) in enumerate(
            ((ANN, "common", ANN), (ANN, "bobs", BOB), (BOB, "common", BOB))
        ):
            covers = said("decision", principal)
            kept = ApprovalRemembered(
                str(number), "pay", "exact", covers, True, "", by, NOW, (), "0" * 64, CONTEXT
            )
            self.journal.decisions.write(written(kept, session, principal))
        for person in (ANN, BOB):
            await self.journal.outbox.replace(
                f"of {person[0]}", b"", f"{person}-run-own asks {said('told', person)}".encode()
            )
        if self.journal.broadcasts is not None:
            await self.journal.broadcasts.watch(Watcher(id="w", joins=1), f"{ANN}/thread", seconds=60)
            await self.journal.broadcasts.add(f"{ANN}/thread", "r", 1, 1, said("live").encode())
        (question,) = await self.journal.questions.open("votes")
        vote = Vote(
            question_id=question.id,
            digest=question.digest,
            by=ANN,
            roles=("approver",),
            approved=True,
            at=1.0,
        )
        await self.journal.votes.cast("votes", vote)
        for window in [each.window for each in await self.journal.spending.list()]:
            raised = SpendRaise(id="votes", by=BOB if ANN in window.name else ANN, amounts={"tokens": 1})
            if window.by == "principal":
                await self.journal.spending.add(window, raised)

    async def erase(self, **options: Any) -> runs.Erasure:
        return await runs.erase(self.journal, ANN, accounts=self.accounts, **options)

    # What is left.

    def bytes(self) -> dict[str, bytes]:
        """Return every file that Handrail wrote, by name: journal, log, users, copies of workspaces and what a folder keeps."""
        found = {str(at): at.read_bytes() for at in self.base.rglob("*") if at.is_file()}
        found.update((f"{at}'s name", str(at.relative_to(self.base)).encode()) for at in self.base.rglob("*"))
        if self.name.startswith("postgresql:"):
            address = parse_url(self.name)
            program = postgres.programs() / "pg_dump"
            dumped = subprocess.run(
                [str(program), "--schema", address.schema, "--inserts", address.conninfo],
                check=True,
                capture_output=True,
            ).stdout
            found["dump"] = dumped
            found["dumped bytes"] = b"\n".join(
                bytes.fromhex(part.partition(b"'")[0].decode()) for part in dumped.split(b"'\\x")[1:]
            )
        return found

    def holding(self, text: str) -> set[str]:
        return {name for name, data in self.bytes().items() if text.encode() in data}


@pytest.fixture(params=["sqlite", "postgres"])
def name(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    state = tmp_path / "state"
    state.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_CACHE_HOME", str(state / "cache"))
    if request.param == "sqlite":
        return str(state / "runs.db")
    monkeypatch.setenv("HANDRAIL_KEY", postgres.KEY)
    return postgres.new_url()


@asynccontextmanager
async def world(name: str, base: Path) -> AsyncGenerator[World]:
    made = World(name, base)
    try:
        yield made
    finally:
        made.close()


async def test_nothing_is_left_of_a_person_but_what_is_listed(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with world(name, tmp_path / "state") as made:
        await made.fill()
        with pytest.raises(ErasureRefused, match="--cancel") as refused:
            await made.erase()
        assert dict(refused.value.runs) == {f"{ANN}-queued": "queued"}
        before = await made.erase(dry=True)
        for word in WORDS:  # otherwise the search below would find nothing in any case
            if word not in ("password", *(("live",) if name.endswith(".db") else ())):
                assert made.holding(said(word)), word
        exported = tmp_path / "export"
        done = await runs.export_person(made.journal, ANN, exported, accounts=made.accounts)
        assert [run_id for run_id, _ in done.left_out] == [f"{ANN}-queued"]
        assert (exported / "workspaces" / f"{ANN}-shelf" / "kept.txt").read_text() == said("draft")

        other = open_by_name(
            name, watches=False
        )  # a process that goes on with its runs, and knows the ends of chains
        mine = RunRecord(id="other", session_id="others", principal=BOB, prompt="p", model="m", began_at=1.0)
        await other.runs.begin(mine)
        monkeypatch.setenv(
            "XDG_STATE_HOME", str(tmp_path / "another user")
        )  # who can't verify what the folder keeps
        done = await made.erase(cancel=True)
        await other.calls.note("other", Entry("remark", "", 2.0, b""))
        await other.runs.leave("other", "done")
        other.close()
        held = done.holdings
        assert held.runs == before.holdings.runs
        assert len(held.runs) == 7
        assert held.workspaces == [f"{ANN}-shelf"]
        assert held.shared == ["team"]
        (window,) = [each for each in await made.journal.spending.list() if each.window.by == "principal"]
        assert sorted(held.votes) == [
            ("decision", "bobs"),
            ("raise of a cap", window.window.id),
            ("vote", "votes"),
        ]
        assert window.window.name == BOB
        assert done.has_account
        assert done.entries == 2
        assert done.folders == [str(tmp_path / "state" / "folder")]
        assert not done.unreachable
        assert done.is_compact

        # files outside, which are listed: the folder's, and the ids of the last calls that changed it
        stays = {str(tmp_path / "state" / each) for each in ("folder/kept.txt", ".folder.handrail/claims")}
        team = {
            str(at)
            for at in (tmp_path / "state").glob("cache/handrail/workspaces/*/team/**/*")
            if at.is_file()
        }
        database = {made.journal.path, "dumped bytes"}
        for word in WORDS:
            left = made.holding(said(word)) - stays
            assert left <= ({*team, *database} if word == "draft" else set()), (
                word
            )  # what a shared workspace has
            assert made.holding(said(word, BOB)) or word in ("password", "reply", "key", "live"), word
        await made.journal.upkeep.compact()  # what was written since repeats in the log what is listed
        for at in made.holding(ANN) - stays - team:
            data = made.bytes()[at].replace(said("draft").encode(), b"")
            assert data.count(ANN.encode()) == 4, at  # the vote, the decision, and the raise with its record
        assert not made.holding(f"{ANN}-address-zq")

        assert not (await made.journal.runs.verify()).altered
        assert [each["action"] for each in made.people.audit()][-1] == "person erased"
        assert made.people.audit()[-1]["digest"] == held.digest
        assert made.people.find(ANN) is None
        assert made.people.find(BOB) is not None
        recorded = contents_of(made, "erasures")
        assert (await made.erase()).holdings.erased_at is not None  # again, which changes nothing
        assert contents_of(made, "erasures") == recorded
        assert (await made.resume("votes", Workspace("team"), "goes on")).text == "goes on"
        await made.works(BOB, Workspace("team"), f"{BOB}/another")
        await made.works(ANN, Workspace(f"{ANN}-shelf"))  # somebody of that name may come back
        assert not (await made.journal.runs.verify()).altered
    async with world(name, tmp_path / "state") as made:
        assert not (await made.journal.runs.verify()).altered


def test_every_table_says_what_an_erasure_deletes_in_it() -> None:
    """A table or a column that is new has to be thought of in `ERASERS` before it is added here."""
    covered = " ".join(tables for tables, _ in ERASERS).split()
    assert sorted(covered) == sorted(
        name for name, (kind, *_) in expected_schema().items() if kind == "table"
    )
    own = " ".join(tables for tables, _ in PostgresDatabase.erasers).split()
    created = [
        each.split()[2 + (each.split()[1] == "UNLOGGED")]
        for each in postgres_statements()
        if "CREATE INDEX" not in each and each.startswith("CREATE ") and "TABLE" in each[:25]
    ]
    assert sorted(created) == sorted([*covered, *own])
    with closing(sqlite3.connect(":memory:")) as connection:
        for each in TABLES:
            connection.execute(each)
        columns = {
            table: " ".join(row[1] for row in connection.execute(f"PRAGMA table_info({table})"))
            for table in covered
        }
    assert columns == COLUMNS


COLUMNS = {
    "about": "key value",
    "runs": "id session_id principal status owner leased_until began_at changed_at signals deaths progress queue host key due_at legs record outcome mac",
    "questions": "id question answer answered_at run_id asked_at principal",
    "tickets": "run_id place text open holder held_until deposit mac",
    "blob_runs": "run_id digest",
    "blobs": "digest data",
    "outbox": "receiver state mac",
    "spending": "id ends_at body mac",
    "reservations": "spending id owner body mac",
    "turns": "session_id principal turn run_id mac",
    "workspaces": "name id version run_id owner seal mac",
    "workspace_files": "workspace path version kind mode digest size mac",
    "records": "number chain link kind key at session_id body mac state begins",
    "chains": "chain links seal",
    "workers": "owner host leased_until body mac",
}
"""The columns of each table. All those that can be about a person are in rows that are deleted, or are written again."""


# --- refused, and cut off -------------------------------------------------------------------------------


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a journal in a file."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "state" / "cache"))
    (tmp_path / "state").mkdir(mode=0o700)
    return tmp_path / "state"


def contents_of(made: World, chain: str) -> list[Any]:
    return made.journal._database.transact_now(  # pyright: ignore[reportPrivateUsage]
        lambda connection: connection.execute(
            "SELECT link, key FROM records WHERE chain = ?", (chain,)
        ).fetchall()
    )


def contents(path: Path) -> list[str]:
    with closing(sqlite3.connect(path)) as connection:
        return list(connection.iterdump())


async def test_a_run_that_a_process_executes_and_files_that_are_not_applied_are_refused(place: Path) -> None:
    """Whoever is erased has no run that goes on. The error names the runs and the calls, and nothing is deleted."""
    async with world(str(place / "runs.db"), place) as made:
        other = open_by_name(str(place / "runs.db"), watches=False)
        begun = RunRecord(id="works", session_id="s", principal=ANN, prompt="p", model="m", began_at=1.0)
        await other.runs.begin(begun)
        before = contents(place / "runs.db")
        with pytest.raises(ErasureRefused) as refused:
            await made.erase()
        assert refused.value.runs == [("works", "running")]
        with pytest.raises(ErasureRefused):  # the transaction looks itself
            await made.journal.upkeep.erase(ANN)
        assert contents(place / "runs.db") == before
        await other.runs.leave("works", "done")
        other.close()
        await made.journal.runs.take("works", turn="none")  # as an undo takes it
        assert (await made.journal.upkeep.holdings(ANN)).unfinished == [("works", "running")]
        await made.journal.runs.leave("works", "done")
        with closing(sqlite3.connect(place / "runs.db", isolation_level=None)) as connection:
            connection.execute("UPDATE records SET state = 'committed' WHERE chain = 'run works'")
        with pytest.raises(ErasureRefused, match="handrail runs discard works"):
            await made.journal.upkeep.erase(ANN)


async def test_a_workspace_that_others_have_written_to_stays(place: Path) -> None:
    """Even after their runs were forgotten. A workspace in which only the person's runs are known goes, also with a run that never wrote."""
    async with world(str(place / "runs.db"), place) as made:
        await made.works(BOB, Workspace("was-shared"))
        await made.works(ANN, Workspace("was-shared"))
        await made.works(ANN, Workspace("own"), f"{ANN}/own")
        await runs.forget(made.journal, before=datetime.now(UTC) + timedelta(1))
        assert not await ids(made.journal)
        assert made.holding(f"{ANN}/own")
        held = await made.journal.upkeep.holdings(ANN)
        assert (held.workspaces, held.shared) == (["own"], ["was-shared"])
        begun = RunRecord(id="died", session_id="s", principal=ANN, prompt="p", model="m", began_at=1.0)
        await made.journal.runs.begin(begun)
        await made.journal.workspaces.acquire("was-shared", "died")  # and never released
        await made.journal.runs.leave("died", "done")
        await made.erase()
        assert [line.name for line in await made.journal.workspaces.list()] == ["was-shared"]
        row = await made.journal.workspaces.get("was-shared")
        assert row is not None
        assert not row.run_id
        assert not (await made.journal.runs.verify()).altered
        assert not made.holding(
            f"{ANN}/own"
        )  # nor in the list of sessions, which had named it since it was forgotten
        await made.works(BOB, Workspace("was-shared"), f"{BOB}/later")


async def test_lists_that_were_altered_are_not_signed_again(place: Path) -> None:
    """If the list of sessions was altered, an erasure raises `JournalAltered` and changes nothing."""
    async with world(str(place / "runs.db"), place) as made:
        await made.fill()
        await runs.cancel(made.journal, f"{ANN}-queued")
        with closing(sqlite3.connect(place / "runs.db", isolation_level=None)) as connection:
            connection.execute("UPDATE records SET at = at + 1 WHERE chain = 'sessions' AND link = 1")
        before = contents(place / "runs.db")
        with pytest.raises(JournalAltered, match="list of sessions"):
            await made.erase()
        assert contents(place / "runs.db") == before


OF_BOB = "SELECT id FROM runs WHERE principal = 'bob-k2m9' AND session_id = 'common'"


@pytest.mark.parametrize(
    "altered",
    [
        pytest.param([f"UPDATE runs SET principal = '{ANN}' WHERE id IN ({OF_BOB})"], id="given to her"),
        pytest.param([f"UPDATE runs SET principal = 'eve' WHERE id = '{ANN}-run-own'"], id="taken from her"),
        pytest.param(
            [
                f"DELETE FROM {table} WHERE {column} IN (SELECT 'run ' || id FROM ({OF_BOB}))"
                for table, column in (("records", "chain"), ("chains", "chain"), ("runs", "'run ' || id"))
            ],
            id="removed",
        ),
        pytest.param(
            ["UPDATE records SET key = 'x' WHERE chain = 'workspace ann-q7x3-shelf'"], id="workspace"
        ),
    ],
)
async def test_an_erasure_hides_no_alteration(place: Path, altered: list[str]) -> None:
    """Whose a run is, and which runs a session has, is checked before a person is erased. Otherwise runs of others would go too, and
    the rest would verify."""
    async with world(str(place / "runs.db"), place) as made:
        await made.fill()
        await runs.cancel(made.journal, f"{ANN}-queued")
        with closing(sqlite3.connect(place / "runs.db", isolation_level=None)) as connection:
            for each in altered:
                assert connection.execute(each).rowcount
        before = contents(place / "runs.db")
        with pytest.raises(JournalAltered):
            await made.erase()
        assert contents(place / "runs.db") == before


async def test_bytes_in_the_log_are_told_while_another_process_reads(place: Path) -> None:
    """A process that reads an earlier state keeps the log. The outcome says so, and a second call empties it."""
    async with world(str(place / "runs.db"), place) as made:
        begun = RunRecord(
            id="r", session_id="s", principal=ANN, prompt=said("draft"), model="m", began_at=1.0
        )
        await made.journal.runs.begin(begun)
        await made.journal.runs.leave("r", "done")
        reader = sqlite3.connect(place / "runs.db", isolation_level=None)
        reader.execute("BEGIN")
        reader.execute("SELECT count(*) FROM runs").fetchone()
        with closing(sqlite3.connect(place / "runs.db", isolation_level=None)) as impatient:
            assert not compact(impatient)
        reader.close()
        assert (await made.erase()).is_compact
        assert not made.holding(said("draft"))


async def test_a_folder_that_is_gone_is_told(place: Path) -> None:
    """What a folder keeps for undo can't be deleted if the folder was moved away, which the outcome says."""
    async with world(str(place / "runs.db"), place) as made:
        (place / "folder").mkdir()
        with DirectoryFilesystem(place / "folder") as files:
            await made.works(ANN, files)
        (place / "folder").rename(place / "moved")
        assert (await made.erase()).unreachable == [str(place / "folder")]


async def test_sessions_that_were_forgotten_are_still_named_until_then(place: Path) -> None:
    """A person of whom only the list of sessions tells is erased from it. Of somebody of whom there is nothing, nothing is recorded."""
    async with world(str(place / "runs.db"), place) as made:
        begun = RunRecord(id="r", session_id=f"{ANN}/t", principal=ANN, prompt="p", model="m", began_at=1.0)
        await made.journal.runs.begin(begun)
        await made.journal.runs.leave("r", "done")
        await made.journal.runs.forget(["r"])
        assert made.holding(ANN)
        assert (await made.erase()).is_compact
        assert not made.holding(ANN)
        assert len(contents_of(made, "erasures")) == 1
        await runs.erase(made.journal, "nobody")
        assert len(contents_of(made, "erasures")) == 1
        assert not (await made.journal.runs.verify()).altered


async def test_a_full_disk_while_the_file_is_rewritten(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error says that the records are gone and the bytes may not be. The same call, repeated, finishes."""

    def full(connection: sqlite3.Connection) -> bool:
        raise sqlite3.OperationalError("database or disk is full")

    async with world(str(place / "runs.db"), place) as made:
        begun = RunRecord(id="r", session_id="s", principal=ANN, prompt="p", model="m", began_at=1.0)
        await made.journal.runs.begin(begun)
        await made.journal.runs.leave("r", "done")
        with monkeypatch.context() as patch:
            patch.setattr(sqlite_module, "compact", full)
            with pytest.raises(JournalError, match=r"disk is full.*room for a second copy"):
                await made.erase()
        assert (await made.erase()).is_compact
        assert not made.holding(ANN)


class Killed:
    """Counts the statements of a child process that write, and kills it before the one with this number.

    Those that create tables are not counted, because they only find out, once in a process, what a schema looks like.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.count = 0

    def __call__(self, statement: str) -> None:
        if not statement.lstrip().startswith(("SELECT", "CREATE")):
            self.count += 1
            if self.count == self.number:
                os.kill(os.getpid(), signal.SIGKILL)


def erase_and_die(name: str, number: int) -> int | None:
    """Erase the person in a child process that is killed before a statement. Returns the number of statements if it is not."""
    reading, writing = os.pipe()
    child = os.fork()
    if child:
        os.close(writing)
        with os.fdopen(reading, "rb") as pipe:
            said = pipe.read()
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) in (0, -signal.SIGKILL)
        return None if os.WIFSIGNALED(status) else int(said)
    killed = Killed(number)

    class Cursor(sqlite3.Cursor):
        def execute(self, sql: str, *values: Any) -> Any:
            killed(sql)
            return super().execute(sql, *values)

    class Connection(sqlite3.Connection):
        def execute(self, sql: str, *values: Any) -> Any:
            killed(sql)
            return super().execute(sql, *values)

        def cursor(self, factory: Any = Cursor) -> Any:
            return super().cursor(factory)

    connect = sqlite3.connect
    sqlite3.connect = lambda *given, **named: connect(*given, factory=Connection, **named)  # type: ignore[assignment]  # only in this child
    execute = psycopg.Connection.execute

    def counted(self: Any, query: Any, *values: Any, **named: Any) -> Any:
        killed(query)
        return execute(self, query, *values, **named)

    psycopg.Connection.execute = counted  # type: ignore[method-assign]  # only in this child
    try:
        kind = PostgresJournal if name.startswith("postgresql:") else SqliteJournal
        journal: AnyJournal = kind(name, watch=None, inline=True)
        accounts = journal.accounts or AccountsFile(people_path(Path(name)))
        asyncio.run(runs.erase(journal, ANN, accounts=accounts))
        os.write(writing, str(killed.count).encode())
    finally:
        os._exit(0)
    return None


async def test_an_erasure_that_is_cut_off_goes_on(place: Path, tmp_path: Path) -> None:
    """Killed before any of its statements, an erasure has deleted all or nothing of the journal, which verifies; run again, it goes on."""
    async with world(str(place / "runs.db"), place) as made:
        await made.fill()
        await runs.cancel(made.journal, f"{ANN}-queued")
        total = len((await made.journal.upkeep.holdings(ANN)).runs)
    shutil.copytree(place, tmp_path / "before", symlinks=True)

    def restore() -> None:
        shutil.rmtree(place)
        shutil.copytree(tmp_path / "before", place, symlinks=True)

    last = erase_and_die(str(place / "runs.db"), 0)
    assert last
    restore()
    whole = set[bool]()
    for number in sorted({*range(1, last, max(1, last // 12)), *range(last - 8, last + 1)}):
        assert erase_and_die(str(place / "runs.db"), number) is None, number
        async with world(str(place / "runs.db"), place) as made:
            held = await made.journal.upkeep.holdings(ANN)
            assert len(held.runs) in (0, total), number
            assert not (await made.journal.runs.verify()).altered, number
            whole.add(bool(held.runs))
            done = await made.erase() if not held.runs else None
            if done is not None:
                assert made.people.find(ANN) is None
                assert not made.holding(said("answer")), number
                assert [each["action"] for each in made.people.audit()].count("person erased") == 1
        if not held.runs:
            restore()
    assert whole == {True, False}


async def test_an_erasure_in_postgresql_that_is_cut_off_goes_on(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in SQLite: each time, everything is still there, until the transaction is committed, and then nothing."""
    monkeypatch.setenv("HANDRAIL_KEY", postgres.KEY)
    name = postgres.new_url()
    async with world(name, place) as made:
        await made.fill()
        await runs.cancel(made.journal, f"{ANN}-queued")
        total = len((await made.journal.upkeep.holdings(ANN)).runs)
        kills, held = 0, await made.journal.upkeep.holdings(ANN)
        while held.runs:
            assert len(held.runs) == total
            assert made.people.find(ANN) is not None
            kills += 1
            if erase_and_die(name, 1 + kills * (5 if DEEP else 19)) is None:
                assert not (await made.journal.runs.verify()).altered
            held = await made.journal.upkeep.holdings(ANN)
        assert kills > 4
        await made.erase()
        made.accounts.refresh()
        assert made.people.find(ANN) is None
        assert not made.holding(said("answer"))
        assert [each["action"] for each in made.people.audit()].count("person erased") == 1
        assert not (await made.journal.runs.verify()).altered


# --- retention ----------------------------------------------------------------------------------------


async def end(
    journal: AnyJournal, id: str, at: datetime, status: Any = "done", app: str = "", **more: Any
) -> None:
    """Record a run that has ended at this time."""
    begun = RunRecord(
        id=id, session_id=more.pop("session_id", id), principal=ANN, prompt="p", model="m", app=app,
        began_at=at.timestamp(), **more,
    )  # fmt: skip
    await journal.runs.begin(begun, followed=await journal.runs.turn(begun.session_id, ANN))
    await journal.runs.leave(id, status)


class Calendar:
    """A clock that tests set."""

    def __init__(self) -> None:
        self.time = NOW

    def now(self) -> datetime:
        return self.time

    def monotonic(self) -> float:
        return self.time.timestamp()


@pytest.fixture
def calendar() -> Calendar:
    return Calendar()


@pytest.fixture
def journal(tmp_path: Path, calendar: Calendar) -> Iterator[AnyJournal]:
    with closing(SqliteJournal(tmp_path / "runs.db", watch=None, clock=calendar)) as opened:
        yield opened


async def ids(journal: AnyJournal) -> set[str]:
    return {row.record.id for row in await journal.runs.list(limit=1000)}


async def test_runs_are_kept_by_age_state_and_app(journal: AnyJournal, calendar: Calendar) -> None:
    """The shortest rule for a run counts. A session goes when the last of its runs may go."""
    await end(journal, "old", NOW)
    await end(journal, "old of another app", NOW, app="b")
    await end(journal, "first", NOW, session_id="continued")
    calendar.time += timedelta(days=50)
    await end(journal, "second", calendar.time, session_id="continued")
    await end(journal, "failed", calendar.time, "failed")
    calendar.time += timedelta(days=10)
    await end(journal, "new", calendar.time)
    day = timedelta(days=1)
    rules = [Retention(40 * day, app=""), Retention(7 * day, standing=["failed"])]
    assert await sweep(journal, rules) == 2
    assert await ids(journal) == {"old of another app", "first", "second", "new"}
    assert not (await journal.runs.verify()).altered
    calendar.time += timedelta(days=35)
    assert await sweep(journal, rules) == 2
    assert await ids(journal) == {"old of another app", "new"}
    wrong: list[dict[str, Any]] = [
        {"keep": timedelta(0)},
        {"keep": day, "standing": ["parked"]},
        {"keep": day, "standing": ()},
    ]
    for each in wrong:
        with pytest.raises(DefinitionError):
            Retention(**each)


async def test_what_others_depend_on_is_kept(journal: AnyJournal, calendar: Calendar) -> None:
    """Neither retention nor `forget` deletes a session that goes on, is in use, or waits for a background run."""
    from handrail.journal.records import Parent

    await end(journal, "parent", NOW)
    child = RunRecord(
        id="child",
        session_id="child",
        principal=ANN,
        prompt="p",
        model="m",
        began_at=NOW.timestamp(),
        parent=Parent(run_id="parent", call_id="c"),
    )
    await journal.runs.begin(child)
    await journal.runs.leave("child", "parked")
    await end(journal, "used", NOW)
    await end(journal, "gone", NOW)
    await journal.runs.take("used", turn="none")
    calendar.time += timedelta(days=9)
    assert await journal.runs.forget(["parent", "used", "child", "gone"], finished=True) == ["gone"]
    await end(journal, "again", calendar.time, session_id="used2")
    assert await sweep(journal, [Retention(timedelta(days=1))]) == 0
    assert await runs.forget(journal, before=calendar.time) == ()
    await journal.runs.leave("used", "done")
    assert await runs.forget(journal, before=calendar.time + timedelta(1), standing=["failed"]) == ()
    assert await runs.forget(journal, before=calendar.time + timedelta(1), app="x") == ()
    assert set(await runs.forget(journal, before=calendar.time + timedelta(1))) == {"used", "again"}
    await journal.runs.take("child")
    await journal.runs.leave("child", "done")
    assert set(await runs.forget(journal, keep=0)) == {"parent", "child"}


def test_a_person_is_found_without_a_look_at_every_run_for_each_session() -> None:
    """The rows of runs are searched by an index for each session, or an erasure of many would hold the journal up for minutes."""
    with closing(sqlite3.connect(":memory:")) as connection:
        for each in TABLES:
            connection.execute(each)
        for query, values in ((UNRECORDED, 1), (OTHERS, 2)):
            plan = connection.execute(f"EXPLAIN QUERY PLAN {query}", ["s"] * values).fetchall()
            assert any("SEARCH" in step for *_, step in plan)
            assert not any("SCAN" in step for *_, step in plan)


async def test_retention_hides_no_removed_run(place: Path) -> None:
    """A session from which something else has removed a run is kept, so that `verify` still reports it."""
    async with world(str(place / "runs.db"), place) as made:
        for id, principal in (("a", ANN), ("b", BOB)):
            begun = RunRecord(id=id, session_id="s", principal=principal, prompt="p", model="m", began_at=1.0)
            await made.journal.runs.begin(begun)
            await made.journal.runs.leave(id, "done")
        with closing(sqlite3.connect(place / "runs.db", isolation_level=None)) as connection:
            for each in (
                "records WHERE chain = 'run b'",
                "chains WHERE chain = 'run b'",
                "runs WHERE id = 'b'",
            ):
                assert connection.execute(f"DELETE FROM {each}").rowcount
        assert await sweep(made.journal, [Retention(timedelta(microseconds=1))]) == 0
        assert (await made.journal.runs.verify()).altered


class Looked(Exception):
    """Raised in place of a pause."""


async def test_one_process_sweeps_in_an_hour(
    journal: AnyJournal, calendar: Calendar, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of all processes with the same rules, one looks through the journal each hour. A run that can't be deleted now stops none of them."""

    async def pause(seconds: float) -> None:
        raise Looked

    async def look() -> None:
        with monkeypatch.context() as patch:
            patch.setattr("handrail.runs.retention.asyncio.sleep", pause)
            with pytest.raises(Looked):
                await keep_sweeping(journal, [Retention(timedelta(minutes=1))])

    await end(journal, "old", NOW)
    calendar.time += timedelta(days=9)
    await look()
    assert await ids(journal) == set()
    await end(journal, "new", NOW)
    calendar.time += timedelta(minutes=30)
    await look()  # as another process would
    assert await ids(journal) == {"new"}
    calendar.time += timedelta(days=9)
    with monkeypatch.context() as patch:
        patch.setattr(journal.runs, "forget", journal.runs.get)  # fails: there is no such run
        await look()
    calendar.time += timedelta(hours=1)
    await look()
    assert await ids(journal) == set()


async def until_gone(journal: AnyJournal) -> None:
    while await ids(journal):
        await asyncio.sleep(0)


async def test_servers_and_workers_delete_what_was_kept_long_enough(
    journal: AnyJournal, calendar: Calendar
) -> None:
    """A server and a worker apply their rules from their start on, and end as always."""
    rules = [Retention(timedelta(days=1))]
    await end(journal, "old", NOW)
    calendar.time += timedelta(days=9)
    stop = asyncio.Event()
    working = asyncio.ensure_future(Runner(journal, [], retention=rules).run(stop))
    await until_gone(journal)
    stop.set()
    await working
    await end(journal, "new", NOW)
    calendar.time += timedelta(days=9)
    source = PromptSource(PROMPT, Adapter(ScriptedModel([]), journal=journal))
    async with ServedApp(source, journal=journal, retention=rules).lifespan():
        await until_gone(journal)


def test_the_option_names_a_state_and_a_span() -> None:
    day = timedelta(days=1)
    assert parse_retention(["90d", "failed=12h"], "app:x") == [
        Retention(90 * day, app="app:x"),
        Retention(day / 2, {"failed"}, "app:x"),
    ]
    for wrong, said in (
        ("parked=1d", "does not begin with"),
        ("1y", "not a span of time"),
        ("", "not a span"),
    ):
        with pytest.raises(UsageError, match=said):
            parse_retention([wrong], "app:x")
