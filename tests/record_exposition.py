"""The `vllm:*` metrics of a real replica, recorded: `python -m tests.record_exposition URL FILE`.

It sends a little traffic first, so that every series that traffic makes is there: streamed and not, chat and text, a
prompt sent twice (prefix cache), a client that leaves, a request that is refused. What the recording is good for are
the names, types, labels and bounds; its values are those of the minute.
"""

import http.client
import json
import re
import sys
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from prometheus_client.parser import text_string_to_metric_families

RECORDED = Path(__file__).parent / "fixtures" / "expositions" / "vllm-0.32.0.txt"
SETTINGS = frozenset({"le", "source", "reason", "finished_reason", "sleep_state", "engine", "model_name"})
"""Labels whose values are part of the contract; others describe one replica's settings."""
HEADER = "# vLLM {version}, recorded by `python -m tests.record_exposition URL FILE`\n"


def exercise(address: str, model: str) -> None:
    """One request of each kind."""
    chat = {
        "model": model,
        "messages": [{"role": "user", "content": "Count the words of this sentence. " * 40}],
        "max_tokens": 4,
        "ignore_eos": True,
    }
    for body in (chat, chat, chat | {"stream": True}):
        _ask(address, "/v1/chat/completions", body)
    _ask(address, "/v1/completions", {"model": model, "prompt": "Once", "max_tokens": 4, "ignore_eos": True})
    _ask(address, "/v1/chat/completions", chat | {"max_tokens": 0}, status=400)
    _ask(address, "/v1/chat/completions", chat | {"stream": True, "max_tokens": 2000}, leave=True)


def _ask(address: str, path: str, body: Any = None, status: int = 200, leave: bool = False) -> str:
    connection = http.client.HTTPConnection(address, timeout=60)
    try:
        if body is None:
            connection.request("GET", path)
        else:
            connection.request("POST", path, json.dumps(body), {"content-type": "application/json"})
        reply = connection.getresponse()
        if reply.status != status:
            raise RuntimeError(f"{path}: got status {reply.status}, expected {status}")
        return (reply.readline() if leave else reply.read()).decode()
    finally:
        connection.close()


def vllm_families(exposition: str) -> str:
    """The types and samples of vLLM's own metrics; help texts and what describes the process are left out."""
    kept = [line for line in exposition.splitlines() if line.removeprefix("# TYPE ").startswith("vllm:")]
    return "\n".join(kept) + "\n"


def shape(exposition: str) -> dict[str, tuple[str, set[tuple[tuple[str, str], ...]]]]:
    """Type, and the series by label names and (where they are fixed) values, of each `vllm:` family."""
    types = dict(re.findall(r"^# TYPE (vllm:\S+) (\S+)", exposition, re.M))
    series: dict[str, tuple[str, set[tuple[tuple[str, str], ...]]]] = {}
    for family in text_string_to_metric_families(exposition):
        for sample in family.samples:
            if sample.name.startswith("vllm:"):
                labels = {key: value if key in SETTINGS else "" for key, value in sample.labels.items()}
                kind = types.get(sample.name) or types.get(family.name) or ""
                series.setdefault(sample.name, (kind, set()))[1].add(tuple(sorted(labels.items())))
    return series


def record(url: str, file: Path) -> None:
    """Traffic, then the recording."""
    address = urlsplit(url).netloc
    model = json.loads(_ask(address, "/v1/models"))["data"][0]["id"]
    exercise(address, model)
    version = json.loads(_ask(address, "/version"))["version"]
    file.write_text(HEADER.format(version=version) + vllm_families(_ask(address, "/metrics")), encoding="utf-8")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: python -m tests.record_exposition URL FILE")
    record(sys.argv[1], Path(sys.argv[2]))
