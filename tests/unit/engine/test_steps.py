"""The step loop: what a replica computes in each step, and what it does when memory runs out."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.engine.kv_blocks import block_hashes
from serving.engine.sequence import EngineLimits, Plan, Sequence
from serving.engine.step_time import DEFAULT, Profile
from serving.engine.steps import SteppedEngine


def chunks(plan: Plan | None) -> dict[str, int]:
    """Tokens of each sequence in a plan."""
    assert plan is not None
    return {chunk.sequence.request_id: chunk.tokens for chunk in plan.chunks}


def step(engine: SteppedEngine, now: float = 0.0) -> dict[str, int]:
    """Plans and completes a step."""
    plan = engine.plan(now)
    assert plan is not None
    engine.complete(plan, now + plan.seconds)
    return chunks(plan)


def test_short_requests_wait_behind_a_long_prompt_that_runs() -> None:
    """Without head-of-line blocking, the simulated engine would show no gain from lanes, or a false one."""
    engine = SteppedEngine(DEFAULT, EngineLimits(max_num_batched_tokens=2048))
    engine.add(Sequence("long", 6000, 4), 0.0)
    step(engine)
    for name in ("a", "b"):
        engine.add(Sequence(name, 64, 4), 0.0)
    assert step(engine) == {"long": 2048}
    assert step(engine) == {"long": 1904, "a": 64, "b": 64}
    assert step(engine) == {"long": 1, "a": 1, "b": 1}


def test_no_more_sequences_run_than_there_are_seats() -> None:
    """A replica that ran more than `max_num_seqs` would make every limit measured against it worthless."""
    engine = SteppedEngine(DEFAULT, EngineLimits(max_num_seqs=2))
    for name in ("a", "b", "c"):
        engine.add(Sequence(name, 10, 2), 0.0)
    assert set(step(engine)) == {"a", "b"}
    assert set(step(engine)) == {"a", "b"}
    assert set(step(engine)) == {"c"}


def test_the_last_to_join_is_put_back_when_blocks_run_out_and_starts_over() -> None:
    """Preemption is where overloaded engines lose their time: a simulation without it is too kind to overload."""
    profile = Profile(block_size=4, kv_blocks=5)
    engine = SteppedEngine(profile, EngineLimits(prefix_caching=False))
    first, second = Sequence("first", 7, 8), Sequence("second", 7, 8)
    engine.add(first, 0.0)
    engine.add(second, 0.0)
    assert step(engine) == {"first": 7, "second": 7}
    assert step(engine) == {"first": 1, "second": 1}
    plan = engine.plan(0.0)
    assert chunks(plan) == {"first": 1}
    assert plan is not None
    assert plan.preempted == (second,)
    engine.complete(plan, 0.1)
    assert (second.computed, second.output_tokens, second.preemptions) == (0, 2, 1)
    while first.output_tokens < 8:
        assert set(step(engine)) == {"first"}
    assert step(engine) == {"second": 9}, "prompt and what it had produced are computed anew"


def test_a_prompt_is_admitted_only_when_all_of_it_fits() -> None:
    """vLLM reserves the whole prompt: a simulation that looked at the first chunk only would thrash instead of wait."""
    engine = SteppedEngine(Profile(block_size=4, kv_blocks=9), EngineLimits(max_num_batched_tokens=16))
    engine.add(Sequence("runs", 12, 4), 0.0)
    engine.add(Sequence("waits", 24, 4), 0.0)
    assert step(engine) == {"runs": 12}
    assert step(engine) == {"runs": 1}


def test_a_repeated_prompt_is_found_in_the_prefix_cache_but_for_its_last_block() -> None:
    """A wrong hit count makes replicas look faster than they are on traffic that repeats."""
    profile = Profile(block_size=16, kv_blocks=100)
    hashes = block_hashes(list(range(64)), 16)
    engine = SteppedEngine(profile, EngineLimits())
    engine.add(Sequence("first", 64, 1, hashes), 0.0)
    assert step(engine) == {"first": 64}
    again = Sequence("again", 64, 1, hashes)
    engine.add(again, 0.0)
    plan = engine.plan(0.0)
    assert chunks(plan) == {"again": 16}
    assert plan is not None
    assert (plan.queried_tokens, plan.hit_tokens, again.cached_tokens) == (64, 48, 48)


def test_a_prompt_hits_blocks_that_the_same_step_fills() -> None:
    """vLLM indexes a block when the step that fills it is planned; bursts of equal prompts depend on it."""
    hashes = block_hashes(list(range(64)), 16)
    engine = SteppedEngine(Profile(block_size=16, kv_blocks=100), EngineLimits())
    engine.add(Sequence("a", 64, 1, hashes), 0.0)
    engine.add(Sequence("b", 64, 1, hashes), 0.0)
    assert step(engine) == {"a": 64, "b": 16}


def test_prefix_caching_can_be_switched_off() -> None:
    """Benchmarks that send a prompt twice must be able to pay for it twice."""
    hashes = block_hashes(list(range(64)), 16)
    engine = SteppedEngine(Profile(block_size=16, kv_blocks=100), EngineLimits(prefix_caching=False))
    for name in ("a", "b"):
        engine.add(Sequence(name, 64, 1, hashes), 0.0)
        plan = engine.plan(0.0)
        assert plan is not None
        assert (chunks(plan), plan.queried_tokens) == ({name: 64}, 0)
        engine.complete(plan, 0.1)


def test_the_time_of_a_step_is_the_sum_of_what_is_in_it() -> None:
    """Every latency of the simulated engine is a sum of these."""
    profile = Profile(
        step_ms=1, prefill_token_ms=0.01, decode_ms=0.1, decode_context_ms=0.001, attention_ms=0.0001, prefill_ms=2
    )
    engine = SteppedEngine(profile, EngineLimits())
    engine.add(Sequence("decodes", 50, 5), 0.0)
    step(engine)
    engine.add(Sequence("prefills", 100, 5), 0.0)
    plan = engine.plan(0.0)
    assert plan is not None
    # 1 per step; one decode with 50 tokens before it; one chunk of 100 tokens whose middle has 50 before it.
    assert plan.seconds * 1000 == pytest.approx(1 + 0.1 + 0.05 + 2 + 1 + 100 * 50 * 0.0001)


def test_an_abort_in_the_middle_of_a_step_frees_its_blocks_at_the_end_and_brings_no_token() -> None:
    """Clients that leave must not keep seats or memory, or a replica fills up with nobody."""
    engine = SteppedEngine(DEFAULT, EngineLimits())
    leaves, stays = Sequence("leaves", 300, 5), Sequence("stays", 300, 5)
    engine.add(leaves, 0.0)
    engine.add(stays, 0.0)
    plan = engine.plan(0.0)
    assert plan is not None
    engine.abort(leaves)
    end = engine.complete(plan, 0.1)
    assert end.produced == (stays,)
    assert engine.running == [stays]
    engine.abort(stays)
    assert not engine.busy
    assert engine.kv.usage == 0


@pytest.mark.parametrize(("prompt", "output"), [(0, 1), (1, 0), (8000, 193)])
def test_what_can_never_end_is_refused(prompt: int, output: int) -> None:
    """A sequence that can never finish would block the head of the queue for ever."""
    engine = SteppedEngine(DEFAULT, EngineLimits())
    with pytest.raises(ValueError, match=f"got {prompt} prompt and {output} output tokens, expected"):
        engine.add(Sequence("r", prompt, output), 0.0)


def test_what_is_larger_than_the_cache_is_refused() -> None:
    """Such a request would be preempted for ever."""
    engine = SteppedEngine(Profile(block_size=16, kv_blocks=5), EngineLimits())
    with pytest.raises(ValueError, match="got 66 tokens, expected at most 64, which is the whole KV cache"):
        engine.add(Sequence("r", 60, 6), 0.0)


REQUESTS = st.lists(
    st.tuples(st.integers(1, 90), st.integers(1, 30), st.integers(0, 2), st.booleans(), st.integers(0, 20)),
    min_size=1,
    max_size=25,
)


@given(
    requests=REQUESTS,
    seats=st.integers(1, 8),
    budget=st.integers(1, 64),
    blocks=st.integers(17, 40),
    caching=st.booleans(),
)
@settings(max_examples=150, deadline=None)
def test_every_request_ends_with_all_its_tokens_and_no_block_is_lost(
    requests: list[tuple[int, int, int, bool, int]], seats: int, budget: int, blocks: int, caching: bool
) -> None:
    """A leaked block, a lost or a doubled token: each would slowly turn a simulated replica into a liar."""
    profile = Profile(block_size=8, kv_blocks=blocks)
    limits = EngineLimits(max_num_seqs=seats, max_num_batched_tokens=budget, prefix_caching=caching)
    engine = SteppedEngine(profile, limits)
    arrivals = sorted(
        (
            (at, Sequence(f"r{i}", prompt, output, block_hashes([kind] * prompt, 8)), leaves)
            for i, (prompt, output, kind, leaves, at) in enumerate(requests)
        ),
        key=lambda arrival: arrival[0],
    )
    produced: dict[str, int] = {}
    now, steps = 0.0, 0
    while arrivals or engine.busy:
        while arrivals and arrivals[0][0] <= steps:
            _, sequence, leaves = arrivals.pop(0)
            engine.add(sequence, now)
            if leaves and steps % 2:
                engine.abort(sequence)
                produced[sequence.request_id] = sequence.max_tokens
        plan = engine.plan(now)
        steps += 1
        assert steps < 20_000, "the engine makes no progress"
        if plan is None:
            continue
        assert 0 < sum(chunk.tokens for chunk in plan.chunks) <= budget
        assert len(engine.running) <= seats
        held = {block for sequence in engine.running for block in sequence.blocks}
        assert len(held) + engine.kv.free == engine.kv.usable
        now += plan.seconds
        for sequence in engine.complete(plan, now).produced:
            produced[sequence.request_id] = produced.get(sequence.request_id, 0) + 1
    assert engine.kv.free == engine.kv.usable
    assert sorted(produced) == sorted(f"r{i}" for i in range(len(requests)))
    assert all(produced[f"r{i}"] == output for i, (_, output, _, _, _) in enumerate(requests))
