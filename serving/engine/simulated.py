"""The simulated replica's engine: the step loop of `steps.py` in real time, and the token streams that come out of it.

One task runs all steps. It plans a step, sleeps until the step's end on the monotonic clock, and only then hands out
the tokens, so what a client measures is what the step-time model says. Nothing runs per token but one concatenation
and, where the client waits, the wake-up of its stream; a client that is slower than the engine finds its tokens joined.
"""

import asyncio
import time
from collections.abc import Callable

from serving.engine.engine_span import EngineSpans, SpanSource
from serving.engine.kv_blocks import block_hashes
from serving.engine.sequence import EngineLimits, Sequence, StepEnd
from serving.engine.simulated_reply import ReplyShape, Wording
from serving.engine.step_time import Profile
from serving.engine.steps import SteppedEngine
from serving.engine.vllm_metrics import VllmMetrics

TIMER_SECONDS = 0.001
"""The event loop's timers go by milliseconds: a step's end is noticed up to this much late, and never early."""

CATCH_UP_SECONDS = 0.005
"""How late a step may be noticed and the next one still count from its planned end, so that the timers' lateness does
not add up. What is later is lost time, as it would be for a real engine on a machine that stalls."""


class EngineBusyError(Exception):
    """The replica is full; `reason` is the name of the limit."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class TokenStream:
    """One request from its admission to its end. The bytes of its reply are read by `read`."""

    def __init__(
        self,
        sequence: Sequence,
        source: SpanSource,
        shape: ReplyShape,
        wording: Wording,
        finish_reason: str,
        streamed: bool,
    ) -> None:
        self.sequence = sequence
        self.source = source
        self.finish_reason = finish_reason
        self.previous_token_at = 0.0
        self._shape = shape
        self._wording = wording
        self._streamed = streamed
        self._ready: list[bytes] = []
        self._waiter: asyncio.Future[None] | None = None
        self.ended = False
        """No more bytes will come. True for an aborted stream as well."""

    def token(self, last: bool) -> None:
        """The sequence has a further token. One that ends a reply by itself (`stop`) counts, but has no text."""
        count = self.sequence.output_tokens
        if self._streamed:
            piece = b"" if last and self.finish_reason == "stop" else self._wording.piece(count - 1)
            if count == 1:
                self._ready.append(self._shape.opening())
            if last:
                self._ready.append(self._shape.closing(piece, count, self.finish_reason))
            else:
                self._ready.append(self._shape.token(piece, count))
        elif last:
            text = self._wording.text(count - (self.finish_reason == "stop"))
            self._ready.append(self._shape.whole(text, count, self.finish_reason))
        else:
            return
        if last:
            self.ended = True
        self._wake()

    def drop(self) -> None:
        """Nobody reads any more."""
        self.ended = True
        self._ready.clear()
        self._wake()

    async def read(self) -> bytes:
        """What has come since the last call, at least a byte; empty at the end."""
        while not self._ready:
            if self.ended:
                return b""
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        data = self._ready[0] if len(self._ready) == 1 else b"".join(self._ready)
        self._ready.clear()
        return data

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class SimulatedEngine:
    """Runs on one event loop: `submit` and `abort` are called there, `run` is its task."""

    def __init__(
        self,
        profile: Profile,
        limits: EngineLimits,
        metrics: VllmMetrics,
        spans: EngineSpans,
        max_num_queued_reqs: int | None = None,
        max_num_queued_tokens: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`max_num_queued_reqs` bounds the unfinished requests, `max_num_queued_tokens` the prompt tokens in prefill,
        both as vLLM counts them. None: no bound."""
        self._engine = SteppedEngine(profile, limits)
        self._metrics = metrics
        self._spans = spans
        self._max_requests = max_num_queued_reqs
        self._max_tokens = max_num_queued_tokens
        self._clock = clock
        self._streams: dict[Sequence, TokenStream] = {}
        self._prefill_tokens = 0
        self._arrived = asyncio.Event()

    def check_admission(self) -> None:
        """Raises EngineBusyError when one more request would be too many."""
        reason = None
        if self._max_requests is not None and len(self._streams) >= self._max_requests:
            reason = "max_num_queued_reqs"
        elif self._max_tokens is not None and self._prefill_tokens >= self._max_tokens:
            reason = "max_num_queued_tokens"
        if reason is not None:
            self._metrics.refused(reason)
            raise EngineBusyError(reason)

    def submit(
        self,
        tokens: list[int],
        max_tokens: int,
        source: SpanSource,
        shape: ReplyShape,
        pieces: tuple[bytes, ...],
        finish_reason: str,
        streamed: bool,
    ) -> TokenStream:
        """Queues a request whose prompt is `tokens` and whose output will have `max_tokens`.

        Raises:
            EngineBusyError: as `check_admission`.
            ValueError: it could never be computed.
        """
        self.check_admission()
        hashes = block_hashes(tokens, self._engine.profile.block_size) if self._engine.limits.prefix_caching else ()
        sequence = Sequence(source.request_id, len(tokens), max_tokens, hashes)
        wording = Wording(pieces, seed=hash(tuple(tokens)) & 0xFFFFFFFF)
        stream = TokenStream(sequence, source, shape, wording, finish_reason, streamed)
        self._engine.add(sequence, self._clock())
        self._streams[sequence] = stream
        self._prefill_tokens += sequence.prompt_tokens
        self._arrived.set()
        return stream

    def abort(self, stream: TokenStream) -> None:
        """The client has left, or has its reply: no effect on a request that has ended."""
        if self._streams.pop(stream.sequence, None) is None:
            return
        if stream.sequence.first_token_at is None:
            self._prefill_tokens -= stream.sequence.prompt_tokens
        stream.drop()
        self._engine.abort(stream.sequence)
        self._show_load()

    async def run(self) -> None:
        """The step loop; ends only when it is cancelled."""
        start = self._clock()
        while True:
            plan = self._engine.plan(self._clock())
            if plan is None:
                self._show_load()
                self._arrived.clear()
                await self._arrived.wait()
                start = self._clock()
                continue
            self._metrics.planned(plan)
            end = start + plan.seconds
            while (left := end - self._clock()) > 0:  # noqa: ASYNC110 (waits for an instant, not for a condition)
                await asyncio.sleep(max(left, TIMER_SECONDS))
            now = self._clock()
            self._hand_out(self._engine.complete(plan, now), now)
            start = max(end, now - CATCH_UP_SECONDS)

    def _hand_out(self, end: StepEnd, now: float) -> None:
        finished = set(end.finished)
        intervals: list[float] = []
        first: list[tuple[Sequence, float]] = []
        for sequence in end.produced:
            stream = self._streams[sequence]
            if sequence.output_tokens == 1:
                first.append((sequence, now - stream.source.arrival))
                self._prefill_tokens -= sequence.prompt_tokens
            else:
                intervals.append(now - stream.previous_token_at)
            stream.previous_token_at = now
            stream.token(last=sequence in finished)
        self._metrics.ended(end, intervals, first)
        for sequence in end.finished:
            stream = self._streams.pop(sequence)
            source = stream.source
            self._metrics.finished(sequence, stream.finish_reason, source.max_tokens, now - source.arrival)
            self._spans.finished(source, sequence, now)
        self._show_load()

    def _show_load(self) -> None:
        engine = self._engine
        self._metrics.load(len(engine.running), len(engine.waiting), engine.kv.usage)
