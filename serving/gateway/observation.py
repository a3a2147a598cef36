"""What observers are told: the end of each request, the picture of an instant, readiness."""

from typing import TYPE_CHECKING

from serving.scheduling import ReplicaView
from serving.telemetry.logs import Event
from serving.telemetry.snapshot import Snapshot
from serving.timeline import Outcome

if TYPE_CHECKING:
    from serving.gateway.exchange import Exchange
    from serving.gateway.gateway import Gateway

_NAMED = {
    Outcome.CANCELLED: Event.REQUEST_CANCELLED,
    Outcome.ENGINE_TIMEOUT: Event.REQUEST_TIMED_OUT,
    Outcome.EXPIRED: Event.REQUEST_TIMED_OUT,
    **dict.fromkeys(
        (
            Outcome.REJECTED_FULL,
            Outcome.REJECTED_INFEASIBLE,
            Outcome.REJECTED_QUOTA,
            Outcome.REJECTED_INVALID,
            Outcome.REJECTED_AUTH,
            Outcome.REJECTED_ENGINE,
            Outcome.NO_REPLICA,
        ),
        Event.REQUEST_REFUSED,
    ),
}
"""The event that an outcome is besides its access line."""


def observe_end(gateway: "Gateway", exchange: "Exchange") -> None:
    """Tells everybody of a request that has its outcome: quota, estimate, metrics, spans, access line."""
    timeline = exchange.timeline
    if exchange.caller is not None and exchange.quota is not None:
        used = (timeline.prompt_tokens or 0) + (timeline.output_tokens or 0)
        gateway.keys.settle(
            exchange.caller, exchange.quota, used if timeline.dispatched is not None else 0, gateway.clock()
        )
    if timeline.outcome is Outcome.COMPLETED and exchange.parsed is not None and exchange.estimate is not None:
        actual = timeline.prompt_tokens
        if actual and exchange.usage_seen:
            gateway.counter(exchange.parsed.model).learn(exchange.parsed, exchange.estimate, actual)
            gateway.metrics.estimated(exchange.parsed.model, exchange.estimate, actual)
    exemplar = gateway.metrics.close(timeline, sampled=exchange.trace.sampled)
    exchange.trace.finish(timeline, exemplar=exemplar)
    gateway.logs.access(timeline)
    if (event := _NAMED.get(timeline.outcome or Outcome.COMPLETED)) is not None:
        gateway.logs.event(
            event,
            request_id=timeline.request_id,
            trace_id=timeline.trace_id,
            lane=timeline.lane,
            outcome=timeline.outcome,
        )
    if exchange.caller is not None:
        gateway.recent.remember(timeline, exchange.caller.name)
        if timeline.outcome is Outcome.COMPLETED and exchange.parsed is not None:
            gateway.cache.completed(exchange.parsed, exchange.caller.name)


def take_snapshot(gateway: "Gateway") -> Snapshot:
    """The picture of this instant; call it on the event loop."""
    now = gateway.clock()
    unanswered: dict[tuple[str, str, str], float] = {}
    for exchange in gateway.open:
        timeline = exchange.timeline
        if timeline.first_token is None and timeline.model and timeline.pool and timeline.received is not None:
            key = (timeline.model, timeline.pool, timeline.lane)
            unanswered[key] = max(unanswered.get(key, 0.0), now - timeline.received)
    queues = {}
    replicas: dict[tuple[str, str], ReplicaView] = {}
    for (model, pool), dispatch in gateway.dispatches.items():
        for lane in dispatch.scheduler.lanes():
            queues[(model, pool, lane)] = dispatch.scheduler.lane_view(lane, now)
            unanswered.setdefault((model, pool, lane), 0.0)
        for name, view in dispatch.scheduler.replica_view(now).items():
            replicas[(pool, name)] = _together(replicas.get((pool, name)), view)
    return Snapshot(
        lanes=gateway.ledger.snapshot(),
        queues=queues,
        unanswered=unanswered,
        replicas=replicas,
        desired={key: dispatch.scheduler.desired_replicas(now) for key, dispatch in gateway.dispatches.items()},
        bytes_per_token={name: counter.bytes_per_token for name, counter in gateway.counters.items()},
        cache_bytes=gateway.cache.size,
        logs_dropped=gateway.logs.dropped,
    )


def readiness(gateway: "Gateway") -> tuple[bool, dict[str, object]]:
    """Whether every model has a ready replica, and what `/readyz` says."""
    ready = not gateway.draining and all(
        any(weight and gateway.pool_is_ready(pool) for pool, weight in model.pools.items())
        for model in gateway.spec.models
    )
    pools = {
        part.name: {
            "ready": len(gateway.pools[part.name][1].ready),
            "joined": len(gateway.pools[part.name][1].joined),
            "engine": "external" if part.start is None else part.start.engine,
            "gateway_scheduler": part.gateway_scheduler,
            "engine_scheduler": part.engine_scheduler,
        }
        for part in gateway.spec.pools
    }
    return ready, {
        "ready": ready,
        "draining": gateway.draining,
        "spec_digest": gateway.spec.digest,
        "models": [model.name for model in gateway.spec.models],
        "pools": pools,
    }


def _together(one: ReplicaView | None, other: ReplicaView) -> ReplicaView:
    """Two models' shares of one replica."""
    if one is None:
        return other
    return ReplicaView(
        ready=one.ready and other.ready,
        in_flight=one.in_flight + other.in_flight,
        outstanding_tokens=one.outstanding_tokens + other.outstanding_tokens,
        large_seats_used=one.large_seats_used + other.large_seats_used,
        prefill_rate=one.prefill_rate if other.prefill_rate is None else other.prefill_rate,
    )
