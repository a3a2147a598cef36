"""Figures of a run: nobody who waited in vain may drop out of them."""

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving import spec as spec_file
from serving.spec import Spec
from serving.timeline import Boundary, Outcome, Timeline
from serving.workload.summary import Group, quantile, stratum, stratum_names, summarize


@pytest.fixture(scope="module")
def spec() -> Spec:
    return spec_file.load(Path(__file__).parents[3] / "laneway.yaml")


def request(
    outcome: Outcome = Outcome.COMPLETED,
    *,
    ttft: float | None = 0.05,
    closed: float = 1.0,
    lane: str = "interactive-short",
    prompt: int = 100,
    output: int = 11,
    tpot: float = 0.01,
) -> Timeline:
    timeline = Timeline("r", Boundary.CLIENT, lane=lane, prompt_tokens=prompt, output_tokens=output)
    timeline.scheduled, timeline.sent = 10.0, 10.001
    if ttft is not None:
        timeline.first_token = 10.0 + ttft
        timeline.last_token = timeline.first_token + tpot * (output - 1)
    timeline.end(outcome, 10.0 + closed)
    return timeline


def group(spec: Spec, timelines: list[Timeline], name: str = "all", lane: str = "interactive-short") -> Group:
    groups = summarize(timelines, spec.lanes, spec.strata, window=10.0, elapsed=20.0)
    return next(group for group in groups if (group.lane, group.stratum) == (lane, name))


@pytest.mark.parametrize(
    "outcome",
    [
        Outcome.REJECTED_FULL, Outcome.REJECTED_INFEASIBLE, Outcome.REJECTED_ENGINE, Outcome.EXPIRED,
        Outcome.ENGINE_ERROR, Outcome.ENGINE_TIMEOUT, Outcome.NO_REPLICA, Outcome.DRAINING,
    ],
)  # fmt: skip
def test_who_was_not_served_waited_for_ever(spec: Spec, outcome: Outcome) -> None:
    """A gateway that refuses nine of ten would otherwise have the best p95 of all."""
    served = [request() for _ in range(9)]
    figures = group(spec, [*served, request(outcome, ttft=None)])
    assert figures.ttft.count == 10
    assert figures.ttft.p50 == pytest.approx(0.05)
    assert figures.ttft.p95 == math.inf
    assert figures.ttft_met == pytest.approx(0.9)


@pytest.mark.parametrize("outcome", [Outcome.REJECTED_INVALID, Outcome.REJECTED_AUTH, Outcome.REJECTED_QUOTA])
def test_what_was_never_valid_load_is_in_no_population(spec: Spec, outcome: Outcome) -> None:
    """A client with a wrong key must not burn the lane's objective."""
    figures = group(spec, [request(), request(outcome, ttft=None)])
    assert (figures.offered, figures.ttft.count, figures.ttft_met) == (2, 1, 1.0)


def test_who_left_before_the_objective_is_not_judged_and_who_left_after_it_missed(spec: Spec) -> None:
    """Impatience before the objective says nothing; after it, it says all."""
    early = request(Outcome.CANCELLED, ttft=None, closed=0.05)
    late = request(Outcome.CANCELLED, ttft=None, closed=0.5)
    assert group(spec, [request(), early]).ttft.count == 1
    assert group(spec, [request(), late]).ttft_met == 0.5


def test_goodput_counts_requests_within_both_objectives_over_the_window(spec: Spec) -> None:
    """Fast first tokens followed by a crawl are not good service."""
    figures = group(spec, [request(), request(ttft=0.2), request(tpot=0.06), request(Outcome.ENGINE_ERROR)])
    assert (figures.good, figures.goodput) == (1, 0.1)


def test_output_tokens_count_over_the_time_to_the_last_answer(spec: Spec) -> None:
    """Over the window alone, a backlog worked off afterwards would look like speed."""
    assert group(spec, [request(), request()]).output_tokens_per_second == pytest.approx(22 / 20)


def test_strata_split_a_lane_and_lose_nobody(spec: Spec) -> None:
    """Runs are compared inside a stratum: a request in none, or in two, is a wrong comparison."""
    requests = [request(prompt=prompt) for prompt in (1, 128, 129, 512)]
    assert group(spec, requests, "≤128").offered == 2
    assert group(spec, requests, "≤512").offered == 2


@given(st.integers(0, 100_000))
def test_every_length_is_in_a_named_stratum(tokens: int) -> None:
    """A stratum without a name would not be shown."""
    edges = (128, 512, 2048)
    assert stratum(edges, tokens) in stratum_names(edges)


@given(st.lists(st.floats(0, 100), min_size=1), st.floats(0.01, 0.99))
def test_a_quantile_is_the_smallest_value_that_enough_do_not_exceed(values: list[float], share: float) -> None:
    """An interpolated percentile is nobody's wait."""
    ordered = sorted(values)
    found = quantile(ordered, share)
    assert found in values
    assert found is not None
    assert sum(value <= found for value in values) >= share * len(values) - 1e-6
    assert sum(value < found for value in values) < share * len(values) + 1e-6


def test_a_lane_that_the_spec_does_not_know_is_refused(spec: Spec) -> None:
    """Left out in silence, its requests would be missing from every sum."""
    with pytest.raises(ValueError, match="lane: got mystery, expected one of"):
        summarize([request(lane="mystery")], spec.lanes, spec.strata, 1.0, 1.0)
