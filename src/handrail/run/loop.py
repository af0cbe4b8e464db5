"""The loop: ask the model, run its calls, report their results and ask the advisers, until the model is done.

One loop serves all providers. However the loop ends, each call has one result in the conversation, unless this process no
longer records the run, for example because the run was parked or taken over.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import msgspec

from handrail.concurrency.cancellation import open_scope
from handrail.content import Attachment
from handrail.errors import DeadlineExceededError, ToolValidationError
from handrail.events import Advised
from handrail.guard.feedback import CompletionChecker, FeedbackProvider, Reply, RunState, ask, could_not_check
from handrail.messages import CallAnswered, CallAsked, ToolMessage, UserMessage
from handrail.models import ModelRequestRefused
from handrail.prompt import OPENER, Prompt, RenderedPrompt
from handrail.run.answer import ModelAnswer
from handrail.run.call import OpenTurn
from handrail.run.conversation import Conversation, first_text
from handrail.run.evaluation import Evaluation
from handrail.run.orders import end_as_ordered, hear
from handrail.run.place import Place
from handrail.run.record.format import Advice, RecordedResult, is_masked
from handrail.run.record.notices import leave_remarks, tell_remarks, untold
from handrail.run.request import ask_model
from handrail.run.response import ANSWER_TOOL, REPAIRS, Outcome, Output, made_in, what_to_correct
from handrail.run.run import Run
from handrail.run.search import CALLER, loaded_by, unwrapped
from handrail.text.raised_errors import described
from handrail.tools import ToolResult
from handrail.tools.result import shown_text


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


_MOST_PAUSES = 16
"""Maximum number of times in a row that a paused answer is continued. A provider pauses after about ten calls of its own tools."""


def _check_attachments(evaluation: Evaluation, attachments: Sequence[Attachment]) -> None:
    """Raise `PromptEvaluationError` if the run's model does not accept all the attachments, as if its provider had refused them."""
    model = evaluation.settings.model
    problems = [
        f"{each.name}: {problem}" for each in attachments if (problem := model.traits.takes.problem(each))
    ]
    if problems:
        refused = ModelRequestRefused(
            model.name,
            f"it does not accept these attachments: {'; '.join(problems)}. Leave them out, or convert them.",
        )
        raise evaluation.failed(refused, "request") from refused


async def run_in(
    run: Run,
    conversation: Conversation,
    prompt: Prompt[Any],
    rendered: RenderedPrompt[Any],
    *,
    output: Output | None = None,
    on_text: Callable[[str], None] | None = None,
    system: str | None = None,
) -> Outcome:
    """Run a rendered prompt, root or nested, to its end, and return its outcome."""
    attachments = run.options.attachments
    evaluation = Evaluation(
        run, conversation, prompt, rendered, output=output, on_text=on_text, system=system
    )
    if run.outer is None:
        run.model.evaluation = evaluation
    for path in conversation.opened:
        with contextlib.suppress(ToolValidationError):  # it is open, or does not exist any more
            evaluation.open([path])
    _check_attachments(evaluation, attachments)
    run.task = asyncio.current_task()
    evaluation.begin()
    began = len(conversation.messages)
    evaluation.say(UserMessage(first_text(run.options.message, attachments), attachments=attachments))
    ended = "cancelled"
    try:
        outcome = await run_until_done(evaluation)
        ended = outcome.stop_reason
        return msgspec.structs.replace(outcome, attachments=made_in(conversation.messages.since(began)))
    except Exception as error:
        ended = f"failed: {described(error)}"
        raise
    finally:
        run.task = None
        run.cancellation.close()
        if not run.left_to_the_record:
            leave_remarks(evaluation)
        if run.parked:
            evaluation.park()
        else:
            evaluation.end(ended)


async def run_until_done(evaluation: Evaluation) -> Outcome:
    """Loop until the model is done. Raises `PromptEvaluationError` if the run can't continue."""
    conversation, run, prompt = evaluation.conversation, evaluation.run, evaluation.prompt
    run_id = run.run_context.run_id
    advisers = Advisers(evaluation) if prompt.feedback or prompt.completion else None
    repairs = turns = 0
    begun, said = evaluation.begun, ""
    try:
        while True:
            if evaluation.rendered.live:
                evaluation.refresh()
            if (run.log.is_kept or run.mailbox is not None) and not await hear(evaluation):
                return await end_as_ordered(evaluation, Outcome(said, None, "stopped"))
            answer = await ask_model(evaluation)
            said = answer.text or said
            turns += 1
            calls = conversation.fresh_ids(answer.calls())
            if answer.is_interrupted:
                begun.clear()
                if answer.text:
                    evaluation.say(answer.message(()))
                continue
            evaluation.say(answer.message(calls))
            if not calls and answer.is_paused and len(begun) < _MOST_PAUSES:
                begun.append(answer.text)
                continue
            taken: Any = None
            if calls:
                if begun:
                    begun.clear()
                run.model.answer = answer
                meant = calls
                for call in calls:
                    if call.name == CALLER:
                        meant = tuple([unwrapped(each, run.tools) for each in calls])
                        break
                refused = (
                    _refused_at_the_end(evaluation, meant) if evaluation.is_last else answer.cut_off(calls)
                )
                results = await _run_calls(evaluation, calls, meant, f"{run_id}/{turns}", refused)
                taken = _answer_among(evaluation, meant, results) if evaluation.answers_by_call else None
                if evaluation.is_last and evaluation.output is None:
                    return await end_as_ordered(evaluation, Outcome(answer.text, None, "wrapped up"))
                if taken is None or (untold(evaluation) and not evaluation.is_last):
                    repairs += evaluation.is_last or (
                        evaluation.answers_by_call
                        and any(evaluation.answer_tool(call.name) for call in meant)
                    )
                    if repairs > REPAIRS:
                        raise _no_answer(evaluation, results[-1].message)
                    if advisers is not None:
                        await advisers.advise()
                    continue
                outcome = Outcome(answer.text, evaluation.output.value_of(taken.value), "done")  # pyright: ignore[reportOptionalMemberAccess]  # it answers by a call, so there is one
            else:
                text = "".join([*begun, answer.text])
                begun.clear()
                try:
                    outcome = _outcome(evaluation, answer, text)
                except ToolValidationError as error:
                    repairs += 1
                    if repairs > REPAIRS:
                        raise _no_answer(evaluation, str(error)) from error
                    await _correct(evaluation, error)
                    continue
            if evaluation.is_last:
                outcome = Outcome(outcome.text, outcome.output, "wrapped up")
                return await end_as_ordered(evaluation, outcome)
            held = None if advisers is None else await advisers.hold(outcome.text, outcome.output)
            if held:
                evaluation.say(UserMessage(held, True))
                continue
            if held is not None:
                outcome = Outcome(outcome.text, outcome.output, "incomplete")
            if not await _has_more(evaluation, outcome):
                return outcome
    finally:
        if advisers is not None:
            advisers.close()


async def _has_more(evaluation: Evaluation, outcome: Outcome) -> bool:
    """Return whether the model has to be told something although it is done. If not, and the run is recorded, it ends here."""
    run = evaluation.run
    if run.outer is not None or run.end is None:
        return False
    while True:
        if await tell_remarks(evaluation, is_done=True):
            return True
        evaluation.order = None  # there is nothing left to pause or to stop
        if await run.end(outcome):
            return False


def _refused_at_the_end(evaluation: Evaluation, calls: Sequence[CallAsked]) -> Mapping[str, str]:
    """Return the ids of the calls that a run does not make in its last turn, each with a message for the model."""
    return {
        each.id: f"{each.name} was not called, because the run is wrapped up."
        for each in calls
        if not evaluation.answer_tool(each.name)
    }


async def _correct(evaluation: Evaluation, error: ToolValidationError) -> None:
    """Tell the model why its answer was not accepted. A replay repeats what was recorded."""
    log, place = evaluation.run.log, evaluation.place_of_answer
    told = log.find("correction", place, str)
    if told is None:
        told = what_to_correct(error, evaluation.answers_by_call)
        await log.note("correction", place, told)
    evaluation.say(UserMessage(told, True))


async def _run_calls(
    evaluation: Evaluation,
    calls: tuple[CallAsked, ...],
    meant: tuple[CallAsked, ...],
    message_id: str,
    cut_off: Mapping[str, str],
) -> tuple[ToolResult[Any], ...]:
    """Run the calls of a turn through the gate, and return their results. `meant` are the calls that they stand for.

    Adds the results to the conversation, unless this process no longer records the run. Raises the error that ends the
    run, if there is one, after that.
    """
    turn = OpenTurn(evaluation.gate, meant, message_id, cut_off)
    evaluation.calls += len(calls)
    if evaluation.replays and not turn.is_recorded():
        evaluation.leave_record()
    ending: BaseException | None = None
    results: tuple[ToolResult[Any], ...] = ()
    try:
        ending = await turn.run()
    finally:
        results = turn.results()
        answered = tuple(
            [
                _answered(evaluation, call, call_meant, result)
                for call, call_meant, result in zip(calls, meant, results, strict=True)
            ]
        )
        if (
            not evaluation.run.left_to_the_record
        ):  # otherwise the calls get their results when the run is resumed
            evaluation.say(ToolMessage(answered))
    if ending is not None:
        raise ending
    return results


def _answered(
    evaluation: Evaluation, call: CallAsked, meant: CallAsked, result: ToolResult[Any]
) -> CallAnswered:
    """Return a result as it is sent to the model, with the tools that it shows."""
    shows, definitions = (), ""
    if meant.name == OPENER:
        shows = _opened(evaluation, meant, result)
    elif evaluation.search is not None:
        shows, definitions = loaded_by(call.name, result.value)
    text, failed = shown_text(result), not result.success
    return CallAnswered(call.id, call.name, text, failed, shows, result.attachments, definitions)


def _opened(evaluation: Evaluation, call: CallAsked, result: ToolResult[Any]) -> tuple[str, ...]:
    """Show the tools of the sections that a call opened, and return their names; () if the call failed or opened nothing new."""
    if not result.success:
        return ()
    paths = [path for path in result.value if path not in evaluation.rendered.opened]
    if not paths:
        return ()  # another call of the same turn has opened the sections
    for path in paths:
        evaluation.conversation.open_section(
            path, evaluation.run.run_context.run_id, again=evaluation.replays
        )
    return evaluation.open(paths)


def _answer_among(
    evaluation: Evaluation, calls: tuple[CallAsked, ...], results: tuple[ToolResult[Any], ...]
) -> ToolResult[Any] | None:
    for call, result in zip(calls, results, strict=True):
        if evaluation.answer_tool(call.name) and result.success:
            if isinstance(result, RecordedResult) and evaluation.output is not None:
                if evaluation.output.schema.secret and is_masked(call.arguments):
                    return None  # the secret was not recorded, so the model has to answer again
                return ToolResult.ok(evaluation.output.schema.parse(call.arguments))  # restores the type
            return result
    return None


def _outcome(evaluation: Evaluation, answer: ModelAnswer, text: str) -> Outcome:
    """Return the outcome of an answer without calls, whose complete text is `text`.

    If the run has a schema for its answer, raises `ToolValidationError` if the answer does not match it, was cut off because
    it was too long, or should have been given by a call.
    """
    stop: Any = answer.stop
    reason = "done" if stop.reason == "calls" else "length" if stop.reason == "paused" else stop.reason
    output = evaluation.output
    if output is None:
        return Outcome(text, None, reason)
    if evaluation.answers_by_call:
        raise ToolValidationError(f"the answer was not given by calling {ANSWER_TOOL}")
    if reason == "length":
        raise ToolValidationError("the answer was cut off because it was too long. Make it shorter")
    value = output.parse(text)
    return Outcome(output.text_of(text), value, reason)


def _no_answer(evaluation: Evaluation, problem: str) -> Exception:
    return evaluation.failed(
        ToolValidationError(f"after {REPAIRS} corrections the answer is still invalid: {problem}"), "output"
    )
