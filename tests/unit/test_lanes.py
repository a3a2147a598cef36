"""Which lane a request belongs to."""

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.lanes import LaneRefusedError, choose_lane
from serving.spec import Spec, parse

SPEC_TEXT = """
lanes:
  - {name: interactive-short, max_prompt_tokens: 512, ttft: {seconds: 0.1}, deadline: 2}
  - {name: interactive-long, ttft: {seconds: 1}, deadline: 10}
  - {name: batch, tier: flex, ttft: {seconds: 60}, deadline: 600}
models: [{name: tiny, pools: {baseline: 1}}]
pools: [{name: baseline, replicas: [{url: "http://127.0.0.1:8000"}]}]
"""
LANES = ("interactive-short", "interactive-long", "batch")


@dataclass(frozen=True)
class May:
    """What a key may."""

    lanes: tuple[str, ...] | None = None
    may_choose_lane: bool = False
    default_tier: str = "default"


@pytest.fixture(scope="module")
def spec() -> Spec:
    return parse(SPEC_TEXT)


@pytest.mark.parametrize(
    ("tokens", "tier", "may", "asked", "lane"),
    [
        (1, None, May(), None, "interactive-short"),
        (512, None, May(), None, "interactive-short"),
        (513, None, May(), None, "interactive-long"),
        (513, "default", May(), None, "interactive-long"),
        (10, "auto", May(), None, "interactive-short"),
        (10, "priority", May(), None, "interactive-short"),
        (10, "flex", May(), None, "batch"),
        (9000, "flex", May(), None, "batch"),
        (10, None, May(default_tier="flex"), None, "batch"),
        (10, "auto", May(default_tier="flex"), None, "batch"),
        (10, "default", May(default_tier="flex"), None, "interactive-short"),
        (10, None, May(lanes=("batch",)), None, "batch"),
        (10, "flex", May(lanes=("interactive-long",)), None, "interactive-long"),
        (10, None, May(lanes=("interactive-long", "batch")), None, "interactive-long"),
        (10, None, May(), "batch", "interactive-short"),
        (10, None, May(), "no such lane", "interactive-short"),
        (10, None, May(may_choose_lane=True), "batch", "batch"),
        (10, "flex", May(may_choose_lane=True), "interactive-long", "interactive-long"),
        (513, None, May(may_choose_lane=True), "interactive-short", "interactive-long"),
        (513, "flex", May(may_choose_lane=True), "interactive-short", "batch"),
    ],
)
def test_a_lane_follows_from_length_tier_key_and_where_allowed_from_the_wish(
    spec: Spec, tokens: int, tier: str | None, may: May, asked: str | None, lane: str
) -> None:
    """In the wrong lane, chats wait behind batch jobs, or batch jobs take the chats' share."""
    assert choose_lane(spec, tokens, tier, may, asked).name == lane


@pytest.mark.parametrize(
    ("tokens", "may", "asked", "param", "forbidden", "says"),
    [
        (10, May(may_choose_lane=True), "batsch", "x-laneway-lane", False, "'batsch', expected one of"),
        (10, May(("batch",), may_choose_lane=True), "interactive-long", "x-laneway-lane", True, "['batch']"),
        (513, May(("interactive-short",)), None, None, True, "513 tokens"),
    ],
)
def test_a_lane_that_may_not_be_had_is_refused_and_the_reason_told(
    spec: Spec, tokens: int, may: May, asked: str | None, param: str | None, forbidden: bool, says: str
) -> None:
    """Else a key that was kept to one lane uses another, or its owner does not learn why it is refused."""
    with pytest.raises(LaneRefusedError, match=r".") as caught:
        choose_lane(spec, tokens, None, may, asked)
    assert (caught.value.param, caught.value.forbidden) == (param, forbidden)
    assert says in str(caught.value)


def test_a_wish_that_is_no_name_is_not_repeated(spec: Spec) -> None:
    """A secret in the wrong header would stand in the access log."""
    with pytest.raises(LaneRefusedError) as caught:
        choose_lane(spec, 10, None, May(may_choose_lane=True), "My Secret Prompt")
    assert "Secret" not in str(caught.value)


@given(
    tokens=st.integers(1, 10_000),
    tier=st.none() | st.sampled_from(["auto", "default", "flex", "priority", "scale", ""]),
    lanes=st.none() | st.lists(st.sampled_from(LANES), unique=True).map(tuple),
    may_choose=st.booleans(),
    default_tier=st.sampled_from(["default", "flex"]),
    asked=st.none() | st.sampled_from([*LANES, "nonsense"]),
)
def test_no_request_gets_a_lane_that_is_too_short_for_it_or_that_its_key_may_not_use(
    tokens: int,
    tier: str | None,
    lanes: tuple[str, ...] | None,
    may_choose: bool,
    default_tier: str,
    asked: str | None,
) -> None:
    """One long prompt in the short lane makes everybody in it wait."""
    spec = parse(SPEC_TEXT)
    try:
        lane = choose_lane(spec, tokens, tier, May(lanes, may_choose, default_tier), asked)
    except LaneRefusedError:
        assert lanes is not None or asked == "nonsense"
        return
    assert lane.max_prompt_tokens is None or tokens <= lane.max_prompt_tokens
    assert lanes is None or lane.name in lanes
