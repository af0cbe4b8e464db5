"""Telemetry: runs, model requests and tool calls as OpenTelemetry spans and metrics. Needs `pip install 'handrail[otel]'`.

    import handrail.telemetry

    handrail.telemetry.start()

The `handrail` program starts it by itself where the usual `OTEL_*` variables are set. Without it, nothing is computed.
"""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING

from handrail.errors import DefinitionError
from handrail.imports import names_on_first_use

if TYPE_CHECKING:
    from handrail.telemetry.setup import Telemetry, start

__all__ = ["Telemetry", "start", "start_from_environment"]

SWITCHES = (
    "OTEL_EXPORTER_OTLP_ENDPOINT",
    "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT",
    "OTEL_EXPORTER_OTLP_METRICS_ENDPOINT",
    "OTEL_TRACES_EXPORTER",
    "OTEL_METRICS_EXPORTER",
)
"""Variables that switch telemetry on for the `handrail` program, if one of them is set."""


def start_from_environment() -> Telemetry | None:
    """Start telemetry if one of `SWITCHES` is set, as the `handrail` program does. Returns None if none is.

    If the `otel` extra is not installed, a warning says so: the variables may be meant for other programs.
    """
    if not any(os.environ.get(name, "").strip() for name in SWITCHES):
        return None
    try:
        from handrail.telemetry.setup import start
    except ModuleNotFoundError as error:
        logging.getLogger("handrail.telemetry").warning("%s", _missing(error.name or "", "") or error)
        return None
    return start()


def _missing(name: str, home: str) -> Exception | None:
    if name.partition(".")[0] != "opentelemetry":
        return None
    return DefinitionError(
        "telemetry needs opentelemetry, which is not installed. Install it with: pip install 'handrail[otel]'"
    )


if not TYPE_CHECKING:
    __getattr__ = names_on_first_use(__name__, {"setup": "Telemetry start"}, _missing)
