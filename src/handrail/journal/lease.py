"""Run leases: a run is owned by one process at a time, as long as that process lives and renews the lease."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from handrail.errors import RunBusy, RunUnknown

if TYPE_CHECKING:
    import sqlite3

LEASE_SECONDS = 30.0
"""How long a lease lasts without being renewed, in seconds."""


def new_owner() -> str:
    """Return a new owner name for this process: its host, pid and start time, and a random part."""
    return f"{_host()}/{os.getpid()}/{_started_here()}/{secrets.token_hex(4)}"


def is_free(owner: str, leased_until: float, now: float, me: str) -> bool:
    """Return whether `me` may take a lease that `owner` holds until `leased_until`."""
    return not owner or owner == me or now >= leased_until or is_dead(owner)


def is_dead(owner: str) -> bool:
    """Return whether the owner's process has ended. Processes on other hosts can't be checked and count as alive."""
    host, _, rest = owner.partition("/")
    pid, _, rest = rest.partition("/")
    started = rest.partition("/")[0]
    if host != _host() or not pid.isdecimal():
        return False
    return _started(int(pid)) != started


@lru_cache(maxsize=1)
def _host() -> str:
    """Return a host name within which pids are unique. The names of containers on one host differ in the last part."""
    boot = numbers = ""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()[:8]
        numbers = os.readlink("/proc/self/ns/pid").strip("pid:[]")
    return f"{socket.gethostname()}.{boot}.{numbers}".replace("/", "_")


@lru_cache(maxsize=1)
def _started_here() -> str:
    """Return when this process started. The value is cached, because it does not change."""
    return _started(os.getpid())


os.register_at_fork(after_in_child=_started_here.cache_clear)


def _started(pid: int) -> str:
    """Return when a process started, in clock ticks since boot; "" if it has ended."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    fields = stat.rpartition(")")[2].split()
    return "" if fields[0] in ("Z", "X") else fields[19]


def is_owner(connection: sqlite3.Connection, owner: str, run_id: str) -> bool:
    """Return whether `owner` holds the run's lease."""
    row = connection.execute("SELECT owner FROM runs WHERE id = ?", (run_id,)).fetchone()
    return row is not None and row[0] == owner


def check_owner(connection: sqlite3.Connection, owner: str, run_id: str) -> None:
    """Raise `RunBusy` unless `owner` owns the run, and `RunUnknown` if the run is not recorded."""
    row = connection.execute("SELECT owner FROM runs WHERE id = ?", (run_id,)).fetchone()
    if row is None:
        raise RunUnknown(run_id)
    if row[0] != owner:
        raise RunBusy(run_id, row[0])


def check_not_taken(connection: sqlite3.Connection, owner: str, run_id: str) -> None:
    """Raise `RunBusy` unless `owner` owns the run. A run that is not recorded passes."""
    row = connection.execute("SELECT owner FROM runs WHERE id = ?", (run_id,)).fetchone()
    if row is not None and row[0] != owner:
        raise RunBusy(run_id, row[0])
