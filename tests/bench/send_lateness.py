"""How late `laneway replay` sends, against a stub engine on loopback. The bar: p99 of 5 ms at 50 requests/s.

python -m tests.bench.send_lateness [--seconds 20] [--port 18299]
"""

import argparse
import asyncio
import itertools
import os
import sys
import tempfile
import time
from pathlib import Path

import uvloop
from rich.console import Console
from rich.table import Table

from serving import spec as spec_file
from serving.spec import Spec
from serving.telemetry.tracing import Tracing
from serving.workload.client import Line, open_session
from serving.workload.generate import generate
from serving.workload.prompts import Cost, PromptMaker
from serving.workload.replay import Replayed, replay, send_lateness
from serving.workload.schedule import Address, Shape, prepare, shape_trace
from serving.workload.summary import quantile
from tests.bench.processes import cores, ready, running

RATES = (50, 100, 200)
BAR_RATE, BAR_SECONDS = 50, 0.005


async def one(url: str, spec: Spec, rate: float, seconds: float) -> Replayed:
    """One run of the short-behind-long mix at this rate."""
    trace = generate(f"mix:short-behind-long?short={rate}&long={rate / 7}&seconds={seconds}", 1)
    schedule = shape_trace(trace, Shape(rate=rate), 1)
    numbers = itertools.count()
    prompts = PromptMaker("bench", Cost(4.0))
    made = list(prepare(schedule.requests, Address("stub", True), prompts, lambda: f"bench-{next(numbers)}", spec))
    async with open_session(60.0) as session:
        line = Line(session, f"{url}/v1/chat/completions", "stub", "bench", Tracing("bench", environ={}))
        return await replay(made, line, grace=30.0, stop=asyncio.Event())


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description="How late replay sends.")
    parser.add_argument("--seconds", type=float, default=20.0, help="of each run")
    parser.add_argument("--port", type=int, default=18_299, help="of the stub engine")
    arguments = parser.parse_args()
    spec = spec_file.load(Path("laneway.yaml"))
    table = Table(
        "requests/s",
        "sent",
        "p50 ms",
        "p99 ms",
        "max ms",
        "client CPU",
        title="send lateness",
        caption=f"load average at the start {os.getloadavg()[0]:.1f}: on a busy machine this measures the others",
    )
    _, other = cores()
    command = [sys.executable, "-m", "tests.bench.stub_engine", "--port", str(arguments.port), "--gap", "0.005"]
    url = f"http://127.0.0.1:{arguments.port}"
    with tempfile.TemporaryDirectory() as folder, running("stub", command, other, Path(folder)) as engine:
        asyncio.run(ready(engine, f"{url}/v1/models", 10.0))
        for rate in RATES:
            before = time.process_time()
            done = uvloop.run(one(url, spec, rate, arguments.seconds))
            share = (time.process_time() - before) / arguments.seconds
            late = send_lateness(done.timelines)
            figures = [quantile(late, 0.5) or 0.0, quantile(late, 0.99) or 0.0, late[-1]]
            met = " (bar met)" if figures[1] <= BAR_SECONDS else " (bar MISSED)"
            texts = [f"{value * 1000:.2f}" for value in figures]
            if rate == BAR_RATE:
                texts[1] += met
            table.add_row(str(rate), str(len(late)), *texts, f"{share:.0%}")
    Console().print(table)


if __name__ == "__main__":
    main()
