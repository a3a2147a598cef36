"""Makes runs for tests, through the same writer that a replay uses."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from serving import spec as spec_file
from serving.timeline import Boundary, Outcome, Timeline
from serving.workload.record import Lateness, Run, RunFolder, Workload, read_run, write_run

SPEC = spec_file.load(Path(__file__).parents[3] / "laneway.yaml")


def timeline(
    number: int,
    *,
    lane: str = "interactive-short",
    prompt: int = 100,
    ttft: float | None = 0.05,
    outcome: Outcome = Outcome.COMPLETED,
    scheduled: float | None = None,
) -> Timeline:
    """A client's request, one every tenth of a second."""
    made = Timeline(f"request-{number}", Boundary.CLIENT, lane=lane, prompt_tokens=prompt, output_tokens=20)
    made.scheduled = number / 10 if scheduled is None else scheduled
    made.sent = made.scheduled + 0.001
    if ttft is not None:
        made.first_token = made.scheduled + ttft
        made.last_token = made.first_token + 0.2
    made.end(outcome, made.scheduled + (0.3 if ttft is None else ttft + 0.25))
    return made


def gateway_row(client: Timeline, *, queue: float) -> dict[str, object]:
    """The gateway's record of the same request, on a clock of its own."""
    made = Timeline(client.request_id, Boundary.GATEWAY, lane=client.lane, prompt_tokens=client.prompt_tokens)
    made.received, made.admitted = 5000.0, 5000.001
    made.released = made.admitted + queue
    made.dispatched = made.released + 0.001
    made.first_token = made.dispatched + 0.01
    made.end(Outcome.COMPLETED, made.first_token + 1)
    return made.record()


def run_folder(
    path: Path,
    timelines: Sequence[Timeline],
    *,
    settings: Mapping[str, str] | None = None,
    sha256: str = "a" * 64,
    distrust: tuple[str, ...] = (),
    gateway: Sequence[dict[str, object]] = (),
) -> RunFolder:
    """Writes a run's folder and reads it back."""
    path.mkdir()
    outcomes = [str(t.outcome) for t in timelines]
    run = Run(
        run_id=path.name,
        boundary=Boundary.CLIENT,
        started_at="2026-01-01T00:00:00.000+00:00",
        software={},
        spec_digest=None,
        objectives_digest=SPEC.digest,
        lanes=SPEC.lanes,
        strata=SPEC.strata,
        start_median=SPEC.rollout.start_median,
        target="http://127.0.0.1:1",
        workload=Workload(
            trace="t", format="test", sha256=sha256, seed=1, rate=None, speed=None, duration=None, max_output=None,
            max_prompt=None, max_total=None, unstreamed=0.0, ignore_eos=True, model="m",
        ),
        settings=dict(settings or {}),
        window=10.0,
        elapsed=12.0,
        offered=len(timelines),
        completed=outcomes.count("completed"),
        outcomes={outcome: outcomes.count(outcome) for outcome in set(outcomes)},
        send_lateness=Lateness(p50=0.001, p99=0.002, max=0.003),
        max_send_lateness=SPEC.replay.max_send_lateness,
        trusted=not distrust,
        distrust=distrust,
    )  # fmt: skip
    write_run(path, run, timelines, 0.0, gateway)
    return read_run(path)
