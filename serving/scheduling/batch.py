"""BatchScheduler, the `lanes` policy: which requests go out together, to which replica, and when.

Whenever a replica has credit, the next lane by token shares sends a micro-batch: its requests in deadline order up to
the bucket's threshold, at once, never waiting for company. A head that has used its lane's wait limit goes before the
shares' order, as long as its lane owes nothing. Deadline order inside a lane is strict: while a large head waits for
its seat, smaller ones of its lane wait behind it.
"""

from collections import OrderedDict

from serving import spec
from serving.scheduling.core import SchedulerCore
from serving.scheduling.credit import Replica
from serving.scheduling.shares import DeficitRoundRobin
from serving.scheduling.ticket import Batch, Ticket

REMEMBERED_PREFIXES = 65_536
"""Prefixes whose replica is remembered, most recently used ones; about 10 MB."""


class BatchScheduler(SchedulerCore):
    """See `Scheduler`."""

    def __init__(self, pool: spec.Pool, lanes: tuple[spec.Lane, ...], gateways: int) -> None:
        super().__init__(pool, lanes, gateways)
        weights = {lane.name: lane.weight for lane in lanes}
        self._shares = DeficitRoundRobin(weights, quantum=pool.batch_tokens, turn=pool.turn_tokens)
        self._prefixes: OrderedDict[int, Replica] = OrderedDict()

    def _choose(self, now: float) -> list[Batch]:
        batches: list[Batch] = []
        ready = self._ready()
        while True:
            waiting: dict[str, int] = {}
            takers: dict[str, Replica] = {}
            held: set[str] = set()
            for name, lane in self._lanes.items():
                if (head := lane.queue.head) is None:
                    self._shares.rest(name)
                    continue
                waiting[name] = head.tokens
                if (replica := self._replica_for(head, ready)) is not None:
                    takers[name] = replica
                elif self._engines_are_busy_with_large(head, ready):
                    held.add(name)
            chosen = self._overdue(takers, now) or self._shares.pick(waiting, takers.keys(), held)
            if chosen is None:
                return batches
            batches.append(self._send_batch(chosen, takers[chosen], now))

    def _send_batch(self, name: str, replica: Replica, now: float) -> Batch:
        """The lane's head and who fits beside it: within the threshold, under the credit, liking the same replica."""
        queue = self._lanes[name].queue
        sent: list[Ticket] = []
        tokens = 0
        while (ticket := queue.head) is not None and queue.bucket.fits(tokens, ticket.tokens):
            if sent and (not replica.takes(ticket) or self._preferred(ticket) not in (None, replica)):
                break
            tokens += ticket.tokens
            self._shares.charge(name, ticket.tokens)
            self._learn(ticket, replica)
            self._send(ticket, replica, now)
            sent.append(ticket)
        return self._batch(sent, replica, now)

    def _overdue(self, takers: dict[str, Replica], now: float) -> str | None:
        """The first lane, in the spec's order, whose head is overdue and that owes nothing."""
        for name in takers:
            queue = self._lanes[name].queue
            if queue.head is not None and queue.overdue(queue.head, now) and self._shares.may_jump(name):
                return name
        return None

    def _replica_for(self, ticket: Ticket, ready: list[Replica]) -> Replica | None:
        """Least outstanding tokens under the credit; the prefix's own replica unless it has too many more."""
        best = None
        for replica in ready:
            if replica.takes(ticket) and (best is None or replica.load() < best.load()):
                best = replica
        if best is None:
            return None
        own = self._preferred(ticket)
        if own is None or own is best or not own.takes(ticket):
            return best
        return own if own.outstanding <= best.outstanding + self._pool.affinity_tokens else best

    def _preferred(self, ticket: Ticket) -> Replica | None:
        """The ready replica that computed this prefix last."""
        own = self._prefixes.get(ticket.prefix) if ticket.prefix is not None else None
        return own if own is not None and own.ready else None

    def _learn(self, ticket: Ticket, replica: Replica) -> None:
        if ticket.prefix is None:
            return
        self._prefixes[ticket.prefix] = replica
        self._prefixes.move_to_end(ticket.prefix)
        if len(self._prefixes) > REMEMBERED_PREFIXES:
            self._prefixes.popitem(last=False)

    def _engines_are_busy_with_large(self, head: Ticket, ready: list[Replica]) -> bool:
        """A large head waits for a seat, and every replica computes a large prompt: holding others back until its
        turn idles no engine. Where the engine has lanes of its own, it keeps the shares itself."""
        if self._credit.per_lane or head.tokens <= self._credit.turn_tokens:
            return False
        return not any(replica.has_large_seat(head.lane) for replica in ready)

    def _wake(self, replica: Replica, head: Ticket) -> float | None:
        return replica.wake(head)

    def _deficit(self, lane: str) -> int:
        return self._shares.deficit(lane)
