"""Recorded attachments: the names of a worker's files in a run's record, and their bytes in the journal's blobs."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import msgspec

from handrail.context import Attachment
from handrail.errors import BlobNotFoundError, RunError
from handrail.journals import Journal


class RecordedAttachment(msgspec.Struct, frozen=True):
    """An attachment in a run's record. Its bytes are the blob with this digest."""

    name: str
    digest: str


def record_of(attachments: Iterable[Attachment]) -> list[RecordedAttachment]:
    """Return the records of attachments. `store` stores their bytes."""
    return [RecordedAttachment(each.name, hashlib.sha256(each.content).hexdigest()) for each in attachments]


async def store(journal: Journal, run_id: str, attachments: Iterable[Attachment]) -> None:
    """Store the bytes of attachments as blobs that this run refers to."""
    for each in attachments:
        await journal.blobs.put(each.content, run_id=run_id)


async def restore(
    journal: Journal, run_id: str, recorded: Iterable[RecordedAttachment]
) -> tuple[Attachment, ...]:
    """Return recorded attachments with their bytes.

    Raises `RunError` if the process ended before it had stored them, and `JournalAltered` if they were altered since.
    """
    found: list[Attachment] = []
    for each in recorded:
        try:
            found.append(Attachment(each.name, await journal.blobs.get(each.digest)))
        except BlobNotFoundError:
            raise RunError(
                run_id,
                f"its attachment {each.name!r} is not in the journal, because the process ended as the run began",
                "Nothing has run yet: start it again, with its attachments.",
            ) from None
    return tuple(found)
