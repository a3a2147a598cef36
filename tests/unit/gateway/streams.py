"""Event streams of engines, whole and in pieces.

Those of tests/fixtures/streams were recorded from a real vLLM 0.32 (the tiny random model, usage asked for): a chat
whose tokens have no text of their own, a chat of two choices with log-probabilities, a text completion, whole replies.
"""

import json
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from serving.gateway.sse import StreamScan

STREAMS = Path(__file__).parents[2] / "fixtures" / "streams"
CHAT = (STREAMS / "vllm-0.32.0-chat.txt").read_bytes()
TWO = (STREAMS / "vllm-0.32.0-chat-two-choices.txt").read_bytes()
COMPLETION = (STREAMS / "vllm-0.32.0-completion.txt").read_bytes()


def event_of(**chunk: Any) -> bytes:
    """An event with that JSON object."""
    return b"data: " + json.dumps(chunk, separators=(",", ":")).encode() + b"\n\n"


def delta(finish: str | None = None, index: int = 0, **delta: Any) -> bytes:
    """A chunk of a chat with one choice."""
    return event_of(object="chat.completion.chunk", choices=[{"index": index, "delta": delta, "finish_reason": finish}])


ROLE = delta(role="assistant", content="")
USAGE = event_of(choices=[], usage={"prompt_tokens": 12, "total_tokens": 15, "completion_tokens": 3})
DONE = b"data: [DONE]\n\n"
REASONING = ROLE + delta(reasoning="Hm") + delta(content="4") + delta("stop", content="") + USAGE + DONE
TOOLS = (
    ROLE
    + delta(tool_calls=[{"index": 0, "id": "c1", "function": {"name": "search", "arguments": ""}}])
    + delta(tool_calls=[{"index": 0, "function": {"arguments": '{"error":"usage"}'}}])
    + delta("tool_calls")
    + USAGE
    + DONE
)
WORDS = ROLE + b"".join(delta(content=text) for text in ('say "usage": {', "data: [DONE]", '"error": 1', "\r\n\r\n"))
WORDS += delta("stop", content="") + USAGE + DONE

WHOLE_STREAMS = {
    "chat": CHAT,
    "two choices": TWO,
    "completion": COMPLETION,
    "reasoning": REASONING,
    "tools": TOOLS,
    "words that look like events": WORDS,
}


def fed(pieces: Iterable[bytes], *, pass_usage: bool = False) -> tuple[StreamScan, bytes, list[bool]]:
    """A scan that was fed, what it passed on, and for each piece whether it brought content."""
    scan = StreamScan(pass_usage=pass_usage)
    out, contents = b"", []
    for piece in pieces:
        passed, content = scan.feed(piece)
        out += passed
        contents.append(content)
    return scan, out, contents


def counts_of(scan: StreamScan) -> tuple[Any, ...]:
    """All that a scan knows."""
    return (
        *(scan.prompt_tokens, scan.output_tokens, scan.content_seen),
        *(scan.done, scan.finished, scan.error, scan.rest),
    )


def cut(stream: bytes, places: Sequence[int]) -> list[bytes]:
    """The stream in pieces."""
    edges = [0, *sorted(places), len(stream)]
    return [stream[start:end] for start, end in pairwise(edges)]
