"""One trace from the client to the engine, whose spans say where the request waited."""

import asyncio
import time
from concurrent import futures
from typing import Any

import grpc  # type: ignore[import-untyped]
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from serving.telemetry import semconv
from serving.telemetry.tracing import Tracing, attributes
from serving.timeline import NOT_OFFERED, Boundary, Outcome
from tests.fixtures.otlp_receiver import Received, receiver
from tests.unit.telemetry.timelines import TRACE, ended

CHAT = "/v1/chat/completions"
CALLER = "00f067aa0ba902b7"
SAMPLED = ((b"traceparent", f"00-{TRACE}-{CALLER}-01".encode()), (b"tracestate", b"vendor=1"))
CANARY = "canary-secret-5150"


def value_of(item: Any) -> Any:
    return getattr(item.value, item.value.WhichOneof("value"))


def attributes_of(span: Span) -> dict[str, Any]:
    return {item.key: value_of(item) for item in span.attributes}


def use(monkeypatch: pytest.MonkeyPatch, received: Received, **more: str) -> Tracing:
    for name, setting in {**received.environ(), **more}.items():
        monkeypatch.setenv(name, setting)
    return Tracing("laneway-test", environ=received.environ())


async def closed(tracing: Tracing) -> None:
    assert await asyncio.to_thread(tracing.close, 10.0)


async def test_the_stages_lie_below_the_server_span_at_their_stamps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lost: where the request waited, and the timeline that diagnosis reads back from a trace."""
    async with receiver() as received:
        tracing = use(monkeypatch, received)
        origin = time.monotonic()
        trace = tracing.start(CHAT, SAMPLED, origin)
        timeline = ended(Outcome.COMPLETED, first_token=0.05, tokens=3, gap=0.01, closed=0.08)
        for stamp in ("received", "admitted", "released", "dispatched", "first_token", "last_token", "closed"):
            setattr(timeline, stamp, getattr(timeline, stamp) + origin)
        trace.finish(timeline, exemplar=True)
        await closed(tracing)
    spans = {span.name: span for _, span in received.of_trace(TRACE)}
    server = spans.pop(f"POST {CHAT}")
    assert set(spans) == set(semconv.STAGES)
    assert server.parent_span_id.hex() == CALLER
    assert server.kind == Span.SPAN_KIND_SERVER
    assert abs(server.start_time_unix_nano - time.time_ns()) < 60e9, "wall time, not monotonic"
    first = server.start_time_unix_nano
    wanted = {"admission": (0, 1), "queue": (1, 2), "dispatch": (2, 50), "deliver": (50, 70)}
    for name, (start, end) in wanted.items():
        span = spans[name]
        assert span.parent_span_id == server.span_id
        assert (span.start_time_unix_nano - first) / 1e6 == pytest.approx(start, abs=0.01)
        assert (span.end_time_unix_nano - first) / 1e6 == pytest.approx(end, abs=0.01)
        assert attributes_of(span) == {semconv.LANE: timeline.lane, semconv.COHORT: "baseline"}
    assert (server.end_time_unix_nano - first) / 1e6 == pytest.approx(80, abs=0.01)
    values = attributes_of(server)
    assert values[semconv.EXEMPLAR] is True
    assert values[semconv.GEN_AI_OPERATION_NAME] == "chat"
    assert values[semconv.GEN_AI_USAGE_INPUT_TOKENS] == 64
    assert values[semconv.OUTCOME] == "completed"
    assert semconv.ERROR_TYPE not in values


async def test_the_engine_gets_the_server_spans_id_before_anything_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lost: the engine's span, adrift in a trace of its own."""
    async with receiver() as received:
        tracing = use(monkeypatch, received)
        trace = tracing.start(CHAT, SAMPLED, time.monotonic())
        upstream = dict(trace.upstream)
        version, trace_id, span_id, flags = upstream[b"traceparent"].decode().split("-")
        assert (version, trace_id) == ("00", TRACE)
        assert int(flags, 16) & 1
        assert upstream[b"tracestate"] == b"vendor=1"
        trace.finish(ended(Outcome.COMPLETED))
        await closed(tracing)
    (server,) = received.named(f"POST {CHAT}", TRACE)
    assert server.span_id.hex() == span_id != CALLER


async def test_a_caller_that_does_not_sample_is_respected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lost: the caller's choice; half a trace, and a bill for the other half."""
    async with receiver() as received:
        tracing = use(monkeypatch, received)
        trace = tracing.start(CHAT, [(b"traceparent", f"00-{TRACE}-{CALLER}-00".encode())], time.monotonic())
        assert trace.sampled is False
        assert trace.trace_id == TRACE, "logs still join"
        assert not int(dict(trace.upstream)[b"traceparent"].split(b"-")[3], 16) & 1
        trace.finish(ended(Outcome.COMPLETED, first_token=0.05))
        await closed(tracing)
    assert received.spans == []


async def test_the_sampler_is_the_environments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lost: the operator's means to send less."""
    async with receiver() as received:
        tracing = use(monkeypatch, received, OTEL_TRACES_SAMPLER="always_off")
        assert tracing.start(CHAT, (), time.monotonic()).sampled is False
        await closed(tracing)


def test_without_an_exporter_the_callers_context_passes_through_untouched() -> None:
    """Lost: a trace that leads from the application to the engine, past a gateway that does not trace."""
    tracing = Tracing("test", environ={})
    trace = tracing.start(CHAT, SAMPLED, time.monotonic())
    assert trace.upstream == SAMPLED
    assert (trace.trace_id, trace.sampled) == (TRACE, False)
    trace.finish(ended(Outcome.COMPLETED))
    assert tracing.close() is True
    nobody = tracing.start(CHAT, (), time.monotonic())
    assert (nobody.upstream, nobody.trace_id) == ((), None)


@pytest.mark.parametrize(
    "headers",
    [
        [(b"traceparent", CANARY.encode())],
        [(b"traceparent", b"00-" + b"0" * 32 + b"-" + b"0" * 16 + b"-01")],
        [SAMPLED[0], SAMPLED[0]],
        [(b"traceparent", b"\xff\xfe")],
        [(b"tracestate", b"vendor=1")],
    ],
    ids=["garbage", "zeros", "twice", "bytes", "state alone"],
)
def test_a_context_that_is_none_is_not_passed_on(headers: list[tuple[bytes, bytes]]) -> None:
    """Lost: the engine's trust in what the gateway sends it."""
    trace = Tracing("test", environ={}).start(CHAT, headers, time.monotonic())
    assert (trace.upstream, trace.trace_id) == ((), None)


@pytest.mark.parametrize("outcome", sorted(Outcome))
async def test_failures_are_errors_and_say_which_without_a_word_of_text(
    outcome: Outcome, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lost: the traces of failures, which the collector keeps by their status; and users' text, which it must not."""
    async with receiver() as received:
        tracing = use(monkeypatch, received)
        timeline = ended(outcome, closed=0.5)
        timeline.error = CANARY
        timeline.extra |= {"prompt": CANARY, "replica": "http://127.0.0.1:8100", "status": 502}
        tracing.start(CHAT, SAMPLED, time.monotonic()).finish(timeline)
        await closed(tracing)
    (server,) = received.named(f"POST {CHAT}", TRACE)
    values = attributes_of(server)
    fine = outcome in NOT_OFFERED or outcome in (Outcome.COMPLETED, Outcome.CANCELLED)
    assert server.status.code == (Status.STATUS_CODE_UNSET if fine else Status.STATUS_CODE_ERROR)
    assert server.status.message == ""
    unmarked = outcome in (Outcome.COMPLETED, Outcome.CANCELLED)
    assert values.get(semconv.ERROR_TYPE) == (None if unmarked else outcome.value)
    assert (values[semconv.REPLICA], values[semconv.HTTP_RESPONSE_STATUS_CODE]) == ("http://127.0.0.1:8100", 502)
    assert set(values) <= set(semconv.ATTRIBUTES)
    assert CANARY.encode() not in b"".join(received.raw)


async def test_a_request_that_ended_in_its_queue_shows_the_time_it_spent_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Lost: the longest waits; and no wait may be made up for what was refused at the door."""
    async with receiver() as received:
        tracing = use(monkeypatch, received)
        tracing.start(CHAT, SAMPLED, 0.0).finish(ended(Outcome.EXPIRED, closed=2.0))
        tracing.start(CHAT, (), 0.0).finish(ended(Outcome.REJECTED_FULL, closed=0.002))
        await closed(tracing)
    (queued,) = received.named("queue", TRACE)
    assert (queued.end_time_unix_nano - queued.start_time_unix_nano) / 1e9 == pytest.approx(1.999)
    assert len([span for _, span in received.spans if span.name == "queue"]) == 1


def test_usage_stands_on_the_gateways_span_only() -> None:
    """Lost: token sums over spans, doubled."""
    timeline = ended(Outcome.COMPLETED, first_token=0.05, tokens=3)
    assert attributes(timeline, exemplar=False)[semconv.GEN_AI_USAGE_OUTPUT_TOKENS] == 3
    timeline.boundary = Boundary.CLIENT
    assert semconv.GEN_AI_USAGE_OUTPUT_TOKENS not in attributes(timeline, exemplar=False)


async def test_spans_arrive_by_grpc_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lost: the collector's default port, 4317."""
    arrived: list[str] = []

    class Service(trace_service_pb2_grpc.TraceServiceServicer):
        def Export(self, request: ExportTraceServiceRequest, context: object) -> ExportTraceServiceResponse:  # noqa: N802
            for resource in request.resource_spans:
                arrived.extend(span.name for scope in resource.scope_spans for span in scope.spans)
            return ExportTraceServiceResponse()

    server = grpc.server(futures.ThreadPoolExecutor(1))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(Service(), server)  # type: ignore[no-untyped-call]
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{port}")
        monkeypatch.delenv("OTEL_EXPORTER_OTLP_PROTOCOL", raising=False)
        tracing = Tracing("test", environ={"OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{port}"})
        tracing.start(CHAT, (), time.monotonic()).finish(ended(Outcome.COMPLETED, first_token=0.05))
        await closed(tracing)
    finally:
        server.stop(0)
    assert f"POST {CHAT}" in arrived
