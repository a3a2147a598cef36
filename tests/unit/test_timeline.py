"""The timeline: what a request's numbers mean is said once, here."""

import json
import math
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.timeline import STAMPS, Boundary, Outcome, OutcomeAlreadySetError, Timeline, from_record


def _timeline(boundary: Boundary = Boundary.GATEWAY, **fields: Any) -> Timeline:
    return Timeline(request_id="r1", boundary=boundary, **fields)


def test_a_request_has_one_outcome() -> None:
    """Two outcomes for one request would break the sum that the conservation alert watches."""
    timeline = _timeline(received=1.0)
    timeline.end(Outcome.CANCELLED, 2.0, "left")
    with pytest.raises(OutcomeAlreadySetError, match="completed after cancelled"):
        timeline.end(Outcome.COMPLETED, 3.0)
    assert (timeline.outcome, timeline.closed, timeline.error) == (Outcome.CANCELLED, 2.0, "left")


def test_intervals_are_differences_of_stamps() -> None:
    """A clock started at the wrong stamp is the most repeated error of TTFT figures."""
    timeline = _timeline(received=10.0, admitted=10.5, released=12.0, dispatched=12.1, output_tokens=5)
    for now in (13.0, 13.1, 13.4, 13.5):
        timeline.content(now)
    timeline.end(Outcome.COMPLETED, 14.0)
    assert timeline.queue_wait == pytest.approx(1.5)
    assert timeline.ttft == pytest.approx(3.0)
    assert timeline.tpot == pytest.approx(0.5 / 4)
    assert timeline.itl_max == pytest.approx(0.3)
    assert timeline.completion == pytest.approx(4.0)


@pytest.mark.parametrize(
    ("boundary", "stamps", "start"),
    [
        (Boundary.CLIENT, {"scheduled": 1.0, "sent": 2.0, "received": 3.0}, 1.0),
        (Boundary.CLIENT, {"sent": 2.0, "received": 3.0}, 2.0),
        (Boundary.CLIENT, {"received": 3.0}, None),
        (Boundary.GATEWAY, {"scheduled": 1.0, "sent": 2.0, "received": 3.0}, 3.0),
        (Boundary.ENGINE, {"received": 3.0}, 3.0),
        (Boundary.ENGINE, {"scheduled": 1.0}, None),
    ],
)
def test_latency_counts_from_the_boundary_s_own_start(
    boundary: Boundary, stamps: dict[str, float], start: float | None
) -> None:
    """Counted from sending, a client that falls behind its schedule would hide the overload that it measures."""
    assert _timeline(boundary, **stamps).start == start


def test_a_request_without_a_first_token_counts_as_infinite() -> None:
    """Left out of the population, the requests that failed make the percentiles look better."""
    timeline = _timeline(received=1.0)
    assert timeline.ttft is None
    assert timeline.ttft_or_inf == math.inf
    timeline.content(1.5)
    assert timeline.ttft_or_inf == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("tokens", "streamed", "tpot"),
    [(None, True, None), (0, True, None), (1, True, None), (2, True, 1.0), (3, True, 0.5), (3, False, None)],
)
def test_time_per_token_needs_a_second_token_and_a_stream(tokens: int | None, streamed: bool, tpot: float) -> None:
    """A whole reply would count as 0 s a token, and a single token as a division by zero."""
    timeline = _timeline(output_tokens=tokens, streamed=streamed, first_token=1.0, last_token=2.0)
    assert timeline.tpot == tpot


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=20))
def test_the_longest_gap_is_the_longest_between_neighbours(times: list[float]) -> None:
    """A stall in the middle of a stream is what the user sees; the mean hides it."""
    times = sorted(times)
    timeline = _timeline()
    for now in times:
        timeline.content(now)
    gaps = [later - earlier for earlier, later in pairwise(times)]
    assert timeline.itl_max == (max(gaps) if gaps else None)
    assert (timeline.first_token, timeline.last_token) == (times[0], times[-1])


stamps = st.none() | st.floats(-1e6, 1e6)
timelines = st.builds(
    Timeline,
    request_id=st.text(max_size=8),
    boundary=st.sampled_from(Boundary),
    trace_id=st.none() | st.text(max_size=8),
    model=st.none() | st.text(max_size=8),
    lane=st.text(max_size=8),
    prompt_tokens=st.none() | st.integers(0, 10**9),
    output_tokens=st.none() | st.integers(0, 10**9),
    outcome=st.none() | st.sampled_from(Outcome),
    error=st.none() | st.text(max_size=8),
    streamed=st.booleans(),
    itl_max=st.none() | st.floats(0, 1e6),
    extra=st.dictionaries(st.sampled_from(["engine_prefill", "engine_queue"]), st.integers(), max_size=2),
    **dict.fromkeys(STAMPS, stamps),
)


@given(timelines, st.floats(-1e6, 1e6))
def test_a_record_is_read_back_as_it_was_written(timeline: Timeline, origin: float) -> None:
    """Replay, simulator and diagnosis read each other's files: a key lost on the way is a stage that vanishes."""
    row = json.loads(json.dumps(timeline.record(origin)))
    again = from_record(row)
    assert again.record() == row
    assert (again.outcome, again.boundary, again.extra) == (timeline.outcome, timeline.boundary, timeline.extra)
    for name in STAMPS:
        value = getattr(timeline, name)
        read = getattr(again, name)
        assert (read is None) is (value is None)
        assert value is None or read == pytest.approx(value - origin, abs=1e-6)


def test_a_record_has_the_keys_that_every_reader_expects() -> None:
    """The schema is a contract with files that were written long ago."""
    assert list(_timeline().record()) == [
        *("request_id", "trace_id", "run_id", "model", "pool", "lane", "cohort", "boundary"),
        *("prompt_tokens", "output_tokens", "outcome", "error", "streamed"),
        *STAMPS,
        "itl_max",
    ]


def test_unknown_keys_of_a_record_are_kept() -> None:
    """A newer gateway's log would lose what an older reader does not know."""
    row = _timeline().record() | {"engine_prefill": 0.25}
    assert from_record(row).record()["engine_prefill"] == 0.25


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"request_id": None}, "request_id: got None, expected a string"),
        ({"request_id": 7}, "request_id: got 7, expected a string"),
        ({"boundary": "moon"}, "boundary: got 'moon', expected one of client, gateway, engine"),
        ({"boundary": ["client"]}, "boundary: got "),
        ({"outcome": "lost"}, "outcome: got 'lost', expected one of completed, rejected_full"),
        ({"outcome": 1}, "outcome: got 1, expected null or one of completed"),
        ({"received": "now"}, "received: got 'now', expected seconds or null"),
        ({"received": True}, "received: got True, expected seconds or null"),
        ({"itl_max": []}, r"itl_max: got \[\], expected seconds or null"),
        ({"prompt_tokens": 1.5}, "prompt_tokens: got 1.5, expected a whole number or null"),
        ({"output_tokens": "3"}, "output_tokens: got '3', expected a whole number or null"),
        ({"lane": None}, "lane: got None, expected a string"),
        ({"model": 3}, "model: got 3, expected a string or null"),
        ({"streamed": "yes"}, "streamed: got 'yes', expected true or false"),
    ],
)
def test_a_bad_record_is_refused_by_field_value_and_expectation(changes: dict[str, Any], message: str) -> None:
    """A report would fail far from the file, with a message about a comparison of None."""
    with pytest.raises(ValueError, match=f"^{message}"):
        from_record(_timeline().record() | changes)


@pytest.mark.parametrize("name", ["request_id", "boundary"])
def test_a_record_without_what_it_needs_is_refused(name: str) -> None:
    """A file of another kind would be read as requests that never did anything."""
    row = _timeline().record()
    del row[name]
    with pytest.raises(ValueError, match=f"^{name}: missing"):
        from_record(row)
