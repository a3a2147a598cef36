"""What clients get wrong, on purpose or not: a clear error, the right outcome, and nothing that stays behind."""

import asyncio
import hashlib
import json
import socket
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import aiohttp
import psutil
import pytest
import pytest_asyncio

from tests.fixtures.gateway_in_process import spec_text, until
from tests.fixtures.scripted_engine import Act, ScriptedEngine
from tests.fixtures.scripted_wire import MODEL
from tests.integration.gateway_process import GatewayProcess, gateway_process

pytestmark = [pytest.mark.integration, pytest.mark.asyncio(loop_scope="module")]

CHAT = "/v1/chat/completions"
KEY, LANE_KEY, TOKEN_KEY = "lw-plain", "lw-may-choose-its-lane", "lw-few-tokens"
MIB = 1 << 20
TOKENS_TO_FILL_EVERY_BUFFER = 60_000
"""About 12 MB of events: more than the kernel keeps for a client that does not read."""


@dataclass
class Served:
    """A gateway with short time-outs, and its engine."""

    gateway: GatewayProcess
    engine: ScriptedEngine


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def running(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    sha = {key: hashlib.sha256(key.encode()).hexdigest() for key in (KEY, LANE_KEY, TOKEN_KEY)}
    text = f"""  limits: {{body_timeout: 1}}
  auth:
    keys:
      - {{name: plain, sha256: {sha[KEY]}}}
      - {{name: chooser, sha256: {sha[LANE_KEY]}, may_choose_lane: true, lanes: [interactive-short, batch]}}
      - {{name: few, sha256: {sha[TOKEN_KEY]}, tokens_per_minute: 600}}
"""
    async with ScriptedEngine() as engine:
        spec = (
            spec_text(engine.url, timeouts="idle: 1, first_token: 20", pool="max_num_seqs: 2, lookahead: {requests: 0}")
            + text
        )
        async with gateway_process(tmp_path_factory.mktemp("gateway"), spec) as gateway:
            yield Served(gateway, engine)
            await gateway.conserved()


@pytest_asyncio.fixture(loop_scope="module")
async def served(running: Served) -> AsyncIterator[Served]:
    """The same gateway for every test; each must leave nothing behind."""
    running.engine.act, running.engine.tokens = Act.ANSWER, 4
    running.engine.asked.clear()
    running.engine.released.clear()
    yield running
    running.engine.release()
    await running.gateway.conserved()
    await until(lambda: not running.engine.open, 5)


def body(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], **fields}


async def post(
    gateway: GatewayProcess, data: Any, path: str = CHAT, headers: dict[str, str] | None = None
) -> tuple[int, dict[str, Any], dict[str, str]]:
    """Status, JSON and headers; `data` is sent as it is where it is bytes."""
    raw = data if isinstance(data, bytes) else json.dumps(data).encode()
    async with (
        aiohttp.ClientSession() as session,
        session.post(
            gateway.url + path, data=raw, headers={"Content-Type": "application/json", **(headers or {})}
        ) as reply,
    ):
        return reply.status, json.loads(await reply.read()), {name.lower(): it for name, it in reply.headers.items()}


def head(length: int | None, request_id: str, *more: str) -> bytes:
    """The head of a raw request."""
    size = "transfer-encoding: chunked" if length is None else f"content-length: {length}"
    lines = [f"POST {CHAT} HTTP/1.1", "host: x", f"x-request-id: {request_id}", size, *more]
    return "\r\n".join(lines).encode() + b"\r\n\r\n"


async def answer_to(reader: asyncio.StreamReader) -> tuple[int, dict[str, Any]]:
    """Status and JSON of the answer on a raw connection."""
    async with asyncio.timeout(10):
        first = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        length = next(
            int(line.split(":")[1]) for line in first.split("\r\n") if line.lower().startswith("content-length")
        )
        return int(first.split(" ")[1]), json.loads(await reader.readexactly(length))


@pytest.mark.parametrize(
    ("wrong", "status", "param", "told"),
    [
        (b'{"model": ', 400, None, "not JSON"),
        (b"\xff\xfe\x00", 400, None, "not JSON"),
        (b"[1, 2]", 400, None, "expected an object"),
        (b"", 400, None, "not JSON"),
        (body(model="none-such"), 404, "model", "laneway-tiny"),
        (body(model=7), 400, "model", "expected a string"),
        ({"messages": []}, 400, "model", "missing"),
        (body(messages="hello"), 400, "messages", "expected"),
        (body(messages=[]), 400, "messages", "expected"),
        (body(messages=[{"role": "user", "content": 5}]), 400, "messages[0].content", "expected"),
        (body(max_tokens=10**12), 400, "max_tokens", "expected a whole number from 1 to 32768"),
        (body(max_tokens=-1), 400, "max_tokens", "expected a whole number from 1 to 32768"),
        (body(max_tokens="many"), 400, "max_tokens", "expected a whole number"),
        (body(max_completion_tokens=0), 400, "max_completion_tokens", "expected a whole number"),
        (body(temperature="hot"), 400, "temperature", "expected a number"),
        (body(stream="yes"), 400, "stream", "expected true or false"),
        (body(n=5000), 400, "n", "expected a whole number from 1 to 128"),
        (body(stream_options={"include_usage": True}), 400, "stream_options", "stream"),
        (body(vllm_xargs=[1]), 400, "vllm_xargs", "expected an object"),
        (b'{"model": "laneway-tiny", "messages": ' + b"[" * 5000 + b"]" * 5000 + b"}", 400, None, ""),
    ],
)
async def test_a_body_that_is_wrong_is_refused_with_its_field_and_what_was_expected(
    served: Served, wrong: Any, status: int, param: str | None, told: str
) -> None:
    """Lost: whoever sends it must read our source to learn what is wrong with it."""
    code, said, headers = await post(served.gateway, wrong)
    assert code == status
    assert headers["x-laneway-outcome"] == "rejected_invalid"
    assert told in said["error"]["message"]
    if told:
        assert said["error"]["param"] == param
    assert set(said["error"]) >= {"message", "type", "param", "code"}
    assert served.engine.asked == []


async def test_what_the_engine_says_of_a_prompt_that_is_too_long_reaches_the_client(served: Served) -> None:
    """Lost: the engine's own words on what it refused; and a 400 must not count against the replica."""
    served.engine.act = Act.TOO_LONG_400
    for _ in range(5):
        code, said, headers = await post(served.gateway, body())
        assert (code, said["error"]["message"]) == (400, "too long")
        assert headers["x-laneway-outcome"] == "rejected_invalid"
    assert len(served.engine.asked) == 5
    served.engine.act = Act.ANSWER
    assert (await post(served.gateway, body()))[0] == 200


async def test_a_50_mb_body_is_refused_unread(served: Served) -> None:
    """Lost: the memory of the gateway, to anybody who sends large bodies at it."""
    process = psutil.Process(served.gateway.process.pid)
    before = process.memory_info().rss
    reader, writer = await _connect(served.gateway)
    writer.write(head(50 * MIB, "big") + b" " * 1000)
    status, said = await answer_to(reader)
    assert status == 413
    assert str(50 * MIB) in said["error"]["message"]
    assert said["error"]["code"] == "request_too_large"
    assert await asyncio.wait_for(reader.read(), 5) == b""
    writer.close()
    assert (await served.gateway.access("big"))["outcome"] == "rejected_invalid"
    assert process.memory_info().rss - before < 8 * MIB


async def test_a_client_that_sends_50_mb_before_it_reads_still_gets_its_413(served: Served) -> None:
    """Lost: a client that sees a connection reset in place of the reason, and tries again."""
    process = psutil.Process(served.gateway.process.pid)
    before = process.memory_info().rss
    for _ in range(3):
        code, said, _ = await post(served.gateway, b" " * (50 * MIB))
        assert code == 413
        assert said["error"]["code"] == "request_too_large"
    assert process.memory_info().rss - before < 16 * MIB


async def test_a_body_of_unknown_size_is_refused_once_it_is_too_large(served: Served) -> None:
    """Lost: the same memory, to chunked bodies, which do not say how long they are."""
    process = psutil.Process(served.gateway.process.pid)
    before = process.memory_info().rss
    reader, writer = await _connect(served.gateway)
    writer.write(head(None, "chunked"))
    chunk = b"%x\r\n%b\r\n" % (MIB, b" " * MIB)

    async def send() -> None:
        for _ in range(50):
            writer.write(chunk)
            await writer.drain()

    sending = asyncio.create_task(send())
    status, _ = await answer_to(reader)
    assert status == 413
    sending.cancel()
    await asyncio.gather(sending, return_exceptions=True)
    writer.close()
    assert (await served.gateway.access("chunked"))["outcome"] == "rejected_invalid"
    assert process.memory_info().rss - before < 24 * MIB


@pytest.mark.parametrize("pieces", [1, 20])
async def test_a_head_of_100_kb_is_refused(served: Served, pieces: int) -> None:
    """Lost: the memory of the gateway, before any key was checked."""
    reader, writer = await _connect(served.gateway)
    raw = head(2, "large-head", "x-padding: " + "a" * 100_000) + b"{}"
    size = len(raw) // pieces
    for i in range(0, len(raw), size):
        writer.write(raw[i : i + size])
        await asyncio.sleep(0.002)
    status, said = await answer_to(reader)
    assert status == 431
    assert "head" in said["error"]["message"]
    writer.close()


async def test_a_head_that_never_ends_is_given_up(served: Served) -> None:
    """Lost: connections, to clients that send a byte a minute."""
    reader, writer = await _connect(served.gateway)
    began = time.monotonic()
    writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\n")
    status, _ = await answer_to(reader)
    assert status == 408
    assert 0.8 < time.monotonic() - began < 3
    assert await asyncio.wait_for(reader.read(), 5) == b""
    writer.close()


async def test_a_body_that_never_ends_is_given_up(served: Served) -> None:
    """Lost: connections, likewise."""
    reader, writer = await _connect(served.gateway)
    writer.write(head(1000, "slow-body") + b'{"model": ')
    status, said = await answer_to(reader)
    assert status == 408
    assert said["error"]["outcome"] == "rejected_invalid"
    assert await asyncio.wait_for(reader.read(), 5) == b""
    writer.close()
    assert (await served.gateway.access("slow-body"))["outcome"] == "rejected_invalid"


async def test_a_client_that_goes_in_the_middle_of_its_body_is_no_error(served: Served) -> None:
    """Lost: alerts on errors that nobody made."""
    _, writer = await _connect(served.gateway)
    writer.write(head(1000, "left-early") + b'{"model": ')
    await writer.drain()
    writer.transport.abort()
    assert (await served.gateway.access("left-early"))["outcome"] == "cancelled"


@pytest.mark.parametrize("stream", [True, False])
async def test_a_half_closed_client_has_left(served: Served, stream: bool) -> None:
    """Lost: the engine's time, for clients that are gone but for a socket."""
    served.engine.act = Act.HOLD
    raw = json.dumps(body(stream=stream)).encode()
    _, writer = await _connect(served.gateway)
    request_id = f"half-closed-{stream}"
    writer.write(head(len(raw), request_id) + raw)
    await until(lambda: bool(served.engine.asked), 5)
    closed = time.monotonic()
    writer.write_eof()
    await until(lambda: served.engine.asked[0].aborted is not None, 5)
    assert (served.engine.asked[0].aborted or 0) - closed < 0.5
    assert (await served.gateway.access(request_id))["outcome"] == "cancelled"
    writer.close()


async def test_a_client_that_stops_reading_is_cut_off_after_the_idle_time(served: Served) -> None:
    """Lost: a seat in the engine, a connection and a buffer, for ever, to each client that hangs."""
    served.engine.tokens = TOKENS_TO_FILL_EVERY_BUFFER
    raw = json.dumps(body(stream=True)).encode()
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(client, ("127.0.0.1", served.gateway.port))
        await loop.sock_sendall(client, head(len(raw), "stalled") + raw)
        row = await served.gateway.access("stalled", 20)
        assert row["outcome"] == "cancelled"
        assert row["error"] == "the client stopped reading"
        assert row["closed"] - row["last_token"] >= 0.9
        await until(lambda: not served.engine.open, 5)
        await until(lambda: served.gateway.connections() == 0, 5)


async def test_an_unknown_path_is_told_what_is_served(served: Served) -> None:
    """Lost: an hour, to a wrong base URL."""
    code, said, _ = await post(served.gateway, body(), "/chat/completions")
    assert code == 404
    assert said["error"]["type"] == "not_found_error"
    assert "POST /v1/chat/completions" in said["error"]["message"]
    assert "GET /metrics" in said["error"]["message"]
    code, text = await served.gateway.get(CHAT)
    assert code == 405
    assert json.loads(text)["error"]["code"] == "method_not_allowed"


@pytest.mark.parametrize("value", ["soon", "-5", "0", "1.5", "99999999999", "", "1e3", "٣"])
async def test_a_deadline_that_is_no_number_of_milliseconds_is_refused(served: Served, value: str) -> None:
    """Lost: a deadline that was meant, and silently is none."""
    code, said, _ = await post(served.gateway, body(), headers={"x-laneway-deadline-ms": value})
    assert code == 400
    assert said["error"]["param"] == "x-laneway-deadline-ms"


async def test_a_deadline_that_passes_in_the_queue_ends_the_request(served: Served) -> None:
    """Lost: answers that nobody waits for any more are computed before those that somebody does."""
    served.engine.act = Act.HOLD
    holding = [asyncio.create_task(post(served.gateway, body())) for _ in range(2)]
    await until(lambda: len(served.engine.open) == 2, 5)
    began = time.monotonic()
    code, said, headers = await post(served.gateway, body(), headers={"x-laneway-deadline-ms": "300"})
    assert (code, headers["x-laneway-outcome"]) == (504, "expired")
    assert 0.29 < time.monotonic() - began < 1.5
    assert "queue" in said["error"]["message"]
    served.engine.release()
    assert {status for status, _, _ in await asyncio.gather(*holding)} == {200}
    assert len(served.engine.asked) == 2


async def test_a_lane_is_the_clients_choice_only_where_its_key_allows(served: Served) -> None:
    """Lost: the fast lane, to everybody who asks for it."""

    async def ask(key: str, lane: str) -> tuple[int, str | None, str]:
        code, said, headers = await post(
            served.gateway, body(), headers={"authorization": f"Bearer {key}", "x-laneway-lane": lane}
        )
        return code, said.get("error", {}).get("param"), headers["x-laneway-lane"]

    assert (await ask(LANE_KEY, "batch"))[::2] == (200, "batch")
    assert (await ask(LANE_KEY, "interactive-long"))[0] == 403
    assert (await ask(LANE_KEY, "no-such-lane"))[0] == 400
    plain = await ask(KEY, "batch")
    assert plain[0] in (200, 403)
    assert plain[2] != "batch"


async def test_a_token_quota_is_told_exactly(served: Served) -> None:
    """Lost: a client that waits as long as it was told must be let in."""
    how = {"authorization": f"Bearer {TOKEN_KEY}"}
    served.engine.act = Act.HOLD  # what is under way is charged with all that it may use
    first = asyncio.create_task(post(served.gateway, body(max_tokens=595), headers=how))
    await until(lambda: bool(served.engine.asked), 5)
    code, said, headers = await post(served.gateway, body(max_tokens=15), headers=how)
    assert (code, headers["x-laneway-outcome"]) == (429, "rejected_quota")
    assert said["error"]["code"] == "rate_limit_exceeded"
    wait = int(headers["retry-after"])
    told = float(said["error"]["message"].split("a pause of ")[1].split(" s")[0])
    assert told <= wait + 0.05 <= told + 1.1  # the header knows whole seconds only
    await asyncio.sleep(wait)
    second = asyncio.create_task(post(served.gateway, body(max_tokens=15), headers=how))
    await until(lambda: len(served.engine.asked) == 2, 5)
    served.engine.release()
    assert [(await task)[0] for task in (first, second)] == [200, 200]


async def _connect(gateway: GatewayProcess) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", gateway.port)
