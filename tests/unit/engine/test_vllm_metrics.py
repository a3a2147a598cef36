"""The simulated replica's metrics against a recording of the real ones."""

from pathlib import Path

from prometheus_client import CollectorRegistry, generate_latest

from serving.engine import buckets
from serving.engine.sequence import EngineLimits, Sequence
from serving.engine.step_time import DEFAULT
from serving.engine.steps import SteppedEngine
from serving.engine.vllm_metrics import VllmMetrics
from serving.spec import load
from tests.record_exposition import RECORDED, shape

PROJECT = Path(__file__).parents[3]


def metrics(registry: CollectorRegistry) -> VllmMetrics:
    """As `laneway engine simulate` makes them beside the default spec."""
    bounds = buckets.from_spec(load(PROJECT / "laneway.yaml"))
    return VllmMetrics(registry, "laneway-tiny", DEFAULT, EngineLimits(), bounds)


def value(registry: CollectorRegistry, name: str, **labels: str) -> float | None:
    """A sample of the one model."""
    return registry.get_sample_value(f"vllm:{name}", {"model_name": "laneway-tiny", "engine": "0", **labels})


def test_names_types_labels_and_bounds_are_those_of_the_real_engine() -> None:
    """Dashboards and alerts would work on the simulated engine, and be empty on the real one at the worst moment."""
    registry = CollectorRegistry()
    metrics(registry)
    real = shape(RECORDED.read_text(encoding="utf-8"))
    ours = shape(generate_latest(registry).decode())
    assert sorted(ours) == sorted(real)
    for name, (kind, series) in real.items():
        assert ours[name][0] == kind, name
        assert ours[name][1] == series, name


def test_a_request_is_counted_once_in_every_stage() -> None:
    """The engine's own queue, prefill and decode times are what a slow first token is blamed on."""
    registry = CollectorRegistry()
    counted = metrics(registry)
    engine = SteppedEngine(DEFAULT, EngineLimits())
    sequence = Sequence("r", 3000, 3)
    engine.add(sequence, 10.0)
    now = 10.5
    while (plan := engine.plan(now)) is not None:
        counted.planned(plan)
        now += plan.seconds
        end = engine.complete(plan, now)
        first = [(s, now - 10.0) for s in end.produced if s.output_tokens == 1]
        counted.ended(end, [plan.seconds] * (len(end.produced) - len(first)), first)
        for ended in end.finished:
            counted.finished(ended, "length", 3, now - 10.0)
    assert value(registry, "request_success_total", finished_reason="length") == 1
    assert value(registry, "request_queue_time_seconds_sum") == 0.5
    assert value(registry, "prompt_tokens_total") == 3000
    assert value(registry, "prompt_tokens_by_source_total", source="local_compute") == 3000
    assert value(registry, "generation_tokens_total") == 3
    assert value(registry, "inter_token_latency_seconds_count") == 2
    assert value(registry, "time_to_first_token_seconds_count") == 1
    assert value(registry, "iteration_tokens_total_sum") == 3003
    assert value(registry, "iteration_tokens_total_count") == 3, "a step that brings no token is not recorded"
    stages = [value(registry, f"request_{stage}_time_seconds_sum") for stage in ("queue", "prefill", "decode")]
    whole = value(registry, "e2e_request_latency_seconds_sum")
    assert whole is not None
    assert abs(sum(stage or 0 for stage in stages) - whole) < 1e-9
