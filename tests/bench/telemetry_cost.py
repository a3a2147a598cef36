"""What observing one request costs the event loop: `python -m tests.bench.telemetry_cost` prints a table.

Spans go to an exporter that throws them away, in the SDK's own batch processor: what is measured is what the loop pays.
"""

import gc
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

from opentelemetry.context import Context
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from serving.ledger import Ledger
from serving.spec import Spec, load
from serving.telemetry.exposition import render
from serving.telemetry.logs import Logs
from serving.telemetry.metrics import Metrics
from serving.telemetry.snapshot import Snapshot
from serving.telemetry.tracing import Tracing
from serving.timeline import Boundary, Outcome, Timeline

ROOT = Path(__file__).parents[2]
CALLS, ROUNDS = 1000, 15
ROUTE = "/v1/chat/completions"
PARENT = b"00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-0"
OPEN_METRICS = "application/openmetrics-text; version=1.0.0"


class Discarded(SpanExporter):
    """Takes spans and keeps none."""

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        return SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        """Nothing to end."""


def request(spec: Spec, number: int) -> Timeline:
    """A completed stream of 16 tokens."""
    timeline = Timeline(
        f"r{number}", Boundary.GATEWAY, trace_id=f"{number:032x}", model=spec.models[0].name, lane=spec.lanes[0].name
    )
    timeline.pool, timeline.prompt_tokens, timeline.output_tokens = spec.pools[0].name, 100, 16
    timeline.received = number * 1e-3
    timeline.admitted = timeline.received + 0.001
    timeline.released = timeline.admitted + 0.01
    timeline.dispatched = timeline.released + 0.0002
    for i in range(16):
        timeline.content(timeline.dispatched + 0.03 + i * 0.01)
    timeline.extra |= {"replica": "127.0.0.1:8100", "batch_requests": 2}
    assert timeline.last_token is not None
    timeline.end(Outcome.COMPLETED, timeline.last_token + 0.001)
    return timeline


def cost(work: Callable[[Timeline], object], timelines: list[Timeline]) -> tuple[float, float]:
    """Median and best round, µs a call."""
    rounds = []
    for _ in range(ROUNDS):
        gc.collect()
        started = time.perf_counter()
        for timeline in timelines:
            work(timeline)
        rounds.append((time.perf_counter() - started) / len(timelines) * 1e6)
    return median(rounds), min(rounds)


def traced() -> Tracing:
    """Tracing as the environment would set it up, with the exporter exchanged."""
    tracing = Tracing("bench", environ={})
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(Discarded(), max_queue_size=1 << 20))
    tracing._provider, tracing._tracer = provider, provider.get_tracer("laneway")
    return tracing


def main() -> None:
    spec = load(ROOT / "laneway.yaml")
    timelines = [request(spec, number) for number in range(CALLS)]
    metrics, off, on = Metrics(spec), Tracing("bench", environ={}), traced()
    compared = Metrics(spec)
    compared.set_compared(["baseline"])

    def spans(tracing: Tracing, flag: bytes) -> Callable[[Timeline], object]:
        headers = [(b"traceparent", PARENT + flag)]
        return lambda timeline: tracing.start(ROUTE, headers, timeline.received or 0.0).finish(timeline)

    def begun(tracing: Tracing) -> Callable[[Timeline], object]:
        headers = [(b"traceparent", PARENT + b"1")]
        return lambda timeline: tracing.start(ROUTE, headers, timeline.received or 0.0)

    rows: list[tuple[str, tuple[float, float]]] = [
        ("Metrics.close, trace not sampled", cost(lambda t: metrics.close(t, sampled=False), timelines)),
        ("Metrics.close, sampled (exemplars limited)", cost(lambda t: metrics.close(t, sampled=True), timelines)),
        ("Metrics.close, cohorts compared", cost(lambda t: compared.close(t, sampled=False), timelines)),
        ("spans, no exporter", cost(spans(off, b"1"), timelines)),
        ("spans, caller does not sample", cost(spans(on, b"0"), timelines)),
        ("spans, sampled: server and four stages", cost(spans(on, b"1"), timelines)),
        ("of which: start, before the dispatch", cost(begun(on), timelines)),
    ]
    with tempfile.TemporaryDirectory() as folder:
        logs = Logs(Path(folder) / "log", environ={})
        rows.append(("access line, into the queue", cost(logs.access, timelines)))
        logs.close(30.0)
    extract = TraceContextTextMapPropagator().extract
    carrier = {"traceparent": (PARENT + b"1").decode()}
    rows.append(("of which: reading traceparent", cost(lambda t: extract(carrier, Context()), timelines)))
    print(f"{'a request':48} {'median µs':>10} {'best µs':>10}")
    for name, (middle, best) in rows:
        print(f"{name:48} {middle:10.1f} {best:10.1f}")

    print(f"\n{'a scrape (in its own thread)':48} {'ms':>10} {'series':>10}")
    ledger = Ledger(tuple(lane.name for lane in spec.lanes))
    for models in (1, 8, 32):
        many = tuple(spec.models[0].model_copy(update={"name": f"model-{i}"}) for i in range(models))
        wide = Metrics(spec.model_copy(update={"models": many}))
        wide.hand(Snapshot(lanes=ledger.snapshot()))
        started = time.perf_counter()
        body, _ = render(wide.registry, OPEN_METRICS)
        elapsed = (time.perf_counter() - started) * 1e3
        series = sum(not line.startswith(b"#") for line in body.splitlines())
        print(f"{f'render, {models} models':48} {elapsed:10.1f} {series:10}")


if __name__ == "__main__":
    main()
