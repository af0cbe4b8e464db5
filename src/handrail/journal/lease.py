"""Run leases: one process owns a run at a time, for as long as it lives and renews the lease."""

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
"""How long a lease lasts without being renewed."""


def new_owner() -> str:
    """A new owner name for this process: its host, pid and start time, and a random part."""
    return f"{_host()}/{os.getpid()}/{_started_here()}/{secrets.token_hex(4)}"


def is_free(owner: str, leased_until: float, now: float, me: str) -> bool:
    """Whether `me` may take a lease that `owner` holds until `leased_until`."""
    return not owner or owner == me or now >= leased_until or is_dead(owner)


def is_dead(owner: str) -> bool:
    """Whether the owner's process has ended. Processes on other hosts can't be seen and count as alive."""
    host, _, rest = owner.partition("/")
    pid, _, rest = rest.partition("/")
    started = rest.partition("/")[0]
    if host != _host() or not pid.isdecimal():
        return False
    return _started(int(pid)) != started


@lru_cache(maxsize=1)
def _host() -> str:
    """The host within which pids are unique: containers may share all but the last part."""
    boot = numbers = ""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()[:8]
        numbers = os.readlink("/proc/self/ns/pid").strip("pid:[]")
    return f"{socket.gethostname()}.{boot}.{numbers}".replace("/", "_")


@lru_cache(maxsize=1)
def _started_here() -> str:
    """When this process started. Cached, because it does not change."""
    return _started(os.getpid())


os.register_at_fork(after_in_child=_started_here.cache_clear)


def _started(pid: int) -> str:
    """When a process started, in clock ticks since boot; "" if there is no such process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    fields = stat.rpartition(")")[2].split()
    return "" if fields[0] in ("Z", "X") else fields[19]


def check_owner(connection: sqlite3.Connection, owner: str, run_id: str) -> None:
    """Only the owner of a run adds to it: `RunBusy` in a process that lost the lease."""
    row = connection.execute("SELECT owner FROM runs WHERE id = ?", (run_id,)).fetchone()
    if row is None:
        raise RunUnknown(run_id)
    if row[0] != owner:
        raise RunBusy(run_id, row[0])


def check_not_taken(connection: sqlite3.Connection, owner: str, run_id: str) -> None:
    """The same, for what need not belong to a recorded run."""
    row = connection.execute("SELECT owner FROM runs WHERE id = ?", (run_id,)).fetchone()
    if row is not None and row[0] != owner:
        raise RunBusy(run_id, row[0])
