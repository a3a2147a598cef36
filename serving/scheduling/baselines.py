"""The policies to beat: `passthrough`, which only forwards, and `static-fifo`, which practice starts from.

Both keep the same queues, bounds, deadlines and cancellation as the lanes; only who leaves when differs.
"""

from serving.scheduling.core import SchedulerCore
from serving.scheduling.credit import Replica
from serving.scheduling.ticket import Batch, Ticket


class Passthrough(SchedulerCore):
    """Every request goes at once to the ready replica with the least outstanding tokens; nothing queues unless no
    replica is ready."""

    def _choose(self, now: float) -> list[Batch]:
        batches = []
        while (ticket := self._oldest()) is not None:
            replica = min(self._ready(), key=Replica.load)
            self._send(ticket, replica, now)
            batches.append(self._batch([ticket], replica, now))
        return batches


class StaticFifo(SchedulerCore):
    """Batches of up to `pool.static_batch` by arrival over all lanes, at once with what is there; a replica gets its
    next one only when the whole batch has ended."""

    def _choose(self, now: float) -> list[Batch]:
        batches = []
        for replica in self._ready():
            if replica.in_flight:
                continue
            tickets: list[Ticket] = []
            while len(tickets) < self._pool.static_batch and (ticket := self._oldest()) is not None:
                self._send(ticket, replica, now)
                tickets.append(ticket)
            if tickets:
                batches.append(self._batch(tickets, replica, now))
        return batches
