"""The standard variables decide what is exported, and a dead collector decides nothing."""

import asyncio
import threading
import time
from collections.abc import Mapping

import pytest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

from serving.telemetry import otlp
from serving.telemetry.otlp import OtlpSettingError, Signal, exported, protocol
from serving.telemetry.runtime import RuntimeMetrics
from serving.telemetry.tracing import Tracing
from serving.timeline import Outcome
from tests.fixtures.otlp_receiver import receiver
from tests.unit.telemetry.timelines import ended


@pytest.mark.parametrize(
    ("environ", "traces"),
    [
        ({}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1"}, True),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://127.0.0.1:1"}, True),
        ({"OTEL_EXPORTER_OTLP_LOGS_ENDPOINT": "http://127.0.0.1:1"}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1", "OTEL_TRACES_EXPORTER": "none"}, False),
        ({"OTEL_TRACES_EXPORTER": "otlp"}, True),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1", "OTEL_SDK_DISABLED": "true"}, False),
    ],
)
def test_a_signal_is_exported_only_where_the_environment_asks(environ: Mapping[str, str], traces: bool) -> None:
    """Lost: a gateway that does not send to port 4317 of every machine it is tried on."""
    assert exported(Signal.TRACES, environ) is traces
    tracing = Tracing("test", environ=environ)
    assert tracing.enabled is traces
    tracing.close()


def test_with_none_of_the_variables_set_nothing_is_built() -> None:
    """Lost: the cost and the threads of exporters, to everybody who has no collector."""
    before = set(threading.enumerate())
    tracing, runtime = Tracing("test", environ={}), RuntimeMetrics("test", environ={})
    trace = tracing.start("/v1/completions", (), time.monotonic())
    assert (trace.span, trace.tracer, trace.sampled) == (None, None, False)
    assert runtime.provider is None
    runtime.loop_lag(0.1)
    runtime.close()
    assert set(threading.enumerate()) == before


def test_a_signals_own_protocol_goes_before_the_general_one() -> None:
    """Lost: traces by gRPC beside metrics by HTTP, as Prometheus' own OTLP endpoint needs them."""
    environ = {"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc", "OTEL_EXPORTER_OTLP_METRICS_PROTOCOL": "http/protobuf"}
    assert protocol(Signal.METRICS, environ) == "http/protobuf"
    assert protocol(Signal.TRACES, environ) == "grpc"
    assert protocol(Signal.TRACES, {}) == "grpc"


@pytest.mark.parametrize(
    ("name", "setting"),
    [("OTEL_TRACES_EXPORTER", "zipkin"), ("OTEL_EXPORTER_OTLP_PROTOCOL", "http/json")],
)
def test_a_setting_that_cannot_be_followed_is_refused_by_name(name: str, setting: str) -> None:
    """Lost: hours, to a typo that silently sends nothing."""
    with pytest.raises(OtlpSettingError, match=f"{name}: got '{setting}', expected"):
        Tracing("test", environ={"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1", name: setting})


@pytest.mark.parametrize(
    ("environ", "name"),
    [
        ({}, "laneway-gateway"),
        ({"OTEL_SERVICE_NAME": "theirs"}, "theirs"),
        ({"OTEL_RESOURCE_ATTRIBUTES": "service.name=theirs,team=one"}, "theirs"),
        ({"OTEL_RESOURCE_ATTRIBUTES": "team=one"}, "laneway-gateway"),
    ],
)
def test_the_users_service_name_goes_before_ours(
    environ: dict[str, str], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lost: two deployments kept apart by their names."""
    for variable, setting in environ.items():
        monkeypatch.setenv(variable, setting)
    assert otlp.resource("laneway-gateway", environ).attributes["service.name"] == name


def test_a_shutdown_that_hangs_is_left_behind() -> None:
    """Lost: a restart in time; the SDK alone waits 30 s for a collector that is gone."""
    release = threading.Event()
    assert otlp.bounded(release.wait, 0.05) is False
    release.set()
    assert otlp.bounded(release.wait, 5.0) is True


async def test_a_hung_collector_slows_no_request_and_no_shutdown(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lost: user traffic, to an outage of the thing that watches it. The collector accepts and never answers."""
    async with receiver(hung=True) as received:
        for name, setting in {**received.environ(), "OTEL_BSP_MAX_QUEUE_SIZE": "64"}.items():
            monkeypatch.setenv(name, setting)
        monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "32")
        tracing = Tracing("test", environ=received.environ())
        for _ in range(2000):  # five spans each, many times what the queue holds
            trace = tracing.start("/v1/completions", (), time.monotonic())
            assert trace.sampled
            trace.finish(ended(Outcome.COMPLETED, first_token=0.02, tokens=2))
        for _ in range(200):
            if received.waiting:
                break
            await asyncio.sleep(0.02)
        assert received.waiting == 1, "the collector holds an export, and requests went on"
        started = time.monotonic()
        assert await asyncio.to_thread(tracing.close, 0.3) is False
        assert time.monotonic() - started < 2.0


async def test_the_process_and_the_sdk_report_their_own_health(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lost: the answer to "are spans being dropped?" when a trace is missing."""
    monkeypatch.delenv(otlp.SDK_METRICS, raising=False)
    async with receiver() as received:
        for name, setting in received.environ().items():
            monkeypatch.setenv(name, setting)
        runtime = RuntimeMetrics("test", environ=received.environ())
        tracing = Tracing("test", environ=received.environ(), meter_provider=runtime.provider)
        runtime.loop_lag(0.004)
        tracing.start("/v1/completions", (), time.monotonic()).finish(ended(Outcome.COMPLETED, first_token=0.02))
        assert await asyncio.to_thread(tracing.close)
        await asyncio.to_thread(runtime.close)
        names = set()
        for body in received.raw:
            try:
                request = ExportMetricsServiceRequest.FromString(body)
            except Exception:  # a trace export, which is another message
                continue
            names |= {
                metric.name
                for resource in request.resource_metrics
                for scope in resource.scope_metrics
                for metric in scope.metrics
            }
        assert {"laneway.event_loop.lag", "process.cpu.time", "process.memory.usage"} <= names
        assert "otel.sdk.processor.span.queue.size" in names
        assert "otel.sdk.processor.span.processed" in names
