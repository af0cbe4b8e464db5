"""`Metrics`: what a server counts, as Prometheus reads it. No principal and no thread is named in it."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

_BOUNDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)

Labels = tuple[tuple[str, str], ...]


class Histogram:
    """How often something took how long."""

    def __init__(self) -> None:
        self._counts = [0] * (len(_BOUNDS) + 1)
        self._sum = 0.0

    def add(self, seconds: float) -> None:
        self._counts[bisect_left(_BOUNDS, seconds)] += 1
        self._sum += seconds

    def lines(self, name: str) -> Iterable[str]:
        total = 0
        for bound, count in zip((*map(str, _BOUNDS), "+Inf"), self._counts, strict=True):
            total += count
            yield f'{name}_bucket{{le="{bound}"}} {total}'
        yield f"{name}_sum {self._sum:.6f}"
        yield f"{name}_count {total}"


class Metrics:
    """Counts, from the start of the process."""

    def __init__(self) -> None:
        self.requests: Counter[Labels] = Counter()
        self.refused: Counter[Labels] = Counter()
        self.runs_over: Counter[Labels] = Counter()
        self.runs_begun = 0
        self.events = 0
        """Sent to readers; one that three readers get counts three times."""
        self.bytes = 0
        self.first_event = Histogram()

    def request(self, route: str, method: str, status: int) -> None:
        self.requests[("route", route), ("method", method), ("status", str(status))] += 1

    def refuse(self, kind: str) -> None:
        self.refused[(("reason", kind),)] += 1

    def leg_ended(self, event: Mapping[str, Any]) -> None:
        """Count the run as over, unless it waits for somebody or is parked, by the event that ends its leg."""
        if event["type"] == "RUN_ERROR":
            outcome = "parked" if event.get("code") == "ServerStopping" else "error"
        else:
            outcome = str((event.get("outcome") or {}).get("type", "success"))
        if outcome not in ("interrupt", "parked"):
            self.runs_over[(("outcome", outcome),)] += 1

    def text(self, gauges: Mapping[str, tuple[str, float]]) -> str:
        """All of it, with what stands right now."""
        lines: list[str] = []

        def head(name: str, kind: str, says: str) -> None:
            lines.extend((f"# HELP {name} {says}", f"# TYPE {name} {kind}"))

        for name, says, counts in (
            ("handrail_requests_total", "Requests answered.", self.requests),
            ("handrail_refused_total", "Requests refused, by reason.", self.refused),
            ("handrail_runs_over_total", "Runs that came to an end here, by outcome.", self.runs_over),
        ):
            head(name, "counter", says)
            lines += [f"{name}{_labels(labels)} {count}" for labels, count in sorted(counts.items())]
        for name, says, count in (
            ("handrail_runs_begun_total", "Runs begun here.", self.runs_begun),
            ("handrail_events_sent_total", "Events sent to readers.", self.events),
            ("handrail_sent_bytes_total", "Bytes of answers sent.", self.bytes),
        ):
            head(name, "counter", says)
            lines.append(f"{name} {count}")
        for name, (says, value) in gauges.items():
            head(name, "gauge", says)
            lines.append(f"{name} {value:g}")
        head("handrail_first_event_seconds", "histogram", "From a request to the first event of its answer.")
        lines += self.first_event.lines("handrail_first_event_seconds")
        return "\n".join(lines) + "\n"


def _labels(labels: Labels) -> str:
    return "{" + ",".join(f'{name}="{_escaped(value)}"' for name, value in labels) + "}"


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
