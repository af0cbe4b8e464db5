"""Recorded attachments: a run's record refers to them, and their bytes are blobs of the journal."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from handrail.content import Attachment
from handrail.errors import BlobNotFoundError, RunError
from handrail.journal.protocol import Journal
from handrail.messages import Message, ToolMessage


async def store(journal: Journal, run_id: str, attachments: Iterable[Attachment]) -> None:
    """Store the bytes of attachments as blobs that this run refers to. Attachments without loaded bytes are skipped."""
    for content in contents(attachments):
        await journal.blobs.put(content, run_id=run_id)


def contents(attachments: Iterable[Attachment]) -> list[bytes]:
    """Return the bytes of the attachments that are in memory."""
    return [each.content for each in attachments if each.is_here]


async def load(
    journal: Journal, run_id: str, attachments: Iterable[Attachment], *, some: bool = False
) -> None:
    """Load the bytes of attachments that are only references. Equal bytes are kept in memory once.

    Attachments with an address are skipped. Raises `RunError` if the bytes of any other one are not in the journal, for example
    because the process ended before it had stored them. With `some`, such an attachment stays a reference instead. Raises
    `JournalAltered` if the bytes were altered.
    """
    found: dict[str, bytes] = {}
    for each in attachments:
        if each.is_here:
            found[each.digest] = each.content
        elif not each.address:
            content = found.get(each.digest)
            try:
                content = await journal.blobs.get(each.digest) if content is None else content
            except BlobNotFoundError:
                if some:
                    continue
                raise RunError(
                    run_id,
                    f"its attachment {each.name!r} is not in the journal. The process may have ended before it was stored",
                    "Start a new run with the attachments.",
                ) from None
            each.load(content)
            found[each.digest] = content


def attached_to(messages: Iterable[Message]) -> Iterator[Attachment]:
    """Yield the attachments of messages, in order."""
    for message in messages:
        if isinstance(message, ToolMessage):
            for result in message.results:
                yield from result.attachments
        else:
            yield from message.attachments
