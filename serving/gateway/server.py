"""Runs the gateway: uvicorn with uvloop and httptools, the spec watched, SIGTERM drained, replicas started and stopped.

uvloop and httptools are what uvicorn itself prefers; tests/bench/http_client.py has the figures.
"""

import asyncio
import contextlib
import ipaddress
import signal
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import uvicorn
import uvloop
from fastapi import FastAPI
from watchfiles import awatch

from serving import spec as spec_file
from serving.engine.client import EngineClient
from serving.engine.started import StartedReplicas
from serving.gateway.app import make_app
from serving.gateway.gateway import Gateway
from serving.gateway.uvicorn_protocol import bounded_protocol
from serving.spec import Spec
from serving.telemetry.logs import Event, Logs
from serving.telemetry.metrics import Metrics
from serving.telemetry.runtime import RuntimeMetrics
from serving.telemetry.tracing import Tracing

KEEP_ALIVE_SECONDS = 75
"""Longer than load balancers keep a connection idle, so that it is they who close it."""


class _Server(uvicorn.Server):
    """uvicorn's server that tells the gateway of SIGTERM before it stops to listen."""

    def __init__(self, config: uvicorn.Config, drain: Callable[[], None]) -> None:
        super().__init__(config)
        self._drain = drain

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        # Not uvicorn's own: that raises the signal again once it has served, which would end the process before the
        # replicas that it started are stopped and its last spans sent.
        asyncio.get_running_loop().call_soon_threadsafe(self._drain)
        self.force_exit = self.should_exit and sig == signal.SIGINT
        self.should_exit = True


def check_exposed(host: str, spec: Spec) -> None:
    """Off loopback, keys are required.

    Raises:
        ValueError: they are not.
    """
    loopback = host == "localhost"
    with contextlib.suppress(ValueError):
        loopback = ipaddress.ip_address(host).is_loopback
    if not loopback and not (spec.gateway.auth.required and spec.gateway.auth.keys):
        raise ValueError(
            f"--host {host} is not a loopback address and gateway.auth.required is "
            f"{str(spec.gateway.auth.required).lower()} with {len(spec.gateway.auth.keys)} keys, "
            "expected gateway.auth.required true and at least one key"
        )


def run(path: Path, spec: Spec, adjust: Callable[[Spec], Spec], host: str, port: int, logs: Logs) -> None:
    """Serves until SIGTERM or SIGINT. `adjust` is applied to every spec that is read, the first (`spec`) included."""
    uvloop.run(_serve(path.resolve(), adjust(spec), adjust, host, port, logs))


async def _serve(path: Path, spec: Spec, adjust: Callable[[Spec], Spec], host: str, port: int, logs: Logs) -> None:
    timeouts = spec.gateway.timeouts
    metrics = Metrics(spec)
    runtime = RuntimeMetrics("laneway-gateway")
    tracing = Tracing("laneway-gateway", meter_provider=runtime.provider)
    started = StartedReplicas(logs)
    async with EngineClient(timeouts.connect) as client:
        gateway = Gateway(spec, client, metrics, tracing, logs, runtime)
        gateway.start(started.set_spec(spec))
        app: FastAPI = make_app(gateway)
        limits = spec.gateway.limits
        config = uvicorn.Config(
            app,
            host=host,
            port=port,
            http=bounded_protocol(limits.max_header_bytes, limits.body_timeout),
            ws="none",
            lifespan="off",
            access_log=False,
            log_level="warning",
            server_header=False,
            proxy_headers=False,
            date_header=False,
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=int(timeouts.drain) or 1,
            backlog=4096,
        )
        server = _Server(config, gateway.drain)
        watch = asyncio.create_task(_follow_spec(path, adjust, gateway, started, logs), name="spec")
        try:
            await server.serve()
        finally:
            watch.cancel()
            await gateway.stop()
            await started.stop()
            await asyncio.to_thread(tracing.close)
            await asyncio.to_thread(runtime.close)


async def _follow_spec(
    path: Path, adjust: Callable[[Spec], Spec], gateway: Gateway, started: StartedReplicas, logs: Logs
) -> None:
    """Takes over each good edit; a bad one is logged and changes nothing. The folder is watched: editors rename."""
    async for changes in awatch(path.parent, recursive=False):
        if not any(Path(changed).name == path.name for _, changed in changes):
            continue
        try:
            spec = adjust(spec_file.load(path))
            if spec.digest == gateway.spec.digest:
                continue
            urls = started.set_spec(spec)
        except ValueError as error:
            logs.event(Event.SPEC_REFUSED, reason=str(error))
            continue
        gateway.set_spec(spec, urls)
