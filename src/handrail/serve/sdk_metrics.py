"""`SdkMetrics`: metrics that the SDK of OpenTelemetry keeps. Needs `pip install 'handrail[otel]'`."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from opentelemetry.exporter.prometheus import PrometheusMetricReader
from opentelemetry.metrics import CallbackOptions, Observation, get_meter_provider
from opentelemetry.sdk.metrics import MeterProvider
from prometheus_client import CollectorRegistry, generate_latest

from handrail.serve.metrics import Metrics, prometheus_name, start_at_zero
from handrail.telemetry import names
from handrail.telemetry.metrics import Instrument, MeterRecorder, Recorder


class SdkMetrics(Metrics):
    """Metrics with a registry of their own. They also go to the process's meter provider, if telemetry or the app has set one up before."""

    def __init__(self, instruments: Mapping[str, Instrument]) -> None:
        super().__init__(instruments)
        self._registry = CollectorRegistry()
        reader = PrometheusMetricReader(
            disable_target_info=True, scope_info_enabled=False, registry=self._registry
        )
        own = MeterProvider([reader], shutdown_on_exit=False).get_meter(names.SCOPE)
        self._meters, self._recorders = [own], [MeterRecorder(own, self.instruments)]
        shared = get_meter_provider()
        if isinstance(shared, MeterProvider):
            self._meters.append(shared.get_meter(names.SCOPE))
            self._recorders.append(MeterRecorder(self._meters[1], instruments))
        start_at_zero(self)

    def add(self, name: str, amount: float = 1, /, **labels: str) -> None:
        for each in self._recorders:
            each.add(name, amount, **labels)

    def record(self, name: str, value: float, /, **labels: str) -> None:
        for each in self._recorders:
            each.record(name, value, **labels)

    @property
    def recorder(self) -> Recorder:
        return self._recorders[0]  # telemetry that was started observes runs itself

    def observe(self, name: str, description: str, read: Callable[[], float], /) -> None:
        def observations(options: CallbackOptions) -> list[Observation]:
            return [Observation(read())]

        for meter in self._meters:
            meter.create_observable_gauge(name, [observations], description=description)

    def value(self, name: str, /, **labels: str) -> float:
        return self._registry.get_sample_value(prometheus_name(name, self.instruments[name]), labels) or 0

    def text(self) -> str:
        return generate_latest(self._registry).decode()
