"""The record of one request: its stamps, its one outcome, its intervals.

The gateway fills one per request, the replay client one per request it sends, the simulator one per request it
imagines. Stamps are seconds of one monotonic clock; a `Timeline` never mixes two clocks, and `boundary` says whose
clock it is. `record` writes the schema that access log, replay, simulator and diagnosis share.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import NoneType
from typing import Any


class Boundary(StrEnum):
    """Where the clock of a timeline stands."""

    CLIENT = "client"
    GATEWAY = "gateway"
    ENGINE = "engine"


class Outcome(StrEnum):
    """How a request ended. Every request ends in exactly one."""

    COMPLETED = "completed"
    REJECTED_FULL = "rejected_full"
    REJECTED_INFEASIBLE = "rejected_infeasible"
    REJECTED_QUOTA = "rejected_quota"
    REJECTED_INVALID = "rejected_invalid"
    REJECTED_AUTH = "rejected_auth"
    REJECTED_ENGINE = "rejected_engine"
    EXPIRED = "expired"
    CANCELLED = "cancelled"
    ENGINE_ERROR = "engine_error"
    ENGINE_TIMEOUT = "engine_timeout"
    NO_REPLICA = "no_replica"
    DRAINING = "draining"


NOT_OFFERED = frozenset({Outcome.REJECTED_INVALID, Outcome.REJECTED_AUTH, Outcome.REJECTED_QUOTA})
"""Outcomes of requests that were never valid load: they are in no objective's population."""

STAMPS = (
    "scheduled",
    "sent",
    "received",
    "admitted",
    "released",
    "dispatched",
    "first_token",
    "last_token",
    "closed",
)
"""In the order of time. `scheduled` and `sent` are the client's; the engine's boundary has no `admitted`."""


class OutcomeAlreadySetError(RuntimeError):
    """A second outcome was given to a request that has one: a defect in the caller."""


@dataclass(slots=True)
class Timeline:
    """One request at one boundary. Stamps are seconds of one monotonic clock, None where not (yet) seen."""

    request_id: str
    boundary: Boundary
    trace_id: str | None = None
    run_id: str | None = None
    model: str | None = None
    pool: str | None = None
    lane: str = "none"
    cohort: str = "baseline"
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    outcome: Outcome | None = None
    error: str | None = None
    streamed: bool = True
    scheduled: float | None = None
    sent: float | None = None
    received: float | None = None
    admitted: float | None = None
    released: float | None = None
    dispatched: float | None = None
    first_token: float | None = None
    last_token: float | None = None
    closed: float | None = None
    itl_max: float | None = None
    """Longest gap between two content chunks, seconds."""
    extra: dict[str, Any] = field(default_factory=dict)
    """Further keys of the record, such as what a simulator knows of the engine. Never a prompt."""

    def content(self, now: float) -> None:
        """A chunk that carries content arrived at `now`. Role-only and empty chunks must not be told."""
        if self.first_token is None:
            self.first_token = now
        elif self.last_token is not None:
            gap = now - self.last_token
            if self.itl_max is None or gap > self.itl_max:
                self.itl_max = gap
        self.last_token = now

    def end(self, outcome: Outcome, now: float, error: str | None = None) -> None:
        """Sets the one outcome and the closing stamp.

        Raises:
            OutcomeAlreadySetError: the request has an outcome already.
        """
        if self.outcome is not None:
            raise OutcomeAlreadySetError(f"{self.request_id}: {outcome} after {self.outcome}")
        self.outcome = outcome
        self.error = error
        self.closed = now

    @property
    def start(self) -> float | None:
        """What latencies count from: the schedule for a client (so that overload cannot hide), else receipt."""
        if self.boundary is Boundary.CLIENT:
            return self.scheduled if self.scheduled is not None else self.sent
        return self.received

    @property
    def queue_wait(self) -> float | None:
        """released − admitted, seconds."""
        return _between(self.admitted, self.released)

    @property
    def ttft(self) -> float | None:
        """first_token − start, seconds. None without a first token: count it as +∞ (`ttft_or_inf`)."""
        return _between(self.start, self.first_token)

    @property
    def ttft_or_inf(self) -> float:
        """TTFT for populations that must not lose those who never saw a token."""
        value = self.ttft
        return math.inf if value is None else value

    @property
    def tpot(self) -> float | None:
        """(last_token − first_token) / (output tokens − 1), seconds; None for fewer than two tokens."""
        gap = _between(self.first_token, self.last_token)
        if gap is None or self.output_tokens is None or self.output_tokens < 2 or not self.streamed:
            return None
        return gap / (self.output_tokens - 1)

    @property
    def completion(self) -> float | None:
        """closed − start, seconds."""
        return _between(self.start, self.closed)

    def record(self, origin: float = 0.0) -> dict[str, Any]:
        """The shared schema: stamps in seconds from `origin` (the run's start, same clock), to the microsecond."""
        row: dict[str, Any] = {
            "request_id": self.request_id,
            "trace_id": self.trace_id,
            "run_id": self.run_id,
            "model": self.model,
            "pool": self.pool,
            "lane": self.lane,
            "cohort": self.cohort,
            "boundary": str(self.boundary),
            "prompt_tokens": self.prompt_tokens,
            "output_tokens": self.output_tokens,
            "outcome": None if self.outcome is None else str(self.outcome),
            "error": self.error,
            "streamed": self.streamed,
        }
        for name in STAMPS:
            value = getattr(self, name)
            row[name] = None if value is None else round(value - origin, 6)
        row["itl_max"] = None if self.itl_max is None else round(self.itl_max, 6)
        row.update(self.extra)
        return row


_FIELDS = frozenset(Timeline.__dataclass_fields__) - {"extra"}
_VALUES: tuple[tuple[tuple[str, ...], tuple[type, ...], str], ...] = (
    (("request_id", "lane", "cohort"), (str,), "a string"),
    (("trace_id", "run_id", "model", "pool", "error"), (str, NoneType), "a string or null"),
    (("prompt_tokens", "output_tokens"), (int, NoneType), "a whole number or null"),
    ((*STAMPS, "itl_max"), (int, float, NoneType), "seconds or null"),
    (("streamed",), (bool,), "true or false"),
    (("boundary",), (str,), f"one of {', '.join(Boundary)}"),
    (("outcome",), (str, NoneType), f"null or one of {', '.join(Outcome)}"),
)


def from_record(row: Mapping[str, Any]) -> Timeline:
    """The timeline of a record; keys that the schema does not name go to `extra`.

    Raises:
        ValueError: a key is missing or has a value that the schema does not allow; the message names it.
    """
    for name in ("request_id", "boundary"):
        if name not in row:
            raise ValueError(f"{name}: missing, expected a value")
    known = {key: value for key, value in row.items() if key in _FIELDS}
    for names, kinds, expected in _VALUES:
        for name in names:
            if name in known and type(known[name]) not in kinds:  # not isinstance: true is no number
                raise ValueError(f"{name}: got {known[name]!r}, expected {expected}")
    for name, kind in (("boundary", Boundary), ("outcome", Outcome)):
        if known.get(name) is not None and known[name] not in list(kind):
            raise ValueError(f"{name}: got {known[name]!r}, expected one of {', '.join(kind)}")
    known["boundary"] = Boundary(known["boundary"])
    known["outcome"] = None if known.get("outcome") is None else Outcome(known["outcome"])
    return Timeline(**known, extra={key: value for key, value in row.items() if key not in _FIELDS})


def _between(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else end - start
