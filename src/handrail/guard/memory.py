"""What a session remembers of its approvals: listed, revocable, and found again for a later call."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

from handrail.clock import SYSTEM_CLOCK, Clock
from handrail.errors import DefinitionError, SessionError
from handrail.events import ApprovalRemembered, ApprovalRevoked
from handrail.guard.covering import Covering
from handrail.journal.decisions import lasting
from handrail.question import Question
from handrail.session import Session


class ApprovalMemory:
    """The decisions somebody said are to hold for more than one call of this session.

    They are facts in the session's log: kept although a call fails, saved and loaded with the session,
    and recorded where its runs are. An approval is of no effect in another session, nor is either for
    another principal.
    """

    __slots__ = ("_clock", "_session")

    def __init__(self, session: Session, clock: Clock = SYSTEM_CLOCK) -> None:
        if not isinstance(session, Session):  # pyright: ignore[reportUnnecessaryIsInstance]  # a tool's view is none
            raise DefinitionError(
                f"approvals are remembered by a Session, and this is a {type(session).__name__}. "
                "Give the session that is evaluated on; what a tool sees of it can't change them."
            )
        self._session = session
        self._clock = clock

    def list(self) -> tuple[ApprovalRemembered, ...]:
        """What is remembered and not revoked, oldest first."""
        return remembered_in(self._session)

    def __iter__(self) -> Iterator[ApprovalRemembered]:
        return iter(self.list())

    def __len__(self) -> int:
        return len(self.list())

    def revoke(self, id: str, by: str | None = None) -> None:
        """Let a decision count no more, from now on: what is not decided yet is asked about again."""
        session = self._session
        with session.lock:
            found = next((each for each in self.list() if each.id == id), None)
            if found is None:
                ids = ", ".join(repr(each.id) for each in self.list()) or "none"
                raise SessionError(
                    session.id,
                    f"it remembers no approval with the id {id!r}",
                    f"Give the id of one: {ids}.",
                )
            by = session.principal if by is None else by
            _record(session, ApprovalRevoked(id, found.tool, found.covers, by, self._clock.now()))


def approvals_of(session: Session) -> ApprovalMemory:
    """What this session remembers of its approvals: `.list()` it, `.revoke(id)` one."""
    return ApprovalMemory(session)


def remembered_in(session: Session) -> tuple[ApprovalRemembered, ...]:
    """The decisions that still hold in this session: its own, and the denials it was parted with."""
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
    """Let a decision count. It is recorded first, where the session is: what can't be does not count."""
    if session.decisions is not None:
        session.decisions.write(fact)
    session.record(fact)


class Recall:
    """What the session remembers about one request, and how an answer to it is remembered.

    `cover` gives the keys that the request has in the session of an id: in this one, and in one from
    which a denial was brought along.
    """

    __slots__ = ("_clock", "_cover", "_question", "_session", "lies_open", "used")

    def __init__(
        self, session: Session, question: Question, cover: Callable[[str], Covering], clock: Clock
    ) -> None:
        self._session = session
        self._question = question
        self._cover = cover
        self._clock = clock
        self.lies_open = False
        """Was it put to somebody before, who may be looking at it still? Then it is theirs to decide."""
        self.used: ApprovalRemembered | None = None
        """What decided the request, where something remembered did."""

    def find(self) -> ApprovalRemembered | None:
        """The decision that covers this request. A denial goes before every approval."""
        found = () if self.lies_open else remembered_in(self._session)
        if not found:
            return None
        for each in found:
            if not each.approved and each.key in self._cover(each.run_context.session_id).denying:
                return each
        approving = self._cover(self._session.id).approving
        return next((each for each in found if each.approved and each.key in approving), None)

    def keep(self, approved: bool, reason: str, by: str, scope: str | None = None) -> None:
        """Remember an answer: for this scope, which was offered, or for exactly this."""
        session = self._session
        fact = lasting(self._question, approved, reason, by, scope, self._clock.now())
        if fact is None:
            return
        if any(each.id == fact.id for each in session[ApprovalRemembered].all()):
            session.dispatcher.publish(fact)  # it was recorded with its answer, and is heard of now
        else:
            _record(session, fact)

    def when_covered(self, wake: Callable[[], object]) -> Callable[[], None]:
        """Call `wake`, on this loop, once something is remembered that covers this; returns how to stop."""
        loop = asyncio.get_running_loop()

        def look(_: ApprovalRemembered) -> None:
            if self.find() is not None:
                loop.call_soon_threadsafe(wake)

        return self._session.dispatcher.subscribe(ApprovalRemembered, look)
