"""`Metrics`: counters and durations of a server's work, without the names of principals or threads.

They are kept in memory and rendered as Prometheus text.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping
from typing import Any

REQUESTS = "handrail_requests_total"
REFUSED = "handrail_refused_total"
RUNS_STARTED = "handrail_runs_begun_total"
RUNS_ENDED = "handrail_runs_over_total"
EVENTS_SENT = "handrail_events_sent_total"
BYTES_SENT = "handrail_sent_bytes_total"
FIRST_EVENT = "handrail_first_event_seconds"

_COUNTERS = {
    REQUESTS: "Requests answered.",
    REFUSED: "Requests refused, by reason.",
    RUNS_ENDED: "Runs that ended here, by outcome.",
    RUNS_STARTED: "Runs started here.",
    EVENTS_SENT: "Events sent to readers, counted once for each reader.",
    BYTES_SENT: "Bytes of response bodies sent.",
}
_WITHOUT_LABELS = (RUNS_STARTED, EVENTS_SENT, BYTES_SENT)
_HISTOGRAMS = {FIRST_EVENT: "Time from a request to the first event of its response."}
_BOUNDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)

_Labels = tuple[tuple[str, str], ...]


class Metrics:
    """Collects metrics in memory, and renders them as Prometheus text."""

    def __init__(self) -> None:
        self._counts: dict[str, Counter[_Labels]] = {name: Counter() for name in _COUNTERS}
        for name in _WITHOUT_LABELS:
            self._counts[name][()] = 0
        self._buckets = {name: [0] * (len(_BOUNDS) + 1) for name in _HISTOGRAMS}
        self._sums = dict.fromkeys(_HISTOGRAMS, 0.0)

    def add(self, name: str, amount: int = 1, /, **labels: str) -> None:
        """Increase the counter `name` by `amount`. Each set of labels is counted separately."""
        self._counts[name][tuple(labels.items())] += amount

    def refuse(self, kind: str) -> None:
        """Count a refused request, or a connection that was closed because of a limit, by `kind`."""
        self.add(REFUSED, reason=kind)

    def end_leg(self, event: Mapping[str, Any]) -> None:
        """Count the end of a run by its outcome, given the event that ends a leg.

        Interrupts, parked runs, and runs that wait for the client's own tools are not counted.
        """
        if event["type"] == "RUN_ERROR":
            outcome = "parked" if event.get("code") == "ServerStopping" else "error"
        else:
            told: Mapping[str, Any] = event.get("outcome") or {}
            outcome = "interrupt" if told.get("pendingToolCallIds") else str(told.get("type", "success"))
        if outcome not in ("interrupt", "parked"):
            self.add(RUNS_ENDED, outcome=outcome)

    def record(self, name: str, seconds: float, /) -> None:
        """Record a duration under `name`."""
        self._buckets[name][bisect_left(_BOUNDS, seconds)] += 1
        self._sums[name] += seconds

    def value(self, name: str, /, **labels: str) -> int:
        """Return the current value of the counter `name` for these labels."""
        return self._counts[name][tuple(labels.items())]

    def text(self, gauges: Mapping[str, tuple[str, float]]) -> str:
        """Return all metrics as Prometheus text.

        `gauges` maps the name of each gauge to its description and current value.
        """
        lines: list[str] = []

        def start(name: str, kind: str, description: str) -> None:
            lines.extend((f"# HELP {name} {description}", f"# TYPE {name} {kind}"))

        for name, description in _COUNTERS.items():
            start(name, "counter", description)
            lines += [
                f"{name}{_render(labels)} {count}" for labels, count in sorted(self._counts[name].items())
            ]
        for name, (description, value) in gauges.items():
            start(name, "gauge", description)
            lines.append(f"{name} {value:g}")
        for name, description in _HISTOGRAMS.items():
            start(name, "histogram", description)
            total = 0
            for bound, count in zip((*map(str, _BOUNDS), "+Inf"), self._buckets[name], strict=True):
                total += count
                lines.append(f'{name}_bucket{{le="{bound}"}} {total}')
            lines += [f"{name}_sum {self._sums[name]:.6f}", f"{name}_count {total}"]
        return "\n".join(lines) + "\n"


def _render(labels: _Labels) -> str:
    if not labels:
        return ""
    return "{" + ",".join(f'{name}="{_escape(value)}"' for name, value in labels) + "}"


def _escape(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
