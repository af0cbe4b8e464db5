"""The loop: ask the model, run the calls it wants, tell it what came of them, until it is done.

There is one for every provider. Whatever happens in it, the conversation is left as a provider would
take it: each call has its one result.
"""

from __future__ import annotations

from typing import Any

from handrail.adapter.advising import Advisers
from handrail.adapter.answer import Answer
from handrail.adapter.output import ANSWER_TOOL, REPAIRS, what_to_correct
from handrail.adapter.requesting import ask
from handrail.adapter.response import Outcome
from handrail.adapter.run import Run
from handrail.dispatch.replaying import RecordedResult
from handrail.dispatch.secrets import is_masked
from handrail.dispatch.turn import OpenTurn
from handrail.errors import ToolValidationError
from handrail.messages import CallAnswered, CallAsked, ToolMessage, UserMessage
from handrail.prompt import OPENER
from handrail.tools import ToolResult


async def run_until_done(run: Run) -> Outcome:
    """Evaluate: raises `PromptEvaluationError` where the run can't go on."""
    conversation, frame = run.conversation, run.frame
    run_id = frame.run_context.run_id
    advisers = Advisers(run) if run.feedback or run.completion else None
    repairs = turns = 0
    try:
        while True:
            answer = await ask(run)
            turns += 1
            calls = conversation.fresh_ids(answer.calls())
            run.say(answer.message(calls))
            taken: Any = None
            if calls:
                frame.provider = answer
                results = await _run_calls(run, calls, f"{run_id}/{turns}")
                taken = _answer_among(run, calls, results) if run.answers_by_call else None
                if taken is None:
                    repairs += run.answers_by_call and any(run.answer_tool(call.name) for call in calls)
                    if repairs > REPAIRS:
                        raise _no_answer(run, results[-1].message)
                    if advisers is not None:
                        await advisers.advise()
                    continue
                outcome = Outcome(answer.text, run.output.value_of(taken.value), "done")  # pyright: ignore[reportOptionalMemberAccess]  # it answers by a call, so there is one
            else:
                try:
                    outcome = _outcome(run, answer)
                except ToolValidationError as error:
                    repairs += 1
                    if repairs > REPAIRS:
                        raise _no_answer(run, str(error)) from error
                    run.say(UserMessage(what_to_correct(error, run.answers_by_call), True))
                    continue
            if advisers is None:
                return outcome
            held = await advisers.hold(outcome.text, outcome.output)
            if held is None:
                return outcome
            if not held:
                return Outcome(outcome.text, outcome.output, "incomplete")
            run.say(UserMessage(held, True))
    finally:
        if advisers is not None:
            advisers.close()


async def _run_calls(run: Run, calls: tuple[CallAsked, ...], message_id: str) -> tuple[ToolResult[Any], ...]:
    """Run a turn's calls through the gate and give each its result, also when the turn is cut short."""
    turn = OpenTurn(run.gate, calls, message_id)
    run.calls += len(calls)
    if run.again and not turn.is_recorded():
        run.goes_on()
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
                    result.render(),
                    not result.success,
                    _opened(run, call, result) if call.name == OPENER else (),
                )
                for call, result in zip(calls, results, strict=True)
            ]
        )
        if not run.frame.left_to_the_record:  # parked: these calls have no results yet
            run.say(ToolMessage(answered))
    if ending is not None:
        raise ending
    return results


def _opened(run: Run, call: CallAsked, result: ToolResult[Any]) -> tuple[str, ...]:
    """Bring the tools into view that a call of the opener has opened, and say which."""
    if not result.success:
        return ()
    paths = [path for path in result.value if path not in run.rendered.opened]
    if not paths:
        return ()  # another call of the same turn has opened them
    for path in paths:
        run.conversation.open_section(path, run.frame.run_context.run_id, again=run.again)
    return run.open(paths)


def _answer_among(
    run: Run, calls: tuple[CallAsked, ...], results: tuple[ToolResult[Any], ...]
) -> ToolResult[Any] | None:
    for call, result in zip(calls, results, strict=True):
        if run.answer_tool(call.name) and result.success:
            if isinstance(result, RecordedResult) and run.output is not None:
                if run.output.schema.secret and is_masked(call.arguments):
                    return None  # the secret in it was not recorded: it has to be given again
                return ToolResult.ok(run.output.schema.parse(call.arguments))  # typed, as it was
            return result
    return None


def _outcome(run: Run, answer: Answer) -> Outcome:
    """What an answer without calls comes to; `ToolValidationError` where it is not what was asked for."""
    stop: Any = answer.stop
    reason = "done" if stop.reason == "calls" else stop.reason
    output = run.output
    if output is None:
        return Outcome(answer.text, None, reason)
    if run.answers_by_call:
        raise ToolValidationError(f"the answer was not given by calling {ANSWER_TOOL}")
    if reason == "length":
        raise ToolValidationError("the answer was cut off because it is too long: make it shorter")
    return Outcome(answer.text, output.parse(answer.text), reason)


def _no_answer(run: Run, problem: str) -> Exception:
    return run.failed(
        ToolValidationError(f"after {REPAIRS} corrections the answer still does not fit: {problem}"), "output"
    )
