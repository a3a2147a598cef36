"""What a scraper reads of `Metrics`, as the tests of telemetry ask for it."""

from typing import Any

from prometheus_client.metrics_core import Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from serving.telemetry.catalog import MetricDef
from serving.telemetry.exposition import render
from serving.telemetry.metrics import Metrics

OPEN_METRICS = "application/openmetrics-text; version=1.0.0"


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
