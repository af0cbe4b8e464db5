"""Upload of the files that a call changed in a workspace, before the call is recorded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from handrail.journals import Journal
from handrail.records import WorkspaceDelta
from handrail.threads import run_in_thread

if TYPE_CHECKING:
    from handrail.dispatch.transaction import RecordedFork

_STORED = 8 * 1024 * 1024
"""Maximum bytes that are stored at a time, unless a single file is larger."""


async def upload(journal: Journal, fork: RecordedFork, run_id: str) -> WorkspaceDelta:
    """Store the bytes of a staged fork's files that the journal does not have yet. Returns the fork's delta."""
    delta = fork.delta()
    assert delta is not None, "only forks with changes are uploaded"
    sizes = {
        change.new.digest: change.new.size for change in delta.changes if change.new and change.new.digest
    }
    stored = set(await journal.workspaces.has(sizes, run_id=run_id)) if sizes else set[str]()
    for some in _batches({digest: size for digest, size in sizes.items() if digest not in stored}):
        blobs = await run_in_thread(lambda some=some: [fork.content(digest) for digest in some])
        await journal.workspaces.put(blobs, run_id=run_id)
    return delta


def _batches(sizes: dict[str, int]) -> Iterator[Sequence[str]]:
    """Yield the digests in batches, each of at most `_STORED` bytes or a single larger file."""
    batch: list[str] = []
    total = 0
    for digest, size in sizes.items():
        if batch and total + size > _STORED:
            yield batch
            batch, total = [], 0
        batch.append(digest)
        total += size
    if batch:
        yield batch
