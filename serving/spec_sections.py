"""The sections of `laneway.yaml` that may be left out: how requests are taken, what is kept, when a rollout goes on."""

from typing import Literal, Self

from pydantic import Field, model_validator

from serving.spec_fields import Bytes, Name, Part, Percent, Seconds, Share, Tokens


class Key(Part):
    """An API key, by its SHA-256: the key itself is never in a file."""

    name: Name = Field(description="who it belongs to; in logs, never in metrics")
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$", description="hex digest of the key (`laneway key` makes a pair)")
    lanes: tuple[str, ...] | None = Field(None, description="lanes that it may use; null: every lane")
    models: tuple[str, ...] | None = Field(None, description="models that it may use; null: every model")
    may_choose_lane: bool = Field(False, description="the header x-laneway-lane is honoured")
    default_tier: Literal["default", "flex"] = Field("default", description="tier of requests that name none")
    requests_per_minute: int | None = Field(None, ge=1, le=10_000_000, description="quota; null: none")
    tokens_per_minute: Tokens | None = Field(None, description="quota of prompt and output tokens; null: none")


class Auth(Part):
    """Who may ask."""

    required: bool = Field(False, description="refuse requests without a key (always so off loopback)")
    keys: tuple[Key, ...] = Field((), description="the keys", json_schema_extra={"secret": True})


class Limits(Part):
    """What a request may be, before its lane is known."""

    max_body_bytes: Bytes = Field(4 << 20, description="size of a request's body")
    max_header_bytes: Bytes = Field(32 << 10, description="size of a request's head")
    max_output_tokens: Tokens = Field(32_768, description="largest `max_tokens` that is believed")
    default_output_tokens: Tokens = Field(256, description="output tokens assumed where a request names no limit")
    max_connections: int = Field(8192, ge=1, le=1_000_000, description="requests at once in this gateway")
    body_timeout: Seconds = Field(30.0, description="to read the whole body")


class Timeouts(Part):
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


class Gateway(Part):
    """The request path."""

    replicas: int = Field(1, ge=1, le=1000, description="gateways in front of the same engines; each takes its share")
    limits: Limits = Field(Limits(), description="size limits")
    timeouts: Timeouts = Field(Timeouts(), description="deadlines")
    auth: Auth = Field(Auth(), description="API keys")


class Cache(Part):
    """Whole responses of deterministic requests (temperature 0, no tools), kept apart by API key."""

    enabled: bool = Field(False, description="answer from it; while off, hits it would have had are counted")
    max_bytes: Bytes = Field(64 << 20, description="size of all kept responses")
    ttl: Seconds = Field(600.0, description="how long a response is kept")
    max_keys: int = Field(100_000, ge=1, le=10_000_000, description="hashes remembered for the count of would-be hits")


class Strata(Part):
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


class ErrorSpike(Part):
    """What an error spike of the candidate is."""

    points: float = Field(1.0, gt=0, le=100, description="percentage points above the control's error ratio")
    min_errors: int = Field(5, ge=1, le=1_000_000, description="and at least this many errors")


class Rollout(Part):
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


class Slo(Part):
    """The period that error budgets are counted over."""

    period_days: int = Field(28, ge=1, le=366, description="days")


class Telemetry(Part):
    """How much is kept."""

    exemplar_every: Seconds = Field(15.0, description="at most one exemplar per lane and bucket in this time")
    max_models: int = Field(32, ge=1, le=1000, description="model names that become label values; others are `other`")
    max_replicas: int = Field(
        64, ge=1, le=1000, description="replica names of a pool that become label values; others are `other`"
    )


class Replay(Part):
    """When the figures of a replay are to be trusted."""

    max_send_lateness: Seconds = Field(
        0.020, description="p99 of how late requests were sent; a run above it is marked as not to be trusted"
    )
