"""The simulated replica in one process: what it refuses, what it sends, and when."""

import asyncio
import json
import time
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from serving.engine import simulated_request
from serving.engine.engine_span import EngineSpans, SpanSource, attributes
from serving.engine.sequence import EngineLimits, Sequence
from serving.engine.simulated import EngineBusyError, SimulatedEngine, TokenStream
from serving.engine.simulated_reply import ReplyShape, text_pieces
from serving.engine.simulated_request import Parsed, RefusedError, parse
from serving.engine.step_time import Profile
from serving.engine.tiny_model import tokenizer
from serving.engine.vllm_metrics import VllmMetrics

SECRET = "canary-7f3a"
CHAT = {"model": "m", "messages": [{"role": "user", "content": SECRET}], "max_tokens": 4}
SLOW = Profile(step_ms=20.0, prefill_token_ms=0.0, decode_ms=0.0, prefill_ms=0.0, attention_ms=0.0)

PIECES = text_pieces(tokenizer())


def parsed(body: Any, chat: bool = True) -> Parsed:
    """A body, parsed."""
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    return parse(raw, "application/json", chat, "m", 100)


@pytest.mark.parametrize(
    ("change", "status", "kind", "param"),
    [
        ({"model": SECRET}, 404, "NotFoundError", "model"),
        ({"messages": []}, 400, "BadRequestError", None),
        ({"messages": SECRET}, 400, "Bad Request", "body.messages"),
        ({"messages": [{"content": SECRET}]}, 400, "Bad Request", "body.messages.0.role"),
        ({"messages": [{"role": "user", "content": 5}]}, 400, "Bad Request", "body.messages.0.content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "BadRequestError", None),
        ({"max_tokens": 0}, 400, "BadRequestError", "max_tokens"),
        ({"max_tokens": 101}, 400, "BadRequestError", "max_tokens"),
        ({"max_tokens": SECRET}, 400, "Bad Request", "body.max_tokens"),
        ({"temperature": -1}, 400, "BadRequestError", "temperature"),
        ({"top_p": 3}, 400, "BadRequestError", "top_p"),
        ({"n": 2}, 400, "BadRequestError", "n"),
        ({"logprobs": True}, 400, "BadRequestError", "logprobs"),
        ({"tools": [{"type": "function"}]}, 400, "BadRequestError", None),
        ({"stream_options": {"include_usage": True}}, 400, "BadRequestError", "stream_options"),
        ({"response_format": {"type": "json_object"}}, 400, "BadRequestError", "response_format"),
    ],
)
def test_a_wrong_request_is_refused_as_vllm_does_and_nothing_of_it_is_repeated(
    change: dict[str, Any], status: int, kind: str, param: str | None
) -> None:
    """A gateway tested against other errors would map the real ones wrongly; an error text must not leak prompts."""
    with pytest.raises(RefusedError) as refusal:
        parsed(CHAT | change)
    body = json.loads(refusal.value.body())["error"]
    assert (refusal.value.status, body["type"], body["param"], body["code"]) == (status, kind, param, status)
    assert SECRET not in refusal.value.body().decode()


@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b"\xff\xfe", b"[" * 100_000])
def test_what_is_no_json_object_is_refused(body: bytes) -> None:
    """Garbage must cost a 400, not a replica."""
    with pytest.raises(RefusedError) as refusal:
        parsed(body)
    assert (refusal.value.status, refusal.value.kind) == (400, "Bad Request")


def test_the_newer_name_of_the_output_limit_wins() -> None:
    """OpenAI clients send `max_completion_tokens`: ignoring it would let them stream to the model's length."""
    assert parsed(CHAT | {"max_completion_tokens": 9}).asked_tokens == 9


@pytest.mark.parametrize(
    ("prompt", "tokens"), [("word", None), (["word"], None), ([5, 6, 7], [5, 6, 7]), ([[5, 6, 7]], [5, 6, 7])]
)
def test_a_text_completion_takes_text_or_tokens(prompt: Any, tokens: list[int] | None) -> None:
    """Benchmarks send token ids to be exact about lengths."""
    request = parsed({"model": "m", "prompt": prompt}, chat=False)
    ids = simulated_request.encode(request, tokenizer())
    assert ids == tokens if tokens is not None else ids[0] == 0


def engine(profile: Profile = SLOW, requests: int | None = None, tokens: int | None = None) -> SimulatedEngine:
    """An engine without spans, with bounds on what it holds."""
    metrics = VllmMetrics(CollectorRegistry(), "m", profile, EngineLimits(), {})
    return SimulatedEngine(profile, EngineLimits(), metrics, EngineSpans({}), requests, tokens)


def submit(target: SimulatedEngine, output: int, streamed: bool = True, prompt: int = 10) -> TokenStream:
    """A request of `prompt` equal tokens."""
    request = parsed(CHAT | {"stream": streamed})
    source = SpanSource("chatcmpl-1", {}, 0, time.monotonic(), output, None, None)
    shape = ReplyShape(request, "chatcmpl-1", 1, "m", prompt)
    return target.submit([9] * prompt, output, source, shape, PIECES, "length", streamed)


async def read_all(stream: TokenStream) -> bytes:
    """The whole reply."""
    data = b""
    while part := await stream.read():
        data += part
    return data


async def test_tokens_come_when_their_steps_end_and_never_before() -> None:
    """A simulated engine that sends early makes every latency measured on it wrong."""
    target = engine()
    running = asyncio.create_task(target.run())
    began = time.monotonic()
    stream = submit(target, 10)
    arrived = []
    while await stream.read():
        arrived.append(time.monotonic() - began)
    running.cancel()
    assert len(arrived) == 10
    for number, at in enumerate(arrived, start=1):
        assert at >= number * 0.020


async def test_the_same_prompt_gets_the_same_text_streamed_or_not() -> None:
    """Caches and mirrored comparisons need replies that repeat."""
    target = engine(Profile(step_ms=0.5))
    running = asyncio.create_task(target.run())
    streamed = await read_all(submit(target, 12))
    whole = json.loads(await read_all(submit(target, 12, streamed=False)))
    running.cancel()
    events = [json.loads(event[6:]) for event in streamed.decode().split("\n\n") if event.startswith("data: {")]
    text = "".join(event["choices"][0]["delta"].get("content", "") for event in events)
    assert text == whole["choices"][0]["message"]["content"]
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert len(events) == 1 + 12
    assert streamed.endswith(b"data: [DONE]\n\n")
    assert whole["usage"]["completion_tokens"] == 12


async def test_a_client_that_leaves_frees_its_place_within_a_step() -> None:
    """Otherwise a replica that clients have left goes on working for nobody."""
    target = engine(requests=1)
    running = asyncio.create_task(target.run())
    leaving = submit(target, 1000)
    await leaving.read()
    with pytest.raises(EngineBusyError, match="max_num_queued_reqs"):
        submit(target, 1)
    target.abort(leaving)
    assert await leaving.read() == b""
    began = time.monotonic()
    await read_all(submit(target, 1))
    running.cancel()
    assert time.monotonic() - began < 3 * 0.020 + 0.1


async def test_prompts_in_prefill_can_be_bounded_and_leave_the_bound_when_their_first_token_is_there() -> None:
    """A leak in this count would make the replica refuse everything, for ever."""
    target = engine(tokens=10)
    running = asyncio.create_task(target.run())
    first = submit(target, 5)
    with pytest.raises(EngineBusyError, match="max_num_queued_tokens"):
        submit(target, 5)
    await first.read()
    second = submit(target, 5)
    target.abort(second)
    await read_all(submit(target, 5))
    await read_all(first)
    running.cancel()


def test_the_span_of_a_request_divides_its_time_as_vllm_does() -> None:
    """Traces through a simulated engine must read like those through a real one."""
    sequence = Sequence("r", 100, 5, queued_at=1.0, scheduled_at=1.5, first_token_at=2.0, last_token_at=4.0)
    sequence.output_tokens = 5
    values = attributes(SpanSource("chatcmpl-r", {}, 0, 0.9, 5, 0.0, None), sequence, 4.1)
    assert values["gen_ai.latency.time_in_queue"] == 0.5
    assert values["gen_ai.latency.time_in_model_prefill"] == 0.5
    assert values["gen_ai.latency.time_in_model_decode"] == 2.0
    assert values["gen_ai.latency.time_to_first_token"] == pytest.approx(1.1)
    assert values["gen_ai.usage.completion_tokens"] == 5
    assert "gen_ai.request.temperature" not in values, "vLLM leaves a temperature of 0 out"
