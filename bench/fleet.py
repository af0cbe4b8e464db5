"""Measure workers that share a PostgreSQL database: steps per second, failover, cancellation, and parked runs.

    python bench/fleet.py URL PART...       (each PART is `steps`, `dbos`, `failover`, `cancel`, `answer` or `parked`)

URL is a database for this benchmark only. Each part except `dbos` creates schemas of its own in it. The workers are processes
on this machine, and compete for its cores with PostgreSQL. `FLEET_SMALL=1` parks 1,000 runs instead of 10,000.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from handrail import PostgresJournal, runs
from handrail.fleet import FleetApp, Submission, submit
from handrail.journal.records import OVER, RunRow
from handrail.question import Answer

APP = Path(__file__).with_name("fleet_app.py")
RUNS, STEPS = 150, 20
PARKED, WOKEN = (1_000, 100) if os.environ.get("FLEET_SMALL") else (10_000, 1_000)
_TICKS = os.sysconf("SC_CLK_TCK")


def say(what: str, figure: str) -> None:
    print(f"{what:<72}{figure:>18}", flush=True)


def cpu(pid: int) -> float:
    """Return the CPU seconds that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


def resident(pid: int) -> float:
    """Return the resident memory of a process in MB."""
    return int(Path(f"/proc/{pid}/status").read_text().partition("VmRSS:")[2].split()[0]) / 1024


class Fleet:
    """A journal in a schema of its own, and worker processes for it."""

    def __init__(self, url: str, schema: str, lease: float, folder: Path) -> None:
        joint = "&" if urlsplit(url).query else "?"
        self.url = f"{url}{joint}schema={schema}_{os.getpid()}&lease={lease:g}"
        self.log = folder / f"{schema}.log"
        self.environment = {
            **os.environ,
            "HANDRAIL_JOURNAL": self.url,
            "HANDRAIL_KEY": "the key of the benchmark",
            "FLEET_LOG": str(self.log),
        }
        os.environ["HANDRAIL_KEY"] = self.environment["HANDRAIL_KEY"]
        self.journal = PostgresJournal(self.url)
        self.app = FleetApp.load(str(APP))
        self.workers: list[subprocess.Popen[Any]] = []

    async def start(self, count: int, *, limit: int = 20, prefix: Sequence[str] = ()) -> None:
        """Start workers, and wait until the journal lists them. `prefix` is the beginning of their command line."""
        command = [*prefix, sys.executable, "-m", "handrail", "worker", str(APP), "-n", str(limit)]
        already = len(await self.journal.queue.workers())
        for _ in range(count):
            quiet: Any = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
            self.workers.append(subprocess.Popen(command, env=self.environment, **quiet))
        await until(lambda: self._announced(already + count))

    async def _announced(self, count: int) -> bool:
        return len(await self.journal.queue.workers()) >= count

    async def stop(self) -> None:
        """Stop the workers, and wait until they have ended."""
        for each in self.workers:
            each.send_signal(signal.SIGTERM)
        for each in self.workers:
            await asyncio.to_thread(each.wait)
        self.workers.clear()

    async def submit(self, message: str, count: int = 1, **options: Any) -> list[str]:
        rows = [await submit(self.journal, self.app, Submission(message, **options)) for _ in range(count)]
        return [row.record.id for row in rows]

    async def over(self, ids: Sequence[str]) -> list[RunRow]:
        """Wait until these runs are over, and return their rows."""
        left = set(ids)

        async def done() -> bool:
            for each in tuple(left):
                if (await self.journal.runs.get(each)).status not in OVER:
                    return False
                left.discard(each)
            return True

        await until(done, 0.05)
        return [await self.journal.runs.get(each) for each in ids]

    def noted(self, what: str) -> list[float]:
        """Return the times at which the app's handlers wrote this word."""
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        return [float(line.split()[1]) for line in lines if line.startswith(what)]

    async def parked(self, count: int) -> bool:
        """Return whether at least this many runs are parked and have no owner."""
        query = "SELECT count(*) FROM runs WHERE status = 'parked' AND owner = ''"
        [[found]] = await self.journal._database.select(query)  # pyright: ignore[reportPrivateUsage]
        return found >= count

    def close(self) -> None:
        for each in self.workers:
            each.kill()
            each.wait()
        self.journal.close()


async def until(done: Callable[[], Any], pause: float = 0.005) -> None:
    async with asyncio.timeout(900):
        while not await result if asyncio.iscoroutine(result := done()) else not result:
            await asyncio.sleep(pause)


@contextlib.asynccontextmanager
async def fleet(url: str, schema: str, lease: float = 30.0) -> AsyncGenerator[Fleet]:
    with tempfile.TemporaryDirectory() as folder:
        made = Fleet(url, schema, lease, Path(folder))
        try:
            yield made
        finally:
            made.close()


async def steps(url: str) -> None:
    """Print the steps per second and the workers' CPU time per step. All runs become due together, once the workers have started."""
    for count in (1, 2, 4):
        async with fleet(url, f"steps{count}") as made:
            await made.start(count)
            at = time.time() + 0.02 * RUNS + 2
            ids = await made.submit(f"step {STEPS}", RUNS, at=at)
            before = [cpu(each.pid) for each in made.workers]
            rows = await made.over(ids)
            spent = sum(cpu(each.pid) for each in made.workers) - sum(before)
            took = max(row.changed_at for row in rows) - min(row.record.began_at for row in rows)
            assert all(row.status == "done" for row in rows)
            await made.stop()
        done = RUNS * STEPS
        say(
            f"{count} workers, {RUNS} runs of {STEPS} steps: steps a second, CPU a step",
            f"{done / took:.0f}, {spent / done * 1e3:.2f} ms",
        )


_DBOS = """
import sys, time
from dbos import DBOS
url, runs, steps = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
DBOS(config={"name": "bench", "system_database_url": url, "log_level": "ERROR"})

@DBOS.step()
def step(number):
    return number + 1

@DBOS.workflow()
def run():
    done = 0
    while done < steps:
        done = step(done)
    return done

DBOS.launch()
DBOS.register_queue("bench", worker_concurrency=20, polling_interval_sec=0.2)
began, used = time.time(), time.process_time()
handles = [DBOS.enqueue_workflow("bench", run) for _ in range(runs)]
assert all(each.get_result() == steps for each in handles)
took, spent = time.time() - began, time.process_time() - used
print(f"{runs * steps / took:.0f}, {spent / runs / steps * 1e3:.2f} ms")
DBOS.destroy()
"""


async def dbos(url: str) -> None:
    """Print the steps per second and the CPU time per step of DBOS alone, in one process, with a workflow for each run."""
    command = [sys.executable, "-c", _DBOS, url, str(RUNS), str(STEPS)]
    done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True)
    lines = done.stdout.strip().splitlines() or [f"failed: {done.stderr.strip()[-60:]}"]
    say(f"DBOS alone, 1 process, {RUNS} workflows of {STEPS} steps", lines[-1])


async def failover(url: str) -> None:
    """Print how long it takes until another worker continues the run of a worker that was killed."""
    for lease in (2.0, 5.0, 30.0):
        async with fleet(url, f"failover{lease:g}", lease) as made:
            await made.start(1)
            [run_id] = await made.submit("wait")
            await until(lambda made=made: made.noted("began"))
            await made.start(1)
            killed = time.time()
            made.workers[0].kill()
            await until(lambda made=made: len(made.noted("began")) == 2)
            say(
                f"lease of {lease:g} s: kill -9 until another worker's handler begins",
                f"{made.noted('began')[1] - killed:.2f} s",
            )
            await runs.cancel(made.journal, run_id)
            await made.over([run_id])
            await made.stop()


async def cancel(url: str, prefix: Sequence[str] = (), outside: str = "") -> None:
    """Print how long it takes until a handler's signal fires after this process has cancelled the handler's run."""
    async with fleet(url, "cancel") as made:
        if outside:
            made.environment["HANDRAIL_JOURNAL"] = made.url.replace(url, outside)
        await made.start(1, prefix=prefix)
        found: list[float] = []
        for number in range(1, 6):
            [run_id] = await made.submit("wait")
            await until(lambda number=number: len(made.noted("began")) == number)
            at = time.time()
            await runs.cancel(made.journal, run_id)
            await until(lambda number=number: len(made.noted("signalled")) == number)
            found.append(made.noted("signalled")[-1] - at)
            await made.over([run_id])
        hosts = [each.host for each in await made.journal.queue.workers()]
        say(
            f"cancelled in this process, until the signal fires on {', '.join(hosts)} (5 times)",
            " ".join(f"{each * 1e3:.0f}" for each in found) + " ms",
        )


def reply(made: Fleet, question: Any) -> None:
    made.journal.questions.answer(
        Answer(question_id=question.id, digest=question.digest, by=question.principal, value={"number": 1})
    )


async def answer(url: str) -> None:
    """Answer a run's question while no worker is alive, and print how soon a worker that starts later finishes the run."""
    async with fleet(url, "answer") as made:
        await made.start(1)
        [run_id] = await made.submit("choose")
        await until(lambda: made.parked(1))
        await made.stop()
        [question] = await made.journal.questions.open(run_id)
        reply(made, question)
        row = await made.journal.runs.get(run_id)
        alive = len(await made.journal.queue.workers())
        say(f"answered with {alive} workers alive: the run is", f"{row.status}, due")
        began = time.time()
        await made.start(1)
        started = time.time()
        [row] = await made.over([run_id])
        say("  a worker starts, until it is announced", f"{started - began:.2f} s")
        say(f"  from then until the run is {row.status}", f"{max(0.0, row.changed_at - started):.2f} s")
        await made.stop()


async def parked(url: str) -> None:
    """Print what many parked runs cost, how long it takes to answer a tenth of them, and how long until these are done."""
    async with fleet(url, "parked") as made:
        ids = await made.submit("choose", PARKED)
        began = time.time()
        await made.start(2, limit=50)
        empty = resident(made.workers[0].pid)
        await until(lambda: made.parked(PARKED), 0.5)
        say(f"{PARKED:,} runs ask and are parked by 2 workers", f"{time.time() - began:.0f} s")
        await asyncio.sleep(1)
        memory = [resident(each.pid) for each in made.workers]
        say("  memory of a worker, at its start and now", f"{empty:.0f}, {max(memory):.0f} MB")
        before = [cpu(each.pid) for each in made.workers]
        await asyncio.sleep(5)
        idle = (sum(cpu(each.pid) for each in made.workers) - sum(before)) / 10
        say("  CPU of an idle worker beside them", f"{idle * 100:.1f} %")
        await show_plan(made)
        woken = ids[:: PARKED // WOKEN]
        questions = [question for each in woken for question in await made.journal.questions.open(each)]
        began = time.time()
        for question in questions:
            reply(made, question)
        answered = time.time()
        rows = await made.over(woken)
        last = max(row.changed_at for row in rows)
        assert all(row.status == "done" for row in rows)
        say(f"{WOKEN:,} of them are answered", f"{answered - began:.1f} s")
        say("  from the first answer until the last of them is done", f"{last - began:.1f} s")
        memory = [resident(each.pid) for each in made.workers]
        say("  memory of a worker then", f"{max(memory):.0f} MB")
        await made.stop()


async def show_plan(made: Fleet) -> None:
    """Print PostgreSQL's plan of the statement with which a worker looks for due runs."""
    from handrail.journal.sql.queue import _DUE, _FIRST  # pyright: ignore[reportPrivateUsage]

    database: Any = made.journal._database  # pyright: ignore[reportPrivateUsage]
    query = f"EXPLAIN (ANALYZE, COSTS OFF, TIMING OFF) {_DUE} AND {database.leases.free}{_FIRST}"
    values = {"now": time.time(), "limit": 50}

    def explain(connection: Any) -> list[str]:
        connection.execute("ANALYZE runs")
        return [str(line) for (line,) in connection.execute(query, values).fetchall()]

    lines = await database.transact(explain)
    for line in lines:
        if "Scan" in line or "Execution" in line or "Sort" in line:
            print(f"    {line.strip()}")


PARTS: dict[str, Callable[..., Any]] = {
    each.__name__: each for each in (steps, dbos, failover, cancel, answer, parked)
}


def main() -> None:
    if len(sys.argv) < 3 or not set(sys.argv[2:]) <= PARTS.keys():
        sys.exit(__doc__)
    for part in sys.argv[2:]:
        asyncio.run(PARTS[part](sys.argv[1]))


if __name__ == "__main__":
    main()
