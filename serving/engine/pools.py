"""Which replicas a pool has, and which of them can be given work.

Membership comes from the spec and from DNS (one name may stand for many addresses) and changes at run time. Readiness
comes from the engine's own progress: a replica is ready once it answers `/v1/models`, and it is lost when it cannot
be reached, or when it holds requests and none of its token counters has moved for `STALLED_SECONDS`. `/health` alone
says only that the engine's process has not died.
"""

import asyncio
import ipaddress
import re
import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Protocol
from urllib.parse import urlsplit

import orjson

from serving.engine.client import EngineClient, ReplicaUnreachableError, ReplyBrokenError

PROBE_SECONDS = 1.0
PROBE_TIMEOUT_SECONDS = 5.0
RESOLVE_SECONDS = 5.0
LOST_AFTER_FAILURES = 3
STALLED_SECONDS = 30.0

_NOT_AN_ENGINE = (ValueError, LookupError, TypeError, ArithmeticError)
"""What reading the answers of something that is no engine may raise."""

_COUNTERS = re.compile(
    rb"^(vllm:(?:num_requests_running|num_requests_waiting|prompt_tokens_total|generation_tokens_total))"
    rb"(?:\{.*?\})? ([0-9.eE+-]+)",
    re.MULTILINE,
)


@dataclass(frozen=True, slots=True)
class Address:
    """Where a replica is: `name` identifies the instance, `base` is its URL without /v1."""

    name: str
    base: str
    host: str | None = None
    """The Host header, where `base` holds an address that DNS gave."""
    server_name: str | None = None
    """The TLS name, likewise."""


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """What a replica's `/metrics` says: requests, and tokens since its start."""

    running: int
    waiting: int
    prompt_tokens_total: float
    generation_tokens_total: float


def parse_load(exposition: bytes) -> EngineLoad:
    """The load figures of a vLLM exposition, engines of one server added up; a missing figure counts as 0."""
    sums: dict[bytes, float] = {}
    for name, value in _COUNTERS.findall(exposition):
        sums[name] = sums.get(name, 0.0) + float(value)
    return EngineLoad(
        running=int(sums.get(b"vllm:num_requests_running", 0)),
        waiting=int(sums.get(b"vllm:num_requests_waiting", 0)),
        prompt_tokens_total=sums.get(b"vllm:prompt_tokens_total", 0.0),
        generation_tokens_total=sums.get(b"vllm:generation_tokens_total", 0.0),
    )


class PoolListener(Protocol):
    """Who is told of a pool's replicas; all calls come on the event loop."""

    def replica_joined(self, address: Address) -> None:
        """A replica belongs to the pool now; it is not ready yet."""

    def replica_left(self, address: Address) -> None:
        """It belongs to the pool no more; what runs there may end."""

    def replica_ready(self, address: Address, ready: bool, reason: str) -> None:
        """Its readiness changed."""

    def replica_load(self, address: Address, load: EngineLoad) -> None:
        """It answered a probe."""


@dataclass(slots=True)
class _Member:
    address: Address
    probe: asyncio.Task[None]
    ready: bool = False
    failures: int = 0
    progress: float = 0.0
    progressed_at: float = 0.0
    served: frozenset[str] = field(default_factory=frozenset)


class Pool:
    """The replicas of one pool. `urls` are followed as given and resolved every `RESOLVE_SECONDS`."""

    def __init__(
        self,
        name: str,
        urls: Iterable[str],
        client: EngineClient,
        listener: PoolListener,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = name
        self._urls = tuple(urls)
        self._client = client
        self._listener = listener
        self._clock = clock
        self._members: dict[str, _Member] = {}
        self._resolved: dict[str, list[Address]] = {}
        self._follow_task: asyncio.Task[None] | None = None

    @asynccontextmanager
    async def running(self) -> AsyncIterator["Pool"]:
        """Follows membership and readiness until the block ends."""
        self.start()
        try:
            yield self
        finally:
            await self.stop()

    def start(self) -> None:
        """Starts to follow."""
        self._follow_task = asyncio.create_task(self._follow(), name=f"pool {self.name}")

    async def stop(self) -> None:
        """Ends every probe. The replicas themselves are not told."""
        tasks = [member.probe for member in self._members.values()]
        if self._follow_task is not None:
            tasks.append(self._follow_task)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._members.clear()

    def set_urls(self, urls: Iterable[str]) -> None:
        """Replicas join and leave: a new spec, or a replica that we started."""
        self._urls = tuple(urls)
        if self._follow_task is not None:
            self._follow_task.cancel()
            self.start()

    def address(self, name: str) -> Address | None:
        """The address of a member."""
        member = self._members.get(name)
        return None if member is None else member.address

    def served(self) -> frozenset[str]:
        """Names of the models that the pool's ready replicas serve."""
        return frozenset().union(*(member.served for member in self._members.values() if member.ready))

    def failed(self, name: str, reason: str) -> None:
        """A request to the replica failed in a way that is the replica's: probe it anew before it gets more."""
        member = self._members.get(name)
        if member is not None and member.ready:
            member.failures += 1
            if member.failures >= LOST_AFTER_FAILURES:
                self._set_ready(member, False, reason)

    async def _follow(self) -> None:
        while True:
            urls = self._urls
            found = await asyncio.gather(*map(resolve, urls))
            # A name that resolves to nothing right now says more about DNS than about its replicas: they stay.
            self._resolved = {url: new or self._resolved.get(url, []) for url, new in zip(urls, found, strict=True)}
            wanted = {address.name: address for those in self._resolved.values() for address in those}
            for name, member in list(self._members.items()):
                if wanted.get(name) != member.address:
                    del self._members[name]
                    member.probe.cancel()
                    self._listener.replica_left(member.address)
            for name, address in wanted.items():
                if name not in self._members:
                    self._listener.replica_joined(address)
                    self._members[name] = _Member(address, asyncio.create_task(self._probe(name), name=f"probe {name}"))
            await asyncio.sleep(RESOLVE_SECONDS)

    async def _probe(self, name: str) -> None:
        await asyncio.sleep(0)
        member = self._members[name]
        while True:
            try:
                await self._probe_once(member)
            except (ReplicaUnreachableError, ReplyBrokenError, *_NOT_AN_ENGINE) as error:
                member.failures += 1
                if member.ready and member.failures >= LOST_AFTER_FAILURES:
                    self._set_ready(member, False, f"probe: {error}" if str(error) else type(error).__name__)
            await asyncio.sleep(PROBE_SECONDS)

    async def _probe_once(self, member: _Member) -> None:
        address = member.address
        headers = {"Host": address.host} if address.host else {}
        if not member.ready:
            listing = orjson.loads(
                await self._client.get(
                    f"{address.base}/v1/models", headers, PROBE_TIMEOUT_SECONDS, server_name=address.server_name
                )
            )
            member.served = frozenset(str(model["id"]) for model in listing["data"])
        load = parse_load(
            await self._client.get(
                f"{address.base}/metrics", headers, PROBE_TIMEOUT_SECONDS, server_name=address.server_name
            )
        )
        now = self._clock()
        progress = load.prompt_tokens_total + load.generation_tokens_total
        if progress != member.progress or load.running + load.waiting == 0 or not member.progressed_at:
            member.progress = progress
            member.progressed_at = now
        member.failures = 0
        self._listener.replica_load(address, load)
        stalled = now - member.progressed_at
        if stalled > STALLED_SECONDS:
            self._set_ready(member, False, f"no token for {stalled:.0f} s with requests waiting")
        else:
            self._set_ready(member, True, "serves")

    def _set_ready(self, member: _Member, ready: bool, reason: str) -> None:
        if member.ready is not ready:
            member.ready = ready
            self._listener.replica_ready(member.address, ready, reason)


async def resolve(url: str) -> list[Address]:
    """The addresses that a replica's URL stands for: one, or as many as its DNS name has. Empty if DNS fails."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    port = parts.port or (443 if parts.scheme == "https" else 80)
    path = parts.path.rstrip("/")
    try:
        ipaddress.ip_address(host)
        return [Address(f"{parts.netloc}{path}", url.rstrip("/"))]
    except ValueError:
        pass
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=1)
    except (OSError, UnicodeError):  # the latter: a label that no DNS name can have
        return []
    ips = sorted({str(entry[4][0]) for entry in found}, key=lambda ip: (":" in ip, ip))
    # A dual-stack name is one replica with two addresses, not two replicas.
    v4 = [ip for ip in ips if ":" not in ip]
    return [
        Address(
            name=f"{ip}:{port}{path}" if ":" not in ip else f"[{ip}]:{port}{path}",
            base=f"{parts.scheme}://{ip if ':' not in ip else f'[{ip}]'}:{port}{path}",
            host=parts.netloc,
            server_name=host if parts.scheme == "https" else None,
        )
        for ip in (v4 or ips)
    ]
