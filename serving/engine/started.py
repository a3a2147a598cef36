"""Replicas that the gateway starts itself: one process each, on loopback, stopped with the gateway.

A replica that ends by itself is started again after a pause that doubles up to `RESTART_MAX_SECONDS`, and that is said:
nothing is restarted in silence.
"""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from serving.spec import Model, Pool, Spec
from serving.telemetry.logs import Event, Logs

RESTART_FIRST_SECONDS = 1.0
RESTART_MAX_SECONDS = 60.0
STOP_SECONDS = 10.0
HOST = "127.0.0.1"


def replica_command(pool: Pool, model: Model | None, port: int) -> list[str]:
    """The command that runs one replica of a pool, serving `model` (None: no model of the spec is served there).

    Raises:
        ValueError: the pool starts nothing.
    """
    start = pool.start
    if start is None:
        raise ValueError(f"pools.{pool.name}.start: null, expected what to start")
    name = pool.name if model is None else model.name
    # vLLM's own chunked prefill keeps a long prompt to one turn a step, so that others get their part of every step.
    limits = ["--max-num-seqs", str(pool.max_num_seqs), "--max-num-batched-tokens", str(pool.step_tokens)]
    limits += ["--long-prefill-token-threshold", str(pool.turn_tokens)]
    command = [sys.executable, "-m", "serving.cli", "engine"]
    if start.engine == "simulated":
        command += ["simulate", "--port", str(port), "--name", name, *limits]
        if model is not None:
            command += ["--max-model-len", str(model.max_model_len)]
        if start.profile is not None:
            command += ["--profile", start.profile]
        return command
    command += ["vllm", "--port", str(port), "--name", name, *limits]
    if start.model_dir is not None:
        command += ["--model", start.model_dir]
    return [*command, "--", *start.arguments] if start.arguments else command


@dataclass(frozen=True, slots=True)
class _Replica:
    pool: str
    command: list[str]
    task: asyncio.Task[None]


class StartedReplicas:
    """The processes, by port. `set_spec` starts what is missing and stops what is no longer wanted."""

    def __init__(self, logs: Logs, environment: Mapping[str, str] | None = None) -> None:
        self._logs = logs
        self._environment = dict(os.environ if environment is None else environment)
        self._running: dict[int, _Replica] = {}
        self._ending: dict[asyncio.Task[None], int] = {}

    def set_spec(self, spec: Spec) -> dict[str, tuple[str, ...]]:
        """Follows the spec; returns each pool's URLs, those that run elsewhere first."""
        wanted: dict[int, tuple[str, list[str]]] = {}
        urls: dict[str, tuple[str, ...]] = {}
        for pool in spec.pools:
            model = next((model for model in spec.models if pool.name in model.pools), None)
            ports = range(0) if pool.start is None else pool.start.ports
            wanted |= {port: (pool.name, replica_command(pool, model, port)) for port in ports}
            urls[pool.name] = (*(replica.url for replica in pool.replicas), *(f"http://{HOST}:{p}" for p in ports))
        for port, replica in list(self._running.items()):
            if wanted.get(port) != (replica.pool, replica.command):
                self._end_later(port)
        for port, (name, command) in wanted.items():
            if port not in self._running:
                task = asyncio.create_task(self._keep_running(name, port, command), name=f"replica on port {port}")
                self._running[port] = _Replica(name, command, task)
        return urls

    async def stop(self) -> None:
        """Ends every process: SIGTERM, and SIGKILL for what is still there after a while."""
        for port in list(self._running):
            self._end_later(port)
        await asyncio.gather(*self._ending, return_exceptions=True)

    def _end_later(self, port: int) -> None:
        """Its successor waits for the port, and `stop` for its end."""
        task = self._running.pop(port).task
        task.cancel()
        self._ending[task] = port
        task.add_done_callback(self._ending.pop)

    async def _keep_running(self, pool: str, port: int, command: list[str]) -> None:
        if before := [task for task, its_port in self._ending.items() if its_port == port]:
            await asyncio.wait(before)
        pause = RESTART_FIRST_SECONDS
        loop = asyncio.get_running_loop()
        while True:
            self._logs.event(Event.ENGINE_LOADING, pool=pool, port=port)
            began = loop.time()
            code = await self._run(command)
            if loop.time() - began > RESTART_MAX_SECONDS:
                pause = RESTART_FIRST_SECONDS
            self._logs.event(Event.ENGINE_LOADING_FAILED, pool=pool, port=port, exit_code=code, retry_in=pause)
            await asyncio.sleep(pause)
            pause = min(2 * pause, RESTART_MAX_SECONDS)

    async def _run(self, command: list[str]) -> int | None:
        """Runs a replica to its end; its exit code, None where it could not be started."""
        try:
            process = await asyncio.create_subprocess_exec(
                *command, env=self._environment, stdin=asyncio.subprocess.DEVNULL, start_new_session=True
            )
        except OSError:  # no memory, no process left: as passing as any other failure
            return None
        try:
            return await process.wait()
        finally:
            await _end(process)


async def _end(process: asyncio.subprocess.Process) -> None:
    """Ends the process and what it started, which may have outlived it: it leads a process group of its own."""
    _signal(process, signal.SIGTERM)
    gone = asyncio.ensure_future(process.wait())
    try:
        await asyncio.wait({gone}, timeout=STOP_SECONDS)  # `wait_for` would lose a cancellation in Python 3.11
    finally:
        _signal(process, signal.SIGKILL)
    await gone


def _signal(process: asyncio.subprocess.Process, which: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, which)
