"""Replicas that the gateway starts itself: one process each, on loopback, stopped with the gateway.

A replica that ends by itself is started again after a pause that doubles up to `RESTART_MAX_SECONDS`, and that is said:
nothing is restarted in silence.
"""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Callable, Mapping

from serving.spec import Pool, Spec
from serving.telemetry.logs import Event, Logs

RESTART_FIRST_SECONDS = 1.0
RESTART_MAX_SECONDS = 60.0
STOP_SECONDS = 10.0
HOST = "127.0.0.1"


def replica_command(pool: Pool, model: str, port: int) -> list[str]:
    """The command that runs one replica of a pool."""
    start = pool.start
    if start is None:
        raise ValueError(f"pools.{pool.name}.start: null, expected what to start")
    limits = ["--max-num-seqs", str(pool.max_num_seqs), "--max-num-batched-tokens", str(pool.step_tokens)]
    command = [sys.executable, "-m", "serving.cli", "engine"]
    if start.engine == "simulated":
        command += ["simulate", "--port", str(port), "--name", model, *limits]
        if start.profile is not None:
            command += ["--profile", start.profile]
        return command
    command += ["vllm", "--port", str(port), "--name", model, *limits]
    if start.model_dir is not None:
        command += ["--model", start.model_dir]
    return [*command, "--", *start.arguments] if start.arguments else command


class StartedReplicas:
    """The processes, by address. `set_spec` starts what is missing and stops what is no longer wanted."""

    def __init__(self, logs: Logs, environment: Mapping[str, str] | None = None) -> None:
        self._logs = logs
        self._environment = dict(os.environ if environment is None else environment)
        self._running: dict[tuple[str, int], tuple[list[str], asyncio.Task[None]]] = {}

    def set_spec(self, spec: Spec) -> dict[str, tuple[str, ...]]:
        """Follows the spec; returns each pool's URLs, those that run elsewhere first.

        Raises:
            ValueError: two pools would start a replica on the same port.
        """
        wanted: dict[tuple[str, int], list[str]] = {}
        urls: dict[str, tuple[str, ...]] = {}
        ports: dict[int, str] = {}
        for pool in spec.pools:
            mine = [replica.url for replica in pool.replicas]
            for i in range(pool.start.count if pool.start is not None else 0):
                assert pool.start is not None
                port = pool.start.first_port + i
                if port in ports:
                    raise ValueError(
                        f"pools: {ports[port]} and {pool.name} would both start a replica on port {port}, "
                        "expected different ports"
                    )
                ports[port] = pool.name
                model = next((model.name for model in spec.models if pool.name in model.pools), pool.name)
                wanted[(pool.name, port)] = replica_command(pool, model, port)
                mine.append(f"http://{HOST}:{port}")
            urls[pool.name] = tuple(mine)
        for key, (command, task) in list(self._running.items()):
            if wanted.get(key) != command:
                task.cancel()
                del self._running[key]
        for key, command in wanted.items():
            if key not in self._running:
                self._running[key] = (command, asyncio.create_task(self._keep_running(key, command)))
        return urls

    async def stop(self) -> None:
        """Ends every process: SIGTERM, and SIGKILL for what is still there after a while."""
        tasks = [task for _, task in self._running.values()]
        self._running.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _keep_running(self, key: tuple[str, int], command: list[str]) -> None:
        pool, port = key
        pause = RESTART_FIRST_SECONDS
        loop = asyncio.get_running_loop()
        while True:
            self._logs.event(Event.ENGINE_LOADING, pool=pool, port=port)
            began = loop.time()
            process = await asyncio.create_subprocess_exec(
                *command, env=self._environment, stdin=asyncio.subprocess.DEVNULL, start_new_session=True
            )
            try:
                code = await process.wait()
            finally:
                await _end(process)
            if loop.time() - began > RESTART_MAX_SECONDS:
                pause = RESTART_FIRST_SECONDS
            self._logs.event(Event.ENGINE_LOADING_FAILED, pool=pool, port=port, exit_code=code, retry_in=pause)
            await asyncio.sleep(pause)
            pause = min(2 * pause, RESTART_MAX_SECONDS)


async def _end(process: asyncio.subprocess.Process) -> None:
    """Ends the process and what it started: it leads a process group of its own."""
    signals: list[Callable[[], None]] = [
        lambda: os.killpg(process.pid, signal.SIGTERM),
        lambda: os.killpg(process.pid, signal.SIGKILL),
    ]
    for send in signals:
        if process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            send()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(process.wait()), STOP_SECONDS)
