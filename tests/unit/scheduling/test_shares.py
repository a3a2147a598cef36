"""Deficit round robin: shares by weight, a bound on starvation, turns of a large prompt."""

from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from serving.scheduling import DeficitRoundRobin, starvation_bound_tokens

WEIGHTS = {"short": 8, "long": 3, "batch": 1}
QUANTUM, TURN = 256, 2048


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 1 << 32), st.integers(1, 9000), st.floats(0, 1), st.floats(0, 1))
def test_nobody_starves_beyond_the_bound(seed: int, head: int, busy: float, jumps: float) -> None:
    """A batch user could wait forever behind interactive traffic, overdue jumps included.

    Other lanes come, go, have credit, lose it and jump at random; `batch` waits, with credit for its head."""
    random = Random(seed)
    shares = DeficitRoundRobin(WEIGHTS, QUANTUM, TURN)
    bound = starvation_bound_tokens("batch", WEIGHTS, QUANTUM, TURN, dict.fromkeys(WEIGHTS, 9000))
    others = 0
    for _ in range(300):
        waiting = {lane: random.randint(1, 9000) for lane in ("short", "long") if random.random() < busy}
        able = {lane for lane in waiting if random.random() < 0.7} | {"batch"}
        waiting["batch"] = head
        jumper = random.choice(["short", "long"])
        jump = random.random() < jumps and jumper in able and shares.may_jump(jumper)
        chosen = jumper if jump else shares.pick(waiting, able)
        assert chosen is not None, "with credit for a head, something must go"
        assert chosen in able
        shares.charge(chosen, waiting[chosen])
        for lane in WEIGHTS:
            if lane not in waiting:
                shares.rest(lane)
            assert -9000 <= shares.deficit(lane) <= TURN + QUANTUM * WEIGHTS[lane]
        others = 0 if chosen == "batch" else others + waiting[chosen]
        assert others <= bound


def test_the_bound_holds_against_greedy_lanes_and_is_no_phantasy() -> None:
    """The bound in the docs would be a number that nobody could rely on, or that says nothing."""
    shares = DeficitRoundRobin(WEIGHTS, QUANTUM, TURN)
    largest = {"short": 512, "long": 8000, "batch": 2000}
    bound = starvation_bound_tokens("batch", WEIGHTS, QUANTUM, TURN, largest)
    worst = others = 0
    for _ in range(20_000):
        chosen = shares.pick(largest, WEIGHTS.keys())
        assert chosen is not None
        shares.charge(chosen, largest[chosen])
        others = 0 if chosen == "batch" else others + largest[chosen]
        worst = max(worst, others)
    assert bound / 4 < worst <= bound


@settings(max_examples=50, deadline=None)
@given(st.dictionaries(st.sampled_from("abcde"), st.integers(1, 10), min_size=2), st.integers(0, 1 << 32))
def test_shares_follow_the_weights_while_all_are_backlogged(weights: dict[str, int], seed: int) -> None:
    """A weight in the spec would mean nothing."""
    random = Random(seed)
    shares = DeficitRoundRobin(weights, QUANTUM, TURN)
    sent = dict.fromkeys(weights, 0)
    heads = {lane: random.randint(1, 9000) for lane in weights}
    for _ in range(400):
        chosen = shares.pick(heads, weights.keys())
        assert chosen is not None
        shares.charge(chosen, heads[chosen])
        sent[chosen] += heads[chosen]
        heads[chosen] = random.randint(1, 9000)
    # In rounds: what each lane got ÷ its quantum differs by no more than the accounts' range, on either side.
    rounds = {lane: sent[lane] / (QUANTUM * weight) for lane, weight in weights.items()}
    slack = {lane: (9000 + TURN + QUANTUM * weight) / (QUANTUM * weight) for lane, weight in weights.items()}
    assert max(rounds[lane] - slack[lane] for lane in weights) <= min(rounds[lane] + slack[lane] for lane in weights)


def test_a_large_prompt_goes_on_its_first_turn_and_its_lane_owes_the_rest() -> None:
    """Others would get nothing until a 7000-token prompt was paid for, or a long one would wait for its whole price."""
    shares = DeficitRoundRobin({"long": 1, "batch": 1}, 1000, 2000)
    heads = {"long": 7000, "batch": 1000}
    order = []
    for _ in range(8):
        chosen = shares.pick(heads, heads.keys())
        assert chosen is not None
        shares.charge(chosen, heads[chosen])
        order.append(chosen)
    assert order == ["batch", "long", *["batch"] * 6]


def test_debt_is_kept_by_a_lane_that_runs_empty() -> None:
    """A lane that sends one large prompt at a time would never pay for it."""
    shares = DeficitRoundRobin({"long": 1, "batch": 1}, 1000, 2000)
    shares.charge("long", 7000)
    shares.rest("long")
    assert shares.deficit("long") == -6000
    assert not shares.may_jump("long")


def test_a_round_does_not_go_on_without_a_lane_that_is_held_for_its_seat() -> None:
    """Batch would take the long lane's share of the engine, since it needs no seat."""
    shares = DeficitRoundRobin({"long": 1, "batch": 1}, 2000, 2000)
    heads = {"long": 7000, "batch": 1000}
    sent = 0
    while (chosen := shares.pick(heads, {"batch"}, {"long"})) is not None:
        shares.charge(chosen, heads[chosen])
        sent += heads[chosen]
    assert sent == 2000
    assert shares.pick(heads, {"batch", "long"}) == "long"
