"""What one request, one picture and one spec add to the metrics."""

import math

import pytest

from serving.ledger import Ledger, State
from serving.spec import parse
from serving.telemetry import catalog
from serving.telemetry.metrics import Metrics
from serving.telemetry.snapshot import Snapshot
from serving.timeline import Outcome
from tests.unit.spec_edits import with_value
from tests.unit.telemetry.readings import exposition, value
from tests.unit.telemetry.timelines import LANE, MODEL, SPEC, ended

TTFT = LANE.ttft.seconds


def test_series_that_rules_take_a_rate_of_exist_before_their_first_event() -> None:
    """Lost: the first failure after a start; a rate over a series that appears with the value 1 is 0."""
    metrics = Metrics(SPEC)
    for outcome in Outcome:
        assert value(metrics, catalog.REQUESTS, MODEL, LANE.name, outcome) == 0
        assert value(metrics, catalog.REQUESTS, catalog.OTHER, "none", outcome) == 0
        assert value(metrics, catalog.COHORT_REQUESTS, LANE.name, "baseline", outcome) == 0
    for objective in catalog.OBJECTIVES:
        assert value(metrics, catalog.SLO, MODEL, LANE.name, objective) == 0
        assert value(metrics, catalog.SLO_MISSED, MODEL, LANE.name, objective) == 0
    assert value(metrics, catalog.TTFT, MODEL, LANE.name, "baseline", suffix="_count") == 0
    batch = next(lane for lane in SPEC.lanes if lane.tpot is None)
    assert value(metrics, catalog.SLO, MODEL, batch.name, "tpot") is None


NEVER_VALID = {Outcome.REJECTED_INVALID, Outcome.REJECTED_AUTH, Outcome.REJECTED_QUOTA}
COUNTED = {
    # (outcome, first token, its time or else the end's): ttft total and missed, success total and missed, good
    (Outcome.COMPLETED, "token", "within"): (1, 0, 1, 0, 1),
    (Outcome.COMPLETED, "token", "beyond"): (1, 1, 1, 0, 0),
    (Outcome.COMPLETED, "none", "within"): (1, 1, 1, 0, 0),
    (Outcome.COMPLETED, "none", "beyond"): (1, 1, 1, 0, 0),
    (Outcome.CANCELLED, "token", "within"): (1, 0, 0, 0, 0),
    (Outcome.CANCELLED, "token", "beyond"): (1, 1, 0, 0, 0),
    (Outcome.CANCELLED, "none", "within"): (0, 0, 0, 0, 0),
    (Outcome.CANCELLED, "none", "beyond"): (1, 1, 0, 0, 0),
}
"""Every other outcome: nothing if it was never valid load, else a miss of both objectives."""


@pytest.mark.parametrize("when", ["within", "beyond"])
@pytest.mark.parametrize("first", ["token", "none"])
@pytest.mark.parametrize("outcome", sorted(Outcome))
def test_slo_counters_count_each_outcome_as_the_objectives_say(outcome: Outcome, first: str, when: str) -> None:
    """Lost: error budgets that hold what users went through. The population itself: test_objectives."""
    closed = (2 if when == "beyond" else 0.5) * TTFT
    metrics = Metrics(SPEC)
    timeline = ended(outcome, first_token=closed if first == "token" else None, tokens=1, closed=closed)
    metrics.close(timeline, sampled=False)
    other = (0, 0, 0, 0, 0) if outcome in NEVER_VALID else (1, 1, 1, 1, 0)
    assert (
        value(metrics, catalog.SLO, MODEL, LANE.name, "ttft"),
        value(metrics, catalog.SLO_MISSED, MODEL, LANE.name, "ttft"),
        value(metrics, catalog.SLO, MODEL, LANE.name, "success"),
        value(metrics, catalog.SLO_MISSED, MODEL, LANE.name, "success"),
        value(metrics, catalog.GOOD, MODEL, LANE.name),
    ) == COUNTED.get((outcome, first, when), other)
    assert value(metrics, catalog.REQUESTS, MODEL, LANE.name, outcome) == 1
    assert value(metrics, catalog.COHORT_REQUESTS, LANE.name, "baseline", outcome) == 1


def test_the_first_failure_of_a_candidate_is_seen_as_an_increase() -> None:
    """Lost: the error that starts a spike; a series that appears with the value 1 has not increased."""
    metrics = Metrics(SPEC)
    assert value(metrics, catalog.COHORT_REQUESTS, LANE.name, "candidate", "engine_error") is None
    metrics.set_compared(["candidate", "control"])
    for cohort in ("candidate", "control"):
        for outcome in Outcome:
            assert value(metrics, catalog.COHORT_REQUESTS, LANE.name, cohort, outcome) == 0
        assert value(metrics, catalog.TTFT, MODEL, LANE.name, cohort, suffix="_count") == 0


def test_conservation_adds_up_in_one_picture_and_received_never_falls() -> None:
    """Lost: the alert on requests that got lost; a falling counter would look like a restart at every request."""
    metrics = Metrics(SPEC)
    ledger = Ledger((LANE.name,))
    entry = ledger.receive()
    metrics.hand(Snapshot(lanes=ledger.snapshot()))
    assert value(metrics, catalog.UNCLASSIFIED) == 1
    assert value(metrics, catalog.RECEIVED, "none") == 0
    entry.classify(LANE.name)
    entry.move(State.QUEUED)
    metrics.hand(Snapshot(lanes=ledger.snapshot()))
    assert value(metrics, catalog.UNCLASSIFIED) == 0
    assert value(metrics, catalog.RECEIVED, LANE.name) == 1
    assert value(metrics, catalog.QUEUED, LANE.name) == 1
    entry.end(Outcome.EXPIRED)
    ledger.receive().end(Outcome.REJECTED_AUTH)
    metrics.hand(Snapshot(lanes=ledger.snapshot()))
    assert value(metrics, catalog.RECEIVED, "none") == 1
    assert value(metrics, catalog.DRIFT, LANE.name) == 0
    ledger._lanes[LANE.name].received += 1  # the defect that the gauge is there for
    metrics.hand(Snapshot(lanes=ledger.snapshot()))
    assert value(metrics, catalog.DRIFT, LANE.name) == 1


@pytest.mark.parametrize(("outcome", "waited"), [(Outcome.EXPIRED, 1), (Outcome.REJECTED_FULL, 0)])
def test_queue_wait_has_those_who_never_left_the_queue_alive(outcome: Outcome, waited: int) -> None:
    """Lost: the longest waits of all; or, the other way, a pile of zeros from requests that never waited."""
    metrics = Metrics(SPEC)
    metrics.close(ended(outcome, closed=2.0), sampled=False)
    assert value(metrics, catalog.QUEUE_WAIT, MODEL, LANE.name, "baseline", suffix="_count") == waited


def test_the_fine_histogram_holds_the_compared_cohorts_and_those_they_failed() -> None:
    """Lost: the gate; a candidate that refuses every slow request would look fast."""
    metrics = Metrics(SPEC)
    fast = ended(Outcome.COMPLETED, first_token=0.05, cohort="candidate")
    metrics.close(fast, sampled=False)
    labels = (LANE.name, "candidate", "le128")
    assert value(metrics, catalog.FINE_TTFT, *labels, suffix="_count") is None
    metrics.set_compared(["candidate", "control"])
    assert value(metrics, catalog.FINE_TTFT, *labels, suffix="_count") == 0
    metrics.close(fast, sampled=False)
    metrics.close(ended(Outcome.REJECTED_FULL, cohort="candidate"), sampled=False)
    metrics.close(ended(Outcome.COMPLETED, first_token=0.05), sampled=False)
    assert value(metrics, catalog.FINE_TTFT, *labels, suffix="_count") == 2
    assert value(metrics, catalog.FINE_TTFT, *labels, suffix="_bucket", le="2.0") == 1
    assert value(metrics, catalog.FINE_TTFT, LANE.name, "baseline", "le128", suffix="_count") is None
    with pytest.raises(ValueError, match="candidat'"):
        metrics.set_compared(["candidat"])
    metrics.close(fast, sampled=False)
    assert value(metrics, catalog.FINE_TTFT, *labels, suffix="_count") == 3, "a refused set changes nothing"


def test_a_new_objective_is_a_bound_from_the_moment_the_spec_changes() -> None:
    """Lost: exact SLOs after an edit of the spec, until somebody restarts the gateway."""
    metrics = Metrics(SPEC)
    metrics.close(ended(Outcome.COMPLETED, first_token=0.05, tokens=3), sampled=False)
    metrics.set_spec(parse(with_value("lanes[0].ttft.seconds", 0.137)))
    metrics.close(ended(Outcome.COMPLETED, first_token=0.12, tokens=3), sampled=False)
    labels = (MODEL, LANE.name, "baseline")
    assert value(metrics, catalog.TTFT, *labels, suffix="_bucket", le="0.137") == 1
    assert value(metrics, catalog.TPOT, *labels, suffix="_count") == 2, "its bounds did not change"
    assert value(metrics, catalog.SLO, MODEL, LANE.name, "ttft") == 2
    exposition(metrics)


def test_an_estimate_of_an_empty_prompt_is_not_counted() -> None:
    """Lost: the histogram, to a division by 0."""
    metrics = Metrics(SPEC)
    metrics.estimated(MODEL, 5, 0)
    metrics.estimated(MODEL, 150, 100)
    assert value(metrics, catalog.ESTIMATE_ERROR, MODEL, suffix="_sum") == 0.5


def test_a_sum_of_the_fine_histogram_is_infinite_rather_than_wrong() -> None:
    """Lost: the warning that a mean over requests that were never served has no value."""
    metrics = Metrics(SPEC)
    metrics.set_compared(["candidate"])
    metrics.close(ended(Outcome.REJECTED_FULL, cohort="candidate"), sampled=False)
    assert value(metrics, catalog.FINE_TTFT, LANE.name, "candidate", "le128", suffix="_sum") == math.inf
    exposition(metrics)
