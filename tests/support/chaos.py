"""Chaos tests: worker processes are killed, frozen and cut off while they execute runs.

python tests/support/chaos.py --workers 4 --runs 100 --seconds 60 --dispatcher dbos

It starts a PostgreSQL server and worker processes. As root, each worker is on its own host (`support.hosts`).
Every second it disturbs a worker: it kills the worker, freezes it, cuts its network or sets its clock 30 seconds
ahead or behind. Each of the last three lasts for three leases. Once, it restarts PostgreSQL. Meanwhile it
answers the questions of the runs. Then it lets all runs finish, and checks the journal and the ledger that
the app writes. It ends only processes that it started.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import contextlib
import itertools
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg

sys.path.insert(0, str(Path(__file__).parents[1]))

from handrail import PostgresJournal
from handrail.adapter.run_record import decode_outcome
from handrail.errors import HandrailError
from handrail.fleet import FleetApp, Submission, submit
from handrail.journal.postgres.address import parse_url
from handrail.limits import Budget
from handrail.question import Answer
from handrail.records import OVER
from support import TESTS, chaos_app, postgres
from support.hosts import Host, can_make

LEASE = 2.0
_DURABLE = {
    **postgres._SETTINGS,
    "synchronous_commit": "on",
    "listen_addresses": "*",
}  # a committed transaction survives the server's death


class Server:
    """A PostgreSQL server of our own, which can be killed and started again."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._options: dict[str, Any] = {
            "cwd": folder,
            "env": {"PATH": os.environ["PATH"], "LC_ALL": "C.UTF-8", "TZ": "UTC"},
            "stdout": subprocess.DEVNULL,
            "stderr": subprocess.DEVNULL,
            **postgres._unprivileged(),
        }
        if "user" in self._options:
            os.chown(folder, self._options["user"], self._options["group"])
        create = [postgres.programs() / "initdb", "-D", folder / "data", "-U", "tests", "-A", "trust"]
        subprocess.run([*create, "-E", "UTF8", "--no-sync", "--locale=C"], check=True, **self._options)
        with (folder / "data" / "pg_hba.conf").open("a") as file:
            file.write("host all all 10.0.0.0/8 trust\n")
        self.port = _free_port()
        self._process = self._start()

    def _start(self) -> subprocess.Popen[Any]:
        settings = [f"-c{name}={value.strip(chr(39))}" for name, value in _DURABLE.items()]
        command = [postgres.programs() / "postgres", "-D", self._folder / "data", "-k", self._folder]
        command += ["-p", str(self.port)]
        return subprocess.Popen([*command, *settings], **self._options)

    def url(self, host: str = "", **parameters: object) -> str:
        """Return the server's URL, through its socket or through the network, where it has the address `host`."""
        added = "".join(f"&{name}={value}" for name, value in parameters.items())
        return f"postgresql://tests@/postgres?host={host or self._folder}&port={self.port}{added}"

    def wait(self) -> None:
        until = time.monotonic() + 60
        while True:
            with contextlib.suppress(psycopg.OperationalError), psycopg.connect(self.url()):
                return
            assert time.monotonic() < until, "PostgreSQL does not start"
            time.sleep(0.05)

    def restart(self) -> None:
        """Stop the server at once, without waiting for its clients, and start it again."""
        self.stop()
        self._process = self._start()
        self.wait()

    def stop(self) -> None:
        self._process.send_signal(signal.SIGQUIT)
        self._process.wait()


def _free_port() -> int:
    with socket.create_server(("", 0)) as free:
        return free.getsockname()[1]


class WorkerProcess:
    """A worker process, on its own host if it was given one."""

    def __init__(
        self, number: int, dispatcher: str, environment: dict[str, str], log: Path, host: Host | None
    ) -> None:
        self.is_frozen = False
        self.host = host
        command = [sys.executable, "-m", "handrail", "worker", chaos_app.__file__, "-n", "20"]
        if dispatcher != "journal":
            command += ["--dispatcher", dispatcher]
        if host is not None:
            command = host.command(*command)
            environment = {**environment, **host.environment()}
        with log.open("ab") as file:
            self.process = subprocess.Popen(command, env=environment, stdout=file, stderr=file)

    @property
    def is_well(self) -> bool:
        return not self.is_frozen and not (self.host is not None and self.host.is_cut)

    def _pid(self) -> int:
        """Return the id of the worker itself, which may be a child of `unshare`."""
        if self.host is None:
            return self.process.pid
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return int(children[0])

    def kill(self) -> None:
        with contextlib.suppress(OSError, IndexError):
            os.kill(self._pid(), signal.SIGKILL)
        self.process.kill()
        self.process.wait()

    def freeze(self, is_frozen: bool) -> None:
        with contextlib.suppress(OSError, IndexError):
            os.kill(self._pid(), signal.SIGSTOP if is_frozen else signal.SIGCONT)
            self.is_frozen = is_frozen


class Chaos:
    """Runs, the workers that execute them, and what has happened to both, as counts."""

    def __init__(
        self,
        url: str,
        folder: Path,
        *,
        dispatcher: str,
        workers: int,
        seed: int,
        url_from: Callable[[str], str] | None = None,
    ) -> None:
        """Start workers. If there is `url_from`, each is on a host, which reaches the journal at `url_from(host.address)`."""
        self.random = random.Random(seed)
        self.happened: collections.Counter[str] = collections.Counter()
        self._folder = folder
        self._dispatcher = dispatcher
        self.ledger = folder / "ledger"
        self._environment = {
            **os.environ,
            "HANDRAIL_KEY": postgres.KEY,
            "CHAOS_LEDGER": str(self.ledger),
            "PYTHONPATH": str(TESTS),
        }
        self.app = FleetApp.load(chaos_app.__file__)
        self.journal = PostgresJournal(url)
        self._hosts = [Host(number, folder) for number in range(workers)] if url_from else []
        self._urls = [url_from(each.address) for each in self._hosts] if url_from else [url] * workers
        self._workers = [self._work(number) for number in range(workers)]

    def supervise(self) -> None:
        """Start workers again that have ended by themselves, as systemd does."""
        for number, each in enumerate(self._workers):
            if each.process.poll() is not None:
                self.happened["ended"] += 1
                self._workers[number] = self._work(number)

    def _work(self, number: int) -> WorkerProcess:
        log = self._folder / f"worker{number}.log"
        url = self._urls[number]
        where = {"HANDRAIL_JOURNAL": url, "HANDRAIL_DISPATCH_URL": parse_url(url).conninfo}
        host = self._hosts[number] if self._hosts else None
        return WorkerProcess(number, self._dispatcher, {**self._environment, **where}, log, host)

    def close(self) -> None:
        for each in self._workers:
            each.kill()
        for each in self._hosts:
            each.close()
        self.journal.close()

    def faults(self) -> list[Callable[[], Any]]:
        """Return the methods that disturb a worker. Without hosts, networks and clocks can't be disturbed."""
        return [self.kill, self.freeze, *([self.cut, self.skew] if self._hosts else [])]

    def _victim(self) -> WorkerProcess | None:
        """Return a random undisturbed worker, or None if at most one is left."""
        well = [each for each in self._workers if each.is_well]
        return self.random.choice(well) if len(well) > 1 else None

    async def submit(self, runs: int) -> None:
        """Submit runs. The budget of every fourth run is one call too small, so that it fails."""
        for number in range(runs):
            calls = chaos_app.CALLS - (number % 4 == 3)
            budget = Budget(requests=chaos_app.REQUESTS, tool_calls=calls)
            await submit(
                self.journal, self.app, Submission(f"o{number}", run_id=f"run{number}", budget=budget)
            )

    def kill(self) -> None:
        """Kill a worker, and start one in its place."""
        number = self.random.randrange(len(self._workers))
        self._workers[number].kill()
        self._workers[number] = self._work(number)
        self.happened["kill -9"] += 1

    async def freeze(self) -> None:
        """Freeze a worker for three leases, if more than one is undisturbed."""
        worker = self._victim()
        if worker is not None:
            worker.freeze(True)
            self.happened["SIGSTOP"] += 1
            await asyncio.sleep(3 * self.journal.lease)
            worker.freeze(False)

    async def cut(self) -> None:
        """Cut the network of a worker's host for three leases, if more than one worker is undisturbed."""
        worker = self._victim()
        if worker is not None and worker.host is not None:
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
        """Answer every open question. Whether an interrupted step has happened is looked up in the ledger."""
        lines = (
            [line.split() for line in self.ledger.read_text().splitlines()] if self.ledger.exists() else []
        )
        for row in await self._rows("parked", "running"):
            for question in await self.journal.questions.open(row.record.id):
                order = row.record.id.replace("run", "o")
                happened = {"happened": ["end", "tip", order, "-"] in lines}
                value = {"name": "blue"} if question.name == "pick" else happened
                answer = Answer(
                    question_id=question.id, digest=question.digest, by=question.principal, value=value
                )
                await asyncio.to_thread(self.journal.questions.answer, answer)

    async def _rows(self, *statuses: str) -> list[Any]:
        rows = [await self.journal.runs.get(f"run{number}") for number in range(self.runs)]
        return [row for row in rows if not statuses or row.status in statuses]

    async def run(
        self, runs: int, seconds: float, events: Iterator[Callable[[], Any]], patience: float
    ) -> None:
        """Submit runs, and wait until all are over. In the first `seconds`, an event happens every second."""
        submitted = time.monotonic()
        await self.begin(runs, patience)
        began = next_event = time.monotonic()
        lasting: list[asyncio.Task[None]] = []
        while (now := time.monotonic()) < began + seconds:
            if now >= next_event:
                next_event = now + 1
                found = next(events)()
                if asyncio.iscoroutine(found):
                    lasting.append(asyncio.ensure_future(found))
            await self._look()
        await self.finish(patience)
        await asyncio.gather(*lasting)
        self.seconds = time.monotonic() - submitted

    async def begin(self, runs: int, patience: float) -> None:
        """Submit runs, and wait until a worker executes one."""
        self.runs = runs
        await self.submit(runs)
        until = time.monotonic() + patience
        while not self.ledger.exists():
            assert time.monotonic() < until, "no worker has begun"
            await self._look()

    async def finish(self, patience: float) -> None:
        """Wait until all runs are over."""
        until = time.monotonic() + patience
        while not await self._look():
            assert time.monotonic() < until, f"not over: {await self.left()}"

    async def _look(self) -> bool:
        """Start workers that have ended, and answer questions. Returns whether all runs are over."""
        self.supervise()
        await asyncio.sleep(0.1)
        with contextlib.suppress(HandrailError):  # PostgreSQL was just restarted
            await self.answer()
            return all(row.status in OVER for row in await self._rows())
        return False

    async def left(self) -> list[tuple[Any, ...]]:
        return [
            (row.record.id, row.status, row.legs, row.deaths, row.owner[:30], row.questions, row.due_at)
            for row in await self._rows()
            if row.status not in OVER
        ]

    async def check(self) -> list[str]:
        """Check the ledger and the journal after all runs are over. Return a line for each problem."""
        wrong: list[str] = []
        lines = [tuple(line.split()) for line in self.ledger.read_text().splitlines()]
        begun = collections.Counter(line[1:3] for line in lines if line[0] == "begin")
        keys: dict[tuple[str, ...], set[str]] = {}
        for line in lines:
            keys.setdefault(line[1:3], set()).add(line[3])
        wrong += [f"{each}: more than one key" for each, found in keys.items() if len(found) > 1]
        for number in range(self.runs):
            wrong += [f"run{number}: {each}" for each in await self._check_run(number, begun, set(lines))]
        verified = await self.journal.runs.verify()
        wrong += [str(each) for each in verified.altered]
        self.happened["records"] = verified.records
        return wrong

    async def _check_run(self, number: int, begun: Any, lines: set[Any]) -> list[str]:
        wrong: list[str] = []
        order, is_short = f"o{number}", number % 4 == 3
        row = await self.journal.runs.get(f"run{number}")
        outcome = decode_outcome(row)
        self.happened[row.status] += 1
        self.happened["legs"] += row.legs
        if row.status != ("failed" if is_short else "done"):
            wrong.append(f"{row.status} {outcome.stop_reason} {outcome.error}")
        if is_short and outcome.phase != "budget":
            wrong.append(f"it failed, but not because of its budget: {outcome.error}")
        units = await self.journal.calls.load(f"run{number}")
        places = collections.Counter(unit.place for unit in units)
        wrong += [f"{place} has {count} units" for place, count in places.items() if count > 1]
        for what in ("pay", "ship", "book", "fee", "tip"):  # a small budget excludes the last two
            wanted = not (is_short and what in ("fee", "tip"))
            if bool(begun[what, order]) != wanted and not (wanted and what == "ship"):
                wrong.append(f"{what} {'never began' if wanted else 'began, which its budget excludes'}")
        if begun["ship", order] > 1:
            wrong.append(f"ship began {begun['ship', order]} times")
        ended = ("end", "ship", order, "-") in lines
        shipped = next((unit for unit in units if unit.tool == "ship"), None)
        if shipped is None:
            return [*wrong, f"ship has no unit; legs {row.legs}, deaths {row.deaths}"]
        self.happened[f"ship {shipped.status}"] += 1
        if shipped.status == "ok" and not ended:
            wrong.append("ship is recorded, but not in the ledger")
        if shipped.status != "ok" and "unknown" not in outcome.text and not is_short:
            wrong.append(f"the model was not told that nobody knows of ship: {outcome.text}")
        if begun["pay", order] > 1:
            self.happened["pay again"] += begun["pay", order] - 1
        return wrong


async def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--runs", type=int, default=50)
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--patience", type=float, default=120)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--dispatcher", choices=["journal", "dbos", "procrastinate"], default="journal")
    parser.add_argument("--keep", action="store_true", help="keep the folder with the workers' logs")
    given = parser.parse_args()
    os.environ["HANDRAIL_KEY"] = postgres.KEY
    folder = Path(tempfile.mkdtemp(prefix="handrail-chaos-"))
    folder.chmod(0o755)  # PostgreSQL runs as a different user
    (folder / "pg").mkdir()
    server = Server(folder / "pg")
    try:
        server.wait()
        url = server.url(schema="chaos", lease=LEASE)
        chaos = Chaos(
            url,
            folder,
            dispatcher=given.dispatcher,
            workers=given.workers,
            seed=given.seed,
            url_from=(lambda host: server.url(host, schema="chaos", lease=LEASE)) if can_make() else None,
        )
        try:
            faults = chaos.faults()
            events = itertools.chain(
                [*faults, lambda: asyncio.to_thread(server.restart)],
                iter(lambda: chaos.random.choice(faults), None),
            )
            await chaos.run(given.runs, given.seconds, events, given.patience)
            wrong = await chaos.check()
        finally:
            chaos.close()
    finally:
        server.stop()
        if not given.keep:
            shutil.rmtree(folder)
    shown = ", ".join(f"{name} {count}" for name, count in sorted(chaos.happened.items()))
    print(f"{given.dispatcher}: {given.runs} runs, {given.workers} workers, {chaos.seconds:.1f} s: {shown}")
    for each in wrong:
        print("WRONG", each)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
