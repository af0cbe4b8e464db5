"""What runs have used and spent, summed up from their records by day, person, app, model and tool."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Sequence
from datetime import datetime
from decimal import Decimal
from math import inf
from typing import Any, Literal, get_args
from zoneinfo import ZoneInfo

import msgspec

from handrail.errors import DefinitionError, JournalAltered
from handrail.journal.protocol import Journal
from handrail.journal.records import CommitUnit, Entry, RunRow
from handrail.messages import Usage
from handrail.run.answer import FailedRequest, RecordedCompaction
from handrail.run.place import Place
from handrail.run.record.begin import decode_outcome

UsageKey = Literal["day", "person", "app", "model", "tool"]
KEYS: tuple[UsageKey, ...] = get_args(UsageKey)
_PAGE = 500


class UsageLine(msgspec.Struct, kw_only=True):
    """What was used by what has these keys in common. A key that the lines are not divided by is ""."""

    day: str = ""
    person: str = ""
    app: str = ""
    """The name of the prompt that the run began with."""
    model: str = ""
    """The model; "" for calls."""
    tool: str = ""
    """The tool that was called or, for a request, in whose call it was made; "" for the requests of runs themselves."""
    requests: int = 0
    input: int = 0
    output: int = 0
    calls: int = 0
    failed: int = 0
    """How many of the calls failed."""
    cost: Decimal = Decimal(0)
    unpriced: int = 0
    """How many requests have a cost that is not known. It is not in `cost`."""


class UsageReport(msgspec.Struct, frozen=True):
    """The usage in a journal, and the sessions that could not be read because they were altered."""

    lines: Sequence[UsageLine]
    altered: Sequence[str] = ()

    def data(self, by: Sequence[UsageKey]) -> list[dict[str, Any]]:
        """Return the lines as plain data, with these keys. Costs are text."""
        columns = (*by, *_AMOUNTS)
        return [{name: each[name] for name in columns} for each in msgspec.to_builtins(self.lines)]

    def csv(self, by: Sequence[UsageKey]) -> str:
        """Return the lines as CSV, with these keys. Text that a spreadsheet would take for a formula is quoted."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        columns = [*by, *_AMOUNTS]
        writer.writerow(columns)
        for line in self.lines:
            writer.writerow([_inert(getattr(line, column)) for column in columns])
        return text.getvalue()


_AMOUNTS = tuple(name for name in UsageLine.__struct_fields__ if name not in KEYS)


def _inert(value: Any) -> Any:
    return (
        f"'{value}"
        if isinstance(value, str) and value.startswith(("=", "+", "-", "@", "\t", "\r"))
        else value
    )


class _Answer(msgspec.Struct):
    """The part of a recorded answer that says what it used."""

    model: str
    usage: Usage | None = None
    cost: Decimal | None = None
    failed: tuple[FailedRequest, ...] = ()


class _Inner(msgspec.Struct):
    """The part of a recorded inner call that says what was called."""

    status: str
    seconds: float = 0.0
    act: bool = False
    path: tuple[str, ...] = ()


_Spent = tuple[float, str, str, Usage | None, Decimal | None]
"""When a request was made, the outermost call that it was made in, its model, usage and cost."""


async def usage(
    journal: Journal,
    *,
    by: Sequence[UsageKey] = ("day",),
    since: float = 0.0,
    until: float = inf,
    principal: str | None = None,
    zone: str = "UTC",
) -> UsageReport:
    """Sum up what was used from `since` until `until`, in seconds since 1970, divided by these keys and sorted by them.

    Every record is verified. Days are those of the time zone. Raises `DefinitionError` for an unknown key.
    """
    for key in by:
        if key not in KEYS:
            raise DefinitionError(f"usage can't be divided by {key!r}. Use {', '.join(KEYS)}.")
    try:
        clock = ZoneInfo(zone)
    except (KeyError, ValueError, OSError):
        raise DefinitionError(
            f"{zone!r} is not a time zone that this machine knows. Pass one such as 'Europe/Berlin'."
        ) from None
    lines, altered = dict[tuple[str, ...], UsageLine](), list[str]()
    rows: dict[str, RunRow] = {}
    before = None
    while page := await journal.runs.list(principal=principal, limit=_PAGE, before=before):
        rows.update(
            {row.record.id: row for row in page if row.changed_at >= since and row.record.began_at < until}
        )
        before = page[-1].record.mark

    def line_of(row: RunRow, at: float, model: str, tool: str) -> UsageLine | None:
        if not since <= at < until:
            return None
        found = UsageLine(
            day=datetime.fromtimestamp(at, clock).date().isoformat(),
            person=row.record.principal,
            app=row.record.prompt,
            model=model,
            tool=tool,
        )
        keys = tuple(getattr(found, key) for key in by)
        return lines.setdefault(keys, UsageLine(**dict(zip(by, keys, strict=True))))

    for session_id in dict.fromkeys(row.record.session_id for row in rows.values()):
        try:
            recorded = await journal.calls.history(session_id)
        except JournalAltered:
            altered.append(session_id)
            continue
        tools = {(run_id, each.place): each.tool for run_id, each in recorded if isinstance(each, CommitUnit)}
        for run_id, each in recorded:
            row = rows.get(run_id)
            if row is None:
                continue
            if (call := _call(each)) is not None:
                began, tool, status = call
                if (line := line_of(row, began, "", tool)) is not None:
                    line.calls += 1
                    line.failed += status != "ok"
            elif isinstance(each, Entry):
                for spent in _requests(each):
                    _add(line_of(row, spent[0], spent[2], tools.get((run_id, spent[1]), "")), spent)
    for row in rows.values():
        if (unanswered := decode_outcome(row).unanswered) is not None:
            for each in unanswered.failed:
                spent = (unanswered.at, "", each.model, each.usage, each.cost)
                _add(line_of(row, unanswered.at, each.model, ""), spent)
    return UsageReport([lines[key] for key in sorted(lines)], altered)


def _call(recorded: CommitUnit | Entry) -> tuple[float, str, str] | None:
    """Return when a finished call began, its tool and its status; None if this records no call."""
    if isinstance(recorded, CommitUnit):
        return recorded.at, recorded.tool, recorded.status
    if recorded.kind != "inner call":
        return None
    inner = msgspec.msgpack.decode(recorded.body, type=_Inner)
    return (
        (recorded.at - inner.seconds, inner.path[-1], inner.status) if inner.path and not inner.act else None
    )


def _requests(entry: Entry) -> Iterator[_Spent]:
    """Yield the requests that an entry records."""
    if entry.kind == "model answer":
        answer = msgspec.msgpack.decode(entry.body, type=_Answer)
        requests: list[Any] = [answer, *answer.failed]
    elif entry.kind == "compaction":
        requests = [*msgspec.msgpack.decode(entry.body, type=RecordedCompaction).spent]
    else:
        return
    call = Place.parse(entry.key).outermost_call
    for each in requests:
        yield entry.at, "" if call is None else str(call), each.model, each.usage, each.cost


def _add(line: UsageLine | None, spent: _Spent) -> None:
    if line is None:
        return
    *_, used, cost = spent
    line.requests += 1
    line.unpriced += cost is None and used is not None
    if used is not None:
        line.input += used.input
        line.output += used.output
    line.cost += cost or 0
