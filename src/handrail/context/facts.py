"""Facts about one call and its run, as frozen values."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any, Literal

import msgspec


class Invocation(msgspec.Struct, frozen=True):
    """One call of a tool."""

    id: str
    started_at: datetime
    attempt: int
    """1 for the first attempt, 2 for the first retry."""
    idempotency_key: str
    """The same for every attempt of this call, also after a crash. Pass it to systems that accept one."""
    parent_message: str | None
    """The id of the model's message that asked for the call; None if no model did."""
    path: tuple[str, ...]
    """The names of the calls that led here, outermost first, this one last."""


class RunContext(msgspec.Struct, frozen=True):
    """The ids that tie a call's records together, all known from the start."""

    run_id: str
    request_id: str
    session_id: str
    attempt: int
    worker_id: str
    trace_id: str
    span_id: str


class RequestView(msgspec.Struct, frozen=True):
    """The request to the provider that led to this call, read-only and with secrets redacted."""

    model: str
    body: Mapping[str, Any]
    headers: Mapping[str, str]


class ResponseAccumulator(msgspec.Struct, frozen=True):
    """What the model has streamed so far in the turn that led to this call."""

    text: str
    calls: tuple[str, ...]
    """The ids of the tool calls seen so far."""


ApprovalOutcome = Literal["approved", "denied", "timed out", "cancelled", "nobody there"]


class Approval(msgspec.Struct, frozen=True):
    """The decision on a request for approval. It is true if it was approved."""

    approved: bool
    reason: str
    by: str
    outcome: ApprovalOutcome

    def __bool__(self) -> bool:
        return self.approved
