"""What the timelines of a run say, lane by lane and stratum by stratum. Pure.

Who counts is decided in one place, `serving.telemetry.objectives`: refused, expired and failed requests stay in the
population with a TTFT of +∞. Percentiles are nearest rank (the smallest value that at least this share does not
exceed): they are real requests' intervals, and they stay right where some are +∞.
"""

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from serving.spec import Lane, Strata
from serving.telemetry.objectives import judge, population_ttft
from serving.timeline import NOT_OFFERED, Outcome, Timeline

ALL_LENGTHS = "all"


@dataclass(frozen=True, slots=True)
class Quantiles:
    """Seconds; +∞ where so many never got there, None without a value."""

    count: int
    p50: float | None
    p95: float | None
    p99: float | None
    max: float | None


@dataclass(frozen=True, slots=True)
class Group:
    """The requests of one lane, of all prompt lengths or of one stratum."""

    lane: str
    stratum: str
    offered: int
    """Requests whose time came, invalid ones included."""
    completed: int
    outcomes: Mapping[str, int]
    ttft: Quantiles
    """`count` is the population of the TTFT objective."""
    ttft_met: float | None
    """Share of the population within the objective; None without one."""
    tpot: Quantiles
    """Of streams with at least two tokens."""
    itl_max: Quantiles
    """The longest gap of each stream."""
    completion: Quantiles
    """Of completed requests."""
    good: int
    goodput: float
    """Requests a second of the window that completed within the lane's objectives of TTFT and TPOT."""
    output_tokens_per_second: float
    """Output tokens of every answer, broken ones too, over the time to the last answer's end."""


def quantile(ordered: Sequence[float], share: float) -> float | None:
    """Nearest rank of values in ascending order; None if there are none."""
    if not ordered:
        return None
    return ordered[max(0, math.ceil(share * len(ordered) - 1e-9) - 1)]


def quantiles(values: Iterable[float]) -> Quantiles:
    """Of values in any order."""
    ordered = sorted(values)
    return Quantiles(
        len(ordered),
        quantile(ordered, 0.50),
        quantile(ordered, 0.95),
        quantile(ordered, 0.99),
        ordered[-1] if ordered else None,
    )


def ttft_population(timelines: Iterable[Timeline], lane: Lane) -> list[float]:
    """TTFT of everybody in the objective's population, seconds, +∞ for who was not served."""
    waits = (population_ttft(timeline, lane.ttft.seconds) for timeline in timelines)
    return [wait for wait in waits if wait is not None]


def stratum(edges: Sequence[int], tokens: int | None) -> str:
    """The stratum that a length falls into, named by its upper edge: `≤128`, …, `>2048`."""
    if tokens is None:
        return "unknown"
    i = bisect_left(edges, tokens)
    return f"≤{edges[i]}" if i < len(edges) else f">{edges[-1]}" if edges else ALL_LENGTHS


def stratum_names(edges: Sequence[int]) -> list[str]:
    """Every stratum's name, shortest first."""
    return [*(f"≤{edge}" for edge in edges), f">{edges[-1]}" if edges else ALL_LENGTHS, "unknown"]


def summarize(
    timelines: Sequence[Timeline], lanes: Sequence[Lane], strata: Strata, window: float, elapsed: float
) -> list[Group]:
    """A group for each lane (stratum `all`), followed by its strata of prompt tokens; lanes without requests too.

    Args:
        window: seconds in which requests were offered.
        elapsed: seconds to the last answer's end.

    Raises:
        ValueError: a request has no outcome, or is in a lane that is not among `lanes`.
    """
    known = {lane.name for lane in lanes}
    strays = Counter(timeline.lane for timeline in timelines if timeline.lane not in known)
    if strays:
        raise ValueError(f"lane: got {', '.join(sorted(strays))}, expected one of {', '.join(sorted(known))}")
    groups: list[Group] = []
    for lane in lanes:
        own = [timeline for timeline in timelines if timeline.lane == lane.name]
        groups.append(_group(lane, ALL_LENGTHS, own, window, elapsed))
        edges = strata.prompt_tokens
        for name in stratum_names(edges):
            part = [timeline for timeline in own if stratum(edges, timeline.prompt_tokens) == name]
            if part:
                groups.append(_group(lane, name, part, window, elapsed))
    return groups


def _group(lane: Lane, name: str, timelines: Sequence[Timeline], window: float, elapsed: float) -> Group:
    def present(measure: Callable[[Timeline], float | None]) -> list[float]:
        return [value for timeline in timelines if (value := measure(timeline)) is not None]

    waits = ttft_population(timelines, lane)
    completed = [timeline for timeline in timelines if timeline.outcome is Outcome.COMPLETED]
    good = sum(judge(timeline, lane).good for timeline in timelines)
    return Group(
        lane=lane.name,
        stratum=name,
        offered=len(timelines),
        completed=len(completed),
        outcomes=dict(sorted(Counter(str(timeline.outcome) for timeline in timelines).items())),
        ttft=quantiles(waits),
        ttft_met=sum(wait <= lane.ttft.seconds for wait in waits) / len(waits) if waits else None,
        tpot=quantiles(present(lambda timeline: timeline.tpot)),
        itl_max=quantiles(present(lambda timeline: timeline.itl_max)),
        completion=quantiles(c for timeline in completed if (c := timeline.completion) is not None),
        good=good,
        goodput=good / window if window > 0 else 0.0,
        output_tokens_per_second=sum(timeline.output_tokens or 0 for timeline in timelines) / elapsed
        if elapsed > 0
        else 0.0,
    )


def refused_or_failed(group: Group) -> int:
    """Valid requests that did not complete, those whose client left included."""
    excluded = {str(outcome) for outcome in NOT_OFFERED} | {str(Outcome.COMPLETED)}
    return sum(count for outcome, count in group.outcomes.items() if outcome not in excluded)
