"""The records of a journal: runs, what happened in them, their questions and decisions.

Plain data, so that another process, or a later version, can read them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

from handrail.question import Answer, Question

RunStatus = Literal["running", "parked", "done", "failed", "cancelled"]
"""`running` also stands for a run whose process has died: its lease tells."""

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
"""`undoing`: a call is being undone; `undone`: it was, and its key is the call's id. `told`: the model was told so.

`deadline`: where the run's deadline stands, which has been paused for people. `approval`: what was decided there
by something remembered, so that whoever goes through the run again finds it as it stood then.
"""


Mark = tuple[float, str]
"""Where a page ended: when its last row began, or was changed, and its id, since several may be as old."""


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
    """What the loop needs to begin again in the same way; only the adapter reads it."""
    app: str = ""
    """Where the prompt is found again: a worker's file, or `module:name`."""
    code: str = ""
    """A digest of the code that app was, to say when it has changed."""
    forked_from: str = ""

    @property
    def mark(self) -> Mark:
        """Where it stands among other runs."""
        return self.began_at, self.id


class RunRow(msgspec.Struct, frozen=True, kw_only=True):
    """A run as it stands."""

    record: RunRecord
    status: RunStatus
    owner: str = ""
    """The process that has it; "" for nobody."""
    leased_until: float = 0.0
    changed_at: float = 0.0
    outcome: bytes = b""
    """What came of it, once it is over; only the adapter reads it."""
    questions: int = 0
    """How many questions of it wait for an answer."""
    stopping: bool = False
    """Has somebody asked the process that has it to cancel it?"""


class SessionRow(msgspec.Struct, frozen=True, kw_only=True):
    """A session of somebody, by its runs."""

    session_id: str
    runs: int
    changed_at: float
    """When a run of it last began, was taken or was let go of."""
    first: RunRecord
    newest: RunRow
    questions: int = 0
    """How many questions of all its runs wait for an answer."""

    @property
    def began_at(self) -> float:
        return self.first.began_at

    @property
    def mark(self) -> Mark:
        """Where it stands among other sessions."""
        return self.changed_at, self.session_id


class Entry(msgspec.Struct, frozen=True):
    """One thing that happened in a run. Its key is its place in the run, never chance."""

    kind: EntryKind
    key: str
    at: float
    body: bytes


class CommitUnit(msgspec.Struct, frozen=True, kw_only=True):
    """A call of a run that is over, with everything it changed, recorded as one: all of it or none."""

    run_id: str
    call_id: str
    events: Sequence[bytes] = ()
    result: bytes = b""
    effects: Sequence[str] = ()
    files: Sequence[Mapping[str, Any]] = ()
    """What is to be done to each folder once this is recorded: the manifests of its durable forks."""
    session_id: str = ""
    place: str = ""
    """Where in the run it was called: the same whenever the run is gone through again."""
    tool: str = ""
    arguments: str = ""
    status: str = "ok"
    at: float = 0.0
    """When it began, in seconds since 1970."""
    seconds: float = 0.0
    reads: Sequence[str] = ()
    """The slices and paths it read; `slice Plan`, `file docs/a.md`."""
    writes: Sequence[str] = ()
    diff: str = ""
    charged: bool = True
    """Does it count towards a budget of tool calls?"""
    root: str = ""
    """The folder that its paths are of, where that is a real one."""
    decision: str = ""
    """What policies said of it: `allow`, `ask: why`, or `deny`; "" where there were none."""


class Asked(msgspec.Struct, frozen=True):
    """A question of a run, and its answer once there is one."""

    question: Question
    answer: Answer | None = None
    answered_at: float | None = None
    """When the answer was accepted, in seconds since 1970."""


class RunCopy(msgspec.Struct, frozen=True, kw_only=True):
    """Everything a journal holds of a run, to be brought into a journal under an id of its own."""

    row: RunRow
    entries: Sequence[Entry] = ()
    units: Sequence[CommitUnit] = ()
    steps: Sequence[tuple[str, bytes | None]] = ()
    """Settled values by key; None where the outcome is unknown."""
    blobs: Sequence[bytes] = ()
    """The bytes the run refers to."""


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """Something a session remembers of its approvals, or that it was taken back."""

    session_id: str
    principal: str
    kind: Literal["remembered", "revoked"]
    id: str
    """That of the decision, for both kinds."""
    at: float
    body: bytes
    """The fact, as sessions write facts."""
