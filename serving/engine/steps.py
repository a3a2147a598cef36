"""The step loop of a vLLM replica on a clock that is handed in. Pure: no I/O, no clock, no randomness.

Every step is planned as vLLM's V1 scheduler plans it (first come, first served; chunked prefill): sequences that run
come first, each taking all of the step's tokens that it can; then waiting ones join while tokens, seats and KV blocks
last; when a running sequence finds no block, the last one that joined is put back and starts over. `SteppedEngine`
neither sleeps nor sends: the simulated replica waits for a plan's duration on the real clock, the simulator adds it to
a virtual one.
"""

from collections import deque

from serving.engine.kv_blocks import KvBlocks
from serving.engine.sequence import Chunk, EngineLimits, Plan, Sequence, StepEnd
from serving.engine.step_time import Profile


class SteppedEngine:
    """The scheduler's state. Call `plan`, let its seconds pass, call `complete`; `add` and `abort` at any time."""

    def __init__(self, profile: Profile, limits: EngineLimits) -> None:
        """Raises ValueError as `KvBlocks` does."""
        self.profile = profile
        self.limits = limits
        self.kv = KvBlocks(profile.kv_blocks, profile.block_size, limits.prefix_caching)
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self._aborted: list[Sequence] = []
        self._in_step = False
        self._added = 0

    def add(self, sequence: Sequence, now: float) -> None:
        """Queues it; a step that is under way does not see it.

        Raises:
            ValueError: it could never run to its end, alone in the whole cache.
        """
        most = sequence.prompt_tokens + sequence.max_tokens
        if sequence.prompt_tokens < 1 or sequence.max_tokens < 1 or most > self.limits.max_model_len:
            raise ValueError(
                f"{sequence.request_id}: got {sequence.prompt_tokens} prompt and {sequence.max_tokens} output tokens, "
                f"expected at least 1 of each and at most {self.limits.max_model_len} together"
            )
        if self.kv.needed(most - 1) > self.kv.usable:
            raise ValueError(
                f"{sequence.request_id}: got {most} tokens, expected at most "
                f"{self.kv.usable * self.kv.block_size}, which is the whole KV cache"
            )
        sequence.queued_at = now
        self._added += 1
        sequence.number = self._added
        self.waiting.append(sequence)

    def abort(self, sequence: Sequence) -> None:
        """Nobody waits for it any more: no further token, and its blocks are free when the step under way ends."""
        if sequence.gone:
            return
        sequence.gone = True
        self._aborted.append(sequence)
        if not self._in_step:
            self._drop_aborted()

    @property
    def busy(self) -> bool:
        """Something waits or runs."""
        return bool(self.waiting or self.running)

    def plan(self, now: float) -> Plan | None:
        """The next step, or None when nothing waits or runs.

        Raises:
            RuntimeError: the step before it was not completed.
        """
        if self._in_step:
            raise RuntimeError("plan was called in the middle of a step, expected complete first")
        if not self.busy:
            return None
        chunks: list[Chunk] = []
        preempted: list[Sequence] = []
        most = self._chunk_bound()
        budget = self._plan_running(most, chunks, preempted)
        joined: list[Sequence] = []
        queried = hits = 0
        if not preempted:
            queried, hits = self._plan_waiting(budget, most, chunks, joined, now)
        self._in_step = True
        prefills = [chunk for chunk in chunks if chunk.is_prefill]
        decodes = [chunk for chunk in chunks if not chunk.is_prefill]
        prefill_tokens = sum(chunk.tokens for chunk in prefills)
        return Plan(
            chunks=tuple(chunks),
            preempted=tuple(preempted),
            joined=tuple(joined),
            prefill_tokens=prefill_tokens,
            decodes=len(decodes),
            seconds=self.profile.step_seconds(
                prefill_tokens=prefill_tokens,
                prefill_chunks=len(prefills),
                chunk_context=sum(chunk.tokens * (chunk.context + chunk.tokens / 2) for chunk in prefills),
                decodes=len(decodes),
                decode_context=sum(chunk.context for chunk in decodes),
            ),
            queried_tokens=queried,
            hit_tokens=hits,
        )

    def complete(self, plan: Plan, now: float) -> StepEnd:
        """The step's seconds have passed: `now` is the stamp of the tokens that it brought.

        Raises:
            RuntimeError: no step is under way.
        """
        if not self._in_step:
            raise RuntimeError("complete was called without a step under way, expected plan first")
        self._in_step = False
        produced: list[Sequence] = []
        finished: list[Sequence] = []
        for chunk in plan.chunks:
            sequence = chunk.sequence
            produces = chunk.produces
            sequence.computed += chunk.tokens
            if not produces or sequence.gone:
                continue
            sequence.output_tokens += 1
            sequence.last_token_at = now
            if sequence.first_token_at is None:
                sequence.first_token_at = now
            produced.append(sequence)
            if sequence.output_tokens == sequence.max_tokens:
                sequence.gone = True
                finished.append(sequence)
                self._free(sequence)
        if finished:
            self.running = [sequence for sequence in self.running if sequence.blocks]
        self._drop_aborted()
        return StepEnd(tuple(produced), tuple(finished))

    def _plan_running(self, most: int, chunks: list[Chunk], preempted: list[Sequence]) -> int:
        """Adds the chunks of running sequences; returns the tokens that are left."""
        budget = self.limits.max_num_batched_tokens
        index = 0
        while index < len(self.running) and budget > 0:
            sequence = self.running[index]
            tokens = min(sequence.tokens - sequence.computed, most, budget)
            while not self._extend(sequence, tokens):
                last = self.running.pop()
                self._preempt(last)
                preempted.append(last)
                if last is sequence:
                    return budget
            chunks.append(Chunk(sequence, sequence.computed, tokens))
            budget -= tokens
            index += 1
        return budget

    def _plan_waiting(
        self, budget: int, most: int, chunks: list[Chunk], joined: list[Sequence], now: float
    ) -> tuple[int, int]:
        """Lets waiting sequences join; returns the tokens asked of the prefix cache, and those that it had."""
        queried = hits = 0
        while self.waiting and budget > 0 and len(self.running) < self.limits.max_num_seqs:
            sequence = self.waiting[0]
            found = self._prefix(sequence)
            hit = len(found) * self.kv.block_size
            # vLLM admits only what fits as a whole, though the first chunk needs less: else prompts evict each other.
            whole = self.kv.needed(sequence.tokens) - len(found) + self.kv.unheld(found)
            if whole > self.kv.free:
                break
            tokens = min(sequence.tokens - hit, most, budget)
            self.kv.hold(found)
            sequence.blocks = found
            sequence.filled = len(found)
            sequence.computed = hit
            self._extend(sequence, tokens)
            self.waiting.popleft()
            self.running.append(sequence)
            joined.append(sequence)
            if sequence.preemptions == 0:
                sequence.cached_tokens = hit
                sequence.scheduled_at = now
                if self.limits.prefix_caching:
                    queried += sequence.tokens
                    hits += hit
            chunks.append(Chunk(sequence, hit, tokens))
            budget -= tokens
        return queried, hits

    def _chunk_bound(self) -> int:
        """Most tokens of one sequence in this step: one that is alone starves nobody, and takes all that it can."""
        threshold = self.limits.long_prefill_token_threshold
        alone = len(self.running) + len(self.waiting) <= 1
        return self.limits.max_num_batched_tokens if alone or not threshold else threshold

    def _prefix(self, sequence: Sequence) -> list[int]:
        """The blocks of its beginning that are in the cache."""
        if not self.limits.prefix_caching:
            return []
        if sequence.preemptions == 0:
            return self.kv.prefix(sequence.hashes, sequence.tokens)
        full = sequence.tokens // self.kv.block_size
        return self.kv.prefix([sequence.block_hash(index) for index in range(full)], sequence.tokens)

    def _extend(self, sequence: Sequence, tokens: int) -> bool:
        """Takes the blocks for `tokens` more tokens; False when there are too few."""
        end = sequence.computed + tokens
        missing = self.kv.needed(end) - len(sequence.blocks)
        if missing > self.kv.free:
            return False
        if missing > 0:
            sequence.blocks += self.kv.take(missing)
        # As in vLLM, a block can be hit as soon as the step that fills it is planned.
        full = end // self.kv.block_size
        if full > sequence.filled and self.limits.prefix_caching:
            for index in range(sequence.filled, full):
                self.kv.fill(sequence.blocks[index], sequence.block_hash(index))
            sequence.filled = full
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self._free(sequence)
        sequence.preemptions += 1
        self.waiting.appendleft(sequence)

    def _free(self, sequence: Sequence) -> None:
        # The last block first: what comes later in a sequence is the less likely to be asked for again.
        self.kv.release(reversed(sequence.blocks))
        sequence.blocks = []
        sequence.filled = 0
        sequence.computed = 0

    def _drop_aborted(self) -> None:
        if not self._aborted:
            return
        aborted = set(map(id, self._aborted))
        self._aborted = []
        for sequence in self.running:
            if id(sequence) in aborted:
                self._free(sequence)
        self.running = [sequence for sequence in self.running if id(sequence) not in aborted]
        self.waiting = deque(sequence for sequence in self.waiting if id(sequence) not in aborted)
