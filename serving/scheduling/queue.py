"""LaneQueue: one lane's backlog, bounded in requests and tokens, in deadline order.

Leaving frees room at once, however a ticket leaves: nothing dead stays in the accounts.
"""

from collections import OrderedDict
from itertools import chain, islice

from serving.scheduling.bucket import TokenBucket
from serving.scheduling.order import DeadlineOrder
from serving.scheduling.ticket import State, Ticket


class LaneQueue:
    """Tickets of one lane.

    Args:
        max_requests: bound on queued tickets.
        max_tokens: bound on their prompt tokens together.
        bucket: the lane's pending tokens; kept here.
        wait_limit: seconds after which a queued ticket counts as a breach, once.
    """

    def __init__(self, max_requests: int, max_tokens: int, bucket: TokenBucket, wait_limit: float) -> None:
        self.max_requests = max_requests
        self.max_tokens = max_tokens
        self.bucket = bucket
        self.wait_limit = wait_limit
        self.breaches = 0
        self._order = DeadlineOrder()
        # Both in arrival order; a linked dictionary, because a plain one scans its dead entries to find the first.
        self._in_time: OrderedDict[int, Ticket] = OrderedDict()
        self._late: OrderedDict[int, Ticket] = OrderedDict()

    def __len__(self) -> int:
        return len(self._order)

    @property
    def tokens(self) -> int:
        """Prompt tokens queued."""
        return self.bucket.pending

    @property
    def head(self) -> Ticket | None:
        """The earliest deadline."""
        return self._order.first

    @property
    def oldest(self) -> Ticket | None:
        """The earliest arrival."""
        return next(islice(chain(self._late.values(), self._in_time.values()), 1), None)

    def full(self, tokens: int) -> str | None:
        """Why `tokens` more are not taken; None if they are. What exceeds `max_tokens` alone is never taken."""
        if len(self._order) >= self.max_requests:
            return f"the queue holds {len(self._order)} requests, its bound"
        if self.tokens + tokens > self.max_tokens:
            return f"the queue holds {self.tokens} tokens, {tokens} more would exceed its bound of {self.max_tokens}"
        return None

    def push(self, ticket: Ticket, sequence: int, now: float) -> None:
        """Admits it; `sequence` grows with every arrival, over all lanes.

        Raises:
            ValueError: the queue is full (ask `full` first), or the ticket is not new.
        """
        if ticket.state is not State.NEW:
            raise ValueError(f"{ticket.request_id}: state is {ticket.state}, expected new")
        if reason := self.full(ticket.tokens):
            raise ValueError(f"{ticket.request_id}: {reason}")
        ticket.sequence = sequence
        ticket.admitted = now
        ticket.state = State.QUEUED
        self._order.add(ticket)
        self._in_time[sequence] = ticket
        self.bucket.add(ticket.tokens)

    def remove(self, ticket: Ticket, now: float) -> bool:
        """Takes it out, to release or to cancel it; False if it is not queued here."""
        if ticket.state is not State.QUEUED or not self._order.remove(ticket):
            return False
        self._leave(ticket, now)
        return True

    def expire(self, now: float) -> list[Ticket]:
        """Takes out all whose deadline is not after `now`."""
        due = self._order.remove_due(now)
        for ticket in due:
            self._leave(ticket, now)
        return due

    def drain(self, now: float) -> list[Ticket]:
        """Takes out all."""
        tickets = list(self._order)
        self._order = DeadlineOrder()
        for ticket in tickets:
            self._leave(ticket, now)
        return tickets

    def tokens_ahead(self, deadline: float) -> int:
        """Queued tokens that a newcomer of that deadline would wait for."""
        return self._order.tokens_before(deadline)

    def count_breaches(self, now: float) -> None:
        """Counts those whose wait limit has passed by `now`. Amortised O(1) a ticket."""
        while self._in_time:
            sequence, ticket = next(iter(self._in_time.items()))
            if ticket.waited(now) <= self.wait_limit:
                return
            del self._in_time[sequence]
            self._late[sequence] = ticket
            self.breaches += 1

    def overdue(self, ticket: Ticket, now: float) -> bool:
        """It has used the wait limit."""
        return ticket.waited(now) >= self.wait_limit

    def _leave(self, ticket: Ticket, now: float) -> None:
        ticket.state = State.GONE
        self.bucket.take(ticket.tokens)
        if self._in_time.pop(ticket.sequence, None) is None:
            del self._late[ticket.sequence]
        elif ticket.waited(now) > self.wait_limit:
            self.breaches += 1
