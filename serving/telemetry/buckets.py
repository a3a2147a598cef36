"""Bounds of the histograms: the conventions' own, joined with every threshold of the spec.

A share "within 100 ms" read from buckets is exact only where 100 ms is a bound, so every objective, wait limit,
deadline and gate threshold is one. All results ascend, are finite, and leave `+Inf` to the exporter.
"""

from collections.abc import Iterable

from serving.spec import Spec
from serving.telemetry import catalog
from serving.telemetry.catalog import MetricDef

TTFT_CONVENTION = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
TPOT_CONVENTION = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
DURATION_CONVENTION = tuple(0.01 * 2**i for i in range(14))
"""OpenTelemetry's GenAI metric conventions, `gen_ai.server.*` (0.01 doubling to 81.92 s)."""

FINE_FIRST, FINE_LAST, FINE_STEP = 0.010, 2.0, 1.10
"""Of the histogram that a rollout is judged by: 10 ms to 2 s, each bound 10 % above the one before."""

POWERS = tuple(float(2**i) for i in range(9))
ERROR_RATIOS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 1.0, 2.0, 5.0)
SCALING = (1.0, 2.0, 5.0, 10.0, 20.0, 30.0, 45.0, 60.0, 90.0, 120.0, 180.0, 300.0, 600.0, 1200.0)
LOOP_LAG = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0)


def ttft_bounds(spec: Spec) -> tuple[float, ...]:
    """Seconds. The convention's, each lane's objective, wait limit and deadline, and the rollout's thresholds."""
    lanes = [value for lane in spec.lanes for value in (lane.ttft.seconds, lane.wait_limit, lane.deadline)]
    return _joined(TTFT_CONVENTION, lanes, gate_thresholds(spec))


def tpot_bounds(spec: Spec) -> tuple[float, ...]:
    """Seconds per token. The convention's and each lane's objective."""
    return _joined((0.001, 0.0025, 0.005), TPOT_CONVENTION, (lane.tpot.seconds for lane in spec.lanes if lane.tpot))


def duration_bounds(spec: Spec) -> tuple[float, ...]:
    """Seconds. The convention's, each lane's deadline and the total timeout."""
    return _joined(DURATION_CONVENTION, (lane.deadline for lane in spec.lanes), (spec.gateway.timeouts.total,))


def itl_bounds(spec: Spec) -> tuple[float, ...]:
    """Seconds. As for a token, with the idle timeout, which ends the longest gap there can be."""
    return _joined(tpot_bounds(spec), (5.0, 10.0, spec.gateway.timeouts.idle))


def fine_bounds(spec: Spec) -> tuple[float, ...]:
    """Seconds. 10 % apart, joined with the rollout's thresholds and the gate lanes' objectives."""
    steps = []
    bound = FINE_FIRST
    while bound < FINE_LAST:
        steps.append(float(f"{bound:.4g}"))
        bound *= FINE_STEP
    lanes = (lane.ttft.seconds for lane in spec.lanes if lane.gate)
    return _joined(steps, (FINE_LAST,), gate_thresholds(spec), lanes)


def batch_token_bounds(spec: Spec) -> tuple[float, ...]:
    """Tokens. Powers of two up to the longest prompt, with each pool's batch threshold and turn budget."""
    longest = max(model.max_model_len for model in spec.models)
    powers = (float(2**i) for i in range(3, longest.bit_length() + 1))
    return _joined(powers, (float(value) for pool in spec.pools for value in (pool.batch_tokens, pool.turn_tokens)))


def gate_thresholds(spec: Spec) -> tuple[float, ...]:
    """Seconds of TTFT that the spec's rollout decides by."""
    rollout = spec.rollout
    return (
        rollout.start_median,
        rollout.canary_p95,
        rollout.rollback_median,
        rollout.rollback_p95,
        rollout.edge_median,
    )


def histogram_bounds(spec: Spec) -> dict[MetricDef, tuple[float, ...]]:
    """Every histogram's bounds under this spec."""
    ttft = ttft_bounds(spec)
    return {
        catalog.TTFT: ttft,
        catalog.CLIENT_TTFT: ttft,
        catalog.QUEUE_WAIT: ttft,
        catalog.BATCH_WAIT: ttft,
        catalog.DISPATCH: ttft,
        catalog.TPOT: tpot_bounds(spec),
        catalog.ITL_MAX: itl_bounds(spec),
        catalog.DURATION: duration_bounds(spec),
        catalog.FINE_TTFT: fine_bounds(spec),
        catalog.BATCH_REQUESTS: POWERS,
        catalog.BATCH_TOKENS: batch_token_bounds(spec),
        catalog.ESTIMATE_ERROR: ERROR_RATIOS,
        catalog.SCALING: SCALING,
        catalog.LOOP_LAG: LOOP_LAG,
    }


def _joined(*parts: Iterable[float]) -> tuple[float, ...]:
    """Without doubles, and without the 0.08000000000000002 that arithmetic makes of a typed 0.08."""
    return tuple(sorted({float(f"{value:.12g}") for part in parts for value in part}))
