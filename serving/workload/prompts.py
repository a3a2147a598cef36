"""Prompt text of a wanted number of tokens: random words that no cache has seen, except where the trace shares them.

Words come from a fixed vocabulary, so that their number of tokens is known once for all; which words is drawn anew
for each run and request. With the model's tokenizer the count is exact; without it, it rests on bytes per token, as
measured at the target by the probe before a run.
"""

import random
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Protocol

from serving.workload.trace import TraceRequest

VOCABULARY_WORDS = 2048
FEWEST_WORDS = 256
"""With fewer, prompts of one run could begin alike, and a prefix cache would know them."""
_CONSONANTS, _VOWELS = "bdfgklmnprstvz", "aeiou"


class TokenizerError(ValueError):
    """The tokenizer cannot be read or used."""


class _Tokenizer(Protocol):
    def encode(self, sequence: str, *, add_special_tokens: bool) -> "_Encoding": ...


class _Encoding(Protocol):
    @property
    def ids(self) -> list[int]: ...
    @property
    def offsets(self) -> list[tuple[int, int]]: ...


@dataclass(frozen=True, slots=True)
class Cost:
    """What words cost at a target: tokens = template + text's bytes / bytes per token."""

    bytes_per_token: float
    template_tokens: float = 0.0
    """Tokens that the chat template puts round the text."""


def vocabulary() -> tuple[str, ...]:
    """Pronounceable words, each with the space before it; always the same ones."""
    rng = random.Random("laneway prompt words")
    words: set[str] = set()
    while len(words) < VOCABULARY_WORDS:
        words.add(" " + "".join(rng.choice(_CONSONANTS) + rng.choice(_VOWELS) for _ in range(rng.randint(1, 3))))
    return tuple(sorted(words))


class PromptMaker:
    """Makes the prompts of one run.

    Args:
        salt: what makes this run's text its own: the same salt gives the same text, any other gives another.
        cost: template and bytes per token at the target.
        tokenizer: the model's `tokenizer.json`, or its folder, for exact counts.

    Raises:
        TokenizerError: it cannot be read.
    """

    def __init__(self, salt: str, cost: Cost, tokenizer: Path | None = None) -> None:
        self._salt = salt
        self._cost = cost
        self._words = vocabulary()
        self._tokenizer = None if tokenizer is None else load_tokenizer(tokenizer)
        exact = _additive_costs(self._tokenizer, self._words) if self._tokenizer else None
        self._exact = exact is not None
        self._costs: Sequence[float] = [len(word) / cost.bytes_per_token for word in self._words]
        if exact is not None:
            self._words, self._costs = tuple(exact), tuple(exact.values())
        self._smallest = min(range(len(self._words)), key=lambda i: (self._costs[i], len(self._words[i])))
        self._block = lru_cache(maxsize=4096)(self._make_block)

    @property
    def counts_words(self) -> bool:
        """Counts are exact by adding words up; else a text is cut until its count is right, or only estimated."""
        return self._exact

    def prompt(self, request: TraceRequest, number: int) -> str:
        """Text of the request's prompt tokens, template included; `number` makes it unlike any other of the run."""
        wanted = max(1.0, request.prompt_tokens - self._cost.template_tokens)
        parts: list[str] = []
        rest = wanted
        for block in request.prefix:
            if rest <= 0:
                break
            text = self._block(block, min(request.prefix_block_tokens, rest))
            parts.append(text)
            rest -= request.prefix_block_tokens
        if rest > 0:
            parts.append(self._fill(random.Random(f"{self._salt}:request:{number}"), rest))
        # Chat templates strip what a message begins with: a leading space would not be counted.
        text = "".join(parts).lstrip(" ")
        if self._tokenizer is not None and not self._exact:
            text = _cut_to(self._tokenizer, text, round(wanted))
        return text

    def text(self, tokens: int, name: str) -> str:
        """Text of about so many tokens, without regard to a template: for the probe."""
        return self._fill(random.Random(f"{self._salt}:{name}"), tokens)

    def _make_block(self, block: int, tokens: float) -> str:
        # A shorter cut of a block is a prefix of the whole one: equal seed, equal words in equal order.
        text = self._fill(random.Random(f"{self._salt}:block:{block}"), tokens)
        if self._tokenizer is not None and not self._exact:
            text = _cut_to(self._tokenizer, text, round(tokens))
        return text

    def _fill(self, rng: random.Random, tokens: float) -> str:
        words, costs, chosen, total = self._words, self._costs, [], 0.0
        draw, count = rng.random, len(self._words)
        while total < tokens:
            i = int(draw() * count)
            if total + costs[i] > tokens:
                break
            total += costs[i]
            chosen.append(words[i])
        while total + costs[self._smallest] <= tokens + 1e-9 or not chosen:
            total += costs[self._smallest]
            chosen.append(words[self._smallest])
        return "".join(chosen)


def load_tokenizer(path: Path) -> _Tokenizer:
    """The tokenizer of a `tokenizer.json` or of the folder that holds one.

    Raises:
        TokenizerError: it cannot be read.
    """
    from tokenizers import Tokenizer

    file = path / "tokenizer.json" if path.is_dir() else path
    try:
        loaded: _Tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare Exception
        raise TokenizerError(f"{file}: cannot be read ({error}), expected a tokenizer.json") from None
    return loaded


def _additive_costs(tokenizer: _Tokenizer, words: Sequence[str]) -> dict[str, int] | None:
    """Words with their tokens, if these add up in a text and some word costs a single token; None if they do not.

    They add up where the tokenizer splits at spaces before anything else, as byte-level BPE does. Words that cost
    something else without the space before them are left out: one of them may stand first.
    """

    def count(text: str) -> int:
        return len(tokenizer.encode(text, add_special_tokens=False).ids)

    costs = {word: cost for word in words if (cost := count(word)) == count(word.lstrip(" "))}
    if len(costs) < FEWEST_WORDS or min(costs.values()) != 1:
        return None
    sample = random.Random("laneway additivity").choices(list(costs), k=VOCABULARY_WORDS)
    return costs if count("".join(sample)) == sum(costs[word] for word in sample) else None


def _cut_to(tokenizer: _Tokenizer, text: str, tokens: int) -> str:
    """The text's beginning that makes so many tokens (or the fewest above it, where no cut makes exactly that)."""
    while True:
        encoding = tokenizer.encode(text, add_special_tokens=False)
        if len(encoding.ids) >= tokens:
            break
        text += text
    ends = sorted({end for _, end in encoding.offsets})
    for end in ends[bisect_left(ends, encoding.offsets[tokens - 1][1]) :]:
        # At the cut, tokens can merge otherwise than in the middle of a text.
        cut = text[:end]
        if len(tokenizer.encode(cut, add_special_tokens=False).ids) >= tokens:
            return cut
    return text
