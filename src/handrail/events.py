"""The facts that Handrail publishes. A call has one `ToolStarted` and one `ToolInvoked`, over all legs of its run.

Facts go to the subscribers of the event bus. All except `ToolStarted`, `ToolResumed`, `Progress`, `Emitted`, `PromptRendered`,
`MessageQueued`, `BackgroundStarted`, `BackgroundEnded`, `ModelRequested`, `PartialOutput`, the deltas and the details are also kept in the session's logs. Only Handrail publishes facts: a tool publishes its
own events with `context.emit`, which wraps them in `Emitted`.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from decimal import Decimal
from typing import Any, Literal

import msgspec

from handrail.content import Attachment
from handrail.context.facts import Approval, RunContext
from handrail.journal.records import QueuedMessage
from handrail.messages import AssistantMessage, Compaction, Message, ModelRequest, StopReason, Usage
from handrail.tools.definition import Tool
from handrail.tools.result import ToolResult, Whole, whole_of

DecidedBy = Literal["asked", "remembered", "mode", "nobody"]
"""How an approval request was decided: by the people asked or a custom broker, a remembered decision, a mode, or nobody."""
LegEnd = Literal["", "parked", "released", "lost"]
"""How a leg of a run ended before the run was over: it was parked or left to another process, or its process ended. "" if there was none."""
CallStatus = Literal["ok", "error", "denied", "cancelled", "timed out", "invalid", "conflict"]


class Fact(msgspec.Struct, frozen=True):
    """Base class of the events that only Handrail itself publishes."""


class ToolStarted(Fact, frozen=True, gc=False):
    """A call was requested. This comes before its tool is looked up, its arguments are parsed and policies check it."""

    call_id: str
    tool: str
    path: tuple[str, ...]
    at: float
    """Seconds since the run began or was last resumed."""
    run_context: RunContext


class ToolResumed(Fact, frozen=True, gc=False):
    """A call that started in an earlier leg of its run continues in this one. Its start is not published again.

    An act of the call, an inner call or a question of it may come from the record; it continues after them.
    """

    call_id: str
    tool: str
    path: tuple[str, ...]
    at: float
    """Seconds since the run was last resumed."""
    run_context: RunContext


class ToolInvoked(Fact, frozen=True):
    """A call has ended with this result."""

    call_id: str
    tool: str
    path: tuple[str, ...]
    status: CallStatus
    result: ToolResult[Any]
    params: Any
    """The parsed arguments; None if the tool takes none, or if they were not parsed."""
    seconds: float
    attempts: int
    stale: tuple[str, ...]
    """Slices and paths that the call had read and that something else changed before the call committed."""
    error: BaseException | None
    """The exception, for telemetry; None if there was none.

    Listeners see its traceback. Once they have returned, the traceback is removed, so that a session does not hold on to
    calls that are over. If the exception also ends the run, this is a copy without a traceback.
    """
    run_context: RunContext
    policy: str = ""
    """The name of the policy that denied the call, or that was the first to ask for its approval; "" if none did."""


class ResultShortened(Fact, frozen=True):
    """A result was longer than its limit, so the model was shown an excerpt of it, and can read on."""

    call_id: str
    tool: str
    whole: Whole
    run_context: RunContext


def shortened_by(end: ToolInvoked, result: ToolResult[Any]) -> ResultShortened | None:
    """Return the fact that the result of a call was shortened; None if it was not. `result` is the one that the model was shown."""
    whole = whole_of(result)
    return None if whole is None else ResultShortened(end.call_id, end.tool, whole, end.run_context)


class ToolRolledBack(Fact, frozen=True):
    """An attempt at a call was rolled back."""

    call_id: str
    tool: str
    reason: str
    compensated: tuple[str, ...]
    not_undone: tuple[str, ...]
    """Effects that were not undone, such as irreversible calls, and effects whose compensation failed."""
    run_context: RunContext
    seconds: float = 0.0
    """How long it took, with the compensations."""


class Progress(Fact, frozen=True):
    """A call reported progress."""

    call_id: str
    tool: str
    message: str
    done: float | None
    total: float | None
    run_context: RunContext


class Emitted(Fact, frozen=True):
    """A tool published its own `event` with `context.emit`. Subscribers to the event's own type receive the event itself.

    An act of a handoff publishes under the id and the name of the handoff's call.
    """

    call_id: str
    tool: str
    event: object
    run_context: RunContext


class ApprovalRequested(Fact, frozen=True):
    """Approval was requested, for a call or by its handler. A person is asked, unless the request can be decided without one."""

    question_id: str
    call_id: str
    tool: str
    asked_by: tuple[str, ...]
    reason: str
    run_context: RunContext
    policy: str = ""
    """The name of the policy that was the first to ask for the approval of the call; "" if its handler requested it."""


class ApprovalDecided(Fact, frozen=True):
    """A request for approval was decided."""

    question_id: str
    call_id: str
    tool: str
    approval: Approval
    run_context: RunContext
    how: DecidedBy = "asked"
    remembered: str | None = None
    """The id of the remembered decision that decided the request; None if it was decided in another way."""
    seconds: float = 0.0
    """How long the request was open, also while the run was parked."""


class ApprovalRemembered(Fact, frozen=True):
    """A decision was remembered for later requests. It applies until it is revoked, in this session and, if it denies, in its forks."""

    id: str
    """The id for revoking the decision. It is made from the question's id and digest."""
    tool: str
    """The tool that the question was about."""
    covers: Literal["exact", "scope"]
    scope: str
    """A description of what the decision covers: an offered scope, or a summary of the request."""
    approved: bool
    reason: str
    by: str
    at: datetime
    asked_by: tuple[str, ...]
    """The path of calls that led to the request."""
    key: str
    """The key of the requests that the decision covers. It was computed for the session in which the decision was made, and its principal."""
    run_context: RunContext


class ApprovalRevoked(Fact, frozen=True):
    """A remembered decision was revoked. Runs do not revoke decisions, so the event has no run context."""

    id: str
    tool: str
    covers: Literal["exact", "scope"]
    by: str
    at: datetime


class QuestionAsked(Fact, frozen=True):
    """A call has asked a question and waits for the answer."""

    question_id: str
    call_id: str
    kind: str
    asked_by: Sequence[str]
    run_context: RunContext


class QuestionAnswered(Fact, frozen=True):
    """A question was closed: answered, declined, cancelled or timed out."""

    question_id: str
    call_id: str
    outcome: str
    by: str
    run_context: RunContext
    seconds: float = 0.0
    """How long the question was open, also while the run was parked."""


class HandoffParked(Fact, frozen=True):
    """A handoff now waits for its answer. The event does not contain the handoff's private data."""

    call_id: str
    tool: str
    path: tuple[str, ...]
    public: Any
    """The public data as plain JSON, with its secrets masked."""
    run_context: RunContext


class HandoffAnswered(Fact, frozen=True):
    """A handoff got its answer, from a person, a model, the `client` act itself or the caller of `finish`."""

    call_id: str
    tool: str
    path: tuple[str, ...]
    answer: Any
    """The answer as plain JSON, with its secrets masked."""
    run_context: RunContext


# --- a run and its model -----------------------------------------------------------------------


class PromptRendered(Fact, frozen=True):
    """A run has begun or was resumed, and its prompt has been rendered."""

    prompt: str
    text: str
    tools: tuple[str, ...]
    run_context: RunContext
    model: str = ""
    earlier: LegEnd = ""
    """How the run's earlier leg ended; "" if this is its first."""


class MessageAdded(Fact, frozen=True):
    """A message was added to a conversation. A session's conversations are kept as these events."""

    conversation: str
    message: Message
    run_id: str


class SectionOpened(Fact, frozen=True):
    """A section that was shown as a summary will be shown in full from now on."""

    conversation: str
    path: str
    run_id: str


class ConversationCompacted(Fact, frozen=True):
    """From now on, less of a conversation is sent to the model, because it nearly fills the model's window. Nothing of it is lost."""

    conversation: str
    compaction: Compaction
    run_id: str


class MessageQueued(Fact, frozen=True):
    """A message that was sent to the run while it works was accepted, edited, withdrawn, or told to its model, as its `state` says."""

    message: QueuedMessage
    run_context: RunContext


class BackgroundStarted(Fact, frozen=True):
    """A call has committed that begins a background run."""

    background_id: str
    """The id of the background run."""
    agent: str
    """The name of its prompt."""
    message: str
    """What it was asked to do."""
    call_id: str
    run_context: RunContext


class BackgroundEnded(Fact, frozen=True):
    """The model was told that a background run has ended."""

    end: QueuedMessage
    run_context: RunContext


class ToolWithheld(Fact, frozen=True):
    """A tool that the model's provider runs itself is not offered to the model, because it is not allowed.

    Either a policy denies it, or the run is inside a call whose effect does not allow the tool's. This is published once,
    and again if the reason changes or the tool was offered in between.
    """

    tool: str
    reason: str
    run_context: RunContext


class ModelRequested(Fact, frozen=True):
    """A request is sent to a model."""

    model: str
    attempt: int
    messages: int
    run_context: RunContext
    request: ModelRequest | None = None
    """The request, with its secrets masked."""
    compacted: bool = False
    """Whether the conversation was compacted, so that only a part of it is sent."""


class ModelResponded(Fact, frozen=True):
    """A model has answered a request."""

    model: str
    stop_reason: StopReason
    usage: Usage
    cost: Decimal | None
    """The cost in US dollars; None if the price is unknown."""
    seconds: float
    attempt: int
    run_context: RunContext


class ModelFailed(Fact, frozen=True):
    """A request to a model failed, or the model refused to answer and another model is asked.

    What the model had streamed until then is discarded.
    """

    model: str
    attempt: int
    error: str
    retry_in: float | None
    """Seconds until the same model is asked again; None if it is not. If that would be past the deadline, the run fails instead."""
    run_context: RunContext
    next_model: str = ""
    """The model that is asked instead; "" if the same model is asked again, or none."""
    seconds: float = 0.0
    """Seconds until the request failed."""


class TextDelta(Fact, frozen=True, gc=False):
    """A chunk of the answer's text arrived in a streamed run."""

    text: str
    run_context: RunContext


class AttachmentDelta(Fact, frozen=True):
    """A model has made a picture, a sound or another file as a part of its answer. Published only when streaming."""

    attachment: Attachment
    run_context: RunContext


class ThoughtDelta(Fact, frozen=True, gc=False):
    """A chunk of the model's thinking arrived in a streamed run."""

    text: str
    run_context: RunContext


class CallDelta(Fact, frozen=True, gc=False):
    """A chunk of a call that the model is writing arrived in a streamed run. The first chunk has the `name`."""

    index: int
    call_id: str
    name: str
    arguments: str
    run_context: RunContext


class PartialOutput(Fact, frozen=True):
    """More of the typed answer of a streamed run has arrived. Published only if `output=` is an object or a list, without secrets.

    Every answer begins with an empty `value`: so does one that is corrected, or that is requested again after a failure.
    """

    value: Any
    """What is complete: a list of the complete items, a dict of the complete fields, or the whole answer.

    Each part has been validated and has its type. A list or an object in a field is there while it is incomplete, in the same
    form. The value is not changed later.
    """
    run_context: RunContext


class SpendWarned(Fact, frozen=True):
    """Much of a cap on a day's spending is spent. This is published once for each window, by the run that noticed it."""

    text: str
    """What was spent, by whom, and what the cap is."""
    window: str
    """The id of the window in the journal."""
    run_context: RunContext


class Advised(Fact, frozen=True):
    """A feedback provider gave the model advice, a completion checker told it what is missing, or one of them raised."""

    kind: Literal["feedback", "completion"]
    by: str
    text: str
    failed: bool
    run_context: RunContext


class PromptExecuted(Fact, frozen=True):
    """A run has ended."""

    prompt: str
    stop_reason: str
    """Why the run ended; `failed: ...` or `cancelled` if there is no response."""
    usage: Usage
    cost: Decimal | None
    run_context: RunContext


# --- details ---------------------------------------------------------------------------------------------


class Detail(Fact, frozen=True):
    """Base class of the facts for telemetry. They are not logged, and only those receive them who subscribe to their own type."""


class CallAccepted(Detail, frozen=True):
    """The arguments of a call were parsed. They may contain secrets: `definition.mask(arguments)` masks them."""

    call_id: str
    definition: Tool[Any, Any]
    arguments: Any
    params: Any
    run_context: RunContext


class SecretGiven(Detail, frozen=True):
    """A person gave a secret to a call, so what the call says may contain it."""

    call_id: str
    answer: Any
    """The answer as plain JSON, with the secret in clear."""
    masked: Any
    """The same, with the secret masked."""
    run_context: RunContext


class CallCommitted(Detail, frozen=True):
    """A call that has succeeded was committed."""

    call_id: str
    tool: str
    seconds: float
    run_context: RunContext


class RemoteRequested(Detail, frozen=True):
    """A call sends a request to an MCP server."""

    call_id: str
    method: str
    protocol: str
    """The version of MCP that the connection uses."""
    address: str
    """The server's address, if it is reached over a network; otherwise ""."""
    run_context: RunContext


class SkillUsed(Detail, frozen=True):
    """A call has opened a skill, or uses one of its files."""

    call_id: str
    skill: str
    description: str
    resource: str
    """The path of the file in the skill's folder; "" if the skill itself was opened."""
    run_context: RunContext


class CommandRun(Detail, frozen=True):
    """A call has run a command."""

    call_id: str
    program: str
    exit_code: int
    run_context: RunContext


class AnswerArrived(Detail, frozen=True):
    """A model's answer has arrived completely, before `ModelResponded`. Its secrets are masked."""

    message: AssistantMessage
    first_part: float | None
    """Seconds until its first part arrived; None if it was not streamed."""
    run_context: RunContext


class CompactionStarted(Detail, frozen=True):
    """A conversation is about to be compacted. If less of it is sent from then on, `ConversationCompacted` follows."""

    run_context: RunContext


class CompactionEnded(Detail, frozen=True):
    """A compaction has ended."""

    by: str
    """How the conversation was compacted, such as "trim" or "summary"; "" if it was not."""
    run_context: RunContext


class CallUndone(Detail, frozen=True):
    """A person has undone a committed call, after its run or while that was parked. It is published to no session."""

    call_id: str
    tool: str
    run_id: str
    traceparent: str
    """What the call's run was started from; "" if nothing was given."""
    stands: tuple[str, ...]
    """The call's external effects, which were not undone."""
    seconds: float


class RunClaimed(Detail, frozen=True):
    """A worker begins a run that was submitted. It is published to no session."""

    run_id: str
    seconds: float
    """How long the run was due before."""


class PromptParked(Detail, frozen=True):
    """A leg of a run ends because the run is parked. It is published for nested runs too, innermost first."""

    prompt: str
    run_context: RunContext
