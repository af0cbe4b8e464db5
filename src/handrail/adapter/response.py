"""`PromptResponse`: what an evaluation came to."""

from __future__ import annotations

from decimal import Decimal
from typing import Generic, TypeVar

import msgspec

from handrail.messages import Usage
from handrail.session import Session

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
