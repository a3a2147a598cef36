"""Measured rates, and the estimate of what an engine has still to compute."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.scheduling import Ticket
from serving.scheduling.prefill import UNKNOWN_PREFILL, PrefillOrder
from serving.scheduling.rates import DRAIN_TIME_CONSTANT, PrefillTime, TokenRate


def _drained(seconds: float, tokens: int) -> TokenRate:
    rate = TokenRate()
    for step in range(int(seconds * 10) + 1):
        rate.mark(step / 10, tokens, counting=True)
    return rate


def test_a_drain_rate_is_tokens_per_backlogged_second() -> None:
    """A refusal would rest on a wrong promise."""
    assert _drained(30.0, 100).rate(30.0) == pytest.approx(1000, rel=0.02)


def test_no_rate_before_it_was_measured() -> None:
    """The first burst of the day would be refused on a guess."""
    assert TokenRate().rate(100.0) is None
    assert _drained(1.0, 100).rate(1.0) is None


def test_what_passes_an_empty_queue_is_no_drain() -> None:
    """A quiet hour would promise a drain that no backlog ever gets."""
    rate = TokenRate()
    for step in range(1000):
        rate.mark(step / 10, 1_000_000, counting=False)
    assert rate.rate(100.0) is None


def test_a_stall_presses_the_rate_down_but_never_to_nothing() -> None:
    """After a passing stall everything would be refused, and nothing be measured again."""
    rate = _drained(30.0, 100)
    for step in range(1, 6000):
        rate.mark(30.0 + step / 10, 0, counting=True)
    stalled = rate.rate(700.0)
    assert stalled == pytest.approx(1000 / 2.71828, rel=0.05)
    rate.mark(700.0, 100, counting=True)
    for step in range(1, int(3 * DRAIN_TIME_CONSTANT * 10)):
        rate.mark(700.0 + step / 10, 100, counting=True)
    assert rate.rate(700.0 + 3 * DRAIN_TIME_CONSTANT) == pytest.approx(1000, rel=0.05)


@settings(deadline=None)
@given(st.lists(st.integers(2049, 8000), min_size=5, max_size=40, unique=True))
def test_the_time_of_a_long_prompt_is_learned_with_its_curve(lengths: list[int]) -> None:
    """The next long prompt would be sent too early, and short requests would wait behind two."""
    model = PrefillTime(curved=True)
    for n in lengths:
        model.add(n, 13e-6 * n + 1.25e-8 * n**2)
    spread = max(lengths) / min(lengths)
    for n in (min(lengths), max(lengths)):
        if spread > 2:
            assert model.seconds(n) == pytest.approx(13e-6 * n + 1.25e-8 * n**2, rel=0.02)
        assert model.tokens(model.seconds(n)) == pytest.approx(n)


def _ticket(tokens: int, streamed: bool = True) -> Ticket:
    return Ticket("r", "a", tokens, received=0.0, deadline=9.0, streamed=streamed)


def _order(tokens_per_second: float | None) -> PrefillOrder:
    order = PrefillOrder(turn=2048, ending=512)
    order.scraped_rate = tokens_per_second
    return order


def test_without_a_rate_a_streamed_prompt_counts_whole_until_its_first_token() -> None:
    """The engine would be overfilled on a guess."""
    order, ticket = _order(None), _ticket(1000)
    order.add(ticket, 0.0)
    order.settle(100.0)
    assert order.outstanding == 1000
    order.computed(ticket, 100.0)
    assert order.outstanding == 0


def test_without_a_rate_one_that_does_not_stream_is_taken_as_computed_after_a_stated_time() -> None:
    """Requests that do not stream would hold credit through their whole decode."""
    order = _order(None)
    for _ in range(3):
        order.add(_ticket(1000, streamed=False), 0.0)
    assert order.time_of_progress(1) == UNKNOWN_PREFILL
    order.settle(UNKNOWN_PREFILL)
    assert order.outstanding == 0


def test_progress_is_first_come_first_served_at_the_measured_rate() -> None:
    """Credit would come back too late, and the engine idle."""
    order = _order(1000.0)
    order.add(_ticket(1000, streamed=False), 0.0)
    order.add(_ticket(1000), 0.0)
    order.settle(0.5)
    assert order.outstanding == pytest.approx(1500)
    order.settle(1.5)
    assert order.outstanding == pytest.approx(500)
    order.settle(99.0)
    assert order.outstanding == 0
    assert order.time_of_progress(1001) is None, "what streams will tell; nothing behind it is guessed"


def test_a_large_prompt_gives_up_its_seat_shortly_before_its_end_and_for_good() -> None:
    """The engine would idle between two long prompts, or hold three at once."""
    order, ticket = _order(1000.0), _ticket(4000)
    order.add(ticket, 0.0)
    assert order.time_of_seat() == pytest.approx(3.488)
    order.settle(3.48)
    assert order.seats_used == 1
    order.settle(3.49)
    assert order.seats_used == 0
    order.scraped_rate = 1.0
    order.settle(3.5)
    assert order.seats_used == 0


_event = st.tuples(st.sampled_from(["add", "computed", "left", "idle", "wait"]), st.integers(1, 5000), st.booleans())


@settings(deadline=None)
@given(st.lists(_event, max_size=80), st.sampled_from([None, 100.0, 1e6]))
def test_accounts_are_never_negative_and_end_at_nothing(
    events: list[tuple[str, int, bool]], rate: float | None
) -> None:
    """A lost or doubled event would give a replica too much, or nothing, until a restart."""
    order, now, tickets = _order(rate), 0.0, []
    for kind, number, streamed in events:
        now += number / 5000
        if kind == "add":
            tickets.append(_ticket(number, streamed))
            order.add(tickets[-1], now)
        elif kind == "idle":
            order.idle(now - 0.5, now)
        elif kind in ("computed", "left") and tickets:
            getattr(order, kind)(tickets[number % len(tickets)], now)
        order.settle(now)
        held = [ticket for ticket in tickets if ticket in order]
        assert 0 <= order.outstanding <= sum(ticket.tokens for ticket in held)
        assert -1e-6 <= order.small_tokens("a") <= sum(t.tokens for t in held if t.tokens <= 2048)
        assert 0 <= order.seats_used <= sum(1 for t in held if t.tokens > 2048)
    for ticket in tickets:
        order.left(ticket, now)
    assert (order.outstanding, order.small_tokens("a"), order.seats_used) == (0, 0, 0)
