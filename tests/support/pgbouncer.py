"""A pgbouncer, from Debian's package, in front of the PostgreSQL server of the tests."""

from __future__ import annotations

import contextlib
import os
import subprocess
import tempfile
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import psycopg

from support import PATIENCE, postgres

PROGRAM = Path("/usr/sbin/pgbouncer")
_SETTINGS = """[databases]
postgres = host={server} dbname=postgres user=tests
[pgbouncer]
listen_addr =
listen_port = 6432
unix_socket_dir = {folder}
auth_type = any
pool_mode = {mode}
"""


@contextlib.contextmanager
def pooled_url(mode: str) -> Generator[str]:
    """Yield the URL of a new journal that is reached through a pool in this mode.

    Raises `RuntimeError` if pgbouncer is not installed.
    """
    if not PROGRAM.is_file():
        raise RuntimeError(
            "pgbouncer is not installed. Run `scripts/components`, or as root `apt install pgbouncer`."
        )
    as_user: dict[str, Any] = postgres._unprivileged()
    with tempfile.TemporaryDirectory(prefix="handrail-pool-") as folder:
        settings = Path(folder) / "pgbouncer.ini"
        settings.write_text(_SETTINGS.format(server=postgres.server_folder(), folder=folder, mode=mode))
        os.chmod(folder, 0o755)
        if as_user:
            os.chown(folder, as_user["user"], as_user["group"])
        process = subprocess.Popen([PROGRAM, "-q", settings], stderr=subprocess.DEVNULL, **as_user)
        try:
            url = postgres.new_url().replace(str(postgres.server_folder()), f"{folder}&port=6432")
            _wait(process, f"host={folder} port=6432 dbname=postgres user=tests")
            yield url
        finally:
            process.terminate()
            process.wait()


def _wait(process: subprocess.Popen[Any], conninfo: str) -> None:
    until = time.monotonic() + PATIENCE
    while True:
        try:
            psycopg.connect(conninfo).close()
            return
        except psycopg.OperationalError:
            if process.poll() is not None or time.monotonic() > until:
                raise
            time.sleep(0.02)
