"""The failure table: maps every error to the status and the result of its call."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from handrail.concurrency.cancellation import TimedOut, WentSilent
from handrail.concurrency.deadline import is_span
from handrail.context import Approval
from handrail.errors import (
    ActFailed,
    BudgetExceededError,
    CallFailed,
    CapabilityMissing,
    Conflict,
    DeadlineExceededError,
    DepthExceededError,
    Diverged,
    EffectRefused,
    JournalError,
    NoAnswer,
    OutcomeUnknown,
    PromptEvaluationError,
    RunBusy,
    ToolValidationError,
    TransientError,
    VisibilityExpansionRequired,
    WorkspaceBusy,
    WorkspaceTakenError,
)
from handrail.events import CallStatus, DecidedBy
from handrail.schema import list_problems
from handrail.text.raised_errors import in_short, leaves_of, words_of
from handrail.tools import ToolResult
from handrail.tools.result import clean_text, keep_rendering

if TYPE_CHECKING:
    from handrail.run.call import Attempt

_NOBODY = (
    "If it called context.wait_for or context.prompt_model: these are None if there is no person or no model to ask. "
    "Check first, with `if context.wait_for`, or annotate the context as UserContext or AgentContext."
)


class Refused(Exception):
    """Raised when the gate refuses a call before its handler runs, or refuses its result or its changes afterwards."""

    def __init__(self, status: CallStatus, message: str) -> None:
        super().__init__(message)
        self.status: CallStatus = status


def not_approved(name: str, approval: Approval, how: DecidedBy, asked: str, ran: bool) -> str:
    """Return the message that tells the model why a call was not approved, and whether it ran."""
    why = f": {approval.reason}" if approval.reason else ""
    done = "Its changes were not applied." if ran else "It did not run."
    if how == "nobody":
        hint = " Nobody can be asked here: go on without it, and say what was left undone."
    else:
        hint = " The denial is remembered, so do not repeat this call." if how == "remembered" else ""
    return (
        f"{name} was not approved ({approval.outcome}){why}. {done} It needs approval because {asked}.{hint}"
    )


class SignatureMismatch(Exception):
    """Raised when a handler can't be called with params and a context."""


class WrongResult(Exception):
    """Raised when a handler returns no `ToolResult`, or one that does not have the declared type or can't be shown or recorded."""


class Unsuccessful(Exception):
    """Raised to end a call with a result that has `success=False`, such as one that its handler returned."""

    def __init__(self, result: ToolResult[Any]) -> None:
        self.result = result


class Failure:
    """The outcome of a failed call: the result for the model, and the error that ends the run, if any."""

    __slots__ = ("advice", "loses_run", "reraise", "result", "status")

    def __init__(
        self,
        status: CallStatus,
        message: str,
        reraise: BaseException | None = None,
        advice: str = "",
        *,
        loses_run: bool = False,
    ) -> None:
        self.status: CallStatus = status
        self.result: ToolResult[Any] = ToolResult.error(clean_text(message))
        self.reraise = reraise
        self.advice = advice
        """Advice to the model, which is given only if no effect of the call remains."""
        self.loses_run = loses_run
        """Whether this process can no longer record the run."""

    def told(self, left: Sequence[str], kept: Sequence[str] = ()) -> ToolResult[Any]:
        """Return the result for the model. It names what remains of the call, or gives the advice if nothing remains.

        `left` are the effects that could not be undone, and `kept` the names of inner calls that committed separately.
        """
        message = self.result.message
        remains: list[str] = []
        if kept:
            remains.append(what_stands(kept))
        if left:
            remains.append(f"Could not be undone: {clean_text(', '.join(left))}.")
        if remains:
            what = f"{' '.join(remains)} Find out what it changed before you do it again."
            message = _continued(message, what)
        elif self.advice:
            message = _continued(message, self.advice)
        else:
            return self.result
        told = ToolResult.error(message, self.result.value)
        if "text" in self.result.__dict__:  # its value was rendered by the gate, and may not render again
            shown = self.result.__dict__["text"].removeprefix(self.result.message).lstrip("\n")
            keep_rendering(
                told, f"{message}\n{shown}" if shown else message, self.result.__dict__.get("json")
            )
        return told


def what_stands(kept: Sequence[str]) -> str:
    """Return a sentence with the names of inner calls that have committed separately.

    Each name is given once, with the number of calls if there are several.
    """
    named = (name if number == 1 else f"{name} ({number} times)" for name, number in Counter(kept).items())
    return f"Each of its calls commits separately, so these stand: {', '.join(named)}."


def _continued(message: str, sentence: str) -> str:
    """Return the message with a sentence after it. The message may lack its full stop, or be empty."""
    if not message:
        return sentence
    return f"{message} {sentence}" if message.endswith((".", "!", "?", "…")) else f"{message}. {sentence}"


def failure_of(attempt: Attempt, raised: BaseException, cancel_requested: bool) -> Failure:
    """Return the outcome of a call that raised this error. Every error has an entry in the table.

    An `Exception` that the error's own methods raise does not escape.
    """
    try:
        return _look_up(attempt, _deciding(raised), cancel_requested)
    except Exception:  # an error's `__str__`, `__class__` or `exceptions` raised
        return Failure("error", f"{attempt.name} failed: {type(raised).__name__}")


def _loss(attempt: Attempt, error: BaseException) -> str:
    """Return why this process can no longer record the run of a call, or "" if the error does not mean that.

    A run that can't be recorded stops in this process. It can be resumed, and the process that resumes it decides what to undo.
    """
    if isinstance(error, RunBusy) and error.run_id == attempt.run.log.run_id:
        return "another process has taken over the run"
    if isinstance(error, WorkspaceTakenError) and error.loser == attempt.run.log.run_id:
        return "another run has taken over its workspace"
    if isinstance(error, JournalError) and error.is_lost:
        return "the journal can't be reached"
    return ""


def _look_up(attempt: Attempt, error: BaseException, cancel_requested: bool) -> Failure:
    name = attempt.name
    match error:
        case Refused():
            return Failure(error.status, words_of(error))
        case Unsuccessful():
            failure = Failure("error", error.result.message)
            failure.result = error.result
            return failure
        case ToolValidationError():
            return Failure("invalid", _what_to_correct(name, error))
        case SignatureMismatch():
            return Failure(
                "invalid",
                f"{name} can't be called: {error}. This is a defect in the tool, not in the arguments.",
            )
        case WrongResult():
            return Failure("error", f"{name} failed: {error}.")
        case WentSilent():
            return Failure(
                "timed out",
                f"{name} was stopped: it promised a heartbeat every {error} seconds and did not send one in time.",
            )
        case TimedOut():
            return Failure(
                "timed out",
                f"{name} took longer than {error} seconds and was stopped.",
            )
        case asyncio.CancelledError() if cancel_requested:
            return Failure("cancelled", f"{name} was cancelled.", error)
        case asyncio.CancelledError():
            return Failure("error", f"{name} failed: it cancelled itself.")
        case VisibilityExpansionRequired() if error.run_id in (None, attempt.run_context.run_id):
            return Failure("error", f"{name} needs sections that are not shown yet.", error)
        case PromptEvaluationError() if error.run_id in (None, attempt.run_context.run_id):
            return Failure("error", f"{name} stopped the run: {words_of(error)}", error)
        case DeadlineExceededError() if (
            attempt.deadline is not None and error.deadline == attempt.deadline.at
        ):
            return _ends_the_run(attempt, "timed out", error, "deadline")
        case BudgetExceededError() if error.of_root:
            return _ends_the_run(attempt, "error", error, "budget")
        case Conflict():
            places = ", ".join(error.places)
            what = (
                f"{name} was not applied: another call or somebody else has changed {places} in the meantime."
            )
            return Failure("conflict", what, advice="Look at the new state and try again.")
        case RunBusy() | WorkspaceBusy() | JournalError() if loss := _loss(attempt, error):
            return Failure("cancelled", f"{name} was not recorded: {loss}.", error, loses_run=True)
        case OutcomeUnknown():
            return Failure("error", f"The outcome of {name} is unknown: {words_of(error)}")
        case Diverged():
            return Failure("error", str(OutcomeUnknown(f"{name} ({words_of(error)})")))
        case (
            CapabilityMissing()
            | DepthExceededError()
            | EffectRefused()
            | CallFailed()
            | NoAnswer()
            | ActFailed()
        ):
            return Failure("error", f"{name} failed: {words_of(error) or in_short(error)}")
        case TransientError():
            wait = retry_delay(error)
            hint = f"It may work after {wait:g} seconds." if is_span(wait) else ""
            return Failure("error", f"{name} failed: {in_short(error)}", advice=hint)
        case TypeError() if (
            "'NoneType' object is not callable" in words_of(error) and attempt.wait_for is None
        ):
            return Failure("error", f"{name} failed: {in_short(error)}. {_NOBODY}")
        case VisibilityExpansionRequired():
            sections = ", ".join(error.sections)
            return Failure("error", f"{name} failed: a run inside it needs {sections} to be opened.")
        case Exception() | GeneratorExit():  # a coroutine that is closed does not get here
            return Failure("error", f"{name} failed: {in_short(error)}")
        case _:
            return Failure("error", f"{name} was stopped by {type(error).__name__}.", error)


def retry_delay(error: TransientError) -> float | None:
    """Return the wait in seconds that a handler asked for; None if it asked for none, or the value is invalid."""
    asked: object = error.retry_after
    if isinstance(asked, bool) or not isinstance(asked, int | float):
        return None
    return asked if asked >= 0 else None


def _what_to_correct(name: str, error: ToolValidationError) -> str:
    return f"The arguments of {name} are invalid:\n{list_problems(error)}\nCorrect them and call again."


def _ends_the_run(attempt: Attempt, status: CallStatus, error: Exception, phase: str) -> Failure:
    ending = PromptEvaluationError(f"{attempt.name}: {error}", phase=phase, run_id=attempt.run_context.run_id)
    ending.__cause__ = error
    return Failure(status, f"{attempt.name} did not finish: {error}", ending)


# --- groups of errors ---------------------------------------------------------------------------------


def transient_in(error: BaseException) -> TransientError | None:
    """Return the transient failure in an error or a group; None if there is none.

    If there are several, it is the one that asks for the longest pause.
    """
    found = [each for each in leaves_of(error) if isinstance(each, TransientError)]
    return max(found, key=lambda each: retry_delay(each) or 0.0, default=None)


def _deciding(error: BaseException) -> BaseException:
    """Return the error that decides the outcome.

    In a group, this is the first `VisibilityExpansionRequired` or `PromptEvaluationError`. If there is none, it is the
    group's only error, or the group itself if it has several.
    """
    leaves = list(leaves_of(error))
    for each in leaves:
        if isinstance(each, VisibilityExpansionRequired | PromptEvaluationError):
            return each
    return leaves[0] if len(leaves) == 1 else error
