"""How many tokens a prompt has, before the engine says so.

With the model's tokenizer.json, text is counted by it. Without, bytes are divided by a ratio that is learned, per
model, from the `usage` of the engine's answers. Either way the chat template's own tokens are learned per message. What
nobody can count here (images, audio) is estimated by a constant and said to be estimated.
"""

import asyncio
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from serving.gateway.request import ParsedRequest
from serving.spec import Model

FIRST_BYTES_PER_TOKEN = 4.0
"""English text in common vocabularies; only until the first answer taught better."""
FIRST_TOKENS_PER_MESSAGE = 4.0
MEDIA_TOKENS = 1024
"""An image of 1024 × 1024 in common vision models takes about this much."""
THREAD_FROM_BYTES = 8192
"""Tokenizing takes about 0.25 µs a byte: below this the way to a thread costs more than it saves the loop."""
DECAY = 0.98
"""Weight of the past at each lesson: about the last 50 answers count."""


@dataclass(frozen=True, slots=True)
class PromptCount:
    """A prompt's length in tokens; `exact` only where it came from the tokenizer or as token ids."""

    tokens: int
    exact: bool


class TokenCounter:
    """The count of one model's prompts, and what it has learned. Lives on the event loop."""

    def __init__(self, model: Model) -> None:
        """Raises ValueError if the model names a tokenizer that cannot be read."""
        self._tokenizer = None if model.tokenizer is None else _load(Path(model.tokenizer), model.name)
        self._bytes = 0.0
        self._tokens = 0.0
        self._overhead = 0.0
        self._messages = 0.0

    @property
    def bytes_per_token(self) -> float:
        """The ratio in use."""
        return self._bytes / self._tokens if self._tokens > 0 else FIRST_BYTES_PER_TOKEN

    @property
    def tokens_per_message(self) -> float:
        """What the chat template adds, as far as it is known."""
        return self._overhead / self._messages if self._messages > 0 else FIRST_TOKENS_PER_MESSAGE

    async def count(self, parsed: ParsedRequest) -> PromptCount:
        """The prompt's tokens; at least 1."""
        parts = parsed.prompt
        rest = parts.token_ids + parts.media * MEDIA_TOKENS + round(parts.messages * self.tokens_per_message)
        tools = parts.tools_bytes / self.bytes_per_token
        if self._tokenizer is None or not parts.texts:
            size = sum(map(_size, parts.texts))
            exact = not parts.texts and not parts.media and not parts.messages
            return PromptCount(max(1, round(size / self.bytes_per_token + tools + rest)), exact)
        if sum(map(len, parts.texts)) < THREAD_FROM_BYTES:
            text = _tokenize(self._tokenizer, parts.texts)
        else:
            text = await asyncio.to_thread(_tokenize, self._tokenizer, parts.texts)
        exact = not parts.media and not parts.messages and not parts.tools_bytes
        return PromptCount(max(1, round(text + tools + rest)), exact)

    def learn(self, parsed: ParsedRequest, estimated: int, actual: int) -> None:
        """The engine's `usage` said that the prompt had `actual` tokens where `count` had said `estimated`."""
        parts = parsed.prompt
        if parts.media or parts.tools_bytes or not parts.texts or actual <= 0:
            return  # nothing to be learned from what was guessed in part
        if self._tokenizer is None:
            size = sum(map(_size, parts.texts))
            text = actual - parts.messages * self.tokens_per_message
            if size > 0 and text > 0:
                self._bytes = self._bytes * DECAY + size
                self._tokens = self._tokens * DECAY + text
        elif parts.messages:
            text_tokens = estimated - round(parts.messages * self.tokens_per_message)
            self._overhead = self._overhead * DECAY + max(0, actual - text_tokens)
            self._messages = self._messages * DECAY + parts.messages


def _load(path: Path, model: str) -> Tokenizer:
    file = path / "tokenizer.json" if path.is_dir() else path
    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare Exception
        raise ValueError(
            f"models[{model}].tokenizer: {path} cannot be read ({error}), expected a tokenizer.json or its folder"
        ) from None


def _tokenize(tokenizer: Tokenizer, texts: tuple[str, ...]) -> int:
    return sum(len(tokenizer.encode(text, add_special_tokens=False).ids) for text in texts)


def _size(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))
