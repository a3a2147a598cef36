"""A share "within 100 ms" can only be read from buckets exactly if 100 ms is one of them."""

import math
from itertools import pairwise

import pytest

from serving.spec import Spec, parse
from serving.telemetry import buckets, catalog
from serving.telemetry.catalog import Kind
from tests.unit.spec_edits import with_value
from tests.unit.telemetry.timelines import SPEC

ODD = parse(with_value("lanes[0].ttft.seconds", 0.137))


@pytest.mark.parametrize("spec", [SPEC, ODD], ids=["shipped", "edited"])
def test_every_threshold_of_the_spec_is_a_bound(spec: Spec) -> None:
    """Lost: an SLO that says 95 % while its neighbour bucket's share is shown, off by all that lies between."""
    ttft = buckets.ttft_bounds(spec)
    for lane in spec.lanes:
        assert lane.ttft.seconds in ttft
        assert any(math.isclose(lane.wait_limit, bound, rel_tol=1e-9) for bound in ttft)
        assert lane.deadline in ttft
        assert lane.deadline in buckets.duration_bounds(spec)
        if lane.tpot:
            assert lane.tpot.seconds in buckets.tpot_bounds(spec)
            assert lane.tpot.seconds in buckets.itl_bounds(spec)
        if lane.gate:
            assert lane.ttft.seconds in buckets.fine_bounds(spec)
    rollout = spec.rollout
    for threshold in (
        rollout.start_median,
        rollout.canary_p95,
        rollout.rollback_median,
        rollout.rollback_p95,
        rollout.edge_median,
    ):
        assert threshold in ttft
        assert threshold in buckets.fine_bounds(spec)
    assert spec.gateway.timeouts.total in buckets.duration_bounds(spec)


def test_a_threshold_outside_of_the_fine_range_is_a_fine_bound_all_the_same() -> None:
    """Lost: the gate of a slow model; everything between 2 s and its threshold of 3 s would be one bucket."""
    slow = parse(with_value("rollout.canary_p95", 3.0))
    assert 3.0 in buckets.fine_bounds(slow)


def test_what_lies_between_the_stamps_of_a_request_has_the_bounds_of_its_ttft() -> None:
    """Lost: the wait limit as a bound of the queue's histogram, which tells a breach from a wait."""
    bounds = buckets.histogram_bounds(ODD)
    for metric in (catalog.TTFT, catalog.CLIENT_TTFT, catalog.QUEUE_WAIT, catalog.BATCH_WAIT, catalog.DISPATCH):
        assert bounds[metric] == buckets.ttft_bounds(ODD), metric.name
    assert ODD.gateway.timeouts.idle in bounds[catalog.ITL_MAX]
    for pool in ODD.pools:
        assert {pool.batch_tokens, pool.turn_tokens} <= set(bounds[catalog.BATCH_TOKENS])


def test_the_conventions_bounds_stay_whatever_the_spec_says() -> None:
    """Lost: the comparison with any other server that follows the convention."""
    assert set(buckets.TTFT_CONVENTION) <= set(buckets.ttft_bounds(ODD))
    assert set(buckets.TPOT_CONVENTION) <= set(buckets.tpot_bounds(ODD))
    assert set(buckets.DURATION_CONVENTION) <= set(buckets.duration_bounds(ODD))
    assert buckets.DURATION_CONVENTION[0] == 0.01
    assert buckets.DURATION_CONVENTION[-1] == 81.92


def test_fine_bounds_are_never_more_than_ten_percent_apart() -> None:
    """Lost: the gate's resolution; a candidate 30 % better could fall into its control's bucket."""
    bounds = buckets.fine_bounds(SPEC)
    assert bounds[0] == 0.010
    assert bounds[-1] == 2.0
    assert all(high / low < 1.101 for low, high in pairwise(bounds))


def test_every_histogram_has_ascending_finite_bounds() -> None:
    """Lost: the start of the gateway; the exporter refuses what does not ascend."""
    bounds = buckets.histogram_bounds(ODD)
    assert set(bounds) == {metric for metric in catalog.METRICS if metric.kind is Kind.HISTOGRAM}
    for metric, values in bounds.items():
        assert all(low < high for low, high in pairwise(values)), metric.name
        assert all(math.isfinite(value) for value in values), metric.name


def test_no_bound_shows_the_dust_of_binary_arithmetic() -> None:
    """Lost: alert rules, whose `le="0.08"` would match no series called `le="0.08000000000000002"`."""
    for values in buckets.histogram_bounds(SPEC).values():
        assert all(len(repr(value)) <= 14 for value in values)
