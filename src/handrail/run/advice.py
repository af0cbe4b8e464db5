"""`Advisers`: asks the feedback providers and completion checkers of a run when they are due."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any, Literal

import msgspec

from handrail.concurrency.cancellation import open_scope
from handrail.errors import DeadlineExceededError
from handrail.events import Advised
from handrail.guard.feedback import CompletionChecker, FeedbackProvider, Reply, RunState, ask, could_not_check
from handrail.messages import UserMessage
from handrail.run.evaluation import Evaluation
from handrail.run.place import Place


class Advice(msgspec.Struct, frozen=True):
    """Recorded advice, with the number of times that each adviser had spoken by then."""

    said: list[str]
    given: list[int]
    after: int
    """The number of the model's answer that the advice follows."""


class Advisers:
    """The feedback providers and completion checkers of one run."""

    def __init__(self, evaluation: Evaluation) -> None:
        self._evaluation = evaluation
        self._given: dict[int, int] = {}
        self._asked_at: dict[int, tuple[int, float]] = {}
        self._seen: set[type] = set()
        self._times = 0
        """The number of rounds of advice so far. It is part of the place under which a round is recorded."""
        self._began = evaluation.run.monotonic()
        self._stop: list[Callable[[], None]] = [
            evaluation.run.session.dispatcher.subscribe(kind, self._note(kind))
            for kind in {
                each.trigger.event for each in evaluation.prompt.feedback if each.trigger.event is not None
            }
        ]

    def close(self) -> None:
        """Stop listening to events."""
        for stop in self._stop:
            stop()

    def _note(self, kind: type) -> Callable[[object], None]:
        return lambda event: self._seen.add(kind)

    async def advise(self) -> None:
        """Ask every feedback provider that is due after a turn of calls, and pass its advice on to the model.

        A provider that has reached its cap is not asked. A replay asks no provider, and repeats the recorded advice.
        """
        seen, self._seen = self._seen, set()
        run_log, place = self._evaluation.run.log, self._next_place()
        if (before := run_log.find("advice", place, Advice)) is not None:
            self._recall(self._evaluation.prompt.feedback, before)
            for said in before.said:
                self._tell(said)
            return
        self._evaluation.leave_record()
        given: list[str] = []
        for provider in self._evaluation.prompt.feedback:
            if self._is_due(provider, seen) and self._given.get(id(provider), 0) < provider.cap:
                said = await self._said("feedback", provider, provider.advise, "", None)
                if said.text:
                    given.append(f"[{provider.name}] {said.text}")
        await run_log.note("advice", place, self._advice(self._evaluation.prompt.feedback, given))
        for said in given:
            self._tell(said)

    def _tell(self, said: str) -> None:
        self._evaluation.say(UserMessage(said, True))

    def _advice(self, who: Sequence[Any], said: list[str]) -> Advice:
        given = [self._given.get(id(each), 0) for each in who]
        return Advice(said, given, self._evaluation.answers)

    def _recall(self, who: Sequence[Any], advice: Advice) -> None:
        self._given.update(zip(map(id, who), advice.given, strict=False))

    def _next_place(self) -> Place:
        self._times += 1
        return self._evaluation.run.place.advice(self._times)

    async def hold(self, text: str, output: Any) -> str | None:
        """Return what is still missing when the model wants to end the run, as a message for the model.

        A checker that raises an error counts as objecting. Returns None if nothing is missing, or "" if only checkers
        that have reached their cap object.
        """
        run_log, place = self._evaluation.run.log, self._next_place()
        if (before := run_log.find("advice", place, Advice)) is not None:
            self._recall(self._evaluation.prompt.completion, before)
            return before.said[0] if before.said else None
        self._evaluation.leave_record()
        held = await self._hold(text, output)
        advice = self._advice(self._evaluation.prompt.completion, [] if held is None else [held])
        await run_log.note("advice", place, advice)
        return held

    async def _hold(self, text: str, output: Any) -> str | None:
        missing: list[str] = []
        problems: list[str] = []
        spent = False
        for checker in self._evaluation.prompt.completion:
            at_cap = self._given.get(id(checker), 0) >= checker.cap
            said = await self._said("completion", checker, checker.missing, text, output, count=not at_cap)
            if at_cap:
                spent = spent or bool(said.text or said.problem)
            elif said.problem:
                problems.append(could_not_check(checker.name, said.problem))
            elif said.text:
                missing.append(said.text)
        if missing:
            return f"The task is not finished. {' '.join([*missing, *problems])} Continue, then answer again."
        if problems:
            return (
                f"It can't be confirmed that the task is finished. {' '.join(problems)} "
                "Correct the cause if you can, then answer again."
            )
        return "" if spent else None

    def _is_due(self, provider: FeedbackProvider, seen: set[type]) -> bool:
        trigger, calls = provider.trigger, self._evaluation.calls
        now = self._evaluation.run.monotonic()
        calls_then, then = self._asked_at.get(id(provider), (0, self._began))
        due = (
            (trigger.calls is not None and calls - calls_then >= trigger.calls)
            or (trigger.seconds is not None and now - then >= trigger.seconds)
            or (trigger.event is not None and trigger.event in seen)
        )
        if due:
            self._asked_at[id(provider)] = (calls, now)
        return due

    async def _said(
        self,
        kind: Literal["feedback", "completion"],
        who: FeedbackProvider | CompletionChecker,
        asked: Callable[[RunState], Any],
        text: str,
        output: Any,
        count: bool = True,
    ) -> Reply:
        """Ask a provider or checker, within the run's deadline, and record what it said, if anything.

        An error in a checker counts towards its cap; an error in a feedback provider does not. Without `count`, nothing
        is counted or recorded.
        """
        run = self._evaluation.run
        said = await self._within_deadline(ask(who.name, partial(self._ask, who, asked, text, output)))
        told = said.problem or said.text
        if told and count:
            if kind == "completion" or not said.problem:
                self._given[id(who)] = self._given.get(id(who), 0) + 1
            run.session.record(Advised(kind, who.name, told, bool(said.problem), run.run_context))
        return said

    async def _within_deadline(self, asking: Coroutine[Any, Any, Reply]) -> Reply:
        """Await an answer. The run fails if the deadline passes first, even if the provider or checker ignores its cancellation."""
        deadline, scope = self._evaluation.run.deadline, open_scope(self._evaluation.run.cancellation)
        ending: BaseException = asyncio.CancelledError()
        said: Reply | None = None
        if deadline is not None:
            scope.start_deadline(deadline)
        try:
            said = await asking
        except asyncio.CancelledError as error:
            ending = error
        finally:
            late = scope.explain(ending, "the advisers had answered")
            stopped = scope.close()
        if isinstance(late, DeadlineExceededError):
            raise self._evaluation.failed(late, "deadline") from late
        if stopped or said is None:
            raise ending
        return said

    async def _ask(self, who: object, asked: Callable[[RunState], Any], text: str, output: Any) -> str | None:
        said = asked(await self._state(who, text, output))
        return await said if inspect.isawaitable(said) else said

    async def _state(self, who: object, text: str, output: Any) -> RunState:
        evaluation, run = self._evaluation, self._evaluation.run
        budget = run.budget
        return RunState(
            session=evaluation.session_view,
            calls=evaluation.calls,
            seconds=run.monotonic() - self._began,
            given=self._given.get(id(who), 0),
            deadline=run.deadline,
            left={} if budget is None else budget.remaining(),
            spent={} if budget is None else {unit: float(spent) for unit, spent in budget.spent().items()},
            filesystem=await evaluation.files(),
            text=text,
            output=output,
        )
