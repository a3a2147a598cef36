"""How many tokens a prompt has, before the engine says so.

With the model's tokenizer.json, text is counted by it. Without, bytes are divided by a ratio that is learned, per
model, from the `usage` of the engine's answers. Either way the chat template's own tokens are learned per message. What
nobody can count here (images, audio, how a template writes tools) is estimated and said to be estimated.

Measured on one core of a shared machine: `encode_batch_fast` takes 0.27 µs a byte of English (`encode`, which also
keeps offsets, 0.40), and the way to a thread and back 54 µs (p95 306).
"""

import asyncio
from dataclasses import dataclass
from pathlib import Path
from weakref import WeakKeyDictionary

from tokenizers import Tokenizer

from serving.gateway.prompt_fit import DECAY, PromptFit
from serving.gateway.request import Kind, ParsedRequest
from serving.spec import Model

FIRST_BYTES_PER_TOKEN = 4.0
"""English text in common vocabularies; only until the first answer taught better."""
MOST_BYTES_PER_TOKEN = 16.0
"""No prose or code comes near it. Text of more bytes than this times the model's length is not tokenized at all."""
MEDIA_TOKENS = 1024
"""An image of 1024 × 1024 in common vision models takes about this much."""
THREAD_FROM_CHARACTERS = 2048
"""About 0.5 ms of tokenizing: what is shorter is done sooner here than by a thread, what is longer would be felt by
every other request."""


@dataclass(frozen=True, slots=True)
class PromptCount:
    """A prompt's length in tokens; `exact` only where it came from the tokenizer or as token ids."""

    tokens: int
    exact: bool
    at_least: int = 0
    """The prompt cannot be shorter than this: what a refusal for its length may go by."""


class TokenCounter:
    """The count of one model's prompts, and what it has learned. Lives on the event loop."""

    def __init__(self, model: Model) -> None:
        """Raises ValueError if the model names a tokenizer that cannot be read."""
        self._tokenizer = None if model.tokenizer is None else _load(Path(model.tokenizer), model.name)
        self._most_bytes = model.max_model_len * MOST_BYTES_PER_TOKEN
        # The unit of text is a token where there is a tokenizer, which leaves nothing to learn, else a byte.
        self._fit = (
            PromptFit(1 / FIRST_BYTES_PER_TOKEN, weight=1.0, bounds=(1 / MOST_BYTES_PER_TOKEN, 1.0))
            if self._tokenizer is None
            else PromptFit(1.0, weight=1.0, bounds=(1.0, 1.0))
        )
        self._bytes = 0.0
        self._tokens = 0.0
        self._text_tokens: WeakKeyDictionary[ParsedRequest, int] = WeakKeyDictionary()
        """Of requests under way, as the tokenizer counted them."""

    @property
    def bytes_per_token(self) -> float:
        """Of text: learned from the engine's counts or, with a tokenizer, from its own."""
        if self._tokenizer is None:
            return 1 / self._fit.per_unit
        return self._bytes / self._tokens if self._tokens > 0 else FIRST_BYTES_PER_TOKEN

    @property
    def tokens_per_message(self) -> float:
        """What the chat template adds, as far as it is known."""
        return self._fit.per_message

    async def count(self, parsed: ParsedRequest) -> PromptCount:
        """The prompt's tokens; at least 1. Long texts are tokenized in a thread."""
        parts = parsed.prompt
        size = sum(map(_size, parts.texts))
        uncounted = parts.media * MEDIA_TOKENS + parts.tools_bytes / self.bytes_per_token
        if parts.texts and (self._tokenizer is None or size > self._most_bytes):
            text = size / self.bytes_per_token + parts.messages * self.tokens_per_message
            least = int(size / MOST_BYTES_PER_TOKEN)
            return PromptCount(max(1, round(text + uncounted)), False, max(1, least))
        counted = parts.token_ids
        if self._tokenizer is not None and parts.texts:
            special = parsed.kind is Kind.COMPLETION and parsed.body.get("add_special_tokens") is not False
            if sum(map(len, parts.texts)) < THREAD_FROM_CHARACTERS:
                counted = _tokenize(self._tokenizer, parts.texts, special)
            else:
                counted = await asyncio.to_thread(_tokenize, self._tokenizer, parts.texts, special)
            self._text_tokens[parsed] = counted
            self._bytes = self._bytes * DECAY + size
            self._tokens = self._tokens * DECAY + counted
        exact = not (parts.messages or parts.media or parts.tools_bytes)
        total = counted + parts.messages * self.tokens_per_message + uncounted
        return PromptCount(max(1, round(total)), exact, max(1, counted))

    def learn(self, parsed: ParsedRequest, estimated: int, actual: int) -> float:
        """The engine's `usage` said that the prompt had `actual` tokens where `count` had said `estimated`.

        Returns the relative error of that estimate, (estimated − actual) / actual: above 0 where it was too long.
        """
        parts = parsed.prompt
        guessed = bool(parts.media or parts.tools_bytes)  # nothing to be learned from what was guessed in part
        if parts.texts and not guessed:
            if self._tokenizer is None:
                self._fit.learn(sum(map(_size, parts.texts)), parts.messages, actual)
            elif parts.messages and (text_tokens := self._text_tokens.get(parsed)) is not None:
                self._fit.learn(text_tokens, parts.messages, actual)
        return (estimated - actual) / max(1, actual)


def _load(path: Path, model: str) -> Tokenizer:
    file = path / "tokenizer.json" if path.is_dir() else path
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare Exception
        raise ValueError(
            f"models[{model}].tokenizer: {path} cannot be read ({error}), expected a tokenizer.json or its folder"
        ) from None
    # A file may carry the settings of a training run, with which every long prompt would count as short.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _tokenize(tokenizer: Tokenizer, texts: tuple[str, ...], special: bool) -> int:
    return sum(len(encoded) for encoded in tokenizer.encode_batch_fast(list(texts), add_special_tokens=special))


def _size(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode())
