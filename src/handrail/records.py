"""The records of a journal: runs, what happened in them, their questions and decisions.

Plain data, so that another process, or a later version, can read them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

from handrail.question import Answer, Question

RunStatus = Literal["running", "parked", "done", "failed", "cancelled"]
"""A run whose process died is also `running`; its lease tells them apart."""

OVER: frozenset[RunStatus] = frozenset(("done", "failed", "cancelled"))

EntryKind = Literal[
    "model answer",
    "call begun",
    "call tried",
    "inner call",
    "verb",
    "advice",
    "undoing",
    "undone",
    "told",
    "deadline",
    "approval",
]
"""`undoing`: a call is being undone. `undone`: it has been; the key is the call's id. `told`: the model was told so.

`deadline`: the run's deadline, which was paused for people. `approval`: what a remembered decision decided at this
place, so that a resumed run decides the same.
"""


Mark = tuple[float, str]
"""The end of a page: when its last row began or was changed, and its id, since times may be equal."""


class RunRecord(msgspec.Struct, frozen=True, kw_only=True):
    """How a run began. It never changes."""

    id: str
    session_id: str
    principal: str
    prompt: str
    """The prompt's name."""
    model: str
    began_at: float
    """Seconds since 1970."""
    begin: bytes = b""
    """What the loop needs to begin the same way again; only the adapter reads it."""
    app: str = ""
    """Where to find the prompt: a worker's file, or `module:name`."""
    code: str = ""
    """A digest of the app's code, to detect changes."""
    forked_from: str = ""

    @property
    def mark(self) -> Mark:
        """Its position among other runs."""
        return self.began_at, self.id


class RunRow(msgspec.Struct, frozen=True, kw_only=True):
    """The current state of a run."""

    record: RunRecord
    status: RunStatus
    owner: str = ""
    """The process that owns it; "" for none."""
    leased_until: float = 0.0
    changed_at: float = 0.0
    outcome: bytes = b""
    """The outcome, once it is over; only the adapter reads it."""
    questions: int = 0
    """Number of its open questions."""
    stopping: bool = False
    """Whether its owner has been asked to cancel it."""


class SessionRow(msgspec.Struct, frozen=True, kw_only=True):
    """A principal's session, summarized from its runs."""

    session_id: str
    runs: int
    changed_at: float
    """When a run of it last began, was taken or was left."""
    first: RunRecord
    newest: RunRow
    questions: int = 0
    """Number of open questions of all its runs."""

    @property
    def began_at(self) -> float:
        return self.first.began_at

    @property
    def mark(self) -> Mark:
        """Its position among other sessions."""
        return self.changed_at, self.session_id


class Entry(msgspec.Struct, frozen=True):
    """One thing that happened in a run. Its key is a place in the run or a call's id, never random."""

    kind: EntryKind
    key: str
    at: float
    body: bytes


class CommitUnit(msgspec.Struct, frozen=True, kw_only=True):
    """A finished call and everything it changed, recorded atomically."""

    run_id: str
    call_id: str
    events: Sequence[bytes] = ()
    result: bytes = b""
    effects: Sequence[str] = ()
    files: Sequence[Mapping[str, Any]] = ()
    """What to do to each folder once this is recorded: the manifests of its durable forks."""
    session_id: str = ""
    place: str = ""
    """Where in the run it was called; the same when the run is resumed."""
    tool: str = ""
    arguments: str = ""
    status: str = "ok"
    at: float = 0.0
    """When it began, in seconds since 1970."""
    seconds: float = 0.0
    reads: Sequence[str] = ()
    """The slices and paths it read: `slice Plan`, `file docs/a.md`."""
    writes: Sequence[str] = ()
    diff: str = ""
    charged: bool = True
    """Whether it counts towards a budget of tool calls."""
    root: str = ""
    """The folder its paths are relative to, if it is a real one."""
    decision: str = ""
    """What policies decided: `allow`, `ask: why`, or `deny`; "" without policies."""


class QuestionRecord(msgspec.Struct, frozen=True):
    """A question, and its answer once there is one."""

    question: Question
    answer: Answer | None = None
    answered_at: float | None = None
    """When the answer was accepted, in seconds since 1970."""


class RunCopy(msgspec.Struct, frozen=True, kw_only=True):
    """Everything a journal holds of a run, to be added to a journal under another id."""

    row: RunRow
    entries: Sequence[Entry] = ()
    units: Sequence[CommitUnit] = ()
    steps: Sequence[tuple[str, bytes | None]] = ()
    """Settled values by key; None where the outcome is unknown."""
    blobs: Sequence[bytes] = ()
    """The bytes the run refers to."""


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """A remembered approval or denial of a session, or its revocation."""

    session_id: str
    principal: str
    kind: Literal["remembered", "revoked"]
    id: str
    """The id of the decision, also for its revocation."""
    at: float
    body: bytes
    """The fact, as sessions write facts."""
