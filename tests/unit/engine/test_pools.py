"""Pools: who belongs to them and who can be given work, against real replicas on loopback."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from serving.engine import pools
from serving.engine.client import EngineClient
from serving.engine.pools import STALLED_SECONDS, Address, EngineLoad, Pool


class _Replica:
    """A replica of which a test says how it is."""

    def __init__(self) -> None:
        self.models: Any = {"data": [{"id": "tiny"}]}
        self.status = 200
        self.fails = 0
        """So many probes get a 500."""
        self.running = 0
        self.tokens = 0
        self.port = 0
        self.hosts: set[str] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def name(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def _models(self, request: web.Request) -> web.Response:
        self.hosts.add(request.host)
        if isinstance(self.models, str):
            return web.Response(text=self.models, status=self.status)
        return web.json_response(self.models, status=self.status)

    async def _metrics(self, request: web.Request) -> web.Response:
        text = f'vllm:num_requests_running{{engine="0"}} {self.running}\nvllm:prompt_tokens_total {self.tokens}\n'
        self.fails -= 1
        return web.Response(text=text, status=self.status if self.fails < 0 else 500)

    @asynccontextmanager
    async def listening(self, host: str = "127.0.0.1") -> AsyncIterator["_Replica"]:
        app = web.Application()
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/metrics", self._metrics)
        runner = web.AppRunner(app, shutdown_timeout=0)
        await runner.setup()
        await web.TCPSite(runner, host, self.port, reuse_address=True).start()
        self.port = runner.addresses[0][1]
        try:
            yield self
        finally:
            await runner.cleanup()


class _Listener:
    """Remembers what it was told, in order, and wakes who waits for it."""

    def __init__(self) -> None:
        self.told: list[tuple[str, str]] = []
        self.reasons: list[str] = []
        self.loads: list[EngineLoad] = []
        self._changed = asyncio.Condition()

    def replica_joined(self, address: Address) -> None:
        self._tell("joined", address)

    def replica_left(self, address: Address) -> None:
        self._tell("left", address)

    def replica_ready(self, address: Address, ready: bool, reason: str) -> None:
        self.reasons.append(reason)
        self._tell("ready" if ready else "lost", address)

    def replica_load(self, address: Address, load: EngineLoad) -> None:
        self.loads.append(load)

    def _tell(self, what: str, address: Address) -> None:
        self.told.append((what, address.name))

    async def until(self, condition: Callable[[], bool]) -> None:
        """Fails after two seconds."""
        async with asyncio.timeout(2):
            while not condition():  # noqa: ASYNC110 - what is waited for is many things, and none of them tells
                await asyncio.sleep(0.005)


class _Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture(autouse=True)
def _fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pools, "PROBE_SECONDS", 0.01)
    monkeypatch.setattr(pools, "RESOLVE_SECONDS", 0.01)


@asynccontextmanager
async def _pool(*urls: str, clock: Callable[[], float] = time.monotonic) -> AsyncIterator[tuple[Pool, _Listener]]:
    listener = _Listener()
    async with EngineClient(1.0) as client, Pool("baseline", urls, client, listener, clock).running() as pool:
        yield pool, listener


async def test_a_replica_is_ready_once_it_serves_and_not_before() -> None:
    """Work sent to an engine that still loads its weights waits for minutes."""
    replica = _Replica()
    replica.status = 503
    async with replica.listening(), _pool(replica.url) as (pool, listener):
        await listener.until(lambda: bool(replica.hosts))
        assert listener.told == [("joined", replica.name)]
        assert pool.served() == frozenset()
        replica.status = 200
        await listener.until(lambda: len(listener.told) == 2)
        assert listener.told[1] == ("ready", replica.name)
        assert pool.served() == {"tiny"}
        assert pool.address(replica.name) == Address(replica.name, replica.url)
        assert pool.address("127.0.0.1:1") is None


@pytest.mark.parametrize("models", ["<html>", "", [], {"data": None}, {"data": [{"name": "x"}]}, {"data": [7]}, 7])
async def test_a_replica_that_answers_nonsense_is_not_ready_and_is_asked_again(models: Any) -> None:
    """A probe that dies of nonsense would never find out that the replica got well."""
    replica = _Replica()
    replica.models = models
    async with replica.listening(), _pool(replica.url) as (pool, listener):
        await listener.until(lambda: bool(replica.hosts))
        await asyncio.sleep(0.05)
        assert listener.told == [("joined", replica.name)]
        replica.models = {"data": [{"id": "tiny"}]}
        await listener.until(lambda: pool.served() == {"tiny"})


async def test_a_replica_that_dies_is_lost_and_found_again() -> None:
    """Requests would be sent to a dead address, or never again to one that was restarted."""
    replica = _Replica()
    async with _pool() as (pool, listener):
        async with replica.listening():
            pool.set_urls([replica.url])
            await listener.until(lambda: listener.told[-1:] == [("ready", replica.name)])
        await listener.until(lambda: listener.told[-1] == ("lost", replica.name))
        assert listener.reasons[-1].startswith("probe: ")
        assert pool.address(replica.name) is not None, "it belongs to the pool still"
        async with replica.listening():
            await listener.until(lambda: listener.told[-1] == ("ready", replica.name))


async def test_a_probe_or_two_that_fail_lose_no_replica() -> None:
    """A single slow answer would empty the pool in the middle of a burst."""
    replica = _Replica()
    async with replica.listening(), _pool(replica.url) as (_, listener):
        await listener.until(lambda: len(listener.told) == 2)
        for fails in (2, 1, 2):
            replica.fails = fails
            await _probes(listener)
            assert replica.fails < 0
        assert [what for what, _ in listener.told] == ["joined", "ready"]
        replica.fails = 3
        await listener.until(lambda: ("lost", replica.name) in listener.told)


async def test_a_replica_that_holds_requests_and_computes_nothing_is_lost() -> None:
    """`/health` of an engine that hangs says 200: requests would go there until somebody looks."""
    replica, clock = _Replica(), _Clock()
    replica.running, replica.tokens = 2, 100
    async with replica.listening(), _pool(replica.url, clock=clock) as (_, listener):
        await listener.until(lambda: len(listener.loads) > 1)
        clock.now += STALLED_SECONDS
        await _probes(listener)
        assert listener.told[-1] == ("ready", replica.name)
        clock.now += 1
        await listener.until(lambda: listener.told[-1] == ("lost", replica.name))
        assert listener.reasons[-1] == "no token for 31 s with requests waiting"
        await _probes(listener)
        assert listener.told[-1] == ("lost", replica.name), "that it answers probes does not make it well"
        replica.tokens += 1
        await listener.until(lambda: listener.told[-1] == ("ready", replica.name))


async def test_a_replica_at_rest_is_not_stalled() -> None:
    """A pool that nobody uses at night would be lost by morning."""
    replica, clock = _Replica(), _Clock()
    async with replica.listening(), _pool(replica.url, clock=clock) as (_, listener):
        await listener.until(lambda: len(listener.loads) > 1)
        for _ in range(3):
            clock.now += STALLED_SECONDS
            await _probes(listener)
        replica.running = 1
        await _probes(listener)
        assert [what for what, _ in listener.told] == ["joined", "ready"]


async def _probes(listener: _Listener) -> None:
    """Two probes that began after now."""
    seen = len(listener.loads)
    await listener.until(lambda: len(listener.loads) > seen + 1)


async def test_the_load_is_told_with_every_probe() -> None:
    """Credit is corrected by it."""
    replica = _Replica()
    async with replica.listening(), _pool(replica.url) as (_, listener):
        replica.running, replica.tokens = 5, 70
        await listener.until(lambda: EngineLoad(5, 0, 70, 0) in listener.loads)


async def test_requests_that_fail_lose_a_replica_before_its_probe_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two probes a hundred requests could be sent to a replica that is gone."""
    monkeypatch.setattr(pools, "PROBE_SECONDS", 0.2)
    replica = _Replica()
    async with replica.listening(), _pool(replica.url) as (pool, listener):
        await listener.until(lambda: len(listener.told) == 2)
        pool.failed("127.0.0.1:1", "not one of ours")
        for _ in range(3):
            assert listener.told[-1][0] == "ready"
            pool.failed(replica.name, "unreachable")
        assert (listener.told[-1], listener.reasons[-1]) == (("lost", replica.name), "unreachable")
        await listener.until(lambda: listener.told[-1] == ("ready", replica.name))


async def test_replicas_join_and_leave_while_the_pool_runs() -> None:
    """A scaled pool would need a restart of the gateway."""
    async with AsyncExitStack() as stack:
        one, two = [await stack.enter_async_context(_Replica().listening()) for _ in range(2)]
        pool, listener = await stack.enter_async_context(_pool(one.url))
        await listener.until(lambda: ("ready", one.name) in listener.told)
        pool.set_urls([one.url, two.url])
        await listener.until(lambda: ("ready", two.name) in listener.told)
        pool.set_urls([two.url])
        await listener.until(lambda: ("left", one.name) in listener.told)
        assert pool.address(one.name) is None
        loads = len(listener.loads)
        await listener.until(lambda: len(listener.loads) > loads)
        assert listener.told.count(("joined", two.name)) == 1, "who stays is not told anew"
        pool.set_urls([])
        await listener.until(lambda: listener.told[-1] == ("left", two.name))


async def test_one_name_stands_for_many_replicas_and_follows_dns(monkeypatch: pytest.MonkeyPatch) -> None:
    """A headless service is how replicas scale: each address is one, and is asked by the service's name."""
    loop = asyncio.get_running_loop()
    addresses: dict[str, list[str]] = {"engines.test": ["127.0.0.2", "127.0.0.1"]}

    async def lookup(host: str, port: int, **_: Any) -> list[Any]:
        if not addresses.get(host):
            raise OSError("no such name")
        return [(2, 1, 6, "", (address, port)) for address in addresses[host]]

    monkeypatch.setattr(loop, "getaddrinfo", lookup)
    one, two = _Replica(), _Replica()
    async with one.listening("127.0.0.1"):
        two.port = one.port
        url = f"http://engines.test:{one.port}"
        async with two.listening("127.0.0.2"), _pool(url, "http://127.0.0.1:1") as (pool, listener):
            names = [f"127.0.0.{i}:{one.port}" for i in (1, 2)]
            await listener.until(lambda: {("ready", name) for name in names} <= set(listener.told))
            assert one.hosts == two.hosts == {f"engines.test:{one.port}"}
            addresses["engines.test"] = []
            await asyncio.sleep(0.05)
            assert pool.address(names[1]) is not None, "a failed lookup says nothing of the replicas"
            addresses["engines.test"] = ["127.0.0.1"]
            await listener.until(lambda: ("left", names[1]) in listener.told)
            assert ("left", names[0]) not in listener.told
            pool.set_urls([f"http://127.0.0.1:{one.port}"])
            await listener.until(lambda: listener.told.count(("ready", names[0])) == 2)
            assert pool.address(names[0]) == Address(names[0], f"http://127.0.0.1:{one.port}"), "no name now"


async def test_a_stopped_pool_leaves_no_task_behind() -> None:
    """A pool that a spec took out would probe its replicas for ever."""
    before = asyncio.all_tasks()
    replica = _Replica()
    async with replica.listening():
        async with _pool(replica.url) as (_, listener):
            await listener.until(lambda: bool(listener.loads))
        left = {task.get_name() for task in asyncio.all_tasks() - before}
    assert not [name for name in left if name.startswith(("probe", "pool"))]
