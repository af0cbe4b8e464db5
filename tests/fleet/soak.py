"""Soak: a server, a server of workers and the workers do all kinds of runs for a while, and faults never stop.

    python tests/fleet/soak.py --seconds 600

The load is steady: orders of the chaos app in workspaces, streamed answers, approvals, cancellations, background runs,
files and commands in a folder, and conversations that are compacted. Faults follow one after the other (`Faults`). The
time is divided into rounds. After each round, the faults end, everything is finished, and what each process holds is
measured. From its first whole round to the last one, no figure may grow by more than `soak_laws.GROWTH`; worker 1 is
killed in every round, and the servers in the first. At the end every law of `chaos_laws` and `soak_laws` is checked.
The program prints one line of JSON and, after that, at most 50 violations. It ends only processes that it started.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import contextlib
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psycopg

sys.path.insert(0, str(Path(__file__).parents[1]))

from fleet import chaos_laws, soak_app, soak_faults, soak_laws
from fleet.chaos import LEASE, Chaos
from fleet.soak_laws import Figures
from handrail import SqliteJournal
from handrail.errors import HandrailError
from handrail.journal.protocol import Journal
from support import PATIENCE, TESTS, postgres, strict_wires
from support.killed_postgres import Server
from support.programs import HANDRAIL
from support.reserved_port import reserved_port
from support.serving import BEARER, TOKEN, Client, Said

ORDERS = 6
"""How many orders are under way at once."""
PEOPLE = 3
"""How many people use each server at once."""
_TURNS = 12
"""After how many turns a person begins a new thread."""
_LONGEST = 2.5
"""Maximum seconds that a fault lasts."""


_LEFT = re.compile(r"(\S+) was not cleaned up, because the disk reported an error")
"""What a process says about a folder that a failing disk keeps it from removing."""
_FAILED = (OSError, asyncio.IncompleteReadError, ValueError, IndexError, TimeoutError)
"""What a client raises if the connection breaks, also in the middle of a line."""


class ServerProcess:
    """A server process, which is started again at the same address when it is killed."""

    def __init__(
        self, name: str, folder: Path, port: int, environment: dict[str, str], *options: str
    ) -> None:
        self.name = name
        self.temporary = folder / f"{name}-temporary"
        self.temporary.mkdir()
        self.url = f"http://127.0.0.1:{port}"
        self.log = folder / f"{name}.log"
        self._environment = {
            **environment,
            "HANDRAIL_TOKEN": TOKEN,
            "TMPDIR": str(self.temporary),
            "XDG_STATE_HOME": str(folder / f"{name}-state"),
        }
        self._command = [*HANDRAIL, "serve", soak_app.APP, "--port", str(port), *options]
        self.process = self._start()

    def _start(self) -> subprocess.Popen[Any]:
        with self.log.open("ab") as log:
            return subprocess.Popen(self._command, env=self._environment, cwd=TESTS, stdout=log, stderr=log)

    def supervise(self) -> int:
        """Start the server again if it has ended. Returns how often it did."""
        if self.process.poll() is None:
            return 0
        self.process = self._start()
        return 1

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        self.process = self._start()


def client_of(server: ServerProcess) -> Client:
    return Client(server.url, None, BEARER)  # pyright: ignore[reportArgumentType]  # the app is in another process


async def ask(client: Client, method: str, path: str, body: Any = None) -> Said | None:
    """Return the server's response; None if the connection failed."""
    with contextlib.suppress(*_FAILED):
        async with asyncio.timeout(30):
            return await client.ask(method, path, body)
    return None


class Person:
    """Says one thing after the other to a server, follows the run's stream, answers its questions, and cancels some runs."""

    def __init__(self, soak: Soak, server: ServerProcess, verbs: Sequence[str]) -> None:
        self._soak = soak
        self._client = client_of(server)
        self._verbs = itertools.cycle(verbs)
        self._name = f"{server.name}-{next(soak.numbers)}"

    async def talk(self, is_over: Callable[[], bool]) -> None:
        turn = itertools.count()
        while not is_over():
            thread = f"{self._name}-{next(turn) // _TURNS}"
            text = f"{next(self._verbs)} {next(self._soak.numbers)}"
            said = await ask(self._client, "POST", f"/threads/{thread}/messages", {"text": text})
            if said is not None and said.status == 202:
                self._soak.turns[said.json["run_id"]] = text
            else:  # if the connection was lost, the run may have begun
                self._soak.happened[f"refused {said.status if said else 'connection'}"] += 1
                await asyncio.sleep(0.5)
            async with asyncio.timeout(PATIENCE):
                await self._follow(thread, text)
            self._soak.happened[text.partition(" ")[0]] += 1

    async def _follow(self, thread: str, text: str) -> None:
        """Read the thread's stream until its run is over. Connect again after each disconnection."""
        while True:
            with contextlib.suppress(*_FAILED):
                async with (
                    asyncio.timeout(5),
                    self._client.stream("GET", f"/threads/{thread}/events") as stream,
                ):
                    if stream.status == 200:
                        self._soak.happened["events"] += len(await stream.all())
            seen = await ask(self._client, "GET", f"/threads/{thread}")
            if seen is not None and seen.status == 404:
                return
            if seen is None or seen.status != 200:
                await asyncio.sleep(0.1)
            elif seen.json["status"] in ("idle", "failed", "cancelled"):
                return
            elif text.startswith("rest"):
                await ask(self._client, "POST", f"/threads/{thread}/cancel", {})
            else:
                for each in seen.json["questions"]:
                    answer = {
                        "question_id": each["id"],
                        "digest": each["digest"],
                        "value": {"approved": True},
                    }
                    await ask(self._client, "POST", f"/threads/{thread}/answers", answer)


class Soak:
    """The processes, their load, and what has happened to them."""

    def __init__(
        self, folder: Path, server: Server, models: soak_faults.ModelServer, ports: Sequence[int]
    ) -> None:
        self.folder = folder
        self.postgres = server
        self.models = models
        self.weather, self.files = folder / "weather", folder / "files"
        for each in (self.weather, self.files):
            each.mkdir()
        self.url = server.url(schema="soak", lease=LEASE)
        self.sqlite = folder / "journal" / "runs.db"
        self.sqlite.parent.mkdir(mode=0o700)
        self.turns: dict[str, str] = {}
        self.numbers = itertools.count()
        environment = {"SOAK_MODELS": models.url, "SOAK_WEATHER": str(self.weather)}
        self.chaos = Chaos(
            self.url,
            folder,
            dispatcher="journal",
            workers=2,
            seed=1,
            app=soak_app.APP,
            requests=1000,
            environment=environment,
        )
        self.happened = self.chaos.happened
        served = {**self.chaos.environment, **environment}
        desk = {**served, "HANDRAIL_JOURNAL": str(self.sqlite), "SOAK_FILES": str(self.files)}
        self.desk = ServerProcess("desk", folder, ports[0], desk)
        self.front = ServerProcess(
            "front", folder, ports[1], {**served, "HANDRAIL_JOURNAL": self.url}, "--submit"
        )

    def close(self) -> None:
        for each in (self.desk, self.front):
            each.process.kill()
            each.process.wait()
        self.chaos.close()

    async def begin(self) -> None:
        """Wait until both servers answer. Raises `AssertionError` if one ends."""
        async with asyncio.timeout(PATIENCE):
            for each in (self.desk, self.front):
                client = client_of(each)
                while await ask(client, "GET", "/health") is None:
                    assert each.process.poll() is None, f"{each.name} has ended: {each.log.read_text()}"
                    await asyncio.sleep(0.1)

    # Load.

    async def work(self, seconds: float, faults: Iterator[Callable[[], Awaitable[None]]]) -> None:
        """Keep the load up while faults follow each other for so many seconds. Then let everything be finished."""
        until = time.monotonic() + seconds

        def is_over() -> bool:
            return time.monotonic() > until

        desk = ["keep", "spend", "tell", "read", "sort", "rest", "keep"]
        front = ["tell", "begin", "spend", "read", "rest"]
        people = [
            Person(self, server, verbs[number:] + verbs[:number])
            for server, verbs in ((self.desk, desk), (self.front, front))
            for number in range(PEOPLE)
        ]
        async with asyncio.TaskGroup() as tasks:
            for each in people:
                tasks.create_task(each.talk(is_over))
            tasks.create_task(self._order(is_over))
            while not is_over():
                await next(faults)()
                await asyncio.sleep(_LONGEST / 5)
        await self._finish()

    async def _order(self, is_over: Callable[[], bool]) -> None:
        """Keep some orders under way."""
        while not is_over():
            await self._look()
            with contextlib.suppress(HandrailError, psycopg.OperationalError):
                left = self.chaos.runs - await asyncio.to_thread(self.chaos.count_over)
                if left < ORDERS:
                    await self.chaos.submit(1)

    async def _look(self) -> None:
        """Restart the processes that have ended, and answer the questions of orders."""
        for each in (self.desk, self.front):
            self.happened[f"{each.name} ended"] += each.supervise()
        self.chaos.supervise()
        await asyncio.sleep(0.1)
        with contextlib.suppress(HandrailError, psycopg.OperationalError):
            await self.chaos.answer()

    async def _finish(self) -> None:
        """Wait until every run is over. Raises `AssertionError` if some are not after `PATIENCE` seconds."""
        until = time.monotonic() + PATIENCE
        while left := await self._left():
            assert time.monotonic() < until, f"these runs are not over: {left[:20]}"
            await self._look()

    async def _left(self) -> Sequence[Any]:
        query = "SELECT id, status, legs, deaths, owner, due_at FROM {}.runs WHERE status != ALL(%s)"
        try:
            return await asyncio.to_thread(self.chaos.select, query, ["done", "failed", "cancelled"])
        except psycopg.OperationalError as error:
            return [error]

    # Figures.

    def _processes(self) -> dict[str, tuple[int, Sequence[Path]]]:
        """Return the process id and the folders for temporary files of each process."""
        staged = self.files.with_name(f".{self.files.name}.handrail") / "at-work"
        found: dict[str, tuple[int, Sequence[Path]]] = {
            "desk": (self.desk.process.pid, (self.desk.temporary, staged)),
            "front": (self.front.process.pid, (self.front.temporary,)),
        }
        workers = enumerate(self.chaos.processes())
        return found | {f"worker{number}": (pid, (folder,)) for number, (pid, folder) in workers}

    async def measure(self) -> dict[tuple[str, int], Figures]:
        """Return what each process holds when nothing happens: the least of several measurements."""
        found: dict[tuple[str, int], Figures] = {}
        left = _LEFT.findall(self.desk.log.read_text())
        for _ in range(4):
            await asyncio.sleep(0.5)
            for name, (pid, folders) in self._processes().items():
                now = Figures.of(pid, self.folder, folders, left)
                found[name, pid] = now.least(found.get((name, pid), now))
        return found

    # Laws.

    async def check(self) -> list[chaos_laws.Broken]:
        broken = await self.chaos.check()
        ledger = chaos_laws.Ledger(self.chaos.ledger)

        async def check(journal: Journal, kept: Sequence[str]) -> None:
            found = soak_laws.check_turns(journal, self.turns, ledger, kept, self.chaos.count)
            broken.extend([each async for each in found])

        await check(self.chaos.journal, ())
        with contextlib.closing(SqliteJournal(self.sqlite)) as journal:
            await check(journal, soak_laws.kept_in(self.files))
            for each in (await journal.runs.verify()).altered:
                broken.append(chaos_laws.Broken("the journal verifies", str(each)))
        broken += [chaos_laws.Broken("requests fit the wire", each) for each in strict_wires.take_refused()]
        return broken


class Faults:
    """All faults, one after the other. Servers are killed only until `spares_servers` is set."""

    def __init__(self, soak: Soak, seconds: float) -> None:
        self._soak = soak
        self._seconds = seconds
        self.spares_servers = False

    def __iter__(self) -> Iterator[Callable[[], Awaitable[None]]]:
        """Yield the faults. Between two faults of the models lies another one, in which requests that failed succeed."""
        soak = self._soak
        kill_servers = self._named("kill -9 of both servers", self._kill_servers)
        others = [
            kill_servers,
            self._named("kill -9 of a worker", self._kill_worker),
            *(self._named(f"disk {fault}", self._weather, "disk", fault) for fault in soak_app.DISK),
            *(self._named("clock 30 s off", self._weather, "clock", each) for each in ("30", "-30")),
            self._named("SQLite locked", self._locked, lambda: soak_faults.lock_sqlite(soak.sqlite)),
            self._named("PostgreSQL locked", self._locked, lambda: soak_faults.lock_postgres(soak.url)),
            self._named("PostgreSQL's connections dropped", self._drop),
            self._named("PostgreSQL killed", self._restart),
        ]
        for fault, other in zip(itertools.cycle(soak_faults.MODELS), itertools.cycle(others), strict=False):
            yield self._named(f"model {fault}", self._model, fault)
            if other is not kill_servers or not self.spares_servers:
                yield other

    def _named(
        self, name: str, fault: Callable[..., Awaitable[None]], *arguments: Any
    ) -> Callable[[], Awaitable[None]]:
        async def happen() -> None:
            self._soak.happened[name] += 1
            await fault(*arguments)

        return happen

    async def _model(self, fault: str) -> None:
        await self._soak.models.change(fault)
        await asyncio.sleep(self._seconds)
        await self._soak.models.change("")

    async def _weather(self, what: str, fault: str) -> None:
        path = self._soak.weather / what
        new = path.with_suffix(".new")
        new.write_text(fault)
        new.replace(path)
        await asyncio.sleep(self._seconds)
        path.unlink()

    async def _kill_worker(self) -> None:
        self._soak.chaos.kill(1)

    async def _kill_servers(self) -> None:
        for each in (self._soak.desk, self._soak.front):
            each.kill()

    async def _locked(self, lock: Callable[[], Callable[[], None]]) -> None:
        unlock = await asyncio.to_thread(lock)
        await asyncio.sleep(self._seconds)
        unlock()

    async def _drop(self) -> None:
        await asyncio.to_thread(soak_faults.drop_connections, self._soak.postgres)

    async def _restart(self) -> None:
        await asyncio.to_thread(self._soak.postgres.restart)


async def run(soak: Soak, seconds: float) -> tuple[dict[str, Any], list[chaos_laws.Broken]]:
    """Soak for so many seconds, in rounds. Returns the figures of each process at start and end, and what was violated."""
    rounds = max(4, int(seconds // 60))
    faults = Faults(soak, min(_LONGEST, seconds / rounds / 20))
    following = iter(faults)
    samples: dict[tuple[str, int], list[Figures]] = {}
    await soak.begin()
    for number in range(rounds):
        faults.spares_servers = number > 0
        await soak.work(seconds / rounds, following)
        for key, found in (await soak.measure()).items():
            samples.setdefault(key, []).append(found)
            print(f"round {number + 1} of {rounds}: {key[0]} {found}", file=sys.stderr, flush=True)
    shown: dict[str, Any] = {}
    broken: list[chaos_laws.Broken] = []
    for (name, _), found in samples.items():
        if len(found) > 2:
            start, end = found[1], found[-1]
            shown[name] = {what: [a, b] for what, a, b in zip(Figures._fields, start, end, strict=True)}
            shown[name]["memory of each round"] = [each.memory for each in found]
            broken += soak_laws.grown(name, start, end)
    return shown, broken + await soak.check()


async def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument(
        "--keep", type=Path, help="the folder to keep logs and journals in, if a law is broken"
    )
    given = parser.parse_args()
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    os.environ["HANDRAIL_KEY"] = postgres.KEY
    folder = Path(tempfile.mkdtemp(prefix="handrail-soak-"))
    folder.chmod(0o755)  # PostgreSQL runs as a different user
    (folder / "pg").mkdir()
    server = Server(folder / "pg", addresses="")
    said: dict[str, Any] = {"seconds": given.seconds}
    broken = [chaos_laws.Broken("every run finished", "the test itself failed")]
    try:
        server.wait()
        async with soak_faults.model_server(soak_app.MODELS) as models:
            with reserved_port() as one, reserved_port() as other:
                soak = Soak(folder, server, models, (one, other))
                try:
                    # on a busy machine, a round takes longer to end its runs than to work
                    async with asyncio.timeout(4 * given.seconds + 3 * PATIENCE):
                        said["figures"], broken = await run(soak, given.seconds)
                finally:
                    said["happened"] = soak.happened
                    soak.close()
    except* (AssertionError, TimeoutError) as errors:
        broken = [chaos_laws.Broken("every run finished", repr(each)) for each in errors.exceptions]
    finally:
        server.stop()
        if broken and given.keep is not None:
            shutil.copytree(folder, given.keep, symlinks=True, ignore=shutil.ignore_patterns("pg"))
        shutil.rmtree(folder)
    said["laws"] = dict(collections.Counter(each.law for each in broken)) or "kept"
    print(json.dumps(said))
    for each in broken[:50]:
        print("BROKEN", each)
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
