"""The approval broker, which decides requests for approval."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any, Literal, Protocol, cast, runtime_checkable

from msgspec.structs import replace
from pydantic import BaseModel, ConfigDict

from handrail.context.facts import Approval, ApprovalOutcome
from handrail.errors import DefinitionError, ToolValidationError
from handrail.events import ApprovalRemembered
from handrail.journal.local import LocalQuestions
from handrail.journal.protocol import Questions
from handrail.protocols import ApprovalRecall, ApprovalRequest, Asker, Environment
from handrail.question import Answer
from handrail.resources.startup_files import why_not_covered
from handrail.schema import Schema

ApprovalMode = Literal["interactive", "approve_all", "strict"]


class ApprovalAnswer(BaseModel):
    """The answer to a request for approval.

    The schema that clients get has only the first two fields, so that every client can show them. A client that
    knows the other fields may also set `remember`, for this exact request or for one of the offered scopes.
    """

    model_config = ConfigDict(frozen=True)

    approved: bool
    reason: str | None = None
    remember: Literal["once", "exact", "scope"] = "once"
    scope: str | None = None
    """One of the offered scopes. If it is None and `remember` is "scope", the first offered scope applies."""


APPROVAL_ANSWER: Schema[ApprovalAnswer] = Schema(ApprovalAnswer)
APPROVAL_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"approved": {"type": "boolean"}, "reason": {"type": "string"}},
    "required": ["approved"],
}


@runtime_checkable
class PreviewBroker(Protocol):
    """A broker that says whether it can decide on a staged call by its diff, after the call has run in its fork."""

    @property
    def shows_previews(self) -> bool: ...


class Broker:
    """Decides requests for approval, in one of three modes.

    - *interactive*: the person in the environment is asked. If there is none, the request is denied. A model in a
      person's place never approves on their behalf.
    - *approve_all*: everything is approved except what a remembered denial covers, what a quorum decides, and
      changes to files that later run automatically. This mode is never the default.
    - *strict*: everything is denied, even what was approved before.

    Without a mode, the broker decides as in *interactive*. A decision that the session remembers applies, and nobody is
    asked, except in *strict* and for requests that quorums decide. Denials take precedence over approvals.

    One broker can serve any number of concurrent runs: each request brings its own session's memory. Without
    `questions`, the broker keeps its open questions in memory.
    """

    def __init__(
        self,
        questions: Questions | None = None,
        environment: Environment | None = None,
        mode: ApprovalMode | None = None,
    ) -> None:
        if mode not in (None, "interactive", "approve_all", "strict"):
            raise DefinitionError(
                f"there is no approval mode {mode!r}. Use 'interactive', 'approve_all', 'strict', or None."
            )
        self._questions: Questions = LocalQuestions() if questions is None else questions
        self._environment = environment
        self._mode: ApprovalMode | None = mode

    @property
    def mode(self) -> ApprovalMode | None:
        return self._mode

    @property
    def shows_previews(self) -> bool:
        """Whether a person is asked and can be shown a diff before it is applied."""
        environment = self._environment
        asked = self._mode in (None, "interactive")
        return asked and environment is not None and environment.run_mode == "user"

    async def decide(self, request: ApprovalRequest, /) -> Approval:
        recall = request.recall
        if self._mode == "strict":
            return Approval(
                False, "the approval mode is strict, so it is denied without asking", "strict", "denied"
            )
        if request.question.quorums:
            return await self._ask_others(request)
        while True:
            if recall is not None:
                remembered = recall.find()
                if remembered is not None:
                    recall.used = remembered
                    return _repeat(remembered)
            if self._mode == "approve_all":
                if request.startup_files:
                    return Approval(False, why_not_covered(request.startup_files), "approve_all", "denied")
                return Approval(True, "", "approve_all", "approved")
            environment = self._environment
            if environment is None or environment.run_mode != "user":
                why = why_not_covered(request.startup_files) if request.startup_files else ""
                return Approval(False, why, "", "nobody there")
            answer = await self._ask(request, environment)
            if answer is not None:
                return decision(answer, request)
            await self._questions.withdraw(request.question.id)  # nobody waits for its answer any more

    async def _ask_others(self, request: ApprovalRequest) -> Approval:
        """Ask the people that the policies require. No approval mode or remembered decision can replace them.

        If there are too few of them, the request is denied immediately.
        """
        question, environment = request.question, self._environment
        for quorum in question.quorums:
            found = () if environment is None else environment.voters(quorum, question.principal)
            if environment is None or len(found) < quorum.approvals:
                there = "nobody" if not found else f"only {len(found)}"
                reason = f"it needs {quorum}, not counting {question.principal!r}, and {there} can be asked"
                return Approval(False, reason, "", "denied")
        answer = await self._ask(request, cast("Environment", environment))
        if answer is None:
            return Approval(False, "", "", "cancelled")
        return decision(_without_former_voters(answer, request, cast("Environment", environment)), request)

    async def _ask(self, request: ApprovalRequest, environment: Environment) -> Answer | None:
        """Return the answer to a request; None if the request was withdrawn because a new decision covers it."""
        fits = partial(_checked, request=request)
        asker = cast("Asker", environment) if request.through is None else request.through(environment)
        asking = asyncio.ensure_future(self._questions.ask(request.question, asker, fits))
        withdrawn = False

        def withdraw() -> None:
            nonlocal withdrawn
            withdrawn = asking.cancel()

        stop = None
        if request.recall is not None and not request.diff:  # a person may be reading the diff
            stop = request.recall.when_covered(withdraw)
        try:
            await asyncio.wait({asking})
        finally:
            if stop is not None:
                stop()
            if not asking.done():  # the caller was cancelled
                asking.cancel()
                await asyncio.wait({asking})
        return None if withdrawn and asking.cancelled() else asking.result()


def _without_former_voters(answer: Answer, request: ApprovalRequest, environment: Environment) -> Answer:
    """Return an answer without the votes of accounts that may no longer vote, for example because they were removed."""
    question = request.question
    voters = [(each, environment.voters(each, question.principal)) for each in question.quorums]
    standing = [
        vote
        for vote in answer.votes
        if all(found.get(vote.by) == vote.since for quorum, found in voters if quorum.counts(vote))
    ]
    return replace(answer, votes=tuple(standing))


def _checked(value: Any, request: ApprovalRequest) -> ApprovalAnswer:
    """Parse an answer. Raises `ToolValidationError` if it does not match what was offered."""
    answer = APPROVAL_ANSWER.parse_value(value)
    offered = request.scopes
    if request.recall is None and answer.remember != "once":
        raise ToolValidationError(
            "an answer to this request can't be remembered. Answer with remember='once'."
        )
    keys = request.question.decision_keys
    if answer.approved and answer.remember == "exact" and keys is not None and not keys.exact:
        raise ToolValidationError(
            "an approval of exactly this command can't be remembered, because the files that it runs may change. "
            "Answer with remember='once' or 'scope'."
        )
    if answer.remember != "scope":
        if answer.scope is not None:
            raise ToolValidationError(
                f"the answer has a scope but also remember={answer.remember!r}. Answer with remember='scope', or without a scope."
            )
    elif not offered:
        raise ToolValidationError("this request has no scopes. Answer with remember='once' or 'exact'.")
    elif answer.scope is not None and answer.scope not in offered:
        raise ToolValidationError(
            f"the scope {answer.scope!r} was not offered. Use one of {', '.join(map(repr, offered))}."
        )
    return answer


def decision(answer: Answer, request: ApprovalRequest) -> Approval:
    """Return the decision that an answer gives. If the answer asks to be remembered, remember it.

    An approval whose quorums are not met counts as a denial. Raises `ToolValidationError` if the answer does not match
    what was offered.
    """
    if answer.outcome != "answered":
        outcomes: dict[str, ApprovalOutcome] = {"declined": "denied", "timed out": "timed out"}
        return Approval(False, answer.reason, answer.by, outcomes.get(answer.outcome, "cancelled"))
    decided = _checked(answer.value, request)
    question = request.question
    if question.quorums and decided.approved and question.decided_by(answer.votes) is not True:
        return Approval(False, "the required people have not approved it", answer.by, "denied")
    reason = decided.reason or ""
    recall: ApprovalRecall | None = request.recall
    if recall is not None and decided.remember != "once":
        scope = (decided.scope or request.scopes[0]) if decided.remember == "scope" else None
        recall.keep(decided.approved, reason, answer.by, scope)
    return Approval(decided.approved, reason, answer.by, "approved" if decided.approved else "denied")


def _repeat(remembered: ApprovalRemembered) -> Approval:
    """Return a remembered decision as the answer to a new request, with its reason and scope."""
    reason = f"{remembered.reason} " if remembered.reason else ""
    return Approval(
        remembered.approved,
        f"{reason}(remembered in this session: {remembered.scope})",
        remembered.by,
        "approved" if remembered.approved else "denied",
    )
