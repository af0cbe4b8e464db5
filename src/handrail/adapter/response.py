"""`PromptResponse`: what an evaluation came to."""

from __future__ import annotations

from decimal import Decimal
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import msgspec

from handrail.messages import Usage
from handrail.session import Session

if TYPE_CHECKING:
    from handrail.dispatch.frame import Frame

OutputT = TypeVar("OutputT")


class PromptResponse(msgspec.Struct, Generic[OutputT], frozen=True):
    """The end of a run."""

    text: str
    output: OutputT
    """The typed answer of a prompt with `output=...`, else None."""
    usage: Usage
    """Tokens of this run and of everything nested in it."""
    cost: Decimal | None
    """US dollars, likewise; None where part of it is unknown."""
    run_id: str
    stop_reason: str
    """`done`; `length` where the answer was cut off; `refused`; `incomplete` where a completion checker
    still misses something and may hold the run no longer."""
    session: Session


class Outcome(msgspec.Struct, frozen=True):
    """How a run ended by itself."""

    text: str
    output: Any
    stop_reason: str


def respond(outcome: Outcome, frame: Frame) -> PromptResponse[Any]:
    """The response of a run, root or nested, that ended in this way."""
    spending = frame.spending
    return PromptResponse(
        outcome.text,
        outcome.output,
        spending.usage,
        spending.cost,
        frame.run_context.run_id,
        outcome.stop_reason,
        frame.session,
    )
