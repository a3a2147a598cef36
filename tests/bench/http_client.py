"""Which HTTP client towards the engine, and which event loop: a bare streaming hop with each, side by side.

The hop is a raw ASGI app under uvicorn (httptools) that does nothing but ask the engine and pass the chunks on, so a
row's difference to another row is the client and the loop, not the gateway. Client and engine run on one core, the hop
on the other; rounds are interleaved.

    python -m tests.bench.http_client [--rates 100,200] [--seconds 8] [--rounds 3]
"""

import argparse
import asyncio
import os
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, Protocol, cast

import aiohttp
import httptools
import httpx2
import uvicorn
import uvloop
from rich.console import Console
from rich.table import Table

from tests.bench.measure import Sample, measure, spread
from tests.bench.open_loop import chat_body
from tests.bench.processes import cores, ready, running
from tests.bench.stub_engine import MODEL

CLIENTS = ("aiohttp", "httpx", "protocol")
LOOPS = ("uvloop", "asyncio")
FIRST_PORT = 18480


class Client(Protocol):
    """The one thing that is compared."""

    def stream(self, body: bytes) -> AsyncIterator[bytes]:
        """POSTs the body and yields the reply's bytes as they come."""


class AiohttpClient:
    """aiohttp, as the gateway uses it."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self._session = session
        self._url = url

    async def stream(self, body: bytes) -> AsyncIterator[bytes]:
        async with self._session.post(self._url, data=body, headers={"content-type": "application/json"}) as answer:
            while data := await answer.content.readany():
                yield data


class HttpxClient:
    """httpx."""

    def __init__(self, client: httpx2.AsyncClient, url: str) -> None:
        self._client = client
        self._url = url

    async def stream(self, body: bytes) -> AsyncIterator[bytes]:
        headers = {"content-type": "application/json"}
        async with self._client.stream("POST", self._url, content=body, headers=headers) as answer:
            async for data in answer.aiter_raw():
                yield data


class _Connection(asyncio.Protocol):
    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._parts: list[bytes] = []
        self._done = False
        self._parser = httptools.HttpResponseParser(self)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)  # uvloop's is none by class

    def connection_lost(self, exc: Exception | None) -> None:
        self.transport = None
        self._done = True
        self._wake()

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)
        self._wake()

    def on_body(self, data: bytes) -> None:
        self._parts.append(data)

    def on_message_complete(self) -> None:
        self._done = True

    def begin(self) -> None:
        self._parts, self._done = [], False
        self._parser = httptools.HttpResponseParser(self)

    async def read(self) -> bytes:
        while not self._parts:
            if self._done:
                return b""
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        data = b"".join(self._parts)
        self._parts = []
        return data

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class ProtocolClient:
    """The least that could work on asyncio.Protocol and httptools: the floor, not a candidate for every case."""

    def __init__(self, host: str, port: int, path: str) -> None:
        self._host, self._port = host, port
        self._head = f"POST {path} HTTP/1.1\r\nhost: {host}:{port}\r\ncontent-type: application/json\r\n".encode()
        self._idle: list[_Connection] = []

    async def stream(self, body: bytes) -> AsyncIterator[bytes]:
        connection = self._idle.pop() if self._idle else None
        if connection is None or connection.transport is None:
            _, connection = await asyncio.get_running_loop().create_connection(_Connection, self._host, self._port)
        assert connection.transport is not None
        connection.begin()
        connection.transport.write(self._head + b"content-length: %d\r\n\r\n%b" % (len(body), body))
        while data := await connection.read():
            yield data
        if connection.transport is not None:
            self._idle.append(connection)


@asynccontextmanager
async def client_of(kind: str, engine_port: int) -> AsyncIterator[Client]:
    """The client of this kind, towards the engine on loopback."""
    url = f"http://127.0.0.1:{engine_port}/v1/chat/completions"
    async with AsyncExitStack() as stack:
        if kind == "aiohttp":
            session = await stack.enter_async_context(
                aiohttp.ClientSession(
                    connector=aiohttp.TCPConnector(limit=0),
                    timeout=aiohttp.ClientTimeout(total=None),
                    cookie_jar=aiohttp.DummyCookieJar(),
                    auto_decompress=False,
                )
            )
            yield AiohttpClient(session, url)
        elif kind == "httpx":
            limits = httpx2.Limits(max_connections=None, max_keepalive_connections=None)
            client = await stack.enter_async_context(httpx2.AsyncClient(limits=limits, timeout=None, trust_env=False))
            yield HttpxClient(client, url)
        else:
            yield ProtocolClient("127.0.0.1", engine_port, "/v1/chat/completions")


Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]


async def serve_hop(kind: str, port: int, engine_port: int) -> None:
    """The hop: one raw ASGI app."""
    async with client_of(kind, engine_port) as client:

        async def app(scope: dict[str, Any], receive: Receive, send: Send) -> None:
            if scope["type"] != "http":
                return
            parts: list[bytes] = []
            while True:
                message = await receive()
                parts.append(message.get("body", b""))
                if not message.get("more_body"):
                    break
            await send(
                {"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]}
            )
            if scope["method"] == "POST":
                async for data in client.stream(b"".join(parts)):
                    await send({"type": "http.response.body", "body": data, "more_body": True})
            await send({"type": "http.response.body", "body": b""})

        config = uvicorn.Config(
            app, host="127.0.0.1", port=port, http="httptools", lifespan="off", log_level="warning", access_log=False
        )
        await uvicorn.Server(config).serve()


async def compare(rates: list[int], seconds: float, rounds: int, prompt_words: int, gap: float) -> None:
    """Measures every client under every loop, and prints the table."""
    near, far = cores()
    os.sched_setaffinity(0, {near})
    body = chat_body(MODEL, prompt_words, 16)
    stub = str(Path(__file__).with_name("stub_engine.py"))
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        engine_port = FIRST_PORT
        engine = stack.enter_context(
            running("engine", [sys.executable, stub, "--port", str(engine_port), "--gap", str(gap)], near, folder)
        )
        await ready(engine, f"http://127.0.0.1:{engine_port}/health", 10)
        hops = {}
        for number, (kind, loop) in enumerate((kind, loop) for loop in LOOPS for kind in CLIENTS):
            port = engine_port + 1 + number
            command = [sys.executable, "-m", "tests.bench.http_client", "--hop", kind, "--loop", loop]
            hop = stack.enter_context(
                running(f"{kind}-{loop}", [*command, "--port", str(port), "--engine", str(engine_port)], far, folder)
            )
            await ready(hop, f"http://127.0.0.1:{port}/health", 20)
            hops[kind, loop] = (hop, port)
        table = Table("client", "loop", "rate /s", "sent", "failed", "added TTFT p50 ms", "p99 ms", "CPU µs a request")
        for rate in rates:
            samples: dict[tuple[str, str], list[tuple[Sample, Sample]]] = {key: [] for key in hops}
            for turn in range(rounds):
                direct = await measure(engine_port, body, 16, rate, seconds, turn, None)
                for key, (hop, port) in hops.items():
                    samples[key].append((await measure(port, body, 16, rate, seconds, turn, hop), direct))
            for (kind, loop), pairs in samples.items():
                table.add_row(
                    kind,
                    loop,
                    str(rate),
                    str(sum(sample.sent for sample, _ in pairs)),
                    str(sum(sample.failed for sample, _ in pairs)),
                    spread([(sample.ttft_p50 - direct.ttft_p50) * 1e3 for sample, direct in pairs]),
                    spread([(sample.ttft_p99 - direct.ttft_p99) * 1e3 for sample, direct in pairs]),
                    spread([sample.cpu_per_request * 1e6 for sample, _ in pairs], digits=0),
                )
        Console(width=120).print(table)


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description="A bare streaming hop with each HTTP client and event loop.")
    parser.add_argument("--rates", default="100,200", help="requests a second, comma-separated")
    parser.add_argument("--seconds", type=float, default=8.0, help="length of one run")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prompt-words", type=int, default=100)
    parser.add_argument("--gap", type=float, default=0.0, help="seconds between the engine's tokens; 0: all at once")
    parser.add_argument("--hop", choices=CLIENTS, help=argparse.SUPPRESS)
    parser.add_argument("--loop", choices=LOOPS, default="uvloop", help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--engine", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.hop is not None:
        run = uvloop.run if arguments.loop == "uvloop" else asyncio.run
        run(serve_hop(arguments.hop, arguments.port, arguments.engine))
        return
    rates = [int(rate) for rate in arguments.rates.split(",")]
    uvloop.run(compare(rates, arguments.seconds, arguments.rounds, arguments.prompt_words, arguments.gap))


if __name__ == "__main__":
    main()
