"""Requests that have ended, as the tests of telemetry need them. Stamps are seconds; the head came at 0."""

from pathlib import Path

from serving.spec import Spec, load
from serving.timeline import Boundary, Outcome, Timeline

SPEC: Spec = load(Path(__file__).parents[3] / "laneway.yaml")
MODEL = SPEC.models[0].name
LANE = SPEC.lanes[0]
"""Interactive: it has a TTFT and a TPOT objective."""
TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"


def ended(
    outcome: Outcome,
    *,
    first_token: float | None = None,
    gap: float = 0.01,
    tokens: int | None = None,
    closed: float | None = None,
    lane: str = LANE.name,
    cohort: str = "baseline",
    trace_id: str | None = None,
    streamed: bool = True,
    model: str | None = MODEL,
    prompt_tokens: int | None = 64,
) -> Timeline:
    """A request that ended so. With `first_token` it was dispatched, and `tokens` came `gap` seconds apart."""
    timeline = Timeline(
        "r1", Boundary.GATEWAY, trace_id=trace_id, model=model, pool="baseline", lane=lane, cohort=cohort
    )
    timeline.streamed = streamed
    timeline.prompt_tokens = prompt_tokens
    timeline.received = 0.0
    timeline.admitted = 0.001
    last = timeline.admitted
    if first_token is not None:
        timeline.released = timeline.dispatched = 0.002
        timeline.output_tokens = tokens
        for i in range(tokens or 1):
            last = first_token + i * gap
            timeline.content(last)
    timeline.end(outcome, last if closed is None else closed)
    return timeline
