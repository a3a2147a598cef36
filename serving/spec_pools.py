"""The engine pools of `laneway.yaml`: where replicas are, what is started, and who schedules what enters them."""

from typing import Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, model_validator

from serving.spec_fields import Name, Part, Tokens

GATEWAY_SCHEDULERS = ("lanes", "passthrough", "static-fifo")
GatewayScheduler = Literal["lanes", "passthrough", "static-fifo"]
EngineScheduler = Literal["lanes", "vllm"]
HIGHEST_PORT = 65_535


class Replica(Part):
    """One address of an engine."""

    url: str = Field(
        pattern=r"^https?://[^/\s]+(/[^\s]*)?$", description="base URL, without /v1; a DNS name may stand for many"
    )

    @model_validator(mode="after")
    def _is_an_address(self) -> Self:
        try:
            parts = urlsplit(self.url)
            good = bool(parts.hostname) and parts.port != 0
        except ValueError:  # a port that is no port, or half an IPv6 address
            good = False
        if not good or "@" in parts.netloc or parts.query or parts.fragment:
            raise ValueError("url is no base URL, expected http(s)://host[:port][/path] and nothing else")
        return self


class Started(Part):
    """Replicas that `laneway serve` starts itself, on loopback, and stops when it ends."""

    engine: Literal["simulated", "vllm"] = Field("simulated", description="what to start")
    count: int = Field(1, ge=1, le=16, description="how many")
    first_port: int = Field(8100, ge=1, le=HIGHEST_PORT, description="the first replica's port; the others follow")
    profile: str | None = Field(None, description="simulated: a calibrated step-time model (JSON)")
    model_dir: str | None = Field(None, description="vllm: the model's folder or hub name; null: the tiny random model")
    arguments: tuple[str, ...] = Field((), description="vllm: further arguments of its server")

    @property
    def ports(self) -> range:
        """The port of each of them."""
        return range(self.first_port, self.first_port + self.count)

    @model_validator(mode="after")
    def _ports_exist(self) -> Self:
        if self.ports[-1] > HIGHEST_PORT:
            raise ValueError(
                f"{self.count} replicas from port {self.first_port} on, expected the last at {HIGHEST_PORT} or below"
            )
        return self


class Lookahead(Part):
    """What a replica may hold beyond what it computes, so that it never idles for want of the next request."""

    tokens: Tokens = Field(512, description="prompt tokens")
    requests: int = Field(4, ge=0, le=10_000, description="requests above `max_num_seqs`")


class Pool(Part):
    """Replicas of the same kind with the same settings."""

    name: Name = Field(description="label value")
    replicas: tuple[Replica, ...] = Field((), description="engines that run elsewhere")
    start: Started | None = Field(None, description="engines that the gateway starts itself")
    gateway_scheduler: GatewayScheduler = Field("lanes", description="who decides what enters the engine, and when")
    engine_scheduler: EngineScheduler = Field("vllm", description="who decides, every step, whose tokens are computed")
    batch_tokens: Tokens = Field(256, description="threshold of one micro-batch; a larger prompt goes alone")
    turn_tokens: Tokens = Field(
        512,
        description="hard budget of one turn; a longer prompt takes several, and a seat for large ones "
        "(vLLM: --long-prefill-token-threshold)",
    )
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
