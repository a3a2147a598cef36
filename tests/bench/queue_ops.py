"""What the queue costs with 100,000 requests in it: `python -m tests.bench.queue_ops` prints a table.

Bars: enqueue + dequeue under 20 µs on average, expiry of 10,000 at once under 50 ms; a blocked `release` and
`next_wake` cost the same however much is queued.
"""

from collections.abc import Callable
from random import Random
from time import perf_counter

from serving import spec
from serving.scheduling import LaneQueue, Scheduler, Ticket, TokenBucket, make_scheduler

QUEUED = 100_000
ROUNDS = 20_000
BOUND = spec.QueueBounds(max_requests=1_000_000, max_tokens=100_000_000)


def tickets(number: int, jitter: float, lane: str = "a", start: float = 0.0) -> list[Ticket]:
    """Arrivals 10 µs apart, 64–100 tokens, deadlines 600 s away and up to `jitter` seconds more."""
    random = Random(1)
    return [
        Ticket("r", lane, random.randint(64, 100), start, start + 600.0 + i * 1e-5 + random.random() * jitter)
        for i in range(number)
    ]


def queue_round_trip(jitter: float) -> float:
    """Mean µs of `push` + head + `remove` with 100,000 queued."""
    queue = LaneQueue(1_000_000, 100_000_000, TokenBucket(256), 1.0)
    everyone = tickets(QUEUED + ROUNDS, jitter)
    for sequence, ticket in enumerate(everyone[:QUEUED]):
        queue.push(ticket, sequence, 0.0)

    def work() -> None:
        for sequence, ticket in enumerate(everyone[QUEUED:], QUEUED):
            queue.push(ticket, sequence, 0.0)
            head = queue.head
            assert head is not None
            queue.remove(head, 0.0)

    return timed(work) / ROUNDS * 1e6


def loaded(queued: int, jitter: float = 1.0) -> tuple[Scheduler, list[Ticket]]:
    """A scheduler of the default lanes' shape with so many queued and no credit left."""
    lanes = tuple(
        spec.Lane(name=name, ttft=spec.Objective(seconds=1.0), deadline=600.0, weight=weight, queue=BOUND)
        for name, weight in (("a", 8), ("b", 3), ("c", 1))
    )
    pool = spec.Pool(name="p", replicas=(spec.Replica(url="http://127.0.0.1:1"),))
    scheduler = make_scheduler(pool, lanes, 1)
    for name in ("one", "two"):
        scheduler.add_replica(name, 0.0)
    everyone = tickets(queued, jitter)
    for ticket in everyone:
        assert scheduler.submit(ticket, 0.0) is None
    sent = [ticket for batch in scheduler.release(0.0) for ticket in batch.tickets]
    return scheduler, sent


def scheduler_round_trip() -> float:
    """Mean µs of `submit`, and of one request's part of `first_token`, `finished` and `release`, with 100,000 queued
    and a measured drain rate."""
    scheduler, sent = loaded(QUEUED)
    fresh = tickets(ROUNDS, 1.0)
    now = 0.0

    def work() -> None:
        nonlocal now
        for ticket in fresh:
            now += 1e-3
            done = sent.pop(0)
            scheduler.first_token(done, now)
            scheduler.finished(done, now)
            scheduler.submit(ticket, now)
            sent.extend(ticket for batch in scheduler.release(now) for ticket in batch.tickets)

    return timed(work) / ROUNDS * 1e6


def blocked(queued: int) -> float:
    """Mean µs of a `release` that can do nothing, and `next_wake`."""
    scheduler, _ = loaded(queued)

    def work() -> None:
        for _ in range(1000):
            assert not scheduler.release(0.0)
            scheduler.next_wake(0.0)

    return timed(work) / 1000 * 1e6


def expiry() -> float:
    """ms to expire 10,000 of 110,000 at once."""
    scheduler, _ = loaded(QUEUED)
    for i in range(10_000):
        scheduler.submit(Ticket("r", "a", 80, 0.0, 1.0 + i * 1e-6), 0.0)
    gone = 0

    def work() -> None:
        nonlocal gone
        gone = len(scheduler.expire(5.0))

    milliseconds = timed(work) * 1e3
    assert gone == 10_000
    return milliseconds


def timed(work: Callable[[], None]) -> float:
    """Seconds."""
    start = perf_counter()
    work()
    return perf_counter() - start


def main() -> None:
    """Prints the table."""
    rows = [
        ("queue: enqueue + dequeue, deadlines in order of arrival", queue_round_trip(0.0), "µs", "< 20"),
        ("queue: enqueue + dequeue, deadlines at random", queue_round_trip(600.0), "µs", "< 20"),
        ("scheduler: submit, release, first token, end", scheduler_round_trip(), "µs", ""),
        ("scheduler: blocked release + next_wake, 1,000 queued", blocked(1000), "µs", ""),
        ("scheduler: blocked release + next_wake, 100,000 queued", blocked(QUEUED), "µs", "as above"),
        ("scheduler: expiry of 10,000 at once", expiry(), "ms", "< 50"),
    ]
    print(f"{QUEUED:,} requests queued\n")
    for name, value, unit, bar in rows:
        print(f"{name:<58} {value:8.1f} {unit}  {bar}")


if __name__ == "__main__":
    main()
