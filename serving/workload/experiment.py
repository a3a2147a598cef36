"""One mix through several gateway schedulers, on the same engines, one run after the other.

Engines run for the whole experiment, each gateway only for its own run. Where the engine is slower than the one that
the spec's objectives suit, the whole experiment is stretched in time: arrivals come that much slower and every
objective and deadline is that much longer, so that the busy share and what counts as in time mean the same.
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from serving.spec import Lane, Objective, Spec

HOST = "127.0.0.1"
PROBE_WORDS = 5000
REFERENCE_SECONDS = 0.39
"""TTFT of a prompt of `PROBE_WORDS` tokens on the idle engine that the default profile was fitted to."""
ENGINE_READY_SECONDS = 300.0
GATEWAY_READY_SECONDS = 60.0
STOP_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Mix:
    """Rates of the *short-behind-long* mix for one engine of the reference's speed, requests a second."""

    short: float = 8.0
    long: float = 1.4
    burst: int = 8
    every: float = 10.0

    def trace(self, engines: int, stretch: float, seconds: float) -> str:
        """The trace's name for `engines` engines that are `stretch` times slower."""
        return (
            f"mix:short-behind-long?short={self.short * engines / stretch:.3f}&long={self.long * engines / stretch:.3f}"
            f"&burst={self.burst * engines}&every={self.every * stretch:.2f}&seconds={seconds:g}"
        )


@dataclass(frozen=True, slots=True)
class Setup:
    """What an experiment runs on."""

    engine: Literal["simulated", "vllm"]
    pools: int
    seconds: float
    out: Path
    mix: Mix = Mix()
    stretch: float | None = None
    """None: measured."""
    turn_tokens: int = 512
    """The engines' bound on one request's tokens in one step, the same for every scheduler; 0: none."""
    engine_core: int | None = None
    """Pin each engine to this core, and everything else to the others."""


@contextlib.contextmanager
def engines(setup: Setup) -> Iterator[list[str]]:
    """The engines, one a pool, ready; their URLs."""
    ports = [free_port() for _ in range(setup.pools)]
    pinned = setup.engine_core is not None and setup.engine == "vllm"
    # A prompt that was seen in an earlier run would be cheap in a later one: no prefix caching here.
    kind = "simulate" if setup.engine == "simulated" else "vllm"
    command = [sys.executable, "-m", "serving.cli", "engine", kind, "--no-prefix-caching"]
    command += ["--long-prefill-token-threshold", str(setup.turn_tokens)]
    if pinned:
        command += ["--cpu-core", str(setup.engine_core)]
    with contextlib.ExitStack() as stack:
        for i, port in enumerate(ports):
            log = setup.out / f"engine-{i}.log"
            stack.enter_context(process([*command, "--port", str(port)], log))
        for i, port in enumerate(ports):
            wait_for(f"http://{HOST}:{port}/v1/models", ENGINE_READY_SECONDS, setup.out / f"engine-{i}.log")
        yield [f"http://{HOST}:{port}" for port in ports]


@contextlib.contextmanager
def gateway(spec: Path, scheduler: str, log: Path) -> Iterator[str]:
    """A gateway with this scheduler in every pool; its URL. `log` gets its access lines."""
    port = free_port()
    command = [sys.executable, "-m", "serving.cli", "serve", "--spec", str(spec), "--port", str(port)]
    command += ["--gateway-scheduler", scheduler, "--access-log", str(log)]
    with process(command, log.with_suffix(".out")):
        wait_for(f"http://{HOST}:{port}/readyz", GATEWAY_READY_SECONDS, log.with_suffix(".out"))
        yield f"http://{HOST}:{port}"


def run(setup: Setup, spec: Path, stretch: float, urls: Sequence[str], scheduler: str, folder: Path, seed: int) -> None:
    """One replay of the mix through one scheduler; the run's folder is `folder`.

    Raises:
        RuntimeError: the replay ended with an error (a run that is not to be trusted is no error; its table says so).
    """
    log = folder.with_name(folder.name + ".access.jsonl")
    with gateway(spec, scheduler, log) as url:
        command = [sys.executable, "-m", "serving.cli", "replay"]
        command += [setup.mix.trace(len(urls), stretch, setup.seconds), "--target", url, "--out", str(folder)]
        command += ["--seed", str(seed), "--gateway-log", str(log), "--spec", str(spec), "--run-id", folder.name]
        code = subprocess.run(command, check=False).returncode
    if code not in (0, 1):
        raise RuntimeError(f"the replay through {scheduler} ended with exit code {code}")


def write_spec(base: Spec, setup: Setup, urls: Sequence[str], stretch: float, path: Path) -> None:
    """The experiment's spec: one pool an engine, equal weights, objectives and deadlines stretched."""
    names = [f"pool-{i + 1}" for i in range(len(urls))]

    def pool(name: str, url: str) -> dict[str, Any]:
        turns = {"turn_tokens": setup.turn_tokens} if setup.turn_tokens else {}
        return {"name": name, "replicas": [{"url": url}], **turns}

    data: dict[str, Any] = {
        "lanes": [stretched(lane, stretch).model_dump(mode="json", exclude_defaults=True) for lane in base.lanes],
        "models": [{"name": base.models[0].name, "max_model_len": 8192, "pools": dict.fromkeys(names, 1)}],
        "pools": [pool(name, url) for name, url in zip(names, urls, strict=True)],
    }
    path.write_text(yaml.safe_dump(data, sort_keys=False), encoding="utf-8")


def stretched(lane: Lane, factor: float) -> Lane:
    """The lane with every time `factor` times as long."""

    def longer(objective: Objective) -> Objective:
        return objective.model_copy(update={"seconds": round(objective.seconds * factor, 3)})

    return lane.model_copy(
        update={
            "ttft": longer(lane.ttft),
            "tpot": None if lane.tpot is None else longer(lane.tpot),
            "deadline": round(lane.deadline * factor, 3),
        }
    )


def measure_stretch(url: str, model: str) -> float:
    """How many times slower than the reference an idle engine is, at a long prompt; at least 1."""
    # The fastest of them is the engine's own speed; what is above it was somebody else's use of the machine.
    fastest = min(_first_token_seconds(url, model, i) for i in range(6))
    return max(1.0, round(fastest / REFERENCE_SECONDS, 2))


def _first_token_seconds(url: str, model: str, salt: int) -> float:
    body = {
        "model": model,
        "prompt": [5 + (salt * 31 + i * 7) % 400 for i in range(PROBE_WORDS)],
        "max_tokens": 2,
        "stream": True,
        "ignore_eos": True,
    }
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    began = time.monotonic()
    with urllib.request.urlopen(request, timeout=ENGINE_READY_SECONDS) as reply:
        for line in reply:
            if line.startswith(b"data:"):
                return time.monotonic() - began
    raise RuntimeError(f"{url} answered without a token, expected an engine")


@contextlib.contextmanager
def process(command: Sequence[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process of our own in a group of its own, ended with the block."""
    with log.open("wb") as out:
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        yield child
    finally:
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(STOP_SECONDS)
                break


def wait_for(url: str, seconds: float, log: Path) -> None:
    """Waits until `url` answers 200.

    Raises:
        RuntimeError: it does not in time; the message has the end of the log.
    """
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=5):
            return
        time.sleep(0.2)
    raise RuntimeError(f"{url} did not answer within {seconds:g} s; {log} ends with:\n{log.read_text()[-2000:]}")


def free_port() -> int:
    """A port that nobody listens on right now."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])
