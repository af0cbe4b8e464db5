"""Facts about one call, its run and its worker, as frozen values, and the ticket with which another process runs a call's tool."""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
from collections.abc import Awaitable, Callable, Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from handrail.content import Attachment
from handrail.errors import TicketError

if TYPE_CHECKING:
    from handrail.messages import Message


class Invocation(msgspec.Struct, frozen=True):
    """Facts about one tool call."""

    id: str
    started_at: datetime
    attempt: int
    """1 for the first attempt, and one more for each retry after a transient failure."""
    idempotency_key: str
    """A key that is the same for every attempt at this call, even after a crash. Pass it to systems that accept one."""
    parent_message: str | None
    """The id of the model's message that requested the call; None if the call is not from a model's message."""
    path: tuple[str, ...]
    """The names of the tools and workers around this call, outermost first, followed by the name of the one it calls."""


class RunContext(msgspec.Struct, frozen=True):
    """The ids that tie a call's records together, and the run's attempt. All are known when the call starts."""

    run_id: str
    request_id: str
    session_id: str
    attempt: int
    """1 for the first execution of the run. It increases each time the run is resumed."""
    worker_id: str
    """The process that executes the run, as its journal names it; "local" without a journal."""
    trace_id: str
    """The trace that the run and all runs nested in it belong to. It stays the same when the run is resumed."""
    span_id: str
    """The span of this run's current leg. A nested run has its own, and so has a resumed run."""
    traceparent: str = ""
    """What the outermost run was started from, as W3C's `traceparent`; "" if nothing was given."""


class RequestView(msgspec.Struct, frozen=True):
    """The request to the provider that led to this call, read-only and with secrets redacted."""

    model: str
    body: Mapping[str, Any]
    headers: Mapping[str, str]


class ResponseAccumulator(msgspec.Struct, frozen=True):
    """The text and the tool calls of the model's answer that led to this call."""

    text: str
    calls: tuple[str, ...]
    """The ids of the answer's tool calls, as in `context.call_id`. An id that the model omitted or repeated was replaced."""


ApprovalOutcome = Literal["approved", "denied", "timed out", "cancelled", "nobody there"]


class Approval(msgspec.Struct, frozen=True):
    """The decision on a request for approval. It is truthy if the request was approved."""

    approved: bool
    reason: str
    by: str
    outcome: ApprovalOutcome

    def __bool__(self) -> bool:
        return self.approved


class RegistryView(msgspec.Struct, frozen=True):
    """The workers that a worker may call: their names and descriptions."""

    descriptions: Mapping[str, str]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.descriptions)


class WorkerMessage(msgspec.Struct, frozen=True):
    """A message that was added to a worker's conversation."""

    path: tuple[str, ...]
    """The names of the tools and workers from the worker that was started down to the one whose conversation this is."""
    message: Message

    @property
    def worker(self) -> str:
        """The name of the worker that the conversation belongs to."""
        return self.path[-1]


MessageCallback = Callable[[WorkerMessage], Awaitable[None] | None]
"""A function that is called with each message. If it is async, it is awaited, in the order of the messages."""


class WorkerFacts(msgspec.Struct, frozen=True):
    """Facts about a worker's run that other runs do not have."""

    name: str
    registry: RegistryView
    creation_defaults: Mapping[str, Any]
    attachments: tuple[Attachment, ...]
    message_callback: MessageCallback | None


_VERSION = 1
_SHORTEST_KEY = 16


class Ticket(msgspec.Struct, frozen=True, kw_only=True):
    """What another process with the same journal must know to run this call's tool. It contains nothing secret.

    If the run has a budget, the ticket's share of it is already reserved, and its holder can spend no more than that. Changes
    made under a ticket are committed by the call that issued it, once the call's handler has succeeded.
    """

    run_id: str
    """The id of the run in its journal."""
    place: str
    """The place in the run where the ticket was issued. It is the same when a resumed run enters the handler again."""
    call_id: str
    session_id: str
    tool: str
    path: tuple[str, ...]
    depth: int
    deadline: datetime | None
    budget: dict[str, float]
    capabilities: tuple[str, ...]
    effect: str
    """The call's effect. If it is transactional, the tool that runs under the ticket must not have a stronger one."""

    def seal(self, key: bytes) -> str:
        """Encode the ticket as stable, URL-safe text, signed with `key`. Raises `TicketError` if the key is too short."""
        _check_key(key)
        body = msgspec.json.encode({"v": _VERSION, **msgspec.to_builtins(self)}, order="sorted")
        return f"{_text(body)}.{_text(_signature(body, key))}"

    @staticmethod
    def open(text: str, key: bytes) -> Ticket:
        """Decode a sealed ticket.

        Raises `TicketError` if the text is not a ticket or was altered, if it was sealed with another key or by another
        version, or if the key is too short.
        """
        _check_key(key)
        encoded, dot, signature = str(text).partition(".")
        try:
            body, signed = _bytes(encoded), _bytes(signature)
        except (binascii.Error, ValueError):
            dot = ""
            body = signed = b""
        if not dot:
            raise TicketError(
                "this is not a ticket", "Pass on the text that `context.ticket()` returned, unchanged."
            )
        if not hmac.compare_digest(signed, _signature(body, key)):
            raise TicketError(
                "its signature is wrong",
                "Pass it on unchanged, and use the key with which it was sealed.",
            )
        fields = msgspec.json.decode(body)
        version = fields.pop("v", None)
        if version != _VERSION:
            raise TicketError(
                f"its version is {version}, and this process supports {_VERSION}",
                "Run both sides on the same version of Handrail.",
            )
        return msgspec.convert(fields, Ticket)


def _check_key(key: bytes) -> None:
    if len(key) < _SHORTEST_KEY:
        raise TicketError(f"the key has {len(key)} bytes", f"Use at least {_SHORTEST_KEY} random bytes.")


def _signature(body: bytes, key: bytes) -> bytes:
    return hmac.digest(key, b"handrail ticket\0" + body, hashlib.sha256)


def _text(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def _bytes(text: str) -> bytes:
    return base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
