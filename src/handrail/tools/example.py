"""Small words a tool's definition is made of: examples, and who it may meet."""

from __future__ import annotations

import dataclasses
from typing import Generic, Literal, TypeVar

ParamsT = TypeVar("ParamsT")
ResultT = TypeVar("ResultT")

RunMode = Literal["user", "agent", "headless"]
"""Who is on the other side: a person, a model in a person's place, or nobody."""

Need = Literal["user", "model", "worker"]
"""What a handler can require of its environment by the type of its context."""


@dataclasses.dataclass(frozen=True)  # no slots: a subscripted call, ToolExample[...](...), sets an attribute
class ToolExample(Generic[ParamsT, ResultT]):
    """One call and what came of it, shown to the model. Checked against the tool's types."""

    description: str
    input: ParamsT
    output: ResultT
