"""Replicas that fail in every way that replicas do: the status, the outcome, the retry, and what is left behind."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.fixtures.gateway_in_process import spec_text, until
from tests.fixtures.scripted_engine import Act, ScriptedEngine
from tests.fixtures.scripted_wire import MODEL
from tests.integration.gateway_process import GatewayProcess, gateway_process

pytestmark = pytest.mark.integration

CHAT = "/v1/chat/completions"
WHOLE = " word0 word1 word2 word3"
TIMEOUTS = "first_token: 1, idle: 1, total: 4, connect: 1"

BEFORE_CONTENT = {
    Act.GARBAGE: (502, "engine_error"),
    Act.HTML: (502, "engine_error"),
    Act.CUT_JSON: (502, "engine_error"),
    Act.ERROR_500: (502, "engine_error"),
    Act.DIES_BEFORE_HEAD: (502, "engine_error"),
    Act.DIES_BEFORE_CONTENT: (502, "engine_error"),
    Act.ERROR_EVENT_FIRST: (502, "engine_error"),
    Act.BUSY_503: (429, "rejected_engine"),
}
"""What a client gets if both replicas do it."""
AFTER_CONTENT = {
    Act.DIES_AFTER_CONTENT: "engine_error",
    Act.ERROR_EVENT: "engine_error",
    Act.STALLS: "engine_timeout",
}


class Served:
    """A gateway with two replicas."""

    def __init__(self, gateway: GatewayProcess, engines: tuple[ScriptedEngine, ScriptedEngine]) -> None:
        self.gateway = gateway
        self.engines = engines

    def act(self, first: Act, second: Act) -> None:
        """What is done with a request's first and second attempt, whichever replica gets them."""
        tried: set[str] = set()

        def choose(asked: Any) -> Act:
            request_id = asked.headers["x-request-id"].rsplit("-", 1)[0]
            again = request_id in tried
            tried.add(request_id)
            return second if again else first

        for engine in self.engines:
            engine.act = choose

    @property
    def attempts(self) -> int:
        return sum(len(engine.asked) for engine in self.engines)


@asynccontextmanager
async def served(folder: Path, timeouts: str = TIMEOUTS) -> AsyncIterator[Served]:
    """Two replicas; at the end everything must add up, and the replicas must be rid of everybody."""
    async with ScriptedEngine() as one, ScriptedEngine() as two:
        spec = spec_text(one.url, two.url, timeouts=timeouts)
        async with gateway_process(folder, spec, replicas=2) as gateway:
            yield Served(gateway, (one, two))
            await gateway.conserved()
            await until(lambda: not one.open and not two.open, 5)


async def ask(gateway: GatewayProcess, request_id: str, stream: bool = True) -> tuple[int, str, dict[str, Any] | None]:
    """(status, text of the answer, its error)."""
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], "stream": stream}
    async with (
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(20)) as session,
        session.post(gateway.url + CHAT, json=body, headers={"x-request-id": request_id}) as reply,
    ):
        text = await reply.text()
        if reply.status != 200:
            return reply.status, "", json.loads(text)["error"]
        if not stream:
            return 200, json.loads(text)["choices"][0]["message"]["content"], None
        said, error = "", None
        for line in text.splitlines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            event = json.loads(line.removeprefix("data: "))
            error = event.get("error", error)
            for choice in event.get("choices", ()):
                said += choice["delta"].get("content") or ""
        return 200, said, error


async def test_a_failure_before_any_content_is_tried_once_more_elsewhere(tmp_path: Path) -> None:
    """Lost: one sick replica fails a share of all requests that a well one would have answered."""
    async with served(tmp_path) as both:
        for act in BEFORE_CONTENT:
            for stream in (True, False):
                both.act(act, Act.ANSWER)
                before = both.attempts
                await both.gateway.ready(2)  # after some failures a replica is out until it was probed
                name = f"{act.name}-{stream}"
                assert await ask(both.gateway, name, stream) == (200, WHOLE, None), act
                assert both.attempts == before + 2, act
                row = await both.gateway.access(name)
                assert row["outcome"] == "completed"
                addresses = [engine.url.removeprefix("http://") for engine in both.engines if _has(engine, name)]
                assert len(addresses) == 2, "the second attempt must go elsewhere"
                assert row["replica"] in addresses
        metrics = await both.gateway.metrics()
        retried = sum(value for key, value in metrics.items() if key.startswith("laneway_upstream_retries_total"))
        assert retried == 2 * len(BEFORE_CONTENT)


async def test_a_failure_of_both_replicas_has_its_own_status_and_outcome(tmp_path: Path) -> None:
    """Lost: who reads the log at night does not learn what failed; and a third try would add to an overload."""
    async with served(tmp_path) as both:
        for act, (status, outcome) in BEFORE_CONTENT.items():
            for stream in (True, False):
                both.act(act, act)
                await both.gateway.ready(2)
                before = both.attempts
                name = f"{act.name}-{stream}"
                code, said, error = await ask(both.gateway, name, stream)
                assert (code, said) == (status, ""), act
                assert error is not None
                assert error["outcome"] == outcome
                assert both.attempts == before + 2, act
                assert (await both.gateway.access(name))["outcome"] == outcome
        metrics = await both.gateway.metrics()
        counted = sum(
            value
            for key, value in metrics.items()
            if key.startswith("laneway_requests_total{") and 'outcome="engine_error"' in key
        )
        assert counted == 2 * (len(BEFORE_CONTENT) - 1)


async def test_a_failure_after_content_is_an_error_event_and_is_not_retried(tmp_path: Path) -> None:
    """Lost: an answer whose end comes from another replica than its beginning."""
    async with served(tmp_path) as both:
        for engine in both.engines:
            engine.gap = 0.02  # content must have left before the fault comes: with it in one piece, nothing has
        for act, outcome in AFTER_CONTENT.items():
            both.act(act, Act.ANSWER)
            before = both.attempts
            code, said, error = await ask(both.gateway, act.name)
            assert (code, said) == (200, " word0 word1"), act
            assert error is not None
            assert error["outcome"] == outcome
            assert both.attempts == before + 1
            row = await both.gateway.access(act.name)
            assert row["outcome"] == outcome
            assert row["first_token"] is not None
            await both.gateway.ready(2)


async def test_a_replica_that_never_answers_is_given_up_in_time(tmp_path: Path) -> None:
    """Lost: clients that wait until their own time-out, and seats that are never free again."""
    async with served(tmp_path) as both:
        both.act(Act.NEVER, Act.NEVER)
        loop = asyncio.get_running_loop()
        for stream, limit in ((True, 1.0), (False, 4.0)):  # who is not streamed to has no first token to wait for
            began = loop.time()
            code, _, error = await ask(both.gateway, f"never-{stream}", stream)
            assert (code, error and error["outcome"]) == (504, "engine_timeout")
            assert limit - 0.1 < loop.time() - began < limit + 1.5
            assert (await both.gateway.access(f"never-{stream}"))["outcome"] == "engine_timeout"


async def test_a_stream_whose_body_never_ends_is_whole_for_the_client(tmp_path: Path) -> None:
    """Lost: complete answers counted as time-outs, and their seats held until then."""
    async with served(tmp_path) as both:
        both.act(Act.NO_END, Act.NO_END)
        began = asyncio.get_running_loop().time()
        assert await ask(both.gateway, "no-end") == (200, WHOLE, None)
        assert asyncio.get_running_loop().time() - began < 0.9
        assert (await both.gateway.access("no-end"))["outcome"] == "completed"


async def test_a_stream_that_comes_in_odd_pieces_is_passed_on_once(tmp_path: Path) -> None:
    """Lost: a role event that comes twice, the second time after the end."""
    async with served(tmp_path) as both:
        for act in (Act.ROLE_APART, Act.NO_DONE):
            for engine in both.engines:
                engine.act, engine.gap = act, 0.02
            body = {"model": MODEL, "messages": [{"role": "user", "content": "x"}], "stream": True}
            async with aiohttp.ClientSession() as session, session.post(both.gateway.url + CHAT, json=body) as reply:
                text = await reply.text()
            assert text.count('"role"') == 1
            assert text.count("[DONE]") == (act is Act.ROLE_APART)
            assert text.count(" word") == 4


async def test_kept_connections_that_the_replica_closes_cost_no_request(tmp_path: Path) -> None:
    """Lost: a request now and then, whenever a replica's keep-alive time is shorter than ours."""
    async with served(tmp_path) as both:
        both.act(Act.CLOSES_AFTERWARDS, Act.CLOSES_AFTERWARDS)
        for i in range(30):
            assert (await ask(both.gateway, f"closes-{i}", i % 2 == 0))[:2] == (200, WHOLE)
        assert not both.gateway.events("replica_lost")


async def test_a_replica_that_dies_is_lost_and_is_taken_back_when_it_is_well(tmp_path: Path) -> None:
    """Lost: requests, to a replica that is known to be dead; or half of the capacity, after a restart."""
    async with ScriptedEngine() as stays:
        dies = ScriptedEngine()
        async with dies:
            port = int(dies.url.rsplit(":", 1)[1])
            spec = spec_text(stays.url, dies.url, timeouts=TIMEOUTS)
            gateway = GatewayProcess(tmp_path, spec)
            try:
                await gateway.ready(2)
                await dies.stop()
                address = dies.url.removeprefix("http://")
                for i in range(20):
                    assert (await ask(gateway, f"during-{i}"))[:2] == (200, WHOLE)
                await gateway.event("replica_lost", 10, replica=address)
                before = len(gateway.events("replica_ready"))
                async with ScriptedEngine(port=port) as back:
                    await gateway.ready(2, 15)
                    assert len(gateway.events("replica_ready")) == before + 1
                    await asyncio.gather(*(ask(gateway, f"after-{i}") for i in range(20)))
                    assert back.asked
                    await gateway.conserved()
            finally:
                assert await asyncio.to_thread(gateway.stop) == 0


async def test_with_no_replica_ready_requests_are_told_so_at_once(tmp_path: Path) -> None:
    """Lost: requests that wait out their whole deadline in front of nothing."""
    async with ScriptedEngine() as engine:
        gateway = GatewayProcess(tmp_path, spec_text(engine.url))
        try:
            await gateway.ready(1)
            engine.well = False
            await gateway.event("replica_lost", 15)
            assert (await gateway.get("/readyz"))[0] == 503
            assert (await gateway.get("/healthz"))[0] == 200
            code, _, error = await ask(gateway, "nobody")
            assert (code, error and error["outcome"]) == (503, "no_replica")
            engine.well = True
            await gateway.ready(1, 10)
            assert (await ask(gateway, "somebody"))[0] == 200
            await gateway.conserved()
        finally:
            assert await asyncio.to_thread(gateway.stop) == 0


async def test_a_storm_of_all_faults_at_once_leaves_nothing_behind(tmp_path: Path) -> None:
    """Lost: seats that leak one by one, under faults that come together."""
    acts = [*BEFORE_CONTENT, *AFTER_CONTENT, Act.NEVER, Act.ANSWER, Act.ANSWER, Act.NO_END, Act.CLOSES_AFTERWARDS]
    async with served(tmp_path) as both:
        for engine in both.engines:
            engine.act = lambda asked: acts[hash(asked.headers["x-request-id"]) % len(acts)]
        results = await asyncio.gather(*(ask(both.gateway, f"storm-{i}", i % 3 > 0) for i in range(150)))
        assert {code for code, _, _ in results} <= {200, 429, 502, 503, 504}


def _has(engine: ScriptedEngine, request_id: str) -> bool:
    return any(asked.headers["x-request-id"].startswith(request_id + "-") for asked in engine.asked)
