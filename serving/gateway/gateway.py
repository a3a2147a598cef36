"""The gateway's parts and what joins them: queues, pools, counts, observers. One instance, on one event loop."""

import asyncio
import hashlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from serving.engine.client import EngineClient
from serving.engine.pools import Address, EngineLoad, Pool
from serving.gateway.cache import ResponseCache
from serving.gateway.client_timings import RecentRequests
from serving.gateway.dispatch import Dispatch
from serving.gateway.errors import RequestError
from serving.gateway.exchange import Exchange
from serving.gateway.head import Head
from serving.gateway.keys import Caller, Keys
from serving.gateway.request import Kind, ParsedRequest, parse_body
from serving.gateway.scaling import ScalingWatch
from serving.gateway.tokens import PromptCount, TokenCounter
from serving.lanes import LaneRefusedError, choose_lane
from serving.ledger import Ledger
from serving.scheduling import Batch, ReplicaView, Scheduler, make_scheduler
from serving.spec import Lane, Model, Spec
from serving.spec import Pool as PoolSpec
from serving.telemetry.catalog import RetryReason
from serving.telemetry.logs import Event, Logs
from serving.telemetry.metrics import Metrics
from serving.telemetry.runtime import RuntimeMetrics
from serving.telemetry.snapshot import Snapshot
from serving.telemetry.tracing import Tracing
from serving.timeline import Outcome

VITALS_SECONDS = 1.0

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


@dataclass(slots=True)
class _PoolState:
    """One pool as the gateway sees it; told by `Pool` of what happens there."""

    gateway: "Gateway"
    name: str
    ready: set[str] = field(default_factory=set)
    joined: set[str] = field(default_factory=set)

    def replica_joined(self, address: Address) -> None:
        self.joined.add(address.name)
        now = self.gateway.clock()
        for scheduler in self.gateway.schedulers(self.name):
            scheduler.add_replica(address.name, now)
            scheduler.set_ready(address.name, False, now)
        self.gateway.logs.event(Event.REPLICA_JOINED, pool=self.name, replica=address.name)

    def replica_left(self, address: Address) -> None:
        self.joined.discard(address.name)
        self.ready.discard(address.name)
        now = self.gateway.clock()
        for scheduler in self.gateway.schedulers(self.name):
            scheduler.remove_replica(address.name, now)
        self.gateway.logs.event(Event.REPLICA_LEFT, pool=self.name, replica=address.name)

    def replica_ready(self, address: Address, ready: bool, reason: str) -> None:
        now = self.gateway.clock()
        (self.ready.add if ready else self.ready.discard)(address.name)
        for scheduler in self.gateway.schedulers(self.name):
            scheduler.set_ready(address.name, ready, now)
        event = Event.REPLICA_READY if ready else Event.REPLICA_LOST
        self.gateway.logs.event(event, pool=self.name, replica=address.name, reason=reason)
        if ready:
            self.gateway.scaling.replica_ready(self.name, now)
        self.gateway.pump(self.name)

    def replica_load(self, address: Address, load: EngineLoad) -> None:
        now = self.gateway.clock()
        for scheduler in self.gateway.schedulers(self.name):
            scheduler.observe(
                address.name,
                now,
                running=load.running,
                waiting=load.waiting,
                prompt_tokens_total=load.prompt_tokens_total,
            )


class Gateway:
    """Everything that requests share. Made on the event loop, started and stopped by `server`."""

    def __init__(
        self,
        spec: Spec,
        client: EngineClient,
        metrics: Metrics,
        tracing: Tracing,
        logs: Logs,
        runtime: RuntimeMetrics,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.spec = spec
        self.client = client
        self.metrics = metrics
        self.tracing = tracing
        self.logs = logs
        self.runtime = runtime
        self.clock = clock
        self.draining = False
        self.ledger = Ledger(tuple(lane.name for lane in spec.lanes))
        self.keys = Keys(spec.gateway.auth)
        self.cache = ResponseCache(spec.cache, clock=clock, count=metrics.cache)
        self.recent = RecentRequests(clock)
        self.scaling = ScalingWatch(spec, metrics.scaled)
        self._counters: dict[str, TokenCounter] = {}
        self._pools: dict[str, tuple[Pool, _PoolState]] = {}
        self._dispatches: dict[tuple[str, str], Dispatch] = {}
        self._open: dict[Exchange, None] = {}
        self._vitals: asyncio.Task[None] | None = None
        self._urls: Mapping[str, tuple[str, ...]] = {}

    # --- life ----------------------------------------------------------------------------------------------------

    def start(self, urls: Mapping[str, tuple[str, ...]]) -> None:
        """Follows the pools; `urls` has each pool's replicas, those of the spec and those that were started."""
        self._urls = urls
        self._set_up(self.spec, None)
        self._vitals = asyncio.create_task(self._watch_vitals(), name="vitals")

    async def stop(self) -> None:
        """Ends probes and timers; requests must have ended."""
        if self._vitals is not None:
            self._vitals.cancel()
        for dispatch in self._dispatches.values():
            dispatch.close()
        for pool, _ in self._pools.values():
            await pool.stop()

    def drain(self) -> None:
        """No new requests; what is queued leaves; what runs may finish."""
        if not self.draining:
            self.draining = True
            self.logs.event(Event.DRAINING, requests=len(self._open))
            for dispatch in self._dispatches.values():
                dispatch.drain("the gateway is shutting down")

    def set_spec(self, spec: Spec, urls: Mapping[str, tuple[str, ...]]) -> None:
        """Takes a new spec over while requests run: lanes, pools, keys, limits. Queued requests keep their place."""
        old, self.spec, self._urls = self.spec, spec, urls
        for lane in spec.lanes:
            self.ledger.add_lane(lane.name)
        self.metrics.set_spec(spec)
        self.keys.set_auth(spec.gateway.auth)
        self.cache.set_settings(spec.cache)
        self.scaling.set_spec(spec)
        self._set_up(spec, old)
        self.logs.event(Event.SPEC_CHANGED, digest=spec.digest)

    def _set_up(self, spec: Spec, old: Spec | None) -> None:
        for model in spec.models:
            known = None if old is None else old.model(model.name)
            if model.name not in self._counters or known is None or known.tokenizer != model.tokenizer:
                self._counters[model.name] = TokenCounter(model)
        self._set_up_dispatches(spec, old)
        self._set_up_pools(spec)

    def _set_up_dispatches(self, spec: Spec, old: Spec | None) -> None:
        wanted = {(model.name, pool): spec.pool(pool) for model in spec.models for pool in model.pools}
        gone = [key for key in self._dispatches if key not in wanted]
        replaced: list[tuple[Dispatch, Dispatch | None]] = [(self._dispatches.pop(key), None) for key in gone]
        for key, pool in wanted.items():
            current = self._dispatches.get(key)
            if current is not None and old is not None and _same_policy(old, spec, pool):
                continue
            scheduler = make_scheduler(pool, spec.lanes, spec.gateway.replicas)
            self._dispatches[key] = Dispatch(key[0], key[1], scheduler, self._batch_released, self.clock)
            if pool.name in self._pools:
                state = self._pools[pool.name][1]
                for name in state.joined:
                    scheduler.add_replica(name, self.clock())
                    scheduler.set_ready(name, name in state.ready, self.clock())
            if current is not None:
                replaced.append((current, self._dispatches[key]))
        for before, after in replaced:
            if after is None:
                before.drain(f"pool {before.pool!r} no longer serves the model")
            else:
                before.move_queue(after)
            before.close()

    def _set_up_pools(self, spec: Spec) -> None:
        for name in [name for name in self._pools if name not in {pool.name for pool in spec.pools}]:
            pool, _ = self._pools.pop(name)
            task = asyncio.create_task(pool.stop(), name=f"stop pool {name}")
            task.add_done_callback(lambda done: done.exception())
        for part in spec.pools:
            urls = self._urls.get(part.name, ())
            if part.name in self._pools:
                self._pools[part.name][0].set_urls(urls)
                continue
            state = _PoolState(self, part.name)
            pool = Pool(part.name, urls, self.client, state, self.clock)
            self._pools[part.name] = (pool, state)
            pool.start()

    # --- what an exchange asks for -------------------------------------------------------------------------------

    @property
    def running(self) -> int:
        """Requests that have no outcome yet."""
        return len(self._open)

    def opened(self, exchange: Exchange) -> None:
        """An exchange begins."""
        self._open[exchange] = None

    def parse(self, raw: bytes, kind: Kind) -> ParsedRequest:
        """The checked request of a body (RequestError if it is refused)."""
        return parse_body(raw, kind, self.spec)

    def counter(self, model: str) -> TokenCounter:
        """How the model's prompts are counted."""
        return self._counters[model]

    def choose_lane(self, parsed: ParsedRequest, count: PromptCount, caller: Caller, asked: str | None) -> Lane:
        """The request's lane (RequestError if it may not have it)."""
        if caller.models is not None and parsed.model not in caller.models:
            raise RequestError(
                Outcome.REJECTED_AUTH,
                f"model is {parsed.model!r}, expected one that the API key may use: {list(caller.models)}",
                param="model",
                status=403,
            )
        model = self.spec.model(parsed.model)
        if model is not None and count.at_least >= model.max_model_len:
            raise RequestError(
                Outcome.REJECTED_INVALID,
                f"the prompt has at least {count.at_least} tokens, expected fewer than the model's "
                f"{model.max_model_len}",
                param="prompt" if parsed.kind is Kind.COMPLETION else "messages",
                code="context_length_exceeded",
            )
        try:
            return choose_lane(self.spec, count.tokens, parsed.service_tier, caller, asked)
        except LaneRefusedError as refused:
            forbidden = refused.forbidden
            outcome = Outcome.REJECTED_AUTH if forbidden else Outcome.REJECTED_INVALID
            raise RequestError(outcome, str(refused), param=refused.param, status=403 if forbidden else None) from None

    def choose_dispatch(self, parsed: ParsedRequest, head: Head) -> Dispatch:
        """The queue of the pool that serves this caller: by weight, sticky, and ready if any is."""
        model = self.spec.model(parsed.model)
        if model is None:  # a new spec came while the prompt was counted
            raise RequestError(Outcome.NO_REPLICA, "the model is no longer served", param="model", retry_after=1.0)
        pool = _sticky_pool(model, parsed.user or head.session or head.request_id)
        if not self.pool_is_ready(pool):
            ready = [name for name, weight in model.pools.items() if weight and self.pool_is_ready(name)]
            pool = ready[0] if ready else pool
        return self._dispatches[(model.name, pool)]

    def pool_is_ready(self, pool: str) -> bool:
        """At least one replica can be given work."""
        return bool(self._pools[pool][1].ready)

    def address(self, pool: str, replica: str) -> Address | None:
        """Where a replica is; None if it left."""
        return self._pools[pool][0].address(replica) if pool in self._pools else None

    def replica_failed(self, pool: str, replica: str, reason: str) -> None:
        """A request failed in a way that is the replica's fault."""
        if pool in self._pools:
            self._pools[pool][0].failed(replica, reason)

    def retried(self, exchange: Exchange, reason: RetryReason) -> None:
        """The request goes to another replica."""
        if exchange.timeline.pool is not None:
            self.metrics.retried(exchange.timeline.pool, reason)

    def store(self, exchange: Exchange, body: bytes) -> None:
        """Keeps a whole answer, if it may be kept."""
        if exchange.parsed is not None and exchange.caller is not None:
            self.cache.store(exchange.parsed, exchange.caller.name, body)

    def schedulers(self, pool: str) -> list[Scheduler]:
        """The schedulers that share a pool's replicas."""
        return [dispatch.scheduler for (_, name), dispatch in self._dispatches.items() if name == pool]

    def pump(self, pool: str) -> None:
        """Something changed that may let requests go."""
        for (_, name), dispatch in self._dispatches.items():
            if name == pool:
                dispatch.pump()

    # --- the end of a request ------------------------------------------------------------------------------------

    def ended(self, exchange: Exchange) -> None:
        """Observes a request that has its outcome: quota, estimate, metrics, spans, access line."""
        self._open.pop(exchange, None)
        timeline = exchange.timeline
        if exchange.caller is not None and exchange.quota is not None:
            used = (timeline.prompt_tokens or 0) + (timeline.output_tokens or 0)
            self.keys.settle(
                exchange.caller, exchange.quota, used if timeline.dispatched is not None else 0, self.clock()
            )
        if timeline.outcome is Outcome.COMPLETED and exchange.parsed is not None and exchange.estimate is not None:
            actual = timeline.prompt_tokens
            if actual and exchange.usage_seen:
                self._counters[exchange.parsed.model].learn(exchange.parsed, exchange.estimate, actual)
                self.metrics.estimated(exchange.parsed.model, exchange.estimate, actual)
        exemplar = self.metrics.close(timeline, sampled=exchange.trace.sampled)
        exchange.trace.finish(timeline, exemplar=exemplar)
        self.logs.access(timeline)
        if (event := _NAMED.get(timeline.outcome or Outcome.COMPLETED)) is not None:
            self.logs.event(
                event,
                request_id=timeline.request_id,
                trace_id=timeline.trace_id,
                lane=timeline.lane,
                outcome=timeline.outcome,
            )
        if exchange.caller is not None:
            self.recent.remember(timeline, exchange.caller.name)
            if timeline.outcome is Outcome.COMPLETED and exchange.parsed is not None:
                self.cache.completed(exchange.parsed, exchange.caller.name)

    def _batch_released(self, dispatch: Dispatch, batch: Batch) -> None:
        self.metrics.batch_released(dispatch.model, dispatch.pool, batch)

    # --- what observers see --------------------------------------------------------------------------------------

    def snapshot(self) -> Snapshot:
        """The picture of this instant; call it on the event loop."""
        now = self.clock()
        unanswered: dict[tuple[str, str, str], float] = {}
        for exchange in self._open:
            timeline = exchange.timeline
            if timeline.first_token is None and timeline.model and timeline.pool and timeline.received is not None:
                key = (timeline.model, timeline.pool, timeline.lane)
                unanswered[key] = max(unanswered.get(key, 0.0), now - timeline.received)
        queues = {}
        replicas: dict[tuple[str, str], ReplicaView] = {}
        for (model, pool), dispatch in self._dispatches.items():
            for lane in dispatch.scheduler.lanes():
                queues[(model, pool, lane)] = dispatch.scheduler.lane_view(lane, now)
                unanswered.setdefault((model, pool, lane), 0.0)
            for name, view in dispatch.scheduler.replica_view(now).items():
                replicas[(pool, name)] = _added(replicas.get((pool, name)), view)
        return Snapshot(
            lanes=self.ledger.snapshot(),
            queues=queues,
            unanswered=unanswered,
            replicas=replicas,
            desired={key: dispatch.scheduler.desired_replicas(now) for key, dispatch in self._dispatches.items()},
            bytes_per_token={name: counter.bytes_per_token for name, counter in self._counters.items()},
            cache_bytes=self.cache.size,
            logs_dropped=self.logs.dropped,
        )

    def readiness(self) -> tuple[bool, dict[str, object]]:
        """Whether every model has a ready replica, and what `/readyz` says."""
        ready = not self.draining and all(
            any(weight and self.pool_is_ready(pool) for pool, weight in model.pools.items())
            for model in self.spec.models
        )
        pools = {
            part.name: {
                "ready": len(self._pools[part.name][1].ready),
                "joined": len(self._pools[part.name][1].joined),
                "engine": "external" if part.start is None else part.start.engine,
                "gateway_scheduler": part.gateway_scheduler,
                "engine_scheduler": part.engine_scheduler,
            }
            for part in self.spec.pools
        }
        return ready, {
            "ready": ready,
            "draining": self.draining,
            "spec_digest": self.spec.digest,
            "models": [model.name for model in self.spec.models],
            "pools": pools,
        }

    async def _watch_vitals(self) -> None:
        due = self.clock()
        while True:
            due = max(due + VITALS_SECONDS, self.clock())
            await asyncio.sleep(due - self.clock())
            now = self.clock()
            self.metrics.loop_lag(max(0.0, now - due))
            self.runtime.loop_lag(max(0.0, now - due))
            for (model, pool), dispatch in self._dispatches.items():
                for lane in dispatch.scheduler.lanes():
                    age = dispatch.scheduler.lane_view(lane, now).oldest_age
                    self.scaling.queue_age(model, pool, lane, age, now)


def _sticky_pool(model: Model, key: str) -> str:
    total = sum(model.pools.values())
    point = int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest()) % total
    for pool, weight in model.pools.items():
        point -= weight
        if point < 0:
            return pool
    raise AssertionError("weights add up to their sum")


def _same_policy(old: Spec, new: Spec, pool: PoolSpec) -> bool:
    """Nothing changed that a scheduler was made from."""
    before = next((part for part in old.pools if part.name == pool.name), None)
    if before is None or old.lanes != new.lanes or old.gateway.replicas != new.gateway.replicas:
        return False
    unscheduled = {"replicas": (), "start": None}
    return before.model_copy(update=unscheduled) == pool.model_copy(update=unscheduled)


def _added(one: ReplicaView | None, other: ReplicaView) -> ReplicaView:
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
