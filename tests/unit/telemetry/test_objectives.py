"""Nobody may drop out of an objective's population by having been served badly."""

import math

import pytest

from serving.spec import Lane
from serving.telemetry.objectives import NOT_COUNTED, judge, population_ttft, prompt_strata, prompt_stratum
from serving.timeline import NOT_OFFERED, Boundary, Outcome, Timeline
from tests.unit.telemetry.timelines import LANE, SPEC, ended

TTFT = LANE.ttft.seconds
IN_TIME, TOO_LATE = 0.5 * TTFT, 2 * TTFT
FAILED = sorted(set(Outcome) - NOT_OFFERED - {Outcome.COMPLETED, Outcome.CANCELLED})


@pytest.mark.parametrize("outcome", FAILED)
@pytest.mark.parametrize("first_token", [None, IN_TIME, TOO_LATE], ids=["no token", "in time", "late"])
def test_who_was_refused_expired_or_failed_missed_every_objective(outcome: Outcome, first_token: float | None) -> None:
    """Lost: an alert while every request is refused within a millisecond."""
    timeline = ended(outcome, first_token=first_token, closed=TOO_LATE)
    verdict = judge(timeline, LANE)
    assert verdict.ttft is False
    assert verdict.success is False
    assert verdict.good is False
    assert verdict.tpot is (None if first_token is None else False)
    assert population_ttft(timeline, TTFT) == math.inf


@pytest.mark.parametrize("outcome", sorted(NOT_OFFERED))
@pytest.mark.parametrize("closed", [IN_TIME, TOO_LATE])
def test_what_was_never_valid_load_is_in_no_population(outcome: Outcome, closed: float) -> None:
    """Lost: error budgets, to anybody who sends nonsense."""
    timeline = ended(outcome, closed=closed)
    assert judge(timeline, LANE) == NOT_COUNTED
    assert population_ttft(timeline, TTFT) is None


@pytest.mark.parametrize(("first_token", "met"), [(IN_TIME, True), (TTFT, True), (TOO_LATE, False)])
def test_a_completed_request_is_judged_by_its_first_token(first_token: float, met: bool) -> None:
    """Lost: the meaning of the objective. Its own bound still counts as within."""
    verdict = judge(ended(Outcome.COMPLETED, first_token=first_token, tokens=4), LANE)
    assert (verdict.ttft, verdict.tpot, verdict.success, verdict.good) == (met, True, True, met)


@pytest.mark.parametrize(
    ("first_token", "closed", "met"),
    [(None, IN_TIME, None), (None, TOO_LATE, False), (IN_TIME, TOO_LATE, True), (TOO_LATE, 3 * TTFT, False)],
    ids=["left early", "gave up waiting", "left while served", "left after a late token"],
)
def test_a_client_that_left_counts_once_the_objective_had_passed(
    first_token: float | None, closed: float, met: bool | None
) -> None:
    """Lost: the worst waits, those that made users go; or, the other way, budgets burnt by users who closed a tab."""
    verdict = judge(ended(Outcome.CANCELLED, first_token=first_token, tokens=1, closed=closed), LANE)
    assert verdict.ttft is met
    assert verdict.success is None
    assert verdict.good is False


def test_a_client_that_left_after_the_deadline_without_a_token_was_failed() -> None:
    """Lost: the failure of a request that should have been answered 504 by then."""
    assert judge(ended(Outcome.CANCELLED, closed=LANE.deadline * 1.01), LANE).success is False


def test_a_stream_that_a_client_left_in_a_stall_missed_its_pace() -> None:
    """Lost: stalls so long that nobody waits for the token that would have shown them."""
    assert LANE.tpot is not None
    stalled = ended(Outcome.CANCELLED, first_token=0.01, tokens=3, closed=0.03 + 4 * LANE.tpot.seconds)
    assert judge(stalled, LANE).tpot is False
    steady = ended(Outcome.CANCELLED, first_token=0.01, tokens=3, closed=0.031)
    assert judge(steady, LANE).tpot is True


def test_a_slow_stream_is_not_good_even_with_its_first_token_in_time() -> None:
    """Lost: goodput that falls when only the pace does."""
    assert LANE.tpot is not None
    verdict = judge(ended(Outcome.COMPLETED, first_token=IN_TIME, tokens=4, gap=2 * LANE.tpot.seconds), LANE)
    assert (verdict.ttft, verdict.tpot, verdict.good) == (True, False, False)


@pytest.mark.parametrize("tokens", [None, 0, 1])
def test_an_answer_without_a_second_token_has_no_pace(tokens: int | None) -> None:
    """Lost: a pace objective, to a division by what is not there."""
    assert judge(ended(Outcome.COMPLETED, first_token=IN_TIME, tokens=tokens), LANE).tpot is None


def test_a_lane_without_a_pace_objective_has_none_to_miss() -> None:
    """Lost: the batch lane's goodput."""
    batch: Lane = next(lane for lane in SPEC.lanes if lane.tpot is None)
    verdict = judge(ended(Outcome.COMPLETED, first_token=1.0, tokens=3, gap=9.0, lane=batch.name), batch)
    assert (verdict.tpot, verdict.good) == (None, True)


def test_a_request_that_has_not_ended_cannot_be_judged() -> None:
    """Lost: the certainty that a request is counted once."""
    with pytest.raises(ValueError, match="outcome is None"):
        judge(Timeline("r1", Boundary.GATEWAY), LANE)


@pytest.mark.parametrize(
    ("tokens", "stratum"),
    [(1, "le128"), (128, "le128"), (129, "le512"), (2048, "le2048"), (2049, "gt2048"), (None, "unknown")],
)
def test_a_prompt_belongs_to_the_stratum_whose_edge_it_does_not_exceed(tokens: int | None, stratum: str) -> None:
    """Lost: a fair comparison; a different mix of lengths alone gave 91 % false alarms."""
    assert prompt_stratum(SPEC, tokens) == stratum
    assert prompt_strata(SPEC) == ("le128", "le512", "le2048", "gt2048")
