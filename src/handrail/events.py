"""The facts Handrail publishes. Each call has exactly one `ToolStarted` and one `ToolInvoked`.

Facts are sent to whoever subscribed; those that say what became of something (`ToolInvoked`,
`ToolRolledBack`, approvals, questions) are kept in the session's logs too. These names are ours: a
tool publishes its own events with `context.emit`, which wraps them in `Emitted`.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from decimal import Decimal
from typing import Any, Literal

import msgspec

from handrail.context.facts import Approval, RunContext
from handrail.messages import Message, StopReason, Usage
from handrail.tools.result import ToolResult

DecidedBy = Literal["asked", "remembered", "mode", "nobody"]
"""How a request was decided: somebody was asked, had decided before, a mode did, or nobody was there."""
CallStatus = Literal["ok", "error", "denied", "cancelled", "timed out", "invalid", "conflict"]


class Fact(msgspec.Struct, frozen=True):
    """The root of what only Handrail itself publishes."""


class ToolStarted(Fact, frozen=True, gc=False):
    """A call was asked for. Nothing has been looked up, parsed or allowed yet."""

    call_id: str
    tool: str
    path: tuple[str, ...]
    at: float
    """Seconds since the run began."""
    run_context: RunContext


class ToolInvoked(Fact, frozen=True):
    """A call is over, and this is what came of it."""

    call_id: str
    tool: str
    path: tuple[str, ...]
    status: CallStatus
    result: ToolResult[Any]
    params: Any
    """What the arguments were parsed to; None when they could not be."""
    seconds: float
    attempts: int
    stale: tuple[str, ...]
    """What the call had read that was changed by somebody else before it committed."""
    error: BaseException | None
    """What was raised, with its traceback, for telemetry and never for a model."""
    run_context: RunContext


class ToolRolledBack(Fact, frozen=True):
    """What a call had done was undone."""

    call_id: str
    tool: str
    reason: str
    compensated: tuple[str, ...]
    not_undone: tuple[str, ...]
    """What could not be undone: irreversible inner calls and effects settled by `once`."""
    run_context: RunContext


class Progress(Fact, frozen=True):
    """How far a call is, for whoever watches."""

    call_id: str
    tool: str
    message: str
    done: float | None
    total: float | None
    run_context: RunContext


class Emitted(Fact, frozen=True):
    """An event of a tool's own, under the tool's name."""

    call_id: str
    tool: str
    event: object
    run_context: RunContext


class ApprovalRequested(Fact, frozen=True):
    """A call needs to be approved: somebody is asked, unless it is decided without."""

    question_id: str
    call_id: str
    tool: str
    asked_by: tuple[str, ...]
    reason: str
    run_context: RunContext


class ApprovalDecided(Fact, frozen=True):
    """What came of asking."""

    question_id: str
    call_id: str
    tool: str
    approval: Approval
    run_context: RunContext
    how: DecidedBy = "asked"
    remembered: str | None = None
    """The id of the remembered decision that decided it, where one did."""


class ApprovalRemembered(Fact, frozen=True):
    """Somebody decided for more than one call. It holds in this session until it is revoked."""

    id: str
    """It is revoked by this. Made of the question it answered, and of what that was about."""
    tool: str
    """The tool it was asked about."""
    covers: Literal["exact", "scope"]
    scope: str
    """What it covers, in the words the person agreed to."""
    approved: bool
    reason: str
    by: str
    at: datetime
    asked_by: tuple[str, ...]
    """The path of calls that led to whoever asked."""
    key: str
    """What a request must have to be covered; it fits this session and its principal only."""
    run_context: RunContext


class ApprovalRevoked(Fact, frozen=True):
    """A remembered decision counts no more. It belongs to no run: somebody outside took it back."""

    id: str
    tool: str
    covers: Literal["exact", "scope"]
    by: str
    at: datetime


class QuestionAsked(Fact, frozen=True):
    """A call waits for somebody's answer."""

    question_id: str
    call_id: str
    kind: str
    asked_by: Sequence[str]
    run_context: RunContext


class QuestionAnswered(Fact, frozen=True):
    """A question is over: answered, declined, cancelled or timed out."""

    question_id: str
    call_id: str
    outcome: str
    by: str
    run_context: RunContext


# --- a run and its model -----------------------------------------------------------------------


class PromptRendered(Fact, frozen=True):
    """A run begins: its prompt was rendered."""

    prompt: str
    text: str
    tools: tuple[str, ...]
    run_context: RunContext


class MessageAdded(Fact, frozen=True):
    """A conversation has grown by a message. A session's conversations are made of these."""

    conversation: str
    message: Message
    run_id: str


class SectionOpened(Fact, frozen=True):
    """A section that was shown as a summary is shown in full from here on."""

    conversation: str
    path: str
    run_id: str


class ModelRequested(Fact, frozen=True):
    """A request goes to a model."""

    model: str
    attempt: int
    messages: int
    run_context: RunContext


class ModelResponded(Fact, frozen=True):
    """A model has answered, and this is what it took."""

    model: str
    stop_reason: StopReason
    usage: Usage
    cost: Decimal | None
    """In US dollars; None where nobody knows the price."""
    seconds: float
    attempt: int
    run_context: RunContext


class ModelFailed(Fact, frozen=True):
    """A request came to nothing. What was streamed of it does not count."""

    model: str
    attempt: int
    error: str
    retry_in: float | None
    """Seconds until it is tried again; None when it is not."""
    run_context: RunContext


class TextDelta(Fact, frozen=True, gc=False):
    """More of the answer's text, in a streamed run."""

    text: str
    run_context: RunContext


class ThinkingDelta(Fact, frozen=True, gc=False):
    """More of what the model says it thinks, in a streamed run."""

    text: str
    run_context: RunContext


class CallDelta(Fact, frozen=True, gc=False):
    """A call the model is writing, in a streamed run; `name` comes with its first piece."""

    index: int
    call_id: str
    name: str
    arguments: str
    run_context: RunContext


class Advised(Fact, frozen=True):
    """The model was given advice, or held to its task; or whoever was to do so raised."""

    kind: Literal["feedback", "completion"]
    by: str
    text: str
    failed: bool
    run_context: RunContext


class PromptExecuted(Fact, frozen=True):
    """A run is over."""

    prompt: str
    stop_reason: str
    """Why it ended; `failed: ...` or `cancelled` where there is no response."""
    usage: Usage
    cost: Decimal | None
    run_context: RunContext
