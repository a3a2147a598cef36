"""Replays a schedule open loop: every request goes out when it is due, whatever became of the ones before.

A closed loop slows down with the engine and so hides its overload. Here the schedule is kept, `scheduled` and `sent`
are both stamped, latency counts from the schedule, and a run whose client could not keep up says so.
"""

import asyncio
import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from serving.timeline import Timeline
from serving.workload.client import Line, Prepared, send

LEAD_SECONDS = 0.2
"""Between the start of the clock and the first moment that a request may be due: room for the loop to settle."""
TIMER_SECONDS = 0.0015
"""libuv's timers have a resolution of 1 ms and wake late: sleep until this much before, and yield until it is time."""
PROGRESS_SECONDS = 1.0
"""Between two updates of the progress bar: drawing takes some milliseconds that requests would wait for."""
STOP_SECONDS = 0.2
"""At most so long until a stop is heard."""


@dataclass(frozen=True, slots=True)
class Replayed:
    """What came back."""

    timelines: tuple[Timeline, ...]
    """One for every request whose time came, in order of schedule. Stamps are `time.monotonic`'s."""
    origin: float
    """The run's start on that clock."""
    elapsed: float
    """Seconds to the last answer's end."""
    interrupted: bool
    """It was stopped before every request was sent and answered."""


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a run is."""

    due: int
    ended: int
    total: int


async def replay(
    prepared: Sequence[Prepared],
    line: Line,
    *,
    grace: float,
    stop: asyncio.Event,
    tell: Callable[[Progress], None] | None = None,
) -> Replayed:
    """Sends every request at its time and waits for the answers.

    Args:
        prepared: in order of `due`.
        grace: seconds after the last request was sent in which answers are awaited; then their clients leave.
        stop: set it to end the run early; what is on its way is cancelled, and nothing that was sent is lost.
        tell: called about once a second.
    """
    tasks: list[asyncio.Task[Timeline]] = []
    running: set[asyncio.Task[Timeline]] = set()
    loop = asyncio.get_running_loop()
    with _no_collections():
        start = time.monotonic() + LEAD_SECONDS
        report = loop.create_task(_report(tell, tasks, running, len(prepared))) if tell else None
        for request in prepared:
            if not await _until(start + request.due, stop):
                break
            task = loop.create_task(send(line, request, start))
            tasks.append(task)
            running.add(task)
            task.add_done_callback(running.discard)
        patience = time.monotonic() + grace
        while running and not stop.is_set() and (rest := patience - time.monotonic()) > 0:
            await asyncio.wait(running, timeout=min(rest, STOP_SECONDS))
        interrupted = len(tasks) < len(prepared) or bool(running)
        for task in tuple(running):
            task.cancel()
        timelines = await asyncio.gather(*tasks)
        if report is not None:
            report.cancel()
        if tell:
            tell(Progress(len(tasks), len(tasks), len(prepared)))
    closed = [timeline.closed for timeline in timelines if timeline.closed is not None]
    return Replayed(tuple(timelines), start, max(closed, default=start) - start, interrupted)


async def _until(due: float, stop: asyncio.Event) -> bool:
    """Waits for a moment of the monotonic clock; False if the run is stopped before."""
    while (rest := due - time.monotonic()) > 0:
        if stop.is_set():
            return False
        # Long waits in slices, so that a stop is heard; the last stretch without the timer.
        await asyncio.sleep(min(rest - TIMER_SECONDS, STOP_SECONDS) if rest > TIMER_SECONDS else 0)
    return not stop.is_set()


async def _report(
    tell: Callable[[Progress], None],
    tasks: Sequence[asyncio.Task[Timeline]],
    running: set[asyncio.Task[Timeline]],
    total: int,
) -> None:
    while True:
        tell(Progress(len(tasks), len(tasks) - len(running), total))
        await asyncio.sleep(PROGRESS_SECONDS)


@contextmanager
def _no_collections() -> Iterator[None]:
    """No garbage collection: one over the prepared bodies takes longer than a request may be late."""
    was_enabled = gc.isenabled()
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.unfreeze()
        if was_enabled:
            gc.enable()


def send_lateness(timelines: Sequence[Timeline]) -> list[float]:
    """sent − scheduled of every request that was sent, less the time to open its connection; seconds, sorted.

    Opening is the target's and the network's share, not the client's lateness; latencies count from the schedule and
    hold it all.
    """
    return sorted(
        timeline.sent - timeline.scheduled - float(timeline.extra.get("connect", 0.0))
        for timeline in timelines
        if timeline.sent is not None and timeline.scheduled is not None
    )
