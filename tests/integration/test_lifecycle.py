"""A gateway's life as its operators live it: drains, edits of the spec, replicas that it starts, clients that leave."""

import asyncio
import json
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest
from prometheus_client.openmetrics import parser

from tests.fixtures.gateway_in_process import spec_text, until
from tests.fixtures.scripted_engine import Act, ScriptedEngine
from tests.fixtures.scripted_wire import MODEL
from tests.integration.gateway_process import GatewayProcess, gateway_process
from tests.integration.replicas import free_port

pytestmark = pytest.mark.integration

CHAT = "/v1/chat/completions"
ONE_SEAT = "max_num_seqs: 1, lookahead: {requests: 0}"


def body(stream: bool = True, text: str = "hello") -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": text}], "stream": stream, "max_tokens": 8}


async def ask(gateway: GatewayProcess, request_id: str, stream: bool = True, **more: Any) -> tuple[int, str]:
    """Status and whole text of the answer."""
    async with (
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(30)) as session,
        session.post(gateway.url + CHAT, json=body(stream) | more, headers={"x-request-id": request_id}) as reply,
    ):
        return reply.status, await reply.text()


async def test_sigterm_lets_what_runs_finish_and_sends_what_is_queued_away(tmp_path: Path) -> None:
    """Lost: at every deployment, the answers under way; and clients that could have gone elsewhere at once."""
    async with ScriptedEngine(Act.HOLD_LATER) as engine:
        gateway = GatewayProcess(tmp_path, spec_text(engine.url, pool=ONE_SEAT))
        await gateway.ready()
        runs = asyncio.create_task(ask(gateway, "runs"))
        await until(lambda: bool(engine.asked) and len(engine.asked[0].written) >= 3, 5)
        waits = asyncio.create_task(ask(gateway, "waits"))
        await asyncio.sleep(0.2)
        gateway.process.send_signal(signal.SIGTERM)
        status, text = await asyncio.wait_for(waits, 5)
        assert (status, json.loads(text)["error"]["outcome"]) == (503, "draining")
        await asyncio.sleep(0.3)
        with pytest.raises(aiohttp.ClientConnectionError):
            await ask(gateway, "new")
        assert not runs.done()
        engine.release()
        status, text = await asyncio.wait_for(runs, 5)
        assert status == 200
        assert text.endswith("data: [DONE]\n\n")
        assert await asyncio.to_thread(gateway.stop) == 0
        assert (await gateway.access("runs"))["outcome"] == "completed"
        assert (await gateway.access("waits"))["outcome"] == "draining"
        assert gateway.events("draining")
        assert "Traceback" not in gateway.stderr_path.read_text()


async def test_a_drain_ends_in_time_and_says_so_to_those_it_cuts_off(tmp_path: Path) -> None:
    """Lost: a pod that is killed in place of ending, and streams that just stop."""
    async with ScriptedEngine(Act.STALLS) as engine:
        gateway = GatewayProcess(tmp_path, spec_text(engine.url, timeouts="drain: 1"))
        await gateway.ready()
        stream = asyncio.create_task(ask(gateway, "stream"))
        whole = asyncio.create_task(ask(gateway, "whole", stream=False))
        await until(lambda: len(engine.asked) == 2 and all(asked.written for asked in engine.asked), 5)
        began = time.monotonic()
        assert await asyncio.to_thread(gateway.stop) == 0
        assert 0.9 < time.monotonic() - began < 5
        status, text = await stream
        assert status == 200
        assert json.loads(text.strip().splitlines()[-1].removeprefix("data: "))["error"]["outcome"] == "draining"
        status, text = await whole
        assert (status, json.loads(text)["error"]["outcome"]) == (503, "draining")
        for name in ("stream", "whole"):
            assert (await gateway.access(name))["outcome"] == "draining"
        await until(lambda: not engine.open, 5)
        assert "Traceback" not in gateway.stderr_path.read_text()


async def test_edits_of_the_spec_are_taken_over_while_requests_wait(tmp_path: Path) -> None:
    """Lost: a restart, and all that is queued, for every replica and lane that comes or goes."""
    async with ScriptedEngine(Act.HOLD) as one, ScriptedEngine() as two:
        before = spec_text(one.url, pool=ONE_SEAT)
        async with gateway_process(tmp_path, before) as gateway:
            runs = asyncio.create_task(ask(gateway, "runs"))
            await until(lambda: len(one.open) == 1, 5)
            queued = [asyncio.create_task(ask(gateway, f"queued-{i}")) for i in range(3)]
            await asyncio.sleep(0.3)
            assert len(one.asked) == 1

            # A lane more: every queue is made anew, and what waited must wait on in the new one.
            lane = "  - {name: tiny, max_prompt_tokens: 4, ttft: {seconds: 0.1}, deadline: 60}\n"
            with_lane = before.replace("lanes:\n", "lanes:\n" + lane)
            gateway.spec_path.write_text(with_lane)
            await gateway.event("spec_changed")
            await asyncio.sleep(0.2)

            # A bad edit changes nothing.
            gateway.spec_path.write_text(with_lane.replace("weight: 8", "weight: heavy"))
            refused = await gateway.event("spec_refused")
            assert "lanes[1].weight" in refused["reason"]
            assert "heavy" in refused["reason"]

            # A replica joins, and what waits can go there.
            both = with_lane.replace("replicas: [", f'replicas: [{{url: "{two.url}"}}, ')
            gateway.spec_path.write_text(both)
            await gateway.event("replica_ready", replica=two.url.removeprefix("http://"))
            one.release()
            results = await asyncio.wait_for(asyncio.gather(runs, *queued), 10)
            assert {status for status, _ in results} == {200}
            assert two.asked
            await gateway.conserved()

            # The first replica leaves.
            gateway.spec_path.write_text(both.replace(f', {{url: "{one.url}"}}', ""))
            await gateway.event("replica_left", replica=one.url.removeprefix("http://"))
            had = len(one.asked)
            for i in range(5):
                assert (await ask(gateway, f"later-{i}"))[0] == 200
            assert len(one.asked) == had
            await gateway.conserved()


async def test_a_lane_that_a_new_spec_drops_sends_its_queue_away(tmp_path: Path) -> None:
    """Lost: the watch on the spec, to an error, and the queue of that lane, to nothing."""
    async with ScriptedEngine(Act.HOLD) as engine:
        text = spec_text(engine.url, pool=ONE_SEAT)
        async with gateway_process(tmp_path, text) as gateway:
            runs = asyncio.create_task(ask(gateway, "runs"))
            await until(lambda: len(engine.open) == 1, 5)
            flex = asyncio.create_task(ask(gateway, "flex", service_tier="flex"))
            short = asyncio.create_task(ask(gateway, "short"))
            await asyncio.sleep(0.3)
            gateway.spec_path.write_text("\n".join(line for line in text.splitlines() if "name: batch" not in line))
            status, answer = await asyncio.wait_for(flex, 5)
            assert status == 503
            assert "batch" in json.loads(answer)["error"]["message"]
            engine.release()
            assert {status for status, _ in await asyncio.gather(runs, short)} == {200}
            await gateway.conserved()
            gateway.spec_path.write_text(text)
            await until(lambda: len(gateway.events("spec_changed")) == 2, 5)
            assert (await ask(gateway, "flex-again", service_tier="flex"))[0] == 200


async def test_replicas_that_the_gateway_started_are_restarted_and_end_with_it(tmp_path: Path) -> None:
    """Lost: capacity, to a replica that died at night; a port and memory, to those left over from yesterday."""
    port = free_port()
    spec = spec_text("http://unused").replace(
        'replicas: [{url: "http://unused"}]', f"start: {{engine: simulated, count: 1, first_port: {port}}}"
    )
    async with gateway_process(tmp_path, spec) as gateway:
        child = _listener(gateway, port)
        assert child is not None
        assert (await ask(gateway, "one"))[0] == 200
        child.kill()
        await gateway.event("engine_loading_failed", pool="baseline", port=port)
        await until(lambda: _listener(gateway, port) not in (None, child), 30)
        again = _listener(gateway, port)
        assert again is not None
        await gateway.ready()
        assert (await ask(gateway, "two"))[0] == 200
        await gateway.conserved()
    assert not again.is_running() or again.status() == psutil.STATUS_ZOMBIE


@pytest.mark.parametrize("fails", [False, True])
async def test_a_stream_that_waits_gets_comments_and_then_its_answer_or_an_error(tmp_path: Path, fails: bool) -> None:
    """Lost: streams that a load balancer cuts because nothing came for a minute."""
    async with ScriptedEngine(Act.HOLD) as engine:
        timeouts = "header_hold: 0.2, comment_every: 0.1"
        async with gateway_process(tmp_path, spec_text(engine.url, timeouts=timeouts, pool=ONE_SEAT)) as gateway:
            runs = asyncio.create_task(ask(gateway, "runs"))
            await until(lambda: len(engine.open) == 1, 5)
            headers = {"x-request-id": "waits"} | ({"x-laneway-deadline-ms": "800"} if fails else {})
            began = time.monotonic()
            async with (
                aiohttp.ClientSession() as session,
                session.post(gateway.url + CHAT, json=body(), headers=headers) as reply,
            ):
                assert reply.status == 200
                assert reply.content_type == "text/event-stream"
                assert 0.15 < time.monotonic() - began < 0.7
                for _ in range(3):
                    assert (await reply.content.readuntil(b"\n\n")).startswith(b":")
                if not fails:
                    engine.release()
                rest = (await reply.content.read()).decode()
            events = [event for event in rest.split("\n\n") if event.startswith("data: ")]
            if fails:
                assert len(events) == 1
                assert json.loads(events[0].removeprefix("data: "))["error"]["outcome"] == "expired"
                engine.release()
            else:
                assert events[-1] == "data: [DONE]"
                assert "".join(events).count('"role"') == 1
                after_content = rest[rest.index("data: ") :]
                assert ": waiting" not in after_content
            assert (await gateway.access("waits"))["outcome"] == ("expired" if fails else "completed")
            await runs
            await gateway.conserved()


@pytest.mark.parametrize("stream", [True, False])
async def test_the_engine_learns_within_half_a_second_that_the_client_left(tmp_path: Path, stream: bool) -> None:
    """Lost: the engine's time. A client that leaves the queue must never reach the engine at all."""
    async with (
        ScriptedEngine(Act.STALLS if stream else Act.HOLD) as engine,
        gateway_process(tmp_path, spec_text(engine.url, pool=ONE_SEAT)) as gateway,
    ):
        runs = asyncio.create_task(ask(gateway, "runs", stream))
        await until(lambda: len(engine.open) == 1, 5)
        waits = asyncio.create_task(ask(gateway, "waits", stream))
        await asyncio.sleep(0.3)
        waits.cancel()
        await asyncio.gather(waits, return_exceptions=True)
        assert (await gateway.access("waits"))["outcome"] == "cancelled"
        left = time.monotonic()
        runs.cancel()
        await asyncio.gather(runs, return_exceptions=True)
        await until(lambda: not engine.open, 5)
        assert (engine.asked[0].aborted or 0) - left < 0.5
        row = await gateway.access("runs")
        assert row["outcome"] == "cancelled"
        assert (row["first_token"] is not None) is stream
        await gateway.conserved()
        assert len(engine.asked) == 1


async def test_every_token_is_passed_on_before_the_next_one_is_made(tmp_path: Path) -> None:
    """Lost: the first token's time, to buffering. With 100 ms between tokens, each must arrive within its own gap."""
    async with (
        ScriptedEngine(tokens=6, gap=0.1) as engine,
        gateway_process(tmp_path, spec_text(engine.url)) as gateway,
    ):
        arrived: list[float] = []
        async with aiohttp.ClientSession() as session, session.post(gateway.url + CHAT, json=body()) as reply:
            with suppress(asyncio.IncompleteReadError):
                while event := await reply.content.readuntil(b"\n\n"):
                    if b" word" in event:
                        arrived.append(time.monotonic())
        written = engine.asked[0].written[1:]  # the first piece is the role
        assert len(arrived) == 6
        late = [at for at, following in zip(arrived, written[1:], strict=False) if at >= following]
        assert len(late) <= 1, "tokens wait for their successors"


async def test_healthz_answers_and_metrics_parse_while_many_streams_run(tmp_path: Path) -> None:
    """Lost: a gateway that is restarted by its liveness probe exactly when it is needed most."""
    async with (
        ScriptedEngine(tokens=20, gap=0.02) as engine,
        gateway_process(tmp_path, spec_text(engine.url)) as gateway,
    ):
        load = [asyncio.create_task(ask(gateway, f"load-{i}")) for i in range(200)]
        health = [(await gateway.get("/healthz"))[0] for _ in range(10)]
        accept = {"Accept": "application/openmetrics-text; version=1.0.0"}
        status, text = await gateway.get("/metrics", headers=accept)
        assert health == [200] * 10
        assert status == 200
        families = {
            family.name: family
            for family in parser.text_string_to_metric_families(text)  # type: ignore[no-untyped-call]
        }
        drift = families["laneway_conservation_drift"].samples
        assert {sample.labels["lane"] for sample in drift} == {
            *("none", "interactive-short", "interactive-long", "batch")
        }
        assert all(sample.value == 0 for sample in drift)
        assert {status for status, _ in await asyncio.gather(*load)} == {200}
        await gateway.conserved()


async def test_a_health_check_shares_its_connection_with_what_comes_before_and_after(tmp_path: Path) -> None:
    """Lost: a probe's connection that is out of step, and so takes another request's answer for its own."""
    async with ScriptedEngine() as engine, gateway_process(tmp_path, spec_text(engine.url)) as gateway:
        reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
        for path in ("/healthz", "/healthz", "/v1/models", "/healthz"):  # sent at once, before any answer
            writer.write(f"GET {path} HTTP/1.1\r\nhost: gateway\r\n\r\n".encode())
        writer.write(b"GET /healthz HTTP/1.1\r\nhost: gateway\r\nconnection: close\r\n\r\n")
        answers = (await asyncio.wait_for(reader.read(), 5)).split(b"HTTP/1.1 ")[1:]
        assert [answer[:3] for answer in answers] == [b"200"] * 5
        assert [b'{"status":"ok"}' in answer for answer in answers] == [True, True, False, True, True]
        writer.close()


def _listener(gateway: GatewayProcess, port: int) -> psutil.Process | None:
    """The gateway's child that listens on this port."""
    for child in psutil.Process(gateway.process.pid).children(recursive=True):
        with suppress(psutil.Error):
            if any(it.status == psutil.CONN_LISTEN and it.laddr.port == port for it in child.net_connections("tcp")):
                return child
    return None
