"""What clients report of what they saw: believed once, from the right key, about a request that was served here."""

import json
import math
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.gateway import client_timings
from serving.gateway.client_timings import (
    REMEMBERED_SECONDS,
    Accepted,
    ClientTimings,
    RecentRequests,
    parse_timings,
)
from serving.gateway.errors import RequestError
from serving.telemetry.catalog import TimingResult
from serving.timeline import Boundary, Outcome, Timeline

CANARY = "canary-0f9a7"
GOOD: dict[str, Any] = {"request_id": "r1", "ttft": 0.2, "total": 1.5}


class _Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def _served(request_id: str = "r1", first_token: float | None = 10.25) -> Timeline:
    timeline = Timeline(request_id=request_id, boundary=Boundary.GATEWAY, model="tiny", lane="batch", received=10.0)
    timeline.first_token = first_token
    timeline.end(Outcome.COMPLETED, 12.0)
    return timeline


def _report(request_id: str = "r1") -> ClientTimings:
    return ClientTimings(request_id, 0.3, 2.0, "eu-west")


def test_a_report_is_set_beside_what_the_gateway_measured() -> None:
    """Server fast and client slow would stay a guess."""
    recent = RecentRequests(_Clock())
    recent.remember(_served(), "team-a")
    taken = recent.take(_report(), "team-a")
    assert taken == Accepted(_report(), "tiny", "batch", "baseline", 0.25)


def test_a_request_is_reported_on_once() -> None:
    """One client in a loop would be all of the client-side distribution."""
    recent = RecentRequests(_Clock())
    recent.remember(_served(), "team-a")
    assert isinstance(recent.take(_report(), "team-a"), Accepted)
    assert recent.take(_report(), "team-a") is TimingResult.REPEATED


def test_another_key_s_request_is_as_unknown_as_one_that_never_was() -> None:
    """A key could spoil another team's figures, or find out which ids exist."""
    recent = RecentRequests(_Clock())
    recent.remember(_served(), "team-a")
    assert recent.take(_report(), "team-b") is TimingResult.UNKNOWN_REQUEST
    assert recent.take(_report("r2"), "team-a") is TimingResult.UNKNOWN_REQUEST
    assert isinstance(recent.take(_report(), "team-a"), Accepted), "the stranger's try used nothing up"


def test_two_keys_may_use_the_same_id() -> None:
    """Clients choose their ids: one that reuses another's must not take its report away."""
    recent = RecentRequests(_Clock())
    recent.remember(_served(), "team-a")
    recent.remember(_served(first_token=11.0), "team-b")
    for caller, ttft in (("team-a", 0.25), ("team-b", 1.0)):
        taken = recent.take(_report(), caller)
        assert isinstance(taken, Accepted)
        assert taken.gateway_ttft == pytest.approx(ttft)


def test_a_request_that_saw_no_token_cannot_be_reported_on() -> None:
    """There is nothing that its client could have seen."""
    recent = RecentRequests(_Clock())
    recent.remember(_served(first_token=None), "team-a")
    assert recent.take(_report(), "team-a") is TimingResult.UNKNOWN_REQUEST


def test_requests_are_forgotten_in_time() -> None:
    """A report of last week would be taken for one of now."""
    clock = _Clock()
    recent = RecentRequests(clock)
    recent.remember(_served(), "team-a")
    clock.now += REMEMBERED_SECONDS
    assert isinstance(recent.take(_report(), "team-a"), Accepted)
    recent.remember(_served("r2"), "team-a")
    clock.now += REMEMBERED_SECONDS + 0.1
    assert recent.take(_report("r2"), "team-a") is TimingResult.UNKNOWN_REQUEST


def test_what_is_remembered_is_bounded_and_the_oldest_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gateway's memory would grow with its traffic."""
    monkeypatch.setattr(client_timings, "REMEMBERED", 3)
    recent = RecentRequests(_Clock())
    for name in ("r1", "r2", "r3", "r1", "r4"):
        recent.remember(_served(name), "team-a")
    kept = [name for name in ("r1", "r2", "r3", "r4") if isinstance(recent.take(_report(name), "team-a"), Accepted)]
    assert kept == ["r1", "r3", "r4"], "r1 came again, so r2 is the oldest"


def test_a_good_report_is_read() -> None:
    """The field names are a public interface."""
    assert parse_timings(orjson.dumps(GOOD)) == ClientTimings("r1", 0.2, 1.5, None)
    assert parse_timings(orjson.dumps({**GOOD, "region": "eu-west-1", "ttft": 0})).region == "eu-west-1"


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        (b"{", None, "the body is not JSON"),
        (b"[]", None, "the body is list, expected an object"),
        ({"request_id": None}, "request_id", "request_id is missing or no string"),
        ({"request_id": ""}, "request_id", "1 to 128 characters"),
        ({"request_id": "x" * 129}, "request_id", "1 to 128 characters"),
        ({"ttft": None}, "ttft", "ttft is missing or no number, expected seconds"),
        ({"ttft": True}, "ttft", "ttft is missing or no number"),
        ({"ttft": "0.2"}, "ttft", "ttft is missing or no number"),
        ({"ttft": -0.1}, "ttft", "ttft is -0.1, expected seconds from 0 to 86400"),
        ({"total": 86_401}, "total", "total is 86401, expected seconds from 0 to 86400"),
        ({"total": 0.1}, "total", "total is 0.1, expected at least ttft (0.2)"),
        ({"region": 7}, "region", "region is no string"),
        ({"region": "EU"}, "region", "region is no string of 1 to 32 characters"),
        ({"region": f"x {CANARY}"}, "region", "region is no string"),
        ({"request_id": CANARY * 20}, "request_id", "1 to 128 characters"),
    ],
)
def test_a_bad_report_is_refused_by_field(body: bytes | dict[str, Any], param: str | None, message: str) -> None:
    """Whoever writes the client learns what to mend; a region of free text would become a metric label."""
    raw = body if isinstance(body, bytes) else orjson.dumps({**GOOD, **body})
    with pytest.raises(RequestError) as caught:
        parse_timings(raw)
    assert (caught.value.outcome, caught.value.status) == (Outcome.REJECTED_INVALID, 400)
    assert caught.value.param == param
    assert message in caught.value.message
    assert CANARY not in caught.value.message


numbers = st.floats() | st.integers() | st.none() | st.booleans() | st.text(max_size=5)


@given(
    st.binary(max_size=64)
    | st.fixed_dictionaries(
        {"request_id": st.text(max_size=140), "ttft": numbers, "total": numbers}, optional={"region": st.text()}
    ).map(lambda body: json.dumps(body).encode())
)
def test_any_body_is_a_report_in_range_or_refused(raw: bytes) -> None:
    """An infinite or negative time would spoil the sum of a histogram for ever."""
    try:
        timings = parse_timings(raw)
    except RequestError:
        return
    assert math.isfinite(timings.total)
    assert 0 <= timings.ttft <= timings.total <= 86_400
