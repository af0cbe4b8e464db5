"""The built-in policies. Their state lives in the session, keyed by the policy's name."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Collection, Hashable, Iterable, Mapping
from typing import Any, Literal

import msgspec

from handrail.context import ToolContext
from handrail.errors import DefinitionError, FileError
from handrail.protocols import PolicyDecision, ToolPolicy
from handrail.question import Quorum
from handrail.resources.paths import parse_path
from handrail.session import kept
from handrail.tools import EFFECTS, Effect, Tool, ToolResult
from handrail.tools.checks import CAPABILITY

Verdict = Literal["allow", "ask", "deny"] | Quorum
"""The verdict on a capability or an effect. A `Quorum`, which `ask(role=..., approvals=...)` returns, asks other people."""

_PATTERN = re.compile(rf"(\*|{CAPABILITY}(\.\*)?)\Z")


def _policy_key(note: Any) -> Hashable:
    return (note.policy, note.key)


@kept(key=_policy_key)
class PolicyNote(msgspec.Struct, frozen=True):
    """A note in a policy's state. If the call that led to it is undone, so is the note."""

    policy: str
    key: str
    value: str


class CheckOnly:
    """A policy that ignores results."""

    def on_result(
        self, tool: Tool[Any, Any], params: Any, result: ToolResult[Any], *, context: ToolContext
    ) -> None:
        return None


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
            # The note is not looked up first, because a call that reads the notes becomes stale whenever another one writes.
            context.session.dispatch(PolicyNote(self.name, tool.name, "succeeded"))


class CapabilityPolicy(CheckOnly):
    """Allows, asks about or denies calls by capability, effect and path.

    Verdicts on capabilities come first, by name or by a pattern such as `fs.*` or `*`. A tool is denied or
    asked about if one of its capabilities is, and allowed if all of them are. Otherwise the verdict on the tool's
    effect in `effects` decides. By default, `pure`, `read` and `staged` are allowed, and the other effects ask.

    A worker called as a tool is allowed unless its capability, `worker`, says otherwise: its own policies
    decide about its calls.

    A tool that may write is allowed within `scope` only: a path outside it asks, even if the tool only reads it.
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

    def check_tools(self, tools: Iterable[Tool[Any, Any]]) -> None:
        """Raise `DefinitionError` if this policy names a capability that is probably misspelt.

        That is, none of these tools has it, but one has a very similar capability that the policy does not name.
        """
        used = {word for tool in tools for word in tool.capabilities}
        for word in sorted(self._verdicts.keys() - used):
            start = word[: word.rfind(".") + 2]  # typos are rare in a word's first letter
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
            outside = [named.path for named in tool.paths(params) if not self._in_scope(named.path)]
            if outside:
                return PolicyDecision.ask(f"{tool.name} goes outside its scope: {', '.join(outside)}")
        return decision

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


class Scoped:
    """A section's policy. It decides on the section's tools, and is notified of the results of all tools.

    If its `on_result` judges results, it has a method `note_result` for the results of other tools, which only takes
    note of them.
    """

    __slots__ = ("_note", "_policy", "_tools", "name")

    def __init__(self, policy: ToolPolicy, tools: frozenset[str]) -> None:
        self.name = policy.name
        self._policy = policy
        self._tools = tools
        self._note: Callable[..., None] | None = getattr(policy, "note_result", None)

    def check(
        self, tool: Tool[Any, Any], params: Any, *, context: ToolContext
    ) -> PolicyDecision | Awaitable[PolicyDecision]:
        if tool.name not in self._tools:
            return PolicyDecision.allow()
        return self._policy.check(tool, params, context=context)

    def on_result(
        self, tool: Tool[Any, Any], params: Any, result: ToolResult[Any], *, context: ToolContext
    ) -> Awaitable[None] | None:
        if self._note is not None and tool.name not in self._tools:
            return self._note(tool, params, context=context)
        return self._policy.on_result(tool, params, result, context=context)


def within_scope(policy: ToolPolicy, tools: frozenset[str] | None) -> ToolPolicy:
    """Return the policy limited to these tools; None means all tools."""
    return policy if tools is None else Scoped(policy, tools)


def check_verdicts(policies: Iterable[ToolPolicy], tools: Collection[Tool[Any, Any]]) -> None:
    """Raise `DefinitionError` if a policy names a misspelt capability that none of these tools has."""
    for policy in policies:
        if isinstance(policy, CapabilityPolicy):
            policy.check_tools(tools)
