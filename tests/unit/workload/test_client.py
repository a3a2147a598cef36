"""One request against a real server on loopback: what came, and what the timeline says came."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace

import orjson
import pytest
from aiohttp import web
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from serving.telemetry.tracing import Tracing
from serving.timeline import Outcome, Timeline
from serving.workload.client import Line, Prepared, open_session, refusal, send
from serving.workload.replay import replay, send_lateness
from serving.workload.trace import TraceRequest

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
SECRET = "my secret prompt"


def prepared(due: float = 0.0, *, streamed: bool = True) -> Prepared:
    body = orjson.dumps({"messages": [{"role": "user", "content": SECRET}], "stream": streamed})
    headers = {"content-type": "application/json", "x-request-id": f"mine-{due}"}
    request = TraceRequest(due, 100, 4, streamed=streamed)
    return Prepared(request, due, body, headers, f"mine-{due}", "interactive-short")


@asynccontextmanager
async def serving(handler: Handler, timeout: float = 5.0) -> AsyncIterator[Line]:
    app = web.Application()
    app.router.add_post("/v1/chat/completions", handler)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    server = site._server
    assert isinstance(server, asyncio.Server)
    port = server.sockets[0].getsockname()[1]
    try:
        async with open_session(timeout) as session:
            url = f"http://127.0.0.1:{port}/v1/chat/completions"
            yield Line(session, url, "m", "run", Tracing("test", environ={}))
    finally:
        await runner.cleanup()


async def outcome_of(handler: Handler, *, streamed: bool = True, timeout: float = 5.0) -> Timeline:
    async with serving(handler, timeout) as line:
        return await send(line, prepared(streamed=streamed), asyncio.get_running_loop().time())


def event(fields: dict[str, object]) -> bytes:
    return b"data: " + orjson.dumps(fields) + b"\n\n"


def delta(**fields: object) -> bytes:
    return event({"choices": [{"index": 0, "delta": fields}]})


async def stream(request: web.Request, *parts: bytes | float, cut: bool = False) -> web.StreamResponse:
    """Writes parts; a number waits so many seconds. `cut` closes the connection in the middle."""
    response = web.StreamResponse(headers={"content-type": "text/event-stream", "x-laneway-lane": "batch"})
    await response.prepare(request)
    for part in parts:
        if isinstance(part, float):
            await asyncio.sleep(part)
        else:
            await response.write(part)
    if cut and request.transport is not None:
        request.transport.abort()
    return response


async def test_a_stream_is_stamped_at_its_first_content_not_at_its_role() -> None:
    """The role chunk comes at once; taken for a token it would hide the whole wait."""

    async def handler(request: web.Request) -> web.StreamResponse:
        usage = event({"choices": [], "usage": {"prompt_tokens": 101, "completion_tokens": 3}})
        return await stream(
            request, delta(role="assistant", content=""), 0.05, delta(content="a"), 0.02, delta(content="b"), 0.08,
            delta(content="c"), usage, b"data: [DONE]\n\n",
        )  # fmt: skip

    timeline = await outcome_of(handler)
    assert (timeline.outcome, timeline.output_tokens, timeline.lane) == (Outcome.COMPLETED, 3, "batch")
    assert timeline.ttft is not None
    assert 0.05 <= timeline.ttft < 0.5
    assert timeline.itl_max is not None
    assert 0.06 <= timeline.itl_max < 0.5
    assert timeline.scheduled is not None
    assert timeline.sent is not None
    assert timeline.first_token is not None
    assert timeline.last_token is not None
    assert timeline.closed is not None
    assert timeline.scheduled <= timeline.sent <= timeline.first_token <= timeline.last_token <= timeline.closed
    assert timeline.extra["usage_prompt_tokens"] == 101


async def test_a_whole_answer_has_no_tpot_and_its_tokens() -> None:
    """Its single stamp spread over its tokens would be a wonderful TPOT of zero."""

    async def handler(_: web.Request) -> web.StreamResponse:
        return web.json_response({"choices": [{"message": {"content": "x"}}], "usage": {"completion_tokens": 9}})

    timeline = await outcome_of(handler, streamed=False)
    assert (timeline.outcome, timeline.output_tokens, timeline.streamed) == (Outcome.COMPLETED, 9, False)
    assert timeline.tpot is None
    assert timeline.ttft is not None


async def test_the_trace_context_goes_out_and_the_gateways_id_comes_back() -> None:
    """Without them a slow request of the report cannot be found in the gateway's log or in a trace."""
    seen: dict[str, str] = {}

    async def handler(request: web.Request) -> web.StreamResponse:
        seen.update(request.headers)
        body = {"choices": [], "usage": {"completion_tokens": 1}}
        return web.json_response(body, headers={"x-request-id": "the-gateways"})

    timeline = await outcome_of(handler, streamed=False)
    version, trace_id, span_id, flags = seen["traceparent"].split("-")
    assert (version, flags, len(span_id)) == ("00", "01", 16)
    assert timeline.trace_id == trace_id
    assert timeline.request_id == "the-gateways"


async def test_the_clients_own_span_is_the_parent_of_the_gateways(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the trace begins at the gateway, and a slow network is nowhere in it."""
    exported: list[Span] = []
    parents: list[str] = []

    async def collect(request: web.Request) -> web.StreamResponse:
        message = ExportTraceServiceRequest.FromString(await request.read())
        exported.extend(span for part in message.resource_spans for scope in part.scope_spans for span in scope.spans)
        return web.Response()

    async def answer(request: web.Request) -> web.StreamResponse:
        parents.append(request.headers["traceparent"])
        return web.json_response({"choices": []})

    async with serving(collect) as collector, serving(answer) as line:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", collector.url)
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf")
        tracing = Tracing("test")
        start = asyncio.get_running_loop().time()
        timeline = await send(replace(line, tracing=tracing), prepared(streamed=False), start)
        await asyncio.to_thread(tracing.close)
    (span,) = exported
    (parent,) = parents
    version, trace_id, span_id, flags = parent.split("-")
    assert (version, trace_id, span_id) == ("00", span.trace_id.hex(), span.span_id.hex())
    assert int(flags, 16) & 1, "the gateway is told to record its part too"
    assert (span.name, span.kind, span.parent_span_id) == ("chat m", Span.SPAN_KIND_CLIENT, b"")
    assert timeline.trace_id == span.trace_id.hex()
    assert timeline.completion is not None
    assert (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9 == pytest.approx(timeline.completion, abs=1e-5)
    assert SECRET not in str(span)


@pytest.mark.parametrize(
    ("status", "error", "outcome"),
    [
        (429, {"code": "rejected_infeasible"}, Outcome.REJECTED_INFEASIBLE),
        (429, {"code": "rejected_quota"}, Outcome.REJECTED_QUOTA),
        (429, {"type": "too_many"}, Outcome.REJECTED_FULL),
        (504, {"code": "expired"}, Outcome.EXPIRED),
        (504, {}, Outcome.ENGINE_TIMEOUT),
        (503, {"code": "draining"}, Outcome.DRAINING),
        (503, {}, Outcome.NO_REPLICA),
        (401, {"code": "invalid_api_key"}, Outcome.REJECTED_AUTH),
        (403, {}, Outcome.REJECTED_AUTH),
        (404, {"code": 404}, Outcome.REJECTED_INVALID),
        (422, {}, Outcome.REJECTED_INVALID),
        (500, {}, Outcome.ENGINE_ERROR),
        (502, {"code": "engine_error"}, Outcome.ENGINE_ERROR),
        (None, {"code": "engine_timeout"}, Outcome.ENGINE_TIMEOUT),
        (None, {"code": 503}, Outcome.NO_REPLICA),
        (None, {}, Outcome.ENGINE_ERROR),
        (500, {"code": "completed"}, Outcome.ENGINE_ERROR),
    ],
)
def test_an_error_answer_has_the_outcome_that_the_gateway_gave_it(
    status: int | None, error: dict[str, object], outcome: Outcome
) -> None:
    """Client and gateway must count the same ends, or nobody knows which count to believe."""
    assert refusal(status, error)[0] is outcome


async def test_a_refusal_keeps_nothing_of_what_the_user_wrote() -> None:
    """Servers quote bad input in their messages, and reports are mailed around."""

    async def handler(_: web.Request) -> web.StreamResponse:
        error = {"message": f"bad: {SECRET}", "type": SECRET, "code": "rejected_invalid"}
        return web.json_response({"error": error}, status=400)

    timeline = await outcome_of(handler)
    assert timeline.outcome is Outcome.REJECTED_INVALID
    assert "secret" not in str(timeline.record())


async def test_an_error_event_after_the_first_token_is_a_failure() -> None:
    """Its status was 200: only the event says that the answer is broken."""

    async def handler(request: web.Request) -> web.StreamResponse:
        return await stream(
            request, delta(content="a"), event({"error": {"code": "engine_error"}}), b"data: [DONE]\n\n"
        )

    timeline = await outcome_of(handler)
    assert timeline.outcome is Outcome.ENGINE_ERROR
    assert timeline.first_token is not None


async def test_a_stream_that_just_stops_is_a_failure() -> None:
    """A cut-off answer counted as complete is how a crash looks healthy."""

    async def ends(request: web.Request) -> web.StreamResponse:
        return await stream(request, delta(content="a"))

    async def aborts(request: web.Request) -> web.StreamResponse:
        return await stream(request, delta(content="a"), 0.02, cut=True)

    assert (await outcome_of(ends)).error == "stream_cut"
    assert (await outcome_of(aborts)).outcome is Outcome.ENGINE_ERROR


@pytest.mark.parametrize(
    "garbage",
    [b"data: {\n\n", b"data: []\n\n", b'data: {"choices":["x"]}\n\n', b'data: {"choices":7}\n\n', b"\xff\xfe"],
)
async def test_garbage_is_the_engines_error_and_does_not_end_the_run(garbage: bytes) -> None:
    """One broken replica among many must not cost the whole benchmark."""

    async def handler(request: web.Request) -> web.StreamResponse:
        return await stream(request, garbage)

    assert (await outcome_of(handler)).outcome is Outcome.ENGINE_ERROR


async def test_who_never_answers_is_left_and_who_is_not_there_is_no_replica() -> None:
    """Hung and absent servers are two different alarms."""

    async def hangs(request: web.Request) -> web.StreamResponse:
        return await stream(request, 3.0)

    timeline = await outcome_of(hangs, timeout=0.1)
    assert (timeline.outcome, timeline.error) == (Outcome.CANCELLED, "client_timeout")
    async with open_session(1.0) as session:
        line = Line(session, "http://127.0.0.1:9/v1/chat/completions", "m", "run", Tracing("test", environ={}))
        absent = await send(line, prepared(), asyncio.get_running_loop().time())
    assert absent.outcome is Outcome.NO_REPLICA
    assert absent.closed is not None


async def test_a_stuck_server_does_not_slow_the_schedule_and_nobody_is_lost() -> None:
    """In a closed loop the second request waits for the first, and overload hides itself."""

    async def hangs(request: web.Request) -> web.StreamResponse:
        return await stream(request, 30.0)

    async with serving(hangs) as line:
        done = await replay([prepared(i / 100) for i in range(30)], line, grace=0.2, stop=asyncio.Event())
    assert len(done.timelines) == 30
    assert {timeline.error for timeline in done.timelines} == {"run_ended"}
    assert done.interrupted
    # Half of the schedule's gap would already show a loop that waits: each answer takes 3000 gaps.
    assert max(send_lateness(done.timelines)) < 1.0


async def test_a_stopped_run_keeps_what_it_has() -> None:
    """Ctrl-C after ten minutes must not cost the ten minutes."""
    stop = asyncio.Event()

    async def answers(request: web.Request) -> web.StreamResponse:
        stop.set()
        return await stream(request, delta(content="a"), b"data: [DONE]\n\n")

    async with serving(answers) as line:
        done = await replay([prepared(0.0), prepared(60.0)], line, grace=5.0, stop=stop)
    assert len(done.timelines) == 1
    assert done.interrupted
