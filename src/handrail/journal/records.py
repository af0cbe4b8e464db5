"""The records of a journal: runs, what happened in them, and their questions and decisions.

They are plain data, so that another process or a later version can read them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime, time, timedelta
from decimal import Context, Decimal
from typing import Any, Literal

import msgspec

from handrail.errors import JournalAltered
from handrail.question import Answer, Question

RunStatus = Literal["queued", "running", "parked", "done", "failed", "cancelled"]
"""The status of a run.

A `queued` run was submitted and has not begun. A run whose process died keeps its status; its lease shows that it has no
live owner.
"""

CANCEL, MESSAGES = 1, 2
"""The signals to a run, as bits: somebody has asked to cancel it, and messages wait for it."""

When = Literal["now", "next step", "afterwards"]
"""When a message that is sent to a run is told to its model.

`now`: before the next request, and the model's current answer is stopped. `next step`: before the next request. `afterwards`: when
the model would be done.
"""


Amounts = dict[str, int | Decimal]
"""Exact amounts of a budget, by unit."""

Order = Literal["pause", "wrap up", "stop"]
"""What a run is ordered to do before its next step: pause, take one last turn without calls, or end."""


class QueuedMessage(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A message that was sent to a run, an order, or the end of a background run that the run has begun."""

    id: str
    text: str
    """What its model is told; "" for an order without words."""
    order: Order | None = None
    """What the run is ordered to do when it comes to this message; None if its model is only told the text."""
    when: When = "next step"
    by: str = ""
    """The principal who sent it."""
    at: float = 0.0
    """When it was accepted or last edited, in seconds since 1970."""
    state: Literal["waiting", "told", "withdrawn"] = "waiting"
    edited: bool = False
    child: str = ""
    """The id of the background run that has ended; "" for anything that somebody said. The text is then its answer or its error."""
    agent: str = ""
    """The name of the background run's prompt."""
    end: RunStatus | Literal[""] = ""
    """How the background run ended."""
    left: Amounts = {}
    """What the background run has not spent of its share of the budget."""


OVER: frozenset[RunStatus] = frozenset(("done", "failed", "cancelled"))

EntryKind = Literal[
    "model answer",
    "call begun",
    "call tried",
    "inner call",
    "verb",
    "advice",
    "correction",
    "remark",
    "compaction",
    "undoing",
    "undone",
    "told",
    "deadline",
    "approval",
    "attachments",
    "emitted",
    "remote work",
    "parked",
    "script",
]
"""The kinds of entries in a run's record.

`model answer`: the model has answered. `call begun`: an attempt begins, usually at a call that must not run
twice. `call tried`: another attempt at a call begins. `inner call`: a call inside another one has ended. `verb`: a handler has used a verb
of its context. `advice`: what the run's feedback providers or completion checkers said.
`correction`: why an answer was not accepted, as the model was told. `remark`: what people said along with their answers, as the model
was told before the answer at this place. `compaction`: what of the conversation is sent from the answer at this place on.
`undoing`: a call is being undone. `undone`: a call has been undone; the key is its id. `told`: the model has been
informed of undone calls. `deadline`: the state of a deadline that pauses for people. `approval`: what a remembered decision
decided at the entry's place, so that a resumed run decides the same. `attachments`: the files that a call gave to a worker.
`emitted`: the events of a call that the web page showed; the key is the call's id.
`remote work`: the id of the work that a call has started elsewhere.
`parked`: the run was parked; what was published about its unfinished calls. The key is the number of the leg.
`script`: a script is under way; in which order it was given the outcomes of its calls, and where it was suspended.
"""


class Parent(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The run that began a background run, and what the two have to do with each other."""

    run_id: str
    call_id: str
    """The call that began the background run."""
    share: Amounts = {}
    """The share of the parent's budget that the background run has."""
    policies: tuple[str, ...] = ()
    """References to the prompts whose policies decide about the background run too."""
    spend: tuple[SpendCap, ...] = ()
    """The caps of the parent on what is spent in a day, which apply to the background run too."""
    wake: bytes = b""
    """The encoded `SpawnedRun`, the run that is submitted at the end if the parent is over; b"" if none is."""


class RunEnd(msgspec.Struct, frozen=True, kw_only=True):
    """The part of a run's outcome that the parent of a background run is told."""

    text: str = ""
    error: str = ""
    spent: Amounts = {}
    """What the run has spent of its budget. A unit that is left out counts as spent."""


Mark = tuple[float, str]
"""The end of a page: when its last row began or changed, and that row's id, because times may be equal."""


class RunRecord(msgspec.Struct, frozen=True, kw_only=True):
    """How a run began. The record does not change, but a submitted run gets a new one when it begins."""

    id: str
    session_id: str
    principal: str
    prompt: str
    """The prompt's name."""
    model: str
    began_at: float
    """When the run began, in seconds since 1970. For a run that has not begun, when it was submitted or, in a series, is due."""
    begin: bytes = b""
    """The data that is needed to begin the run in the same way again, as the adapter encodes it; b"" for a run that has not begun."""
    app: str = ""
    """Reference to the prompt: a worker's file, or `module:name`; "" if it is not known."""
    code: str = ""
    """A digest of the app's code, to detect changes; "" if it is not known."""
    forked_from: str = ""
    request: bytes = b""
    """The encoded request of a submitted run; b"" for other runs."""
    parent: Parent | None = None
    """The run that began this one in the background; None if nobody did."""

    @property
    def mark(self) -> Mark:
        """The run's position in a list of runs, from which the next page continues."""
        return self.began_at, self.id

    @property
    def has_begun(self) -> bool:
        """Whether the run has begun. A submitted run that was cancelled while it was queued never did."""
        return bool(self.begin or not self.request)

    @property
    def queue(self) -> str:
        """The queue for runs of this app and this version of its code."""
        return queue_of(self.app, self.code)


def queue_of(app: str, code: str) -> str:
    """Return the name of the queue for runs of an app whose code has this digest."""
    return f"{app}@{code}"


class RunRow(msgspec.Struct, frozen=True, kw_only=True):
    """The current state of a run."""

    record: RunRecord
    status: RunStatus
    owner: str = ""
    """The process that owns the run; "" for none."""
    leased_until: float = 0.0
    """When the lease in the run's own row ends, in seconds since 1970; 0 if there is none, or if the process has one for all its runs."""
    held: bool = False
    """Whether the owner was alive and held its lease when the row was read."""
    changed_at: float = 0.0
    outcome: bytes = b""
    """The run's outcome as the adapter encodes it; b"" until the run is over."""
    questions: int = 0
    """The number of the run's open questions."""
    stopping: bool = False
    """Whether somebody has asked for the run to be cancelled."""
    has_messages: bool = False
    """Whether the run's model has not been told every message that was sent to it."""
    deaths: int = 0
    """How many consecutive processes ended while they executed the run. If one made progress first, the count restarts at 1."""
    queue: str = ""
    """The queue from which workers take the run; "" for a run that was not submitted."""
    host: str = ""
    """The only host whose workers may take the run; "" for any host."""
    due_at: float | None = None
    """When a worker may take the run, in seconds since 1970; None if the run does not wait for a time."""
    legs: int = 0
    """How many legs have begun. A leg is the work of one process on the run. Some failed claims of the run by its id count too."""
    before: RunStatus | None = None
    """In the row that `take` returns: the run's status before its current leg, also if a claim has begun that. Otherwise None."""


class WorkerRow(msgspec.Struct, frozen=True, kw_only=True):
    """A worker process that is alive: the queues it takes runs from, and where it runs."""

    owner: str
    host: str
    queues: Sequence[str]
    leased_until: float = 0.0
    runs: int = 0
    """How many runs the worker is executing."""
    limit: int = 0
    """The maximum number of runs that the worker executes at once."""


class SessionRow(msgspec.Struct, frozen=True, kw_only=True):
    """A principal's session, summarized from that principal's runs in it."""

    session_id: str
    runs: int
    changed_at: float
    """When one of these runs was last submitted, begun, forked, taken by a process, moved to another queue or released."""
    first: RunRecord
    newest: RunRow
    questions: int = 0
    """The number of open questions in these runs."""

    @property
    def began_at(self) -> float:
        return self.first.began_at

    @property
    def mark(self) -> Mark:
        """The session's position in a list of sessions, from which the next page continues."""
        return self.changed_at, self.session_id


class SessionTurn(msgspec.Struct, frozen=True):
    """A turn of a recorded session: the time in which one run works on it."""

    id: str
    links: int | None = None
    """How many records the run that has the turn had when the turn was read; None if the turn was over, or is the caller's own."""
    has_messages: bool = False
    """Whether messages wait for the run that has just begun this turn."""


TakenTurn = Literal["new", "same", "none"]
"""Whether a run that is taken gets the next turn of its session, the last one again, or none."""


class Entry(msgspec.Struct, frozen=True):
    """Something that happened in a run. The key is a place in the run or a call's id, by which a resumed run finds the entry."""

    kind: EntryKind
    key: str
    at: float
    body: bytes


class CallKey(msgspec.Struct, frozen=True):
    """Identifies a call among those of all conversations. A call's id is not enough, because models may repeat ids."""

    call_id: str
    run_id: str = ""
    place: str = ""
    """The call's place in its run; "" in a search means any."""
    journal: str = ""
    """The id of the journal that records the call; "" for none."""


class WorkspaceFile(msgspec.Struct, frozen=True):
    """The recorded state of one path of a workspace."""

    kind: Literal["file", "folder", "link"]
    mode: int
    """The permission bits; 0 for a link."""
    digest: str = ""
    """SHA-256 of a file's bytes, or of the path that a link leads to; "" for a folder."""
    size: int = 0


class WorkspaceChange(msgspec.Struct, frozen=True):
    """The state of one path of a workspace before and after a call. None means that nothing is there."""

    path: str
    old: WorkspaceFile | None
    new: WorkspaceFile | None


class WorkspaceDelta(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that one call changed in a workspace."""

    name: str
    id: str
    base: int
    """The version of the workspace that the call worked on. The commit makes the next version."""
    changes: Sequence[WorkspaceChange] = ()


WORKSPACE = "workspace:"
"""The prefix of every workspace's address."""


def workspace_name(address: str) -> str:
    """Return the name in a workspace's address, `workspace:NAME`; "" for the path of a folder."""
    return address.removeprefix(WORKSPACE) if address.startswith(WORKSPACE) else ""


class WorkspaceRow(msgspec.Struct, frozen=True, kw_only=True):
    """The current state of a workspace, without its files."""

    name: str
    id: str
    version: int = 0
    """The number of commits and undos so far."""
    run_id: str = ""
    """The run that acquired the workspace last; "" if it has released the workspace and no worker will continue the run."""
    owner: str = ""
    """The process that acquired the workspace for that run; "" once it has released the workspace."""
    seal: str = ""
    """The sum of the MACs of the workspace's file rows. It shows whether rows were added or removed."""


class WorkspaceLine(msgspec.Struct, frozen=True):
    """A workspace in a list of all workspaces."""

    name: str
    version: int = 0
    """The number of commits and undos so far."""
    files: int = 0
    """The number of files and links."""
    size: int = 0
    """The number of bytes in all files together."""
    run_id: str = ""
    """The run that has the workspace; "" if a new run could take it."""
    altered: str = ""
    """What was altered by something other than Handrail; "" if nothing was. If something was, only the name is known."""


class SpawnedRun(msgspec.Struct, frozen=True, omit_defaults=True):
    """A background run that a call begins. It is submitted together with the call's commit."""

    run: RunRecord
    host: str = ""
    """The only host whose workers take the run; "" for any host."""


class CommitUnit(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A finished call and everything it changed, recorded atomically."""

    run_id: str
    call_id: str
    events: Sequence[bytes] = ()
    result: bytes = b""
    effects: Sequence[str] = ()
    """The external effects of the call and of its inner calls, which an undo does not reverse."""
    files: Sequence[Mapping[str, Any]] = ()
    """The manifests of the call's durable forks, which say what to change in each folder once the call is recorded."""
    workspaces: tuple[WorkspaceDelta, ...] = ()
    """What the call changed in workspaces. Recording the call applies these changes."""
    session_id: str = ""
    place: str = ""
    """The place of the call in its run. It is the same when the run is resumed."""
    tool: str = ""
    arguments: str = ""
    status: str = "ok"
    at: float = 0.0
    """When the call began, in seconds since 1970. If the run was resumed during the call, when the call began again."""
    seconds: float = 0.0
    reads: Sequence[str] = ()
    """What the call read, such as `slice Plan` or `file docs/a.md`.

    `server files` means that its result came from outside, from the MCP server `files`.
    """
    writes: Sequence[str] = ()
    diff: str = ""
    charged: bool = True
    """Whether the call counts towards a budget of tool calls."""
    root: str = ""
    """The folder that the call's paths are relative to, or `workspace:NAME`; "" if the files are not on disk."""
    root_id: str = ""
    """The id that this folder keeps when it is moved; "" if there is no folder, or if nothing had been written to it yet."""
    decision: str = ""
    """The policies' decision: `allow`, `ask: why`, or `deny`; "" without policies."""
    logged: Sequence[bytes] = ()
    """What the call added to the session's logs, in order. It stays if the call failed or is undone."""
    path: tuple[str, ...] = ()
    """The names of the calls around an inner call, outermost first, followed by its own name; () for a call of the run itself."""
    spawned: tuple[SpawnedRun, ...] = ()
    """The background runs that the call has begun. They are submitted when the call is recorded, or if it changes files, applied."""

    @property
    def has_changed(self) -> bool:
        """Whether the call had a lasting effect: on the session, on files or elsewhere, or by beginning a background run."""
        return bool(self.effects or self.writes or self.spawned)

    def is_in(self, root: str, root_id: str) -> bool:
        """Return whether the call worked in this folder.

        Folders are compared by their ids if both are known, and by their paths otherwise.
        """
        if self.root_id and root_id:
            return self.root_id == root_id
        return self.root == root


class QuestionRecord(msgspec.Struct, frozen=True):
    """A question, and its answer once there is one."""

    question: Question
    answer: Answer | None = None
    answered_at: float | None = None
    """When the answer was accepted, in seconds since 1970; None until then."""


class RunCopy(msgspec.Struct, frozen=True, kw_only=True):
    """A run's row, entries, units, steps and blobs, to be added to a journal as a new run."""

    row: RunRow
    entries: Sequence[Entry] = ()
    units: Sequence[CommitUnit] = ()
    steps: Sequence[tuple[str, bytes | None]] = ()
    """The key and the settled value of each step. The value is None if the outcome is unknown."""
    blobs: Sequence[bytes] = ()
    """The blobs that the run refers to."""
    forked_from: str = ""
    """The run and step in the same journal from which the run was forked, as `run#2`; "" for an import."""


class Verification(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of checking a journal for alterations."""

    records: int
    """How many records were read and found intact. A record that was read twice counts twice."""
    altered: Sequence[JournalAltered]
    """The first alteration of each run, session, other chain and workspace, every altered blob, and damage to the file.

    If one run was checked, this has only the first alteration of its session.
    """
    imported: Sequence[str]
    """The runs that were imported. Alterations before the import can't be detected."""


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """A remembered approval or denial in a session, or its revocation."""

    session_id: str
    principal: str
    kind: Literal["remembered", "revoked"]
    id: str
    """The id of the decision. Its revocation has the same id."""
    at: float
    body: bytes
    """The encoded `ApprovalRemembered` or `ApprovalRevoked`."""


class Holdings(msgspec.Struct, frozen=True, kw_only=True):
    """What a journal holds of a person."""

    principal: str
    digest: str = ""
    """The keyed digest of their name, under which it stays recorded that they were erased."""
    runs: Sequence[str] = ()
    """The ids of their runs, and of what was recorded for them without a run."""
    sessions: Sequence[str] = ()
    unfinished: Sequence[tuple[str, RunStatus]] = ()
    """Those of their runs that are not over or that a process has, with their status."""
    unapplied: Sequence[tuple[str, str]] = ()
    """The run and the id of each of their calls whose file changes are recorded but not applied."""
    workspaces: Sequence[str] = ()
    """The workspaces that nobody else has written to or has a run in."""
    shared: Sequence[str] = ()
    """The other workspaces that they have written to or have runs in."""
    votes: Sequence[tuple[str, str]] = ()
    """The votes, answers and decisions that they gave in runs of others: what it is, and the run or session that it is in."""
    erased_at: float | None = None
    """When data of this person was last erased from this journal, in seconds since 1970; None if it never was."""


# --- spending -----------------------------------------------------------------------------------------


_EXACTLY = Context(prec=1000)
"""A decimal context that is precise enough to keep sums exact, whatever context the caller has set."""


def sum_of(*several: Mapping[str, int | Decimal]) -> Amounts:
    """Return the exact sum of these amounts, by unit."""
    total: Amounts = {}
    for amounts in several:
        for unit, amount in amounts.items():
            before = total.get(unit, 0)
            whole = type(before) is int and type(amount) is int
            total[unit] = before + amount if whole else _EXACTLY.add(before, amount)
    return total


def negative(amounts: Mapping[str, int | Decimal]) -> Amounts:
    """Return the amounts to add in order to take these away."""
    return {unit: -amount for unit, amount in amounts.items()}


class SpendWindow(msgspec.Struct, frozen=True, kw_only=True):
    """A period in which spending counts towards a cap, and whose spending: one day of a principal or of an app."""

    by: Literal["principal", "app"]
    name: str
    day: str
    """The date, as in 2026-01-31."""
    zone: str
    ends_at: float
    """When the day ends in this zone, in seconds since 1970."""

    @property
    def id(self) -> str:
        """The text that identifies the window in a journal."""
        return msgspec.json.encode([self.by, self.name, self.day, self.zone]).decode()


class SpendCap(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What may be spent in a window, as a run has it and records it. `Spend` describes the members."""

    limits: Amounts
    by: Literal["principal", "app"] = "principal"
    zone: str = "UTC"
    raised_by: str = "admin"
    warn_at: float = 0.8
    app: str = ""

    @property
    def scope(self) -> tuple[str, ...]:
        """Whose spending the cap limits. A newer cap with the same scope replaces an older one."""
        return (self.by, self.app, self.zone)

    def window(self, principal: str, now: float) -> SpendWindow:
        """Return the window in which something that this principal spends `now` counts."""
        from zoneinfo import ZoneInfo  # only caps need it

        zone = ZoneInfo(self.zone)
        day = datetime.fromtimestamp(now, zone).date()
        midnight = datetime.combine(day + timedelta(days=1), time(), zone)
        name = self.app if self.by == "app" else principal
        return SpendWindow(
            by=self.by, name=name, day=day.isoformat(), zone=self.zone, ends_at=midnight.timestamp()
        )


class SpendRaise(msgspec.Struct, frozen=True, kw_only=True):
    """A raise of a cap for one window."""

    id: str
    """The id of the question that was answered. A raise with the same id counts once."""
    by: str
    amounts: Amounts
    at: float = 0.0


class SpendState(msgspec.Struct, frozen=True, kw_only=True):
    """What has been spent and reserved in a window."""

    window: SpendWindow
    counted: Amounts = {}
    """What was spent, and what is reserved: a request whose process was killed counts as much as it could have cost."""
    in_flight: Amounts = {}
    """The part of `counted` that live processes have reserved, and that may still turn out to be less."""
    raises: tuple[SpendRaise, ...] = ()
    warned: bool = False
    """Whether somebody was warned that the cap is near, since it was last raised."""

    def limits(self, cap: Mapping[str, int | Decimal]) -> Amounts:
        """Return a cap with what it was raised by."""
        raised = sum_of(*(each.amounts for each in self.raises))
        return {unit: sum_of({unit: limit}, raised).get(unit, limit) for unit, limit in cap.items()}

    def missing(self, wanted: Amounts, cap: Mapping[str, int | Decimal]) -> Amounts:
        """Return by how much the cap would have to be higher for `wanted` to be spent too; empty if it is high enough."""
        over = sum_of(self.counted, wanted, negative(self.limits(cap)))
        return {unit: over[unit] for unit in cap if unit in wanted and over[unit] > 0}
