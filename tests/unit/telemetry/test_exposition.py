"""What a scrape gets: the whole catalog, exemplars where they belong, and never on the event loop's time."""

import gzip
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families as plain_families

from serving.ledger import Ledger
from serving.scheduling.ticket import Batch, LaneView, ReplicaView, Ticket
from serving.telemetry import catalog
from serving.telemetry.catalog import CacheResult, RetryReason, TimingResult
from serving.telemetry.exposition import MetricsApp, render
from serving.telemetry.metrics import Metrics
from serving.telemetry.snapshot import Snapshot
from serving.timeline import Outcome
from tests.unit.telemetry.readings import OPEN_METRICS, exemplars, exposition, value
from tests.unit.telemetry.timelines import LANE, MODEL, SPEC, TRACE, ended


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
    plain = render(metrics.registry, "text/plain")[0].decode()
    assert TRACE not in plain, "the older format has no exemplars; a scraper would refuse the line"
    assert {family.name for family in plain_families(plain)} >= {catalog.TTFT.name, catalog.QUEUED.name}


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


def test_no_created_series_is_in_either_format() -> None:
    """Lost: twice the series for nothing."""
    metrics = Metrics(SPEC)
    for accept in (OPEN_METRICS, "text/plain"):
        assert b"_created" not in render(metrics.registry, accept)[0]


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


async def test_the_picture_is_taken_on_the_loop_and_rendered_off_it() -> None:
    """Lost: tokens of every stream, for as long as a render takes; or counts that do not add up, torn by a thread."""
    threads: dict[str, threading.Thread] = {}

    class Watched(Metrics):
        def collect(self) -> Iterator[Metric]:
            threads["render"] = threading.current_thread()
            return super().collect()

    def take() -> Snapshot:
        threads["snapshot"] = threading.current_thread()
        return Snapshot()

    app = MetricsApp(Watched(SPEC), take)
    assert (await scrape(app))[0] == 200
    app.close()
    assert threads["snapshot"] is threading.current_thread()
    assert threads["render"] is not threading.current_thread()
