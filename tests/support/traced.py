"""Spans of a test's runs: in memory, as a tree, and from other processes, which append them to a file."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from handrail import telemetry

TESTS = Path(__file__).parents[1]


class Seen:
    """The spans that have ended, in this process or others."""

    def __init__(self, provider: TracerProvider, exporter: InMemorySpanExporter) -> None:
        self.provider = provider
        self._exporter = exporter

    @property
    def spans(self) -> tuple[Any, ...]:
        return self._exporter.get_finished_spans()

    def named(self, name: str) -> Any:
        """Return the only span of this name."""
        [span] = self.all(name)
        return span

    def all(self, name: str) -> list[Any]:
        return [span for span in self.spans if span.name == name]

    def inside(self, name: str) -> list[str]:
        """Return the names of what is directly inside the only span of this name, in the order in which it began."""
        parent = self.named(name).context.span_id
        found = [span for span in self.spans if span.parent and span.parent.span_id == parent]
        return [span.name for span in sorted(found, key=lambda each: each.start_time)]

    def clear(self) -> None:
        self._exporter.clear()

    def text(self) -> str:
        """Return everything that is exported of the spans."""
        return "\n".join(span.to_json() for span in self.spans)

    def tree(self) -> list[Any]:
        """Return the names of the spans, each with those inside it, in the order in which they began."""
        known = {span.context.span_id for span in self.spans}

        def inside(parent: int | None) -> list[Any]:
            found = [
                span
                for span in self.spans
                if (span.parent.span_id if span.parent and span.parent.span_id in known else None) == parent
            ]
            made: list[Any] = []
            for span in sorted(found, key=lambda each: each.start_time):
                inner = inside(span.context.span_id)
                made.append((span.name, inner) if inner else span.name)
            return made

        return inside(None)


@contextmanager
def traced(**options: Any) -> Generator[Seen]:
    """Observe the runs of this block, without touching the providers of the process."""
    exporter, provider = InMemorySpanExporter(), TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    with telemetry.start(
        tracer_provider=provider, meter_provider=MeterProvider(shutdown_on_exit=False), **options
    ):
        yield Seen(provider, exporter)


class Lines(SpanExporter):
    """Appends each span to the file that `TRACE_LOG` names, at once."""

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        with open(os.environ["TRACE_LOG"], "a") as file:
            file.writelines(f"{json.dumps(json.loads(span.to_json()))}\n" for span in spans)
        return SpanExportResult.SUCCESS


def observe() -> None:
    """Observe the runs of a process that a test has started."""
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(Lines()))
    telemetry.start(tracer_provider=provider, meter_provider=MeterProvider(), content=False)


def in_process(folder: Path, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    """Run `support.traced_app` with these arguments in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "support.traced_app", *arguments],
        cwd=folder,
        env={
            **os.environ,
            "TRACE_LOG": str(folder / "spans.jsonl"),
            "PYTHONPATH": os.pathsep.join([str(TESTS), *sys.path]),
        },
        check=check,
        capture_output=True,
        text=True,
        timeout=120,
    )


def lines_in(folder: Path) -> list[dict[str, Any]]:
    """Return the spans that processes have appended to the folder's file."""
    file = folder / "spans.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
