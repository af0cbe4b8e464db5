"""Messages that were sent to a run while it works, in the form in which clients see them."""

from __future__ import annotations

from typing import Any

from handrail.journal.records import QueuedMessage
from handrail.run.record.notices import text_of
from handrail.serve.agui.wire_events import Event, custom, format_time

QUEUED = "handrail.queued"
"""The name of the event that says what happened to a message."""


def queued_json(run_id: str, message: QueuedMessage) -> dict[str, Any]:
    """Return a message to a run as plain JSON data. `child` is the background run whose end it is; "" for what somebody said."""
    return {
        "id": message.id,
        "run_id": run_id,
        "text": text_of(message),
        "order": message.order,
        "child": message.child,
        "when": message.when,
        "by": message.by,
        "at": format_time(message.at),
        "state": message.state,
        "edited": message.edited,
    }


def queued_event(run_id: str, message: QueuedMessage) -> Event:
    """Return the event that a message was accepted, edited, withdrawn or told, as its `state` says."""
    return custom(QUEUED, queued_json(run_id, message))
