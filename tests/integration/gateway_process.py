"""The gateway as its own process, as a person starts it, in front of engines that the test writes the script of."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import psutil

from tests.integration.replicas import free_port

READY_SECONDS = 30.0
STOP_SECONDS = 45.0


class GatewayProcess:
    """One `laneway serve`."""

    def __init__(self, folder: Path, spec: str, environ: Mapping[str, str] | None = None) -> None:
        self.spec_path = folder / "laneway.yaml"
        self.log_path = folder / "gateway.jsonl"
        self.stderr_path = folder / "stderr"
        self.spec_path.write_text(spec)
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        clean = {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")}
        with self.stderr_path.open("w") as stderr:
            self.process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "serving.cli", "serve"),
                    *("--spec", str(self.spec_path), "--port", str(self.port), "--access-log", str(self.log_path)),
                ],
                stdout=stderr,
                stderr=stderr,
                env={**clean, **(environ or {})},
            )

    def rows(self) -> list[dict[str, Any]]:
        """Every line of its log so far."""
        if not self.log_path.exists():
            return []
        return [json.loads(line) for line in self.log_path.read_bytes().splitlines(keepends=True) if line[-1:] == b"\n"]

    def events(self, name: str) -> list[dict[str, Any]]:
        """The log's events of this name (`request` is the access line)."""
        return [row for row in self.rows() if row["event"] == name]

    async def access(self, request_id: str, seconds: float = 10.0) -> dict[str, Any]:
        """The one access line of a request; waits for it, and fails if there are two."""
        async with asyncio.timeout(seconds):
            while True:
                found = [row for row in self.events("request") if row["request_id"] == request_id]
                if found:
                    assert len(found) == 1, f"{len(found)} access lines for one request"
                    return found[0]
                await asyncio.sleep(0.02)

    async def event(self, name: str, seconds: float = 10.0, **fields: Any) -> dict[str, Any]:
        """Waits for an event with these fields."""
        async with asyncio.timeout(seconds):
            while True:
                for row in self.events(name):
                    if fields.items() <= row.items():
                        return row
                await asyncio.sleep(0.02)

    async def get(self, path: str, **how: Any) -> tuple[int, str]:
        """Status and body of a GET."""
        async with aiohttp.ClientSession() as session, session.get(self.url + path, **how) as reply:
            return reply.status, await reply.text()

    async def ready(self, replicas: int = 1, seconds: float = READY_SECONDS) -> None:
        """Waits until so many replicas are ready."""
        until = time.monotonic() + seconds
        while True:
            assert self.process.poll() is None, self.stderr_path.read_text()
            try:
                pools = json.loads((await self.get("/readyz"))[1])["pools"]
                if sum(pool["ready"] for pool in pools.values()) >= replicas:
                    return
            except aiohttp.ClientError:
                pass
            assert time.monotonic() < until, f"not {replicas} replicas ready: {self.rows()[-5:]}"
            await asyncio.sleep(0.03)

    async def metrics(self) -> dict[str, float]:
        """Its metrics, `name{labels}` each with its value."""
        _, text = await self.get("/metrics")
        pairs = (line.rsplit(" ", 1) for line in text.splitlines() if line and not line.startswith("#"))
        return {name: float(value) for name, value in pairs}

    async def conserved(self, seconds: float = 10.0) -> None:
        """Waits until nothing is queued, running or held, and checks that every count adds up."""
        held = (
            *("laneway_requests_queued", "laneway_requests_running", "laneway_requests_unclassified"),
            *("laneway_replica_in_flight", "laneway_replica_outstanding_tokens", "laneway_conservation_drift"),
        )
        until = time.monotonic() + seconds
        while True:
            metrics = await self.metrics()
            kept = {name: value for name, value in metrics.items() if name.startswith(held) and value}
            if not kept:
                break
            assert time.monotonic() < until, f"left over: {kept}"
            await asyncio.sleep(0.05)
        received = _sum(metrics, "laneway_requests_received_total")
        assert received == _sum(metrics, "laneway_requests_total")
        while len(self.events("request")) < received and time.monotonic() < until:  # noqa: ASYNC110 - lines come from another process, a moment after they are counted
            await asyncio.sleep(0.02)
        assert received == len(self.events("request"))

    def stop(self) -> int:
        """SIGTERM, and the exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise

    def connections(self) -> int:
        """Connections of clients that it holds open."""
        inside = psutil.Process(self.process.pid).net_connections("tcp")
        return sum(
            connection.status != psutil.CONN_LISTEN and connection.laddr.port == self.port for connection in inside
        )


@asynccontextmanager
async def gateway_process(
    folder: Path, spec: str, *, replicas: int = 1, environ: Mapping[str, str] | None = None
) -> AsyncIterator[GatewayProcess]:
    """A gateway until the block ends; it is ready when the block begins, and must end well."""
    gateway = GatewayProcess(folder, spec, environ)
    try:
        await gateway.ready(replicas)
        yield gateway
    finally:
        code = await asyncio.to_thread(gateway.stop)
    assert code == 0, f"exit code {code}: {gateway.stderr_path.read_text()[-2000:]}"
    assert "Traceback" not in gateway.stderr_path.read_text()


def _sum(metrics: Mapping[str, float], name: str) -> float:
    return sum(value for key, value in metrics.items() if key.partition("{")[0] == name)
