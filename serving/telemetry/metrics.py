"""The gateway's Prometheus metrics: what one ended request, one released batch, one report of a client adds.

Names, labels and bounds are data (`catalog.py`, `buckets.py`); gauges come from the last `Snapshot` (`snapshot.py`);
`exposition.py` serves it all. A request costs one call of `close`, when it ends; nothing is counted per token.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib.metadata import version

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.metrics_core import Metric
from prometheus_client.process_collector import ProcessCollector

from serving.ledger import NO_LANE
from serving.scheduling.ticket import Batch
from serving.spec import Lane, Spec
from serving.telemetry import buckets, catalog
from serving.telemetry.catalog import CacheResult, MetricDef, RetryReason, TimingResult
from serving.telemetry.exemplars import ExemplarLimit
from serving.telemetry.objectives import NOT_COUNTED, Verdict, judge, population_ttft, prompt_strata, prompt_stratum
from serving.telemetry.snapshot import SNAPSHOT_METRICS, Snapshot, families, labelled_models
from serving.timeline import Outcome, Timeline

_LEFT_THE_QUEUE = frozenset({Outcome.EXPIRED, Outcome.CANCELLED, Outcome.DRAINING, Outcome.NO_REPLICA})
"""Outcomes that can end a request in its queue. What was refused at the door never waited there."""

_CACHE = {
    CacheResult.HIT: catalog.CACHE_HITS,
    CacheResult.MISS: catalog.CACHE_MISSES,
    CacheResult.WOULD_HIT: catalog.CACHE_WOULD_HIT,
}


@dataclass(frozen=True, slots=True)
class _RequestSeries:
    """The histogram children of one (model, lane, cohort)."""

    ttft: Histogram
    tpot: Histogram
    duration: Histogram
    queue_wait: Histogram
    dispatch: Histogram
    itl_max: Histogram


class Metrics:
    """Counts, observes, and holds the last snapshot. All methods but `collect` belong to the event loop."""

    def __init__(self, spec: Spec, registry: CollectorRegistry | None = None) -> None:
        """Every series that alert rules take a rate of exists from here on, so that its first event is seen.

        `registry`: None makes one of our own. The library's global one would bring series of other packages.
        """
        self.registry = CollectorRegistry() if registry is None else registry
        self._spec = spec
        self._snapshot = Snapshot()
        self._version = version("laneway")
        self._bounds: dict[MetricDef, tuple[float, ...]] = {}
        self._counters: dict[str, Counter] = {}
        self._histograms: dict[str, Histogram] = {}
        self._children: dict[tuple[str, ...], Counter] = {}
        self._requests: dict[tuple[str, str, str], _RequestSeries] = {}
        self._compared: frozenset[str] = frozenset()
        for metric in catalog.METRICS:
            if metric.kind is catalog.Kind.COUNTER and metric not in SNAPSHOT_METRICS:
                self._counters[metric.name] = Counter(metric.name, metric.help, metric.labels, registry=self.registry)
        self._take_over(spec)
        self.registry.register(self)
        ProcessCollector(registry=self.registry)

    def set_spec(self, spec: Spec) -> None:
        """A new spec is in force. Histograms whose bounds it changes start again at 0; queries see a reset."""
        self._take_over(spec)

    def set_compared(self, cohorts: Iterable[str]) -> None:
        """The cohorts that also fill the fine histogram: those of a rollout that is on; none switches it off.

        Raises:
            ValueError: a cohort that there is not.
        """
        compared = frozenset(cohorts)
        if unknown := sorted(compared - set(catalog.COHORTS)):
            raise ValueError(f"cohorts: got {unknown}, expected some of {list(catalog.COHORTS)}")
        self._compared = compared
        fine = self._histograms[catalog.FINE_TTFT.name]
        for cohort in self._compared:
            self._create_cohort(cohort)
            for lane in self._lanes:
                for stratum in prompt_strata(self._spec):
                    fine.labels(lane, cohort, stratum)

    def hand(self, snapshot: Snapshot) -> None:
        """The picture that the next render shows. Take it on the event loop, before the render goes to a thread."""
        self._snapshot = snapshot

    def collect(self) -> Iterator[Metric]:
        """The families of the last snapshot; called by the registry, in any thread."""
        return families(self._snapshot, self._spec, self._version)

    def describe(self) -> Iterator[Metric]:
        """So that the registry can refuse a second metric of one of these names."""
        return self.collect()

    def close(self, timeline: Timeline, *, sampled: bool, now: float | None = None) -> bool:
        """Counts a request that ended. One call a request: 20–30 µs, and 8 µs more while cohorts are compared
        (tests/bench/telemetry_cost.py).

        `sampled`: its trace is recorded, so an exemplar may point at it. `now`: monotonic seconds, by default its
        closing stamp. True if one does: the server span must then carry `exemplar=true`, or the trace is lost.

        Raises:
            ValueError: the request has no outcome.
        """
        outcome = timeline.outcome
        if outcome is None:
            raise ValueError(f"{timeline.request_id}: outcome is None, expected a request that has ended")
        model, lane, cohort = self._model(timeline.model), timeline.lane, _cohort(timeline.cohort)
        settings = self._lanes.get(lane)
        if settings is None:
            lane = lane if lane == NO_LANE else catalog.OTHER
        self._count(catalog.REQUESTS, model, lane, outcome).inc()
        self._count(catalog.COHORT_REQUESTS, lane, cohort, outcome).inc()
        if timeline.output_tokens:
            self._count(catalog.OUTPUT_TOKENS, model, lane).inc(timeline.output_tokens)
        if timeline.prompt_tokens and timeline.dispatched is not None:
            self._count(catalog.PROMPT_TOKENS, model, lane).inc(timeline.prompt_tokens)
        if settings is None:
            return False
        verdict = judge(timeline, settings)
        if verdict is not NOT_COUNTED:
            self._objectives(model, lane, verdict)
            if cohort in self._compared:
                self._compare(timeline, settings)
        return self._observe(
            timeline, self._series(model, lane, cohort), sampled, timeline.closed if now is None else now
        )

    def batch_released(self, model: str, pool: str, batch: Batch) -> None:
        """A micro-batch left for a replica."""
        labels = (self._model(model), pool, batch.lane)
        self._histograms[catalog.BATCH_REQUESTS.name].labels(*labels).observe(len(batch.tickets))
        self._histograms[catalog.BATCH_TOKENS.name].labels(*labels).observe(batch.tokens)
        self._histograms[catalog.BATCH_WAIT.name].labels(*labels).observe(batch.waited)

    def retried(self, pool: str, reason: RetryReason) -> None:
        """A request goes to another replica."""
        self._count(catalog.RETRIES, pool, reason).inc()

    def estimated(self, model: str, estimated_tokens: int, actual_tokens: int) -> None:
        """The engine's `usage` said what a prompt really was. A prompt of 0 tokens tells nothing."""
        if actual_tokens > 0:
            error = abs(estimated_tokens / actual_tokens - 1.0)
            self._histograms[catalog.ESTIMATE_ERROR.name].labels(self._model(model)).observe(error)

    def cache(self, model: str, result: CacheResult) -> None:
        """The cache was asked for a request that it may answer."""
        self._count(_CACHE[result], self._model(model)).inc()

    def scaled(self, model: str, pool: str, seconds: float) -> None:
        """A new replica was ready `seconds` after a lane's queue age first broke its objective."""
        self._histograms[catalog.SCALING.name].labels(self._model(model), pool).observe(seconds)

    def client_timing(self, result: TimingResult) -> None:
        """A client's report came in."""
        self._count(catalog.CLIENT_TIMINGS, result).inc()

    def client_ttft(self, model: str | None, lane: str, cohort: str, seconds: float) -> None:
        """An accepted report's time to the first token shown. The labels are the request's own, not the client's."""
        if lane in self._lanes:
            labels = (self._model(model), lane, _cohort(cohort))
            self._histograms[catalog.CLIENT_TTFT.name].labels(*labels).observe(seconds)

    def loop_lag(self, seconds: float) -> None:
        """How late a timer of the event loop fired."""
        self._histograms[catalog.LOOP_LAG.name].observe(seconds)

    def _count(self, metric: MetricDef, *labels: str) -> Counter:
        key = (metric.name, *labels)
        child = self._children.get(key)
        if child is None:
            child = self._children[key] = self._counters[metric.name].labels(*labels)
        return child

    def _objectives(self, model: str, lane: str, verdict: Verdict) -> None:
        for objective, met in (("ttft", verdict.ttft), ("tpot", verdict.tpot), ("success", verdict.success)):
            if met is None:
                continue
            self._count(catalog.SLO, model, lane, objective).inc()
            if not met:
                self._count(catalog.SLO_MISSED, model, lane, objective).inc()
        if verdict.good:
            self._count(catalog.GOOD, model, lane).inc()

    def _compare(self, timeline: Timeline, lane: Lane) -> None:
        waited = population_ttft(timeline, lane.ttft.seconds)
        if waited is not None:
            stratum = prompt_stratum(self._spec, timeline.prompt_tokens)
            self._histograms[catalog.FINE_TTFT.name].labels(lane.name, timeline.cohort, stratum).observe(waited)

    def _observe(self, timeline: Timeline, series: _RequestSeries, sampled: bool, now: float | None) -> bool:
        # The exporter refuses labels above 128 characters only after it has counted: a trace id has 32, or is none.
        trace_id = timeline.trace_id if sampled and timeline.trace_id and len(timeline.trace_id) == 32 else None
        trace = None if trace_id is None else {"trace_id": trace_id}
        carried = False
        for histogram, limit, value in (
            (series.ttft, self._limits[0], timeline.ttft),
            (series.tpot, self._limits[1], timeline.tpot),
            (series.duration, self._limits[2], timeline.completion),
        ):
            if value is None:
                continue
            if trace is not None and now is not None and limit.take(timeline.lane, value, now):
                histogram.observe(value, trace)
                carried = True
            else:
                histogram.observe(value)
        waited = timeline.queue_wait
        if waited is None and timeline.outcome in _LEFT_THE_QUEUE and timeline.admitted is not None:
            waited = (timeline.closed or timeline.admitted) - timeline.admitted
        if waited is not None:
            series.queue_wait.observe(waited)
        if timeline.dispatched is not None and timeline.first_token is not None:
            series.dispatch.observe(timeline.first_token - timeline.dispatched)
        if timeline.itl_max is not None and timeline.streamed:
            series.itl_max.observe(timeline.itl_max)
        return carried

    def _series(self, model: str, lane: str, cohort: str) -> _RequestSeries:
        key = (model, lane, cohort)
        series = self._requests.get(key)
        if series is None:
            children = (self._histograms[metric.name].labels(*key) for metric in _PER_REQUEST)
            series = self._requests[key] = _RequestSeries(*children)
        return series

    def _model(self, model: str | None) -> str:
        if model is None:
            return catalog.NO_MODEL
        return model if model in self._models else catalog.OTHER

    def _take_over(self, spec: Spec) -> None:
        self._spec = spec
        self._lanes = {lane.name: lane for lane in spec.lanes}
        self._models = labelled_models(spec)
        old, self._bounds = self._bounds, buckets.histogram_bounds(spec)
        for metric, bounds in self._bounds.items():
            if old.get(metric) == bounds:
                continue
            if metric in old:
                self.registry.unregister(self._histograms[metric.name])
                self._requests.clear()
            self._histograms[metric.name] = Histogram(
                metric.name, metric.help, metric.labels, registry=self.registry, buckets=bounds
            )
        every = spec.telemetry.exemplar_every
        self._limits = tuple(ExemplarLimit(self._bounds[metric], every) for metric in _WITH_EXEMPLARS)
        self._create_children(spec)
        self.set_compared(self._compared)

    def _create_children(self, spec: Spec) -> None:
        for model in (*self._models, catalog.OTHER, catalog.NO_MODEL):
            for name in (*self._lanes, NO_LANE):
                for outcome in Outcome:
                    self._count(catalog.REQUESTS, model, name, outcome)
        self._create_cohort(catalog.BASELINE)
        for model in self._models:
            for cache in _CACHE.values():
                self._count(cache, model)
            for lane in spec.lanes:
                for metric in (catalog.GOOD, catalog.PROMPT_TOKENS, catalog.OUTPUT_TOKENS):
                    self._count(metric, model, lane.name)
                for objective in catalog.OBJECTIVES:
                    if objective != "tpot" or lane.tpot is not None:
                        self._count(catalog.SLO, model, lane.name, objective)
                        self._count(catalog.SLO_MISSED, model, lane.name, objective)
        for pool in spec.pools:
            for reason in RetryReason:
                self._count(catalog.RETRIES, pool.name, reason)
        for result in TimingResult:
            self._count(catalog.CLIENT_TIMINGS, result)

    def _create_cohort(self, cohort: str) -> None:
        for lane in (*self._lanes, NO_LANE):
            for outcome in Outcome:
                self._count(catalog.COHORT_REQUESTS, lane, cohort, outcome)
        for lane in self._lanes:
            for model in self._models:
                self._series(model, lane, cohort)


def _cohort(name: str) -> str:
    return name if name in catalog.COHORTS else catalog.OTHER


_PER_REQUEST = (catalog.TTFT, catalog.TPOT, catalog.DURATION, catalog.QUEUE_WAIT, catalog.DISPATCH, catalog.ITL_MAX)
"""In the order of `_RequestSeries`' fields."""

_WITH_EXEMPLARS = _PER_REQUEST[:3]
