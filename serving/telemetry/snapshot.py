"""What the gateway's gauges show: one frozen picture, taken on the event loop and rendered anywhere.

Counts that must add up (conservation) are only right when they are read at one instant between two callbacks of the
loop. So the gateway makes a `Snapshot` there, and the render in a thread reads that and nothing that moves.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily
from prometheus_client.metrics_core import Metric

from serving.ledger import NO_LANE, LaneCount
from serving.scheduling.ticket import LaneView, ReplicaView
from serving.spec import Spec
from serving.telemetry import catalog
from serving.telemetry.catalog import Kind, MetricDef

Labels = TypeVar("Labels", bound=tuple[str, ...])

SNAPSHOT_METRICS = frozenset({catalog.RECEIVED, catalog.BREACHES, catalog.LOGS_DROPPED})
"""Counters that are rendered from counts kept elsewhere, instead of being counted here."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The gateway at one instant. Empty parts render as no series."""

    lanes: Mapping[str, LaneCount] = field(default_factory=dict)
    """`Ledger.snapshot()`, lane `none` included."""
    queues: Mapping[tuple[str, str, str], LaneView] = field(default_factory=dict)
    """(model, pool, lane): its view."""
    unanswered: Mapping[tuple[str, str, str], float] = field(default_factory=dict)
    """(model, pool, lane): seconds since receipt of the oldest request that has seen no content; 0 for none."""
    replicas: Mapping[tuple[str, str], ReplicaView] = field(default_factory=dict)
    """(pool, replica): its view, all models of the pool together."""
    desired: Mapping[tuple[str, str], int] = field(default_factory=dict)
    """(model, pool): replicas that the load needs."""
    bytes_per_token: Mapping[str, float] = field(default_factory=dict)
    """model: the learned ratio."""
    cache_bytes: int = 0
    logs_dropped: int = 0
    rollout: tuple[str, str] | None = None
    """(run id, stage) of the rollout that is on."""


def labelled_models(spec: Spec) -> tuple[str, ...]:
    """The models that are label values; all others are `other`."""
    return tuple(model.name for model in spec.models)[: spec.telemetry.max_models]


def families(snapshot: Snapshot, spec: Spec, version: str) -> Iterator[Metric]:
    """The metric families of a snapshot and of the spec in force."""
    yield from _conservation(snapshot.lanes)
    models = frozenset(labelled_models(spec))
    yield from _queues(snapshot, models)
    yield from _replicas(snapshot, spec)
    yield _family(catalog.DESIRED, _capped(snapshot.desired, models, sum))
    # No mean of ratios is the ratio of what stands behind them: models without a label show none.
    ratios = {(model,): value for model, value in snapshot.bytes_per_token.items() if model in models}
    yield _family(catalog.BYTES_PER_TOKEN, ratios)
    yield _family(catalog.CACHE_BYTES, {(): snapshot.cache_bytes})
    yield _family(catalog.LOGS_DROPPED, {(): snapshot.logs_dropped})
    yield from _spec(spec)
    yield _info(catalog.BUILD_INFO, (version,))
    if snapshot.rollout is not None:
        yield _info(catalog.ROLLOUT_INFO, snapshot.rollout)


def _conservation(lanes: Mapping[str, LaneCount]) -> Iterator[Metric]:
    known = {name: count for name, count in lanes.items() if name != NO_LANE}
    none = lanes.get(NO_LANE)
    received: dict[tuple[str, ...], float] = {(name,): count.received for name, count in known.items()}
    if none is not None:
        # A request that gets its lane leaves `none`: only those that ended there make a count that never falls.
        received[(NO_LANE,)] = sum(none.outcomes.values())
        yield _family(catalog.UNCLASSIFIED, {(): none.queued + none.running})
    yield _family(catalog.RECEIVED, received)
    yield _family(catalog.QUEUED, {(name,): count.queued for name, count in known.items()})
    yield _family(catalog.RUNNING, {(name,): count.running for name, count in known.items()})
    yield _family(catalog.DRIFT, {(name,): count.drift for name, count in lanes.items()})


def _queues(snapshot: Snapshot, models: frozenset[str]) -> Iterator[Metric]:
    views = snapshot.queues
    measured = {key: view.drain_rate for key, view in views.items() if view.drain_rate is not None}
    ages = {key: view.oldest_age for key, view in views.items()}
    yield _family(catalog.QUEUE_OLDEST, _capped(ages, models, max))
    yield _family(catalog.OLDEST_UNANSWERED, _capped(snapshot.unanswered, models, max))
    for metric, values in (
        (catalog.QUEUE_TOKENS, {key: view.queued_tokens for key, view in views.items()}),
        (catalog.BREACHES, {key: view.breaches for key, view in views.items()}),
        (catalog.DRAIN_RATE, measured),
        (catalog.DEFICIT, {key: view.deficit for key, view in views.items()}),
        (catalog.BUCKET_TOKENS, {key: view.bucket_tokens for key, view in views.items()}),
    ):
        yield _family(metric, _capped(values, models, sum))


def _replicas(snapshot: Snapshot, spec: Spec) -> Iterator[Metric]:
    ready: dict[tuple[str, ...], float] = {}
    in_flight: dict[tuple[str, ...], float] = {}
    outstanding: dict[tuple[str, ...], float] = {}
    in_pool: dict[tuple[str, ...], float] = {(pool.name,): 0 for pool in spec.pools}
    names: dict[str, set[str]] = {}
    for (pool, name), view in sorted(snapshot.replicas.items()):
        seen = names.setdefault(pool, set())
        if len(seen) < spec.telemetry.max_replicas:
            seen.add(name)
        key = (pool, name if name in seen else catalog.OTHER)
        ready[key] = ready.get(key, 0) + view.ready
        in_flight[key] = in_flight.get(key, 0) + view.in_flight
        outstanding[key] = outstanding.get(key, 0) + view.outstanding_tokens
        in_pool[(pool,)] = in_pool.get((pool,), 0) + view.ready
    yield _family(catalog.REPLICA_READY, ready)
    yield _family(catalog.REPLICA_IN_FLIGHT, in_flight)
    yield _family(catalog.REPLICA_TOKENS, outstanding)
    yield _family(catalog.POOL_READY, in_pool)


def _spec(spec: Spec) -> Iterator[Metric]:
    seconds: dict[tuple[str, ...], float] = {}
    shares: dict[tuple[str, ...], float] = {}
    for lane in spec.lanes:
        for name, objective in (("ttft", lane.ttft), ("tpot", lane.tpot)):
            if objective is not None:
                seconds[(lane.name, name)] = objective.seconds
                shares[(lane.name, name)] = objective.share
        shares[(lane.name, "success")] = lane.success
    yield _family(catalog.OBJECTIVE_SECONDS, seconds)
    yield _family(catalog.OBJECTIVE_SHARE, shares)
    yield _family(catalog.WAIT_LIMIT, {(lane.name,): float(f"{lane.wait_limit:.12g}") for lane in spec.lanes})
    yield _family(catalog.DEADLINE, {(lane.name,): lane.deadline for lane in spec.lanes})
    yield _info(catalog.SPEC_INFO, (spec.digest,))


def _capped(
    values: Mapping[Labels, float], models: frozenset[str], together: Callable[[Iterable[float]], float]
) -> dict[tuple[str, ...], float]:
    """The same by (model, …), with those models that have no label of their own under one."""
    found: dict[tuple[str, ...], list[float]] = {}
    for (model, *rest), value in values.items():
        found.setdefault((model if model in models else catalog.OTHER, *rest), []).append(value)
    return {labels: together(several) for labels, several in found.items()}


def _family(metric: MetricDef, values: Mapping[Labels, float]) -> Metric:
    kind = CounterMetricFamily if metric.kind is Kind.COUNTER else GaugeMetricFamily
    family = kind(metric.name, metric.help, labels=metric.labels)
    for labels, value in values.items():
        family.add_metric(labels, value)
    return family


def _info(metric: MetricDef, labels: tuple[str, ...]) -> Metric:
    name = metric.name.removesuffix("_info")
    return InfoMetricFamily(name, metric.help, value=dict(zip(metric.labels, labels, strict=True)))
