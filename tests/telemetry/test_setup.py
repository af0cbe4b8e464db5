"""Setting telemetry up: which providers it uses, what malformed variables get."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
from opentelemetry.metrics import NoOpMeterProvider
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult

from handrail import telemetry
from handrail.errors import DefinitionError
from handrail.telemetry.setup import captures_content, check_variables
from support import PATIENCE

WRONG = {
    "OTEL_EXPORTER_OTLP_ENDPOINT": "localhost:4318",
    "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "here",
    "OTEL_EXPORTER_OTLP_PROTOCOL": "http/json",
    "OTEL_EXPORTER_OTLP_TIMEOUT": "10s",
    "OTEL_EXPORTER_OTLP_COMPRESSION": "zip",
    "OTEL_EXPORTER_OTLP_HEADERS": "authorization Bearer abc",
    "OTEL_BSP_MAX_QUEUE_SIZE": "many",
    "OTEL_BSP_SCHEDULE_DELAY": "0",
    "OTEL_METRIC_EXPORT_INTERVAL": "1m",
    "OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT": "-1",
    "OTEL_RESOURCE_ATTRIBUTES": "service.name",
    "OTEL_TRACES_SAMPLER": "sometimes",
    "OTEL_TRACES_SAMPLER_ARG": "1.5",
    "OTEL_SDK_DISABLED": "maybe",
    "OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT": "yes",
}
RIGHT = {
    "OTEL_EXPORTER_OTLP_ENDPOINT": "https://collector.example:4318/base",
    "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf",
    "OTEL_EXPORTER_OTLP_TIMEOUT": "2.5",
    "OTEL_EXPORTER_OTLP_HEADERS": "authorization=Bearer%20abc, x-team=a",
    "OTEL_BSP_MAX_QUEUE_SIZE": "10",
    "OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT": "",
    "OTEL_RESOURCE_ATTRIBUTES": "service.name=demo,team=a",
    "OTEL_TRACES_SAMPLER": "parentbased_traceidratio",
    "OTEL_TRACES_SAMPLER_ARG": "0.25",
    "OTEL_SDK_DISABLED": "FALSE",
    "OTEL_SOMETHING_ELSE": "whatever",
}


@pytest.mark.parametrize("name", WRONG)
def test_a_malformed_variable_is_named(name: str):
    """The error names the variable and what it should be. Headers are not shown, because they carry keys."""
    with pytest.raises(DefinitionError, match=f"{name} is .*Set it to .*, or unset it") as caught:
        check_variables({**RIGHT, name: WRONG[name]})
    assert ("Bearer" in str(caught.value)) is False


def test_correct_variables_are_accepted():
    """Each variable in its usual form, an empty one and an unknown one are accepted."""
    check_variables(RIGHT)
    for value in ("0", "1", "1.0", "0.001", ".5"):
        check_variables({"OTEL_TRACES_SAMPLER_ARG": value})


@pytest.mark.parametrize(
    ("value", "wanted"),
    [("", False), ("true", True), ("SPAN_ONLY", True), ("span_and_event", True), ("EVENT_ONLY", False)],
)
def test_content_is_off_unless_the_variable_asks_for_it(value: str, wanted: bool):
    """The variable of the conventions asks for content, in its old form and its new one."""
    name = "OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT"
    assert captures_content({name: value} if value else {}) is wanted


def test_nothing_starts_by_itself_without_a_variable(monkeypatch: pytest.MonkeyPatch):
    """The program starts telemetry only where a variable says where it goes."""
    for name in telemetry.SWITCHES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OTEL_SERVICE_NAME", "demo")
    assert telemetry.start_from_environment() is None


APP = """
from handrail import Agent, ScriptedModel
agent = Agent(ScriptedModel(lambda request: "Hello."), "Greet.")
"""


def run_program(folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    (folder / "app.py").write_text(APP)
    return subprocess.run(
        [sys.executable, "-m", "handrail", "run", "app.py", "Hi", "--journal", str(folder / "runs.db")],
        cwd=folder,
        env={**{k: v for k, v in os.environ.items() if not k.startswith("OTEL_")}, **variables},
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_the_program_goes_on_with_one_warning_if_the_collector_is_down(tmp_path: Path):
    """A run whose collector can't be reached ends as usual. Exactly one warning names the variable."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        ended = run_program(
            tmp_path,
            OTEL_EXPORTER_OTLP_ENDPOINT=f"http://127.0.0.1:{free.getsockname()[1]}",
            OTEL_METRICS_EXPORTER="none",
        )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.strip() == "Hello."
    assert ended.stderr.count("telemetry can't be sent") == 1
    assert "OTEL_EXPORTER_OTLP_ENDPOINT" in ended.stderr
    assert "opentelemetry" not in ended.stderr


def test_a_collector_that_does_not_answer_is_waited_for_once(caplog: pytest.LogCaptureFixture):
    """The first flush gives up after its time and warns. Later ones, such as that at the end of the process, don't wait."""
    answers = threading.Event()

    class Hangs(SpanExporter):
        def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
            answers.wait()
            return SpanExportResult.SUCCESS

    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(Hangs()))
    provider.get_tracer("app").start_span("waits").end()
    started = telemetry.Telemetry(provider, NoOpMeterProvider(), [])
    try:
        started.flush(0.01)
        started.flush(PATIENCE)
    finally:
        answers.set()
        provider.shutdown()
    [warning] = caplog.records
    assert "the collector does not answer" in warning.message


def test_the_program_names_a_malformed_variable(tmp_path: Path):
    """The program starts nothing if a variable is malformed, and says which."""
    ended = run_program(tmp_path, OTEL_EXPORTER_OTLP_ENDPOINT="collector")
    assert ended.returncode == 2
    assert "OTEL_EXPORTER_OTLP_ENDPOINT is 'collector'" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_an_exporter_that_is_not_installed_is_named(tmp_path: Path):
    """An exporter without a package is an error that names the variable and the package."""
    ended = run_program(tmp_path, OTEL_TRACES_EXPORTER="zipkin_json")
    assert ended.returncode == 2
    assert "OTEL_TRACES_EXPORTER" in ended.stderr
    assert "opentelemetry-exporter-zipkin-json" in ended.stderr


def test_a_disabled_sdk_starts_nothing(tmp_path: Path):
    """With OTEL_SDK_DISABLED=true, nothing is sent, so that a collector that is down is not noticed."""
    ended = run_program(tmp_path, OTEL_EXPORTER_OTLP_ENDPOINT="http://127.0.0.1:1", OTEL_SDK_DISABLED="true")
    assert (ended.returncode, ended.stderr.count("can't be sent")) == (0, 0)
