"""Do the clocks agree? The same requests on real vLLM, seen by the client, by the gateway and by the engine.

vLLM (CPU, tiny random model) is pinned to the last core; client and gateway run on the others. Joined request by
request: the client's time to first token from its sending against the gateway's from receipt; token counts; and the
engine's own queue + prefill time, from its span, against the gateway's dispatched → first token.

    python -m tests.bench.truth [--seconds 130] [--short 4] [--long 0.1]
"""

import argparse
import json
import os
import threading
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from rich.console import Console
from rich.table import Table

from serving import spec as spec_file
from serving.workload import experiment

QUEUE = "gen_ai.latency.time_in_queue"
PREFILL = "gen_ai.latency.time_in_model_prefill"


class Spans:
    """An OTLP/HTTP receiver that keeps what the engine says of each trace."""

    def __init__(self) -> None:
        self.engine: dict[str, dict[str, float]] = {}
        received = self.engine

        class Receiver(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                if self.path.endswith("/v1/traces"):
                    _keep(ExportTraceServiceRequest.FromString(body), received)
                answer = ExportTraceServiceResponse().SerializeToString()
                self.send_response(200)
                self.send_header("content-type", "application/x-protobuf")
                self.send_header("content-length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 (the library's name)
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Receiver)
        self.endpoint = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()


def _keep(request: ExportTraceServiceRequest, received: dict[str, dict[str, float]]) -> None:
    for resource in request.resource_spans:
        for scope in resource.scope_spans:
            for span in scope.spans:
                if span.name == "llm_request":
                    values = {item.key: item.value.double_value for item in span.attributes}
                    received[span.trace_id.hex()] = values


@dataclass(frozen=True)
class Joined:
    """One request at its three boundaries, seconds."""

    client_ttft: float
    gateway_ttft: float
    gateway_engine: float
    engine: float | None
    counts_agree: bool


def join(run: Path, access: Path, engine: dict[str, dict[str, float]]) -> list[Joined]:
    """The streamed, completed requests of a run."""
    gateway = {
        row["request_id"]: row
        for row in map(json.loads, access.read_text().splitlines())
        if row.get("event") == "request" and row["outcome"] == "completed"
    }
    rows = []
    for client in map(json.loads, (run / "timelines.jsonl").read_text().splitlines()):
        if client["boundary"] != "client" or client["outcome"] != "completed":
            continue
        row = gateway[client["request_id"]]
        span = engine.get(row["trace_id"] or "")
        rows.append(
            Joined(
                client_ttft=client["first_token"] - client["sent"],
                gateway_ttft=row["first_token"] - row["received"],
                gateway_engine=row["first_token"] - row["dispatched"],
                engine=None if span is None else span[QUEUE] + span[PREFILL],
                counts_agree=client["output_tokens"] == row["output_tokens"]
                and client["usage_prompt_tokens"] == row["prompt_tokens"],
            )
        )
    return rows


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=130.0)
    parser.add_argument("--short", type=float, default=4.0, help="short prompts a second")
    parser.add_argument("--long", type=float, default=0.1, help="long prompts a second")
    parser.add_argument("--out", type=Path, default=Path("runs/truth"))
    options = parser.parse_args()
    options.out.mkdir(parents=True)
    spans = Spans()
    os.environ["OTEL_EXPORTER_OTLP_ENDPOINT"] = spans.endpoint
    os.environ["OTEL_EXPORTER_OTLP_PROTOCOL"] = "http/protobuf"
    os.environ["OTEL_METRICS_EXPORTER"] = os.environ["OTEL_LOGS_EXPORTER"] = "none"
    cores = sorted(os.sched_getaffinity(0))
    mix = experiment.Mix(short=options.short, long=options.long, burst=0)
    setup = experiment.Setup("vllm", 1, options.seconds, options.out, mix=mix, engine_core=cores[-1])
    run, spec = options.out / "run", options.out / "laneway.yaml"
    with experiment.engines(setup) as urls:
        os.sched_setaffinity(0, set(cores[:-1]) or set(cores))
        experiment.write_spec(spec_file.load(Path("laneway.yaml")), setup, urls, 4.0, spec)
        experiment.run(setup, spec, 1.0, urls, "lanes", run, seed=1)
    show(join(run, options.out / "run.access.jsonl", spans.engine))


def show(rows: list[Joined]) -> None:
    """The table."""
    apart = sorted(abs(row.client_ttft - row.gateway_ttft) * 1000 for row in rows)
    seen = [row for row in rows if row.engine is not None]
    margin = sorted((row.gateway_engine - (row.engine or 0.0)) * 1000 for row in seen)
    table = Table("what", "figure", title=f"{len(rows)} streamed requests; load average {os.getloadavg()}")
    table.add_row(
        "client TTFT − gateway TTFT, p50 / p99 / max ms", " / ".join(f"{at(apart, q):.2f}" for q in (0.5, 0.99, 1))
    )
    table.add_row("requests whose token counts differ", str(sum(not row.counts_agree for row in rows)))
    table.add_row("requests with an engine span", f"{len(seen)} of {len(rows)}")
    table.add_row(
        "gateway (dispatched → first token) − engine (queue + prefill), min / p50 / p99 ms",
        " / ".join(f"{at(margin, q):.2f}" for q in (0, 0.5, 0.99)),
    )
    table.add_row("requests where the engine says more than the gateway", str(sum(value < 0 for value in margin)))
    Console(width=150).print(table)


def at(ordered: list[float], share: float) -> float:
    """A quantile of ascending values, nearest rank."""
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else float("nan")


if __name__ == "__main__":
    main()
