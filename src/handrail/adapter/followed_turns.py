"""How far sessions in memory have followed the record: the last turn in each journal that a session includes."""

from __future__ import annotations

from weakref import WeakKeyDictionary

from handrail.journals import Journal
from handrail.records import SessionTurn
from handrail.session import Session

_followed: WeakKeyDictionary[Session, dict[str, SessionTurn | None]] = WeakKeyDictionary()
"""The turns that sessions include, by the ids of their journals."""


def follow(session: Session, journal: Journal, turn: SessionTurn | None) -> None:
    """Note that a session includes everything that was recorded until this turn, or is the session of this turn's run."""
    with session.lock:
        _followed.setdefault(session, {})[journal.id] = turn


def continue_turn(session: Session, journal: Journal) -> None:
    """Note that the run that has the session's turn works on this object, which then includes what the run adds to the record."""
    turn = followed(session, journal)
    if turn is not None:
        follow(session, journal, SessionTurn(turn.id))


def followed(session: Session, journal: Journal) -> SessionTurn | None:
    """Return the last turn in a journal that a session includes; None if it includes none."""
    return _followed.get(session, {}).get(journal.id)


async def is_outdated(session: Session, journal: Journal) -> bool:
    """Return whether a run can't begin on a session, because its record goes further. Then the session must be loaded again."""
    return followed(session, journal) != await journal.runs.turn(session.id, session.principal)
