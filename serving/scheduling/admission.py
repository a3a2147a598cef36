"""Admission: one lane's queue, rates and counts, and whether a ticket may join it."""

from dataclasses import dataclass, field

from serving import spec
from serving.scheduling.queue import LaneQueue
from serving.scheduling.rates import TokenRate
from serving.scheduling.ticket import Refusal, Ticket
from serving.timeline import Outcome

RETRY_AFTER = (1.0, 60.0)
"""Seconds: bounds of what a refusal suggests. `Retry-After` has whole seconds, and nobody plans on more than these."""


@dataclass(slots=True)
class LaneState:
    """One lane in one scheduler."""

    settings: spec.Lane
    queue: LaneQueue
    drain: TokenRate = field(default_factory=TokenRate)
    released: int = 0
    released_tokens: int = 0

    def refusal(self, ticket: Ticket, now: float) -> Refusal | None:
        """Why the ticket is not taken; None if it is.

        An infeasible one is refused only on evidence: the tokens ahead of it and its own, at the lane's measured drain
        rate, take longer than it has. Before a rate is measured, and into an empty queue, it is admitted: that is also
        how a rate that a stall has pressed down is measured again.
        """
        if ticket.deadline <= now:
            return _refuse(Outcome.REJECTED_INFEASIBLE, 0.0, "its deadline has passed")
        rate = self.drain.rate(now)
        if reason := self.queue.full(ticket.tokens):
            wait = 0.0 if rate is None else self.queue.tokens / rate
            return _refuse(Outcome.REJECTED_FULL, wait, reason)
        if rate is None or not len(self.queue):
            return None
        wait = (self.queue.tokens_ahead(ticket.deadline) + ticket.tokens) / rate
        left = ticket.deadline - now
        if wait <= left:
            return None
        reason = f"its turn comes in {wait:.1f} s at {rate:.0f} tokens/s, its deadline in {left:.1f} s"
        return _refuse(Outcome.REJECTED_INFEASIBLE, wait - left, reason)


def _refuse(outcome: Outcome, wait: float, reason: str) -> Refusal:
    least, most = RETRY_AFTER
    return Refusal(outcome, min(max(wait, least), most), reason)
