"""The spec: one file that names everything, and refuses what contradicts itself."""

from typing import Any

import pytest
import yaml

from serving import spec as spec_file
from serving.spec import Spec, load, parse
from tests.unit.spec_edits import ROOT, problems_of, shipped, with_value

CANARY = "canary-0f9a7"


def test_the_shipped_file_has_the_lanes_that_the_design_promises() -> None:
    """A user who changes nothing would get other objectives than the documentation says."""
    lanes = [
        (
            lane.name,
            lane.max_prompt_tokens,
            lane.tier,
            (lane.ttft.share, lane.ttft.seconds),
            None if lane.tpot is None else (lane.tpot.share, lane.tpot.seconds),
            lane.success,
            lane.deadline,
            lane.weight,
            lane.gate,
        )
        for lane in load(ROOT / "laneway.yaml").lanes
    ]
    assert lanes == [
        ("interactive-short", 512, "default", (0.95, 0.1), (0.95, 0.05), 0.995, 2, 8, True),
        ("interactive-long", None, "default", (0.95, 1.0), (0.95, 0.08), 0.995, 10, 3, False),
        ("batch", None, "flex", (0.95, 60.0), None, 0.99, 600, 1, False),
    ]


def test_the_defaults_are_those_of_the_design() -> None:
    """Strata, stages and the gate's thresholds would drift from what release engineers were told."""
    spec = load(ROOT / "laneway.yaml")
    assert spec.lane("interactive-short").wait_limit == pytest.approx(0.08)
    assert spec.strata.prompt_tokens == (128, 512, 2048)
    assert spec.strata.output_tokens == (64, 256)
    assert spec.slo.period_days == 28
    assert (spec.rollout.shadow_percent, spec.rollout.canary_percent, spec.rollout.window) == (5, 25, 60)
    assert (spec.rollout.error_spike.points, spec.rollout.error_spike.min_errors) == (1, 5)
    assert (spec.pools[0].batch_tokens, spec.pools[0].static_batch) == (256, 8)
    assert spec.gateway.timeouts.header_hold == 5


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"lanes[0].name": "batch"}, ["lanes: 'batch' stands more than once"]),
        ({"lanes[0].name": "none"}, ["'none' is reserved"]),
        ({"lanes[1].max_prompt_tokens": 4096}, ["no lane of tier default takes every prompt"]),
        ({"lanes[2].max_prompt_tokens": 4096}, ["no lane of tier flex takes every prompt"]),
        ({"models[0].pools": {"other": 1}}, ["models[0].pools: got 'other', expected one of ['baseline']"]),
        ({"models[0].pools": {"baseline": 0}}, ["models[0].pools: every weight is 0"]),
        ({"pools[0].start": None}, ["pools[0]: has neither `replicas` nor `start`"]),
        ({"gateway.auth.keys": [{"name": "a", "sha256": "0" * 64, "lanes": ["x"]}]}, ["keys[0].lanes: got 'x'"]),
        ({"gateway.auth.keys": [{"name": "a", "sha256": "0" * 64, "models": ["x"]}]}, ["keys[0].models: got 'x'"]),
        (
            {"gateway.auth.keys": [{"name": name, "sha256": "0" * 64} for name in "ab"]},
            [f"gateway.auth.keys: '{'0' * 64}' stands more than once"],
        ),
        ({"strata": {"prompt_tokens": [512, 128]}}, ["strata: prompt_tokens is [512, 128]", "ascending"]),
        ({"rollout": {"shadow_percent": 30}}, ["rollout: shadow_percent is 30", "at most canary_percent (25)"]),
        ({"pools[0].start": {"count": 2, "first_port": 65_535}}, ["pools[0].start: 2 replicas from port 65535"]),
    ],
)
def test_fields_that_contradict_each_other_are_refused(changes: dict[str, Any], words: list[str]) -> None:
    """The gateway would start, and turn requests away, or count them in the wrong place, only under traffic."""
    [(path, value)] = changes.items()
    [problem] = problems_of(with_value(path, value))
    for word in words:
        assert word in problem


def test_two_pools_cannot_start_replicas_on_one_port() -> None:
    """`laneway spec` would call the file good, and one replica would fail for ever."""
    data = shipped()
    data["pools"] = [
        {"name": name, "start": {"count": 2, "first_port": port}} for name, port in (("a", 8100), ("b", 8101))
    ]
    data["models"][0]["pools"] = {"a": 1, "b": 1}
    [problem] = problems_of(yaml.safe_dump(data))
    assert problem == "pools[1].start: port 8101 is taken by a replica of pool 'a', expected ports of its own"


def test_a_started_replica_serves_one_model() -> None:
    """Requests for the second model would all fail at the engine with a 404."""
    data = shipped()
    data["models"].append({**data["models"][0], "name": "another"})
    [problem] = problems_of(yaml.safe_dump(data))
    assert "pools[0].start: serves ['laneway-tiny', 'another'], expected one model" in problem


@pytest.mark.parametrize(
    ("url", "good"),
    [
        ("http://127.0.0.1:8000", True),
        ("https://vllm.example.com", True),
        ("http://[::1]:8000/base/", True),
        ("ftp://x", False),
        ("http://", False),
        ("http://host:99999", False),
        ("http://host:0", False),
        ("http://host:http", False),
        ("http://[::1", False),
        (f"http://user:{CANARY}@host", False),
        (f"http://host?key={CANARY}", False),
        (f"http://host/#{CANARY}", False),
        ("http://host /v1", False),
    ],
)
def test_a_replica_has_a_plain_base_url(url: str, good: bool) -> None:
    """A URL with no usable port would end the task that follows the pool; one with a password would be a label."""
    text = with_value("pools[0].replicas", [{"url": url}])
    if good:
        assert parse(text).pools[0].replicas[0].url == url
    else:
        [problem] = problems_of(text)
        assert problem.startswith("pools[0].replicas[0]")
        assert CANARY not in problem


OTHER_VALUES: dict[str, Any] = {
    "lanes[0].max_prompt_tokens": 513,
    "lanes[0].ttft.seconds": 0.11,
    "lanes[0].tpot": None,
    "lanes[0].gate": False,
    "lanes[0].queue": {"max_requests": 7},
    "lanes[2].deadline": 601,
    "models[0].max_model_len": 4096,
    "models[0].tokenizer": "tokenizer.json",
    "models[0].pools.baseline": 2,
    "pools[0].batch_tokens": 257,
    "pools[0].engine_scheduler": "lanes",
    "pools[0].start.arguments": ["--seed", "1"],
    "pools[0].replicas": [{"url": "http://127.0.0.1:1"}],
    "gateway.replicas": 2,
    "gateway.timeouts.idle": 31,
    "gateway.auth.keys": [{"name": "a", "sha256": "0" * 64}],
    "cache.enabled": True,
    "strata.prompt_tokens": [128, 512],
    "slo.period_days": 27,
    "rollout.error_spike": {"min_errors": 6},
    "telemetry.max_models": 31,
    "replay.max_send_lateness": 0.03,
}


def test_the_digest_changes_with_any_setting_and_with_nothing_else() -> None:
    """A gateway compares digests to see whether an edit means anything; an edit that it missed would never count."""
    before = load(ROOT / "laneway.yaml").digest
    digests = {path: parse(with_value(path, value)).digest for path, value in OTHER_VALUES.items()}
    assert len({before, *digests.values()}) == len(digests) + 1
    assert {path.partition(".")[0].partition("[")[0] for path in digests} == set(Spec.model_fields)
    assert parse(yaml.safe_dump(shipped())).digest == before, "comments and layout are no settings"
    assert parse(with_value("gateway.timeouts.idle", 30)).digest == before, "nor is a default that was typed out"


def test_lanes_pools_and_models_are_found_by_name() -> None:
    """A wrong lookup would apply another lane's objective."""
    spec = load(ROOT / "laneway.yaml")
    assert spec.lane("batch").tier == "flex"
    assert spec.pool("baseline").start is not None
    assert spec.model("laneway-tiny") is spec.models[0]
    assert spec.model("gpt") is None
    with pytest.raises(KeyError):
        spec.lane("gold")
    with pytest.raises(KeyError):
        spec.pool("gold")


def test_a_spec_cannot_be_changed_in_place() -> None:
    """Parts of the gateway would see different settings."""
    spec = load(ROOT / "laneway.yaml")
    with pytest.raises(ValueError, match="frozen"):
        spec.lanes[0].weight = 2  # type: ignore[misc]


def test_the_module_hands_out_every_section() -> None:
    """`from serving.spec import …` is how every part reads the spec, wherever a section is written down."""
    assert all(hasattr(spec_file, name) for name in spec_file.__all__)
