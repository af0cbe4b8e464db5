"""What a session remembers of its approvals: listed, revocable, and found again for a later call."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

from handrail.clock import SYSTEM_CLOCK, Clock
from handrail.context.facts import RunContext
from handrail.errors import DefinitionError, SessionError
from handrail.events import ApprovalRemembered, ApprovalRevoked
from handrail.guard.covering import Covering
from handrail.question import Question
from handrail.session import Session


class ApprovalMemory:
    """The decisions somebody said are to hold for more than one call of this session.

    They are facts in the session's log: kept although a call fails, saved and loaded with the session,
    and of no effect in another session or for another principal.
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
            session.record(ApprovalRevoked(id, found.tool, found.covers, by, self._clock.now()))


def approvals_of(session: Session) -> ApprovalMemory:
    """What this session remembers of its approvals: `.list()` it, `.revoke(id)` one."""
    return ApprovalMemory(session)


def remembered_in(session: Session) -> tuple[ApprovalRemembered, ...]:
    """The decisions of this session that still hold."""
    kept = session[ApprovalRemembered].all()
    if not kept:
        return ()
    revoked = {each.id for each in session[ApprovalRevoked].all()}
    return tuple(each for each in kept if each.id not in revoked)


class Recall:
    """What the session remembers about one request, and how an answer to it is remembered."""

    __slots__ = ("_clock", "_covering", "_question", "_run_context", "_session", "_tool", "used")

    def __init__(
        self,
        session: Session,
        question: Question,
        tool: str,
        covering: Covering,
        clock: Clock,
        run_context: RunContext,
    ) -> None:
        self._session = session
        self._question = question
        self._tool = tool
        self._covering = covering
        self._clock = clock
        self._run_context = run_context
        self.used: ApprovalRemembered | None = None
        """What decided the request, where something remembered did."""

    def find(self) -> ApprovalRemembered | None:
        """The decision that covers this request. A denial goes before every approval."""
        found = remembered_in(self._session)
        if not found:
            return None
        denying, approving = self._covering.denying, self._covering.approving
        for each in found:
            if not each.approved and each.key in denying:
                return each
        return next((each for each in found if each.approved and each.key in approving), None)

    def keep(self, approved: bool, reason: str, by: str, scope: str | None = None) -> None:
        """Remember an answer: for this scope, which was offered, or for exactly this."""
        covering = self._covering
        if scope is not None:
            key = next(offered.key for offered in covering.scopes if offered.words == scope)
        else:
            key = covering.exact if approved else covering.whatever_it_does
        self._session.record(
            ApprovalRemembered(
                self._question.id,
                self._tool,
                "exact" if scope is None else "scope",
                covering.words if scope is None else scope,
                approved,
                reason,
                by,
                self._clock.now(),
                self._question.asked_by,
                key,
                self._run_context,
            )
        )

    def when_covered(self, wake: Callable[[], object]) -> Callable[[], None]:
        """Call `wake`, on this loop, once something is remembered that covers this; returns how to stop."""
        loop = asyncio.get_running_loop()

        def look(_: ApprovalRemembered) -> None:
            if self.find() is not None:
                loop.call_soon_threadsafe(wake)

        return self._session.dispatcher.subscribe(ApprovalRemembered, look)
