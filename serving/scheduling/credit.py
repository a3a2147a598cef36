"""Replica: what one engine instance has been given by this gateway, and what it may still be given.

The credit is what the engine computes plus a small look-ahead, in requests and in tokens, divided among the gateways.
A part of it is reserved to each lane, so that no lane can fill the seats of another.
"""

from collections import Counter
from dataclasses import dataclass

from serving import spec
from serving.scheduling.prefill import PrefillOrder
from serving.scheduling.ticket import ReplicaView, Ticket


@dataclass(frozen=True, slots=True)
class Credit:
    """One gateway's share of one replica."""

    lanes: tuple[str, ...]
    requests: int
    """In flight at most."""
    reserved_requests: int
    """Of these, how many each lane has to itself: 1, or 0 where the look-ahead is too small to spare them. They come
    out of the look-ahead, never out of what the replica computes: a lane alone must be able to fill it."""
    tokens: int
    """A prompt of one turn at most may go while fewer than this are uncomputed; so the last one may overshoot, and a
    long one never waits for a gap of its size."""
    reserved_tokens: int
    """Of these, how many each lane has to itself: one micro-batch, but always less than an equal part of the credit."""
    large_seats: int
    """Prompts above `turn_tokens` that are not yet within `ending_tokens` of their end."""
    turn_tokens: int
    ending_tokens: int
    per_lane: bool
    """The engine has lanes of its own and chooses every step: each lane has tokens and large seats to itself."""


def credit_of(pool: spec.Pool, lanes: tuple[str, ...], gateways: int) -> Credit:
    """The credit of a replica of `pool` for one of `gateways` gateways. Every share is at least 1."""
    tokens = max(1, (pool.step_tokens + pool.lookahead.tokens) // gateways)
    requests = max(1, (pool.max_num_seqs + pool.lookahead.requests) // gateways)
    return Credit(
        lanes=lanes,
        requests=requests,
        reserved_requests=int(pool.lookahead.requests // gateways >= len(lanes) - 1 and requests >= len(lanes)),
        tokens=tokens,
        reserved_tokens=min(pool.batch_tokens, tokens // (len(lanes) + 1)),
        large_seats=max(1, pool.large_seats // gateways),
        turn_tokens=pool.turn_tokens,
        ending_tokens=max(1, pool.lookahead.tokens // gateways),
        per_lane=pool.engine_scheduler == "lanes",
    )


class Replica:
    """The accounts of one instance. They count only what this gateway sent, and cannot go negative: a ticket leaves
    an account only if it is in it. Call `settle(now)` before reading."""

    def __init__(self, name: str, credit: Credit) -> None:
        self.name = name
        self.credit = credit
        self.ready = True
        self._in_flight: set[Ticket] = set()
        self._per_lane = Counter(dict.fromkeys(credit.lanes, 0))
        self._orders = {
            lane: PrefillOrder(credit.turn_tokens, credit.ending_tokens)
            for lane in (credit.lanes if credit.per_lane else ("",))
        }
        self._observed: tuple[float, float, int] | None = None

    @property
    def in_flight(self) -> int:
        """Requests sent that have not left."""
        return len(self._in_flight)

    def send(self, ticket: Ticket, now: float) -> None:
        """It goes to this replica."""
        self._in_flight.add(ticket)
        self._per_lane[ticket.lane] += 1
        self._order(ticket.lane).add(ticket, now)

    def first_token(self, ticket: Ticket, now: float) -> None:
        """Its prefill is over."""
        if ticket in self._in_flight:
            self._order(ticket.lane).computed(ticket, now)

    def leave(self, ticket: Ticket, now: float) -> bool:
        """It is no longer here; False if it never was, or left before."""
        if ticket not in self._in_flight:
            return False
        self._in_flight.discard(ticket)
        self._per_lane[ticket.lane] -= 1
        self._order(ticket.lane).left(ticket, now)
        return True

    def observe(self, now: float, running: int, waiting: int, prompt_tokens_total: float) -> None:
        """What the engine's metrics said. Between two looks that both found requests waiting it computed prompts
        without a pause, so its counter gives a rate; when it has nothing, what was sent before the last look is gone.
        """
        before = self._observed
        self._observed = (now, prompt_tokens_total, waiting)
        if before is None or now <= before[0]:
            return
        for order in self._orders.values():
            if not running and not waiting:
                order.idle(before[0], now)
            elif waiting and before[2] and prompt_tokens_total > before[1]:
                order.scraped_rate = (prompt_tokens_total - before[1]) / (now - before[0])

    def settle(self, now: float) -> None:
        """Brings the estimates to `now`."""
        for order in self._orders.values():
            order.settle(now)

    @property
    def outstanding(self) -> float:
        """Estimated uncomputed prompt tokens."""
        return sum(order.outstanding for order in self._orders.values())

    def load(self) -> tuple[float, int]:
        """What replicas are compared by, least first: uncomputed tokens, then requests."""
        return self.outstanding, len(self._in_flight)

    @property
    def prefill_rate(self) -> float | None:
        """Prompt tokens a second while it computes prompts; None before it was measured."""
        rates = [rate for order in self._orders.values() if (rate := order.rate)]
        return sum(rates) / len(rates) if rates else None

    def large(self, ticket: Ticket) -> bool:
        """It takes several turns, and a large seat."""
        return ticket.tokens > self.credit.turn_tokens

    def takes(self, ticket: Ticket) -> bool:
        """There is credit for it."""
        if not self.ready or not self._has_request_seat(ticket.lane):
            return False
        return self.has_large_seat(ticket.lane) if self.large(ticket) else self._missing_tokens(ticket.lane) <= 0

    def has_large_seat(self, lane: str) -> bool:
        """A large prompt of the lane may start."""
        return self._order(lane).seats_used < self.credit.large_seats

    def wake(self, ticket: Ticket) -> float | None:
        """When, by the estimates alone, there may be credit for it; None: only an event can tell (or there is)."""
        if not self.ready or not self._has_request_seat(ticket.lane) or self.takes(ticket):
            return None
        order = self._order(ticket.lane)
        if self.large(ticket):
            return order.time_of_seat()
        return order.time_of_progress(order.progress + self._missing_tokens(ticket.lane))

    def view(self) -> ReplicaView:
        """For gauges."""
        return ReplicaView(
            ready=self.ready,
            in_flight=self.in_flight,
            outstanding_tokens=round(self.outstanding),
            large_seats_used=sum(order.seats_used for order in self._orders.values()),
            prefill_rate=self.prefill_rate,
        )

    def _order(self, lane: str) -> PrefillOrder:
        return self._orders[lane if self.credit.per_lane else ""]

    def _has_request_seat(self, lane: str) -> bool:
        kept = 0
        if self.credit.reserved_requests:
            kept = sum(1 for other, count in self._per_lane.items() if other != lane and count == 0)
        return self.in_flight + kept < self.credit.requests

    def _missing_tokens(self, lane: str) -> float:
        """Tokens that must be computed before the lane may send; 0 or less: it may."""
        order = self._order(lane)
        own = order.small_tokens(lane)
        if self.credit.per_lane:
            return own - self.credit.tokens + 1
        reserve = self.credit.reserved_tokens
        common = self.credit.tokens - reserve * len(self.credit.lanes)
        shared = sum(max(0.0, order.small_tokens(other) - reserve) for other in self.credit.lanes)
        return min(own - reserve, shared - common) + 1
