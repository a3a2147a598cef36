"""One replay from beginning to end: probe the target, make the requests, send them, write the run's folder."""

import asyncio
import hashlib
import platform
import statistics
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import aiohttp
import orjson

from serving.spec import Spec
from serving.telemetry.tracing import Tracing
from serving.timeline import Boundary, Outcome, Timeline
from serving.workload import probe
from serving.workload.client import Line, open_session
from serving.workload.client_timings import report_timings
from serving.workload.gateway_log import rows_of
from serving.workload.prompts import Cost, PromptMaker, load_tokenizer
from serving.workload.record import Lateness, Run, Workload, write_run
from serving.workload.replay import Progress, Replayed, replay, send_lateness
from serving.workload.schedule import Address, Schedule, Shape, prepare, shape_trace
from serving.workload.summary import quantile
from serving.workload.trace import Trace, TraceRequest

UNPROBED_BYTES_PER_TOKEN = 4.0
"""Where no probe may be sent: the rule of thumb for English text and large vocabularies."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything that a replay is asked to do."""

    target: str
    out: Path
    seed: int
    shape: Shape
    run_id: str
    model: str | None = None
    key: str | None = None
    tokenizer: Path | None = None
    ignore_eos: bool = True
    probe: bool = True
    timeout: float = 900.0
    """Of one request, seconds."""
    grace: float = 120.0
    """Seconds to wait for answers after the last request was sent."""
    gateway_log: Path | None = None
    report_timings: bool = False
    settings: Mapping[str, str] | None = None


async def run_replay(
    plan: Plan,
    trace: Trace,
    spec: Spec,
    stop: asyncio.Event,
    *,
    say: Callable[[str], None],
    tell: Callable[[Progress], None] | None = None,
) -> Run:
    """Replays and writes `run.json`, `timelines.jsonl` and the joined gateway rows into `plan.out`.

    Args:
        say: told what is going on before and after the load.
        tell: told how far the load is.

    Raises:
        TargetError: the target does not answer.
        ScheduleError: the trace cannot be shaped so.
        TokenizerError: the tokenizer cannot be read.
    """
    tracing = Tracing("laneway-replay")
    try:
        async with open_session(plan.timeout) as session:
            target = await probe.ask(session, plan.target, plan.key, plan.model)
            address = Address(target.model, plan.ignore_eos, plan.key)
            shape, schedule = _shape(plan, trace, target, spec)
            prompts = await _prompts(session, plan, address)
            say(f"making {len(schedule.requests)} requests for {target.model}")
            prepared = list(prepare(schedule.requests, address, prompts, lambda: uuid.uuid4().hex, spec))
            line = Line(session, f"{probe.api_url(plan.target)}/chat/completions", target.model, plan.run_id, tracing)
            started_at = datetime.now(UTC)
            done = await replay(prepared, line, grace=plan.grace, stop=stop, tell=tell)
            if plan.report_timings:
                said, believed = await report_timings(session, plan.target, plan.key, done.timelines)
                say(f"client timings: {believed} of {said} were accepted")
    finally:
        tracing.close()
    rows = await rows_of(plan.gateway_log, done.timelines) if plan.gateway_log else []
    run = _run(plan, trace, shape, schedule, target, spec, done, started_at, len(rows))
    write_run(plan.out, run, done.timelines, done.origin, rows)
    return run


def _shape(plan: Plan, trace: Trace, target: probe.Target, spec: Spec) -> tuple[Shape, Schedule]:
    """The shape within the model's length, as the target or else the spec has it."""
    served = spec.model(target.model)
    shape = replace(plan.shape, max_total=target.max_model_len or (served.max_model_len if served else None))
    return shape, shape_trace(trace, shape, plan.seed)


async def _prompts(session: aiohttp.ClientSession, plan: Plan, address: Address) -> PromptMaker:
    """Prompts of this run's own text, measured against the target unless that is switched off."""
    salt = f"{plan.seed}:{plan.run_id}"
    maker = PromptMaker(salt, Cost(UNPROBED_BYTES_PER_TOKEN), plan.tokenizer)
    if not plan.probe:
        return maker
    if plan.tokenizer is None:
        return PromptMaker(salt, await probe.word_cost(session, plan.target, address, maker))
    text = maker.text(probe.PROBE_TOKENS[0], "probe").lstrip(" ")
    tokens = len(load_tokenizer(plan.tokenizer).encode(text, add_special_tokens=False).ids)
    template = await probe.template_tokens(session, plan.target, address, text, tokens)
    return PromptMaker(salt, Cost(UNPROBED_BYTES_PER_TOKEN, template), plan.tokenizer)


def _run(
    plan: Plan,
    trace: Trace,
    shape: Shape,
    schedule: Schedule,
    target: probe.Target,
    spec: Spec,
    done: Replayed,
    started_at: datetime,
    gateway_rows: int,
) -> Run:
    late = send_lateness(done.timelines)
    lateness = None
    if late:
        lateness = Lateness(p50=quantile(late, 0.5) or 0.0, p99=quantile(late, 0.99) or 0.0, max=late[-1])
    distrust = distrust_of(lateness, spec.replay.max_send_lateness, done.interrupted)
    outcomes = [str(timeline.outcome) for timeline in done.timelines]
    return Run(
        run_id=plan.run_id,
        boundary=Boundary.CLIENT,
        started_at=started_at.isoformat(timespec="milliseconds"),
        software={
            "laneway": version("laneway"),
            "python": platform.python_version(),
            "aiohttp": aiohttp.__version__,
            "platform": platform.platform(),
        },
        spec_digest=target.spec_digest,
        objectives_digest=spec.digest,
        lanes=spec.lanes,
        strata=spec.strata,
        start_median=spec.rollout.start_median,
        target=plan.target,
        workload=Workload(
            trace=trace.source,
            format=trace.format,
            sha256=digest(schedule.requests),
            seed=plan.seed,
            rate=shape.rate,
            speed=shape.speed,
            duration=shape.duration,
            max_output=shape.max_output,
            max_prompt=shape.max_prompt,
            max_total=shape.max_total,
            unstreamed=shape.unstreamed,
            ignore_eos=plan.ignore_eos,
            model=target.model,
            skipped_rows=trace.skipped_rows,
            guessed_outputs=trace.guessed_outputs,
            capped_prompts=schedule.capped_prompts,
            capped_outputs=schedule.capped_outputs,
        ),
        settings={**target.settings, **(plan.settings or {})},
        window=round(schedule.window, 6),
        elapsed=round(done.elapsed, 6),
        offered=len(done.timelines),
        completed=outcomes.count(str(Outcome.COMPLETED)),
        outcomes={outcome: outcomes.count(outcome) for outcome in sorted(set(outcomes))},
        send_lateness=lateness,
        max_send_lateness=spec.replay.max_send_lateness,
        trusted=not distrust,
        distrust=distrust,
        gateway_rows=gateway_rows,
        prompt_token_error=_prompt_token_error(done.timelines),
    )


def distrust_of(lateness: Lateness | None, limit: float, interrupted: bool) -> tuple[str, ...]:
    """Why a run's figures are not to be trusted; empty where they are."""
    reasons: list[str] = []
    if lateness is None:
        reasons.append("no request was sent")
    elif lateness.p99 > limit:
        reasons.append(
            f"requests were sent late: p99 {lateness.p99 * 1000:.1f} ms, expected at most {limit * 1000:g} ms"
        )
    if interrupted:
        reasons.append("the run was stopped, or its grace ended, before every request was answered")
    return tuple(reasons)


def digest(requests: Sequence[TraceRequest]) -> str:
    """SHA-256 of a shaped schedule: equal where the same requests are due at the same times."""
    rows = [
        (round(r.arrival, 6), r.prompt_tokens, r.output_tokens, r.tier, r.streamed, r.prefix, r.prefix_block_tokens)
        for r in requests
    ]
    return hashlib.sha256(orjson.dumps(rows)).hexdigest()


def _prompt_token_error(timelines: Sequence[Timeline]) -> float | None:
    errors = [
        abs(said - wanted) / wanted
        for timeline in timelines
        if isinstance(said := timeline.extra.get("usage_prompt_tokens"), int) and (wanted := timeline.prompt_tokens)
    ]
    return round(statistics.median(errors), 4) if errors else None
