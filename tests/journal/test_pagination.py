"""Pages of a principal's runs and sessions, and lists of the questions to that principal."""

import asyncio
import sqlite3
import tempfile
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from handrail.errors import RunUnknown
from handrail.journal.protocol import Journal
from handrail.journal.records import CommitUnit, Mark, QuestionRecord, RunCopy, RunRecord, RunRow, SessionRow
from handrail.journal.sqlite import MemoryJournal, SqliteJournal
from handrail.question import Question
from handrail.runs import list_runs
from support.examples import at_most
from support.parked_runs import answer_to

pytestmark = pytest.mark.once  # the pages do not depend on the Python version

NOW = datetime(2026, 1, 1, tzinfo=UTC)

RUNS = st.lists(
    st.tuples(
        st.integers(0, 3),  # start time, shared by many runs
        st.sampled_from(["ada", "bob", ""]),
        st.sampled_from(["s", "t", "u", "v"]),
        st.integers(0, 3),  # time of the last change
        st.integers(0, 2),  # number of open questions
    ),
    max_size=12,
)


def question(run_id: str, number: int, principal: str, at: int) -> Question:
    return Question(
        id=f"{run_id}?{number}",
        kind="input",
        name="pick",
        message="Which?",
        payload={},
        schema={},
        digest="0" * 64,
        principal=principal,
        asked_by=(),
        call_id="c",
        asked_at=NOW + timedelta(seconds=at),
        run_id=run_id,
    )


class Hands:
    """A clock that stands still until a test sets it."""

    def __init__(self) -> None:
        self.at = 0.0

    def now(self) -> datetime:
        return datetime.fromtimestamp(self.at, UTC)

    def monotonic(self) -> float:
        return self.at


async def fill(
    journal: Journal, clock: Hands, runs: list[tuple[int, str, str, int, int]]
) -> list[asyncio.Future[Any]]:
    """Record runs with open questions, and return the tasks that wait for answers."""
    asking: list[asyncio.Future[Any]] = []
    for number, (began, principal, session, changed, waiting) in enumerate(runs):
        record = RunRecord(
            id=f"run-{number * 7 % 13:02}",
            session_id=f"{principal}/{session}",
            principal=principal,
            prompt="p",
            model="m",
            began_at=float(began),
        )
        await journal.runs.add(
            RunCopy(
                row=RunRow(record=record, status="parked", changed_at=float(changed)), entries=(), units=()
            )
        )
        if not waiting:
            continue
        clock.at = float(changed)
        await journal.runs.take(record.id)
        for which in range(waiting):
            asked = question(record.id, which, principal, len(asking))
            asking.append(asyncio.ensure_future(journal.questions.ask(asked)))
            while not any(each.id == asked.id for each in await journal.questions.open(record.id)):
                await asyncio.sleep(0)
        await journal.runs.leave(record.id, "parked")
    return asking


async def all_pages(journal: Journal, principal: str | None, limit: int) -> list[RunRow]:
    found: list[RunRow] = []
    before: Mark | None = None
    while page := await journal.runs.list(principal=principal, limit=limit, before=before):
        found += page
        before = page[-1].record.mark
    return found


async def all_sessions(journal: Journal, principal: str, limit: int) -> list[SessionRow]:
    found: list[SessionRow] = []
    before: Mark | None = None
    while page := await journal.runs.sessions(principal, limit=limit, before=before):
        assert len(page) <= limit
        found += page
        before = page[-1].mark
    return found


@settings(max_examples=at_most(60), deadline=None)
@given(runs=RUNS, limit=st.integers(1, 5))
async def test_pages_have_everything_once_and_both_journals_say_the_same(
    runs: list[tuple[int, str, str, int, int]], limit: int
):
    """Pages list each of a principal's runs once, newest first, and each session once, last changed first. Both journals give the same pages."""
    with tempfile.TemporaryDirectory() as folder:
        clock = Hands()
        on_disk = SqliteJournal(Path(folder) / "runs.db", watch=None, inline=True, clock=clock)
        said: list[Any] = []
        for journal in (MemoryJournal(clock), on_disk):
            asking = await fill(journal, clock, runs)
            every = [await all_pages(journal, who, limit) for who in (None, "ada", "bob", "", "eve")]
            whole = sorted((row.record.mark for row in every[0]), reverse=True)
            assert [row.record.mark for row in every[0]] == whole
            assert len(set(whole)) == len(runs)
            for who, rows in zip(("ada", "bob", "", "eve"), every[1:], strict=True):
                assert rows == [row for row in every[0] if row.record.principal == who]
                lines = await list_runs(journal, principal=who, limit=1000)
                assert [line.row for line in lines] == rows
            sessions = [await all_sessions(journal, who, limit) for who in ("ada", "bob", "", "eve")]
            for who, rows, found in zip(("ada", "bob", "", "eve"), every[1:], sessions, strict=True):
                check_sessions(rows, found)
                waiting = await journal.questions.open(principal=who)
                assert len(waiting) == sum(each.questions for each in found)
                assert {each.principal for each in waiting} <= {who}
            said.append((every, sessions, await journal.questions.open()))
            for each in asking:
                each.cancel()
            await asyncio.gather(*asking, return_exceptions=True)
        assert said[0] == said[1]
        on_disk.close()


def check_sessions(rows: list[RunRow], found: list[SessionRow]) -> None:
    """Check that the sessions are in order, that each is listed once, and that each sums up its own runs."""
    assert [each.mark for each in found] == sorted((each.mark for each in found), reverse=True)
    assert {each.session_id for each in found} == {row.record.session_id for row in rows}
    assert len(found) == len({each.session_id for each in found})
    for each in found:
        own = [row for row in rows if row.record.session_id == each.session_id]
        assert (each.runs, each.newest, each.first) == (len(own), own[0], own[-1].record)
        assert each.changed_at == max(row.changed_at for row in own)
        assert each.questions == sum(row.questions for row in own)
        assert each.began_at == own[-1].record.began_at


def connection_of(journal: SqliteJournal) -> sqlite3.Connection:
    """Return the database connection of a journal that writes inline."""
    connection: Any = journal._database._connection  # pyright: ignore[reportPrivateUsage]
    assert connection is not None
    return connection


async def test_somebodys_runs_sessions_and_questions_are_found_by_an_index(tmp_path: Path):
    """A principal's runs, sessions and questions are found by an index, without a scan of other principals' rows."""
    journal = SqliteJournal(tmp_path / "runs.db", watch=None, inline=True)
    connection = connection_of(journal)
    queries: list[str] = []
    connection.set_trace_callback(queries.append)
    await journal.runs.list(principal="ada", limit=10, before=(1.0, "x"))
    await journal.runs.sessions("ada", limit=10, before=(1.0, "x"))
    await journal.questions.open(principal="ada")
    connection.set_trace_callback(None)
    seen = [
        row[3]
        for query in queries
        if query.startswith(("SELECT", "WITH"))
        for row in connection.execute(f"EXPLAIN QUERY PLAN {query}")
    ]
    assert seen
    assert [each for each in seen if each.startswith("SCAN") and "found" not in each] == []
    assert any("runs_of_a_principal" in each for each in seen)
    assert any("COVERING INDEX sessions_of_a_principal" in each for each in seen)
    assert any("open_questions_to_a_principal" in each for each in seen)
    journal.close()


async def test_a_page_of_sessions_costs_by_its_lines_what_it_costs_among_few(tmp_path: Path):
    """The extra cost of a longer page of sessions hardly depends on the number of sessions."""

    async def steps(many: int) -> int:
        journal = SqliteJournal(tmp_path / f"{many}.db", watch=None, inline=True)
        for number in range(many):
            record = RunRecord(
                id=f"r{number}",
                session_id=f"s{number}",
                principal="ada",
                prompt="p",
                model="m",
                began_at=float(number),
            )
            await journal.runs.add(
                RunCopy(row=RunRow(record=record, status="done", changed_at=float(number)))
            )
        took = [0]

        def count() -> int:
            took[0] += 1
            return 0

        connection = connection_of(journal)
        await journal.runs.sessions(
            "ada", limit=1
        )  # the first list in a process checks the table and its indexes
        connection.set_progress_handler(count, 1)
        for limit in (20, 1):
            took[0] *= -1
            await journal.runs.sessions("ada", limit=limit)
        connection.set_progress_handler(None, 1)
        journal.close()
        return -took[0]

    assert await steps(400) < 1.5 * await steps(40)


@pytest.fixture(params=["memory", "file"])
def either(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Journal]:
    """Provide a journal in memory or in a file."""
    if request.param == "memory":
        yield MemoryJournal()
        return
    journal = SqliteJournal(tmp_path / "journal.db")
    yield journal
    journal.close()


def a_run(run_id: str = "r") -> RunRecord:
    return RunRecord(id=run_id, session_id="s", principal="ada", prompt="p", model="m", began_at=1.0)


async def test_a_run_there_is_not_can_not_be_stopped(either: Journal):
    """Stopping an unknown run is refused."""
    with pytest.raises(RunUnknown, match="no such run"):
        await either.runs.stop("nothing")


async def test_a_run_that_is_brought_in_is_nobodys(either: Journal):
    """An imported run has neither its source's owner nor its source's cancel request."""
    row = RunRow(record=a_run(), status="parked", owner="elsewhere", leased_until=1e12, stopping=True)
    await either.runs.add(RunCopy(row=row))
    taken = await either.runs.take("r")
    assert (taken.owner, taken.leased_until, taken.stopping) == ("", 0.0, False)


async def test_of_a_run_that_is_forgotten_no_files_are_left_to_change(either: Journal):
    """After a run is forgotten, its calls are no longer listed as unapplied."""
    await either.runs.begin(a_run())
    await either.calls.commit(CommitUnit(run_id="r", call_id="c", files=[{"path": "a"}]))
    await either.runs.forget(["r"])
    assert await either.calls.unapplied() == ()


async def test_both_journals_say_when_an_answer_was_taken(tmp_path: Path):
    """Both journals record when an answer was accepted, and repeating the answer does not change that time."""
    hands = Hands()
    asked = msgspec.structs.replace(question("r", 1, "ada", 0), asked_at=datetime.fromtimestamp(1, UTC))
    answer = answer_to(asked, 4, by="ada")
    memory, file = MemoryJournal(clock=hands), SqliteJournal(tmp_path / "runs.db", clock=hands)
    for journal in (memory, file):
        hands.at = 1.0
        waiting = asyncio.ensure_future(journal.questions.ask(asked))
        while not await journal.questions.open():
            await asyncio.sleep(0)
        assert await journal.questions.history("r") == (QuestionRecord(asked),)
        hands.at = 5.0
        journal.questions.answer(answer)
        assert await waiting == answer
        hands.at = 9.0
        journal.questions.answer(answer)
        assert await journal.questions.history("r") == (QuestionRecord(asked, answer, 5.0),)
    file.close()
