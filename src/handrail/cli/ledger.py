"""What is under way in a run, and what there is to say of it: the events of a run, made lines and rows.

No output happens here. The screen and the plain view both read from a ledger.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

from rich.text import Text

from handrail.cli import lines
from handrail.clock import Clock
from handrail.environment.text import escape_line
from handrail.events import (
    Advised,
    ApprovalDecided,
    ModelFailed,
    ModelRequested,
    ModelResponded,
    Progress,
    PromptRendered,
    TextDelta,
    ToolInvoked,
    ToolRolledBack,
    ToolStarted,
)
from handrail.place import RUN, Place, is_in_run

_FRAMES = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"
_BAR = 20
_SAID = 60
"""How much of a nested run's newest line is shown."""


@dataclass(slots=True)
class Row:
    """Something under way."""

    name: str
    path: tuple[str, ...]
    since: float
    message: str = ""
    done: float | None = None
    total: float | None = None
    opened: bool = False
    """Its own line stands above those of what happens inside it."""
    run_id: str = ""
    """The run it is a call of."""
    place: Place | None = None
    """Where it is in that run."""
    inner: int = 0
    cost: Decimal | None = None
    """What the runs inside it have cost so far."""


@dataclass(slots=True)
class Ledger:
    """The calls under way, and the lines of those that are over."""

    clock: Clock
    verbose: bool = False
    rows: dict[str, Row] = field(default_factory=dict[str, Row])
    thinking: Row | None = None
    """The model of the outermost run, while nothing of its answer has come."""
    root: str = ""
    denied: list[str] = field(default_factory=list[str])
    """The tools whose calls were not approved."""
    done: list[str] = field(default_factory=list[str])
    """The ids of the calls that succeeded, oldest first."""
    _group: str = ""
    """The call whose inner calls were printed last."""
    _calls: dict[str, int] = field(default_factory=dict[str, int])
    """How many calls each run has made itself."""

    def take(self, event: object) -> list[Text]:
        """Note one event; the lines to print for it."""
        kind = type(event)
        taken = _TAKES.get(kind)
        return [] if taken is None else taken(self, event)

    # Calls.

    def started(self, event: ToolStarted) -> list[Text]:
        self.thinking = None
        run_id = event.run_context.run_id
        row = Row(
            event.tool,
            event.path,
            self.clock.monotonic(),
            run_id=run_id,
            place=self._place(run_id, event.path),
        )
        self.rows[event.call_id] = row
        return []

    def _place(self, run_id: str, path: tuple[str, ...]) -> Place:
        """Where a call is in its run: in a call of the same run, or in the run itself."""
        parent = self._parent(path[:-1])
        if parent is not None and parent[1].run_id == run_id and parent[1].place is not None:
            parent[1].inner += 1
            return parent[1].place.attempt(1).child(parent[1].inner)
        self._calls[run_id] = number = self._calls.get(run_id, 0) + 1
        return RUN.child(number)

    def around(self, run_id: str) -> Row | None:
        """The call that a nested run happens in."""
        return next((row for row in self.rows.values() if _is_around(row, run_id)), None)

    def over(self, event: ToolInvoked) -> list[Text]:
        row = self.rows.pop(event.call_id, None)
        if event.status == "ok":
            self.done.append(event.call_id)
        above = self._headers(event.path)
        if len(event.path) == 1:
            self._group = ""
        return [*above, lines.call_over(event, None if row is None else row.cost)]

    def progress(self, event: Progress) -> list[Text]:
        row = self.rows.get(event.call_id)
        if row is not None:
            row.message, row.done, row.total = event.message, event.done, event.total
        return []

    def _headers(self, path: tuple[str, ...]) -> list[Text]:
        """The lines that say inside which calls this one happened, where they were not just said."""
        found: list[tuple[str, Row]] = []
        for deep in range(1, len(path)):
            parent = self._parent(path[:deep])
            if parent is not None:
                found.append(parent)
        if not found:
            return []
        nearest, row = found[-1]
        if row.opened and self._group in (nearest, ""):
            self._group = nearest
            return []
        self._group = nearest
        said = [each for _, each in found if not each.opened] or [row]
        for each in said:
            each.opened = True
        return [lines.call_opens(each.name, each.path) for each in said]

    def _parent(self, path: tuple[str, ...]) -> tuple[str, Row] | None:
        for call_id, row in reversed(self.rows.items()):
            if row.path == path:
                return call_id, row
        return None

    # Approvals, models, advice.

    def decided(self, event: ApprovalDecided) -> list[Text]:
        if not event.approval.approved:
            self.denied.append(event.tool)
        return [Text(lines.indent(self._path_of(event.call_id))) + lines.decided(event)]

    def _path_of(self, call_id: str) -> tuple[str, ...]:
        row = self.rows.get(call_id)
        return () if row is None else row.path

    def rolled_back(self, event: ToolRolledBack) -> list[Text]:
        said = lines.rolled_back(event)
        return [] if said is None else [said]

    def rendered(self, event: PromptRendered) -> list[Text]:
        self.root = self.root or event.run_context.run_id
        return []

    def requested(self, event: ModelRequested) -> list[Text]:
        if event.run_context.run_id == self.root:
            self.thinking = Row(event.model, (event.model,), self.clock.monotonic())
        return []

    def responded(self, event: ModelResponded) -> list[Text]:
        run_id = event.run_context.run_id
        if run_id == self.root:
            self.thinking = None
        if event.cost is not None:
            for row in self.rows.values():
                if _is_around(row, run_id):
                    row.cost = (row.cost or Decimal(0)) + event.cost
        if not self.verbose:
            return []
        name = escape_line(event.model, 60)
        return [Text(f"· {name}: {lines.summary(event.usage, event.cost, event.seconds).plain}", "dim")]

    def failed(self, event: ModelFailed) -> list[Text]:
        if event.run_context.run_id == self.root:
            self.thinking = None
        return [lines.model_failed(event)]

    def advised(self, event: Advised) -> list[Text]:
        return [lines.advised(event)] if self.verbose or event.failed else []

    def text(self, event: TextDelta) -> list[Text]:
        """The outermost run's text is shown as it comes; of a nested one, the newest line beside its call."""
        run_id = event.run_context.run_id
        if run_id == self.root:
            self.thinking = None
        elif (row := self.around(run_id)) is not None:
            row.message = f"{row.message}{event.text}".rpartition("\n")[2][-_SAID:]
        return []

    # What is under way.

    def live(self, most: int) -> list[Text]:
        """A line for each thing under way, with its time and its progress; at most so many lines."""
        now = self.clock.monotonic()
        rows = sorted(self.rows.values(), key=lambda row: row.since)
        if not rows and self.thinking is not None:
            rows = [self.thinking]
        shown = [row_line(row, now) for row in rows[: max(most, 1)]]
        if len(rows) > len(shown):
            shown.append(Text(f"… {len(rows) - len(shown)} more under way", "dim"))
        return shown


def row_line(row: Row, now: float) -> Text:
    """One thing under way."""
    text = Text(lines.indent(row.path), no_wrap=True, overflow="ellipsis")
    text.append(f"{_FRAMES[int(now * 10) % len(_FRAMES)]} ", "cyan")
    text.append(escape_line(row.name, 60), "bold")
    text.append(f"  {lines.seconds(max(now - row.since, 0))}", "dim")
    said = progress_words(row)
    if said:
        text.append("  ")
        text.append(said)
    return text


def _is_around(row: Row, run_id: str) -> bool:
    """Whether a run is nested in this call."""
    if row.place is None or not is_in_run(run_id, row.run_id):
        return False
    return Place.from_id(run_id, row.run_id).attempt_at(row.place) is not None


def _number(given: Any) -> float | None:
    """What a tool gave, where it is a number that can be drawn."""
    return given if isinstance(given, int | float) and math.isfinite(given) else None


def progress_words(row: Row) -> str:
    """How far it is: a bar where the end is known, and its own words."""
    message = escape_line(row.message, 80)
    done, total = _number(row.done), _number(row.total)
    if done is None:
        return message
    if total is None or total <= 0:
        return f"{done:g} {message}".rstrip()
    share = min(max(done / total, 0.0), 1.0)
    full = round(share * _BAR)
    bar = f"{'━' * full}{'─' * (_BAR - full)}"
    return f"{bar} {share:.0%} {message}".rstrip()


_TAKES: dict[type, Any] = {
    ToolStarted: Ledger.started,
    ToolInvoked: Ledger.over,
    ToolRolledBack: Ledger.rolled_back,
    Progress: Ledger.progress,
    ApprovalDecided: Ledger.decided,
    PromptRendered: Ledger.rendered,
    ModelRequested: Ledger.requested,
    ModelResponded: Ledger.responded,
    ModelFailed: Ledger.failed,
    Advised: Ledger.advised,
    TextDelta: Ledger.text,
}
