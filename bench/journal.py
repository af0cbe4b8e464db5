"""Measure the cost of recording a call, compared with no journal and with a bare statement, and of resuming runs.

    python bench/journal.py [CALLS [LONGEST]]

In SQLite the bare statement is an insert of one row of the same size in its own transaction, in a file opened in the
same way. In PostgreSQL it is the fenced statement that adds a record, with the same bytes and a connection opened in
the same way. A bare statement is the minimum cost of any record with that durability. The sides take turns. The cheapest turn counts
for CPU time, and the median for elapsed time.
"""

from __future__ import annotations

import asyncio
import importlib
import itertools
import os
import sqlite3
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from handrail import Adapter, DirectoryFilesystem, PostgresJournal, Prompt, SqliteJournal, ToolContext, tool
from handrail.clock import SYSTEM_CLOCK
from handrail.environment import LaterEnvironment
from handrail.errors import RunParked
from handrail.journal.postgres.chains import FENCED
from handrail.journal.postgres.statements import PostgresConnection
from handrail.journal.records import RunCopy, RunRecord, RunRow
from handrail.journal.sql.chains import INSERT, MAC_BYTES, Chains, NewRecord
from handrail.journal.sql.connection import Connection
from handrail.journal.sqlite import Durability, SqliteDatabase
from handrail.messages import CallPart, ModelPart, ModelRequest, Price, StopPart, Traits
from handrail.models.scripted import ScriptedModel
from handrail.question import Answer
from handrail.run import Gate, open_gate

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))
postgres: Any = importlib.import_module("support.postgres")
"""The module that starts a PostgreSQL server for this process."""


class Pick(BaseModel):
    """The type of the answer that is requested."""

    number: int


@tool(effect="pure")
async def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@tool(effect="staged")
async def choose(context: ToolContext) -> str:
    """Ask somebody for a number."""
    assert context.wait_for
    return str((await context.wait_for("pick", {}, Pick)).number)


PROMPT = Prompt("bench", "Do what is asked.", tools=[add, choose])


def say(what: str, figure: str) -> None:
    print(f"{what:<58}{figure:>16}")


TURNS = 20
PROCESS_LIMIT, POWER_LIMIT, POSTGRES_LIMIT = 4.0, 2.5, 2.0
"""Maximum cost of a record: in bare inserts for each durability of SQLite, and in fenced statements for PostgreSQL."""
FILE_LIMITS: dict[Durability, float] = {"process": 4.0, "power": 5.0}
"""Maximum cost of a recorded call that writes a file, in bare writes of a file followed by a bare insert."""
LIST_LIMIT = 2.0
"""Maximum cost of the first list of a journal with ten times as many runs, compared with the first list of the other."""


class Side:
    """One of the compared pieces of work, and its cost in microseconds."""

    def __init__(self, work: Callable[[int], Awaitable[None]]) -> None:
        self._work = work
        self._turns: list[tuple[float, float]] = []

    async def take_turn(self, count: int) -> None:
        cpu, began = time.process_time(), time.perf_counter()
        await self._work(count)
        elapsed = time.perf_counter() - began
        self._turns.append(((time.process_time() - cpu) / count * 1e6, elapsed / count * 1e6))

    @property
    def cpu(self) -> float:
        """The CPU time of the cheapest turn."""
        return min(cpu for cpu, _ in self._turns)

    @property
    def elapsed(self) -> float:
        """The median of the elapsed times, because a disk or a server is sometimes much faster than usual."""
        return statistics.median(elapsed for _, elapsed in self._turns)


def calls(journal: Any, then: Callable[[], object] = lambda: None) -> Side:
    """Return a side that makes calls through a gate, each of which is followed by `then`."""
    gate = open_gate([add], journal=journal)

    async def work(count: int) -> None:
        for number in range(count):
            await gate.invoke("add", {"a": number, "b": 2})
            then()

    return Side(work)


def statements(execute: Callable[[], object]) -> Side:
    async def work(count: int) -> None:
        for _ in range(count):
            execute()

    return Side(work)


async def compare(count: int, *sides: Side) -> None:
    for _ in range(TURNS):
        for side in sides:
            await side.take_turn(max(count // TURNS, 1))


def inserts(path: Path, size: int, synchronous: str) -> Callable[[], object]:
    """Return a function that inserts one row."""
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute(f"PRAGMA synchronous = {synchronous}")
    connection.execute("CREATE TABLE units (number INTEGER PRIMARY KEY, run_id TEXT, unit BLOB)")
    connection.execute("CREATE INDEX units_of_a_run ON units (run_id)")
    body = b"x" * size

    def insert() -> None:
        connection.execute("BEGIN IMMEDIATE")
        connection.execute("INSERT INTO units (run_id, unit) VALUES ('run', ?)", (body,))
        connection.execute("COMMIT")

    return insert


def verdict(cost: float, limit: float) -> str:
    return f"{cost:.1f}{'' if cost <= limit else '  MISSED'}"


async def body_size(journal: Any) -> int:
    """Record one call, and return the size of its record's body in bytes."""
    await calls(journal).take_turn(1)
    [[size]] = await journal._database.select("SELECT max(length(body)) FROM records WHERE kind = 'unit'")
    return size


async def costs(folder: Path, count: int) -> None:
    levels: tuple[tuple[Durability, str, float], ...] = (
        ("process", "OFF", PROCESS_LIMIT),
        ("power", "FULL", POWER_LIMIT),
    )
    for durability, synchronous, limit in levels:
        journal = SqliteJournal(folder / f"{durability}.db", durability=durability)
        size = await body_size(journal)
        insert = inserts(folder / f"bare-{durability}.db", size, synchronous)
        sides = calls(None), calls(journal), statements(insert), calls(None, insert)
        await compare(count, *sides)
        journal.close()
        # Only a synced write waits, so its cost is measured in elapsed time.
        is_synced = synchronous == "FULL"
        without, whole, one, inserted = (each.elapsed if is_synced else each.cpu for each in sides)
        cost = whole - without
        say(f"a call without a journal: {'elapsed' if is_synced else 'CPU'} time", f"{without:.0f} µs")
        say(f'with a journal, durability="{durability}"', f"{whole:.0f} µs")
        say(f"  a bare insert of the same {size} bytes", f"{one:.0f} µs")
        say(f"  the cost of the record, in bare inserts (limit {limit:g})", verdict(cost / one, limit))
        # After other work, the caches of the processor hold neither SQLite's code nor its pages.
        say("  the same, if each bare insert follows a call", f"{cost / (inserted - without):.1f}")


CONTENT = "x" * 2000


@tool(effect="staged")
async def rewrite(context: ToolContext) -> None:
    """Write one file."""
    context.filesystem.write("file", CONTENT)


def replaces(path: Path, *, synced: bool) -> Callable[[], object]:
    """Return a function that writes a temporary file, syncs it if `synced`, and renames it to `path`."""
    temporary = path.with_suffix(".new")

    def replace() -> None:
        with temporary.open("w") as file:
            file.write(CONTENT)
            if synced:
                file.flush()
                os.fsync(file.fileno())
        temporary.rename(path)

    return replace


async def files(folder: Path, count: int) -> None:
    """Print the cost of a recorded call that writes a file, in bare writes of a file, each with a bare insert.

    It is CPU time, or elapsed time where both wait for the disk.
    """
    for durability, limit in FILE_LIMITS.items():
        at, is_synced = folder / f"files-{durability}", durability == "power"
        at.mkdir()
        journal = SqliteJournal(folder / f"files-{durability}.db", durability=durability)
        opened = DirectoryFilesystem(at)
        gate = open_gate([rewrite], journal=journal, filesystem=opened)
        insert = inserts(folder / f"files-bare-{durability}.db", 400, "FULL" if is_synced else "OFF")
        replace = replaces(folder / f"bare-{durability}", synced=is_synced)

        async def work(count: int, gate: Gate = gate) -> None:
            for _ in range(count):
                assert (await gate.invoke("rewrite", {})).success

        call, bare = Side(work), statements(lambda replace=replace, insert=insert: (replace(), insert()))
        await compare(count, call, bare)
        opened.close()
        journal.close()
        whole, both = (call.elapsed, bare.elapsed) if is_synced else (call.cpu, bare.cpu)
        say(f'a call that writes a file, durability="{durability}"', f"{whole:.0f} µs")
        say("  a bare write of the file and a bare insert", f"{both:.0f} µs")
        say(f"  the call, in these (limit {limit:g})", verdict(whole / both, limit))


async def lists(folder: Path, count: int) -> None:
    """Print what a new process waits for the first list, for the first run of a session and for one run, by the journal's size."""
    firsts: list[float] = []
    for runs in (count // 10, count):
        path = folder / f"{runs}-runs.db"
        journal = SqliteJournal(path, watch=None)
        begin = b"x" * 600
        for number in range(runs):
            id = f"run-{number}"
            record = RunRecord(
                id=id, session_id=id, principal="p", prompt="p", model="m", began_at=number, begin=begin
            )
            await journal.runs.add(RunCopy(row=RunRow(record=record, status="done")))
        journal.close()
        took: dict[str, float] = {}
        for what in ("list", "session", "get"):
            journal = SqliteJournal(path, watch=None)
            began = time.process_time()
            if what == "get":
                await journal.runs.get("run-1")
            else:
                await journal.runs.list(session_id="new" if what == "session" else None, limit=50)
            took[what] = (time.process_time() - began) * 1e3
            journal.close()
        firsts.append(took["list"])
        say(f"{runs:,} runs: CPU time of the first list", f"{took['list']:.1f} ms")
        say(
            "  to find that a session is new, to read one run", f"{took['session']:.1f}, {took['get']:.1f} ms"
        )
    growth = firsts[1] / firsts[0]
    say(
        f"  the first list, in that of a tenth of the runs (limit {LIST_LIMIT:g})",
        verdict(growth, LIST_LIMIT),
    )


def fenced(journal: PostgresJournal, size: int) -> Callable[[], object]:
    """Return a function that executes the fenced statement once, on a chain of its own in the same tables."""
    connection = PostgresConnection(journal._database.connect())  # pyright: ignore[reportPrivateUsage]
    owner, seal, body = journal.owner, b"s" * MAC_BYTES, b"x" * size
    insert = "INSERT INTO chains (chain, links, seal, number, owner) VALUES (?, ?, ?, ?, ?)"
    connection.execute(insert, ("run bare", 0, seal, 0, owner))
    links = itertools.count(1)

    def execute() -> None:
        link = next(links)
        head = (link, seal, link, "run bare", seal, owner)
        record = (link, link, "unit", f"call-{link}", 0.0, "s" * 32, body, seal, "applied", 0)
        assert connection.execute(FENCED, (*head, *record)).rowcount == 1

    return execute


async def postgres_costs(count: int) -> None:
    os.environ["HANDRAIL_KEY"] = postgres.KEY
    journal = PostgresJournal(postgres.new_url(), watch=None)
    size = await body_size(journal)
    plain, recorded, bare = calls(None), calls(journal), statements(fenced(journal, size))
    await compare(count, plain, recorded, bare)
    journal.close()
    say(
        "a call with a journal in PostgreSQL: CPU time, elapsed",
        f"{recorded.cpu:.0f}, {recorded.elapsed:.0f} µs",
    )
    say(f"  a bare fenced statement of the same {size} bytes", f"{bare.cpu:.0f}, {bare.elapsed:.0f} µs")
    for what, cost in (
        ("CPU time", (recorded.cpu - plain.cpu) / bare.cpu),
        ("elapsed time", (recorded.elapsed - plain.elapsed) / bare.elapsed),
    ):
        say(
            f"  {what} of the record, in fenced statements (limit {POSTGRES_LIMIT:.0f})",
            verdict(cost, POSTGRES_LIMIT),
        )


MAC_LIMIT = 6.0
"""Maximum cost of a record's MAC and of its link to the previous record, in microseconds."""


class Unchained(Chains):
    """Chains that write rows of the same size with a constant in place of the MAC and without a head, for comparison."""

    def append_record(self, connection: Connection, record: NewRecord) -> int:
        self.number = number = getattr(self, "number", 0) + 1
        mac = bytearray(b"x" * MAC_BYTES)
        body = bytearray(record.body)
        values = (record.chain, number, record.kind, record.key, 0.0, "s", body, mac, "applied", 0)
        connection.execute(INSERT, values)
        return number


def chained(path: Path, count: int, make: type[Chains]) -> float:
    """Return the CPU seconds that it takes to add a record to a chain. All records are added in one transaction."""
    database = SqliteDatabase(str(path), clock=SYSTEM_CLOCK, new_id="bench", inline=True)
    chains, body = make("bench", str(path), b"k" * 32), b"x" * 350

    def work(connection: Connection) -> float:
        began = time.process_time()
        for number in range(count):
            chains.append(
                connection, "run bench", "unit", f"call-{number}", body, session_id="s", state="applied"
            )
        return (time.process_time() - began) / count

    spent = database.transact_now(work)
    database.close()
    return spent


def chains(folder: Path, count: int) -> None:
    """Print the cost of a record's MAC and link: the difference between the fastest of seven rounds with and without them."""
    rounds = [
        (
            chained(folder / f"bare{each}.db", count, Unchained),
            chained(folder / f"mac{each}.db", count, Chains),
        )
        for each in range(7)
    ]
    bare, mac = (min(each[which] for each in rounds) * 1e6 for which in (0, 1))
    verdict = "" if mac - bare <= MAC_LIMIT else "  MISSED"
    say("a record of 350 bytes, in one transaction", f"{bare:.1f} µs")
    say(f"  its MAC and link add (limit {MAC_LIMIT:.0f} µs)", f"{mac - bare:.1f} µs{verdict}")


class Steps:
    """A model that requests one call after another, the last of which asks a question. It keeps no requests, so only the run is measured."""

    name = "bench:steps"
    traits = Traits(price=Price(Decimal(0), Decimal(0)))

    def __init__(self, steps: int) -> None:
        self._left = steps

    async def stream(self, request: ModelRequest, /) -> AsyncGenerator[ModelPart]:
        self._left -= 1
        name, arguments = ("add", '{"a": 1, "b": 2}') if self._left else ("choose", "{}")
        yield CallPart(0, "", name, arguments)
        yield StopPart("calls")


async def parked(path: Path, steps: int) -> SqliteJournal:
    """Run this many steps, the last of which asks a question, and return the journal of the parked run.

    Raises `AssertionError` if the run was not parked.
    """
    journal = SqliteJournal(path, watch=None)
    adapter = Adapter(Steps(steps), journal=journal, environment=LaterEnvironment())
    try:
        await adapter.evaluate(PROMPT, "go", run_id="long")
    except RunParked:
        return journal
    raise AssertionError("the run was not parked")


async def resumed(folder: Path, steps: int) -> None:
    began = time.process_time()
    journal = await parked(folder / f"{steps}.db", steps)
    made = time.process_time() - began
    (question,) = await journal.questions.open("long")
    journal.questions.answer(
        Answer(question_id=question.id, digest=question.digest, by=question.principal, value={"number": 1})
    )
    adapter = Adapter(ScriptedModel(["end"]), journal=journal, environment=LaterEnvironment())
    began = time.process_time()
    response = await adapter.resume("long", PROMPT)
    spent = time.process_time() - began
    assert response.text == "end"
    journal.close()
    say(f"{steps:,} steps: CPU time to run them, and per step", f"{made:.2f} s, {made / steps * 1e6:.0f} µs")
    say("  CPU time to resume, and per step", f"{spent:.2f} s, {spent / steps * 1e6:.0f} µs")


def main() -> None:
    count, longest = ([int(each) for each in sys.argv[1:]] + [2000, 10_000][len(sys.argv) - 1 :])[:2]
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(costs(Path(folder), count))
        asyncio.run(files(Path(folder), count))
        asyncio.run(lists(Path(folder), 10_000))
        asyncio.run(postgres_costs(count))
        chains(Path(folder), 10 * count)
        for steps in (longest // 10, longest // 4, longest // 2, longest):
            asyncio.run(resumed(Path(folder), steps))


if __name__ == "__main__":
    main()
