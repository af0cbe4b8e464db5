"""What sessions remember of their approvals, as a journal has it: written when it is said, read by whoever goes on."""

from __future__ import annotations

import sqlite3
from collections.abc import Container, Mapping, Sequence
from datetime import datetime
from typing import Any, Literal, cast

from handrail.clock import Clock
from handrail.errors import RunBusy
from handrail.events import ApprovalRemembered, ApprovalRevoked
from handrail.journal.writer import Writer
from handrail.question import Answer, Question
from handrail.records import Decision, RunRow
from handrail.session.serialization import encode_item

_SAID = frozenset(("approved", "reason", "remember", "scope"))


def lasting(
    question: Question, approved: bool, reason: str, by: str, scope: str | None, at: datetime
) -> ApprovalRemembered | None:
    """What is remembered of an answer: for this scope, which was offered, or for exactly this.

    None where nothing can be. One question has one answer, so the same decision has the same id whenever
    it is heard; a question that is asked again about what has changed is another.
    """
    kept = question.lasting
    if kept is None or (scope is not None and scope not in kept.scopes):
        return None
    key = kept.scopes[scope] if scope is not None else kept.exact if approved else kept.any_diff
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


def lasting_in(question: Question, answer: Answer, at: datetime) -> ApprovalRemembered | None:
    """What an answer is to be remembered as; None where it is for once, or will not be taken by whoever asked."""
    value: Any = answer.value
    if question.lasting is None or answer.outcome != "answered" or not isinstance(value, Mapping):
        return None
    said = cast("Mapping[str, Any]", value)
    remember, scope, reason = said.get("remember", "once"), said.get("scope"), said.get("reason")
    if remember not in ("exact", "scope") or not said.keys() <= _SAID:
        return None
    if type(said.get("approved")) is not bool or not isinstance(reason, str | None):
        return None
    if remember == "scope":
        scope = next(iter(question.lasting.scopes), None) if scope is None else scope
        if not isinstance(scope, str):
            return None
    elif scope is not None:
        return None
    return lasting(question, said["approved"], reason or "", answer.by, scope, at)


def written(fact: ApprovalRemembered | ApprovalRevoked, session_id: str, principal: str) -> Decision:
    """A fact as a journal has it."""
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


class MemoryDecisions:
    """Decisions within one process."""

    def __init__(self, owner: str, runs: Mapping[str, RunRow]) -> None:
        self._owner = owner
        self._runs = runs
        self._kept: dict[tuple[str, str, str, str], Decision] = {}

    def write(self, decision: Decision, /, *, run_id: str = "") -> None:
        row = self._runs.get(run_id)
        if row is not None and row.owner != self._owner:
            raise RunBusy(run_id, row.owner)
        key = (decision.session_id, decision.principal, decision.kind, decision.id)
        self._kept.setdefault(key, decision)

    async def read(self, session_id: str, principal: str, /) -> Sequence[Decision]:
        return tuple(
            each
            for each in self._kept.values()
            if (each.session_id, each.principal) == (session_id, principal)
        )

    def forget(self, sessions: Container[str]) -> None:
        """Keep nothing of these any more."""
        self._kept = {key: each for key, each in self._kept.items() if each.session_id not in sessions}


class SqliteDecisions:
    """Decisions in a journal's file, where other processes find them."""

    def __init__(self, owner: str, clock: Clock, writer: Writer) -> None:
        self._owner = owner
        self._clock = clock
        self._writer = writer

    def write(self, decision: Decision, /, *, run_id: str = "") -> None:
        def write(connection: sqlite3.Connection) -> None:
            row = connection.execute("SELECT owner FROM runs WHERE id = ?", (run_id,)).fetchone()
            if row is not None and row[0] != self._owner:
                raise RunBusy(run_id, row[0])
            put(connection, decision)

        self._writer.do_now(write)

    async def read(self, session_id: str, principal: str, /) -> Sequence[Decision]:
        query = (
            "SELECT kind, id, at, body FROM decisions WHERE session_id = ? AND principal = ? ORDER BY number"
        )
        rows = await self._writer.do(
            lambda connection: connection.execute(query, (session_id, principal)).fetchall(), synced=False
        )
        return tuple(
            Decision(session_id=session_id, principal=principal, kind=kind, id=id, at=at, body=body)
            for kind, id, at, body in rows
        )

    def take(self, connection: sqlite3.Connection, question: Question, answer: Answer) -> None:
        """Within the transaction that records an answer: record also what it is to be remembered as."""
        fact = lasting_in(question, answer, self._clock.now())
        if fact is not None:
            put(connection, written(fact, fact.run_context.session_id, question.principal))


def put(connection: sqlite3.Connection, decision: Decision) -> None:
    """Add a decision, unless it is there."""
    connection.execute(
        "INSERT OR IGNORE INTO decisions (session_id, principal, kind, id, at, body) VALUES (?, ?, ?, ?, ?, ?)",
        (
            decision.session_id,
            decision.principal,
            decision.kind,
            decision.id,
            decision.at,
            decision.body,
        ),
    )
