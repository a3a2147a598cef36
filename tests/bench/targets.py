"""The proxies of the overhead bench: how each is installed, started against one engine, and known to be ready.

Each foreign proxy lives in an environment of its own, made at the pinned version when it is missing, and runs with its
defaults but for what makes it comparable: one engine, round robin (there is nothing to choose from), loopback, quiet.
"""

import secrets
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from tests.bench.stub_engine import MODEL

REPOSITORY = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, slots=True)
class Target:
    """One thing to send load at. `command` is empty for the engine itself."""

    name: str
    port: int
    ready_path: str
    command: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    key: str | None = None
    """The API key that it wants; None: it asks for none on loopback."""
    most: float = float("inf")
    """Requests a second above which it is not asked: it would only queue."""


FOREIGN = {"vllm-router": "0.1.17", "sglang-router": "0.3.2", "litellm": "1.108.0"}
"""Distribution and pinned version."""

EXTRAS = {"litellm": "[proxy]"}
NAMES = ("laneway", *FOREIGN)
START_SECONDS = 90.0
"""LiteLLM's proxy imports for half a minute on a busy core."""


def installed(name: str, environments: Path) -> Path:
    """The folder of the proxy's commands; makes its environment at the pinned version if it is not there.

    Raises:
        subprocess.CalledProcessError: it could not be installed; what pip said is on standard error.
    """
    folder = environments / name
    version = FOREIGN[name]
    if not list(folder.glob(f"lib/python*/site-packages/{name.replace('-', '_')}-{version}.dist-info")):
        print(f"installing {name} {version} into {folder}", file=sys.stderr)
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        requirement = f"{name}{EXTRAS.get(name, '')}=={version}"
        subprocess.run([str(folder / "bin" / "pip"), "install", "-q", requirement], check=True, stdout=sys.stderr)
    return folder / "bin"


def target(name: str, port: int, engine_port: int, environments: Path, folder: Path) -> Target:
    """The proxy of this name on `port`, towards the engine on `engine_port`; its files go into `folder`.

    Raises:
        ValueError: the name is none of `NAMES`.
    """
    engine = f"http://127.0.0.1:{engine_port}"
    here = ("--host", "127.0.0.1", "--port", str(port))
    workers = ("--worker-urls", engine, "--policy", "round_robin", "--prometheus-port", str(port + 20))
    if name == "laneway":
        spec = _laneway_spec(folder, engine)
        log = ("--access-log", str(folder / "access.jsonl"))
        return Target(
            name, port, "/readyz", (sys.executable, "-m", "serving.cli", "serve", "--spec", str(spec), *here, *log)
        )
    if name == "vllm-router":
        command = str(installed(name, environments) / "vllm-router")
        return Target(name, port, "/v1/models", (command, *here, *workers, "--log-level", "warning"))
    if name == "sglang-router":
        command = str(installed(name, environments) / "sglang-router")
        return Target(name, port, "/v1/models", (command, "launch", *here, *workers, "--log-level", "warn"))
    if name == "litellm":
        command = str(installed(name, environments) / "litellm")
        key = f"sk-{secrets.token_hex(32)}"  # it does not start without one; the check is part of what it adds
        return Target(
            name,
            port,
            "/health/liveliness",
            (command, *here, "--config", str(_litellm_config(folder, engine)), "--telemetry", "False"),
            # Its price list comes from the package; else it asks the network at every start.
            {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_LOG": "ERROR", "LITELLM_MASTER_KEY": key},
            key,
            most=20.0,
        )
    raise ValueError(f"target: {name!r}, expected one of {', '.join(NAMES)}")


def _laneway_spec(folder: Path, engine: str) -> Path:
    """The repository's own spec, its pool pointed at the engine."""
    spec = yaml.safe_load((REPOSITORY / "laneway.yaml").read_text())
    spec["pools"] = [{"name": "baseline", "replicas": [{"url": engine}]}]
    path = folder / "laneway.yaml"
    path.write_text(yaml.safe_dump(spec))
    return path


def _litellm_config(folder: Path, engine: str) -> Path:
    engine_parameters = {"model": f"openai/{MODEL}", "api_base": f"{engine}/v1", "api_key": "none"}
    path = folder / "litellm.yaml"
    path.write_text(yaml.safe_dump({"model_list": [{"model_name": MODEL, "litellm_params": engine_parameters}]}))
    return path
