"""Every exception Handrail raises, in one tree.

Each is ours *and* the builtin a caller would expect; each carries data beside its words.

    HandrailError
    ├── DefinitionError (ValueError)             something was defined wrongly; found when it is defined
    │   ├── ToolDefinitionError                    .tool, .problem, .hint
    │   ├── PromptDefinitionError                  .place, .problem, .hint
    │   │   └── PromptValidationError                .tool, .places: two tools of one name
    │   ├── ExtraKeyError                          .key
    │   ├── RuleError                              .rule
    │   └── WorkerError                            .problems: a worker's file is wrong, all of it at once
    ├── ToolError                                what a handler raises, or what stops a call before it
    │   ├── ToolValidationError (ValueError)       .problems: the arguments do not fit, all of it at once
    │   ├── TransientError                         .retry_after: try the same call again
    │   ├── CallFailed (RuntimeError)              .result: an inner call came back failed
    │   ├── ActFailed (RuntimeError)               .raised, .where: an act of a handoff raised; its words are kept back
    │   └── OutcomeUnknown (RuntimeError)          .what: it may have happened, and nobody can tell
    ├── ContextError (RuntimeError)              a context or an operation used where it can't be
    │   ├── ContextExpired                         .call: the call is over
    │   ├── CapabilityMissing (LookupError)        .capability: this environment does not have it
    │   ├── NotRendered (LookupError)              the prompt has no rendered form yet
    │   ├── NotSupported (NotImplementedError)     .member: nothing stands behind it here
    │   └── TicketError (ValueError)               .problem: not a ticket of ours, forged, or too old
    ├── OperationError (RuntimeError)            .operation
    │   ├── OperationUsedTwice                     awaited or waited for a second time
    │   ├── OperationHasNoTruth (TypeError)        used as a condition, so the await was forgotten
    │   ├── WaitOnLoopThread                       `.wait()` where `await` belongs
    │   └── LoopGone                               the event loop it belongs to has ended
    ├── NoAnswer                                 a question got no answer: .question
    │   ├── Declined                               .reason: they said no
    │   ├── QuestionCancelled                      it was withdrawn
    │   └── QuestionTimedOut (TimeoutError)        nobody answered in time
    ├── LimitError                               a limit of the run was reached
    │   ├── DeadlineExceededError (TimeoutError)   .deadline
    │   ├── BudgetExceededError                    .unit, .wanted, .left, .of_root
    │   └── DepthExceededError (RecursionError)    .path, .limit
    ├── StateError                               what a session or a resource refuses
    │   ├── SessionError (ValueError)              .session
    │   ├── ReducerError (RuntimeError)            .event: a reducer raised; the dispatch was undone
    │   ├── EventRefused (TypeError)               .event: not an event, or a name of ours
    │   ├── Conflict (RuntimeError)                .places: what was changed by somebody else meanwhile
    │   ├── UndoRefused (RuntimeError)             .call_id, .places: what a call did can't be taken back
    │   ├── EffectRefused (PermissionError)        .effect: a call did more than its tool's effect allows
    │   ├── JournalError (ValueError)              .journal: a file that is no journal, or one that can't be used
    │   ├── ResourceError (LookupError)            .resource
    │   ├── ShellError (RuntimeError)              .command
    │   │   ├── CommandRefused (PermissionError)     .problem, .allowed: it may not run
    │   │   ├── CommandMissing (FileNotFoundError)   .program: there is no such program
    │   │   └── ShellUnavailable                     .problem, .hint: nothing can run contained here
    │   └── FileError (OSError)                    .path
    │       ├── FileMissing (FileNotFoundError)
    │       ├── FileInTheWay (FileExistsError)       something else is there already
    │       ├── PathRefused (ValueError)             a path that leads out or can't be one
    │       ├── EditRefused (ValueError)             the text to replace is not there, or not unique
    │       └── FileLimitReached                     too large, or too many
    ├── AnswerRefused (ValueError)               .question, .problems: unknown, late, forged, or it does not fit
    ├── RequestRefused (ValueError)              .status, .kind, .fields, .retry_after: a server does not serve it
    ├── ModelError (RuntimeError)                .model, .status, .retry_after, .transient
    │   ├── ModelRateLimited                       too much was asked of it
    │   ├── ModelUnavailable (ConnectionError)     it could not be reached, or could not answer
    │   ├── ModelAnswerBroken (ValueError)         its answer was cut off, or can't be read
    │   └── ModelRequestRefused (ValueError)       the request is wrong: trying again won't help
    ├── ConversationBusy (RuntimeError)          .conversation: another evaluation is at work on it
    ├── PromptRenderError (ValueError)           .prompt, .problem, .hint: not with what was given
    ├── PromptEvaluationError (RuntimeError)     .phase, .run_id: the run itself can't go on
    ├── RunError (RuntimeError)                  .run_id: a recorded run can't be used like this
    │   ├── RunUnknown (LookupError)               there is no such run
    │   ├── RunBusy                                .owner: another process has it
    │   ├── RunParked                              .questions: it waits for answers, and can be resumed
    │   └── Diverged                               .place: it is not gone through as it was recorded
    ├── ServeError                               .thread: a server refuses it
    │   ├── ThreadNameRefused (ValueError)         it can't be called that
    │   ├── ThreadUnknown (LookupError)            there is none of theirs with this id
    │   ├── ThreadBusy (RuntimeError)              a run of it is under way
    │   ├── QuestionsOpen (RuntimeError)           .count: it waits for answers
    │   └── ServerStopping (RuntimeError)          nothing is begun any more
    ├── SimulationError (RuntimeError)           .status: the process that crashes a scenario came to nothing
    └── VisibilityExpansionRequired              .sections: show these in full and evaluate again

    OperationNeverAwaited (RuntimeWarning)       a warning: an operation was made and dropped
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from datetime import datetime

    from handrail.schema import Problem
    from handrail.tools import ToolResult


class HandrailError(Exception):
    """The root of the tree: `except HandrailError` catches everything of ours."""


class DefinitionError(HandrailError, ValueError):
    """Something was defined wrongly. Raised where it is defined, never when it is first used."""

    @property
    def parts(self) -> tuple[str, str]:
        """The problem and the hint, for an error that adds where it was found."""
        problem, _, hint = str(self).partition(". ")
        return problem, hint


class ToolDefinitionError(DefinitionError):
    """A tool can't be made as written."""

    def __init__(self, tool: str, problem: str, hint: str) -> None:
        super().__init__(f"tool {tool!r}: {problem}. {hint}")
        self.tool = tool
        self.problem = problem
        self.hint = hint


class PromptDefinitionError(DefinitionError):
    """A prompt or a section can't be made as written; `place` says which."""

    def __init__(self, place: str, problem: str, hint: str) -> None:
        super().__init__(f"{place}: {problem}. {hint}")
        self.place = place
        self.problem = problem
        self.hint = hint


class PromptValidationError(PromptDefinitionError):
    """Two tools that would be offered together have one name; `places` are the paths of their sections."""

    def __init__(self, prompt: str, tool: str, places: Sequence[str]) -> None:
        super().__init__(
            f"prompt {prompt!r}",
            f"two tools are called {tool!r}, in {' and in '.join(places)}",
            "Rename one, drop one, or let only one of the two be enabled at a time.",
        )
        self.tool = tool
        self.places = tuple(places)


class ExtraKeyError(DefinitionError):
    """A key or a value of a context's extras is not of the allowed form."""

    def __init__(self, key: object, problem: str, hint: str) -> None:
        super().__init__(f"extra {key!r}: {problem}. {hint}")
        self.key = key


class RuleError(DefinitionError):
    """A rule about commands can't be what was meant."""

    def __init__(self, rule: str, problem: str, hint: str) -> None:
        super().__init__(f"rule {rule}: {problem}. {hint}")
        self.rule = rule


class WorkerError(DefinitionError):
    """A worker, or a folder of workers, can't be used as written. Everything wrong is in `problems`."""

    def __init__(self, message: str, problems: Sequence[Any] = ()) -> None:
        super().__init__(message)
        self.problems = tuple(problems)


class ToolError(HandrailError):
    """What a handler may raise to fail its call, or what stopped the call before its handler ran."""


class ToolValidationError(ToolError, ValueError):
    """The arguments of a call do not fit. Every problem of the call is in `problems`.

    A handler may raise it too, with plain words: `raise ToolValidationError("'from' is after 'to'")`.
    """

    def __init__(self, message: str, problems: Sequence[Problem] = ()) -> None:
        super().__init__(message)
        self.problems = tuple(problems)


class TransientError(ToolError):
    """The call failed but may succeed if tried again, after `retry_after` seconds when that is known."""

    def __init__(self, message: str = "a passing failure", *, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class CallFailed(ToolError, RuntimeError):
    """An inner call came back with `success=False`; `result` is what it said."""

    def __init__(self, name: str, result: ToolResult[Any]) -> None:
        super().__init__(f"{name} failed: {result.message}")
        self.name = name
        self.result = result


class ActFailed(ToolError, RuntimeError):
    """An act that holds private data raised. What it said is kept back, since it may show some of that.

    `raised` is the name of what was raised, `where` the lines it went through, innermost last.
    """

    def __init__(self, raised: str, where: Sequence[str] = ()) -> None:
        super().__init__(f"it raised {raised} (what that said is kept back, as it may hold private data)")
        self.raised = raised
        self.where = tuple(where)


class OutcomeUnknown(ToolError, RuntimeError):
    """Something may have happened before the process ended, and nobody can tell whether it did."""

    def __init__(self, what: str, hint: str = "Find out what stands before it is done again.") -> None:
        super().__init__(
            f"the process ended while {what} was under way, so it is not known whether it happened. {hint}"
        )
        self.what = what


class ContextError(HandrailError, RuntimeError):
    """A context was used in a way it does not allow."""


class ContextExpired(ContextError):
    """The call this context was made for is over, and nothing can be done through it any more."""

    def __init__(self, call: str) -> None:
        super().__init__(
            f"the call {call!r} has ended, so its context can no longer be used. "
            "Finish what needs the context before the handler returns; work that must outlive "
            "the call belongs in a call or a run of its own."
        )
        self.call = call


class CapabilityMissing(ContextError, LookupError):
    """The tool requires something that this environment does not have."""

    def __init__(self, tool: str, capability: str, hint: str) -> None:
        super().__init__(f"tool {tool!r} needs {capability!r}, which is not there in this run. {hint}")
        self.tool = tool
        self.capability = capability


class NotRendered(ContextError, LookupError):
    """The prompt has not been rendered yet, so there is no rendered form to give."""

    def __init__(self, prompt: str) -> None:
        super().__init__(
            f"prompt {prompt!r} has not been rendered yet. This adapter renders lazily: read "
            "`context.rendered_prompt`, which is None until then, or render it yourself."
        )
        self.prompt = prompt


class NotSupported(ContextError, NotImplementedError):
    """Nothing stands behind this member of the context in this run."""

    def __init__(self, member: str, hint: str) -> None:
        super().__init__(f"`context.{member}` has nothing behind it in this run. {hint}")
        self.member = member


class TicketError(ContextError, ValueError):
    """A ticket can't be taken: it is not one of ours, its signature is wrong, or it is too old."""

    def __init__(self, problem: str, hint: str) -> None:
        super().__init__(f"ticket refused: {problem}. {hint}")
        self.problem = problem


class OperationError(HandrailError, RuntimeError):
    """An operation was used in a way it does not allow."""

    def __init__(self, operation: str, problem: str) -> None:
        super().__init__(f"operation {operation}: {problem}")
        self.operation = operation


class OperationUsedTwice(OperationError):
    """An operation runs once. Make a new one for a second run."""


class OperationHasNoTruth(OperationError, TypeError):
    """An operation was used as a condition: its `await` or `.wait()` was forgotten."""


class WaitOnLoopThread(OperationError):
    """`.wait()` was called on a thread that runs an event loop; it would wait for itself."""


class LoopGone(OperationError):
    """The event loop the operation belongs to has ended."""


class OperationNeverAwaited(RuntimeWarning):
    """An operation was made and thrown away without having run."""


class NoAnswer(HandrailError):
    """Somebody was asked and gave no answer."""

    def __init__(self, question: str, problem: str) -> None:
        super().__init__(f"question {question!r}: {problem}")
        self.question = question


class Declined(NoAnswer):
    """Whoever was asked said no."""

    def __init__(self, question: str, reason: str = "") -> None:
        super().__init__(question, f"declined: {reason}" if reason else "declined")
        self.reason = reason


class QuestionCancelled(NoAnswer):
    """The question was withdrawn before anybody answered."""

    def __init__(self, question: str, reason: str = "") -> None:
        super().__init__(question, f"cancelled: {reason}" if reason else "cancelled before it was answered")
        self.reason = reason


class QuestionTimedOut(NoAnswer, TimeoutError):
    """Nobody answered in the time the question had."""

    def __init__(self, question: str) -> None:
        super().__init__(question, "nobody answered in time")


class LimitError(HandrailError):
    """A limit of the run was reached."""


class DeadlineExceededError(LimitError, TimeoutError):
    """The run's deadline has passed."""

    def __init__(self, deadline: datetime, doing: str) -> None:
        super().__init__(f"the deadline {deadline.isoformat()} passed before {doing}")
        self.deadline = deadline
        self.doing = doing


class BudgetExceededError(LimitError):
    """A spend would go over a budget. Nothing of it was spent."""

    def __init__(self, unit: str, wanted: object, left: object, *, of_root: bool) -> None:
        whose = "the run's budget" if of_root else "this run's share of the budget"
        said = f"{whose} for {unit} is spent: {wanted} wanted, {left} left"
        if isinstance(wanted, str):
            said = (
                f"{whose} is limited in {unit} and {wanted} would be spent. Give the model a price, "
                "or run `pip install 'handrail[prices]'`, which knows the prices of many"
            )
        super().__init__(said)
        self.unit = unit
        self.wanted = wanted
        self.left = left
        self.of_root = of_root


class DepthExceededError(LimitError, RecursionError):
    """Calls are nested more deeply than the run allows."""

    def __init__(self, path: Sequence[str], limit: int) -> None:
        super().__init__(
            f"this call would be {len(path) - 1} deep in others and the limit is {limit}: {' > '.join(path)}. "
            "Do the work at a shallower level, or raise the run's depth limit."
        )
        self.path = tuple(path)
        self.limit = limit


class StateError(HandrailError):
    """A session or a resource refused."""


class SessionError(StateError, ValueError):
    """A session was used or loaded wrongly."""

    def __init__(self, session: str, problem: str, hint: str) -> None:
        super().__init__(f"session {session!r}: {problem}. {hint}")
        self.session = session


class ReducerError(StateError, RuntimeError):
    """A reducer raised, and its dispatch was undone. The reducer's own error is the cause."""

    def __init__(self, reducer: str, event: object, error: BaseException) -> None:
        super().__init__(
            f"reducer {reducer!r} raised {type(error).__name__} on a {type(event).__name__}: {error}. "
            "The event was not applied."
        )
        self.reducer = reducer
        self.event = event


class EventRefused(StateError, TypeError):
    """This can't be dispatched or published."""

    def __init__(self, event: object, problem: str, hint: str) -> None:
        super().__init__(f"event {type(event).__name__}: {problem}. {hint}")
        self.event = event


class Conflict(StateError, RuntimeError):
    """What a call read or wrote was changed by somebody else before it could commit."""

    def __init__(self, places: Sequence[str]) -> None:
        super().__init__(
            f"changed by another call or by somebody else meanwhile: {', '.join(places)}. "
            "Nothing of this was applied: look at the new state and try again."
        )
        self.places = tuple(places)


class UndoRefused(StateError, RuntimeError):
    """What a call committed can't be taken back, and nothing of it was."""

    def __init__(self, call_id: str, places: Sequence[str], problem: str) -> None:
        where, hint = "", ""
        if places:
            where = f": {', '.join(places)}"
            hint = ": correct it by hand, or undo the later changes first"
        super().__init__(f"call {call_id!r} can't be undone: {problem}{where}. Nothing was changed{hint}.")
        self.call_id = call_id
        self.places = tuple(places)


class JournalError(StateError, ValueError):
    """A journal can't be opened or used."""

    def __init__(self, journal: str, problem: str, hint: str) -> None:
        super().__init__(f"journal {journal!r}: {problem}. {hint}")
        self.journal = journal


class EffectRefused(StateError, PermissionError):
    """A call did, or tried to use, more than the effect its tool declares."""

    def __init__(self, tool: str, effect: str | None, problem: str) -> None:
        declares = "an effect that only reads" if effect is None else f"effect={effect!r}"
        super().__init__(
            f"tool {tool!r} declares {declares}: {problem}. Declare the effect that it really has."
        )
        self.tool = tool
        self.effect = effect
        """None where all that is known of it is that it may not write: it is `pure` or `read`."""


class ResourceError(StateError, LookupError):
    """A resource is not there, or can't be made."""

    def __init__(self, resource: str, problem: str, hint: str) -> None:
        super().__init__(f"resource {resource}: {problem}. {hint}")
        self.resource = resource


class ShellError(StateError, RuntimeError):
    """A command could not be run, or not be followed to its end."""

    def __init__(self, command: str, problem: str) -> None:
        super().__init__(f"`{command}`: {problem}" if command else problem)
        self.command = command


class CommandRefused(ShellError, PermissionError):
    """A command may not run. Worded for a model: what may."""

    def __init__(self, command: str, problem: str, allowed: Sequence[str] = ()) -> None:
        super().__init__(command, problem)
        self.problem = problem
        self.allowed = tuple(allowed)


class CommandMissing(ShellError, FileNotFoundError):
    """The program of a command is not there, or can't be executed."""

    def __init__(self, command: str, program: str, problem: str) -> None:
        super().__init__(command, problem)
        self.program = program


class ShellUnavailable(ShellError):
    """What holds a command in is not to be had on this machine, so nothing was run."""

    def __init__(self, problem: str, hint: str) -> None:
        super().__init__("", f"{problem}. {hint}")
        self.problem = problem
        self.hint = hint


class FileError(StateError, OSError):
    """Something about a path."""

    def __init__(self, path: str, problem: str) -> None:
        super().__init__(f"{path!r}: {problem}")
        self.path = path


class FileMissing(FileError, FileNotFoundError):
    """There is nothing at that path."""


class FileInTheWay(FileError, FileExistsError):
    """Something else is at that path already."""


class PathRefused(FileError, ValueError):
    """A path that leads out of the root, or that can't be a path."""


class EditRefused(FileError, ValueError):
    """The text to replace is not in the file, or is there more than once."""


class FileLimitReached(FileError):
    """The file would be too large, or there would be too many."""


class AnswerRefused(HandrailError, ValueError):
    """An answer was not taken: its question is unknown, over, another's, or asks for something else."""

    def __init__(self, question: str, problem: str, hint: str, *, problems: Sequence[Problem] = ()) -> None:
        super().__init__(f"answer to {question!r} refused: {problem}. {hint}")
        self.question = question
        self.problem = problem
        self.problems = tuple(problems)
        """What of its value does not fit, each with its place; empty where it was refused for another reason."""


class RequestRefused(HandrailError, ValueError):
    """A request to a server that is not served, and why. `kind` is what programs tell it by."""

    def __init__(
        self,
        status: int,
        kind: str,
        message: str,
        *,
        fields: Sequence[tuple[str, str]] = (),
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.fields = tuple(fields)
        """What is wrong in its body: JSON pointers, each with the hint."""
        self.retry_after = retry_after


class ModelError(HandrailError, RuntimeError):
    """A request to a model failed. Where it is `transient` the run tries again by itself."""

    transient = False

    def __init__(
        self, model: str, problem: str, *, status: int | None = None, retry_after: float | None = None
    ) -> None:
        code = f" (status {status})" if status is not None else ""
        super().__init__(f"model {model!r}: {problem}{code}")
        self.model = model
        self.problem = problem
        self.status = status
        self.retry_after = retry_after
        """Seconds, where the provider said so."""


class ModelRateLimited(ModelError):
    """The provider takes no more for now."""

    transient = True


class ModelUnavailable(ModelError, ConnectionError):
    """The provider could not be reached, or could not answer."""

    transient = True


class ModelAnswerBroken(ModelError, ValueError):
    """The answer was cut off or can't be read, and nothing of it was used."""

    transient = True


class ModelRequestRefused(ModelError, ValueError):
    """The provider refuses the request itself: a key, a model, or a setting is wrong."""


class ConversationBusy(HandrailError, RuntimeError):
    """A conversation is evaluated once at a time."""

    def __init__(self, session: str, conversation: str) -> None:
        super().__init__(
            f"session {session!r}: another evaluation is at work on the conversation {conversation!r}. "
            "Wait for it, or evaluate on a session of its own."
        )
        self.session = session
        self.conversation = conversation


class PromptRenderError(HandrailError, ValueError):
    """A prompt can't be rendered with the params, session or opened sections it was given."""

    def __init__(self, prompt: str, problem: str, hint: str) -> None:
        super().__init__(f"prompt {prompt!r}: {problem}. {hint}")
        self.prompt = prompt
        self.problem = problem
        self.hint = hint


class PromptEvaluationError(HandrailError, RuntimeError):
    """The run itself can't go on. A tool's failure is never one of these."""

    def __init__(self, message: str, *, phase: str = "run", run_id: str | None = None) -> None:
        super().__init__(message)
        self.phase = phase
        self.run_id = run_id


class RunError(HandrailError, RuntimeError):
    """A recorded run can't be used like this."""

    def __init__(self, run_id: str, problem: str, hint: str) -> None:
        super().__init__(f"run {run_id!r}: {problem}. {hint}")
        self.run_id = run_id


class RunUnknown(RunError, LookupError):
    """The journal has no such run."""

    def __init__(self, run_id: str) -> None:
        super().__init__(
            run_id, "the journal has no such run", "`handrail runs list` shows those that it has."
        )


class RunBusy(RunError):
    """Another process has the run, or had it a moment ago."""

    def __init__(self, run_id: str, owner: str) -> None:
        super().__init__(
            run_id,
            f"the process {owner!r} has it",
            "Wait until it lets go of it, or until its lease is over.",
        )
        self.owner = owner


class RunParked(RunError):
    """The run waits for answers, and nobody is there to give them. It goes on when it is resumed."""

    def __init__(self, run_id: str, questions: Sequence[Any]) -> None:
        asked = ", ".join(repr(question.name) for question in questions)
        super().__init__(run_id, f"it waits for an answer to {asked}", "Answer, then resume it.")
        self.questions = tuple(questions)


class Diverged(RunError):
    """A run that is gone through again does not do what was recorded."""

    def __init__(self, run_id: str, place: str, recorded: str, now: str) -> None:
        super().__init__(
            run_id,
            f"at {place} the record has {recorded}, and now it is {now}",
            "What depends on time or chance belongs into a verb of the context, whose value is recorded.",
        )
        self.place = place
        self.recorded = recorded
        self.now = now


class SimulationError(HandrailError, RuntimeError):
    """The process in which a simulation tries its crash points ended by itself."""

    def __init__(self, status: int | None) -> None:
        super().__init__(
            f"the process that tries the crash points ended with status {status}, and said above why. "
            "It must be able to import the scenario: define what it is made of at the top of a module."
        )
        self.status = status


class VisibilityExpansionRequired(HandrailError):
    """The model asked for sections in full that this adapter can't open in place."""

    def __init__(self, sections: Sequence[str]) -> None:
        super().__init__(f"show in full and evaluate again: {', '.join(sections)}")
        self.sections = tuple(sections)


class ServeError(HandrailError):
    """Something a server refuses; `thread` is the conversation it is about."""

    def __init__(self, thread: str, problem: str, hint: str) -> None:
        self.thread = thread
        super().__init__(f"thread {thread!r}: {problem}. {hint}")


class ThreadNameRefused(ServeError, ValueError):
    """It can't be called that."""


class ServerStopping(ServeError, RuntimeError):
    """The server begins nothing any more."""

    def __init__(self, thread: str) -> None:
        super().__init__(thread, "the server is stopping", "Try again when it is back.")


class ThreadUnknown(ServeError, LookupError):
    """There is no such conversation, or it is somebody else's."""

    def __init__(self, thread: str) -> None:
        super().__init__(thread, "there is none of yours with this id", "Say something in it to begin one.")


class ThreadBusy(ServeError, RuntimeError):
    """A run of it is under way."""

    def __init__(self, thread: str) -> None:
        super().__init__(thread, "a run of it is under way", "Wait until it is over, or cancel it.")


class QuestionsOpen(ServeError, RuntimeError):
    """It waits for answers."""

    def __init__(self, thread: str, count: int) -> None:
        self.count = count
        waits = "a question waits for an answer" if count == 1 else f"{count} questions wait for answers"
        super().__init__(thread, waits, "Answer, or cancel the run, before you say something new.")
