"""Events of every kind, and a plain computation of the session contents that they lead to, for the tests of forks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from handrail.session import Items, Session, SessionFork, SliceRules


@dataclass(frozen=True)
class Note:
    """A piece of state. All pieces are kept, in order."""

    number: int


@dataclass(frozen=True)
class Put:
    """A piece of state. Only the newest piece for each key is kept."""

    key: int
    number: int


@dataclass(frozen=True)
class Fold:
    """An event whose reducer's result depends on the order of events."""

    number: int


@dataclass(frozen=True)
class Folded:
    """State computed by folding `Fold` events."""

    number: int


@dataclass(frozen=True)
class Heard:
    """A log entry that a reducer also turns into state."""

    number: int


def fold(slice_: Any, event: Fold) -> Any:
    return slice_.replace([Folded((slice_.latest() or Folded(7)).number * 31 % 1009 + event.number)])


RULES = {
    Put: SliceRules(key=lambda put: put.key),
    Folded: SliceRules(reducers={Fold: fold}),
    Heard: SliceRules("log"),
    Items: SliceRules(reducers={Heard: lambda slice_, event: slice_.append(event.number)}),
}
SLICES = (Note, Put, Folded, Items)
"""The classes whose slices the tests compare. The slice of `Items` contains integers."""


def new_session() -> Session:
    return Session(slices=RULES)


def contents(place: Session | SessionFork) -> dict[str, Any]:
    """Return what a session or a fork contains for each class in `SLICES`. This does not count as a read."""
    root = place if isinstance(place, Session) else place.root
    return {kind.__name__: root.slice_in(place.state, kind).all() for kind in SLICES}


def replayed(events: list[Any]) -> dict[str, Any]:
    """Return the contents that these events must lead to, computed without a session."""
    folded: int | None = None
    puts: dict[int, Put] = {}
    for event in events:
        if isinstance(event, Fold):
            folded = (7 if folded is None else folded) * 31 % 1009 + event.number
        elif isinstance(event, Put):
            puts[event.key] = event
    return {
        "Note": tuple(event for event in events if isinstance(event, Note)),
        "Put": tuple(puts.values()),
        "Folded": () if folded is None else (Folded(folded),),
        "Items": tuple(event.number for event in events if isinstance(event, Heard)),
    }
