"""What a journal is given of a call that commits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from handrail.protocols import CommitUnit
from handrail.schema import to_json
from handrail.tools import ToolResult

if TYPE_CHECKING:
    from handrail.dispatch.call import LiveCall


def commit_unit(call: LiveCall, result: ToolResult[Any]) -> CommitUnit:
    """Everything a call changes, as plain data."""
    transaction = call.open_transaction
    return CommitUnit(
        run_id=call.run_context.run_id,
        call_id=call.id,
        events=[to_json(event) for event in transaction.events],
        result=to_json({"message": result.message, "value": result.value, "success": result.success}),
        effects=[done.what for done in transaction.settled or ()],
    )
