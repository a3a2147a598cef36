"""The `vllm:*` metrics of a replica that is not vLLM: names, types, labels and bounds as vLLM 0.32 has them.

A test holds them against a recording of the real ones. What a simulated replica has nothing to say about (images,
adapters, KV transfer, floating-point operations) stands at zero, as it does in a real replica that does without.
"""

from collections.abc import Mapping, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from serving.engine import buckets
from serving.engine.sequence import EngineLimits, Plan, StepEnd
from serving.engine.sequence import Sequence as EngineSequence
from serving.engine.step_time import Profile

ENGINE = "0"
"""vLLM numbers the engines of a process; there is one here."""

REFUSALS = ("max_num_queued_reqs", "max_num_queued_tokens")
REASONS = ("stop", "length", "abort", "error", "repetition")

_COUNTERS = {
    "estimated_flops_per_gpu": "Floating-point operations (not simulated).",
    "estimated_read_bytes_per_gpu": "Bytes read from memory (not simulated).",
    "estimated_write_bytes_per_gpu": "Bytes written to memory (not simulated).",
    "prefix_cache_queries": "Tokens looked up in the prefix cache.",
    "prefix_cache_hits": "Tokens found in the prefix cache.",
    "external_prefix_cache_queries": "Tokens looked up in other instances (not simulated).",
    "external_prefix_cache_hits": "Tokens found in other instances (not simulated).",
    "mm_cache_queries": "Media looked up (not simulated).",
    "mm_cache_hits": "Media found (not simulated).",
    "num_preemptions": "Requests put back from running to waiting.",
    "prompt_tokens": "Prompt tokens of requests whose prefill has ended.",
    "prompt_tokens_cached": "Those of them that were cached.",
    "generation_tokens": "Output tokens.",
}

_LABELLED_COUNTERS = {
    "prompt_tokens_by_source": (
        "Prompt tokens, by where their KV came from.",
        "source",
        ("local_compute", "local_cache_hit", "external_kv_transfer"),
    ),
    "prompt_tokens_cached_by_source": (
        "Cached prompt tokens, by tier.",
        "source",
        ("device", "host", "p2p", "disk", "external_unspecified"),
    ),
    "request_success": ("Requests that ended by themselves.", "finished_reason", REASONS),
}

_HISTOGRAMS = {
    "request_prompt_tokens": ("request_tokens", "Prompt tokens of a request."),
    "request_generation_tokens": ("request_tokens", "Output tokens of a request."),
    "iteration_tokens_total": ("iteration_tokens", "Tokens of a step that brought output."),
    "request_max_num_generation_tokens": ("request_tokens", "Output tokens of a request's longest sequence."),
    "request_params_n": ("request_params_n", "Sequences that a request asked for."),
    "request_params_max_tokens": ("request_tokens", "Output limit that a request came with."),
    "time_to_first_token_seconds": ("time_to_first_token", "Arrival to first token."),
    "inter_token_latency_seconds": ("inter_token_latency", "Between two tokens of a request."),
    "request_time_per_output_token_seconds": ("inter_token_latency", "Mean of that, per request."),
    "e2e_request_latency_seconds": ("request_latency", "Arrival to last token."),
    "request_queue_time_seconds": ("request_latency", "Queued to first scheduled."),
    "request_inference_time_seconds": ("request_latency", "First scheduled to last token."),
    "request_prefill_time_seconds": ("request_latency", "First scheduled to first token."),
    "request_decode_time_seconds": ("request_latency", "First token to last token."),
    "request_num_preemptions": ("request_num_preemptions", "Times that a request was preempted."),
    "request_prefill_kv_computed_tokens": ("request_tokens", "Prompt tokens computed, without the cached ones."),
}

_CACHE_CONFIG = (
    *("_block_size_resolved", "block_size", "cache_dtype", "cache_hit_alignment_tokens"),
    *("effective_attention_block_size", "enable_mamba_shared_prefix_checkpoint", "enable_prefix_caching"),
    *("gpu_memory_utilization", "hash_block_size", "is_attention_free", "kv_cache_dtype_skip_layers"),
    *("kv_cache_layout", "kv_cache_max_concurrency", "kv_cache_memory_bytes", "kv_cache_size_tokens"),
    *("kv_offloading_backend", "kv_offloading_size", "kv_sharing_fast_prefill", "mamba_block_size"),
    *("mamba_cache_dtype", "mamba_cache_mode", "mamba_page_size_padded", "mamba_ssm_cache_dtype", "num_cpu_blocks"),
    *("num_gpu_blocks", "num_gpu_blocks_override", "prefix_cache_retention_interval", "prefix_caching_hash_algo"),
    *("prefix_match_unit", "replayssm_buffer_len", "skip_page_size_padded", "sliding_window", "swa_bounded_replay"),
    *("use_kda_recoverssm", "use_replayssm", "user_specified_block_size"),
)


class VllmMetrics:
    """The metrics of one replica. Every child is made once; a step costs one observation a token."""

    def __init__(
        self,
        registry: CollectorRegistry,
        model: str,
        profile: Profile,
        limits: EngineLimits,
        bounds: Mapping[str, Sequence[float]],
    ) -> None:
        """`bounds`: by family, as `buckets.from_spec` gives them; a family that is not there has vLLM's own."""
        families = {**buckets.STOCK, "request_tokens": buckets.request_tokens(limits.max_model_len), **bounds}
        names = ("model_name", "engine")
        values = (model, ENGINE)
        self._counters = {
            name: Counter(f"vllm:{name}", text, names, registry=registry).labels(*values)
            for name, text in _COUNTERS.items()
        }
        self._by: dict[str, dict[str, Counter]] = {}
        for name, (text, label, choices) in _LABELLED_COUNTERS.items():
            parent = Counter(f"vllm:{name}", text, (*names, label), registry=registry)
            self._by[name] = {choice: parent.labels(*values, choice) for choice in choices}
        self._histograms = {
            name: Histogram(f"vllm:{name}", text, names, buckets=families[family], registry=registry).labels(*values)
            for name, (family, text) in _HISTOGRAMS.items()
        }
        refused = Counter(
            "vllm:admission_rejections",
            "Requests refused by a queue limit.",
            ("model_name", "reason"),
            registry=registry,
        )
        self._refused = {reason: refused.labels(model, reason) for reason in REFUSALS}
        gauges = {
            "num_requests_running": "Requests that run.",
            "num_requests_waiting": "Requests that wait.",
            "kv_cache_usage_perc": "Share of the KV blocks that are held, 0 to 1.",
        }
        self._gauges = {
            name: Gauge(f"vllm:{name}", text, names, registry=registry).labels(*values) for name, text in gauges.items()
        }
        by_reason = Gauge(
            "vllm:num_requests_waiting_by_reason",
            "Requests that wait, by reason.",
            (*names, "reason"),
            registry=registry,
        )
        self._waiting = by_reason.labels(*values, "capacity")
        by_reason.labels(*values, "deferred")
        sleep = Gauge(
            "vllm:engine_sleep_state", "The state that the engine is in.", (*names, "sleep_state"), registry=registry
        )
        for state, value in (("awake", 1), ("weights_offloaded", 0), ("discard_all", 0)):
            sleep.labels(*values, state).set(value)
        self._describe_cache(registry, profile, limits)

    def load(self, running: int, waiting: int, kv_usage: float) -> None:
        """What the engine holds now."""
        self._gauges["num_requests_running"].set(running)
        self._gauges["num_requests_waiting"].set(waiting)
        self._waiting.set(waiting)
        self._gauges["kv_cache_usage_perc"].set(kv_usage)

    def refused(self, reason: str) -> None:
        """A request was refused; `reason` is one of `REFUSALS`."""
        self._refused[reason].inc()

    def planned(self, plan: Plan) -> None:
        """A step was planned."""
        counters = self._counters
        if plan.queried_tokens:
            counters["prefix_cache_queries"].inc(plan.queried_tokens)
        if plan.hit_tokens:
            counters["prefix_cache_hits"].inc(plan.hit_tokens)
            self._by["prompt_tokens_cached_by_source"]["device"].inc(plan.hit_tokens)
        if plan.preempted:
            counters["num_preemptions"].inc(len(plan.preempted))

    def ended(self, end: StepEnd, intervals: Sequence[float], first: Sequence[tuple[EngineSequence, float]]) -> None:
        """A step ended.

        Args:
            end: what it brought.
            intervals: seconds since each further token's predecessor.
            first: the sequences that have their first token, and the seconds since their request arrived.
        """
        if not end.produced:
            return
        prompt = sum(sequence.prompt_tokens for sequence, _ in first)
        cached = sum(sequence.cached_tokens for sequence, _ in first)
        if first:
            self._counters["prompt_tokens"].inc(prompt)
            self._counters["prompt_tokens_cached"].inc(cached)
            self._by["prompt_tokens_by_source"]["local_compute"].inc(prompt - cached)
            self._by["prompt_tokens_by_source"]["local_cache_hit"].inc(cached)
            observe = self._histograms["time_to_first_token_seconds"].observe
            for _, seconds in first:
                observe(seconds)
        self._counters["generation_tokens"].inc(len(end.produced))
        self._histograms["iteration_tokens_total"].observe(prompt - cached + len(end.produced))
        observe = self._histograms["inter_token_latency_seconds"].observe
        for seconds in intervals:
            observe(seconds)

    def finished(self, sequence: EngineSequence, reason: str, asked_tokens: int, latency: float) -> None:
        """A request ended by itself (vLLM counts none that was aborted).

        Args:
            sequence: the request's.
            reason: one of `REASONS`.
            asked_tokens: the output limit that it came with.
            latency: seconds from its arrival to its end.
        """
        first, last, scheduled = sequence.first_token_at, sequence.last_token_at, sequence.scheduled_at
        assert first is not None
        assert last is not None
        assert scheduled is not None
        self._by["request_success"][reason].inc()
        decode = last - first
        for name, value in (
            ("e2e_request_latency_seconds", latency),
            ("request_queue_time_seconds", scheduled - sequence.queued_at),
            ("request_prefill_time_seconds", first - scheduled),
            ("request_inference_time_seconds", last - scheduled),
            ("request_decode_time_seconds", decode),
            ("request_time_per_output_token_seconds", decode / max(sequence.output_tokens - 1, 1)),
            ("request_num_preemptions", sequence.preemptions),
            ("request_prefill_kv_computed_tokens", sequence.prompt_tokens - sequence.cached_tokens),
            ("request_prompt_tokens", sequence.prompt_tokens),
            ("request_generation_tokens", sequence.output_tokens),
            ("request_max_num_generation_tokens", sequence.output_tokens),
            ("request_params_n", 1),
            ("request_params_max_tokens", asked_tokens),
        ):
            self._histograms[name].observe(value)

    def _describe_cache(self, registry: CollectorRegistry, profile: Profile, limits: EngineLimits) -> None:
        size = profile.block_size * profile.kv_blocks
        known = {
            "block_size": str(profile.block_size),
            "enable_prefix_caching": str(limits.prefix_caching),
            "num_gpu_blocks": str(profile.kv_blocks),
            "kv_cache_size_tokens": str(size),
            "kv_cache_max_concurrency": str(size / limits.max_model_len),
        }
        info = Gauge(
            "vllm:cache_config_info",
            "Settings of the KV cache.",
            (*_CACHE_CONFIG, "engine"),
            registry=registry,
        )
        info.labels(*(known.get(name, "None") for name in _CACHE_CONFIG), ENGINE).set(1)
