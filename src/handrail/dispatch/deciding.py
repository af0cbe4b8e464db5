"""Deciding on an approval: as it was decided before, where a run is gone through again, else by the broker."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from handrail.context import Approval
from handrail.errors import ToolValidationError
from handrail.events import ApprovalRemembered, DecidedBy
from handrail.guard.approval import decision
from handrail.guard.memory import Recall
from handrail.journal.runlog import RunLog
from handrail.place import Place
from handrail.protocols import ApprovalRequest

if TYPE_CHECKING:
    from handrail.dispatch.attempt import Attempt


class Decided(msgspec.Struct, frozen=True):
    """What came of a request, and how."""

    approval: Approval
    how: DecidedBy
    remembered: str | None = None
    """The id of the remembered decision that decided it, where one did."""


class _Noted(msgspec.Struct, frozen=True):
    """A decision by something remembered, as it stands in the record of the run."""

    digest: str
    """That of the request: one about anything else is decided anew."""
    approval: Approval
    remembered: str


async def decide(attempt: Attempt, asked: ApprovalRequest, recall: Recall) -> Decided:
    """What stood when this place was first come to, if it was; else what stands now.

    What somebody answered to this very question goes before all they said since, and so does what a
    remembered decision decided here: a call that was let go stays so, whatever was denied or revoked
    while its process was gone. Only *strict* holds for every call.
    """
    frame, log = attempt.frame, attempt.frame.log
    mode = getattr(frame.broker, "mode", None)
    if log is not None and log.resumed and mode != "strict":
        before = _before(log, asked)
        if before is not None:
            return before
        # One with a diff is not withdrawn for another's answer, since somebody may be looking at it.
        recall.is_open = bool(asked.diff) and _lies_there(log, asked) and mode != "approve_all"
    book = frame.session.decisions
    if book is not None and frame.journal is not None and len(frame.session[ApprovalRemembered]):
        await book.read()  # somebody may have revoked one elsewhere
    approval = await frame.broker.decide(asked)
    used = recall.used
    if used is None:
        return Decided(approval, _how(approval, mode))
    if log is not None:
        noted = _Noted(asked.question.digest, approval, used.id)
        await log.note("approval", _place(log, asked), noted)
        if log.resumed and _lies_there(log, asked):
            await frame.steps.withdraw(asked.question.id, alone=True)  # nobody hears an answer to it
    return Decided(approval, "remembered", used.id)


def _before(log: RunLog, asked: ApprovalRequest) -> Decided | None:
    """What this request came to before its process ended."""
    question = asked.question
    noted = log.find("approval", _place(log, asked), _Noted)
    if noted is not None and noted.digest == question.digest:
        return Decided(noted.approval, "remembered", noted.remembered)
    answer = log.asked[question.id].answer if _lies_there(log, asked) else None
    try:
        return None if answer is None else Decided(decision(answer, asked), "asked")
    except ToolValidationError:  # given where nobody could check it: it is asked for again
        return None


def _lies_there(log: RunLog, asked: ApprovalRequest) -> bool:
    """Was just this put to somebody?"""
    before = log.asked.get(asked.question.id)
    return before is not None and before.question.digest == asked.question.digest


def _place(log: RunLog, asked: ApprovalRequest) -> Place:
    return Place.from_id(asked.question.id, log.run_id)


def _how(approval: Approval, mode: str | None) -> DecidedBy:
    if approval.outcome == "nobody there":
        return "nobody"
    return "mode" if mode in ("approve_all", "strict") else "asked"
