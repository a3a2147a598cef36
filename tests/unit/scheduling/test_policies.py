"""Every policy under random traffic: nothing is lost, bounds and credit hold, order is kept."""

from collections import Counter
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving import spec
from serving.scheduling import Batch, Scheduler, State, Ticket, make_scheduler
from tests.unit.scheduling.specs import lane, pool

LANES = (
    lane("short", weight=8, queue=spec.QueueBounds(max_requests=20, max_tokens=3000)),
    lane("long", weight=3, deadline=10.0, queue=spec.QueueBounds(max_requests=8, max_tokens=30_000)),
    lane("batch", weight=1, deadline=60.0, queue=spec.QueueBounds(max_requests=30, max_tokens=20_000)),
)
SIZES = {"short": (1, 300), "long": (400, 7000), "batch": (1, 2500)}


class Traffic:
    """Random events against one scheduler, with a check after each."""

    def __init__(self, seed: int, settings_: dict[str, object], gateways: int) -> None:
        self.random = Random(seed)
        self.pool = pool(**settings_)
        self.gateways = gateways
        self.scheduler: Scheduler = make_scheduler(self.pool, LANES, gateways)
        self.now = 0.0
        self.tickets: list[Ticket] = []
        self.counts: Counter[str] = Counter()
        self.queued: dict[Ticket, None] = {}
        self.in_flight: dict[Ticket, None] = {}
        self.batches: list[Batch] = []
        self.moved = False
        self.retries = seed % 2 == 1
        for name in ("a", "b"):
            self.scheduler.add_replica(name, 0.0)

    def run(self, events: int) -> None:
        actions = [self.submit] * 5 + [self.first_token, self.finish, self.finish, self.cancel, self.wait, self.churn]
        for _ in range(events):
            self.random.choice(actions)()
            self.settle()
        for ticket in self.scheduler.drain(self.now):
            self.leave(ticket, "drained")
        for ticket in list(self.in_flight):
            self.scheduler.finished(ticket, self.now)
            self.scheduler.finished(ticket, self.now)
            del self.in_flight[ticket]
            self.counts["finished"] += 1
        self.check()
        assert not self.queued
        assert {ticket.state for ticket in self.tickets} <= {State.GONE}
        for view in self.scheduler.replica_view(self.now).values():
            assert (view.in_flight, view.outstanding_tokens, view.large_seats_used) == (0, 0, 0)

    def submit(self) -> None:
        name = self.random.choice(list(SIZES))
        low, high = SIZES[name]
        ticket = Ticket(
            f"r{len(self.tickets)}",
            name,
            self.random.randint(low, high),
            received=self.now,
            deadline=self.now + self.random.choice([-1, 0.5, 2, 9]),
            prefix=self.random.choice([None, 1, 2]),
            streamed=self.random.random() < 0.7,
        )
        self.tickets.append(ticket)
        self.counts["submitted"] += 1
        if (refusal := self.scheduler.submit(ticket, self.now)) is None:
            self.queued[ticket] = None
        else:
            assert refusal.outcome in ("rejected_full", "rejected_infeasible")
            assert 1 <= refusal.retry_after <= 60
            self.counts["refused"] += 1

    def first_token(self) -> None:
        if self.tickets:
            self.scheduler.first_token(self.random.choice(self.tickets), self.now)

    def finish(self) -> None:
        if self.in_flight:
            ticket = self.random.choice(list(self.in_flight))
            if self.retries and self.random.random() < 0.2:
                was = ticket.replica
                assert was is not None
                if (name := self.scheduler.reassign(ticket, frozenset([was]), self.now)) is not None:
                    assert name != was
                    self.moved = True
                    return
            self.scheduler.finished(ticket, self.now)
            del self.in_flight[ticket]
            self.counts["finished"] += 1

    def cancel(self) -> None:
        if self.tickets:
            ticket = self.random.choice(self.tickets)
            assert self.scheduler.cancel(ticket, self.now) == (ticket in self.queued)
            if ticket in self.queued:
                self.leave(ticket, "cancelled")

    def wait(self) -> None:
        wake = self.scheduler.next_wake(self.now)
        assert (wake is None) == (not self.queued), "a queued ticket has at least its deadline to wake for"
        self.now += self.random.choice([0.001, 0.05, 0.5])
        if wake is not None and self.random.random() < 0.5:
            self.now = max(self.now, wake)

    def churn(self) -> None:
        name = self.random.choice(["a", "b", "nobody"])
        if self.random.random() < 0.3 and name != "nobody":
            self.scheduler.remove_replica(name, self.now)
            self.scheduler.add_replica(name, self.now)
        self.scheduler.set_ready(name, self.random.random() < 0.8, self.now)
        total = self.now * 10_000
        self.scheduler.observe(name, self.now, running=self.random.randint(0, 2), waiting=1, prompt_tokens_total=total)

    def leave(self, ticket: Ticket, how: str) -> None:
        del self.queued[ticket]
        self.counts[how] += 1
        assert ticket.state is State.GONE

    def settle(self) -> None:
        for ticket in self.scheduler.expire(self.now):
            assert ticket.deadline <= self.now
            self.leave(ticket, "expired")
        assert all(ticket.deadline > self.now for ticket in self.queued)
        before = self.scheduler.replica_view(self.now)
        sent: Counter[str] = Counter()
        for batch in self.scheduler.release(self.now):
            assert before[batch.replica].ready
            for ticket in batch.tickets:
                del self.queued[ticket]
                self.in_flight[ticket] = None
                assert ticket.replica == batch.replica
            sent[batch.replica] += len(batch.tickets)
            self.batches.append(batch)
            self.check_batch(batch, before[batch.replica].in_flight)
        self.check()

    def check(self) -> None:
        ends = sum(self.counts[how] for how in ("refused", "cancelled", "expired", "drained", "finished"))
        assert self.counts["submitted"] == len(self.queued) + len(self.in_flight) + ends
        for settings_ in LANES:
            view = self.scheduler.lane_view(settings_.name, self.now)
            mine = [ticket for ticket in self.queued if ticket.lane == settings_.name]
            assert (view.queued, view.queued_tokens) == (len(mine), sum(ticket.tokens for ticket in mine))
            assert view.queued <= settings_.queue.max_requests
            assert view.queued_tokens <= settings_.queue.max_tokens
            assert view.oldest_age == max((ticket.waited(self.now) for ticket in mine), default=0)
        assert self.scheduler.desired_replicas(self.now) >= 1

    def check_batch(self, batch: Batch, in_flight_before: int) -> None:
        waits = [ticket.waited(self.now) for ticket in batch.tickets]
        assert batch.tokens == sum(ticket.tokens for ticket in batch.tickets)
        assert batch.waited == max(waits)


class LanesTraffic(Traffic):
    """What only the `lanes` policy promises."""

    def check_batch(self, batch: Batch, in_flight_before: int) -> None:
        super().check_batch(batch, in_flight_before)
        assert {ticket.lane for ticket in batch.tickets} == {batch.lane}
        assert batch.tokens <= self.pool.batch_tokens or len(batch.tickets) == 1
        deadlines = [(ticket.deadline, ticket.sequence) for ticket in batch.tickets]
        assert deadlines == sorted(deadlines)
        behind = [(ticket.deadline, ticket.sequence) for ticket in self.queued if ticket.lane == batch.lane]
        assert not behind or deadlines[-1] < min(behind)

    def check(self) -> None:
        super().check()
        if self.moved:  # A retry goes past the credit: then its bounds do not hold.
            return
        per_lane = len(LANES) if self.pool.engine_scheduler == "lanes" else 1
        for view in self.scheduler.replica_view(self.now).values():
            requests = (self.pool.max_num_seqs + self.pool.lookahead.requests) // self.gateways
            assert view.in_flight <= max(1, requests)
            assert view.large_seats_used <= max(1, self.pool.large_seats // self.gateways) * per_lane
            tokens = (self.pool.step_tokens + self.pool.lookahead.tokens) // self.gateways
            assert view.prefill_rate is None or view.prefill_rate > 0
            self.check_tokens(max(1, tokens) * per_lane, view.outstanding_tokens)

    def check_tokens(self, credit: int, outstanding: int) -> None:
        # Each account may overshoot by one prompt of a turn; large ones have their seats, and may be ending.
        accounts = len(LANES)
        large = 2 * 7000 * (len(LANES) if self.pool.engine_scheduler == "lanes" else 1) * self.pool.large_seats
        assert outstanding <= credit + accounts * self.pool.turn_tokens + large


SEEDS = st.integers(0, 1 << 32)
SETTINGS: st.SearchStrategy[dict[str, object]] = st.fixed_dictionaries(
    {
        "engine_scheduler": st.sampled_from(["vllm", "lanes"]),
        "max_num_seqs": st.sampled_from([1, 4, 256]),
        "lookahead": st.builds(spec.Lookahead, tokens=st.sampled_from([1, 512]), requests=st.sampled_from([0, 2, 4])),
        "step_tokens": st.sampled_from([64, 2048]),
        "large_seats": st.sampled_from([1, 2]),
    }
)


@settings(max_examples=60, deadline=None)
@given(SEEDS, SETTINGS, st.sampled_from([1, 2, 7]))
def test_lanes_keep_every_promise_under_random_traffic(seed: int, settings_: dict[str, object], gateways: int) -> None:
    """A user's request would be lost, doubled, sent past the credit, or overtaken in its own lane."""
    LanesTraffic(seed, settings_, gateways).run(150)


@settings(max_examples=30, deadline=None)
@given(SEEDS)
def test_passthrough_queues_nothing_while_a_replica_is_ready(seed: int) -> None:
    """The baseline would not be the thing that users have today."""
    traffic = Traffic(seed, {"gateway_scheduler": "passthrough"}, 1)
    traffic.run(150)
    traffic = Traffic(seed, {"gateway_scheduler": "passthrough"}, 1)
    for _ in range(10):
        traffic.submit()
        traffic.settle()
        assert not traffic.queued


class StaticTraffic(Traffic):
    """A replica's next batch begins only when its last one has ended."""

    def check_batch(self, batch: Batch, in_flight_before: int) -> None:
        super().check_batch(batch, in_flight_before)
        assert in_flight_before == 0
        assert len(batch.tickets) <= self.pool.static_batch
        arrivals = [ticket.sequence for ticket in batch.tickets]
        assert arrivals == sorted(arrivals)
        assert all(ticket.sequence > arrivals[-1] for ticket in self.queued)


@settings(max_examples=30, deadline=None)
@given(SEEDS)
def test_static_fifo_starts_no_batch_before_the_last_one_has_ended(seed: int) -> None:
    """The baseline would be better than what practice starts from, and the comparison a lie."""
    StaticTraffic(seed, {"gateway_scheduler": "static-fifo", "static_batch": 4}, 1).run(150)


@pytest.mark.parametrize("policy", spec.GATEWAY_SCHEDULERS)
def test_an_unknown_lane_is_refused_by_name(policy: str) -> None:
    """At 3 a.m. the log would say KeyError."""
    scheduler = make_scheduler(pool(gateway_scheduler=policy), LANES, 1)
    with pytest.raises(ValueError, match="lane is 'nope', expected one of short, long, batch"):
        scheduler.submit(Ticket("r", "nope", 1, received=0.0, deadline=1.0), 0.0)
