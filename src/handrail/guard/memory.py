"""Approval memory: decisions of a session that hold for later calls, listed, revocable and recorded."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator

from handrail.clock import SYSTEM_CLOCK, Clock
from handrail.errors import DefinitionError, SessionError
from handrail.events import ApprovalRemembered, ApprovalRevoked
from handrail.guard.coverage import Coverage
from handrail.journal.decisions import lasting, written
from handrail.journals import Journal
from handrail.question import Question
from handrail.session import Session
from handrail.session.serialization import decode_item, said_in


class ApprovalMemory:
    """The decisions that hold for more than one call of this session.

    They are facts in the session's log: they outlive a failed call, are saved and loaded with the session,
    and are recorded in the journal of its runs. An approval has no effect in another session; no decision has
    any for another principal.
    """

    __slots__ = ("_clock", "_session")

    def __init__(self, session: Session, clock: Clock = SYSTEM_CLOCK) -> None:
        if not isinstance(session, Session):  # pyright: ignore[reportUnnecessaryIsInstance]  # a tool's view is none
            raise DefinitionError(
                f"approvals are remembered by a Session, and this is a {type(session).__name__}. "
                "Give the session of the run; a tool's view of it can't change them."
            )
        self._session = session
        self._clock = clock

    def list(self) -> tuple[ApprovalRemembered, ...]:
        """The decisions that were not revoked, oldest first."""
        return remembered_in(self._session)

    def __iter__(self) -> Iterator[ApprovalRemembered]:
        return iter(self.list())

    def __len__(self) -> int:
        return len(self.list())

    def revoke(self, id: str, by: str | None = None) -> None:
        """Withdraw a decision: later calls that it covered are asked about again."""
        session = self._session
        with session.lock:
            found = next((each for each in self.list() if each.id == id), None)
            if found is None:
                ids = ", ".join(repr(each.id) for each in self.list()) or "none"
                raise SessionError(
                    session.id, f"it remembers no approval with the id {id!r}", f"Its ids are: {ids}."
                )
            by = session.principal if by is None else by
            _record(session, ApprovalRevoked(id, found.tool, found.covers, by, self._clock.now()))


def approvals_of(session: Session) -> ApprovalMemory:
    """The approval memory of a session: `.list()` the decisions, `.revoke(id)` one."""
    return ApprovalMemory(session)


def remembered_in(session: Session) -> tuple[ApprovalRemembered, ...]:
    """The decisions that hold in this session: its own, and denials from the session it was forked from."""
    kept = session[ApprovalRemembered].all()
    if not kept:
        return ()
    revoked = {each.id for each in session[ApprovalRevoked].all()}
    return tuple(
        each
        for each in kept
        if each.id not in revoked and not (each.approved and each.run_context.session_id != session.id)
    )


def _record(session: Session, fact: ApprovalRemembered | ApprovalRevoked) -> None:
    """Record a decision, then let it count. If it can't be recorded it does not count."""
    if session.decisions is not None:
        session.decisions.write(fact)
    session.record(fact)


class Recall:
    """What a session remembers about one request, and how an answer to it is remembered.

    `cover` gives the keys of the request in the session with an id: this one, or the one a denial came from.
    """

    __slots__ = ("_clock", "_cover", "_question", "_session", "is_open", "used")

    def __init__(
        self, session: Session, question: Question, cover: Callable[[str], Coverage], clock: Clock
    ) -> None:
        self._session = session
        self._question = question
        self._cover = cover
        self._clock = clock
        self.is_open = False
        """Whether somebody was asked before and may still be looking at it. Then it is theirs to decide."""
        self.used: ApprovalRemembered | None = None
        """The remembered decision that decided the request, if one did."""

    def find(self) -> ApprovalRemembered | None:
        """The decision that covers this request. Denials come before approvals."""
        found = () if self.is_open else remembered_in(self._session)
        if not found:
            return None
        for each in found:
            if not each.approved and each.key in self._cover(each.run_context.session_id).denying:
                return each
        approving = self._cover(self._session.id).approving
        return next((each for each in found if each.approved and each.key in approving), None)

    def keep(self, approved: bool, reason: str, by: str, scope: str | None = None) -> None:
        """Remember an answer for one of the offered scopes, or for exactly this request."""
        session = self._session
        fact = lasting(self._question, approved, reason, by, scope, self._clock.now())
        if fact is None:
            return
        if any(each.id == fact.id for each in session[ApprovalRemembered].all()):
            session.dispatcher.publish(fact)  # recorded with its answer, and announced now
        else:
            _record(session, fact)

    def when_covered(self, wake: Callable[[], object]) -> Callable[[], None]:
        """Call `wake` on this loop once a decision covers this request; returns how to stop."""
        loop = asyncio.get_running_loop()

        def look(_: ApprovalRemembered) -> None:
            if self.find() is not None:
                loop.call_soon_threadsafe(wake)

        return self._session.dispatcher.subscribe(ApprovalRemembered, look)


class RecordedDecisions:
    """The decisions of one session in one journal."""

    __slots__ = ("_journal", "_session")

    def __init__(self, session: Session, journal: Journal) -> None:
        self._session = session
        self._journal = journal

    def write(self, decision: ApprovalRemembered | ApprovalRevoked, /) -> None:
        """Record a decision. Raises `RunBusy` if another process has taken the run it was made in."""
        session = self._session
        made_in = decision.run_context.request_id if isinstance(decision, ApprovalRemembered) else ""
        self._journal.decisions.write(written(decision, session.id, session.principal), run_id=made_in)

    async def read(self) -> None:
        """Tell the session of the decisions that the journal has and it does not know."""
        session = self._session
        recorded = await self._journal.decisions.read(session.id, session.principal)
        known = _known(session)
        new = [each for each in recorded if (each.kind, each.id) not in known]
        bring_in(session, [decode_item(each.body, session.id) for each in new])

    async def add(self) -> None:
        """Record the decisions that the session knows and the journal does not: made without a journal."""
        session = self._session
        known = _known(session)
        if known:
            recorded = await self._journal.decisions.read(session.id, session.principal)
            for which in known.keys() - {(each.kind, each.id) for each in recorded}:
                self._journal.decisions.write(written(known[which], session.id, session.principal))


async def keep_decisions(session: Session, journal: Journal) -> None:
    """Record the decisions of this session from now on, and load those made before."""
    book = RecordedDecisions(session, journal)
    await book.read()
    await book.add()
    session.decisions = book


def decisions_in(saved: bytes) -> list[ApprovalRemembered | ApprovalRevoked]:
    """The decisions in a saved session, revocations included."""
    return [*said_in(saved, ApprovalRemembered), *said_in(saved, ApprovalRevoked)]


def bring_in(session: Session, facts: Iterable[ApprovalRemembered | ApprovalRevoked]) -> None:
    """Tell a session of earlier decisions, each once. They are not published again."""
    with session.lock:
        known = _known(session)
        for fact in facts:
            if _which(fact) not in known:
                session.keep(fact)


def _known(session: Session) -> dict[tuple[str, str], ApprovalRemembered | ApprovalRevoked]:
    facts = (*session[ApprovalRemembered].all(), *session[ApprovalRevoked].all())
    return {_which(fact): fact for fact in facts}


def _which(fact: ApprovalRemembered | ApprovalRevoked) -> tuple[str, str]:
    return "remembered" if isinstance(fact, ApprovalRemembered) else "revoked", fact.id
