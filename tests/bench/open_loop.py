"""Open-loop load on an OpenAI-style endpoint, on bare asyncio protocols, so that the client costs next to nothing.

Requests go out when a seeded Poisson schedule says so, whatever became of the ones before. Every interval counts from
the *scheduled* time: a late sender or a full connection pool is in the figure, not beside it. Asyncio's timers have a
resolution of 1 ms, as large as what is to be measured, so a thread does the waiting.
"""

import asyncio
import contextlib
import json
import math
import random
import re
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast
from urllib.parse import urlsplit

import httptools

_CONTENT = re.compile(rb'"content"\s*:\s*"[^"]')
_DONE = re.compile(rb"data:\s*\[DONE\]")
LEAD_SECONDS = 0.1
"""Between the start of a run and its first scheduled moment."""


@dataclass(frozen=True, slots=True)
class Shot:
    """One request, as its client saw it. Seconds; the intervals count from `scheduled`."""

    scheduled: float
    late: float
    """Scheduled to the moment its bytes were given to the socket."""
    ttft: float | None
    completion: float | None
    content_chunks: int
    error: str | None


def poisson_schedule(rate: float, seconds: float, seed: int) -> list[float]:
    """Offsets in seconds, exponential gaps of mean 1/rate."""
    draw = random.Random(seed)
    offsets: list[float] = []
    moment = draw.expovariate(rate)
    while moment < seconds:
        offsets.append(moment)
        moment += draw.expovariate(rate)
    return offsets


def chat_body(model: str, prompt_words: int, max_tokens: int, **more: object) -> bytes:
    """A streamed chat request whose prompt has about this many words; `more`: further fields."""
    prompt = " ".join(f"word{number % 97}" for number in range(prompt_words))
    return json.dumps(
        {
            "model": model,
            "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": prompt}],
            "max_tokens": max_tokens,
            "temperature": 0.0,
            "stream": True,
            **more,
        }
    ).encode()


def request_bytes(url: str, body: bytes, headers: Sequence[tuple[str, str]] = ()) -> bytes:
    """The whole request as it goes on the wire."""
    parts = urlsplit(url)
    lines = [
        f"POST {parts.path} HTTP/1.1",
        f"host: {parts.netloc}",
        "content-type: application/json",
        "accept: text/event-stream",
        f"content-length: {len(body)}",
        *(f"{name}: {value}" for name, value in headers),
    ]
    return ("\r\n".join(lines) + "\r\n\r\n").encode() + body


class _Connection(asyncio.Protocol):
    """One connection; `ask` owns it until its future is done."""

    def __init__(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self.transport: asyncio.Transport | None = None
        self.answer: asyncio.Future[None] | None = None
        self.first: float | None = None
        self.body: list[bytes] = []
        self._recent = b""
        self.status = 0
        self.used = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)  # uvloop's is none by class

    def connection_lost(self, exc: Exception | None) -> None:
        self.transport = None
        self._fail("connection closed")

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self._fail("not HTTP")
            self.drop()

    def on_body(self, data: bytes) -> None:
        if self.first is None:
            self._recent += data  # a proxy may cut an event in two
            if _CONTENT.search(self._recent) is not None:
                self.first = time.monotonic()
        self.body.append(data)

    def on_message_complete(self) -> None:
        self.status = self._parser.get_status_code()
        if not self._parser.should_keep_alive():
            self.drop()
        self._parser = httptools.HttpResponseParser(self)
        if self.answer is not None and not self.answer.done():
            self.answer.set_result(None)

    def start(self, wire: bytes) -> "asyncio.Future[None]":
        """Sends; the future ends with the reply."""
        assert self.transport is not None
        self.answer = asyncio.get_running_loop().create_future()
        self.first, self.body, self._recent, self.status = None, [], b"", 0
        self.used = True
        self.transport.write(wire)
        return self.answer

    def drop(self) -> None:
        """Closes the connection."""
        if self.transport is not None:
            self.transport.abort()

    def _fail(self, reason: str) -> None:
        if self.answer is not None and not self.answer.done():
            self.answer.set_exception(ConnectionError(reason))


class OpenLoop:
    """A client with its pool of connections to one address."""

    def __init__(
        self, url: str, body: bytes, expected_chunks: int, key: str | None = None, timeout: float = 10.0
    ) -> None:
        """`url`: the endpoint; `expected_chunks`: content chunks of a whole reply; `timeout`: seconds a request."""
        parts = urlsplit(url)
        self._host = parts.hostname or "127.0.0.1"
        self._port = parts.port or 80
        self._wire = request_bytes(url, body, [("authorization", f"Bearer {key}")] if key is not None else ())
        self._expected = expected_chunks
        self._timeout = timeout
        self._idle: list[_Connection] = []

    async def run(self, offsets: Sequence[float]) -> list[Shot]:
        """Sends one request at each offset (seconds, ascending) and waits for all of them."""
        loop = asyncio.get_running_loop()
        tasks: list[asyncio.Task[Shot]] = []
        all_sent = asyncio.Event()
        start = time.monotonic() + LEAD_SECONDS

        def send(scheduled: float) -> None:
            tasks.append(loop.create_task(self._ask(scheduled)))

        def pace() -> None:
            for offset in offsets:
                wait = start + offset - time.monotonic()
                if wait > 0:
                    time.sleep(wait)
                loop.call_soon_threadsafe(send, start + offset)
            loop.call_soon_threadsafe(all_sent.set)

        pacer = threading.Thread(target=pace, name="pacer", daemon=True)
        pacer.start()
        await all_sent.wait()
        pacer.join()
        return list(await asyncio.gather(*tasks))

    def close(self) -> None:
        """Closes the idle connections."""
        while self._idle:
            self._idle.pop().drop()

    async def _ask(self, scheduled: float) -> Shot:
        connection: _Connection | None = None
        sent = scheduled
        try:
            async with asyncio.timeout(self._timeout):
                connection = await self._connection()
                sent = time.monotonic()
                await connection.start(self._wire)
        except TimeoutError:
            return self._failed(scheduled, sent, connection, "timeout")
        except OSError as error:
            return self._failed(scheduled, sent, connection, str(error) or type(error).__name__)
        ended = time.monotonic()
        body = b"".join(connection.body)
        chunks = len(_CONTENT.findall(body))
        error_text: str | None = None
        if connection.status != 200:
            error_text = f"status {connection.status}"
        elif chunks != self._expected:
            error_text = f"{chunks} content chunks instead of {self._expected}"
        elif _DONE.search(body) is None:
            error_text = "no [DONE]"
        first = connection.first
        if connection.transport is not None and not connection.transport.is_closing():
            self._idle.append(connection)
        ttft = first - scheduled if first is not None and error_text is None else None
        return Shot(scheduled, sent - scheduled, ttft, ended - scheduled, chunks, error_text)

    async def _connection(self) -> _Connection:
        while self._idle:
            connection = self._idle.pop()
            if connection.transport is not None and not connection.transport.is_closing():
                return connection
        _, made = await asyncio.get_running_loop().create_connection(_Connection, self._host, self._port)
        return made

    def _failed(self, scheduled: float, sent: float, connection: _Connection | None, error: str) -> Shot:
        if connection is not None:
            connection.answer = None
            with contextlib.suppress(OSError):
                connection.drop()
        return Shot(scheduled, sent - scheduled, None, None, 0, error)


def quantile(values: Sequence[float], share: float) -> float:
    """Nearest-rank quantile, share in (0, 1]; infinite for no values."""
    if not values:
        return float("inf")
    return sorted(values)[max(0, math.ceil(round(len(values) * share, 9)) - 1)]


def ttft_of(shots: Sequence[Shot]) -> list[float]:
    """Seconds; a request without a first token counts as infinite."""
    return [shot.ttft if shot.ttft is not None else float("inf") for shot in shots]
