"""`CallLog`: what a call adds to the session's logs, for the record of its end.

A log keeps what happened, whatever becomes of the call. So in a run with a journal, what a call logs is recorded with the
call's end, failed or not, and is restored with the session. Until then it is only in memory: a call that was cut off and is
entered again logs again. What must survive although the call is not entered again is recorded with the mark of its
beginning, and what earlier attempts logged with the record of the next attempt.

The facts about a call are logged too. A call that continues in a later leg of its run passes the same points again. Its
facts are then logged again, because the log of the earlier leg is gone, but not published again.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import msgspec

from handrail.errors import SessionError
from handrail.events import Fact, ToolInvoked, ToolStarted
from handrail.session.serialization import decode_item, encode_item

if TYPE_CHECKING:
    from handrail.run.call import Attempt
    from handrail.session import Session, SessionFork

log = logging.getLogger("handrail.gate")


class CallLog:
    """What all attempts at one call have logged so far, as a journal records it."""

    __slots__ = ("entries", "told")

    def __init__(self, entries: Iterable[bytes] = ()) -> None:
        self.entries: list[bytes] = list(entries)
        self.told: list[str] = []
        """The keys of the facts about the call that were published, in this leg or an earlier one."""


def logged_by(attempt: Attempt) -> Sequence[bytes]:
    """Return what a call has logged so far, in its recorded form. Without a journal, this is always empty."""
    logged = attempt.passage.logged
    return () if logged is None else tuple(logged.entries)


def dispatch_recorded(attempt: Attempt, session: Session | SessionFork, event: object) -> None:
    """Dispatch an event of a call in a run with a journal, and keep it for the call's record if it goes into a log.

    Raises `SessionError`, and dispatches nothing, if such an event can't be recorded.
    """
    root = attempt.run.session
    if not root.route_of(event).logs:
        session.dispatch(event)
        return
    entry = encode_item(event, root.id)
    session.dispatch(event)
    _log_of(attempt).entries.append(entry)


def log_again(attempt: Attempt, entries: Iterable[bytes]) -> None:
    """Add recorded entries to the session's logs, without publishing them, and to what the call has logged."""
    session = attempt.run.session
    for entry in entries:
        session.relog(decode_item(entry, session.id))
        _log_of(attempt).entries.append(entry)


def tell(attempt: Attempt, fact: Fact, about: str, *, known: bool = False) -> None:
    """Log a fact about a call and, unless an earlier leg of its run has done so, publish it.

    `about` distinguishes the fact from others of its type in the run: it is the id of a question, or the place of an attempt.
    `known` says that the record shows that the fact was published, even if the run was not parked since.
    """
    run = attempt.run
    if run.journal is None:
        run.session.record(fact)
        return
    key = _key(type(fact), about)
    if run.log.resumed and (known or key in run.log.told):
        run.session.keep(fact)
    else:
        run.session.record(fact)
    _note(attempt, fact)
    _log_of(attempt).told.append(key)


def tell_between(attempt: Attempt, fact: Fact) -> None:
    """Tell a fact about a call between two of its parts. If the record shows that the next one had started, it was published."""
    place = attempt.place
    tell(attempt, fact, str(place), known=attempt.run.log.had_started(place.child(attempt.inner + 1)))


def record_unrepeated(attempt: Attempt, fact: Fact) -> None:
    """Log and publish a fact about a call at a point that the call does not pass again in a later leg."""
    attempt.run.record(fact)
    if attempt.run.journal is not None:
        _note(attempt, fact)


def keep_fact(attempt: Attempt, fact: Fact) -> None:
    """Log a fact about a call without publishing it."""
    attempt.run.session.keep(fact)
    _note(attempt, fact)


def had_started(attempt: Attempt) -> bool:
    """Return whether the start of the call was published in an earlier leg of its run."""
    run_log, place = attempt.run.log, attempt.call.place
    return _key(ToolStarted, str(place)) in run_log.told or run_log.had_started(place)


def told_about(attempts: Iterable[Attempt]) -> list[str]:
    """Return the keys of the facts that were published about these calls, for the record of a parked run."""
    found: list[str] = []
    for attempt in attempts:
        found.append(_key(ToolStarted, str(attempt.call.place)))
        if attempt.passage.logged is not None:
            found += attempt.passage.logged.told
    return found


def leave_to_outcome(attempt: Attempt, end: ToolInvoked) -> None:
    """Keep what a call without a recorded end has logged, such as a cancelled one, for the record of its run's end."""
    run_log = attempt.run.log
    if run_log.is_kept and not run_log.closed:
        _note(attempt, msgspec.structs.replace(end, params=None, error=None))
        run_log.unrecorded += logged_by(attempt)


def _key(kind: type[Fact], about: str) -> str:
    return f"{kind.__name__} {about}"


def _note(attempt: Attempt, fact: Fact) -> None:
    try:
        _log_of(attempt).entries.append(encode_item(fact, attempt.run.session.id))
    except SessionError:  # a text in it can't be encoded; the call must end properly nevertheless
        log.warning("a %s can't be recorded, so a resumed run does not log it", type(fact).__name__)


def _log_of(attempt: Attempt) -> CallLog:
    passage = attempt.passage
    if passage.logged is None:
        with attempt.run.session.lock:  # two threads may ask at once and must get the same log
            passage.logged = passage.logged or CallLog()
    return passage.logged
