"""The HTTP client towards a replica, against real servers on loopback."""

import asyncio
import inspect
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import uvicorn
from aiohttp import web

from serving.engine import client as client_module
from serving.engine.client import KEEP_ALIVE_SECONDS, EngineClient, ReplicaUnreachableError, ReplyBrokenError

PIECE = b"data: token\n\n"


class _Server:
    """Counts connections, and sees clients leave."""

    def __init__(self) -> None:
        self.peers: list[object] = []
        self.headers: list[dict[str, str]] = []
        self.bodies: list[bytes] = []
        self.asked = asyncio.Event()
        self.left = asyncio.Event()
        self.port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def _seen(self, request: web.Request) -> None:
        assert request.transport is not None
        self.peers.append(request.transport.get_extra_info("peername"))
        self.headers.append({name.lower(): value for name, value in request.headers.items()})
        self.bodies.append(await request.read())
        self.asked.set()

    async def echo(self, request: web.Request) -> web.StreamResponse:
        await self._seen(request)
        return web.Response(body=self.bodies[-1] or b"hello", status=int(request.query.get("status", "200")))

    async def stream(self, request: web.Request) -> web.StreamResponse:
        """Sends pieces until the client leaves; `pieces` bounds them, `cut` ends without the end."""
        await self._seen(request)
        response = web.StreamResponse()
        response.enable_chunked_encoding()
        await response.prepare(request)
        try:
            for _ in range(int(request.query.get("pieces", "1000000"))):
                await response.write(PIECE)
                await asyncio.sleep(0.005)
        except (ConnectionError, asyncio.CancelledError):
            self.left.set()
            raise
        if "cut" in request.query:
            assert request.transport is not None
            request.transport.close()
        return response

    async def moved(self, request: web.Request) -> web.StreamResponse:
        await self._seen(request)
        raise web.HTTPFound("/echo")

    async def never(self, request: web.Request) -> web.StreamResponse:
        await self._seen(request)
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            self.left.set()
            raise
        raise AssertionError("nobody waits a minute")


@asynccontextmanager
async def _server() -> AsyncIterator[_Server]:
    server = _Server()
    app = web.Application()
    for name in ("echo", "stream", "moved", "never"):
        app.router.add_route("*", f"/{name}", getattr(server, name))
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    server.port = runner.addresses[0][1]
    try:
        yield server
    finally:
        await runner.cleanup()


@asynccontextmanager
async def _raw(answer: bytes) -> AsyncIterator[str]:
    """A server that reads a head, answers these bytes and hangs up."""

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        writer.close()

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def test_a_reply_is_read_as_it_comes() -> None:
    """Read in larger pieces, the first token would wait for the ones after it."""
    async with _server() as server, EngineClient(1.0) as client:
        reply = await client.post(f"{server.url}/stream?pieces=3", b"{}", {})
        assert reply.status == 200
        first = await reply.read_some()
        assert first.startswith(PIECE)
        assert len(first) < 3 * len(PIECE)
        assert first + await reply.read_all(1000) == 3 * PIECE
        assert await reply.read_some() == b""


async def test_the_body_and_the_given_headers_go_out_and_no_others() -> None:
    """An `Accept-Encoding` would bring compressed streams; a default `User-Agent` tells of what we are made."""
    async with _server() as server, EngineClient(1.0) as client:
        reply = await client.post(f"{server.url}/echo", b'{"a": 1}', {"X-Request-Id": "r1", "Host": "engine:8000"})
        assert await reply.read_all(100) == b'{"a": 1}'
        assert reply.headers["CONTENT-type"] == "application/octet-stream"
    [headers] = server.headers
    assert headers["x-request-id"] == "r1"
    assert headers["host"] == "engine:8000"
    assert set(headers) <= {"x-request-id", "host", "content-length", "content-type"}


async def test_a_connection_whose_reply_was_read_is_used_again() -> None:
    """A new connection a request costs a round trip, and ports."""
    async with _server() as server, EngineClient(1.0) as client:
        for _ in range(3):
            reply = await client.post(f"{server.url}/echo", b"x", {})
            await reply.read_all(100)
            reply.abort()
        assert len(set(server.peers)) == 1


async def test_an_aborted_reply_closes_its_connection_at_once() -> None:
    """It is how the engine learns that nobody waits: else it computes for clients that have left."""
    async with _server() as server, EngineClient(1.0) as client:
        reply = await client.post(f"{server.url}/stream", b"", {})
        await reply.read_some()
        reply.abort()
        reply.abort()
        await asyncio.wait_for(server.left.wait(), 0.5)
        await (await client.post(f"{server.url}/echo", b"", {})).read_all(100)
        assert len(set(server.peers)) == 2


async def test_a_request_cancelled_before_the_head_leaves_the_engine_too() -> None:
    """A client that leaves while its prompt is computed is the common case."""
    async with _server() as server, EngineClient(1.0) as client:
        task = asyncio.create_task(client.post(f"{server.url}/never", b"", {}))
        await asyncio.wait_for(server.asked.wait(), 1.0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.wait_for(server.left.wait(), 0.5)


async def test_an_idle_connection_is_left_before_the_engine_closes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """uvicorn closes it after 5 s: a request that is sent just then is lost."""
    assert inspect.signature(uvicorn.Config).parameters["timeout_keep_alive"].default > KEEP_ALIVE_SECONDS
    monkeypatch.setattr(client_module, "KEEP_ALIVE_SECONDS", 0.05)
    async with _server() as server, EngineClient(1.0) as client:
        for _ in range(2):
            await (await client.post(f"{server.url}/echo", b"", {})).read_all(100)
            await asyncio.sleep(0.15)
        assert len(set(server.peers)) == 2


async def test_a_redirect_is_not_followed() -> None:
    """A replica could send prompts to wherever it likes."""
    async with _server() as server, EngineClient(1.0) as client:
        reply = await client.post(f"{server.url}/moved", b"", {})
        assert reply.status == 302
        reply.abort()
        assert len(server.peers) == 1


async def test_a_replica_that_is_not_there_is_unreachable_and_no_reset(unused_tcp_port: int) -> None:
    """`reset` lets the request be tried again at the same replica, which would be in vain."""
    async with EngineClient(1.0) as client:
        with pytest.raises(ReplicaUnreachableError) as caught:
            await client.post(f"http://127.0.0.1:{unused_tcp_port}", b"", {})
        assert not caught.value.reset
        with pytest.raises(ReplicaUnreachableError):
            await client.post("http://nowhere.invalid", b"", {})


async def test_a_connection_closed_without_a_word_is_a_reset() -> None:
    """On a kept-alive connection it says nothing of the replica's health."""
    async with _raw(b"") as url, EngineClient(1.0) as client:
        with pytest.raises(ReplicaUnreachableError) as caught:
            await client.post(url, b"", {})
        assert caught.value.reset


@pytest.mark.parametrize(
    "answer", [b"hello?\r\n\r\n", b"SSH-2.0-x\r\n", b"HTTP/1.1 abc\r\n\r\n", b"\x16\x03\x01\r\n\r\n"]
)
async def test_what_is_not_http_is_a_broken_reply(answer: bytes) -> None:
    """A wrong port would be a defect of the gateway instead of a replica that failed."""
    async with _raw(answer) as url, EngineClient(1.0) as client:
        with pytest.raises(ReplyBrokenError) as caught:
            await client.post(url, b"", {})
        assert "hello" not in str(caught.value)


async def test_a_reply_that_breaks_off_is_never_taken_for_a_whole_one() -> None:
    """Half an answer would be `completed`."""
    async with _server() as server, EngineClient(1.0) as client:
        reply = await client.post(f"{server.url}/stream?pieces=2&cut=1", b"", {})
        with pytest.raises(ReplyBrokenError):
            await reply.read_all(10_000)
    async with _raw(b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nabc") as url, EngineClient(1.0) as client:
        reply = await client.post(url, b"", {})
        with pytest.raises(ReplyBrokenError):
            await reply.read_all(10_000)


async def test_a_reply_that_is_too_large_is_given_up() -> None:
    """An engine that never stops would fill the gateway's memory."""
    async with _server() as server, EngineClient(1.0) as client:
        reply = await client.post(f"{server.url}/stream", b"", {})
        with pytest.raises(ReplyBrokenError, match="more than 50 bytes"):
            await reply.read_all(50)
        reply.abort()
        await asyncio.wait_for(server.left.wait(), 0.5)


async def test_a_small_document_is_fetched() -> None:
    """Probes read `/v1/models` and `/metrics` so."""
    async with _server() as server, EngineClient(1.0) as client:
        assert await client.get(f"{server.url}/echo", {}, timeout=1.0) == b"hello"


@pytest.mark.parametrize("status", [204, 404, 500, 503])
async def test_a_document_with_another_status_is_no_document(status: int) -> None:
    """A replica that says 503 to its probe would be given work."""
    async with _server() as server, EngineClient(1.0) as client:
        with pytest.raises(ReplicaUnreachableError, match=f"status {status}"):
            await client.get(f"{server.url}/echo?status={status}", {}, timeout=1.0)


async def test_a_document_that_does_not_come_in_time_is_given_up() -> None:
    """A hung replica would hang its probe, and stay ready for ever."""
    async with _server() as server, EngineClient(1.0) as client:
        for path in ("never", "stream"):
            with pytest.raises(ReplicaUnreachableError, match=r"no answer within 0\.05 s"):
                await client.get(f"{server.url}/{path}", {}, timeout=0.05)
        await asyncio.wait_for(server.left.wait(), 0.5)
