"""Work that a call has started elsewhere, such as a task on an MCP server.

The id of the work is recorded with the call. If the process ends, the resumed call continues with the same work, even if the
call is irreversible, instead of starting it again.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from handrail.context import ToolContext
from handrail.run import questions
from handrail.run.attempt import attempt_of


def find_started(context: ToolContext) -> str | None:
    """Return the id of the work that this attempt at the call has started, perhaps in an earlier process; None if there is none."""
    attempt = attempt_of(context)
    return None if attempt is None else attempt.run.log.find_remote(attempt.place)


async def note_started(context: ToolContext, id: str) -> None:
    """Record the id of the work that this call has started, and wait until it is durable.

    Nothing is recorded without a journal, after the run's log is closed, or if the context was made for a test.
    """
    attempt = attempt_of(context)
    if attempt is not None:
        await attempt.run.log.note_remote(attempt.place, id)


def is_left(context: ToolContext) -> bool:
    """Return whether this process no longer records the call's run, for example because the run is parked or was taken over.

    If so, the work must go on, because the resumed call continues with it.
    """
    attempt = attempt_of(context)
    return attempt is not None and attempt.run.log.closed


def paused_timeouts(context: ToolContext) -> AbstractContextManager[None]:
    """Pause the timeouts and watchdogs of the call and its outer calls until the block ends. The deadlines of runs do not pause."""
    attempt = attempt_of(context)
    return nullcontext() if attempt is None else questions.paused_timeouts(attempt)
