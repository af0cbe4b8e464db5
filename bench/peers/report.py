"""Format a benchmark's results as tables.

python bench/peers/report.py bench/results/peers.jsonl
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

Result = dict[str, Any]


class Row(NamedTuple):
    """One line of the tables. `limit` is the maximum cost of Handrail as a multiple of the floor."""

    what: str
    variant: str
    scenario: str
    figure: str
    limit: float | None = None


ROWS = (
    Row("in process: tool loop, µs per call", "inproc", "tool_loop", "us_per_call", 3),
    Row("in process: turn at 10 messages, µs", "inproc", "growth", "us_turn_10"),
    Row("in process: turn at 100 messages, µs", "inproc", "growth", "us_turn_100"),
    Row("in process: turn at 500 messages, µs", "inproc", "growth", "us_turn_500"),
    Row("in process: turn at 1000 messages, µs", "inproc", "growth", "us_turn_1000"),
    Row("HTTP: tool loop, µs per call", "http", "tool_loop", "us_per_call", 1.6),
    Row("HTTP: turn at 500 messages, µs", "http", "growth", "us_turn_500", 1.6),
    Row("HTTP: 500 runs at once, s", "http", "concurrency", "cpu_s", 1.4),
)
OURS = ("floor", "handrail")
AHEAD = 10
"""How many times less Handrail is to cost than the best other peer, in every row."""


def figure(results: Iterable[Result], row: Row, peer: str) -> float | None:
    """Return a peer's median over the rounds, or None if it has no result."""
    wanted = (peer, row.variant, row.scenario)
    taken = [
        result["figures"][row.figure]
        for result in results
        if (result["peer"], result["variant"], result["scenario"]) == wanted
        and row.figure in result.get("figures", {})
    ]
    return statistics.median(taken) if taken else None


def _number(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:,.0f}" if value >= 10 else f"{value:.2f}"


def _times(value: float | None, other: float | None) -> str:
    return f"{value / other:.2f}×" if value is not None and other else "–"


def _table(head: list[str], lines: list[list[str]]) -> str:
    ruled = [head, ["---", *["---:"] * (len(head) - 1)], *lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in ruled)


def summary(results: list[Result], peers: list[str]) -> str:
    """Return a table that compares Handrail with the floor and with the best peer, figure by figure."""
    lines: list[list[str]] = []
    for row in ROWS:
        floor, ours = (figure(results, row, name) for name in OURS)
        others = [
            (value, name) for name in peers if name not in OURS if (value := figure(results, row, name))
        ]
        best, name = min(others, default=(None, ""))
        must = _judged(f"≤ {row.limit:g}×", ours, floor and row.limit * floor) if row.limit else ""
        ahead = _judged(f"≥ {AHEAD}×", ours, best and best / AHEAD)
        shown = f"{_number(best)} ({name})" if name else "–"
        lines.append(
            [
                *(row.what, _number(floor), _number(ours), _times(ours, floor), must),
                *(shown, _times(best, ours), ahead),
            ]
        )
    head = ["CPU time", "floor", "Handrail", "Handrail / floor", "limit"]
    return _table([*head, "best peer", "best peer / Handrail", "limit"], lines)


def _judged(limit: str, ours: float | None, most: float | None) -> str:
    """Return the limit with a word that says whether it was met. Without figures, nothing is said."""
    if ours is None or most is None:
        return limit
    return f"{limit}, met" if ours <= most else f"{limit}, MISSED"


def tables(results: list[Result]) -> str:
    """Return the whole report: the summary, the figures of every peer, failures, versions and calibration times."""
    peers = list(dict.fromkeys(result["peer"] for result in results))
    every = [[row.what, *(_number(figure(results, row, peer)) for peer in peers)] for row in ROWS]
    parts = [summary(results, peers), _table(["CPU", *peers], every)]
    if any(result.get("quick") for result in results):
        parts.append("These counts are tiny. The figures only show that everything runs.")
    if failed := [result for result in results if "error" in result]:
        parts.append(
            "\n".join(
                f"- {one['peer']}, {one['variant']}, {one['scenario']}, round {one['round'] + 1}: {_last_line(one['error'])}"
                for one in failed
            )
        )
    ran = {one["peer"]: one for one in results if "versions" in one}
    versions = [
        f"{peer}: " + ", ".join(f"{name} {version}" for name, version in one["versions"].items())
        for peer, one in ran.items()
    ]
    if ran:
        pythons = ", ".join(sorted({one["python"] for one in ran.values()}))
        steady = [one["calibration_ms"] for one in results if "calibration_ms" in one]
        parts.append("\n".join([f"Python {pythons}", *versions]))
        parts.append(
            f"The same piece of Python took {min(steady):.1f} to {max(steady):.1f} ms (median "
            f"{statistics.median(steady):.1f}) in these {len(steady)} processes, so the machine's speed varied by that much."
        )
        loads = [one["load"] for one in results if "load" in one]
        if loads:
            parts.append(
                f"The machine's load was {min(loads):.1f} to {max(loads):.1f} (median {statistics.median(loads):.1f}). A load above 1 "
                "for each core slows everything, and what uses more memory the most."
            )
    return "\n\n".join(parts)


def _last_line(text: str) -> str:
    return text.splitlines()[-1][:200]


if __name__ == "__main__":
    kept = Path(sys.argv[1]).read_text().splitlines()
    print(tables([json.loads(line) for line in kept]))
