"""Measure the cost of recording a call, compared with no journal and with a bare insert, and of resuming runs.

    python bench/journal.py [CALLS [LONGEST]]

The bare insert is one row of the same size in its own transaction, in a file opened in the same way. It is
the minimum cost of any record with that durability.
"""

from __future__ import annotations

import asyncio
import sqlite3
import sys
import tempfile
import time
from collections.abc import AsyncGenerator
from decimal import Decimal
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from handrail import Adapter, Prompt, SqliteJournal, ToolContext, tool
from handrail.clock import SYSTEM_CLOCK
from handrail.dispatch import open_gate
from handrail.environment import LaterEnvironment
from handrail.errors import RunParked
from handrail.journal.chains import INSERT, MAC_BYTES, Chains
from handrail.journal.connection import Connection
from handrail.journal.database import Database
from handrail.journal.sqlite import Durability
from handrail.messages import CallPart, ModelPart, ModelRequest, Price, StopPart, Traits
from handrail.models.scripted import ScriptedModel
from handrail.question import Answer


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


async def calls(count: int, journal: Any) -> float:
    """Return the seconds that a call through the gate takes."""
    gate = open_gate([add], journal=journal)
    for _ in range(50):
        await gate.invoke("add", {"a": 1, "b": 2})
    began = time.perf_counter()
    for number in range(count):
        await gate.invoke("add", {"a": number, "b": 2})
    return (time.perf_counter() - began) / count


def inserts(path: Path, count: int, size: int, synchronous: str) -> float:
    """Return the seconds that a bare insert takes."""
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute(f"PRAGMA synchronous = {synchronous}")
    connection.execute("CREATE TABLE units (number INTEGER PRIMARY KEY, run_id TEXT, unit BLOB)")
    connection.execute("CREATE INDEX units_of_a_run ON units (run_id)")
    body = b"x" * size
    began = time.perf_counter()
    for _ in range(count):
        connection.execute("BEGIN IMMEDIATE")
        connection.execute("INSERT INTO units (run_id, unit) VALUES ('run', ?)", (body,))
        connection.execute("COMMIT")
    spent = (time.perf_counter() - began) / count
    connection.close()
    return spent


async def costs(folder: Path, count: int) -> None:
    plain = await calls(count, None)
    say("a call without a journal", f"{plain * 1e6:.0f} µs")
    levels: tuple[tuple[Durability, str], ...] = (("process", "OFF"), ("power", "FULL"))
    for durability, synchronous in levels:
        journal = SqliteJournal(folder / f"{durability}.db", durability=durability)
        spent = await calls(count, journal)
        database = journal._database  # pyright: ignore[reportPrivateUsage]
        [units] = await database.select("SELECT avg(length(body)) FROM records WHERE kind = 'unit'")
        size = int(units[0])
        journal.close()
        bare = inserts(folder / f"bare-{durability}.db", count, size, synchronous)
        say(f'with a journal, durability="{durability}"', f"{spent * 1e6:.0f} µs")
        say(f"  a bare insert of the same {size} bytes", f"{bare * 1e6:.0f} µs")
        say("  the cost of the record, in bare inserts", f"{(spent - plain) / bare:.1f}")


MAC_LIMIT = 6.0
"""Maximum cost of a record's MAC and of its link to the previous record, in microseconds."""


class Unchained(Chains):
    """Chains that write the same rows without a MAC or a head, for comparison."""

    def append(
        self, connection: Connection, chain: str, kind: str, key: str, body: bytes, **more: Any
    ) -> int:
        self.number = number = getattr(self, "number", 0) + 1
        mac = bytearray(b"x" * MAC_BYTES)
        connection.execute(INSERT, (chain, number, kind, key, 0.0, "s", bytearray(body), mac, "applied", 0))
        return number


def chained(path: Path, count: int, make: type[Chains]) -> float:
    """Return the CPU seconds that it takes to add a record to a chain. All records are added in one transaction."""
    database = Database(str(path), clock=SYSTEM_CLOCK, new_id="bench", inline=True)
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
    """Print the cost of a record's MAC: the difference between the fastest of seven rounds with it and without it."""
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
    """A model that requests one call after another. It keeps no requests, so that only the run is measured."""

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
        chains(Path(folder), 10 * count)
        for steps in (longest // 10, longest // 4, longest // 2, longest):
            asyncio.run(resumed(Path(folder), steps))


if __name__ == "__main__":
    main()
