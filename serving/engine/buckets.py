"""Histogram bounds of an engine's `vllm:*` metrics: vLLM's own, joined with what the spec promises.

vLLM's queue-time histogram starts at 0.3 s, so a lane that promises a first token within 0.1 s could not be judged by
it. The launcher passes these bounds to vLLM (`--custom-histogram-buckets`) and the simulated replica uses them as they
are, so both expose the same series. Defaults: vLLM 0.32, `vllm/v1/metrics/buckets.py`.
"""

from collections.abc import Iterable

from serving.spec import Spec

STOCK: dict[str, tuple[float, ...]] = {
    "request_latency": (
        *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
        *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
    ),
    "time_to_first_token": (
        *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
        *(10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
    ),
    "inter_token_latency": (
        *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
        *(10.0, 20.0, 40.0, 80.0),
    ),
    "iteration_tokens": (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384),
    "request_params_n": (1, 2, 5, 10, 20),
    "request_num_preemptions": (1, 2, 3, 4, 5, 10, 20),
}
"""vLLM's bounds by family; seconds for the latencies, else a count."""


def from_spec(spec: Spec) -> dict[str, tuple[float, ...]]:
    """The families whose bounds the spec adds to, ascending, in seconds.

    Every TTFT objective, wait limit, deadline and rollout threshold becomes a bound of the TTFT and the phase
    histograms (queue, prefill, decode, whole request), and every TPOT objective one of the token histograms.
    """
    rollout = spec.rollout
    firsts = [lane.ttft.seconds for lane in spec.lanes] + [lane.wait_limit for lane in spec.lanes]
    firsts += [lane.deadline for lane in spec.lanes]
    firsts += [rollout.start_median, rollout.canary_p95, rollout.rollback_median, rollout.rollback_p95]
    finer = [bound for bound in STOCK["time_to_first_token"] if bound < STOCK["request_latency"][0]]
    return {
        "request_latency": _joined(STOCK["request_latency"], finer, firsts),
        "time_to_first_token": _joined(STOCK["time_to_first_token"], firsts),
        "inter_token_latency": _joined(
            STOCK["inter_token_latency"], [lane.tpot.seconds for lane in spec.lanes if lane.tpot is not None]
        ),
    }


def request_tokens(max_model_len: int) -> tuple[float, ...]:
    """vLLM's bounds for token counts of a request: 1, 2, 5, 10, … up to the model's length."""
    bounds: list[float] = []
    scale = 1
    while True:
        for step in (1, 2, 5):
            if step * scale > max_model_len:
                return tuple(bounds)
            bounds.append(step * scale)
        scale *= 10


def _joined(*lists: Iterable[float]) -> tuple[float, ...]:
    # 0.8 × 0.1 is 0.08000000000000002: without rounding it would stand beside 0.08 as a bound of its own.
    return tuple(sorted({round(float(bound), 9) for bounds in lists for bound in bounds}))
