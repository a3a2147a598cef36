"""Where one request's time went: the stages between its stamps. Pure.

With the gateway's record of the same request, the client's wait is opened up. No stamp of one clock is ever compared
with one of the other: what the client waited beyond what the gateway saw is a difference of two intervals.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from serving.timeline import Boundary, Timeline

SENT_LATE = "sent late"
CONNECT = "connecting"
NETWORK = "network and client"
ADMISSION = "admission"
QUEUE = "queue"
DISPATCH = "dispatch"
ENGINE = "engine to first token"
WAIT = "wait for first token"
TOKENS = "tokens"
END = "end of answer"

ORDER = (SENT_LATE, CONNECT, NETWORK, ADMISSION, QUEUE, DISPATCH, ENGINE, WAIT, TOKENS, END)
"""In the order of time. `wait for first token` stands for all between where only the client's boundary is known."""

_CLIENT = ((SENT_LATE, "scheduled", "sent"), (WAIT, "sent", "first_token"))
_GATEWAY = (
    (ADMISSION, "received", "admitted"),
    (QUEUE, "admitted", "released"),
    (DISPATCH, "released", "dispatched"),
    (ENGINE, "dispatched", "first_token"),
)
_AFTER = ((TOKENS, "first_token", "last_token"), (END, "last_token", "closed"))


@dataclass(frozen=True, slots=True)
class Stage:
    """One stretch of a request's life."""

    name: str
    seconds: float


def stages(timeline: Timeline, gateway: Timeline | None = None) -> list[Stage]:
    """The request's stages from its start to its end; one that ended early ends in the stage it was in.

    Args:
        timeline: at any boundary.
        gateway: the gateway's record of the same request, where `timeline` is the client's.
    """
    if timeline.boundary is not Boundary.CLIENT:
        return _stages(timeline, (*_GATEWAY, *_AFTER))
    plain = _connecting_apart(timeline, _stages(timeline, (*_CLIENT, *_AFTER)))
    if gateway is None:
        return plain
    opened = _stages(gateway, _GATEWAY)
    seen = sum(stage.seconds for stage in opened)
    result: list[Stage] = []
    for stage in plain:
        if stage.name == WAIT:
            result += [Stage(NETWORK, max(0.0, stage.seconds - seen)), *opened]
        else:
            result.append(stage)
    return result


def _connecting_apart(timeline: Timeline, parts: list[Stage]) -> list[Stage]:
    """To open a connection is the target's and the network's share of a late start, not the sender's."""
    connect = timeline.extra.get("connect")
    if not parts or parts[0].name != SENT_LATE or not isinstance(connect, float) or connect <= 0:
        return parts
    late = parts[0].seconds
    connect = min(connect, late)
    return [Stage(SENT_LATE, late - connect), Stage(CONNECT, connect), *parts[1:]]


def before_first_token(parts: Sequence[Stage]) -> list[Stage]:
    """Only what lies before the first token."""
    return [stage for stage in parts if stage.name not in (TOKENS, END)]


def _stages(timeline: Timeline, steps: Sequence[tuple[str, str, str]]) -> list[Stage]:
    result: list[Stage] = []
    for name, first, last in steps:
        start: float | None = getattr(timeline, first)
        end: float | None = getattr(timeline, last)
        if start is None:
            continue
        if end is None:
            if timeline.closed is not None:
                result.append(Stage(name, max(0.0, timeline.closed - start)))
            break
        result.append(Stage(name, max(0.0, end - start)))
    return result
