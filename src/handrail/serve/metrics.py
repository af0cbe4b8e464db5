"""`Metrics`: counters, durations and gauges of a process's work, rendered as Prometheus text. No label names a person, a thread or a run.

With the `otel` extra they are kept by OpenTelemetry's SDK, and go wherever telemetry was started to send them as well. Without it, they
are kept in memory.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Callable, Mapping
from typing import Any

from handrail.telemetry.metrics import INSTRUMENTS, Instrument, Recorder, RunMetrics

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


REQUESTS = "handrail.requests"
REFUSED = "handrail.refused"
RUNS_STARTED = "handrail.runs_begun"
RUNS_ENDED = "handrail.runs_over"
EVENTS_SENT = "handrail.events_sent"
BYTES_SENT = "handrail.sent"
FIRST_EVENT = "handrail.first_event"

SERVER: Mapping[str, Instrument] = {
    REQUESTS: Instrument("Requests answered."),
    REFUSED: Instrument("Requests refused, by reason."),
    RUNS_ENDED: Instrument("Runs that ended here, by outcome."),
    RUNS_STARTED: Instrument("Runs started here."),
    EVENTS_SENT: Instrument("Events sent to readers, counted once for each reader."),
    BYTES_SENT: Instrument("Bytes of response bodies sent.", "By"),
    FIRST_EVENT: Instrument(
        "Time from a request to the first event of its response.",
        "s",
        (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0),
    ),
}
_WITHOUT_LABELS = (RUNS_STARTED, EVENTS_SENT, BYTES_SENT)


class Metrics(ABC):
    """The values of some instruments and of those of runs, by name and labels. Each set of labels is counted separately."""

    def __init__(self, instruments: Mapping[str, Instrument]) -> None:
        self.instruments = {**instruments, **INSTRUMENTS}

    @property
    def recorder(self) -> Recorder:
        """Where the metrics of this process's runs are recorded."""
        return self

    def observe_runs(self) -> Callable[[], None]:
        """Observe the runs of this process from now on. Returns a function that stops it."""
        return RunMetrics(self.recorder).begin()

    @abstractmethod
    def add(self, name: str, amount: float = 1, /, **labels: str) -> None:
        """Increase the counter `name` by `amount`."""

    @abstractmethod
    def record(self, name: str, value: float, /, **labels: str) -> None:
        """Record a value, such as a duration in seconds, in the histogram `name`."""

    @abstractmethod
    def observe(self, name: str, description: str, read: Callable[[], float], /) -> None:
        """Show the gauge `name`, whose current value `read` returns. It may be called from any thread."""

    @abstractmethod
    def value(self, name: str, /, **labels: str) -> float:
        """Return the current value of the counter `name` for these labels."""

    @abstractmethod
    def text(self) -> str:
        """Return all metrics as Prometheus text."""

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


def new_metrics(instruments: Mapping[str, Instrument] = SERVER) -> Metrics:
    """Return `SdkMetrics` if the `otel` extra is installed and not switched off by `OTEL_SDK_DISABLED`. Otherwise, return `MemoryMetrics`."""
    if os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return MemoryMetrics(instruments)
    try:
        from handrail.serve.sdk_metrics import SdkMetrics
    except ModuleNotFoundError as missing:
        if (missing.name or "").partition(".")[0] not in ("opentelemetry", "prometheus_client"):
            raise
        return MemoryMetrics(instruments)
    return SdkMetrics(instruments)


# --- in memory ----------------------------------------------------------------------------------------

_Labels = tuple[tuple[str, str], ...]


class _Histogram:
    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.buckets = [0] * (len(bounds) + 1)
        self.sum = 0.0


class MemoryMetrics(Metrics):
    """Metrics that are kept in memory."""

    def __init__(self, instruments: Mapping[str, Instrument] = SERVER) -> None:
        super().__init__(instruments)
        self._counts: dict[str, dict[_Labels, float]] = {name: {} for name in self.instruments}
        self._histograms: dict[str, dict[_Labels, _Histogram]] = {name: {} for name in self.instruments}
        self._gauges: dict[str, tuple[str, Callable[[], float]]] = {}
        start_at_zero(self)

    def add(self, name: str, amount: float = 1, /, **labels: str) -> None:
        counts, key = self._counts[name], tuple(sorted(labels.items()))
        counts[key] = counts.get(key, 0) + amount

    def record(self, name: str, value: float, /, **labels: str) -> None:
        bounds, key = self.instruments[name].bounds, tuple(sorted(labels.items()))
        histogram = self._histograms[name].setdefault(key, _Histogram(bounds))
        histogram.buckets[bisect_left(bounds, value)] += 1
        histogram.sum += value

    def observe(self, name: str, description: str, read: Callable[[], float], /) -> None:
        self._gauges[name] = description, read

    def value(self, name: str, /, **labels: str) -> float:
        return self._counts[name].get(tuple(sorted(labels.items())), 0)

    def text(self) -> str:
        lines: list[str] = []

        def start(name: str, kind: str, description: str) -> None:
            lines.extend((f"# HELP {name} {description}", f"# TYPE {name} {kind}"))

        for name, instrument in self.instruments.items():
            shown = prometheus_name(name, instrument)
            start(shown, "histogram" if instrument.bounds else "counter", instrument.description)
            lines += [f"{shown}{_render(key)} {count}" for key, count in sorted(self._counts[name].items())]
            for key, histogram in sorted(self._histograms[name].items()):
                total = 0
                ends = (*map(str, map(float, instrument.bounds)), "+Inf")
                for end, count in zip(ends, histogram.buckets, strict=True):
                    total += count
                    lines.append(f"{shown}_bucket{_render((*key, ('le', end)))} {total}")
                lines += [
                    f"{shown}_sum{_render(key)} {histogram.sum:.9g}",
                    f"{shown}_count{_render(key)} {total}",
                ]
        for name, (description, read) in self._gauges.items():
            start(_plain(name), "gauge", description)
            lines.append(f"{_plain(name)} {read():g}")
        return "\n".join(lines) + "\n"


def start_at_zero(metrics: Metrics) -> None:
    """Show the counters without labels from the start, so that their rates are right from the first event on."""
    for name in _WITHOUT_LABELS:
        if name in metrics.instruments:
            metrics.add(name, 0)


_UNITS = {"s": "_seconds", "By": "_bytes"}


def prometheus_name(name: str, instrument: Instrument) -> str:
    """Return the name of an instrument in Prometheus text, as OpenTelemetry's exporter spells it."""
    ending = "" if instrument.bounds else "_total"
    return _plain(name) + _UNITS.get(instrument.unit, "") + ending


def _plain(name: str) -> str:
    return name.replace(".", "_")


def _render(labels: _Labels) -> str:
    if not labels:
        return ""
    return "{" + ",".join(f'{_plain(name)}="{_escape(value)}"' for name, value in labels) + "}"


def _escape(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
