"""What every policy shares: lanes with bounded queues and admission, replicas with their accounts, the whole life of
a ticket. A policy adds one thing: which queued tickets leave now (`_choose`)."""

from abc import ABC, abstractmethod
from math import ceil

from serving import spec
from serving.scheduling.admission import LaneState
from serving.scheduling.bucket import TokenBucket
from serving.scheduling.credit import Replica, credit_of
from serving.scheduling.queue import LaneQueue
from serving.scheduling.rates import DRAIN_TIME_CONSTANT, TokenRate
from serving.scheduling.ticket import Batch, LaneView, Refusal, ReplicaView, State, Ticket

TIMER_STEP = 0.001
"""Seconds: an estimate is not worth waking up for more often than this."""


class SchedulerCore(ABC):
    """See `Scheduler` for the methods. Everything is keyed by instance: a replica that comes back under its old name
    starts anew, and what its predecessor still has may finish without touching it."""

    def __init__(self, pool: spec.Pool, lanes: tuple[spec.Lane, ...], gateways: int) -> None:
        if gateways < 1:
            raise ValueError(f"gateways is {gateways}, expected at least 1")
        self._pool = pool
        self._lanes = {
            lane.name: LaneState(
                settings=lane,
                queue=LaneQueue(
                    lane.queue.max_requests, lane.queue.max_tokens, TokenBucket(pool.batch_tokens), lane.wait_limit
                ),
            )
            for lane in lanes
        }
        self._credit = credit_of(pool, tuple(self._lanes), gateways)
        self._gateways = gateways
        self._replicas: dict[str, Replica] = {}
        self._in_flight: dict[Ticket, Replica] = {}
        self._sequence = 0
        self._arrivals = TokenRate()
        self._drain = TokenRate()

    @abstractmethod
    def _choose(self, now: float) -> list[Batch]:
        """The batches that leave now, each sent by `_send`. Replicas are settled."""

    def submit(self, ticket: Ticket, now: float) -> Refusal | None:
        """Takes a ticket into its lane's queue, or says why not (`LaneState.refusal`).

        Raises:
            ValueError: the lane is not known, or the ticket was submitted before.
        """
        lane = self._lane(ticket.lane)
        if ticket.state is not State.NEW:
            raise ValueError(
                f"{ticket.request_id}: state is {ticket.state}, expected a ticket that was never submitted"
            )
        self._arrivals.mark(now, ticket.tokens, counting=True)
        if (refusal := lane.refusal(ticket, now)) is not None:
            ticket.state = State.GONE
            return refusal
        lane.queue.push(ticket, self._sequence, now)
        self._sequence += 1
        return None

    def release(self, now: float) -> list[Batch]:
        """All that may leave now, for the gateway to dispatch at once."""
        for replica in self._replicas.values():
            replica.settle(now)
        batches = self._choose(now) if self._ready() else []
        self._keep_time(now, batches)
        return batches

    def expire(self, now: float) -> list[Ticket]:
        """Removes the queued tickets whose deadline has come; their room is free at once."""
        return [ticket for lane in self._lanes.values() for ticket in lane.queue.expire(now)]

    def cancel(self, ticket: Ticket, now: float) -> bool:
        """True if the ticket was queued (and is no more)."""
        return self._lane(ticket.lane).queue.remove(ticket, now)

    def drain(self, now: float) -> list[Ticket]:
        """Everything queued leaves."""
        return [ticket for lane in self._lanes.values() for ticket in lane.queue.drain(now)]

    def first_token(self, ticket: Ticket, now: float) -> None:
        """Its prefill is over. Late and repeated calls do nothing."""
        if (replica := self._in_flight.get(ticket)) is not None:
            replica.first_token(ticket, now)

    def finished(self, ticket: Ticket, now: float) -> None:
        """It left its replica, whatever the outcome. Repeated calls do nothing."""
        if (replica := self._in_flight.pop(ticket, None)) is not None:
            ticket.state = State.GONE
            replica.leave(ticket, now)

    def reassign(self, ticket: Ticket, exclude: frozenset[str], now: float) -> str | None:
        """Moves a ticket in flight to the least loaded ready replica not in `exclude`, past its credit but into its
        accounts. None if there is none, or the ticket is not in flight; it then stays where it is."""
        old = self._in_flight.get(ticket)
        others = [r for r in self._replicas.values() if r.ready and r.name not in exclude and r is not old]
        if old is None or not others:
            return None
        for replica in others:
            replica.settle(now)
        new = min(others, key=Replica.load)
        old.leave(ticket, now)
        self._enter(ticket, new, now)
        return new.name

    def add_replica(self, name: str, now: float) -> None:
        """A new instance, ready."""
        if (old := self._replicas.pop(name, None)) is not None:
            old.ready = False
        self._replicas[name] = Replica(name, self._credit)

    def remove_replica(self, name: str, now: float) -> None:
        """Gets nothing more; what it still has may finish. An unknown name does nothing."""
        if (old := self._replicas.pop(name, None)) is not None:
            old.ready = False

    def set_ready(self, name: str, ready: bool, now: float) -> None:
        """Whether it may get requests. An unknown name does nothing: it may just have been removed."""
        if (replica := self._replicas.get(name)) is not None:
            replica.ready = ready

    def observe(self, name: str, now: float, *, running: int, waiting: int, prompt_tokens_total: float) -> None:
        """What the engine's own metrics said just now. An unknown name does nothing."""
        if (replica := self._replicas.get(name)) is not None:
            replica.observe(now, running, waiting, prompt_tokens_total)

    def next_wake(self, now: float) -> float | None:
        """The earliest deadline in a queue, or the time at which a blocked head may find credit by the estimates.
        O(lanes × replicas), whatever is queued."""
        times = []
        for lane in self._lanes.values():
            if (head := lane.queue.head) is not None:
                credit = [self._wake(replica, head) for replica in self._replicas.values()]
                times += [head.deadline, *(max(at, now + TIMER_STEP) for at in credit if at is not None)]
        return min(times, default=None)

    def lanes(self) -> tuple[str, ...]:
        """In the spec's order."""
        return tuple(self._lanes)

    def lane_view(self, lane: str, now: float) -> LaneView:
        """For gauges."""
        state = self._lane(lane)
        state.queue.count_breaches(now)
        oldest = state.queue.oldest
        return LaneView(
            queued=len(state.queue),
            queued_tokens=state.queue.tokens,
            oldest_age=0.0 if oldest is None else oldest.waited(now),
            bucket_tokens=state.queue.bucket.level,
            deficit=self._deficit(lane),
            drain_rate=state.drain.rate(now),
            breaches=state.queue.breaches,
            released=state.released,
            released_tokens=state.released_tokens,
        )

    def replica_view(self, now: float) -> dict[str, ReplicaView]:
        """For gauges."""
        for replica in self._replicas.values():
            replica.settle(now)
        return {name: replica.view() for name, replica in self._replicas.items()}

    def desired_replicas(self, now: float) -> int:
        """⌈(arriving tokens/s + Σ over lanes of queued tokens ÷ the time they may wait) ÷ drained tokens/s of one
        replica⌉, at least 1, over all gateways' replicas if each gateway sees an equal part of the load.

        The time that a lane's backlog may take is its wait limit, but no less than the time constant of the rates: a
        shorter queue is noise. What one replica drains was measured while a queue was backlogged, else it is its
        prefill rate; with neither, the number that is ready now.
        """
        ready = self._ready()
        drained = self._drain.rate(now)
        rates = [rate for replica in ready if (rate := replica.prefill_rate)]
        if ready and drained:
            one = drained / len(ready)
        elif rates:
            one = sum(rates) / len(rates) / self._gateways
        else:
            return max(1, len(ready))
        load = self._arrivals.rate(now) or 0.0
        for lane in self._lanes.values():
            load += lane.queue.tokens / max(lane.settings.wait_limit, DRAIN_TIME_CONSTANT)
        return max(1, ceil(load / one))

    def _send(self, ticket: Ticket, replica: Replica, now: float) -> None:
        """Moves a queued ticket to a replica."""
        lane = self._lanes[ticket.lane]
        lane.queue.remove(ticket, now)
        lane.released += 1
        lane.released_tokens += ticket.tokens
        ticket.released = now
        self._enter(ticket, replica, now)

    def _batch(self, tickets: list[Ticket], replica: Replica, now: float) -> Batch:
        """What was sent to a replica together."""
        first = tickets[0]
        return Batch(
            lane=first.lane,
            replica=replica.name,
            tickets=tuple(tickets),
            tokens=sum(ticket.tokens for ticket in tickets),
            waited=max(ticket.waited(now) for ticket in tickets),
            overdue=self._lanes[first.lane].queue.overdue(first, now),
        )

    def _enter(self, ticket: Ticket, replica: Replica, now: float) -> None:
        ticket.state = State.IN_FLIGHT
        ticket.replica = replica.name
        self._in_flight[ticket] = replica
        replica.send(ticket, now)

    def _wake(self, replica: Replica, head: Ticket) -> float | None:
        """When `replica` may take `head` without an event."""
        return None

    def _deficit(self, lane: str) -> int:
        return 0

    def _ready(self) -> list[Replica]:
        return [replica for replica in self._replicas.values() if replica.ready]

    def _oldest(self) -> Ticket | None:
        """The earliest arrival over all lanes."""
        first = [ticket for lane in self._lanes.values() if (ticket := lane.queue.oldest) is not None]
        return min(first, key=lambda ticket: ticket.sequence, default=None)

    def _keep_time(self, now: float, batches: list[Batch]) -> None:
        """The drain clocks run while a lane is backlogged and some replica could take from it."""
        running = bool(self._ready())
        tokens = dict.fromkeys(self._lanes, 0)
        for batch in batches:
            for ticket in batch.tickets:
                tokens[ticket.lane] += ticket.tokens
        for name, lane in self._lanes.items():
            lane.drain.mark(now, tokens[name], running and len(lane.queue) > 0)
            lane.queue.count_breaches(now)
        self._drain.mark(now, sum(tokens.values()), running and any(len(lane.queue) for lane in self._lanes.values()))

    def _lane(self, name: str) -> LaneState:
        try:
            return self._lanes[name]
        except KeyError:
            raise ValueError(f"lane is {name!r}, expected one of {', '.join(self._lanes)}") from None
