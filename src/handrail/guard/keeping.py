"""A session's decisions in a journal: recorded when they are taken, and there again for whoever goes on with the session."""

from __future__ import annotations

from collections.abc import Iterable

from handrail.events import ApprovalRemembered, ApprovalRevoked
from handrail.journal.decisions import written
from handrail.records import Journal
from handrail.session import Session
from handrail.session.serialization import decode_item, said_in


class RecordedDecisions:
    """The decisions of one session in one journal."""

    __slots__ = ("_journal", "_session")

    def __init__(self, session: Session, journal: Journal) -> None:
        self._session = session
        self._journal = journal

    def write(self, decision: ApprovalRemembered | ApprovalRevoked, /) -> None:
        """Record one. `RunBusy` where it was made in a run that another process has taken since."""
        session = self._session
        made_in = decision.run_context.request_id if isinstance(decision, ApprovalRemembered) else ""
        self._journal.decisions.write(written(decision, session.id, session.principal), run_id=made_in)

    async def read(self) -> None:
        """Let the session know what was recorded and it does not know."""
        session = self._session
        there = await self._journal.decisions.read(session.id, session.principal)
        known = _known(session)
        new = [each for each in there if (each.kind, each.id) not in known]
        bring_in(session, [decode_item(each.body, session.id) for each in new])

    async def add(self) -> None:
        """Record what the session knows and the journal does not: it was decided where there was none."""
        session = self._session
        known = _known(session)
        if known:
            there = await self._journal.decisions.read(session.id, session.principal)
            for which in known.keys() - {(each.kind, each.id) for each in there}:
                fact = written(known[which], session.id, session.principal)
                self._journal.decisions.write(fact)  # of whichever run


async def keep_decisions(session: Session, journal: Journal) -> None:
    """From here on what is decided for this session is recorded, and it knows what was decided before."""
    book = RecordedDecisions(session, journal)
    await book.read()
    await book.add()
    session.decisions = book


def decided_in(saved: bytes) -> list[ApprovalRemembered | ApprovalRevoked]:
    """What a saved session remembers of its approvals, and what was taken back of that."""
    return [*said_in(saved, ApprovalRemembered), *said_in(saved, ApprovalRevoked)]


def bring_in(session: Session, facts: Iterable[ApprovalRemembered | ApprovalRevoked]) -> None:
    """Let a session know of decisions from before, each once; whoever listens has heard of them."""
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
