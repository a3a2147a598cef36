"""What a client must know of an OpenAI-style answer: when content came, how it ended, and how many tokens it had."""

from dataclasses import dataclass, field
from typing import Any

import orjson

CONTENT_KEYS = ("content", "reasoning_content", "reasoning", "tool_calls", "function_call", "refusal", "audio")
"""Any of these in a delta is content: a reader sees thinking and tool calls too. A role alone is not."""


class NotAnAnswerError(ValueError):
    """The server sent something that is no OpenAI-style answer. The text never quotes it."""


@dataclass(slots=True)
class Answer:
    """One answer as it comes in, streamed or whole."""

    content_chunks: int = 0
    done: bool = False
    """`[DONE]` came, or the whole body was read."""
    finished: bool = False
    """A choice has its finish reason."""
    error: dict[str, Any] | None = None
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    _partial: bytes = field(default=b"", repr=False)

    def feed(self, data: bytes) -> int:
        """Reads bytes of an event stream; the number of content chunks in them.

        Raises:
            NotAnAnswerError: an event's data is no JSON object.
        """
        data = self._partial + data if self._partial else data
        if b"\r" in data:
            data = data.replace(b"\r\n", b"\n")
        *events, self._partial = data.split(b"\n\n")
        before = self.content_chunks
        for event in events:
            self._event(event)
        return self.content_chunks - before

    def whole(self, body: bytes) -> None:
        """Reads an answer that is not streamed.

        Raises:
            NotAnAnswerError: it is no JSON object with choices.
        """
        reply = _object(body)
        if not isinstance(reply.get("choices"), list):
            raise NotAnAnswerError("a body without choices")
        self._usage(reply.get("usage"))
        self.done = self.finished = True

    def _event(self, event: bytes) -> None:
        payload = event[6:] if event.startswith(b"data: ") and b"\n" not in event else _data(event)
        if not payload:
            return
        if payload == b"[DONE]":
            self.done = True
            return
        chunk = _object(payload)
        if chunk.get("error") is not None:
            error = chunk["error"]
            self.error = error if isinstance(error, dict) else {}
            return
        self._usage(chunk.get("usage"))
        choices = chunk.get("choices") or []
        if not isinstance(choices, list) or not all(isinstance(choice, dict) for choice in choices):
            raise NotAnAnswerError("choices that are no list of objects")
        for choice in choices:
            if choice.get("finish_reason"):
                self.finished = True
            delta = choice.get("delta")
            if any(map(delta.get, CONTENT_KEYS)) if isinstance(delta, dict) else choice.get("text"):
                self.content_chunks += 1

    def _usage(self, usage: Any) -> None:
        if isinstance(usage, dict):
            self.prompt_tokens = usage.get("prompt_tokens", self.prompt_tokens)
            self.output_tokens = usage.get("completion_tokens", self.output_tokens)


def error_of(body: bytes) -> dict[str, Any]:
    """The `error` object of a refusal's body; empty where it has none. vLLM puts its fields at the top."""
    try:
        reply = _object(body)
    except NotAnAnswerError:
        return {}
    error = reply.get("error", reply)
    return error if isinstance(error, dict) else {}


def _data(event: bytes) -> bytes:
    lines = [line[5:].removeprefix(b" ") for line in event.split(b"\n") if line.startswith(b"data:")]
    return b"\n".join(lines).strip()


def _object(text: bytes) -> dict[str, Any]:
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError:
        raise NotAnAnswerError("data that is not JSON") from None
    if not isinstance(value, dict):
        raise NotAnAnswerError("data that is no JSON object")
    return value
