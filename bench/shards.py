"""Simulate sessions that are split over several databases by a digest of their ids, and find out which limit is reached first.

    python bench/shards.py [SESSIONS [STATEMENTS [CONNECTIONS]]]

One database takes STATEMENTS fenced statements per second, and allows CONNECTIONS connections. Estimate STATEMENTS
from the steps that `bench/fleet.py URL steps` measures. All steps of a session go to the same database, so the busiest sessions decide how
even the load is. The activity of sessions follows Zipf's law: the n-th session makes 1/n of the steps of the first.
"""

from __future__ import annotations

import hashlib
import sys

STEP_STATEMENTS = 1.0
"""Statements per step: one fenced statement."""
RUN_STATEMENTS = 12.0
"""Statements per run besides those of its steps: an estimate for submitting, claiming, beginning and ending it."""
STEPS = 20
"""Steps per run."""
WORKER_STEPS = 100.0
"""Steps per second that one worker makes."""
WORKER_CONNECTIONS = 2


def shard_of(session_id: str, count: int) -> int:
    """Return the number of the database for a session."""
    return int.from_bytes(hashlib.sha256(session_id.encode()).digest()[:8]) % count


def loads(sessions: int, count: int) -> list[float]:
    """Return the share of all steps that each database gets."""
    shares = [0.0] * count
    for number in range(1, sessions + 1):
        shares[shard_of(f"session-{number}", count)] += 1 / number
    total = sum(shares)
    return [each / total for each in shares]


def main(sessions: int, statements: float, connections: int) -> None:
    a_step = STEP_STATEMENTS + RUN_STATEMENTS / STEPS
    print(
        f"{sessions:,} sessions; a database takes {statements:,.0f} statements a second and {connections} connections"
    )
    print(
        f"{'databases':>10}{'busiest':>10}{'steps/s':>10}{'workers':>10}{'connections each':>18}  what is full first"
    )
    for count in (1, 2, 4, 8, 16, 32):
        busiest = max(loads(sessions, count))
        steps = statements / a_step / busiest  # the busiest database is full, the others are not
        workers = steps / WORKER_STEPS
        each = workers * busiest * WORKER_CONNECTIONS  # a worker works for one database
        allowed = connections / WORKER_CONNECTIONS * WORKER_STEPS / busiest
        first = "the busiest database" if steps <= allowed else "its connections"
        print(
            f"{count:>10}{busiest * count:>9.2f}x{min(steps, allowed):>10,.0f}{workers:>10,.0f}{each:>18,.0f}  {first}"
        )
    alone = 1 / sum(1 / number for number in range(1, sessions + 1))
    print(f"The busiest session alone makes {alone:.1%} of the steps, and can't be split.")


if __name__ == "__main__":
    given = [float(each) for each in sys.argv[1:]]
    defaults = [100_000.0, 2_000.0, 100.0]
    sessions, statements, connections = [*given, *defaults[len(given) :]]
    main(int(sessions), statements, int(connections))
