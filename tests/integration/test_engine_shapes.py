"""The simulated replica beside a real vLLM: the same requests, and replies of the same shape."""

import http.client
import json
import re
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.integration.replicas import SIMULATED_START_SECONDS, replica
from tests.record_exposition import RECORDED, exercise, shape, vllm_families

pytestmark = pytest.mark.integration

CHAT: dict[str, Any] = {
    "model": "laneway-tiny",
    "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is a queue? " * 9}],
    "max_tokens": 12,
    "ignore_eos": True,
}
TEXT: dict[str, Any] = {"model": "laneway-tiny", "prompt": "Once upon a time", "max_tokens": 12, "ignore_eos": True}


def ask(url: str, path: str, body: Any = None) -> tuple[int, str, str]:
    """Status, content type and text of a reply."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=60)
    try:
        if body is None:
            connection.request("GET", path)
        else:
            raw = body if isinstance(body, bytes) else json.dumps(body).encode()
            connection.request("POST", path, raw, {"content-type": "application/json"})
        reply = connection.getresponse()
        return reply.status, reply.getheader("content-type") or "", reply.read().decode()
    finally:
        connection.close()


def outline(value: Any, path: str = "") -> list[str]:
    """Keys in their order, types of the values, and the values that are the same for every request."""
    if isinstance(value, dict):
        return [line for key, item in value.items() for line in outline(item, f"{path}.{key}")]
    if isinstance(value, list):
        return [line for item in value for line in outline(item, f"{path}[]")] or [f"{path}: empty"]
    if path.rpartition(".")[2] in ("object", "role", "finish_reason", "prompt_tokens", "completion_tokens", "index"):
        return [f"{path}: {value!r}"]
    return [f"{path}: {type(value).__name__}"]


def events(text: str) -> list[str]:
    """The data of a stream's events, each with its outline; equal neighbours once (tokens may come joined)."""
    outlines = [
        data if data == "[DONE]" else "\n".join(outline(json.loads(data)))
        for data in re.findall(r"^data: (.*)$", text, re.M)
    ]
    return [one for i, one in enumerate(outlines) if i == 0 or outlines[i - 1] != one]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", CHAT | {"stream": True}),
        ("/v1/chat/completions", CHAT | {"stream": True, "stream_options": {"include_usage": True}}),
        ("/v1/completions", TEXT | {"stream": True}),
        ("/v1/completions", TEXT | {"stream": True, "stream_options": {"include_usage": True}}),
    ],
)
def test_streams_have_the_same_events_in_the_same_order(
    vllm_url: str, simulated_url: str, path: str, body: dict[str, Any]
) -> None:
    """A gateway that works with the simulated engine must not meet another protocol in production."""
    real, ours = ask(vllm_url, path, body), ask(simulated_url, path, body)
    assert ours[:2] == real[:2]
    assert events(ours[2]) == events(real[2])


def test_running_usage_is_in_every_chunk_where_it_was_asked_for(vllm_url: str, simulated_url: str) -> None:
    """Clients that meter while they read would see no tokens."""
    body = CHAT | {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    for url in (vllm_url, simulated_url):
        text = ask(url, "/v1/chat/completions", body)[2]
        chunks = [json.loads(data) for data in re.findall(r"^data: (\{.*)$", text, re.M)]
        counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
        assert counts[0] == 0
        assert counts == sorted(counts)
        assert counts[-1] == 12
    real, ours = (ask(url, "/v1/chat/completions", body | {"max_tokens": 1})[2] for url in (vllm_url, simulated_url))
    assert events(ours) == events(real)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", CHAT),
        ("/v1/chat/completions", CHAT | {"max_completion_tokens": 2}),
        ("/v1/chat/completions", CHAT | {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}]}),
        ("/v1/completions", TEXT),
        ("/v1/completions", TEXT | {"prompt": [5, 6, 7]}),
        ("/tokenize", {"model": "laneway-tiny", "prompt": "Once upon a time"}),
        ("/v1/models", None),
    ],
)
def test_whole_replies_have_the_same_keys_and_count_the_same_tokens(
    vllm_url: str, simulated_url: str, path: str, body: dict[str, Any] | None
) -> None:
    """Token counts that differ would put the same request into different lanes at the two engines."""
    real, ours = ask(vllm_url, path, body), ask(simulated_url, path, body)
    assert ours[:2] == real[:2]
    assert outline(json.loads(ours[2])) == outline(json.loads(real[2]))


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", CHAT | {"model": "nobody"}),
        ("/v1/chat/completions", b'{"model":'),
        ("/v1/chat/completions", b"[1]"),
        ("/v1/chat/completions", b""),
        ("/v1/chat/completions", {"model": "laneway-tiny"}),
        ("/v1/chat/completions", CHAT | {"messages": []}),
        ("/v1/chat/completions", CHAT | {"messages": "x"}),
        ("/v1/chat/completions", CHAT | {"max_tokens": 0}),
        ("/v1/chat/completions", CHAT | {"max_tokens": "many"}),
        ("/v1/chat/completions", CHAT | {"max_tokens": 100_000}),
        ("/v1/chat/completions", CHAT | {"temperature": -1}),
        ("/v1/chat/completions", CHAT | {"top_p": 3}),
        ("/v1/chat/completions", CHAT | {"n": 0}),
        ("/v1/chat/completions", CHAT | {"priority": "x"}),
        ("/v1/chat/completions", CHAT | {"stream_options": {"include_usage": True}}),
        ("/v1/chat/completions", CHAT | {"tools": [{"type": "function", "function": {"name": "f"}}]}),
        ("/v1/completions", {"model": "laneway-tiny", "max_tokens": 2}),
        ("/v1/completions", TEXT | {"prompt": ""}),
        ("/v1/completions", TEXT | {"prompt": []}),
        ("/v1/completions", TEXT | {"prompt": [5] * 9000}),
        ("/v1/completions", TEXT | {"prompt": [99_999]}),
        ("/v1/nothing", CHAT),
    ],
)
def test_refusals_have_the_same_status_type_and_parameter(
    vllm_url: str, simulated_url: str, path: str, body: Any
) -> None:
    """What the gateway retries, and whom it blames, hangs on these."""
    real, ours = ask(vllm_url, path, body), ask(simulated_url, path, body)
    assert ours[:2] == real[:2]
    real_error, our_error = json.loads(real[2]), json.loads(ours[2])
    assert real_error.keys() == our_error.keys()
    if "error" in real_error:
        assert {**our_error["error"], "message": ""} == {**real_error["error"], "message": ""}
        assert our_error["error"]["message"]


def test_a_prompt_that_leaves_little_room_gets_what_fits(vllm_url: str, simulated_url: str) -> None:
    """vLLM clips the output silently; a replica that refused here would break clients that rely on it."""
    body = TEXT | {"prompt": [5] * 8190, "max_tokens": 50}
    counts = [json.loads(ask(url, "/v1/completions", body)[2])["usage"] for url in (vllm_url, simulated_url)]
    assert counts[0]["completion_tokens"] == counts[1]["completion_tokens"] == 2


def test_the_recorded_exposition_is_still_what_the_real_engine_exposes(vllm_url: str) -> None:
    """Every dashboard and alert is checked against the recording: it must not go stale."""
    exercise(urlsplit(vllm_url).netloc, "laneway-tiny")
    real = vllm_families(ask(vllm_url, "/metrics")[2])
    assert shape(real) == shape(RECORDED.read_text(encoding="utf-8"))


def test_the_simulated_replica_exposes_the_same_series_after_traffic(simulated_url: str) -> None:
    """Series that appear only with traffic would be missed by a comparison at rest."""
    exercise(urlsplit(simulated_url).netloc, "laneway-tiny")
    ours = vllm_families(ask(simulated_url, "/metrics")[2])
    assert shape(ours) == shape(RECORDED.read_text(encoding="utf-8"))


def test_a_full_replica_refuses_with_503(tmp_path: Path) -> None:
    """The gateway tries another replica on this status only."""
    arguments = ("simulate", "--max-num-queued-reqs", "1")
    with replica(tmp_path / "log", *arguments, seconds=SIMULATED_START_SECONDS) as url:
        connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=60)
        long = json.dumps(CHAT | {"stream": True, "max_tokens": 4000})
        connection.request("POST", "/v1/chat/completions", long, {"content-type": "application/json"})
        connection.getresponse().readline()
        status, _, text = ask(url, "/v1/chat/completions", CHAT)
        error = json.loads(text)["error"]
        assert (status, error["type"], error["code"], error["param"]) == (503, "Service Unavailable", 503, None)
        metrics = ask(url, "/metrics")[2]
        assert 'vllm:admission_rejections_total{model_name="laneway-tiny",reason="max_num_queued_reqs"} 1.0' in metrics
        connection.close()
