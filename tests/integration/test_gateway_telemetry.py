"""What a request leaves with its observers: one trace from the client to the engine, and nothing of what it said."""

import asyncio
import hashlib
import time
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.fixtures.gateway_in_process import spec_text, until
from tests.fixtures.otlp_receiver import Received, receiver
from tests.fixtures.scripted_engine import Act, ScriptedEngine
from tests.fixtures.scripted_wire import MODEL
from tests.integration.gateway_process import GatewayProcess, gateway_process
from tests.integration.replicas import free_port

pytestmark = pytest.mark.integration

CHAT = "/v1/chat/completions"
TRACE, CLIENT_SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
PARENT = f"00-{TRACE}-{CLIENT_SPAN}-01"
CANARY = "canary-9d1f-that-nobody-may-see"
CANARY_KEY = "lw-canary-key-77aa"


async def ask(gateway: GatewayProcess, text: str, headers: dict[str, str], **more: Any) -> tuple[int, str]:
    data = {"model": MODEL, "messages": [{"role": "user", "content": text}], "stream": True, "max_tokens": 8} | more
    async with (
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(20)) as session,
        session.post(gateway.url + CHAT, json=data, headers=headers) as reply,
    ):
        return reply.status, await reply.text()


async def test_one_trace_leads_from_the_client_through_the_gateway_into_the_engine(tmp_path: Path) -> None:
    """Lost: the answer to "where did this request wait?"."""
    spec = spec_text("http://unused").replace(
        'replicas: [{url: "http://unused"}]', f"start: {{engine: simulated, count: 1, first_port: {free_port()}}}"
    )
    async with receiver() as received:
        async with gateway_process(tmp_path, spec, environ=received.environ()) as gateway:
            assert (await ask(gateway, "hello", {"traceparent": PARENT, "x-request-id": "traced"}))[0] == 200
            await until(lambda: bool(received.named("llm_request", TRACE)), 10)
            await until(lambda: bool(_server_spans(received)), 10)
        spans = {span.span_id.hex(): (service, span) for service, span in received.of_trace(TRACE)}
        server = _server_spans(received)[0]
        assert server.parent_span_id.hex() == CLIENT_SPAN
        engine = received.named("llm_request", TRACE)[0]
        assert spans[engine.parent_span_id.hex()][0] == "laneway-gateway"
        below = {span.name: span for _, span in spans.values() if span.parent_span_id == server.span_id}
        assert {"admission", "queue", "dispatch", "deliver"} <= set(below)
        for span in below.values():
            assert server.start_time_unix_nano <= span.start_time_unix_nano
            assert span.start_time_unix_nano <= span.end_time_unix_nano <= server.end_time_unix_nano
        assert below["queue"].end_time_unix_nano <= below["dispatch"].start_time_unix_nano
        row = await gateway.access("traced")
        assert row["trace_id"] == TRACE


async def test_no_prompt_answer_or_key_is_in_any_log_span_metric_or_error(tmp_path: Path) -> None:
    """Lost: what users wrote, to everybody who may read the logs."""
    digest = hashlib.sha256(CANARY_KEY.encode()).hexdigest()
    auth = f"  auth: {{keys: [{{name: one, sha256: {digest}}}]}}\n"
    key = {"authorization": f"Bearer {CANARY_KEY}"}
    async with receiver() as received, ScriptedEngine() as engine:
        spec = spec_text(engine.url, timeouts="first_token: 1, idle: 1") + auth
        async with gateway_process(tmp_path, spec, environ=received.environ()) as gateway:
            answers: list[str] = []
            for act in (Act.ANSWER, Act.ERROR_500, Act.HTML, Act.DIES_AFTER_CONTENT, Act.STALLS, Act.TOO_LONG_400):
                await gateway.ready(1)
                engine.act = act
                status, text = await ask(gateway, CANARY, key, user=CANARY)
                answers += [text] if status != 200 else []
            wrong: tuple[tuple[dict[str, Any], dict[str, str]], ...] = (
                ({"model": CANARY + " " + CANARY}, key),
                ({"temperature": CANARY}, key),
                ({"messages": CANARY}, key),
                ({"stop": CANARY, "max_tokens": CANARY}, key),
                ({}, {"authorization": f"Bearer {CANARY}"}),
                ({}, {"authorization": CANARY_KEY}),
                ({}, key | {"x-laneway-lane": "no-such-lane"}),
            )
            for fields, headers in wrong:
                status, text = await ask(gateway, CANARY, headers, **fields)
                assert status in (400, 401, 403, 404)
                answers.append(text)
            _, metrics = await gateway.get("/metrics")
            await asyncio.sleep(1)
            assert received.raw
        seen = {
            "log": gateway.log_path.read_text(),
            "standard error": gateway.stderr_path.read_text(),
            "metrics": metrics,
            "error": "\n".join(answers),
            "otlp": b"\n".join(received.raw).decode("latin-1"),
        }
        for where, text in seen.items():
            for secret in (CANARY, CANARY_KEY, digest, "word0", "welcome"):
                assert secret not in text, where


async def test_a_collector_that_hangs_delays_no_request_and_no_end(tmp_path: Path) -> None:
    """Lost: the service, to its own monitoring."""
    async with receiver(hung=True) as received, ScriptedEngine() as engine:
        gateway = GatewayProcess(tmp_path, spec_text(engine.url), received.environ())
        await gateway.ready()
        longest = 0.0
        for i in range(60):
            began = time.monotonic()
            assert (await ask(gateway, "hello", {"traceparent": PARENT, "x-request-id": f"r{i}"}))[0] == 200
            longest = max(longest, time.monotonic() - began)
            await asyncio.sleep(0.01)
        assert received.waiting
        assert longest < 2  # an export's own time-out is 10 s
        began = time.monotonic()
        assert await asyncio.to_thread(gateway.stop) == 0
        assert time.monotonic() - began < 15
        assert len(gateway.events("request")) == 60


def _server_spans(received: Received) -> list[Any]:
    """The gateway's span whose parent is the client's."""
    return [span for _, span in received.of_trace(TRACE) if span.parent_span_id.hex() == CLIENT_SPAN]
