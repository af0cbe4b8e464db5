"""Tests for what only a journal in PostgreSQL does.

They cover the number of statements, leases by the database's clock, lost connections, keys and URLs. The laws that all
journals share are in test_journal_contract.py.
"""

from __future__ import annotations

import asyncio
import hashlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import psycopg
import pytest

from handrail import PostgresJournal, tool
from handrail.errors import DefinitionError, JournalAltered, JournalError, RunBusy, SessionBusy
from handrail.journal.postgres.address import is_url, parse_url
from handrail.journal.postgres.database import statements
from handrail.journal.records import CommitUnit, Decision, Entry, RunRecord
from handrail.journal.sql.schema import VERSION
from handrail.question import Vote
from handrail.run import open_gate
from journal.test_journal_contract import ask, asked, request, run, unit
from support import PATIENCE, postgres
from support.damage import end_leases
from support.journals import kept
from support.parked_runs import answer_to
from support.texts import WRONG_KEY

pytestmark = pytest.mark.once  # PostgreSQL starts slowly

Open = Callable[..., PostgresJournal]


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HANDRAIL_KEY", postgres.KEY)


@pytest.fixture
def own_schema() -> None:
    """Mark a test that may alter its schema: the fixture `url` gives it a new schema, which no later test uses."""


@pytest.fixture
def url(request: pytest.FixtureRequest) -> Iterator[str]:
    if "own_schema" in request.fixturenames:
        yield postgres.new_url()
        return
    url = postgres.borrow_url()
    yield url
    postgres.give_back(url)


@pytest.fixture
def open_journal(url: str) -> Iterator[Open]:
    """Provide a function that opens the test's journal, each time as a separate process would."""
    opened: list[PostgresJournal] = []

    def open_it(**options: Any) -> PostgresJournal:
        options.setdefault("watch", None)
        opened.append(PostgresJournal(url, **options))
        return opened[-1]

    yield open_it
    for each in opened:
        each.close()


@pytest.fixture
def sql(url: str) -> Iterator[Callable[..., list[Any]]]:
    """Provide a function that executes a statement on the database, as its administrator would."""
    address = parse_url(url)
    with psycopg.connect(address.conninfo, autocommit=True) as connection:

        def execute(query: str, *values: Any) -> list[Any]:
            connection.execute(f'SET search_path = "{address.schema}"')  # pyright: ignore
            found = connection.execute(query, values)  # pyright: ignore
            return found.fetchall() if found.description else []

        yield execute


def entry(key: str) -> Entry:
    return Entry("told", key, 1.0, b"body")


class Wire:
    """Records the statements of an inline journal, and cuts its connection before or after a statement that a test chooses."""

    def __init__(self, journal: PostgresJournal) -> None:
        self.connection: Any = journal._database._connection
        self.sent: list[str] = []
        self.cut_before = self.cut_after = ""
        self.before_the_cut: Callable[..., object] = lambda *statement: None
        """Called with the statement before which the connection is cut."""
        self._watch()

    def _watch(self) -> None:
        wire, raw = self, self.connection.raw

        class WatchedCursor(psycopg.Cursor[Any]):
            def execute(self, query: Any, *rest: Any, **options: Any) -> Any:
                wire.sent.append(query)
                if wire.cut_before and wire.cut_before in query:
                    wire.cut_before = ""
                    wire.before_the_cut(query, *rest)
                    raw.close()
                    raise psycopg.OperationalError("the connection was cut")
                found = super().execute(query, *rest, **options)
                if wire.cut_after and wire.cut_after in query:
                    wire.cut_after = ""
                    raw.close()
                    raise psycopg.OperationalError("the connection was cut")
                return found

        raw.cursor_factory = WatchedCursor
        self.connection._cursor = None


# --- the number of statements, and concurrent writes ----------------------------------------------


async def test_a_unit_an_entry_and_a_settled_step_are_one_statement_each(open_journal: Open):
    journal = open_journal(inline=True)
    await journal.runs.begin(run())
    await journal.steps.run("run/0", _value, run_id="run")
    wire = Wire(journal)
    await journal.calls.commit(unit("a"))
    assert len(wire.sent) == 1
    await journal.calls.note("run", entry("x"))
    assert len(wire.sent) == 2
    await journal.steps.run("run/1", _value, run_id="run")
    assert len(wire.sent) == 4, "one to reserve the step, one to settle it"
    assert not (await journal.runs.verify()).altered


async def _value() -> str:
    return "value"


async def test_a_unit_of_a_run_that_is_not_recorded_is_one_statement_until_another_process_begins_the_run(
    open_journal: Open,
):
    journal, other = open_journal(inline=True), open_journal()
    await journal.calls.commit(unit("a"))
    wire = Wire(journal)
    await journal.calls.commit(unit("b"))
    assert len(wire.sent) == 1
    await other.runs.begin(run())
    with pytest.raises(RunBusy):
        await journal.calls.commit(unit("c"))
    assert [each.call_id for each in await other.calls.load("run")] == ["a", "b"]


@pytest.mark.parametrize("is_known", [True, False])
async def test_a_call_is_recorded_whether_or_not_one_statement_is_enough(open_journal: Open, is_known: bool):
    """A call is recorded whether or not this process knows the head of the run's chain. If it doesn't, one statement is not enough."""

    @tool(effect="pure")
    async def add(a: int, b: int) -> int:
        """Add two numbers."""
        return a + b

    journal = open_journal()
    gate = open_gate([add], journal=journal, run_id="run")
    for number in range(3):
        if not is_known:
            journal._database._own_chains._known.clear()
        assert (await gate.invoke("add", {"a": number, "b": 1})).value == number + 1
    assert len(await journal.calls.load("run")) == 3
    assert not (await journal.runs.verify()).altered


async def test_what_others_add_meanwhile_costs_a_second_try_and_breaks_nothing(open_journal: Open):
    first, second = open_journal(), open_journal()
    await first.runs.begin(run())
    await first.calls.commit(unit("a"))
    await second.runs.stop("run")  # this adds a record to the run's own chain
    await first.calls.commit(unit("b"))
    assert [each.call_id for each in await second.calls.load("run")] == ["a", "b"]
    assert not (await second.runs.verify()).altered


async def test_many_processes_add_at_the_same_time(open_journal: Open):
    """Transactions that conflict are run again: every record is added once, and every chain is intact."""
    journals = [open_journal() for _ in range(4)]
    await journals[0].runs.begin(run("shared", "table"))
    asking = await asked(journals[0], ask("shared?1", "shared"))

    async def work(number: int, journal: PostgresJournal) -> None:
        await journal.runs.begin(run(f"run{number}", f"table {number}"))
        for each in range(5):
            await journal.calls.commit(unit(f"{number}-{each}", f"run{number}", "table"))
            vote = Vote(
                question_id="shared?1",
                digest="digest of shared?1",
                by=f"{number}-{each}",
                roles=(),
                approved=True,
            )
            await journal.votes.cast("shared", vote)
            decision = Decision(
                session_id="table",
                principal="ada",
                kind="remembered",
                id=f"{number}-{each}",
                at=1.0,
                body=b"",
            )
            await asyncio.to_thread(journal.decisions.write, decision)

    await asyncio.gather(*(work(number, journal) for number, journal in enumerate(journals)))
    asking.cancel()
    assert len(await journals[0].votes.on("shared", "shared?1", "digest of shared?1")) == 20
    assert len(await journals[1].decisions.read("table", "ada")) == 20
    assert len(await journals[2].calls.load_session("table")) == 20
    assert not (await journals[3].runs.verify()).altered


# --- claims ---------------------------------------------------------------------------------------


async def test_parked_runs_cost_a_claim_nothing(open_journal: Open, sql: Callable[..., list[Any]]):
    """With 10,000 parked runs, a claim finds a due run through the index `runs_for_workers`, without a scan of all runs."""
    journal = open_journal(inline=True)
    await journal.queue.submit(request("due", session="s"))
    columns = [name for (name,) in sql(_COLUMNS) if name not in ("id", "session_id", "status", "due_at")]
    rest = ", ".join(columns)
    sql(
        f"INSERT INTO runs (id, session_id, status, due_at, {rest})"
        f" SELECT 'parked' || n, 's' || n, 'parked', NULL, {rest} FROM runs, generate_series(1, 10000) AS n"
    )
    sql("ANALYZE runs")
    wire = Wire(journal)
    claimed = await journal.queue.claim([request().queue])
    assert claimed is not None
    assert claimed.record.id == "due"
    [claim] = [query for query in wire.sent if "ORDER BY coalesce(due_at" in query]
    plan = "\n".join(line for (line,) in sql(f"EXPLAIN {claim % {'now': 2.0**40, 'limit': 50}}"))
    assert "Index Scan using runs_for_workers" in plan
    assert "Seq Scan on runs" not in plan.partition("SubPlan")[0]


async def test_a_run_that_another_worker_is_claiming_is_skipped(
    open_journal: Open, sql: Callable[..., list[Any]]
):
    journal = open_journal()
    for id in ("first", "second"):
        await journal.queue.submit(request(id, session=id), at=1.0 if id == "first" else 2.0)
    sql("BEGIN")
    sql("SELECT 1 FROM runs WHERE id = 'first' FOR UPDATE")
    async with asyncio.timeout(PATIENCE):
        claimed = await journal.queue.claim([request().queue])
    sql("ROLLBACK")
    assert claimed is not None
    assert claimed.record.id == "second"


_COLUMNS = "SELECT column_name FROM information_schema.columns WHERE table_schema = current_schema AND table_name = 'runs'"


# --- leases ---------------------------------------------------------------------------------------


async def test_a_process_has_one_lease_for_all_its_runs(open_journal: Open, sql: Callable[..., list[Any]]):
    journal = open_journal(lease=PATIENCE)
    for number in range(3):
        await journal.runs.begin(run(f"run{number}", f"s{number}"))
        await kept(journal, f"run{number}")
    query = "SELECT owner, leased_until - extract(epoch FROM clock_timestamp()) FROM leases"
    [(owner, left)] = sql(query)
    assert (owner, 0 < left <= PATIENCE) == (journal.owner, True)


async def test_only_the_lease_says_whether_a_process_is_alive(
    open_journal: Open, monkeypatch: pytest.MonkeyPatch
):
    """A process keeps its run until its lease ends by the database's clock.

    Neither a process table nor a host's clock is used.
    """
    first, second = open_journal(), open_journal()
    await first.runs.begin(run())
    monkeypatch.setattr(
        "handrail.journal.sql.leases.is_dead", lambda owner: pytest.fail("looked at processes")
    )
    monkeypatch.setattr(
        "handrail.clock.SystemClock.now", lambda self: pytest.fail("looked at the host's clock")
    )
    assert (await second.runs.get("run")).held
    with pytest.raises(RunBusy):
        await second.runs.take("run")
    end_leases(second)
    assert not (await second.runs.get("run")).held
    assert (await second.runs.take("run")).deaths == 1
    with pytest.raises(RunBusy):
        await first.calls.commit(unit("late"))
    assert not await second.calls.load("run")


@pytest.mark.parametrize(
    "how",
    [
        "UPDATE leases SET leased_until = 0",
        "UPDATE leases SET leased_until = 0, mac = ''",
        "UPDATE leases SET owner = owner || 'x'",
        "DELETE FROM leases",
        "TRUNCATE leases",
    ],
)
async def test_whoever_writes_to_leases_alone_cannot_have_a_run_taken_from_a_live_process(
    open_journal: Open, sql: Callable[..., list[Any]], how: str
):
    """An altered or removed lease counts as held: the run, its session and its queue stay with their process, and `verify` names the lease.

    Once the process has renewed its lease, nothing is wrong any more.
    """
    first, second = open_journal(), open_journal()
    await first.runs.begin(run())
    queued = await first.queue.submit(msgspec.structs.replace(run("next", "s2"), app="app"))
    claimed = await first.queue.claim([queued.queue])
    assert claimed is not None
    sql(how)
    for run_id in ("run", "next"):
        with pytest.raises(RunBusy):
            await second.runs.take(run_id)
        assert (await second.runs.get(run_id)).held
    assert not await second.queue.due([queued.queue])
    assert await second.queue.claim([queued.queue]) is None
    with pytest.raises(SessionBusy):
        await second.runs.begin(run("other"))
    found = (await second.runs.verify()).altered
    assert {each.chain for each in found} == {"lease"}
    await first.calls.commit(unit("a"))
    await first.steps.run("run/1", _value, run_id="run")
    first._database.leases.renewed = None  # type: ignore[attr-defined]  # it is due
    await first.runs.keep("run")
    sql("DELETE FROM leases WHERE owner LIKE '%%x'")
    assert not (await second.runs.verify()).altered


async def test_an_effect_is_not_begun_after_the_lease_unless_the_run_is_still_owned(open_journal: Open):
    """A process whose lease has expired renews it before it begins an effect.

    If another process has taken the run, the effect does not begin.
    """
    first, second = open_journal(inline=True), open_journal()
    await first.runs.begin(run())
    happened: list[str] = []

    async def effect() -> str:
        happened.append("effect")
        return "done"

    leases: Any = first._database.leases
    leases.renewed -= 2 * first.lease
    assert await first.steps.run("run/1", effect, run_id="run") == "done", "nobody had taken it"
    assert leases.left() > 0
    steps: Any = first.steps
    reserve = steps._reserved

    async def frozen(*given: Any) -> Any:
        found = await reserve(*given)
        leases.renewed -= 2 * first.lease
        end_leases(second)
        await second.runs.take("run")
        return found

    steps._reserved = frozen
    with pytest.raises(RunBusy):
        await first.steps.run("run/2", effect, run_id="run")
    assert happened == ["effect"]


# --- lost connections -----------------------------------------------------------------------------


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("what", ["UPDATE chains", "COMMIT"])
async def test_a_lost_connection_loses_nothing_and_repeats_nothing(open_journal: Open, when: str, what: str):
    """After a lost connection, the journal finds out whether the server had done the work, and repeats it only if not."""
    journal = open_journal(inline=True)
    await journal.runs.begin(run())
    await journal.calls.commit(unit("a"))
    wire = Wire(journal)
    setattr(wire, f"cut_{when}", what)
    if what == "COMMIT":
        await journal.runs.begin(run("other", "t"))
        assert (await journal.runs.get("other")).status == "running"
    else:
        await journal.calls.commit(unit("b"))
        await journal.calls.commit(unit("c"))
        assert [each.call_id for each in await journal.calls.load("run")] == ["a", "b", "c"]
    assert not (await journal.runs.verify()).altered


async def test_a_record_that_is_committed_after_its_connection_was_lost_is_added_once(open_journal: Open):
    """A record is added once, even if the server commits it only while the journal connects again."""
    journal = open_journal(inline=True)
    await journal.runs.begin(run())
    await journal.calls.commit(unit("a"))
    wire = Wire(journal)
    wire.cut_before = "UPDATE chains"
    with journal._database.connect() as slow, journal._database.connect() as watcher:
        slow.autocommit = False

        def commit_late() -> None:
            waits = "SELECT 1 FROM pg_stat_activity WHERE %s = ANY (pg_blocking_pids(pid))"
            while not watcher.execute(waits, (slow.info.backend_pid,)).fetchall():
                pass
            slow.commit()

        wire.before_the_cut = slow.execute
        late = asyncio.get_running_loop().run_in_executor(None, commit_late)
        await asyncio.to_thread(lambda: asyncio.run(journal.calls.commit(unit("b"))))
        await asyncio.wait_for(late, PATIENCE)
    await journal.calls.commit(unit("c"))
    assert [each.call_id for each in await journal.calls.load("run")] == ["a", "b", "c"]
    assert not (await journal.runs.verify()).altered


async def test_a_lost_connection_is_not_tried_past_the_lease(
    open_journal: Open, monkeypatch: pytest.MonkeyPatch
):
    journal = open_journal(inline=True, lease=0.05)
    await journal.runs.begin(run())
    wire, tries = Wire(journal), list[str]()
    wire.cut_before = "UPDATE chains"

    def refuse() -> Any:
        tries.append("")
        raise psycopg.OperationalError("connection refused")

    monkeypatch.setattr(journal._database, "_connect", refuse)
    with pytest.raises(JournalError, match="the connection was cut"):
        await journal.calls.commit(unit("a"))
    assert tries


# --- notices --------------------------------------------------------------------------------------


async def test_an_answer_of_another_process_wakes_the_asker(open_journal: Open):
    asker, other = open_journal(watch=3600), open_journal()
    await asker.runs.begin(run())
    question = ask()
    waiting = await asked(asker, question)
    await asyncio.to_thread(other.questions.answer, answer_to(question, 7))
    assert (await asyncio.wait_for(waiting, PATIENCE)).value == 7


@pytest.mark.parametrize("steps", range(5))
async def test_a_wait_that_ends_as_it_is_cancelled_does_not_swallow_the_cancellation(
    open_journal: Open, steps: int
):
    """A wait that is cancelled at about the time of a notice either has already ended or ends as cancelled."""
    journal = open_journal()
    await journal.queue.wait(PATIENCE)  # ends with the first notice, which says that the listener has started
    waiting = asyncio.ensure_future(journal.queue.wait(PATIENCE))
    for _ in range(3):  # until it waits
        await asyncio.sleep(0)
    journal._database._noticed("run", "r")
    for _ in range(steps):
        await asyncio.sleep(0)
    was_over = waiting.done()
    waiting.cancel()
    await asyncio.wait([waiting])
    assert waiting.cancelled() != was_over


async def test_notices_carry_ids_only(open_journal: Open, url: str):
    journal = open_journal()
    with psycopg.connect(parse_url(url).conninfo, autocommit=True) as listener:
        listener.execute(f'LISTEN "{journal._database.channel}"')  # pyright: ignore
        await journal.runs.begin(
            RunRecord(id="r", session_id="s", principal="ada", prompt="secret", model="m", began_at=1)
        )
        await journal.runs.stop("r")
        heard = {each.payload for each in listener.notifies(timeout=PATIENCE, stop_after=2)}
    assert heard == {"run r"}


# --- opening --------------------------------------------------------------------------------------


def test_a_journal_without_its_key_is_refused(url: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Any):
    file = tmp_path / "key"
    file.write_text(f"{postgres.KEY}\n")
    file.chmod(0o600)
    PostgresJournal(url, key_file=file).close()
    monkeypatch.delenv("HANDRAIL_KEY")
    with pytest.raises(JournalError, match=r"there is no key.*HANDRAIL_KEY .*HANDRAIL_KEY_FILE"):
        PostgresJournal(url)
    monkeypatch.setenv("HANDRAIL_KEY_FILE", str(file))
    PostgresJournal(url).close()
    monkeypatch.setenv("HANDRAIL_KEY", "a different secret")
    with pytest.raises(JournalError, match=WRONG_KEY):
        PostgresJournal(url)
    file.chmod(0o644)
    with pytest.raises(JournalError, match="other users can access"):
        PostgresJournal(url, key_file=file)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            "UPDATE about SET value = '99' WHERE key IN ('schema', 'oldest')",
            "whose schema is at least 99",
        ),
        ("DROP TABLE about", "is not a journal"),
        ("DROP TABLE votes_of_nobody, questions", "'questions' was removed"),
        (
            "CREATE FUNCTION f() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END' ;; "
            "CREATE TRIGGER planted BEFORE INSERT ON records FOR EACH ROW EXECUTE FUNCTION f()",
            "the trigger 'planted' was added",
        ),
        (
            "CREATE OPERATOR === (LEFTARG = text, RIGHTARG = bytea, FUNCTION = outside.g)",
            "operator '===' was added",
        ),
        ("ALTER TABLE records ADD CHECK (outside.g(kind, body))", "function 'g' was added"),
        ("ALTER TABLE records ALTER COLUMN kind SET DEFAULT outside.g('', '')", "function 'g' was added"),
        ("CREATE INDEX planted ON records (outside.g(kind, body))", "function 'g' was added"),
    ],
)
def test_a_database_that_is_not_such_a_journal_is_refused(
    own_schema: None, url: str, sql: Callable[..., list[Any]], change: str, words: str
):
    PostgresJournal(url).close()
    sql("CREATE TABLE votes_of_nobody (x int)")
    sql("CREATE SCHEMA IF NOT EXISTS outside")
    sql(
        "CREATE OR REPLACE FUNCTION outside.g(text, bytea) RETURNS boolean IMMUTABLE LANGUAGE sql AS 'SELECT true'"
    )
    for each in change.split(" ;; "):
        sql(each)
    with pytest.raises(JournalError, match=words):
        PostgresJournal(url)


def test_code_in_a_schema_without_tables_is_refused(
    own_schema: None, url: str, sql: Callable[..., list[Any]]
):
    """A schema with a planted function is refused, because the function could replace one that the journal uses.

    No table is created.
    """
    schema = parse_url(url).schema
    sql(f'CREATE SCHEMA "{schema}"')
    sql("CREATE FUNCTION hashtext(varchar) RETURNS int LANGUAGE sql AS 'SELECT 1'")
    with pytest.raises(JournalError, match="the function 'hashtext' was added"):
        PostgresJournal(url)
    assert sql("SELECT relname FROM pg_class WHERE relnamespace = %s::regnamespace", schema) == []


def test_every_password_of_a_url_is_masked_in_messages():
    address = parse_url("postgresql://me:one%20two@host/db?sslpassword=one%20two%203&password=four")
    told = address.without_secret("one two 3, one%20two%203, one two, one%20two, four")
    assert told == ", ".join(["***"] * 5)
    short = parse_url("postgresql://me:a@host/db")
    assert short.without_secret("the password 'a' has failed") == "the password '***' has failed"


@pytest.mark.parametrize("password", ["12/horse", "12?horse", "12#horse", "12/a?b#horse"])
def test_a_password_that_looks_like_the_rest_of_a_url_is_not_shown(password: str):
    with pytest.raises(JournalError, match="%2F") as raised:
        PostgresJournal(f"postgresql://me:{password}@host/db")
    assert "horse" not in str(raised.value)


def test_a_failed_connection_is_told_in_two_lines_without_the_password():
    cases = {
        postgres.schema_url(
            "x", user=postgres.LOCKED_USER, password="wrong word"
        ): "password authentication failed",
        "postgresql://me:wrong%20word@/db?host=/nowhere&password=wrong%20word": "No such file or directory",
        "postgresql://me:wrong%20word@127.0.0.1:1/db": "Connection refused",
        "postgresql://me:wrong%20word@[/db": "its URL can't be read",
        "postgresql://me:a@wrong@127.0.0.1:1/db": "its URL can't be read",
        "postgresql://me:wrong%20word@/db?schema=A-b": "is not a plain name",
    }
    for url, words in cases.items():
        with pytest.raises(JournalError, match=words) as raised:
            PostgresJournal(url)
        text = str(raised.value)
        assert "wrong" not in text, text
        assert "\n" not in text, text
    locked = postgres.schema_url("locked", user=postgres.LOCKED_USER, password=postgres.PASSWORD)
    journal = PostgresJournal(locked)
    assert postgres.PASSWORD not in journal.path
    journal.close()


def test_urls_are_told_from_paths():
    assert is_url("postgresql://a@b/c")
    assert is_url("postgres:///c")
    assert not is_url("runs.db")
    assert parse_url("postgresql:///db").shown == "postgresql:///db"
    assert (
        parse_url("postgresql://u:p@h:5/db?sslmode=require").shown == "postgresql://u@h:5/db?sslmode=require"
    )
    assert parse_url("postgresql://u:p@h:5/db?schema=x&sslmode=require").conninfo.endswith(
        "/db?sslmode=require"
    )


def test_the_url_says_how_long_a_lease_is(url: str):
    """`lease=` in the URL sets the length of the lease in seconds, unless the argument `lease` does."""
    for text, seconds in (("2", 2.0), ("0.5s", 0.5)):
        journal = PostgresJournal(f"{url}&lease={text}", watch=None)
        assert (journal.lease, journal.path.endswith(f"&lease={text}")) == (seconds, True)
        journal.close()
    journal = PostgresJournal(f"{url}&lease=2", lease=7, watch=None)
    assert journal.lease == 7
    journal.close()


@pytest.mark.parametrize("text", ["", "0", "-1", "nan", "inf", "soon", "2m"])
def test_a_lease_that_is_not_a_number_of_seconds_is_refused(text: str):
    with pytest.raises(
        JournalError, match=r"is not a finite number of seconds above 0\. Write one, such as lease=30"
    ):
        parse_url(f"postgresql://u@h/db?lease={text}")


def test_a_missing_extra_is_told(own_schema: None, url: str, monkeypatch: pytest.MonkeyPatch):
    for name in [each for each in sys.modules if each.startswith("handrail.journal.postgres.")]:
        if name != "handrail.journal.postgres.journal":
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "psycopg", None)
    with pytest.raises(DefinitionError, match=r"pip install 'handrail\[postgres\]'"):
        PostgresJournal(url)


# --- alterations ----------------------------------------------------------------------------------


async def test_every_altered_column_is_found(
    own_schema: None, open_journal: Open, sql: Callable[..., list[Any]]
):
    """`verify` finds every change that the database's administrator makes to a row, except to the columns named below."""
    journal = open_journal()
    await journal.runs.begin(run())
    await journal.calls.commit(CommitUnit(run_id="run", call_id="a", session_id="s", result=b"{}"))
    await journal.steps.run("run/1", _value, run_id="run")
    await journal.calls.note("run", entry("x"))
    await journal.blobs.put(b"bytes", run_id="run")
    question = ask()
    waiting = await asked(journal, question)
    await asyncio.to_thread(journal.questions.answer, answer_to(question, 1))
    await waiting
    await asyncio.to_thread(journal.tickets.issue, "run", ".1", "text")
    await journal.runs.leave("run", "done", b"outcome")
    assert not (await journal.runs.verify()).altered
    missed: list[str] = []
    columns = sql(
        "SELECT table_name, column_name, data_type FROM information_schema.columns WHERE table_schema = current_schema"
        " AND table_name IN ('runs', 'records', 'chains', 'questions', 'tickets', 'blobs') ORDER BY 1, 2"
    )
    other = {
        "text": "{0} || 'x'",
        "bytea": "{0} || '\\x00'",
        "bigint": "{0} + 1000000",
        "double precision": "coalesce({0}, 0) + 1",
    }
    for table, column, type in columns:
        for (row,) in sql(f"SELECT ctid::text FROM {table} WHERE {column} IS NOT NULL"):
            before = sql(f"SELECT {column} FROM {table} WHERE ctid = %s::tid", row)[0][0]
            [(now,)] = sql(
                f"UPDATE {table} SET {column} = {other[type].format(column)} WHERE ctid = %s::tid RETURNING ctid::text",
                row,
            )
            if not (await journal.runs.verify()).altered:
                missed.append(f"{table}.{column}")
            sql(f"UPDATE {table} SET {column} = %s WHERE ctid = %s::tid", before, now)
    # These columns of a ticket are checked when the ticket is used.
    assert set(missed) <= {f"tickets.{each}" for each in ("holder", "held_until", "open", "mac")}
    sql("UPDATE records SET body = 'x' WHERE kind = 'unit'")
    with pytest.raises(JournalAltered):
        await journal.calls.load("run")


async def test_an_altered_run_is_left_out_of_the_lists(
    own_schema: None, open_journal: Open, sql: Callable[..., list[Any]]
):
    journal = open_journal()
    for id in ("one", "two"):
        await journal.runs.begin(
            RunRecord(id=id, session_id=id, principal="p", prompt="p", model="m", began_at=1.0)
        )
    sql("UPDATE runs SET status = 'done' WHERE id = 'one'")
    assert [row.record.id for row in await journal.runs.list()] == ["two"]
    assert [row.session_id for row in await journal.runs.sessions("p")] == ["two"]
    assert await journal.questions.open() == ()


def test_an_advisory_lock_of_another_role_keeps_no_journal_closed(
    own_schema: None, url: str, sql: Callable[..., list[Any]], monkeypatch: pytest.MonkeyPatch
):
    """Any role can take the lock under which tables are created. It delays only that, for a limited time, with an error that says so."""
    monkeypatch.setattr("handrail.journal.postgres.database.LOCK_SECONDS", 1)
    sql("SELECT pg_advisory_lock(hashtext('handrail'), hashtext(%s))", parse_url(url).schema)
    with pytest.raises(JournalError, match="lock timeout") as refused:
        PostgresJournal(url)
    assert "pg_locks" in str(refused.value)
    sql("SELECT pg_advisory_unlock_all()")
    PostgresJournal(url).close()
    sql("SELECT pg_advisory_lock(hashtext('handrail'), hashtext(%s))", parse_url(url).schema)
    PostgresJournal(url).close()


@pytest.mark.parametrize(("lease", "seconds"), [("2", "10s"), ("30", "30s")])
def test_the_server_ends_the_transactions_of_a_host_that_is_gone(
    lease: str, seconds: str, monkeypatch: pytest.MonkeyPatch
):
    """The server ends a transaction whose client is silent for the length of the lease, or for ten seconds if the lease is shorter.

    Otherwise, the locks of a lost host would keep its runs from all other processes.
    """
    monkeypatch.setenv("HANDRAIL_KEY", postgres.KEY)
    journal = PostgresJournal(f"{postgres.new_url()}&lease={lease}")
    with journal._database.connect() as connection:
        assert connection.execute("SHOW idle_in_transaction_session_timeout").fetchone() == (seconds,)
    journal.close()


def test_whoever_changes_the_schema_changes_its_version():
    """Otherwise a journal of an earlier version would be called altered. After a change, increase `VERSION` and correct this."""
    text = "\n".join(statements())
    assert (VERSION, hashlib.sha256(text.encode()).hexdigest()[:16]) == (17, "ff07d9c710c2582f")
