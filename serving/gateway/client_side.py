"""The client's end of an exchange: reads its body within bounds, notices when it leaves, writes the answer.

Both forms of ASGI's disconnect are seen: `http.disconnect` from `receive`, and (from spec version 2.4 on) an `OSError`
raised by `send`.
"""

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from serving.gateway.errors import RequestError
from serving.timeline import Outcome

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

COMMENT = b": waiting\n\n"
"""Keeps a waiting stream's connection alive; clients of server-sent events skip comments."""


class ClientLeftError(Exception):
    """The client closed its connection."""


class ClientSide:
    """One request's `receive` and `send`. `started` and `ended` say how much of the answer is out."""

    __slots__ = ("_abort", "_receive", "_send", "_watch", "ended", "started", "writing")

    def __init__(self, receive: Receive, send: Send, abort: Callable[[], None] | None = None) -> None:
        """`abort` closes the connection without waiting for the client to read what was written."""
        self._receive = receive
        self._send = send
        self._abort = abort
        self._watch: asyncio.Task[None] | None = None
        self.started = False
        self.ended = False
        self.writing = False
        """A write waits for the client to read."""

    async def read_body(self, declared: int | None, limit: int) -> bytes:
        """The whole body.

        Raises:
            RequestError: it is larger than `limit` bytes, by its head's word or in fact (413).
            ClientLeftError: the connection ended before the body did.
        """
        if declared is not None and declared > limit:
            raise _too_large(declared, limit)
        message = await self._receive()
        if message["type"] == "http.request" and not message.get("more_body", False):
            body: bytes = message.get("body", b"")
            if len(body) > limit:
                raise _too_large(len(body), limit)
            return body
        parts: list[bytes] = []
        size = 0
        while True:
            if message["type"] == "http.disconnect":
                raise ClientLeftError
            part = message.get("body", b"")
            size += len(part)
            if size > limit:
                raise _too_large(size, limit)
            parts.append(part)
            if not message.get("more_body", False):
                return b"".join(parts)
            message = await self._receive()

    def watch(self, left: Callable[[], None]) -> None:
        """Calls `left` once if the client goes before the answer has ended."""
        self._watch = asyncio.create_task(self._watch_disconnect(left))

    async def _watch_disconnect(self, left: Callable[[], None]) -> None:
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                if not self.ended:
                    left()
                return

    async def start(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        """Sends the head, once."""
        self.started = True
        await self._put({"type": "http.response.start", "status": status, "headers": headers})

    async def write(self, body: bytes) -> None:
        """Sends a part of the body; waits while the client does not read."""
        await self._put({"type": "http.response.body", "body": body, "more_body": True})

    async def end(self, body: bytes = b"") -> None:
        """Sends the last part. What the client does after that is its own affair."""
        self.ended = True
        await self._put({"type": "http.response.body", "body": body, "more_body": False})

    async def _put(self, message: MutableMapping[str, Any]) -> None:
        self.writing = True
        try:
            await self._send(message)
        except OSError:
            raise ClientLeftError from None
        finally:
            self.writing = False

    async def abort(self) -> None:
        """Closes the connection of a client that does not read. An ordinary close would wait for it for ever."""
        self.ended = True
        if self._abort is not None:
            self._abort()
            await asyncio.sleep(0)  # the server learns of it before it wonders why the answer has no end

    def release(self) -> None:
        """Stops watching."""
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None


def _too_large(size: int, limit: int) -> RequestError:
    return RequestError(
        Outcome.REJECTED_INVALID,
        f"the request's body has {size} bytes, expected at most {limit}",
        status=413,
        code="request_too_large",
    )
