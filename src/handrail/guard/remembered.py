"""What a remembered decision about an approval covers, and the memory of a session's decisions.

A remembered decision is recorded under a key, and covers every request that has this key. The keys of a request and the scopes offered
for it are both computed here, so what a person is offered and what is covered afterwards can't differ. Remembered decisions can be
listed and revoked.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, cast

import msgspec

from handrail.clock import SYSTEM_CLOCK, Clock
from handrail.errors import DefinitionError, SessionError
from handrail.events import ApprovalRemembered, ApprovalRevoked
from handrail.journal.decisions import remembered_as, written
from handrail.journal.digest import keyed_digest, new_key
from handrail.journal.protocol import Journal
from handrail.question import Question
from handrail.resources.paths import split
from handrail.schema.problems import describe_kind
from handrail.session import Session
from handrail.session.serialization import decode_item, said_in
from handrail.text.rendering import UNSHOWN
from handrail.tools import Tool

Asks = Literal["call", "message", "permission"]
"""What a request is about: a call, the message of a `request_approval`, or the permission of a `request_permission`."""

DELETES = "fs.delete"
"""The capability to delete files. A scope for other capabilities does not cover a call that deletes, whatever its tool declares."""
NEVER_REMEMBERED = frozenset({"worker.create"})
"""Capabilities of tools whose approvals are never remembered. An answer applies to one call only."""
_KEY = new_key()
"""The key for digests of arguments that were not shown in full, if there is no journal. It lasts as long as the process."""
_SHORT = 200
_MANY = 5
"""Maximum number of files in an offered scope. Nobody would read a longer list."""
_PLAIN = re.compile(r"[\w.@+-]+(/[\w.@+-]+)*", re.ASCII)


class Scope(msgspec.Struct, frozen=True):
    """A set of requests that one remembered answer can cover, with its description and its key."""

    words: str
    key: str


class Coverage(msgspec.Struct, frozen=True):
    """The keys of one request. They are valid for one session and its principal only."""

    words: str
    """A description of this request, for lists of remembered decisions."""
    exact: str
    """The key for exactly these arguments and, if a diff was shown, this diff. "" if an approval of them can't be remembered."""
    any_diff: str
    """The key for the same call with normalised paths and any diff. A denial without a scope is recorded under it."""
    scopes: tuple[Scope, ...]
    wider: tuple[Scope, ...] = ()
    """For a request that deletes, the scopes that it would have if it only wrote. Their denials cover it too."""

    @property
    def approving(self) -> frozenset[str]:
        """The keys under which an approval covers the request."""
        return frozenset(filter(None, (self.exact, *(scope.key for scope in self.scopes))))

    @property
    def denying(self) -> frozenset[str]:
        """The keys under which a denial covers the request."""
        return self.approving | {self.any_diff, *(scope.key for scope in self.wider)}


def coverage_of(
    tool: Tool[Any, Any],
    asks: Asks,
    name: str,
    *,
    whose: tuple[str, str],
    arguments: Any,
    shown: Any,
    diff: str,
    paths: Sequence[str] | None,
    deletes: bool,
    spelled: Mapping[str, str],
    secret: bytes | None = None,
) -> Coverage:
    """Return the keys of a request.

    - `whose`: the session's id and principal.
    - `arguments`: the call's arguments in canonical form, and `shown`: what a person sees of them.
    - `paths`: the normalised paths that the call names or has changed; None if they are not known, or if the request is not
      about a call.
    - `deletes`: whether the call deletes files.
    - `spelled`: maps each path as it was written to its normal form.
    - `secret`: the key for digests of arguments that are not shown in full, so that nobody can guess these arguments
      from the request's keys.
    """
    secret = _KEY if secret is None else secret
    written = json.dumps([arguments, shown], sort_keys=True)
    about = ("exact", asks, name, _identity(tool))
    denied = ("exact", asks, name, _kind(tool))
    if _is_shown(arguments, shown):
        exactly = written
        however = json.dumps(_respelled(shown, spelled), sort_keys=True)
    else:
        exactly = keyed_digest(secret, written)
        however = keyed_digest(secret, json.dumps(_respelled([arguments, shown], spelled), sort_keys=True))
    # A command runs files that may have changed since, and without a diff nobody sees what it does this time.
    is_lasting = not _leaves_out(diff) and (
        asks != "call" or diff != "" or "proc.exec" not in tool.capabilities
    )

    def scopes(deletes: bool) -> tuple[Scope, ...]:
        offered = _offered(tool, asks, name, paths, deletes)
        return tuple(Scope(words, _key(whose, "scope", *what)) for words, what in offered)

    return Coverage(
        words=_in_short(f"exactly {_request(tool, asks, name)} {json.dumps(shown)}"),
        exact=_key(whose, *about, exactly, diff) if is_lasting else "",
        any_diff=_key(whose, "however", *denied, however),
        scopes=scopes(deletes),
        wider=scopes(False) if deletes else (),
    )


def _leaves_out(diff: str) -> bool:
    """Return whether a diff says that changes can't be shown, so that other changes may have the same diff."""
    # Lines of files begin with one of these characters, and no other line does.
    return any(UNSHOWN in line and line[0] not in " +-\\" for line in diff.split("\n"))


def _offered(
    tool: Tool[Any, Any], asks: Asks, name: str, paths: Sequence[str] | None, deletes: bool
) -> Iterable[tuple[str, tuple[Any, ...]]]:
    """Yield the description of each scope and the parts of its key, narrowest first.

    No scope covers everything: only a mode or a policy can allow everything, not a single answer.
    """
    if asks == "permission":
        yield _request(tool, asks, name), ("permission", name, _identity(tool))
    if asks != "call" or paths is None:
        return
    if not paths:
        if not tool.path_accesses:  # otherwise the scope would cover all paths
            yield f"{tool.name} (any arguments)", ("tool", _identity(tool))
        return
    granted: list[str] = sorted({*(tool.capabilities - {DELETES}), *([DELETES] if deletes else [])})
    words = " and ".join(granted if tool.capabilities else (tool.name, *granted))
    which = (granted, tool.effect, "" if tool.capabilities else _identity(tool))
    folder = _common([split(path)[0] for path in paths])
    files = sorted(set(paths))
    if not folder and len(files) <= _MANY:
        yield f"{words} of {', '.join(_said(path or '.') for path in files)}", ("files", files, *which)
    while folder:
        yield f"{words} under {_said(folder, '/')}", ("folder", folder, *which)
        folder = split(folder)[0]


def _request(tool: Tool[Any, Any], asks: Asks, name: str) -> str:
    if asks == "call":
        return tool.name
    return f"{_said(name)} {'for' if asks == 'permission' else 'from'} {tool.name}"


def _in_short(words: str) -> str:
    return words if len(words) <= _SHORT else f"{words[:_SHORT]}…"


def _common(folders: Sequence[str]) -> str:
    """Return the deepest folder that contains or equals each of these; "" if they have no folder in common."""
    names = [folder.split("/") for folder in folders]
    same: list[str] = []
    for each in zip(*names, strict=False):
        if len(set(each)) > 1:
            break
        same.append(each[0])
    return "/".join(same)


def _said(text: str, end: str = "") -> str:
    """Format a name from a call, followed by `end`, for a description. Both are quoted unless the name matches `_PLAIN`."""
    return f"{text}{end}" if _PLAIN.fullmatch(text) else json.dumps(f"{text}{end}")


def _identity(tool: Tool[Any, Any]) -> Any:
    """Return the values that distinguish this tool from another tool with the same name.

    The description is one of them: a tool that says something else may do something else. So approvals end when it changes.
    """
    return (*_kind(tool), tool.description)


def _kind(tool: Tool[Any, Any]) -> Any:
    """Return what a denial of this tool's calls is bound to. A tool does not escape a denial by describing itself differently."""
    return (tool.name, tool.json_schema, sorted(tool.capabilities), tool.effect)


def _is_shown(given: Any, shown: Any) -> bool:
    """Return whether everything given is also shown, with nothing masked, omitted or changed."""
    if isinstance(given, Mapping) and isinstance(shown, Mapping):
        there = cast("Mapping[str, Any]", shown)
        return all(
            name in there and _is_shown(value, there[name])
            for name, value in cast("Mapping[str, Any]", given).items()
        )
    if isinstance(given, list) and isinstance(shown, list):
        some, others = cast("list[Any]", given), cast("list[Any]", shown)
        return len(some) == len(others) and all(map(_is_shown, some, others))
    return given == shown


def _respelled(value: Any, spelled: Mapping[str, str]) -> Any:
    """Return the value with each path in `spelled` replaced by its normal form, so that `./a` does not evade a denial of `a`."""
    if isinstance(value, str):
        return spelled.get(value, value)
    if isinstance(value, Mapping):
        named = cast("Mapping[str, Any]", value)
        return {name: _respelled(each, spelled) for name, each in named.items()}
    if isinstance(value, list):
        return [_respelled(each, spelled) for each in cast("list[Any]", value)]
    return value


def _key(*parts: Any) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


class ApprovalMemory:
    """The remembered decisions of a session, which apply to its later calls.

    They are facts in the session's log: they outlive a failed call, are saved and loaded with the session,
    and are recorded in the journal of its runs, if there is one. An approval has no effect in another session, and no
    decision has any effect for another principal.
    """

    __slots__ = ("_clock", "_session")

    def __init__(self, session: Session, clock: Clock = SYSTEM_CLOCK) -> None:
        if not isinstance(session, Session):  # pyright: ignore[reportUnnecessaryIsInstance]  # a tool's view is not one
            raise DefinitionError(
                f"approvals are remembered by a Session, and this is {describe_kind(session)}. "
                "Pass the session of the run; a tool's view of it can't change them."
            )
        self._session = session
        self._clock = clock

    def list(self) -> tuple[ApprovalRemembered, ...]:
        """Return the decisions in force, in the order in which they were added to the session."""
        return remembered_in(self._session)

    def __iter__(self) -> Iterator[ApprovalRemembered]:
        return iter(self.list())

    def __len__(self) -> int:
        return len(self.list())

    def revoke(self, id: str, by: str | None = None) -> None:
        """Revoke a decision, so that later calls are decided without it. Raises `SessionError` if there is no such decision."""
        session = self._session
        with session.lock:
            found = next((each for each in self.list() if each.id == id), None)
            if found is None:
                ids = ", ".join(repr(each.id) for each in self.list()) or "none"
                raise SessionError(
                    session.id, f"it remembers no decision with the id {id!r}", f"Remembered ids: {ids}."
                )
            by = session.principal if by is None else by
            _record(session, ApprovalRevoked(id, found.tool, found.covers, by, self._clock.now()))


def approvals_of(session: Session) -> ApprovalMemory:
    """Return the approval memory of a session, which can `.list()` its decisions and `.revoke(id)` one."""
    return ApprovalMemory(session)


def remembered_in(session: Session) -> tuple[ApprovalRemembered, ...]:
    """Return the decisions in force in this session: its own, and denials from sessions that it was forked from."""
    kept = session[ApprovalRemembered].all()
    if not kept:
        return ()
    revoked = {each.id for each in session[ApprovalRevoked].all()}
    return tuple(
        each
        for each in kept
        if each.id not in revoked and not (each.approved and each.run_context.session_id != session.id)
    )


def _record(session: Session, fact: ApprovalRemembered | ApprovalRevoked) -> None:
    """Record a decision, then apply it. A decision that can't be recorded has no effect."""
    if session.decisions is not None:
        session.decisions.write(fact)
    session.record(fact)


class Recall:
    """Looks up the remembered decision that covers one request, and remembers an answer to it.

    `cover` returns the keys that the request has in the session with a given id. A denial may come from another session.
    """

    __slots__ = ("_clock", "_cover", "_question", "_session", "is_open", "used")

    def __init__(
        self, session: Session, question: Question, cover: Callable[[str], Coverage], clock: Clock
    ) -> None:
        self._session = session
        self._question = question
        self._cover = cover
        self._clock = clock
        self.is_open = False
        """Whether a person was already asked and may still be looking at the request. If so, no remembered decision applies."""
        self.used: ApprovalRemembered | None = None
        """The remembered decision that decided the request; None if there was none."""

    def find(self) -> ApprovalRemembered | None:
        """Return a decision that covers this request; None if none does or `is_open` is true. Denials take precedence over approvals."""
        found = () if self.is_open else remembered_in(self._session)
        if not found:
            return None
        for each in found:
            if not each.approved and each.key in self._cover(each.run_context.session_id).denying:
                return each
        approving = self._cover(self._session.id).approving
        return next((each for each in found if each.approved and each.key in approving), None)

    def keep(self, approved: bool, reason: str, by: str, scope: str | None = None) -> None:
        """Remember an answer for one of the offered scopes, or for this request if `scope` is None.

        Without a scope, an approval covers exactly this request, and a denial also covers the request with a different diff.
        Does nothing if the question's answers can't be remembered.
        """
        session = self._session
        fact = remembered_as(self._question, approved, reason, by, scope, self._clock.now())
        if fact is None:
            return
        if any(each.id == fact.id for each in session[ApprovalRemembered].all()):
            session.dispatcher.publish(fact)  # already recorded with its answer, so only publish it
        else:
            _record(session, fact)

    def when_covered(self, wake: Callable[[], object]) -> Callable[[], None]:
        """Call `wake` on the running event loop when a new decision covers this request. Returns a function that unsubscribes."""
        loop = asyncio.get_running_loop()

        def look(_: ApprovalRemembered) -> None:
            if self.find() is not None:
                loop.call_soon_threadsafe(wake)

        return self._session.dispatcher.subscribe(ApprovalRemembered, look)


class RecordedDecisions:
    """The decisions of one session in one journal."""

    __slots__ = ("_journal", "_session")

    def __init__(self, session: Session, journal: Journal) -> None:
        self._session = session
        self._journal = journal

    def write(self, decision: ApprovalRemembered | ApprovalRevoked, /) -> None:
        """Record a decision. Raises `RunBusy` if another process has taken over the run in which it was made."""
        session = self._session
        made_in = decision.run_context.request_id if isinstance(decision, ApprovalRemembered) else ""
        self._journal.decisions.write(written(decision, session.id, session.principal), run_id=made_in)

    async def read(self) -> None:
        """Add to the session the decisions that only the journal has."""
        session = self._session
        recorded = await self._journal.decisions.read(session.id, session.principal)
        known = _known(session)
        new = [each for each in recorded if (each.kind, each.id) not in known]
        bring_in(session, [decode_item(each.body, session.id) for each in new])

    async def add(self) -> None:
        """Record the decisions that only the session has."""
        session = self._session
        known = _known(session)
        if known:
            recorded = await self._journal.decisions.read(session.id, session.principal)
            for which in known.keys() - {(each.kind, each.id) for each in recorded}:
                self._journal.decisions.write(written(known[which], session.id, session.principal))


async def keep_decisions(session: Session, journal: Journal, *, is_restored: bool = False) -> None:
    """Load a session's recorded decisions from a journal, and record its other decisions there, present and future.

    A session that `is_restored` from the record of its runs has only the approvals that the journal has as decisions. The record of a
    run may have been imported, and a file approves nothing.
    """
    book = RecordedDecisions(session, journal)
    if is_restored:
        with session.lock:
            kept = session[ApprovalRemembered].all()
            session.load_slice(ApprovalRemembered, [each for each in kept if not each.approved])
    await book.read()
    await book.add()
    session.decisions = book


def decisions_in(saved: bytes) -> list[ApprovalRemembered | ApprovalRevoked]:
    """Return the decisions in a saved session, including revocations."""
    return [*said_in(saved, ApprovalRemembered), *said_in(saved, ApprovalRevoked)]


def bring_in(session: Session, facts: Iterable[ApprovalRemembered | ApprovalRevoked]) -> None:
    """Add earlier decisions to a session without duplicates. They are not published again."""
    with session.lock:
        known = _known(session)
        for fact in facts:
            if _which(fact) not in known:
                session.keep(fact)


def _known(session: Session) -> dict[tuple[str, str], ApprovalRemembered | ApprovalRevoked]:
    facts = (*session[ApprovalRemembered].all(), *session[ApprovalRevoked].all())
    return {_which(fact): fact for fact in facts}


def _which(fact: ApprovalRemembered | ApprovalRevoked) -> tuple[str, str]:
    return "remembered" if isinstance(fact, ApprovalRemembered) else "revoked", fact.id
