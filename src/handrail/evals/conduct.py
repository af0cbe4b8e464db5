"""`Conduct`: what an agent did in a run, as plain data that evaluators judge and reports keep."""

from __future__ import annotations

from collections.abc import Mapping
from decimal import Decimal
from typing import Any

import msgspec
import pydantic_core

from handrail.events import (
    ApprovalDecided,
    ApprovalRequested,
    Fact,
    ModelResponded,
    ToolInvoked,
    ToolRolledBack,
)
from handrail.messages import Usage
from handrail.protocols import Filesystem
from handrail.schema import to_json
from handrail.session import Session


class Ask(msgspec.Struct, frozen=True):
    """A request for approval, and how it was decided."""

    policy: str
    """The policy that was the first to ask; "" if the tool's handler requested the approval."""
    approved: bool
    by: str
    reason: str
    """Why it was decided so, if whoever decided said why."""


class CallConduct(msgspec.Struct, frozen=True, kw_only=True):
    """A call, and what became of it."""

    tool: str
    path: tuple[str, ...]
    status: str
    """`ok`, `error`, `denied`, `invalid` and so on, as in `ToolInvoked`."""
    policy: str
    """The policy that denied the call, or that was the first to ask for its approval; "" if none did."""
    asks: tuple[Ask, ...] = ()
    undone: tuple[str, ...] = ()
    """Why each attempt at the call that was rolled back was; () if none was."""


class Conduct(msgspec.Struct, frozen=True, kw_only=True):
    """What an agent did in a run: its calls with those inside them, and what files, state and cost became."""

    calls: tuple[CallConduct, ...]
    """The calls that have ended, in the order in which they ended."""
    files: Mapping[str, str | None]
    """The changed files by path, with their new text; None if the file was deleted."""
    state: Mapping[str, list[Any]]
    """The items of each slice of the session's state as plain JSON, by the name of their type. Secrets are masked."""
    usage: Usage
    cost: Decimal | None
    """The cost of all requests in US dollars; None if part of it is unknown."""


def texts_of(files: Filesystem | None) -> dict[str, str]:
    """Return the text of every file by path. Bytes that are not UTF-8 are written as `\\xff`."""
    paths = () if files is None else files.glob("**")
    return {path: files.read_bytes(path).decode(errors="backslashreplace") for path in paths if files}


class Observer:
    """Tells what the runs of a session do from now on, and what becomes of these files."""

    def __init__(self, session: Session, files: Filesystem | None) -> None:
        self._session = session
        self._files = files
        self._before = texts_of(files)

    @property
    def conduct(self) -> Conduct:
        return _conduct(self._session, self._before, texts_of(self._files))


def _conduct(session: Session, before: Mapping[str, str], after: Mapping[str, str]) -> Conduct:
    decided = {each.question_id: each.approval for each in session[ApprovalDecided].all()}
    requests, rollbacks = session[ApprovalRequested].all(), session[ToolRolledBack].all()
    calls = [
        CallConduct(
            tool=end.tool,
            path=end.path,
            status=end.status,
            policy=end.policy,
            asks=tuple(
                Ask(each.policy, approval.approved, approval.by, approval.reason)
                for each in requests
                if _key(each) == _key(end) and (approval := decided.get(each.question_id)) is not None
            ),
            undone=tuple(each.reason for each in rollbacks if _key(each) == _key(end)),
        )
        for end in session[ToolInvoked].all()
    ]
    answers = session[ModelResponded].all()
    costs = [each.cost for each in answers if each.cost is not None]
    return Conduct(
        calls=tuple(calls),
        files={
            path: after.get(path) for path in sorted({*before, *after}) if before.get(path) != after.get(path)
        },
        state={
            kind.__name__: pydantic_core.from_json(to_json(items.all()))
            for kind, items in session.state.items()
            if not issubclass(kind, Fact)
        },
        usage=sum((each.usage for each in answers), Usage()),
        cost=sum(costs, Decimal()) if len(costs) == len(answers) else None,
    )


def _key(fact: ToolInvoked | ToolRolledBack | ApprovalRequested) -> tuple[str, str]:
    return fact.run_context.run_id, fact.call_id
