"""OTLP exporters, as the standard `OTEL_*` variables say. With none of them set nothing is built, and nothing is sent.

A signal is exported when its exporter is named `otlp` (`OTEL_TRACES_EXPORTER`, `OTEL_METRICS_EXPORTER`,
`OTEL_LOGS_EXPORTER`), or when that variable is unset and an endpoint is given (`OTEL_EXPORTER_OTLP_ENDPOINT` or the
signal's own). Everything else (endpoints, headers, timeouts, queue sizes, samplers) the SDK reads by itself.

Logs: the SDK of 1.45 keeps its logs package private (`opentelemetry.sdk._logs`, not stable); only this module and
`logs.py` touch it. Traces and metrics are stable.
"""

import threading
from collections.abc import Callable, Mapping
from enum import StrEnum
from importlib.metadata import version

from opentelemetry.exporter.otlp.proto.grpc import _log_exporter as grpc_logs
from opentelemetry.exporter.otlp.proto.grpc import metric_exporter as grpc_metrics
from opentelemetry.exporter.otlp.proto.grpc import trace_exporter as grpc_traces
from opentelemetry.exporter.otlp.proto.http import _log_exporter as http_logs
from opentelemetry.exporter.otlp.proto.http import metric_exporter as http_metrics
from opentelemetry.exporter.otlp.proto.http import trace_exporter as http_traces
from opentelemetry.sdk._logs.export import LogRecordExporter
from opentelemetry.sdk.metrics.export import MetricExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace.export import SpanExporter

from serving.telemetry import semconv

SHUTDOWN_SECONDS = 3.0
"""What a provider may take to send what it still holds when the process ends. What is left then is lost."""

SDK_METRICS = "OTEL_PYTHON_SDK_INTERNAL_METRICS_ENABLED"
"""The SDK reports its own health (queued, sent and dropped spans) only where this variable is true."""


class Signal(StrEnum):
    """What can be exported."""

    TRACES = "traces"
    METRICS = "metrics"
    LOGS = "logs"


class OtlpSettingError(ValueError):
    """An `OTEL_*` variable has a value that we cannot follow; the message names it and what was expected."""


def exported(signal: Signal, environ: Mapping[str, str]) -> bool:
    """Whether the environment asks for this signal.

    Raises:
        OtlpSettingError: for another exporter than `otlp` or `none`.
    """
    if environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return False
    name = f"OTEL_{signal.upper()}_EXPORTER"
    chosen = environ.get(name, "").strip().lower()
    if chosen not in ("", "otlp", "none"):
        raise OtlpSettingError(f"{name}: got {chosen!r}, expected otlp or none")
    if chosen:
        return chosen == "otlp"
    endpoints = ("OTEL_EXPORTER_OTLP_ENDPOINT", f"OTEL_EXPORTER_OTLP_{signal.upper()}_ENDPOINT")
    return any(environ.get(endpoint, "").strip() for endpoint in endpoints)


def protocol(signal: Signal, environ: Mapping[str, str]) -> str:
    """`grpc` or `http/protobuf`. The default is grpc, which is vLLM's too.

    Raises:
        OtlpSettingError: for any other.
    """
    for name in (f"OTEL_EXPORTER_OTLP_{signal.upper()}_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"):
        chosen = environ.get(name, "").strip().lower()
        if chosen in ("grpc", "http/protobuf"):
            return chosen
        if chosen:
            raise OtlpSettingError(f"{name}: got {chosen!r}, expected grpc or http/protobuf")
    return "grpc"


def span_exporter(environ: Mapping[str, str]) -> SpanExporter:
    """The exporter of traces."""
    if protocol(Signal.TRACES, environ) == "grpc":
        return grpc_traces.OTLPSpanExporter()
    return http_traces.OTLPSpanExporter()


def metric_exporter(environ: Mapping[str, str]) -> MetricExporter:
    """The exporter of metrics."""
    if protocol(Signal.METRICS, environ) == "grpc":
        return grpc_metrics.OTLPMetricExporter()
    return http_metrics.OTLPMetricExporter()


def log_exporter(environ: Mapping[str, str]) -> LogRecordExporter:
    """The exporter of logs."""
    if protocol(Signal.LOGS, environ) == "grpc":
        return grpc_logs.OTLPLogExporter()
    return http_logs.OTLPLogExporter()


def resource(service_name: str, environ: Mapping[str, str]) -> Resource:
    """Who sends. `OTEL_SERVICE_NAME` and `OTEL_RESOURCE_ATTRIBUTES` go before `service_name`."""
    attributes = {semconv.SERVICE_VERSION: version("laneway")}
    named = environ.get("OTEL_SERVICE_NAME") or "service.name=" in environ.get("OTEL_RESOURCE_ATTRIBUTES", "")
    if not named:
        attributes[semconv.SERVICE_NAME] = service_name
    return Resource.create(attributes)


def bounded(shutdown: Callable[[], object], seconds: float) -> bool:
    """Runs a shutdown that may hang (the SDK's wait 30 s for a dead collector). False: it was left behind."""
    thread = threading.Thread(target=shutdown, name="telemetry shutdown", daemon=True)
    thread.start()
    thread.join(seconds)
    return not thread.is_alive()
