"""A toy FCFS engine on a virtual clock: what vLLM does with a step's token budget, as far as waiting goes.

Running requests first (each takes all the budget that it can), then waiting ones in order; a step lasts as long as its
tokens, their context and its decodes say. The coefficients are those of the tiny model's measured step times.
"""

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import count

from serving.scheduling import Batch, Scheduler, Ticket


@dataclass(eq=False)
class Job:
    """One request in the engine."""

    ticket: Ticket
    output: int
    computed: int = 0
    produced: int = 0


@dataclass
class Step:
    """What one engine step computes: prompt chunks and decodes."""

    chunks: list[tuple[Job, int]]
    decodes: list[Job]

    @property
    def seconds(self) -> float:
        """ms = 1.87 + 0.0133·P + 0.073·decodes + 1.9e-4·their context + 2.5e-5·Σ chunk·context + 0.83·prefills."""
        tokens = sum(chunk for _, chunk in self.chunks)
        context = sum(chunk * (job.computed + chunk / 2) for job, chunk in self.chunks)
        decode_context = sum(job.computed + job.produced for job in self.decodes)
        return 1e-3 * (
            1.87
            + 0.0133 * tokens
            + 0.073 * len(self.decodes)
            + 1.9e-4 * decode_context
            + 2.5e-5 * context
            + 0.83 * len(self.chunks)
        )


@dataclass
class Engine:
    """One replica."""

    step_tokens: int = 2048
    max_num_seqs: int = 256
    waiting: list[Job] = field(default_factory=list)
    running: list[Job] = field(default_factory=list)
    busy_seconds: float = 0.0

    def plan(self) -> Step | None:
        """The next step; None when there is nothing to do."""
        budget = self.step_tokens
        step = Step([], [])
        for job in self.running:
            if job.computed < job.ticket.tokens:
                chunk = min(budget, job.ticket.tokens - job.computed)
                if chunk:
                    step.chunks.append((job, chunk))
                budget -= chunk
            elif budget:
                step.decodes.append(job)
                budget -= 1
        while self.waiting and budget and len(self.running) < self.max_num_seqs:
            job = self.waiting.pop(0)
            self.running.append(job)
            chunk = min(budget, job.ticket.tokens)
            step.chunks.append((job, chunk))
            budget -= chunk
        return step if step.chunks or step.decodes else None

    def complete(self, step: Step) -> tuple[list[Job], list[Job]]:
        """Applies a step; who got a first token by it, and who ended."""
        first, ended = [], []
        for job, chunk in step.chunks:
            job.computed += chunk
            if job.computed == job.ticket.tokens:
                job.produced = 1
                first.append(job)
        for job in step.decodes:
            job.produced += 1
        for job in [job for job in self.running if job.produced >= job.output]:
            self.running.remove(job)
            ended.append(job)
        return first, ended


@dataclass
class Result:
    """What happened to every ticket of a run."""

    offered: list[Ticket] = field(default_factory=list)
    refused: list[Ticket] = field(default_factory=list)
    expired: list[Ticket] = field(default_factory=list)
    first_token: dict[Ticket, float] = field(default_factory=dict)
    ended: dict[Ticket, float] = field(default_factory=dict)
    batches: list[tuple[float, Batch]] = field(default_factory=list)
    wakes: int = 0
    busy_seconds: float = 0.0

    def ttft(self, lane: str) -> list[float]:
        """Sorted, seconds; no first token is +∞."""
        tickets = [ticket for ticket in self.offered if ticket.lane == lane]
        return sorted(self.first_token.get(ticket, float("inf")) - ticket.received for ticket in tickets)

    def percentile(self, lane: str, share: float) -> float:
        """Nearest-rank percentile of the lane's TTFT, seconds."""
        values = self.ttft(lane)
        return values[min(len(values) - 1, int(share * len(values)))]

    def good(self, lane: str, objective: float) -> int:
        """Requests of the lane with a first token within the objective."""
        return sum(1 for value in self.ttft(lane) if value <= objective)


Arrival = tuple[float, str, int, int, bool]
"""Seconds, lane, prompt tokens, output tokens, streamed."""


def run(
    scheduler: Scheduler,
    engines: dict[str, Engine],
    arrivals: list[Arrival],
    deadlines: dict[str, float],
    latency: float = 0.003,
    until: float = 1e9,
    check: Callable[[Scheduler, float], None] | None = None,
) -> Result:
    """Drives a scheduler as the gateway does: an event, then `expire` and `release`, then a timer for `next_wake`.

    `latency` is the time one way between gateway and engine, seconds.
    """
    result = Result()
    events: list[tuple[float, int, Callable[[float], None]]] = []
    order = count()
    steps: dict[str, Step | None] = dict.fromkeys(engines)
    timer: list[float | None] = [None]

    def at(time: float, action: Callable[[float], None]) -> None:
        heapq.heappush(events, (time, next(order), action))

    outputs: dict[Ticket, int] = {}

    def arrive(lane: str, tokens: int, output: int, streamed: bool) -> Callable[[float], None]:
        def action(now: float) -> None:
            ticket = Ticket(
                f"r{len(result.offered)}", lane, tokens, received=now, deadline=now + deadlines[lane], streamed=streamed
            )
            outputs[ticket] = output
            result.offered.append(ticket)
            if scheduler.submit(ticket, now) is not None:
                result.refused.append(ticket)

        return action

    def begin(name: str, now: float) -> None:
        if steps[name] is None and (step := engines[name].plan()) is not None:
            steps[name] = step
            engines[name].busy_seconds += step.seconds
            at(now + step.seconds, lambda then: end(name, then))

    def end(name: str, now: float) -> None:
        step = steps[name]
        assert step is not None
        steps[name] = None
        first, ended = engines[name].complete(step)
        for job in first:
            if job.ticket.streamed:
                at(now + latency, partial(tell_first, job.ticket))
            else:
                result.first_token[job.ticket] = now + latency
        for job in ended:
            at(now + latency, partial(tell_end, job.ticket))
        begin(name, now)

    def tell_first(ticket: Ticket, now: float) -> None:
        result.first_token[ticket] = now
        scheduler.first_token(ticket, now)

    def tell_end(ticket: Ticket, now: float) -> None:
        result.ended[ticket] = now
        scheduler.finished(ticket, now)

    def deliver(name: str, ticket: Ticket) -> Callable[[float], None]:
        def action(now: float) -> None:
            engines[name].waiting.append(Job(ticket, outputs[ticket]))
            begin(name, now)

        return action

    for name in engines:
        scheduler.add_replica(name, 0.0)
    for time, lane, tokens, output, streamed in arrivals:
        at(time, arrive(lane, tokens, output, streamed))
    while events and events[0][0] <= until:
        now, _, action = heapq.heappop(events)
        action(now)
        result.expired += scheduler.expire(now)
        for batch in scheduler.release(now):
            result.batches.append((now, batch))
            for ticket in batch.tickets:
                at(now + latency, deliver(batch.replica, ticket))
        if check is not None:
            check(scheduler, now)
        wake = scheduler.next_wake(now)
        if wake is not None and wake <= until and (timer[0] is None or timer[0] <= now or wake < timer[0]):
            timer[0] = wake
            result.wakes += 1
            at(wake, lambda then: None)
    result.busy_seconds = sum(engine.busy_seconds for engine in engines.values())
    return result
