"""Setting up telemetry: the providers of OpenTelemetry, from the usual `OTEL_*` variables unless the app has set them up."""

from __future__ import annotations

import atexit
import logging
import os
import re
import threading
from collections.abc import Callable, Iterable, Mapping
from importlib.metadata import entry_points
from typing import Any, NamedTuple, Self

from opentelemetry import metrics, trace
from opentelemetry.metrics import MeterProvider
from opentelemetry.trace import TracerProvider

from handrail.errors import DefinitionError
from handrail.telemetry import names
from handrail.telemetry.metrics import MeterRecorder, RunMetrics
from handrail.telemetry.spans import Spans

log = logging.getLogger("handrail.telemetry")

HOSTS_VARIABLE = "HANDRAIL_TRACE_HOSTS"
CONTENT_VARIABLE = "OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT"
_SECONDS = 5.0
"""How long the end of a process waits for the collector."""


class Rule(NamedTuple):
    """What the value of a variable must look like."""

    variables: str
    """A pattern for the variable's name."""
    values: str
    wanted: str


_PAIRS = r"\s*([^\s=,]+\s*=[^,]*)?(,\s*([^\s=,]+\s*=[^,]*)?)*"
RULES = (
    Rule("OTEL_SDK_DISABLED", "true|false", "true or false"),
    Rule(
        r"OTEL_EXPORTER_OTLP_(\w+_)?ENDPOINT", r"https?://[^\s/]+\S*", "a URL such as http://localhost:4318"
    ),
    Rule(r"OTEL_EXPORTER_OTLP_(\w+_)?PROTOCOL", "http/protobuf|grpc", "http/protobuf, or grpc"),
    Rule(r"OTEL_EXPORTER_OTLP_(\w+_)?HEADERS", _PAIRS, "pairs such as name=value,other=value"),
    Rule(r"OTEL_EXPORTER_OTLP_(\w+_)?COMPRESSION", "none|gzip|deflate", "none, gzip or deflate"),
    Rule(r"OTEL_EXPORTER_OTLP_(\w+_)?TIMEOUT", r"\d+(\.\d+)?", "a number of seconds"),
    Rule(r"OTEL_BSP_\w+", r"[1-9]\d*", "a whole number of at least 1"),
    Rule(r"OTEL_METRIC_EXPORT_(INTERVAL|TIMEOUT)", r"[1-9]\d*", "a number of milliseconds"),
    Rule(r"OTEL_(SPAN|EVENT|LINK|ATTRIBUTE)_\w+_LIMIT", r"\d*", "a whole number"),
    Rule("OTEL_RESOURCE_ATTRIBUTES", _PAIRS, "pairs such as name=value,other=value"),
    Rule(
        "OTEL_TRACES_SAMPLER",
        r"(parentbased_)?(always_on|always_off|traceidratio)",
        "a sampler such as always_on",
    ),
    Rule("OTEL_TRACES_SAMPLER_ARG", r"0|1|0?\.\d+|[01]\.0*|0\.\d+", "a number from 0 to 1"),
    Rule(
        CONTENT_VARIABLE,
        "true|false|no_content|span_only|event_only|span_and_event",
        "true or false, or SPAN_ONLY, EVENT_ONLY, SPAN_AND_EVENT or NO_CONTENT",
    ),
)


def check_variables(environment: Mapping[str, str]) -> None:
    """Raise `DefinitionError` for the first `OTEL_*` variable with an invalid value. An empty one counts as not set."""
    for name, value in environment.items():
        for rule in RULES if name.startswith("OTEL_") and value.strip() else ():
            if re.fullmatch(rule.variables, name) and not re.fullmatch(
                rule.values, value.strip(), re.IGNORECASE
            ):
                shown = "malformed" if name.endswith("HEADERS") else repr(value)  # headers carry keys
                raise DefinitionError(f"{name} is {shown}. Set it to {rule.wanted}, or unset it.")


class FirstFailure(logging.Handler):
    """Turns whatever OpenTelemetry's exporters log about a collector that can't be reached into one warning."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.settled = threading.Event()
        """Set when sending has failed or has succeeded."""
        self.hangs = False
        """Whether sending has neither failed nor succeeded while somebody waited for it."""
        self._warned = False

    def emit(self, record: logging.LogRecord) -> None:
        self.warn(record.getMessage())
        self.settled.set()

    def warn(self, problem: str) -> None:
        """Log the warning, unless it was logged before."""
        if not self._warned:
            self._warned = True
            log.warning(
                "telemetry can't be sent: %s Runs go on without it. Check the collector, and OTEL_EXPORTER_OTLP_ENDPOINT.",
                problem,
            )

    def take_over(self) -> None:
        """Receive what the exporters log from now on, instead of the handlers of the root logger."""
        for name in ("opentelemetry.exporter", "opentelemetry.sdk._shared_internal"):
            logger = logging.getLogger(name)
            logger.addHandler(self)
            logger.propagate = False


def exporters(signal: str, environment: Mapping[str, str]) -> list[Any]:
    """Create the exporters that `OTEL_TRACES_EXPORTER` or `OTEL_METRICS_EXPORTER` names. `signal` is "traces" or "metrics".

    Raises `DefinitionError` if one is not installed.
    """
    variable = f"OTEL_{signal.upper()}_EXPORTER"
    found: list[Any] = []
    for name in filter(None, (each.strip() for each in environment.get(variable, "otlp").split(","))):
        if name == "none":
            continue
        if name == "otlp":
            own, every = (f"OTEL_EXPORTER_OTLP_{part}PROTOCOL" for part in (f"{signal.upper()}_", ""))
            protocol = environment.get(own) or environment.get(every) or "http/protobuf"
            variable, name = (
                (own if environment.get(own) else every),
                f"otlp_proto_{protocol.partition('/')[0].lower()}",
            )
        matches = entry_points(group=f"opentelemetry_{signal}_exporter", name=name)
        if not matches:
            raise DefinitionError(
                f"{variable} asks for the exporter {name!r}, which is not installed. Install its package "
                f"(opentelemetry-exporter-{name.replace('_', '-')}), or use otlp with http/protobuf, console or none."
            )
        found.append(next(iter(matches)).load()())
    return found


class Telemetry:
    """Telemetry that was started: stop it to observe no more. As a context manager, it is stopped at the end of the block."""

    def __init__(
        self,
        tracer_provider: TracerProvider,
        meter_provider: MeterProvider,
        stops: list[Callable[[], None]],
        failure: FirstFailure | None = None,
    ) -> None:
        self.tracer_provider = tracer_provider
        self.meter_provider = meter_provider
        self._stops = stops
        self._failure = failure or FirstFailure()

    def flush(self, seconds: float = _SECONDS) -> None:
        """Send what has not been sent. Returns after `seconds` at the latest, and at once if the collector can't be reached.

        If an earlier flush has waited for a collector that does not answer, this one does not.
        """
        failure, settled = self._failure, self._failure.settled
        settled.clear()

        def send() -> None:
            for provider in (self.tracer_provider, self.meter_provider):
                force_flush: Any = getattr(provider, "force_flush", None)
                if force_flush is not None:
                    force_flush()
            settled.set()

        threading.Thread(target=send, name="handrail-telemetry", daemon=True).start()
        failure.hangs = not settled.wait(0 if failure.hangs else seconds)
        if failure.hangs:
            failure.warn("the collector does not answer.")

    def stop(self) -> None:
        """Observe no more, and send what has not been sent. Stopping again does nothing."""
        stops, self._stops = self._stops, []
        for stop in stops:
            stop()
        if stops:
            self.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


class _Providers(NamedTuple):
    tracers: TracerProvider
    meters: MeterProvider
    failure: FirstFailure | None


_lock = threading.Lock()
_own: _Providers | None = None
"""The providers that `start` has set up in this process; None if it has not, or if the app has."""


def _providers(environment: Mapping[str, str]) -> _Providers:
    """Return the app's providers, or else set them up for the whole process, once."""
    global _own
    with _lock:
        tracers, meters = trace.get_tracer_provider(), metrics.get_meter_provider()
        if _own is not None:
            return _own
        if isinstance(tracers, trace.ProxyTracerProvider):
            _own = _set_up(environment)
            return _own
        return _Providers(tracers, meters, None)


def _set_up(environment: Mapping[str, str]) -> _Providers:
    from opentelemetry.sdk.metrics import MeterProvider as SdkMeterProvider
    from opentelemetry.sdk.metrics.export import MetricReader, PeriodicExportingMetricReader
    from opentelemetry.sdk.trace import TracerProvider as SdkTracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    failure = FirstFailure()
    failure.take_over()
    made = {signal: exporters(signal, environment) for signal in ("traces", "metrics")}
    tracers = SdkTracerProvider(shutdown_on_exit=False)
    for each in made["traces"]:
        tracers.add_span_processor(BatchSpanProcessor(each))
    meters = SdkMeterProvider(
        [
            each if isinstance(each, MetricReader) else PeriodicExportingMetricReader(each)
            for each in made["metrics"]
        ],
        shutdown_on_exit=False,
    )
    trace.set_tracer_provider(tracers)
    metrics.set_meter_provider(meters)

    def let_go() -> None:
        Telemetry(tracers, meters, [], failure).flush()
        failure.setLevel(logging.CRITICAL)  # what is sent after the shutdown is not missing
        for each in (*made["traces"], *made["metrics"]):
            each.shutdown()

    atexit.register(let_go)  # in place of the providers' own end, which would wait for a collector that hangs
    return _Providers(tracers, meters, failure)


def captures_content(environment: Mapping[str, str]) -> bool:
    """Return whether the convention's variable asks for the content of messages and calls on spans."""
    return environment.get(CONTENT_VARIABLE, "").strip().lower() in ("true", "span_only", "span_and_event")


_active: Telemetry | None = None


def start(
    *,
    content: bool | None = None,
    trace_hosts: Iterable[str] | None = None,
    tracer_provider: TracerProvider | None = None,
    meter_provider: MeterProvider | None = None,
) -> Telemetry:
    """Observe all runs of this process from now on, as spans and metrics of OpenTelemetry.

    The providers are those given, or those that the app has set up, or else new ones that send over OTLP, as the usual
    `OTEL_*` variables say. `content` adds messages, arguments and results to spans; by default, the variable
    `OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT` decides. Secrets are masked either way.

    Requests to models carry the trace only to the hosts in `trace_hosts`, such as `models.example.com` or `*.example.com`; by
    default, to those in `HANDRAIL_TRACE_HOSTS`, separated by commas. Requests to MCP servers always do.

    Telemetry that was started before is stopped. With `OTEL_SDK_DISABLED=true`, nothing is observed. Raises `DefinitionError` for a
    malformed variable, and names it.
    """
    global _active
    environment = os.environ
    check_variables(environment)
    if environment.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return Telemetry(trace.NoOpTracerProvider(), metrics.NoOpMeterProvider(), [])
    if tracer_provider is None or meter_provider is None:
        found = _providers(environment)
    else:
        found = _Providers(tracer_provider, meter_provider, None)
    tracers, meters = tracer_provider or found.tracers, meter_provider or found.meters
    if _active is not None:
        _active.stop()
    hosts = environment.get(HOSTS_VARIABLE, "").split(",") if trace_hosts is None else trace_hosts
    wanted = captures_content(environment) if content is None else content
    spans = Spans(tracers, content=wanted, hosts=[each.strip() for each in hosts])
    run_metrics = RunMetrics(MeterRecorder(meters.get_meter(names.SCOPE)))
    _active = Telemetry(tracers, meters, [spans.begin(), run_metrics.begin()], found.failure)
    return _active
