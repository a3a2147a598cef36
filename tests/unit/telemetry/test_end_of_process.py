"""A process ends when it is told to, whatever has become of those that read its logs, traces and metrics."""

import asyncio
import os
import subprocess
import sys
import time

import pytest

from serving.telemetry import otlp
from tests.fixtures.otlp_receiver import receiver

pytestmark = pytest.mark.integration

LIMIT = 5 * otlp.SHUTDOWN_SECONDS
"""Seconds: tracing, metrics, the log's file and the log's exporter may each take one; the rest is the interpreter's."""
PROGRAM = """
import time
from serving.telemetry.logs import Event, Logs
from serving.telemetry.runtime import RuntimeMetrics
from serving.telemetry.tracing import Tracing
from serving.timeline import Boundary, Outcome, Timeline

logs, runtime = Logs(), RuntimeMetrics("test")
tracing = Tracing("test", meter_provider=runtime.provider)
for number in range(2000):  # some 900 kB of lines: a pipe holds 64
    timeline = Timeline(f"r{number}", Boundary.GATEWAY, received=time.monotonic())
    trace = tracing.start("/v1/completions", (), timeline.received)
    timeline.end(Outcome.COMPLETED, time.monotonic())
    trace.finish(timeline)
    logs.access(timeline)
time.sleep(0.5)
tracing.close()
runtime.close()
logs.close()
"""


async def ends(environ: dict[str, str]) -> float:
    """Seconds that a process took to run PROGRAM, its standard output a pipe that nobody reads."""
    started = time.monotonic()
    process = subprocess.Popen(  # noqa: ASYNC220 - started once, waited for in a thread
        [sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=os.environ | environ
    )
    try:
        assert await asyncio.to_thread(process.wait, LIMIT + 10) == 0
    finally:
        process.kill()
        process.communicate()
    return time.monotonic() - started


async def test_a_log_reader_that_stalls_does_not_keep_the_process() -> None:
    """Lost: every restart, to a log shipper that hangs: the process would stay until somebody kills it."""
    assert await ends({}) < LIMIT


@pytest.mark.parametrize("protocol", ["grpc", "http/protobuf"])
async def test_a_collector_that_hangs_does_not_keep_the_process(protocol: str) -> None:
    """Lost: the same, to a collector that accepts and never answers; by either protocol, and all signals at once."""
    async with receiver(hung=True) as received:
        assert await ends(received.environ() | {"OTEL_EXPORTER_OTLP_PROTOCOL": protocol}) < LIMIT
