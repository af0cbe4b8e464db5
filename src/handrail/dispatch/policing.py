"""A call as its policies see it: the same facts, a session and files of their own standing."""

from __future__ import annotations

from typing import Any

import msgspec

from handrail.context import ToolContext
from handrail.dispatch.call import LiveCall
from handrail.dispatch.failures import Refused
from handrail.dispatch.views import PolicySession
from handrail.errors import ContextExpired
from handrail.operation import Home
from handrail.protocols import Filesystem, Forkable
from handrail.resources.registry import CallResources
from handrail.tools import ToolResult


class PolicyCall(msgspec.Struct, eq=False):
    """Stands behind the context that policies get.

    Before the handler it shows what the call will start from; afterwards, what the call did. Policies
    may write state although the tool's effect is only to read.
    """

    _call: LiveCall
    _ended: bool = False
    _home: Home | None = None
    _resources: CallResources | None = None

    @property
    def home(self) -> Home:
        if self._home is None:
            self._home = Home(self._call.loop, self._call.id)
            self._home.closed = self._ended
        return self._home

    def check(self) -> None:
        """Raise `ContextExpired` if the call is over: later than for its handler, since policies hear of that."""
        if self._ended:
            raise ContextExpired(self._call.id)

    def fork(self, protocol: type, resource: Forkable) -> Any:
        return self._call.fork(protocol, resource)

    def close(self) -> None:
        """The call is over, and with it what its policies may do through the context."""
        self._ended = True
        if self._home is not None:
            self._home.close()

    @property
    def session(self) -> PolicySession:
        return PolicySession(self._call)

    @property
    def resources(self) -> CallResources:
        if self._resources is None:
            self._call.policies_made_resources = True
            frame = self._call.frame
            self._resources = CallResources(frame.resources, self, frame.given)
        return self._resources

    @property
    def filesystem(self) -> Filesystem:
        files = self._call.frame.filesystem
        return self.resources.get(Filesystem) if files is None else self._call.fork(Filesystem, files)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._call, name)


def policy_context(call: LiveCall) -> ToolContext:
    """The context that a call's policies get."""
    behind: Any = PolicyCall(call)  # what it lacks of a call's members it takes from the call itself
    return ToolContext(behind)


def close_policy_context(call: LiveCall) -> None:
    """End that context with the call, and with it the circle that only the collector could free."""
    context = call.policy_context
    if context is not None:
        call.policy_context = None
        behind: Any = context._call  # pyright: ignore[reportPrivateUsage]  # made here
        behind.close()


def policy_resources(call: LiveCall) -> CallResources | None:
    """What policies made for this call, if anything."""
    if call.policy_context is None:
        return None
    behind: Any = call.policy_context._call  # pyright: ignore[reportPrivateUsage]  # made here
    return behind._resources


async def tell_policies(call: LiveCall, result: ToolResult[Any]) -> None:
    """Every policy hears of a success before it is committed; one that raises fails the call."""
    context: Any = call.policy_context
    for policy in call.frame.policies:
        try:
            told = policy.on_result(call.tool, call.seen, result, context=context)
            if told is not None:
                await told
        except Exception as error:
            raise Refused(
                "denied", f"The policy {policy.name!r} refused what {call.name} did: {error}"
            ) from error
