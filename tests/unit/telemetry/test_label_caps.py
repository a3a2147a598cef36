"""No label has more values than the spec allows, whoever invents them."""

import yaml

from serving.scheduling.ticket import LaneView, ReplicaView
from serving.spec import parse
from serving.telemetry import catalog
from serving.telemetry.catalog import CacheResult
from serving.telemetry.metrics import Metrics
from serving.telemetry.snapshot import Snapshot
from serving.timeline import Outcome
from tests.unit.spec_edits import shipped
from tests.unit.telemetry.readings import exposition, value
from tests.unit.telemetry.timelines import LANE, MODEL, SPEC, ended


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


def test_a_queue_of_a_model_beyond_the_cap_is_added_up_under_one_label() -> None:
    """Lost: the cap, on the gauges; and the oldest request of all, were ages added up too."""
    spec = SPEC.model_copy(update={"telemetry": SPEC.telemetry.model_copy(update={"max_models": 1})})
    metrics = Metrics(spec)
    view = LaneView(1, 10, 0.5, 10, 4, 100.0, 2, 3, 30)
    keys = [(model, "baseline", LANE.name) for model in (MODEL, "second", "third")]
    metrics.hand(
        Snapshot(
            queues=dict.fromkeys(keys, view),
            unanswered=dict(zip(keys, (0.1, 0.2, 0.3), strict=True)),
            desired={(model, pool): 2 for model, pool, _ in keys},
            bytes_per_token=dict.fromkeys((MODEL, "second", "third"), 4.0),
        )
    )
    other, own = (catalog.OTHER, "baseline", LANE.name), keys[0]
    assert value(metrics, catalog.QUEUE_TOKENS, *own) == view.queued_tokens
    assert value(metrics, catalog.QUEUE_TOKENS, *other) == 2 * view.queued_tokens
    assert value(metrics, catalog.BREACHES, *other) == 2 * view.breaches
    assert value(metrics, catalog.QUEUE_OLDEST, *other) == view.oldest_age
    assert value(metrics, catalog.OLDEST_UNANSWERED, *other) == 0.3
    assert value(metrics, catalog.DESIRED, catalog.OTHER, "baseline") == 4
    for family in exposition(metrics).values():
        assert not {"second", "third"} & {sample.labels.get("model") for sample in family.samples}, family.name


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


def test_a_client_report_cannot_invent_a_lane() -> None:
    """Lost: Prometheus, to a client that reports a new lane each time."""
    metrics = Metrics(SPEC)
    metrics.client_ttft(MODEL, "invented", "baseline", 0.1)
    assert value(metrics, catalog.CLIENT_TTFT, MODEL, "invented", "baseline", suffix="_count") is None
    metrics.client_ttft(MODEL, LANE.name, "invented", 0.1)
    assert value(metrics, catalog.CLIENT_TTFT, MODEL, LANE.name, "other", suffix="_count") == 1
