"""`ModelAnswer`: one answer from a model, assembled from its parts, and its record."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from decimal import Decimal
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
import pydantic_core

from handrail.content import Attachment
from handrail.context import (
    PROVIDER_REQUEST_ID,
    RATE_LIMIT,
    RETRIES,
    Extras,
    RateLimit,
    RequestView,
    ResponseAccumulator,
)
from handrail.journal.records import Entry
from handrail.messages import (
    AssistantMessage,
    AttachmentPart,
    CallAsked,
    CallPart,
    Compaction,
    Message,
    ModelPart,
    ModelRequest,
    SentPart,
    StopPart,
    TextPart,
    ThinkingPart,
    ToolMessage,
    Usage,
    UsagePart,
    UserMessage,
)
from handrail.models.grammar import is_object
from handrail.run.limits import Charge, Charged
from handrail.schema.immutability import read_only
from handrail.tools import ProviderTool, Tool
from handrail.tools.result import clean_text

if TYPE_CHECKING:
    from handrail.run.conversation import SecretMask

_NONE = Usage(requests=1)
_WHY_CUT = {
    "length": "The answer reached its length limit before this call was complete, so {} was not run. Make fewer calls "
    "in one answer, or split long arguments over several calls.",
    "refused": "The provider stopped the answer before this call was complete, so {} was not run.",
}
"""Messages to the model about a call that was cut off, by the reason why the answer stopped."""


class ModelAnswer:
    """A model's answer, assembled as its parts arrive.

    It also provides `request`, `response_accumulator` and `extras` to the calls in the answer. Each is created
    when a tool first uses it.
    """

    __slots__ = (
        "_accumulator",
        "_attached",
        "_extras",
        "_ids",
        "_masking",
        "_messages",
        "_pieces",
        "_request",
        "_texts",
        "_thoughts",
        "_view",
        "attempt",
        "charged",
        "interrupted",
        "model",
        "sent",
        "stop",
        "usage",
    )

    def __init__(
        self, model: str, request: ModelRequest, attempt: int, masking: SecretMask | None = None
    ) -> None:
        self.model = model
        self._masking = masking
        self.attempt = attempt
        self._request = request
        self._messages = len(request.messages)
        self._texts: list[str] = []
        self._thoughts: list[str] = []
        self._attached: list[tuple[int, Attachment]] = []
        """Each attachment, with the number of pieces of text before it."""
        self._pieces: dict[int, list[CallPart]] = {}
        self.usage = _NONE
        self.charged: Charged = {}
        """The amounts that the budget was charged, if the provider did not report the usage; otherwise empty."""
        self.interrupted = False
        """Whether the request was stopped while its answer was awaited."""
        self.stop: StopPart | None = None
        self.sent: SentPart | None = None
        self._view: RequestView | None = None
        self._accumulator: ResponseAccumulator | None = None
        self._extras: Extras | None = None
        self._ids: tuple[str, ...] = ()
        """The ids of the calls in the session, since a provider may omit or repeat ids."""

    def take(self, part: ModelPart) -> None:
        """Add a part of the answer."""
        if isinstance(part, TextPart):
            self._texts.append(part.text)
        elif isinstance(part, CallPart):
            pieces = self._pieces.get(part.index)
            if pieces is None:
                self._pieces[part.index] = [part]
            else:
                pieces.append(part)
        elif isinstance(part, UsagePart):
            self.usage = part.usage
        elif isinstance(part, StopPart):
            self.stop = part
        elif isinstance(part, ThinkingPart):
            self._thoughts.append(part.text)
        elif isinstance(part, AttachmentPart):
            self._attached.append((len(self._texts), part.attachment))
        else:
            self.sent = part

    @property
    def counted(self) -> bool:
        """Whether the provider has reported the usage of the request."""
        return self.usage is not _NONE

    @property
    def begun(self) -> bool:
        """Whether the request has been sent, as far as is known. If so, the provider may charge for it."""
        return self.interrupted or bool(
            self.sent or self._texts or self._pieces or self._thoughts or self._attached
        )

    @property
    def is_paused(self) -> bool:
        """Whether the provider paused the answer, and will continue it when asked again."""
        return self.stop is not None and self.stop.reason == "paused"

    @property
    def is_interrupted(self) -> bool:
        """Whether the answer was stopped because somebody said something."""
        return self.stop is not None and self.stop.reason == "interrupted"

    def cut(self) -> None:
        """End the answer here. Its calls and thoughts are dropped, because they are not complete."""
        self._pieces.clear()
        self._thoughts.clear()
        self.stop = StopPart("interrupted")
        if not self.interrupted:  # it was not asked for yet
            self.usage = Usage()

    @property
    def text(self) -> str:
        texts = self._texts
        return clean_text(texts[0] if len(texts) == 1 else "".join(texts)) if texts else ""

    @property
    def thought(self) -> str:
        """The model's thinking, as far as its provider shows it."""
        return clean_text("".join(self._thoughts)) if self._thoughts else ""

    @property
    def attachments(self) -> tuple[Attachment, ...]:
        return tuple([attachment for _, attachment in self._attached])

    @property
    def offsets(self) -> tuple[int, ...]:
        """For each attachment, the number of characters of the text before it."""
        return tuple([len(clean_text("".join(self._texts[:at]))) for at, _ in self._attached])

    def calls(self) -> tuple[CallAsked, ...]:
        """Return the calls so far, in the order in which they began."""
        return tuple([_whole(pieces) for pieces in self._pieces.values()])

    def cut_off(self, calls: tuple[CallAsked, ...]) -> dict[str, str]:
        """Return the ids of the calls that were, or may have been, cut off with the answer, each with a message for the model.

        The last call of an answer that was cut off may look complete although it is not. What this returns depends only on
        the recorded answer, so that a resumed run decides the same way.
        """
        why = None if self.stop is None else _WHY_CUT.get(self.stop.reason)
        if why is None or not calls:
            return {}
        cut = [call for call in calls[:-1] if not is_object(call.arguments)]
        return {call.id: why.format(call.name) for call in (*cut, calls[-1])}

    def message(self, calls: tuple[CallAsked, ...]) -> AssistantMessage:
        """Return the answer as a message with these calls. Their ids must be unique in the session, and tools see them in `accumulator`."""
        self._ids = tuple([call.id for call in calls])
        kept, thought = None if self.stop is None else self.stop.kept, self.thought if self._thoughts else ""
        if not self._attached:
            return AssistantMessage(self.text, calls, kept, thought)
        return AssistantMessage(self.text, calls, kept, thought, self.attachments, self.offsets)

    # The members that tools can see.

    @property
    def request(self) -> RequestView:
        if self._view is None:
            sent, masking = self.sent, self._masking
            messages = self._request.messages.since(0)[: self._messages]
            body: Any = (
                _plain(self._request, messages) if sent is None else pydantic_core.from_json(sent.body)
            )
            if masking is not None:
                body = masking.body(body, messages)
            headers = {} if sent is None else sent.headers
            self._view = RequestView(self.model, read_only(body), read_only(headers))
        return self._view

    @property
    def accumulator(self) -> ResponseAccumulator:
        if self._accumulator is None:
            self._accumulator = ResponseAccumulator(self.text, self._ids)
        return self._accumulator

    @property
    def extras(self) -> Extras:
        if self._extras is None:
            values: dict[str, Any] = {}
            sent = self.sent
            if sent is not None:
                values.update(sent.extras)
                if sent.request_id:
                    values[PROVIDER_REQUEST_ID.name] = sent.request_id
                if sent.requests_left is not None or sent.tokens_left is not None:
                    values[RATE_LIMIT.name] = RateLimit(sent.requests_left, sent.tokens_left, sent.resets_at)
            values[RETRIES.name] = self.attempt - 1
            self._extras = Extras(values)
        return self._extras


class FailedRequest(Charge, frozen=True):
    """An earlier request for an answer, and why it failed or was not used."""

    model: str
    error: str


class RecordedAnswer(msgspec.Struct, frozen=True):
    """A recorded answer, with everything that a resumed run needs, including its costs."""

    model: str
    attempt: int
    text: str
    calls: tuple[CallAsked, ...]
    stop: StopPart
    usage: Usage | None
    """The tokens used; None if the provider did not report them."""
    seconds: float
    sent: SentPart | None = None
    cost: Decimal | None = None
    """The cost in US dollars; None if unknown."""
    failed: tuple[FailedRequest, ...] = ()
    """The earlier requests for this answer, in order: those that were retried, and those to other models of a choice."""
    thought: str = ""
    charged: Charged = {}
    """The amounts that the budget was charged, if the provider did not report the usage; otherwise empty."""
    attachments: tuple[Attachment, ...] = ()
    """References to what the model made. The bytes are blobs of the journal."""
    offsets: tuple[int, ...] = ()
    offered: Mapping[str, str] = {}
    """The tools that were first offered in the request for this answer, by name, except in the run's first request. See `offer_of`."""

    def message(self, calls: tuple[CallAsked, ...]) -> AssistantMessage:
        """Return the answer as a message with these calls, whose ids are unique in the session."""
        return AssistantMessage(
            self.text, calls, self.stop.kept, self.thought, self.attachments, self.offsets
        )


class RecordedCompaction(msgspec.Struct, frozen=True, omit_defaults=True):
    """The record of a compaction, before the answer at its place."""

    compaction: Compaction
    spent: tuple[FailedRequest, ...] = ()
    """What the requests for summaries cost, whether or not they succeeded."""


class Unanswered(msgspec.Struct, frozen=True):
    """The requests for an answer that never came, with which a run ended."""

    at: float
    """When the first request began, in seconds since 1970."""
    seconds: float
    """The time until the last request had failed, in seconds."""
    failed: tuple[FailedRequest, ...]


class _Answered(Protocol):
    @property
    def usage(self) -> Usage | None: ...
    @property
    def cost(self) -> Decimal | None: ...
    @property
    def failed(self) -> Sequence[FailedRequest]: ...


def total(answers: Iterable[_Answered], others: Iterable[Charge] = ()) -> tuple[Usage, Decimal | None]:
    """Return the usage and cost of answers, of the earlier requests for them, and of other requests.

    The cost is None if a part of it is unknown.
    """
    requests: list[Charge] = [*others]
    for answer in answers:
        requests += [Charge(usage=answer.usage or Usage(requests=1), cost=answer.cost), *answer.failed]
    costs = [each.cost for each in requests if each.usage is not None]
    usage = sum((each.usage for each in requests if each.usage is not None), Usage())
    return usage, None if None in costs else sum((each for each in costs if each is not None), Decimal(0))


def spent_by(entries: Iterable[Entry]) -> tuple[Usage, Decimal | None]:
    """Return the usage and cost of a run's recorded answers. The cost is None if a part of it is unknown."""
    answers: list[RecordedAnswer] = []
    compactions: dict[str, RecordedCompaction] = {}
    for entry in entries:
        if entry.kind == "model answer":
            answers.append(msgspec.msgpack.decode(entry.body, type=RecordedAnswer))
        elif entry.kind == "compaction":  # the last one at a place includes what those before it have cost
            compactions[entry.key] = msgspec.msgpack.decode(entry.body, type=RecordedCompaction)
    return total(answers, (request for each in compactions.values() for request in each.spent))


def write_answer(
    answer: ModelAnswer,
    seconds: float,
    cost: Decimal | None,
    masking: SecretMask | None = None,
    failed: tuple[FailedRequest, ...] = (),
    offered: Mapping[str, str] = {},
) -> RecordedAnswer:
    """Return the record of a complete answer, masked by `masking` if given. The request's body is left out: the conversation has it."""
    assert answer.stop is not None
    calls, stop = answer.calls(), answer.stop
    if masking is not None:
        shown = masking.calls(calls)
        if shown != calls:
            stop = StopPart(stop.reason, masking.kept(stop.kept, calls, shown))
        calls = shown
    sent = answer.sent
    if sent is not None:
        sent = msgspec.structs.replace(sent, body=b"{}")
    usage = answer.usage if answer.counted else None
    return RecordedAnswer(
        answer.model,
        answer.attempt,
        answer.text,
        calls,
        stop,
        usage,
        seconds,
        sent,
        cost,
        failed,
        answer.thought,
        answer.charged,
        answer.attachments,
        answer.offsets,
        offered,
    )


def offer_of(tool: Tool[Any, Any]) -> str:
    """Return what a model is shown of a tool, besides its name, as JSON text: the description and the JSON Schema, or a provider tool's limits."""
    shown = (
        [tool.limits(), tool.options]
        if isinstance(tool, ProviderTool)
        else [tool.description, tool.json_schema]
    )
    return msgspec.json.encode(shown, order="sorted", enc_hook=dict).decode()


def read_answer(
    recorded: RecordedAnswer, request: ModelRequest, masking: SecretMask | None = None
) -> ModelAnswer:
    """Restore a recorded answer, as if it had just arrived."""
    answer = ModelAnswer(recorded.model, request, recorded.attempt, masking)
    answer.charged = recorded.charged
    if recorded.sent is not None:
        answer.take(recorded.sent)
    if recorded.thought:
        answer.take(ThinkingPart(recorded.thought))
    for part in recorded.message(()).parts:
        answer.take(TextPart(part) if isinstance(part, str) else AttachmentPart(part))
    for index, call in enumerate(recorded.calls):
        answer.take(CallPart(index, call.id, call.name, call.arguments))
    if recorded.usage is not None:
        answer.take(UsagePart(recorded.usage))
    answer.take(recorded.stop)
    return answer


def _whole(pieces: list[CallPart]) -> CallAsked:
    first = pieces[0]
    call_id, name, arguments = first.id, first.name, first.arguments
    if len(pieces) > 1:
        call_id = next((piece.id for piece in pieces if piece.id), "")
        name = "".join([piece.name for piece in pieces])
        arguments = "".join([piece.arguments for piece in pieces])
    if call_id.isascii() and name.isascii() and arguments.isascii():
        return CallAsked(call_id, name, arguments)
    return CallAsked(clean_text(call_id), clean_text(name), clean_text(arguments))


def _plain(request: ModelRequest, messages: Sequence[Message]) -> Mapping[str, Any]:
    """Return, as plain data, a request that was not sent over a network."""
    said: list[dict[str, Any]] = []
    for message in messages:
        if isinstance(message, UserMessage):
            said.append({"role": "user", "text": message.text})
        elif isinstance(message, ToolMessage):
            said += [{"role": "tool", "id": each.id, "text": each.text} for each in message.results]
        else:
            calls = [
                {"id": call.id, "name": call.name, "arguments": call.arguments} for call in message.calls
            ]
            made = [each.render() for each in message.attachments]
            said.append(
                {"role": "assistant", "text": message.text, "calls": calls}
                | ({"attachments": made} if made else {})
            )
    return {
        "system": request.system,
        "messages": said,
        "tools": [offered.tool.name for offered in request.tools],
        "provider_tools": [tool.name for tool in request.provider_tools],
    }
