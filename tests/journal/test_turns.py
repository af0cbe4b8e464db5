"""Laws of turns in every journal: one run at a time works on a session, and a session in memory must include the last turn."""

import sqlite3
from pathlib import Path

import pytest

from handrail.errors import JournalAltered, RunBusy, SessionBusy, SessionOutdated
from handrail.journal.protocol import Journal
from handrail.journal.records import Entry, RunCopy, RunRow
from handrail.journal.sql.leases import LEASE_SECONDS
from handrail.journal.sqlite import SqliteJournal
from journal.test_journal_contract import (
    Hands,
    claimed,
    clock,
    journal,
    opening,
    processes,
    request,
    run,
    unit,
)

__all__ = ["clock", "journal", "opening", "processes"]


async def begin(journal: Journal, id: str, session: str = "s") -> None:
    """Begin a run on a session that has just been loaded."""
    await journal.runs.begin(run(id, session), followed=await journal.runs.turn(session, "ada"))


async def test_a_run_has_the_turn_until_it_parks_or_ends(processes: tuple[Journal, Journal]):
    first, second = processes
    await begin(first, "a")
    for other in processes:
        with pytest.raises(SessionBusy) as busy:
            await begin(other, "b")
        assert (busy.value.session, busy.value.run_id, busy.value.owner) == ("s", "a", first.owner)
    await begin(second, "elsewhere", "another session")
    await first.runs.leave("a", "parked")
    await begin(second, "b")
    with pytest.raises(SessionBusy):
        await first.runs.take("a")
    await second.runs.leave("b", "done")
    await first.runs.take("a")
    with pytest.raises(SessionBusy):
        await begin(second, "c")
    assert not (await first.runs.verify()).altered


async def test_a_run_begins_only_on_a_session_that_includes_the_last_turn(journal: Journal):
    assert await journal.runs.turn("s", "ada") is None
    own = await journal.runs.begin(run("a"))
    during = await journal.runs.turn("s", "ada")
    await journal.calls.commit(unit("c", "a"))
    await journal.runs.leave("a", "done")
    for outdated in (None, during):  # never loaded, and loaded before the commit
        with pytest.raises(SessionOutdated):
            await journal.runs.begin(run("b"), followed=outdated)
    loaded = await journal.runs.turn("s", "ada")
    await journal.runs.begin(run("b"), followed=own)
    await journal.runs.leave("b", "done")
    for outdated in (own, loaded):
        with pytest.raises(SessionOutdated):
            await journal.runs.begin(run("c"), followed=outdated)
    assert [row.record.id for row in await journal.runs.list(session_id="s")] == ["a", "b"]


async def test_a_session_that_was_loaded_while_nothing_was_recorded_is_up_to_date(journal: Journal):
    await begin(journal, "a")
    await journal.calls.commit(unit("c", "a"))
    during = await journal.runs.turn("s", "ada")
    await journal.runs.leave("a", "parked")
    await journal.runs.begin(run("b"), followed=during)
    assert [row.record.id for row in await journal.runs.list(session_id="s")] == ["a", "b"]


async def test_a_process_whose_lease_has_ended_loses_its_run_with_the_turn(
    processes: tuple[Journal, Journal], clock: Hands
):
    """It can't add anything to the run any more. The run can be resumed, and the lost process counts as a death."""
    frozen, other = processes
    await begin(frozen, "a")
    await frozen.calls.commit(unit("c1", "a"))
    loaded = await other.runs.turn("s", "ada")
    clock.seconds = LEASE_SECONDS - 1
    with pytest.raises(SessionBusy):
        await other.runs.begin(run("b"), followed=loaded)
    clock.seconds = LEASE_SECONDS + 1
    await other.runs.begin(run("b"), followed=loaded)
    with pytest.raises(RunBusy):
        await frozen.calls.commit(unit("c2", "a"))
    with pytest.raises(RunBusy):
        await frozen.calls.note("a", Entry("verb", ".1", 1.0, b""))
    with pytest.raises(RunBusy):
        await frozen.runs.leave("a", "done")
    assert isinstance((await frozen.runs.keep("a"))["a"], RunBusy)
    assert [each.call_id for each in await other.calls.load_session("s")] == ["c1"]
    row = await other.runs.get("a")
    assert (row.status, row.owner, row.deaths) == ("running", "", 1)
    await other.runs.leave("b", "done")
    assert (await frozen.runs.take("a")).deaths == 1
    assert not (await other.runs.verify()).altered


async def test_what_a_process_adds_after_its_lease_has_ended_is_not_missed(
    processes: tuple[Journal, Journal], clock: Hands
):
    """If a process that counted as gone commits once more, a session that was loaded before is out of date."""
    frozen, other = processes
    await begin(frozen, "a")
    clock.seconds = LEASE_SECONDS + 1
    loaded = await other.runs.turn("s", "ada")
    await frozen.calls.commit(unit("late", "a"))
    with pytest.raises(SessionOutdated):
        await other.runs.begin(run("b"), followed=loaded)
    assert (await other.runs.get("a")).owner == frozen.owner, "a refused run took another one away"
    await begin(other, "b")
    with pytest.raises(RunBusy):
        await frozen.calls.commit(unit("too late", "a"))


async def test_a_run_that_kills_its_processes_is_counted_although_others_take_its_turn(
    processes: tuple[Journal, Journal], clock: Hands
):
    """A run without progress is not resumed for ever, even if another run takes the turn after each of its deaths."""
    deadly, other = processes
    await begin(deadly, "a")
    for death in (1, 2, 3):
        clock.seconds += LEASE_SECONDS + 1
        await begin(other, f"b{death}")
        await other.runs.leave(f"b{death}", "done")
        assert (await deadly.runs.take("a")).deaths == death
    await deadly.runs.leave("a", "running")  # it was released, so this is no death
    assert (await deadly.runs.take("a")).deaths == 0


async def test_a_run_is_taken_without_a_turn_while_another_one_works(journal: Journal):
    """Cancelling a parked run does not wait for its session, and adds nothing to it."""
    await begin(journal, "a")
    await journal.runs.leave("a", "parked")
    own = await journal.runs.begin(run("b"), followed=await journal.runs.turn("s", "ada"))
    assert (await journal.runs.take("a", turn="none")).status == "parked"
    await journal.runs.leave("a", "cancelled")
    with pytest.raises(SessionBusy):
        await begin(journal, "c")
    await journal.runs.leave("b", "done")
    await journal.runs.begin(run("c"), followed=own)


async def test_an_undo_excludes_other_runs_and_leaves_sessions_up_to_date(journal: Journal):
    own = await journal.runs.begin(run("a"))
    await journal.runs.stop("a")
    await journal.runs.leave("a", "parked", due_at=7.0)
    before = await journal.runs.get("a")
    await journal.runs.take("a", turn="same")
    with pytest.raises(SessionBusy):
        await begin(journal, "b")
    await journal.runs.leave("a", before.status, due_at=before.due_at)
    after = await journal.runs.get("a")
    assert (after.status, after.legs, after.due_at) == ("parked", before.legs, before.due_at)
    assert after.stopping, "a request to cancel the run was lost"
    await journal.runs.begin(run("b"), followed=own)


async def test_a_finished_run_that_is_taken_leaves_the_turn(journal: Journal):
    await begin(journal, "a")
    await journal.runs.leave("a", "done")
    own = await journal.runs.begin(run("b"), followed=await journal.runs.turn("s", "ada"))
    await journal.runs.take("a")
    await journal.runs.leave("a", "done")
    await journal.runs.leave("b", "done")
    await journal.runs.begin(run("c"), followed=own)
    assert [row.record.id for row in await journal.runs.list(session_id="s")] == ["a", "b", "c"]


async def test_a_worker_claims_no_run_of_a_session_in_use(processes: tuple[Journal, Journal]):
    """A submitted run waits for its session, whoever works on it, and has its turn as soon as it is claimed."""
    worker, other = processes
    await begin(other, "direct")
    await worker.queue.submit(request("queued", "s"))
    await other.runs.leave("direct", "done")
    followed = await other.runs.turn("s", "ada")
    assert await claimed(worker) == "queued"
    with pytest.raises(SessionBusy):
        await other.runs.begin(run("direct 2"), followed=followed)
    with pytest.raises(SessionOutdated):  # it was loaded before the claim
        await worker.runs.begin(request("queued", "s"), followed=followed)
    await worker.runs.begin(request("queued", "s"), followed=await worker.runs.turn("s", "ada"))
    await worker.runs.leave("queued", "parked", due_at=0.0)
    await begin(other, "direct 3")
    assert await claimed(worker) == ""
    assert [row.record.id for row in await worker.queue.due()] == []
    await other.runs.leave("direct 3", "done")
    assert await claimed(worker) == "queued"


async def test_sessions_of_different_principals_have_their_own_turns(journal: Journal):
    """Nobody learns of, or holds up, a session of somebody else that has the same id."""
    own = await journal.runs.begin(run("ada's"))
    await journal.runs.begin(run("bob's", principal="bob"))
    await journal.runs.leave("ada's", "done")
    await journal.runs.begin(run("ada's 2"), followed=own)
    assert {row.record.id for row in await journal.runs.list(principal="ada")} == {"ada's", "ada's 2"}


async def test_a_copy_is_a_turn_of_its_session(journal: Journal):
    own = await journal.runs.begin(run("a"))
    await journal.runs.leave("a", "done")
    await journal.runs.add(RunCopy(row=RunRow(record=run("copy"), status="done")))
    with pytest.raises(SessionOutdated):
        await journal.runs.begin(run("b"), followed=own)
    await begin(journal, "b")


async def test_a_forgotten_session_begins_anew(journal: Journal):
    await begin(journal, "a")
    await journal.runs.leave("a", "done")
    first = await journal.runs.turn("s", "ada")
    await journal.runs.forget(["a"])
    assert await journal.runs.turn("s", "ada") is None
    await journal.runs.begin(run("a"))
    await journal.runs.leave("a", "done")
    with pytest.raises(SessionOutdated):
        await journal.runs.begin(run("b"), followed=first)
    assert not (await journal.runs.verify()).altered


@pytest.mark.parametrize(
    ("change", "done"),
    [
        ("UPDATE turns SET turn = 'mine'", "changed"),
        ("UPDATE turns SET run_id = 'b'", "changed"),
        ("DELETE FROM turns", "removed"),
    ],
)
async def test_an_altered_turn_is_found(tmp_path: Path, change: str, done: str):
    """A changed row is refused when a run would begin, and a removed one is found by `verify`."""
    journal = SqliteJournal(tmp_path / "runs.db", watch=None)
    await begin(journal, "a")
    await journal.runs.leave("a", "done")
    loaded = await journal.runs.turn("s", "ada")
    connection = sqlite3.connect(tmp_path / "runs.db", isolation_level=None)
    connection.execute(change)
    connection.close()
    (found,) = (await journal.runs.verify()).altered
    assert (found.chain, found.id) == ("session", "s")
    assert found.problem == f"its row in the table of turns was {done}"
    if "UPDATE" in change:
        with pytest.raises(JournalAltered):
            await journal.runs.begin(run("b"), followed=loaded)
    journal.close()
