"""Leases by the database's clock. Each process has one lease, in one row, for all the runs that it owns."""

from __future__ import annotations

from collections.abc import Callable

from handrail.clock import Clock
from handrail.journal.chains import Chains
from handrail.journal.connection import Connection
from handrail.journal.run_rows import StoredRun

_TIME = "coalesce(CAST(? AS double precision), extract(epoch FROM clock_timestamp()))"
_RENEW = f"""INSERT INTO leases VALUES (?, {_TIME} + ?)
    ON CONFLICT (owner) DO UPDATE SET leased_until = excluded.leased_until"""
_LONG_GONE = 3600.0


class DatabaseLeases:
    """The leases of the processes that share a database. Only the database's clock decides when a lease ends.

    With `is_simulated`, the given clock stands in for the database's.
    """

    free = """(owner = '' OR NOT EXISTS (
        SELECT 1 FROM leases WHERE leases.owner = runs.owner AND leases.leased_until > :now
    ))"""

    def __init__(self, owner: str, seconds: float, clock: Clock, *, is_simulated: bool) -> None:
        self.seconds = seconds
        self._owner = owner
        self._clock = clock
        self._is_simulated = is_simulated
        self.renewed: float | None = None
        """When this process last renewed its lease, by its own monotonic clock; None if it never took one."""

    def _now(self) -> float | None:
        """Return the simulated time of the database, or None to use the database's own clock."""
        return self._clock.now().timestamp() if self._is_simulated else None

    def until(self, connection: Connection, now: float) -> float:
        # Read before the statement, so that this process counts the lease as ended before the database does.
        began = self._clock.monotonic()
        connection.execute(_RENEW, (self._owner, self._now(), self.seconds))
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
        query = f"SELECT leased_until > {_TIME} FROM leases WHERE owner = ? /* FOR SHARE */"
        row = connection.execute(query, (self._now(), owner)).fetchone()
        return row is not None and bool(row[0])

    def is_announced(self, owner: str, until: float, now: float) -> bool:
        return until > now

    def held(self, connection: Connection, now: float) -> Callable[[str, float], bool]:
        query = f"SELECT owner FROM leases WHERE leased_until > {_TIME}"
        live = {str(owner) for (owner,) in connection.execute(query, (self._now(),)).fetchall()}
        return lambda owner, until: owner in live

    def end(self, connection: Connection) -> None:
        """Delete this process's lease, and leases that expired long ago, unless their processes still own runs."""
        unused = "NOT EXISTS (SELECT 1 FROM runs WHERE runs.owner = leases.owner)"
        connection.execute(f"DELETE FROM leases WHERE owner = ? AND {unused}", (self._owner,))
        connection.execute(
            f"DELETE FROM leases WHERE leased_until < {_TIME} - ? AND {unused}",
            (self._now(), _LONG_GONE),
        )
