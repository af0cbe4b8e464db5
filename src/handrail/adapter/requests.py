"""The request of a submitted run: everything that a worker needs to begin it."""

from __future__ import annotations

from collections.abc import Sequence
from decimal import Decimal

import msgspec

from handrail.content import Attachment
from handrail.errors import RunError
from handrail.journals import Journal
from handrail.records import RunRecord, RunRow, workspace_name


class RunRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The request of a submitted run. It is recorded with the run, and a worker reads it to begin or resume the run."""

    message: str
    attachments: list[Attachment] = []
    """References to the files that the message comes with. Their bytes are blobs of the run."""
    deadline: float | None = None
    """Seconds that the run has once it begins; None for no limit."""
    budget: dict[str, int | Decimal] | None = None
    folder: str = ""
    """The folder of the run's files, or `workspace:NAME`; "" for the files that the worker was started with, if any."""
    startup_files: list[str] = []
    """The patterns of the startup files that the run's calls may change without a separate approval."""
    every: float | None = None
    """Seconds between repetitions of the run; None for a run that is not repeated."""
    due_at: float = 0.0
    """When the run was due, in seconds since 1970. The next repetition is due a multiple of `every` seconds later."""
    key: str = ""
    """The idempotency key with which the request was first submitted, or the id of its first run if it had no key."""

    @property
    def workspace(self) -> str:
        """The name of the workspace that the run works in; "" if it works in none."""
        return workspace_name(self.folder)


def decode_request(record: RunRecord) -> RunRequest:
    """Return the request of a submitted run."""
    return msgspec.msgpack.decode(record.request, type=RunRequest)


async def begun_runs(journal: Journal, session_id: str, principal: str) -> Sequence[RunRow]:
    """Return the runs of a principal's session that have begun, oldest first."""
    rows = await journal.runs.list(session_id=session_id, principal=principal)
    return [row for row in rows if row.record.has_begun]


def check_begun(row: RunRow) -> None:
    """Raise `RunError` for a run that was submitted and has not begun."""
    if not row.record.has_begun:
        raise RunError(
            row.record.id,
            f"it is {row.status} and has not begun",
            f"Start a worker, which begins it: `handrail worker {row.record.app}`."
            if row.status == "queued"
            else "Submit it again.",
        )
