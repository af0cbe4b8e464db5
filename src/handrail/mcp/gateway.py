"""The gateway: the tools of other MCP servers behind Handrail's gate, for any MCP client.

Each call of a client is a separate run, under the policies in a file. A call that needs approval waits for the
approvers, who decide in the inbox of a `handrail serve` that uses the same journal. The client that makes the call does
not decide on it, unless it is trusted.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from handrail.clock import SYSTEM_CLOCK, Clock
from handrail.context import ToolContext
from handrail.errors import Declined, DefinitionError
from handrail.guard import CapabilityPolicy
from handrail.guard.policy import CheckOnly
from handrail.journal.digest import keyed_digest
from handrail.mcp.calls import Calls, LiveCall
from handrail.mcp.config import load_servers
from handrail.mcp.server import ToolServer
from handrail.mcp.tools import may_be_of
from handrail.prompt import Prompt
from handrail.protocols import PolicyDecision, ToolPolicy
from handrail.question import Answer, Question, Quorum, ask
from handrail.run.host import Host, Voters
from handrail.run.record.parking import Parking
from handrail.serve.inbox import GATEWAY
from handrail.text.rendering import escape_line
from handrail.tools import EFFECTS, Effect, Tool
from handrail.workers.front_matter import (
    CapabilityRules,
    Finder,
    FrontMatter,
    PolicyEntry,
    WorkerProblem,
    parse_file,
    read_text,
    refuse,
)

log = logging.getLogger("handrail.mcp")

_FENCE = "---\n"
_ALLOWED = frozenset(["policies", "limits"])


class Rules(NamedTuple):
    """The content of a policy file."""

    policies: tuple[ToolPolicy, ...]
    seconds: float | None = None
    """The time limit of one call, in seconds; None for the default of `McpTools`."""
    capabilities: frozenset[str] = frozenset()
    """The capabilities that the policies name."""


def load_rules(path: Path, *, trust_client: bool = False) -> Rules:
    """Read a policy file: the `policies` and `limits` of a worker's file, without the `---` lines around them.

    Approvers decide on calls for which a policy asks, and on calls of tools that no policy names and that may change
    something. With `trust_client`, the client's user decides. Raises a `WorkerError` that lists the problems by line.
    """
    find = _Shifted(path)
    text = read_text(path, find)
    parsed = None if text is None else parse_file(f"{_FENCE}{text}\n{_FENCE}", find)
    if parsed is None:
        raise refuse(find.problems)
    front = parsed.front
    # If a setting is invalid, `front.locked` is set even if the file has no `locked`, so names without a line are ignored.
    for name in sorted((front.model_fields_set & parsed.lines.keys()) - _ALLOWED):
        find.add(
            parsed.line_of(name), f"`{name}` has no meaning for a gateway", "Keep only policies and limits."
        )
    limits = front.limits.model_dump(exclude_none=True)
    for name in sorted(limits.keys() - {"tool_calls", "seconds"}):
        find.add(
            parsed.line_of(f"limits.{name}"), f"`limits.{name}` has no meaning for a gateway", "Leave it out."
        )
    made: list[ToolPolicy] = []
    for index, entry in enumerate(_entries(front)):
        where = f"policies[{index}]"
        try:
            made.append(_policy(entry, None if trust_client else ask()))
        except DefinitionError as error:
            find.add(parsed.line_of(where), *error.parts)
    names = [policy.name for policy in made]
    for name in sorted({name for name in names if names.count(name) > 1}):
        find.add(parsed.line_of("policies"), f"there are two policies {name!r}", "Merge them into one.")
    if find.problems:
        raise refuse(find.problems)
    if front.limits.tool_calls is not None:
        made.append(SharedRate(front.limits.tool_calls, None, name="limits"))
    return Rules(tuple(made), front.limits.seconds, _capabilities_in(_entries(front)))


class _Shifted(Finder):
    """Collects problems with the line numbers of the file. The parsed text has an additional first line, a fence."""

    def add(self, line: int, problem: str, hint: str, column: int | None = None) -> None:
        hint = hint.replace("worker.schema.json defines", "the policies of a worker's file define")
        self.problems.append(WorkerProblem(self.file, max(line - 1, 1), problem.rstrip("."), hint, column))


def _entries(front: FrontMatter) -> Sequence[Any]:
    given = front.policies
    has_rule = given is not None and any(
        each == "capability" or (isinstance(each, PolicyEntry) and each.capability is not None)
        for each in given
    )
    # Without a capability policy, no call would need approval.
    return (*(given or ()),) if has_rule else (*(given or ()), "capability")


def _capabilities_in(entries: Sequence[Any]) -> frozenset[str]:
    rules = [each.capability for each in entries if isinstance(each, PolicyEntry)]
    return frozenset(
        word for each in rules if each is not None for word in (*each.allow, *each.ask, *each.deny)
    )


def _policy(entry: Any, quorum: Quorum | None) -> ToolPolicy:
    if entry == "capability":
        return _capabilities(CapabilityRules(), quorum)
    if isinstance(entry, PolicyEntry):
        given = [entry.capability, entry.rate_limit, entry.sequential]
        if sum(each is not None for each in given) == 1:
            if entry.capability is not None:
                return _capabilities(entry.capability, quorum)
            if (rate := entry.rate_limit) is not None:
                return SharedRate(rate.most, rate.per_seconds, tools=rate.tools)
    raise DefinitionError(
        "a gateway has only the policies `capability` and `rate_limit`, one in each entry. Leave out the others: they depend "
        "on earlier calls, and each call through a gateway is a separate run."
    )


def _capabilities(rules: CapabilityRules, quorum: Quorum | None) -> ToolPolicy:
    asked: Any = quorum or "ask"
    verdicts: dict[str, Any] = {}
    for verdict, words in (("allow", rules.allow), (asked, rules.ask), ("deny", rules.deny)):
        for word in words:
            if word in verdicts:
                raise DefinitionError(f"{word!r} is listed twice. Keep one of them.")
            verdicts[word] = verdict
    effects: dict[Effect, Any] = {
        name: asked for name, rule in EFFECTS.items() if rule.policy in ("ask", "by capability")
    }
    return CapabilityPolicy(verdicts, effects=effects)


class SharedRate(CheckOnly):
    """Allows a principal at most `most` calls in `per_seconds` seconds, or in total if `per_seconds` is None.

    Only calls of the tools named in `tools` count; None means all tools. A gateway's calls are separate runs with separate
    sessions, so the policy itself counts them. The count starts again when the gateway restarts.
    """

    def __init__(
        self,
        most: int,
        per_seconds: float | None,
        *,
        tools: Sequence[str] | None = None,
        name: str = "rate_limit",
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self.name = name
        self.named_tools = None if tools is None else frozenset(tools)
        self._most = most
        self._window = per_seconds
        self._now = clock.monotonic
        self._calls: dict[str, deque[tuple[float, str]]] = {}

    def check(self, tool: Tool[Any, Any], params: Any, *, context: ToolContext) -> PolicyDecision:
        if self.named_tools is not None and tool.name not in self.named_tools:
            return PolicyDecision.allow()
        calls = self._calls.setdefault(context.session.principal, deque(maxlen=self._most + 1))
        now, key = self._now(), context.invocation.idempotency_key
        while calls and self._window is not None and calls[0][0] <= now - self._window:
            calls.popleft()
        if any(known == key for _, known in calls):
            return PolicyDecision.allow()  # the call was counted when it was first checked
        if len(calls) < self._most:
            calls.append((now, key))
            return PolicyDecision.allow()
        if self._window is None or not calls:
            return PolicyDecision.deny(
                f"this gateway allows each caller {self._most} calls, and yours are used up. "
                "Finish without this tool, or ask the gateway's owner for a higher limit."
            )
        wait = calls[0][0] + self._window - now
        return PolicyDecision.deny(
            f"{self._most} calls in {self._window:g} seconds is the limit. Wait {wait:.1f} seconds."
        )


class Gateway(ToolServer):
    """An MCP server with the tools of other MCP servers, behind policies.

    `voters` finds the people who may approve calls. Without it, the client is trusted: its own user approves.

    A gateway is identified by the path of its `mcp.json` and by where the servers in it are. Its identity is the name of its
    runs and part of the question that approvers see, so an approval is worth nothing at a gateway to other servers, even if it has the same
    journal and gives its servers the same names.
    """

    def __init__(
        self, servers: Path, rules: Rules, *, voters: Voters | None, journal: Any = None, **options: Any
    ) -> None:
        timeout = {} if rules.seconds is None else {"timeout": rules.seconds}
        self.sections = load_servers(servers, **timeout)
        names = [section.server.name for section in self.sections]
        for word in sorted(rules.capabilities):
            if not any(may_be_of(name, word) for name in names):
                log.warning(
                    "a policy names %s, and no server in %s is called that, so it decides nothing. The servers are: %s",
                    *(escape_line(word), servers, escape_line(", ".join(names))),
                )
        path = str(Path(servers).resolve())
        places = [[section.server.name, *section.server.place] for section in self.sections]
        identity = keyed_digest(b"" if journal is None else journal.key, GATEWAY, path, places)[:12]
        for section in self.sections:
            section.server.offer_through(f"gateway {path} ({identity})")
        prompt = Prompt(
            f"{GATEWAY}-{identity}", ["Tools of other servers.", *self.sections], policies=rules.policies
        )
        self._voters = voters
        super().__init__(prompt, journal=journal, **options)

    def make_calls(self, **options: Any) -> Calls:
        calls = Calls(self.tools, **options)
        if self._voters is not None:
            calls.live_call = partial(_SharedCall, voters=self._voters)
        return calls

    async def close(self) -> None:
        """Disconnect from the servers, and stop those that the gateway started."""
        await asyncio.gather(*(section.close() for section in self.sections))


class _SharedCall(LiveCall):
    """A call through a gateway.

    Approvers decide on the call. The client's user answers all other questions; if the client can't show them, they are declined.
    """

    def __init__(self, *arguments: Any, voters: Voters, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.parks = True
        self._voters = voters

    @property
    def environment(self) -> Host:
        return self

    async def ask(self, question: Question, /) -> Answer | None:
        if question.kind == "approval":
            return None  # the question is in the journal, where the approvers find it
        if not self._asks:
            raise Declined(question.name, "the client can't show questions")
        return await super().ask(question)

    def run_waiting(self, parking: Parking) -> None:
        if self.questions:
            super().run_waiting(parking)
