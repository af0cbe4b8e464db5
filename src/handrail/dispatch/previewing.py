"""Approve what you see: a staged call runs first, in its fork, and is approved by what it did there."""

from __future__ import annotations

from typing import TYPE_CHECKING

from handrail.dispatch.transaction import Transaction
from handrail.errors import ToolValidationError
from handrail.schema import to_json
from handrail.session import SessionFork
from handrail.tools import EFFECTS

if TYPE_CHECKING:
    from handrail.dispatch.attempt import Attempt


def runs_first(attempt: Attempt) -> bool:
    """May this call run before it is approved? All of it must be undoable, and somebody there to look.

    Where nobody can be shown anything (nobody there, *strict*) nothing runs that has to be asked for,
    and nothing that asks somebody itself runs before it may.
    """
    undoable = EFFECTS[attempt.tool.effect].previewed and not attempt.tool.reenters
    return undoable and bool(getattr(attempt.frame.broker, "shows_previews", False))


def diff_of(transaction: Transaction) -> str:
    """What a call did, as a person reads it: its files, then its state. From here on it stays as it is."""
    transaction.seal()
    said: list[str] = []
    for fork in transaction.touched:
        diff = getattr(fork, "diff", None)
        if diff is not None:
            said.append(diff())
        elif not isinstance(fork, SessionFork):
            said.append(f"{type(fork).__name__}: it was used, and what was changed in it can't be shown\n")
    said += [f"state: {type(event).__name__} {_written(event)}\n" for event in transaction.events]
    return "".join(said) or "It changed nothing.\n"


def _written(event: object) -> str:
    try:
        return to_json(event).decode()
    except ToolValidationError:
        return "(what is in it can't be shown)"
