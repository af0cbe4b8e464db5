"""A PostgreSQL server that can be killed and started again, for tests of its clients."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import psycopg

from support import PATIENCE, postgres
from support.reserved_port import reserved_port

_SETTINGS = {**postgres._SETTINGS, "synchronous_commit": "on"}
"""The settings of the server. A committed transaction survives the server's death, but may be lost if the machine crashes."""


class Server:
    """A PostgreSQL server in a folder. Hosts on this machine reach it through the network."""

    def __init__(self, folder: Path, *, addresses: str = "*") -> None:
        """Create and start the server. It listens on these addresses; with "", only on its socket."""
        self._folder = folder
        self._settings = {**_SETTINGS, "listen_addresses": addresses}
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
        self._reserved = contextlib.ExitStack()
        self.port = self._reserved.enter_context(reserved_port(""))
        self._process = self._start()

    def _start(self) -> subprocess.Popen[Any]:
        settings = [f"-c{name}={value.strip(chr(39))}" for name, value in self._settings.items()]
        command = [postgres.programs() / "postgres", "-D", self._folder / "data", "-k", self._folder]
        command += ["-p", str(self.port)]
        return subprocess.Popen([*command, *settings], **self._options)

    def url(self, host: str = "", **parameters: object) -> str:
        """Return the server's URL. It uses the address `host` if that is given, and otherwise the server's socket."""
        added = "".join(f"&{name}={value}" for name, value in parameters.items())
        return f"postgresql://tests@/postgres?host={host or self._folder}&port={self.port}{added}"

    def wait(self) -> None:
        """Wait until the server accepts connections. If it has ended, start it again.

        A new server ends at once if processes of a killed one are still running.
        """
        until = time.monotonic() + PATIENCE
        while True:
            with contextlib.suppress(psycopg.OperationalError), psycopg.connect(self.url()):
                return
            assert time.monotonic() < until, "PostgreSQL does not start"
            if self._process.poll() is not None:
                self._process = self._start()
            time.sleep(0.05)

    def restart(self) -> None:
        """Kill the server with SIGKILL, and start it again. The processes of its connections end by themselves."""
        self._process.kill()
        self.start_again()

    def shut_down(self) -> None:
        """End the server and its connections, as a restart of its service does first."""
        self._process.send_signal(signal.SIGINT)
        self._process.wait()

    def start_again(self) -> None:
        """Start the server again, and wait until it accepts connections."""
        self._process.wait()
        self._process = self._start()
        self.wait()

    def stop(self) -> None:
        """Stop the server at once, without waiting for its clients."""
        self._process.send_signal(signal.SIGQUIT)
        self._process.wait()
        self._reserved.close()


@contextlib.contextmanager
def started_server() -> Generator[Server]:
    """Yield a server that accepts connections, in a temporary folder that its user can reach."""
    with tempfile.TemporaryDirectory(prefix="handrail-pg-") as folder:
        os.chmod(folder, 0o755)
        server = Server(Path(folder))
        try:
            server.wait()
            yield server
        finally:
            server.stop()
