"""Policies: how they check a call, and the context that they get."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Coroutine, Iterable, Iterator
from typing import Any, TypeVar

import msgspec

from handrail.concurrency.cancellation import shielded
from handrail.concurrency.operation import Home
from handrail.concurrency.user_code import is_closing
from handrail.context import ToolContext, call_behind
from handrail.errors import ContextExpired, EventRefused
from handrail.events import Fact
from handrail.protocols import ALLOWED, Filesystem, Forkable, PolicyDecision, Slice, ToolPolicy
from handrail.resources.bindings import CallResources
from handrail.resources.staging import FileFork
from handrail.run.call import Attempt
from handrail.run.call_log import dispatch_recorded
from handrail.run.failures import Refused
from handrail.run.views import CallSession, reserved
from handrail.session import Session, SessionFork
from handrail.session.slices import readable, shared
from handrail.text.raised_errors import log_error, words_of

T = TypeVar("T")

log = logging.getLogger("handrail.gate")


class PolicySession(CallSession):
    """The session as a policy sees it.

    Before the handler runs, a policy reads the state from which the call will start, and may only append to
    logs. Afterwards it reads and writes the call's fork, whatever the tool's own effect.
    """

    __slots__ = ()

    def __getitem__(self, kind: type[T], /) -> Slice[T]:
        attempt = self._attempt
        if attempt.let_through:
            found = attempt.open_transaction.session[kind]
            return found if kind in shared else readable(kind, found)
        outer = attempt.open_transaction.parent
        state = attempt.run.session.state if outer is None else outer.session.state
        found = attempt.run.session.slice_in(state, kind)
        return found if kind in shared else readable(kind, found)

    def dispatch(self, event: object, /) -> None:
        attempt = self._attempt
        if isinstance(event, Fact):
            raise reserved(event)
        session = attempt.run.session
        if attempt.let_through:
            self._dispatch(attempt.open_transaction.session, event)
            return
        if not all(target.is_log for target in session.targets_of(event)):
            raise EventRefused(
                event,
                "a policy's `check` may only append to a log",
                "Keep what the policy remembers in a slice of kind 'log'.",
            )
        self._dispatch(session, event)

    def _dispatch(self, session: Session | SessionFork, event: object) -> None:
        if self._attempt.run.journal is None:
            session.dispatch(event)
        else:
            dispatch_recorded(self._attempt, session, event)


class PolicyCall(msgspec.Struct, eq=False):
    """The policies' view of an attempt, and what they have said about it. Members that it does not have come from the attempt.

    Before the handler runs, it shows the state from which the call will start. Afterwards it shows the call's changes,
    and policies may also write state, even if the tool itself may only read.
    """

    _attempt: Attempt
    checked: list[tuple[ToolPolicy, Any]] = []
    """The policies that have checked the call, each with its own copy of the params."""
    made_resources: CallResources | None = None
    """The policies' view of the resources; None until they use one."""

    @property
    def home(self) -> Home:
        """The owner of the policies' operations. It is closed when the call is over."""
        attempt, passage = self._attempt, self._attempt.passage
        is_over = attempt.policy_context is None
        if passage.policy_home is not None and not is_over:
            return passage.policy_home
        home = Home(attempt.call.loop, attempt.id)
        home.closed = is_over
        if not is_over:
            passage.policy_home = home
        return home

    def check(self) -> None:
        """Raise `ContextExpired` once the call is over.

        This is later than for the handler's context, because policies also see the call's result.
        """
        if self._attempt.policy_context is None:
            raise ContextExpired(self._attempt.id)

    def view(self, resource: Forkable) -> Any:
        return self._attempt.view(resource)

    @property
    def session(self) -> PolicySession:
        return PolicySession(self._attempt)

    @property
    def resources(self) -> CallResources:
        if self.made_resources is None:
            run, _ = (
                self._attempt.run,
                self._attempt.resources,
            )  # so that the gate knows that there are some to close
            self.made_resources = CallResources(run.world.resources, self, run.costs.given)
        return self.made_resources

    @property
    def filesystem(self) -> Filesystem:
        files = self._attempt.run.world.filesystem
        return self.resources.get(Filesystem) if files is None else self._attempt.view(files)

    def changed_files(self) -> Iterable[tuple[str, bytes | None, bytes | None]]:
        """Return the files that the call has changed so far, each with its old and its new bytes.

        The old bytes of a new file, and the new bytes of a removed one, are None. Empty if the call has no `FileFork`.
        """
        world = self._attempt.run.world
        files = world.resources.made(Filesystem) if world.filesystem is None else world.filesystem
        fork = self._attempt.open_transaction.made_fork_of(files)
        return fork.changes() if isinstance(fork, FileFork) else ()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._attempt, name)


def close_policies(attempt: Attempt) -> None:
    """Close the policies' context, and break its reference cycle."""
    attempt.policy_context = None
    home, attempt.passage.policy_home = attempt.passage.policy_home, None
    if home is not None:
        home.close()


async def close_resources(attempt: Attempt) -> None:
    """Close the resources that an attempt and its policies created for themselves."""
    policing = attempt.policing
    for resources in (attempt.made_resources, None if policing is None else policing.made_resources):
        if resources is not None and not resources.untouched:
            for error in await shielded(resources.close()):
                log_error(log, logging.ERROR, "closing a resource of %s raised", attempt.name, error=error)


# `check_policies` and `tell_policies` return None if no policy has to be awaited, which is the usual case. Otherwise they
# return a coroutine that must be awaited.


def check_policies(
    attempt: Attempt, policies: Iterable[ToolPolicy], asked: str | None = None
) -> Coroutine[Any, Any, None] | None:
    """Check a call against the policies in order, and set the `decision` on it.

    Raises `Refused` if a policy denies the call, raises, returns no decision, or now requires people who did not take part in
    an earlier approval. If a policy asks, the call needs approval. Each policy gets a copy of the params, so that none can
    change what the others or the handler get. `asked` is the first reason so far to ask for approval; None if there is none.
    """
    call = attempt.call
    policing: Any
    context = attempt.policy_context
    tool, params, arguments = call.tool, attempt.params, call.arguments
    copy_params = tool.copy_params
    if context is None:
        policing = PolicyCall(attempt)
        context = attempt.policy_context = ToolContext(policing)
    else:
        policing = call_behind(context)
    checked = policing.checked
    for policy in policies:
        seen = copy_params(params, arguments)
        checked.append((policy, seen))
        try:
            decision = policy.check(tool, seen, context=context)
        except (Exception, GeneratorExit) as error:
            raise _undecided(attempt, policy) from error
        if decision is ALLOWED:
            continue
        if not isinstance(decision, PolicyDecision):
            return _check_waiting(attempt, policy, decision, asked)
        if decision.kind != "allow":
            asked = _reason_to_ask(attempt, policy, decision, asked)
    attempt.passage.decision = "allow" if asked is None else f"{_ASK}{asked}"
    return None


async def _check_waiting(
    attempt: Attempt,
    policy: ToolPolicy,
    waiting: Awaitable[PolicyDecision],
    asked: str | None,
) -> None:
    """Await the decision of a policy, then check the call against the rest, as `check_policies` does."""
    attempt.passage.decision = "deny"  # until all of them have decided
    try:
        decision = await waiting
        kind = decision.kind
    except (Exception, GeneratorExit) as error:
        if is_closing():
            raise
        raise _undecided(attempt, policy) from error
    if kind != "allow":
        asked = _reason_to_ask(attempt, policy, decision, asked)
    assert attempt.policing is not None, "it is checking the call"
    rest = attempt.run.policies[len(attempt.policing.checked) :]
    waiting_again = check_policies(attempt, rest, asked)
    if waiting_again is not None:
        await waiting_again


_ASK = "ask: "
_UNKNOWN = "It has not run yet, because it runs commands, and what they can reach is not known"


def reason_to_ask(attempt: Attempt) -> str:
    """Return why the call needs approval. Call this only if a policy has asked for approval."""
    reason, tool = attempt.passage.decision.removeprefix(_ASK), attempt.tool
    reach = _UNKNOWN if tool.reach is None and "proc.exec" in tool.capabilities else tool.reach
    return f"{reason}. {reach}" if reach else reason


def _reason_to_ask(attempt: Attempt, policy: ToolPolicy, decision: PolicyDecision, asked: str | None) -> str:
    """Return the first reason to ask for approval, and note the quorums that the policy requires.

    Raises `Refused` if the policy denies the call, or now requires people who did not take part in an earlier approval.
    """
    if decision.kind != "ask":  # an unknown kind of decision also denies the call
        _deny(attempt, policy)
        raise Refused("denied", f"{attempt.name} is not allowed: {decision.reason}")
    missing = set(decision.quorums) - set(attempt.passage.quorums)
    if missing and attempt.passage.has_asked:  # the earlier approval did not come from these people
        _deny(attempt, policy)
        raise Refused("denied", f"{attempt.name} now needs approval from different people. Call it again.")
    if missing:
        attempt.passage.quorums = tuple(dict.fromkeys((*attempt.passage.quorums, *decision.quorums)))
    if asked is None:
        attempt.passage.policy = policy.name
    return asked or decision.reason or f"{policy.name} asks"


def _deny(attempt: Attempt, policy: ToolPolicy) -> None:
    attempt.passage.decision, attempt.passage.policy = "deny", policy.name


def _undecided(attempt: Attempt, policy: ToolPolicy) -> Refused:
    _deny(attempt, policy)
    log.exception("the policy %r raised, or returned no PolicyDecision, on %s", policy.name, attempt.name)
    return Refused("denied", f"The policy {policy.name!r} could not decide, so {attempt.name} is denied.")


def tell_policies(
    attempt: Attempt, checked: Iterator[tuple[ToolPolicy, Any]] | None = None
) -> Coroutine[Any, Any, None] | None:
    """Tell each policy that checked the call about the call's success, before the call is committed.

    Raises `Refused` if a policy raises, so that the call fails.
    """
    context: Any = attempt.policy_context
    tool, result = attempt.call.tool, attempt.finished
    if checked is None:
        policing: Any = call_behind(context)
        checked = iter(policing.checked)
    for policy, seen in checked:
        try:
            told = policy.on_result(tool, seen, result, context=context)
        except (Exception, GeneratorExit) as error:
            raise _refusing(attempt, policy, error) from error
        if told is not None:
            return _tell_waiting(attempt, policy, told, checked)
    return None


async def _tell_waiting(
    attempt: Attempt,
    policy: ToolPolicy,
    waiting: Awaitable[None],
    rest: Iterator[tuple[ToolPolicy, Any]],
) -> None:
    """Await a policy's `on_result`, then tell the rest, as `tell_policies` does."""
    try:
        await waiting
    except (Exception, GeneratorExit) as error:
        if is_closing():
            raise
        raise _refusing(attempt, policy, error) from error
    waiting_again = tell_policies(attempt, rest)
    if waiting_again is not None:
        await waiting_again


def _refusing(attempt: Attempt, policy: ToolPolicy, error: BaseException) -> Refused:
    attempt.passage.policy = policy.name
    return Refused(
        "denied", f"The policy {policy.name!r} rejected the result of {attempt.name}: {words_of(error)}"
    )
