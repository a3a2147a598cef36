"""The `llm_request` span of a replica that is not vLLM, as vLLM 0.32 makes it: one a request, when it ends.

Names and units are vLLM's (`vllm/tracing/utils.py`, `output_processor.py`); they predate the GenAI conventions. The
parent is the caller's `traceparent`. An aborted request leaves no span.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import SpanKind
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

from serving.engine.sequence import Sequence
from serving.telemetry import otlp

SPAN = "llm_request"
SERVICE = "vllm"
"""As the launcher of real replicas names them; `laneway.engine` tells the two apart."""

_PROPAGATOR = TraceContextTextMapPropagator()


@dataclass(frozen=True, slots=True)
class SpanSource:
    """What the span of a request says beyond its sequence."""

    request_id: str
    trace_headers: Mapping[str, str]
    """`traceparent` and `tracestate`, where the request had them."""
    arrival_ns: int
    """Wall clock."""
    arrival: float
    """The same instant on the engine's monotonic clock, seconds."""
    max_tokens: int
    temperature: float | None
    top_p: float | None


class EngineSpans:
    """Sends spans where the `OTEL_*` variables say so, else does nothing."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        """Raises OtlpSettingError for a variable that cannot be followed."""
        self._provider: TracerProvider | None = None
        if otlp.exported(otlp.Signal.TRACES, environ):
            resource = otlp.resource(SERVICE, environ).merge(Resource({"laneway.engine": "simulated"}))
            self._provider = TracerProvider(resource=resource)
            self._provider.add_span_processor(BatchSpanProcessor(otlp.span_exporter(environ)))
            self._tracer = self._provider.get_tracer("serving.engine")

    def finished(self, source: SpanSource, sequence: Sequence, now: float) -> None:
        """The request ended by itself at `now` (the engine's monotonic clock)."""
        if self._provider is None:
            return
        context = _PROPAGATOR.extract(source.trace_headers)
        span = self._tracer.start_span(SPAN, context=context, kind=SpanKind.SERVER, start_time=source.arrival_ns)
        if span.is_recording():
            span.set_attributes(attributes(source, sequence, now))
        span.end(source.arrival_ns + int((now - source.arrival) * 1e9))

    def close(self) -> None:
        """Sends what is left; gives up after a while when nobody takes it."""
        if self._provider is not None:
            otlp.bounded(self._provider.shutdown, otlp.SHUTDOWN_SECONDS)


def attributes(source: SpanSource, sequence: Sequence, now: float) -> dict[str, AttributeValue]:
    """The span's attributes; times in seconds."""
    first, last, scheduled = sequence.first_token_at, sequence.last_token_at, sequence.scheduled_at
    assert first is not None
    assert last is not None
    assert scheduled is not None
    values: dict[str, AttributeValue] = {
        "gen_ai.latency.time_to_first_token": first - source.arrival,
        "gen_ai.latency.e2e": now - source.arrival,
        "gen_ai.latency.time_in_queue": scheduled - sequence.queued_at,
        "gen_ai.usage.prompt_tokens": sequence.prompt_tokens,
        "gen_ai.usage.completion_tokens": sequence.output_tokens,
        "gen_ai.latency.time_in_model_prefill": first - scheduled,
        "gen_ai.latency.time_in_model_decode": last - first,
        "gen_ai.latency.time_in_model_inference": last - scheduled,
        "gen_ai.request.id": source.request_id,
        "gen_ai.request.max_tokens": source.max_tokens,
        "gen_ai.request.n": 1,
        "gen_ai.request.top_p": 1.0 if source.top_p is None else source.top_p,
    }
    temperature = 1.0 if source.temperature is None else source.temperature
    if temperature:
        values["gen_ai.request.temperature"] = temperature
    return values
