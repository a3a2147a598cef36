"""One scheduler on the event loop: its clock, its timer, and the requests that wait for it.

The scheduler is pure and decides; this turns its decisions into calls on the waiting requests. Everything here is
synchronous and runs on the event loop, so no decision is ever seen half made.
"""

import asyncio
import time
from collections.abc import Callable
from typing import Protocol

from serving.scheduling import Batch, Refusal, Scheduler, Ticket
from serving.scheduling.ticket import State


class Waiter(Protocol):
    """A request that waits for its release. The calls come on the event loop and must not block."""

    def released(self, replica: str, batch: Batch, now: float) -> None:
        """It may go to this replica, now."""

    def expired(self, now: float) -> None:
        """Its deadline passed in the queue."""

    def drained(self, now: float, reason: str) -> None:
        """What is queued must leave: the gateway ends, or a new spec has no such queue."""

    def refused(self, refusal: Refusal) -> None:
        """The queue that it was moved to does not take it."""

    def moved(self, successor: "Dispatch") -> None:
        """It waits in another queue from now on; called before that can release it."""


class Dispatch:
    """The queue of one (model, pool)."""

    def __init__(
        self,
        model: str,
        pool: str,
        scheduler: Scheduler,
        on_batch: Callable[["Dispatch", Batch], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.model = model
        self.pool = pool
        self.scheduler = scheduler
        self._on_batch = on_batch
        self._clock = clock
        self._waiters: dict[Ticket, Waiter] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._pumping = False

    def submit(self, ticket: Ticket, waiter: Waiter) -> Refusal | None:
        """Queues the ticket; `waiter.released` may be called before this returns."""
        refusal = self.scheduler.submit(ticket, self._clock())
        if refusal is None:
            self._waiters[ticket] = waiter
            self.pump()
        return refusal

    def cancel(self, ticket: Ticket) -> None:
        """The client left. Harmless for a ticket that is not queued."""
        if self._waiters.pop(ticket, None) is not None:
            self.scheduler.cancel(ticket, self._clock())
            self.pump()

    def first_token(self, ticket: Ticket, now: float) -> None:
        """Its prefill is over."""
        self.scheduler.first_token(ticket, now)
        self._pump_if_queued()

    def finished(self, ticket: Ticket) -> None:
        """It left its replica, whatever became of it."""
        self.scheduler.finished(ticket, self._clock())
        self._pump_if_queued()

    def drain(self, reason: str) -> None:
        """Everything queued leaves."""
        now = self._clock()
        for ticket in self.scheduler.drain(now):
            waiter = self._waiters.pop(ticket, None)
            if waiter is not None:
                waiter.drained(now, reason)

    def move_queue(self, successor: "Dispatch") -> None:
        """Hands what is queued to the dispatch of a new spec. Tickets of a lane that it does not have leave."""
        now = self._clock()
        lanes = successor.scheduler.lanes()
        for ticket in self.scheduler.drain(now):
            waiter = self._waiters.pop(ticket, None)
            if waiter is None:
                continue
            if ticket.lane not in lanes:
                waiter.drained(now, f"lane {ticket.lane!r} is no longer served")
                continue
            ticket.state = State.NEW  # to the other scheduler it is
            waiter.moved(successor)
            refusal = successor.submit(ticket, waiter)
            if refusal is not None:
                waiter.refused(refusal)

    def close(self) -> None:
        """Stops the timer."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _pump_if_queued(self) -> None:
        """Room was made: with an empty queue, nobody can use it, and a look at every replica is saved."""
        if self._waiters:
            self.pump()

    def pump(self) -> None:
        """Ends what has expired, releases what may go, and sets the timer for when something can change by itself."""
        if self._pumping:  # a waiter that leaves while it is told: the outer call sees the change
            return
        self._pumping = True
        try:
            now = self._clock()
            for ticket in self.scheduler.expire(now):
                waiter = self._waiters.pop(ticket, None)
                if waiter is not None:
                    waiter.expired(now)
            for batch in self.scheduler.release(now):
                self._on_batch(self, batch)
                for ticket in batch.tickets:
                    waiter = self._waiters.pop(ticket, None)
                    if waiter is not None:
                        waiter.released(batch.replica, batch, now)
                    else:
                        self.scheduler.finished(ticket, now)
            self._arm(now)
        finally:
            self._pumping = False

    def _arm(self, now: float) -> None:
        wake = self.scheduler.next_wake(now)
        if self._timer is not None:
            if wake is not None and self._timer.when() - now <= wake - now and not self._timer.cancelled():
                return  # it fires early enough, and will look again
            self._timer.cancel()
            self._timer = None
        if wake is not None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(max(0.0, wake - now), self._fire)

    def _fire(self) -> None:
        self._timer = None
        self.pump()
