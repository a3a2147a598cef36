"""The simulated replica as a process: clients that leave, spans, bad settings, its end."""

import http.client
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from tests.integration.replicas import SIMULATED_START_SECONDS, free_port, replica

pytestmark = pytest.mark.integration

CHAT: dict[str, Any] = {
    "model": "laneway-tiny",
    "messages": [{"role": "user", "content": "canary-91c2"}],
    "max_tokens": 5,
    "ignore_eos": True,
    "stream": True,
}
TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = "b7ad6b7169203331"


def post(url: str, body: dict[str, Any], headers: dict[str, str] | None = None) -> http.client.HTTPConnection:
    """A connection whose reply has begun."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=30)
    raw = json.dumps(body)
    connection.request("POST", "/v1/chat/completions", raw, {"content-type": "application/json", **(headers or {})})
    return connection


def running(url: str) -> float:
    """Requests that the replica says it computes."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=30)
    connection.request("GET", "/metrics")
    text = connection.getresponse().read().decode()
    return sum(float(line.rpartition(" ")[2]) for line in text.splitlines() if line.startswith("vllm:num_requests_r"))


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_is_aborted_within_half_a_second(simulated_url: str, stream: bool) -> None:
    """An engine that computes for clients that have left makes all the others wait."""
    connection = post(simulated_url, CHAT | {"max_tokens": 8000, "stream": stream})
    until = time.monotonic() + 5
    while running(simulated_url) == 0 and time.monotonic() < until:
        time.sleep(0.01)
    assert running(simulated_url) == 1
    connection.close()
    time.sleep(0.5)
    assert running(simulated_url) == 0


@contextmanager
def collector() -> Iterator[tuple[str, list[Any]]]:
    """Takes OTLP over HTTP; the endpoint, and the spans that came with their resources."""
    spans: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            raw = self.rfile.read(int(self.headers["content-length"]))
            for group in ExportTraceServiceRequest.FromString(raw).resource_spans:
                for scope in group.scope_spans:
                    spans.extend((group.resource, span) for span in scope.spans)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", free_port()), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", spans
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_a_request_leaves_one_span_below_its_caller(tmp_path: Path) -> None:
    """Without it a trace ends at the gateway, and nobody sees whether the engine or the queue was slow."""
    with collector() as (endpoint, spans):
        environ = {"OTEL_EXPORTER_OTLP_ENDPOINT": endpoint, "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"}
        with replica(tmp_path / "log", "simulate", seconds=SIMULATED_START_SECONDS, environ=environ) as url:
            reply = post(url, CHAT, {"traceparent": f"00-{TRACE}-{PARENT}-01"}).getresponse()
            reply.read()
            leaving = post(url, CHAT | {"max_tokens": 8000})
            leaving.getresponse().readline()
            leaving.close()
        # The replica has ended: what it had not sent by then is lost.
        assert len(spans) == 1, "one that was aborted leaves none, as in vLLM"
        resource, span = spans[0]
        assert (span.name, span.trace_id.hex(), span.parent_span_id.hex()) == ("llm_request", TRACE, PARENT)
        attributes = {item.key: item.value for item in span.attributes}
        assert attributes["gen_ai.usage.completion_tokens"].int_value == 5
        first = attributes["gen_ai.latency.time_to_first_token"].double_value
        whole = attributes["gen_ai.latency.e2e"].double_value
        assert 0 < first < whole
        assert (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9 == pytest.approx(whole, abs=1e-4)
        assert {item.key: item.value.string_value for item in resource.attributes}["service.name"] == "vllm"
        assert b"canary-91c2" not in span.SerializeToString()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["simulate", "--profile", "absent.json"], "absent.json: cannot be read"),
        (["simulate", "--scheduler", "best"], "scheduler: got 'best', expected one of"),
        (["simulate", "--spec", "absent.yaml"], "absent.yaml: cannot be read"),
        (["simulate", "--tokenizer", "absent.json"], "--tokenizer: absent.json cannot be read"),
        (["vllm", "--scheduler", "best"], "--scheduler: got 'best', expected 'vllm'"),
    ],
)
def test_a_wrong_setting_is_refused_with_exit_code_2(tmp_path: Path, arguments: list[str], message: str) -> None:
    """Someone who starts a replica by hand must read what to change, not a traceback."""
    code = "from serving.engine.commands import engine_app; engine_app()"
    ran = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, cwd=tmp_path, timeout=60, check=False
    )
    assert ran.returncode == 2
    assert message in ran.stderr
    assert "Traceback" not in ran.stderr
