"""Messages to runs: edit or withdraw what a run's model was not told yet."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from handrail.journal.records import QueuedMessage, When
from handrail.run.mailbox import Receipt, change, ring, send

if TYPE_CHECKING:
    from handrail.journal.protocol import Journal

__all__ = ["Receipt", "edit", "messages", "send", "withdraw"]


async def edit(
    journal: Journal,
    run_id: str,
    message_id: str,
    text: str | None = None,
    *,
    when: When | None = None,
    by: str | None = None,
) -> None:
    """Replace the text of a message that the run's model was not told yet, or when it is told, or both.

    Raises `MessageRefused` if it was told or withdrawn, and the errors of `send`.
    """
    await change(journal.messages, run_id, message_id, text=text, when=when, by=by)
    await ring(journal, run_id)


async def withdraw(journal: Journal, run_id: str, message_id: str, *, by: str | None = None) -> None:
    """Take back a message that the run's model was not told yet. Raises `MessageRefused` if it was told or withdrawn."""
    await change(journal.messages, run_id, message_id, by=by, withdrawn=True)
    await ring(journal, run_id)


async def messages(journal: Journal, run_id: str) -> Sequence[QueuedMessage]:
    """Return the messages that were sent to a run, in the order in which they were accepted. Raises `RunUnknown` if there is no such run."""
    return await journal.messages.list(run_id)
