"""The `lanes` policy by example: what goes, what waits, and why."""

from itertools import count

import pytest

from serving import spec
from serving.scheduling import Batch, Refusal, Scheduler, Ticket, make_scheduler
from serving.scheduling.rates import DRAIN_TIME_CONSTANT
from tests.unit.scheduling.specs import lane, pool

LANES = (
    lane("short", weight=8),
    lane("long", weight=3, deadline=10.0, ttft=spec.Objective(seconds=1.0)),
    lane("batch", weight=1, deadline=600.0, ttft=spec.Objective(seconds=60.0)),
)
_names = count()


def _scheduler(replicas: int = 1, lanes: tuple[spec.Lane, ...] = LANES, **settings: object) -> Scheduler:
    scheduler = make_scheduler(pool(**settings), lanes, 1)
    for index in range(replicas):
        scheduler.add_replica(f"r{index}", 0.0)
    return scheduler


def _submit(
    scheduler: Scheduler, lane: str, tokens: int, now: float = 0.0, left: float = 2.0, prefix: int | None = None
) -> Ticket:
    ticket = Ticket(f"t{next(_names)}", lane, tokens, received=now, deadline=now + left, prefix=prefix)
    assert scheduler.submit(ticket, now) is None
    return ticket


def _sent(batches: list[Batch]) -> list[list[Ticket]]:
    return [list(batch.tickets) for batch in batches]


def test_short_requests_go_together_up_to_the_threshold_and_wait_for_nobody() -> None:
    """A user would wait for company."""
    scheduler = _scheduler()
    tickets = [_submit(scheduler, "short", 100) for _ in range(3)]
    assert _sent(scheduler.release(0.0)) == [tickets[:2], tickets[2:]]


def test_one_larger_than_the_threshold_goes_alone() -> None:
    """A short request would be held in a heavy batch."""
    scheduler = _scheduler()
    tickets = [_submit(scheduler, "batch", tokens) for tokens in (10, 300, 10)]
    assert _sent(scheduler.release(0.0)) == [[ticket] for ticket in tickets]


def test_the_earliest_deadline_goes_first_in_its_lane() -> None:
    """A user in a hurry would wait behind one with time."""
    scheduler = _scheduler()
    late, early = _submit(scheduler, "short", 250, left=2.0), _submit(scheduler, "short", 250, left=1.0)
    assert _sent(scheduler.release(0.0)) == [[early], [late]]


def test_batch_cannot_fill_the_room_of_short_requests() -> None:
    """A burst of batch work would keep an idle chat user waiting for all of it."""
    scheduler = _scheduler()
    for _ in range(8):
        _submit(scheduler, "batch", 1500, left=600)
    sent = sum(batch.tokens for batch in scheduler.release(0.0))
    assert sent < 2560 + 1500
    short = _submit(scheduler, "short", 80)
    assert _sent(scheduler.release(0.0)) == [[short]]


def test_only_one_large_prompt_is_computed_at_once_and_short_ones_pass_it() -> None:
    """A chat user would wait behind two long documents."""
    scheduler = _scheduler()
    first, second = _submit(scheduler, "long", 5000), _submit(scheduler, "long", 5000)
    assert _sent(scheduler.release(0.0)) == [[first]]
    short = _submit(scheduler, "short", 80)
    assert _sent(scheduler.release(0.1)) == [[short]]
    assert scheduler.lane_view("long", 0.1).deficit < 0, "it owes what exceeds its turn"
    scheduler.first_token(first, 0.4)
    assert _sent(scheduler.release(0.4)) == [[second]]


def test_the_next_large_prompt_is_there_when_the_one_before_it_ends() -> None:
    """The engine would idle between two long prompts."""
    scheduler, now = _scheduler(), 0.0
    for _ in range(3):
        ticket = _submit(scheduler, "long", 5000, now)
        scheduler.release(now)
        now += 0.5
        scheduler.first_token(ticket, now)
        scheduler.finished(ticket, now)
    first, second = _submit(scheduler, "long", 5000, now), _submit(scheduler, "long", 5000, now)
    assert _sent(scheduler.release(now)) == [[first]]
    wake = scheduler.next_wake(now)
    assert wake is not None
    assert wake == pytest.approx(now + 0.5 * (5000 - 512) / 5000)
    assert _sent(scheduler.release(wake - 0.001)) == []
    assert _sent(scheduler.release(wake)) == [[second]]


def test_batch_does_not_take_the_share_of_a_lane_that_waits_for_its_seat() -> None:
    """Long prompts would lose the engine to batch, which needs no seat."""
    scheduler = _scheduler()
    _submit(scheduler, "long", 2100)
    scheduler.release(0.0)
    _submit(scheduler, "long", 2100)
    for _ in range(10):
        _submit(scheduler, "batch", 250, left=600)
    sent = sum(batch.tokens for batch in scheduler.release(0.01))
    # `long` needs at most ⌈(2048 + 52) / 768⌉ = 3 rounds; `batch` had one round's allowance before.
    assert 0 < sent <= 4 * 256


def test_an_overdue_head_goes_before_the_turn_of_others_but_not_twice_in_debt() -> None:
    """A user whose wait limit has passed would wait for the whole round; or could push everyone else aside."""
    scheduler = _scheduler(lookahead=spec.Lookahead(tokens=1, requests=4), step_tokens=1)
    blocker = _submit(scheduler, "short", 10)
    scheduler.release(0.0)
    batch = [_submit(scheduler, "batch", 300, left=600) for _ in range(2)]
    short = _submit(scheduler, "short", 10, now=59.99)
    scheduler.first_token(blocker, 60.0)
    sent = scheduler.release(60.0)
    assert _sent(sent) == [[batch[0]]], "its turn would come after the short one's"
    assert sent[0].overdue
    assert sent[0].waited == 60.0
    scheduler.first_token(batch[0], 60.01)
    assert _sent(scheduler.release(60.01)) == [[short]], "batch owes 44 tokens"
    scheduler.first_token(short, 60.02)
    assert _sent(scheduler.release(60.02)) == [[batch[1]]]
    assert scheduler.lane_view("batch", 60.02).breaches == 2
    assert scheduler.lane_view("short", 60.02).breaches == 0


def test_a_prefix_goes_where_it_was_computed_unless_that_replica_is_far_busier() -> None:
    """The engine's prefix cache would be missed; or one hot prefix would overload one replica."""
    scheduler = _scheduler(replicas=2, affinity_tokens=500, step_tokens=100_000)
    first = _submit(scheduler, "short", 200, prefix=7)
    home = scheduler.release(0.0)[0].replica
    assert first.replica == home
    near = _submit(scheduler, "short", 200, prefix=7)
    scheduler.release(0.0)
    _submit(scheduler, "batch", 1000, prefix=7)
    scheduler.release(0.0)
    far = _submit(scheduler, "short", 200, prefix=7)
    scheduler.release(0.0)
    assert near.replica == home
    assert far.replica != home


def test_a_batch_is_cut_where_a_follower_likes_another_replica() -> None:
    """Company would cost a request its cached prefix."""
    scheduler = _scheduler(replicas=2)
    one, two = _submit(scheduler, "short", 50, prefix=1), _submit(scheduler, "batch", 50, prefix=2)
    scheduler.release(0.0)
    assert one.replica != two.replica
    again = [_submit(scheduler, "short", 50, prefix=1), _submit(scheduler, "short", 50, prefix=2)]
    assert _sent(scheduler.release(0.0)) == [[again[0]], [again[1]]]
    assert [ticket.replica for ticket in again] == [one.replica, two.replica]


def test_with_lanes_in_the_engine_each_lane_has_credit_of_its_own() -> None:
    """The engine could not choose a short request that it does not see, nor compute two large ones in turns."""
    scheduler = _scheduler(engine_scheduler="lanes")
    for name in ("long", "batch"):
        _submit(scheduler, name, 5000, left=9.0)
        _submit(scheduler, name, 5000, left=9.0)
    for _ in range(50):
        _submit(scheduler, "short", 100)
    sent = scheduler.release(0.0)
    tokens = {name: sum(batch.tokens for batch in sent if batch.lane == name) for name in scheduler.lanes()}
    assert tokens == {"short": 2600, "long": 5000, "batch": 5000}


def test_gateways_share_a_replicas_credit() -> None:
    """Two gateways would give an engine twice what it can hold."""
    scheduler = make_scheduler(pool(max_num_seqs=6), LANES, 2)
    scheduler.add_replica("r0", 0.0)
    for _ in range(20):
        _submit(scheduler, "short", 1)
    assert sum(len(batch.tickets) for batch in scheduler.release(0.0)) == 3
    _submit(scheduler, "batch", 1)
    assert [batch.lane for batch in scheduler.release(0.0)] == ["batch"], "its seat was kept"


BOUND = spec.QueueBounds(max_requests=100_000, max_tokens=2_000_000)


def _backlogged(bound: spec.QueueBounds = BOUND) -> tuple[Scheduler, float]:
    """A lane `short` alone, that has released 1000 tokens a second for 30 s and has 300 tokens queued; and the time."""
    lookahead = spec.Lookahead(tokens=1, requests=0)
    scheduler = _scheduler(lanes=(lane("short", queue=bound),), lookahead=lookahead, max_num_seqs=1)
    for _ in range(4):
        _submit(scheduler, "short", 100, left=1e6)
    running = scheduler.release(0.0)[0].tickets[0]
    for tick in range(1, 301):
        now = tick / 10
        _submit(scheduler, "short", 100, now, left=1e6)
        scheduler.finished(running, now)
        running = scheduler.release(now)[0].tickets[0]
    return scheduler, 30.0


def _refusal(scheduler: Scheduler, tokens: int, now: float, left: float) -> Refusal | None:
    return scheduler.submit(Ticket("new", "short", tokens, received=now, deadline=now + left), now)


def test_what_cannot_meet_its_deadline_is_refused_at_once_with_the_time_that_it_would_take() -> None:
    """A user would wait two seconds for a 504 that was certain."""
    scheduler, now = _backlogged()
    assert scheduler.lane_view("short", now).drain_rate == pytest.approx(1000, rel=0.05)
    for _ in range(10):
        _submit(scheduler, "short", 400, now, left=20.0)
    assert _refusal(scheduler, 1000, now, left=2.0) is None, "only what is due before it is ahead of it"
    refusal = _refusal(scheduler, 10_000, now, left=21.0 - 12.0)
    assert refusal is not None
    assert refusal.outcome == "rejected_infeasible"
    assert refusal.retry_after == pytest.approx((1000 + 10_000) / 1000 - 9.0, abs=0.6)
    assert "its deadline in 9.0 s" in refusal.reason


def test_a_full_queue_says_when_to_come_back() -> None:
    """Clients would retry into the same full queue."""
    scheduler, now = _backlogged(spec.QueueBounds(max_requests=100_000, max_tokens=4000))
    _submit(scheduler, "short", 3000, now, left=1e6)
    refusal = _refusal(scheduler, 1000, now, left=1e6)
    assert refusal is not None
    assert refusal.outcome == "rejected_full"
    assert refusal.retry_after == pytest.approx(3.3, rel=0.05)


def test_after_a_long_stall_an_empty_queue_admits_and_the_rate_is_still_there() -> None:
    """An engine that hung once would leave its users refused for good."""
    scheduler, now = _backlogged()
    for _ in range(600):
        now += 1.0
        scheduler.release(now)
    for ticket in scheduler.drain(now):
        assert ticket.lane == "short"
    assert scheduler.release(now) == []
    assert (scheduler.lane_view("short", now).drain_rate or 0) > 1000 / 3
    assert _refusal(scheduler, 100_000, now, left=2.0) is None


def test_a_deadline_that_has_passed_is_infeasible() -> None:
    """It would take a place in the queue only to leave it."""
    refusal = _refusal(_scheduler(), 10, 5.0, left=0.0)
    assert refusal is not None
    assert (refusal.outcome, refusal.reason) == ("rejected_infeasible", "its deadline has passed")


def test_one_retry_goes_elsewhere_and_a_second_replica_may_not_exist() -> None:
    """A request would be retried on the replica that has just failed it."""
    scheduler = _scheduler(replicas=2)
    ticket = _submit(scheduler, "short", 10)
    first = scheduler.release(0.0)[0].replica
    second = scheduler.reassign(ticket, frozenset({first}), 0.1)
    assert second not in (None, first)
    assert scheduler.reassign(ticket, frozenset({"r0", "r1"}), 0.2) is None
    assert {name: view.in_flight for name, view in scheduler.replica_view(0.2).items()} == {first: 0, second: 1}


def test_a_replica_that_comes_back_under_its_name_starts_with_clean_accounts() -> None:
    """After a restart a replica would be given too little for ever, or too much."""
    scheduler = _scheduler()
    ticket = _submit(scheduler, "short", 10)
    scheduler.release(0.0)
    scheduler.remove_replica("r0", 0.1)
    scheduler.add_replica("r0", 0.2)
    new = _submit(scheduler, "short", 10, 0.2)
    scheduler.release(0.2)
    scheduler.finished(ticket, 0.3)
    assert scheduler.replica_view(0.3)["r0"].in_flight == 1
    scheduler.finished(new, 0.4)
    assert scheduler.replica_view(0.4)["r0"].in_flight == 0


def test_an_engine_that_says_it_is_empty_frees_the_tokens_of_lost_requests() -> None:
    """A first token that was never seen would take credit away for ever."""
    scheduler = _scheduler()
    _submit(scheduler, "long", 5000)
    scheduler.release(0.0)
    scheduler.observe("r0", 1.0, running=0, waiting=0, prompt_tokens_total=0.0)
    assert scheduler.replica_view(1.0)["r0"].large_seats_used == 1, "one look may be older than the request"
    scheduler.observe("r0", 2.0, running=0, waiting=0, prompt_tokens_total=5000.0)
    assert scheduler.replica_view(2.0)["r0"].large_seats_used == 0


def test_desired_replicas_follow_the_measured_drain() -> None:
    """The autoscaler would hear nothing while the queue grows."""
    assert _scheduler().desired_replicas(0.0) == 1
    scheduler, now = _backlogged()
    assert scheduler.desired_replicas(now) == 2, "arrivals alone fill one replica, and something is queued"
    _submit(scheduler, "short", 40_000, now, left=1e6)
    arriving = 1000 + 40_000 / DRAIN_TIME_CONSTANT
    queued = 40_300 / DRAIN_TIME_CONSTANT
    assert scheduler.desired_replicas(now) == pytest.approx((arriving + queued) / 1000, abs=1.5)
