"""Run leases: a run is owned by one process at a time, as long as that process lives and renews the lease."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
from collections.abc import Callable, Iterable
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from handrail.errors import JournalAltered, RunBusy, RunUnknown
from handrail.journal.records import OVER
from handrail.journal.sql.run_rows import StoredRun, update_run
from handrail.journal.sql.verification import verify_session

if TYPE_CHECKING:
    from handrail.journal.sql.chains import Chains
    from handrail.journal.sql.connection import Connection
    from handrail.journal.sql.database import Database


LEASE_SECONDS = 30.0
"""How long a lease lasts by default without being renewed, in seconds."""


def new_owner() -> str:
    """Return a new owner name for this process: its host, pid and start time, and a random part."""
    return f"{_host()}/{os.getpid()}/{_started_here()}/{secrets.token_hex(4)}"


_given_up: set[str] = set()
"""The owners of this process that could not release a run, for example because the disk was full."""


def give_up(owner: str) -> None:
    """Let other owners in this process take the runs of this one, which could not release one. Other processes wait for the lease's end."""
    _given_up.add(owner)


def is_dead(owner: str) -> bool:
    """Return whether the owner's process has ended. Processes on other hosts can't be checked and count as alive."""
    if owner in _given_up:
        return True
    host, _, rest = owner.partition("/")
    pid, _, rest = rest.partition("/")
    started = rest.partition("/")[0]
    if host != _host() or not pid.isdecimal():
        return False
    return _started(int(pid)) != started


@lru_cache(maxsize=1)
def _host() -> str:
    """Return a host name within which pids are unique. Containers that number their processes separately have their own names."""
    boot = numbers = ""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()[:8]
        numbers = os.readlink("/proc/self/ns/pid").strip("pid:[]")
    return f"{socket.gethostname()}.{boot}.{numbers}".replace("/", "_")


@lru_cache(maxsize=1)
def _started_here() -> str:
    """Return when this process started. The value is cached, except that a forked child computes its own."""
    return _started(os.getpid())


os.register_at_fork(after_in_child=_started_here.cache_clear)


def _started(pid: int) -> str:
    """Return when a process started, in clock ticks since boot; "" if it has ended, or if there is no `/proc`."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    fields = stat.rpartition(")")[2].split()
    return "" if fields[0] in ("Z", "X") else fields[19]


class Leases:
    """The leases with which a journal's processes hold their runs. They also show other processes whether a holder is gone.

    These are by this host's clock, each in the row of its run. A process on this host that has ended holds none.
    """

    free = "1 = 1"  # a query can't tell which processes are alive
    """An SQL condition that is true for every run that may be free now. `:now` is the time."""

    def __init__(self, owner: str, seconds: float = LEASE_SECONDS) -> None:
        self._owner = owner
        self.seconds = seconds
        """How long a lease lasts without being renewed, in seconds."""

    def until(self, connection: Connection, now: float) -> float:
        """Begin or renew this process's lease. Returns the end to record in the run's row; 0 if the row records none."""
        return now + self.seconds

    def renew(self, connection: Connection, chains: Chains, row: StoredRun, now: float) -> None:
        """Renew the lease of a run that this process owns. May do nothing if it was renewed a short time ago."""
        update_run(connection, chains, row, leased_until=now + self.seconds)

    def is_lapsed(self) -> bool:
        """Return whether this process must check that it still owns its runs, because its lease has ended."""
        return False  # each write checks the owner, and all processes are on one host

    def is_free(
        self, connection: Connection, owner: str, leased_until: float, now: float, me: str = ""
    ) -> bool:
        """Return whether `me` may take a run or ticket that `owner` holds until `leased_until`."""
        return not owner or owner == me or now >= leased_until or is_dead(owner)

    def is_at_work(self, connection: Connection, owner: str) -> bool:
        """Return whether an owner's process may still be at work."""
        return bool(owner) and not is_dead(owner)

    def is_announced(self, owner: str, until: float, now: float) -> bool:
        """Return whether a worker counts as alive at `now`, if its announcement lasts until `until`."""
        return until > now and not is_dead(owner)

    def held(self, connection: Connection, now: float) -> Callable[[str, float], bool]:
        """Return a function that checks whether an owner is alive and holds its lease.

        Its arguments are the owner and the end of the lease.
        """
        return lambda owner, until: not self.is_free(connection, owner, until, now)

    def alterations(self, connection: Connection, chains: Chains) -> Iterable[JournalAltered]:
        """Return an error for each lease that was changed or removed, except those in the rows of runs."""
        return ()


_OWNER = "SELECT owner FROM runs WHERE id = ? /* FOR SHARE */"


def is_owner(connection: Connection, owner: str, run_id: str) -> bool:
    """Return whether the run is recorded and `owner` owns it, even if the lease has expired."""
    row = connection.execute(_OWNER, (run_id,)).fetchone()
    return row is not None and row[0] == owner


def check_owner(connection: Connection, owner: str, run_id: str) -> None:
    """Raise `RunBusy` unless `owner` owns the run, and `RunUnknown` if the run is not recorded."""
    row = connection.execute(_OWNER, (run_id,)).fetchone()
    if row is None:
        raise RunUnknown(run_id)
    if row[0] != owner:
        raise RunBusy(run_id, row[0])


def check_not_taken(connection: Connection, owner: str, run_id: str) -> None:
    """Raise `RunBusy` unless `owner` owns the run. A run that is not recorded passes."""
    row = connection.execute(_OWNER, (run_id,)).fetchone()
    if row is not None and row[0] != owner:
        raise RunBusy(run_id, row[0])


def acquire(
    connection: Connection,
    database: Database,
    row: StoredRun,
    now: float,
    *,
    claims: bool = False,
    **changes: Any,
) -> StoredRun:
    """Take the lease of a run that no other process holds, and return its new row.

    Raises `JournalAltered` if its session was altered.

    `changes` are made only if this process did not own the run before. So `take`, which clears a request to stop
    the run, does not clear one that was made after a worker's claim. With `claims`, a new leg begins even if this process owned the run.
    """
    progress = verify_session(connection, database.chains, row.id).progress
    is_mine = row.owner == database.owner
    return update_run(
        connection,
        database.chains,
        row,
        **{
            "status": row.status if row.status in (*OVER, "queued") else "running",
            "owner": database.owner,
            "leased_until": database.leases.until(connection, now),
            "changed_at": now,
            "deaths": row.deaths if is_mine else count_deaths(row, progress),
            "progress": progress,
            "due_at": None,
            "legs": row.legs if is_mine and not claims else row.legs + 1,
            **({} if is_mine else changes),
        },
    )


def earliest(*times: float | None) -> float | None:
    """Return the earliest of these times, or None if all of them are None."""
    return min((each for each in times if each is not None), default=None)


def count_deaths(row: StoredRun, progress: int) -> int:
    """Return how many processes in a row have died while they executed this run. A process that made progress restarts the count at 1."""
    if row.status not in ("running", "queued"):
        return 0
    if not row.owner:  # it was released, which resets the count, or taken from a process that has ended
        return row.deaths
    return row.deaths + 1 if row.progress == progress else 1
