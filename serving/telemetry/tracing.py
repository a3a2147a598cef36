"""Spans: one server span a request, and below it the stages that its timeline knows.

The server span starts when the head was read, so that its id can go to the engine, whose own span becomes its child.
The stages (`admission`, `queue`, `dispatch`, `deliver`) are made when the request has ended, from its monotonic stamps:
nothing is done while tokens flow, and all spans of a trace reach the collector together. No span is ever made current;
a context variable set around a `yield` cannot be taken back when the client leaves.

Cost of a request to the event loop, all of `start` and `finish` (tests/bench/telemetry_cost.py): 10 µs where nothing is
exported, 20 µs where the caller does not sample, 200 µs where five spans are made (55 of them before the dispatch).

Spans hold only what `semconv.ATTRIBUTES` names. Status carries no text, and no exception is recorded.
"""

import os
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from opentelemetry.context import Context
from opentelemetry.metrics import MeterProvider
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import (
    Span,
    SpanContext,
    SpanKind,
    StatusCode,
    Tracer,
    format_trace_id,
    get_current_span,
    set_span_in_context,
)
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

from serving.telemetry import otlp, semconv
from serving.timeline import NOT_OFFERED, Boundary, Outcome, Timeline

Headers = Iterable[tuple[bytes, bytes]]
"""As ASGI has them: lower-case names."""

OPERATIONS = {"/v1/chat/completions": "chat", "/v1/completions": "text_completion"}
"""Values of `gen_ai.operation.name` (GenAI semantic conventions) by route."""

_STAGE_STAMPS = (
    (semconv.SPAN_ADMISSION, "received", "admitted"),
    (semconv.SPAN_QUEUE, "admitted", "released"),
    (semconv.SPAN_DISPATCH, "dispatched", "first_token"),
    (semconv.SPAN_DELIVER, "first_token", "last_token"),
)
"""Each stage from one stamp to another: the timeline can be read back from the trace."""

_UNADMITTED = frozenset({Outcome.REJECTED_FULL, Outcome.REJECTED_INFEASIBLE})
"""`admitted` is the stamp of their refusal: they had no time in the queue."""

_PROPAGATOR = TraceContextTextMapPropagator()


@dataclass(frozen=True, slots=True)
class RequestTrace:
    """One request's server (or client) span, from its start until `finish`."""

    span: Span | None
    """None: nothing is exported; what the caller sent is passed on as it came."""
    tracer: Tracer | None
    trace_id: str | None
    """32 hex digits: for logs and answers; None where nobody traces."""
    sampled: bool
    """The trace is recorded here, so an exemplar may point at it."""
    upstream: tuple[tuple[bytes, bytes], ...]
    """Headers that carry the context to the engine."""
    wall_offset: int
    """Wall clock minus monotonic clock, ns, taken once when the request started."""

    def finish(self, timeline: Timeline, *, exemplar: bool = False) -> None:
        """Makes the stages' spans and ends the server span. Call once, when the timeline has its outcome.

        `exemplar`: an exemplar points at this trace (what `Metrics.close` gave back), so it must be kept.
        """
        span = self.span
        if span is None or self.tracer is None:
            return
        if span.is_recording():
            if timeline.boundary is Boundary.GATEWAY:
                self._stages(self.tracer, span, timeline)
            span.set_attributes(attributes(timeline, exemplar=exemplar))
            if timeline.outcome not in NOT_OFFERED and timeline.outcome not in (Outcome.COMPLETED, Outcome.CANCELLED):
                span.set_status(StatusCode.ERROR)
        closed = timeline.closed
        span.end(None if closed is None else self._wall(closed))

    def _stages(self, tracer: Tracer, server: Span, timeline: Timeline) -> None:
        context = set_span_in_context(server, Context())
        shared = {semconv.LANE: timeline.lane, semconv.COHORT: timeline.cohort}
        for name, first, last in _STAGE_STAMPS:
            start: float | None = getattr(timeline, first)
            end: float | None = getattr(timeline, last)
            if start is None or (name == semconv.SPAN_QUEUE and timeline.outcome in _UNADMITTED):
                continue
            if end is None:
                end = timeline.closed  # the request ended in this stage
            if end is None:
                continue
            span = tracer.start_span(name, context, attributes=shared, start_time=self._wall(start))
            span.end(self._wall(end))

    def _wall(self, stamp: float) -> int:
        return self.wall_offset + round(stamp * 1e9)


class Tracing:
    """Starts the spans of requests. Sampling is the SDK's: `OTEL_TRACES_SAMPLER`, by default as the caller decided."""

    def __init__(
        self,
        service_name: str,
        *,
        environ: Mapping[str, str] = os.environ,
        meter_provider: MeterProvider | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`clock`: the one of the timelines' stamps, seconds. `meter_provider`: gets the SDK's own health.

        Raises:
            OtlpSettingError: the environment asks for what we do not have.
        """
        self._clock = clock
        self._provider: TracerProvider | None = None
        self._tracer: Tracer | None = None
        if otlp.exported(otlp.Signal.TRACES, environ):
            self._provider = TracerProvider(
                resource=otlp.resource(service_name, environ), shutdown_on_exit=False, meter_provider=meter_provider
            )
            exporter = otlp.span_exporter(environ)
            self._provider.add_span_processor(BatchSpanProcessor(exporter, meter_provider=meter_provider))
            self._tracer = self._provider.get_tracer("laneway")

    @property
    def enabled(self) -> bool:
        """Whether spans are made at all."""
        return self._tracer is not None

    def start(self, route: str, headers: Headers, received: float, method: str = "POST") -> RequestTrace:
        """The server span of a request whose head was read at `received` (monotonic seconds).

        `route` must be one of the paths served, never the path that was asked for: it names the span.
        """
        carrier = _trace_headers(headers)
        attributes: dict[str, AttributeValue] = {semconv.HTTP_REQUEST_METHOD: method, semconv.HTTP_ROUTE: route}
        if route in OPERATIONS:
            attributes[semconv.GEN_AI_OPERATION_NAME] = OPERATIONS[route]
            attributes[semconv.GEN_AI_PROVIDER_NAME] = semconv.PROVIDER
        return self._start(f"{method} {route}", SpanKind.SERVER, carrier, attributes, received)

    def start_client(self, name: str, sent: float) -> RequestTrace:
        """The root span of a request that we send ourselves (replay); its `upstream` makes the gateway's a child."""
        return self._start(name, SpanKind.CLIENT, {}, {}, sent)

    def close(self, seconds: float = otlp.SHUTDOWN_SECONDS) -> bool:
        """Sends what is still queued, for `seconds` at most. False: some of it was left behind."""
        return self._provider is None or otlp.bounded(self._provider.shutdown, seconds)

    def _start(
        self, name: str, kind: SpanKind, carrier: dict[str, str], attributes: dict[str, AttributeValue], at: float
    ) -> RequestTrace:
        wall_offset = time.time_ns() - round(self._clock() * 1e9)
        context = _PROPAGATOR.extract(carrier, Context()) if carrier else Context()
        if self._tracer is None:
            parent = get_current_span(context).get_span_context()
            passed = _headers(carrier) if parent.is_valid else ()
            return RequestTrace(None, None, _trace_id(parent), False, passed, wall_offset)
        span = self._tracer.start_span(
            name, context, kind, attributes, start_time=wall_offset + round(at * 1e9), record_exception=False
        )
        upstream: dict[str, str] = {}
        _PROPAGATOR.inject(upstream, set_span_in_context(span, context))
        own = span.get_span_context()
        return RequestTrace(span, self._tracer, _trace_id(own), span.is_recording(), _headers(upstream), wall_offset)


def attributes(timeline: Timeline, *, exemplar: bool) -> dict[str, AttributeValue]:
    """The server span's attributes of an ended request, by allow-list; what is None is left out."""
    values: dict[str, AttributeValue | None] = {
        semconv.REQUEST_ID: timeline.request_id,
        semconv.BOUNDARY: timeline.boundary.value,
        semconv.LANE: timeline.lane,
        semconv.COHORT: timeline.cohort,
        semconv.POOL: timeline.pool,
        semconv.RUN_ID: timeline.run_id,
        semconv.STREAMED: timeline.streamed,
        semconv.GEN_AI_REQUEST_MODEL: timeline.model,
        semconv.GEN_AI_USAGE_INPUT_TOKENS: timeline.prompt_tokens,
        semconv.GEN_AI_USAGE_OUTPUT_TOKENS: timeline.output_tokens,
    }
    if timeline.boundary is not Boundary.GATEWAY:
        # Usage stands on one span of a trace only, or sums over spans count it twice.
        values[semconv.GEN_AI_USAGE_INPUT_TOKENS] = values[semconv.GEN_AI_USAGE_OUTPUT_TOKENS] = None
    if timeline.outcome is not None:
        values[semconv.OUTCOME] = timeline.outcome.value
        if timeline.outcome not in (Outcome.COMPLETED, Outcome.CANCELLED):
            values[semconv.ERROR_TYPE] = timeline.outcome.value
    for key, name in semconv.EXTRA_ATTRIBUTES.items():
        value = timeline.extra.get(key)
        if isinstance(value, str | int | float):
            values[name] = value
    if exemplar:
        values[semconv.EXEMPLAR] = True
    return {name: value for name, value in values.items() if value is not None}


def _trace_headers(headers: Headers) -> dict[str, str]:
    """`traceparent` and `tracestate`; W3C: two `traceparent` are none, several `tracestate` are one list."""
    carrier: dict[str, str] = {}
    parents = 0
    for name, value in headers:
        if name == b"traceparent":
            parents += 1
            carrier["traceparent"] = value.decode("latin-1")
        elif name == b"tracestate":
            text = value.decode("latin-1")
            carrier["tracestate"] = f"{carrier['tracestate']},{text}" if "tracestate" in carrier else text
    return carrier if parents == 1 else {}


def _headers(carrier: Mapping[str, str]) -> tuple[tuple[bytes, bytes], ...]:
    return tuple((name.encode("latin-1"), value.encode("latin-1")) for name, value in carrier.items())


def _trace_id(context: SpanContext) -> str | None:
    return format_trace_id(context.trace_id) if context.is_valid else None
