"""What the step loop of a replica works with: limits, sequences, and the plan and end of one step."""

from dataclasses import dataclass, field

from serving.engine.kv_blocks import BlockHash

SCHEDULERS = ("fcfs",)


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """What a replica computes at once. The defaults are vLLM's for an online server on a CPU."""

    max_num_seqs: int = 256
    """Sequences that run at once."""
    max_num_batched_tokens: int = 2048
    """Tokens of one step."""
    max_model_len: int = 8192
    """Prompt and output of one sequence, tokens."""
    prefix_caching: bool = True
    scheduler: str = "fcfs"
    long_prefill_token_threshold: int = 0
    """Most tokens of one sequence in one step while there are others; 0: no bound (vLLM's setting of that name)."""

    def __post_init__(self) -> None:
        """Raises ValueError: the message has the field, the value and what was expected."""
        for name in ("max_num_seqs", "max_num_batched_tokens", "max_model_len"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: got {getattr(self, name)}, expected at least 1")
        if self.long_prefill_token_threshold < 0:
            raise ValueError(
                f"long_prefill_token_threshold: got {self.long_prefill_token_threshold}, expected 0 or more"
            )
        if self.scheduler not in SCHEDULERS:
            raise ValueError(f"scheduler: got {self.scheduler!r}, expected one of {list(SCHEDULERS)}")


@dataclass(slots=True, eq=False)
class Sequence:
    """One request in the engine. Stamps are seconds of the clock that the calls carry."""

    request_id: str
    prompt_tokens: int
    max_tokens: int
    """Output tokens after which it ends."""
    hashes: tuple[BlockHash, ...] = ()
    """Of the prompt's full blocks; without them it has no prefix in common with any other."""
    queued_at: float = 0.0
    scheduled_at: float | None = None
    """First time that it joined; preemption does not change it."""
    first_token_at: float | None = None
    last_token_at: float | None = None
    output_tokens: int = 0
    cached_tokens: int = 0
    """Prompt tokens found in the prefix cache when it first joined."""
    preemptions: int = 0
    computed: int = 0
    """Tokens whose KV is there."""
    blocks: list[int] = field(default_factory=list)
    filled: int = 0
    """Blocks of it that have been given to the prefix index."""
    gone: bool = False
    """Aborted, or finished."""
    number: int = 0
    """Given by the engine: tells its output's blocks from everybody else's."""

    @property
    def tokens(self) -> int:
        """Prompt and output so far."""
        return self.prompt_tokens + self.output_tokens

    def block_hash(self, index: int) -> BlockHash:
        """Of one of its full blocks. What it has produced is its own: only it can find that again, when preempted."""
        return self.hashes[index] if index < len(self.hashes) else hash((-1, self.number, index))


@dataclass(frozen=True, slots=True)
class Chunk:
    """What a step computes of one sequence."""

    sequence: Sequence
    context: int
    """Tokens before it."""
    tokens: int

    @property
    def produces(self) -> bool:
        """The sequence has a new token when the step ends."""
        return self.context + self.tokens == self.sequence.tokens

    @property
    def is_prefill(self) -> bool:
        """Computes more than the newest token."""
        return self.tokens > 1 or self.context < self.sequence.prompt_tokens


@dataclass(frozen=True, slots=True)
class Plan:
    """One step. `seconds` is how long it takes."""

    chunks: tuple[Chunk, ...]
    preempted: tuple[Sequence, ...]
    joined: tuple[Sequence, ...]
    """Came from the waiting queue in this step."""
    prefill_tokens: int
    decodes: int
    seconds: float
    queried_tokens: int
    """Tokens for which the prefix cache was asked."""
    hit_tokens: int
    """And those that it had."""


@dataclass(frozen=True, slots=True)
class StepEnd:
    """What a step brought."""

    produced: tuple[Sequence, ...]
    """Have one more output token. Aborted ones are left out."""
    finished: tuple[Sequence, ...]
    """Of these, the ones that reached their `max_tokens`."""
