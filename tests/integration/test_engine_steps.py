"""The simulated step loop beside vLLM's own scheduler: the same workload, and the same plan in every step."""

import json
import os
import random
import subprocess
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from serving.engine.kv_blocks import block_hashes
from serving.engine.sequence import EngineLimits, Sequence
from serving.engine.step_time import Profile
from serving.engine.steps import SteppedEngine
from serving.engine.vllm import find_python, tiny_model_folder

pytestmark = pytest.mark.integration

REAL = Path(__file__).with_name("real_scheduler.py")


def workload(seed: int) -> dict[str, Any]:
    """A random workload with common prefixes and, in two of three, too little memory for all of it."""
    draw = random.Random(seed)
    block_size = draw.choice((4, 16))
    limits = EngineLimits(
        max_num_seqs=draw.randint(2, 12),
        max_num_batched_tokens=draw.choice((32, 64, 256)),
        max_model_len=256,
        prefix_caching=draw.random() < 0.7,
        long_prefill_token_threshold=draw.choice((0, 0, 8, 16)),
    )
    prefixes = [[draw.randrange(100, 200) for _ in range(draw.randrange(0, 120))] for _ in range(4)]
    requests = []
    for _ in range(60):
        own = [draw.randrange(200, 300) for _ in range(draw.randrange(1, 60))]
        requests.append((draw.randrange(0, 150), [*draw.choice(prefixes), *own], draw.randrange(1, 60)))
    blocks = 256 // block_size + 2 + draw.choice((0, 10, 200))
    return {"limits": asdict(limits), "blocks": blocks, "block_size": block_size, "requests": requests}


def simulated(load: dict[str, Any]) -> list[dict[str, Any]]:
    """The plans of our step loop."""
    limits = {key: value for key, value in load["limits"].items() if key != "model"}
    profile = Profile(block_size=load["block_size"], kv_blocks=load["blocks"])
    engine = SteppedEngine(profile, EngineLimits(**limits))
    arrivals = sorted(enumerate(load["requests"]), key=lambda item: item[1][0])
    plans: list[dict[str, Any]] = []
    step = 0
    while arrivals or engine.busy:
        while arrivals and arrivals[0][1][0] <= step:
            number, (_, prompt, output) = arrivals.pop(0)
            hashes = block_hashes(prompt, load["block_size"])
            engine.add(Sequence(f"r{number}", len(prompt), output, hashes), 0.0)
        step += 1
        plan = engine.plan(0.0)
        if plan is None:
            continue
        plans.append(
            {
                "plan": sorted([chunk.sequence.request_id, chunk.tokens] for chunk in plan.chunks),
                "preempted": sorted(sequence.request_id for sequence in plan.preempted),
                "free": engine.kv.free,
            }
        )
        engine.complete(plan, 0.0)
    return plans


def test_every_step_is_planned_as_vllm_plans_it(tmp_path: Path) -> None:
    """All that is learned from simulation, and all that is measured on the simulated engine, rests on this."""
    python = find_python(None, os.environ)
    model = str(tiny_model_folder(python, os.environ))
    loads = [workload(seed) for seed in range(20)]
    text = "".join(json.dumps({**load, "model": model}) + "\n" for load in loads)
    environ = {**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_CPU_KVCACHE_SPACE": "1"}
    ran = subprocess.run(
        [str(python), str(REAL)], input=text, capture_output=True, text=True, env=environ, cwd=tmp_path, check=False
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    real: list[list[dict[str, Any]]] = [[]]
    for line in ran.stdout.splitlines():
        if line == "end":
            real.append([])
        elif line.startswith("{"):
            plan = json.loads(line)
            real[-1].append({**plan, "plan": sorted(plan["plan"])})
    preemptions = 0
    for seed, (load, expected) in enumerate(zip(loads, real, strict=False)):
        ours = simulated(load)
        assert len(expected) > 100, f"workload {seed}"
        for number, (mine, theirs) in enumerate(zip(ours, expected, strict=False)):
            assert mine == theirs, f"workload {seed}, step {number}"
        assert len(ours) == len(expected), f"workload {seed}"
        preemptions += sum(len(plan["preempted"]) for plan in expected)
    assert preemptions > 100, "the workloads must reach the hard case"
