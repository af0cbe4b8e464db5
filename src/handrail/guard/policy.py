"""`SequentialDependencyPolicy` and `CapabilityPolicy`, the roles that any policy can have, and the policies of sections.

Policies with state keep it in the session, under their names.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Collection, Hashable, Iterable, Mapping
from contextlib import suppress
from typing import Any, Literal, Protocol, runtime_checkable

import msgspec

from handrail.concurrency.claims import SLICE
from handrail.concurrency.threads import run_in_thread
from handrail.context import ToolContext, call_behind
from handrail.errors import DefinitionError, FileError, HandrailError
from handrail.protocols import PolicyDecision, ToolPolicy
from handrail.question import Quorum
from handrail.resources.paths import HasLinks, parse_path
from handrail.session import kept
from handrail.text.spelling import checked_arguments
from handrail.tools import EFFECTS, Effect, Tool, ToolResult
from handrail.tools.definition import CAPABILITY

Verdict = Literal["allow", "ask", "deny"] | Quorum
"""The verdict on a capability or an effect. A `Quorum`, which `ask(role=..., approvals=...)` returns, asks other people."""

_APPROVED = "approved outside the scope"
_PATTERN = re.compile(rf"(\*|{CAPABILITY}(\.\*)?)\Z")


def _policy_key(note: Any) -> Hashable:
    return (note.policy, note.key)


@kept(key=_policy_key)
class PolicyNote(msgspec.Struct, frozen=True):
    """A note in a policy's state. If the call that led to the note is rolled back, so is the note."""

    policy: str
    key: str
    value: str


@runtime_checkable
class ChangePolicy(Protocol):
    """The role of a policy that also judges the paths that a call has changed, before the call is committed.

    Its `on_result` must refuse changes that nobody was asked about.
    """

    def paths_outside(self, tool: Tool[Any, Any], *, context: ToolContext) -> list[str]:
        """Return the paths that a call has changed in its fork and that need approval."""
        ...


@runtime_checkable
class ResultsNoter(Protocol):
    """The role of a section's policy that takes note of the successful results of all tools, but judges only the section's tools."""

    def note_result(self, tool: Tool[Any, Any], params: Any, *, context: ToolContext) -> None: ...


class CheckOnly:
    """A base class for policies that ignore results."""

    def on_result(
        self, tool: Tool[Any, Any], params: Any, result: ToolResult[Any], *, context: ToolContext
    ) -> None:
        return None


@checked_arguments
class SequentialDependencyPolicy:
    """Allows a tool only after others have succeeded, as in `{"deploy": {"build", "test"}}`."""

    def __init__(self, needs: Mapping[str, Collection[str]], *, name: str = "sequential") -> None:
        for tool, others in needs.items():
            if isinstance(others, str):
                raise DefinitionError(
                    f"policy {name!r}: {tool!r} requires the string {others!r}, not a set. Pass a set of tool names: {{{others!r}}}."
                )
            if tool in others:
                raise DefinitionError(
                    f"policy {name!r}: {tool!r} requires itself, so it could never run. Remove it from its own set."
                )
        self.name = name
        self._needs = {tool: tuple(sorted(others)) for tool, others in needs.items()}
        self._watched = {each for others in self._needs.values() for each in others}
        self.named_tools = frozenset(self._needs)

    def check(self, tool: Tool[Any, Any], params: Any, *, context: ToolContext) -> PolicyDecision:
        needed = self._needs.get(tool.name)
        if not needed:
            return PolicyDecision.allow()
        notes = context.session[PolicyNote]
        missing = [each for each in needed if notes.get((self.name, each)) is None]
        if missing:
            return PolicyDecision.deny(
                f"{tool.name} may run only after {' and '.join(missing)} succeeded. Call {' and '.join(missing)} first."
            )
        return PolicyDecision.allow()

    def on_result(
        self, tool: Tool[Any, Any], params: Any, result: ToolResult[Any], *, context: ToolContext
    ) -> None:
        if tool.name in self._watched:
            # Written even if the note exists: looking it up would make this call stale whenever another call writes a note.
            context.session.dispatch(PolicyNote(self.name, tool.name, "succeeded"))


@checked_arguments
class CapabilityPolicy:
    """Allows, asks about or denies calls by capability, effect and path.

    Verdicts on capabilities come first, by name or by a pattern such as `fs.*` or `*`. A tool is denied or
    asked about if one of its capabilities is, and allowed if all of them are. Otherwise the verdict on the tool's
    effect in `effects` decides. By default, `pure`, `read` and `staged` tools are allowed, and others are asked about.

    A worker or an agent that is called as a tool is allowed, unless there is another verdict on its capability, `worker`
    or `agent`. Policies decide on its inner calls.

    A tool that may write is allowed within `scope` only. If an argument names a path outside it, or a link that leads
    there, the policy asks, even if the tool only reads the path. After the call has run in its fork, the paths that it
    actually changed are judged too, including those that a command changed. If one is outside, the policy shows the call's
    diff and asks before the call is committed. It can ask about a nested call, or a call on files in memory, at that point
    only if the call is previewed anyway. Otherwise the call is rejected, unless somebody has approved the paths by name.
    """

    def __init__(
        self,
        verdicts: Mapping[str, Verdict] | None = None,
        *,
        effects: Mapping[Effect, Verdict] | None = None,
        scope: Collection[str] = (".",),
        name: str = "capability",
    ) -> None:
        for word in verdicts or {}:
            if word in EFFECTS:
                raise DefinitionError(
                    f"policy {name!r}: {word!r} is an effect, not a capability. "
                    f"Write it under effects: CapabilityPolicy(effects={{{word!r}: ...}})."
                )
            if not _PATTERN.match(word):
                raise DefinitionError(
                    f"policy {name!r}: {word!r} is neither a capability nor a pattern, so it would match nothing. "
                    "Write 'fs.write', 'fs.*' or '*'."
                )
        for what, verdict in [*(verdicts or {}).items(), *(effects or {}).items()]:
            if verdict not in ("allow", "ask", "deny") and not isinstance(verdict, Quorum):  # pyright: ignore[reportUnnecessaryIsInstance]  # callers might not be type-checked
                raise DefinitionError(
                    f"policy {name!r}: the verdict on {what!r} is {verdict!r}. Use 'allow', 'ask', 'deny' or "
                    "ask(role=..., approvals=...)."
                )
        for effect in effects or ():
            if effect not in EFFECTS:
                raise DefinitionError(
                    f"policy {name!r}: {effect!r} is not an effect. Use one of {', '.join(EFFECTS)}."
                )
        if isinstance(scope, str):
            raise DefinitionError(
                f"policy {name!r}: the scope is a string. Pass a list of folders: [{scope!r}]."
            )
        self.name = name
        self._verdicts: dict[str, Verdict] = dict(verdicts or {})
        self._effects: dict[Effect, Verdict] = dict(effects or {})
        self._scope = tuple(parse_path(folder).path for folder in scope)
        self._is_limited = "" not in self._scope

    def check_tools(self, tools: Iterable[Tool[Any, Any]]) -> None:
        """Raise `DefinitionError` if this policy names a capability that is probably misspelt.

        That is, none of these tools has it, but one has a very similar capability that the policy does not name.
        """
        used = {word for tool in tools for word in tool.capabilities}
        for word in sorted(self._verdicts.keys() - used):
            # Up to the first letter of the last part. Typos are rare there.
            start = word[: word.rfind(".") + 2]
            alike = [other for other in sorted(used - self._verdicts.keys()) if other.startswith(start)]
            if alike and not word.endswith("*"):
                import difflib

                for near in difflib.get_close_matches(word, alike, n=1, cutoff=0.8):
                    raise DefinitionError(
                        f"policy {self.name!r}: no tool has the capability {word!r}. Did you mean {near!r}?"
                    )

    def check(self, tool: Tool[Any, Any], params: Any, *, context: ToolContext) -> PolicyDecision:
        decision = self._by_capability(tool) or self._by_effect(tool)
        if decision.kind == "allow" and EFFECTS[tool.effect].writes:
            outside = self._named_outside(tool, params, context) if self._is_limited else ()
            if outside:
                return PolicyDecision.ask(f"{tool.name} goes outside its scope: {', '.join(outside)}")
        return decision

    def _named_outside(self, tool: Tool[Any, Any], params: Any, context: ToolContext) -> list[str]:
        """Return the paths in these params that are outside the scope or, if none is, those that lead out of it through a link."""
        named = [each.path for each in tool.paths(params)]
        outside = [path for path in named if not self._in_scope(path)]
        if outside or not named:
            return outside
        try:
            files = context.filesystem
        except HandrailError:
            return []
        if isinstance(files, HasLinks):
            for path in named:
                # The handler reports a path that is invalid or leads nowhere.
                with suppress(FileError):
                    target = files.resolved(parse_path(path).path)
                    if not self._in_scope(target):
                        outside.append(f"{path}, which leads to {target}")
        return outside

    def paths_outside(self, tool: Tool[Any, Any], *, context: ToolContext) -> list[str]:
        """Return the paths outside the scope that a call has changed in its fork, if this policy allows the tool itself.

        Paths that a nested call changed, and that were approved there, are left out.
        """
        if not self._is_limited or not EFFECTS[tool.effect].writes:
            return []
        if (self._by_capability(tool) or self._by_effect(tool)).kind != "allow":
            return []  # somebody has approved the call, whatever it changes
        call = call_behind(context)
        transaction = call.open_transaction
        outside = transaction.judged.get(id(self))
        if outside is None:
            changed = [path for fork in transaction.touched for path in fork.changed_paths() or ()]
            outside = [path.rstrip("/") for path in changed if not self._may_change(path, changed)]
            if transaction.sealed:
                transaction.judged[id(self)] = outside
        if not outside:
            return []
        approved = {
            each.key
            for each in transaction.events
            if isinstance(each, PolicyNote) and (each.policy, each.value) == (self.name, _APPROVED)
        }
        return [path for path in outside if path not in approved]

    def _may_change(self, path: str, changed: Collection[str]) -> bool:
        """Return whether a changed path is in the scope, or is a folder above the scope with another changed path below it."""
        if self._in_scope(path.rstrip("/")):
            return True
        around = path.endswith("/") and any(f"{folder}/".startswith(path) for folder in self._scope)
        return around and any(other != path and other.startswith(path) for other in changed)

    def on_result(
        self, tool: Tool[Any, Any], params: Any, result: ToolResult[Any], *, context: ToolContext
    ) -> Awaitable[None] | None:
        """Note the paths outside the scope whose changes were approved. Raises `FileError` if one was not approved."""
        outside = self.paths_outside(tool, context=context)
        if len(outside) > SLICE:
            return run_in_thread(lambda: self._note(outside, tool, params, context))
        return self._note(outside, tool, params, context) if outside else None

    def _note(self, outside: list[str], tool: Tool[Any, Any], params: Any, context: ToolContext) -> None:
        call = call_behind(context)
        was_shown = call.preview is not None or call.open_transaction.durable
        named = () if was_shown else _named(tool, params, context)
        for path in outside:
            covered = was_shown or any(path == each or path.startswith(f"{each}/") for each in named)
            if not call.passage.has_asked or not covered:
                scope = ", ".join(map(repr, self._scope))
                raise FileError(
                    path,
                    f"{tool.name} goes outside its scope ({scope}) by changing it, and nobody has approved that. Use paths in the scope",
                )
            context.session.dispatch(PolicyNote(self.name, path, _APPROVED))

    def _by_capability(self, tool: Tool[Any, Any]) -> PolicyDecision | None:
        found = [(word, self._verdict_on(word)) for word in sorted(tool.capabilities)]
        denied = [word for word, verdict in found if verdict == "deny"]
        if denied:
            return self._decision("deny", f"{tool.name} uses {denied[0]!r}")
        quorums = tuple(verdict for _, verdict in found if isinstance(verdict, Quorum))
        asked = [word for word, verdict in found if verdict == "ask" or isinstance(verdict, Quorum)]
        if asked:
            return self._ask(f"{tool.name} uses {asked[0]!r}", quorums)
        allowed = found and all(verdict == "allow" for _, verdict in found)
        return PolicyDecision.allow() if allowed else None

    def _by_effect(self, tool: Tool[Any, Any]) -> PolicyDecision:
        if tool.delegates:
            return PolicyDecision.allow()
        if tool.effect in self._effects:
            return self._decision(self._effects[tool.effect], f"{tool.name} is {tool.effect}")
        rule = EFFECTS[tool.effect].policy
        if rule in ("allow", "allow in scope"):
            return PolicyDecision.allow()
        if rule == "by capability":
            undecided = [word for word in sorted(tool.capabilities) if self._verdict_on(word) is None]
            what = f"use {', '.join(undecided)}" if undecided else "run, as it declares no capability"
            return PolicyDecision.ask(f"no rule says whether {tool.name} may {what}")
        return PolicyDecision.ask(f"{tool.name} is {tool.effect}")

    def _decision(self, verdict: Verdict, about: str) -> PolicyDecision:
        if verdict == "deny":
            return PolicyDecision.deny(f"{about}, which is not allowed here.")
        if isinstance(verdict, Quorum):
            return self._ask(about, (verdict,))
        return PolicyDecision.ask(about) if verdict == "ask" else PolicyDecision.allow()

    def _ask(self, about: str, quorums: tuple[Quorum, ...]) -> PolicyDecision:
        needed = f", which needs {' and '.join(map(str, quorums))}" if quorums else ""
        return PolicyDecision.ask(f"{about}{needed}", *quorums)

    def _verdict_on(self, word: str) -> Verdict | None:
        if word in self._verdicts:
            return self._verdicts[word]
        parts = word.split(".")
        for length in range(len(parts) - 1, -1, -1):
            pattern = ".".join([*parts[:length], "*"])
            if pattern in self._verdicts:
                return self._verdicts[pattern]
        return None

    def _in_scope(self, path: str) -> bool:
        try:
            at = parse_path(path).path
        except FileError:
            return False
        return any(not folder or at == folder or at.startswith(f"{folder}/") for folder in self._scope)


def _named(tool: Tool[Any, Any], params: Any, context: ToolContext) -> set[str]:
    """Return the paths in these params in canonical form, and where they lead. Invalid ones are left out."""
    found: set[str] = set()
    for each in tool.paths(params):
        with suppress(HandrailError):
            path = parse_path(each.path).path
            found.add(path)
            files = context.filesystem
            if isinstance(files, HasLinks):
                found.add(files.resolved(path))
    return found


class Scoped:
    """A section's policy. It decides on the section's tools only.

    Its `on_result` gets the successful results of all tools. If the policy is a `ResultsNoter`, its `note_result` gets the
    results of tools outside the section instead.
    """

    def __init__(self, policy: ToolPolicy, tools: frozenset[str]) -> None:
        self.name = policy.name
        self._policy = policy
        self._tools = tools
        self._noter = policy if isinstance(policy, ResultsNoter) else None

    def check(
        self, tool: Tool[Any, Any], params: Any, *, context: ToolContext
    ) -> PolicyDecision | Awaitable[PolicyDecision]:
        if tool.name not in self._tools:
            return PolicyDecision.allow()
        return self._policy.check(tool, params, context=context)

    def on_result(
        self, tool: Tool[Any, Any], params: Any, result: ToolResult[Any], *, context: ToolContext
    ) -> Awaitable[None] | None:
        if self._noter is not None and tool.name not in self._tools:
            return self._noter.note_result(tool, params, context=context)
        return self._policy.on_result(tool, params, result, context=context)


class ScopedChanges(Scoped):
    """A section's `ChangePolicy`. It judges the section's tools only.

    It gets the results of other tools only if it is a `ResultsNoter`.
    """

    def __init__(self, policy: ToolPolicy, judge: ChangePolicy, tools: frozenset[str]) -> None:
        super().__init__(policy, tools)
        self._judge = judge

    def on_result(
        self, tool: Tool[Any, Any], params: Any, result: ToolResult[Any], *, context: ToolContext
    ) -> Awaitable[None] | None:
        if self._noter is None and tool.name not in self._tools:
            return None
        return super().on_result(tool, params, result, context=context)

    def paths_outside(self, tool: Tool[Any, Any], *, context: ToolContext) -> list[str]:
        return self._judge.paths_outside(tool, context=context) if tool.name in self._tools else []


def within_scope(policy: ToolPolicy, tools: frozenset[str] | None) -> ToolPolicy:
    """Return the policy limited to these tools; None means all tools."""
    if tools is None:
        return policy
    return ScopedChanges(policy, policy, tools) if isinstance(policy, ChangePolicy) else Scoped(policy, tools)


def check_verdicts(policies: Iterable[ToolPolicy], tools: Collection[Tool[Any, Any]]) -> None:
    """Raise `DefinitionError` if a `CapabilityPolicy` names a capability that is probably misspelt."""
    for policy in policies:
        if isinstance(policy, CapabilityPolicy):
            policy.check_tools(tools)
