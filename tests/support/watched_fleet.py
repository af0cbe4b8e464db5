"""Real processes that share a journal in PostgreSQL: workers, and a server whose page shows what they do."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg

from handrail.journal.postgres.address import parse_url
from support import PATIENCE, postgres, watched_app
from support.programs import HANDRAIL
from support.reserved_port import reserved_port

APP = str(Path(watched_app.__file__))
TOKEN = "Wv3kQ9tX2mZr7LpN5sHd8aYc"


class WatchedFleet:
    """Starts workers and servers as processes, kills them, and opens the gates of their app."""

    def __init__(self, url: str, folder: Path, port: int) -> None:
        self.url = url
        self.gates = folder / "gates"
        self.gates.mkdir()
        self._logs = folder
        self._processes: list[subprocess.Popen[bytes]] = []
        self.port = port
        self.address = f"http://127.0.0.1:{self.port}"
        self.token: str | None = TOKEN
        """The server's token; None if users sign in by name."""

    def worker(self) -> subprocess.Popen[bytes]:
        """Start a worker, and return it when it takes runs."""
        return self._start("executes up to", "worker", APP)

    def server(self, port: int | None = None) -> subprocess.Popen[bytes]:
        """Start a server, by default always at the same address, and return it when it accepts requests."""
        return self._start(" is at http", "serve", APP, "--submit", "--port", str(port or self.port))

    def users(self, *words: str) -> str:
        """Run `handrail users`, as if on a machine of its own, and return what it prints."""
        command = [*HANDRAIL, "users", *words, "--journal", self.url]
        environment = {**self._environment(), "XDG_STATE_HOME": str(self._logs / "elsewhere")}
        return subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout

    def open(self, gate: str) -> None:
        (self.gates / gate).touch()

    def kill(self, process: subprocess.Popen[bytes], number: int = signal.SIGKILL) -> None:
        """Send a process a signal that ends it, and wait for it to end."""
        process.send_signal(number)
        process.wait(PATIENCE)

    def close(self) -> None:
        for each in self._processes:
            if each.poll() is None:
                self.kill(each)

    def said(self) -> str:
        """Return what all processes have printed."""
        return "".join(each.read_text() for each in sorted(self._logs.glob("*.log")))

    def rows(self, table: str) -> list[Any]:
        """Return all rows of one of the journal's tables."""
        address = parse_url(self.url)
        with psycopg.connect(address.conninfo, autocommit=True) as connection:
            return connection.execute(f'SELECT * FROM "{address.schema}".{table}').fetchall()  # pyright: ignore[reportArgumentType, reportCallIssue]  # plain names

    def until(self, holds: Callable[[], Any]) -> Any:
        """Wait until this function returns a true value, and return that value."""
        end = time.monotonic() + PATIENCE
        while not (found := holds()):
            if time.monotonic() > end:
                raise AssertionError(f"the condition never held. The processes said:\n{self.said()}")
            time.sleep(0.02)
        return found

    def _start(self, ready: str, *arguments: str) -> subprocess.Popen[bytes]:
        path = self._logs / f"{len(self._processes)}.log"
        environment = {
            **self._environment(),
            "XDG_STATE_HOME": str(self._logs / f"state{len(self._processes)}"),
        }
        with path.open("wb") as log:
            process = subprocess.Popen([*HANDRAIL, *arguments], env=environment, stdout=log, stderr=log)
        self._processes.append(process)
        self.until(lambda: re.search(re.escape(ready), path.read_text()) or process.poll() is not None)
        if process.poll() is not None:
            raise AssertionError(f"the process has ended. It printed:\n{path.read_text()}")
        return process

    def _environment(self) -> dict[str, str]:
        return {
            **os.environ,
            **({} if self.token is None else {"HANDRAIL_TOKEN": self.token}),
            "HANDRAIL_JOURNAL": f"{self.url}&lease=1",
            "HANDRAIL_KEY": postgres.KEY,
            "GATES": str(self.gates),
        }


@contextmanager
def watched_fleet(folder: Path) -> Generator[WatchedFleet]:
    """Yield a fleet on an empty journal. Its processes end with the block."""
    url = postgres.borrow_url()
    with reserved_port() as port:
        fleet = WatchedFleet(url, folder, port)
        try:
            yield fleet
        finally:
            fleet.close()
            postgres.give_back(url)
