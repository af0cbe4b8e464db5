"""Policies: how they check a call, and the context they get."""

from __future__ import annotations

import logging
from typing import Any, TypeVar

import msgspec

from handrail.cancellation import await_foreign, shielded
from handrail.context import ToolContext
from handrail.dispatch.attempt import Attempt
from handrail.dispatch.failures import Refused
from handrail.dispatch.views import CallSession, reserved
from handrail.errors import ContextExpired, EventRefused
from handrail.events import Fact
from handrail.operation import Home
from handrail.protocols import Filesystem, Forkable, PolicyDecision, Slice
from handrail.question import Quorum
from handrail.resources.bindings import CallResources
from handrail.tools import ToolResult

T = TypeVar("T")

log = logging.getLogger("handrail.gate")


class PolicySession(CallSession):
    """The session as a policy sees it.

    Before the handler runs, a policy reads the state that the call will start from and may only log; after
    it, a policy reads and writes the call's fork, whatever the tool's own effect.
    """

    __slots__ = ()

    def __getitem__(self, kind: type[T], /) -> Slice[T]:
        attempt = self._attempt
        if attempt.let_through:
            return attempt.open_transaction.session[kind]
        outer = attempt.parent.transaction if attempt.parent is not None else None
        state = attempt.frame.session.state if outer is None else outer.session.state
        return attempt.frame.session.slice_in(state, kind)

    def dispatch(self, event: object, /) -> None:
        attempt = self._attempt
        if isinstance(event, Fact):
            raise reserved(event)
        if attempt.let_through:
            attempt.open_transaction.session.dispatch(event)
            return
        session = attempt.frame.session
        if not all(target.is_log for target in session.targets_of(event)):
            raise EventRefused(
                event, "a policy's `check` may only log", "Keep what it counts in a slice of kind 'log'."
            )
        session.dispatch(event)


class PolicyCall(msgspec.Struct, eq=False):
    """The source of the context that policies get.

    Before the handler it shows the state that the call will start from; afterwards, the call's changes.
    Policies may write state even if the tool's effect is only to read.
    """

    _attempt: Attempt
    _ended: bool = False
    _home: Home | None = None
    _resources: CallResources | None = None

    @property
    def home(self) -> Home:
        if self._home is None:
            self._home = Home(self._attempt.call.loop, self._attempt.id)
            self._home.closed = self._ended
        return self._home

    def check(self) -> None:
        """Raise `ContextExpired` once the call is over. That is later than for the handler, since policies see the result."""
        if self._ended:
            raise ContextExpired(self._attempt.id)

    def fork(self, protocol: type, resource: Forkable) -> Any:
        return self._attempt.fork(protocol, resource)

    def close(self) -> None:
        """Close the policies' context, because the call is over."""
        self._ended = True
        if self._home is not None:
            self._home.close()

    @property
    def session(self) -> PolicySession:
        return PolicySession(self._attempt)

    @property
    def resources(self) -> CallResources:
        if self._resources is None:
            self._attempt.policies_made_resources = True
            frame = self._attempt.frame
            self._resources = CallResources(frame.world.resources, self, frame.costs.given)
        return self._resources

    @property
    def filesystem(self) -> Filesystem:
        files = self._attempt.frame.world.filesystem
        return self.resources.get(Filesystem) if files is None else self._attempt.fork(Filesystem, files)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._attempt, name)


def close_policy_context(attempt: Attempt) -> None:
    """Close the policies' context and break its reference cycle."""
    context = attempt.policy_context
    if context is not None:
        attempt.policy_context = None
        PolicyCall.close(context._source)  # pyright: ignore[reportPrivateUsage, reportArgumentType]  # made here


def policy_resources(attempt: Attempt) -> CallResources | None:
    """Return the resources that policies made for this attempt, if any."""
    if attempt.policy_context is None:
        return None
    behind: Any = attempt.policy_context._source  # pyright: ignore[reportPrivateUsage]  # made here
    return behind._resources


async def close_resources(attempt: Attempt) -> None:
    """Close the resources that an attempt and its policies made for themselves."""
    for resources in (attempt.made_resources, policy_resources(attempt)):
        if resources is not None and not resources.untouched:
            for error in await shielded(resources.close()):
                log.error("closing a resource of %s raised", attempt.name, exc_info=error)


async def check_policies(attempt: Attempt) -> str | None:
    """Check a call with every policy. All must allow it; one that raises denies. Returns the reason to ask, if any."""
    asked: str | None = None
    quorums: tuple[Quorum, ...] = ()
    call, seen = attempt.call, attempt.seen
    tool, name = call.tool, call.name
    if seen is None:  # a copy, so that no policy can change what the handler gets
        seen = attempt.seen = tool.parse_again(attempt.params, call.arguments)
    attempt.decision = "deny"
    context = attempt.policy_context
    if context is None:
        behind: Any = PolicyCall(attempt)  # members that it lacks come from the attempt
        context = attempt.policy_context = ToolContext(behind)
    for policy in attempt.frame.policies:
        try:
            decision = policy.check(tool, seen, context=context)
            if not isinstance(decision, PolicyDecision):
                decision = await await_foreign(decision)
            kind = decision.kind
        except Exception as error:
            log.exception("the policy %r raised, or returned no PolicyDecision, on %s", policy.name, name)
            raise Refused(
                "denied", f"The policy {policy.name!r} could not decide and so denies {name}."
            ) from error
        if kind == "ask":
            asked = asked or decision.reason or f"{policy.name} asks"
            if decision.quorums:
                quorums = tuple(dict.fromkeys((*quorums, *decision.quorums)))
        elif kind != "allow":  # anything but the three kinds is denied, too
            raise Refused("denied", f"{name} is not allowed: {decision.reason}")
    if attempt.quorums is None:
        attempt.quorums = quorums
    elif not set(quorums) <= set(
        attempt.quorums
    ):  # what was approved before was not approved by these people
        raise Refused("denied", f"{name} needs the approval of other people than before. Call it again.")
    attempt.decision = "allow" if asked is None else f"ask: {asked}"
    return asked


async def tell_policies(attempt: Attempt, result: ToolResult[Any]) -> None:
    """Tell every policy about a success before it is committed. A policy that raises fails the call."""
    context: Any = attempt.policy_context
    tool = attempt.call.tool
    for policy in attempt.frame.policies:
        try:
            told = policy.on_result(tool, attempt.seen, result, context=context)
            if told is not None:
                await told
        except Exception as error:
            raise Refused(
                "denied", f"The policy {policy.name!r} refused what {attempt.name} did: {error}"
            ) from error
