"""`Dispatcher`: the interface between the journal, which records the runs, and a queue that starts their legs."""

from __future__ import annotations

import hashlib
import hmac
import logging
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Protocol

from handrail.journal.protocol import Journal
from handrail.journal.records import RunRow
from handrail.serve import missing_extra

log = logging.getLogger("handrail.fleet")

Execute = Callable[[str], Coroutine[Any, Any, None]]
"""A function that executes the next leg of the run with this id, if the run is due and no other worker has it."""


class Dispatcher(Protocol):
    """Starts legs of runs on workers.

    The journal is authoritative: a run is recorded there first, and only the journal decides which worker executes it.
    So a dispatcher may start a leg twice or late. It may even lose one, because workers also look for due runs. A leg of a
    run that was cancelled does nothing.
    """

    async def submit(self, run: RunRow, /, at: float | None = None) -> None:
        """Start the first leg of a queued run at the time `at`, in seconds since 1970, or now if `at` is None."""
        ...

    async def wake(self, run: RunRow, /) -> None:
        """Start the next leg of a run that is due, for example because a question was answered or its worker is gone."""
        ...


class Engine(Dispatcher, Protocol):
    """A dispatcher that a worker process takes its legs from."""

    async def work(self, execute: Execute, queues: Sequence[str], limit: int, /) -> None:
        """Execute legs of runs in these queues, at most `limit` at once, until cancelled.

        When this is cancelled, no further leg starts. The worker finishes those that have started.
        """
        ...


def leg_id(run: RunRow, number: int) -> str:
    """Return the id of a leg. Every process computes the same id, so that a leg is not submitted twice."""
    return f"{run.record.id}/leg-{number}"


def next_leg(run: RunRow) -> str:
    """Return the id of a run's next leg."""
    return leg_id(run, run.legs + 1)


def sealed_leg(run: RunRow, journal: Journal) -> str:
    """Return the text that an engine stores to start a run's next leg: the leg's id after a MAC with the journal's key.

    An engine's tables may be open to others, who could otherwise name any run in them.
    """
    leg = next_leg(run)
    return f"{_mac(journal, leg)} {leg}"


def run_of_leg(stored: object, journal: Journal) -> str | None:
    """Return the id of the run that a text from `sealed_leg` names. Returns None, and logs a warning, for anything else."""
    mac, _, leg = stored.partition(" ") if isinstance(stored, str) else ("", "", "")
    if hmac.compare_digest(mac.encode(), _mac(journal, leg).encode()):
        return leg.rpartition("/")[0]
    log.warning(
        "refused to start a leg, because its job was not written with the key of journal %s", journal.id
    )
    return None


def _mac(journal: Journal, leg: str) -> str:
    text = f"{journal.id} {leg}".encode(errors="surrogatepass")
    return hashlib.blake2b(text, key=journal.key, digest_size=32, person=b"handrail leg").hexdigest()


def queue_name(queue: str) -> str:
    """Return a queue's name in a form that is short enough for every engine."""
    return f"handrail-{hashlib.sha256(queue.encode()).hexdigest()[:16]}"


class JournalDispatcher:
    """The dispatcher for workers without an engine: they claim runs from the journal, and its changes wake them."""

    async def submit(self, run: RunRow, /, at: float | None = None) -> None:
        """Do nothing, because the journal has the run."""

    async def wake(self, run: RunRow, /) -> None:
        """Do nothing, because the journal knows that the run is due."""


def missing_engine(name: str, error: ModuleNotFoundError) -> Exception:
    """Return the error to raise if an engine can't be imported.

    It names the extra to install, or is the original error if an unrelated package is missing.
    """
    if (error.name or "").partition(".")[0] not in (name, "psycopg"):
        return error
    return missing_extra(error.name or name, name, f"the dispatcher {name!r}")
