"""`Answer`: one answer from a model, requested within the budget and assembled from its parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import msgspec
import pydantic_core

from handrail.adapter.mask import StreamMask
from handrail.context import (
    PROVIDER_REQUEST_ID,
    RATE_LIMIT,
    RETRIES,
    Extras,
    RateLimit,
    RequestView,
    ResponseAccumulator,
)
from handrail.errors import ModelError
from handrail.events import (
    CallDelta,
    ModelRequested,
    ModelResponded,
    TextDelta,
    ThoughtDelta,
)
from handrail.limits import BudgetTracker, Reservation
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
    ThinkingPart,
    ToolMessage,
    Usage,
    UsagePart,
    UserMessage,
)
from handrail.models import ModelAnswerBroken
from handrail.models.blocks import outside_lines
from handrail.models.grammar import is_object
from handrail.models.prices import most_of
from handrail.models.provider_tools import check_provider_tools
from handrail.schema.read_only import read_only
from handrail.tools.result import clean_text

if TYPE_CHECKING:
    from handrail.adapter.mask import SecretMask
    from handrail.adapter.run import Run

_NONE = Usage(requests=1)
_WHY_CUT = {
    "length": "The answer reached its length limit before this call was complete, so {} was not run. Make fewer calls "
    "in one answer, or split long arguments over several calls.",
    "refused": "The provider stopped the answer before this call was complete, so {} was not run.",
}
"""Messages to the model about a call that was cut off, by the reason why the answer stopped."""


class Answer:
    """A model's answer, assembled as its parts arrive.

    It also provides `request`, `response_accumulator` and `extras` to the calls in the answer. Each is created
    when a tool first uses it.
    """

    __slots__ = (
        "_accumulator",
        "_extras",
        "_masking",
        "_messages",
        "_pieces",
        "_request",
        "_texts",
        "_thoughts",
        "_view",
        "attempt",
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
        self._pieces: dict[int, list[CallPart]] = {}
        self.usage = _NONE
        self.stop: StopPart | None = None
        self.sent: SentPart | None = None
        self._view: RequestView | None = None
        self._accumulator: ResponseAccumulator | None = None
        self._extras: Extras | None = None

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
        else:
            self.sent = part

    @property
    def counted(self) -> bool:
        """Whether the provider has reported the usage of the request."""
        return self.usage is not _NONE

    @property
    def begun(self) -> bool:
        """Whether the request has been sent, as far as is known. If so, the provider may charge for it."""
        return bool(self.sent or self._texts or self._pieces or self._thoughts)

    @property
    def is_paused(self) -> bool:
        """Whether the provider interrupted the answer, and will continue it in its next answer."""
        return self.stop is not None and self.stop.reason == "paused"

    @property
    def text(self) -> str:
        texts = self._texts
        return clean_text(texts[0] if len(texts) == 1 else "".join(texts)) if texts else ""

    @property
    def thought(self) -> str:
        """The model's thinking, as far as its provider shows it."""
        return clean_text("".join(self._thoughts)) if self._thoughts else ""

    def calls(self) -> tuple[CallAsked, ...]:
        """Return the calls so far, in the order in which they began."""
        return tuple([_whole(pieces) for pieces in self._pieces.values()])

    def cut_off(self, calls: tuple[CallAsked, ...]) -> dict[str, str]:
        """Return the ids of the calls that were, or may have been, cut off with the answer, each with a message for the model.

        The last call of an answer that was cut off may look complete although it is not. This depends only on the
        recorded answer, so that a resumed run decides the same way.
        """
        why = None if self.stop is None else _WHY_CUT.get(self.stop.reason)
        if why is None or not calls:
            return {}
        cut = [call for call in calls[:-1] if not is_object(call.arguments)]
        return {call.id: why.format(call.name) for call in (*cut, calls[-1])}

    def message(self, calls: tuple[CallAsked, ...]) -> AssistantMessage:
        """Return the answer as a message with these calls. Their ids must be unique in the session."""
        kept, thought = None if self.stop is None else self.stop.kept, self.thought if self._thoughts else ""
        return AssistantMessage(self.text, calls, kept, thought)

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
            self._accumulator = ResponseAccumulator(self.text, tuple(call.id for call in self.calls()))
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


class FailedRequest(msgspec.Struct, frozen=True):
    """An earlier request for an answer, and why it failed or was not used."""

    model: str
    error: str
    usage: Usage | None = None
    """The tokens that the request used, as far as its provider reported them; None if it reported none."""
    cost: Decimal | None = None


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
    """The cost in US dollars; None if unknown. It is charged again if the answer is inside a call that is replayed."""
    failed: tuple[FailedRequest, ...] = ()
    """The earlier requests for this answer, in order: those that were retried, and those to other models of a choice."""
    thought: str = ""


def write_answer(
    answer: Answer,
    seconds: float,
    cost: Decimal | None,
    masking: SecretMask | None = None,
    failed: tuple[FailedRequest, ...] = (),
) -> RecordedAnswer:
    """Return the record of a complete answer. The request is left out, because the conversation contains it."""
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
    )


def read_answer(recorded: RecordedAnswer, request: ModelRequest, masking: SecretMask | None = None) -> Answer:
    """Restore a recorded answer, as if it had just arrived."""
    answer = Answer(recorded.model, request, recorded.attempt, masking)
    if recorded.sent is not None:
        answer.take(recorded.sent)
    if recorded.thought:
        answer.take(ThinkingPart(recorded.thought))
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
            said.append({"role": "assistant", "text": message.text, "calls": calls})
    return {
        "system": request.system,
        "messages": said,
        "tools": [offered.tool.name for offered in request.tools],
        "provider_tools": [tool.name for tool in request.provider_tools],
    }


# --- asking the model ---

OUTPUT_BOUND = 4096
"""Maximum number of tokens in an answer if tokens or money are limited and `max_tokens` is not set."""
_LEAST_OUTPUT = 16
_MOST_SAID = 200
"""Maximum number of characters of an error that is recorded."""
_PER_MESSAGE = 16
"""Upper bound for the tokens that a provider adds to each message."""


async def ask_once(
    run: Run, attempt: int, failed: list[FailedRequest]
) -> tuple[Answer, float, Decimal | None]:
    """Ask the run's model once, and return its complete answer, the seconds it took, and its cost; None if that is unknown.

    A budget is charged for the request even if it fails, and so is the run, with the tokens that the provider
    had reported by then. Raises `ModelError`, after adding the request to `failed`, or `BudgetExceededError`.
    """
    frame, model = run.frame, run.model
    request, reserved = (run.request(), None) if frame.budget is None else _reserve(run, frame.budget)
    masking = run.masking
    answer = Answer(model.name, request, attempt, masking)
    throttle = run.throttle
    try:
        if throttle is not None:
            await throttle.enter()
        try:
            if frame.told.get(ModelRequested, True):
                frame.publish(ModelRequested(model.name, attempt, len(request.messages), frame.run_context))
            began = frame.monotonic()
            check_provider_tools(model.name, request, model.traits.provider_tools)
            parts = model.stream(request)
            try:
                if request.stream:
                    writing = None if masking is None else StreamMask(masking)
                    async for part in parts:
                        answer.take(part)
                        _publish_delta(run, part, writing)
                else:
                    async for part in parts:
                        answer.take(part)
            except BaseException:
                await parts.aclose()
                raise
            if answer.stop is None:
                raise ModelAnswerBroken(model.name, "the answer ended before it was complete")
            if answer.stop.kept is not None:
                _tell_outside(run, answer, request.stream)
        finally:
            if throttle is not None:
                throttle.leave()
        seconds = frame.monotonic() - began
        cost = charge(run, answer, reserved, seconds)
        reserved = None
        return answer, seconds, cost
    except BaseException as error:
        usage, cost = _charge_cut(run, answer, reserved)
        if isinstance(error, ModelError):
            failed.append(FailedRequest(model.name, error.problem[:_MOST_SAID], usage, cost))
        raise


def _charge_cut(
    run: Run, answer: Answer, reserved: Reservation | None
) -> tuple[Usage, Decimal | None] | tuple[None, None]:
    """Charge a request whose answer was cut off or never came. Returns its reported usage and cost, or None for both."""
    if answer.counted:
        usage, cost = answer.usage, run.tariff(answer.usage)
        run.frame.costs.models.add(usage, cost)
        if reserved is not None:
            reserved.settle(requests=1, tokens=usage.tokens, money=cost)
        return usage, cost
    if reserved is not None and answer.begun:
        reserved.settle(requests=1)  # the usage is unknown, so the reserved amount counts as spent
    elif reserved is not None:
        reserved.settle(requests=1, tokens=0, money=0)
    return None, None


def _tell_outside(run: Run, answer: Answer, streaming: bool) -> None:
    """Add a line for each call of the provider's own tools to the thought, which people are shown."""
    kept = None if answer.stop is None else answer.stop.kept
    lines = outside_lines(kept)
    if lines:
        before = "\n\n" if answer.thought else ""
        part = ThinkingPart(before + "\n".join(lines) + "\n")
        answer.take(part)
        if streaming:
            _publish_delta(run, part, None)


def charge(
    run: Run,
    answer: Answer,
    reserved: Reservation | None,
    seconds: float,
    recorded: RecordedAnswer | None = None,
) -> Decimal | None:
    """Charge the answer to this run and every run above, and return its cost; None if that is unknown.

    A recorded answer is charged again. Usage that the provider does not report is unknown, not zero: the reserved
    amount counts as spent.
    """
    usage, frame = answer.usage, run.frame
    if recorded is not None and recorded.model != run.model.name:
        cost = recorded.cost  # a different model of the run's choice answered
    else:
        cost = run.tariff(usage) if answer.counted else run.uncounted_cost()
    frame.costs.models.add(usage, cost)
    if answer.counted:
        run.counted = (len(run.conversation.messages) + 1, usage.tokens)  # the answer itself is counted
    if reserved is not None:
        reserved.settle(requests=1, **({"tokens": usage.tokens, "money": cost} if answer.counted else {}))
    stop: Any = answer.stop
    tell = frame.session.record if recorded is None else frame.session.keep
    tell(ModelResponded(answer.model, stop.reason, usage, cost, seconds, answer.attempt, frame.run_context))
    return cost


def _reserve(run: Run, budget: BudgetTracker) -> tuple[ModelRequest, Reservation]:
    """Reserve an upper bound for the request's tokens and cost. If little of the budget remains, shorten the answer.

    Returns the request and the reservation, or raises `BudgetExceededError`. A message counts as many tokens as it
    has bytes, because no tokenizer produces more than that. Messages that the provider counted in an earlier turn
    are not estimated again.
    """
    left = budget.remaining()
    known, tokens = run.counted
    sent = tokens + sum(_size(message) for message in run.conversation.messages.since(known))
    if not known:
        sent += len(run.system.encode()) + run.offered_size()
    # An estimate until the provider reports the actual count.
    run.counted = (len(run.conversation.messages), sent)
    room = run.max_tokens or OUTPUT_BOUND
    if "tokens" in left:
        room = max(min(room, int(left["tokens"]) - sent), _LEAST_OUTPUT)
    while "money" in left and room > _LEAST_OUTPUT and (most_of(run.tariff, sent, room) or 0) > left["money"]:
        room //= 2
    reserved = budget.reserve(requests=1, tokens=sent + room, money=most_of(run.tariff, sent, room))
    return run.request(max_tokens=room if {"tokens", "money"} & left.keys() else run.max_tokens), reserved


def _size(message: Message) -> int:
    if isinstance(message, AssistantMessage):
        calls = sum(len(call.name.encode()) + len(call.arguments.encode()) for call in message.calls)
        return len(message.text.encode()) + calls + _PER_MESSAGE * (1 + len(message.calls))
    if isinstance(message, ToolMessage):
        return sum(
            len(result.text.encode()) + _PER_MESSAGE + sum(each.token_bound for each in result.attachments)
            for result in message.results
        )
    return len(message.text.encode()) + _PER_MESSAGE + sum(each.token_bound for each in message.attachments)


def _publish_delta(run: Run, part: ModelPart, writing: StreamMask | None) -> None:
    frame = run.frame
    if isinstance(part, TextPart):
        run.has_shown = True
        if run.on_text is not None:
            run.on_text(part.text)
        frame.publish(TextDelta(part.text, frame.run_context))
    elif isinstance(part, CallPart):
        if writing is not None:
            part = writing.take(part)
            if not (part.id or part.name or part.arguments):
                return
        run.has_shown = True
        frame.publish(CallDelta(part.index, part.id, part.name, part.arguments, frame.run_context))
    elif isinstance(part, ThinkingPart):
        run.has_shown = True
        frame.publish(ThoughtDelta(part.text, frame.run_context))
    elif isinstance(part, StopPart) and writing is not None:
        for rest in writing.rest():
            frame.publish(CallDelta(rest.index, "", "", rest.arguments, frame.run_context))
