"""`Parked`: what a handoff keeps for itself, and what it shows, while somebody else has the turn."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Generic, TypeVar

PrivateT = TypeVar("PrivateT")
PublicT = TypeVar("PublicT")
ResultT = TypeVar("ResultT")


@dataclass(frozen=True)
class Parked(Generic[PrivateT, PublicT]):
    """What `before` returns to hand over.

    `private` goes to `after` and nowhere else; `public` is all that the other side sees. Both are
    plain data (dataclasses, pydantic models, JSON values), since a handoff may wait for days.
    """

    private: PrivateT = field(repr=False)
    public: PublicT


@dataclass(frozen=True)
class Begun(Generic[PrivateT, PublicT, ResultT]):
    """What came of `before`, as it is written down: something is parked, or all is done."""

    parked: Parked[PrivateT, PublicT] | None = field(default=None, repr=False)
    value: ResultT | None = None
