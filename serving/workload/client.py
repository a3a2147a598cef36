"""Sends one request and fills its timeline at the client's boundary.

aiohttp on uvloop was measured to be good enough: at 50 requests/s against a loopback engine, the bytes leave within
the bar of `tests/bench/send_lateness.py`, which prints what it is on this machine.
"""

import asyncio
import random
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace

import aiohttp

from serving.ledger import NO_LANE
from serving.telemetry.tracing import RequestTrace, Tracing
from serving.timeline import Boundary, Outcome, Timeline
from serving.workload.events import Answer, error_of
from serving.workload.trace import TraceRequest

KEEPALIVE_SECONDS = 4.0
"""Below the 5 s after which uvicorn closes an idle connection: a request must not meet a closing one."""
CONNECT_SECONDS = 5.0
_ERROR_BODY_BYTES = 64 * 1024

_OUTCOMES = {str(outcome): outcome for outcome in Outcome}
_BY_STATUS = {
    401: Outcome.REJECTED_AUTH,
    403: Outcome.REJECTED_AUTH,
    429: Outcome.REJECTED_FULL,
    503: Outcome.NO_REPLICA,
    504: Outcome.ENGINE_TIMEOUT,
}
_WORD = re.compile(r"[A-Za-z0-9_.-]{1,64}")


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request whose every byte is ready before it is due."""

    request: TraceRequest
    due: float
    """Seconds from the run's start."""
    body: bytes
    headers: dict[str, str]
    request_id: str
    lane: str
    """By the spec's rules; the answer's header says better."""


@dataclass(slots=True)
class Sending:
    """One request on its way: its timeline, and what the HTTP client's hooks saw."""

    timeline: Timeline
    connect_began: float | None = None
    connecting: float = 0.0
    """Seconds spent opening a connection."""
    status: int | None = None
    answer: Answer = field(default_factory=Answer)


@dataclass(frozen=True, slots=True)
class Line:
    """What all requests of a run share."""

    session: aiohttp.ClientSession
    url: str
    """Of the completion endpoint."""
    model: str
    run_id: str
    tracing: Tracing

    @property
    def span_name(self) -> str:
        return f"chat {self.model}"


def open_session(timeout: float) -> aiohttp.ClientSession:
    """A session without a limit on connections: an open loop must never wait for a free one.

    Args:
        timeout: of a whole request, seconds.
    """
    hooks = aiohttp.TraceConfig()
    hooks.on_connection_create_start.append(_connecting)
    hooks.on_connection_create_end.append(_connected)
    hooks.on_request_chunk_sent.append(_sent)
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_SECONDS, ttl_dns_cache=None),
        timeout=aiohttp.ClientTimeout(total=timeout, sock_connect=CONNECT_SECONDS),
        cookie_jar=aiohttp.DummyCookieJar(),
        trace_configs=[hooks],
        auto_decompress=False,
    )


async def send(line: Line, prepared: Prepared, start: float) -> Timeline:
    """Sends the request now and waits for its end; whatever happens is the timeline's outcome, never an exception.

    Args:
        start: of the run, on `time.monotonic`'s clock.
    """
    scheduled = start + prepared.due
    # The root span counts from the schedule, as the client's latency does.
    trace = line.tracing.start_client(line.span_name, scheduled)
    trace_id, context = _trace_context(trace)
    timeline = Timeline(
        request_id=prepared.request_id,
        boundary=Boundary.CLIENT,
        trace_id=trace_id,
        run_id=line.run_id,
        model=line.model,
        lane=prepared.lane,
        prompt_tokens=prepared.request.prompt_tokens,
        streamed=prepared.request.streamed,
        scheduled=scheduled,
    )
    sending = Sending(timeline)
    try:
        outcome, error = await _exchange(line, prepared, context, sending)
    except asyncio.CancelledError:
        outcome, error = Outcome.CANCELLED, "run_ended"
    except aiohttp.ConnectionTimeoutError:
        outcome, error = Outcome.NO_REPLICA, "connect_timeout"
    except TimeoutError:
        outcome, error = Outcome.CANCELLED, "client_timeout"
    except aiohttp.ClientConnectorError as failure:
        outcome, error = Outcome.NO_REPLICA, f"connect: {type(failure.os_error).__name__}"
    except Exception as failure:
        # One answer of whatever kind must not cost the run. A message could quote what was sent; the class says enough.
        outcome, error = Outcome.ENGINE_ERROR, type(failure).__name__
    timeline.end(outcome, time.monotonic(), error)
    _account(sending, prepared)
    trace.finish(timeline)
    return timeline


def _trace_context(trace: RequestTrace) -> tuple[str, dict[str, str]]:
    """(trace id, headers). Where nobody exports spans here, ids are drawn, so that the gateway's trace has one root."""
    if trace.trace_id is not None:
        return trace.trace_id, {name.decode(): value.decode() for name, value in trace.upstream}
    trace_id, span_id = f"{random.getrandbits(128) or 1:032x}", f"{random.getrandbits(64) or 1:016x}"
    return trace_id, {"traceparent": f"00-{trace_id}-{span_id}-01"}


async def _exchange(
    line: Line, prepared: Prepared, context: dict[str, str], sending: Sending
) -> tuple[Outcome, str | None]:
    timeline, answer = sending.timeline, sending.answer
    async with line.session.post(
        line.url,
        data=prepared.body,
        headers=prepared.headers | context,
        allow_redirects=False,
        trace_request_ctx=sending,
    ) as response:
        sending.status = response.status
        _identify(timeline, response.headers)
        if response.status != 200:
            body = await response.content.read(_ERROR_BODY_BYTES)
            named = response.headers.get("x-laneway-outcome")
            return refusal(response.status, error_of(body) | ({"code": named} if named else {}))
        if response.content_type != "text/event-stream":
            body = await response.read()
            now = time.monotonic()
            answer.whole(body)
            timeline.streamed = False
            timeline.content(now)
            return Outcome.COMPLETED, None
        async for data in response.content.iter_any():
            now = time.monotonic()
            if answer.feed(data):
                timeline.content(now)
    if answer.error is not None:
        return refusal(None, answer.error)
    if not answer.done and not answer.finished:
        return Outcome.ENGINE_ERROR, "stream_cut"
    return Outcome.COMPLETED, None


def refusal(status: int | None, error: dict[str, object]) -> tuple[Outcome, str]:
    """The outcome of an error answer, and a text for the record that holds nothing the user wrote.

    Laneway names the outcome in `error.code`; other servers are read by their status (None: an error event inside a
    stream whose status was 200 already).
    """
    code = error.get("code")
    named = _OUTCOMES.get(code) if isinstance(code, str) else None
    if named is None or named is Outcome.COMPLETED:
        if status is None and isinstance(code, int):
            status = code
        if status is not None and 400 <= status < 500:
            named = _BY_STATUS.get(status, Outcome.REJECTED_INVALID)
        else:
            named = _BY_STATUS.get(status or 500, Outcome.ENGINE_ERROR)
    words = [f"http {status}" if status is not None else "event"]
    words += [str(word) for key in ("code", "type") if _WORD.fullmatch(str(word := error.get(key) or ""))]
    return named, " ".join(dict.fromkeys(words))


def _identify(timeline: Timeline, headers: Mapping[str, str]) -> None:
    """The gateway's own word on the request, where the target is one. Refused early, a request has no lane yet."""
    get = headers.get
    timeline.request_id = get("x-request-id", timeline.request_id)
    lane = get("x-laneway-lane", NO_LANE)
    if lane != NO_LANE:
        timeline.lane = lane
    timeline.extra["lane_by"] = "spec" if lane == NO_LANE else "gateway"


def _account(sending: Sending, prepared: Prepared) -> None:
    timeline, answer = sending.timeline, sending.answer
    counted = answer.output_tokens if isinstance(answer.output_tokens, int) else answer.content_chunks
    timeline.output_tokens = counted
    timeline.extra |= {
        "status": sending.status,
        "tier": prepared.request.tier,
        "connect": round(sending.connecting, 6),
        "usage_prompt_tokens": answer.prompt_tokens,
        "wanted_output_tokens": prepared.request.output_tokens,
    }


# The probe's requests pass these hooks too, without a `Sending`.


async def _connecting(_: aiohttp.ClientSession, context: SimpleNamespace, __: object) -> None:
    sending = context.trace_request_ctx
    if isinstance(sending, Sending):
        sending.connect_began = time.monotonic()


async def _connected(_: aiohttp.ClientSession, context: SimpleNamespace, __: object) -> None:
    sending = context.trace_request_ctx
    if isinstance(sending, Sending) and sending.connect_began is not None:
        sending.connecting += time.monotonic() - sending.connect_began


async def _sent(_: aiohttp.ClientSession, context: SimpleNamespace, __: object) -> None:
    sending = context.trace_request_ctx
    if isinstance(sending, Sending) and sending.timeline.sent is None:
        sending.timeline.sent = time.monotonic()
