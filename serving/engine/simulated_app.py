"""The simulated replica's HTTP server: the part of vLLM's OpenAI API that a gateway talks to, on uvicorn.

Paths: `/v1/chat/completions`, `/v1/completions`, `/v1/models`, `/tokenize`, `/health`, `/ping`, `/version`, `/metrics`.
A client that leaves is aborted in the engine at once, which frees what it held at the end of the step under way.
"""

import asyncio
import os
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version

import orjson
import uvicorn
import uvloop
from prometheus_client import GC_COLLECTOR, PLATFORM_COLLECTOR, PROCESS_COLLECTOR, CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send
from tokenizers import Tokenizer

from serving.engine import simulated_request
from serving.engine.engine_span import EngineSpans, SpanSource
from serving.engine.sequence import EngineLimits
from serving.engine.simulated import EngineBusyError, SimulatedEngine, TokenStream
from serving.engine.simulated_reply import ReplyShape, models_body, text_pieces
from serving.engine.simulated_request import Parsed, RefusedError
from serving.engine.step_time import Profile
from serving.engine.tiny_model import tokenizer as tiny_tokenizer
from serving.engine.vllm_metrics import VllmMetrics

ASIDE_BYTES = 4096
"""Prompts above this size are tokenized in a thread: they would hold up the step loop by a millisecond or more."""

SHORTEST_REPLY, LONGEST_REPLY = 32, 256
"""Tokens of a reply that may end by itself (`ignore_eos` not set): drawn from the prompt between these bounds."""

SHUTDOWN_SECONDS = 1
"""Streams may run on this long after SIGTERM. vLLM ends them at once."""

BUSY = {
    "max_num_queued_reqs": "the replica holds as many requests as it may",
    "max_num_queued_tokens": "the replica holds as many prompt tokens in prefill as it may",
}


@dataclass(frozen=True)
class SimulatedOptions:
    """What a simulated replica is to be."""

    profile: Profile
    limits: EngineLimits
    name: str = "laneway-tiny"
    """What requests call the model."""
    host: str = "127.0.0.1"
    port: int = 8100
    max_num_queued_reqs: int | None = None
    max_num_queued_tokens: int | None = None
    bounds: Mapping[str, tuple[float, ...]] | None = None
    """Histogram bounds by family (`buckets.from_spec`); None: vLLM's own."""
    tokenizer: Tokenizer | None = None
    """None: the tiny model's."""


class SimulatedReplica:
    """The application and what it runs on."""

    def __init__(self, options: SimulatedOptions, environ: Mapping[str, str]) -> None:
        """Raises OtlpSettingError and ValueError for settings that cannot be followed."""
        self.options = options
        self.registry = CollectorRegistry()
        for collector in (PROCESS_COLLECTOR, PLATFORM_COLLECTOR, GC_COLLECTOR):
            self.registry.register(collector)
        metrics = VllmMetrics(self.registry, options.name, options.profile, options.limits, options.bounds or {})
        self.spans = EngineSpans(environ)
        self.engine = SimulatedEngine(
            options.profile,
            options.limits,
            metrics,
            self.spans,
            options.max_num_queued_reqs,
            options.max_num_queued_tokens,
        )
        self._tokenizer = options.tokenizer or tiny_tokenizer()
        self._pieces = text_pieces(self._tokenizer)
        self._created = int(time.time())
        self.app = Starlette(
            routes=[
                Route("/v1/chat/completions", self._chat, methods=["POST"]),
                Route("/v1/completions", self._complete, methods=["POST"]),
                Route("/v1/models", self._models),
                Route("/tokenize", self._tokenize, methods=["POST"]),
                Route("/health", _empty),
                Route("/ping", _empty),
                Route("/version", _version),
                Route("/metrics", self._metrics),
            ],
            exception_handlers={HTTPException: _not_found, RefusedError: _refusal},
        )

    async def _chat(self, request: Request) -> Response:
        return await self._generate(request, chat=True)

    async def _complete(self, request: Request) -> Response:
        return await self._generate(request, chat=False)

    async def _generate(self, request: Request, chat: bool) -> Response:
        arrival, arrival_ns = time.monotonic(), time.time_ns()
        parsed = await self._parsed(request, chat)
        try:
            self.engine.check_admission()
            tokens = await self._tokens(parsed)
            room = self.options.limits.max_model_len - len(tokens)
            if self.options.profile.request_ms:
                await asyncio.sleep(self.options.profile.request_ms / 1000)
            headers = request.headers
            reply_id = f"{'chatcmpl' if chat else 'cmpl'}-{headers.get('x-request-id') or os.urandom(8).hex()}"
            asked = min(parsed.asked_tokens or room, room)
            length, reason = _reply_length(parsed, asked, tokens)
            stream = self.engine.submit(
                tokens,
                length,
                SpanSource(
                    request_id=reply_id,
                    trace_headers={name: headers[name] for name in ("traceparent", "tracestate") if name in headers},
                    arrival_ns=arrival_ns,
                    arrival=arrival,
                    max_tokens=asked,
                    temperature=parsed.temperature,
                    top_p=parsed.top_p,
                ),
                ReplyShape(parsed, reply_id, arrival_ns // 1_000_000_000, self.options.name, len(tokens)),
                self._pieces,
                reason,
                parsed.stream,
            )
        except EngineBusyError as busy:
            raise RefusedError(503, "Service Unavailable", BUSY[busy.reason]) from None
        except ValueError:
            raise RefusedError(400, "BadRequestError", "prompt and output do not fit into the KV cache") from None
        return _StreamResponse(self.engine, stream, parsed.stream)

    async def _parsed(self, request: Request, chat: bool) -> Parsed:
        limit = self.options.limits.max_model_len
        body, kind = await request.body(), request.headers.get("content-type", "")
        return simulated_request.parse(body, kind, chat, self.options.name, limit)

    async def _tokens(self, parsed: Parsed) -> list[int]:
        if parsed.text is not None and len(parsed.text) > ASIDE_BYTES:
            tokens = await asyncio.to_thread(simulated_request.encode, parsed, self._tokenizer)
        else:
            tokens = simulated_request.encode(parsed, self._tokenizer)
        if tokens and not 0 <= max(tokens) < self._tokenizer.get_vocab_size():
            raise RefusedError(400, "BadRequestError", "prompt: got a token id that is out of vocabulary")
        simulated_request.check_length(len(tokens), self.options.limits.max_model_len)
        return tokens

    async def _models(self, _: Request) -> Response:
        limit = self.options.limits.max_model_len
        return _json(models_body(self.options.name, self._created, limit))

    async def _tokenize(self, request: Request) -> Response:
        chat = b'"messages"' in await request.body()
        tokens = await self._tokens(await self._parsed(request, chat))
        length = self.options.limits.max_model_len
        return _json({"count": len(tokens), "max_model_len": length, "tokens": tokens, "token_strs": None})

    async def _metrics(self, _: Request) -> Response:
        # In a thread: to render some hundred series on the loop would hold the step loop up by milliseconds.
        text = await asyncio.to_thread(generate_latest, self.registry)
        return Response(text, media_type=None, headers={"content-type": CONTENT_TYPE_LATEST})


class _StreamResponse(Response):
    """Sends what the engine makes, until its end or the client's leaving, which aborts it."""

    def __init__(self, engine: SimulatedEngine, stream: TokenStream, streamed: bool) -> None:
        self._engine = engine
        self._stream = stream
        self._streamed = streamed
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        left = asyncio.create_task(self._abort_when_client_leaves(receive))
        try:
            if self._streamed:
                await send(_start(b"text/event-stream; charset=utf-8"))
            while data := await self._stream.read():
                last = self._stream.ended
                if not self._streamed:
                    await send(_start(b"application/json", (b"content-length", str(len(data)).encode())))
                await send({"type": "http.response.body", "body": data, "more_body": not last})
                if last:
                    break
        finally:
            left.cancel()
            self._engine.abort(self._stream)

    async def _abort_when_client_leaves(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._engine.abort(self._stream)


def _start(content_type: bytes, *more: tuple[bytes, bytes]) -> dict[str, object]:
    return {"type": "http.response.start", "status": 200, "headers": [(b"content-type", content_type), *more]}


def _reply_length(parsed: Parsed, asked: int, tokens: list[int]) -> tuple[int, str]:
    """Output tokens and finish reason. A reply that may end by itself has a length of its own, fixed by its prompt."""
    if parsed.ignore_eos:
        return asked, "length"
    own = SHORTEST_REPLY + hash((len(tokens), *tokens[-64:])) % (LONGEST_REPLY - SHORTEST_REPLY)
    own = max(own, parsed.min_tokens)
    return (own, "stop") if own < asked else (asked, "length")


def _json(value: object, status: int = 200) -> Response:
    return Response(orjson.dumps(value), status, media_type="application/json")


async def _empty(_: Request) -> Response:
    return Response(b"")


async def _version(_: Request) -> Response:
    return _json({"version": f"laneway-simulated-{version('laneway')}"})


async def _not_found(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return _json({"detail": error.detail}, error.status_code)


async def _refusal(_: Request, error: Exception) -> Response:
    assert isinstance(error, RefusedError)
    return Response(error.body(), error.status, media_type="application/json")


async def _serve(replica: SimulatedReplica) -> None:
    options = replica.options
    config = uvicorn.Config(
        replica.app,
        host=options.host,
        port=options.port,
        http="httptools",
        log_level="warning",
        access_log=False,
        lifespan="off",
        timeout_graceful_shutdown=SHUTDOWN_SECONDS,
    )
    server = uvicorn.Server(config)
    engine = asyncio.create_task(replica.engine.run(), name="engine steps")
    serving = asyncio.create_task(server.serve(), name="http server")
    await asyncio.wait((engine, serving), return_when=asyncio.FIRST_COMPLETED)
    # A replica without its engine must not go on answering: its callers would wait for ever.
    server.should_exit = True
    await serving
    engine.cancel()
    await asyncio.gather(engine, return_exceptions=True)
    if not engine.cancelled() and (error := engine.exception()) is not None:
        raise error


def serve(options: SimulatedOptions, environ: Mapping[str, str]) -> None:
    """Runs a replica until SIGTERM or SIGINT.

    Raises:
        OtlpSettingError, ValueError: for settings that cannot be followed.
    """
    replica = SimulatedReplica(options, environ)
    # uvicorn raises the signal again when it has ended; the process would die before its last spans were sent.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_serve(replica))
    finally:
        replica.spans.close()
