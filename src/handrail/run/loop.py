"""The loop: ask the model, run its calls and report their results, until the model is done.

One loop serves all providers. However the loop ends, each call has one result in the conversation, unless this process no
longer records the run, for example because the run was parked or taken over.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from handrail.content import Attachment
from handrail.errors import ToolValidationError
from handrail.messages import CallAnswered, CallAsked, ToolMessage, UserMessage
from handrail.models import ModelRequestRefused
from handrail.prompt import OPENER, Prompt, RenderedPrompt
from handrail.run.advice import Advisers
from handrail.run.answer import Answer
from handrail.run.call import OpenTurn
from handrail.run.conversation import Conversation, first_text
from handrail.run.evaluation import Evaluation
from handrail.run.record.format import RecordedResult, is_masked
from handrail.run.record.notices import leave_remarks, untold
from handrail.run.request import ask
from handrail.run.response import ANSWER_TOOL, REPAIRS, Outcome, Output, made_in, what_to_correct
from handrail.run.run import Run
from handrail.text.raised_errors import described
from handrail.tools import ToolResult
from handrail.tools.result import shown_text

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
        if not run.parked:
            evaluation.end(ended)


async def run_until_done(evaluation: Evaluation) -> Outcome:
    """Loop until the model is done. Raises `PromptEvaluationError` if the run can't continue."""
    conversation, run, prompt = evaluation.conversation, evaluation.run, evaluation.prompt
    run_id = run.run_context.run_id
    advisers = Advisers(evaluation) if prompt.feedback or prompt.completion else None
    repairs = turns = 0
    begun = evaluation.begun
    try:
        while True:
            if evaluation.rendered.live:
                evaluation.refresh()
            answer = await ask(evaluation)
            turns += 1
            calls = conversation.fresh_ids(answer.calls())
            evaluation.say(answer.message(calls))
            if not calls and answer.is_paused and len(begun) < _MOST_PAUSES:
                begun.append(answer.text)
                continue
            taken: Any = None
            if calls:
                if begun:
                    begun.clear()
                run.model.provider = answer
                results = await _run_calls(evaluation, calls, f"{run_id}/{turns}", answer.cut_off(calls))
                taken = _answer_among(evaluation, calls, results) if evaluation.answers_by_call else None
                if taken is None or untold(evaluation):
                    repairs += evaluation.answers_by_call and any(
                        evaluation.answer_tool(call.name) for call in calls
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
            if advisers is None:
                return outcome
            held = await advisers.hold(outcome.text, outcome.output)
            if held is None:
                return outcome
            if not held:
                return Outcome(outcome.text, outcome.output, "incomplete")
            evaluation.say(UserMessage(held, True))
    finally:
        if advisers is not None:
            advisers.close()


async def _correct(evaluation: Evaluation, error: ToolValidationError) -> None:
    """Tell the model why its answer was not accepted. A replay repeats what was recorded."""
    log, place = evaluation.run.log, evaluation.place_of_answer
    told = log.find("correction", place, str)
    if told is None:
        told = what_to_correct(error, evaluation.answers_by_call)
        await log.note("correction", place, told)
    evaluation.say(UserMessage(told, True))


async def _run_calls(
    evaluation: Evaluation, calls: tuple[CallAsked, ...], message_id: str, cut_off: Mapping[str, str]
) -> tuple[ToolResult[Any], ...]:
    """Run the calls of a turn through the gate, and return their results.

    Adds the results to the conversation, unless this process no longer records the run. Raises the error that ends the
    run, if there is one, after that.
    """
    turn = OpenTurn(evaluation.gate, calls, message_id, cut_off)
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
                CallAnswered(
                    call.id,
                    call.name,
                    shown_text(result),
                    not result.success,
                    _opened(evaluation, call, result) if call.name == OPENER else (),
                    result.attachments,
                )
                for call, result in zip(calls, results, strict=True)
            ]
        )
        if (
            not evaluation.run.left_to_the_record
        ):  # otherwise the calls get their results when the run is resumed
            evaluation.say(ToolMessage(answered))
    if ending is not None:
        raise ending
    return results


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


def _outcome(evaluation: Evaluation, answer: Answer, text: str) -> Outcome:
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
