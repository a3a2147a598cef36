"""What one request adds to the metrics, and what an exposition of them says."""

import gzip
import math
from typing import Any

import pytest
import yaml
from prometheus_client.metrics_core import Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from serving.ledger import Ledger, State
from serving.scheduling.ticket import Batch, LaneView, ReplicaView, Ticket
from serving.spec import parse
from serving.telemetry import catalog
from serving.telemetry.catalog import CacheResult, MetricDef, RetryReason, TimingResult
from serving.telemetry.exposition import MetricsApp, render
from serving.telemetry.metrics import Metrics
from serving.telemetry.snapshot import Snapshot
from serving.timeline import Outcome
from tests.unit.spec_edits import shipped, with_value
from tests.unit.telemetry.timelines import LANE, MODEL, SPEC, TRACE, ended

OPEN_METRICS = "application/openmetrics-text; version=1.0.0"
TTFT = LANE.ttft.seconds


def exposition(metrics: Metrics) -> dict[str, Metric]:
    """What a scraper that asks for OpenMetrics gets, read by the library's own parser."""
    body, content_type = render(metrics.registry, OPEN_METRICS)
    assert content_type.startswith("application/openmetrics-text")
    families = text_string_to_metric_families(body.decode())  # type: ignore[no-untyped-call]
    return {family.name: family for family in families}


def value(metrics: Metrics, metric: MetricDef, *labels: str, suffix: str = "", **more: str) -> float | None:
    """One sample's value; None where there is no such series."""
    return metrics.registry.get_sample_value(
        metric.name + suffix, {**dict(zip(metric.labels, labels, strict=True)), **more}
    )


def exemplars(metrics: Metrics) -> list[tuple[str, Any]]:
    return [
        (sample.name, sample.exemplar)
        for family in exposition(metrics).values()
        for sample in family.samples
        if sample.exemplar is not None
    ]


def test_the_exposition_parses_and_has_every_metric_with_the_labels_of_the_catalog() -> None:
    """Lost: dashboards and alerts that are generated from the catalog, without a word."""
    metrics = Metrics(SPEC)
    ticket = Ticket("r1", LANE.name, 10, 0.0, 1.0)
    metrics.batch_released(MODEL, "baseline", Batch(LANE.name, "a", (ticket,), 10, 0.01, False))
    metrics.retried("baseline", RetryReason.BROKEN)
    metrics.estimated(MODEL, 90, 100)
    metrics.cache(MODEL, CacheResult.HIT)
    metrics.scaled(MODEL, "baseline", 12.0)
    metrics.client_timing(TimingResult.ACCEPTED)
    metrics.client_ttft(MODEL, LANE.name, "baseline", 0.1)
    metrics.loop_lag(0.001)
    metrics.set_compared(["candidate"])
    metrics.close(ended(Outcome.COMPLETED, first_token=0.05, tokens=3), sampled=False)
    queue = (MODEL, "baseline", LANE.name)
    metrics.hand(
        Snapshot(
            lanes=Ledger(tuple(lane.name for lane in SPEC.lanes)).snapshot(),
            queues={queue: LaneView(1, 10, 0.5, 10, 4, 100.0, 2, 3, 30)},
            unanswered={queue: 0.5},
            replicas={("baseline", "a"): ReplicaView(True, 1, 10, 0, None)},
            desired={(MODEL, "baseline"): 2},
            bytes_per_token={MODEL: 3.9},
            rollout=("run-1", "canary"),
        )
    )
    families = exposition(metrics)
    for metric in catalog.METRICS:
        family = families[metric.name.removesuffix("_total").removesuffix("_info")]
        assert family.type == metric.kind.value, metric.name
        assert family.samples, metric.name
        for sample in family.samples:
            assert set(sample.labels) - {"le"} == set(metric.labels), metric.name


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


@pytest.mark.parametrize("outcome", sorted(Outcome))
@pytest.mark.parametrize("late", [False, True], ids=["within", "beyond"])
def test_slo_counters_count_each_outcome_as_the_objectives_say(outcome: Outcome, late: bool) -> None:
    """Lost: error budgets that hold what users went through. The population itself: test_objectives."""
    never_valid = outcome in (Outcome.REJECTED_INVALID, Outcome.REJECTED_AUTH, Outcome.REJECTED_QUOTA)
    served = outcome is Outcome.COMPLETED
    closed = (2 if late else 0.5) * TTFT
    metrics = Metrics(SPEC)
    metrics.close(ended(outcome, first_token=closed if served else None, tokens=1, closed=closed), sampled=False)
    left_early = outcome is Outcome.CANCELLED and not late
    ttft = 0 if never_valid or left_early else 1
    missed = 0 if served and not late else ttft
    success = 0 if never_valid or outcome is Outcome.CANCELLED else 1
    assert value(metrics, catalog.SLO, MODEL, LANE.name, "ttft") == ttft
    assert value(metrics, catalog.SLO_MISSED, MODEL, LANE.name, "ttft") == missed
    assert value(metrics, catalog.SLO, MODEL, LANE.name, "success") == success
    assert value(metrics, catalog.SLO_MISSED, MODEL, LANE.name, "success") == (0 if served else success)
    assert value(metrics, catalog.GOOD, MODEL, LANE.name) == (1 if served and not late else 0)
    assert value(metrics, catalog.REQUESTS, MODEL, LANE.name, outcome) == 1


def test_one_exemplar_a_lane_bucket_and_period_and_each_is_announced() -> None:
    """Lost: the traces behind the exemplars, or the collector's disk, to every trace being kept."""
    metrics = Metrics(SPEC)
    every = SPEC.telemetry.exemplar_every

    def close(first_token: float, now: float, lane: str = LANE.name) -> bool:
        timeline = ended(Outcome.COMPLETED, first_token=first_token, lane=lane, trace_id=TRACE)
        return metrics.close(timeline, sampled=True, now=now)

    assert close(0.05, 100.0)
    assert not close(0.05, 100.0 + 0.99 * every)
    assert close(0.05, 100.0, SPEC.lanes[1].name)
    assert close(5.1, 100.1), "another bucket"
    assert close(0.05, 100.0 + every)
    shown = [item for name, item in exemplars(metrics) if name == f"{catalog.TTFT.name}_bucket"]
    assert len(shown) == 3
    assert all(item.labels == {"trace_id": TRACE} for item in shown)


@pytest.mark.parametrize(
    ("trace_id", "sampled"), [(TRACE, False), (None, True), ("x" * 200, True)], ids=["unsampled", "none", "absurd"]
)
def test_no_exemplar_points_at_a_trace_that_is_not_kept(trace_id: str | None, sampled: bool) -> None:
    """Lost: trust in the dots on a panel; or the request's observation, where a label is too long."""
    metrics = Metrics(SPEC)
    timeline = ended(Outcome.COMPLETED, first_token=0.05, tokens=2, trace_id=trace_id)
    assert metrics.close(timeline, sampled=sampled) is False
    assert exemplars(metrics) == []
    assert value(metrics, catalog.TTFT, MODEL, LANE.name, "baseline", suffix="_count") == 1


def test_names_that_clients_or_flags_invent_become_other() -> None:
    """Lost: Prometheus, to whoever sends a new model name with each request."""
    metrics = Metrics(SPEC)
    before = sum(len(family.samples) for family in exposition(metrics).values())
    for i in range(50):
        metrics.close(ended(Outcome.REJECTED_INVALID, lane="none", model=f"invented-{i}"), sampled=False)
        metrics.cache(f"invented-{i}", CacheResult.MISS)
        metrics.close(ended(Outcome.COMPLETED, first_token=0.05, cohort=f"invented-{i}", lane="gone"), sampled=False)
    after = sum(len(family.samples) for family in exposition(metrics).values())
    assert value(metrics, catalog.REQUESTS, catalog.OTHER, "none", "rejected_invalid") == 50
    assert after - before < 10


def test_models_beyond_the_specs_cap_share_one_label() -> None:
    """Lost: the cap that `telemetry.max_models` promises."""
    models = [{"name": name, "pools": {"baseline": 1}} for name in ("one", "two", "three")]
    data = shipped() | {"models": models, "telemetry": {"max_models": 2}}
    data["pools"] = [{"name": "baseline", "replicas": [{"url": "http://127.0.0.1:8100"}]}]
    capped = parse(yaml.safe_dump(data))
    metrics = Metrics(capped)
    metrics.close(ended(Outcome.COMPLETED, first_token=0.05, model="three"), sampled=False)
    assert value(metrics, catalog.REQUESTS, catalog.OTHER, LANE.name, "completed") == 1


def test_replicas_beyond_the_specs_cap_are_added_up_under_one_label() -> None:
    """Lost: the sum over replicas, or Prometheus, where a DNS name stands for hundreds."""
    spec = SPEC.model_copy(update={"telemetry": SPEC.telemetry.model_copy(update={"max_replicas": 2})})
    metrics = Metrics(spec)
    view = ReplicaView(True, 3, 10, 0, None)
    metrics.hand(Snapshot(replicas={("baseline", f"r{i}"): view for i in range(5)}))
    in_flight = exposition(metrics)[catalog.REPLICA_IN_FLIGHT.name].samples
    assert {sample.labels["replica"]: sample.value for sample in in_flight} == {"r0": 3, "r1": 3, "other": 9}
    assert value(metrics, catalog.POOL_READY, "baseline") == 5


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


def test_no_created_series_is_in_either_format() -> None:
    """Lost: twice the series for nothing."""
    metrics = Metrics(SPEC)
    for accept in (OPEN_METRICS, "text/plain"):
        assert b"_created" not in render(metrics.registry, accept)[0]


def test_a_client_report_cannot_invent_a_lane() -> None:
    """Lost: Prometheus, to a client that reports a new lane each time."""
    metrics = Metrics(SPEC)
    metrics.client_ttft(MODEL, "invented", "baseline", 0.1)
    assert value(metrics, catalog.CLIENT_TTFT, MODEL, "invented", "baseline", suffix="_count") is None


def test_an_estimate_of_an_empty_prompt_is_not_counted() -> None:
    """Lost: the histogram, to a division by 0."""
    metrics = Metrics(SPEC)
    metrics.estimated(MODEL, 5, 0)
    metrics.estimated(MODEL, 150, 100)
    assert value(metrics, catalog.ESTIMATE_ERROR, MODEL, suffix="_sum") == 0.5


async def scrape(app: MetricsApp, method: str = "GET", **headers: str) -> tuple[int, dict[bytes, bytes], bytes]:
    sent: list[dict[str, Any]] = []

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    async def receive() -> dict[str, Any]:
        return {"type": "http.request"}

    head = [(name.replace("_", "-").encode(), text.encode()) for name, text in headers.items()]
    await app({"type": "http", "method": method, "path": "/metrics", "headers": head}, receive, send)
    return sent[0]["status"], dict(sent[0]["headers"]), sent[1]["body"]


async def test_a_scrape_gets_the_picture_of_its_own_moment_in_the_form_it_asks_for() -> None:
    """Lost: the scrape (Prometheus follows no redirect here), exemplars, or gauges a scrape old."""
    pictures = iter(range(1, 100))
    app = MetricsApp(Metrics(SPEC), lambda: Snapshot(cache_bytes=next(pictures)))
    status, headers, body = await scrape(app, accept=OPEN_METRICS, accept_encoding="gzip, deflate")
    assert (status, headers[b"content-encoding"]) == (200, b"gzip")
    assert headers[b"content-type"].startswith(b"application/openmetrics-text")
    assert gzip.decompress(body).endswith(b"# EOF\n")
    assert b"laneway_cache_bytes 1.0\n" in gzip.decompress(body)
    status, headers, body = await scrape(app)
    assert (status, b"content-encoding" in headers) == (200, False)
    assert headers[b"content-type"].startswith(b"text/plain")
    assert b"laneway_cache_bytes 2.0\n" in body
    assert int(headers[b"content-length"]) == len(body)
    status, headers, body = await scrape(app, "HEAD")
    assert (status, body) == (200, b"")
    assert (await scrape(app, "POST"))[0] == 405
    app.close()


def test_a_sum_of_the_fine_histogram_is_infinite_rather_than_wrong() -> None:
    """Lost: the warning that a mean over requests that were never served has no value."""
    metrics = Metrics(SPEC)
    metrics.set_compared(["candidate"])
    metrics.close(ended(Outcome.REJECTED_FULL, cohort="candidate"), sampled=False)
    assert value(metrics, catalog.FINE_TTFT, LANE.name, "candidate", "le128", suffix="_sum") == math.inf
    exposition(metrics)
