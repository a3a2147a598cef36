"""The official `openai` client against the gateway: what works with OpenAI's own service works here."""

import asyncio
import hashlib
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import openai
import pytest
import pytest_asyncio

from tests.fixtures.gateway_in_process import spec_text, until
from tests.fixtures.scripted_engine import Act, ScriptedEngine
from tests.fixtures.scripted_wire import MODEL
from tests.integration.gateway_process import GatewayProcess, gateway_process

pytestmark = [pytest.mark.integration, pytest.mark.asyncio(loop_scope="module")]

KEY = "lw-a-key-of-the-tests"
QUOTA_KEY = "lw-a-key-with-a-quota"
NARROW_KEY = "lw-a-key-for-another-model"
SAID = " word0 word1 word2 word3"
HELLO: Any = [{"role": "user", "content": "hello"}]


def keys() -> str:
    """The part of the spec with the keys."""
    digest = {key: hashlib.sha256(key.encode()).hexdigest() for key in (KEY, QUOTA_KEY, NARROW_KEY)}
    return f"""  auth:
    required: true
    keys:
      - {{name: all, sha256: {digest[KEY]}}}
      - {{name: few, sha256: {digest[QUOTA_KEY]}, requests_per_minute: 1}}
      - {{name: other-model, sha256: {digest[NARROW_KEY]}, models: []}}
"""


Running = tuple[GatewayProcess, ScriptedEngine]


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def running(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Running]:
    """A gateway that requires keys, and its engine; one for all tests."""
    async with (
        ScriptedEngine() as engine,
        gateway_process(tmp_path_factory.mktemp("gateway"), spec_text(engine.url) + keys()) as gateway,
    ):
        yield gateway, engine


@asynccontextmanager
async def served(running: Running, act: Act = Act.ANSWER) -> AsyncIterator[Running]:
    """The gateway and its engine, which has seen nothing yet; nothing may be left of it in the end."""
    gateway, engine = running
    engine.act, engine.gap = act, 0.0
    engine.asked.clear()
    yield gateway, engine
    await gateway.conserved()


def client_of(gateway: GatewayProcess, key: str = KEY) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key=key, max_retries=0, timeout=10)


async def test_chat_and_completions_are_answered_whole_and_streamed(running: Running) -> None:
    """Lost: every application written for OpenAI's API."""
    async with served(running) as (gateway, _), client_of(gateway) as client:
        whole = await client.chat.completions.create(model=MODEL, messages=HELLO)
        assert whole.choices[0].message.content == SAID
        assert whole.usage is not None
        assert whole.usage.completion_tokens == 4

        stream = await client.chat.completions.create(model=MODEL, messages=HELLO, stream=True)
        chunks = [chunk async for chunk in stream]
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == SAID
        assert chunks[0].choices[0].delta.role == "assistant"
        assert [chunk.choices[0].finish_reason for chunk in chunks][-1] == "stop"

        text = await client.completions.create(model=MODEL, prompt="hello")
        assert text.choices[0].text == SAID
        pieces = [piece async for piece in await client.completions.create(model=MODEL, prompt="hello", stream=True)]
        assert "".join(piece.choices[0].text for piece in pieces) == SAID

        assert [model.id async for model in client.models.list()] == [MODEL]


async def test_the_synchronous_client_works_too(running: Running) -> None:
    """Lost: scripts and notebooks."""

    def ask(url: str) -> tuple[str | None, str]:
        with openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0, timeout=10) as client:
            whole = client.chat.completions.create(model=MODEL, messages=HELLO)
            with client.chat.completions.create(model=MODEL, messages=HELLO, stream=True) as stream:
                streamed = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
            return whole.choices[0].message.content, streamed

    async with served(running) as (gateway, _):
        assert await asyncio.to_thread(ask, gateway.url) == (SAID, SAID)


@pytest.mark.parametrize("wanted", [True, False])
async def test_usage_ends_a_stream_only_where_the_client_asked(running: Running, wanted: bool) -> None:
    """Lost: clients that take `choices[0]` of every chunk fail on a usage chunk that they did not ask for; those that
    did ask, for billing, must get it. The engine is asked for it always."""
    async with served(running) as (gateway, engine), client_of(gateway) as client:
        options: Any = {"include_usage": True} if wanted else openai.NOT_GIVEN
        stream = await client.chat.completions.create(
            model=MODEL,
            messages=HELLO,
            stream=True,
            stream_options=options,
            extra_headers={"x-request-id": f"u{wanted}"},
        )
        chunks = [chunk async for chunk in stream]
        assert engine.asked[0].body["stream_options"]["include_usage"] is True
        assert all(len(chunk.choices) == 1 for chunk in chunks[:-1])
        assert (chunks[-1].usage is not None) is wanted
        if wanted:
            assert chunks[-1].usage is not None
            assert chunks[-1].usage.completion_tokens == 4
            assert chunks[-1].choices == []
        assert (await gateway.access(f"u{wanted}"))["output_tokens"] == 4


async def test_tools_and_fields_that_the_gateway_does_not_know_reach_the_engine_unchanged(running: Running) -> None:
    """Lost: tools, structured output, and whatever vLLM learns next."""
    tools: Any = [
        {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}
    ]
    extra = {
        "top_k": 7,
        "guided_json": {"type": "object", "required": ["größe"]},
        "chat_template_kwargs": {"enable_thinking": False},
        "vllm_xargs": {"mine": 3, "lane": "batch", "deadline_ms": 10**9},
        "priority": -100,
    }
    async with served(running) as (gateway, engine), client_of(gateway) as client:
        await client.chat.completions.create(
            model=MODEL,
            messages=HELLO,
            tools=tools,
            tool_choice="auto",
            temperature=0.3,
            logit_bias={"5": -1},
            extra_body=extra,
        )
        body = engine.asked[0].body
        assert body["tools"] == tools
        assert body["tool_choice"] == "auto"
        assert body["temperature"] == 0.3
        assert body["logit_bias"] == {"5": -1}
        assert body["messages"] == HELLO
        for name in ("top_k", "guided_json", "chat_template_kwargs"):
            assert body[name] == extra[name]
        assert "priority" not in body
        assert body["vllm_xargs"].pop("deadline_ms") <= 60_000
        assert body["vllm_xargs"] == {"mine": 3, "lane": "interactive-short"}
        assert "authorization" not in engine.asked[0].headers


async def test_errors_become_the_clients_own_exceptions(running: Running) -> None:
    """Lost: error handling that was written once, for OpenAI's service."""
    async with served(running) as (gateway, engine):
        async with client_of(gateway) as client:
            with pytest.raises(openai.NotFoundError) as unknown:
                await client.chat.completions.create(model="gpt-none", messages=HELLO)
            assert unknown.value.code == "model_not_found"
            assert unknown.value.param == "model"

            with pytest.raises(openai.BadRequestError) as wrong:
                await client.chat.completions.create(model=MODEL, messages=HELLO, temperature=9)
            assert wrong.value.param == "temperature"
            assert wrong.value.type == "invalid_request_error"

            engine.act = Act.TOO_LONG_400
            with pytest.raises(openai.BadRequestError, match="too long"):
                await client.chat.completions.create(model=MODEL, messages=HELLO)
            engine.act = Act.ERROR_500
            with pytest.raises(openai.InternalServerError) as broken:
                await client.chat.completions.create(model=MODEL, messages=HELLO, stream=True)
            assert broken.value.status_code == 502
            engine.act = Act.BUSY_503
            with pytest.raises(openai.RateLimitError) as busy:
                await client.chat.completions.create(model=MODEL, messages=HELLO)
            assert int(busy.value.response.headers["retry-after"]) >= 1
            engine.act = Act.ANSWER

        async with client_of(gateway, "lw-nobody-has-this-one") as stranger:
            with pytest.raises(openai.AuthenticationError) as refused:
                await stranger.models.list()
            assert refused.value.code == "invalid_api_key"
            with pytest.raises(openai.AuthenticationError):
                await stranger.chat.completions.create(model=MODEL, messages=HELLO)
        async with client_of(gateway, NARROW_KEY) as narrow:
            with pytest.raises(openai.PermissionDeniedError):
                await narrow.chat.completions.create(model=MODEL, messages=HELLO)
        assert "lw-nobody-has-this-one" not in gateway.log_path.read_text() + gateway.stderr_path.read_text()


async def test_a_used_up_quota_is_a_rate_limit_with_the_exact_time_to_wait(running: Running) -> None:
    """Lost: clients that back off by the header come back too early, and are refused once more, or much too late."""
    async with served(running) as (gateway, _), client_of(gateway, QUOTA_KEY) as client:
        began = asyncio.get_running_loop().time()
        await client.chat.completions.create(model=MODEL, messages=HELLO)
        with pytest.raises(openai.RateLimitError) as limited:
            await client.chat.completions.create(model=MODEL, messages=HELLO)
        told = int(limited.value.response.headers["retry-after"])
        passed = asyncio.get_running_loop().time() - began
        assert math.ceil(60 - passed) <= told <= 60


async def test_a_failure_in_mid_stream_raises_in_the_client(running: Running) -> None:
    """Lost: a cut-off answer would be taken for a whole one."""
    async with served(running, Act.ERROR_EVENT) as (gateway, engine), client_of(gateway) as client:
        engine.gap = 0.02
        stream = await client.chat.completions.create(model=MODEL, messages=HELLO, stream=True)
        said: list[str] = []

        async def read() -> None:
            async for chunk in stream:
                said.append(chunk.choices[0].delta.content or "")  # noqa: PERF401 - what came before the error counts

        with pytest.raises(openai.APIError) as broken:
            await read()
        assert "".join(said) == " word0 word1"
        assert broken.value.code == "engine_error"


async def test_a_client_that_closes_its_stream_aborts_the_engine(running: Running) -> None:
    """Lost: the engine goes on computing for nobody."""
    async with served(running, Act.STALLS) as (gateway, engine), client_of(gateway) as client:
        stream = await client.chat.completions.create(model=MODEL, messages=HELLO, stream=True)
        async for _ in stream:
            break
        left = asyncio.get_running_loop().time()
        await stream.close()
        await until(lambda: engine.asked[0].aborted is not None, 5)
        assert (engine.asked[0].aborted or 0) - left < 0.5
