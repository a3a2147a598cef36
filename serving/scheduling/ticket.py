"""What passes between the gateway and a scheduler: tickets in, refusals and batches out, views for gauges."""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from serving.timeline import Outcome


class State(StrEnum):
    """Where a ticket is, as the scheduler sees it."""

    NEW = "new"
    QUEUED = "queued"
    IN_FLIGHT = "in_flight"
    GONE = "gone"


@dataclass(slots=True, eq=False)
class Ticket:
    """One request's place in the schedule. Times are seconds of one monotonic clock, the gateway's.

    Raises:
        ValueError: `tokens` is below 1; every account counts in tokens, and a free request could never be bounded.
    """

    request_id: str
    lane: str
    tokens: int
    """Prompt tokens, an estimate: the cost in every token account."""
    received: float
    deadline: float
    """Absolute; to the first token."""
    prefix: int | None = None
    """Hash of the prompt's head: requests that share it like the same replica."""
    streamed: bool = True
    """False: no `first_token` comes before `finished`, so its progress is estimated."""
    output_tokens: int = 0
    state: State = field(default=State.NEW, init=False)
    sequence: int = field(default=-1, init=False)
    admitted: float | None = field(default=None, init=False)
    released: float | None = field(default=None, init=False)
    replica: str | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        if self.tokens < 1:
            raise ValueError(f"{self.request_id}: tokens is {self.tokens}, expected at least 1")

    def waited(self, now: float) -> float:
        """Seconds in the queue so far; 0 before it was admitted."""
        return 0.0 if self.admitted is None else now - self.admitted


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a ticket was not taken, and after how many seconds it may be worth another try."""

    outcome: Outcome
    """`rejected_full` or `rejected_infeasible`."""
    retry_after: float
    reason: str


@dataclass(frozen=True, slots=True)
class Batch:
    """Tickets that leave together for one replica."""

    lane: str
    """The first ticket's lane (`static-fifo` mixes lanes; the others never do)."""
    replica: str
    tickets: tuple[Ticket, ...]
    tokens: int
    waited: float
    """Seconds that its oldest ticket had queued."""
    overdue: bool
    """Its first ticket had used its lane's wait limit."""


@dataclass(frozen=True, slots=True)
class LaneView:
    """A lane at one instant."""

    queued: int
    queued_tokens: int
    oldest_age: float
    """Seconds since the oldest queued ticket was admitted; 0 when none is queued."""
    bucket_tokens: int
    """Pending tokens up to the threshold of one batch."""
    deficit: int
    """Tokens that it may still release in this round; below 0 it owes. 0 where the policy keeps no shares."""
    drain_rate: float | None
    """Tokens a second while backlogged; None before it was measured."""
    breaches: int
    """Tickets, ever, that waited longer than the wait limit."""
    released: int
    released_tokens: int
    """Ever."""


@dataclass(frozen=True, slots=True)
class ReplicaView:
    """A replica at one instant, as counted by this gateway."""

    ready: bool
    in_flight: int
    outstanding_tokens: int
    """Estimated prompt tokens sent and not computed."""
    large_seats_used: int
    prefill_rate: float | None
    """Prompt tokens a second while it computes prompts; None before it was measured."""


class Scheduler(Protocol):
    """The policy of one (model, pool). Synchronous and without a clock: `now` is seconds, and never goes back."""

    def submit(self, ticket: Ticket, now: float) -> Refusal | None:
        """Takes a ticket into its lane's queue, or says why not."""

    def release(self, now: float) -> list[Batch]:
        """All that may leave now."""

    def expire(self, now: float) -> list[Ticket]:
        """Removes the queued tickets whose deadline has come; their room is free at once."""

    def cancel(self, ticket: Ticket, now: float) -> bool:
        """The client left: True if the ticket was queued (and is no more)."""

    def first_token(self, ticket: Ticket, now: float) -> None:
        """Its prefill is over. Late and repeated calls do nothing."""

    def finished(self, ticket: Ticket, now: float) -> None:
        """It left its replica, whatever the outcome. Repeated calls do nothing."""

    def reassign(self, ticket: Ticket, exclude: frozenset[str], now: float) -> str | None:
        """Moves a ticket in flight to another ready replica, past its credit; None if there is none (it stays)."""

    def add_replica(self, name: str, now: float) -> None:
        """A new instance, ready. Of an old one of that name nothing is inherited."""

    def remove_replica(self, name: str, now: float) -> None:
        """Gets nothing more; what it still has may finish."""

    def set_ready(self, name: str, ready: bool, now: float) -> None:
        """Whether it may get requests."""

    def observe(self, name: str, now: float, *, running: int, waiting: int, prompt_tokens_total: float) -> None:
        """What the engine's own metrics said just now."""

    def next_wake(self, now: float) -> float | None:
        """When, without an event, `release` or `expire` could next do something. Ask after `release`."""

    def drain(self, now: float) -> list[Ticket]:
        """Everything queued leaves."""

    def lanes(self) -> tuple[str, ...]:
        """In the spec's order."""

    def lane_view(self, lane: str, now: float) -> LaneView:
        """For gauges."""

    def replica_view(self, now: float) -> dict[str, ReplicaView]:
        """For gauges."""

    def desired_replicas(self, now: float) -> int:
        """How many replicas the load needs."""
