"""From a trace to requests that only wait for their time: rescaled, cut, capped, every byte ready. Pure.

A body is made before the run, not when it is due: making 7000 tokens of text takes longer than a request may be late.
"""

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import orjson

from serving.lanes import choose_lane
from serving.spec import Spec
from serving.workload.client import Prepared
from serving.workload.prompts import PromptMaker
from serving.workload.trace import Tier, Trace, TraceRequest

TEMPLATE_ROOM_TOKENS = 64
"""Left free below a model's length: a prompt made by bytes per token can be a few tokens longer than wanted."""


class ScheduleError(ValueError):
    """The trace cannot be replayed as asked for."""


@dataclass(frozen=True, slots=True)
class Shape:
    """How a trace is bent to fit an engine."""

    rate: float | None = None
    """Mean arrivals a second over the replayed part; the pattern stays."""
    speed: float | None = None
    """The trace's time runs so many times as fast."""
    duration: float | None = None
    """Seconds after which no request starts, on the replay's clock."""
    max_output: int | None = None
    """Output tokens at most."""
    max_prompt: int | None = None
    """Prompt tokens at most: a longer prompt is shortened, not dropped, so that the arrivals stay."""
    max_total: int | None = None
    """Prompt and output tokens together at most, room for a chat template included: the model's length."""
    unstreamed: float = 0.0
    """Share of the requests that ask for a whole answer."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """Shaped requests, in order of arrival."""

    requests: tuple[TraceRequest, ...]
    window: float
    """Seconds in which requests start."""
    capped_prompts: int
    capped_outputs: int


def shape_trace(trace: Trace, shape: Shape, seed: int) -> Schedule:
    """Applies the shape: time first, then the cut, then the caps.

    Raises:
        ScheduleError: rate and speed both given, or nothing is left within the duration.
    """
    if shape.rate is not None and shape.speed is not None:
        raise ScheduleError(f"rate is {shape.rate:g} and speed is {shape.speed:g}, expected only one of them")
    speed = shape.speed or 1.0
    if shape.rate is not None:
        speed = shape.rate / _mean_rate(trace, shape)
    kept = [request for request in trace.requests if shape.duration is None or request.arrival / speed < shape.duration]
    if not kept:
        raise ScheduleError(
            f"{trace.source}: no request within duration {shape.duration:g} s, expected a longer time"
            if shape.duration is not None
            else f"{trace.source}: holds no request"
        )
    streams = random.Random(f"unstreamed:{seed}")
    shaped = tuple(
        _fitted(
            replace(
                request,
                arrival=request.arrival / speed,
                streamed=request.streamed and not streams.random() < shape.unstreamed,
            ),
            shape,
        )
        for request in kept
    )
    window = min(shape.duration, trace.span / speed) if shape.duration is not None else trace.span / speed
    return Schedule(
        requests=shaped,
        # A single request has no span of its own; a rate over nothing would be infinite.
        window=max(window, shaped[-1].arrival, 1.0),
        capped_prompts=sum(a.prompt_tokens != b.prompt_tokens for a, b in zip(kept, shaped, strict=True)),
        capped_outputs=sum(a.output_tokens != b.output_tokens for a, b in zip(kept, shaped, strict=True)),
    )


def _mean_rate(trace: Trace, shape: Shape) -> float:
    """Arrivals a second of the part that will be replayed, on the trace's clock."""
    count = len(trace.requests)
    if shape.rate is not None and shape.duration is not None:
        count = min(count, max(2, round(shape.rate * shape.duration)))
    span = trace.requests[count - 1].arrival - trace.requests[0].arrival
    if count < 2 or span <= 0:
        raise ScheduleError(f"{trace.source}: {count} request(s) at one moment have no rate, expected --speed")
    return (count - 1) / span


def _fitted(request: TraceRequest, shape: Shape) -> TraceRequest:
    """Capped to what the shape allows. Of a model's length the output gets half at most."""
    outputs = [request.output_tokens or 1]
    prompts = [request.prompt_tokens]
    if shape.max_output is not None:
        outputs.append(shape.max_output)
    if shape.max_prompt is not None:
        prompts.append(shape.max_prompt)
    if shape.max_total is not None:
        outputs.append(max(1, shape.max_total // 2))
        prompts.append(max(1, shape.max_total - min(outputs) - TEMPLATE_ROOM_TOKENS))
    return replace(request, prompt_tokens=min(prompts), output_tokens=min(outputs))


@dataclass(frozen=True, slots=True)
class Address:
    """What is the same in every request of a run."""

    model: str
    ignore_eos: bool
    key: str | None = None
    """API key; only ever in the header."""


def prepare(
    requests: Sequence[TraceRequest],
    address: Address,
    prompts: PromptMaker,
    new_id: Callable[[], str],
    spec: Spec,
) -> Iterable[Prepared]:
    """Makes each request's bytes. `new_id` gives request ids."""
    for number, request in enumerate(requests):
        request_id = new_id()
        headers = {
            "content-type": "application/json",
            "accept": "text/event-stream" if request.streamed else "application/json",
            "accept-encoding": "identity",
            "x-request-id": request_id,
        }
        if address.key:
            headers["authorization"] = f"Bearer {address.key}"
        yield Prepared(
            request=request,
            due=request.arrival,
            body=body(request, address, prompts.prompt(request, number)),
            headers=headers,
            request_id=request_id,
            lane=lane_by_spec(spec, request.tier, request.prompt_tokens),
        )


def body(request: TraceRequest, address: Address, text: str) -> bytes:
    """The body of a chat completion."""
    fields: dict[str, object] = {
        "model": address.model,
        "messages": [{"role": "user", "content": text}],
        "max_tokens": request.output_tokens,
    }
    if request.streamed:
        fields |= {"stream": True, "stream_options": {"include_usage": True}}
    if address.ignore_eos:
        fields["ignore_eos"] = True
    if request.tier == "flex":
        fields["service_tier"] = "flex"
    return orjson.dumps(fields)


@dataclass(frozen=True, slots=True)
class _Anyone:
    """What a request may that carries no key."""

    lanes: tuple[str, ...] | None = None
    may_choose_lane: bool = False
    default_tier: str = "default"


def lane_by_spec(spec: Spec, tier: Tier, prompt_tokens: int) -> str:
    """The lane that the gateway's rules give, for targets that do not say which."""
    return choose_lane(spec, prompt_tokens, tier, _Anyone(), None).name
