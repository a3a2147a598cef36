"""What a gateway shows at `/metrics`: the catalog, all of it, and nothing that is not in it."""

import json
from pathlib import Path

from prometheus_client.metrics_core import Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from serving.telemetry import catalog
from serving.telemetry.catalog import Kind
from tests.fixtures.asgi_caller import AsgiCaller
from tests.fixtures.gateway_in_process import InProcess, gateway_of, spec_text
from tests.fixtures.request_kinds import chat
from tests.fixtures.scripted_engine import ScriptedEngine

OPEN_METRICS = (b"accept", b"application/openmetrics-text; version=1.0.0")
OF_A_ROLLOUT = {catalog.ROLLOUT_INFO, catalog.FINE_TTFT}
"""They have series only while cohorts are compared."""
OF_LUCK = {catalog.SCALING, catalog.DRAIN_RATE}
"""Only where a replica joined a queue that waited; only once a queue has been seen to empty."""


async def scraped(inside: InProcess) -> dict[str, Metric]:
    caller = AsgiCaller(inside.app, b"", request_id="scrape", path="/metrics", headers=(OPEN_METRICS,))
    caller.scope["method"] = "GET"
    await caller()
    assert caller.status == 200
    families = text_string_to_metric_families(caller.answer.decode())  # type: ignore[no-untyped-call]
    return {family.name: family for family in families}


async def test_a_gateways_exposition_is_the_catalog(tmp_path: Path) -> None:
    """Lost: a panel or an alert that is generated from the catalog, and whose series nobody fills."""
    async with ScriptedEngine() as engine, gateway_of(spec_text(engine.url), tmp_path / "log", engine) as inside:
        fresh = await scraped(inside)
        for number, stream in enumerate((True, False)):
            asked = AsgiCaller(inside.app, chat(100, stream), request_id=f"r{number}")
            await asked()
            assert asked.status == 200
        report = {"request_id": "r0", "ttft": 0.2, "total": 0.3}
        reported = AsgiCaller(inside.app, json.dumps(report).encode(), request_id="report", path="/v1/client-timings")
        await reported()
        assert reported.status in (200, 202, 204), reported.answer
        inside.gateway.metrics.loop_lag(0.001)
        families = await scraped(inside)
    named = {metric.name.removesuffix("_total").removesuffix("_info"): metric for metric in catalog.METRICS}
    assert {name for name in families if not name.startswith("process_")} <= set(named)
    silent = {metric for name, metric in named.items() if name not in families or not families[name].samples}
    assert silent - OF_LUCK == OF_A_ROLLOUT
    for name, metric in named.items():
        for sample in families[name].samples if name in families else ():
            assert set(sample.labels) - {"le"} == set(metric.labels), name
    for name, metric in named.items():
        if metric.kind is Kind.COUNTER:
            counts = [sample.value for sample in fresh[name].samples]
            assert counts, f"{name}: its first event would not be an increase"
            assert set(counts) == {0}, name
