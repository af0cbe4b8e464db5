"""Laws of workspaces in every journal: which run has one, what a commit changes, and what an undo restores."""

import asyncio
import hashlib
import sqlite3
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest

from handrail.errors import (
    BlobNotFoundError,
    JournalAltered,
    RunBusy,
    UndoRefused,
    WorkspaceBusy,
)
from handrail.journal.any_journal import AnyJournal
from handrail.journal.postgres.journal import PostgresJournal
from handrail.journal.records import (
    CommitUnit,
    Entry,
    RunRecord,
    WorkspaceChange,
    WorkspaceDelta,
    WorkspaceFile,
    WorkspaceLine,
)
from handrail.journal.sqlite import MemoryJournal, SqliteJournal
from support import postgres

STORES = ("memory", "sqlite", "postgres")
FOLDER = WorkspaceFile("folder", 0o755)


@pytest.fixture
def open_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], AnyJournal]]:
    opened: list[AnyJournal] = []
    monkeypatch.setenv("HANDRAIL_KEY", postgres.KEY)
    url = cache(postgres.new_url)

    def open_store(store: str) -> AnyJournal:
        if store == "memory":
            opened.append(MemoryJournal())
        elif store == "postgres":
            opened.append(PostgresJournal(url(), watch=None))
        else:
            opened.append(SqliteJournal(tmp_path / "runs.db", watch=None))
        return opened[-1]

    yield open_store
    for each in opened:
        each.close()


@pytest.fixture(params=STORES)
def journal(request: pytest.FixtureRequest, open_store: Callable[[str], AnyJournal]) -> AnyJournal:
    journal = open_store(request.param)
    asyncio.run(begin(journal, "r"))
    return journal


async def begin(journal: AnyJournal, run_id: str) -> None:
    await journal.runs.begin(
        RunRecord(id=run_id, session_id=run_id, principal="p", prompt="p", model="m", began_at=1.0)
    )


def file(content: bytes, mode: int = 0o644) -> WorkspaceFile:
    return WorkspaceFile("file", mode, hashlib.sha256(content).hexdigest(), len(content))


def unit(delta: WorkspaceDelta, call: str = "c1", run: str = "r") -> CommitUnit:
    return CommitUnit(run_id=run, call_id=call, session_id=run, place=call, workspaces=(delta,))


async def commit(
    journal: AnyJournal,
    changes: dict[str, tuple[bytes | None, bytes | None]],
    call: str = "c1",
    run: str = "r",
) -> CommitUnit:
    """Acquire the workspace for a run, and commit a call that changes each path from its old to its new content."""
    row = await journal.workspaces.acquire("w", run)
    await journal.workspaces.put([new for _, new in changes.values() if new is not None], run_id=run)
    states = [
        WorkspaceChange(path, *(None if each is None else file(each) for each in change))
        for path, change in changes.items()
    ]
    made = unit(WorkspaceDelta(name="w", id=row.id, base=row.version, changes=states), call, run)
    await journal.calls.commit(made)
    return made


def undone(call: str = "c1") -> Entry:
    return Entry("undone", call, 2.0, b"x")


async def test_a_commit_changes_the_files_together_with_the_record_of_the_call(journal: AnyJournal):
    made = await commit(journal, {"a": (None, b"one"), "b": (None, b"two")})
    assert await journal.workspaces.files("w") == {"a": file(b"one"), "b": file(b"two")}
    assert [each.workspaces for each in await journal.calls.load("r")] == [made.workspaces]
    assert not await journal.calls.unapplied()
    await commit(journal, {"a": (b"one", None), "b": (b"two", b"three")}, "c2")
    assert await journal.workspaces.files("w") == {"a": None, "b": file(b"three")}
    row = await journal.workspaces.get("w")
    assert row is not None
    assert (row.version, row.run_id) == (2, "r")


async def test_only_what_changed_after_a_version_is_read(journal: AnyJournal):
    await commit(journal, {"a": (None, b"one"), "b": (None, b"two")})
    await commit(journal, {"b": (b"two", None)}, "c2")
    assert await journal.workspaces.files("w", since=1) == {"b": None}
    assert await journal.workspaces.files("w", since=2) == {}


async def test_a_commit_whose_bytes_are_not_stored_changes_nothing(journal: AnyJournal):
    row = await journal.workspaces.acquire("w", "r")
    delta = WorkspaceDelta(name="w", id=row.id, base=0, changes=[WorkspaceChange("a", None, file(b"one"))])
    with pytest.raises(BlobNotFoundError):
        await journal.calls.commit(unit(delta))
    assert (await journal.workspaces.files("w"), await journal.calls.load("r")) == ({}, ())


async def test_a_commit_to_an_earlier_version_is_refused(journal: AnyJournal):
    made = await commit(journal, {"a": (None, b"one")})
    with pytest.raises(WorkspaceBusy):
        await journal.calls.commit(msgspec.structs.replace(made, call_id="c2"))
    assert len(await journal.calls.load("r")) == 1


async def test_a_second_run_is_refused_by_name_until_the_first_has_left(journal: AnyJournal):
    await begin(journal, "r2")
    await journal.workspaces.acquire("w", "r")
    with pytest.raises(WorkspaceBusy, match="in use by the run 'r'") as refused:
        await journal.workspaces.acquire("w", "r2")
    assert (refused.value.workspace, refused.value.run_id, refused.value.owner) == ("w", "r", journal.owner)
    await journal.workspaces.release("w", "r2")  # r2 does not have it, so nothing changes
    with pytest.raises(WorkspaceBusy):
        await journal.workspaces.acquire("w", "r2")
    await journal.workspaces.release("w", "r")
    assert (await journal.workspaces.acquire("w", "r2")).run_id == "r2"
    assert (await journal.workspaces.acquire("other", "r")).id != (
        await journal.workspaces.acquire("w", "r2")
    ).id


async def test_a_run_that_has_ended_does_not_keep_a_workspace_that_it_did_not_release(journal: AnyJournal):
    await begin(journal, "r2")
    await journal.workspaces.acquire("w", "r")
    await journal.runs.leave("r", "done")
    assert (await journal.workspaces.acquire("w", "r2")).run_id == "r2"


async def test_a_submitted_run_that_was_interrupted_keeps_its_workspace_for_the_worker_that_continues_it(
    journal: AnyJournal,
):
    """A submitted run that was interrupted keeps its workspace, because its next commit builds on its last one. A run that waits for an answer does not."""
    await begin(journal, "r2")
    record = RunRecord(
        id="s", session_id="s", principal="p", prompt="p", model="m", began_at=1.0, app="a:b", request=b"x"
    )
    row = await journal.queue.submit(record)
    await journal.queue.claim([row.queue])
    begun = msgspec.structs.replace(record, request=b"", begin=b"x")
    await journal.runs.begin(begun, followed=await journal.runs.turn("s", "p"))
    await journal.workspaces.acquire("w", "s")
    await journal.workspaces.release("w", "s")
    with pytest.raises(WorkspaceBusy, match="kept for the run 's', which was interrupted") as refused:
        await journal.workspaces.acquire("w", "r2")
    assert refused.value.owner == ""
    await journal.runs.leave(
        "s", "parked", due_at=1.0
    )  # a worker that is stopped parks its runs, and makes them due
    assert await journal.workspaces.holders() == {"w": "s"}
    await journal.runs.take("s")
    assert (await journal.workspaces.acquire("w", "s")).run_id == "s"
    await journal.workspaces.release("w", "s")
    await journal.runs.leave("s", "parked")
    assert (await journal.workspaces.acquire("w", "r2")).run_id == "r2"


async def test_the_holders_are_the_runs_that_keep_others_from_their_workspaces(journal: AnyJournal):
    await begin(journal, "r2")
    assert await journal.workspaces.holders() == {}
    for name, run in (("w", "r"), ("other", "r2"), ("left", "r")):
        await journal.workspaces.acquire(name, run)
    await journal.workspaces.release("left", "r")
    assert await journal.workspaces.holders() == {"w": "r", "other": "r2"}
    await journal.runs.leave("r2", "parked")  # it has not released the workspace
    assert await journal.workspaces.holders() == {"w": "r"}


async def test_the_list_shows_each_workspace_with_its_files_and_the_run_that_has_it(journal: AnyJournal):
    assert await journal.workspaces.list() == []
    await commit(journal, {"a": (None, b"one"), "b": (None, b"three"), "c": (None, b"x")})
    await commit(journal, {"c": (b"x", None)}, "c2")
    await journal.workspaces.acquire("free", "r")
    await journal.workspaces.release("free", "r")
    assert await journal.workspaces.list() == [WorkspaceLine("free"), WorkspaceLine("w", 2, 2, 8, "r")]


async def test_a_run_that_lost_its_workspace_commits_nothing(journal: AnyJournal):
    await begin(journal, "r2")
    made = await commit(journal, {"a": (None, b"one")})
    await journal.workspaces.release("w", "r")
    await commit(journal, {"a": (b"one", b"two")}, "c1", "r2")
    [delta] = made.workspaces
    late = msgspec.structs.replace(delta, base=2, changes=[WorkspaceChange("a", file(b"two"), file(b"one"))])
    with pytest.raises(WorkspaceBusy, match="'r2'"):
        await journal.calls.commit(unit(late, "c2"))
    assert await journal.workspaces.files("w") == {"a": file(b"two")}


@pytest.mark.parametrize("store", ["sqlite", "postgres"])
async def test_a_live_process_keeps_its_workspace_and_a_run_that_moves_takes_it_along(
    store: str, open_store: Callable[[str], AnyJournal]
):
    here, there = open_store(store), open_store(store)
    await begin(here, "r")
    await begin(there, "r2")
    await here.workspaces.acquire("w", "r")
    with pytest.raises(WorkspaceBusy):
        await there.workspaces.acquire("w", "r2")
    with pytest.raises(RunBusy):  # it does not own the run
        await there.workspaces.acquire("w", "r")
    await here.runs.leave("r", "parked")
    await there.runs.take("r")
    assert (await there.workspaces.acquire("w", "r")).owner == there.owner
    await here.workspaces.release("w", "r")  # this process no longer has it, so nothing changes
    row = await here.workspaces.get("w")
    assert row is not None
    assert row.owner == there.owner


async def test_an_undo_is_the_opposite_change_and_is_recorded_with_it(journal: AnyJournal):
    await commit(journal, {"a": (None, b"one")})
    made = await commit(journal, {"a": (b"one", b"two"), "b": (None, b"new")}, "c2")
    await journal.workspaces.release("w", "r")
    await journal.runs.leave("r", "done")
    with pytest.raises(RunBusy):  # so that nobody works on the run's session meanwhile
        await journal.workspaces.undo([(made, undone("c2"))])
    await journal.runs.take("r", turn="same")
    await journal.workspaces.undo([(made, undone("c2"))])
    assert await journal.workspaces.files("w") == {"a": file(b"one"), "b": None}
    assert [entry.key for entry in await journal.calls.entries("r") if entry.kind == "undone"] == ["c2"]


async def test_an_undo_is_refused_if_its_paths_were_changed_since(journal: AnyJournal):
    made = await commit(journal, {"a": (None, b"one"), "b": (None, b"two")})
    await commit(journal, {"a": (b"one", b"mine")}, "c2")
    await journal.workspaces.release("w", "r")
    await journal.runs.leave("r", "done")
    await journal.runs.take("r", turn="same")
    with pytest.raises(UndoRefused) as refused:
        await journal.workspaces.undo([(made, undone())])
    assert refused.value.places == ("a",)
    assert await journal.workspaces.files("w") == {"a": file(b"mine"), "b": file(b"two")}
    assert not await journal.calls.entries("r")


async def test_several_are_undone_or_none(journal: AnyJournal):
    """If one of the commits can't be undone, those before it in the list are not undone either, and nothing is recorded."""
    first = await commit(journal, {"a": (None, b"one"), "b": (None, b"two")})
    second = await commit(journal, {"c": (None, b"three")}, "c2")
    await commit(journal, {"a": (b"one", b"mine")}, "c3")
    await journal.workspaces.release("w", "r")
    await journal.runs.leave("r", "done")
    await journal.runs.take("r", turn="same")
    with pytest.raises(UndoRefused):
        await journal.workspaces.undo([(second, undone("c2")), (first, undone())])
    assert await journal.workspaces.files("w") == {"a": file(b"mine"), "b": file(b"two"), "c": file(b"three")}
    assert not await journal.calls.entries("r")


async def test_an_undo_does_not_remove_a_folder_that_others_have_filled(journal: AnyJournal):
    row = await journal.workspaces.acquire("w", "r")
    made = unit(WorkspaceDelta(name="w", id=row.id, base=0, changes=[WorkspaceChange("d", None, FOLDER)]))
    await journal.calls.commit(made)
    await commit(journal, {"d/a": (None, b"one"), "d0": (None, b"no member")}, "c2")
    await journal.workspaces.release("w", "r")
    await journal.runs.leave("r", "done")
    await journal.runs.take("r", turn="same")
    with pytest.raises(UndoRefused) as refused:
        await journal.workspaces.undo([(made, undone())])
    assert refused.value.places == ("d/a",)


async def test_an_undo_waits_until_no_run_has_the_workspace(journal: AnyJournal):
    await begin(journal, "r2")
    made = await commit(journal, {"a": (None, b"one")})
    await journal.workspaces.release("w", "r")
    await journal.runs.leave("r", "done")
    await journal.workspaces.acquire("w", "r2")
    await journal.runs.take("r", turn="same")
    with pytest.raises(WorkspaceBusy, match="'r2'"):
        await journal.workspaces.undo([(made, undone())])


async def test_bytes_are_kept_as_long_as_the_workspace_or_a_run_refers_to_them(journal: AnyJournal):
    await begin(journal, "r2")
    await commit(journal, {"a": (None, b"one"), "b": (None, b"old")})
    await commit(journal, {"b": (b"old", b"new")}, "c2")
    digests = {name: file(name.encode()).digest for name in ("one", "old", "new", "never")}
    assert set(await journal.workspaces.has(digests.values(), run_id="r")) == set(digests.values()) - {
        digests["never"]
    }
    await journal.workspaces.release("w", "r")
    await journal.runs.leave("r", "done")
    await journal.runs.forget(["r"])
    assert set(await journal.workspaces.fetch([digests["one"], digests["new"]])) == {
        digests["one"],
        digests["new"],
    }
    with pytest.raises(BlobNotFoundError):  # only an undo of the forgotten run needed these bytes
        await journal.workspaces.fetch([digests["old"]])
    assert not (await journal.runs.verify()).altered


async def test_many_files_are_committed_and_read_at_once(journal: AnyJournal):
    content = {f"f{number:04}": b"%d" % number for number in range(701)}
    await commit(journal, {path: (None, new) for path, new in content.items()})
    assert len(await journal.workspaces.files("w")) == 701
    digests = [file(new).digest for new in content.values()]
    assert len(await journal.workspaces.fetch(digests)) == 701


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE workspace_files SET mode = 511 WHERE path = 'a'",
        "DELETE FROM workspace_files WHERE path = 'a'",
        "UPDATE workspaces SET version = 7",
        "DELETE FROM workspaces",
        "UPDATE workspaces SET version = X'01'",
    ],
)
async def test_rows_that_something_else_changed_are_noticed(
    statement: str, open_store: Callable[[str], AnyJournal], tmp_path: Path
):
    journal: Any = open_store("sqlite")
    await begin(journal, "r")
    await commit(journal, {"a": (None, b"one"), "b": (None, b"two")})
    with sqlite3.connect(tmp_path / "runs.db") as connection:
        connection.execute(statement)
    connection.close()
    with pytest.raises(JournalAltered) as refused:
        await journal.workspaces.files("w")
    await journal.workspaces.acquire("other", "r")
    other, altered = await journal.workspaces.list()
    assert (other.name, other.altered, other.run_id) == ("other", "", "r")
    assert altered == WorkspaceLine("w", altered=refused.value.problem)
    assert [each.chain for each in (await journal.runs.verify()).altered] == ["workspace"]


@pytest.mark.parametrize("store", ["sqlite", "postgres"])
async def test_missing_bytes_of_a_file_are_noticed(store: str, open_store: Callable[[str], AnyJournal]):
    """If something else deletes the bytes of a workspace's file, `verify` names them, as it does for those of a run."""
    journal: Any = open_store(store)
    await begin(journal, "r")
    await commit(journal, {"a": (None, b"one"), "b": (None, b"two")})
    assert not (await journal.runs.verify()).altered
    gone = hashlib.sha256(b"one").hexdigest()
    await journal._database.transact(
        lambda connection: connection.execute("DELETE FROM blobs WHERE digest = ?", (gone,))
    )
    [altered] = (await journal.runs.verify()).altered
    assert (altered.chain, altered.id, altered.problem) == ("blob", gone, "its bytes are missing")


_KEPT = ("workspaces", "workspace_files", "chains", "records")


@pytest.mark.parametrize("store", ["sqlite", "postgres"])
async def test_rows_that_were_set_back_to_an_earlier_version_are_noticed(
    store: str, open_store: Callable[[str], AnyJournal]
):
    """Earlier rows of a workspace are never delivered, even if all of them are restored together, and `verify` finds them.

    If the workspace's chain was set back as well, `verify` still finds that a run has recorded a newer version.
    """
    journal: Any = open_store(store)
    database = journal._database
    where = {each: "chain LIKE 'workspace %'" if each in ("chains", "records") else "1 = 1" for each in _KEPT}

    def copied(connection: Any) -> dict[str, list[Any]]:
        return {
            table: connection.execute(f"SELECT * FROM {table} WHERE {which}").fetchall()
            for table, which in where.items()
        }

    async def restore(tables: dict[str, list[Any]]) -> None:
        def restored(connection: Any) -> None:
            for table, rows in tables.items():
                connection.execute(f"DELETE FROM {table} WHERE {where[table]}")
                for row in rows:
                    connection.execute(f"INSERT INTO {table} VALUES ({', '.join('?' * len(row))})", row)

        await database.transact(restored)

    await begin(journal, "r")
    await commit(journal, {"a": (None, b"one"), "b": (None, b"two")})
    earlier = await database.transact(copied)
    await commit(journal, {"a": (b"one", b"new")}, "c2")
    newest = await database.transact(copied)
    assert not (await journal.runs.verify()).altered
    for tables in (_KEPT[:2], _KEPT[:1], _KEPT[2:], _KEPT[:3], (*_KEPT[:2], "records")):
        await restore({each: earlier[each] for each in tables})
        for use in (
            lambda: journal.workspaces.files("w"),
            lambda: journal.workspaces.files("w", since=1),
            lambda: journal.workspaces.get("w"),
            lambda: journal.workspaces.acquire("w", "r"),
            lambda: commit(journal, {"a": (b"one", b"late")}, "c3"),
        ):
            with pytest.raises(JournalAltered):
                await use()
        assert {each.chain for each in (await journal.runs.verify()).altered} == {"workspace"}
        await restore(newest)
        assert not (await journal.runs.verify()).altered
    await restore(earlier)
    assert [each.chain for each in (await journal.runs.verify()).altered] == ["workspace"]
    await restore({each: [] for each in _KEPT[:2]})
    with pytest.raises(JournalAltered, match="removed"):
        await journal.workspaces.acquire("w", "r")
