"""The reason for lanes, on a virtual clock: short requests behind long ones, in front of a toy FCFS engine."""

from random import Random

from serving import spec
from serving.scheduling import Scheduler, make_scheduler
from tests.unit.scheduling.specs import lane, pool
from tests.unit.scheduling.toy_engine import Arrival, Engine, Result, run

LANES = (
    lane("short", weight=8),
    lane("long", weight=3, deadline=10.0, ttft=spec.Objective(seconds=1.0)),
    lane("batch", weight=1, deadline=600.0, ttft=spec.Objective(seconds=60.0)),
)
DEADLINES = {settings.name: settings.deadline for settings in LANES}
SECONDS = 120


def mix(seed: int, streamed: float = 1.0) -> list[Arrival]:
    """Short 64–100 tokens at 8/s, long 3000–7000 at 1.8/s, and 8 batch requests of 500–2000 every 10 s."""
    random = Random(seed)
    arrivals: list[Arrival] = []

    def add(at: float, name: str, low: int, high: int) -> None:
        arrivals.append((at, name, random.randint(low, high), 16, random.random() < streamed))

    for name, rate, low, high in (("short", 8.0, 64, 100), ("long", 1.8, 3000, 7000)):
        at = random.expovariate(rate)
        while at < SECONDS:
            add(at, name, low, high)
            at += random.expovariate(rate)
    for burst in range(5, SECONDS, 10):
        for _ in range(8):
            add(float(burst), "batch", 500, 2000)
    return sorted(arrivals)


def outcome(policy: str, arrivals: list[Arrival], replicas: int = 1) -> Result:
    scheduler = make_scheduler(pool(gateway_scheduler=policy), LANES, 1)
    return run(scheduler, {f"r{index}": Engine() for index in range(replicas)}, arrivals, DEADLINES, check=_credit)


def _credit(scheduler: Scheduler, now: float) -> None:
    assert all(view.outstanding_tokens >= 0 for view in scheduler.replica_view(now).values())


def good(result: Result) -> dict[str, int]:
    return {settings.name: result.good(settings.name, settings.ttft.seconds) for settings in LANES}


def test_short_requests_wait_half_as_long_and_nobody_pays_for_it() -> None:
    """There would be no reason to put Laneway in front of an engine."""
    for seed in range(3):
        arrivals = mix(seed)
        lanes, passthrough, static = (outcome(policy, arrivals) for policy in ("lanes", "passthrough", "static-fifo"))
        assert lanes.percentile("short", 0.95) * 2 <= passthrough.percentile("short", 0.95)
        assert lanes.percentile("short", 0.95) * 3.4 <= static.percentile("short", 0.99)
        ours, theirs = good(lanes), good(passthrough)
        assert sum(ours.values()) > sum(theirs.values())
        assert all(ours[name] >= 0.95 * theirs[name] for name in ours)
        assert len(lanes.ended) == len(arrivals), "everything was served"
        assert max(lanes.ended.values()) <= 1.01 * max(passthrough.ended.values()), "no bubbles in the engine"


def test_a_short_request_waits_behind_one_large_prompt_at_most_and_the_end_of_another() -> None:
    """A chat user would wait for documents that came after."""
    result = outcome("lanes", mix(0))
    for ticket in (ticket for ticket in result.offered if ticket.lane == "short"):
        released, first = ticket.released, result.first_token[ticket]
        assert released is not None
        ahead = [
            other
            for other in result.offered
            if other.lane == "long" and (other.released or 0) < released < result.first_token[other] <= first
        ]
        assert len(ahead) <= 2


def test_requests_that_do_not_stream_are_served_without_an_idle_engine() -> None:
    """A client that does not stream would hold credit until its last token, and the engine would idle."""
    arrivals = mix(1, streamed=0.3)
    lanes, passthrough = outcome("lanes", arrivals), outcome("passthrough", arrivals)
    assert len(lanes.ended) == len(arrivals)
    assert max(lanes.ended.values()) <= 1.02 * max(passthrough.ended.values())
    assert lanes.percentile("short", 0.95) * 1.5 <= passthrough.percentile("short", 0.95)


def test_under_long_overload_every_lane_is_served_and_no_engine_time_is_lost() -> None:
    """Overload would become an outage of the lowest lane, or of all."""
    arrivals = [(at / 2, name, tokens, output, streamed) for at, name, tokens, output, streamed in mix(2)]
    result = outcome("lanes", arrivals)
    served = {settings.name: len([t for t in result.ended if t.lane == settings.name]) for settings in LANES}
    assert len(result.ended) + len(result.refused) + len(result.expired) == len(arrivals)
    assert served["batch"] == 96
    assert served["short"] >= 0.95 * sum(1 for arrival in arrivals if arrival[1] == "short")
    assert result.busy_seconds >= 0.97 * SECONDS / 2


def test_timers_do_not_spin() -> None:
    """A gateway with nothing to do would use a core."""
    result = outcome("lanes", mix(0))
    assert result.wakes < 10 * len(result.offered)
