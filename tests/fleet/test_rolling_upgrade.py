"""Several versions of the code work on one journal during a rolling upgrade, and the oldest ones stop once it does not allow them."""

from __future__ import annotations

import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Generator
from contextlib import closing
from pathlib import Path
from typing import Any

import psycopg
import pytest

from handrail.fleet import FleetApp, Submission, submit
from handrail.journal.any_journal import AnyJournal, open_by_name
from handrail.journal.postgres.address import parse_url
from handrail.journal.postgres.statements import PostgresConnection
from handrail.journal.postgres.upgrade import read_catalog
from handrail.journal.records import OVER
from handrail.journal.sql.schema import TABLES, UPGRADABLE, VERSION
from support import PATIENCE, ROOT, fleet_app, importing_support, postgres

NEXT = VERSION + 1
APP = str(Path(fleet_app.__file__))


def write_next_version(folder: Path, url: str | None) -> Path:
    """Write the next version of the code, whose schema has one more table, and return the folder that it is imported from.

    Its step to that schema goes on while others work. The released schema is that of a new journal.
    """
    code = folder / "next"
    shutil.copytree(ROOT / "src", code, ignore=shutil.ignore_patterns("__pycache__", "vendor"))
    schema = code / "handrail/journal/sql/schema.py"
    text = schema.read_text()
    for old, new in (
        (f"\nVERSION = {VERSION}\n", f"\nVERSION = {NEXT}\n"),
        (f"\nUPGRADABLE = {UPGRADABLE!r}\n", f"\nUPGRADABLE = {(*UPGRADABLE, VERSION)!r}\n"),
        (
            "\nTABLES: Sequence[str] = (\n",
            '\nTABLES: Sequence[str] = (\n    "CREATE TABLE news (id TEXT PRIMARY KEY)",\n',
        ),
    ):
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    schema.write_text(text)
    (schema.parent / f"schema_{VERSION}.sql").write_text("".join(f"{each};\n" for each in TABLES))
    with (schema.parent / "upgrade.py").open("a") as file:
        file.write(
            f"STEPS[{VERSION}] = Step({NEXT}, {VERSION}, False, verify, lambda subject: subject.create())\n"
        )
    if url is not None:
        address = parse_url(url)
        with psycopg.connect(address.conninfo, autocommit=True) as raw:
            lines = read_catalog(PostgresConnection(raw), address.schema)
        catalog = code / f"handrail/journal/postgres/schema_{VERSION}.txt"
        catalog.write_text("".join(f"{each}\n" for each in lines))
    return code


class Fleet:
    """Workers of two versions on one journal, and the runs that they execute."""

    def __init__(self, journal: AnyJournal, name: str, folder: Path, code: dict[str, Path]) -> None:
        self.journal = journal
        self.name = name
        self._folder = folder
        self._code = code
        self._workers: list[subprocess.Popen[bytes]] = []
        self._app = FleetApp.load(APP)
        self.submitted = 0

    def environment(self, version: str) -> dict[str, str]:
        path = os.pathsep.join((str(self._code[version]), importing_support()["PYTHONPATH"]))
        return {**os.environ, "PYTHONPATH": path}

    def run(self, version: str, *words: str) -> str:
        """Run a command with the code of a version, and return what it printed."""
        command = [sys.executable, "-m", "handrail", *words, "--journal", self.name]
        done = subprocess.run(command, env=self.environment(version), capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def start(self, version: str) -> subprocess.Popen[bytes]:
        """Start a worker with the code of a version."""
        command = [sys.executable, "-m", "handrail", "worker", APP, "--journal", self.name, "-n", "4"]
        with (self._folder / f"worker-{len(self._workers)}.log").open("wb") as log:
            worker = subprocess.Popen(command, env=self.environment(version), stdout=log, stderr=log)
        self._workers.append(worker)
        return worker

    async def submit(self, number: int) -> None:
        """Submit runs, each of which ships a parcel. That can't be taken back, so it must happen exactly once."""
        for _ in range(number):
            self.submitted += 1
            asked = Submission(f"ship {self.submitted}", run_id=f"run-{self.submitted}")
            await submit(self.journal, self._app, asked)

    def said(self) -> str:
        return "".join(each.read_text() for each in sorted(self._folder.glob("worker-*.log")))

    def close(self) -> None:
        for each in self._workers:
            each.kill()
            each.wait()


@pytest.fixture(params=["sqlite", "postgres"])
def fleet(request: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Generator[Fleet]:
    """A fleet on a new journal."""
    monkeypatch.setenv("HANDRAIL_KEY", postgres.KEY)
    monkeypatch.setenv("FLEET_LOG", str(tmp_path / "log"))
    url = f"{postgres.new_url()}&lease=2" if request.param == "postgres" else None
    name = url or str(tmp_path / "runs.db")
    with closing(open_by_name(name, watches=False)) as journal:
        code = {"this": ROOT / "src", "next": write_next_version(tmp_path, url)}
        made = Fleet(journal, name, tmp_path, code)
        try:
            yield made
        finally:
            made.close()


async def until(fleet: Fleet, holds: Callable[[], Any]) -> Any:
    end = time.monotonic() + PATIENCE
    while not (found := await holds()):
        assert time.monotonic() < end, fleet.said()
        time.sleep(0.05)
    return found


@pytest.mark.timeout(900)
async def test_workers_of_two_versions_lose_nothing_and_do_nothing_twice(fleet: Fleet, tmp_path: Path):
    """Four workers are replaced one after another, under load, while the journal is upgraded. Then the old version is shut out."""

    async def done() -> int:
        rows = await fleet.journal.runs.list(limit=1000)
        assert all(row.status in ("queued", "running", "done") for row in rows), fleet.said()
        return sum(row.status in OVER for row in rows)

    old = [fleet.start("this") for _ in range(4)]
    await fleet.submit(12)
    await until(fleet, done)
    told = fleet.run("next", "journal", "upgrade")
    assert f"was upgraded from schema {VERSION} to {NEXT}" in told
    for each in old:
        await fleet.submit(6)
        fleet.start("next")
        each.send_signal(signal.SIGTERM)
        assert each.wait(PATIENCE) == 0
    await fleet.submit(6)

    async def all_done() -> bool:
        return await done() == fleet.submitted

    await until(fleet, all_done)
    shipped = Counter((tmp_path / "log").read_text().split())
    assert shipped == {"ship": 42, **{str(number): 1 for number in range(1, 43)}}
    assert (await fleet.journal.runs.verify()).altered == []
    assert "nothing was altered" in fleet.run("next", "runs", "verify")

    left = fleet.start("this")  # a worker that somebody forgot

    async def has_begun() -> bool:
        return fleet.said().count("executes up to") == 9

    await until(fleet, has_begun)
    shut_out(fleet.name)
    left.wait(PATIENCE)
    assert f"lets only versions of Handrail write to it whose schema is at least {NEXT}" in fleet.said()


def shut_out(name: str) -> None:
    """Let a journal allow only the next version, as a step would."""
    statement = f"UPDATE about SET value = '{NEXT}' WHERE key = 'oldest'"
    if not name.startswith("postgresql:"):
        with closing(sqlite3.connect(name, isolation_level=None, timeout=PATIENCE)) as connection:
            connection.execute(statement)
        return
    address = parse_url(name)
    with psycopg.connect(address.conninfo, options=f"-c search_path={address.schema}") as raw:
        raw.execute(statement)  # pyright: ignore[reportArgumentType, reportCallIssue]  # our own text
