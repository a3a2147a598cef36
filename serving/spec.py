"""`laneway.yaml`, typed: the only place that names lanes, objectives, engine pools and rollout thresholds.

Every field carries its unit and bounds. A wrong file is refused with the YAML path, the value and what was expected.
"""

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, ValidationError, model_validator

from serving import spec_text
from serving.spec_fields import Name, Part, Seconds, Share, Tokens
from serving.spec_pools import GATEWAY_SCHEDULERS, EngineScheduler, GatewayScheduler, Lookahead, Pool, Replica, Started
from serving.spec_sections import (
    Auth,
    Cache,
    ErrorSpike,
    Gateway,
    Key,
    Limits,
    Replay,
    Rollout,
    Slo,
    Strata,
    Telemetry,
    Timeouts,
)

__all__ = [
    "GATEWAY_SCHEDULERS",
    "Auth",
    "Cache",
    "EngineScheduler",
    "ErrorSpike",
    "Gateway",
    "GatewayScheduler",
    "Key",
    "Lane",
    "Limits",
    "Lookahead",
    "Model",
    "Objective",
    "Pool",
    "QueueBounds",
    "Replay",
    "Replica",
    "Rollout",
    "Slo",
    "Spec",
    "SpecError",
    "Started",
    "Strata",
    "Telemetry",
    "Timeouts",
    "explain",
    "load",
    "parse",
]

WAIT_LIMIT_SHARE = 0.8
"""The wait limit is this share of the lane's TTFT objective: what is left is for prefill and the way back."""


class SpecError(ValueError):
    """The spec is refused. `problems` holds one line a fault: path, value, what was expected."""

    def __init__(self, source: str, problems: list[str]) -> None:
        self.problems = problems
        super().__init__("\n".join(f"{source}: {problem}" for problem in problems))


class Objective(Part):
    """A latency objective: this share of the lane's valid requests within this time."""

    share: Share = Field(0.95, description="share of requests that must be within `seconds`")
    seconds: Seconds = Field(description="the time that they must be within")


class QueueBounds(Part):
    """How much a lane may hold back, per model and pool. What comes on top is refused (429)."""

    max_requests: int = Field(1000, ge=1, le=1_000_000, description="queued requests")
    max_tokens: Tokens = Field(2_000_000, description="prompt tokens of the queued requests together")


class Lane(Part):
    """One class of traffic with its own queue, objectives and share."""

    name: Name = Field(description="label value in metrics, spans and logs")
    max_prompt_tokens: Tokens | None = Field(None, description="takes prompts up to this length; null takes any length")
    tier: Literal["default", "flex"] = Field(
        "default", description="takes requests of this service tier (`service_tier: flex`, or the key's own tier)"
    )
    ttft: Objective = Field(description="time to first token, from receipt of the request's head")
    tpot: Objective | None = Field(None, description="time per output token after the first; null: no objective")
    success: Share = Field(0.995, description="share of valid requests that must complete")
    deadline: Seconds = Field(description="to the first token, from receipt; past it a queued request ends (504)")
    weight: int = Field(1, ge=1, le=1000, description="share of prompt tokens while several lanes are backlogged")
    gate: bool = Field(False, description="a rollout's latency limits apply to this lane")
    queue: QueueBounds = Field(QueueBounds(), description="bounds of the lane's queue")

    @property
    def wait_limit(self) -> float:
        """Seconds in the queue after which a request takes the next seat reserved for its lane."""
        return WAIT_LIMIT_SHARE * self.ttft.seconds


class Model(Part):
    """A served model and the pools that serve it."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._/:-]{0,127}$", description="as in the request's `model`")
    tokenizer: str | None = Field(
        None, description="folder or file of its tokenizer.json; null: an estimate that learns bytes per token"
    )
    max_model_len: Tokens = Field(8192, description="prompt and output together")
    pools: dict[str, Annotated[int, Field(ge=0, le=100_000)]] = Field(
        min_length=1, description="pool: integer weight of its share of the traffic"
    )


class Spec(Part):
    """The whole of `laneway.yaml`."""

    lanes: tuple[Lane, ...] = Field(min_length=1, description="in order of preference: the first that fits takes it")
    models: tuple[Model, ...] = Field(min_length=1, description="served models")
    pools: tuple[Pool, ...] = Field(min_length=1, description="engine pools")
    gateway: Gateway = Field(Gateway(), description="the request path")
    cache: Cache = Field(Cache(), description="hot prompts")
    strata: Strata = Field(Strata(), description="populations that may be compared")
    slo: Slo = Field(Slo(), description="service level objectives")
    rollout: Rollout = Field(Rollout(), description="shadow, canary, full")
    telemetry: Telemetry = Field(Telemetry(), description="metrics, traces, logs")
    replay: Replay = Field(Replay(), description="load from the client's side")

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        problems = list(self._problems())
        if problems:
            raise ValueError("; ".join(problems))
        return self

    def _problems(self) -> Iterator[str]:
        for kind, names in (
            ("lanes", [lane.name for lane in self.lanes]),
            ("models", [model.name for model in self.models]),
            ("pools", [pool.name for pool in self.pools]),
            ("gateway.auth.keys", [key.name for key in self.gateway.auth.keys]),
            ("gateway.auth.keys", [key.sha256 for key in self.gateway.auth.keys]),
        ):
            for name in sorted({name for name in names if names.count(name) > 1}):
                yield f"{kind}: {name!r} stands more than once, expected each once"
        lane_names = {lane.name for lane in self.lanes}
        model_names = {model.name for model in self.models}
        pool_names = {pool.name for pool in self.pools}
        if "none" in lane_names:
            yield "lanes: the name 'none' is reserved for requests whose lane is not known, expected another"
        for tier in ("default", "flex"):
            fits_all = [lane for lane in self.lanes if lane.tier == tier and lane.max_prompt_tokens is None]
            if not fits_all and (tier == "default" or any(lane.tier == tier for lane in self.lanes)):
                yield f"lanes: no lane of tier {tier} takes every prompt, expected one with max_prompt_tokens null"
        for i, model in enumerate(self.models):
            for pool in model.pools:
                if pool not in pool_names:
                    yield f"models[{i}].pools: got {pool!r}, expected one of {sorted(pool_names)}"
            if sum(model.pools.values()) == 0:
                yield f"models[{i}].pools: every weight is 0, expected one above 0"
        yield from self._started_problems()
        for i, key in enumerate(self.gateway.auth.keys):
            for lane in key.lanes or ():
                if lane not in lane_names:
                    yield f"gateway.auth.keys[{i}].lanes: got {lane!r}, expected one of {sorted(lane_names)}"
            for name in key.models or ():
                if name not in model_names:
                    yield f"gateway.auth.keys[{i}].models: got {name!r}, expected one of {sorted(model_names)}"

    def _started_problems(self) -> Iterator[str]:
        """What would only fail once the replicas are started."""
        taken: dict[int, str] = {}
        for i, pool in enumerate(self.pools):
            if pool.start is None:
                continue
            for port in pool.start.ports:
                if port in taken:
                    yield (
                        f"pools[{i}].start: port {port} is taken by a replica of pool {taken[port]!r}, "
                        "expected ports of its own"
                    )
                taken[port] = pool.name
            served = [model.name for model in self.models if pool.name in model.pools]
            if len(served) > 1:
                yield f"pools[{i}].start: serves {served}, expected one model: a started replica has no more"

    def lane(self, name: str) -> Lane:
        """The lane of that name (KeyError if there is none)."""
        for lane in self.lanes:
            if lane.name == name:
                return lane
        raise KeyError(name)

    def pool(self, name: str) -> Pool:
        """The pool of that name (KeyError if there is none)."""
        for pool in self.pools:
            if pool.name == name:
                return pool
        raise KeyError(name)

    def model(self, name: str) -> Model | None:
        """The model of that name, if it is served."""
        return next((model for model in self.models if model.name == name), None)

    @property
    def digest(self) -> str:
        """Twelve hex digits that change whenever a setting does."""
        return hashlib.sha256(self.model_dump_json().encode()).hexdigest()[:12]


def load(path: Path) -> Spec:
    """Reads and checks a spec.

    Raises:
        SpecError: with a line for each fault.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError(str(path), [f"cannot be read ({error}), expected a YAML file"]) from None
    return parse(text, str(path))


def parse(text: str, source: str = "laneway.yaml") -> Spec:
    """The spec of a YAML text; `source` names it in refusals.

    Raises:
        SpecError: with a line for each fault.
    """
    try:
        data = spec_text.read_yaml(text)
    except ValueError as error:
        raise SpecError(source, [f"is not YAML: {error}"]) from None
    if not isinstance(data, dict):
        raise SpecError(source, [f"holds {type(data).__name__}, expected a mapping with lanes, models and pools"])
    try:
        return Spec.model_validate(data)
    except ValidationError as error:
        raise SpecError(source, spec_text.refusals(Spec, error)) from None


def explain() -> Iterator[tuple[str, str, str, str]]:
    """Every field of the spec as (path, type with unit and bounds, default, meaning), in the file's order."""
    return spec_text.fields(Spec)
