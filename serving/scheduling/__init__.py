"""Scheduling: pure policy, without I/O or a clock of its own. The gateway and the simulator drive the same classes.

`make_scheduler` gives the policy that a pool's spec names; `Scheduler` says what each of them does.
"""

from serving import spec
from serving.scheduling.baselines import Passthrough, StaticFifo
from serving.scheduling.batch import BatchScheduler
from serving.scheduling.bucket import TokenBucket
from serving.scheduling.queue import LaneQueue
from serving.scheduling.shares import DeficitRoundRobin, starvation_bound_tokens
from serving.scheduling.ticket import Batch, LaneView, Refusal, ReplicaView, Scheduler, State, Ticket

__all__ = [
    "Batch",
    "BatchScheduler",
    "DeficitRoundRobin",
    "LaneQueue",
    "LaneView",
    "Passthrough",
    "Refusal",
    "ReplicaView",
    "Scheduler",
    "State",
    "StaticFifo",
    "Ticket",
    "TokenBucket",
    "make_scheduler",
    "starvation_bound_tokens",
]

_POLICIES: dict[str, type[BatchScheduler | Passthrough | StaticFifo]] = {
    "lanes": BatchScheduler,
    "passthrough": Passthrough,
    "static-fifo": StaticFifo,
}


def make_scheduler(pool: spec.Pool, lanes: tuple[spec.Lane, ...], gateways: int) -> Scheduler:
    """The policy of one (model, pool), for one of `gateways` gateways; it has no replicas yet."""
    return _POLICIES[pool.gateway_scheduler](pool, lanes, gateways)
