"""Approvals: the permission that a call needs before it takes effect.

A call with the effect `staged` may run first, in its fork. The approval is then for the changes that it made there.
`runs_first` has the conditions.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import msgspec
import pydantic_core

from handrail.concurrency.operation import Operation
from handrail.context import Approval
from handrail.errors import FileError, ToolValidationError
from handrail.events import ApprovalDecided, ApprovalRemembered, ApprovalRequested, DecidedBy
from handrail.guard.approval import APPROVAL_SCHEMA, decision
from handrail.guard.policy import ChangePolicy
from handrail.guard.remembered import (
    DELETES,
    NEVER_REMEMBERED,
    Asks,
    Coverage,
    Recall,
    coverage_of,
)
from handrail.protocols import ApprovalRequest, Filesystem
from handrail.question import DecisionKeys, Wording
from handrail.resources.paths import HasLinks, ancestors, parse_path
from handrail.resources.staging import FileFork
from handrail.resources.startup_files import why_ask_about
from handrail.run.call_log import tell
from handrail.run.place import Place
from handrail.run.questions import (
    CallAsker,
    canonical_arguments,
    note_verb,
    params_that_came,
    question_of,
    seconds_open,
    waiting_for_a_person,
)
from handrail.run.record.log import RunLog
from handrail.run.transaction import Transaction
from handrail.schema import to_json
from handrail.schema.coverage import first_hidden, in_order
from handrail.schema.problems import describe_kind
from handrail.text.rendering import UNSHOWN, exact, visible
from handrail.tools import EFFECTS

if TYPE_CHECKING:
    from handrail.run.call import Attempt


def approval_verb(
    attempt: Attempt, asks: Asks, operation: str, name: str, reason: str
) -> Operation[Approval]:
    """Implement the verbs `request_approval` and `request_permission`."""
    attempt.home.check()
    number = attempt.next_verb(f"approval {name}")

    async def ask() -> Approval:
        await note_verb(attempt, number, f"approval {name}")
        approval, _ = await ask_approval(attempt, asks, name, reason, question_id=attempt.question_id(number))
        return approval

    return Operation(ask, operation, attempt.home)


_HIDDEN = (
    "it can't be shown to a person as the tool would get it, so nobody was asked. The JSON of its type does not show "
    "everything. The cause may be an excluded field, an alias that two fields share, a serializer, or keys that become "
    "equal in JSON."
)


async def ask_approval(
    attempt: Attempt, asks: Asks, name: str, reason: str, diff: str = "", question_id: str | None = None
) -> tuple[Approval, DecidedBy]:
    """Ask for approval, and return the decision and how it was made.

    Raises `ToolValidationError`, without asking, if the arguments can't be shown as the tool would get them.
    """
    if attempt.tool.origin:
        reason = f"{reason.rstrip('.')}. The tool belongs to the {attempt.tool.origin}."
    transaction = attempt.open_transaction
    request = partial(_request, attempt, asks, name, reason, diff, question_id)
    asked, recall = await transaction.go_through(request) if diff else request()
    policy = attempt.passage.policy if asks == "call" else ""
    return await _decided(attempt, reason, policy, asked, recall)


def _request(
    attempt: Attempt, asks: Asks, name: str, reason: str, diff: str, question_id: str | None
) -> tuple[ApprovalRequest, Recall]:
    run = attempt.run
    session = run.session
    params = params_that_came(attempt)
    arguments = pydantic_core.from_json(attempt.tool.dump(params))  # secrets masked
    hidden = None if params is None else first_hidden(params, arguments, masked=attempt.tool.secret)
    if hidden is not None:
        raise ToolValidationError(f"{hidden}: {_HIDDEN}")
    arguments = in_order(params, arguments)
    cover = _covering(attempt, asks, name, params, arguments, diff)
    keys = cover(session.id)
    quorums = attempt.passage.quorums if asks == "call" else ()
    attempt.passage.has_asked = attempt.passage.has_asked or asks == "call"
    kept = attempt.tool.capabilities.isdisjoint(NEVER_REMEMBERED) and not quorums
    startup = attempt.open_transaction.startup_files() if diff else []
    kept = kept and not startup
    scopes = {scope.words: scope.key for scope in keys.scopes} if kept else {}
    payload = {"tool": attempt.name, "arguments": arguments, "reason": exact(reason)}
    if kept:
        payload["scopes"] = tuple(scopes)  # shows that the decision can be remembered
        if not keys.exact:
            payload["exact"] = False
    if diff:
        payload["diff"] = visible(diff, tabs=True)
    decision_keys = DecisionKeys(
        tool=attempt.name,
        words=keys.words,
        exact=keys.exact,
        any_diff=keys.any_diff,
        scopes=scopes,
        run_context=attempt.run_context,
    )
    question = question_of(
        attempt,
        question_id or attempt.next_approval_id(),
        "approval",
        name,
        Wording(reason),
        payload,
        APPROVAL_SCHEMA,
        run.options.approval_seconds,
        decision_keys if kept else None,
        quorums,
    )
    recall = Recall(session, question, cover, run.clock)
    asked = ApprovalRequest(
        question=question,
        tool=attempt.name,
        arguments=arguments,
        diff=diff,
        startup_files=tuple(path for path, _ in startup),
        scopes=tuple(scopes),
        recall=recall if kept else None,
        through=lambda environment: CallAsker(attempt, environment),
    )
    return asked, recall


async def _decided(
    attempt: Attempt, reason: str, policy: str, asked: ApprovalRequest, recall: Recall
) -> tuple[Approval, DecidedBy]:
    """Have a request decided, and publish that it was made and how it was decided."""
    run, question = attempt.run, asked.question
    requested = ApprovalRequested(
        question.id, attempt.id, attempt.name, attempt.path, reason, attempt.run_context, policy
    )
    tell(attempt, requested, question.id, known=question.id in run.log.asked)
    decided = Decided(Approval(False, "", "", "cancelled"), "asked")
    try:
        with waiting_for_a_person(attempt):
            decided = await decide(attempt, asked, recall)
    finally:
        if not run.parked or decided.approval.outcome != "cancelled":  # otherwise the question stays open
            told = ApprovalDecided(
                question.id,
                attempt.id,
                attempt.name,
                decided.approval,
                attempt.run_context,
                decided.how,
                decided.remembered,
                seconds_open(attempt, question),
            )
            tell(attempt, told, question.id)
    return decided.approval, decided.how


def _covering(
    attempt: Attempt, asks: Asks, name: str, params: Any, shown: Any, diff: str
) -> Callable[[str], Coverage]:
    """Return a function that maps a session id to the keys that this request has in that session's approval memory."""
    run = attempt.run
    paths = paths_of(attempt, params, bool(diff)) if asks == "call" else None
    deletes = _deletes(attempt) if diff else DELETES in attempt.tool.capabilities
    spellings, arguments = spelled(attempt, params), canonical_arguments(attempt)

    @cache
    def cover(session_id: str) -> Coverage:
        return coverage_of(
            attempt.tool,
            asks,
            name,
            whose=(session_id, run.session.principal),
            arguments=arguments,
            shown=shown,
            diff=diff,
            paths=paths,
            deletes=deletes,
            spelled=spellings,
            secret=None if run.journal is None else run.journal.key,
        )

    return cover


# --- deciding ----------------------------------------------------------------------------------------


class Decided(msgspec.Struct, frozen=True):
    """The outcome of an approval request, and how it was decided."""

    approval: Approval
    how: DecidedBy
    remembered: str | None = None
    """Id of the remembered decision that settled the request; None if there was none."""


class _Noted(msgspec.Struct, frozen=True):
    """A record that a remembered decision was used."""

    digest: str
    """Digest of the request. A request with a different digest is decided again."""
    approval: Approval
    remembered: str


async def decide(attempt: Attempt, asked: ApprovalRequest, recall: Recall) -> Decided:
    """Decide an approval request: from the record of a resumed run, if it has the decision, or else through the broker.

    In a resumed run, an earlier answer to the same question still counts, and so does a remembered decision that was used
    for it. So an approved call stays approved, even if the approval was revoked while the process was down. The mode
    *strict* is the exception: it denies the call. Raises `TypeError` if the broker does not return an `Approval`.
    """
    run, log = attempt.run, attempt.run.log
    mode = run.people.mode
    if log.resumed and mode != "strict":
        before = _before(log, asked)
        if before is not None:
            return before
        # If a person was asked about a diff, no remembered decision answers in their place, since they may be looking at it.
        recall.is_open = bool(asked.diff) and _was_asked(log, asked) and mode != "approve_all"
    book = run.session.decisions
    if book is not None and run.journal is not None and len(run.session[ApprovalRemembered]):
        await book.read()  # another process may have revoked a remembered decision
    approval: Any = await run.people.broker.decide(asked)
    if not isinstance(approval, Approval) or approval.approved not in (True, False):
        raise TypeError(
            f"the approval broker returned {describe_kind(approval)}. "
            "Return an Approval whose `approved` is True or False."
        )
    used = recall.used
    if used is None:
        return Decided(approval, _decided_by(approval, mode))
    if log.is_kept:
        noted = _Noted(asked.question.digest, approval, used.id)
        await log.note("approval", _place(log, asked), noted)
        if log.resumed and _was_asked(log, asked):
            await run.people.questions.withdraw(asked.question.id)  # its answer would no longer be used
    return Decided(approval, "remembered", used.id)


def _before(log: RunLog, asked: ApprovalRequest) -> Decided | None:
    """Return how this request was decided before the process ended; None if it was not, or if its answer is not valid."""
    question = asked.question
    noted = log.find("approval", _place(log, asked), _Noted)
    if noted is not None and noted.digest == question.digest:
        return Decided(noted.approval, "remembered", noted.remembered)
    answer = log.asked[question.id].answer if _was_asked(log, asked) else None
    try:
        return None if answer is None else Decided(decision(answer, asked), "asked")
    except ToolValidationError:  # the answer was given in a process that could not check it: ask again
        return None


def _was_asked(log: RunLog, asked: ApprovalRequest) -> bool:
    """Return whether exactly this question was asked before."""
    before = log.asked.get(asked.question.id)
    return before is not None and before.question.digest == asked.question.digest


def _place(log: RunLog, asked: ApprovalRequest) -> Place:
    return Place.from_id(asked.question.id, log.run_id)


def _decided_by(approval: Approval, mode: str | None) -> DecidedBy:
    if approval.outcome == "nobody there":
        return "nobody"
    return "mode" if mode in ("approve_all", "strict") else "asked"


# --- previews ----------------------------------------------------------------------------------------


def runs_first(attempt: Attempt) -> bool:
    """Return whether a call runs before it is approved, so that a person can see its changes before deciding.

    This requires an effect that can be previewed, and a broker that shows previews. `Broker` does so if a person can be
    asked and the mode is *interactive* or not set. A call does not run first if its quorums can't be met, or if its
    tool's `reenters` is true, because such a handler may ask questions. Nor does a call that runs commands, unless
    these are known to reach nothing but the folder.
    """
    if "proc.exec" in attempt.tool.capabilities and attempt.tool.reach != "":
        return False
    undoable = EFFECTS[attempt.tool.effect].previewed and not attempt.tool.reenters
    return undoable and attempt.run.people.shows_previews and _can_be_decided(attempt)


def _can_be_decided(attempt: Attempt) -> bool:
    """Return whether there are enough people to meet the quorums that the policies require."""
    environment, principal = attempt.run.people.environment, attempt.run.session.principal
    return all(
        environment is not None and len(environment.voters(quorum, principal)) >= quorum.approvals
        for quorum in attempt.passage.quorums
    )


def why_ask(attempt: Attempt) -> str | None:
    """Return why the changes that a call made in its fork need approval, or None if they do not."""
    files, why = attempt.open_transaction.startup_files(), attempt.preview
    outside = outside_scope(attempt)
    reasons = [why_ask_about(files)] if files else []
    if outside:
        reasons.append(f"{attempt.name} changes paths outside its scope: {', '.join(outside)}")
    if reasons:
        why = "; ".join(reasons if why is None else (why, *reasons))
        if EFFECTS[attempt.tool.effect].previewed and not attempt.tool.reenters:
            attempt.preview = (
                why  # if the folder changes before the commit, the call runs again, for a new diff
            )
    return why


def outside_scope(attempt: Attempt) -> list[str]:
    """Return the paths that a call changed outside the scope of its policies, except those approved before it ran."""
    policing, found = attempt.policing, dict[str, None]()
    for policy, _ in () if policing is None else policing.checked:
        if isinstance(policy, ChangePolicy):
            context = attempt.policy_context
            assert context is not None, "policies check a call with their context"
            outside = policy.paths_outside(attempt.tool, context=context)
            found.update(dict.fromkeys(outside))
            if outside and not attempt.passage.policy:
                attempt.passage.policy = policy.name
    if not found or not attempt.passage.has_asked or attempt.preview is not None:
        return list(found)
    named = paths_of(attempt, params_that_came(attempt), False) or ()
    return [path for path in found if not any(path == each or path.startswith(f"{each}/") for each in named)]


def diff_of(transaction: Transaction) -> str:
    """Seal a call's transaction and return its changes as text for a person: resources such as files first, then state."""
    transaction.seal()
    said: list[str] = []
    for fork in transaction.touched:
        diff = fork.diff()
        said.append(
            f"{type(fork).__name__}: it was used, and its changes {UNSHOWN}\n" if diff is None else diff
        )
    said += [f"state: {type(event).__name__} {exact(_shown(event))}\n" for event in transaction.events]
    return "".join(said) or "It changed nothing.\n"


def _shown(event: object) -> str:
    try:
        return to_json(event).decode()
    except ToolValidationError:
        return f"(its contents {UNSHOWN})"


# --- paths -------------------------------------------------------------------------------------------


def paths_of(attempt: Attempt, params: Any, ran: bool) -> tuple[str, ...] | None:
    """Return the paths that a call names.

    Before the call runs, the paths that these resolve to are included. After it has run in its fork, the paths that it
    changed there are included. Returns None if the paths can't be known, because one is invalid or something other than
    files may have changed.
    """
    found: list[str] = []
    try:
        named = [parse_path(each.path).path for each in attempt.tool.paths(params)]
        found += named
        if named and not ran:
            found += _followed(attempt, named)
    except FileError:
        return None
    if ran:
        changed = _changed(attempt)
        if changed is None:
            return None
        found += changed
    return tuple(dict.fromkeys(found))


def spelled(attempt: Attempt, params: Any) -> dict[str, str]:
    """Return the paths a call names, each with its canonical spelling. Invalid paths are left out."""
    found: dict[str, str] = {}
    for each in attempt.tool.paths(params):
        with contextlib.suppress(FileError):
            found[each.path] = parse_path(each.path).path
    return found


def _followed(attempt: Attempt, paths: list[str]) -> list[str]:
    """Return the paths to which these paths resolve, since a link may point into another folder.

    Empty if the filesystem does not support links.
    """
    run = attempt.run
    files: Any = run.world.filesystem
    if files is None:
        files = attempt.filesystem if run.world.resources.binds(Filesystem) else None
    elif (outer := attempt.open_transaction.parent) is not None:
        files = outer.fork_of(files)  # the outer call may have made a link
    return [files.resolved(path) for path in paths if path] if isinstance(files, HasLinks) else []


def _changed(attempt: Attempt) -> list[str] | None:
    """Return the paths changed in the attempt's forks; None if something other than files may have changed.

    A folder is left out if something inside it is listed.
    """
    changed: list[str] = []
    for fork in attempt.open_transaction.touched:
        paths = fork.changed_paths()
        if paths is None:
            return None
        around = {f"{folder}/" for path in paths for folder in ancestors(path.rstrip("/"))}
        changed += [path.rstrip("/") for path in paths if path not in around]
    return changed


def _deletes(attempt: Attempt) -> bool:
    """Return whether the attempt deleted files in its forks."""
    return any(isinstance(fork, FileFork) and fork.deletes() for fork in attempt.open_transaction.touched)
