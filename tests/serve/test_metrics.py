"""Both kinds of `Metrics`, in memory and of OpenTelemetry's SDK, pass the same tests, and give the same text."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from handrail.serve.metrics import (
    FIRST_EVENT,
    REFUSED,
    REQUESTS,
    RUNS_STARTED,
    SERVER,
    MemoryMetrics,
    Metrics,
    new_metrics,
)
from handrail.serve.sdk_metrics import SdkMetrics

BOTH: list[Callable[[], Metrics]] = [lambda: MemoryMetrics(SERVER), lambda: SdkMetrics(SERVER)]
both = pytest.mark.parametrize("make", BOTH, ids=["memory", "sdk"])
NAMES = {
    "handrail_requests": "counter",
    "handrail_refused": "counter",
    "handrail_runs_over": "counter",
    "handrail_runs_begun": "counter",
    "handrail_events_sent": "counter",
    "handrail_sent_bytes": "counter",
    "handrail_first_event_seconds": "histogram",
    "handrail_viewers": "gauge",
}

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def parsed(text: str) -> tuple[dict[str, tuple[str, str]], Samples]:
    """Return the type and the description of each family that has samples, and the samples."""
    families = [each for each in text_string_to_metric_families(text) if each.samples]
    samples = {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in families
        for sample in family.samples
    }
    return {each.name: (each.type, each.documentation) for each in families}, samples


def fill(metrics: Metrics) -> None:
    metrics.add(REQUESTS, route="/threads/{id}", method="GET", status="200")
    metrics.add(REQUESTS, 2, route="/threads/{id}", method="GET", status="404")
    metrics.add(RUNS_STARTED)
    metrics.refuse('Odd "reason" \\ with\na line')
    metrics.end_leg({"type": "RUN_FINISHED"})
    for seconds in (0.003, 0.005, 0.2, 1000):
        metrics.record(FIRST_EVENT, seconds)
    metrics.observe("handrail.viewers", "Open streams.", lambda: 3)


@both
def test_every_name_has_its_type_and_its_values(make: Callable[[], Metrics]):
    metrics = make()
    fill(metrics)
    families, samples = parsed(metrics.text())
    assert {name: kind for name, (kind, _) in families.items()} == NAMES
    labels = {"route": "/threads/{id}", "method": "GET", "status": "404"}
    assert samples["handrail_requests_total", frozenset(labels.items())] == 2
    assert metrics.value(REQUESTS, **labels) == 2
    assert metrics.value(REFUSED, reason='Odd "reason" \\ with\na line') == 1
    assert samples["handrail_first_event_seconds_bucket", frozenset({("le", "0.005")})] == 2
    assert samples["handrail_first_event_seconds_bucket", frozenset({("le", "+Inf")})] == 4
    assert samples["handrail_events_sent_total", frozenset()] == 0  # from the start


def test_both_give_the_same_text():
    memory, sdk = (make() for make in BOTH)
    fill(memory)
    fill(sdk)
    assert parsed(memory.text()) == parsed(sdk.text())


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 2**40), st.floats(0, 1e6)), max_size=20))
def test_both_count_alike(events: list[tuple[str, int, float]]):
    """Whatever is counted and recorded, both have the same buckets, counts and sums."""
    texts: list[Samples] = []
    for make in BOTH:
        metrics = make()
        for reason, amount, seconds in events:
            metrics.add(REFUSED, amount, reason=reason)
            metrics.record(FIRST_EVENT, seconds)
        texts.append(parsed(metrics.text())[1])
    memory, sdk = texts
    if not events:
        memory = {key: value for key, value in memory.items() if not key[0].startswith("handrail_first")}
    assert memory == pytest.approx(sdk, rel=1e-6)


def test_the_sdk_keeps_metrics_unless_it_is_switched_off(monkeypatch: pytest.MonkeyPatch):
    assert isinstance(new_metrics(), SdkMetrics)
    monkeypatch.setenv("OTEL_SDK_DISABLED", "True")
    assert isinstance(new_metrics(), MemoryMetrics)


@pytest.mark.once
@pytest.mark.parametrize("package", ["opentelemetry", "prometheus_client"])
def test_without_the_extra_metrics_are_kept_in_memory(package: str):
    code = (
        f"import sys; sys.modules[{package!r}] = None\n"
        "from handrail.serve.metrics import new_metrics; print(type(new_metrics()).__name__)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "MemoryMetrics\n"
