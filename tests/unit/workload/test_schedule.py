"""Bending a trace to an engine must keep its pattern, and say what it altered."""

from pathlib import Path

import orjson
import pytest

from serving import spec as spec_file
from serving.spec import Spec
from serving.workload.generate import generate
from serving.workload.prompts import Cost, PromptMaker
from serving.workload.schedule import Address, ScheduleError, Shape, lane_by_spec, prepare, shape_trace
from serving.workload.trace import Trace, TraceRequest

TRACE = Trace("t", "test", tuple(TraceRequest(i * 2.0, 1000, 100) for i in range(101)))


@pytest.fixture(scope="module")
def spec() -> Spec:
    return spec_file.load(Path(__file__).parents[3] / "laneway.yaml")


def test_a_rate_stretches_the_time_and_keeps_the_pattern() -> None:
    """A pattern that changes with the rate is another workload."""
    trace = generate("mix:short-behind-long?seconds=60", 1)
    schedule = shape_trace(trace, Shape(rate=50.0), 1)
    factors = {round(b.arrival / a.arrival, 9) for a, b in zip(trace.requests[1:], schedule.requests[1:], strict=True)}
    assert len(factors) == 1
    assert len(schedule.requests) / schedule.window == pytest.approx(50.0, rel=0.02)


def test_a_rate_over_a_part_of_the_trace_is_that_parts_rate() -> None:
    """A trace that starts quietly would otherwise be replayed far below the rate that was asked for."""
    quiet = tuple(TraceRequest(float(i), 10, 10) for i in range(50))
    busy = tuple(TraceRequest(50 + i / 100, 10, 10) for i in range(1000))
    schedule = shape_trace(Trace("t", "test", quiet + busy), Shape(rate=5.0, duration=10.0), 1)
    assert len(schedule.requests) == pytest.approx(50, abs=2)


def test_speed_and_duration_cut_on_the_replays_clock() -> None:
    """`--duration 30` is how long a person waits, not a part of the recording."""
    schedule = shape_trace(TRACE, Shape(speed=4.0, duration=30.0), 1)
    assert [request.arrival for request in schedule.requests[:3]] == [0.0, 0.5, 1.0]
    assert len(schedule.requests) == 60
    assert schedule.window == 30.0


def test_caps_shorten_and_count_and_drop_nobody() -> None:
    """Dropped requests would thin the load just at its heaviest."""
    schedule = shape_trace(TRACE, Shape(max_output=10, max_total=500), 1)
    assert len(schedule.requests) == 101
    assert {(r.prompt_tokens, r.output_tokens) for r in schedule.requests} == {(500 - 10 - 64, 10)}
    assert (schedule.capped_prompts, schedule.capped_outputs) == (101, 101)


def test_a_share_of_requests_is_not_streamed_and_always_the_same_ones() -> None:
    """Both forms are real traffic, and both runs of a comparison need the same of each."""
    one = shape_trace(TRACE, Shape(unstreamed=0.3), 5)
    assert one == shape_trace(TRACE, Shape(unstreamed=0.3), 5)
    assert 0.15 < sum(not request.streamed for request in one.requests) / 101 < 0.45


@pytest.mark.parametrize(
    ("trace", "shape", "expected"),
    [
        (TRACE, Shape(rate=1.0, speed=1.0), "expected only one of them"),
        (Trace("t", "test", (TraceRequest(5.0, 1, 1),)), Shape(duration=1.0), "no request within duration 1 s"),
        (Trace("t", "test", (TraceRequest(0.0, 1, 1),)), Shape(rate=1.0), "have no rate, expected --speed"),
    ],
)
def test_what_cannot_be_done_is_refused(trace: Trace, shape: Shape, expected: str) -> None:
    """An empty run that ends with success says nothing, loudly."""
    with pytest.raises(ScheduleError, match=expected):
        shape_trace(trace, shape, 1)


def test_a_body_asks_for_what_the_trace_says(spec: Spec) -> None:
    """A wrong field here makes every answer's length or lane wrong."""
    requests = (TraceRequest(0.0, 50, 7, tier="flex"), TraceRequest(1.0, 50, 8, streamed=False))
    made = list(
        prepare(requests, Address("m", True, "secret-key"), PromptMaker("x", Cost(4.0)), iter("ab").__next__, spec)
    )
    first, second = (orjson.loads(prepared.body) for prepared in made)
    assert (first["max_tokens"], first["ignore_eos"], first["service_tier"]) == (7, True, "flex")
    assert (first["stream"], first["stream_options"]) == (True, {"include_usage": True})
    assert "stream" not in second
    assert "service_tier" not in second
    assert [prepared.request_id for prepared in made] == ["a", "b"]
    assert made[0].headers["authorization"] == "Bearer secret-key"
    assert b"secret-key" not in made[0].body


@pytest.mark.parametrize(
    ("tier", "tokens", "lane"),
    [
        ("default", 512, "interactive-short"),
        ("default", 513, "interactive-long"),
        ("flex", 10, "batch"),
        ("flex", 9000, "batch"),
    ],
)
def test_without_a_gateway_the_specs_rules_name_the_lane(spec: Spec, tier: str, tokens: int, lane: str) -> None:
    """A direct run of the engine is the baseline: its requests must be counted in the same lanes."""
    assert lane_by_spec(spec, "flex" if tier == "flex" else "default", tokens) == lane
