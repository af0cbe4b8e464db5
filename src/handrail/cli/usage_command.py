"""`handrail usage`: what runs have used and spent, from a journal's records."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import msgspec

from handrail.cli.outcome import UsageError
from handrail.cli.runs_commands import Report, parse_time, run_report
from handrail.clock import SYSTEM_CLOCK
from handrail.journal.any_journal import AnyJournal
from handrail.journal.records import SpendState
from handrail.runs.totals import KEYS, UsageKey, UsageReport, usage
from handrail.text.rendering import counted, escape_line


def show(journal: str | None, by: Sequence[str], as_csv: bool, as_json: bool, **options: Any) -> int:
    """Print what was used, and return the exit code."""
    arguments = {"by": by or ("day", "model"), "as_csv": as_csv, **options}
    return run_report(_report, journal, arguments, as_json, False)


async def _report(
    journal: AnyJournal, by: Sequence[str], as_csv: bool, since: str, who: str | None, zone: str
) -> Report:
    if unknown := [each for each in by if each not in KEYS]:
        raise UsageError(f"--by {unknown[0]!r} is not one of {', '.join(KEYS)}.")
    keys, begins = cast("Sequence[UsageKey]", by), parse_time(since, "--since")
    assert begins is not None
    found = await usage(journal, by=keys, since=begins.timestamp(), principal=who, zone=zone)
    windows = await journal.spending.list(since=SYSTEM_CLOCK.now().timestamp())
    today = [each for each in windows if who is None or each.window.name == who]
    altered = [f"The session {escape_line(each)} was altered, and is left out." for each in found.altered]
    data = {"lines": found.data(keys), "altered": found.altered, "today": msgspec.to_builtins(today)}
    if as_csv:
        return Report(data, found.csv(keys).rstrip("\n"))
    return Report(data, _table(found, keys), *map(_today, today), *altered)


def _today(state: SpendState) -> str:
    """Say what counts towards a cap today."""
    spent = ", ".join(f"{amount} {unit}" for unit, amount in state.counted.items() if amount)
    raised = f" It was raised {counted(len(state.raises), 'time')}." if state.raises else ""
    return f"{escape_line(state.window.name)} has spent {spent or 'nothing'} of the cap on {state.window.day}.{raised}"


def _table(found: UsageReport, by: Sequence[UsageKey]) -> str:
    heads = [*(key.upper() for key in by), "REQUESTS", "IN", "OUT", "COST", "CALLS", "FAILED"]
    rows = [
        [
            *(escape_line(getattr(each, key)) or "-" for key in by),
            *(str(number) for number in (each.requests, each.input, each.output)),
            f"${each.cost:.4f}" + ("+?" if each.unpriced else ""),
            *(str(number) for number in (each.calls, each.failed)),
        ]
        for each in found.lines
    ]
    widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if at < len(by) else cell.rjust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in (heads, *rows)
    )
