"""An engine that answers at once: what a proxy adds is then all there is to see.

Speaks enough of the OpenAI API for every proxy under test, in one process, on bare asyncio protocols. The bytes of a
reply are made once, at start; a request costs one parse of its head and one search of its body.

    python -m tests.bench.stub_engine --port 18400 [--tokens 16] [--gap 0.0]
"""

import argparse
import asyncio
import contextlib
import json
import re
import signal
from dataclasses import dataclass
from typing import cast

import httptools
import uvloop

MODEL = "laneway-tiny"
_STREAM = re.compile(rb'"stream"\s*:\s*true')
_USAGE = re.compile(rb'"include_usage"\s*:\s*true')

METRICS = b"""# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="laneway-tiny"} 0.0
# HELP vllm:num_requests_waiting Number of requests waiting to be processed.
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="laneway-tiny"} 0.0
# HELP vllm:kv_cache_usage_perc KV-cache usage. 1 means 100 percent usage.
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{engine="0",model_name="laneway-tiny"} 0.0
# HELP vllm:generation_tokens_total Number of generation tokens processed.
# TYPE vllm:generation_tokens_total counter
vllm:generation_tokens_total{engine="0",model_name="laneway-tiny"} 0.0
"""


@dataclass(frozen=True)
class Replies:
    """Everything that the stub can say, as bytes on the wire."""

    head: bytes
    """Head of a streamed reply."""
    events: tuple[bytes, ...]
    """HTTP chunks: the role, then one for each token; the last token's carries the finish reason."""
    usage: bytes
    end: bytes
    whole: bytes
    models: bytes
    metrics: bytes
    ok: bytes
    unknown: bytes


def replies(tokens: int) -> Replies:
    """Makes them for this many output tokens a reply."""
    base = {"id": "chatcmpl-0", "object": "chat.completion.chunk", "created": 0, "model": MODEL}
    usage = {"prompt_tokens": 100, "completion_tokens": tokens, "total_tokens": 100 + tokens}

    def choice(delta: dict[str, str], finish: str | None = None) -> dict[str, object]:
        return base | {"choices": [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}]}

    events = [_chunk(_event(choice({"role": "assistant", "content": ""})))]
    for number in range(tokens):
        finish = "length" if number == tokens - 1 else None
        events.append(_chunk(_event(choice({"content": f" word{number}"}, finish))))
    whole = base | {
        "object": "chat.completion",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "".join(f" word{number}" for number in range(tokens))},
                "logprobs": None,
                "finish_reason": "length",
            }
        ],
        "usage": usage,
    }
    models = {"object": "list", "data": [{"id": MODEL, "object": "model", "created": 0, "owned_by": "stub"}]}
    return Replies(
        head=b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n",
        events=tuple(events),
        usage=_chunk(_event(base | {"choices": [], "usage": usage})),
        end=_chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n",
        whole=_reply(b"200 OK", b"application/json", json.dumps(whole).encode()),
        models=_reply(b"200 OK", b"application/json", json.dumps(models).encode()),
        metrics=_reply(b"200 OK", b"text/plain; version=0.0.4", METRICS),
        ok=_reply(b"200 OK", b"application/json", b"{}"),
        unknown=_reply(b"404 Not Found", b"application/json", b'{"error":{"message":"not found"}}'),
    )


def _event(value: object) -> bytes:
    return b"data: " + json.dumps(value, separators=(",", ":")).encode() + b"\n\n"


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def _reply(status: bytes, kind: bytes, body: bytes) -> bytes:
    return b"HTTP/1.1 %b\r\ncontent-type: %b\r\ncontent-length: %d\r\n\r\n%b" % (status, kind, len(body), body)


class StubProtocol(asyncio.Protocol):
    """One connection, kept alive. Requests on it are answered in turn."""

    def __init__(self, said: Replies, gap: float) -> None:
        self._said = said
        self._gap = gap
        self._parser = httptools.HttpRequestParser(self)
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._path = b""
        self._body: list[bytes] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is none by class

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        if self._timer is not None:
            self._timer.cancel()

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            if self._transport is not None:
                self._transport.close()

    # The parser's callbacks.
    def on_message_begin(self) -> None:
        self._path = b""
        self._body = []

    def on_url(self, url: bytes) -> None:
        self._path += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == b"expect" and self._transport is not None:
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, body: bytes) -> None:
        self._body.append(body)

    def on_message_complete(self) -> None:
        said = self._said
        path = self._path.split(b"?", 1)[0]
        if path.endswith(b"/completions"):
            body = b"".join(self._body)
            if _STREAM.search(body) is None:
                self._write(said.whole)
            else:
                self._stream(said.usage if _USAGE.search(body) is not None else b"")
        elif path == b"/v1/models":
            self._write(said.models)
        elif path == b"/metrics":
            self._write(said.metrics)
        elif path in (b"/health", b"/healthz", b"/readiness", b"/liveness", b"/server_info", b"/get_server_info"):
            self._write(said.ok)
        else:
            self._write(said.unknown)

    def _stream(self, usage: bytes) -> None:
        said = self._said
        if not self._gap:
            self._write(said.head + b"".join(said.events) + usage + said.end)
            return
        self._write(said.head + said.events[0] + said.events[1])
        self._next(2, usage)

    def _next(self, position: int, usage: bytes) -> None:
        if position == len(self._said.events):
            self._write(usage + self._said.end)
            return
        self._timer = asyncio.get_running_loop().call_later(self._gap, self._token, position, usage)

    def _token(self, position: int, usage: bytes) -> None:
        self._write(self._said.events[position])
        self._next(position + 1, usage)

    def _write(self, data: bytes) -> None:
        if self._transport is not None:
            self._transport.write(data)


async def serve(port: int, tokens: int, gap: float) -> None:
    """Serves on loopback until SIGTERM or SIGINT. `gap`: seconds between tokens; 0 sends a reply in one write."""
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    said = replies(tokens)
    server = await loop.create_server(lambda: StubProtocol(said, gap), "127.0.0.1", port, backlog=4096)
    await stop.wait()
    server.close()


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description="An OpenAI-style engine that answers at once.")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--tokens", type=int, default=16, help="content chunks a stream")
    parser.add_argument("--gap", type=float, default=0.0, help="seconds between tokens; 0: all at once")
    arguments = parser.parse_args()
    with contextlib.suppress(KeyboardInterrupt):
        uvloop.run(serve(arguments.port, arguments.tokens, arguments.gap))


if __name__ == "__main__":
    main()
