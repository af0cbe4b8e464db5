"""`ask_once`: one request to a model, from its reservation in the budget to its charge."""

from __future__ import annotations

import asyncio
from decimal import Decimal
from typing import TYPE_CHECKING, Any

from handrail.adapter.answer import Answer, FailedRequest, RecordedAnswer
from handrail.adapter.deltas import Deltas
from handrail.cancellation import finish
from handrail.errors import ModelError
from handrail.events import ModelRequested, ModelResponded
from handrail.limits import BudgetTracker, Reservation
from handrail.messages import (
    AssistantMessage,
    AttachmentPart,
    Message,
    ModelPart,
    ModelRequest,
    ThinkingPart,
    ToolMessage,
    Usage,
)
from handrail.models import ModelAnswerBroken
from handrail.models.blocks import outside_lines
from handrail.models.media import token_bound_of
from handrail.models.prices import most_of
from handrail.models.provider_tools import check_provider_tools
from handrail.raised_errors import in_short
from handrail.replay.attachments import store
from handrail.tools.result import clean_text

if TYPE_CHECKING:
    from handrail.adapter.run import Run

OUTPUT_BOUND = 4096
"""Maximum number of tokens in an answer if tokens or money are limited and `max_tokens` is not set."""
_LEAST_OUTPUT = 16
_MOST_SAID = 200
"""Maximum length of a recorded error, in characters."""
_PER_MESSAGE = 16
"""Upper bound for the tokens that a provider adds to each message, call and result."""


async def ask_once(
    run: Run, attempt: int, failed: list[FailedRequest]
) -> tuple[Answer, float, Decimal | None]:
    """Ask the run's model once. Returns its complete answer, the seconds it took, and its cost (None if unknown).

    Even if the request fails, it is added to `failed`, the budget is charged for it, and the tokens that the provider had
    reported by then are added to the run's costs. Raises `ModelError` if the request fails, and `BudgetExceededError`
    if the budget does not allow it.
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
            if request.provider_tools:
                check_provider_tools(model, request.provider_tools)
            parts = model.stream(request)
            try:
                if request.stream:
                    deltas = Deltas(run)
                    async for part in parts:
                        answer.take(part)
                        await _keep_bytes(run, part)
                        deltas.publish(part)
                else:
                    async for part in parts:
                        answer.take(part)
                        await _keep_bytes(run, part)
            except BaseException as error:
                answer.interrupted = isinstance(error, asyncio.CancelledError)
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
        problem = _problem_of(error)[:_MOST_SAID]
        failed.append(FailedRequest(model.name, problem, usage=usage, cost=cost, charged=answer.charged))
        raise


def _problem_of(error: BaseException) -> str:
    if isinstance(error, ModelError):
        return error.problem
    is_stopped = isinstance(error, asyncio.CancelledError | GeneratorExit)
    return "it was stopped before it had answered" if is_stopped else clean_text(in_short(error))


async def _keep_bytes(run: Run, part: ModelPart) -> None:
    """Store the bytes of a picture or a sound, before an event or a record refers to them."""
    log = run.frame.log
    if isinstance(part, AttachmentPart) and log.is_kept:
        await finish(store(log.journal, log.run_id, [part.attachment]))


def _charge_cut(
    run: Run, answer: Answer, reserved: Reservation | None
) -> tuple[Usage, Decimal | None] | tuple[None, None]:
    """Charge a request whose answer was cut off or never came. Returns its usage and cost, both None if it was not answered at all."""
    if not (answer.counted or answer.begun):
        if reserved is not None:
            answer.charged = reserved.settle(requests=1, tokens=0, money=0)
        return None, None
    usage = answer.usage
    cost = run.tariff(usage) if answer.counted else run.uncounted_cost()
    run.frame.costs.models.add(usage, cost)
    if reserved is not None and answer.counted:
        reserved.settle(requests=1, tokens=usage.tokens, money=cost)
    elif reserved is not None:
        answer.charged = reserved.settle(requests=1)  # the usage is unknown, so the reserved amount is spent
    return usage, cost


def _tell_outside(run: Run, answer: Answer, streaming: bool) -> None:
    """Add a line for each call of the provider's own tools to the answer's thinking, which is shown to people."""
    kept = None if answer.stop is None else answer.stop.kept
    lines = outside_lines(kept)
    if lines:
        before = "\n\n" if answer.thought else ""
        part = ThinkingPart(before + "\n".join(lines) + "\n")
        answer.take(part)
        if streaming:
            Deltas(run).publish(part)


def charge(
    run: Run,
    answer: Answer,
    reserved: Reservation | None,
    seconds: float,
    recorded: RecordedAnswer | None = None,
) -> Decimal | None:
    """Charge the answer to this run and the runs around it, and return its cost; None if that is unknown.

    A recorded answer is charged again. Usage that the provider does not report is unknown, not zero: the reserved
    amount counts as spent.
    """
    usage, frame = answer.usage, run.frame
    if recorded is not None and recorded.model != run.model.name:
        cost = recorded.cost  # another of the run's candidates answered, so `run.tariff` does not apply
    else:
        cost = run.tariff(usage) if answer.counted else run.uncounted_cost()
    frame.costs.models.add(usage, cost)
    if answer.counted:
        run.counted = (len(run.conversation.messages) + 1, usage.tokens)  # the answer itself is counted
    if reserved is not None and answer.counted:
        reserved.settle(requests=1, tokens=usage.tokens, money=cost)
    elif reserved is not None:
        answer.charged = reserved.settle(**(answer.charged or {"requests": 1}))
    stop: Any = answer.stop
    tell = frame.session.record if recorded is None else frame.session.keep
    tell(ModelResponded(answer.model, stop.reason, usage, cost, seconds, answer.attempt, frame.run_context))
    return cost


def _reserve(run: Run, budget: BudgetTracker) -> tuple[ModelRequest, Reservation]:
    """Reserve an upper bound for the request's tokens and cost. If little of the budget remains, request a shorter answer.

    Returns the request and the reservation. Raises `BudgetExceededError` if too little is left. Each byte of
    a text counts as a token, because no tokenizer produces more tokens than that. Messages that the provider counted in an earlier
    turn are not estimated again.
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
        made = token_bound_of(message) if message.attachments else 0
        return len(message.text.encode()) + calls + made + _PER_MESSAGE * (1 + len(message.calls))
    if isinstance(message, ToolMessage):
        return sum(
            len(result.text.encode()) + _PER_MESSAGE + sum(each.token_bound for each in result.attachments)
            for result in message.results
        )
    return len(message.text.encode()) + _PER_MESSAGE + sum(each.token_bound for each in message.attachments)
