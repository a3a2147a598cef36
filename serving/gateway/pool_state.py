"""What the gateway knows of one pool's replicas, and what it does when that changes."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from serving.engine.pools import Address, EngineLoad
from serving.telemetry.logs import Event

if TYPE_CHECKING:
    from serving.gateway.gateway import Gateway


@dataclass(slots=True)
class PoolState:
    """One pool as the gateway sees it; told by `Pool` of what happens there."""

    gateway: "Gateway"
    name: str
    ready: set[str] = field(default_factory=set)
    joined: set[str] = field(default_factory=set)

    def replica_joined(self, address: Address) -> None:
        """It belongs to the pool; not ready yet."""
        self.joined.add(address.name)
        now = self.gateway.clock()
        for scheduler in self.gateway.schedulers(self.name):
            scheduler.add_replica(address.name, now)
            scheduler.set_ready(address.name, False, now)
        self.gateway.logs.event(Event.REPLICA_JOINED, pool=self.name, replica=address.name)

    def replica_left(self, address: Address) -> None:
        """Gets nothing more; what it has may finish."""
        self.joined.discard(address.name)
        self.ready.discard(address.name)
        now = self.gateway.clock()
        for scheduler in self.gateway.schedulers(self.name):
            scheduler.remove_replica(address.name, now)
        self.gateway.logs.event(Event.REPLICA_LEFT, pool=self.name, replica=address.name)

    def replica_ready(self, address: Address, ready: bool, reason: str) -> None:
        """Its readiness changed."""
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
        """Corrects the schedulers' estimates."""
        now = self.gateway.clock()
        for scheduler in self.gateway.schedulers(self.name):
            scheduler.observe(
                address.name,
                now,
                running=load.running,
                waiting=load.waiting,
                prompt_tokens_total=load.prompt_tokens_total,
            )
