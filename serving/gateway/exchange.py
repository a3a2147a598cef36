"""One request, from its head to its end: the object that owns its timeline, its place in the queue and its outcome.

Everything that a request holds (a ledger entry, a ticket, a replica's connection, timers, a span) is let go in one
place, `_close`, which runs exactly once whatever happens: an answer, a refusal, a time-out, a client that leaves at any
await, or the gateway's own end.
"""

import asyncio
from collections.abc import Sequence
from math import ceil
from typing import TYPE_CHECKING

from serving.gateway.attempt import ask_replicas
from serving.gateway.client_side import ClientLeftError, ClientSide, Receive, Scope, Send
from serving.gateway.comments import Comments
from serving.gateway.due import Due, Stop
from serving.gateway.errors import RequestError, error_body, error_event
from serving.gateway.head import Head
from serving.gateway.placing import lane_for
from serving.gateway.request import Kind, ParsedRequest
from serving.gateway.uvicorn_protocol import ABORT
from serving.ledger import State
from serving.scheduling import Batch, Refusal, Ticket
from serving.timeline import Boundary, Outcome, Timeline

if TYPE_CHECKING:
    from serving.gateway.dispatch import Dispatch
    from serving.gateway.gateway import Gateway
    from serving.gateway.keys import Caller

EVENT_STREAM = b"text/event-stream; charset=utf-8"
JSON = b"application/json"


class Exchange:
    """One request at the gateway's boundary."""

    def __init__(self, gateway: "Gateway", kind: Kind, scope: Scope, receive: Receive, send: Send) -> None:
        self.gateway = gateway
        self.kind = kind
        self.head = Head.read(scope, gateway.clock)
        self.client = ClientSide(receive, send, scope.get(ABORT))
        self.timeline = Timeline(
            request_id=self.head.request_id, boundary=Boundary.GATEWAY, received=self.head.received
        )
        self.entry = gateway.ledger.receive()
        self.trace = gateway.tracing.start(kind.path, self.head.trace_headers, self.head.received)
        self.timeline.trace_id = self.trace.trace_id
        self.caller: Caller | None = None
        self.parsed: ParsedRequest | None = None
        self.dispatch: Dispatch | None = None
        self.ticket: Ticket | None = None
        self.estimate: int | None = None
        self.quota: int | None = None
        self.usage_seen = False
        self._task: asyncio.Task[object] | None = None
        self._stop: Stop | None = None
        self._turn: asyncio.Future[None] | None = None
        self._refused: RequestError | None = None
        self._replica: str | None = None
        timeouts = gateway.spec.gateway.timeouts
        self._due = Due(gateway.clock, self.head.received + timeouts.total, self._overdue)
        self._comments = Comments(self.client, timeouts, self._stream_headers, self._client_left)

    async def run(self) -> None:
        """Serves the request. Raises nothing but a cancellation that is not its own."""
        self._task = asyncio.current_task()
        try:
            try:
                try:
                    await self._serve()
                except asyncio.CancelledError:
                    if self._stop is None or self._task is None:
                        raise
                    self._task.uncancel()
                    raise self._stopped(self._stop) from None
            except ClientLeftError:
                self._end(Outcome.CANCELLED, (self._stop or Stop.CLIENT_LEFT).value)
                if self._stop is Stop.SLOW_READER:
                    await self.client.abort()
            except RequestError as error:
                await self._fail(error)
        except asyncio.CancelledError:
            if not self.gateway.draining:
                self._end(Outcome.CANCELLED, "the server cancelled the request")
                raise
            # The time to drain is over, and this is all the time that there is to say so to the client.
            await self._fail(RequestError(Outcome.DRAINING, "the gateway ended before the answer", retry_after=1.0))
        except Exception as error:  # a defect of ours: the client gets an answer, the log gets its type
            self.gateway.logs.defect(error, self.timeline.request_id)
            await self._fail(RequestError(Outcome.ENGINE_ERROR, "internal error of the gateway", status=500))
        finally:
            self._close()

    # --- the course of a request ---------------------------------------------------------------------------------

    async def _serve(self) -> None:
        gateway = self.gateway
        timeouts = gateway.spec.gateway.timeouts
        limits = gateway.spec.gateway.limits
        if gateway.draining:
            raise RequestError(Outcome.DRAINING, "the gateway is shutting down", retry_after=1.0)
        self.caller = gateway.keys.identify(self.head.authorization)
        if gateway.running > limits.max_connections:
            raise RequestError(Outcome.REJECTED_FULL, "the gateway holds as many requests as it may", retry_after=1.0)
        if self.head.problem is not None:
            raise self.head.problem
        self._due.set(self.head.received + limits.body_timeout, Stop.BODY)
        raw = await self.client.read_body(self.head.content_length, limits.max_body_bytes)
        self._due.set(self.head.received + timeouts.total, Stop.TOTAL)
        parsed = gateway.parse(raw, self.kind)
        self.parsed = parsed
        self.timeline.model = parsed.model
        self.timeline.streamed = parsed.stream
        self.client.watch(self._client_left)
        await self._classify(parsed)
        cached = gateway.cache.lookup(parsed, self.caller.name)
        if cached is not None:
            await self._answer_cached(cached)
            return
        await self._queue(parsed)
        assert self._replica is not None
        await ask_replicas(self, parsed, self._replica)

    async def _classify(self, parsed: ParsedRequest) -> None:
        """Counts the prompt, chooses lane, cohort and pool, and takes the quota."""
        gateway = self.gateway
        assert self.caller is not None
        count = await gateway.counter(parsed.model).count(parsed)
        self.estimate = count.tokens
        self.timeline.prompt_tokens = count.tokens
        lane = lane_for(gateway.spec, parsed, count, self.caller, self.head.lane)
        self.timeline.lane = lane.name
        self.entry.classify(lane.name)
        self.dispatch = gateway.choose_dispatch(parsed, self.head)
        self.timeline.pool = self.dispatch.pool
        self.quota = gateway.keys.take(self.caller, count.tokens + parsed.max_output_tokens, gateway.clock())
        deadline = self.head.received + min(lane.deadline, gateway.spec.gateway.timeouts.total)
        if self.head.deadline is not None:
            deadline = min(deadline, self.head.received + self.head.deadline)
        self.ticket = Ticket(
            request_id=self.timeline.request_id,
            lane=lane.name,
            tokens=max(1, count.tokens),
            received=self.head.received,
            deadline=deadline,
            prefix=parsed.prefix,
            streamed=parsed.stream,
            output_tokens=parsed.max_output_tokens,
        )

    async def _queue(self, parsed: ParsedRequest) -> None:
        """Waits for the scheduler's word."""
        assert self.dispatch is not None
        assert self.ticket is not None
        if not self.gateway.pool_is_ready(self.dispatch.pool):
            raise RequestError(
                Outcome.NO_REPLICA, f"no replica of pool {self.dispatch.pool!r} is ready", retry_after=2.0
            )
        self.timeline.admitted = self.gateway.clock()
        self.entry.move(State.QUEUED)
        refusal = self.dispatch.submit(self.ticket, self)
        if refusal is not None:
            self.refused(refusal)
        if self._replica is None and self._refused is None:
            self._keep_alive(parsed)
            self._turn = asyncio.get_running_loop().create_future()
            await self._turn
        if self._refused is not None:
            raise self._refused

    # --- the scheduler's word (dispatch.Waiter) ------------------------------------------------------------------

    def released(self, replica: str, batch: Batch, now: float) -> None:
        """It may go to this replica."""
        self._replica = replica
        self.timeline.released = now
        self.timeline.extra["batch_requests"] = len(batch.tickets)
        self.timeline.extra["replica"] = replica
        if self.entry.outcome is None:
            self.entry.move(State.RUNNING)
        self._wake()

    def expired(self, now: float) -> None:
        """Its deadline passed in the queue."""
        waited = now - self.head.received
        self._refuse(RequestError(Outcome.EXPIRED, f"the deadline passed after {waited:.3f} s in the queue"))

    def drained(self, now: float, reason: str) -> None:
        """It must leave the queue."""
        self._refuse(RequestError(Outcome.DRAINING, reason, retry_after=1.0))

    def refused(self, refusal: Refusal) -> None:
        """The queue does not take it."""
        self._refuse(RequestError(refusal.outcome, refusal.reason, retry_after=refusal.retry_after))

    def moved(self, successor: "Dispatch") -> None:
        """A new spec made a new queue, and this request waits there now."""
        self.dispatch = successor

    def _refuse(self, error: RequestError) -> None:
        self._refused = error
        self._wake()

    def _wake(self) -> None:
        if self._turn is not None and not self._turn.done():
            self._turn.set_result(None)

    # --- what the attempt reports --------------------------------------------------------------------------------

    def sent(self, now: float) -> None:
        """The bytes leave for a replica."""
        self.timeline.dispatched = now
        assert self.ticket is not None
        assert self.parsed is not None
        timeouts = self.gateway.spec.gateway.timeouts
        if self.parsed.stream:
            self._keep_alive(self.parsed)
            self._due.set(min(self.ticket.deadline, now + timeouts.first_token), Stop.FIRST_TOKEN)

    def content(self, now: float) -> None:
        """Content arrived. The first of it ends the wait, so comments stop."""
        self.timeline.content(now)
        self._due.set(now + self.gateway.spec.gateway.timeouts.idle, Stop.IDLE)

    async def begin_stream(self) -> None:
        """Sends the head of a stream, unless a comment did already."""
        await self._comments.end()
        if not self.client.started:
            await self.client.start(200, self._stream_headers())

    async def answer(
        self, status: int, body: bytes, content_type: bytes = JSON, more: Sequence[tuple[bytes, bytes]] = ()
    ) -> None:
        """Sends a whole answer that is no stream; `more` are headers that only this answer has."""
        length = (b"content-length", str(len(body)).encode())
        await self.client.start(status, [*self._headers(content_type), *more, length])
        await self.client.end(body)

    # --- ends ----------------------------------------------------------------------------------------------------

    async def _answer_cached(self, cached: bytes) -> None:
        now = self.gateway.clock()
        self.timeline.admitted = self.timeline.released = self.timeline.dispatched = now
        self.timeline.content(now)
        assert self.parsed is not None
        hit = (b"x-laneway-cache", b"hit")
        if self.parsed.stream:
            await self.client.start(200, [*self._stream_headers(), hit])
            await self.client.end(cached)
        else:
            await self.answer(200, cached, more=[hit])
        self._end(Outcome.COMPLETED)

    async def _fail(self, error: RequestError) -> None:
        """The request's end as an error: with its status while the head is not out, as an event after that."""
        self._end(error.outcome, error.message)
        if self.client.ended:
            return
        try:
            async with asyncio.timeout(self.gateway.spec.gateway.timeouts.idle):
                await self._comments.end()
                if self.client.started:
                    await self.client.end(error_event(error))
                    return
                more = [(b"x-laneway-outcome", str(error.outcome).encode())]
                body = error.raw_body if error.raw_body is not None else error_body(error)
                if error.retry_after is not None:
                    more.append((b"retry-after", str(max(1, ceil(error.retry_after))).encode()))
                if error.status in (408, 413):
                    more.append((b"connection", b"close"))
                await self.answer(error.status, body, more=more)
        except ClientLeftError:
            pass  # nobody reads it; the outcome stands
        except TimeoutError:
            await self.client.abort()

    def completed(self) -> None:
        """The client has the whole answer."""
        self._end(Outcome.COMPLETED)

    def _end(self, outcome: Outcome, error: str | None = None) -> None:
        if self.timeline.outcome is None:
            self.timeline.end(outcome, self.gateway.clock(), error)
            self.entry.end(outcome)
            if self.dispatch is not None and self.ticket is not None:
                # At once, not when the client has read the error: others wait for the seat.
                self.dispatch.cancel(self.ticket)
                self.dispatch.finished(self.ticket)

    def _stopped(self, stop: Stop) -> Exception:
        if stop in (Stop.CLIENT_LEFT, Stop.SLOW_READER):
            return ClientLeftError()
        if stop is Stop.BODY:
            return RequestError(Outcome.REJECTED_INVALID, stop.value, status=408, code="request_timeout")
        return RequestError(Outcome.ENGINE_TIMEOUT, stop.value)

    def _close(self) -> None:
        """Lets everything go, then tells the observers. Runs once, after the answer."""
        self._end(Outcome.CANCELLED, "ended without an outcome")
        self._due.cancel()
        self._comments.cancel()
        self.client.release()
        self.gateway.ended(self)

    # --- stops ---------------------------------------------------------------------------------------------------

    def stop(self, reason: Stop) -> None:
        """Ends the exchange from outside its task; the first reason counts."""
        if self._stop is None and self._task is not None and self.timeline.outcome is None:
            self._stop = reason
            self._task.cancel()

    def _overdue(self, reason: Stop) -> None:
        self.stop(Stop.SLOW_READER if self.client.writing and reason is not Stop.TOTAL else reason)

    def _client_left(self) -> None:
        self.stop(Stop.CLIENT_LEFT)

    def _keep_alive(self, parsed: ParsedRequest) -> None:
        """A stream that still waits after the holding time gets its head and comments, so that nothing cuts it."""
        if parsed.stream:
            held_until = self.head.received + self.gateway.spec.gateway.timeouts.header_hold
            self._comments.start_in(held_until - self.gateway.clock())

    def _stream_headers(self) -> list[tuple[bytes, bytes]]:
        return [*self._headers(EVENT_STREAM), (b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]

    def _headers(self, content_type: bytes) -> list[tuple[bytes, bytes]]:
        headers = [
            (b"content-type", content_type),
            (b"x-request-id", self.timeline.request_id.encode()),
            (b"x-laneway-lane", self.timeline.lane.encode()),
            (b"x-laneway-cohort", self.timeline.cohort.encode()),
        ]
        if self.timeline.pool is not None:
            headers.append((b"x-laneway-pool", self.timeline.pool.encode()))
        return headers
