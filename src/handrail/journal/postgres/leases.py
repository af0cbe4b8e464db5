"""Leases by the database's clock. Each process has one lease, in one row, for all the runs that it owns.

A lease has a MAC, and is never deleted while its process owns runs. A lease that was altered or removed counts as held, so
whoever can write only to this table can't have a live process's runs taken over, unless they restore an earlier row of its lease.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

from handrail.clock import Clock
from handrail.errors import JournalAltered
from handrail.journal.chains import Chains, fetch
from handrail.journal.connection import Connection
from handrail.journal.run_rows import StoredRun

_TIME = "coalesce(CAST(? AS double precision), extract(epoch FROM clock_timestamp()))"
_RENEW = f"""INSERT INTO leases VALUES (?, {_TIME} + ?, '')
    ON CONFLICT (owner) DO UPDATE SET leased_until = excluded.leased_until RETURNING leased_until"""
_SEAL = "UPDATE leases SET mac = ? WHERE owner = ?"
_LOST = "SELECT DISTINCT owner FROM runs WHERE owner != '' AND owner NOT IN (SELECT owner FROM leases)"
_LONG_GONE = 3600.0

log = logging.getLogger("handrail.journal")


class DatabaseLeases:
    """The leases of the processes that share a database. Only the database's clock decides when a lease ends.

    With `is_simulated`, the given clock stands in for the database's. `find_chains` returns the chains of the open journal.
    """

    free = """(owner = '' OR NOT EXISTS (
        SELECT 1 FROM leases WHERE leases.owner = runs.owner AND leases.leased_until > :now
    ))"""

    def __init__(
        self,
        owner: str,
        seconds: float,
        clock: Clock,
        find_chains: Callable[[], Chains],
        *,
        is_simulated: bool,
    ) -> None:
        self.seconds = seconds
        self._owner = owner
        self._clock = clock
        self._find_chains = find_chains
        self._is_simulated = is_simulated
        self.renewed: float | None = None
        """When this process last renewed its lease, by its own monotonic clock; None if it never took one."""

    def _now(self) -> float | None:
        """Return the simulated time of the database, or None to use the database's own clock."""
        return self._clock.now().timestamp() if self._is_simulated else None

    def until(self, connection: Connection, now: float) -> float:
        # Read before the statement, so that this process counts the lease as ended before the database does.
        began = self._clock.monotonic()
        # The database's clock decides, so the MAC follows in a second statement.
        row = connection.execute(_RENEW, (self._owner, self._now(), self.seconds)).fetchone()
        mac = self._find_chains().row_mac("leases", (self._owner, row[0]))
        connection.execute(_SEAL, (mac, self._owner))
        self.renewed = began
        return 0.0  # a run's row does not repeat the process's lease

    def renew(self, connection: Connection, chains: Chains, row: StoredRun, now: float) -> None:
        if self._is_simulated or self.renewed is None or self._left() < 0.8 * self.seconds:
            self.until(connection, now)

    def _left(self) -> float:
        return 0.0 if self.renewed is None else self.renewed + self.seconds - self._clock.monotonic()

    def is_lapsed(self) -> bool:
        return self.renewed is not None and self._left() <= 0

    def left(self) -> float:
        """Return how many more seconds this process certainly holds its lease; the full length if it never had one."""
        return self.seconds if self.renewed is None else self._left()

    def is_free(
        self, connection: Connection, owner: str, leased_until: float, now: float, me: str = ""
    ) -> bool:
        if not owner or owner == me:
            return True
        if leased_until:  # a claim on a ticket, which is not held by a process's lease
            return now >= leased_until
        return not self.is_at_work(connection, owner)

    def is_at_work(self, connection: Connection, owner: str) -> bool:
        # Lock the row, so that its process can't renew the lease while its run is taken over.
        query = (
            f"SELECT leased_until > {_TIME}, leased_until, mac FROM leases WHERE owner = ? /* FOR SHARE */"
        )
        row = connection.execute(query, (self._now(), owner)).fetchone()
        if row is None:
            owned = connection.execute("SELECT 1 FROM runs WHERE owner = ? LIMIT 1", (owner,)).fetchone()
            return owned is not None and self._is_refused(owner)
        return bool(row[0]) or (not self._is_own(owner, *row[1:]) and self._is_refused(owner))

    def _is_own(self, owner: str, until: float, mac: bytes) -> bool:
        return self._find_chains().is_row("leases", (owner, until), mac)

    def _is_refused(self, owner: str) -> bool:
        log.warning("the lease of %s was altered or removed, so its runs are not taken over", owner)
        return True

    def is_announced(self, owner: str, until: float, now: float) -> bool:
        return until > now

    def held(self, connection: Connection, now: float) -> Callable[[str, float], bool]:
        query = f"SELECT owner, leased_until, mac FROM leases WHERE leased_until <= {_TIME}"
        rows = connection.execute(query, (self._now(),)).fetchall()
        ended = {"", *(owner for owner, *lease in rows if self._is_own(owner, *lease))}
        return lambda owner, until: owner not in ended

    def alterations(self, connection: Connection, chains: Chains) -> Iterator[JournalAltered]:
        for owner, until, mac in fetch(connection, "SELECT owner, leased_until, mac FROM leases"):
            if not self._is_own(owner, until, mac):
                yield chains.altered(f"lease {owner}", 1, "its row was changed")
        for (owner,) in fetch(connection, _LOST):
            yield chains.altered(f"lease {owner}", 1, "it was removed")

    def end(self, connection: Connection) -> None:
        """Delete this process's lease, and leases that expired long ago, unless their processes still own runs."""
        unused = "NOT EXISTS (SELECT 1 FROM runs WHERE runs.owner = leases.owner)"
        connection.execute(f"DELETE FROM leases WHERE owner = ? AND {unused}", (self._owner,))
        connection.execute(
            f"DELETE FROM leases WHERE leased_until < {_TIME} - ? AND {unused}",
            (self._now(), _LONG_GONE),
        )
