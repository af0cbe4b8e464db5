"""The approval broker: the one place at the root of a run where "ask" is decided."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from handrail.context.facts import Approval, ApprovalOutcome
from handrail.errors import DefinitionError
from handrail.protocols import ApprovalRequest, Environment, Journal
from handrail.schema import Schema

ApprovalMode = Literal["interactive", "approve_all", "strict"]


class ApprovalAnswer(BaseModel):
    """What somebody who is asked to approve answers. Kept plain, so that every client can show it."""

    model_config = ConfigDict(frozen=True)

    approved: bool
    reason: str | None = None


APPROVAL_ANSWER: Schema[ApprovalAnswer] = Schema(ApprovalAnswer)
APPROVAL_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"approved": {"type": "boolean"}, "reason": {"type": "string"}},
    "required": ["approved"],
}


class Broker:
    """Decides what needs asking.

    - *interactive*: whoever is there is asked. A model in a person's place is nobody: it never
      approves on their behalf.
    - *approve_all*: everything is approved. Only ever said explicitly.
    - *strict*: whatever needs asking is denied.

    With no mode it asks whoever is there, and denies where nobody is.
    """

    def __init__(
        self, journal: Journal, environment: Environment | None = None, mode: ApprovalMode | None = None
    ) -> None:
        if mode not in (None, "interactive", "approve_all", "strict"):
            raise DefinitionError(
                f"approval mode {mode!r} is not one. Use 'interactive', 'approve_all', 'strict', or None."
            )
        self._journal = journal
        self._environment = environment
        self.mode = mode

    @property
    def shows_previews(self) -> bool:
        """Is somebody asked, who can be shown what a call did before it is applied?"""
        environment = self._environment
        asked = self.mode in (None, "interactive")
        return asked and environment is not None and environment.run_mode == "user"

    async def decide(self, request: ApprovalRequest, /) -> Approval:
        if self.mode == "approve_all":
            return Approval(True, "", "approve_all", "approved")
        if self.mode == "strict":
            return Approval(
                False, "approvals are strict here: what needs asking is denied", "strict", "denied"
            )
        environment = self._environment
        if environment is None or environment.run_mode != "user":
            return Approval(False, "", "", "nobody there")
        answer = await self._journal.ask(request.question, environment, APPROVAL_ANSWER.parse_value)
        if answer.outcome != "answered":
            outcomes: dict[str, ApprovalOutcome] = {"declined": "denied"}
            outcome = outcomes.get(answer.outcome) or (
                "timed out" if answer.outcome == "timed out" else "cancelled"
            )
            return Approval(False, answer.reason, answer.by, outcome)
        decided = APPROVAL_ANSWER.parse_value(answer.value)
        return Approval(
            decided.approved, decided.reason or "", answer.by, "approved" if decided.approved else "denied"
        )
