"""Many streams at once through the gateway to the simulated engine: none may be lost, and health must still answer.

Client and engine run on one core, the gateway on the other. All streams are sent within a second and their replies are
long enough that all are open together; meanwhile a process of its own (on the gateway's core, where it waits for one
other only) asks `/healthz` fifty times a second, and the gateway's resident memory is read. The spec is the
repository's with its bounds and the engine's credit raised for this many: what is looked at is the carrying of
streams, not the holding back or refusing of what is too much.

    python -m tests.bench.streams [--streams 2000] [--tokens 128] [--json]
"""

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from collections import Counter
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import uvloop
import yaml
from rich.console import Console
from rich.table import Table

from tests.bench.open_loop import OpenLoop, Shot, chat_body, quantile
from tests.bench.processes import BenchProcess, cores, ready, running
from tests.bench.stub_engine import MODEL
from tests.bench.targets import REPOSITORY, START_SECONDS

PATIENCE_SECONDS = 300.0
BLOCKS_PER_STREAM = 8
"""KV blocks of 128 tokens: more than a stream needs, or the engine would not compute all of them together."""


@dataclass(frozen=True, slots=True)
class Result:
    """What happened. Seconds and bytes."""

    streams: int
    whole: int
    errors: dict[str, int]
    most_held: int
    """Sent and not ended, at any one moment."""
    most_open: int
    """Of these, with their first token there."""
    seconds: float
    ttft_p50: float
    ttft_p99: float
    probes: int
    probes_failed: int
    health_p50: float
    health_p99: float
    health_most: float
    probe_late_p99: float
    """How late the probe itself woke up: its own wait for a processor."""
    rss_before: int
    rss_most: int
    gateway_cpu: float
    load_average: float


async def watch_memory(process: BenchProcess, seen: list[int]) -> None:
    """Resident bytes, five times a second, until cancelled."""
    while True:
        seen.append(process.rss_bytes())
        await asyncio.sleep(0.2)


def roomy_spec(folder: Path, engine: str, streams: int) -> Path:
    """The repository's spec for one engine, with room for this many requests in a lane and no hurry."""
    spec: dict[str, Any] = yaml.safe_load((REPOSITORY / "laneway.yaml").read_text())
    for lane in spec["lanes"]:
        lane["deadline"] = PATIENCE_SECONDS
        lane["queue"] = {"max_requests": 2 * streams}
    spec["pools"] = [{"name": "baseline", "replicas": [{"url": engine}], "max_num_seqs": streams}]
    spec["pools"][0]["lookahead"] = {"tokens": 1000 * streams, "requests": streams}
    path = folder / "laneway.yaml"
    path.write_text(yaml.safe_dump(spec))
    return path


async def bench(arguments: argparse.Namespace, folder: Path, stack: ExitStack) -> Result:
    """Starts engine and gateway, sends the streams, and watches."""
    near, far = cores()
    os.sched_setaffinity(0, {near})
    port, engine_port, streams = arguments.first_port, arguments.first_port + 1, arguments.streams
    laneway = [sys.executable, "-m", "serving.cli"]
    profile = folder / "profile.json"
    profile.write_text(json.dumps({"kv_blocks": BLOCKS_PER_STREAM * streams}))
    simulate = [*laneway, "engine", "simulate", "--port", str(engine_port), "--profile", str(profile)]
    simulate += ["--max-num-seqs", str(streams)]
    engine = stack.enter_context(running("engine", simulate, near, folder))
    await ready(engine, f"http://127.0.0.1:{engine_port}/health", START_SECONDS)
    spec = roomy_spec(folder, f"http://127.0.0.1:{engine_port}", streams)
    serve = [*laneway, "serve", "--spec", str(spec), "--port", str(port), "--access-log", str(folder / "access.jsonl")]
    gateway = stack.enter_context(running("gateway", serve, far, folder))
    await ready(gateway, f"http://127.0.0.1:{port}/readyz", START_SECONDS)
    body = chat_body(MODEL, arguments.prompt_words, arguments.tokens, ignore_eos=True)
    client = OpenLoop(f"http://127.0.0.1:{port}/v1/chat/completions", body, arguments.tokens, timeout=PATIENCE_SECONDS)
    rss_before, cpu_before, began = gateway.rss_bytes(), gateway.cpu_seconds(), time.monotonic()
    memory: list[int] = []
    watch = asyncio.create_task(watch_memory(gateway, memory))
    ask = [sys.executable, "-m", "tests.bench.probe", f"http://127.0.0.1:{port}/healthz"]
    with running("probe", ask, far, folder) as probe:
        shots = await client.run([number / streams for number in range(streams)])
        took = time.monotonic() - began
    watch.cancel()
    client.close()
    seen = json.loads(probe.output())
    latencies = seen["latencies"]
    ttft = [shot.ttft if shot.ttft is not None else float("inf") for shot in shots]
    return Result(
        streams=streams,
        whole=sum(shot.error is None for shot in shots),
        errors=dict(Counter(shot.error for shot in shots if shot.error is not None)),
        most_held=most_at_once([(shot.scheduled + shot.late, end_of(shot)) for shot in shots]),
        most_open=most_at_once([(shot.scheduled + shot.ttft, end_of(shot)) for shot in shots if shot.ttft is not None]),
        seconds=took,
        ttft_p50=quantile(ttft, 0.5),
        ttft_p99=quantile(ttft, 0.99),
        probes=len(latencies),
        probes_failed=seen["failed"],
        health_p50=statistics.median(latencies),
        health_p99=quantile(latencies, 0.99),
        health_most=max(latencies),
        probe_late_p99=quantile(seen["late"], 0.99),
        rss_before=rss_before,
        rss_most=max(memory),
        gateway_cpu=gateway.cpu_seconds() - cpu_before,
        load_average=os.getloadavg()[0],
    )


def end_of(shot: Shot) -> float:
    """When it ended, whatever became of it; a failure has no time of its own and counts as held to the last."""
    return shot.scheduled + shot.completion if shot.completion is not None else float("inf")


def most_at_once(spans: list[tuple[float, float]]) -> int:
    """The most spans (begin, end) that overlap at any one moment."""
    most = now = 0
    for _, step in sorted([(begin, 1) for begin, _ in spans] + [(end, -1) for _, end in spans]):
        now += step
        most = max(most, now)
    return most


def table_of(result: Result) -> Table:
    """For people."""
    table = Table("what", "value")
    rows = {
        "streams sent, whole": f"{result.streams}, {result.whole}",
        "most held at once, with their first token there": f"{result.most_held}, {result.most_open}",
        "took": f"{result.seconds:.1f} s",
        "TTFT p50, p99 (client)": f"{result.ttft_p50:.2f} s, {result.ttft_p99:.2f} s",
        "/healthz asked, failed": f"{result.probes}, {result.probes_failed}",
        "/healthz p50, p99, most": " ".join(
            f"{value * 1e3:.1f} ms" for value in (result.health_p50, result.health_p99, result.health_most)
        ),
        "the probe itself woke up late by, p99": f"{result.probe_late_p99 * 1e3:.1f} ms",
        "gateway memory before, most": f"{result.rss_before / 1e6:.0f} MB, {result.rss_most / 1e6:.0f} MB",
        "gateway processor time": f"{result.gateway_cpu:.1f} s",
        "load average": f"{result.load_average:.2f}",
    }
    for row in rows.items():
        table.add_row(*row)
    return table


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description="Many streams at once through the gateway.")
    parser.add_argument("--streams", type=int, default=2000)
    parser.add_argument("--tokens", type=int, default=128, help="output tokens a stream")
    parser.add_argument("--prompt-words", type=int, default=10)
    parser.add_argument("--first-port", type=int, default=18460, help="it takes this port and the next")
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    arguments = parser.parse_args()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        result = uvloop.run(bench(arguments, folder, stack))
    if arguments.json:
        print(json.dumps(asdict(result), indent=1))
        return
    Console(width=None if sys.stdout.isatty() else 120).print(table_of(result))
    if result.errors:
        print(f"failed: {result.errors}")


if __name__ == "__main__":
    main()
