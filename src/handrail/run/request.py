"""`Requests`: asks the model until it answers, within the run's deadline, with retries and fallback models, and publishes the answer as it arrives."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Coroutine, Mapping
from dataclasses import replace
from decimal import Decimal
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from handrail.concurrency.cancellation import finish, open_scope
from handrail.errors import (
    BudgetExceededError,
    DeadlineExceededError,
    DefinitionError,
    ModelError,
    PromptEvaluationError,
)
from handrail.events import (
    AnswerArrived,
    AttachmentDelta,
    CallDelta,
    CompactionEnded,
    CompactionStarted,
    ModelFailed,
    ModelRequested,
    ModelResponded,
    PartialOutput,
    TextDelta,
    ThoughtDelta,
)
from handrail.messages import (
    AttachmentPart,
    CallPart,
    Message,
    ModelPart,
    ModelRequest,
    Sent,
    SentPart,
    StopPart,
    TextPart,
    ThinkingPart,
    Usage,
    UserMessage,
    Why,
)
from handrail.models import ModelAnswerBroken, ModelKeyMissing, ModelRequestTooLong
from handrail.models.blocks import outside_lines
from handrail.models.names import Candidate, candidates_of, falls_over
from handrail.models.prices import most_of
from handrail.models.request_settings import check_provider_tools
from handrail.run.answer import (
    FailedRequest,
    ModelAnswer,
    RecordedAnswer,
    Unanswered,
    offer_of,
    read_answer,
    write_answer,
)
from handrail.run.compaction import SUMMARY, weight_of
from handrail.run.conversation import StreamMask
from handrail.run.limits import Reservation, charge_again
from handrail.run.record.log import load_attachments, store_attachments
from handrail.run.response import ANSWER_TOOL
from handrail.run.run import Run
from handrail.run.spend import AtCap, Hold, hold, wait_at_cap
from handrail.text.raised_errors import in_short
from handrail.tools.result import clean_text

if TYPE_CHECKING:
    from handrail.concurrency.deadline import Deadline
    from handrail.run.adapter import Retry
    from handrail.run.evaluation import Evaluation
    from handrail.schema.partial_values import PartialValue

T = TypeVar("T")


_COPIED = 4
"""Maximum number of values that are copied into partial outputs for each character of the answer, so that the cost is linear."""


class Deltas:
    """Publishes the parts of one answer as they arrive, with secrets masked, and the part of a typed answer that is complete."""

    def __init__(self, evaluation: Evaluation) -> None:
        self._evaluation = evaluation
        masking = evaluation.masking
        self._mask = None if masking is None else StreamMask(masking)
        listens = evaluation.output is not None and evaluation.run.session.dispatcher.listens_for(
            PartialOutput
        )
        self._output = evaluation.output if listens else None
        self._names: dict[int, str] = {}
        """The name of each call, as far as it has arrived."""
        self._growing: dict[int, _Growing | None] = {}
        """The typed answer of each call that gives one, or that of the text at -1."""

    def publish(self, part: ModelPart) -> None:
        """Publish a part of the answer."""
        evaluation, run = self._evaluation, self._evaluation.run
        if isinstance(part, TextPart):
            evaluation.has_shown = True
            if evaluation.on_text is not None:
                evaluation.on_text(part.text)
            run.publish(TextDelta(part.text, run.run_context))
            if self._output is not None and not evaluation.answers_by_call:
                self._grow(-1, part.text)
        elif isinstance(part, CallPart):
            if self._mask is not None:
                part = self._mask.take(part)
                if not (part.id or part.name or part.arguments):
                    return
            evaluation.has_shown = True
            run.publish(CallDelta(part.index, part.id, part.name, part.arguments, run.run_context))
            if self._output is not None and evaluation.answers_by_call:
                self._names[part.index] = name = self._names.get(part.index, "") + part.name
                if name == ANSWER_TOOL:
                    self._grow(part.index, part.arguments)
        elif isinstance(part, AttachmentPart):
            evaluation.has_shown = True
            run.publish(AttachmentDelta(part.attachment, run.run_context))
        elif isinstance(part, ThinkingPart):
            evaluation.has_shown = True
            run.publish(ThoughtDelta(part.text, run.run_context))
        elif isinstance(part, StopPart) and self._mask is not None:
            for rest in self._mask.rest():
                run.publish(CallDelta(rest.index, "", "", rest.arguments, run.run_context))

    def _grow(self, index: int, text: str) -> None:
        if index not in self._growing:
            assert self._output is not None
            partial = self._output.partial()
            begun = "".join(self._evaluation.begun) if index < 0 else ""
            self._growing[index] = None if partial is None else _Growing(self._evaluation.run, partial, begun)
        growing = self._growing[index]
        if growing is not None:
            growing.take(text)


class _Growing:
    """A typed answer that is published as it arrives. `begun` is the text of earlier answers that this one continues."""

    def __init__(self, run: Run, partial: PartialValue, begun: str) -> None:
        self._run = run
        self._partial = partial
        self._published = 0
        """The number of changes that have been published."""
        self._may_copy = 0
        if begun:
            partial.take(begun)
            self._published = partial.changes

    def take(self, text: str) -> None:
        partial = self._partial
        partial.take(text)
        self._may_copy += _COPIED * len(text)
        if partial.changes and not self._published:
            self._published = 1
            self._publish([] if partial.is_list else {})
        if partial.changes > self._published and (partial.is_complete or partial.size <= self._may_copy):
            self._published = partial.changes
            self._may_copy -= partial.size
            self._publish(partial.copy())

    def _publish(self, value: object) -> None:
        self._run.publish(PartialOutput(value, self._run.run_context))


OUTPUT_BOUND = 4096
"""Maximum number of tokens in an answer if tokens or money are limited and `max_tokens` is not set."""
_LEAST_OUTPUT = 16
_MOST_SAID = 200
"""Maximum length of a recorded error, in characters."""


async def ask_once(
    evaluation: Evaluation, attempt: int, failed: list[FailedRequest], closing: Message | None = None
) -> tuple[ModelAnswer, float, Decimal | None]:
    """Ask the run's model once. Returns its complete answer, the seconds it took, and its cost (None if unknown).

    `closing` is a message for this request only, whose answer nobody is shown as it arrives.

    Even if the request fails, it is added to `failed`, the budget is charged for it, and the tokens that the provider had
    reported by then are added to the run's costs. Raises `ModelError` if the request fails, `BudgetExceededError`
    if the budget does not allow it, and `AtCap` if a cap on a day's spending does not.
    """
    run, model = evaluation.run, evaluation.model
    request, reserved, held = evaluation.request(), None, None
    if run.budget is not None or run.options.spend:
        request, reserved, held = await _reserve(evaluation)
    if closing is not None:
        messages = request.messages.copy()
        messages.append(closing)
        request = msgspec.structs.replace(request, messages=messages, stream=False)
    masking = evaluation.masking
    answer = ModelAnswer(model.name, request, attempt, masking)
    throttle = evaluation.settings.throttle
    evaluation.asked = answer
    run.model.is_asked = closing is None
    try:
        if throttle is not None:
            await throttle.enter()
        try:
            if run.told.get(ModelRequested, True):
                run.publish(_requested(evaluation, request, attempt))
            evaluation.asked_at = began = run.monotonic()
            first_part = None
            if request.provider_tools:
                check_provider_tools(model, request.provider_tools)
            parts = model.stream(request)
            try:
                if request.stream:
                    deltas = Deltas(evaluation)
                    async for part in parts:
                        if first_part is None and not isinstance(part, SentPart):
                            first_part = run.monotonic() - began
                        answer.take(part)
                        if isinstance(part, AttachmentPart):
                            await _keep_bytes(evaluation, part)
                        deltas.publish(part)
                else:
                    async for part in parts:
                        answer.take(part)
                        if isinstance(part, AttachmentPart):
                            await _keep_bytes(evaluation, part)
            except BaseException as error:
                answer.interrupted = isinstance(error, asyncio.CancelledError)
                await parts.aclose()
                raise
            if answer.stop is None:
                raise ModelAnswerBroken(model.name, "the answer ended before it was complete")
            if answer.stop.kept is not None:
                _tell_outside(evaluation, answer, request.stream)
        finally:
            run.model.is_asked = False
            if throttle is not None:
                throttle.leave()
        seconds = run.monotonic() - began
        if run.told.get(AnswerArrived, True):
            message: Any = answer.message(answer.calls())
            shown: Any = message if masking is None else masking.message(message)
            run.publish(AnswerArrived(shown, first_part, run.run_context))
        cost = charge(evaluation, answer, reserved, seconds)
    except BaseException as error:
        usage, cost = _charge_cut(evaluation, answer, reserved)
        if held is not None:
            await finish(
                held.settle(_most_spent(evaluation, answer, request.max_tokens) or _spent(answer, cost))
            )
        problem = _problem_of(error)[:_MOST_SAID]
        failed.append(FailedRequest(model.name, problem, usage=usage, cost=cost, charged=answer.charged))
        raise
    if held is not None:  # before the answer is recorded, so that a recorded one is never charged again
        await finish(held.settle(_spent(answer, cost)))
    return answer, seconds, cost


def _requested(evaluation: Evaluation, request: ModelRequest, attempt: int) -> ModelRequested:
    """Return the fact that a request is sent, with the secrets in it masked."""
    model, masking, conversation = evaluation.model, evaluation.masking, evaluation.conversation
    if masking is not None:
        masked = Sent(masking.message(each) for each in request.messages)
        request = msgspec.structs.replace(request, messages=masked)
    compacted = conversation.sent is not conversation.messages
    sent = len(request.messages)
    return ModelRequested(model.name, attempt, sent, evaluation.run.run_context, request, compacted)


def _problem_of(error: BaseException) -> str:
    if isinstance(error, ModelError):
        return error.problem
    is_stopped = isinstance(error, asyncio.CancelledError | GeneratorExit)
    return "it was stopped before it had answered" if is_stopped else clean_text(in_short(error))


async def _keep_bytes(evaluation: Evaluation, part: AttachmentPart) -> None:
    """Store the bytes of a picture or a sound, before an event or a record refers to them."""
    log = evaluation.run.log
    if log.is_kept:
        await finish(store_attachments(log.journal, log.run_id, [part.attachment]))


def _charge_cut(
    evaluation: Evaluation, answer: ModelAnswer, reserved: Reservation | None
) -> tuple[Usage, Decimal | None] | tuple[None, None]:
    """Charge a request whose answer was cut off or never came. Returns its usage and cost, both None if it was not answered at all."""
    if not (answer.counted or answer.begun):
        if reserved is not None:
            answer.charged = reserved.settle(**_spent(answer, None))
        return None, None
    cost = evaluation.tariff(answer.usage) if answer.counted else evaluation.uncounted_cost()
    _add(evaluation, answer, reserved, cost)
    return answer.usage, cost


def _add(
    evaluation: Evaluation, answer: ModelAnswer, reserved: Reservation | None, cost: Decimal | None
) -> None:
    """Add an answer to the run's costs, and settle its reservation. If its usage is unknown, the reserved amount is spent."""
    evaluation.run.costs.models.add(answer.usage, cost)
    if reserved is not None and answer.counted:
        reserved.settle(**_spent(answer, cost))
    elif reserved is not None:
        answer.charged = reserved.settle(**(answer.charged or _spent(answer, cost)))


def _spent(answer: ModelAnswer, cost: Decimal | None) -> dict[str, int | Decimal | None]:
    """Return what a request has spent. A unit that is left out, or None, counts as it was reserved."""
    if answer.counted:
        return {"requests": 1, "tokens": answer.usage.tokens, "money": cost}
    return {"requests": 1} if answer.begun else {"requests": 1, "tokens": 0, "money": 0}


def _most_spent(
    evaluation: Evaluation, answer: ModelAnswer, most: int | None
) -> dict[str, int | Decimal | None] | None:
    """Return the most that an answer may have cost that was cut off after its provider reported some usage; None for any other.

    A provider may report the input at the beginning, and bill what it wrote until it noticed, at `most` this many tokens.
    """
    is_cut = answer.stop is None and (answer.interrupted or answer.text or answer.thought)
    if not (is_cut and answer.counted and most):
        return None
    usage = msgspec.structs.replace(answer.usage, output=max(answer.usage.output, most))
    return {"requests": 1, "tokens": usage.tokens, "money": evaluation.tariff(usage)}


def _tell_outside(evaluation: Evaluation, answer: ModelAnswer, streaming: bool) -> None:
    """Add a line for each call of the provider's own tools to the answer's thinking, which is shown to people."""
    kept = None if answer.stop is None else answer.stop.kept
    lines = outside_lines(kept)
    if lines:
        before = "\n\n" if answer.thought else ""
        part = ThinkingPart(before + "\n".join(lines) + "\n")
        answer.take(part)
        if streaming:
            Deltas(evaluation).publish(part)


def charge(
    evaluation: Evaluation,
    answer: ModelAnswer,
    reserved: Reservation | None,
    seconds: float,
    recorded: RecordedAnswer | None = None,
) -> Decimal | None:
    """Charge the answer to this run and the runs around it, and return its cost; None if that is unknown.

    A recorded answer is charged again. Usage that the provider does not report is unknown, not zero: the reserved
    amount counts as spent.
    """
    usage, run = answer.usage, evaluation.run
    if recorded is not None and recorded.model != evaluation.model.name:
        cost = recorded.cost  # another of the run's candidates answered, so `run.tariff` does not apply
    else:
        cost = evaluation.tariff(usage) if answer.counted else evaluation.uncounted_cost()
    if reserved is None:
        run.costs.models.add(usage, cost)
    else:
        _add(evaluation, answer, reserved, cost)
    if answer.counted:
        evaluation.counted = (
            len(evaluation.conversation.sent) + 1,
            usage.tokens,
        )  # the answer itself is counted
        if evaluation.window is not None:
            evaluation.window.count(evaluation, usage)
    stop: Any = answer.stop
    tell = run.session.record if recorded is None else run.session.keep
    tell(ModelResponded(answer.model, stop.reason, usage, cost, seconds, answer.attempt, run.run_context))
    return cost


async def _reserve(evaluation: Evaluation) -> tuple[ModelRequest, Reservation | None, Hold | None]:
    """Reserve an upper bound for the request's tokens and cost. If little of the budget remains, request a shorter answer.

    Returns the request, and what is reserved of the budget and in the windows of the caps. Raises `BudgetExceededError` or `AtCap` if
    too little is left. Each byte of a text counts as a token, because no tokenizer produces more tokens than that. Messages that the
    provider counted in an earlier turn are not estimated again.
    """
    budget, caps = evaluation.run.budget, evaluation.run.options.spend
    left: Mapping[str, float] = {} if budget is None else budget.remaining()
    known, tokens = evaluation.counted
    sent = tokens + sum(map(weight_of, evaluation.conversation.sent.since(known)))
    if not known:
        sent += len(evaluation.system.encode()) + evaluation.offered_size()
    # An estimate until the provider reports the actual count.
    evaluation.counted = (len(evaluation.conversation.sent), sent)
    room = evaluation.settings.max_tokens or OUTPUT_BOUND
    if "tokens" in left:
        room = max(min(room, int(left["tokens"]) - sent), _LEAST_OUTPUT)
    while (
        "money" in left
        and room > _LEAST_OUTPUT
        and (most_of(evaluation.tariff, sent, room) or 0) > left["money"]
    ):
        room //= 2
    bound: dict[str, int | Decimal | None] = {
        "requests": 1,
        "tokens": sent + room,
        "money": most_of(evaluation.tariff, sent, room),
    }
    reserved = None if budget is None else budget.reserve(**bound)
    try:
        held = await hold(evaluation, bound) if caps else None
    except BaseException:
        if reserved is not None:
            reserved.release()
        raise
    is_bounded = {"tokens", "money"} & {*left, *(unit for cap in caps for unit in cap.limits)}
    request = evaluation.request(max_tokens=room if is_bounded else evaluation.settings.max_tokens)
    return request, reserved, held


_QUICK_ATTEMPTS = 2
"""Maximum number of attempts with one model, if there is a next candidate."""
_LONGEST_QUICK_WAIT = 2.0
"""Maximum for `Retry.first_wait` and `Retry.longest_wait`, in seconds, if there is a next candidate."""


async def ask_model(evaluation: Evaluation) -> ModelAnswer:
    """Return the recorded answer, or else ask the model and return its complete answer.

    Raises `PromptEvaluationError` if no model answers, or none within the deadline and the budget.
    """
    run = evaluation.run
    evaluation.answers += 1
    evaluation.heard = 0
    if run.log.is_kept:
        place = evaluation.place_of_answer
        if run.log.has("compaction", place):
            (evaluation.window or evaluation.measure()).restore(evaluation, place)
        recorded = run.log.find("model answer", place, RecordedAnswer)
        if recorded is not None:
            await load_attachments(run.log.journal, run.log.run_id, recorded.attachments)
            return _replay(evaluation, recorded)
        evaluation.leave_record()
    requests = Requests(evaluation)
    try:
        while True:
            try:
                window = evaluation.window
                if evaluation.conversation.is_to_be_compacted or (
                    window is not None and window.is_full(evaluation)
                ):
                    await in_time(evaluation, compact(evaluation))
                try:
                    return await in_time(evaluation, requests.answer())
                except PromptEvaluationError as error:
                    is_too_long = isinstance(error.__cause__, ModelRequestTooLong)
                    if not is_too_long or not await compact(evaluation, "refused"):
                        raise
                return await in_time(evaluation, requests.answer())
            except AtCap as short:
                await while_asking(evaluation, wait_at_cap(evaluation, short))
    except BaseException:
        if run.mailbox is not None and run.mailbox.take_back():
            return await requests.cut()
        run.model.unanswered = requests.unanswered()
        raise


async def while_asking(evaluation: Evaluation, asking: Coroutine[Any, Any, T]) -> T:
    """Wait for a person between two steps of the model. The run's deadline pauses, or ends the run."""
    deadline = evaluation.run.deadline
    if deadline is None or not deadline.pauses_for_people:
        return await in_time(evaluation, asking)
    deadline.pause()
    try:
        return await asking
    finally:
        deadline.resume()


async def compact(evaluation: Evaluation, why: Why = "full") -> bool:
    """Compact the run's conversation, and return whether less is sent from now on."""
    run, by = evaluation.run, ""
    if run.told.get(CompactionStarted, True):
        run.publish(CompactionStarted(run.run_context))
    try:
        done = await (evaluation.window or evaluation.measure()).compact(evaluation, _summary, why)
        if done and (compaction := evaluation.conversation.compaction) is not None:
            by = compaction.by
        return done
    finally:
        if run.told.get(CompactionEnded, True):
            run.publish(CompactionEnded(by, run.run_context))


def in_time(evaluation: Evaluation, asking: Coroutine[Any, Any, T]) -> Coroutine[Any, Any, T]:
    """Ask the model until the run's deadline. Raises `PromptEvaluationError` if it passes before the model has answered."""
    deadline = evaluation.run.deadline
    return asking if deadline is None else _until(evaluation, asking, deadline)


async def _until(evaluation: Evaluation, asking: Coroutine[Any, Any, T], deadline: Deadline) -> T:
    scope = open_scope()
    scope.start_deadline(deadline)
    try:
        deadline.check("the model was asked")
        return await asking
    except asyncio.CancelledError as error:
        late = scope.explain(error, "the model had answered")
        if isinstance(late, DeadlineExceededError):
            raise evaluation.failed(late, "deadline") from late
        raise
    except DeadlineExceededError as error:
        raise evaluation.failed(error, "deadline") from error
    finally:
        asking.close()
        scope.close()


def _replay(evaluation: Evaluation, recorded: RecordedAnswer) -> ModelAnswer:
    """Return a recorded answer without sending anything. Its usage and cost are charged again."""
    run, budget = evaluation.run, evaluation.run.budget
    answer = read_answer(recorded, evaluation.request(), evaluation.masking)
    # The limits are not checked again: they were checked before the request was sent.
    for each in recorded.failed:
        charge_again(run, each)
    reserved = None if budget is None else budget.reserve()
    charge(evaluation, answer, reserved, recorded.seconds, recorded)
    evaluation.answered_by = recorded.model
    evaluation.new_tools.clear()
    return answer


class Requests:
    """The requests that are made for one answer. Each has its own events, cost and budget reservation."""

    __slots__ = ("_began", "_evaluation", "_failed", "_number")

    def __init__(self, evaluation: Evaluation) -> None:
        self._evaluation = evaluation
        self._began = evaluation.run.monotonic()
        self._number = 0
        self._failed: list[FailedRequest] = []

    def answer(self) -> Coroutine[Any, Any, ModelAnswer]:
        """Ask the run's model, or the candidates of a choice in order, and return the answer.

        If a candidate fails or refuses, the next one may be asked.
        """
        return self._judge_first() if self._evaluation.judges_offers else self._begin()

    def unanswered(self) -> Unanswered | None:
        """Return the requests that failed, which is all of them if no model answers; None if there are none."""
        if not self._failed:
            return None
        seconds = self._evaluation.run.monotonic() - self._began
        return Unanswered(self._evaluation.run.log.now() - seconds, seconds, tuple(self._failed))

    async def _judge_first(self) -> ModelAnswer:
        await self._evaluation.judge_offers()
        return await self._begin()

    def _begin(self) -> Coroutine[Any, Any, ModelAnswer]:
        evaluation = self._evaluation
        return (
            self._choose()
            if evaluation.settings.is_choice
            else self._ask(evaluation.settings.retry, None, False)
        )

    async def _choose(self) -> ModelAnswer:
        evaluation, candidates = self._evaluation, self._candidates()
        retry = evaluation.settings.retry
        quick = replace(
            retry,
            attempts=min(retry.attempts, _QUICK_ATTEMPTS),
            first_wait=min(retry.first_wait, _LONGEST_QUICK_WAIT),
            longest_wait=min(retry.longest_wait, _LONGEST_QUICK_WAIT),
        )
        for this, after in itertools.pairwise(candidates):
            evaluation.use(this.model)
            try:
                return await self._ask(quick, after.model.name, this.on_refusal)
            except _FellOver:
                continue
        evaluation.use(candidates[-1].model)
        return await self._ask(retry, None, False)

    def _candidates(self) -> tuple[Candidate, ...]:
        """Return the candidates, rotated so that the model that gave the run's last answer is tried first.

        Raises `PromptEvaluationError` if the choice can't be made.
        """
        evaluation = self._evaluation
        try:
            found = candidates_of(evaluation.settings.model, evaluation.request())
        except DefinitionError as error:
            raise evaluation.failed(error, "request") from error
        names = [each.model.name for each in found]
        if evaluation.answered_by not in names:
            return found
        start = names.index(evaluation.answered_by)
        return (*found[start:], *found[:start])

    async def _ask(self, retry: Retry, after: str | None, on_refusal: bool) -> ModelAnswer:
        """Ask the run's model until it answers.

        Raises `_FellOver` if `after`, the next model, is to be asked instead, and `PromptEvaluationError` if the run fails.
        """
        evaluation, tries = self._evaluation, 0
        settings = evaluation.settings
        while True:
            tries += 1
            self._number += 1
            evaluation.has_shown = False
            try:
                answer, seconds, cost = await ask_once(evaluation, self._number, self._failed)
            except BudgetExceededError as error:
                raise evaluation.failed(error, "budget") from error
            except ModelError as error:
                if after is not None and (evaluation.has_shown or not falls_over(error)):
                    # Stay with this model: part of its answer was shown, or the next one would fail too.
                    after, retry = None, settings.retry
                wait = self._wait_after(retry, tries, error, after)
                self._tell(str(error), wait, after)
                if wait is None:
                    if after is not None:
                        raise _FellOver from None
                    raise self._gave_up(error, tries) from (
                        None if isinstance(error, ModelKeyMissing) else error
                    )
                if error.retry_after is not None and settings.throttle is not None:
                    settings.throttle.hold(wait)  # other requests to this provider would be refused as well
                await asyncio.sleep(wait)
                continue
            assert answer.stop is not None
            if (
                after is not None
                and on_refusal
                and answer.stop.reason == "refused"
                and not evaluation.has_shown
            ):
                self._refused(answer, cost, after)
                raise _FellOver
            evaluation.answered_by = answer.model
            await self._record(answer, seconds, cost)
            return answer

    async def _record(self, answer: ModelAnswer, seconds: float, cost: Decimal | None) -> None:
        evaluation = self._evaluation
        if evaluation.run.log.is_kept:
            offered = {tool.name: offer_of(tool) for tool in evaluation.new_tools}
            evaluation.new_tools.clear()
            recorded = write_answer(answer, seconds, cost, evaluation.masking, tuple(self._failed), offered)
            await finish(evaluation.run.log.note("model answer", evaluation.place_of_answer, recorded))

    async def cut(self) -> ModelAnswer:
        """Return the text of an answer that was stopped for a message, as an answer. Its unfinished calls and thoughts are dropped.

        It was charged already. A request that was not sent yet has cost nothing.
        """
        evaluation, answer = self._evaluation, self._evaluation.asked
        assert answer is not None
        cost: Decimal | None = Decimal(0)
        if answer.interrupted:
            cost = self._failed.pop().cost
        answer.cut()
        seconds = evaluation.run.monotonic() - self._began
        run = evaluation.run
        run.session.record(
            ModelResponded(
                answer.model, "interrupted", answer.usage, cost, seconds, answer.attempt, run.run_context
            )
        )
        await self._record(answer, seconds, cost)
        return answer

    def _wait_after(self, retry: Retry, tries: int, error: ModelError, after: str | None) -> float | None:
        """Return the number of seconds until the next attempt; None if this model is not asked again.

        Raises `PromptEvaluationError` if the attempt would be past the deadline and there is no next model.
        """
        wait, deadline = retry.wait_after(tries, error), self._evaluation.run.deadline
        if wait is None or deadline is None or deadline.remaining() > wait:
            return wait
        if after is not None:
            return None
        self._tell(str(error), wait, None)
        late = f" The next try, in {wait:.1f} s, would be past the deadline."
        raise self._evaluation.failed(error, "deadline", late) from error

    def _tell(self, error: str, wait: float | None, after: str | None) -> None:
        evaluation, run = self._evaluation, self._evaluation.run
        next_model = after if wait is None and after is not None else ""
        seconds = run.monotonic() - evaluation.asked_at
        run.session.record(
            ModelFailed(
                evaluation.model.name, self._number, error, wait, run.run_context, next_model, seconds
            )
        )

    def _refused(self, answer: ModelAnswer, cost: Decimal | None, after: str) -> None:
        self._failed.append(
            FailedRequest(
                answer.model, "it refused to answer", usage=answer.usage, cost=cost, charged=answer.charged
            )
        )
        self._tell(f"model {answer.model!r}: it refused to answer", None, after)

    def _gave_up(self, error: ModelError, tries: int) -> Exception:
        said = "" if tries == 1 else f" It was tried {tries} times."
        before = {
            each.model: each.error for each in self._failed if each.model != self._evaluation.model.name
        }
        for model, problem in before.items():
            said += f" Before it, {model} failed: {problem.rstrip('.')}."
        failed = self._evaluation.failed(error, "request", said)
        failed.hides_frames = isinstance(error, ModelKeyMissing)
        return failed


class _FellOver(Exception):
    """Raised to ask the next candidate."""


_SUMMARISE = (
    "[The conversation is about to outgrow the model's window. Write a summary of everything so far, which will take its place: what was "
    "asked for and decided, what was done and found out, with names, paths and numbers, and what is still to do. Answer with the summary "
    "only, and call no tool.]"
)


async def _summary(evaluation: Evaluation, spent: list[FailedRequest]) -> str:
    """Ask the run's model for a summary of the conversation, and return a note with it; "" if it gave none.

    The request is the run's next one with a message at its end, so that the provider has its beginning in its cache. Of a choice that
    has not chosen yet, the candidates are asked in order.
    """
    closing = UserMessage(_SUMMARISE, True)
    for number, candidate in enumerate(candidates_of(evaluation.model, evaluation.request()), 1):
        evaluation.use(candidate.model)
        try:
            answer, _, cost = await ask_once(evaluation, number, spent, closing)
            break
        except BudgetExceededError:
            return ""
        except ModelError as error:
            if not falls_over(error):
                return ""
    else:
        return ""
    text = "" if answer.calls() else answer.text.strip()
    problem = "" if text else "it gave no summary"
    usage = answer.usage if answer.counted else None
    spent.append(FailedRequest(answer.model, problem, usage=usage, cost=cost, charged=answer.charged))
    return f"{SUMMARY}{text}" if text else ""
