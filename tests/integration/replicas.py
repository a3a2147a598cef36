"""Starts replicas as real processes on loopback, and stops them by their own process ids."""

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

VLLM_START_SECONDS = 300.0
"""The first start compiles kernels; with a warm cache it takes about a minute."""
SIMULATED_START_SECONDS = 30.0
STOP_SECONDS = 30.0


def free_port() -> int:
    """A port that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def replica(log: Path, *arguments: str, seconds: float, environ: dict[str, str] | None = None) -> Iterator[str]:
    """A replica started by `laneway engine …`; its URL. Fails with the end of its log when it does not come up."""
    port = free_port()
    command = [sys.executable, "-c", "from serving.engine.commands import engine_app; engine_app()", *arguments]
    at = command.index("--") if "--" in command else len(command)
    command[at:at] = ["--port", str(port)]
    with log.open("w") as output:
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **(environ or {})},
            start_new_session=True,
        )
    try:
        url = f"http://127.0.0.1:{port}"
        _wait_until_healthy(url, process, log, seconds)
        yield url
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _wait_until_healthy(url: str, process: subprocess.Popen[bytes], log: Path, seconds: float) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if process.poll() is not None:
            break
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=2):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
    pytest.fail(f"the replica did not come up; the end of its log:\n{log.read_text(errors='replace')[-3000:]}")
