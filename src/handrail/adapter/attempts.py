"""`Attempts`: asks the model until it answers, within the run's deadline, with retries and fallback models."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Coroutine
from dataclasses import replace
from decimal import Decimal
from typing import TYPE_CHECKING, Any

from handrail.adapter.answer import (
    Answer,
    FailedRequest,
    RecordedAnswer,
    Unanswered,
    offer_of,
    read_answer,
    write_answer,
)
from handrail.adapter.exchange import ask_once, charge
from handrail.adapter.remarks import tell_remarks
from handrail.adapter.undone_calls import tell_undone
from handrail.cancellation import finish, open_scope
from handrail.errors import BudgetExceededError, DeadlineExceededError, DefinitionError, ModelError
from handrail.events import ModelFailed
from handrail.models import ModelKeyMissing
from handrail.models.choice import Candidate, candidates_of, falls_over
from handrail.replay.attachments import load

if TYPE_CHECKING:
    from handrail.adapter.run import Run
    from handrail.adapter.settings import Retry
    from handrail.deadline import Deadline

_QUICK_ATTEMPTS = 2
"""Maximum number of attempts with one model, if there is a next candidate."""
_LONGEST_QUICK_WAIT = 2.0
"""Maximum for `Retry.first_wait` and `Retry.longest_wait`, in seconds, if there is a next candidate."""


async def ask(run: Run) -> Answer:
    """Return the recorded answer, or else ask the model and return its complete answer.

    Raises `PromptEvaluationError` if no model answers, or none within the deadline and the budget.
    """
    frame = run.frame
    if frame.parking is not None and frame.parked:
        raise asyncio.CancelledError  # the run was parked during a shielded step
    run.answers += 1
    if frame.log.is_kept:
        place = run.place_of_answer
        await tell_undone(run, place)
        await tell_remarks(run, place)
        recorded = frame.log.find("model answer", place, RecordedAnswer)
        if recorded is not None:
            await load(frame.log.journal, frame.log.run_id, recorded.attachments)
            return _replay(run, recorded)
        run.leave_record()
    deadline = frame.deadline
    attempts = Attempts(run)
    try:
        return await (attempts.answer() if deadline is None else _in_time(run, attempts, deadline))
    except BaseException:
        frame.model.unanswered = attempts.unanswered()
        raise


async def _in_time(run: Run, attempts: Attempts, deadline: Deadline) -> Answer:
    """Ask the model until the deadline. Raises `PromptEvaluationError` if it passes before the model has answered."""
    scope = open_scope()
    scope.start_deadline(deadline)
    try:
        deadline.check("the model was asked")
        return await attempts.answer()
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
    frame, budget = run.frame, run.frame.budget
    answer = read_answer(recorded, run.request(), run.masking)
    # The limits are not checked again: they were checked before the request was sent.
    for each in recorded.failed:
        if each.usage is not None:
            frame.costs.models.add(each.usage, each.cost)
        if budget is not None:
            budget.reserve().settle(**each.spent())
    reserved = None if budget is None else budget.reserve()
    charge(run, answer, reserved, recorded.seconds, recorded)
    run.answered_by = recorded.model
    run.new_tools.clear()
    return answer


class Attempts:
    """The requests that are made for one answer. Each has its own events, cost and budget reservation."""

    __slots__ = ("_began", "_failed", "_number", "_run")

    def __init__(self, run: Run) -> None:
        self._run = run
        self._began = run.frame.monotonic()
        self._number = 0
        self._failed: list[FailedRequest] = []

    def answer(self) -> Coroutine[Any, Any, Answer]:
        """Ask the run's model, or the candidates of a choice in order, and return the answer.

        If a candidate fails or refuses, the next one may be asked.
        """
        return self._judge_first() if self._run.judges_offers else self._begin()

    def unanswered(self) -> Unanswered | None:
        """Return the requests that failed, which is all of them if no model answers; None if there are none."""
        if not self._failed:
            return None
        seconds = self._run.frame.monotonic() - self._began
        return Unanswered(self._run.frame.log.now() - seconds, seconds, tuple(self._failed))

    async def _judge_first(self) -> Answer:
        await self._run.judge_offers()
        return await self._begin()

    def _begin(self) -> Coroutine[Any, Any, Answer]:
        run = self._run
        return self._choose() if run.chooses else self._ask(run.retry, None, False)

    async def _choose(self) -> Answer:
        run, candidates = self._run, self._candidates()
        quick = replace(
            run.retry,
            attempts=min(run.retry.attempts, _QUICK_ATTEMPTS),
            first_wait=min(run.retry.first_wait, _LONGEST_QUICK_WAIT),
            longest_wait=min(run.retry.longest_wait, _LONGEST_QUICK_WAIT),
        )
        for this, after in itertools.pairwise(candidates):
            run.use(this.model)
            try:
                return await self._ask(quick, after.model.name, this.on_refusal)
            except _FellOver:
                continue
        run.use(candidates[-1].model)
        return await self._ask(run.retry, None, False)

    def _candidates(self) -> tuple[Candidate, ...]:
        """Return the candidates, rotated so that the model that gave the run's last answer is tried first.

        Raises `PromptEvaluationError` if the choice can't be made.
        """
        run = self._run
        try:
            found = candidates_of(run.settings.model, run.request())
        except DefinitionError as error:
            raise run.failed(error, "request") from error
        names = [each.model.name for each in found]
        if run.answered_by not in names:
            return found
        start = names.index(run.answered_by)
        return (*found[start:], *found[:start])

    async def _ask(self, retry: Retry, after: str | None, on_refusal: bool) -> Answer:
        """Ask the run's model until it answers.

        Raises `_FellOver` if `after`, the next model, is to be asked instead, and `PromptEvaluationError` if the run fails.
        """
        run, tries = self._run, 0
        while True:
            tries += 1
            self._number += 1
            run.has_shown = False
            try:
                answer, seconds, cost = await ask_once(run, self._number, self._failed)
            except BudgetExceededError as error:
                raise run.failed(error, "budget") from error
            except ModelError as error:
                if after is not None and (run.has_shown or not falls_over(error)):
                    # Stay with this model: part of its answer was shown, or the next one would fail too.
                    after, retry = None, run.retry
                wait = self._wait_after(retry, tries, error, after)
                self._tell(str(error), wait, after)
                if wait is None:
                    if after is not None:
                        raise _FellOver from None
                    raise self._gave_up(error, tries) from (
                        None if isinstance(error, ModelKeyMissing) else error
                    )
                if error.retry_after is not None and run.throttle is not None:
                    run.throttle.hold(wait)  # other requests to this provider would be refused as well
                await asyncio.sleep(wait)
                continue
            assert answer.stop is not None
            if after is not None and on_refusal and answer.stop.reason == "refused" and not run.has_shown:
                self._refused(answer, cost, after)
                raise _FellOver
            run.answered_by = answer.model
            if run.frame.log.is_kept:
                offered = {tool.name: offer_of(tool) for tool in run.new_tools}
                run.new_tools.clear()
                recorded = write_answer(answer, seconds, cost, run.masking, tuple(self._failed), offered)
                await finish(run.frame.log.note("model answer", run.place_of_answer, recorded))
            return answer

    def _wait_after(self, retry: Retry, tries: int, error: ModelError, after: str | None) -> float | None:
        """Return the number of seconds until the next attempt; None if this model is not asked again.

        Raises `PromptEvaluationError` if the attempt would be past the deadline and there is no next model.
        """
        wait, deadline = retry.wait_after(tries, error), self._run.frame.deadline
        if wait is None or deadline is None or deadline.remaining() > wait:
            return wait
        if after is not None:
            return None
        self._tell(str(error), wait, None)
        late = f" The next try, in {wait:.1f} s, would be past the deadline."
        raise self._run.failed(error, "deadline", late) from error

    def _tell(self, error: str, wait: float | None, after: str | None) -> None:
        run = self._run
        next_model = after if wait is None and after is not None else ""
        run.frame.session.record(
            ModelFailed(run.model.name, self._number, error, wait, run.frame.run_context, next_model)
        )

    def _refused(self, answer: Answer, cost: Decimal | None, after: str) -> None:
        self._failed.append(
            FailedRequest(
                answer.model, "it refused to answer", usage=answer.usage, cost=cost, charged=answer.charged
            )
        )
        self._tell(f"model {answer.model!r}: it refused to answer", None, after)

    def _gave_up(self, error: ModelError, tries: int) -> Exception:
        said = "" if tries == 1 else f" It was tried {tries} times."
        before = {each.model: each.error for each in self._failed if each.model != self._run.model.name}
        for model, problem in before.items():
            said += f" Before it, {model} failed: {problem.rstrip('.')}."
        failed = self._run.failed(error, "request", said)
        failed.hides_frames = isinstance(error, ModelKeyMissing)
        return failed


class _FellOver(Exception):
    """Raised to ask the next candidate."""
