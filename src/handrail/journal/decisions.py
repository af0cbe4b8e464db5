"""Remembered decisions: how an answer asks for one, and how they are stored in a database."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Literal, cast

from handrail.events import ApprovalRemembered, ApprovalRevoked
from handrail.journal.records import Decision
from handrail.journal.sql.chains import Chains, decision_chain
from handrail.journal.sql.connection import Connection
from handrail.journal.sql.database import Role, transaction
from handrail.journal.sql.leases import check_not_taken
from handrail.journal.sql.verification import DECISIONS, add_to_session, read_decisions
from handrail.question import Answer, Question
from handrail.session.serialization import encode_item

_SAID = frozenset(("approved", "reason", "remember", "scope"))


def remembered_as(
    question: Question, approved: bool, reason: str, by: str, scope: str | None, at: datetime
) -> ApprovalRemembered | None:
    """Return a decision to remember, for an offered scope or for this request; None if it can't be remembered.

    Without a scope, an approval covers exactly this request, and a denial also covers the request with a different diff.
    A question has one answer, so the same decision always has the same id. If the subject of a question
    changes and the question is asked again, it counts as a new question.
    """
    kept = question.decision_keys
    if kept is None or (scope is not None and scope not in kept.scopes):
        return None
    key = kept.scopes[scope] if scope is not None else kept.exact if approved else kept.any_diff
    if not key:
        return None
    return ApprovalRemembered(
        f"{question.id}-{question.digest[:8]}",
        kept.tool,
        "exact" if scope is None else "scope",
        kept.words if scope is None else scope,
        approved,
        reason,
        by,
        at,
        question.asked_by,
        key,
        kept.run_context,
    )


def remembered_by(question: Question, answer: Answer, at: datetime) -> ApprovalRemembered | None:
    """Return the decision that an answer asks to remember.

    Returns None if it asks to remember nothing, if the decision can't be remembered, or if the answer is invalid.
    """
    value: Any = answer.value
    if question.decision_keys is None or answer.outcome != "answered" or not isinstance(value, Mapping):
        return None
    said = cast("Mapping[str, Any]", value)
    remember, scope, reason = said.get("remember", "once"), said.get("scope"), said.get("reason")
    if remember not in ("exact", "scope") or not said.keys() <= _SAID:
        return None
    if type(said.get("approved")) is not bool or not isinstance(reason, str | None):
        return None
    if remember == "scope":
        scope = next(iter(question.decision_keys.scopes), None) if scope is None else scope
        if not isinstance(scope, str):
            return None
    elif scope is not None:
        return None
    return remembered_as(question, said["approved"], reason or "", answer.by, scope, at)


def written(fact: ApprovalRemembered | ApprovalRevoked, session_id: str, principal: str) -> Decision:
    """Encode a remembered or revoked decision for a journal."""
    kind: Literal["remembered", "revoked"] = (
        "remembered" if isinstance(fact, ApprovalRemembered) else "revoked"
    )
    return Decision(
        session_id=session_id,
        principal=principal,
        kind=kind,
        id=fact.id,
        at=fact.at.timestamp(),
        body=encode_item(fact, session_id),
    )


def decision_in(question: Question, answer: Answer, now: datetime) -> Decision | None:
    """Return the decision that an answer asks to remember, encoded for a journal; None if there is none."""
    fact = remembered_by(question, answer, now)
    return None if fact is None else written(fact, fact.run_context.session_id, question.principal)


class SqlDecisions(Role):
    """The role `Decisions` of a journal."""

    def write(self, decision: Decision, /, *, run_id: str = "") -> None:
        database = self._database

        def write(connection: Connection) -> None:
            check_not_taken(connection, database.owner, run_id)
            put_decision(connection, database.chains, decision)

        database.transact_now(write)

    @transaction
    def read(self, connection: Connection, session_id: str, principal: str, /) -> Sequence[Decision]:
        records = read_decisions(connection, self._chains, session_id, principal)
        return tuple(
            Decision(
                session_id=session_id,
                principal=principal,
                kind=cast("Any", each.kind),
                id=each.key,
                at=each.at,
                body=each.body,
            )
            for each in records
        )


def put_decision(connection: Connection, chains: Chains, decision: Decision) -> None:
    """Store a decision, unless it is already stored."""
    chain = decision_chain(decision.session_id, decision.principal)
    known = {(each.kind, each.key) for each in chains.read(connection, chain)}
    if (decision.kind, decision.id) not in known:
        link = chains.append(connection, chain, decision.kind, decision.id, decision.body, at=decision.at)
        if link == 1:
            add_to_session(
                connection, chains, decision.session_id, DECISIONS, decision.principal, chain, at=decision.at
            )
