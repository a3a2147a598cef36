"""`laneway.yaml`, typed: the only place that names lanes, objectives, engine pools and rollout thresholds.

Every field carries its unit and bounds. A wrong file is refused with the YAML path, the value and what was expected.
"""

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

GATEWAY_SCHEDULERS = ("lanes", "passthrough", "static-fifo")
GatewayScheduler = Literal["lanes", "passthrough", "static-fifo"]
EngineScheduler = Literal["lanes", "vllm"]

WAIT_LIMIT_SHARE = 0.8
"""The wait limit is this share of the lane's TTFT objective: what is left is for prefill and the way back."""

Name = Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9._/-]{0,62}[a-z0-9])?$")]
Seconds = Annotated[float, Field(gt=0, le=86_400, json_schema_extra={"unit": "s"})]
Tokens = Annotated[int, Field(ge=1, le=100_000_000, json_schema_extra={"unit": "tokens"})]
Bytes = Annotated[int, Field(ge=1, le=1 << 40, json_schema_extra={"unit": "bytes"})]
Count = Annotated[int, Field(ge=0, le=1_000_000)]
Share = Annotated[float, Field(gt=0, lt=1, json_schema_extra={"unit": "share of requests"})]
Percent = Annotated[int, Field(ge=0, le=100, json_schema_extra={"unit": "%"})]


class SpecError(ValueError):
    """The spec is refused. `problems` holds one line a fault: path, value, what was expected."""

    def __init__(self, source: str, problems: list[str]) -> None:
        self.problems = problems
        super().__init__("\n".join(f"{source}: {problem}" for problem in problems))


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Objective(_Part):
    """A latency objective: this share of the lane's valid requests within this time."""

    share: Share = Field(0.95, description="share of requests that must be within `seconds`")
    seconds: Seconds = Field(description="the time that they must be within")


class QueueBounds(_Part):
    """How much a lane may hold back, per model and pool. What comes on top is refused (429)."""

    max_requests: int = Field(1000, ge=1, le=1_000_000, description="queued requests")
    max_tokens: Tokens = Field(2_000_000, description="prompt tokens of the queued requests together")


class Lane(_Part):
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


class Replica(_Part):
    """One address of an engine."""

    url: str = Field(
        pattern=r"^https?://[^/\s]+(/[^\s]*)?$", description="base URL, without /v1; a DNS name may stand for many"
    )


class Started(_Part):
    """Replicas that `laneway serve` starts itself, on loopback, and stops when it ends."""

    engine: Literal["simulated", "vllm"] = Field("simulated", description="what to start")
    count: int = Field(1, ge=1, le=16, description="how many")
    first_port: int = Field(8100, ge=1, le=65_535, description="the first replica's port; the others follow")
    profile: str | None = Field(None, description="simulated: a calibrated step-time model (JSON)")
    model_dir: str | None = Field(None, description="vllm: the model's folder or hub name; null: the tiny random model")
    arguments: tuple[str, ...] = Field((), description="vllm: further arguments of its server")


class Lookahead(_Part):
    """What a replica may hold beyond what it computes, so that it never idles for want of the next request."""

    tokens: Tokens = Field(512, description="prompt tokens")
    requests: int = Field(4, ge=0, le=10_000, description="requests above `max_num_seqs`")


class Pool(_Part):
    """Replicas of the same kind with the same settings."""

    name: Name = Field(description="label value")
    replicas: tuple[Replica, ...] = Field((), description="engines that run elsewhere")
    start: Started | None = Field(None, description="engines that the gateway starts itself")
    gateway_scheduler: GatewayScheduler = Field("lanes", description="who decides what enters the engine, and when")
    engine_scheduler: EngineScheduler = Field("vllm", description="who decides, every step, whose tokens are computed")
    batch_tokens: Tokens = Field(256, description="threshold of one micro-batch; a larger prompt goes alone")
    turn_tokens: Tokens = Field(2048, description="hard budget of one turn; a longer prompt takes several turns")
    large_seats: int = Field(1, ge=1, le=64, description="prompts above `turn_tokens` in prefill at once, per replica")
    max_num_seqs: int = Field(256, ge=1, le=100_000, description="requests that a replica computes at once")
    step_tokens: Tokens = Field(2048, description="tokens that a replica computes in one engine step")
    lookahead: Lookahead = Field(Lookahead(), description="credit beyond what a replica computes")
    static_batch: int = Field(8, ge=1, le=1024, description="`static-fifo`: requests of one batch")
    affinity_tokens: Tokens = Field(
        4096, description="how many more outstanding tokens a replica may have and still be preferred for its prefix"
    )

    @model_validator(mode="after")
    def _has_replicas(self) -> Self:
        if not self.replicas and self.start is None:
            raise ValueError("has neither `replicas` nor `start`, expected at least one of them")
        return self


class Model(_Part):
    """A served model and the pools that serve it."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._/:-]{0,127}$", description="as in the request's `model`")
    tokenizer: str | None = Field(
        None, description="folder or file of its tokenizer.json; null: an estimate that learns bytes per token"
    )
    max_model_len: Tokens = Field(8192, description="prompt and output together")
    pools: dict[str, Annotated[int, Field(ge=0, le=100_000)]] = Field(
        min_length=1, description="pool: integer weight of its share of the traffic"
    )


class Key(_Part):
    """An API key, by its SHA-256: the key itself is never in a file."""

    name: Name = Field(description="who it belongs to; in logs, never in metrics")
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$", description="hex digest of the key (`laneway key` makes a pair)")
    lanes: tuple[str, ...] | None = Field(None, description="lanes that it may use; null: every lane")
    models: tuple[str, ...] | None = Field(None, description="models that it may use; null: every model")
    may_choose_lane: bool = Field(False, description="the header x-laneway-lane is honoured")
    default_tier: Literal["default", "flex"] = Field("default", description="tier of requests that name none")
    requests_per_minute: int | None = Field(None, ge=1, le=10_000_000, description="quota; null: none")
    tokens_per_minute: Tokens | None = Field(None, description="quota of prompt and output tokens; null: none")


class Auth(_Part):
    """Who may ask."""

    required: bool = Field(False, description="refuse requests without a key (always so off loopback)")
    keys: tuple[Key, ...] = Field((), description="the keys")


class Limits(_Part):
    """What a request may be, before its lane is known."""

    max_body_bytes: Bytes = Field(4 << 20, description="size of a request's body")
    max_header_bytes: Bytes = Field(32 << 10, description="size of a request's head")
    max_output_tokens: Tokens = Field(32_768, description="largest `max_tokens` that is believed")
    default_output_tokens: Tokens = Field(256, description="output tokens assumed where a request names no limit")
    max_connections: int = Field(8192, ge=1, le=1_000_000, description="requests at once in this gateway")
    body_timeout: Seconds = Field(30.0, description="to read the whole body")


class Timeouts(_Part):
    """Deadlines towards the engine."""

    connect: Seconds = Field(2.0, description="to connect to a replica")
    first_token: Seconds = Field(
        120.0, description="from dispatch to the first content; the lane's deadline ends what still queues"
    )
    idle: Seconds = Field(30.0, description="between two chunks of a stream")
    total: Seconds = Field(900.0, description="from receipt to the end")
    header_hold: Seconds = Field(5.0, description="a queued stream's headers are withheld this long")
    comment_every: Seconds = Field(5.0, description="between two comments on a stream that still waits")
    drain: Seconds = Field(30.0, description="running requests may finish this long after SIGTERM")


class Gateway(_Part):
    """The request path."""

    replicas: int = Field(1, ge=1, le=1000, description="gateways in front of the same engines; each takes its share")
    limits: Limits = Field(Limits(), description="size limits")
    timeouts: Timeouts = Field(Timeouts(), description="deadlines")
    auth: Auth = Field(Auth(), description="API keys")


class Cache(_Part):
    """Whole responses of deterministic requests (temperature 0, no tools), kept apart by API key."""

    enabled: bool = Field(False, description="answer from it; while off, hits it would have had are counted")
    max_bytes: Bytes = Field(64 << 20, description="size of all kept responses")
    ttl: Seconds = Field(600.0, description="how long a response is kept")
    max_keys: int = Field(100_000, ge=1, le=10_000_000, description="hashes remembered for the count of would-be hits")


class Strata(_Part):
    """Edges of the strata inside which latencies may be compared."""

    prompt_tokens: tuple[Tokens, ...] = Field((128, 512, 2048), description="upper edges; what is longer is the last")
    output_tokens: tuple[Tokens, ...] = Field((64, 256), description="upper edges; what is longer is the last")

    @model_validator(mode="after")
    def _ascending(self) -> Self:
        for name in ("prompt_tokens", "output_tokens"):
            edges = getattr(self, name)
            if list(edges) != sorted(set(edges)):
                raise ValueError(f"{name} is {list(edges)}, expected edges in ascending order")
        return self


class ErrorSpike(_Part):
    """What an error spike of the candidate is."""

    points: float = Field(1.0, gt=0, le=100, description="percentage points above the control's error ratio")
    min_errors: int = Field(5, ge=1, le=1_000_000, description="and at least this many errors")


class Rollout(_Part):
    """Stages and thresholds of a rollout. Latencies are the gateway's TTFT of the candidate's `gate` lanes."""

    shadow_percent: Percent = Field(5, description="share of the traffic in shadow")
    canary_percent: Percent = Field(25, description="share of the traffic in canary")
    window: Seconds = Field(60.0, description="length of a monitoring window")
    start_median: Seconds = Field(0.120, description="a shadow rollout may start when the median is below this")
    median_improvement: Share = Field(0.30, description="gate 1: the candidate's median must be this much lower")
    canary_p95: Seconds = Field(0.200, description="gate 2: p95 must be below this")
    canary_windows: int = Field(3, ge=1, le=100, description="gate 2: for this many consecutive windows")
    rollback_median: Seconds = Field(0.120, description="at any time: a median above this rolls back")
    rollback_p95: Seconds = Field(0.250, description="at any time: a p95 above this rolls back")
    edge_median: Seconds = Field(0.150, description="an edge rollout is indicated when the median stays above this")
    error_spike: ErrorSpike = Field(ErrorSpike(), description="what counts as one")

    @model_validator(mode="after")
    def _nested(self) -> Self:
        if self.shadow_percent > self.canary_percent:
            raise ValueError(
                f"shadow_percent is {self.shadow_percent}, expected at most canary_percent ({self.canary_percent})"
            )
        return self


class Slo(_Part):
    """The period that error budgets are counted over."""

    period_days: int = Field(28, ge=1, le=366, description="days")


class Telemetry(_Part):
    """How much is kept."""

    exemplar_every: Seconds = Field(15.0, description="at most one exemplar per lane and bucket in this time")
    max_models: int = Field(32, ge=1, le=1000, description="model names that become label values; others are `other`")
    max_replicas: int = Field(
        64, ge=1, le=1000, description="replica names of a pool that become label values; others are `other`"
    )


class Replay(_Part):
    """When the figures of a replay are to be trusted."""

    max_send_lateness: Seconds = Field(
        0.020, description="p99 of how late requests were sent; a run above it is marked as not to be trusted"
    )


class Spec(_Part):
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
        ):
            for name in sorted({name for name in names if names.count(name) > 1}):
                yield f"{kind}: the name {name!r} stands more than once, expected each once"
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
        for i, key in enumerate(self.gateway.auth.keys):
            for lane in key.lanes or ():
                if lane not in lane_names:
                    yield f"gateway.auth.keys[{i}].lanes: got {lane!r}, expected one of {sorted(lane_names)}"
            for name in key.models or ():
                if name not in model_names:
                    yield f"gateway.auth.keys[{i}].models: got {name!r}, expected one of {sorted(model_names)}"

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
    """The spec of a YAML text; `source` names it in refusals."""
    try:
        data = yaml.load(text, _UniqueKeyLoader)
    except yaml.YAMLError as error:
        raise SpecError(source, [f"is not YAML: {' '.join(str(error).split())}"]) from None
    if not isinstance(data, dict):
        raise SpecError(source, [f"holds {type(data).__name__}, expected a mapping with lanes, models and pools"])
    try:
        return Spec.model_validate(_tuples(data))
    except ValidationError as error:
        raise SpecError(source, [_problem(fault) for fault in error.errors()]) from None


def explain(part: type[BaseModel] = Spec, prefix: str = "") -> Iterator[tuple[str, str, str, str]]:
    """Every field of the spec as (path, type with unit and bounds, default, meaning), in the file's order."""
    for name, info in part.model_fields.items():
        path = f"{prefix}{name}"
        nested, many = _nested_part(info.annotation)
        default = "required" if info.is_required() else _plain(info.default)
        yield path, _type_text(part, name, nested, many), default, info.description or ""
        if nested is not None:
            yield from explain(nested, f"{path}[]." if many else f"{path}.")


class _UniqueKeyLoader(yaml.SafeLoader):
    """YAML takes the last of two equal keys and drops the first in silence; here that is an error."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)  # type: ignore[no-untyped-call]
            if not isinstance(key, str | int | float | bool | None):
                raise yaml.constructor.ConstructorError(
                    None, None, f"key {key!r} is no plain value", key_node.start_mark
                )
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"key {key!r} stands twice, expected once", key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep)


def _tuples(value: Any) -> Any:
    """YAML lists as tuples: the strict models take nothing else."""
    if isinstance(value, list):
        return tuple(_tuples(item) for item in value)
    if isinstance(value, dict):
        return {key: _tuples(item) for key, item in value.items()}
    return value


def _problem(fault: Any) -> str:
    path = ""
    for part in fault["loc"]:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else str(part)
    message = str(fault["msg"])
    if fault["type"] == "value_error":
        message = message.removeprefix("Value error, ")
        return f"{path}: {message}" if path else message
    if fault["type"] == "missing":
        return f"{path}: missing, expected a value ({_described(fault['loc'])})"
    if fault["type"] == "extra_forbidden":
        return f"{path}: got {_short(fault['input'])}, expected no such field{_siblings(fault['loc'])}"
    return f"{path}: got {_short(fault['input'])}, expected {_expectation(message)}{_unit(fault['loc'])}"


def _expectation(message: str) -> str:
    return message.removeprefix("Input should be ").replace("Input should ", "to ")


def _short(value: Any) -> str:
    text = repr(list(value) if isinstance(value, tuple) else value)
    return text if len(text) <= 80 else text[:77] + "..."


def _field_at(location: tuple[Any, ...]) -> tuple[type[BaseModel], str] | None:
    part: type[BaseModel] = Spec
    names = [step for step in location if isinstance(step, str)]
    for i, name in enumerate(names):
        info = part.model_fields.get(name)
        if info is None:
            return None
        if i == len(names) - 1:
            return part, name
        nested, _ = _nested_part(info.annotation)
        if nested is None:
            return part, name
        part = nested
    return None


def _unit(location: tuple[Any, ...]) -> str:
    found = _field_at(location)
    unit = _schema(*found).get("unit") if found else None
    return f" ({unit})" if unit else ""


def _described(location: tuple[Any, ...]) -> str:
    found = _field_at(location)
    return (found[0].model_fields[found[1]].description or found[1]) if found else str(location[-1])


def _siblings(location: tuple[Any, ...]) -> str:
    part: type[BaseModel] = Spec
    for name in [step for step in location[:-1] if isinstance(step, str)]:
        info = part.model_fields.get(name)
        nested, _ = _nested_part(info.annotation) if info else (None, False)
        if nested is None:
            return ""
        part = nested
    return f"; there are {', '.join(part.model_fields)}"


def _nested_part(annotation: Any) -> tuple[type[BaseModel] | None, bool]:
    """The model that an annotation holds, and whether it is a list of them."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation, False
    for argument in getattr(annotation, "__args__", ()):
        nested, _ = _nested_part(argument)
        if nested is not None:
            return nested, getattr(annotation, "__origin__", None) is tuple
    return None, False


def _schema(part: type[BaseModel], name: str) -> dict[str, Any]:
    schema = part.model_json_schema()["properties"][name]
    for choice in schema.get("anyOf", ()):
        if choice.get("type") != "null":
            schema = {**schema, **choice}
    return dict(schema)


def _type_text(part: type[BaseModel], name: str, nested: type[BaseModel] | None, many: bool) -> str:
    if nested is not None:
        return "list" if many else "section"
    schema = _schema(part, name)
    if "enum" in schema:
        return " | ".join(map(str, schema["enum"]))
    if "const" in schema:
        return str(schema["const"])
    text = str(schema.get("type", "value")).replace("array", "list").replace("object", "mapping")
    bounds = [
        f"{sign} {schema[key]:g}"
        for key, sign in (("minimum", "≥"), ("exclusiveMinimum", ">"), ("maximum", "≤"), ("exclusiveMaximum", "<"))
        if key in schema
    ]
    unit = schema.get("unit") or schema.get("items", {}).get("unit")
    return " ".join([text, *([f"in {unit}"] if unit else []), *([", ".join(bounds)] if bounds else [])])


def _plain(default: Any) -> str:
    if isinstance(default, BaseModel):
        return ""
    if default is None:
        return "null"
    if isinstance(default, tuple):
        return str(list(default))
    return str(default).lower() if isinstance(default, bool) else str(default)
