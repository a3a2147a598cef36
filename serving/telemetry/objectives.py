"""Who counts in an objective's population, and whether they met it. Pure: the gateway's counters, the comparison of
cohorts and benchmarks can all ask here, so that no one of them loses those who never saw a token.

Population of an objective: every valid request. Requests that were never valid load (`NOT_OFFERED`) are in none.
- TTFT: refused, expired, timed out and failed requests missed it. A client that left is judged by its first token, or,
  without one, missed it if the objective had passed when it left; before that nobody can say, and it does not count.
- TPOT: streams with at least two tokens, and streams that broke after the first (missed). A client that left is judged
  by what it saw, its last wait included.
- Success: all but clients that left; these count as missed once the lane's deadline had passed without a first token.
"""

import math
from bisect import bisect_left
from dataclasses import dataclass

from serving.spec import Lane, Spec
from serving.timeline import NOT_OFFERED, Outcome, Timeline

UNKNOWN_STRATUM = "unknown"


@dataclass(frozen=True, slots=True)
class Verdict:
    """Per objective: True it was met, False it was missed, None the request is not in its population."""

    ttft: bool | None
    tpot: bool | None
    success: bool | None
    good: bool
    """Completed, and missed none: goodput counts it."""


NOT_COUNTED = Verdict(None, None, None, False)


def judge(timeline: Timeline, lane: Lane) -> Verdict:
    """The verdict on a request of `lane` that has ended.

    Raises:
        ValueError: it has no outcome yet.
    """
    if timeline.outcome is None:
        raise ValueError(f"{timeline.request_id}: outcome is None, expected a request that has ended")
    if timeline.outcome in NOT_OFFERED:
        return NOT_COUNTED
    waited = population_ttft(timeline, lane.ttft.seconds)
    ttft = None if waited is None else waited <= lane.ttft.seconds
    tpot = None if lane.tpot is None else _tpot_met(timeline, lane.tpot.seconds)
    success = _success(timeline, lane.deadline)
    good = timeline.outcome is Outcome.COMPLETED and ttft is True and tpot is not False
    return Verdict(ttft, tpot, success, good)


def population_ttft(timeline: Timeline, objective: float) -> float | None:
    """TTFT in seconds for the objective's population: +∞ for who was not served, None for who is not in it."""
    if timeline.outcome in NOT_OFFERED or timeline.outcome is None:
        return None
    if timeline.outcome is Outcome.COMPLETED:
        return timeline.ttft_or_inf
    if timeline.outcome is Outcome.CANCELLED:
        if timeline.ttft is not None:
            return timeline.ttft
        left_after = timeline.completion
        return math.inf if left_after is not None and left_after > objective else None
    return math.inf


def _tpot_met(timeline: Timeline, objective: float) -> bool | None:
    first, tokens, outcome = timeline.first_token, timeline.output_tokens, timeline.outcome
    if first is None or not timeline.streamed:
        return None
    if outcome is Outcome.COMPLETED:
        return None if timeline.tpot is None else timeline.tpot <= objective
    if outcome is not Outcome.CANCELLED:
        return False
    if not tokens or timeline.closed is None:
        return None
    # The next token, which the client did not wait for, would have come after `closed`: TPOT was at least this.
    if (timeline.closed - first) / tokens > objective:
        return False
    return None if timeline.tpot is None else timeline.tpot <= objective


def _success(timeline: Timeline, deadline: float) -> bool | None:
    if timeline.outcome is not Outcome.CANCELLED:
        return timeline.outcome is Outcome.COMPLETED
    left_after = timeline.completion
    gave_up = timeline.first_token is None and left_after is not None and left_after > deadline
    return False if gave_up else None


def prompt_strata(spec: Spec) -> tuple[str, ...]:
    """Names of the prompt-length strata, shortest first: `le128`, …, `gt2048`."""
    edges = spec.strata.prompt_tokens
    return (*(f"le{edge}" for edge in edges), f"gt{edges[-1]}") if edges else ("all",)


def prompt_stratum(spec: Spec, prompt_tokens: int | None) -> str:
    """The stratum of a prompt; `unknown` where its length is."""
    if prompt_tokens is None:
        return UNKNOWN_STRATUM
    return prompt_strata(spec)[bisect_left(spec.strata.prompt_tokens, prompt_tokens)]
