"""The policies that come with Handrail. Their state lives in the session, keyed by the policy's name."""

from __future__ import annotations

import difflib
import hashlib
import math
import re
from collections.abc import Collection, Hashable, Mapping
from typing import Any, Literal

import msgspec

from handrail.clock import SYSTEM_CLOCK, Clock
from handrail.context import ToolContext
from handrail.errors import DefinitionError, FileError, FileMissing, HandrailError, ResourceError
from handrail.protocols import Filesystem, PolicyDecision
from handrail.resources.paths import place
from handrail.session import kept
from handrail.tools import EFFECTS, Effect, Tool, ToolResult

Verdict = Literal["allow", "ask", "deny"]

_KNOWN = ("fs.read", "fs.write", "proc.exec", "worker")
"""The capabilities of the tools that come with Handrail; what is nearly one of them is taken for a slip."""
_PATTERN = re.compile(r"(\*|[a-z][a-z0-9_]*(\.[a-z0-9_]+)*(\.\*)?)\Z")


def _policy_key(note: Any) -> Hashable:
    return (note.policy, note.key)


@kept(key=_policy_key)
class PolicyNote(msgspec.Struct, frozen=True):
    """One thing a policy remembers; undone with the call that made it."""

    policy: str
    key: str
    value: str


class CallCounted(msgspec.Struct, frozen=True):
    """A call that counts towards a rate, whatever came of it."""

    policy: str
    call: str
    at: float
    window: float
    most: int


def _within(window: float, at: float, now: float) -> bool:
    """Is `at` that near? One that lies far ahead was measured on another machine's clock."""
    return abs(now - at) < window


def _full(earlier: RateWindow | None, most: int, window: float, now: float) -> bool:
    """Were there as many calls as may be, the oldest of them within the window?"""
    return (
        earlier is not None and len(earlier.times) >= most and _within(window, earlier.times[-most][1], now)
    )


def _add_to_window(windows: Any, event: CallCounted) -> Any:
    earlier = windows.get(event.policy)
    if _full(earlier, event.most, event.window, event.at):
        return windows
    times = () if earlier is None else earlier.times
    return windows.append(RateWindow(event.policy, (*times, (event.call, event.at))[-event.most :]))


def _window_key(window: Any) -> Hashable:
    return window.policy


@kept(kind="log", key=_window_key, reducers={CallCounted: _add_to_window})
class RateWindow(msgspec.Struct, frozen=True):
    """Which calls were last and when, at most as many as the rate allows; kept although calls fail."""

    policy: str
    times: tuple[tuple[str, float], ...]


class _Quiet:
    """A policy that only checks."""

    def on_result(
        self, tool: Tool[Any, Any], params: Any, result: ToolResult[Any], *, context: ToolContext
    ) -> None:
        return None


class SequentialDependencyPolicy:
    """A tool may run only after others have succeeded: `{"deploy": {"build", "test"}}`."""

    def __init__(self, needs: Mapping[str, Collection[str]], *, name: str = "sequential") -> None:
        for tool, others in needs.items():
            if isinstance(others, str):
                raise DefinitionError(
                    f"policy {name!r}: {tool!r} needs {others!r}, a text. Give a set of tool names: {{{others!r}}}."
                )
            if tool in others:
                raise DefinitionError(
                    f"policy {name!r}: {tool!r} needs itself and could never run. Take it out."
                )
        self.name = name
        self._needs = {tool: tuple(sorted(others)) for tool, others in needs.items()}
        self._watched = {each for others in self._needs.values() for each in others}

    def check(self, tool: Tool[Any, Any], params: Any, *, context: ToolContext) -> PolicyDecision:
        needed = self._needs.get(tool.name)
        if not needed:
            return PolicyDecision.allow()
        notes = context.session[PolicyNote]
        missing = [each for each in needed if notes.get((self.name, each)) is None]
        if missing:
            return PolicyDecision.deny(
                f"{tool.name} may only run after {' and '.join(missing)} succeeded. Call that first."
            )
        return PolicyDecision.allow()

    def on_result(
        self, tool: Tool[Any, Any], params: Any, result: ToolResult[Any], *, context: ToolContext
    ) -> None:
        if tool.name in self._watched:
            # Not looked up first: a call that read the notes would be stale whenever another wrote one.
            context.session.dispatch(PolicyNote(self.name, tool.name, "succeeded"))


class ReadBeforeWritePolicy:
    """An existing file is read, at its current content, before it is overwritten.

    New files, and files this session wrote, are free. A tool that may write files but names no path,
    or has no filesystem, is denied.
    """

    name = "read_before_write"

    def check(self, tool: Tool[Any, Any], params: Any, *, context: ToolContext) -> PolicyDecision:
        if "fs.write" not in tool.capabilities and not any(p.access == "write" for p in tool.paths(params)):
            return PolicyDecision.allow()
        paths = [named.path for named in tool.paths(params) if named.access == "write"]
        if not paths:
            return PolicyDecision.deny(
                f"{tool.name} writes files but does not say which: no argument of it is declared as a path."
            )
        try:
            files = context.filesystem
        except HandrailError:
            return PolicyDecision.deny(
                f"{tool.name} writes files and there are none in this run: it was given no filesystem."
            )
        for path in paths:
            if not self._may_write(path, files, context):
                return PolicyDecision.deny(
                    f"{path} exists and was not read at its current content. Read it first, then write."
                )
        return PolicyDecision.allow()

    def on_result(
        self, tool: Tool[Any, Any], params: Any, result: ToolResult[Any], *, context: ToolContext
    ) -> None:
        named = tool.paths(params)
        if not named:
            return
        try:
            files = context.filesystem
        except ResourceError:
            return  # then nothing was read, and what writes has been denied
        for each in named:
            try:
                path = place(each.path).path
            except FileError:
                continue
            content = _content_digest(files, path)
            if content is not None:
                context.session.dispatch(PolicyNote(self.name, path, content))

    def _may_write(self, path: str, files: Filesystem, context: ToolContext) -> bool:
        try:
            at = place(path).path
        except FileError:
            return True  # not a path: the filesystem refuses it with the better words
        current = _content_digest(files, at)
        if current is None:
            return True
        seen = context.session[PolicyNote].get((self.name, at))
        return seen is not None and seen.value == current and current != _UNREADABLE


_UNREADABLE = "unreadable"


def _content_digest(files: Filesystem, path: str) -> str | None:
    """What stands for a file's content; None where there is no file."""
    if not path:
        return None  # the root, which is a folder
    try:
        return hashlib.blake2b(files.read_bytes(path), digest_size=16).hexdigest()
    except FileMissing:
        return None
    except FileError:
        try:
            return _UNREADABLE if files.exists(path) and not files.stat(path).is_directory else None
        except FileError:
            return None  # a link that leads out: the filesystem refuses it with the better words


class CapabilityPolicy(_Quiet):
    """Allow, ask or deny by capability, effect and path.

    A capability's own verdict comes first: by its name, or by a pattern such as `fs.*` or `*`. If
    each of a tool's capabilities is allowed, so is the tool; one that is denied or asked about decides.
    Then the tool's effect decides: `pure` and `read` are allowed, `staged` is allowed, `idempotent`
    goes by its capabilities, `compensable` and `irreversible` ask.

    A worker called as a tool is allowed unless its capability, `worker`, says otherwise: what it does is
    done by its own calls, under its own policies.

    Whatever may write is allowed within `scope` only: a path outside it asks, whoever allowed the tool.
    """

    def __init__(
        self,
        verdicts: Mapping[str, Verdict] | None = None,
        *,
        effects: Mapping[Effect, Verdict] | None = None,
        scope: Collection[str] = (".",),
        name: str = "capability",
    ) -> None:
        for option, given in (("verdicts", verdicts), ("effects", effects)):
            if given is not None and not isinstance(given, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]  # callers may not be typed
                raise DefinitionError(
                    f"policy {name!r}: {option} is {given!r}. Give a mapping, for example {{'fs.write': 'ask'}}."
                )
        for word in verdicts or {}:
            if not _PATTERN.match(word):
                raise DefinitionError(
                    f"policy {name!r}: {word!r} is neither a capability nor a pattern and would match nothing. "
                    "Write 'fs.write', 'fs.*' or '*'."
                )
            meant = difflib.get_close_matches(word, _KNOWN, n=1, cutoff=0.8)
            if meant and word not in _KNOWN:
                raise DefinitionError(
                    f"policy {name!r}: no tool of ours has the capability {word!r}. Did you mean {meant[0]!r}?"
                )
        for what, verdict in [*(verdicts or {}).items(), *(effects or {}).items()]:
            if verdict not in ("allow", "ask", "deny"):
                raise DefinitionError(
                    f"policy {name!r}: the verdict on {what!r} is {verdict!r}. Use 'allow', 'ask' or 'deny'."
                )
        for effect in effects or ():
            if effect not in EFFECTS:
                raise DefinitionError(
                    f"policy {name!r}: {effect!r} is not an effect. Use one of {', '.join(EFFECTS)}."
                )
        if isinstance(scope, str):
            raise DefinitionError(
                f"policy {name!r}: the scope is a text. Give a list of folders: [{scope!r}]."
            )
        self.name = name
        self._verdicts: dict[str, Verdict] = dict(verdicts or {})
        self._effects: dict[Effect, Verdict] = dict(effects or {})
        self._scope = tuple(place(folder).path for folder in scope)

    def check(self, tool: Tool[Any, Any], params: Any, *, context: ToolContext) -> PolicyDecision:
        decision = self._by_capability(tool) or self._by_effect(tool)
        if decision.kind == "allow" and EFFECTS[tool.effect].writes:
            outside = [named.path for named in tool.paths(params) if not self._in_scope(named.path)]
            if outside:
                return PolicyDecision.ask(f"{tool.name} goes outside its scope: {', '.join(outside)}")
        return decision

    def _by_capability(self, tool: Tool[Any, Any]) -> PolicyDecision | None:
        found = [(word, self._verdict_on(word)) for word in sorted(tool.capabilities)]
        strictest_first: tuple[Verdict, ...] = ("deny", "ask")
        for wanted in strictest_first:
            for word, verdict in found:
                if verdict == wanted:
                    return self._decision(wanted, f"{tool.name} uses {word!r}")
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
            unsaid = [word for word in sorted(tool.capabilities) if self._verdict_on(word) is None]
            what = f"use {', '.join(unsaid)}" if unsaid else "run, as it names no capability"
            return PolicyDecision.ask(f"nothing says whether {tool.name} may {what}")
        return PolicyDecision.ask(f"{tool.name} is {tool.effect}")

    def _decision(self, verdict: Verdict, about: str) -> PolicyDecision:
        if verdict == "deny":
            return PolicyDecision.deny(f"{about}, which is not allowed here.")
        return PolicyDecision.ask(about) if verdict == "ask" else PolicyDecision.allow()

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
            at = place(path).path
        except FileError:
            return False
        return any(not folder or at == folder or at.startswith(f"{folder}/") for folder in self._scope)


class RateLimitPolicy(_Quiet):
    """At most so many calls in so many seconds, failed ones counted too; of all tools, or of some.

    A call counts once, also when it is tried again. One that this policy denied does not count.
    """

    def __init__(
        self,
        most: int,
        per_seconds: float,
        *,
        tools: Collection[str] | None = None,
        name: str = "rate_limit",
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        if type(most) is not int or most < 1 or not 0 < per_seconds < math.inf:
            raise DefinitionError(
                f"policy {name!r}: {most} calls in {per_seconds} seconds is no rate. Give at least 1 call and a positive time."
            )
        if isinstance(tools, str):
            raise DefinitionError(f"policy {name!r}: tools is a text. Give a set of names: {{{tools!r}}}.")
        self.name = name
        self._most = most
        self._window = per_seconds
        self._tools = None if tools is None else frozenset(tools)
        self._clock = clock

    def check(self, tool: Tool[Any, Any], params: Any, *, context: ToolContext) -> PolicyDecision:
        if self._tools is not None and tool.name not in self._tools:
            return PolicyDecision.allow()
        session, call = context.session, context.invocation.idempotency_key
        now = self._clock.monotonic()
        window = session[RateWindow].get(self.name)
        if self._counted(window, call, now):
            return PolicyDecision.allow()
        if not _full(window, self._most, self._window, now):
            session.dispatch(CallCounted(self.name, call, now, self._window, self._most))
            # The reducer lets in only as many as may be, also when threads come at the same moment.
            window = session[RateWindow].get(self.name)
            if self._counted(window, call, now):
                return PolicyDecision.allow()
        oldest = now if window is None else window.times[-self._most][1]
        return PolicyDecision.deny(
            f"{self._most} calls in {self._window:g} seconds is the limit. "
            f"Wait {oldest + self._window - now:.1f} seconds."
        )

    def _counted(self, window: RateWindow | None, call: str, now: float) -> bool:
        """Is this call among those that were let in?"""
        times = () if window is None else reversed(window.times)
        return any(one == call and _within(self._window, at, now) for one, at in times)
