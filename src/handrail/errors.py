"""The exceptions that cross layers, in one tree.

Most also derive from the built-in exception that a caller would expect, and carry data besides their message. Errors
that concern a single package are defined there, for example those of commands in `resources.shell.shell_errors`, of
requests to models in `models`, and of serving in `serve.refusals`.

    HandrailError
    ├── DefinitionError (ValueError)             a definition or an argument is wrong
    │   ├── ToolDefinitionError                    .tool, .problem, .hint
    │   ├── PromptDefinitionError                  .place, .problem, .hint
    │   │   └── PromptValidationError                .tool, .places: two tools with the same name
    │   ├── ExtraKeyError                          .key
    │   └── WorkerError                            .problems: everything wrong with a worker's file
    ├── ToolError                                something is wrong with a call, its arguments or its result
    │   ├── ToolValidationError (ValueError)       .problems: what is wrong with a value, usually arguments
    │   ├── TransientError                         .retry_after: the same call may succeed later
    │   ├── CallFailed (RuntimeError)              .result: a call failed, so it has no value
    │   ├── ActFailed (RuntimeError)               .raised, .where: an act of a handoff raised; its message is withheld
    │   └── OutcomeUnknown (RuntimeError)          .what: it is unknown whether this happened
    ├── ContextError (RuntimeError)              a context was used in a way that is not allowed
    │   ├── ContextExpired                         .call: the call is over
    │   ├── CapabilityMissing (LookupError)        .capability: this run does not have it
    │   ├── NotRendered (LookupError)              the prompt has not been rendered yet
    │   ├── NotSupported (NotImplementedError)     .member: a member of the context is not available
    │   └── TicketError (ValueError)               .problem: not a ticket, forged, expired or in use
    ├── OperationError (RuntimeError)            .operation
    │   ├── OperationUsedTwice                     awaited or waited for twice
    │   ├── OperationHasNoTruth (TypeError)        used as a condition: the await is missing
    │   ├── WaitOnLoopThread                       `.wait()` where `await` belongs
    │   └── LoopGone                               the event loop it belongs to is closed
    ├── NoAnswer                                 a question got no answer: .question
    │   ├── Declined                               .reason: the person said no, or nobody could be asked
    │   ├── QuestionCancelled                      .reason: it was closed, for example withdrawn
    │   └── QuestionTimedOut (TimeoutError)        nobody answered in time
    ├── LimitError                               a limit of the run was reached
    │   ├── DeadlineExceededError (TimeoutError)   .deadline
    │   ├── BudgetExceededError                    .unit, .wanted, .left, .of_root
    │   ├── SpendCapReached                        a cap on a day's spending was not raised
    │   └── DepthExceededError (RecursionError)    .path, .limit, .depth
    ├── StateError                               a session, a journal or a resource refused an operation
    │   ├── SessionError (ValueError)              .session
    │   │   ├── SessionOutdated (RuntimeError)       another run has worked on the recorded session since it was loaded
    │   │   └── SessionUnknown (LookupError)         .principal: it has no recorded session with this id
    │   ├── SessionBusy (RuntimeError)             .session, .run_id, .owner: another run is working on the session
    │   ├── ReducerError (RuntimeError)            .event: a reducer failed; the dispatch was undone
    │   ├── EventRefused (TypeError)               .event: it can't be dispatched or published as an event
    │   ├── Conflict (RuntimeError)                .places: what somebody else changed in the meantime
    │   ├── UndoRefused (RuntimeError)             .call_id, .places: a call can't be undone
    │   ├── EffectRefused (PermissionError)        .effect: a call did more than its tool's effect allows
    │   ├── JournalError (ValueError)              .journal: not a journal, or one that can't be used
    │   │   ├── JournalAltered                       .chain, .id, .record: a record was altered
    │   │   ├── JournalExposed                       other users or tools could read or change it
    │   │   └── JournalUpgraded                      .oldest: only newer versions of Handrail may write to it
    │   ├── ErasureRefused (RuntimeError)          .principal, .runs, .calls: a person can't be erased yet
    │   ├── BlobNotFoundError (LookupError)        .digest: a journal has no such bytes
    │   ├── WorkspaceBusy (RuntimeError)           .workspace, .run_id, .owner: another run has the workspace
    │   │   └── WorkspaceTakenError                  .loser: this process has lost a run's workspace
    │   ├── WorkspaceNotFoundError (LookupError)   .workspace: a journal has no such workspace
    │   ├── ResourceError (LookupError)            .resource
    │   └── FileError (OSError)                    .path
    │       ├── FileMissing (FileNotFoundError)
    │       ├── FileInTheWay (FileExistsError)       something else exists there
    │       ├── PathRefused (ValueError)             an invalid path, or one outside the root
    │       ├── EditRefused (ValueError)             the text to replace is empty, equals the new text, or is not there or not unique
    │       ├── FileLimitReached                     too large, or too many, or the disk is full
    │       └── UnfinishedCommit                     .journal, .run_id, .call_id: a dead process's changes come first
    ├── AnswerRefused (ValueError)               .question, .problems: unknown, late, forged, or invalid
    ├── SpawnRefused (ValueError)                .agent, .problem: a background run can't be begun
    ├── ModelError (RuntimeError)                .model, .status, .retry_after, .transient
    ├── ConversationBusy (RuntimeError)          .conversation: another evaluation is using it
    ├── PromptRenderError (ValueError)           .prompt, .problem, .hint: wrong params or session
    ├── PromptEvaluationError (RuntimeError)     .phase, .run_id: the run can't continue
    ├── RunError (RuntimeError)                  .run_id: a recorded run can't be used or continued now
    │   ├── RunUnknown (LookupError)               there is no such run
    │   ├── RunBusy                                .owner: a process is executing the run
    │   ├── RunParked                              .questions: it waits for answers; resume it afterwards
    │   └── Diverged                               .place: the replay differs from the record
    └── VisibilityExpansionRequired              .sections, .run_id: show these in full and evaluate again

    OperationNeverAwaited (RuntimeWarning)       a warning: an operation was never used
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from datetime import datetime

    from handrail.schema.problems import Problem
    from handrail.tools import ToolResult


class HandrailError(Exception):
    """The root of the tree: `except HandrailError` catches every exception in it."""

    hides_frames = False
    """Whether `Operation.wait` leaves Handrail's own frames out of the traceback, because the message says everything."""
    retry_level: int = logging.WARNING
    """The level at which to log the error where what failed is tried again."""


class DefinitionError(HandrailError, ValueError):
    """A definition or an argument is wrong. Raised as soon as the mistake can be detected, usually before anything runs."""

    @property
    def parts(self) -> tuple[str, str]:
        """The message, split into problem and hint, so that another error can add where the problem was found."""
        problem, _, hint = str(self).partition(". ")
        return problem, hint


class ToolDefinitionError(DefinitionError):
    """A tool's definition is invalid."""

    def __init__(self, tool: str, problem: str, hint: str) -> None:
        super().__init__(f"tool {tool!r}: {problem}. {hint}")
        self.tool = tool
        self.problem = problem
        self.hint = hint


class PromptDefinitionError(DefinitionError):
    """The definition of a prompt or a section is invalid. `place` names the prompt or section."""

    def __init__(self, place: str, problem: str, hint: str) -> None:
        super().__init__(f"{place}: {problem}. {hint}")
        self.place = place
        self.problem = problem
        self.hint = hint


class PromptValidationError(PromptDefinitionError):
    """Two tools that would be offered together have the same name. `places` says where they are declared."""

    def __init__(self, prompt: str, tool: str, places: Sequence[str]) -> None:
        first, *others = dict.fromkeys(places)
        where = f"in {' and in '.join((first, *others))}" if others else f"both in {first}"
        hint = "Rename one, drop one, or enable only one of the two at a time."
        super().__init__(
            f"prompt {prompt!r}",
            f"two tools are named {tool!r}, {where}",
            hint if others else "Rename one or drop one.",
        )
        self.tool = tool
        self.places = tuple(places)


class ExtraKeyError(DefinitionError):
    """A key or a value in a context's extras is invalid."""

    def __init__(self, key: object, problem: str, hint: str) -> None:
        super().__init__(f"extra {key!r}: {problem}. {hint}")
        self.key = key


class WorkerError(DefinitionError):
    """A worker, or a folder of workers, is missing or invalid. `problems` lists what is wrong in a file, and may be empty."""

    def __init__(self, message: str, problems: Sequence[Any] = ()) -> None:
        super().__init__(message)
        self.problems = tuple(problems)


class ToolError(HandrailError):
    """Something is wrong with a call, its arguments or its result."""


class ToolValidationError(ToolError, ValueError):
    """A value is invalid, usually the arguments of a call. `problems` lists what is wrong with it, and may be empty.

    A handler may raise it, too: `raise ToolValidationError("'from' is after 'to'")`.
    """

    def __init__(self, message: str, problems: Sequence[Problem] = ()) -> None:
        super().__init__(message)
        self.problems = tuple(problems)


class TransientError(ToolError):
    """The call failed but may succeed if retried, after `retry_after` seconds if that is known.

    The gate retries a call at most twice, and only if the tool's effect allows retries and no inner call has
    committed separately. It waits at most a minute, and never past the tool's timeout or the run's deadline. A call that
    would have to wait longer fails at once.
    """

    retry_after: float | None = None

    def __init__(self, message: str = "a transient failure", *, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class CallFailed(ToolError, RuntimeError):
    """A call failed, and its value was requested. `result` is the call's result."""

    def __init__(self, name: str, result: ToolResult[Any]) -> None:
        super().__init__(f"{name} failed: {result.message}")
        self.name = name
        self.result = result


class ActFailed(ToolError, RuntimeError):
    """An act of a handoff raised an exception. Its message is withheld, since it may contain private data.

    `raised` is the name of the exception's class, and `where` lists the places in its traceback, innermost last.
    """

    def __init__(self, raised: str, where: Sequence[str] = ()) -> None:
        super().__init__(f"it raised {raised} (its message is withheld, as it may contain private data)")
        self.raised = raised
        self.where = tuple(where)


class OutcomeUnknown(ToolError, RuntimeError):
    """Something was in progress when a process ended, and it is not known whether it happened."""

    def __init__(self, what: str, hint: str = "Find out before you do it again.") -> None:
        super().__init__(
            f"the process ended while {what} was under way, so it is not known whether it happened. {hint}"
        )
        self.what = what


class ContextError(HandrailError, RuntimeError):
    """A context was used in a way that is not allowed."""


class ContextExpired(ContextError):
    """The context can't be used any more, because its handler or its call has ended. `call` is "" if it is not known."""

    def __init__(self, call: str) -> None:
        which = f"the call {call!r}" if call else "the call whose handler started this code"
        super().__init__(
            f"{which} has ended, so its context can no longer be used. "
            "Finish what needs the context before the handler returns; work that must outlive "
            "the call belongs in another call or run."
        )
        self.call = call


class CapabilityMissing(ContextError, LookupError):
    """The tool requires a capability that this run does not have."""

    def __init__(self, tool: str, capability: str, hint: str) -> None:
        super().__init__(f"tool {tool!r} needs {capability!r}, which this run does not have. {hint}")
        self.tool = tool
        self.capability = capability


class NotRendered(ContextError, LookupError):
    """The prompt has not been rendered yet."""

    def __init__(self, prompt: str) -> None:
        super().__init__(
            f"prompt {prompt!r} has not been rendered yet. Use `context.rendered_prompt`, which is None until then, "
            "or render the prompt yourself."
        )
        self.prompt = prompt


class NotSupported(ContextError, NotImplementedError):
    """This member of the context is not available in this run."""

    def __init__(self, member: str, hint: str) -> None:
        super().__init__(f"`context.{member}` is not available in this run. {hint}")
        self.member = member


class TicketError(ContextError, ValueError):
    """A ticket was refused, for example because its signature is wrong, it has expired, or its call is over."""

    def __init__(self, problem: str, hint: str) -> None:
        super().__init__(f"ticket refused: {problem}. {hint}")
        self.problem = problem


class OperationError(HandrailError, RuntimeError):
    """An operation was used in a way that is not allowed."""

    def __init__(self, operation: str, problem: str) -> None:
        super().__init__(f"operation {operation}: {problem}")
        self.operation = operation


class OperationUsedTwice(OperationError):
    """An operation or a stream was used a second time. Create a new one instead."""


class OperationHasNoTruth(OperationError, TypeError):
    """An operation was used as a condition, because its `await` or `.wait()` was forgotten."""


class WaitOnLoopThread(OperationError):
    """`.wait()` was called on a thread that runs an event loop, which it would block."""


class LoopGone(OperationError):
    """The event loop that the operation belongs to is closed."""


class OperationNeverAwaited(RuntimeWarning):
    """An operation was created and never run."""


class NoAnswer(HandrailError):
    """A question got no answer."""

    def __init__(self, question: str, problem: str) -> None:
        super().__init__(f"question {question!r}: {problem}")
        self.question = question


class Declined(NoAnswer):
    """The person who was asked said no or gave no valid answer, or nobody could be asked."""

    def __init__(self, question: str, reason: str = "") -> None:
        super().__init__(question, f"declined: {reason}" if reason else "declined")
        self.reason = reason


class QuestionCancelled(NoAnswer):
    """The question was closed without an answer, for example because it was withdrawn or could not be shown."""

    def __init__(self, question: str, reason: str = "") -> None:
        super().__init__(question, f"cancelled: {reason}" if reason else "cancelled before it was answered")
        self.reason = reason


class QuestionTimedOut(NoAnswer, TimeoutError):
    """Nobody answered before the question's timeout."""

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
    """Spending this amount would exceed the budget, or the amount is unknown, so nothing was spent."""

    def __init__(self, unit: str, wanted: object, left: object, *, of_root: bool) -> None:
        whose = "the run's budget" if of_root else "this run's share of the budget"
        said = f"{whose} for {unit} is too low: {wanted} wanted, {left} left"
        if isinstance(wanted, str):
            said = (
                f"{whose} is limited in {unit} and {wanted} would be spent. Give the model a price, "
                "or run `pip install 'handrail[prices]'`, which has the prices of many models"
            )
        super().__init__(said)
        self.unit = unit
        self.wanted = wanted
        self.left = left
        self.of_root = of_root


class SpendCapReached(LimitError):
    """A cap on what is spent in a day leaves too little for a request, and nobody raised it. Nothing was spent."""

    def __init__(self, problem: str, why: str) -> None:
        super().__init__(f"{problem}. {why}. Have it raised, or try again on the next day.")


class DepthExceededError(LimitError, RecursionError):
    """Calls or runs are nested more deeply than the run allows."""

    def __init__(self, path: Sequence[str], limit: int, depth: int) -> None:
        super().__init__(
            f"this would be nested {depth} levels deep, and the limit is {limit}: {' > '.join(path)}. "
            "Do the work at a shallower level, or raise the run's depth limit."
        )
        self.path = tuple(path)
        self.limit = limit
        self.depth = depth


class StateError(HandrailError):
    """A session, a journal or a resource refused an operation."""


class SessionError(StateError, ValueError):
    """A session can't be saved, loaded or used as requested."""

    def __init__(self, session: str, problem: str, hint: str) -> None:
        super().__init__(f"session {session!r}: {problem}. {hint}")
        self.session = session


class SessionOutdated(SessionError, RuntimeError):
    """Another run has worked on a recorded session since this object was loaded, so what it holds may no longer be true."""

    def __init__(self, session: str) -> None:
        super().__init__(
            session,
            "the journal has runs of this session that this object does not include",
            f"To continue it, pass session={session!r} to the run, or load it again with "
            f"`await handrail.runs.session(journal, {session!r}, principal=...)`. To begin a new one, choose another id.",
        )


class SessionUnknown(SessionError, LookupError):
    """The journal has no run of the principal in a session with this id."""

    def __init__(self, session: str, principal: str) -> None:
        whose = repr(principal) if principal else "nobody in particular"
        super().__init__(
            session,
            f"the journal has no session of {whose} with this id",
            "`handrail runs list --json` shows the session of each run.",
        )
        self.principal = principal


class SessionBusy(StateError, RuntimeError):
    """Another run is working on a recorded session. Only one at a time can."""

    def __init__(self, session: str, run_id: str, owner: str) -> None:
        super().__init__(
            f"the session {session!r} is in use by the run {run_id!r} in the process {owner!r}. "
            "Try again when that run is over or parked, or cancel it."
        )
        self.session = session
        self.run_id = run_id
        self.owner = owner
        """The process that executes the run."""


class ReducerError(StateError, RuntimeError):
    """A reducer raised or did not return a slice, and its dispatch was undone. If the reducer raised, its error is the cause."""

    def __init__(self, reducer: str, event: object, error: BaseException) -> None:
        super().__init__(
            f"reducer {reducer!r} failed on the event {type(event).__name__} with {type(error).__name__}: {error}. "
            "The event was not applied."
        )
        self.reducer = reducer
        self.event = event


class EventRefused(StateError, TypeError):
    """This object can't be dispatched or published as an event."""

    def __init__(self, event: object, problem: str, hint: str) -> None:
        super().__init__(f"event {type(event).__name__}: {problem}. {hint}")
        self.event = event


class Conflict(StateError, RuntimeError):
    """Something a call read or wrote was changed by somebody else before the call could commit."""

    def __init__(self, places: Sequence[str]) -> None:
        super().__init__(
            f"another call or somebody else has changed {', '.join(places)} in the meantime. "
            "Nothing was applied. Look at the new state and try again."
        )
        self.places = tuple(places)


class UndoRefused(StateError, RuntimeError):
    """A call can't be undone. Nothing was changed, except that the calls in `undone` were undone first."""

    def __init__(self, call_id: str, places: Sequence[str], problem: str, undone: Sequence[str] = ()) -> None:
        where, hint = "", ""
        if places:
            where = f" ({', '.join(places)})"
            hint = " Correct it by hand, or undo the later changes first."
        changed = f"These calls stay undone: {', '.join(undone)}" if undone else "Nothing was changed"
        super().__init__(f"call {call_id!r} can't be undone: {problem}{where}. {changed}.{hint}")
        self.call_id = call_id
        self.places = tuple(places)
        self.problem = problem
        self.undone = tuple(undone)
        """The ids of the inner calls that had been undone before this call was refused."""


class JournalError(StateError, ValueError):
    """A journal can't be opened or used."""

    def __init__(self, journal: str, problem: str, hint: str, *, is_lost: bool = False) -> None:
        super().__init__(f"journal {journal!r}: {problem}. {hint}")
        self.journal = journal
        self.is_lost = is_lost
        """Whether the database was unreachable or could not do its work for the moment. If so, a later attempt may succeed."""
        if is_lost:
            self.retry_level = logging.DEBUG  # the journal itself warns of it, once for all who need it


class JournalAltered(JournalError):
    """A record is damaged, or was changed, removed, moved or copied by something other than Handrail."""

    def __init__(self, journal: str, chain: str, id: str, record: int, what: str, problem: str) -> None:
        of = {"outside": "answers and cancellations of run", "decisions": "decisions of"}
        named = f" ({what})" if what else ""
        whose = f"{of.get(chain, chain)} {id if chain == 'decisions' else repr(id)}"
        if chain in ("sessions", "users"):
            whose = f"list of {chain}"
        rows = {
            "audit": f"entry {id} of the audit log",
            "sign-in": f"the sign-in {id!r}",
            "file": "the whole file",
        }
        place = rows.get(chain) or f"{whose}, record {record}{named}"
        self.place_and_problem = f"{place}: {problem}"
        super().__init__(
            journal,
            f"{self.place_and_problem}. The journal is damaged, or something other than Handrail has altered it",
            "Nothing was read from there; other runs can still be read. `handrail runs verify` lists every such record.",
        )
        self.chain = chain
        """The kind of chain that the record belongs to: `run`, `outside`, `session`, `sessions`, `decisions` or `step`.

        It is `users` for the list of users, `sign-in` for a user's session, `audit` for an entry of the audit log, `blob` for a
        blob, `workspace` for a workspace, `lease` for the lease of a process, and `file` for damage that belongs to no record.
        """
        self.id = id
        """What the chain belongs to, by name.

        This is the id of the run or session, the session and principal, the key of the step, the digest of the blob, the
        name of the workspace, the id of the sign-in, the number of the entry, or the owner of the lease. It is "" for the lists of
        sessions and users and for the file.
        """
        self.record = record
        """1-based position of the record in its chain; 0 if it was never recorded. It has no meaning for what belongs to no chain, such as a blob."""
        self.what = what
        """The kind and key of the record; "" if they are not known."""
        self.problem = problem


class JournalExposed(JournalError):
    """Other users, or the tools of a run, could read or change a journal."""


class JournalUpgraded(JournalError):
    """A journal was upgraded, and this version of Handrail may not use it any more."""

    def __init__(self, journal: str, oldest: int, version: int) -> None:
        super().__init__(
            journal,
            f"it was upgraded, and lets only versions of Handrail write to it whose schema is at least {oldest}; "
            f"this version has schema {version}",
            "Install a newer version of Handrail, and start this process again.",
        )
        self.oldest = oldest
        """The oldest schema whose code may write to the journal."""


class BlobNotFoundError(StateError, LookupError):
    """A journal has no bytes with this digest."""

    def __init__(self, digest: str) -> None:
        super().__init__(
            f"the journal has no blob {digest!r}. Its run was deleted, or another journal has it: open that one."
        )
        self.digest = digest


class EffectRefused(StateError, PermissionError):
    """A call did, or tried to do, more than its tool's declared effect allows."""

    def __init__(self, tool: str, effect: str | None, problem: str) -> None:
        declares = "an effect that only reads" if effect is None else f"effect={effect!r}"
        super().__init__(
            f"tool {tool!r} declares {declares}: {problem}. Declare the effect that it really has."
        )
        self.tool = tool
        self.effect = effect
        """The declared effect; None if it is only known that the tool may not write."""


class ResourceError(StateError, LookupError):
    """A resource is missing or can't be created."""

    def __init__(self, resource: str, problem: str, hint: str) -> None:
        super().__init__(f"resource {resource}: {problem}. {hint}")
        self.resource = resource


class WorkspaceBusy(StateError, RuntimeError):
    """Another run has the workspace. Only one run at a time can work in it."""

    def __init__(self, workspace: str, run_id: str, owner: str) -> None:
        how = f"in use by the run {run_id!r} in the process {owner!r}"
        if not owner:
            how = f"kept for the run {run_id!r}, which was interrupted and which a worker will continue"
        super().__init__(
            f"the workspace {workspace!r} is {how}. Try again when that run is over or parked, or cancel it."
        )
        self.workspace = workspace
        self.run_id = run_id
        self.owner = owner
        """The process that executes the run; "" if none does."""


class WorkspaceTakenError(WorkspaceBusy):
    """This process has lost the workspace of a run that it executes, because it did not renew its lease in time.

    The run stops without committing to the workspace. It can be resumed.
    """

    def __init__(self, workspace: str, run_id: str, owner: str, *, loser: str) -> None:
        super().__init__(workspace, run_id, owner)
        self.loser = loser
        """The id of the run that has lost the workspace."""
        by = f" by the run {run_id!r} in the process {owner!r}" if run_id else ""
        self.args = (
            f"the workspace {workspace!r} was taken over{by}, because this process did not renew its lease in time. "
            "Resume the run when the workspace is free.",
        )


class WorkspaceNotFoundError(StateError, LookupError):
    """A journal has no workspace with this name."""

    def __init__(self, workspace: str) -> None:
        super().__init__(
            f"the journal has no workspace {workspace!r}. `handrail workspaces list` shows those that it has."
        )
        self.workspace = workspace


class FileError(StateError, OSError):
    """A file operation failed."""

    def __init__(self, path: str, problem: str) -> None:
        shown = repr(path).replace(
            r"\\", "\\"
        )  # a path may contain escapes, whose backslashes `repr` doubles
        super().__init__(f"{shown}: {problem}")
        self.path = path


class FileMissing(FileError, FileNotFoundError):
    """There is nothing at that path."""


class FileInTheWay(FileError, FileExistsError):
    """Something else exists at that path."""


class PathRefused(FileError, ValueError):
    """The path is invalid or outside the root."""


class UnfinishedCommit(FileError):
    """A process died while it committed a call that changes this path, and a journal may have recorded the call.

    Nobody can change the path before somebody with that journal has finished the call's changes or given them up.
    """

    def __init__(self, path: str, journal: str, run_id: str, call_id: str) -> None:
        run, call = run_id or "RUN", call_id or "CALL"
        super().__init__(
            path,
            "a process died while it committed changes to it. Any call with that call's journal finishes them, such as one of "
            f"`handrail runs resume {run}`; `handrail runs discard {run} {call}` gives up those of a recorded run",
        )
        self.journal = journal
        """The id of the journal that may have recorded the call."""
        self.run_id = run_id
        self.call_id = call_id


class EditRefused(FileError, ValueError):
    """The text to replace is empty, equals the new text, is not in the file, or occurs there more than once."""


class FileLimitReached(FileError):
    """A file would be too large, there would be too many files or matches, or the disk is full."""


class AnswerRefused(HandrailError, ValueError):
    """An answer was refused: its question is unknown, closed or somebody else's, or the answer is invalid."""

    def __init__(self, question: str, problem: str, hint: str, *, problems: Sequence[Problem] = ()) -> None:
        super().__init__(f"answer to {question!r} refused: {problem}. {hint}")
        self.question = question
        self.problem = problem
        self.problems = tuple(problems)
        """What is wrong with the answer's value; empty if the answer was refused for another reason."""


class MessageRefused(HandrailError, ValueError):
    """A message to a run, or a change of one, was refused."""

    def __init__(self, run_id: str, problem: str, hint: str) -> None:
        super().__init__(f"message to run {run_id!r} refused: {problem}. {hint}")
        self.run_id = run_id
        self.problem = problem


class SpawnRefused(HandrailError, ValueError):
    """A background run can't be begun."""

    def __init__(self, agent: str, problem: str, hint: str) -> None:
        super().__init__(f"background run of {agent!r} refused: {problem}. {hint}")
        self.agent = agent
        self.problem = problem


class ModelError(HandrailError, RuntimeError):
    """A request to a model failed. The run may retry it if `transient` is true."""

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
        """Seconds to wait before a retry; None if the provider did not say."""


class ConversationBusy(HandrailError, RuntimeError):
    """Another evaluation is using the conversation. Only one at a time can."""

    def __init__(self, session: str, conversation: str) -> None:
        super().__init__(
            f"session {session!r}: another evaluation is using the conversation {conversation!r}. "
            "Wait until it has ended, or evaluate on another session."
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
    """The run can't continue. If only a tool fails, the model is told, and this is not raised."""

    def __init__(self, message: str, *, phase: str = "run", run_id: str | None = None) -> None:
        super().__init__(message)
        self.phase = phase
        self.run_id = run_id


class RunError(HandrailError, RuntimeError):
    """A recorded run can't be used or continued now."""

    def __init__(self, run_id: str, problem: str, hint: str) -> None:
        super().__init__(f"run {run_id!r}: {problem}. {hint}")
        self.run_id = run_id


class MessagesWaiting(RunError):
    """A run can't end, because messages were sent to it that its model has not been told."""

    def __init__(self, run_id: str) -> None:
        super().__init__(run_id, "it was sent messages that its model has not been told", "Tell them first.")


class RunUnknown(RunError, LookupError):
    """The journal has no run with this id."""

    def __init__(self, run_id: str) -> None:
        super().__init__(run_id, "the journal has no such run", "`handrail runs list` shows the runs it has.")


class RunBusy(RunError):
    """This process does not hold the run's lease, or is already executing the run."""

    def __init__(self, run_id: str, owner: str) -> None:
        super().__init__(
            run_id,
            f"the process {owner!r} holds its lease",
            "Wait until it releases the run, or until its lease expires.",
        )
        self.owner = owner


class ErasureRefused(StateError, RuntimeError):
    """A person can't be erased yet: one of their runs is not over, or a call's file changes are not applied. Nothing was deleted."""

    def __init__(
        self, principal: str, runs: Sequence[tuple[str, str]], calls: Sequence[tuple[str, str]] = ()
    ) -> None:
        found = [f"the run {run_id!r} is {status}" for run_id, status in runs]
        found += [
            f"the call {call_id!r} of {run_id!r} has file changes that are not applied"
            for run_id, call_id in calls
        ]
        named = "; ".join(found[:5]) + (f"; and {len(found) - 5} more" if len(found) > 5 else "")
        hint = " Cancel the runs first: add --cancel, or pass `cancel=True`." if runs else ""
        for run_id, call_id in calls[:1]:
            hint += f" Give the changes up: `handrail runs discard {run_id} {call_id}`."
        super().__init__(f"{principal!r} can't be erased yet: {named}. Nothing was deleted.{hint}")
        self.principal = principal
        self.runs = runs
        """The runs that are not over or that a process has, with their status."""
        self.calls = calls
        """The run and the id of each call whose changes are not applied."""


class RunParked(RunError):
    """The run was parked, usually because it waits for answers. Resume it once its `questions` are answered.

    `questions` is empty if the run was parked by force while no question was open. `due_at` is when the first of them
    expires or the run's deadline passes, in seconds since 1970, by the journal's clock; None if nothing has a time. From then
    on, the run can be resumed without an answer.
    """

    def __init__(self, run_id: str, questions: Sequence[Any], due_at: float | None = None) -> None:
        asked = ", ".join(repr(question.name) for question in questions)
        if asked:
            super().__init__(run_id, f"it waits for an answer to {asked}", "Answer it, then resume the run.")
        else:
            super().__init__(run_id, "it was parked, and it has no open question", "Resume the run.")
        self.questions = tuple(questions)
        self.due_at = due_at


class Diverged(RunError):
    """A replayed run does something other than what was recorded."""

    def __init__(self, run_id: str, place: str, recorded: str, now: str) -> None:
        super().__init__(
            run_id,
            f"at {place} the record has {recorded}, and the run now has {now}",
            "Use a context verb, whose value is recorded, for anything that depends on time or chance.",
        )
        self.place = place
        self.recorded = recorded
        self.now = now


class VisibilityExpansionRequired(HandrailError):
    """The model asked to open sections, and the adapter does not open them in place."""

    def __init__(self, sections: Sequence[str], run_id: str | None = None) -> None:
        super().__init__(
            f"the model asked to open {', '.join(sections)}. Evaluate again with these in `opened`."
        )
        self.sections = tuple(sections)
        self.run_id = run_id
        """The run whose model asked; None if it is the run in which this is raised."""
