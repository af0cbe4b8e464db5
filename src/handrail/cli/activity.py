"""A run's activity: the work in progress, and the lines of text to print for each event.

This module prints nothing. The live view and the plain view both read from an `Activity`.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from decimal import Decimal
from functools import lru_cache
from pathlib import Path
from tempfile import mkdtemp
from typing import TYPE_CHECKING, Any

import pydantic_core
from rich.text import Text

from handrail.clock import Clock
from handrail.content import Attachment, shown_size
from handrail.errors import ToolValidationError
from handrail.events import (
    Advised,
    ApprovalDecided,
    AttachmentDelta,
    BackgroundEnded,
    BackgroundStarted,
    CallStatus,
    ConversationCompacted,
    Emitted,
    MessageQueued,
    ModelFailed,
    ModelRequested,
    ModelResponded,
    Progress,
    PromptExecuted,
    PromptRendered,
    TextDelta,
    ThoughtDelta,
    ToolInvoked,
    ToolResumed,
    ToolRolledBack,
    ToolStarted,
    ToolWithheld,
)
from handrail.journal.records import QueuedMessage
from handrail.messages import Compaction, Usage
from handrail.models.blocks import OUTSIDE
from handrail.run.place import RUN, Place, is_in_run
from handrail.schema import to_json
from handrail.text.rendering import counted, escape_line
from handrail.text.terminal import format_arguments

if TYPE_CHECKING:
    from handrail.run.response import PromptResponse

_MARKS: dict[CallStatus, tuple[str, str]] = {
    "ok": ("✓", "green"),
    "error": ("✗", "red"),
    "denied": ("⊘", "yellow"),
    "cancelled": ("■", "yellow"),
    "timed out": ("✗", "red"),
    "invalid": ("✗", "red"),
    "conflict": ("✗", "red"),
}
_SPINNER = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"
_BAR_WIDTH = 20
_MAX_ARGUMENTS, _MAX_REASON, _MAX_NAME, _MAX_MESSAGE, _MAX_THOUGHT = 60, 200, 80, 60, 72


@dataclass(slots=True)
class Row:
    """A call in progress, or a model that is thinking."""

    name: str
    path: tuple[str, ...]
    since: float
    message: str = ""
    done: float | None = None
    total: float | None = None
    opened: bool = False
    """Whether this call's heading has been printed above its inner calls."""
    run_id: str = ""
    """The id of the run that made this call; "" for a model that is thinking."""
    place: Place | None = None
    """The call's place in the run that made it; None for a model that is thinking."""
    inner: int = 0
    cost: Decimal | None = Decimal(0)
    """The cost of the call's nested runs so far; None if a part of it is unknown."""
    denial: Text | None = None
    """The line of an approval that was denied, until the call ends. If it ends because of that, its own line says so."""

    def contains(self, run_id: str) -> bool:
        """Return whether a run is nested in this call."""
        if self.place is None or not is_in_run(run_id, self.run_id):
            return False
        return Place.from_id(run_id, self.run_id).attempt_at(self.place) is not None


@dataclass(slots=True)
class Activity:
    """Tracks the calls in progress in a run, and formats the lines to print for its events."""

    clock: Clock
    verbose: bool = False
    rows: dict[str, Row] = field(default_factory=dict[str, Row])
    thinking: Row | None = None
    """The row for the outermost run's model, from a request until its answer begins or the request fails; otherwise None."""
    root: str = ""
    """The id of the outermost run; "" until the run has begun."""
    denied: list[str] = field(default_factory=list[str])
    """Names of the tools whose calls were not approved."""
    done: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])
    """For each call that succeeded, the id of its outermost run and its own id, in the order in which the calls ended."""
    usage: Usage = field(default_factory=Usage)
    """The usage of the outermost runs that have ended, failed ones included."""
    cost: Decimal | None = Decimal(0)
    """Their cost; None if a part of it is unknown."""
    queued: dict[str, QueuedMessage] = field(default_factory=dict[str, QueuedMessage])
    """The messages that were sent to the outermost run and that its model was not told yet, by id."""
    _settled: set[str] = field(default_factory=set[str])
    """The ids of the messages that it was told, or that were withdrawn."""
    _thought: str = ""
    """The thinking of the outermost run's model that has not been printed yet."""
    _group: str = ""
    """The id of the call whose inner calls were printed last; "" if there is none."""
    _calls: dict[str, int] = field(default_factory=dict[str, int])
    """The number of calls that each run has made directly, by run id."""

    def update(self, event: object) -> list[Text]:
        """Process one event and return the lines to print for it, if any."""
        handle = _HANDLERS.get(type(event))
        return [] if handle is None else handle(self, event)

    # --- calls ---

    def on_started(self, event: ToolStarted | ToolResumed) -> list[Text]:
        self.thinking = None
        run_id = event.run_context.run_id
        place = self._place(run_id, event.path)
        self.rows[event.call_id] = Row(
            event.tool, event.path, self.clock.monotonic(), run_id=run_id, place=place
        )
        return []

    def _place(self, run_id: str, path: tuple[str, ...]) -> Place:
        """Return the place of a new call: inside another call of the same run, or directly in the run."""
        parent = self._parent(path[:-1])
        if parent is not None and parent[1].run_id == run_id and parent[1].place is not None:
            parent[1].inner += 1
            return parent[1].place.attempt(1).child(parent[1].inner)
        self._calls[run_id] = number = self._calls.get(run_id, 0) + 1
        return RUN.child(number)

    def on_invoked(self, event: ToolInvoked) -> list[Text]:
        row = self.rows.pop(event.call_id, None)
        if event.status == "ok":
            self.done.append((event.run_context.request_id, event.call_id))
        headings = self._headings(event.path)
        if row is not None and row.denial is not None and event.status not in ("denied", "cancelled"):
            headings.append(row.denial)
        if len(event.path) == 1:
            self._group = ""
        return [*headings, call_line(event, None if row is None else row.cost)]

    def on_progress(self, event: Progress) -> list[Text]:
        row = self.rows.get(event.call_id)
        if row is not None:
            row.message, row.done, row.total = event.message, event.done, event.total
        return []

    def on_emitted(self, event: Emitted) -> list[Text]:
        """Return the line for an event that a tool emitted: the enclosing calls, the tool, the call's number, and the event."""
        row = self.rows.get(event.call_id)
        path = (event.tool,) if row is None else row.path
        text = Text(indent((*path, "")))
        text.append("· ", "cyan")
        text.append("".join(f"{escape_line(name, _MAX_NAME)} › " for name in path[:-1]), "dim")
        text.append(escape_line(event.tool, _MAX_NAME), "bold")
        if row is not None and row.place is not None:
            text.append(f" #{row.place.number}", "bold")  # tells two calls of one tool apart
        text.append(f" {escape_line(type(event.event).__name__, _MAX_NAME)}", "dim")
        shown = format_arguments(_plain_arguments(event.event), _MAX_ARGUMENTS)
        if shown:
            text.append(f" {shown}")
        return [text]

    def _headings(self, path: tuple[str, ...]) -> list[Text]:
        """Return the headings of the enclosing calls that are to be printed above a call's line, if any.

        Each heading is printed once, except that the nearest one is repeated after the inner calls of a different call.
        """
        found: list[tuple[str, Row]] = []
        for depth in range(1, len(path)):
            parent = self._parent(path[:depth])
            if parent is not None:
                found.append(parent)
        if not found:
            return []
        nearest, row = found[-1]
        if row.opened and self._group in (nearest, ""):
            self._group = nearest
            return []
        self._group = nearest
        unopened = [each for _, each in found if not each.opened] or [row]
        for each in unopened:
            each.opened = True
        return [_heading(each) for each in unopened]

    def _parent(self, path: tuple[str, ...]) -> tuple[str, Row] | None:
        for call_id, row in reversed(self.rows.items()):
            if row.path == path:
                return call_id, row
        return None

    def on_rolled_back(self, event: ToolRolledBack) -> list[Text]:
        if not event.not_undone:
            return []
        left = ", ".join(escape_line(each, _MAX_NAME) for each in event.not_undone)
        return [
            Text(f"! {escape_line(event.tool, _MAX_NAME)} failed, and this was not undone: {left}", "red")
        ]

    # --- approvals, models, advice ---

    def on_decided(self, event: ApprovalDecided) -> list[Text]:
        approval, row = event.approval, self.rows.get(event.call_id)
        tool = escape_line(event.tool, _MAX_NAME)
        reason = f": {escape_line(approval.reason, _MAX_REASON)}" if approval.reason else ""
        if approval.approved:
            mode = " by --approve all" if approval.by == "approve_all" else ""
            line = Text(f"· {tool}: approved{mode}{reason}", "dim")
        else:
            self.denied.append(event.tool)
            line = Text(f"· {tool}: not approved ({approval.outcome}){reason}", "yellow")
        line = Text(indent(() if row is None else row.path)) + line
        if row is None or approval.approved:
            return [line]
        row.denial = line
        return []

    def on_rendered(self, event: PromptRendered) -> list[Text]:
        self.root = self.root or event.run_context.run_id
        return []

    def on_requested(self, event: ModelRequested) -> list[Text]:
        if event.run_context.run_id == self.root:
            self.thinking = Row(event.model, (event.model,), self.clock.monotonic())
        return []

    def on_responded(self, event: ModelResponded) -> list[Text]:
        run_id = event.run_context.run_id
        thought: list[Text] = []
        if run_id == self.root:
            self.thinking = None
            thought = self._fold_thought()
        for row in self.rows.values():
            if row.contains(run_id):
                row.cost = plus(row.cost, event.cost)
        if not self.verbose:
            return thought
        name = escape_line(event.model, _MAX_NAME)
        return [*thought, Text(f"· {name}: {format_summary(event.usage, event.cost, event.seconds)}", "dim")]

    def on_failed(self, event: ModelFailed) -> list[Text]:
        if event.run_context.run_id == self.root:
            self.thinking = None
            self._thought = ""  # the next attempt thinks again
            if event.retry_in is None and not event.next_model:
                return []  # this failure ends the run, and is reported as the run's error
        retry = "" if event.retry_in is None else f"; trying again in {format_seconds(event.retry_in)}"
        if event.next_model:
            retry = f"; asking {escape_line(event.next_model, _MAX_NAME)} instead"
        model = escape_line(event.model, _MAX_NAME)
        return [Text(f"✗ {model}: {escape_line(event.error, _MAX_REASON)}{retry}", "yellow")]

    def on_executed(self, event: PromptExecuted) -> list[Text]:
        run_id = event.run_context.run_id
        if run_id == event.run_context.request_id:
            self.usage += event.usage
            self.cost = plus(self.cost, event.cost)
        elif event.cost is None:  # a request of the nested run was cut off, so it has no `ModelResponded`
            for row in self.rows.values():
                if row.contains(run_id):
                    row.cost = None
        return []

    def on_advised(self, event: Advised) -> list[Text]:
        if not self.verbose and not event.failed:
            return []
        verb = "raised" if event.failed else "said"
        by = escape_line(event.by, _MAX_NAME)
        return [Text(f"· {by} {verb}: {escape_line(event.text, _MAX_REASON)}", "dim")]

    def on_compacted(self, event: ConversationCompacted) -> list[Text]:
        return [Text(f"· {line}", "dim") for line in compaction_lines(event.compaction)]

    def on_text(self, event: TextDelta) -> list[Text]:
        """Process streamed text.

        For the outermost run, returns the lines of the thought before the text, if any. The view prints the text
        itself. For a nested run, shows the newest line beside the outermost call that contains the run, and returns no
        lines.
        """
        run_id = event.run_context.run_id
        if run_id == self.root:
            self.thinking = None
            return self._fold_thought()
        row = next((row for row in self.rows.values() if row.contains(run_id)), None)
        if row is not None:
            row.message = f"{row.message}{event.text}".rpartition("\n")[2][-_MAX_MESSAGE:]
        return []

    def on_attachment(self, event: AttachmentDelta) -> list[Text]:
        """Return the lines of the thought so far, and the line of a file that the outermost run's model made.

        What the model of a nested run makes is in the result of a call, whose line shows it.
        """
        if event.run_context.run_id != self.root:
            return []
        self.thinking = None
        return [*self._fold_thought(), Text(f"  {attachment_line(event.attachment)}", "cyan")]

    def on_thought(self, event: ThoughtDelta) -> list[Text]:
        """Show the newest line of the outermost run's thought beside its model. Returns no lines."""
        if event.run_context.run_id == self.root:
            self._thought += event.text
            if self.thinking is not None:
                self.thinking.message = self._thought.rstrip().rpartition("\n")[2][-_MAX_MESSAGE:]
        return []

    def _fold_thought(self) -> list[Text]:
        """Return the lines of the thought so far, if any, and clear it.

        Unless the view is verbose, returns only the first line, and those that say what the provider has run itself.
        """
        lines = [line for line in self._thought.strip().splitlines() if line.strip()]
        self._thought = ""
        if not lines:
            return []
        if self.verbose:
            return [Text(f"∴ {escape_line(line, _MAX_REASON)}", "dim italic") for line in lines]
        first, outside = lines[0], [line for line in lines[1:] if OUTSIDE in line]
        rest = len(lines) - 1 - len(outside)
        more = f" (+{counted(rest, 'line')}; -v shows {'it' if rest == 1 else 'them'})" if rest else ""
        shown = [
            f"{escape_line(first, _MAX_THOUGHT)}{more}",
            *(escape_line(line, _MAX_REASON) for line in outside),
        ]
        return [Text(f"∴ {line}", "dim italic") for line in shown]

    def on_withheld(self, event: ToolWithheld) -> list[Text]:
        tool, reason = escape_line(event.tool, _MAX_NAME), escape_line(event.reason, _MAX_REASON)
        return [Text(f"· {tool} is not offered to the model: {reason}", "dim")]

    def accept(self, message: QueuedMessage) -> None:
        """Track a message that was accepted, even if that was published already, or is not any more because the run has ended."""
        if message.id not in self._settled:
            self.queued[message.id] = message

    def on_queued(self, event: MessageQueued) -> list[Text]:
        """Track a message that was sent to the outermost run. Returns a line once it was told or withdrawn."""
        message = event.message
        if event.run_context.run_id != self.root:
            return []
        if message.state == "waiting":
            self.accept(message)
            return []
        self.queued.pop(message.id, None)
        self._settled.add(message.id)
        text = escape_line(message.text, _MAX_REASON)
        if message.state == "told":
            return [Text("» ", "bold cyan") + Text(f"told: {text}", "not bold default")]
        return [Text(f"· withdrawn: {text}", "dim")]

    def on_background(self, event: BackgroundStarted) -> list[Text]:
        what = f"{escape_line(event.agent, _MAX_NAME)}: {escape_line(event.message, _MAX_REASON)}"
        return [Text(f"⇉ begun in the background: {what}", "dim")]

    def on_background_ended(self, event: BackgroundEnded) -> list[Text]:
        how = f"{escape_line(event.end.agent, _MAX_NAME)} {event.end.end}"
        return [Text(f"⇉ {how}: {escape_line(event.end.text, _MAX_REASON)}", "dim")]

    # --- work in progress ---

    def live_lines(self, limit: int) -> list[Text]:
        """Return one line for each of up to `limit` calls in progress and, if there are more, a line that counts the others.

        If no call is in progress, returns the line of the model that is thinking, if any.
        """
        now = self.clock.monotonic()
        rows = sorted(self.rows.values(), key=lambda row: row.since)
        if not rows and self.thinking is not None:
            rows = [self.thinking]
        shown = [row_line(row, now) for row in rows[: max(limit, 1)]]
        if len(rows) > len(shown):
            shown.append(Text(f"… {len(rows) - len(shown)} more in progress", "dim"))
        return shown


_HANDLERS: dict[type, Any] = {
    ToolStarted: Activity.on_started,
    ToolResumed: Activity.on_started,
    ToolInvoked: Activity.on_invoked,
    ToolRolledBack: Activity.on_rolled_back,
    Progress: Activity.on_progress,
    Emitted: Activity.on_emitted,
    ApprovalDecided: Activity.on_decided,
    PromptRendered: Activity.on_rendered,
    ModelRequested: Activity.on_requested,
    ModelResponded: Activity.on_responded,
    ModelFailed: Activity.on_failed,
    PromptExecuted: Activity.on_executed,
    MessageQueued: Activity.on_queued,
    BackgroundStarted: Activity.on_background,
    BackgroundEnded: Activity.on_background_ended,
    Advised: Activity.on_advised,
    ConversationCompacted: Activity.on_compacted,
    ToolWithheld: Activity.on_withheld,
    TextDelta: Activity.on_text,
    AttachmentDelta: Activity.on_attachment,
    ThoughtDelta: Activity.on_thought,
}


# --- lines ---


def indent(path: tuple[str, ...]) -> str:
    """Return the indentation of a call's line: two spaces, and two more for each enclosing call."""
    return "  " * max(len(path), 1)


def call_line(event: ToolInvoked, cost: Decimal | None = None) -> Text:
    """Format a finished call: its line, a line for each attachment, and the reason if it did not succeed."""
    mark, colour = _MARKS[event.status]
    text = Text(indent(event.path))
    text.append(f"{mark} ", colour)
    text.append(escape_line(event.tool, _MAX_NAME), "bold")
    arguments = format_arguments(_plain_arguments(event.params), _MAX_ARGUMENTS)
    if arguments:
        text.append(f" {arguments}")
    notes = [format_seconds(event.seconds)]
    if cost:
        notes.append(format_money(cost))
    if event.attempts > 1:
        notes.append(f"{event.attempts} attempts")
    text.append(f"  {' · '.join(notes)}", "dim")
    for each in event.result.attachments:
        text.append(f"\n{indent(event.path)}  {attachment_line(each)}", "cyan")
    if event.status != "ok":
        reason = escape_line(" ".join(event.result.message.split()), _MAX_REASON) or event.status
        text.append(f"\n{indent(event.path)}  {reason}", colour)
    return text


def attachment_line(attachment: Attachment) -> str:
    """Format the line for an attachment: its name, type and size, and its address or the file that it is saved to, if any."""
    where = escape_line(attachment.address, _MAX_REASON) or str(_saved(attachment) or "")
    return f"{escape_line(attachment.name, _MAX_NAME)} ({attachment.media_type}, {shown_size(attachment.size)}) {where}".strip()


@lru_cache(maxsize=256)
def _saved(attachment: Attachment) -> Path | None:
    """Write an attachment to a file that only this user can read, and return its path.

    Returns None if that fails, or if the attachment's bytes are not here.
    """
    if not attachment.is_here:
        return None
    try:
        path = Path(mkdtemp(prefix="handrail-")) / attachment.filename.encode(
            "ascii", "replace"
        ).decode().replace("?", "_")
        path.write_bytes(attachment.content)
    except (OSError, ValueError):
        return None
    return path


def _plain_arguments(params: Any) -> Any:
    """Return arguments, or an event, as plain JSON data with secrets masked; None if there are none or they can't be shown."""
    if params is None:
        return None
    try:
        return pydantic_core.from_json(to_json(params))
    except (ToolValidationError, ValueError):
        return None


def _heading(row: Row) -> Text:
    """Format the line that is printed above a call's inner calls."""
    text = Text(indent(row.path))
    text.append("▸ ", "cyan")
    text.append(escape_line(row.name, _MAX_NAME), "bold")
    return text


def queued_line(message: QueuedMessage) -> Text:
    """Return the line of a message that was sent to a run and that its model was not told yet."""
    when = "" if message.when == "next step" else f", {message.when}"
    return Text(f"⋯ queued{when}: {escape_line(message.text, _MAX_REASON)}", "dim")


def row_line(row: Row, now: float) -> Text:
    """Format the line for a call in progress or a model that is thinking: spinner, name, time and progress."""
    text = Text(indent(row.path), no_wrap=True, overflow="ellipsis")
    text.append(f"{_SPINNER[int(now * 10) % len(_SPINNER)]} ", "cyan")
    text.append(escape_line(row.name, _MAX_NAME), "bold")
    text.append(f"  {format_seconds(max(now - row.since, 0))}", "dim")
    progress = format_progress(row)
    if progress:
        text.append(f"  {progress}")
    return text


def format_progress(row: Row, *, bar: bool = True) -> str:
    """Format the progress that a call reported: the amount done, as a percentage if the total is known, and its message.

    With `bar`, a bar is drawn before the percentage.
    """
    message = escape_line(row.message, 80)
    done, total = _finite(row.done), _finite(row.total)
    if done is None:
        return message
    if total is None or total <= 0:
        return f"{done:g} {message}".rstrip()
    share = min(max(done / total, 0.0), 1.0)
    full = round(share * _BAR_WIDTH)
    drawn = f"{'━' * full}{'─' * (_BAR_WIDTH - full)} " if bar else ""
    return f"{drawn}{share:.0%} {message}".rstrip()


def _finite(value: Any) -> float | None:
    """Return the value if it is a finite number, or None. A tool can report any value as progress."""
    return value if isinstance(value, int | float) and math.isfinite(value) else None


def format_seconds(spent: float) -> str:
    """Format a duration: with tenths below ten seconds, and as minutes and seconds from one minute up."""
    if spent < 9.95:
        return f"{spent:.1f} s"
    if spent < 60:
        return f"{spent:.0f} s"
    return f"{int(spent) // 60} m {int(spent) % 60:02} s"


def plus(cost: Decimal | None, other: Decimal | None) -> Decimal | None:
    """Add two costs. The sum is unknown if one of them is."""
    return None if cost is None or other is None else cost + other


def format_money(cost: Decimal | None) -> str:
    """Format a cost in US dollars. None is an unknown cost. Amounts below one cent keep two significant digits."""
    if cost is None:
        return "cost unknown"
    if not cost:
        return "no cost"
    if cost >= Decimal("0.01"):
        return f"${cost:.2f}"
    return f"${cost:.{max(2, -cost.adjusted() + 1)}f}"


def format_spending(usage: Usage, cost: Decimal | None) -> str:
    """Format requests, tokens and cost."""
    requests = f"{usage.requests} request{'' if usage.requests == 1 else 's'}"
    return f"{requests} · {usage.input:,} tokens in, {usage.output:,} out · {format_money(cost)}"


def compaction_lines(compaction: Compaction, after: Usage | None = None) -> list[str]:
    """Format what a compaction leaves out, and a line with what the requests around it have read from the provider's cache.

    These are the last request before it, the one for a summary, and `after`, the first one after it.
    """
    stubs = sum(isinstance(piece, int) and piece < 0 for piece in compaction.pieces)
    by = "" if compaction.by == "trim" else f" ({escape_line(compaction.by, _MAX_NAME)})"
    of, out = counted(compaction.upto, "message"), compaction.left_out
    line = f"conversation compacted{by}: of {of}, {out} not sent to the model and {stubs} shortened"
    requests = {"before": compaction.before, "summary": compaction.spent, "after": after}
    cached = [f"{name} {_cached(usage)}" for name, usage in requests.items() if usage is not None]
    return [line, *([f"tokens in, from the cache, into the cache: {' · '.join(cached)}"] if cached else [])]


def _cached(usage: Usage) -> str:
    return f"{usage.input:,}, {usage.cached:,}, {usage.cache_writes:,}"


def format_summary(usage: Usage, cost: Decimal | None, spent: float) -> str:
    """Format requests, tokens, cost and elapsed time."""
    return f"{format_spending(usage, cost)} · {format_seconds(spent)}"


def attachments_data(response: PromptResponse[Any]) -> list[dict[str, Any]]:
    """Return what the run's model made as JSON: its names and types, and its addresses or the files that it is saved to."""
    return [
        {
            "name": each.name,
            "media_type": each.media_type,
            "size": each.size,
            "path": each.address or str(_saved(each) or ""),
        }
        for each in response.attachments
    ]


def answer_text(response: PromptResponse[Any]) -> str:
    """Return a run's answer as text: the model's text, or a typed answer as JSON if it is not text itself."""
    output = response.output
    if output is None or isinstance(output, str):
        return response.text if output is None else output
    return json.dumps(pydantic_core.from_json(to_json(output)), indent=2, ensure_ascii=False)
