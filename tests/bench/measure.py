"""One run of load against one port, reduced to the figures that the tables show."""

import asyncio
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from tests.bench.open_loop import OpenLoop, poisson_schedule, quantile, ttft_of
from tests.bench.processes import BenchProcess

WARM_UP_REQUESTS = 20


@dataclass(frozen=True, slots=True)
class Sample:
    """One run. Times in seconds, from the scheduled moment; a failed request has an infinite TTFT."""

    sent: int
    failed: int
    errors: dict[str, int]
    late_p99: float
    ttft_p50: float
    ttft_p99: float
    completion_p50: float
    completion_p99: float
    cpu_per_request: float
    """Processor seconds of the target, over the requests sent; 0 where there is no target."""


async def measure(
    port: int,
    body: bytes,
    chunks: int,
    rate: float,
    seconds: float,
    seed: int,
    target: BenchProcess | None,
    key: str | None = None,
) -> Sample:
    """Sends `rate` requests a second for `seconds`; the schedule follows from `seed` alone."""
    client = OpenLoop(f"http://127.0.0.1:{port}/v1/chat/completions", body, chunks, key)
    try:
        await client.run([number / 50 for number in range(WARM_UP_REQUESTS)])
        before = target.cpu_seconds() if target is not None else 0.0
        shots = await client.run(poisson_schedule(rate, seconds, seed))
        used = target.cpu_seconds() - before if target is not None else 0.0
    finally:
        client.close()
    await asyncio.sleep(0.2)  # what the run left behind is not the next target's load
    errors = Counter(shot.error for shot in shots if shot.error is not None)
    ttft = ttft_of(shots)
    completion = [shot.completion if shot.completion is not None else float("inf") for shot in shots]
    return Sample(
        sent=len(shots),
        failed=errors.total(),
        errors=dict(errors),
        late_p99=quantile([shot.late for shot in shots], 0.99),
        ttft_p50=quantile(ttft, 0.5),
        ttft_p99=quantile(ttft, 0.99),
        completion_p50=quantile(completion, 0.5),
        completion_p99=quantile(completion, 0.99),
        cpu_per_request=used / max(1, len(shots)),
    )


def spread(values: Sequence[float], digits: int = 2) -> str:
    """`median (min to max)`."""
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"
