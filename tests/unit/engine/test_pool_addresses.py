"""What a replica's URL stands for, and what its exposition says of its load."""

from pathlib import Path

import pytest

from serving.engine.pools import Address, EngineLoad, parse_load, resolve

EXPOSITION = Path(__file__).parents[2] / "fixtures" / "expositions" / "vllm-0.32.0.txt"


def test_the_load_of_a_real_replica_is_read() -> None:
    """A metric renamed by an upgrade would read as an idle engine that never makes progress."""
    text = EXPOSITION.read_bytes()
    load = parse_load(text)
    assert load.prompt_tokens_total > 0
    assert load.generation_tokens_total > 0
    for name in (b"num_requests_running", b"num_requests_waiting", b"prompt_tokens_total", b"generation_tokens_total"):
        assert b"\nvllm:" + name + b"{" in text, "the recording has it, so nothing was taken for 0 by default"


@pytest.mark.parametrize(
    ("text", "load"),
    [
        (b"", EngineLoad(0, 0, 0, 0)),
        (b"vllm:num_requests_running 3\n", EngineLoad(3, 0, 0, 0)),
        (
            b'vllm:num_requests_running{engine="0"} 3.0\nvllm:num_requests_running{engine="1"} 4.0',
            EngineLoad(7, 0, 0, 0),
        ),
        (b'vllm:prompt_tokens_total{model_name="a}b c"} 1.5e+06\n', EngineLoad(0, 0, 1.5e6, 0)),
        (b"# HELP vllm:num_requests_running 9\nvllm:num_requests_waiting 2\n", EngineLoad(0, 2, 0, 0)),
        (b'vllm:num_requests_waiting_by_reason{reason="capacity"} 5\n', EngineLoad(0, 0, 0, 0)),
        (b"vllm:generation_tokens_total 12\nvllm:generation_tokens_created 99\n", EngineLoad(0, 0, 0, 12)),
    ],
)
def test_load_is_the_sum_over_the_engines_of_a_server(text: bytes, load: EngineLoad) -> None:
    """One server may run several engines: the load of the first alone would overfill the others."""
    assert parse_load(text) == load


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("http://127.0.0.1:8000", Address("127.0.0.1:8000", "http://127.0.0.1:8000")),
        ("http://127.0.0.1:8000/", Address("127.0.0.1:8000", "http://127.0.0.1:8000")),
        ("http://127.0.0.1:8000/a/", Address("127.0.0.1:8000/a", "http://127.0.0.1:8000/a")),
        ("http://[::1]:8000", Address("[::1]:8000", "http://[::1]:8000")),
        ("http://localhost:8000", Address("127.0.0.1:8000", "http://127.0.0.1:8000", "localhost:8000")),
        ("http://localhost:8000/a", Address("127.0.0.1:8000/a", "http://127.0.0.1:8000/a", "localhost:8000")),
        ("http://localhost", Address("127.0.0.1:80", "http://127.0.0.1:80", "localhost")),
        ("https://localhost", Address("127.0.0.1:443", "https://127.0.0.1:443", "localhost", "localhost")),
    ],
)
async def test_a_url_stands_for_an_address_that_names_one_replica(url: str, address: Address) -> None:
    """Two replicas behind paths of one host must not be one; a certificate is checked against the name, not the IP."""
    assert await resolve(url) == [address]


@pytest.mark.parametrize("url", ["http://nowhere.invalid:8000", f"http://{'a' * 70}.example:80", "http://a..b"])
async def test_a_name_that_does_not_resolve_stands_for_nobody(url: str) -> None:
    """An exception would end the task that follows the pool, and its replicas would be frozen as they are."""
    assert await resolve(url) == []
