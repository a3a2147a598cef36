"""Runs vLLM's own scheduler, without an engine, on a workload from standard input: prints its plan of every step.

It runs in the engine's environment (`test_engine_steps.py` starts it). Input: one JSON object with `model`, `limits`,
`blocks`, `block_size` and `requests` (arrival step, prompt tokens, output tokens), all of it made by the test. Output:
one JSON line a step, `[[request, tokens], …]` in the order of the plan, the preempted requests, and the free blocks.
"""

import json
import sys
from typing import Any

from vllm.config import (
    CacheConfig,
    DeviceConfig,
    ModelConfig,
    ObservabilityConfig,
    ParallelConfig,
    SchedulerConfig,
    VllmConfig,
)
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager


def scheduler(load: dict[str, Any]) -> Scheduler:
    """vLLM's stock scheduler with these limits."""
    import torch

    limits = load["limits"]
    model = ModelConfig(model=load["model"], max_model_len=limits["max_model_len"], dtype="float32")
    cache = CacheConfig(block_size=load["block_size"], enable_prefix_caching=limits["prefix_caching"])
    config = VllmConfig(
        model_config=model,
        cache_config=cache,
        parallel_config=ParallelConfig(),
        device_config=DeviceConfig("cpu"),
        observability_config=ObservabilityConfig(),
        scheduler_config=SchedulerConfig(
            max_num_seqs=limits["max_num_seqs"],
            max_num_batched_tokens=limits["max_num_batched_tokens"],
            max_model_len=limits["max_model_len"],
            enable_chunked_prefill=True,
            long_prefill_token_threshold=limits["long_prefill_token_threshold"],
            is_encoder_decoder=False,
        ),
    )
    config.cache_config.num_gpu_blocks = load["blocks"]
    config.cache_config.enable_prefix_caching = limits["prefix_caching"]
    spec = FullAttentionSpec(block_size=load["block_size"], num_kv_heads=1, head_size=1, dtype=torch.float32)
    kv = KVCacheConfig(
        num_blocks=load["blocks"], kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)]
    )
    return Scheduler(
        vllm_config=config,
        kv_cache_config=kv,
        structured_output_manager=StructuredOutputManager(config),
        block_size=load["block_size"],
    )


def run(load: dict[str, Any]) -> None:
    """Prints a line a step until every request has ended."""
    real = scheduler(load)
    init_none_hash(sha256)
    hasher = get_request_block_hasher(load["block_size"], sha256)
    arrivals = sorted(enumerate(load["requests"]), key=lambda item: item[1][0])
    requests: dict[str, Request] = {}
    step = 0
    while arrivals or real.has_unfinished_requests():
        while arrivals and arrivals[0][1][0] <= step:
            number, (_, prompt, output) = arrivals.pop(0)
            params = SamplingParams(max_tokens=output, ignore_eos=True)
            request = Request(f"r{number}", prompt, params, None, block_hasher=hasher)
            requests[request.request_id] = request
            real.add_request(request)
        step += 1
        if not real.has_unfinished_requests():
            continue
        plan = real.schedule()
        names = list(plan.num_scheduled_tokens)
        done = [requests[name].num_computed_tokens >= requests[name].num_tokens for name in names]
        print(
            json.dumps(
                {
                    "plan": [[name, plan.num_scheduled_tokens[name]] for name in names],
                    "preempted": sorted(plan.preempted_req_ids or ()),
                    "free": real.kv_cache_manager.block_pool.get_num_free_blocks(),
                }
            )
        )
        # A token of its own for every request and position, so that outputs share no prefix.
        tokens = [
            [1_000_000 + int(name[1:]) * 10_000 + requests[name].num_tokens] if ends else []
            for name, ends in zip(names, done, strict=True)
        ]
        real.update_from_output(
            plan, ModelRunnerOutput(names, {name: i for i, name in enumerate(names)}, sampled_token_ids=tokens)
        )


if __name__ == "__main__":
    for line in sys.stdin:
        run(json.loads(line))
        print("end", flush=True)
