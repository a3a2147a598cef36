"""Asks a replica, relays its answer, and tries once more elsewhere while nothing has reached the client."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

from serving.engine.client import ReplicaUnreachableError, Reply, ReplyBrokenError
from serving.gateway.errors import RequestError
from serving.gateway.request import ParsedRequest
from serving.gateway.sse import NotAnEventStreamError, StreamScan, read_whole
from serving.telemetry.catalog import RetryReason
from serving.timeline import Outcome

if TYPE_CHECKING:
    from serving.gateway.exchange import Exchange

MAX_REPLY_BYTES = 256 << 20
MAX_ERROR_BYTES = 64 << 10


@dataclass
class AttemptFailedError(Exception):
    """The replica did not answer well, and no content has reached the client."""

    outcome: Outcome
    reason: RetryReason
    same_again: bool = False
    """An idle connection that the replica had closed: the replica itself may be well."""


async def ask_replicas(exchange: "Exchange", parsed: ParsedRequest, replica: str) -> None:
    """Relays one replica's answer to the client.

    Raises:
        RequestError: the engine refused or failed, once more after one retry, or failed after the first byte.
        ClientLeftError: the client went.
    """
    try:
        await _ask(exchange, parsed, replica)
        return
    except AttemptFailedError as failure:
        second = _next_replica(exchange, replica, failure)
        if second is None:
            raise _final(failure) from None
        exchange.gateway.retried(exchange, failure.reason)
    try:
        await _ask(exchange, parsed, second)
    except AttemptFailedError as failure:
        raise _final(failure) from None


def _next_replica(exchange: "Exchange", replica: str, failure: AttemptFailedError) -> str | None:
    gateway = exchange.gateway
    assert exchange.dispatch is not None
    assert exchange.ticket is not None
    if failure.reason is not RetryReason.REFUSED:
        gateway.replica_failed(exchange.dispatch.pool, replica, failure.reason)
    elsewhere = exchange.dispatch.scheduler.reassign(exchange.ticket, frozenset({replica}), gateway.clock())
    second = replica if elsewhere is None and failure.same_again else elsewhere
    if second is not None:
        exchange.timeline.extra["replica"] = second
    return second


def _final(failure: AttemptFailedError) -> RequestError:
    if failure.outcome is Outcome.REJECTED_ENGINE:
        return RequestError(Outcome.REJECTED_ENGINE, "the engine has no room", retry_after=1.0)
    return RequestError(Outcome.ENGINE_ERROR, f"the engine failed: {failure.reason}")


async def _ask(exchange: "Exchange", parsed: ParsedRequest, replica: str) -> None:
    gateway = exchange.gateway
    assert exchange.dispatch is not None
    assert exchange.ticket is not None
    address = gateway.address(exchange.dispatch.pool, replica)
    if address is None:
        raise AttemptFailedError(Outcome.ENGINE_ERROR, RetryReason.UNREACHABLE)
    now = gateway.clock()
    left_ms = max(0, int((exchange.ticket.deadline - now) * 1000))
    body = parsed.upstream_body(exchange.timeline.lane, left_ms)
    headers = exchange.head.upstream_headers(exchange.trace.upstream, address.host)
    exchange.sent(now)
    try:
        reply = await gateway.client.post(address.base + parsed.kind.path, body, headers, address.server_name)
    except ReplicaUnreachableError as error:
        raise AttemptFailedError(Outcome.ENGINE_ERROR, RetryReason.UNREACHABLE, same_again=error.reset) from None
    except ReplyBrokenError:
        raise AttemptFailedError(Outcome.ENGINE_ERROR, RetryReason.BROKEN) from None
    try:
        if reply.status != 200:
            await _not_ok(reply)
        elif parsed.stream:
            await _relay_stream(exchange, parsed, reply)
        else:
            await _relay_whole(exchange, reply)
    finally:
        reply.abort()


async def _not_ok(reply: Reply) -> None:
    status = reply.status
    if status in (429, 503):
        raise AttemptFailedError(Outcome.REJECTED_ENGINE, RetryReason.REFUSED)
    if 400 <= status < 500:  # the engine knows more of its own fields than we do: its words are for the client
        try:
            body = await reply.read_all(MAX_ERROR_BYTES)
        except ReplyBrokenError:
            raise AttemptFailedError(Outcome.ENGINE_ERROR, RetryReason.BROKEN) from None
        raise RequestError(Outcome.REJECTED_INVALID, "refused by the engine", status=status, raw_body=body)
    raise AttemptFailedError(Outcome.ENGINE_ERROR, RetryReason.SERVER_ERROR)


async def _relay_whole(exchange: "Exchange", reply: Reply) -> None:
    try:
        body = await reply.read_all(MAX_REPLY_BYTES)
        whole = read_whole(body)
    except (ReplyBrokenError, NotAnEventStreamError):
        raise AttemptFailedError(Outcome.ENGINE_ERROR, RetryReason.BROKEN) from None
    exchange.content(exchange.gateway.clock())
    _count(exchange, whole.prompt_tokens, whole.output_tokens)
    await exchange.answer(200, body, _content_type(reply.headers))
    exchange.completed()
    exchange.gateway.store(exchange, body)


async def _relay_stream(exchange: "Exchange", parsed: ParsedRequest, reply: Reply) -> None:
    if "text/event-stream" not in reply.headers.get("content-type", ""):
        raise AttemptFailedError(Outcome.ENGINE_ERROR, RetryReason.BROKEN)
    gateway = exchange.gateway
    client = exchange.client
    scan = StreamScan(pass_usage=parsed.include_usage)
    keep = gateway.cache.wants(parsed)
    kept: list[bytes] = []
    held = b""
    while not scan.done:
        try:
            data = await reply.read_some()
            if not data:
                break
            now = gateway.clock()
            out, content = scan.feed(data)
        except (ReplyBrokenError, NotAnEventStreamError):
            _broken(exchange, "broken")
        if scan.error is not None:
            if out and exchange.timeline.first_token is not None:
                await client.write(out)  # what came before the error is good
            _broken(exchange, "error event")
        if content:
            first = exchange.timeline.first_token is None
            exchange.content(now)
            if first:
                await exchange.begin_stream()
                out, held = held + out, b""
                await client.write(out)
                assert exchange.dispatch is not None
                assert exchange.ticket is not None
                exchange.dispatch.first_token(exchange.ticket, now)
                if keep:
                    kept.append(out)
                continue
        elif exchange.timeline.first_token is None:
            held += out  # nothing reaches the client before content does, so that a failure can still be retried
            continue
        if scan.done:
            held = out
            break
        if out:
            await client.write(out)
            if keep:
                kept.append(out)
    if not scan.done and (not scan.finished or scan.rest):
        _broken(exchange, "cut off")
    _count(exchange, scan.prompt_tokens, scan.output_tokens)
    await exchange.begin_stream()
    await client.end(held)
    exchange.completed()  # before anything else is waited for: the client has its answer
    if keep:
        gateway.store(exchange, b"".join([*kept, held]))
    await reply.skip_rest()


def _broken(exchange: "Exchange", reason: str) -> NoReturn:
    if exchange.timeline.first_token is None:  # comments may be out: they are no content
        raise AttemptFailedError(Outcome.ENGINE_ERROR, RetryReason.BROKEN)
    assert exchange.dispatch is not None
    if exchange.ticket is not None and exchange.ticket.replica is not None:
        exchange.gateway.replica_failed(exchange.dispatch.pool, exchange.ticket.replica, reason)
    raise RequestError(Outcome.ENGINE_ERROR, f"the engine's stream ended early: {reason}")


def _count(exchange: "Exchange", prompt_tokens: int | None, output_tokens: int | None) -> None:
    if prompt_tokens is not None:
        exchange.timeline.prompt_tokens = prompt_tokens
        exchange.usage_seen = True
    if output_tokens is not None:
        exchange.timeline.output_tokens = output_tokens


def _content_type(headers: Mapping[str, str]) -> bytes:
    return headers.get("content-type", "application/json").encode("latin-1")
