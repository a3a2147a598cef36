"""Starts a real vLLM replica with the flags that Laneway needs.

vLLM lives in an environment of its own; `vllm_command` makes its command line and environment without touching
anything, and `run` replaces this process by it, so that signals and the exit status are vLLM's own.
"""

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

from serving.engine import tiny_model

SERVER_MODULE = "vllm.entrypoints.openai.api_server"
"""Started as a module: the console script of the CPU build looks its version up under another name and fails."""

TINY_NAME = "laneway-tiny"
PYTHON_VARIABLE = "LANEWAY_ENGINE_PYTHON"
PROJECT = Path(__file__).resolve().parents[2]


class EngineMissingError(RuntimeError):
    """No interpreter with vLLM was found, or the model cannot be made."""


@dataclass(frozen=True)
class VllmOptions:
    """What a replica is to be. Sizes in tokens and requests; `None` leaves vLLM's own default."""

    python: Path
    """The interpreter that has vLLM."""
    model: str
    """A folder, or a hub name."""
    name: str | None = None
    """What requests call it; for a folder, by default, the folder's name."""
    host: str = "127.0.0.1"
    port: int = 8100
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    long_prefill_token_threshold: int | None = None
    max_num_queued_reqs: int | None = None
    prefix_caching: bool = True
    kv_cache_gib: int | None = 1
    """Size of the CPU build's KV cache (GiB)."""
    cpu_core: int | None = None
    """Pins every process and thread of the replica to this core."""
    buckets: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    """Histogram bounds by family (`buckets.from_spec`)."""
    arguments: tuple[str, ...] = ()
    """Passed on as they are, last, so that they win."""


def vllm_command(options: VllmOptions, environ: Mapping[str, str]) -> tuple[list[str], dict[str, str]]:
    """The replica's argv and its whole environment, made from `environ`. Pure.

    What `environ` already sets (`VLLM_*`, `OTEL_*`, `HF_*`) is kept.
    """
    local = os.path.isdir(options.model)
    name = options.name or (Path(options.model).resolve().name if local else options.model)
    argv = [] if options.cpu_core is None else ["taskset", "--cpu-list", str(options.cpu_core)]
    argv += [str(options.python), "-m", SERVER_MODULE, "--model", options.model, "--served-model-name", name]
    argv += ["--host", options.host, "--port", str(options.port), "--disable-uvicorn-access-log"]
    argv += ["--enable-prefix-caching" if options.prefix_caching else "--no-enable-prefix-caching"]
    for flag, value in (
        ("--max-num-seqs", options.max_num_seqs),
        ("--max-num-batched-tokens", options.max_num_batched_tokens),
        ("--long-prefill-token-threshold", options.long_prefill_token_threshold),
        ("--max-num-queued-reqs", options.max_num_queued_reqs),
    ):
        if value is not None:
            argv += [flag, str(value)]
    if options.buckets:
        bounds = {family: list(options.buckets[family]) for family in sorted(options.buckets)}
        argv += ["--custom-histogram-buckets", json.dumps(bounds, separators=(",", ":"))]
    env = {"VLLM_NO_USAGE_STATS": "1", "OTEL_SERVICE_NAME": "vllm"}
    if options.kv_cache_gib is not None:
        env["VLLM_CPU_KVCACHE_SPACE"] = str(options.kv_cache_gib)
    if options.cpu_core is not None:
        # With one core there is none to spare for the scheduler's process: "auto" would find no core for the threads.
        env["VLLM_CPU_OMP_THREADS_BIND"] = str(options.cpu_core)
    if local:
        env["HF_HUB_OFFLINE"] = "1"
    env.update(environ)
    endpoint, protocol = _traces(environ)
    if endpoint is not None:
        argv += ["--otlp-traces-endpoint", endpoint]
        env["OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"] = protocol
    return [*argv, *options.arguments], env


def _traces(environ: Mapping[str, str]) -> tuple[str | None, str]:
    """Endpoint and protocol of spans by the standard variables. vLLM takes the URL as it is, and gRPC unless told."""
    protocol = environ.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL") or environ.get("OTEL_EXPORTER_OTLP_PROTOCOL") or "grpc"
    if environ.get("OTEL_SDK_DISABLED", "").lower() == "true" or environ.get("OTEL_TRACES_EXPORTER") == "none":
        return None, protocol
    if own := environ.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"):
        return own, protocol
    if shared := environ.get("OTEL_EXPORTER_OTLP_ENDPOINT"):
        return (f"{shared.rstrip('/')}/v1/traces" if protocol.startswith("http") else shared), protocol
    return None, protocol


def find_python(given: Path | None, environ: Mapping[str, str], project: Path = PROJECT) -> Path:
    """The interpreter that has vLLM: the one given, else $LANEWAY_ENGINE_PYTHON, else `.venv-engine`, else this one.

    Raises:
        EngineMissingError: none of them is there; the message says how to get one.
    """
    for source, path in (("--python", given), (PYTHON_VARIABLE, _path(environ.get(PYTHON_VARIABLE)))):
        if path is not None:
            if not path.is_file():
                raise EngineMissingError(f"{source}: got {str(path)!r}, expected an interpreter that has vLLM")
            return path
    beside = project / ".venv-engine" / "bin" / "python"
    if beside.is_file():
        return beside
    if importlib.util.find_spec("vllm") is not None:
        return Path(sys.executable)
    raise EngineMissingError(
        f"no vLLM here: run `make engine-cpu`, or name an interpreter that has it by --python or {PYTHON_VARIABLE}"
    )


def tiny_model_folder(python: Path, environ: Mapping[str, str], name: str = TINY_NAME) -> Path:
    """The tiny model's folder in the user's cache; made there when it is not (5-15 s).

    Raises:
        EngineMissingError: it could not be made.
    """
    cache = Path(environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = cache / "laneway" / "models" / name
    if not tiny_model.is_complete(folder, name):
        made = subprocess.run(
            [str(python), str(Path(tiny_model.__file__)), str(folder), "--name", name],
            capture_output=True,
            text=True,
            check=False,
        )
        if made.returncode != 0:
            last = made.stderr.strip().splitlines()[-1:] or ["no message"]
            raise EngineMissingError(f"the tiny model could not be made with {python}: {last[0]}")
    return folder


def run(options: VllmOptions, environ: Mapping[str, str]) -> NoReturn:
    """Becomes the replica.

    Raises:
        EngineMissingError: the command cannot be executed.
    """
    argv, env = vllm_command(options, environ)
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        os.execvpe(argv[0], argv, env)
    except OSError as error:
        raise EngineMissingError(f"{argv[0]} cannot be run: {error.strerror}") from None


def _path(text: str | None) -> Path | None:
    return Path(text) if text else None
