"""The gateway's parts and what joins them: queues, pools, counts, observers. One instance, on one event loop."""

import asyncio
import time
from collections.abc import Callable, Mapping

from serving.engine.client import EngineClient
from serving.engine.pools import Address, Pool
from serving.gateway.cache import ResponseCache
from serving.gateway.client_timings import RecentRequests
from serving.gateway.dispatch import Dispatch
from serving.gateway.errors import RequestError
from serving.gateway.exchange import Exchange
from serving.gateway.head import Head
from serving.gateway.keys import Keys
from serving.gateway.observation import observe_end
from serving.gateway.placing import sticky_pool
from serving.gateway.pool_state import PoolState
from serving.gateway.request import Kind, ParsedRequest, parse_body
from serving.gateway.scaling import ScalingWatch
from serving.gateway.tokens import TokenCounter
from serving.ledger import Ledger
from serving.scheduling import Batch, Scheduler, make_scheduler
from serving.spec import Pool as PoolSpec
from serving.spec import Spec
from serving.telemetry.catalog import RetryReason
from serving.telemetry.logs import Event, Logs
from serving.telemetry.metrics import Metrics
from serving.telemetry.runtime import RuntimeMetrics
from serving.telemetry.tracing import Tracing
from serving.timeline import Outcome

VITALS_SECONDS = 1.0


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
        self.counters: dict[str, TokenCounter] = {}
        self.pools: dict[str, tuple[Pool, PoolState]] = {}
        self.dispatches: dict[tuple[str, str], Dispatch] = {}
        self.open: dict[Exchange, None] = {}
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
        for dispatch in self.dispatches.values():
            dispatch.close()
        for pool, _ in self.pools.values():
            await pool.stop()

    def drain(self) -> None:
        """No new requests; what is queued leaves; what runs may finish."""
        if not self.draining:
            self.draining = True
            self.logs.event(Event.DRAINING, requests=len(self.open))
            for dispatch in self.dispatches.values():
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
            if model.name not in self.counters or known is None or known.tokenizer != model.tokenizer:
                self.counters[model.name] = TokenCounter(model)
        self._set_up_dispatches(spec, old)
        self._set_up_pools(spec)

    def _set_up_dispatches(self, spec: Spec, old: Spec | None) -> None:
        wanted = {(model.name, pool): spec.pool(pool) for model in spec.models for pool in model.pools}
        gone = [key for key in self.dispatches if key not in wanted]
        replaced: list[tuple[Dispatch, Dispatch | None]] = [(self.dispatches.pop(key), None) for key in gone]
        for key, pool in wanted.items():
            current = self.dispatches.get(key)
            if current is not None and old is not None and _same_policy(old, spec, pool):
                continue
            scheduler = make_scheduler(pool, spec.lanes, spec.gateway.replicas)
            self.dispatches[key] = Dispatch(key[0], key[1], scheduler, self._batch_released, self.clock)
            if pool.name in self.pools:
                state = self.pools[pool.name][1]
                for name in state.joined:
                    scheduler.add_replica(name, self.clock())
                    scheduler.set_ready(name, name in state.ready, self.clock())
            if current is not None:
                replaced.append((current, self.dispatches[key]))
        for before, after in replaced:
            if after is None:
                before.drain(f"pool {before.pool!r} no longer serves the model")
            else:
                before.move_queue(after)
            before.close()

    def _set_up_pools(self, spec: Spec) -> None:
        for name in [name for name in self.pools if name not in {pool.name for pool in spec.pools}]:
            pool, _ = self.pools.pop(name)
            task = asyncio.create_task(pool.stop(), name=f"stop pool {name}")
            task.add_done_callback(lambda done: done.exception())
        for part in spec.pools:
            urls = self._urls.get(part.name, ())
            if part.name in self.pools:
                self.pools[part.name][0].set_urls(urls)
                continue
            state = PoolState(self, part.name)
            pool = Pool(part.name, urls, self.client, state, self.clock)
            self.pools[part.name] = (pool, state)
            pool.start()

    # --- what an exchange asks for -------------------------------------------------------------------------------

    @property
    def running(self) -> int:
        """Requests that have no outcome yet."""
        return len(self.open)

    def opened(self, exchange: Exchange) -> None:
        """An exchange begins."""
        self.open[exchange] = None

    def parse(self, raw: bytes, kind: Kind) -> ParsedRequest:
        """The checked request of a body (RequestError if it is refused)."""
        return parse_body(raw, kind, self.spec)

    def counter(self, model: str) -> TokenCounter:
        """How the model's prompts are counted."""
        return self.counters[model]

    def choose_dispatch(self, parsed: ParsedRequest, head: Head) -> Dispatch:
        """The queue of the pool that serves this caller: by weight, sticky, and ready if any is."""
        model = self.spec.model(parsed.model)
        if model is None:  # a new spec came while the prompt was counted
            raise RequestError(Outcome.NO_REPLICA, "the model is no longer served", param="model", retry_after=1.0)
        pool = sticky_pool(model, parsed.user or head.session or head.request_id)
        if not self.pool_is_ready(pool):
            ready = [name for name, weight in model.pools.items() if weight and self.pool_is_ready(name)]
            pool = ready[0] if ready else pool
        return self.dispatches[(model.name, pool)]

    def pool_is_ready(self, pool: str) -> bool:
        """At least one replica can be given work."""
        return bool(self.pools[pool][1].ready)

    def address(self, pool: str, replica: str) -> Address | None:
        """Where a replica is; None if it left."""
        return self.pools[pool][0].address(replica) if pool in self.pools else None

    def replica_failed(self, pool: str, replica: str, reason: str) -> None:
        """A request failed in a way that is the replica's fault."""
        if pool in self.pools:
            self.pools[pool][0].failed(replica, reason)

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
        return [dispatch.scheduler for (_, name), dispatch in self.dispatches.items() if name == pool]

    def pump(self, pool: str) -> None:
        """Something changed that may let requests go."""
        for (_, name), dispatch in self.dispatches.items():
            if name == pool:
                dispatch.pump()

    def ended(self, exchange: Exchange) -> None:
        """It has its outcome, and holds nothing any more."""
        self.open.pop(exchange, None)
        observe_end(self, exchange)

    def _batch_released(self, dispatch: Dispatch, batch: Batch) -> None:
        self.metrics.batch_released(dispatch.model, dispatch.pool, batch)

    async def _watch_vitals(self) -> None:
        due = self.clock()
        while True:
            due = max(due + VITALS_SECONDS, self.clock())
            await asyncio.sleep(due - self.clock())
            now = self.clock()
            self.metrics.loop_lag(max(0.0, now - due))
            self.runtime.loop_lag(max(0.0, now - due))
            for (model, pool), dispatch in self.dispatches.items():
                for lane in dispatch.scheduler.lanes():
                    age = dispatch.scheduler.lane_view(lane, now).oldest_age
                    self.scaling.queue_age(model, pool, lane, age, now)


def _same_policy(old: Spec, new: Spec, pool: PoolSpec) -> bool:
    """Nothing changed that a scheduler was made from."""
    before = next((part for part in old.pools if part.name == pool.name), None)
    if before is None or old.lanes != new.lanes or old.gateway.replicas != new.gateway.replicas:
        return False
    unscheduled = {"replicas": (), "start": None}
    return before.model_copy(update=unscheduled) == pool.model_copy(update=unscheduled)
