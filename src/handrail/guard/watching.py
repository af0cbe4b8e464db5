"""What those who watch over a run may see of it: feedback providers and completion checkers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from handrail.deadline import Deadline
from handrail.protocols import Filesystem, SessionView


class RunState(msgspec.Struct, frozen=True):
    """A run at one moment."""

    session: SessionView
    calls: int
    """How many tool calls have been made."""
    seconds: float
    """How long it has been running."""
    given: int
    """How often this one has spoken in this run already."""
    deadline: Deadline | None = None
    left: Mapping[str, float] = {}
    """What is left of each limited unit of the budget."""
    spent: Mapping[str, float] = {}
    filesystem: Filesystem | None = None
    text: str = ""
    """The answer, where there is one."""
    output: Any = None
