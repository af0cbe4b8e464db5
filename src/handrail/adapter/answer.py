"""One answer of a model, put together from its parts; and what a tool may see of it meanwhile."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import msgspec
import pydantic_core

from handrail.context import (
    PROVIDER_REQUEST_ID,
    RATE_LIMIT,
    RETRIES,
    Extras,
    RateLimit,
    RequestView,
    ResponseAccumulator,
)
from handrail.messages import (
    AssistantMessage,
    CallAsked,
    CallPart,
    Message,
    ModelPart,
    ModelRequest,
    SentPart,
    StopPart,
    TextPart,
    ToolMessage,
    Usage,
    UsagePart,
    UserMessage,
)

if TYPE_CHECKING:
    from handrail.adapter.masking import Masking

_NONE = Usage(requests=1)


class Answer:
    """Parts as they come in, and what they amount to.

    It is also the provider's side of the calls it leads to (`request`, `response_accumulator` and
    `extras` of their contexts), made only when a tool asks.
    """

    __slots__ = (
        "_accumulator",
        "_extras",
        "_masking",
        "_messages",
        "_pieces",
        "_request",
        "_texts",
        "_view",
        "attempt",
        "model",
        "sent",
        "stop",
        "usage",
    )

    def __init__(
        self, model: str, request: ModelRequest, attempt: int, masking: Masking | None = None
    ) -> None:
        self.model = model
        self._masking = masking
        self.attempt = attempt
        self._request = request
        self._messages = len(request.messages)
        self._texts: list[str] = []
        self._pieces: dict[int, list[CallPart]] = {}
        self.usage = _NONE
        self.stop: StopPart | None = None
        self.sent: SentPart | None = None
        self._view: RequestView | None = None
        self._accumulator: ResponseAccumulator | None = None
        self._extras: Extras | None = None

    def take(self, part: ModelPart) -> None:
        """One more part."""
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
        elif isinstance(part, SentPart):
            self.sent = part

    @property
    def counted(self) -> bool:
        """Has the provider said what the request used?"""
        return self.usage is not _NONE

    @property
    def begun(self) -> bool:
        """Has anything of it arrived? Then the provider has been at work, and wants to be paid."""
        return bool(self.sent or self._texts or self._pieces)

    @property
    def text(self) -> str:
        texts = self._texts
        return texts[0] if len(texts) == 1 else "".join(texts)

    def calls(self) -> tuple[CallAsked, ...]:
        """The calls as they stand, in the order they were begun."""
        return tuple([_whole(pieces) for pieces in self._pieces.values()])

    def message(self, calls: tuple[CallAsked, ...]) -> AssistantMessage:
        """The answer as a message, with its calls under the ids they go by here."""
        return AssistantMessage(self.text, calls, None if self.stop is None else self.stop.kept)

    # What a tool sees.

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
            self._view = RequestView(self.model, body, {} if sent is None else sent.headers)
        return self._view

    @property
    def accumulator(self) -> ResponseAccumulator:
        if self._accumulator is None:
            self._accumulator = ResponseAccumulator(self.text, tuple(call.id for call in self.calls()))
        return self._accumulator

    @property
    def extras(self) -> Extras:
        if self._extras is None:
            values: dict[str, Any] = {RETRIES.name: self.attempt - 1}
            sent = self.sent
            if sent is not None:
                if sent.request_id:
                    values[PROVIDER_REQUEST_ID.name] = sent.request_id
                if sent.requests_left is not None or sent.tokens_left is not None:
                    values[RATE_LIMIT.name] = RateLimit(sent.requests_left, sent.tokens_left, sent.resets_at)
            self._extras = Extras(values)
        return self._extras


class RecordedAnswer(msgspec.Struct, frozen=True):
    """An answer as a journal keeps it: everything the run, and its bill, needs of it."""

    model: str
    attempt: int
    text: str
    calls: tuple[CallAsked, ...]
    stop: StopPart
    usage: Usage | None
    """None where the provider did not say."""
    seconds: float
    sent: SentPart | None = None
    cost: Decimal | None = None
    """US dollars; None where it is unknown. What is nested in a finished call is billed again by it."""


def write_answer(
    answer: Answer, seconds: float, cost: Decimal | None, masking: Masking | None = None
) -> RecordedAnswer:
    """What is kept of an answer that is whole. What was sent is not: the conversation has it."""
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
    return RecordedAnswer(answer.model, answer.attempt, answer.text, calls, stop, usage, seconds, sent, cost)


def read_answer(recorded: RecordedAnswer, request: ModelRequest, masking: Masking | None = None) -> Answer:
    """The answer that was recorded, as if it had just arrived."""
    answer = Answer(recorded.model, request, recorded.attempt, masking)
    if recorded.sent is not None:
        answer.take(recorded.sent)
    if recorded.text:
        answer.take(TextPart(recorded.text))
    for index, call in enumerate(recorded.calls):
        answer.take(CallPart(index, call.id, call.name, call.arguments))
    if recorded.usage is not None:
        answer.take(UsagePart(recorded.usage))
    answer.take(recorded.stop)
    return answer


def _whole(pieces: list[CallPart]) -> CallAsked:
    first = pieces[0]
    if len(pieces) == 1:
        return CallAsked(first.id, first.name, first.arguments)
    return CallAsked(
        next((piece.id for piece in pieces if piece.id), ""),
        "".join(piece.name for piece in pieces),
        "".join(piece.arguments for piece in pieces),
    )


def _plain(request: ModelRequest, messages: Sequence[Message]) -> Mapping[str, Any]:
    """A request that went over no wire, as plain data."""
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
            said.append({"role": "assistant", "text": message.text, "calls": calls})
    return {
        "system": request.system,
        "messages": said,
        "tools": [offered.tool.name for offered in request.tools],
    }
