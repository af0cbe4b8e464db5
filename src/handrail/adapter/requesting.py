"""One answer from a model: within the deadline and the budget, tried again where that can help."""

from __future__ import annotations

import asyncio
from decimal import Decimal
from typing import TYPE_CHECKING, Any

from handrail.adapter.answer import Answer, RecordedAnswer, read_answer, write_answer
from handrail.adapter.masking import Writing
from handrail.adapter.undone import tell_undone
from handrail.cancellation import open_scope, shielded
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
    CallPart,
    Message,
    ModelPart,
    ModelRequest,
    StopPart,
    TextPart,
    ThinkingPart,
    ToolMessage,
)
from handrail.models.model_errors import ModelAnswerBroken
from handrail.models.prices import most_of

if TYPE_CHECKING:
    from handrail.adapter.run import Run

OUTPUT_BOUND = 4096
"""How many tokens an answer may have where tokens or money are limited and nobody said how many."""
_LEAST_OUTPUT = 16
_PER_MESSAGE = 16
"""Tokens a provider adds around a message, at most."""


async def ask(run: Run) -> Answer:
    """The model's next answer, whole. Anything else is a `PromptEvaluationError`."""
    frame = run.frame
    if frame.parking is not None and frame.parked:
        raise asyncio.CancelledError  # it came while something was shielded from it
    place = run.next_place()
    await tell_undone(run, place)
    recorded = frame.log.find("model answer", place, RecordedAnswer)
    if recorded is not None:
        return _heard_before(run, recorded)
    run.goes_on()
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


def _heard_before(run: Run, recorded: RecordedAnswer) -> Answer:
    """An answer from the record: it is paid for again in the counts, and in nothing else."""
    budget = run.frame.budget
    answer = read_answer(recorded, run.request(), run.masking)
    # It was within the bounds when it was asked for, so nothing is checked again.
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
                raise run.failed(error, "request", tries) from error
            deadline = run.frame.deadline
            if deadline is not None and deadline.remaining() <= wait:
                late = f" The next try, in {wait:.1f} s, would be past the deadline."
                raise run.failed(error, "deadline", late) from error
            if error.retry_after is not None and run.throttle is not None:
                run.throttle.hold(wait)  # whoever else asks this provider would be refused as well
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
                    writing = None if masking is None else Writing(masking)
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
                raise ModelAnswerBroken(model.name, "the answer ended before it was whole")
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
                reserved.settle(requests=1)  # nobody knows what it used: the bound stands
            else:
                reserved.settle(requests=1, tokens=0, money=0)
        raise


def _charge(
    run: Run, answer: Answer, reserved: Reservation | None, seconds: float, again: bool = False
) -> Decimal | None:
    """The request is answered: what it really used, here and in every run above. Returns the cost.

    Where the provider does not say, it is unknown, not nothing: the bound that was reserved stands.
    """
    usage = answer.usage
    cost = run.tariff(usage) if answer.counted else run.uncounted_cost()
    frame = run.frame
    frame.spending.add(usage, cost)
    if answer.counted:
        run.counted = (len(run.conversation.messages) + 1, usage.tokens)  # the answer itself is the one more
    if reserved is not None:
        reserved.settle(requests=1, **({"tokens": usage.tokens, "money": cost} if answer.counted else {}))
    stop: Any = answer.stop
    tell = frame.session.keep if again else frame.session.record
    tell(ModelResponded(answer.model, stop.reason, usage, cost, seconds, answer.attempt, frame.run_context))
    return cost


def _reserve(run: Run, budget: BudgetTracker) -> tuple[ModelRequest, Reservation]:
    """Set an upper bound aside for the request; where little is left, its answer must be short.

    No tokenizer makes more tokens than there are bytes. What the provider has counted in an earlier
    turn is not estimated again.
    """
    left = budget.remaining()
    known, tokens = run.counted
    sent = tokens + sum(_size(message) for message in run.conversation.messages.since(known))
    if not known:
        sent += len(run.system.encode()) + run.offered_size()
    run.counted = (len(run.conversation.messages), sent)  # until the provider says better
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


def _publish_delta(run: Run, part: ModelPart, writing: Writing | None) -> None:
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
