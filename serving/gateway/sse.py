"""What the gateway must know of an engine's event stream, and nothing more.

Events are parsed as JSON until the first content and again where they may not be content (a finish reason, usage, an
error, an empty delta, `[DONE]`); between them a chunk costs one search. Bytes are passed on as they came, whole events
only, so that an event which must not reach the client (the usage that only the gateway asked for) can be left out.
"""

from dataclasses import dataclass, field
from typing import Any

import orjson

DONE = b"[DONE]"
MAX_EVENT_BYTES = 16 << 20
"""Of one event; what sends more without an end is no engine. Prompt log-probabilities of a full context need some."""

_CONTENT_KEYS = ("content", "reasoning_content", "reasoning", "tool_calls", "function_call", "refusal", "audio")


class NotAnEventStreamError(ValueError):
    """The engine sent something that is not a stream of JSON events."""


@dataclass(slots=True)
class StreamScan:
    """Reads one stream. `pass_usage`: the client asked for the usage event itself."""

    pass_usage: bool
    content_seen: bool = False
    done: bool = False
    error: dict[str, Any] | None = None
    """The engine's error event."""
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    _partial: bytes = field(default=b"", repr=False)
    _open: set[int] = field(default_factory=set, repr=False)
    _ended: set[int] = field(default_factory=set, repr=False)

    def feed(self, data: bytes) -> tuple[bytes, bool]:
        """(the whole events to pass on, whether any of them carries content).

        Raises:
            NotAnEventStreamError: an event that is looked at is not one, or one has no end.
        """
        if self._partial:
            data = self._partial + data
        if b"\r" in data:
            data = data.replace(b"\r\n", b"\n")
        end = data.rfind(b"\n\n")
        if end < 0:
            if len(data) > MAX_EVENT_BYTES:
                raise NotAnEventStreamError(f"an event of more than {MAX_EVENT_BYTES} bytes")
            self._partial = data
            return b"", False
        end += 2
        if end == len(data):
            block = data
            self._partial = b""
        else:
            block = data[:end]
            self._partial = data[end:]
        if self.content_seen and block.startswith(b"data:") and _only_content(block):
            return block, True
        return self._read(block)

    @property
    def finished(self) -> bool:
        """Choices have their finish reason, and none that was seen is without."""
        return bool(self._ended) and not self._open

    @property
    def rest(self) -> bytes:
        """Bytes after the last whole event; anything at the stream's end was cut off."""
        return self._partial

    def _read(self, block: bytes) -> tuple[bytes, bool]:
        keep: list[bytes] = []
        content = False
        for event in block.split(b"\n\n"):
            event = event.lstrip(b"\n")
            if not event:
                continue
            if (content or self.content_seen) and event.startswith(b"data:") and _only_content(event):
                content = True
                keep.append(event)
                continue
            passed, has_content = self._event(event)
            if self.error is not None:
                break  # nothing after it is part of the answer, least of all a [DONE]
            content = content or has_content
            if passed:
                keep.append(event)
        self.content_seen = self.content_seen or content
        return (b"\n\n".join(keep) + b"\n\n" if keep else b""), content

    def _event(self, event: bytes) -> tuple[bool, bool]:
        """(pass it on, it carries content)."""
        payload = b"\n".join(line[5:].removeprefix(b" ") for line in event.split(b"\n") if line.startswith(b"data:"))
        if not payload:
            if not event.startswith((b":", b"event:", b"id:", b"retry:")):
                raise NotAnEventStreamError("a line that is no field of an event stream")
            return False, False
        if payload.strip() == DONE:
            self.done = True
            return True, False
        try:
            chunk = orjson.loads(payload)
        except orjson.JSONDecodeError:
            raise NotAnEventStreamError("an event whose data is not JSON") from None
        if not isinstance(chunk, dict):
            raise NotAnEventStreamError("an event whose data is not a JSON object")
        if chunk.get("error") is not None:
            error = chunk["error"]
            self.error = error if isinstance(error, dict) else {"message": str(error)}
            return False, False
        self._usage(chunk.get("usage"))
        choices = chunk.get("choices")
        if not isinstance(choices, list):
            raise NotAnEventStreamError("an event without choices")
        if not choices:
            return self.pass_usage, False
        content = False
        for choice in choices:
            if not isinstance(choice, dict):
                raise NotAnEventStreamError("a choice that is no object")
            index = choice.get("index")
            index = index if isinstance(index, int) else 0
            if choice.get("finish_reason"):
                self._ended.add(index)
                self._open.discard(index)
            elif index not in self._ended:
                self._open.add(index)
            delta = choice.get("delta")
            if isinstance(delta, dict):
                content = content or any(delta.get(key) for key in _CONTENT_KEYS)
            else:
                content = content or bool(choice.get("text"))
        return True, content

    def _usage(self, usage: Any) -> None:
        if not isinstance(usage, dict):
            return
        self.prompt_tokens = _count(usage.get("prompt_tokens"), self.prompt_tokens)
        self.output_tokens = _count(usage.get("completion_tokens"), self.output_tokens)


@dataclass(frozen=True, slots=True)
class WholeReply:
    """What the gateway must know of a reply that is not streamed."""

    prompt_tokens: int | None
    output_tokens: int | None


def read_whole(body: bytes) -> WholeReply:
    """Reads a reply that is not streamed.

    Raises:
        NotAnEventStreamError: it is not a JSON object with choices.
    """
    try:
        reply = orjson.loads(body)
    except orjson.JSONDecodeError:
        raise NotAnEventStreamError("a body that is not JSON") from None
    if not isinstance(reply, dict) or not isinstance(reply.get("choices"), list):
        raise NotAnEventStreamError("a body without choices")
    usage = reply.get("usage")
    usage = usage if isinstance(usage, dict) else {}
    return WholeReply(_count(usage.get("prompt_tokens"), None), _count(usage.get("completion_tokens"), None))


def _count(value: Any, default: int | None) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else default


def _only_content(block: bytes) -> bool:
    """Whether nothing in it has to be looked at. It is asked for every chunk: plain searches cost a third of a regular
    expression. JSON with blanks after its colons, which vLLM does not write, is always looked at."""
    return not (
        b'"finish_reason":"' in block
        or b"[DONE]" in block
        or b'"usage":{' in block
        or b'"error"' in block
        or b'"content":""' in block
        or b'"content":null' in block
        or b'"text":""' in block
        or b'"text":null' in block
        or b'"delta":{}' in block
        or b'": ' in block
    )
