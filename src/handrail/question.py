"""Questions and answers: the one thing under approvals, `wait_for` and handoffs.

A question is plain data, so that it can be shown anywhere, kept for days, and answered by another
process than the one that asked.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any, Literal

import msgspec

from handrail.context.facts import RunContext

QuestionKind = Literal["approval", "input", "handoff"]
AnswerOutcome = Literal["answered", "declined", "cancelled", "timed out"]


class Lasting(msgspec.Struct, frozen=True, kw_only=True):
    """What an answer is kept under that is to hold for more than one call of the session.

    It is part of the question, so that such an answer holds from the moment it is taken, by whichever
    process, also if nobody goes on with the run.
    """

    tool: str
    words: str
    """This very request, for a list of what is remembered."""
    exact: str
    """The key of an approval of exactly this, and below that of a denial."""
    any_diff: str
    scopes: dict[str, str]
    """The scopes that are offered, in words, and their keys; the narrowest first."""
    run_context: RunContext


class Question(msgspec.Struct, frozen=True, kw_only=True):
    """Something a run needs from whoever is there.

    `digest` is keyed and covers everything the answer is about; an answer carries it back, so that
    what was answered is what was seen.
    """

    id: str
    kind: QuestionKind
    name: str
    """What is asked for, as the asker calls it: a `wait_for` kind, a permission, a handoff's name."""
    message: str
    payload: Any
    """What to show: plain JSON, nothing secret."""
    schema: dict[str, Any]
    """The JSON Schema an answer must fit."""
    digest: str
    principal: str
    """Who may answer."""
    asked_by: tuple[str, ...]
    """The path of calls that leads to whoever asks, outermost first."""
    call_id: str
    asked_at: datetime
    expires_at: datetime | None = None
    run_id: str = ""
    """The run that waits for it, the outermost one."""
    lasting: Lasting | None = None
    """For an approval whose answer can be remembered. It is for the record, and not to be shown."""
    secret: bool = False
    """Can there be a secret in its answer? Then that is recorded masked, and taken only where whoever asked waits."""


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What came back for one question."""

    question_id: str
    digest: str
    by: str
    outcome: AnswerOutcome = "answered"
    value: Any = None
    reason: str = ""
    seal: str = ""
    """Of an answer on record whose value is masked: by what it is known again. Whoever answers gives none."""
