"""Questions to people and their answers, on which approvals, `wait_for` and handoffs are built.

A question is plain data, so that it can be shown anywhere, kept for days, and answered in a process
other than the one that asked.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any, Literal, cast

import msgspec

from handrail.context.facts import RunContext
from handrail.rendering import Row, rows_of

QuestionKind = Literal["approval", "input", "handoff"]
AnswerOutcome = Literal["answered", "declined", "cancelled", "timed out"]


class DecisionKeys(msgspec.Struct, frozen=True, kw_only=True):
    """The keys under which an answer is remembered for later calls of the session.

    They are part of the question, so that the answer takes effect as soon as any process accepts it, even if
    the run is never resumed.
    """

    tool: str
    words: str
    """A description of this request, for lists of remembered decisions."""
    exact: str
    """The key for approving exactly this request. The next field is the key for denying it."""
    any_diff: str
    scopes: dict[str, str]
    """Maps the text of each offered scope to its key, narrowest first."""
    run_context: RunContext


class Question(msgspec.Struct, frozen=True, kw_only=True):
    """Something that a run needs to know from a person.

    `digest` is keyed and covers everything the answer is about. An answer carries the same digest, which proves
    that it answers what was shown.
    """

    id: str
    kind: QuestionKind
    name: str
    """The asker's name for the question: a `wait_for` kind, a permission, or a handoff's name."""
    message: str
    """Why it is asked. Invisible characters in it are escaped."""
    payload: Any
    """What to show, as plain JSON without secrets."""
    schema: dict[str, Any]
    """The JSON Schema that an answer must match."""
    digest: str
    principal: str
    """The principal who may answer."""
    asked_by: tuple[str, ...]
    """The path of calls that leads to the asker, outermost first."""
    call_id: str
    asked_at: datetime
    expires_at: datetime | None = None
    run_id: str = ""
    """The outermost run that waits for the answer."""
    decision_keys: DecisionKeys | None = None
    """Keys for an approval whose answer can be remembered. Recorded, never shown."""
    secret: bool = False
    """Whether the answer may contain a secret. It is then recorded masked, and accepted only while the asker waits."""

    @property
    def rows(self) -> tuple[Row, ...]:
        """The payload as every environment shows it. For an approval, this is the call's parsed arguments."""
        return rows_of_payload(self.kind, self.payload)


def rows_of_payload(kind: QuestionKind, payload: Any) -> tuple[Row, ...]:
    """Return the rows of a question with this payload."""
    if kind == "approval" and isinstance(payload, dict):
        payload = cast(dict[str, Any], payload).get("arguments")
    if isinstance(payload, dict):
        return rows_of(cast(dict[str, Any], payload))
    return () if payload in (None, "", []) else rows_of({"given": payload})


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to one question, or how the question ended without one."""

    question_id: str
    digest: str
    by: str
    outcome: AnswerOutcome = "answered"
    value: Any = None
    reason: str = ""
    seal: str = ""
    """For a recorded answer whose value is masked, a digest of the actual value. Only the journal sets it."""
