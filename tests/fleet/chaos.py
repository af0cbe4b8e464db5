"""Chaos tests: worker processes are killed, frozen and cut off while they execute runs.

python tests/fleet/chaos.py --workers 4 --runs 100 --seconds 60 --dispatcher dbos

The program starts a PostgreSQL server and worker processes. If it can create hosts (`fleet.hosts`), each worker has one.
For at most `--seconds`, it disturbs a worker every second: it kills or freezes the worker. If there are hosts, it may
instead cut a host's network or, with `faketime`, set its clock 30 seconds ahead or behind. A freeze, a cut and a wrong
clock last for three leases. Once, it kills and restarts PostgreSQL instead. Meanwhile it answers the questions of the
runs. Then it lets all runs finish, and checks the laws in `fleet.chaos_laws`. It prints one line of JSON and, after
that, at most 50 violations. It ends only processes that it started.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import psycopg
import psycopg.sql

sys.path.insert(0, str(Path(__file__).parents[1]))

from fleet import chaos_app, chaos_laws
from fleet.hosts import Host, can_make, faketime
from handrail import PostgresJournal
from handrail.errors import HandrailError
from handrail.fleet import FleetApp, Submission, submit
from handrail.journal.postgres.address import parse_url
from handrail.journal.records import OVER
from handrail.run.limits import Budget
from support import importing_support, postgres
from support.killed_postgres import Server
from support.parked_runs import answer_to

LEASE = 2.0
_NOTHING: Mapping[str, str] = {}


class WorkerProcess:
    """A worker process, on its own host if it was given one."""

    def __init__(
        self,
        number: int,
        app: str,
        dispatcher: str,
        environment: dict[str, str],
        log: Path,
        host: Host | None,
    ) -> None:
        self.is_frozen = False
        self.host = host
        command = [sys.executable, "-m", "handrail", "worker", app, "-n", "20"]
        if dispatcher != "journal":
            command += ["--dispatcher", dispatcher]
        if host is not None:
            command = host.command(*command)
        with log.open("ab") as file:
            self.process = subprocess.Popen(command, env=environment, stdout=file, stderr=file)

    @property
    def is_well(self) -> bool:
        return not self.is_frozen and not (self.host is not None and self.host.is_cut)

    def _pid(self) -> int:
        """Return the process id of the worker itself. On a host, the worker is a child of `unshare`."""
        if self.host is None:
            return self.process.pid
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return int(children[0])

    def send(self, number: signal.Signals) -> None:
        """Send the worker a signal, if it is alive."""
        with contextlib.suppress(OSError, IndexError):
            os.kill(self._pid(), number)

    def kill(self) -> None:
        self.send(signal.SIGKILL)
        self.process.kill()
        self.process.wait()

    def freeze(self, is_frozen: bool) -> None:
        self.send(signal.SIGSTOP if is_frozen else signal.SIGCONT)
        self.is_frozen = is_frozen


class Chaos:
    """Runs and the workers that execute them, with counts of what has happened to both."""

    def __init__(
        self,
        url: str,
        folder: Path,
        *,
        dispatcher: str,
        workers: int,
        seed: int,
        url_from: Callable[[str], str] | None = None,
        app: str = chaos_app.__file__,
        requests: int = chaos_app.REQUESTS,
        environment: Mapping[str, str] = _NOTHING,
    ) -> None:
        """Start workers for the app, with these variables in their environment. A run may make `requests` requests.

        With `url_from`, each worker has its own host, which reaches the journal at `url_from(host.address)`.
        """
        self.random = random.Random(seed)
        self.happened: collections.Counter[str] = collections.Counter()
        self._folder = folder
        self._dispatcher = dispatcher
        self.ledger = folder / "ledger"
        self.environment = {
            **importing_support(),
            "HANDRAIL_KEY": postgres.KEY,
            "CHAOS_LEDGER": str(self.ledger),
            **environment,
        }
        self._name = app
        self._requests = requests
        self.runs = 0
        self.app = FleetApp.load(app)
        self.journal = PostgresJournal(url)
        self._address = parse_url(url)
        self.is_over = False
        self._hosts = [Host(number, folder) for number in range(workers)] if url_from else []
        self._urls = [url_from(each.address) for each in self._hosts] if url_from else [url] * workers
        self._workers = [self._work(number) for number in range(workers)]

    def supervise(self) -> None:
        """Restart the workers that have ended by themselves, as systemd does."""
        for number, each in enumerate(self._workers):
            if each.process.poll() is not None:
                self.happened["ended"] += 1
                self._workers[number] = self._work(number)

    def _work(self, number: int) -> WorkerProcess:
        log, temporary = self._folder / f"worker{number}.log", self._folder / f"temporary{number}"
        temporary.mkdir(exist_ok=True)
        url = self._urls[number]
        where = {
            "TMPDIR": str(temporary),
            "HANDRAIL_JOURNAL": url,
            "HANDRAIL_DISPATCH_URL": parse_url(url).conninfo,
            "XDG_CACHE_HOME": str(
                self._folder / f"cache{number}"
            ),  # each worker has its own copies of workspaces
        }
        host = self._hosts[number] if self._hosts else None
        environment = {**self.environment, **where}
        return WorkerProcess(number, self._name, self._dispatcher, environment, log, host)

    def close(self) -> None:
        for each in self._workers:
            each.kill()
        for each in self._hosts:
            each.close()
        self.journal.close()

    def processes(self) -> list[tuple[int, Path]]:
        """Return the process id and the folder for temporary files of each worker."""
        folders = [self._folder / f"temporary{number}" for number in range(len(self._workers))]
        return [(each.process.pid, folder) for each, folder in zip(self._workers, folders, strict=True)]

    def faults(self) -> list[Callable[[], Any]]:
        """Return the methods that disturb a worker. Cutting a network needs hosts, and setting a clock wrong also needs `faketime`."""
        hosts = [self.cut, *([self.skew] if faketime() else [])] if self._hosts else []
        return [self.kill, self.freeze, *hosts]

    def _victim(self) -> WorkerProcess | None:
        """Return a random worker that is neither frozen nor cut off, or None if at most one such worker is left."""
        well = [each for each in self._workers if each.is_well]
        return self.random.choice(well) if len(well) > 1 else None

    async def submit(self, runs: int) -> None:
        """Submit more runs, each in a workspace. Every fourth run fails, because its budget is one call too small."""
        for number in range(self.runs, self.runs + runs):
            calls = chaos_app.CALLS - chaos_laws.is_short(number)
            asked = Submission(
                f"o{number}",
                run_id=f"run{number}",
                budget=Budget(requests=self._requests, tool_calls=calls),
                folder=f"workspace:{chaos_laws.workspace_of(number)}",
                key=f"run{number}",
            )
            await submit(self.journal, self.app, asked)
            self.runs = number + 1

    def kill(self, number: int | None = None) -> None:
        """Kill a worker, at random unless its number is given, and start a new one in its place."""
        if number is None:
            number = self.random.randrange(len(self._workers))
        self._workers[number].kill()
        self._workers[number] = self._work(number)
        self.happened["kill -9"] += 1

    async def freeze(self) -> None:
        """Freeze a worker for three leases. If `_victim` returns None, kill a worker instead."""
        worker = self._victim()
        if worker is None:
            return self.kill()
        worker.freeze(True)
        self.happened["SIGSTOP"] += 1
        await asyncio.sleep(3 * self.journal.lease)
        worker.freeze(False)

    async def cut(self) -> None:
        """Cut the network of a worker's host for three leases. If `_victim` returns None, kill a worker instead."""
        worker = self._victim()
        if worker is None or worker.host is None:
            return self.kill()
        worker.host.cut(True)
        self.happened["network cut"] += 1
        await asyncio.sleep(3 * self.journal.lease)
        worker.host.cut(False)

    async def skew(self) -> None:
        """Set a host's clock 30 seconds ahead or behind for three leases."""
        host = self.random.choice(self._hosts)
        host.skew(self.random.choice((30, -30)))
        self.happened["clock 30 s off"] += 1
        await asyncio.sleep(3 * self.journal.lease)
        host.skew(0)

    async def answer(self) -> None:
        """Answer every open question of these runs. The ledger tells whether an interrupted tip was paid."""
        questions = [each for each in await self.journal.questions.open() if _is_order(each.run_id)]
        lines = chaos_app.read_ledger(self.ledger) if questions else []
        for question in questions:
            order = question.run_id.replace("run", "o")
            happened = {"happened": ["end", "tip", order, "-"] in lines}
            value = {"name": "blue"} if question.name == "pick" else happened
            answer = answer_to(question, value)
            await asyncio.to_thread(self.journal.questions.answer, answer)

    async def run(
        self, runs: int, seconds: float, events: Iterator[Callable[[], Any]], patience: float
    ) -> None:
        """Submit runs, and wait until all are over. Once a worker executes one, an event happens every second, for at most `seconds`."""
        submitted = time.monotonic()
        await self.begin(runs, patience)
        self.happened["seconds to submit"] = round(time.monotonic() - submitted)
        disturbing = asyncio.ensure_future(self._disturb(seconds, events))
        await self.finish(patience)
        self.seconds = time.monotonic() - submitted
        await disturbing

    async def _disturb(self, seconds: float, events: Iterator[Callable[[], Any]]) -> None:
        """Let an event happen every second until the runs are over or the time is up. Then wait for the events to end."""
        began = time.monotonic()
        lasting: list[asyncio.Task[None]] = []
        for number in range(int(seconds)):
            await asyncio.sleep(max(0.0, began + number - time.monotonic()))
            if self.is_over:
                break
            self.happened["events"] += 1
            found = next(events)()
            if asyncio.iscoroutine(found):
                lasting.append(asyncio.ensure_future(found))
        await asyncio.gather(*lasting)

    async def begin(self, runs: int, patience: float) -> None:
        """Submit runs, and wait until a worker executes one. Raises `AssertionError` if none has begun after `patience` seconds."""
        await self.submit(runs)
        until = time.monotonic() + patience
        while not self.ledger.exists():
            assert time.monotonic() < until, "no worker has begun a run"
            await self._look()

    async def finish(self, patience: float) -> None:
        """Wait until all runs are over. Raises `AssertionError` if some are not over after `patience` seconds."""
        until = time.monotonic() + patience
        while not await self._look():
            if time.monotonic() > until:
                await self._show_workers()
                raise AssertionError(f"these runs are not over: {await self.left()}")
        self.is_over = True

    async def _show_workers(self) -> None:
        """Make each worker print what its tasks wait for, and give it time to do so."""
        for each in self._workers:
            each.send(signal.SIGUSR1)
        await asyncio.sleep(2)

    async def _look(self) -> bool:
        """Restart the workers that have ended, and answer questions. Returns whether all runs are over.

        Returns False while PostgreSQL can't be reached.
        """
        self.supervise()
        await asyncio.sleep(0.1)
        with contextlib.suppress(HandrailError, psycopg.OperationalError):  # raised while PostgreSQL restarts
            await self.answer()
            return await asyncio.to_thread(self.count_over) == self.runs
        return False

    def count_over(self) -> int:
        """Return how many runs are over. Queries the table, because the journal's own methods would read every record."""
        return len(
            self.select("SELECT 1 FROM {}.runs WHERE status = ANY(%s) AND id ~ '^run[0-9]+$'", list(OVER))
        )

    def select(self, query: str, *values: Any) -> list[Any]:
        """Return the rows that a query finds in the journal's tables. A `{}` in the query stands for the schema of these tables."""
        named = psycopg.sql.SQL(query).format(psycopg.sql.Identifier(self._address.schema))  # pyright: ignore[reportArgumentType]  # our own text
        with psycopg.connect(self._address.conninfo) as connection:
            return connection.execute(named, values).fetchall()

    async def left(self) -> list[tuple[Any, ...]]:
        rows = [await self.journal.runs.get(f"run{number}") for number in range(self.runs)]
        return [
            (row.record.id, row.status, row.legs, row.deaths, row.owner[:30], row.questions, row.due_at)
            for row in rows
            if row.status not in OVER
        ]

    def count(self, name: str, number: int) -> None:
        self.happened[name] += number

    async def check(self) -> list[chaos_laws.Broken]:
        """After all runs are over, check the laws against the ledger, the journal and the files. Return the violations."""
        ledger = chaos_laws.Ledger(self.ledger)
        self.happened["ledger lines with the clock off"] = ledger.off
        steps = self.select("SELECT chain || ' ' || key FROM {}.records WHERE kind = 'step settled'")
        settled = [name for (name,) in steps]
        return [each async for each in chaos_laws.check(self.journal, self.runs, ledger, settled, self.count)]


def _is_order(run_id: str) -> bool:
    return run_id.startswith("run") and run_id[3:].isdecimal()


async def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--runs", type=int, default=50)
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--patience", type=float, default=120)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--dispatcher", choices=["journal", "dbos", "procrastinate"], default="journal")
    parser.add_argument("--keep", type=Path, help="the folder to keep logs and ledger in, if a law is broken")
    given = parser.parse_args()
    os.environ["HANDRAIL_KEY"] = postgres.KEY
    folder = Path(tempfile.mkdtemp(prefix="handrail-chaos-"))
    folder.chmod(0o755)  # PostgreSQL runs as a different user
    (folder / "pg").mkdir()
    server = Server(folder / "pg")
    said: dict[str, Any] = {"dispatcher": given.dispatcher, "workers": given.workers, "runs": given.runs}
    broken = [chaos_laws.Broken("every run finished", "the test itself failed")]
    try:
        server.wait()
        chaos = Chaos(
            server.url(schema="chaos", lease=LEASE),
            folder,
            dispatcher=given.dispatcher,
            workers=given.workers,
            seed=given.seed,
            url_from=(lambda host: server.url(host, schema="chaos", lease=LEASE)) if can_make() else None,
        )
        try:
            await chaos.run(given.runs, given.seconds, _events(chaos, server), given.patience)
            broken = await chaos.check()
        except AssertionError as error:
            broken = [chaos_laws.Broken("every run finished", str(error))]
        finally:
            chaos.close()
        said |= {"seed": given.seed, "seconds": round(getattr(chaos, "seconds", 0), 1), **chaos.happened}
    finally:
        server.stop()
        if broken and given.keep is not None:
            shutil.copytree(folder, given.keep, symlinks=True)
        shutil.rmtree(folder)
    counted = collections.Counter(each.law for each in broken)
    said["laws"] = {
        law: f"broken {counted[law]} times" if counted[law] else "kept" for law in chaos_laws.LAWS
    }
    print(json.dumps(said))
    for each in broken[:50]:
        print("BROKEN", each)
    return 1 if broken else 0


def _events(chaos: Chaos, server: Server) -> Iterator[Callable[[], Any]]:
    """Yield what happens in each second: every fault once, PostgreSQL's death, and then faults at random."""
    faults = chaos.faults()
    yield from faults

    def kill_server() -> Any:
        chaos.happened["PostgreSQL killed"] += 1
        return asyncio.to_thread(server.restart)

    yield kill_server
    while True:
        yield chaos.random.choice(faults)


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
