"""`Answer`: one answer from a model, requested within deadline and budget and assembled from its parts."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import msgspec
import pydantic_core

from handrail.adapter.mask import StreamMask
from handrail.adapter.undone_calls import tell_undone
from handrail.cancellation import open_scope, shielded
from handrail.context import (
    PROVIDER_REQUEST_ID,
    RATE_LIMIT,
    RETRIES,
    Extras,
    RateLimit,
    RequestView,
    ResponseAccumulator,
)
from handrail.errors import BudgetExceededError, DeadlineExceededError, ModelError
from handrail.events import (
    CallDelta,
    ModelFailed,
    ModelRequested,
    ModelResponded,
    TextDelta,
    ThinkingDelta,
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
from handrail.models import ModelAnswerBroken, ModelKeyMissing
from handrail.models.grammar import is_object
from handrail.models.prices import most_of
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
"""What a model is told of a call that was cut off, by the reason why its answer stopped."""


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
        elif isinstance(part, SentPart):
            self.sent = part

    @property
    def counted(self) -> bool:
        """Whether the provider has reported the usage of the request."""
        return self.usage is not _NONE

    @property
    def begun(self) -> bool:
        """Whether the request has been sent, as far as is known. If so, the provider may charge for it."""
        return bool(self.sent or self._texts or self._pieces)

    @property
    def text(self) -> str:
        texts = self._texts
        return clean_text(texts[0] if len(texts) == 1 else "".join(texts)) if texts else ""

    def calls(self) -> tuple[CallAsked, ...]:
        """Return the calls so far, in the order in which they began."""
        return tuple([_whole(pieces) for pieces in self._pieces.values()])

    def cut_off(self, calls: tuple[CallAsked, ...]) -> dict[str, str]:
        """Return the calls that were or may have been cut off with the answer, by id, each with why it can't run.

        It depends on nothing but the recorded answer, so that a resumed run decides the same way. The last call of
        an answer that was cut off may look complete and not be so.
        """
        why = None if self.stop is None else _WHY_CUT.get(self.stop.reason)
        if why is None or not calls:
            return {}
        cut = [call for call in calls[:-1] if not is_object(call.arguments)]
        return {call.id: why.format(call.name) for call in (*cut, calls[-1])}

    def message(self, calls: tuple[CallAsked, ...]) -> AssistantMessage:
        """Return the answer as a message with these calls. Their ids must be unique in the session."""
        return AssistantMessage(self.text, calls, None if self.stop is None else self.stop.kept)

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


def write_answer(
    answer: Answer, seconds: float, cost: Decimal | None, masking: SecretMask | None = None
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
    return RecordedAnswer(answer.model, answer.attempt, answer.text, calls, stop, usage, seconds, sent, cost)


def read_answer(recorded: RecordedAnswer, request: ModelRequest, masking: SecretMask | None = None) -> Answer:
    """Restore a recorded answer, as if it had just arrived."""
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
    }


# --- asking the model ---

OUTPUT_BOUND = 4096
"""Maximum number of tokens in an answer if tokens or money are limited and `max_tokens` is not set."""
_LEAST_OUTPUT = 16
_PER_MESSAGE = 16
"""Upper bound for the tokens that a provider adds to each message."""


async def ask(run: Run) -> Answer:
    """Ask the model and return its complete answer. Raises `PromptEvaluationError` if there is none."""
    frame = run.frame
    if frame.parking is not None and frame.parked:
        raise asyncio.CancelledError  # the run was parked during a shielded step
    if frame.log.is_kept:
        place = run.next_place()
        await tell_undone(run, place)
        recorded = frame.log.find("model answer", place, RecordedAnswer)
        if recorded is not None:
            return _replay(run, recorded)
        run.leave_record()
    deadline = frame.deadline
    if deadline is None:
        return await _ask_until_answered(run)
    scope = open_scope()
    scope.start_deadline(deadline)
    try:
        deadline.check("the model was asked")
        return await _ask_until_answered(run)
    except asyncio.CancelledError as error:
        late = scope.explain(error, "the model had answered")
        if isinstance(late, DeadlineExceededError):
            raise run.failed(late, "deadline") from late
        raise
    except DeadlineExceededError as error:
        raise run.failed(error, "deadline") from error
    finally:
        scope.close()


def _replay(run: Run, recorded: RecordedAnswer) -> Answer:
    """Return a recorded answer without sending anything. Its usage and cost are charged again."""
    budget = run.frame.budget
    answer = read_answer(recorded, run.request(), run.masking)
    # The limits are not checked again, because the answer was within them when it was requested.
    reserved = None if budget is None else budget.reserve()
    _charge(run, answer, reserved, recorded.seconds, again=True)
    return answer


async def _ask_until_answered(run: Run) -> Answer:
    attempt = 0
    while True:
        attempt += 1
        try:
            return await _ask_once(run, attempt)
        except BudgetExceededError as error:
            raise run.failed(error, "budget") from error
        except ModelError as error:
            wait = run.retry.wait_after(attempt, error)
            run.frame.session.record(
                ModelFailed(run.model.name, attempt, str(error), wait, run.frame.run_context)
            )
            if wait is None:
                tries = "" if attempt == 1 else f" It was tried {attempt} times."
                failed = run.failed(error, "request", tries)
                failed.hides_frames = isinstance(error, ModelKeyMissing)
                raise failed from None if failed.hides_frames else error
            deadline = run.frame.deadline
            if deadline is not None and deadline.remaining() <= wait:
                late = f" The next try, in {wait:.1f} s, would be past the deadline."
                raise run.failed(error, "deadline", late) from error
            if error.retry_after is not None and run.throttle is not None:
                run.throttle.hold(wait)  # other requests to this provider would be refused as well
            await asyncio.sleep(wait)


async def _ask_once(run: Run, attempt: int) -> Answer:
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
        finally:
            if throttle is not None:
                throttle.leave()
        seconds = frame.monotonic() - began
        cost = _charge(run, answer, reserved, seconds)
        reserved = None
        if frame.log.is_kept:
            recorded = write_answer(answer, seconds, cost, masking)
            await shielded(frame.log.note("model answer", run.place_of_answer, recorded))
        return answer
    except BaseException:
        if reserved is not None:
            if answer.counted:
                reserved.settle(requests=1, tokens=answer.usage.tokens, money=run.tariff(answer.usage))
            elif answer.begun:
                reserved.settle(requests=1)  # the usage is unknown, so the reserved amount counts as spent
            else:
                reserved.settle(requests=1, tokens=0, money=0)
        raise


def _charge(
    run: Run, answer: Answer, reserved: Reservation | None, seconds: float, again: bool = False
) -> Decimal | None:
    """Charge the answer to this run and every run above, and return its cost.

    Usage that the provider does not report is unknown, not zero: the reserved amount counts as spent.
    """
    usage = answer.usage
    cost = run.tariff(usage) if answer.counted else run.uncounted_cost()
    frame = run.frame
    frame.costs.models.add(usage, cost)
    if answer.counted:
        run.counted = (len(run.conversation.messages) + 1, usage.tokens)  # the answer itself is counted
    if reserved is not None:
        reserved.settle(requests=1, **({"tokens": usage.tokens, "money": cost} if answer.counted else {}))
    stop: Any = answer.stop
    tell = frame.session.keep if again else frame.session.record
    tell(ModelResponded(answer.model, stop.reason, usage, cost, seconds, answer.attempt, frame.run_context))
    return cost


def _reserve(run: Run, budget: BudgetTracker) -> tuple[ModelRequest, Reservation]:
    """Reserve an upper bound for the request's tokens and cost. If little of the budget remains, shorten the answer.

    Returns the request and the reservation. The number of bytes is an upper bound, because no tokenizer produces more
    tokens than that. Messages that the provider counted in an earlier turn are not estimated again.
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
        return sum(len(result.text.encode()) + _PER_MESSAGE for result in message.results)
    return len(message.text.encode()) + _PER_MESSAGE


def _publish_delta(run: Run, part: ModelPart, writing: StreamMask | None) -> None:
    frame = run.frame
    if isinstance(part, TextPart):
        if run.on_text is not None:
            run.on_text(part.text)
        frame.publish(TextDelta(part.text, frame.run_context))
    elif isinstance(part, CallPart):
        if writing is not None:
            part = writing.take(part)
            if not (part.id or part.name or part.arguments):
                return
        frame.publish(CallDelta(part.index, part.id, part.name, part.arguments, frame.run_context))
    elif isinstance(part, ThinkingPart):
        frame.publish(ThinkingDelta(part.text, frame.run_context))
    elif isinstance(part, StopPart) and writing is not None:
        for rest in writing.rest():
            frame.publish(CallDelta(rest.index, "", "", rest.arguments, frame.run_context))
