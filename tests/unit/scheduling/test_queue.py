"""LaneQueue and DeadlineOrder against the obvious model: a plain sorted list."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.scheduling import LaneQueue, State, Ticket, TokenBucket
from serving.scheduling.order import BLOCK, DeadlineOrder


def _queue(max_requests: int = 10, max_tokens: int = 1000, wait_limit: float = 0.08) -> LaneQueue:
    return LaneQueue(max_requests, max_tokens, TokenBucket(256), wait_limit)


def _ticket(tokens: int = 10, deadline: float = 2.0) -> Ticket:
    return Ticket("r", "a", tokens, received=0.0, deadline=deadline)


_push = st.tuples(st.just("push"), st.integers(1, 300), st.integers(1, 60))
_cancel = st.tuples(st.just("cancel"), st.integers(0, 40), st.just(0))
_expire = st.tuples(st.just("expire"), st.integers(0, 3), st.just(0))
_pop = st.tuples(st.just("pop"), st.just(0), st.just(0))


@given(st.lists(st.one_of(_push, _push, _cancel, _expire, _pop), max_size=120))
def test_a_queue_behaves_as_a_sorted_list_with_bounds(operations: list[tuple[str, int, int]]) -> None:
    """A user would lose a place in the line, or be refused while there is room."""
    queue, now = _queue(), 0.0
    model: list[Ticket] = []
    ever: list[Ticket] = []
    late: set[int] = set()
    for sequence, (operation, number, due) in enumerate(operations):
        if operation == "push":
            ticket = _ticket(number, now + due)
            refused = len(model) >= 10 or sum(t.tokens for t in model) + number > 1000
            assert (queue.full(number) is not None) == refused
            assert queue.tokens_ahead(ticket.deadline) == sum(t.tokens for t in model if t.deadline <= ticket.deadline)
            if not refused:
                queue.push(ticket, sequence, now)
                model.append(ticket)
                ever.append(ticket)
        elif operation == "cancel" and ever:
            ticket = ever[number % len(ever)]
            assert queue.remove(ticket, now) == (ticket in model)
            model = [t for t in model if t is not ticket]
        elif operation == "expire":
            now += number
            late |= {t.sequence for t in model if t.waited(now) > queue.wait_limit}
            due_now = [t for t in model if t.deadline <= now]
            assert set(queue.expire(now)) == set(due_now)
            model = [t for t in model if t.deadline > now]
        elif operation == "pop" and (head := queue.head) is not None:
            queue.remove(head, now)
            model.remove(head)
        assert queue.head is min(model, key=lambda t: (t.deadline, t.sequence), default=None)
        assert queue.oldest is min(model, key=lambda t: t.sequence, default=None)
        assert (len(queue), queue.tokens) == (len(model), sum(t.tokens for t in model))
        queue.count_breaches(now)
        assert queue.breaches == len(late)
    assert len(queue.drain(now)) == len(model)
    assert (len(queue), queue.tokens, queue.head, queue.oldest) == (0, 0, None, None)


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(1, 9)), min_size=1, max_size=3 * BLOCK))
def test_deadline_order_holds_over_many_blocks(entries: list[tuple[int, int]]) -> None:
    """A user with an early deadline would wait behind one with a late one."""
    order = DeadlineOrder()
    model: list[Ticket] = []
    for sequence, (deadline, tokens) in enumerate(entries * 3):
        ticket = _ticket(tokens, float(deadline))
        ticket.sequence = sequence
        order.add(ticket)
        model.append(ticket)
    model.sort(key=lambda t: (t.deadline, t.sequence))
    assert list(order) == model
    for cut in (0, 13, 25, 50):
        assert order.tokens_before(cut) == sum(t.tokens for t in model if t.deadline <= cut)
    for ticket in model[::3]:
        assert order.remove(ticket)
        assert not order.remove(ticket)
    model = [t for index, t in enumerate(model) if index % 3]
    assert list(order) == model
    assert order.remove_due(25) == [t for t in model if t.deadline <= 25]
    assert list(order) == [t for t in model if t.deadline > 25]
    assert len(order) == len(list(order))


def test_expiry_frees_room_at_once() -> None:
    """New requests would be refused for the sake of requests that nobody waits for any more."""
    queue = _queue(max_requests=1)
    queue.push(_ticket(deadline=1.0), 0, 0.0)
    assert queue.full(10) == "the queue holds 1 requests, its bound"
    assert len(queue.expire(1.0)) == 1
    assert queue.full(10) is None


def test_what_is_larger_than_the_whole_bound_is_never_taken() -> None:
    """An operator's bound on memory would not be one."""
    assert "1001 more would exceed its bound of 1000" in (_queue().full(1001) or "")


def test_a_breach_is_counted_once_and_when_it_happens() -> None:
    """The alert on broken wait limits would come late, or count one user twice."""
    queue, early, late = _queue(), _ticket(), _ticket()
    queue.push(early, 0, 0.0)
    queue.push(late, 1, 0.05)
    queue.count_breaches(0.08)
    assert queue.breaches == 0
    queue.count_breaches(0.081)
    assert queue.breaches == 1
    queue.remove(early, 0.2)
    queue.remove(late, 0.2)
    assert queue.breaches == 2


def test_a_ticket_cannot_be_queued_twice() -> None:
    """Its tokens would be counted twice, and never given back."""
    queue, ticket = _queue(), _ticket()
    queue.push(ticket, 0, 0.0)
    with pytest.raises(ValueError, match="state is queued, expected new"):
        queue.push(ticket, 1, 0.0)
    assert ticket.state is State.QUEUED


@given(st.integers(1, 500), st.integers(0, 500), st.integers(1, 500))
def test_the_bucket_takes_the_first_whatever_its_size_and_then_up_to_its_threshold(
    threshold: int, batch: int, tokens: int
) -> None:
    """A prompt above the threshold would never leave, or a light batch would grow heavy."""
    assert TokenBucket(threshold).fits(batch, tokens) == (batch == 0 or batch + tokens <= threshold)


def test_a_bucket_cannot_go_negative() -> None:
    """A lost account would let a lane exceed its bound."""
    bucket = TokenBucket(256, pending=5)
    with pytest.raises(ValueError, match="tokens is 6, expected at most the 5 that are pending"):
        bucket.take(6)


def test_a_ticket_of_no_tokens_is_refused_by_name() -> None:
    """A free request could not be bounded."""
    with pytest.raises(ValueError, match="tokens is 0, expected at least 1"):
        _ticket(tokens=0)
