"""The command line and environment of a real replica."""

import json
from pathlib import Path

import pytest

from serving.engine import buckets
from serving.engine.vllm import EngineMissingError, VllmOptions, find_python, tiny_model_folder, vllm_command
from serving.spec import load

PROJECT = Path(__file__).parents[3]
PYTHON = Path("/engine/bin/python")


def flag(argv: list[str], name: str) -> str:
    """The value that follows a flag."""
    return argv[argv.index(name) + 1]


def test_a_local_model_is_served_under_its_name_without_asking_the_hub(tmp_path: Path) -> None:
    """A replica that asks the hub for a folder it has would not start on a machine without the hub."""
    argv, env = vllm_command(VllmOptions(PYTHON, str(tmp_path), name="chat", port=8123), {})
    assert argv[:3] == [str(PYTHON), "-m", "vllm.entrypoints.openai.api_server"]
    assert (flag(argv, "--model"), flag(argv, "--served-model-name")) == (str(tmp_path), "chat")
    assert (flag(argv, "--host"), flag(argv, "--port")) == ("127.0.0.1", "8123")
    assert env["HF_HUB_OFFLINE"] == "1"
    assert env["VLLM_CPU_KVCACHE_SPACE"] == "1"
    assert env["VLLM_NO_USAGE_STATS"] == "1"


def test_a_hub_name_may_be_fetched() -> None:
    """Offline mode would make every model of the hub unknown."""
    argv, env = vllm_command(VllmOptions(PYTHON, "org/model"), {})
    assert flag(argv, "--served-model-name") == "org/model"
    assert "HF_HUB_OFFLINE" not in env


def test_what_the_operator_has_set_is_kept() -> None:
    """A launcher that overrides the environment cannot be tuned at 3 a.m."""
    environ = {"VLLM_CPU_KVCACHE_SPACE": "40", "OTEL_SERVICE_NAME": "pool-a", "PATH": "/bin"}
    _, env = vllm_command(VllmOptions(PYTHON, "org/model"), environ)
    assert environ.items() <= env.items()


def test_limits_and_further_arguments_are_passed_on_last() -> None:
    """Without this a user could not reach vLLM's own flags, or would have them overridden."""
    options = VllmOptions(
        PYTHON, "m", max_num_seqs=8, max_num_batched_tokens=512, max_num_queued_reqs=9, prefix_caching=False,
        arguments=("--seed", "3"),
    )  # fmt: skip
    argv, _ = vllm_command(options, {})
    assert flag(argv, "--max-num-seqs") == "8"
    assert flag(argv, "--max-num-batched-tokens") == "512"
    assert flag(argv, "--max-num-queued-reqs") == "9"
    assert "--no-enable-prefix-caching" in argv
    assert argv[-2:] == ["--seed", "3"]


def test_a_replica_can_be_pinned_to_one_core() -> None:
    """Measurements need the engine on one core and the client on another."""
    argv, env = vllm_command(VllmOptions(PYTHON, "m", cpu_core=1), {})
    assert argv[:4] == ["taskset", "--cpu-list", "1", str(PYTHON)]
    assert env["VLLM_CPU_OMP_THREADS_BIND"] == "1"


@pytest.mark.parametrize(
    ("environ", "endpoint", "protocol"),
    [
        ({}, None, None),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4317"}, "http://c:4317", "grpc"),
        (
            {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318/", "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"},
            "http://c:4318/v1/traces",
            "http/protobuf",
        ),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://c:1/t"}, "http://c:1/t", "grpc"),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4317", "OTEL_SDK_DISABLED": "true"}, None, None),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4317", "OTEL_TRACES_EXPORTER": "none"}, None, None),
    ],
)
def test_spans_go_where_the_standard_variables_say(
    environ: dict[str, str], endpoint: str | None, protocol: str | None
) -> None:
    """Otherwise the engine's part of every trace is missing, or start-up waits for a collector nobody asked for."""
    argv, env = vllm_command(VllmOptions(PYTHON, "m"), environ)
    assert (flag(argv, "--otlp-traces-endpoint") if "--otlp-traces-endpoint" in argv else None) == endpoint
    assert env.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL") == protocol


def test_every_promise_of_the_spec_is_a_bound_of_the_engine_histograms() -> None:
    """A threshold that is no bound can only be interpolated, and an objective of 0.1 s not at all from 0.3 s up."""
    spec = load(PROJECT / "laneway.yaml")
    argv, _ = vllm_command(VllmOptions(PYTHON, "m", buckets=buckets.from_spec(spec)), {})
    bounds = json.loads(flag(argv, "--custom-histogram-buckets"))
    for lane in spec.lanes:
        assert {lane.ttft.seconds, round(lane.wait_limit, 9), lane.deadline} <= set(bounds["request_latency"])
        assert lane.ttft.seconds in bounds["time_to_first_token"]
        assert lane.tpot is None or lane.tpot.seconds in bounds["inter_token_latency"]
    for family, values in bounds.items():
        assert values == sorted(set(values))
        assert set(buckets.STOCK[family]) <= set(values)


def test_token_bounds_end_at_the_model_length() -> None:
    """Other bounds than the real engine's could not be summed with them."""
    assert buckets.request_tokens(8192)[-3:] == (1000, 2000, 5000)
    assert buckets.request_tokens(1) == (1,)


def test_the_interpreter_that_is_named_wins_and_must_exist(tmp_path: Path) -> None:
    """A typing error must not start another vLLM than the one that was meant."""
    there = tmp_path / ".venv-engine" / "bin" / "python"
    there.parent.mkdir(parents=True)
    there.touch()
    assert find_python(None, {}, tmp_path) == there
    named = tmp_path / "python"
    with pytest.raises(
        EngineMissingError, match=r"LANEWAY_ENGINE_PYTHON: got .* expected an interpreter that has vLLM"
    ):
        find_python(None, {"LANEWAY_ENGINE_PYTHON": str(named)}, tmp_path)
    named.touch()
    assert find_python(None, {"LANEWAY_ENGINE_PYTHON": str(named)}, tmp_path) == named
    assert find_python(there, {"LANEWAY_ENGINE_PYTHON": str(named)}, tmp_path) == there


def test_without_any_vllm_the_message_says_how_to_get_one(tmp_path: Path) -> None:
    """The first thing a new user sees must be the way out."""
    with pytest.raises(EngineMissingError, match="make engine-cpu"):
        find_python(None, {}, tmp_path)


def test_a_tiny_model_that_cannot_be_made_says_why(tmp_path: Path) -> None:
    """Without torch it fails, and the message has to name what is missing rather than a traceback."""
    wrong = tmp_path / "python"
    wrong.write_text("#!/bin/sh\necho no torch here >&2\nexit 1\n")
    wrong.chmod(0o755)
    with pytest.raises(EngineMissingError, match="no torch here"):
        tiny_model_folder(wrong, {"XDG_CACHE_HOME": str(tmp_path)})
